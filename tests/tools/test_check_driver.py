"""The mistakes of somebody who has just written a driver: each is named, and the arm moves no more than the probe."""

import re
import time

import pytest
from omegaconf import OmegaConf

from serl_launcher.config import composed
from tests.shared.common import CONFIG
from tests.shared.mistakes import JOINTS, LIMITS, PROBE, Bench, MistakenArm
from tools import check_robot
from tools.checks.arm import examined, tried, watched
from tools.checks.driver import WatchedArm

NAME = f"{MistakenArm.__module__}.MistakenArm"
HOLDS = "told to hold where it stands"
CASES = [  # the mistake, where each joint stands, and what FAIL says
    ("reads degrees", 0.9, r"joint1: 51.\d* rad is outside of its range -2 to 1.5; these look like degrees.*says rad"),
    ("reads degrees", 0.0, rf"{HOLDS}, joint\d went from .* a unit that is too large \(degrees for radians\)"),
    ("writes degrees", 0.0, r"joint1 moved by .* 57.* its unit is wrong, write\(\) sends degrees where radians"),
    (
        "writes turns",
        0.0,
        r"joint1 moved by .* times as much: its unit is wrong, write\(\) sends radians where degrees",
    ),
    ("swapped", 0.0, r"joint2 was told to move, and joint3 moved: the order"),
    ("flipped", 0.0, r"joint2 moved by .*: it moved the other way, so its sign is wrong"),
    ("scale", 0.0, r"joint6 moved by .* 2 times as much: its scale is wrong"),
    ("dead", 0.3, r"no joint moved at all: write\(\) does nothing"),
    ("stuck", 0.3, r"joint3 was told .* nothing was measured: its sensor is stuck"),
    ("slow read", 0.3, r"read\(\) takes 15\d ms, at worst 1\d\d; 10 ms are between"),
    ("returns True", 0.3, r"write\(\) returned True: return"),
    ("OSError", 0.3, r"read\(\) raised OSError: .*Input/output error \(mistakes.py, line \d+\): .*RobotFault"),
    ("nan", 0.3, r"joint3 was no finite number in \d+ of \d+ readings"),
    ("few", 0.3, r"read\(\) returned array.*: return 6 numbers, one for each of joint1, "),
    ("none", 0.3, r"read\(\) returned None: return 6 numbers"),
    ("TypeError", 0.3, r"enable\(\) raised TypeError: .*mistakes.py, line"),
    ("writes degrees", 0.3, rf"{HOLDS}, joint1 went from 0.3 to .*a unit that is too large \(degrees for radians\)"),
    ("flipped", 0.3, rf"{HOLDS}, joint2 went from 0.3 to 0.2\d* rad; no more .*another sign"),
]
HANGS = ("hangs", 0.3, r"write\(\) has not returned for 0.4 s: it hangs")
MOVED = 2.5 * PROBE  # the step, a step beyond it, and what an arm moves until it notices that no more set points come


def env(mistake, stands, folder, **options):
    home = dict.fromkeys(JOINTS, 0.0)
    given = {"mistake": mistake, "stands": stands, "log": str(folder / "moved"), **options}
    return {"driver": NAME, "address": str(folder), "options": given, "limits": LIMITS, "home": home, "fps": 10}


def moved(folder):
    path = folder / "moved"
    return float(path.read_text()) if path.exists() else 0.0


def failures(found):
    return "\n".join(f"{one.text}. {one.advice}" for name, one in found if one.state == "FAIL")


def on_bench(clock, words, folder):
    """What the checks find, in this process and on the test's clock."""
    (folder / "calls").touch()
    start = watched(words, str(folder / "calls"), LIMITS)
    try:
        robot = Bench(clock, WatchedArm(start["address"], **start["options"]))
        return list(examined(robot, str(folder / "calls"), words, move=True, seconds=1.0))
    except Exception as error:  # as `tried` tells it
        return [("driver", check_robot.Finding("FAIL", str(error)))]


@pytest.mark.parametrize(("mistake", "stands", "said"), CASES, ids=lambda value: str(value)[:20])
def test_each_mistake_is_named_and_the_arm_moves_no_more_than_the_probe(clock, tmp_path, mistake, stands, said):
    begin = clock.now
    found = failures(on_bench(clock, env(mistake, stands, tmp_path), tmp_path))
    assert re.search(said, found), found
    assert moved(tmp_path) <= MOVED
    assert clock.now - begin < 90


def test_a_sane_driver_passes_in_time(clock, tmp_path):
    begin = clock.now
    found = on_bench(clock, env("", 0.3, tmp_path), tmp_path)
    assert [(name, one.text) for name, one in found if one.state != "ok"] == []
    assert {f"{name}: 0.3 rad" for name in JOINTS} <= {one.text.split(",")[0] for _, one in found}
    assert 0 < moved(tmp_path) <= 1.1 * PROBE
    assert clock.now - begin < 60


@pytest.mark.slow
@pytest.mark.parametrize(("mistake", "stands", "said"), [*CASES, HANGS], ids=lambda value: str(value)[:20])
def test_the_same_holds_with_a_real_guard(tmp_path, mistake, stands, said, capfd):
    begin = time.monotonic()
    found = failures(tried(env(mistake, stands, tmp_path), move=True, seconds=1.0))
    assert re.search(said, found), found
    assert moved(tmp_path) <= MOVED
    assert time.monotonic() - begin < 90
    assert "Traceback" not in "".join(capfd.readouterr())


@pytest.mark.slow
def test_a_sane_six_joint_arm_passes_the_whole_tool(tmp_path):
    """It goes home and holds after the probe."""
    begin = time.monotonic()
    config = composed(CONFIG, ["actor=true", "task=dobot", "task.env.servo_hz=100"])
    for name, word in env("", 0.3, tmp_path).items():
        OmegaConf.update(config, f"task.env.{name}", word, merge=False)
    found = {one["check"]: one for one in check_robot.checks(config, True, 1.0)["checks"]}
    assert {name for name, one in found.items() if one["state"] == "FAIL"} <= {"rate"}, found
    assert {"position", "hold", "probe", "shapes", "close"} <= found.keys()
    assert time.monotonic() - begin < 90
