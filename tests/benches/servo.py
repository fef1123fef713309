"""How evenly a guard writes its set points and an actor sends its commands, beside loops that do nothing.

An env on the real clock moves an arm that only notes when it was written to; its guard is a process, as always. Beside
it two other processes do nothing at the same two rates. Both take turns. A spacing is the time from one set point, or
command, to the next; `off` is how far it is from what was wanted. Figures are medians over the rounds, if they name
none.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import numpy as np
from serl_client.spec import Array

from robot_infra.arm import Arm
from robot_infra.env import RobotEnv
from robot_infra.guard.robot import GuardedRobot
from tests.shared.robots import never

from .paired import JSON, Figure, option

OPTIONS = {
    "--rounds": option(7, "of both (7)"), "--seconds": option(10.0, "of a round (10)"),
    "--hz": option(100.0, "set points per second (100)"), "--fps": option(30.0, "commands per second (30)"), **JSON,
}  # fmt: skip
JOINTS = [f"joint_{number}" for number in range(7)]
LIMIT = {"range": [-1, 1], "speed": 2, "jump": 1, "tracking": 1}
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
    kinds = {"set points": options.hz, "commands": options.fps}
    ours: dict[str, list[Array]] = {kind: [] for kind in kinds}
    empty: dict[str, list[Array]] = {kind: [] for kind in kinds}
    for number in range(options.rounds):
        both = [(ours, guarded), (empty, nothing)]
        for found, round_of in both if number % 2 else both[::-1]:
            for (kind, rate), times in zip(kinds.items(), round_of(folder, options), strict=True):
                found[kind].append(np.diff(times)[SKIPPED:] * rate)  # in periods
    for kind, rate in kinds.items():
        yield from compared(kind, rate, ours[kind], empty[kind])


def compared(kind: str, rate: float, ours: list[Array], empty: list[Array]) -> Iterator[Figure]:
    """Both spacings, [N] periods in each round."""
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


def guarded(folder: Path, options: argparse.Namespace) -> tuple[list[float], list[float]]:
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
    return json.loads(path.read_text()), sent


def nothing(_: Path, options: argparse.Namespace) -> list[list[float]]:
    """When loops that do nothing came round, in one round."""
    words = [sys.executable, "-m", __name__, str(options.seconds)]
    loops = [subprocess.Popen([*words, str(rate)], stdout=subprocess.PIPE) for rate in (options.hz, options.fps)]
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
    sys.stdout.write(json.dumps(empty_loop(*map(float, sys.argv[1:]))))
