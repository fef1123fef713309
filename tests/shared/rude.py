"""Rude arms: a layer between guard and driver that lies, fails and hangs, and arms that note what reached their motors.

Assumed of the real world: a wrong reading is wrong in one of the ways of READINGS, for some readings in a row or all
along. Motors may lose their power, which the driver need not notice; who has none may be moved by hand. A driver that
tells where its motors hold the arm tells the truth; with one that tells nothing the guard begins at what it reads.

As a program: an actor that asks a guard of such an arm for anything; KIND SEED FOLDER REQUESTS. It says the number
of its guard's process after each request, 0 if there is none.
"""

import json
import os
import sys
import time
from collections import deque
from contextlib import suppress
from typing import NamedTuple

import numpy as np
from serl_client import clock
from serl_client.errors import RetakeError, RobotFault

from robot_infra.drivers.arm import Arm
from robot_infra.guard.robot import GuardedRobot
from robot_infra.tasks.fake import FakeArm

A_BIT = 1e-9
JOINTS = tuple(f"joint{i}" for i in range(6))
SIX = {name: {"range": [-1.0, 1.2], "speed": 2.0, "jump": 0.2, "tracking": 0.6} for name in JOINTS}
SIX_HOME = dict(zip(JOINTS, [1.15, 0.0, -0.9, 0.2, 0.1, -0.5], strict=True))
PLANE = {axis: {"range": [-1, 1], "speed": 1.5, "jump": 0.15, "tracking": 0.5} for axis in "xy"}
READINGS = {  # of an arm at [J]; the second is where it was when this began, the third at the reading before
    "right": lambda at, then, before: at,
    "wrapped": lambda at, then, before: at + 2 * np.pi,
    "degrees": lambda at, then, before: np.rad2deg(at),
    "radians": lambda at, then, before: np.deg2rad(at),
    "huge": lambda at, then, before: at * 0 + 1e300,
    "infinite": lambda at, then, before: at - np.inf,
    "none": lambda at, then, before: np.append(at[:-1], np.nan),
    "stuck": lambda at, then, before: then,
    "late": lambda at, then, before: before,
    "shifted": lambda at, then, before: at - 0.7 * np.eye(len(at))[0],
    "off": lambda at, then, before: at - 0.3 * np.sign(at),  # within its range
    "flipped": lambda at, then, before: -at,
    "swapped": lambda at, then, before: at[::-1],
    "few": lambda at, then, before: at[:1],
    "text": lambda at, then, before: ["no position"],
    "nothing": lambda at, then, before: None,
}
ALL_ALONG = ("late", "off", "shifted", "flipped", "swapped")  # what may be wrong from the beginning to the end
RUBBISH = ("text", np.inf, [1e300], [[0.0]])  # what a driver may return in place of positions, each one a fault


class Call(NamedTuple):
    """One call of a driver: where its motors were led before and after it, [J], NaN without torque, and where it was.

    got: messages that could move something and reached the device. failed: the guard is told of a fault, or finds it.
    """

    call: str
    before: list
    after: list
    at: list
    got: int
    failed: bool


