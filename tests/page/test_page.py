"""What the page shows is what the run holds, and an order does what its button says, or says why not."""

import io
import json
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import numpy as np
import pytest
from PIL import Image
from serl_client import Feature, Outcome

from serl_launcher.page import folder, images, orders
from serl_launcher.page.folder import RunFolder
from serl_launcher.page.server import ORDERS, OVER, READS
from serl_launcher.store.index import Index
from tests.page.conftest import serving
from tests.page.test_door import closed
from tests.shared.clients import push_all
from tests.shared.common import PATIENCE, STATE, until
from tests.shared.data import blank_segment, make_episode, tiny_spec
from tests.shared.tools import typed

CAMERA = "observation.images.front"
SPEC = tiny_spec(observation={STATE: Feature((8,)), CAMERA: Feature((48, 64, 3), "uint8")})
HOSTILE = "<img src=x onerror=alert(1)>&'\""


def commands(server):
    return [row[1] for row in Index(server.run_dir / "store/index.sqlite").commands(0)]


@pytest.fixture
def arm(served, join):
    """An actor that has delivered the finished episodes e0, a success, and e1."""
    client = join(served.server)
    push_all(client, [*make_episode("e0", 0), *make_episode("e1", 1)])
    assert client.drain(PATIENCE)
    return client


def test_before_an_actor_comes_the_page_says_how_to_start_one(browse):
    browser = browse()
    assert browser.welcome()["role"] == "operator"
    state = browser.ask("state")
    assert state["banner"] == {"word": "IDLE", "text": "No actor is connected: start one with run_actor.sh", "who": ""}
    assert (browser.ask("episodes"), browser.ask("curves"), browser.ask("image", episode="e", camera="c")) == (
        [], [], None,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("driver", "word"),
    [("POLICY", "POLICY"), ("HUMAN", "HUMAN"), ("FAULT", "FAULT"), ("RESET", "WAITING"), ("PAUSED", "PAUSED"),
     ("waiting for r or the first motion", "WAITING"), ("HOMING", "POLICY"), (HOSTILE, HOSTILE)],
)  # fmt: skip
def test_the_banner_says_who_drives_and_the_actor_its_numbers(browse, arm, driver, word):
    arm.report({"driver": driver, "rate": 9.96, "late": 3, "steps": 16, "takeovers": 2, "warning": ""})
    browser = browse()
    browser.welcome()
    state = until(lambda: (told := browser.ask("state"))["banner"]["word"] == word and told)
    (actor,) = state["actors"]
    assert (actor["name"], actor["rate"], actor["late"], actor["steps"], actor["episode"]) == ("arm", 10.0, 3, 16, "e1")
    assert [each["value"] for each in actor["state"]] == ["1", "7"] * 4  # without cameras: the newest row
    assert state["banner"]["who"] == "arm"


def test_an_actor_has_its_newest_episode_however_many_of_others_are_newer(served, browse, arm, join, monkeypatch):
    monkeypatch.setattr(folder, "LISTED", 2)
    other = join(served.server, "other")
    push_all(other, [*make_episode("f0", 0), *make_episode("f1", 1)])
    assert other.drain(PATIENCE)
    browser = browse()
    browser.welcome()
    assert [(each["name"], each["episode"]) for each in browser.ask("state")["actors"]] == [
        ("arm", "e1"),
        ("other", "f1"),
    ]


def test_an_actor_that_reports_nonsense_spoils_nothing(browse, arm):
    arm.report(
        {"driver": 7, "rate": float("nan"), "steps": HOSTILE, "late": None, "takeovers": float("inf"), "warning": 1}
    )
    browser = browse()
    browser.welcome()
    (actor,) = until(lambda: [each for each in browser.ask("state")["actors"] if each["word"] == "7"])
    assert (actor["rate"], actor["steps"], actor["late"], actor["takeovers"], actor["text"]) == (0, 0, 0, 0, "1")


