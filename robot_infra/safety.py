"""Checks every command before a robot gets it."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import numpy as np
from serl_client.env import Observation
from serl_client.errors import ConfigError, RobotFault
from serl_client.spec import Array

from robot_infra.interfaces import Robot


class SafeRobot:
    """Wraps a Robot: it sends only finite commands within the bounds, and stops the robot on a fault.

    box: {entry of the action: (low, high)}, narrower bounds for entries that the action Feature names.
    jump: how much an entry may change from one command to the next; one number, or one for each entry. It takes
        precedence over the bounds, so that a robot outside of them returns slowly. None: no limit.

    `refused` counts the commands with NaN or infinity; the robot held still instead. Raises ConfigError for a box
    around an entry that does not exist.
    """

    def __init__(
        self, robot: Robot, *, box: Mapping[str, tuple[float, float]] | None = None,
        jump: float | Sequence[float] | None = None,
    ) -> None:  # fmt: skip
        self.robot = robot
        self.observation, self.action, self.space = robot.observation, robot.action, robot.space
        self.refused = 0
        self._low, self._high = np.array(self.action.low), np.array(self.action.high)  # [A]
        for name, (low, high) in (box or {}).items():
            if name not in self.action.names:
                raise ConfigError(f"the box names {name!r}; the action has {', '.join(self.action.names)}")
            entry = self.action.names.index(name)
            self._low[entry], self._high[entry] = max(self._low[entry], low), min(self._high[entry], high)
        self._jump = None if jump is None else np.broadcast_to(np.asarray(jump, self.action.dtype), self.action.shape)
        self._last = robot.hold_action()

    def observe(self) -> Observation:
        """Return the robot's observation. Raises RobotFault for a value that is not finite."""
        with self._stop_on_fault():
            observation = self.robot.observe()
            for name, array in observation.items():
                if not np.isfinite(array).all():
                    raise RobotFault(f"{name} holds a value that is not finite; a sensor or its driver failed")
        return observation

    def command(self, action: Array) -> Array:
        """Send the nearest allowed action [A]; return the action that was really sent."""
        with self._stop_on_fault():
            self._last = self.robot.command(self._allowed(action))
        return self._last

    def hold_action(self) -> Array:
        return self.robot.hold_action()

    def home(self, seed: int) -> None:
        with self._stop_on_fault():
            self.robot.home(seed)
            self._last = self.robot.hold_action()

    @property
    def is_home(self) -> bool:
        return self.robot.is_home

    def recover(self) -> None:
        with self._stop_on_fault():
            self.robot.recover()
            self._last = self.robot.hold_action()

    def stop(self) -> None:
        self.robot.stop()

    def close(self) -> None:
        self.robot.close()

    def _allowed(self, action: Array) -> Array:
        action = np.asarray(action, self.action.dtype)
        self.action.check("action", action)
        if not np.isfinite(action).all():
            self.refused += 1
            return self.robot.hold_action()
        action = np.clip(action, self._low, self._high)
        return action if self._jump is None else np.clip(action, self._last - self._jump, self._last + self._jump)

    @contextmanager
    def _stop_on_fault(self) -> Iterator[None]:
        with ExitStack() as fault:
            fault.callback(self.robot.stop)
            yield
            fault.pop_all()
