"""Builds a real arm's environment from its yaml: driver, limits, cameras, devices, words (docs/robots.md)."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from serl_client.errors import ConfigError

from robot_infra.cameras.lerobot import open_camera
from robot_infra.env import RobotEnv
from robot_infra.guard.robot import GuardedRobot
from robot_infra.judges import Unjudged
from robot_infra.teleop.hands import make_devices
from robot_infra.turns import Turns


def make(
    *, driver: str, address: str, task: str | Sequence[str], fps: float, max_steps: int,
    limits: Mapping[str, Any] | None = None, home: Mapping[str, Any] | None = None,
    space: str = "joint_position", stroke: float | Sequence[float] | None = None,
    options: Mapping[str, Any] | None = None, servo_hz: float = 100.0, home_speed: float = 0.25,
    cameras: Mapping[str, Mapping[str, Any]] | None = None, operator: str = "none",
    devices: Mapping[str, Any] | None = None, handover: float = 0.5, waypoints: Mapping[str, Any] | None = None,
) -> RobotEnv:  # fmt: skip
    """Make the Env of an arm behind a guard: see GuardedRobot for each word, and RobotEnv for `max_steps`.

    task: in words; or a list of two, each of which begins where the other one ends (resets.py).
    cameras: {name: options} (cameras/lerobot.py), beside those that the driver has itself.
    operator, devices: who takes over, and with what (teleop/hands.py); `none`: nobody.
    handover: seconds from policy to person and back, in which the action is led from one to the other.
    """
    with ExitStack() as stack:
        robot = GuardedRobot(
            driver, address=address, fps=fps, limits=limits, home=home, space=space, stroke=stroke, options=options,
            servo_hz=servo_hz, home_speed=home_speed, waypoints=waypoints,
        )  # fmt: skip
        stack.callback(robot.close)
        if twice := robot.cameras.keys() & (cameras or {}).keys():
            raise ConfigError(f"cameras: the arm itself has one that is called {min(twice)}: choose another name")
        seen: dict[str, Any] = dict(robot.cameras)
        for name, wanted in (cameras or {}).items():
            seen[name] = open_camera(str(name), wanted)
            stack.callback(seen[name].close)
        teleop, person = make_devices(operator, None, robot, clock="real", devices=devices)
        env = RobotEnv(
            robot, judge=Unjudged(), task=task if isinstance(task, str) else Turns(tuple(task)), fps=fps,
            max_steps=max_steps, cameras=seen, teleop=teleop, operator=person, handover=handover,
        )  # fmt: skip
        stack.pop_all()
    return env