def test_episodes_curves_and_numbers_are_those_of_the_run(served, browse, arm):
    with_help = blank_segment(tiny_spec(), "e2", 0, 8, ends="terminated")
    with_help.intervened[2:5] = True
    push_all(arm, [with_help, Outcome("e2", True)])
    assert arm.drain(PATIENCE)
    noted = [{"kind": "machines", "time": 1e9 + 30 * i, "outbox": i, "free": 7.5} for i in range(3)]
    (served.server.run_dir / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in noted))
    browser = browse()
    browser.welcome()
    told = [(each["id"], each["verdict"], each["steps"], each["return"]) for each in browser.ask("episodes")]
    assert told == [("e2", "success", 8, 0.0), ("e1", "failure", 8, 28.0), ("e0", "success", 8, 28.0)]
    assert [each["id"] for each in browser.ask("episodes", which="assisted", source="online", actor="arm")] == ["e2"]
    assert browser.ask("episodes", which="failure", actor="other") == []
    numbers = {each["name"]: each["value"] for each in browser.ask("state")["numbers"]}
    assert numbers["success alone"].startswith("1 of 2 [")
    assert numbers["success with help"].startswith("1 of 1 [")
    assert (numbers["episodes"], numbers["replay buffer"]) == ("3", "24 steps")
    curves = {curve["name"]: curve["points"] for curve in browser.ask("curves")}
    assert [point[:2] for point in curves["unassisted success"]] == [[8, 100.0], [16, 50.0], [24, 33.333333]]
    assert [point[:2] for point in curves["success with help"]] == [[24, 100.0]]
    assert (curves["outboxes"], curves["free disk"]) == ([[0, 0], [0.5, 1], [1, 2]], [[0, 7.5], [0.5, 7.5], [1, 7.5]])


def test_an_image_is_the_newest_row_of_its_episode_however_many_of_others_lie_between(
    served, browse, join, monkeypatch
):
    monkeypatch.setattr(images, "SCAN", 3)
    client = join(served.server, spec=SPEC)
    first, last = (blank_segment(SPEC, "e0", start, 4, ends=ends) for start, ends in ((0, ""), (4, "terminated")))
    for segment, shade in ((first, 10), (last, 200)):
        segment.observation[CAMERA][:] = shade
    last.observation[CAMERA][-2] = [255, 0, 0]  # the last step; what follows is the final observation
    other = join(served.server, "other", spec=SPEC)
    for who, segments in (
        (client, [first]),
        (other, [blank_segment(SPEC, "f0", at, 8) for at in range(0, 48, 8)]),
        (client, [last]),
    ):
        push_all(who, segments)
        assert who.drain(PATIENCE)
    browser = browse()
    browser.welcome()
    actor, _ = until(lambda: browser.ask("state")["actors"])
    assert (actor["cameras"], actor["episode"]) == ([CAMERA], "e0")
    pixels = np.asarray(Image.open(io.BytesIO(browser.ask("image", episode="e0", camera=CAMERA))))
    assert pixels.shape == (48, 64, 3)
    assert pixels.reshape(-1, 3).mean(0) == pytest.approx([255, 0, 0], abs=4)
    assert browser.ask("image", episode="e0", camera=STATE) is None


def test_a_verdict_is_stored_before_it_is_acknowledged_but_while_its_robot_drives_on(served, browse, arm, make_segment):
    browser = browse()
    browser.welcome()
    push_all(arm, [make_segment("e2")])
    assert arm.drain(PATIENCE)
    assert [each["goes_on"] for each in browser.ask("episodes")] == [True, False, False]
    assert "e2 goes on: say it at arm" in browser.ask("order", order="success", about="e2")
    assert not served.server.episodes()["e2"]["closed"]
    arm.close()
    until(lambda: not browser.ask("state")["actors"])
    for episode, word, kept in (("e0", "failure", (0, 0)), ("e1", "discard", (None, 1)), ("e2", "success", (1, 0))):
        assert browser.ask("order", order=word, about=episode) == f"{episode}: {word}. It is stored"
        row = served.server.episodes()[episode]
        assert ((row["success"], row["discard"]), row["judged_by"]) == (kept, "operator")
    assert served.server.episodes()["e2"]["closed"]
    assert "there is no episode" in browser.ask("order", order="success", about="e7")


@pytest.mark.parametrize(
    ("driver", "drives", "runs"),
    [("FAULT", "e2", "e2"), ("RESET", "e1", ""), ("RESET", "e3", ""), ("POLICY", "e3", "e3"), ("POLICY", 7, ""),
     ("PAUSED", "e3", "e3")],
)  # fmt: skip
def test_a_verdict_at_an_actor_is_about_what_its_robot_does_also_before_that_is_stored(
    browse, arm, make_segment, driver, drives, runs
):
    push_all(arm, [make_segment("e2")])
    assert arm.drain(PATIENCE)
    arm.report({"driver": driver, "episode": drives})
    browser = browse()
    browser.welcome()
    (actor,) = until(lambda: [each for each in browser.ask("state")["actors"] if each["driver"] == driver])
    assert (actor["episode"], actor["closed"], actor["runs"]) == ("e2", False, runs)


