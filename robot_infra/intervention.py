"""Decides who drives a step, the policy or a person (human intervention), and blends the action when one takes over."""

import numpy as np
from serl_client.errors import ConfigError
from serl_client.spec import Array

from robot_infra.interfaces import Teleop

POLICY_ACTION = "policy_action"  # column of the policy's proposal
HANDOVER = "handover"  # column: this action leads from one driver's to the other's


class Intervention:
    """Decides for each step. If nobody may drive, the device is not even read, so that it cannot disturb the plan.

    Every step of an episode that the operator demonstrates is theirs; without a hand on the device the robot holds.
    If they may intervene, they drive while they want to, and the policy's proposal is dropped.

    ramp: steps from the last action of one driver to the first one of the next, in equal parts; below 2: no step
        between them. `is_handover`: whether the latest step was one on this way. `is_driven`: whether the one whose
        step it was gave an action.
    """

    def __init__(self, teleop: Teleop | None, ramp: int = 0) -> None:
        self._teleop, self._ramp = teleop, ramp
        self._demonstrates = self._may_take_over = False
        self._looked: tuple[bool, Array | None] | None = None  # who drives the next step, and what the device wants
        self._was_theirs, self._left = False, 0
        self.is_handover = self.is_driven = False

    def reset(self, seed: int, *, demonstrate: bool, intervene: bool) -> None:
        """Begin an episode. Raises ConfigError if it is to be demonstrated and there is no teleop."""
        if demonstrate and self._teleop is None:
            raise ConfigError(
                "this robot has no teleop, so nobody can demonstrate: say task.env.operator=..., or leave the phase out"
            )
        self._demonstrates, self._may_take_over, self._looked = demonstrate, intervene, None
        self._was_theirs, self._left = False, 0
        if self._teleop is not None and (demonstrate or intervene):
            self._teleop.reset(seed, demonstrate=demonstrate)

    def drive(self, proposed: Array | None, hold: Array, before: Array | None) -> tuple[Array, bool]:
        """Return the action [A] to send now, and whether the operator drives this step.

        proposed: of the policy; None: nothing. hold: the action [A] that holds the robot still.
        before: the action [A] of the step before, as executed; None: this is the first step.
        """
        if self._looked is None:
            self.look(hold)
        is_theirs, wanted = self._looked or (False, None)
        self._looked = None
        driven = wanted if is_theirs else proposed
        if is_theirs != self._was_theirs:
            self._was_theirs, self._left = is_theirs, self._ramp
        self.is_driven = driven is not None
        self.is_handover = self._left > 1 and self.is_driven
        if driven is None:
            return hold, is_theirs
        if self.is_handover:
            begin = hold if before is None else before
            driven = (begin + (driven - begin) / self._left).astype(hold.dtype)
        self._left = max(self._left - 1, 0)
        return driven, is_theirs

    def look(self, hold: Array) -> bool:
        """Read the device for the next step; return whether the operator drives it."""
        if self._teleop is None or not (self._demonstrates or self._may_take_over):
            return False
        wanted = self._teleop.read(hold)
        self._looked = self._demonstrates or wanted is not None, wanted
        return self._looked[0]


def policy_action(proposed: Array | None, executed: Array) -> Array:
    """Return the value of POLICY_ACTION [A]: the policy's proposal before limits, also if the operator drove instead.

    If the policy proposed nothing, or nothing finite, it is the executed action, so that no value is invented.
    """
    is_proposal = proposed is not None and bool(np.isfinite(proposed).all())
    return np.asarray(proposed if is_proposal else executed, executed.dtype)
