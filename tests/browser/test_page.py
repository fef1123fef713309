"""The page in a browser: it looks right at each size, all of it is reached by keys, and a button does what it says."""

import json
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from serl_client import Feature
from serl_client import messages as m

from serl_launcher.store.index import Index
from tests.browser.conftest import SCHEMES, SIZES
from tests.report.test_page import begin
from tests.shared.clients import push_all
from tests.shared.common import PATIENCE, STATE, until
from tests.shared.data import blank_segment, tiny_spec

pytestmark = pytest.mark.slow
CAMERA = "observation.images.front"
SPEC = tiny_spec(observation={STATE: Feature((8,)), CAMERA: Feature((48, 64, 3), "uint8")})
FAULT = {"driver": "FAULT", "question": 3, "warning": "the arm is stuck", "rate": 9.8, "late": 2, "steps": 24}
FOCUSED = "document.activeElement.textContent || document.activeElement.id"


def seen(episode, *, ends="terminated", shade=0):
    """An episode of 8 steps whose images are a ramp; ends="": it goes on."""
    segment = blank_segment(SPEC, episode, 0, 8, ends=ends)
    segment.observation[CAMERA][:] = np.linspace(shade, 255, 64, dtype=np.uint8)[:, None]
    return segment


@pytest.fixture
def cell(served, join):
    """The page of an arm with a camera that waits after a fault: e0 and e1 are over, e2 is set aside, e3 goes on."""
    served.arm = join(served.server, spec=SPEC)
    push_all(served.arm, [seen("e0"), seen("e1", shade=90), seen("e2"), seen("e3", ends="")])
    assert served.arm.drain(PATIENCE)
    served.server.ask(m.SetAside("e2", "a number beyond its limit"))
    begin(served.server.run_dir)
    lines = [{"kind": "update", "time": 60.0 * i, "updates": 100 * i, "rate": 90 + i % 7, "critic_loss": 1 / (1 + i)}
             for i in range(40)]  # fmt: skip
    lines += [{"kind": "machines", "time": 60.0 * i, "rate": 9.9 - i % 3 / 10, "late": i, "outbox": 0.1 * (i % 5),
               "age": 10.0 * (i % 6), "free": 80 - i} for i in range(40)]  # fmt: skip
    (served.server.run_dir / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    served.arm.report({**FAULT, "episode": "e3"})
    return served


def link(served, role="operator"):
    return f"http://localhost:{served.port}/#{served.page.tokens.make(role)}"


def said(tab, button, text):
    """Press a button, and wait until the page says so."""
    button.click()
    tab.says(text, "#said")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_it_is_readable_at_each_size_dark_and_light(cell, open_tab, size, scheme):
    tab = open_tab(link(cell), size, scheme)
    tab.says("FAULT", "#banner")
    tab.until("[...document.querySelectorAll('img')].length >= 2")
    tab.until("[...document.querySelectorAll('img')].every((each) => each.naturalWidth)")
    tab.until("document.querySelectorAll('#curves path').length")
    tab.page.click("#explain")
    tab.check()
    assert not [url for url in tab.requests if f"//localhost:{cell.port}/" not in url and not url.startswith("blob:")]
    assert "#" not in tab.page.url


def test_each_button_is_found_in_the_store(cell, open_tab):
    tab, server = open_tab(link(cell)), cell.server
    tab.says("FAULT", "#banner")
    for word in ("Pause", "Next"):
        said(tab, tab.page.locator("#orders").get_by_text(word, exact=True), "the learner has taken it")
        until(lambda: not tab.page.locator("#said p").count())
    stop = tab.page.locator("#orders [data-word=stop]")
    stop.evaluate("(button) => { button.click(); button.click(); }")
    tab.until("document.querySelector('#orders [data-word=stop]').textContent === 'Stop'")
    stop.focus()
    tab.page.keyboard.down("Enter")
    tab.until("!document.querySelector('#orders [data-word=stop]').hasAttribute('aria-disabled')")
    tab.page.keyboard.down("Enter")  # it repeats, as it was not let go
    assert "stop" not in tab.page.inner_text("#said"), "neither a double click nor a held key ends the run"
    tab.page.keyboard.up("Enter")
    tab.until("document.querySelector('#orders [data-word=stop]').textContent === 'Stop'")
    stop.evaluate("(button) => { button.click(); setTimeout(() => button.click(), 1000); }")
    tab.says("stop: the learner has taken it", "#said")
    commands = [row[1] for row in Index(server.run_dir / "store/index.sqlite").commands(0)]
    assert commands == ["hold", "next", "stop"]
    for episode, word in (("e0", "failure"), ("e1", "discard"), ("e2", "success")):
        button = tab.page.locator(f"#episodes [data-key={episode}] [data-word={word}]")
        said(tab, button, f"{episode}: {word}. It is stored")
        tab.until(
            "([key, word]) => document.querySelector(`[data-key=${key}] [data-word=${word}][aria-pressed=true]`)",
            [episode, word],
        )
    told = {name: (row["success"], row["discard"], row["judged_by"]) for name, row in server.episodes().items()}
    assert told == {"e0": (0, 0, "operator"), "e1": (None, 1, "operator"), "e2": (1, 0, "operator"),
                    "e3": (None, 0, "")}  # fmt: skip


def test_a_word_reaches_its_robot_and_a_viewer_has_no_button(cell, open_tab):
    tab, heard = open_tab(link(cell)), []

    def answer():
        for _ in range(3):
            (word,) = until(lambda: [*cell.arm.words()])
            heard.append((word.name, word.argument))
            cell.arm.report({**FAULT, "episode": "e3", "heard": str(word.request)})

    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(answer)
        card = tab.page.locator("#actors article")
        for word in ("ready", "pause", "success"):
            said(tab, card.locator(f"[data-word={word}]"), f"{word}: arm has taken it")
    done.result()
    assert heard == [("ready", "3"), ("pause", "3"), ("success", "e3")]
    viewer = open_tab(link(cell, "viewer"))
    viewer.says("FAULT", "#banner")
    viewer.until("document.querySelectorAll('#episodes li').length")
    assert viewer.page.locator("button:visible").all_inner_texts() == ["?"]


def test_keys_alone_reach_every_button_and_the_focus_stays_when_an_episode_comes(cell, open_tab):
    tab = open_tab(link(cell))
    tab.until("document.querySelectorAll('#episodes li').length === 4")
    there = "[...document.querySelectorAll('button, select')].filter((each) => each.offsetParent).length"
    count, page = tab.until(there), tab.page
    reached = set()
    for _ in range(count):
        page.keyboard.press("Tab")
        tab.page.evaluate("document.activeElement.dataset.reached = 1")
        reached.add(page.evaluate(FOCUSED))
    assert page.evaluate("document.querySelectorAll('[data-reached]').length") == count, reached
    button = page.locator("#episodes [data-key=e0] [data-word=discard]")
    button.focus()
    push_all(cell.arm, [seen("e4")])
    tab.until("document.querySelector('#episodes [data-key=e4]')")
    assert button.evaluate("(each) => each === document.activeElement"), "a new episode has moved the focus"
    page.keyboard.press("Enter")
    tab.says("e0: discard. It is stored", "#said")
    page.locator("#which").focus()
    page.keyboard.type("discarded")
    tab.until("[...document.querySelectorAll('#episodes strong')].map((each) => each.textContent).join() === 'e0'")


def test_the_image_of_an_episode_that_goes_on_is_its_newest_one(cell, open_tab):
    tab, drawn = open_tab(link(cell)), "document.querySelector('#episodes [data-key=e3] img')?.src"
    first = tab.until(drawn)
    cell.arm.push(blank_segment(SPEC, "e3", 8, 8, ends="terminated"))
    tab.until(f"(first) => {drawn} !== first", first)


def test_episodes_are_chosen_by_what_was_said_of_them_by_source_and_by_actor(cell, open_tab, join):
    other = join(cell.server, "left", spec=SPEC)
    push_all(other, [seen("f0")])
    assert other.drain(PATIENCE)
    tab = open_tab(link(cell))
    tab.until("document.querySelectorAll('#actor option').length === 3")
    for which, source, actor, expected in (
        ("", "", "left", "f0"), ("aside", "", "", "e2"), ("unjudged", "online", "arm", "e3,e1,e0"),
        ("success", "", "", ""),
    ):  # fmt: skip
        for name, value in (("which", which), ("source", source), ("actor", actor)):
            tab.page.select_option(f"#{name}", value)
        shown = "[...document.querySelectorAll('#episodes strong')].map((each) => each.textContent).join()"
        tab.until(f"(expected) => {shown} === expected", expected)


def test_64_actors_are_a_table_from_which_a_key_chooses_one(served, open_tab, monkeypatch):
    clients = [{"actor": f"arm{i:02}", "role": "actor", "driver": "POLICY", "rate": 10.0} for i in range(64)]
    report, _ = served.page._folder._status()
    monkeypatch.setattr(served.page._folder, "_status", lambda: ({**report, "clients": clients}, ""))
    tab = open_tab(link(served), "phone")
    tab.until("document.querySelectorAll('#many tbody tr').length === 64")
    tab.check()
    tab.page.get_by_role("button", name="arm63").focus()
    tab.page.keyboard.press("Enter")
    tab.says("arm63", "#actors h2")
    assert tab.page.locator("#actors article").count() == 1


def test_a_page_whose_link_says_nothing_any_more_connects_again(served, chromium, exits):
    context, dialled = chromium.new_context(), []
    exits.callback(context.close)
    page = context.new_page()
    page.clock.install()
    page.route_web_socket("**/socket", lambda made: dialled.append(made))  # nobody answers
    page.goto(link(served))
    until(lambda: page.title() and len(dialled) == 1)
    page.clock.fast_forward(26_000)
    until(lambda: page.clock.fast_forward(1000) or len(dialled) > 1)


@pytest.mark.parametrize("kind", ["mp4", "zip"])
def test_an_episode_is_taken_along(served, open_tab, join, kind):
    pytest.importorskip("lerobot", reason="needs the extra `data`")
    begin(served.server.run_dir)
    arm = join(served.server, spec=SPEC)
    push_all(arm, [seen("e0")])
    assert arm.drain(PATIENCE)
    tab = open_tab(link(served))
    with tab.page.expect_download() as made:
        tab.page.locator("#episodes [data-key=e0]").get_by_text("mp4" if kind == "mp4" else "shard").click()
    assert made.value.suggested_filename == f"e0.{kind}"
    content = made.value.path().read_bytes()
    assert content[4:8] == b"ftyp" if kind == "mp4" else b"retake.json" in content
    tab.says("saved", "#said")