class Rude(Arm):
    """An arm of this module, behind a driver that lies, fails, hangs and returns rubbish as `seed` draws.

    say: gets each Call.
    """

    def __init__(self, arm, seed, say):
        self._arm, self._random, self._say = arm, np.random.default_rng(seed), say
        self.entries, self.ranges, self.observation = arm.entries, arm.ranges, arm.observation
        self.is_simulated = arm.is_simulated
        self._always = str(self._random.choice(ALL_ALONG)) if self._random.random() < 0.1 else "right"
        self._rudeness = float(self._random.choice([0.05, 0.2, 1.0]))
        self._way, self._left = self._always, self._random.integers(20, 150 / self._rudeness)
        self._then = self._before = None

    def read(self):
        at = self._called("read")
        self._left -= 1
        if self._left < 0:
            self._way = self._always if self._way != self._always else str(self._random.choice([*READINGS]))
            ends = (20, 150 / self._rudeness) if self._way == self._always else (1, 40)
            self._left, self._then = int(self._random.integers(*ends)), at
        before, self._before = self._before, at
        if self._way == "text":  # it is no array at all: the guard's process ends
            self._say(self._last._replace(failed=True))
        return READINGS[self._way](at, at if self._then is None else self._then, at if before is None else before)

    def write(self, positions):
        return self._called("write", positions)

    def recover(self):
        self._arm.upset(self._random, mends=True)
        self._called("recover")

    def enable(self):
        return self._called("enable")

    def scene(self, seed):
        self._called("scene", seed)

    def sense(self):
        return self._called("sense")

    def close(self):
        self._arm.close()

    def _called(self, call, *words):
        """What the arm's own call returns, or rubbish; or its failure, before or after the call, or a long wait."""
        if self._random.random() < 0.02 * self._rudeness:
            self._arm.upset(self._random)
        way, before, got = self._random.random() / self._rudeness, self._arm.led(), self._arm.got
        failed = True
        try:
            if way < 0.005:
                raise RobotFault("the driver fails", "driver")
            if 0.015 < way < 0.025 and call == "write":  # it never arrives
                failed = False
                return None
            made = getattr(self._arm, call)(*words)
            if 0.025 < way < 0.035:
                clock.sleep(float(self._random.uniform(0, 2 if way > 0.032 else 0.2)))
            if 0.005 < way < 0.01:
                raise [RobotFault("the driver fails", "driver"), OSError("no such device")][int(way > 0.008)]
            failed = 0.01 < way < 0.015 and call in ("write", "enable")
            return RUBBISH[int(self._random.integers(len(RUBBISH)))] if failed else made
        finally:
            self._last = Call(call, before, self._arm.led(), self._arm.at, self._arm.got - got, failed)
            self._say(self._last)


class Point(FakeArm):
    """The fake arm. It has no motors that could be off, and tells nothing of where they hold it."""

    def __init__(self, address="point", *, hz=100.0):
        self.got = 0
        super().__init__(address, hz=hz)

    @property
    def at(self):
        return self.position

    def led(self):
        return self._led

    def scene(self, seed):
        super().scene(seed)
        self._led = self.position

    def write(self, positions):
        self.got, self._led = self.got + 1, positions
        return super().write(positions)

    def begin_anew(self):
        pass

    def upset(self, random, *, mends=False):
        pass


class SixJoints(Arm):
    """Six joints that follow their set points with a lag. Power may go and come, and a hand may move who has none.

    path: a file that keeps what the arm is, whoever drives it; None: nobody else will. tells: `enable` returns where
    the motors hold it; else nothing. A motor obeys its old goal when its power comes back by itself.
    """

    entries = dict.fromkeys(JOINTS, "rad")

    def __init__(self, path=None, *, tells=True):
        self.got, self._tells = 0, tells
        is_new = path is None or not os.path.exists(path)
        state = np.zeros((3, 6)) if path is None else np.memmap(path, float, "w+" if is_new else "r+", shape=(3, 6))
        self._at, self._goals, self._is_on = state
        if is_new:
            self._at[:] = [*SIX_HOME.values()]

    @property
    def at(self):
        return self._at.copy()

    def led(self):
        return np.where(self._is_on > 0, self._goals, np.nan)

    def read(self):
        return self.at

    def write(self, positions):
        self.got += 1
        self._goals[:] = positions
        self._at += 0.5 * (positions - self._at) * self._is_on

    def enable(self):
        off = self._is_on == 0
        self._goals[off], self._is_on[off] = self._at[off], 1
        return self._goals.copy() if self._tells else None

    def begin_anew(self):
        pass

    def upset(self, random, *, mends=False):
        some = random.random(6) < 0.5
        if random.random() < 0.3 and not mends:
            self._is_on[some] = 1 - self._is_on[some]
            self._at += random.normal(0, 0.4, 6) * (1 - self._is_on)


