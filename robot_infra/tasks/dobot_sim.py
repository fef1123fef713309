"""Builds task dobot_pnp (pick and place) with two simulated arms, and its scripted operator."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
from serl_client import clock
from serl_client.errors import ConfigError
from serl_client.spec import Array, Feature

from robot_infra.cameras import gl
from robot_infra.env import RobotEnv
from robot_infra.interfaces import Camera, Reading
from robot_infra.judges import TogglePenalty
from robot_infra.safety import SafeRobot
from robot_infra.sim.dobot_pnp import CHAINS, ENTRIES, JOINTS, OPEN, SIDES, TURN, Scene
from robot_infra.spaces import EE_DELTA, JOINT, JOINT_DELTA, EeDelta, Gripper, JointDelta, Limb, SpacedRobot
from robot_infra.tasks.simulated import Simulated
from robot_infra.teleop.hands import make_devices
from robot_infra.teleop.scripted import Rescuer
from robot_infra.teleop.verdicts import choose_judge

FPS = 10.0  # steps per second, if nothing else is said
SPEED, TURNING = 0.3, 1.5  # metres of a tool, and radians of a joint, per second, at most
BOXES = {  # metres, where a tool may be; fingers end 2 cm lower
    "left": np.array([[0.2, -0.1, 0.025], [0.5, 0.45, 0.35]]),
    "right": np.array([[0.2, -0.45, 0.025], [0.5, 0.1, 0.35]]),
}
WORKER = "right"  # the arm of the scripted operator, and of a person's devices; the other one rests
GRIPPERS = {f"{side}_gripper": Gripper(OPEN, 0.0) for side in SIDES}
AXES = ("x", "y", "z")
SEEN = tuple(f"{point}.{axis}" for point in ("left_tool", "right_tool", "object", "way", "to_box") for axis in AXES)


def state_feature(object_in_state: bool) -> Feature:
    """Return what a state is: the 14 positions alone, or with the object and what follows from it."""
    names = (*ENTRIES, *SEEN, *[f"{name}.target" for name in GRIPPERS]) if object_in_state else ENTRIES
    return Feature((len(names),), names=names)


def state_of(scene: Scene, measured: Array, object_in_state: bool) -> Array:
    """Return the state that state_feature describes, with these measured positions [14]."""
    if object_in_state:
        left, right = (scene.tool(side) for side in SIDES)
        way, to_box = scene.object - right, scene.box - scene.object
        measured = np.concatenate([measured, left, right, scene.object, way, to_box, scene.targets[[6, 13]]])
    return measured.astype(np.float32)


class DobotSim(Simulated):
    """Takes joint targets for a Scene of its own, each reached as fast as TURNING allows; a Robot.

    fps: steps per second. object_in_state: the state [31] also has both tools, the object, the ways to it and from it
        to the box (metres), and the grippers' targets; else it has the 14 positions that the arms measure themselves.
    side: where the object lies: both, left or right half of its area (Scene).
    """

    space = JOINT
    action = Feature(
        (len(ENTRIES),), names=ENTRIES, low=np.array([*[-TURN] * 6, 0] * 2), high=np.array([*[TURN] * 6, OPEN] * 2)
    )

    def __init__(self, *, fps: float = FPS, object_in_state: bool = True, side: str = "both") -> None:
        if not 1 <= fps <= 100:
            raise ConfigError(f"task.env.fps={fps:g}: the simulated arms make 1 to 100 steps per second")
        self.scene, self._period, self.steps = Scene(side), 1 / fps, 0
        self._sees = object_in_state
        self.observation: Mapping[str, Feature] = {"observation.state": state_feature(object_in_state)}
        self._reach = np.array([*[TURNING / fps] * 6, OPEN] * 2)

    def home(self, seed: int) -> None:
        self.scene.reset(seed)
        self.steps = 0  # since the arms were home

    def observe(self) -> Reading:
        state = state_of(self.scene, self.scene.positions, self._sees)
        return Reading({"observation.state": state}, clock.monotonic())

    def command(self, action: Array) -> Array:
        before = self.scene.targets
        target = np.clip(action, before - self._reach, before + self._reach)
        self.scene.step(target, self._period)
        self.steps += 1
        return target.astype(np.float32)

    def hold_action(self) -> Array:
        return self.scene.targets.astype(np.float32)


def spaced(robot: Any, space: str, fps: float, *, is_relative: bool) -> SpacedRobot:
    """Return both arms in one of their action spaces: positions, deltas of joints, or of one tool or both."""
    limbs = {
        side: Limb(
            tuple(f"{side}_{name}" for name in JOINTS), CHAINS[side], BOXES[side],
            (f"{side}_gripper", GRIPPERS[f"{side}_gripper"]),
        )
        for side in SIDES
    }  # fmt: skip
    stroke, most = SPEED / fps, TURNING / fps
    ee_delta = partial(EeDelta, robot.action, stroke=stroke, most=most, is_relative=is_relative)
    spaces = {
        JOINT_DELTA: JointDelta(robot.action, most, GRIPPERS),
        EE_DELTA: ee_delta({f"{side}_": limb for side, limb in limbs.items()}),
        **{f"{EE_DELTA}.{side}": ee_delta({"": limb}) for side, limb in limbs.items()},
    }
    return SpacedRobot(robot, spaces, space, GRIPPERS)


def put(scene: Scene, stroke: float) -> Array:
    """Return the action [x, y, z, gripper] of the worker's tool: above the object, down, close, up, to the box, open.

    It follows from the scene alone, so that a lost object is picked again.
    """
    tool, target = scene.tool(WORKER), scene.targets[ENTRIES.index(f"{WORKER}_gripper")]
    x, y, z = scene.object - tool
    holds = target < OPEN / 2 and abs(z) < 0.03 and np.hypot(x, y) < 0.03
    if not holds:
        beside = np.hypot(x, y) > 0.015
        if beside or abs(z) > 0.01:
            return np.array([x, y, z + 0.1 * beside, -stroke]) / stroke
        return np.array([0.0, 0.0, 0.0, 1.0])
    across = scene.box - tool
    if np.hypot(across[0], across[1]) < 0.03:
        return np.array([0.0, 0.0, 0.0, -1.0])
    is_low = tool[2] < 0.1
    return np.array([*(across[:2] * (not is_low)), 0.12 - tool[2], stroke]) / stroke


def left_to_put(scene: Scene) -> float:
    """Return the metres from the worker's tool to the object plus those from the object to the box."""
    return float(np.linalg.norm(scene.object - scene.tool(WORKER)) + np.linalg.norm((scene.box - scene.object)[:2]))


