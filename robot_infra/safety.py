"""Clips each command to a simulated robot's bounds, refuses NaN, and checks that a real arm has a guard."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
from serl_client.errors import ConfigError, RobotFault
from serl_client.spec import Array

from robot_infra.guard.robot import GuardedRobot
from robot_infra.interfaces import Reading, Robot
from robot_infra.spaces import SpacedRobot


def check_guarded(robot: Robot, clock: str, fps: float) -> None:
    """Raise ConfigError unless a guard owns this robot, and knows its clock, or it is a simulation."""
    robot = robot.robot if isinstance(robot, SpacedRobot) else robot
    if isinstance(robot, GuardedRobot):
        if clock != "real" or robot.fps != fps:
            raise ConfigError(
                f"clock={clock} fps={fps:g}: a guard needs the real clock, and its own fps, {robot.fps:g}"
            )
    elif not getattr(robot, "is_simulated", False):
        raise ConfigError(
            f"{type(robot).__name__} has no guard, so nothing would hold it if this process ended: derive a driver "
            "from robot_infra.drivers.arm.Arm, and give RobotEnv a GuardedRobot with its name (docs/robots.md); a "
            "simulation says is_simulated = True"
        )


def check_clock(clock: str) -> None:
    """Raise ConfigError if a simulation is to have a guard, and its time would not be real."""
    if clock != "real":
        raise ConfigError("task.env.guard=true needs task.env.clock=real: a guard moves the arm in real time")


class SafeRobot:
    """Wraps a simulated Robot: it sends only commands within the bounds, and stops the robot on a fault.

    For a command with NaN or infinity the robot holds still instead.
    """

    def __init__(self, robot: Robot) -> None:
        self.robot = robot
        self.observation, self.action, self.space = robot.observation, robot.action, robot.space
        self.is_simulated = getattr(robot, "is_simulated", False)

    @property
    def is_home(self) -> bool:
        return self.robot.is_home

    def observe(self) -> Reading:
        """Return the robot's observation. Raises RobotFault for a value that is not finite."""
        with self._stop_on_fault():
            reading = self.robot.observe()
            for name, array in reading.values.items():
                if not np.isfinite(array).all():
                    raise RobotFault(
                        f"{name} holds a value that is not finite; a sensor or its driver failed", "sensor"
                    )
        return reading

    def command(self, action: Array) -> Array:
        """Send the nearest allowed action [A]; return the action that was really sent."""
        action = np.asarray(action, self.action.dtype)
        self.action.check("action", action)
        with self._stop_on_fault():
            is_finite = np.isfinite(action).all()
            wanted = np.clip(action, self.action.low, self.action.high) if is_finite else self.robot.hold_action()
            return self.robot.command(wanted)

    def hold_action(self) -> Array:
        return self.robot.hold_action()

    def home(self, seed: int) -> None:
        with self._stop_on_fault():
            self.robot.home(seed)

    def recover(self) -> None:
        with self._stop_on_fault():
            self.robot.recover()

    def stop(self) -> None:
        self.robot.stop()

    def close(self) -> None:
        self.robot.close()

    @contextmanager
    def _stop_on_fault(self) -> Iterator[None]:
        with ExitStack() as fault:
            fault.callback(self.robot.stop)
            yield
            fault.pop_all()
