"""Simulates a light arm in MuJoCo that picks up a block, or moves it aside: scene, reward, scripted operator."""

import math
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from typing import Any

import numpy as np
from serl_client.env import Observation
from serl_client.errors import ConfigError
from serl_client.spec import Array, Feature
from serl_client.starts import is_demonstrated
from serl_client.words import check_choice

from robot_infra.cameras import gl
from robot_infra.cameras.mujoco import cameras, load_mujoco
from robot_infra.drivers.arm import Arm
from robot_infra.env import RobotEnv
from robot_infra.guard.robot import IMAGES, STATE, GuardedRobot
from robot_infra.interfaces import Robot
from robot_infra.judges import DistanceCost, lifted, near
from robot_infra.kinematics import Chain, links_of
from robot_infra.safety import check_clock
from robot_infra.spaces import EE_DELTA, JOINT, JOINT_DELTA, EeDelta, Gripper, JointDelta, Limb, SpacedRobot
from robot_infra.teleop.hands import make_devices
from robot_infra.teleop.scripted import Rescuer
from robot_infra.teleop.verdicts import choose_judge
from robot_infra.turns import Turns

FPS = 10.0  # steps per second, if nothing else is said
PHYSICS = 0.004  # seconds of one physics step, as in arm.xml
SERVO_HZ = 50.0  # set points per second of its guard
FAR = 10.0  # radians or metres: it may press against whatever it likes, as nothing breaks
SPEED = 0.3  # metres per second, of the commanded tool or finger under an action of 1
SHOULDER, UPPER_ARM, FOREARM, HAND = 0.19, 0.32, 0.30, 0.175  # metres: height of the joint, lengths up to the tool
WORKSPACE = np.array([[0.25, -0.2, 0.025], [0.55, 0.2, 0.35]])  # metres, for the tool; fingers end 2 cm lower
HOME = np.array([0.4, 0.0, 0.2])
OPEN = 0.045  # metres between a finger and the middle

JOINTS = ("yaw", "shoulder", "elbow", "wrist", "roll")
TURN, TURNING = 3.1, 1.5  # the ends of a joint, radians, and its speed, radians per second, in the spaces of joints
CHAIN = Chain(links_of([  # of arm.xml
    [SHOULDER, 0, -math.pi / 2, 0], [0, UPPER_ARM, 0, -math.pi / 2], [0, FOREARM, 0, 0],
    [0, 0, math.pi / 2, math.pi / 2], [HAND, 0, 0, 0],
]))  # fmt: skip

SIDE = 0.06  # metres to the left or to the right of the robot, from which on a block lies there
REACH = WORKSPACE[:, :2] + np.array([[-0.01], [0.01]])  # metres, x and y of a block that the fingers can grip
LET_GO = {"release": {"gripper": OPEN}, "rise": {"z": 0.2}}
WAYPOINTS = {  # of each goal, to a scene in which it may begin
    "pick": {"aside": {"x": [0.32, 0.48], "y": [-0.12, 0.12]}, "down": {"z": 0.03}, **LET_GO}, "sides": LET_GO,
}  # fmt: skip

SIDES = {  # x and y of the block: positive is ahead and left of the robot
    "both": lambda x, y: (x, y), "left": lambda x, y: (x, abs(y)), "right": lambda x, y: (x, -abs(y)),
    "corner": lambda x, y: (0.36 + x / 4, 0.1 + y / 6),  # 4 cm wide, far ahead and on the left
}  # fmt: skip

AXES = ("x", "y", "z")
NAMES = (
    *(f"{point}.{axis}" for point in ("tool", "block", "way") for axis in AXES), "finger",
    *(f"target.{axis}" for axis in AXES), "opening", "finger_speed",
)  # fmt: skip
CENTRE = np.array([0.4, 0, 0.15] * 2 + [0, 0, 0, 0.025, 0.4, 0, 0.15, 0.025, 0])
SCALE = np.array([5.0] * 6 + [10.0] * 3 + [40.0] + [5.0] * 3 + [40.0, 5.0])  # brings the state near [-1, 1]


