"""An arm whose sensors and motors are rude, and the rules that no set point may break whatever they do.

Assumed of the real world: a wrong reading is wrong for some readings in a row, in any of the ways below; the driver
notices motors that lose their power, and says so when they come on again; an arm without power may be moved.
"""

import json
import os
from collections.abc import Callable

import numpy as np
from serl_client.errors import RobotFault

from robot_infra.arm import Arm
from tests.shared.arms import HOME, JOINTS, LIMITS

LOW, HIGH = np.array([LIMITS[name]["range"] for name in JOINTS]).T
SPEED = np.array([LIMITS[name]["speed"] for name in JOINTS])
TRACKING = np.array([LIMITS[name]["tracking"] for name in JOINTS])
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

    Calls are lines of JSON in the file `log`: write [J], fault, recover, enable and whether its motors were off.
    """

    entries = dict.fromkeys(JOINTS, "rad")

    def __init__(self, address, *, seed, log):
        self._random, self._log = np.random.default_rng(seed), os.open(log, os.O_CREAT | os.O_WRONLY)
        self.at = np.array([HOME[name] for name in JOINTS], float)
        self._is_on, self._way, self._left = False, "right", 50

    def read(self):
        self._left -= 1
        if self._left < 0:
            self._way = "right" if self._way != "right" else str(self._random.choice([*READINGS, "lost", "cut"]))
            ends = (20, 150) if self._way == "right" else (1, 40)
            self._left, self._then = int(self._random.integers(*ends)), self.at.copy()
            if self._way == "cut":  # its power, and somebody moves it
                self._is_on, self.at = False, self.at + self._random.normal(0, 0.5, 2)
        if self._way in ("lost", "cut"):
            self._say("fault")
            raise RobotFault("the bus does not answer", "bus")
        return READINGS[self._way](self.at, self._then) if self._way != "right" else self.at

    def write(self, positions):
        self._say("write", positions.tolist())
        self.at = self.at + 0.5 * (positions - self.at) * self._is_on

    def recover(self):
        self._say("recover")

    def enable(self):
        were_off, self._is_on = not self._is_on, True
        self._say("enable", were_off)
        return were_off

    def close(self):
        os.close(self._log)

    def _say(self, call, what=None):
        os.write(self._log, f"{json.dumps([call, what])}\n".encode())


def broken_rule(calls, tick):
    """The first rule that calls [(call, what)] break, or an empty text. tick: seconds of a set point."""
    may_write, before, most = False, None, SPEED * tick
    for number, (call, what) in enumerate(calls):
        if call == "enable":
            may_write, before = True, None if what else before
        elif call == "fault":  # set points may have been lost on their way
            may_write, most = False, TRACKING
        elif call == "write":
            point = np.array(what)
            if not may_write:
                return f"call {number}: {what} was written before anybody has said ready, or after a fault"
            if not ((point >= LOW) & (point <= HIGH)).all():
                return f"call {number}: {what} is out of range"
            if before is not None and (np.abs(point - before) > most + A_BIT).any():
                return f"call {number}: from {before} to {what} within {tick} s"
            before, most = point, SPEED * tick
    return ""
