"""How evenly a guard writes its set points and an actor sends its commands, beside loops that do nothing.

With task=dobot_pnp they are both arms of robot=sim, at 50 set points a second behind their drivers, and what counts are
the set points as they reach the simulated controllers over TCP. More words change that task.

An env on the real clock moves an arm that only notes when it was written to; its guard is a process, as always. Beside
it two other processes do nothing at the same two rates. Both take turns. A spacing is the time from one set point, or
command, to the next; `off` is how far it is from what was wanted. Figures are medians over the rounds, if they name
none.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import numpy as np
from serl_client.spec import Array

from robot_infra.arm import Arm
from robot_infra.env import RobotEnv
from robot_infra.guard.robot import GuardedRobot
from robot_infra.robots import dobot_cell
from robot_infra.robots.dobot_cell import DobotCell
from robot_infra.sim import dobot_cell as sim_cell
from robot_infra.sim.dobot_controller import DobotController
from robot_infra.sim.dobot_pnp import SIDES
from serl_launcher.config import composed, factory
from tests.shared.common import CONFIG
from tests.shared.robots import never

from .paired import JSON, Figure, option

OPTIONS = {
    "--rounds": option(7, "of both (7)"), "--seconds": option(10.0, "of a round (10)"),
    "words": {"nargs": "*", "help": "task=dobot_pnp; none: an arm that only notes when it was written to"},
    "--hz": option(100.0, "set points per second (100)"), "--fps": option(30.0, "commands per second (30)"), **JSON,
}  # fmt: skip
JOINTS = [f"joint_{number}" for number in range(7)]
LIMIT = {"range": [-1, 1], "speed": 2, "jump": 1, "tracking": 1}
TIMES = "RETAKE_SERVO_TIMES"  # environment variable: the file for the controllers
SKIPPED = 5  # spacings at the beginning
QUANTILES = {"p50": 0.5, "p99": 0.99, "most": 1.0}


class TimedArm(Arm):
    """Seven joints that are where they should be; notes when they were written to."""

    entries = dict.fromkeys(JOINTS, "rad")
    is_simulated = True

    def __init__(self, address: str, *, path: str) -> None:
        self._path, self._at, self._times = path, np.zeros(len(JOINTS)), list[float]()

    def read(self) -> Array:
        return self._at

    def write(self, positions: Array) -> None:
        self._times.append(time.monotonic())
        self._at = positions

    def close(self) -> None:
        Path(self._path).write_text(json.dumps(self._times))


def measure(folder: Path, options: argparse.Namespace) -> Iterator[Figure]:
    ours_of, arms = guarded, ["set points"]
    if options.words:
        options.config = composed(CONFIG, [*options.words, "robot=sim", "task.env.max_steps=1000000"])
        options.hz, options.fps = dobot_cell.SERVO_HZ, float(options.config.task.env.fps)
        ours_of, arms = cell, [f"set points of the {side} arm" for side in SIDES]
    kinds = {**dict.fromkeys(arms, options.hz), "commands": options.fps}
    ours: dict[str, list[Array]] = {kind: [] for kind in kinds}
    empty: dict[str, list[Array]] = {kind: [] for kind in kinds}
    for number in range(options.rounds):
        both = [(ours, partial(ours_of, folder, options)), (empty, partial(nothing, options.seconds, kinds.values()))]
        for found, round_of in both if number % 2 else both[::-1]:
            for (kind, rate), times in zip(kinds.items(), round_of(), strict=True):
                found[kind].append(np.diff(times)[SKIPPED:] * rate)  # in periods
    for kind, rate in kinds.items():
        yield from compared(kind, rate, ours[kind], empty[kind])


def compared(kind: str, rate: float, ours: list[Array], empty: list[Array]) -> Iterator[Figure]:
    """Both spacings, [N] periods in each round. Only those that a controller sees have goals."""
    late_goal, gap_goal = ("<= 3", "<= 1") if kind.endswith(" arm") else ("", "")
    slow, empty_slow = (int((np.concatenate(each) > 1.5).sum()) for each in (ours, empty))
    beyond = "beyond those of an empty loop"
    yield Figure(
        f"{kind} at {rate:g} Hz: later than 1.5 periods, {beyond}", max(0, slow - empty_slow), "", goal=late_goal
    )
    longest, empty_longest = (float(np.concatenate(each).max()) for each in (ours, empty))
    gap = max(0.0, longest - empty_longest)
    yield Figure(f"{kind}: the longest gap beyond that of an empty loop", gap, "periods", goal=gap_goal)
    late, empty_late = (100 * np.mean(np.abs(np.concatenate(each) - 1) > 0.5) for each in (ours, empty))
    yield Figure(f"{kind} at {rate:g} Hz: outside of 0.5 to 1.5 periods", float(late), "%")
    yield Figure(f"{kind} at {rate:g} Hz: the same of an empty loop", float(empty_late), "%")
    for name, share in QUANTILES.items():
        off, beside = (
            [float(np.quantile(np.abs(each - 1), share)) * 1e3 / rate for each in all] for all in (ours, empty)
        )
        ratio = median(a / b for a, b in zip(off, beside, strict=True))
        against = f"an empty loop ({median(beside):.3g} ms)"
        yield Figure(f"{kind}: off, {name}", median(off), "ms", against, ratio)
        for which, of in (("best", min), ("worst", max)):
            against = f"an empty loop ({of(beside):.3g} ms)"
            yield Figure(f"{kind}: off, {name}, {which} round", of(off), "ms", against, of(off) / of(beside))


def guarded(folder: Path, options: argparse.Namespace) -> list[list[float]]:
    """When the set points were written and the commands sent in one round."""
    path = folder / "times"
    robot = GuardedRobot(
        f"{__name__}.TimedArm", address=str(path), fps=options.fps, servo_hz=options.hz, options={"path": str(path)},
        limits=dict.fromkeys(JOINTS, LIMIT), home=dict.fromkeys(JOINTS, 0),
    )  # fmt: skip
    sent = []
    with RobotEnv(robot, judge=never, task="bench", fps=options.fps, max_steps=10**9) as env:
        env.reset(0)
        for step in range(int(options.seconds * options.fps)):
            sent.append(time.monotonic())
            env.step(np.full(len(JOINTS), 0.5 * np.sin(step / options.fps), np.float32))
    return [json.loads(path.read_text()), sent]


def cell(folder: Path, options: argparse.Namespace) -> list[list[float]]:
    """When the set points came to the controller of each arm, and the commands were sent, in one round."""
    path, sent = folder / "times", list[float]()
    timed = patch.object(dobot_cell, "DRIVER", f"{__name__}.TimedCell")
    with timed, patch.dict(os.environ, {TIMES: str(path)}), factory(options.config, "task.env")() as env:
        env.recover()
        env.reset(0)
        home, moving = env.robot.hold_action(), np.array([*[0.1] * 6, 0] * 2)  # radians
        for step in range(int(options.seconds * options.fps)):
            sent.append(time.monotonic())
            env.step((home + moving * np.sin(step / options.fps)).astype(np.float32))
    arms = json.loads(path.read_text())
    return [*([moment for moment in arm if sent[0] <= moment <= sent[-1]] for arm in arms), sent]


class TimedCell(DobotCell):
    """The arms of dobot_pnp, whose controllers write into the file TIMES when each set point came."""

    program = __name__


def controllers(side: str) -> None:
    """Run the cell of TimedCell until standard input ends."""
    came: list[list[float]] = []

    class Timed(DobotController):
        def __init__(self, *words: Any) -> None:
            super().__init__(*words)
            came.append(times := list[float]())
            obey = self.machine.obey

            def noted(text: str, port: int) -> str | None:
                times.extend([time.monotonic()] * text.startswith("ServoJ"))
                return obey(text, port)

            self.machine.obey = noted

    with patch.object(sim_cell, "DobotController", Timed):
        sim_cell.run(side)
    Path(os.environ[TIMES]).write_text(json.dumps(came))


def nothing(seconds: float, rates: Iterable[float]) -> list[list[float]]:
    """When loops that do nothing came round, in one round."""
    words = [sys.executable, "-m", __name__, str(seconds)]
    loops = [subprocess.Popen([*words, str(rate)], stdout=subprocess.PIPE) for rate in rates]
    return [json.loads(loop.communicate()[0]) for loop in loops]


def empty_loop(seconds: float, rate: float) -> list[float]:
    """When a loop at this rate came round."""
    due = time.monotonic()
    times = []
    for _ in range(int(seconds * rate)):
        time.sleep(max(0.0, due - time.monotonic()))
        times.append(time.monotonic())
        due = max(due + 1 / rate, times[-1])
    return times


if __name__ == "__main__":
    if len(sys.argv) == 2:
        controllers(sys.argv[1])
    else:
        sys.stdout.write(json.dumps(empty_loop(*map(float, sys.argv[1:]))))
