"""The environment of a real arm whose driver, limits and task a yaml names: docs/robots.md."""

from collections.abc import Mapping, Sequence
from typing import Any

from robot_infra.env import RobotEnv
from robot_infra.guard.robot import GuardedRobot
from robot_infra.judges import unjudged


def make(
    *, driver: str, address: str, task: str, fps: float, max_steps: int, limits: Mapping[str, Any] | None = None,
    home: Mapping[str, Any] | None = None, space: str = "joint_position", stroke: float | Sequence[float] | None = None,
    options: Mapping[str, Any] | None = None, servo_hz: float = 100.0, home_speed: float = 0.25,
) -> RobotEnv:  # fmt: skip
    """Make the Env of an arm behind a guard: see GuardedRobot for each word, and RobotEnv for `task` and `max_steps`.

    Cameras, a takeover device or a judge need a function of their own, which may begin as a copy of this one.
    """
    robot = GuardedRobot(
        driver, address=address, fps=fps, limits=limits, home=home, space=space, stroke=stroke, options=options,
        servo_hz=servo_hz, home_speed=home_speed,
    )  # fmt: skip
    return RobotEnv(robot, judge=unjudged, task=task, fps=fps, max_steps=max_steps, cameras=robot.cameras)