def make(
    *, clock: str, fps: float = FPS, cameras: bool | str = False, image_size: int = 128, object_in_state: bool = True,
    side: str = "both", **task: Any,
) -> RobotEnv:  # fmt: skip
    """Make the task as an Env whose arms take joint targets directly; `task`: the other words of `make_task`.

    cameras: true, false or auto (cameras/gl.py). Raises ConfigError where neither state nor camera would show the
    object.
    """
    backend = gl.choose_backend(cameras, "" if object_in_state else "object")
    arms = DobotSim(fps=fps, object_in_state=object_in_state, side=side)
    drawn = arms.scene.cameras(backend, size=image_size) if backend else {}
    return make_task(SafeRobot(arms), lambda: arms.scene, lambda: arms.steps, drawn, clock=clock, fps=fps, **task)


def make_task(
    arms: Any, seen: Callable[[], Scene], steps: Callable[[], int], cameras: Mapping[str, Camera], *, clock: str,
    fps: float, max_steps: int, noise: float, space: str = JOINT, is_relative: bool = False,
    toggle_penalty: float = 0.0, operator: str = "scripted", verdict_by: str = "judge", takeover_after: int = 12,
    handback_after: int = 10, devices: Mapping[str, Any] | None = None,
) -> RobotEnv:  # fmt: skip
    """Make the task of these arms: one puts the object into the box, and the other one rests.

    seen, steps: give the scene as script and judge see it, and the commands since the arms were home.
    space, is_relative: what an action means (spaces.py). toggle_penalty: taken from the reward of a step for each
    gripper that it opens or closes. noise: standard deviation of the scripted operator's actions. verdict_by: `judge`
    or `operator` (teleop/verdicts.py).
    """
    stroke = SPEED / fps
    robot = spaced(arms, space, fps, is_relative=is_relative)
    hand = robot.speaks(f"{EE_DELTA}.{WORKER}")
    scripted = Rescuer(
        lambda: put(seen(), stroke), lambda: left_to_put(seen()), noise=noise, margin=stroke / 4,
        takeover_after=takeover_after, handback_after=handback_after, space=hand.space,
    )  # fmt: skip
    teleop, hands = make_devices(operator, scripted, hand, clock=clock, devices=devices)
    judge, person = choose_judge(verdict_by, lambda: seen().succeeded, steps, max_steps, hands)
    judge = TogglePenalty(judge, lambda: robot.toggled, toggle_penalty)
    return RobotEnv(
        robot, judge=judge, task="put the object into the box", fps=fps,
        max_steps=max_steps, clock=clock, teleop=teleop, operator=person, cameras=cameras,
    )  # fmt: skip
