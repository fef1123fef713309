"""A person drives the simulated arm from a real browser: by keys, by touch and by a gamepad, over each way to the page.

The gamepad is one that the script makes up, with the standard mapping; the touches are the browser's own.
"""

import json

import pytest

from serl_launcher.datasets.episodes import open_run
from serl_launcher.datasets.reader import Dataset
from tests.browser.conftest import Tab
from tests.page.conftest import serving
from tests.page.test_drive import last, run, steps  # noqa: F401
from tests.shared.common import until
from tests.shared.tools import called

pytestmark = pytest.mark.slow
WAYS = ("websocket", "TLS", "without a websocket")
GAMEPAD = """
const buttons = Array.from({length: 17}, () => ({pressed: false, value: 0}));
window.pad = {mapping: "standard", axes: [0, 0, 0, 0], buttons};
navigator.getGamepads = () => [pad];
"""
LATE = "status of 404"  # to the last word of a page that closes, where its stream has ended before
REFUSED = """
WebSocket = class extends EventTarget {
  constructor() { super(); setTimeout(() => this.onclose({code: 1006, reason: ""})); }
  close() {}
};
"""


@pytest.fixture
def drivers(run, keys, chromium, exits, request):  # noqa: F811
    """drivers() -> a Tab of a person of their own, which shows the run's page. The parameter: the way to it."""
    scheme, door = "http", {}
    if request.param == "TLS":
        pytest.importorskip(
            "cryptography", reason="the extra `page` is not installed: . examples/install.sh --extra page"
        )
        scheme, door = "https", {"host": "0.0.0.0", "keys": keys}
    page = exits.enter_context(serving(run.run_dir, run.local, **door))

    def opened():
        context = chromium.new_context(ignore_https_errors=True, has_touch=True)
        exits.callback(context.close)
        context.add_init_script(GAMEPAD + REFUSED * (request.param == "without a websocket"))
        tab = Tab(context.new_page())
        tab.page.goto(f"{scheme}://localhost:{page.port}/#{page.page.tokens.make('operator')}")
        return tab

    return opened


def touched(tab, pad):
    """Scroll to a pad and touch it until the browser is told otherwise; what ends it."""
    there = tab.page.locator(f"[data-pad={pad}]")
    there.tap(trial=True)  # it scrolls, and waits until the pad is where a touch reaches it
    box = there.bounding_box()
    link = tab.page.context.new_cdp_session(tab.page)
    at = [{"x": box["x"] + box["width"] / 2, "y": box["y"] + box["height"] / 2}]
    link.send("Input.dispatchTouchEvent", {"type": "touchStart", "touchPoints": at})
    return lambda: link.send("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})


@pytest.mark.parametrize("drivers", WAYS, indirect=True)
def test_keys_touch_and_a_gamepad_drive_one_at_a_time_and_each_row_says_who(run, drivers, steps, tmp_path):  # noqa: F811
    anna = drivers()
    keyboard, pad = anna.page.keyboard, "([stick, back]) => { pad.axes[1] = stick; pad.buttons[5].pressed = back; }"

    def moves(is_so):
        until(lambda: last(steps, 2, driven=True, moves=is_so), why=lambda: anna.page.inner_text("#actors"))

    assert last(steps, 1, driven=False)
    anna.page.click(".begin")
    moves(False)
    keyboard.down("i")
    moves(True)
    keyboard.up("i")
    moves(False)
    end = touched(anna, "Forward")
    moves(True)
    end()
    moves(False)
    anna.page.evaluate(pad, [-1, False])
    moves(True)

    bert = drivers()
    bert.page.click(".begin")
    bert.says("drives", ".who")
    moves(True)
    anna.page.evaluate(pad, [0, True])
    until(lambda: last(steps, 2, driven=False))
    bert.page.click(".begin")
    bert.page.keyboard.down("ArrowUp")
    moves(True)
    bert.page.close()  # with the key held
    moves(False)

    made = len(steps)
    run.direct({"phase": "practise", "mode": "idle", "into": "online", "boundary": "now"})
    until(lambda: all(each["closed"] for each in run.episodes().values()))
    _, readers, (episode,) = open_run(run.run_dir)
    driven = [step.intervened for step in steps][: episode.steps]
    assert len(driven) >= made
    assert {*driven} == {True, False}
    assert readers["online"].rows(episode)["intervened"].tolist() == driven
    assert called("data", "export", run.run_dir)[0] == 0
    (shard,) = (run.run_dir / "datasets/online").iterdir()
    assert Dataset(shard).episode(0).flag("intervened").tolist() == driven
    assert anna.errors + [error for error in bert.errors if LATE not in error] == []


def test_a_key_that_comes_up_by_another_name_or_beside_a_modifier_is_held_no_more(served, join, open_tab):
    """macOS says nothing of a key that comes up while Cmd is held; another layout calls it by another name."""
    join(served.server).report({"driver": "POLICY", "remote": ""})
    tab, said = open_tab(f"http://localhost:{served.port}/#{served.page.tokens.make('operator')}"), []

    def moves(motion):
        count = len(said)  # title(): meanwhile Playwright hands on what was sent
        tab.wait(lambda: tab.page.title() and [each for each in said[count:] if each.get("motion") == motion])

    def key(kind, key, code, **more):
        event = {"key": key, "code": code, **more}
        tab.page.evaluate("([kind, how]) => dispatchEvent(new KeyboardEvent(kind, how))", [kind, event])

    tab.page.on("websocket", lambda link: link.on("framesent", lambda frame: said.append(json.loads(frame))))
    tab.page.click(".begin")
    key("keydown", "i", "KeyI")
    moves({"x": 1})
    key("keyup", "\u0448", "KeyI")
    moves({})
    key("keydown", "i", "KeyI")
    moves({"x": 1})
    key("keydown", "Meta", "MetaLeft", metaKey=True)
    moves({})
    key("keydown", "i", "KeyI", repeat=True)
    key("keydown", "u", "KeyU")
    moves({"z": 1})
