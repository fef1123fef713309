"""Whatever sensors say, no set point leaves its range, none is faster than its limit, and looking writes nothing."""

import json
import time
from contextlib import suppress

import numpy as np
import pytest
from serl_client.errors import RobotFault

from robot_infra.guard import process
from robot_infra.guard.channel import Request
from robot_infra.guard.limits import Limiter, read_home, read_limits
from robot_infra.guard.motion import Motion
from robot_infra.guard.robot import GuardedRobot
from tests.shared.arms import FPS, HOME, LIMITS
from tests.shared.rude import RudeArm, broken_rule

TICK, FAST = 0.01, 0.002  # seconds of a set point
KINDS = ("target", "target", "target", "hold", "home", "state", "observe", "recover", "recover")


def told(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def lived(seed, path, clock, *, tells):
    """The calls of an arm whose guard is asked for anything, between ticks, in this process."""
    random, arm = np.random.default_rng(seed), RudeArm("arm", seed=seed, log=path, tells=tells)
    limits = read_limits(arm.entries, LIMITS, has_tool=False)
    motion = Motion(
        Limiter(limits, arm.tool), read_home(limits, HOME), tick=TICK, period=1 / FPS, home_speed=0.25,
        measured=arm.at, is_ready=False,
    )  # fmt: skip
    guard = process.Guard(None, arm, motion, None, TICK)
    for number in range(10):
        for _ in range(random.integers(1, 12)):
            clock.advance(TICK)
            guard._servo()
        kind = str(random.choice(KINDS))
        wanted = random.normal(0, 1, 2) if random.random() < 0.9 else np.full(2, np.nan)
        guard._handlers[kind](Request(kind, number, clock.now, wanted.tolist(), 0))
    guard._ends = "is over"
    arm.close()
    return told(path)


@pytest.mark.parametrize("seeds", [range(300), pytest.param(range(300, 2000), marks=pytest.mark.nightly)], ids=str)
def test_no_history_of_readings_leads_a_set_point_out_of_its_limits(clock, tmp_path, seeds):
    wrote = 0
    for seed in seeds:
        tells = seed % 4 > 0
        calls = lived(seed, tmp_path / str(seed), clock, tells=tells)
        assert not broken_rule(calls, TICK, tells=tells), seed
        wrote += sum(call == "write" for call, _ in calls)
    assert wrote > 10 * len(seeds), "the arm was moved, too"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_nor_does_any_through_a_guards_own_process(tmp_path, seed):
    """Each process lives through ten histories of ten requests, since to start one takes longer."""
    random, log = np.random.default_rng(seed), tmp_path / "log"
    robot = GuardedRobot(
        f"{RudeArm.__module__}.RudeArm", address=str(tmp_path), fps=FPS, servo_hz=1 / FAST, limits=LIMITS, home=HOME,
        options={"seed": seed, "log": str(log)},
    )  # fmt: skip
    asked = {
        "target": lambda: robot.command(random.uniform(robot.action.low, robot.action.high).astype(np.float32)),
        "hold": robot.stop, "home": lambda: robot.home(0), "state": lambda: robot.is_home, "observe": robot.observe,
        "recover": robot.recover,
    }  # fmt: skip
    try:
        while not any(call == "write" for call, _ in told(log)):
            with suppress(RobotFault):
                robot.recover()
            time.sleep(0.01)
        for _ in range(10 * 10):
            time.sleep(random.uniform(0, 0.04))
            with suppress(RobotFault):
                asked[str(random.choice(KINDS))]()
    finally:
        robot.close()
    calls = told(log)
    assert not broken_rule(calls, FAST)
    assert sum(call == "write" for call, _ in calls) > 10, "the arm was moved, too"