def test_before_the_first_phase_there_is_no_next(browse):
    browser = browse()
    browser.welcome()
    assert "there is no phase yet" in browser.ask("order", order="next", about="")


def test_a_command_names_its_phase_and_counts_once(served, browse, arm):
    browser = browse()
    browser.welcome()
    phase = browser.ask("state")["phase"]
    for number, word in enumerate(("pause", "resume", "next", "stop"), 1):
        told = browser.ask("order", order=word, about=phase)
        assert told == f"{word}: the learner has taken it as order {number}"
    assert "nothing was done, look again: the phase is 'practise' now" in browser.ask(
        "order", order="next", about="clone"
    )
    assert "there is no order" in browser.ask("order", order="goto", about=phase)
    assert commands(served.server) == ["hold", "resume", "next", "stop"]


@pytest.mark.parametrize(
    ("answer", "says"),
    [("{}", "ready: arm has taken it"),
     ("{} late", "error: nothing was done: what you saw of arm is over, or somebody paused it: look again"),
     (None, "error: ready may be lost, arm has not acknowledged it: look before you repeat it")],
)  # fmt: skip
def test_a_word_to_an_actor_is_acknowledged_by_that_actor_or_said_to_be_lost(browse, arm, monkeypatch, answer, says):
    monkeypatch.setattr(orders, "HEARD_S", PATIENCE if answer else 0.5)
    report = {"driver": "FAULT", "question": 3, "heard": "1"}
    arm.report(report)
    browser = browse()
    browser.welcome()
    (actor,) = until(lambda: [each for each in browser.ask("state")["actors"] if each["asks"]])

    def hear():
        (command,) = until(lambda: [*arm.words()])
        assert (command.name, command.argument, command.actor) == ("ready", "3", "arm")
        if answer:
            report["heard"] = answer.format(command.request)

    with ThreadPoolExecutor(1) as pool:
        heard = pool.submit(hear)
        assert browser.ask("order", order="ready", about=actor["question"], actor="arm") == says
    heard.result()
    assert "no actor none is connected" in browser.ask("order", order="pause", about="", actor="none")


def test_a_word_waits_for_no_label_and_is_refused_when_others_have_held_it_up(running_clock, browse, arm, monkeypatch):
    go, browser = Event(), browse()
    browser.welcome()
    browser.ask("state")
    monkeypatch.setattr(orders, "label", lambda *_, **__: go.wait(PATIENCE))
    monkeypatch.setattr(orders, "command", lambda *_: go.wait(PATIENCE) and "it is done")
    for number, (word, about) in enumerate((("failure", "e0"), ("next", ""), ("resume", ""), ("pause", ""))):
        browser.socket.send(json.dumps({"id": number, "ask": "order", "order": word, "about": about, "actor": ""}))
    browser.number = 9
    assert "no actor none is connected" in browser.ask("order", order="pause", about="", actor="none")
    running_clock.advance(1)  # so that the server is asked again
    assert browser.ask("state")["alive"], "an order holds up, or cuts off, nobody who looks"
    running_clock.advance(orders.LATE_S + 1)
    go.set()
    answers = [json.loads(browser.socket.recv(PATIENCE)) for _ in range(4)]
    told = {each["id"]: each.get("answer", each.get("error")) for each in answers}
    assert (told[0], told[1], told[3]) == ("e0: failure. It is stored", "it is done", "it is done")
    assert told[2].startswith("nothing was done: it waited for more than 5 s")