class Lives:
    """Notes of a rude arm: `calls`. `rule` says which promise they break first."""

    def __init__(self, limits, tick, *, is_simulated, tells, slack=A_BIT):
        self.calls = deque()
        rows = [[*limit["range"], limit["speed"] * tick] for limit in limits.values()]
        self._low, self._high, self._most = np.array(rows, float).T
        self._is_simulated, self._tells, self.slack = is_simulated, tells, slack

    def rule(self):
        """The first promise that is broken, or an empty text."""
        may_write, most = self._is_simulated, self._begin()
        for number, (call, before, after, at, got, failed) in enumerate(self.calls):
            moved = ~(np.abs(after - before) <= self.slack) & ~np.isnan(after)
            if broken := self._broken(call, before, after, at, got, moved, may_write=may_write, most=most):
                return f"call {number}, {call}, leads from {before} to {after}, and it is at {at}: {broken}"
            if call == "write":
                most = self._most if got else most + self._most
            elif call in ("made", "recover"):
                may_write, most = call == "made" and self._is_simulated, self._begin()
            elif call == "scene":
                most = self._begin()
            may_write = (may_write or call == "enable") and not failed
        return ""

    def _broken(self, call, before, after, at, got, moved, *, may_write, most):
        if call != "write":
            if (np.abs(after - at)[moved] > self.slack).any():
                return "it does not stand there"
            return "who only looks has sent something" if got and call in ("read", "sense") else ""
        if got > 1 or (got and not may_write):
            return f"{got} set points, before anybody has said ready, or after a fault"
        if not ((after >= self._low - self.slack) & (after <= self._high + self.slack))[moved].all():
            return "out of range"
        return f"more than {most} at once" if (np.abs(after - before) > most + self.slack).any() else ""

    def _begin(self):
        """How far the first set point may lead: an arm whose driver tells nothing begins where it is measured."""
        return self._most if self._tells else np.full(len(self._most), np.inf)


class FiledArm(Rude):
    """A rude arm for a guard's own process: its calls are lines of the file `calls` in this folder."""

    def __init__(self, address, *, kind, seed):
        self._calls = os.open(f"{address}/calls", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
        arm = Point() if kind == "point" else SixJoints(f"{address}/state")
        super().__init__(arm, [seed, os.getpid()], self._note)
        self._note(Call("made", arm.led(), arm.led(), arm.at, 0, failed=False))

    def _note(self, call):
        line = [each.tolist() if isinstance(each, np.ndarray) else each for each in call]
        os.write(self._calls, f"{json.dumps(line)}\n".encode())


def noted(folder):
    """The calls of a FiledArm."""
    lines = (folder / "calls").read_text().splitlines() if (folder / "calls").exists() else []
    return [Call(call, *map(np.array, led), got, failed) for call, *led, got, failed in map(json.loads, lines)]


def main(kind, seed, folder, requests):
    random = np.random.default_rng([int(seed), os.getpid()])
    limits, home = (PLANE, dict.fromkeys("xy", 0)) if kind == "point" else (SIX, SIX_HOME)
    robot, asked = None, 0
    while robot is None:
        with suppress(RetakeError):  # it may be rude at once, and the guard of an actor that was killed lingers
            robot = GuardedRobot(
                f"{__spec__.name}.FiledArm", address=folder, fps=10.0, limits=limits, home=home,
                options={"kind": kind, "seed": int(seed)},
            )  # fmt: skip
    low, high = robot.action.low, robot.action.high
    ask = [robot.recover, robot.stop, lambda: robot.home(0), lambda: robot.is_home, robot.observe, robot.recover]
    ask += 6 * [
        lambda: robot.command((random.uniform(low, high) * random.choice([1, 1, 1, np.nan])).astype(np.float32))
    ]
    while asked < int(requests):
        with suppress(RetakeError):
            ask[int(random.integers(len(ask))) if robot.guard.is_open else 0]()
        asked += 1
        sys.stdout.write(f"{robot.guard.process}\n")
        sys.stdout.flush()
        time.sleep(random.uniform(0, 0.04))
    robot.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
