"""A six-joint arm whose driver has one mistake, as somebody makes it who has just written it.

Assumed of a real arm: each joint goes to its goal with a lag, no faster than its controller lets it, and stays where it
is once set points have ceased for a moment. Readings have noise. What an arm does whose controller goes on to its last
goal is the same, but for a driver whose first set point is wrong: nothing in software can end that motion.
"""

from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from serl_client import clock
from serl_client.errors import RobotFault
from serl_client.spec import Feature

from robot_infra.drivers.arm import Arm

JOINTS = tuple(f"joint{i}" for i in range(1, 7))
LIMITS = {name: {"range": [-2.0, 1.5], "speed": 0.5, "jump": 0.1, "tracking": 0.2} for name in JOINTS}
PROBE = 0.05  # rad: half a jump
LAG, SPEED, CEASED, NOISE = 0.03, 1.0, 0.05, 1e-4  # seconds, rad/s, seconds, rad


class MistakenArm(Arm):
    """mistake: a name, or empty. stands: where each joint is at first, or all. log: a file: how far one ever moved."""

    entries = dict.fromkeys(JOINTS, "rad")

    def __init__(self, address, mistake="", stands=0.0, log=None):
        self._mistake, self._log, self._reads = mistake, log, 0
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
                Path(self._log).write_text(str(moved))


class Bench:
    """Stands in for a GuardedRobot on the test's clock: a set point each 10 ms that passes, within jump and range."""

    fps, tick = 10.0, 0.01

    def __init__(self, clock, arm, jump=0.1):
        self._clock, self.arm, self._jump = clock, arm, jump
        self._point = self.target = self.measured = arm.read()
        low, high = np.array([LIMITS[name]["range"] for name in JOINTS]).T
        self.action = Feature((6,), names=JOINTS, low=low, high=high)
        self._is_ready, self._fault, self._left, self._is_busy = False, None, 0, False
        self._due = clock.now
        self.guard = self
        clock.passed = self._pass

    @property
    def latest(self):
        return SimpleNamespace(target=self.target, measured=self.measured.tolist(), time=self._clock.now)

    def observe(self):
        if self._fault:
            raise self._fault

    def command(self, action):
        self.target = np.clip(action.astype(float), self.target - self._jump, self.target + self._jump)
        self._left = 10

    def recover(self):
        self.arm.recover()
        self.arm.enable()
        self._point = self.target = self.arm.read()
        self._is_ready = True

    def stop(self):
        pass

    def close(self):
        self._is_ready = False
        self.arm.close()

    def _pass(self):
        if self._is_busy:  # the driver itself sleeps
            return
        self._is_busy = True
        while self._due <= self._clock.now and not self._fault:
            try:
                if self._is_ready:
                    self._point = self._point + (self.target - self._point) / max(self._left, 1)
                    self._left -= 1
                    self.arm.write(self._point.copy())
                self.measured = self.arm.read()
            except RobotFault as fault:
                self._fault = fault
            self._due = max(self._due + self.tick, self._clock.now + 1e-6)
        self._is_busy = False
