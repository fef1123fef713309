"""Arms for tests of the guard: what they are told goes into a pipe, with times, and a test reads it there."""

import json
import os
import select
import time
from typing import NamedTuple

import numpy as np
from serl_client.errors import RobotFault

from robot_infra.drivers.arm import Arm
from robot_infra.guard.robot import GuardedRobot

from .common import PATIENCE

JOINTS = ("shoulder", "elbow")
LIMITS = {
    "shoulder": {"range": [-1.0, 1.0], "speed": 2.0, "jump": 0.2, "tracking": 0.6},
    "elbow": {"range": [-2.0, 0.5], "speed": 1.0, "jump": 0.3, "tracking": 0.6},
}
HOME = {"shoulder": 0.5, "elbow": 0.0}
FPS = 5.0
WALL = 0.3
DRIVER = f"{__name__}.LoggedArm"


class LoggedArm(Arm):
    """Two joints that follow their set points with a lag; every call is a line in the pipe `log`.

    bug: this write, from 1, raises KeyError. walls: what the shoulder meets at WALL, until it is told to recover:
    `stuck`, where it stays, or a kind of RobotFault. The first of them comes first.
    """

    entries = dict.fromkeys(JOINTS, "rad")

    def __init__(self, address, log, *, bug=None, walls=()):
        self._pipe, self._bug, self._walls = os.open(log, os.O_WRONLY), bug, list(walls)
        self._at, self._writes, self._met = np.zeros(2), 0, False
        self._say("made", address)

    def read(self):
        return self._at

    def write(self, positions):
        self._say("write", positions.tolist())
        self._writes += 1
        if self._writes == self._bug:
            raise KeyError("a bug")
        self._at = self._at + 0.5 * (positions - self._at)
        if self._walls and self._at[0] > WALL:
            self._at[0], self._met = WALL, True
            if self._walls[0] != "stuck":
                raise RobotFault("there is a wall", self._walls[0])

    def recover(self):
        self._say("recover")
        self._walls, self._met = self._walls[self._met :], False

    def close(self):
        self._say("close")

    def _say(self, call, what=None):
        line = json.dumps([call, time.monotonic(), what, self._at.tolist()])
        os.write(self._pipe, f"{line}\n".encode())


class Said(NamedTuple):
    """One call of the driver."""

    call: str
    time: float
    what: object
    at: list


class Log:
    """The pipe of a LoggedArm: `calls`, as far as they were read."""

    def __init__(self, folder):
        self.path = str(folder / "log")
        os.mkfifo(self.path)
        self._pipe = os.open(self.path, os.O_RDWR | os.O_NONBLOCK)  # with a writer of our own it never ends
        self._rest, self.calls = b"", []

    def close(self):
        os.close(self._pipe)

    def read(self):
        """All calls until now."""
        while select.select([self._pipe], [], [], 0)[0]:
            self._take()
        return self.calls

    def until(self, condition):
        """Wait until condition(calls) is true, and return its value."""
        deadline = time.monotonic() + PATIENCE
        while not (value := condition(self.read())):
            assert select.select([self._pipe], [], [], deadline - time.monotonic())[0], f"never: {self.calls[-5:]}"
            self._take()
        return value

    def more(self, count, call="write"):
        """Wait for so many more of these calls, and return them."""
        before = len(self.of(call))
        self.until(lambda calls: len(self.of(call)) >= before + count)
        return self.of(call)[before:]

    def wait(self, timeout):
        """Wait for the next call, at most so many seconds."""
        select.select([self._pipe], [], [], timeout)
        self.read()

    def of(self, call):
        return [said for said in self.read() if said.call == call]

    def _take(self):
        *lines, self._rest = (self._rest + os.read(self._pipe, 1 << 16)).split(b"\n")
        self.calls += [Said(*json.loads(line)) for line in lines]


def points(calls):
    """The set points among these calls."""
    return [tuple(said.what) for said in calls if said.call == "write"]


def move_on(robot, log, way):
    """Give targets each `way` further, as a control loop does that has noticed nothing."""
    for row in range(1000):
        robot.command(way * (row + 1))
        log.wait(0.05)


def say_ready(driver):
    """What a guard does with its driver, once a person has said ready. Returns where the motors hold it."""
    driver.recover()
    driver.write(held := driver.enable())
    return held


def guarded(log, **changes):
    """A GuardedRobot over a LoggedArm; `options` go to the driver."""
    options = {"log": log.path, **changes.pop("options", {})}
    arguments = {"address": log.path, "fps": FPS, "limits": LIMITS, "home": HOME, **changes}
    return GuardedRobot(DRIVER, options=options, **arguments)
