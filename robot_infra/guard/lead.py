"""Leads a leader arm to where its follower is, within the follower's limits, until a hand touches it."""

from dataclasses import replace

import numpy as np
from serl_client.errors import RobotFault
from serl_client.spec import Array

from robot_infra.drivers.arm import Arm
from robot_infra.guard.limits import Limiter, Limits, are_positions

LIMP, FOLLOWS, TOUCHED = "limp", "follows", "touched"  # what a leader arm does; TOUCHED: it is limp because of a touch
TOUCH = 0.25  # of an entry's `tracking`: a leader that is measured farther off its set point is pushed by a hand
TOUCH_TICKS = 5  # in a row, so that single wrong measurements are no touch


class Lead:
    """Moves the leader of `arm` by set points, as fast as the follower may move. Nothing else writes to the leader.

    limits: of the follower. Its tools' boxes do not count, as the leader stands elsewhere. tick: seconds of one servo
    tick. `state`: LIMP, FOLLOWS or TOUCHED.
    """

    def __init__(self, arm: Arm, limits: Limits, tick: float) -> None:
        self._arm, self._tick, self._limiter = arm, tick, Limiter(replace(limits, box=None), arm.tool)
        self.state, self._is_on = LIMP, False
        self.stays = False  # it goes no farther than it is, as its robot holds; a touch counts as ever
        self._point: Array | None = None  # the newest set point [J]; None: the next one is where the motors hold it
        self._apart = 0  # consecutive ticks off its way

    def follow(self) -> None:
        """Follow from the next tick on, from where the leader stands."""
        self.state, self._point = FOLLOWS, None

    def let_go(self) -> None:
        """Go limp at the next tick: a person drives."""
        self.state = LIMP

    def advance(self, wanted: Array | None) -> None:
        """Send the leader its set point of this tick, on the way to `wanted` [J]; None: it stays where it is.

        Raises RobotFault, which names the leader, if its driver fails.
        """
        try:
            if self.state != FOLLOWS:
                self._relax()
            elif wanted is None:
                self._point = None  # its motors may be switched off before it goes on
            elif self._point is None and self.stays and not self._is_on:
                return
            elif self._point is None:
                self._is_on, self._apart = True, 0
                self._point = self._checked(self._arm.enable_leader())
            elif self._is_touched(self._point):
                self.state = TOUCHED
                self._relax()
            else:
                self._point = self._limiter.step(self._point, self._point if self.stays else wanted, self._tick)
                self._arm.lead(self._point.copy())
        except RobotFault as fault:
            raise RobotFault(f"leader arm: {fault}", fault.kind) from None

    def _relax(self) -> None:
        if self._is_on:
            self._arm.lead(None)
            self._is_on = False

    def _is_touched(self, point: Array) -> bool:
        apart = np.abs(self._checked(self._arm.read_leader()) - point) > TOUCH * self._limiter.limits.tracking
        self._apart = self._apart + 1 if apart.any() else 0
        return self._apart >= TOUCH_TICKS

    def _checked(self, positions: Array) -> Array:
        positions = np.array(positions, float)
        if not are_positions(positions, len(self._limiter.limits.entries)):
            raise RobotFault(f"its positions are {positions}; a sensor or its driver failed", "sensor")
        return positions
