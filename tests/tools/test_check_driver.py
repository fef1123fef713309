"""The mistakes of somebody who has just written a driver: each is named, and the arm moves no more than the probe."""

import re
from functools import partial

import numpy as np
import pytest
from omegaconf import OmegaConf
from serl_client.errors import RobotFault
from serl_client.spec import Feature

from robot_infra.drivers.arm import Arm
from robot_infra.guard import robot
from serl_launcher.config import composed
from tests.shared.common import CONFIG
from tests.shared.mistakes import JOINTS, LIMITS, PROBE, ClockedGuard, MistakenArm, moved
from tools import check_robot
from tools.checks.arm import tried, watched
from tools.checks.driver import GRACE, Call, Calls, WatchedArm, entry_limits, read_calls
from tools.checks.driver import HANGS as HANGING
from tools.checks.readings import judged

NAME = f"{MistakenArm.__module__}.MistakenArm"
HOLDS = "told to hold where it stands"
APART = (0.3, 0.3, -0.3, 0.3, 0.3, 0.3)
CASES = [  # the mistake, where each joint stands, and what FAIL says
    ("reads degrees", 0.9, r"joint1: 51.\d* rad is outside of its range -2 to 1.5; these look like degrees.*says rad"),
    ("reads degrees", 0.0, rf"{HOLDS}, joint\d went from .* a unit that is too large \(degrees for radians\)"),
    ("writes degrees", 0.0, r"joint1 moved by .* 5[678](\.\d)? times .* unit is wrong, .* degrees where radians"),
    ("writes turns", 0.0, r"joint1 moved by .* times as much: its unit is wrong, write\(\) sends radians where deg"),
    ("swapped", 0.0, r"joint2 was told to move, and joint3 moved: the order"),
    ("flipped", 0.0, r"joint2 moved by .*: it moved the other way, so its sign is wrong"),
    ("scale", 0.0, r"joint6 moved by .* (1\.9\d?|2(\.[01]\d?)?) times as much: its scale is wrong"),
    ("dead", 0.3, r"no joint moved at all: write\(\) does nothing"),
    ("stuck", 0.3, r"joint3 was told .* nothing was measured: its sensor is stuck"),
    ("slow read", 0.3, r"read\(\) takes 1\d\d ms, at worst \d+; 10 ms are between"),
    ("returns True", 0.3, r"write\(\) returned True: return None, or the positions"),
    ("OSError", 0.3, r"read\(\) raised OSError: .*Input/output error \(mistakes.py, line \d+\): .*RobotFault"),
    ("nan", 0.3, r"joint3 was no finite number in \d+ of \d+ readings"),
    ("few", 0.3, r"read\(\) returned array.*: return 6 numbers, one for each of joint1, "),
    ("none", 0.3, r"read\(\) returned None: return 6 numbers"),
    ("TypeError", 0.3, r"enable\(\) raised TypeError: .*mistakes.py, line"),
    ("writes degrees", 0.3, rf"{HOLDS}, joint1 went from 0.3 to .*a unit that is too large \(degrees for radians\)"),
    ("swapped", APART, rf"{HOLDS}, joint2 went .*, joint3 went .* or joint2 and joint3 are in another order"),
    ("flipped", 0.3, rf"{HOLDS}, joint2 went from 0.3 to 0.2\d* rad; no more .*another sign"),
]
HANGS = (
    ("hangs", 0.3, r"write\(\) has not returned for [\d.]+ s: it hangs"),
    ("hangs for good", 0.3, r"write\(\) has not returned, so the guard answers nothing"),
)
MOVED = 2.5 * PROBE  # the step, a step beyond it, and what an arm moves until it notices that no more set points come


def env(mistake, stands, folder, **options):
    home = dict.fromkeys(JOINTS, 0.0)
    given = {"mistake": mistake, "stands": stands, "log": str(folder / "moved"), **options}
    return {"driver": NAME, "address": str(folder), "options": given, "limits": LIMITS, "home": home, "fps": 10}


def failures(found):
    return "\n".join(f"{one.text}. {one.advice}" for name, one in found if one.state == "FAIL")


@pytest.fixture
def clocked(clock, monkeypatch):
    """The guards of a test are in its process, and on its clock."""
    monkeypatch.setattr(robot, "GuardLink", partial(ClockedGuard, clock))
    return clock


@pytest.mark.slow
@pytest.mark.parametrize(("mistake", "stands", "said"), CASES, ids=lambda value: str(value)[:20])
def test_each_mistake_is_named_and_the_arm_moves_no_more_than_the_probe(clocked, tmp_path, mistake, stands, said):
    begin = clocked.now
    found = failures(tried(env(mistake, stands, tmp_path), move=True, seconds=1.0))
    assert re.search(said, found), found
    assert moved(tmp_path / "moved") <= MOVED
    assert clocked.now - begin < 90


def test_a_sane_driver_passes_in_time(clocked, tmp_path):
    begin = clocked.now
    found = [*tried(env("", 0.3, tmp_path), move=True, seconds=1.0)]
    assert [(name, one.text) for name, one in found if one.state != "ok"] == []
    assert {f"{name}: 0.3 rad" for name in JOINTS} <= {one.text.split(",")[0] for _, one in found}
    assert 0 < moved(tmp_path / "moved") <= 1.1 * PROBE
    assert clocked.now - begin < 60


