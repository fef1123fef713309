"""Builds task dobot_pnp (pick and place) with two simulated arms, and its scripted operator."""

import secrets
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
from serl_client.env import Observation
from serl_client.errors import ConfigError
from serl_client.spec import Array, Feature

from robot_infra.cameras import gl
from robot_infra.drivers.arm import Arm
from robot_infra.env import RobotEnv
from robot_infra.guard.robot import IMAGES, STATE, GuardedRobot
from robot_infra.judges import TogglePenalty
from robot_infra.sim.dobot_pnp import CHAINS, ENTRIES, HOME, JOINTS, OPEN, SIDES, TURN, Scene
from robot_infra.spaces import EE_DELTA, JOINT, JOINT_DELTA, EeDelta, Gripper, JointDelta, Limb, SpacedRobot
from robot_infra.teleop.hands import make_devices
from robot_infra.teleop.scripted import Rescuer
from robot_infra.teleop.verdicts import choose_judge

FPS = 10.0  # steps per second, if nothing else is said
FAR = 10.0  # radians: without controllers the arms may press against whatever they like, as nothing breaks
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


class DobotScene(Arm):
    """Drives both arms of a Scene of its own, with no controller between.

    address: any name. hz: set points per second. object_in_state: the state [31] also has both tools, the object, the
        ways to it and from it to the box (metres), and the grippers' targets; else it has the 14 positions that the
        arms measure themselves.
    side: where the object lies: both, left or right half of its area (Scene). backend, image_size: of its cameras
        (cameras/gl.py); an empty backend: it has none.

    The column `scene` has the scene's pose, for judge and script.

    **Assumed:** real arms' sensors are exact, and each arm obeys all set points at once. It cannot show a controller
    that refuses one, or that is late.
    """

    entries: Mapping[str, str] = {name: "%" if name.endswith("gripper") else "rad" for name in ENTRIES}
    is_simulated = True

    def __init__(
        self, address: str, *, hz: float, object_in_state: bool = True, side: str = "both", backend: str = "",
        image_size: int = 128,
    ) -> None:  # fmt: skip
        self._scene, self._period, self._sees = Scene(side), 1 / hz, object_in_state
        drawn = self._scene.cameras(backend, size=image_size) if backend else {}
        self._cameras = {IMAGES + name: camera for name, camera in drawn.items()}
        images = {name: camera.feature for name, camera in self._cameras.items()}
        pose = Feature(self._scene.pose.shape, "float64")
        self.observation = {STATE: state_feature(object_in_state), "scene": pose, **images}

    def read(self) -> Array:
        return self._scene.positions

    def write(self, positions: Array) -> None:
        self._scene.step(positions, self._period)

    def sense(self) -> Observation:
        images = {name: camera.latest().image for name, camera in self._cameras.items()}
        return {STATE: state_of(self._scene, self.read(), self._sees), "scene": self._scene.pose, **images}

    def scene(self, seed: int) -> None:
        self._scene.reset(seed)

    def close(self) -> None:
        for camera in self._cameras.values():
            camera.close()


def guarded(driver: type[DobotScene], *, fps: float, servo_hz: float, process: bool, **options: Any) -> GuardedRobot:
    """Return both arms behind a guard, which is a process of its own or not; options: of the driver, besides `hz`.

    Joints may lag far behind: on a busy machine a controller's clock stands still. Grippers that hold something always
    do.
    """
    joint = {"range": [-TURN, TURN], "speed": TURNING, "jump": TURNING / fps, "tracking": 1.0 if process else FAR}
    gripper = {"range": [0.0, OPEN], "speed": OPEN * fps, "jump": OPEN, "tracking": 2 * OPEN if process else FAR * OPEN}
    return GuardedRobot(
        f"{driver.__module__}.{driver.__name__}", address=f"dobot_pnp-{secrets.token_hex(8)}", fps=fps, process=process,
        limits={name: gripper if name.endswith("gripper") else joint for name in ENTRIES}, servo_hz=servo_hz,
        home=dict(zip(ENTRIES, HOME.tolist(), strict=True)), options={"hz": servo_hz, **options},
    )  # fmt: skip


def spaced(robot: GuardedRobot, space: str, fps: float, *, is_relative: bool) -> SpacedRobot:
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
    if not 1 <= fps <= 100:
        raise ConfigError(f"task.env.fps={fps:g}: the simulated arms make 1 to 100 steps per second")
    backend = gl.choose_backend(cameras, "" if object_in_state else "object")
    robot = guarded(
        DobotScene, fps=fps, servo_hz=fps, process=False, object_in_state=object_in_state, side=side, backend=backend,
        image_size=image_size,
    )  # fmt: skip
    return make_task(robot, clock=clock, fps=fps, **task)


def make_task(
    arms: GuardedRobot, *, clock: str, fps: float, max_steps: int, noise: float, space: str = JOINT,
    is_relative: bool = False, toggle_penalty: float = 0.0, operator: str = "scripted", verdict_by: str = "judge",
    takeover_after: int = 12, handback_after: int = 10, devices: Mapping[str, Any] | None = None,
) -> RobotEnv:  # fmt: skip
    """Make the task of these arms: one puts the object into the box, and the other one rests.

    space, is_relative: what an action means (spaces.py). toggle_penalty: taken from the reward of a step for each
    gripper that it opens or closes. noise: standard deviation of the scripted operator's actions. verdict_by: `judge`
    or `operator` (teleop/verdicts.py).
    """
    scene, shown = Scene(), {}

    def seen() -> Scene:
        """Return the scene as script and judge see it."""
        nonlocal shown
        if arms.seen is not shown:
            shown = arms.seen
            scene.show(shown["scene"])
        return scene

    stroke = SPEED / fps
    robot = spaced(arms, space, fps, is_relative=is_relative)
    hand = robot.speaks(f"{EE_DELTA}.{WORKER}")
    scripted = Rescuer(
        lambda: put(seen(), stroke), lambda: left_to_put(seen()), noise=noise, margin=stroke / 4,
        takeover_after=takeover_after, handback_after=handback_after, space=hand.space,
    )  # fmt: skip
    teleop, hands = make_devices(operator, scripted, hand, clock=clock, devices=devices)
    judge, person = choose_judge(verdict_by, lambda: seen().succeeded, lambda: arms.steps, max_steps, hands)
    judge = TogglePenalty(judge, lambda: robot.toggled, toggle_penalty)
    return RobotEnv(
        robot, judge=judge, task="put the object into the box", fps=fps,
        max_steps=max_steps, clock=clock, teleop=teleop, operator=person, cameras=arms.cameras,
    )  # fmt: skip
