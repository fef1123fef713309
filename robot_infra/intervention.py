"""Who drives a row: the policy, or the operator, who demonstrates a whole episode or takes over in mid-episode."""

import numpy as np
from serl_client.errors import ConfigError
from serl_client.spec import Array

from robot_infra.interfaces import Teleop

POLICY_ACTION = "policy_action"  # the column of what the policy proposed


class Intervention:
    """Decides for each row. Where nobody may drive, the device is not even read: a plan without it cannot be disturbed.

    In an episode that the operator demonstrates every row is theirs, and hands off the device mean: hold. Where they
    may intervene, a row is theirs while they touch the device; what the policy proposed for it is dropped.
    """

    def __init__(self, teleop: Teleop | None) -> None:
        self._teleop = teleop
        self._demonstrates = self._may_take_over = False

    def reset(self, seed: int, *, demonstrate: bool, intervene: bool) -> None:
        """An episode begins. Raises ConfigError when it asks for a demonstration and there is nobody to give it."""
        if demonstrate and self._teleop is None:
            raise ConfigError("this robot has no teleop: nobody can demonstrate")
        self._demonstrates, self._may_take_over = demonstrate, intervene
        if self._teleop is not None and (demonstrate or intervene):
            self._teleop.reset(seed, demonstrate=demonstrate)

    def drive(self, proposed: Array | None) -> tuple[Array | None, bool]:
        """(the action [A] to send now, None: hold; whether it is the operator's row)."""
        if self._teleop is None or not (self._demonstrates or self._may_take_over):
            return proposed, False
        wanted = self._teleop.read()
        is_theirs = self._demonstrates or wanted is not None
        return (wanted if is_theirs else proposed), is_theirs


def policy_action(proposed: Array | None, executed: Array) -> Array:
    """What POLICY_ACTION holds of a row [A], before limits: the policy's proposal, also where the operator drove
    instead. Where it proposed nothing, or nothing finite, it is what was executed, so that no row holds an invention.
    """
    is_proposal = proposed is not None and bool(np.isfinite(proposed).all())
    return np.asarray(proposed if is_proposal else executed, executed.dtype)
