"""Decides each set point of an arm from targets, measurements and silence. It has no clock and no process."""

import math
from collections import deque
from collections.abc import Sequence

import numpy as np
from serl_client.errors import RobotFault
from serl_client.faults import READY
from serl_client.spec import Array

from robot_infra.guard.limits import Limiter, are_positions

HOLD, FOLLOW, HOME = "hold", "follow", "home"
SILENT_PERIODS = 3  # without a sign of life, until the arm holds and waits for a person
OLD = 0.5  # seconds after which a target is not taken: its actor gives a guard up after a second
SILENT_HOME = 0.5  # seconds: the same on the slow way home, where the actor also reads keys
TRACKING_TICKS = 5  # in which set point and measurement are too far apart, until that is a fault
SETTLING = 0.3  # seconds at the end of the way home
MOVED = (
    "Its sensor is wrong, or something pushes it. If somebody has moved it, switch its motors off, or start the actor "
    "again, then say ready"
)
NO_POSITIONS = "the arm's positions are {}; a sensor or its driver failed"
GLANCES = 3  # newest plausible measurements, whose middle one a hold trusts


class Motion:
    """Moves the set point `point` [J] of an arm: by targets, on its way home, or not at all.

    Each set point comes from the limiter: the first one from where the arm stands, once its motors come on (`begin`),
    and every other one from the one before it. Sensors may be wrong, so a measurement off its way is no target.
    Silence matters only while the arm moves: after `hold`, and at home, it may last as long as it likes.

    limiter: limits each target and each set point. home: positions [J] where episodes start.
    tick, period: seconds of one servo tick, and of one control step, over which a target is interpolated.
    home_speed: on the way home, as a share of the speed limits. measured: [J], now.
    is_ready: it may move at once; raises RobotFault if `measured` is out of range. False: only after `recover`.

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
        self.target = self.measured = measured
        self.point: Array | None = None  # the newest set point; None: there was none yet
        self.executed: Array | None = None  # what the arm itself made of the newest set point, [J]; None: it took it
        self._is_released = False  # the driver has failed: no set points, since its motors may be off
        self._glances = deque([measured], GLANCES)
        self._silent = 0  # ticks since the actor's latest sign of life: if nothing ran, nothing moved, either
        self._left = 0  # ticks until the set point reaches the target, or until the arm has settled at home
        self._apart = 0  # consecutive ticks off its way
        if is_ready:
            self.begin(measured)
        else:
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
        if not are_positions(wanted, len(self._home)):
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
        """Stay. The target is brought near the measurement once; again and again would let a heavy arm sink."""
        if self.mode != HOLD and self.point is not None:
            measured, most = np.median(self._glances, axis=0), np.minimum(self._limits.jump, self._limits.tracking)
            self.target = np.clip(self.point, measured - most, measured + most)
        self.mode = HOLD

    def begin(self, measured: Array, *, is_home: bool = False) -> None:
        """Forget the fault and hold where the arm stands, [J]: its motors come on, or a simulation was set up.

        Raises RobotFault, and changes nothing, if that is out of range.
        """
        self.point = self.target = self._limiter.begin(measured, self._period)
        self.measured, self.executed, self.fault, self._is_released = measured, None, None, False
        self.mode, self.is_home, self._apart = HOLD, is_home, 0
        self._glances.clear()
        self._glances.append(measured)

    def may_recover(self, readings: Sequence[Array]) -> bool:
        """Return whether these readings, [J] each, are of an arm that stands within its range.

        If not, the fault says why. A person has said ready, and its motors may be switched on then.
        """
        return self._standing(readings) is not None

    def recover(self, readings: Sequence[Array], *, were_off: bool | None) -> None:
        """Forget the fault, once a person has said ready and the motors are on; or have another, if readings are wrong.

        readings: [J] each, one after another. were_off: whether the motors were off until now, so that the arm may
        stand anywhere; None: nobody knows, and they may have been if the driver has failed. If they stayed on, an arm
        that is measured off its way stays where it is. Else it goes on from its newest set point, or, if the driver has
        failed and may have lost some, from where it stands.
        """
        measured = self._standing(readings)
        if measured is None:
            return
        if self.point is None or (self._is_released if were_off is None else were_off):
            self.begin(measured)
        elif (i := self._off_its_way(measured)) is not None:
            said = self._limits.shown(i, measured)
            self.fault = "tracking", f"{said}, far from the set point that its motors hold. {MOVED}"
        elif self._is_released:
            self.begin(measured)
        else:
            self.fault, self.is_home, self._apart = None, False, 0

    # -- what the arm does

    def fail(self, kind: str, text: str) -> None:
        """Hold, and refuse everything until `recover`. The first reason stays."""
        self.hold()
        self.fault = self.fault or (kind, text)

    def release(self, kind: str, text: str) -> None:
        """Send nothing more until `recover`: the driver has failed, so that the motors may be off."""
        self.hold()
        self._is_released, self.fault = True, (kind, text)

    def advance(self) -> Array | None:
        """Return the set point [J] of this tick; None: none may be sent.

        The arm holds if the actor has been silent while it moves.
        """
        self._silent += 1
        if self._silent > self._patience[self.mode]:
            self.fail("guard", f"no sign of life from the actor for {self._silent} set points while the arm moved")
        if self.point is None or self._is_released:
            return None
        if self.mode == HOME:
            self._advance_home(self.point)
        else:
            parts, self._left = max(self._left, 1) if self.mode == FOLLOW else 1, self._left - 1
            self.point = self._limiter.step(self.point, self.point + (self.target - self.point) / parts, self._tick)
        return self.point

    def accepted(self, point: Array, positions: Array | None) -> None:
        """Take what the arm made of a set point, both [J]; None: it tells nothing."""
        differs = positions is not None and not np.allclose(positions, point, rtol=0, atol=1e-6)
        self.executed = positions if differs else None

    def observe(self, measured: Array) -> None:
        """Take the measured positions [J] of this tick. If they are not finite, or off their way, that is a fault."""
        if not are_positions(measured, len(self._home)):
            self.fail("sensor", NO_POSITIONS.format(measured))
            return
        self.measured = measured
        if self.point is None or (i := self._off_its_way(measured)) is None:
            self._apart = 0
            self._glances.append(measured)
            return
        self._apart += 1
        if self._apart >= TRACKING_TICKS and not self.fault:
            self.fail("tracking", self._astray(i, measured))

    def _off_its_way(self, measured: Array) -> int | None:
        """Return the entry that is measured furthest off the set point, if it is more than `tracking`.

        An arm that holds may still be on its way to where it will.
        """
        wanted = self.target if self.mode == HOLD else self.point
        apart = np.abs(measured - wanted) / self._limits.tracking
        return int(np.argmax(apart)) if (apart > 1).any() else None

    def _astray(self, i: int, measured: Array) -> str:
        """Say what is wrong with entry `i` of these positions [J], which is off its way."""
        low, high, tracking = (each[i] for each in (self._limits.low, self._limits.high, self._limits.tracking))
        if low - tracking <= measured[i] <= high + tracking:
            name = [*self._limits.entries][i]
            return f"{name} does not follow: it hit something, is pushed, or its limits are too fast"
        return f"{self._limits.outside(i, measured)}: its sensor or its driver's unit is wrong"

    def _standing(self, readings: Sequence[Array]) -> Array | None:
        """Return where the arm stands, [J], if these readings agree and are within the range; else have a fault."""
        for measured in readings:
            if not are_positions(measured, len(self._home)):
                self.fault = "sensor", NO_POSITIONS.format(measured)
                return None
        low, high = np.min(readings, axis=0), np.max(readings, axis=0)
        apart, middle = (high - low) / self._limits.tracking, np.median(readings, axis=0)
        if (apart > 1).any():
            said = self._limits.shown(int(np.argmax(apart)), low, high)
            self.fault = "sensor", f"{said} within a moment: its sensor is wrong"
            return None
        try:
            self._limiter.begin(middle, self._period)
        except RobotFault as fault:
            self.fault = fault.kind, str(fault)
            return None
        return middle

    def _advance_home(self, before: Array) -> None:
        way = self._home - before
        steps = float(np.max(np.abs(way) / (self._home_speed * self._limits.speed * self._tick)))
        self.point = self.target = self._limiter.step(before, before + way / max(steps, 1.0), self._tick)
        if not way.any():
            self._left -= 1
            if self._left <= 0:
                self.hold()
                self.is_home = True
        elif (self.point == before).all():
            self.fail("limit", "the straight way home leaves the tool's limits: move the arm by hand, then say ready")