def inverse_kinematics(point: Array) -> tuple[float, float, float, float, float]:
    """Return the joint angles (radians) that bring the tool to `point` [3] (metres), fingers straight down.

    The hand points down, so shoulder and forearm reach for its root in a plane: the law of cosines gives the elbow.
    """
    x, y, z = point
    yaw, distance, height = math.atan2(y, x), math.hypot(x, y), z + HAND - SHOULDER
    cosine = (distance**2 + height**2 - UPPER_ARM**2 - FOREARM**2) / (2 * UPPER_ARM * FOREARM)
    elbow = math.acos(min(max(cosine, -1.0), 1.0))
    shoulder = math.atan2(distance, height)
    shoulder -= math.atan2(FOREARM * math.sin(elbow), UPPER_ARM + FOREARM * math.cos(elbow))
    return yaw, shoulder, elbow, math.pi - shoulder - elbow, yaw


def walled(scene: str) -> str:
    """Return a scene (MJCF) with glass around the workspace. It stops the block alone, which so stays within reach."""
    geoms, half = "", 0.05  # metres, of the glass's thickness
    low, high = WORKSPACE[:, :2] + np.array([[-0.02 - half], [0.02 + half]])  # half a block away
    for x, y, depth, width in (
        (low[0], 0, half, 0.4), (high[0], 0, half, 0.4), (HOME[0], low[1], 0.2, half), (HOME[0], high[1], 0.2, half)
    ):  # fmt: skip
        place = f'pos="{x} {y} 0.25" size="{depth} {width} 0.25"'
        geoms += f'<geom type="box" {place} contype="2" conaffinity="0" rgba="1 1 1 0.1"/>'
    block = 'name="block" class="solid"'
    return scene.replace("</worldbody>", f"{geoms}</worldbody>").replace(block, f'{block} conaffinity="3"')


