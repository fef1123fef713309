"""Decides who drives a step: the policy, or an operator who demonstrates or takes over in mid-episode."""

import numpy as np
from serl_client.errors import ConfigError
from serl_client.spec import Array

from robot_infra.interfaces import Teleop

POLICY_ACTION = "policy_action"  # column of the policy's proposal


class Intervention:
    """Decides for each step. If nobody may drive, the device is not even read, so that it cannot disturb the plan.

    The operator drives every step of an episode that they demonstrate; without a hand on the device the robot holds.
    If they may intervene, they drive while they touch the device, and the policy's proposal is dropped.
    """

    def __init__(self, teleop: Teleop | None) -> None:
        self._teleop = teleop
        self._demonstrates = self._may_take_over = False
        self._looked: tuple[bool, Array | None] | None = None  # who drives the next step, and what the device wants

    def reset(self, seed: int, *, demonstrate: bool, intervene: bool) -> None:
        """Begin an episode. Raises ConfigError if it is to be demonstrated and there is no teleop."""
        if demonstrate and self._teleop is None:
            raise ConfigError("this robot has no teleop: nobody can demonstrate")
        self._demonstrates, self._may_take_over, self._looked = demonstrate, intervene, None
        if self._teleop is not None and (demonstrate or intervene):
            self._teleop.reset(seed, demonstrate=demonstrate)

    def drive(self, proposed: Array | None) -> tuple[Array | None, bool]:
        """Return the action [A] to send now (None: hold), and whether the operator drives this step."""
        if self._looked is None:
            self.look()
        is_theirs, wanted = self._looked or (False, None)
        self._looked = None
        return (wanted if is_theirs else proposed), is_theirs

    def look(self) -> bool:
        """Read the device for the next step; return whether the operator drives it."""
        if self._teleop is None or not (self._demonstrates or self._may_take_over):
            return False
        wanted = self._teleop.read()
        self._looked = self._demonstrates or wanted is not None, wanted
        return self._looked[0]


def policy_action(proposed: Array | None, executed: Array) -> Array:
    """Return the value of POLICY_ACTION [A]: the policy's proposal before limits, also if the operator drove instead.

    If the policy proposed nothing, or nothing finite, it is the executed action, so that no value is invented.
    """
    is_proposal = proposed is not None and bool(np.isfinite(proposed).all())
    return np.asarray(proposed if is_proposal else executed, executed.dtype)