@pytest.mark.slow
@pytest.mark.parametrize(("mistake", "stands", "said"), [*CASES[2::4], *HANGS], ids=lambda value: str(value)[:20])
def test_the_same_holds_with_a_real_guard(tmp_path, mistake, stands, said, capfd):
    found = failures(tried(env(mistake, stands, tmp_path), move=True, seconds=1.0))
    assert re.search(said, found), found
    assert moved(tmp_path / "moved") <= MOVED
    assert "Traceback" not in "".join(capfd.readouterr())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mistake", "said"),
    [
        ("hangs at first", r"__init__\(\) has not returned for [\d.]+ s: it hangs"),
        ("deaf at first", r"ended with status 1\. __init__\(\) has not returned, so the guard answers nothing"),
        ("imports", ""),
    ],
)
def test_a_constructor_that_hangs_is_named_in_time_and_one_that_imports_much_has_it(
    tmp_path, monkeypatch, mistake, said
):
    assert 2 * HANGING["__init__"] + GRACE < 80, "in all less than 90 s"
    monkeypatch.setattr(WatchedArm, "__module__", "tests.shared.impatient")
    found = failures(tried(env(mistake, 0.3, tmp_path), move=False, seconds=0.1))
    assert re.search(said, found), found
    assert bool(said) == ("__init__" in found)


@pytest.mark.slow
def test_a_sane_six_joint_arm_passes_the_whole_tool(tmp_path):
    """It goes home and holds after the probe."""
    config = composed(CONFIG, ["actor=true", "task=dobot", "task.env.servo_hz=100"])
    for name, word in env("", 0.3, tmp_path).items():
        OmegaConf.update(config, f"task.env.{name}", word, merge=False)
    found = {one["check"]: one for one in check_robot.checks(config, True, 1.0)["checks"]}
    assert {name for name, one in found.items() if one["state"] == "FAIL"} <= {"rate"}, found
    assert {"position", "ready", "probe", "shapes", "close"} <= found.keys()


@pytest.mark.parametrize(
    ("unit", "ends", "at", "state", "said"),
    [
        ("rad", [-2, 0.5], [51.6], "FAIL", "a: 51.6 rad is outside of its range -2 to 0.5; these look like degrees: "),
        ("rad", [-2, 0.5], [0.7], "FAIL", "a: 0.7 rad is outside of its range -2 to 0.5"),
        ("rad", [-2, 0.5], [2048], "FAIL", "look like counts of an encoder"),
        ("rad", [-2, 0.5], [0.6], "WARN", "just outside of it"),
        ("deg", [30, 120], [1.3], "FAIL", "these look like radians: the driver says deg"),
        ("%", [20, 100], [0.9], "FAIL", "these look like radians: the driver says %"),
        ("deg", [-120, 90], [1.3, 0.2, -1.0], "WARN", "all of 3 entries in degrees are within 3.1 of zero: they may"),
        ("m", [0, 0.04], [20], "FAIL", "these look like millimetres: the driver says m"),
        ("", [0, 1], [3], "FAIL", "a: 3 is outside of its range 0 to 1"),
    ],
)  # fmt: skip
def test_positions_are_told_against_their_ranges_with_the_unit_they_look_like(unit, ends, at, state, said):
    names = "abc"[: len(at)]
    written = {name: {"range": ends, "speed": 1, "jump": 1, "tracking": 0.15} for name in names}
    calls = Calls(dict.fromkeys(names, unit), {}, [Call("read", 0.0, took=0.001, answer=at)] * 20)
    found = [one for _, one in judged(calls, entry_limits(calls.entries, {}, written), 0.01)]
    assert any(one.state == state and said in one.text for one in found), found


@pytest.mark.parametrize(
    ("readings", "state", "said"),
    [
        (np.array([[0.1, 0.1], [0.11, 0.3]] * 9), "FAIL", "b jumps by up to 0.2 rad"),
        (np.array([[0.1, 0.1], [0.1, 0.1001]] * 9), "WARN", "a: each of 18 readings is the same to the last bit"),
        (np.full((9, 2), 0.1), "ok", ""),
    ],
    ids=["jumps", "one never differs", "none differs"],
)
def test_noise_is_told(readings, state, said):
    calls = Calls(dict.fromkeys("ab", "rad"), {}, [Call("read", 0.0, took=0.03, answer=list(at)) for at in readings])
    limits = entry_limits(calls.entries, {}, {name: {**LIMITS["joint1"], "tracking": 0.1} for name in "ab"})
    found = [one for _, one in judged(calls, limits, 0.04)]
    assert [one.state for one in found if one.state != "ok" and "read()" not in one.text] == [state] * (state != "ok")
    assert any(said in one.text for one in found)
    assert found[-1].state == "WARN", "30 of 40 ms"


class Wrong(Arm):
    """Its `sense` and `close` are wrong, in one way."""

    entries, observation = {"a": "rad"}, {"observation.images.top": Feature((4, 6, 3), "uint8")}

    def __init__(self, address, found=None):
        self._found = found

    def read(self):
        return [0.1]

    def sense(self):
        return self._found

    def close(self):
        raise OSError("it is gone")


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ({"observation.images.top": np.zeros((6, 4, 3), np.uint8)}, "top should be uint8 [4, 6, 3], not"),
        ({}, "observation.images.top is missing"),
        (None, "sense() returned None"),
    ],
)  # fmt: skip
def test_what_else_a_driver_returns_or_raises_is_a_sentence_with_its_method(tmp_path, found, said):
    words = {"driver": f"{__name__}.Wrong", "address": str(tmp_path), "options": {"found": found}}
    arm = WatchedArm("watched", **watched(words, str(tmp_path / "calls"))["options"])
    with pytest.raises(RobotFault, match=re.escape(said)):
        arm.sense()
    for call, said in (
        (lambda: arm.write(np.zeros(1)), "write() is not written"),
        (arm.close, "close() raised OSError"),
    ):
        with pytest.raises(RobotFault, match=re.escape(said)):
            call()
    assert [call.name for call in read_calls(tmp_path / "calls").calls if call.error] == ["sense", "write", "close"]