def test_more_labels_than_may_wait_are_refused_a_word_has_room_beside_them_and_a_pause_beside_both(
    browse, arm, monkeypatch
):
    go, browser = Event(), browse()
    browser.welcome()
    monkeypatch.setattr(orders, "label", lambda *_, **__: go.wait(PATIENCE))
    monkeypatch.setattr(orders, "command", lambda *_: go.wait(PATIENCE) and "it is done")
    for number in range(ORDERS + 1):
        browser.socket.send(json.dumps({"id": number, "ask": "order", "order": "failure", "about": "e0", "actor": ""}))
    refused = json.loads(browser.socket.recv(PATIENCE))
    assert (refused["id"], "16 orders wait: say it again" in refused["error"]) == (ORDERS, True)
    for number in range(ORDERS, 2 * ORDERS + 1):
        browser.socket.send(json.dumps({"id": number, "ask": "order", "order": "next", "about": "", "actor": ""}))
    refused = json.loads(browser.socket.recv(PATIENCE))
    assert (refused["id"], "32 orders wait: say it again" in refused["error"]) == (2 * ORDERS, True)
    browser.number = 99
    assert "no actor none is connected" in browser.ask("order", order="pause", about="", actor="none")
    go.set()
    answers = [json.loads(browser.socket.recv(PATIENCE)) for _ in range(2 * ORDERS)]
    assert {each["answer"] for each in answers} == {"e0: failure. It is stored", "it is done"}


def test_no_order_that_waited_for_others_is_of_a_token_that_ended_meanwhile(served, browse, arm, monkeypatch):
    go, done, browser = Event(), [], browse()
    browser.welcome()
    monkeypatch.setattr(orders, "label", lambda *words, **_: done.append(words) or go.wait(PATIENCE))
    for number in range(3):
        browser.socket.send(json.dumps({"id": number, "ask": "order", "order": "failure", "about": "e0", "actor": ""}))
    until(lambda: done)
    monkeypatch.setattr(served.page.door, "owner", lambda _: None)  # as of a key that was revoked
    go.set()
    assert closed(browser) == (1008, OVER)
    until(lambda: not served.page._guests)
    assert len(done) == 1


def test_a_pause_waits_for_nothing_that_is_looked_at(browse, arm, monkeypatch):
    go, browser = Event(), browse()
    browser.welcome()
    monkeypatch.setattr(RunFolder, "curves", lambda _: [go.wait(PATIENCE)])
    monkeypatch.setattr(orders, "command", lambda *_: "it is done")
    for number in range(READS + 1):
        browser.socket.send(json.dumps({"id": number, "ask": "curves"}))
    refused = json.loads(browser.socket.recv(PATIENCE))
    assert (refused["id"], "256 questions wait: say it again" in refused["error"]) == (READS, True)
    browser.number = 999
    assert browser.ask("order", order="pause", about="", actor="") == "it is done"
    go.set()
    answers = [json.loads(browser.socket.recv(PATIENCE)) for _ in range(READS)]
    assert [(each["id"], each["answer"]) for each in answers] == [(number, [True]) for number in range(READS)]


def test_who_may_only_look_orders_nothing(served, browse, arm):
    browser = browse(role="viewer")
    assert browser.welcome()["role"] == "viewer"
    phase = browser.ask("state")["phase"]
    for word, about, actor in (("stop", phase, ""), ("success", "e1", ""), ("ready", "0", "arm")):
        assert "this link is to look only" in browser.ask("order", order=word, about=about, actor=actor)
    assert not [*arm.words()]
    assert commands(served.server) == []
    assert served.server.episodes()["e1"]["judged_by"] == "judge"


def test_without_a_learner_the_page_shows_what_is_left_and_orders_nothing(served, browse, arm):
    arm.close()
    served.server.stop()
    with serving(served.server.run_dir, "") as left:
        browser = browse(left)
        browser.welcome()
        state = browser.ask("state")
        assert (state["alive"], state["banner"]["text"]) == (False, "No learner runs. What is shown is what it left")
        assert [each["id"] for each in browser.ask("episodes")] == ["e1", "e0"]
        assert "no learner runs here" in browser.ask("order", order="success", about="e1")


def test_a_server_that_does_not_answer_is_said_and_the_page_goes_on(served, browse, arm):
    browser = browse()
    browser.welcome()
    assert browser.ask("state")["alive"]
    arm.close()
    served.server.stop()
    state = until(lambda: not (told := browser.ask("state"))["alive"] and told)
    assert state["banner"]["text"].startswith("The learner does not answer: ")
    assert browser.ask("episodes")


def test_the_tool_refuses_what_is_no_run_in_one_sentence(tmp_path):
    status, said = typed("page", tmp_path)
    assert (status, said.count("\n")) == (1, 1)
    assert "is no run's folder" in said
