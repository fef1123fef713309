"""Builds a real arm's environment from its yaml: driver, limits, cameras, devices, words (docs/guides/robots.md)."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
from serl_client.errors import ConfigError

from robot_infra.cameras.lerobot import open_camera
from robot_infra.drivers.urdf import Kinematics
from robot_infra.env import RobotEnv
from robot_infra.guard.limits import AXES, TOOL
from robot_infra.guard.robot import GuardedRobot
from robot_infra.judges import Unjudged
from robot_infra.spaces import EE_DELTA, EeDelta, Gripper, Limb, SpacedRobot
from robot_infra.teleop.hands import make_devices
from robot_infra.turns import Turns


def make(
    *, driver: str, address: str, task: str | Sequence[str], fps: float, max_steps: int,
    limits: Mapping[str, Any] | None = None, home: Mapping[str, Any] | None = None,
    space: str = "joint_position", stroke: float | Sequence[float] | None = None,
    options: Mapping[str, Any] | None = None, servo_hz: float = 100.0, home_speed: float = 0.25,
    cameras: Mapping[str, Mapping[str, Any]] | None = None, operator: str = "none",
    devices: Mapping[str, Any] | None = None, handover: float = 0.5, waypoints: Mapping[str, Any] | None = None,
    gripper: Mapping[str, Any] | None = None,
) -> RobotEnv:  # fmt: skip
    """Make the Env of an arm behind a guard: see GuardedRobot for each word, and RobotEnv for `max_steps`.

    space: `ee_delta` of an arm whose entries are joints moves its tool, by options.kinematics (drivers/urdf.py); then
        stroke is metres, of one step, and `gripper` {entry, open, closed}, its positions then, or None: there is none.

    task: in words; or a list of two, each of which begins where the other one ends (resets.py).
    cameras: {name: options} (cameras/lerobot.py), beside those that the driver has itself.
    operator, devices: who takes over, and with what (teleop/hands.py); `none`: nobody.
    handover: seconds from policy to person and back, in which the action is led from one to the other.
    """
    options = options or {}
    with ExitStack() as stack:
        moves_tool = space == EE_DELTA and bool(options.get("kinematics"))
        spoken = {} if moves_tool else {"space": space, "stroke": stroke}
        robot = arm = GuardedRobot(
            driver, address=address, fps=fps, limits=limits, home=home, options=options, servo_hz=servo_hz,
            home_speed=home_speed, waypoints=waypoints, **spoken,
        )  # fmt: skip
        stack.callback(arm.close)
        if moves_tool:
            robot = tool_space(arm, options["kinematics"], limits or {}, stroke, gripper)
        if twice := arm.cameras.keys() & (cameras or {}).keys():
            raise ConfigError(f"cameras: the arm itself has one that is called {min(twice)}: choose another name")
        seen: dict[str, Any] = dict(arm.cameras)
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


def tool_space(
    arm: GuardedRobot, kinematics: Mapping[str, Any], limits: Mapping[str, Any], stroke: Any,
    gripper: Mapping[str, Any] | None,
) -> SpacedRobot:  # fmt: skip
    """Return an arm of joints whose actions move its tool: `stroke` metres along x, y and z of its base in one step.

    limits: of the task, which the guard has accepted. A joint that would break them slows the tool down.
    """
    if isinstance(stroke, bool) or not isinstance(stroke, int | float) or stroke <= 0:
        raise ConfigError(f"task.env.stroke={stroke}: with space={EE_DELTA} say the metres of one step, such as 0.01")
    units = dict(zip(arm.action.names, arm.action.units, strict=True))
    known = Kinematics(kinematics, units)
    limits = {str(name): limit for name, limit in limits.items()}
    if TOOL not in limits:
        raise ConfigError(f"space={EE_DELTA} moves the {TOOL} of one arm, and this robot has several: take its joints")
    moves = [limits[entry] for entry in known.entries]
    most = np.array([min(limit["jump"], limit["speed"] / arm.fps) for limit in moves]) * known.scale
    box = np.array([limits[TOOL][axis] for axis in AXES], float).T
    hand = None if gripper is None else _gripper(gripper, units)
    limb = Limb(known.entries, known.chain, box, hand, known.scale)
    space = EeDelta(arm.action, {"": limb}, stroke=stroke, most=float(most.min()))
    return SpacedRobot(arm, {EE_DELTA: space}, EE_DELTA, dict([hand]) if hand else None)


def _gripper(said: Mapping[str, Any], units: Mapping[str, str]) -> tuple[str, Gripper]:
    """Return the entry of a gripper, and its ends."""
    given = dict(said) if isinstance(said, Mapping) else {}
    ends = [float(end) for end in (given.get("open"), given.get("closed")) if isinstance(end, int | float)]
    if given.keys() != {"entry", "open", "closed"} or given["entry"] not in units or len({*ends}) < 2:
        entry = [*units][-1]
        raise ConfigError(
            f"task.env.gripper={said}: say entry, open and closed, as in "
            f"`{{entry: {entry}, open: 100, closed: 0}}`; the entries are {', '.join(units)}"
        )
    return str(given["entry"]), Gripper(*ends)
