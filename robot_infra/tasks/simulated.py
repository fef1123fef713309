"""Defines the base of a simulated robot that has no set points, as it is pushed: no guard could limit them."""

from collections.abc import Mapping

import numpy as np
from serl_client import clock
from serl_client.env import Observation
from serl_client.errors import ConfigError, RobotFault
from serl_client.spec import Array, Feature

from robot_infra.interfaces import Reading


class Simulated:
    """Is the base of such a Robot: it is home at once, and stands still between two commands.

    It takes the nearest action within the bounds, and for one with NaN or infinity that of rest, which is zero.
    """

    is_home = is_simulated = True
    observation: Mapping[str, Feature]
    action: Feature

    def act(self, action: Array) -> None:
        """Let one step of time pass under this action [A], which lies within the bounds."""
        raise NotImplementedError

    def sense(self) -> Observation:
        """Return the state, as `observation` says."""
        raise NotImplementedError

    def observe(self) -> Reading:
        """Return the state now. Raises RobotFault for a value that is not finite."""
        values = self.sense()
        for name, array in values.items():
            if not np.isfinite(array).all():
                raise RobotFault(f"{name} holds a value that is not finite; a sensor or its driver failed", "sensor")
        return Reading(values, clock.monotonic())

    def command(self, action: Array) -> Array:
        """Take the nearest allowed action [A]; return it."""
        action = np.asarray(action, self.action.dtype)
        self.action.check("action", action)
        is_finite = np.isfinite(action).all()
        taken = np.clip(action, self.action.low, self.action.high) if is_finite else self.hold_action()
        self.act(taken)
        return taken

    def hold_action(self) -> Array:
        return np.zeros(self.action.shape, self.action.dtype)

    def return_home(self, seed: int) -> None:
        raise ConfigError("this robot has no way home: only reset=auto or operator sets up its scene")

    def stop(self) -> None:
        """Do nothing: time stands still."""

    def recover(self) -> None:
        """Do nothing: it has no faults."""

    def close(self) -> None:
        """Do nothing: it holds nothing."""
