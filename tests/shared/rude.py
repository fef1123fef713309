"""An arm whose sensors and motors are rude, and the rules that no set point may break whatever they do.

Assumed of the real world: a wrong reading is wrong for some readings in a row, in any of the ways below. Each motor may
lose its power, which the driver need not notice, and an arm without power may be moved. A motor goes to its goal at
once while it has torque, and its goal is where it stands when its torque comes on, as a driver must see to. A driver
that tells where its motors hold the arm tells the truth; with one that tells nothing the guard begins at what it reads.
"""

import json
import os
from collections.abc import Callable

import numpy as np
from serl_client.errors import RobotFault

from robot_infra.drivers.arm import Arm
from tests.shared.arms import HOME, JOINTS, LIMITS

LOW, HIGH = np.array([LIMITS[name]["range"] for name in JOINTS]).T
SPEED = np.array([LIMITS[name]["speed"] for name in JOINTS])
A_BIT = 1e-9
READINGS: dict[str, Callable] = {  # of an arm at [J]; the second is where it was when this began
    "right": lambda at, then: at,
    "wrapped": lambda at, then: at + 2 * np.pi,
    "degrees": lambda at, then: np.rad2deg(at),
    "huge": lambda at, then: np.array([1e300, -1e300]),
    "none": lambda at, then: np.array([at[0], np.nan]),
    "stuck": lambda at, then: then,
    "shifted": lambda at, then: at - [0.7, 0],
    "flipped": lambda at, then: -at,
    "few": lambda at, then: at[:1],
}


class RudeArm(Arm):
    """Two joints that follow their set points with a lag; what is measured is drawn by `seed`, for some readings a way.

    Calls are lines of JSON in the file `log`: write, with the set point, and the goals that its motors held until then
    (null: without torque); fault, recover, enable. tells: `enable` returns the goals; else nothing.
    """

    entries = dict.fromkeys(JOINTS, "rad")

    def __init__(self, address, *, seed, log, tells=True):
        self._random, self._tells = np.random.default_rng(seed), tells
        self._log = os.open(log, os.O_CREAT | os.O_WRONLY)
        self.at = np.array([HOME[name] for name in JOINTS], float)
        self._goals, self._is_on = np.zeros(2), np.zeros(2, bool)
        self._way, self._left = "right", 50

    def read(self):
        self._left -= 1
        if self._left < 0:
            self._way = "right" if self._way != "right" else str(self._random.choice([*READINGS, "lost", "cut"]))
            ends = (20, 150) if self._way == "right" else (1, 40)
            self._left, self._then = int(self._random.integers(*ends)), self.at.copy()
            if self._way == "cut" or self._random.random() < 0.1:  # its power, and somebody moves it
                gone = self._random.random(2) < 0.7
                self._is_on, self.at = self._is_on & ~gone, self.at + gone * self._random.normal(0, 0.5, 2)
        if self._way in ("lost", "cut"):
            self._fail()
        return READINGS[self._way](self.at, self._then) if self._way != "right" else self.at

    def write(self, positions):
        goals = [goal if is_on else None for goal, is_on in zip(self._goals.tolist(), self._is_on, strict=True)]
        self._say("write", [positions.tolist(), goals])
        self._goals = positions
        self.at = self.at + 0.5 * (positions - self.at) * self._is_on

    def recover(self):
        self._say("recover")

    def enable(self):
        for i in np.flatnonzero(~self._is_on):
            self._goals = np.where(np.arange(2) == i, self.at, self._goals)
            self._is_on = self._is_on | (np.arange(2) == i)
            if self._random.random() < 0.1:
                self._fail()
        self._say("enable")
        return self._goals.copy() if self._tells else None

    def close(self):
        os.close(self._log)

    def _fail(self):
        self._say("fault")
        raise RobotFault("the bus does not answer", "bus")

    def _say(self, call, what=None):
        os.write(self._log, f"{json.dumps([call, what])}\n".encode())


def broken_rule(calls, tick, *, tells=True):
    """The first rule that calls [(call, what)] break, or an empty text. tick: seconds of a set point."""
    may_write, most = False, SPEED * tick
    for number, (call, what) in enumerate(calls):
        if call == "recover":
            may_write, most = False, SPEED * tick if tells else np.full(2, np.inf)
        elif call in ("enable", "fault"):
            may_write = call == "enable"
        else:
            point, goals = np.array(what[0]), np.array(what[1], float)
            if not may_write:
                return f"call {number}: {point} was written before anybody has said ready, or after a fault"
            if not ((point >= LOW) & (point <= HIGH)).all():
                return f"call {number}: {point} is out of range"
            if (np.abs(point - goals) > most + A_BIT).any():
                return f"call {number}: motors that held {goals} are led to {point} within {tick} s"
            most = SPEED * tick
    return ""