class SimArm(Arm):
    """Simulates the arm; its positions are those of the tool and the fingers' opening, in metres.

    hz: set points per second. block_in_state: the state [15] has tool, block, the way between them, finger, commanded
        tool, commanded opening and the finger's speed, all scaled. Otherwise the state [9] has only what an arm
        measures of itself.
    side: where the block lies: both, left or right of the robot, or in a corner. demonstrated: the same, of an episode
        that an operator demonstrates; None: as in all others. has_walls: see `walled`.
    backend, image_size: of its cameras (cameras/gl.py); an empty backend: it has none, and needs no graphics.

    The column `scene` tells the judge and the scripted operator where tool and block truly are, in metres, and how far
    the fingers are open, as they are and as commanded.

    **Assumed:** a real arm's sensors are exact, and its motors never tire. It cannot show a motor that is off, or a
    controller that refuses a set point.

    Raises ConfigError without the package mujoco, and for another side.
    """

    entries: Mapping[str, str] = dict.fromkeys((*AXES, "gripper"), "m")
    is_simulated = True

    def __init__(
        self, address: str, *, hz: float, block_in_state: bool = True, side: str = "both",
        demonstrated: str | None = None, backend: str = "", image_size: int = 128, has_walls: bool = False,
    ) -> None:  # fmt: skip
        demonstrated = demonstrated or side
        for name, place in (("side", side), ("demonstrated", demonstrated)):
            if place not in SIDES:
                raise ConfigError(f"task.env.{name}={place}: say one of {', '.join(SIDES)}")
        self._side, self._demonstrated, self._substeps = SIDES[side], SIDES[demonstrated], round(1 / (hz * PHYSICS))
        self._mujoco = load_mujoco()
        scene = files("robot_infra.sim").joinpath("arm.xml").read_text()
        self._model = self._mujoco.MjModel.from_xml_string(walled(scene) if has_walls else scene)
        self._data = self._mujoco.MjData(self._model)
        self._tip, self._block = self._data.site("tool").xpos, self._data.body("block").xpos  # views
        self._shown = [i for i, name in enumerate(NAMES) if block_in_state or not name.startswith(("block.", "way."))]
        drawn = cameras(self._model, self._data, backend, size=image_size) if backend else {}
        self._cameras = {IMAGES + name: camera for name, camera in drawn.items()}
        images = {name: camera.feature for name, camera in self._cameras.items()}
        state = Feature((len(self._shown),), names=tuple(NAMES[i] for i in self._shown))
        self.observation = {STATE: state, "scene": Feature((8,), "float64"), **images}
        self.scene(0)

    @property
    def pose(self) -> Array:
        """Return [14] float64 for drawing the scene: joint angles, fingers, then the block's place and orientation."""
        return self._data.qpos.copy()

    def scene(self, seed: int) -> None:
        random, data = np.random.default_rng(seed), self._data
        self._mujoco.mj_resetData(self._model, data)
        self._commanded = np.append(HOME + random.uniform(-0.03, 0.03, 3), OPEN)
        data.ctrl[:5], data.ctrl[5] = inverse_kinematics(self._commanded[:3]), OPEN
        data.qpos[:5], data.qpos[5:7] = data.ctrl[:5], OPEN  # arm, fingers, then the block: arm.xml's order
        x, y = random.uniform((0.32, -0.12), (0.48, 0.12))
        place = self._demonstrated if is_demonstrated(seed) else self._side
        data.qpos[7:10] = *place(x, y), 0.02
        self._mujoco.mj_forward(self._model, data)

    def read(self) -> Array:
        return np.append(self._tip, self._data.qpos[5])

    def write(self, positions: Array) -> None:
        self._commanded = positions
        self._data.ctrl[:5], self._data.ctrl[5] = inverse_kinematics(positions[:3]), positions[3]
        self._mujoco.mj_step(self._model, self._data, self._substeps)

    def sense(self) -> Observation:
        finger, speed = self._data.qpos[5], self._data.qvel[5]
        state = np.concatenate([self._tip, self._block, self._block - self._tip, [finger], self._commanded, [speed]])
        images = {name: camera.latest().image for name, camera in self._cameras.items()}
        return {
            STATE: ((state - CENTRE) * SCALE)[self._shown].astype(np.float32),
            "scene": np.concatenate([self._tip, self._block, [finger, self._commanded[3]]]), **images,
        }  # fmt: skip

    def close(self) -> None:
        for camera in self._cameras.values():
            camera.close()


class JointSimArm(SimArm):
    """Is the simulated arm whose positions are its joints' angles (radians), and the opening (metres)."""

    entries: Mapping[str, str] = {**dict.fromkeys(JOINTS, "rad"), "gripper": "m"}

    def read(self) -> Array:
        return self._data.qpos[:6].copy()

    def write(self, positions: Array) -> None:
        self._commanded = np.append(CHAIN.pose(positions[:5])[:3, 3], positions[5])
        self._data.ctrl[:] = positions
        self._mujoco.mj_step(self._model, self._data, self._substeps)


class Scene:
    """Is what a judge and a script see of a guarded SimArm: what it observed last. An action moves it by `stroke`."""

    def __init__(self, robot: GuardedRobot) -> None:
        self._robot, self.stroke = robot, SPEED / robot.fps

    @property
    def steps(self) -> int:
        return self._robot.steps

    @property
    def tool(self) -> Array:
        return self._robot.seen["scene"][:3]

    @property
    def block(self) -> Array:
        return self._robot.seen["scene"][3:6]

    @property
    def holds(self) -> bool:
        return holds(*self._robot.seen["scene"][6:])


