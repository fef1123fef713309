"""Decides each set point of a real arm: interpolation, holding when the actor is silent, the way home."""

import math
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from serl_client.errors import RobotFault
from serl_client.faults import READY
from serl_client.spec import Array

from robot_infra.guard.limits import Limiter, are_positions

HOLD, TRACK, HOME = "hold", "track", "home"
SILENT_PERIODS = 3  # without a sign of life, until the arm holds and waits for a person
SILENT_HOME = 0.5  # seconds: the same on the slow way home, where the actor also reads keys
TRACKING_TICKS = 5  # in which set point and measurement are too far apart, until that is a fault
SETTLING = 0.3  # seconds at the end of the way home
MOVED = (
    "Its sensor is wrong, or something pushes it. If it was moved, switch motors off or start the actor again; then "
    "say ready"
)
NO_POSITIONS = "the arm's positions are {}; a sensor or its driver failed"
GLANCES = 3  # newest plausible measurements, whose middle one a hold trusts


class Motion:
    """Moves the set point `point` [J] of an arm: by targets, on its way home, or not at all.

    Each set point comes from the limiter: the first one from where the motors hold the arm once they are on (`begin`),
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
        self._patience = {HOLD: math.inf, TRACK: SILENT_PERIODS * self._per_period, HOME: SILENT_HOME / tick}  # ticks
        self.mode, self.is_home = HOLD, False
        self.fault: tuple[str, str] | None = None
        self.limited = self.refused = 0
        self.target = self.measured = measured
        self.point: Array | None = None  # the newest set point; None: there was none yet
        self.executed: Array | None = None  # what became of the newest target, [J]; None: it is taken as it is
        self._is_suspended = False  # then no set points are sent
        self._is_blocked = False  # the newest target could not be reached
        self._glances = deque([measured], GLANCES)
        self._silent = 0  # ticks since the actor's latest sign of life: if nothing ran, nothing moved, either
        self._left = 0  # ticks until the set point reaches the target, or until the arm has settled on its way home
        self._route = deque[Array]()  # the poses [J] that are left of the way home
        self._apart = 0  # consecutive ticks off its way
        if is_ready:
            self.begin(measured)
        else:
            self.fault = READY, "the arm was connected anew: a person in the actor's terminal says when it may move"

    @property
    def is_relaxing(self) -> bool:
        """Return whether an arm that shall hold still moves to the place where it will."""
        is_live = self.point is not None and not self._is_suspended
        return is_live and self.mode == HOLD and bool(np.any(self.point != self.target))

    # -- what the actor says

    def track(self, wanted: Array) -> None:
        """Take a target [J], as far as the limits allow. One that is not finite, or of another shape, holds."""
        self._silent = 0
        if self.fault:
            return
        if not are_positions(wanted, len(self._home)):
            self.refused += 1
            self.hold()
            return
        target = self._limiter.step(self.target, wanted, self._period, self._limits.jump)
        self.limited += bool((np.abs(target - wanted) > 1e-9).any())
        self.target, self.mode, self.is_home, self._is_blocked = target, TRACK, False, False
        self._left = self._per_period

    def go_home(self, through: Sequence[Array] = ()) -> None:
        """Begin the way home, slowly, straight from pose to pose, and settle at each.

        through: poses [J] before home; NaN: that entry stays as it is.
        """
        if not self.fault:
            self.mode, self.is_home, self._silent = HOME, False, 0
            self._route, self._left = deque([*through, self._home]), math.ceil(SETTLING / self._tick)

    def hear(self) -> None:
        """Take a sign of life."""
        self._silent = 0

    def hold(self) -> None:
        """Hold. The target is brought near the measurement only once: a heavy arm would sink a little each time."""
        if self.mode != HOLD and self.point is not None:
            measured, most = np.median(self._glances, axis=0), np.minimum(self._limits.jump, self._limits.tracking)
            near = np.clip(self.point, measured - most, measured + most)
            self.target = np.clip(near, self._limits.low, self._limits.high)
        self.mode = HOLD

    def begin(self, stands: Array, *, measured: Array | None = None, is_home: bool = False) -> None:
        """Forget the fault, and hold the arm where it stands, or is held, [J]. measured: [J], if it is another place.

        Raises RobotFault, and changes nothing, if that is out of range.
        """
        self.point = self.target = self._limiter.begin(stands, self._tick)
        self.measured = stands if measured is None else measured
        self.executed, self.fault, self._is_suspended = None, None, False
        self.mode, self.is_home, self._apart = HOLD, is_home, 0
        self._glances.clear()
        self._glances.append(self.measured)

    def suspend(self) -> None:
        """Send nothing more until `begin` or `recover`: motors may be off, or be switched on."""
        self.hold()
        self._is_suspended = True

    def may_recover(self, readings: Sequence[Array]) -> bool:
        """Return whether these readings, [J] each, are of an arm that stands within its range, or where it is held.

        If not, the fault says why. A person has said ready, and its motors may be switched on then.
        """
        with self._failing():
            measured = self._standing(readings)
            if self.point is None or self._off(measured, self.point) is not None:
                self._limiter.begin(measured, self._tick)
            return True
        return False

    def recover(self, readings: Sequence[Array], held: Array | None) -> None:
        """Begin where the motors hold the arm, once a person has said ready and they are on; or note another fault.

        readings: [J] each, one after another. held: as Arm.enable tells. Where it tells nothing, the motors hold an
        entry where it is measured, which must be near the newest set point, if there was one.
        """
        with self._failing():
            measured = self._standing(readings)
            told = np.full(measured.shape, np.nan) if held is None else np.asarray(held, float)
            if told.shape != measured.shape or np.isinf(told).any():
                raise RobotFault(
                    f"the driver says that the motors hold the arm at {held}: that is no position", "driver"
                )
            is_told, before = ~np.isnan(told), measured if self.point is None else self.point
            if (i := self._off(measured, np.where(is_told, told, before))) is not None:
                said = self._limits.shown(i, measured)
                raise RobotFault(f"{said}, far from where its motors hold it. {MOVED}", "tracking")
            self.begin(np.where(is_told, told, measured), measured=measured)

    @contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except RobotFault as fault:
            self.fault = fault.kind, str(fault)

    # -- what the arm does

    def fail(self, kind: str, text: str) -> None:
        """Hold, and refuse everything until `recover`. The first reason stays."""
        self.hold()
        self.fault = self.fault or (kind, text)

    def release(self, kind: str, text: str) -> None:
        """Note a fault of the driver, and send nothing more until `recover`: the motors may be off."""
        self.suspend()
        self.fault = kind, text

    def advance(self) -> Array | None:
        """Return the set point [J] of this tick; None: none may be sent.

        The arm holds if the actor has been silent while it moves.
        """
        self._silent += 1
        if self._silent > self._patience[self.mode]:
            self.fail("guard", f"no sign of life from the actor for {self._silent} set points while the arm moved")
        if self.point is None or self._is_suspended:
            return None
        if self.mode == HOME:
            self._advance_home(self.point)
        else:
            before = self.point
            parts, self._left = max(self._left, 1) if self.mode == TRACK else 1, self._left - 1
            self.point = self._limiter.step(before, before + (self.target - before) / parts, self._tick)
            if self.mode == TRACK and (self.point == before).all() and (self.target != before).any():
                # The straight way leaves the tool's box. Further targets must not run away from an arm that stands.
                self.target, self._is_blocked = before, True
                self.limited += 1
        return self.point

    def accepted(self, point: Array, positions: Array | None) -> None:
        """Take what the arm made of a set point, both [J]; None: it tells nothing."""
        differs = positions is not None and bool((np.abs(positions - point) > 1e-6).any())
        self.executed = positions if differs else point if self._is_blocked else None

    def observe(self, measured: Array) -> None:
        """Take the measured positions [J] of this tick. If they are not finite, or off their way, that is a fault."""
        if not are_positions(measured, len(self._home)):
            self.fail("sensor", NO_POSITIONS.format(measured))
            return
        self.measured = measured
        wanted = self.target if self.mode == HOLD else self.point  # which may still be on its way to where it will hold
        if self.point is None or wanted is None or (i := self._off(measured, wanted)) is None:
            self._apart = 0
            self._glances.append(measured)
            return
        self._apart += 1
        if self._apart >= TRACKING_TICKS and not self.fault:
            self.fail("tracking", self._astray(i, measured))

    def _off(self, measured: Array, wanted: Array) -> int | None:
        """Return the entry that is measured furthest off where it should be, if it is more than `tracking`."""
        apart = np.abs(measured - wanted) / self._limits.tracking
        return int(np.argmax(apart)) if (apart > 1).any() else None

    def _astray(self, i: int, measured: Array) -> str:
        """Say what is wrong with entry `i` of these positions [J], which is off its way."""
        low, high, tracking = (each[i] for each in (self._limits.low, self._limits.high, self._limits.tracking))
        if low - tracking <= measured[i] <= high + tracking:
            name = [*self._limits.entries][i]
            return f"{name} does not follow: it hit something, is pushed, or its limits are too fast"
        return f"{self._limits.outside(i, measured)}: its sensor or its driver's unit is wrong"

    def _standing(self, readings: Sequence[Array]) -> Array:
        """Return where the arm stands, [J]. Raises RobotFault if these readings differ, or are no positions."""
        for measured in readings:
            if not are_positions(measured, len(self._home)):
                raise RobotFault(NO_POSITIONS.format(measured), "sensor")
        low, high = np.min(readings, axis=0), np.max(readings, axis=0)
        apart = (high - low) / self._limits.tracking
        if (apart > 1).any():
            said = self._limits.shown(int(np.argmax(apart)), low, high)
            raise RobotFault(f"{said} within a moment: its sensor is wrong", "sensor")
        return np.median(readings, axis=0)

    def _advance_home(self, before: Array) -> None:
        way = np.where(np.isnan(self._route[0]), before, self._route[0]) - before
        steps = float(np.max(np.abs(way) / (self._home_speed * self._limits.speed * self._tick)))
        self.point = self.target = self._limiter.step(before, before + way / max(steps, 1.0), self._tick)
        if not way.any():
            self._left -= 1
            if self._left <= 0:
                self._route.popleft()
                self._left = math.ceil(SETTLING / self._tick)
                if not self._route:
                    self.hold()
                    self.is_home = True
        elif (self.point == before).all():
            self.fail("limit", "the straight way home leaves the tool's limits: move the arm by hand, then say ready")
