"""Decides each set point of an arm from targets, measurements and silence. It has no clock and no process."""

import math
from collections import deque

import numpy as np
from serl_client.faults import READY
from serl_client.spec import Array

from robot_infra.guard.limits import Limiter

HOLD, FOLLOW, HOME = "hold", "follow", "home"
SILENT_PERIODS = 3  # without a sign of life, until the arm holds and waits for a person
OLD = 0.5  # seconds after which a target is not taken: its actor gives a guard up after a second
SILENT_HOME = 0.5  # seconds: the same on the slow way home, where the actor also reads keys
TRACKING_TICKS = 5  # in which set point and measurement are too far apart, until that is a fault
SETTLING = 0.3  # seconds at the end of the way home
GLANCES = 3  # newest measurements, whose middle one a hold trusts: a single wrong one must not become a set point


class Motion:
    """Moves the set point `point` [J] of an arm: by targets, on its way home, or not at all.

    Silence matters only while the arm moves: after `hold`, and at home, it may last as long as it likes.

    limiter: limits each target and each set point. home: positions [J] where episodes start.
    tick, period: seconds of one servo tick, and of one control step, over which a target is interpolated.
    home_speed: on the way home, as a share of the speed limits. measured: [J], now.
    is_ready: False: it moves only after `recover`.

    `target` [J] is the newest accepted target, `fault` the reason (kind, text) for which it holds and refuses.
    `limited` and `refused` count targets.
    """

    def __init__(
        self, limiter: Limiter, home: Array, *, tick: float, period: float, home_speed: float, measured: Array,
        is_ready: bool,
    ) -> None:  # fmt: skip
        self._limiter, self._limits, self._home = limiter, limiter.limits, home
        self._tick, self._period, self._home_speed = tick, period, home_speed
        self._per_period = max(1, math.ceil(period / tick - 1e-6))
        self._patience = {HOLD: math.inf, FOLLOW: SILENT_PERIODS * self._per_period, HOME: SILENT_HOME / tick}  # ticks
        self.mode, self.is_home = HOLD, False
        self.fault: tuple[str, str] | None = None
        self.limited = self.refused = 0
        self.point = self.target = self.measured = measured
        self.executed: Array | None = None  # what the arm itself made of the newest set point, [J]; None: it took it
        self._glances = deque([measured], GLANCES)
        self._silent = 0  # ticks since the actor's latest sign of life: if nothing ran, nothing moved, either
        self._left = 0  # ticks until the set point reaches the target, or until the arm has settled at home
        self._apart = 0  # consecutive ticks off its way
        if not is_ready:
            self.fault = READY, "the arm was connected anew: a person in the actor's terminal says when it may move"

    # -- what the actor says

    def follow(self, wanted: Array, age: float) -> None:
        """Take a target [J], as far as the limits allow. One that is not finite, or of another shape, holds.

        age: seconds since it was sent. An old target is a fault: its actor may have taken this guard for dead.
        """
        self._silent = 0
        if age > OLD:
            self.fail("guard", f"a target came {age:.2f} s after it was sent: the guard was stopped or starved")
        if self.fault:
            return
        if wanted.shape != self.point.shape or not np.isfinite(wanted).all():
            self.refused += 1
            self.hold()
            return
        target = self._limiter.step(self.target, wanted, self._period, self._limits.jump)
        self.limited += not np.allclose(target, wanted, rtol=0, atol=1e-9)
        self.target, self.mode, self.is_home = target, FOLLOW, False
        self._left = self._per_period

    def go_home(self) -> None:
        """Begin the way home, slowly."""
        if not self.fault:
            self.mode, self.is_home, self._silent = HOME, False, 0
            self._left = math.ceil(SETTLING / self._tick)

    def hear(self) -> None:
        """Take a sign of life."""
        self._silent = 0

    def hold(self) -> None:
        """Stay. The set point is brought near the measurement once; again and again would let a heavy arm sink."""
        if self.mode != HOLD:
            measured = np.median(self._glances, axis=0)
            self.point = np.clip(self.point, measured - self._limits.jump, measured + self._limits.jump)
            self.target, self.mode = self.point, HOLD

    def be_there(self, measured: Array) -> None:
        """Hold at the measured positions [J]: a simulation was put where its episode starts."""
        self.point = self.target = self.measured = measured
        self._glances.clear()
        self._glances.append(measured)
        self.mode, self.is_home, self.executed = HOLD, True, None

    def recover(self, measured: Array) -> None:
        """Forget the fault, once a person has said ready, and hold at the measured positions [J]."""
        self.be_there(measured)
        self.fault, self.is_home, self._apart = None, False, 0

    # -- what the arm does

    def fail(self, kind: str, text: str) -> None:
        """Hold, and refuse everything until `recover`. The first reason stays."""
        self.hold()
        self.fault = self.fault or (kind, text)

    def advance(self) -> Array:
        """Return the set point [J] of this tick. The arm holds if the actor has been silent while it moves."""
        self._silent += 1
        if self._silent > self._patience[self.mode]:
            self.fail("guard", f"no sign of life from the actor for {self._silent} set points while the arm moved")
        if self.mode == FOLLOW:
            wanted = self.point + (self.target - self.point) / max(self._left, 1)
            self.point, self._left = self._limiter.step(self.point, wanted, self._tick), self._left - 1
        elif self.mode == HOME:
            self._advance_home()
        return self.point

    def accepted(self, positions: Array | None) -> None:
        """Take what the arm made of the newest set point, [J]; None: it tells nothing."""
        differs = positions is not None and not np.allclose(positions, self.point, rtol=0, atol=1e-6)
        self.executed = positions if differs else None

    def observe(self, measured: Array) -> None:
        """Take the measured positions [J] of this tick. If they are not finite, or off their way, that is a fault."""
        if measured.shape != self.point.shape or not np.isfinite(measured).all():
            self.fail("sensor", f"the arm's positions are {measured}; a sensor or its driver failed")
            return
        self.measured = measured
        self._glances.append(measured)
        apart = np.abs(measured - self.point) - self._limits.tracking
        self._apart = self._apart + 1 if (apart > 0).any() else 0
        if self._apart >= TRACKING_TICKS and not self.fault:
            name = [*self._limits.entries][int(np.argmax(apart / self._limits.tracking))]
            self.fail("tracking", f"{name} does not follow: it hit something, is pushed, or its limits are too fast")

    def _advance_home(self) -> None:
        way = self._home - self.point
        steps = float(np.max(np.abs(way) / (self._home_speed * self._limits.speed * self._tick)))
        point = self._limiter.step(self.point, self.point + way / max(steps, 1.0), self._tick)
        if not way.any():
            self._left -= 1
            if self._left <= 0:
                self.hold()
                self.is_home = True
        elif (point == self.point).all():
            self.fail("limit", "the straight way home leaves the tool's limits: move the arm by hand, then say ready")
        self.point = self.target = point