def guarded(
    *, fps: float = FPS, by_joints: bool = False, guard: bool = False, waypoints: Mapping[str, Any] | None = None,
    **options: Any,
) -> GuardedRobot:  # fmt: skip
    """Return the simulated arm behind a guard, which is a process of its own or not.

    by_joints: it takes targets of its joints; else steps of its tool. options: of the driver, besides `hz`.
    """
    if not 1 <= fps <= 100:
        raise ConfigError(f"task.env.fps={fps:g}: the simulated arm makes 1 to 100 steps per second")
    hz, stroke, driver = max(SERVO_HZ, fps) if guard else fps, SPEED / fps, JointSimArm if by_joints else SimArm
    grip = {"range": [0.0, OPEN], "speed": OPEN * fps, "jump": OPEN, "tracking": FAR}  # holding must not open it
    if by_joints:
        home = [*inverse_kinematics(HOME), OPEN]
        ends, limit = [[-TURN, TURN]] * 5, {"speed": TURNING, "jump": TURNING / fps, "tracking": FAR}
    else:
        home = [*HOME.tolist(), OPEN]
        ends, limit = WORKSPACE.T.tolist(), {"speed": 1.5 * SPEED, "jump": 1.5 * stroke, "tracking": FAR}
    *names, gripper = driver.entries
    limits = {name: {**limit, "range": bounds} for name, bounds in zip(names, ends, strict=True)}
    return GuardedRobot(
        f"{__name__}.{driver.__name__}", address=f"sim_arm-{secrets.token_hex(8)}", fps=fps, process=guard,
        limits={**limits, gripper: grip}, home=dict(zip(driver.entries, home, strict=True)), servo_hz=hz,
        space=JOINT if by_joints else EE_DELTA, stroke=None if by_joints else [stroke, stroke, stroke, -stroke],
        options={"hz": hz, **options}, waypoints=waypoints,
    )  # fmt: skip


def spaced(arm: Robot, space: str, fps: float) -> SpacedRobot:
    """Return the simulated arm of joints in another action space."""
    grippers = {"gripper": Gripper(OPEN, 0.0)}
    limb = Limb(JOINTS, CHAIN, WORKSPACE, ("gripper", grippers["gripper"]))
    spaces = {
        JOINT_DELTA: JointDelta(arm.action, [*[TURNING / fps] * 5, OPEN], grippers),
        EE_DELTA: EeDelta(arm.action, {"": limb}, stroke=SPEED / fps, most=TURNING / fps),
    }
    return SpacedRobot(arm, spaces, space, grippers)


def holds(finger: float, opening: float) -> bool:
    """Return whether the closing fingers have met something, or each other."""
    return opening < 0.003 and finger < 0.026


def pick(arm: Scene) -> Array:
    """Return the action [x, y, z, gripper] of a pick: above the block, down, close, up.

    It follows from the scene alone, so that a lost block is picked again.
    """
    x, y, z = arm.block - arm.tool
    beside = math.hypot(x, y) > 0.02
    if beside or abs(z) > 0.025:
        return np.array([x, y, z + 0.08 * beside, -arm.stroke]) / arm.stroke
    return np.array([0.0, 0.0, 1.0 if arm.holds else 0.0, 1.0])


def carry(arm: Scene, y: float) -> Array:
    """Return the action that brings the block to `y`, metres, just above the table."""
    if not (arm.holds and near(arm.tool, arm.block, 0.04)):
        return pick(arm)
    x = np.clip(arm.block[0], 0.32, 0.48)  # away from the end of its reach
    return np.array([*([x, y] - arm.block[:2]), 0.04 - arm.tool[2], arm.stroke]) / arm.stroke


def left_to_pick(arm: Scene, height: float = 0.12) -> float:
    """Return the metres from the tool to the block plus those from the block to `height`."""
    return float(np.linalg.norm(arm.block - arm.tool)) + max(0.0, height - float(arm.block[2]))


@dataclass(frozen=True, slots=True)
class Goal:
    """One task of the arm: its text, what the scripted operator does, when it is done, and how many metres are left."""

    text: str
    intent: Callable[[Scene], Array]
    is_done: Callable[[Scene], bool]
    left: Callable[[Scene], float]


def beside(text: str, sign: int) -> Goal:
    """Return the goal that the block lies on one side. sign: 1: on the left of the robot; -1: on its right."""

    def left(arm: Scene) -> float:
        return max(0.0, SIDE - sign * float(arm.block[1]))

    return Goal(
        text, partial(carry, y=sign * (SIDE + 0.02)), lambda arm: left(arm) == 0 and arm.block[2] < 0.08,
        lambda arm: float(np.linalg.norm(arm.block - arm.tool)) + left(arm),
    )  # fmt: skip


