"""Checks that an arm has a guard, and a guard the clock that it needs."""

from serl_client.errors import ConfigError

from robot_infra.guard.link import GuardLink
from robot_infra.guard.robot import GuardedRobot
from robot_infra.interfaces import Robot
from robot_infra.spaces import SpacedRobot


def check_guarded(robot: Robot, clock: str, fps: float) -> None:
    """Raise ConfigError unless a guard owns this robot, and knows its clock, or it is a simulation."""
    robot = robot.robot if isinstance(robot, SpacedRobot) else robot
    if isinstance(robot, GuardedRobot):
        if robot.fps != fps or (clock != "real" and isinstance(robot.guard, GuardLink)):
            raise ConfigError(
                f"task.env.clock={clock} task.env.fps={fps:g}: a guard needs its own fps, {robot.fps:g}, and the real "
                "clock if it is a process of its own (task.env.guard=true)"
            )
    elif not getattr(robot, "is_simulated", False):
        raise ConfigError(
            f"{type(robot).__name__} has no guard, so nothing would hold it if this process ended: derive a driver "
            "from robot_infra.drivers.arm.Arm, and give RobotEnv a GuardedRobot with its name (docs/guides/robots.md); "
            "a simulation says is_simulated = True"
        )


def check_clock(clock: str) -> None:
    """Raise ConfigError if a simulation is to have a guard process, and its time would not be real."""
    if clock != "real":
        raise ConfigError("task.env.guard=true needs task.env.clock=real: a guard moves the arm in real time")
