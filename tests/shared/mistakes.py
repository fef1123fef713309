"""A six-joint arm whose driver has one mistake, as somebody makes it who has just written it.

Assumed of a real arm: each joint goes to its goal with a lag, no faster than its controller lets it, and stays where it
is once set points have ceased for a moment. Readings have noise. What an arm does whose controller goes on to its last
goal is the same, but for a driver whose first set point is wrong: nothing in software can end that motion.
"""

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
from serl_client import clock

from robot_infra.drivers.arm import Arm
from robot_infra.drivers.owner import open_arm
from robot_infra.guard.guard import Guard
from robot_infra.guard.simulated import SimulatedGuard

JOINTS = tuple(f"joint{i}" for i in range(1, 7))
LIMITS = {name: {"range": [-2.0, 1.5], "speed": 0.5, "jump": 0.1, "tracking": 0.2} for name in JOINTS}
PROBE = 0.05  # rad: half a jump
LAG, SPEED, CEASED, NOISE = 0.03, 1.0, 0.05, 1e-4  # seconds, rad/s, seconds, rad


class MistakenArm(Arm):
    """mistake: a name, or empty. stands: where each joint is at first, or all. log: a file: how far one ever moved."""

    entries = dict.fromkeys(JOINTS, "rad")

    def __init__(self, address, mistake="", stands=0.0, log=None):
        self._mistake, self._reads = mistake, 0
        for i in range(50 if mistake == "imports" else 0):
            sys.modules[f"{__name__}.{i}"] = sys
            clock.sleep(0.1)
        if mistake == "deaf at first":  # as a call of a library in C, during which no handler of a signal runs
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
        if mistake in ("hangs at first", "deaf at first"):
            clock.sleep(3600)
        self._log = os.open(log, os.O_CREAT | os.O_WRONLY) if log else None
        self._random = np.random.default_rng(0)
        self._start = np.broadcast_to(np.array(stands, float), 6)
        self.at = self._goal = self._start.copy()
        self._updated = self._told = clock.monotonic()
        self.moved = 0.0

    def read(self):
        self._reads += 1
        self._pass()
        if self._mistake == "slow read":
            clock.sleep(0.15)
        if self._mistake == "OSError" and self._reads > 40:
            raise OSError(5, "Input/output error")
        found = self.at + self._random.normal(0, NOISE, 6)
        if self._mistake == "nan" and self._reads % 7 == 0:
            found[2] = np.nan
        if self._mistake == "stuck":
            found[2] = self._start[2]
        return {"reads degrees": np.rad2deg(found), "few": found[:5], "none": None}.get(self._mistake, found)

    def write(self, positions):
        self._pass()
        self._told = clock.monotonic()
        flips = np.array([1, -1, 1, 1, 1, 1]) if self._mistake == "flipped" else 1.0
        scale = {"writes degrees": 180 / np.pi, "writes turns": np.pi / 180, "scale": 2.0}.get(self._mistake, 1.0)
        if self._mistake == "swapped":
            positions = positions[[0, 2, 1, 3, 4, 5]]
        if self._mistake != "dead":
            self._goal = positions * scale * flips
        if self._mistake == "hangs":
            clock.sleep(60)
        while self._mistake == "hangs for good":
            with suppress(Exception):
                clock.sleep(60)
        return True if self._mistake == "returns True" else None

    def enable(self):
        if self._mistake == "TypeError":
            return self.at + None
        return None

    def close(self):
        if self._log:
            os.close(self._log)

    def _pass(self):
        now = clock.monotonic()
        seconds, self._updated = now - self._updated, now
        if now - self._told < CEASED:
            way = (self._goal - self.at) * (1 - np.exp(-seconds / LAG))
            self.at = self.at + np.clip(way, -SPEED * seconds, SPEED * seconds)
        moved = float(np.abs(self.at - self._start).max())
        if moved > self.moved:
            self.moved = moved
            if self._log:
                os.pwrite(self._log, f"{moved:20.9f}".encode(), 0)


def moved(path):
    """How far any joint of the arm with this log has ever moved."""
    return float(Path(path).read_text() or 0) if Path(path).exists() else 0.0


class ClockedGuard(SimulatedGuard):
    """Stands in for a GuardLink: its guard is in this process, and ticks while the test's clock passes."""

    def __init__(self, clock, start):
        super().__init__(start)
        self._clock, self._due, self._is_busy, self._ticks = clock, clock.now, False, 0

    def begin(self):
        start = self._start
        self._guard = Guard(self._opened.enter_context(open_arm(start.driver, start.address, start.options)), start)
        self.is_open, self._clock.passed = True, self._pass
        self.call("state")
        return self._guard.started

    def end(self, why):
        self._clock.passed = lambda: None
        super().end(why)

    def _pass(self):
        if self._is_busy:  # the driver itself sleeps
            return
        self._is_busy = True
        while self._due <= self._clock.now:
            self._guard.servo()
            self._due = max(self._due + 1 / self._start.servo_hz, self._clock.now + 1e-6)
        self._is_busy = False