GOALS = {
    "pick": (Goal("pick up the block", pick, lambda arm: lifted(arm.tool, arm.block), left_to_pick),),
    "sides": (beside("put the block on the left", 1), beside("put the block on the right", -1)),
}


def out_of_reach(arm: Scene) -> str:
    """Return where the block lies if the arm cannot pick it there; empty: it can."""
    x, y, z = arm.block
    if (arm.block[:2] >= REACH[0]).all() and (arm.block[:2] <= REACH[1]).all() and z < 0.04:  # it may lean
        return ""
    return f"the block lies out of reach, at x {x:.2f} m, y {y:.2f} m, z {z:.2f} m"


def make(
    *, max_steps: int, noise: float, clock: str, fps: float = FPS, operator: str = "scripted",
    verdict_by: str = "judge", takeover_after: int = 12, handback_after: int = 10, cameras: bool | str = False,
    image_size: int = 128, block_in_state: bool = True, guard: bool = False, side: str = "both",
    demonstrated: str | None = None, space: str = EE_DELTA, cost: float = 0.0,
    devices: Mapping[str, Any] | None = None, goal: str = "pick", waypoints: Mapping[str, Any] | None = None,
) -> RobotEnv:  # fmt: skip
    """Make a task of the arm as an Env.

    goal: `pick`, or `sides`: two tasks, to put the block on the left and on the right, within walls.
        Its scenes begin on the right.
    waypoints: see GuardedRobot; None: those of the goal (WAYPOINTS) in the space of the tool, else none.
    noise: standard deviation of the scripted operator's actions. verdict_by: `judge` or `operator`
    (teleop/verdicts.py). cameras: true, false or auto (cameras/gl.py). guard: its guard is a process of its own, as a
    real arm's; only on the real clock. side, demonstrated: see SimArm. space: what an action means (spaces.py).
    cost: what each metre that is left takes of a step's reward.
    Raises ConfigError for an unknown goal, and where neither state nor camera would show the block.
    """
    goals = GOALS[check_choice(goal, GOALS, "goal", "task.env.goal")]
    turns = Turns(tuple(each.text for each in goals))
    side, demonstrated = ("right", None) if goal == "sides" else (side, demonstrated)
    backend = gl.choose_backend(cameras, "" if block_in_state else "block")
    if guard:
        check_clock(clock)
    robot = guarded(
        fps=fps, by_joints=space != EE_DELTA, guard=guard, block_in_state=block_in_state,
        has_walls=goal == "sides", side=side, demonstrated=demonstrated, backend=backend, image_size=image_size,
        waypoints=WAYPOINTS[goal] if waypoints is None and space == EE_DELTA else waypoints,
    )  # fmt: skip
    arm, owner = Scene(robot), robot if space == EE_DELTA else spaced(robot, space, fps)
    scripted = Rescuer(
        lambda: goals[turns.now].intent(arm), lambda: goals[turns.now].left(arm), noise=noise, margin=arm.stroke / 4,
        takeover_after=takeover_after, handback_after=handback_after,
    )  # fmt: skip
    hand = owner.speaks(EE_DELTA) if isinstance(owner, SpacedRobot) else owner
    teleop, hands = make_devices(operator, scripted, hand, clock=clock, devices=devices)
    judge, person = choose_judge(
        verdict_by, lambda: goals[turns.now].is_done(arm), lambda: arm.steps, max_steps, hands,
        before=[lambda: arm.holds and near(arm.tool, arm.block, 0.04)],
    )  # fmt: skip
    if cost:
        judge = DistanceCost(judge, cost, lambda _: goals[turns.now].left(arm))
    return RobotEnv(
        owner, judge=judge, task=turns, fps=fps, max_steps=max_steps, clock=clock, cameras=robot.cameras,
        teleop=teleop, operator=person, trouble=lambda: out_of_reach(arm),
    )  # fmt: skip
