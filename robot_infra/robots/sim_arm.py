"""The robot that everybody has: a light MuJoCo arm with a gripper, a table and a block to pick up."""

import math
from collections.abc import Mapping
from functools import partial
from importlib.resources import files
from typing import Any

import numpy as np
from serl_client.errors import ConfigError
from serl_client.runner import Observation
from serl_client.spec import Array, Feature

from robot_infra.env import RobotEnv
from robot_infra.judges import Predicate, lifted
from robot_infra.safety import SafeRobot
from robot_infra.teleop.keyboard import chosen
from robot_infra.teleop.scripted import Rescuer, left_to_pick, pick

FPS = 10.0
SUBSTEPS = 25  # physics steps of 4 ms in one tick
SHOULDER, UPPER_ARM, FOREARM, HAND = 0.19, 0.32, 0.30, 0.175  # metres: height of the joint, lengths up to the tool
WORKSPACE = np.array([[0.25, -0.2, 0.025], [0.55, 0.2, 0.35]])  # metres, for the tool; fingers end 2 cm lower
HOME = np.array([0.4, 0.0, 0.2])
OPEN = 0.045  # metres between a finger and the middle

AXES = ("x", "y", "z")
NAMES = (
    *(f"{point}.{axis}" for point in ("tool", "block", "way") for axis in AXES), "finger",
    *(f"target.{axis}" for axis in AXES), "opening", "finger_speed",
)  # fmt: skip
CENTRE = np.array([0.4, 0, 0.15] * 2 + [0, 0, 0, 0.025, 0.4, 0, 0.15, 0.025, 0])
SCALE = np.array([5.0] * 6 + [10.0] * 3 + [40.0] + [5.0] * 3 + [40.0, 5.0])  # brings the state near [-1, 1]


def inverse_kinematics(point: Array) -> tuple[float, float, float, float, float]:
    """The joint angles (radians) that bring the tool to `point` [3] (metres) with the fingers straight down.

    The hand points down, so shoulder and forearm reach for its root in a plane: the law of cosines gives the elbow.
    """
    x, y, z = point
    yaw, distance, height = math.atan2(y, x), math.hypot(x, y), z + HAND - SHOULDER
    cosine = (distance**2 + height**2 - UPPER_ARM**2 - FOREARM**2) / (2 * UPPER_ARM * FOREARM)
    elbow = math.acos(min(max(cosine, -1.0), 1.0))
    shoulder = math.atan2(distance, height)
    shoulder -= math.atan2(FOREARM * math.sin(elbow), UPPER_ARM + FOREARM * math.cos(elbow))
    return yaw, shoulder, elbow, math.pi - shoulder - elbow, yaw


class SimArm:
    """A Robot whose action [dx, dy, dz, gripper] in [-1, 1] moves its commanded tool point and closes its fingers.

    The state [15] is scaled: tool, block and way between them, finger, commanded tool, commanded opening, finger's
    speed. `tool` and `block` [3] are the true points now, in metres. It needs no graphics. Raises ConfigError
    without the package mujoco.
    """

    space = "ee_delta"
    stroke = 0.03  # metres that an action of 1 moves the commanded tool or finger
    observation: Mapping[str, Feature] = {"observation.state": Feature((15,), names=NAMES)}
    action = Feature((4,), names=(*AXES, "gripper"), low=np.array(-1), high=np.array(1))

    def __init__(self) -> None:
        try:
            import mujoco
        except ModuleNotFoundError:
            raise ConfigError("mujoco is missing: run `uv sync --inexact --extra sim`") from None
        self._mujoco: Any = mujoco
        self._model = self._mujoco.MjModel.from_xml_string(files("robot_infra.sim").joinpath("arm.xml").read_text())
        self._data = self._mujoco.MjData(self._model)
        self.tool, self.block = self._data.site("tool").xpos, self._data.body("block").xpos  # views
        self.home(0)

    @property
    def holds(self) -> bool:
        """Whether the closing fingers have met something, or each other."""
        return self._opening < 0.003 and self._data.qpos[5] < 0.026

    def home(self, seed: int) -> None:
        random, data = np.random.default_rng(seed), self._data
        self._mujoco.mj_resetData(self._model, data)
        self._target, self._opening = HOME + random.uniform(-0.03, 0.03, 3), OPEN
        self._steer()
        data.qpos[:5], data.qpos[5:7] = data.ctrl[:5], OPEN  # arm, fingers, then the block: arm.xml's order
        data.qpos[7:10] = *random.uniform((0.32, -0.12), (0.48, 0.12)), 0.02
        self._mujoco.mj_forward(self._model, data)

    def observe(self) -> Observation:
        finger, speed = self._data.qpos[5], self._data.qvel[5]
        state = np.concatenate(
            [self.tool, self.block, self.block - self.tool, [finger], self._target, [self._opening, speed]]
        )
        return {"observation.state": ((state - CENTRE) * SCALE).astype(np.float32)}

    def command(self, action: Array) -> Array:
        self._target = np.clip(self._target + self.stroke * action[:3], *WORKSPACE)
        self._opening = min(max(self._opening - self.stroke * float(action[3]), 0.0), OPEN)
        self._steer()
        self._mujoco.mj_step(self._model, self._data, SUBSTEPS)
        return action

    def hold_action(self) -> Array:
        return np.zeros(4, np.float32)

    def stop(self) -> None:
        pass  # time stands still between two commands

    def close(self) -> None:
        pass

    def _steer(self) -> None:
        self._data.ctrl[:5], self._data.ctrl[5] = inverse_kinematics(self._target), self._opening


def make(
    *, max_steps: int, noise: float, clock: str, operator: str = "scripted", patience: int = 12, hold: int = 10
) -> RobotEnv:
    """Picking up the block as an Env; the scripted operator's actions carry Gaussian noise, and see Rescuer."""
    arm = SimArm()
    scripted = Rescuer(
        partial(pick, arm), partial(left_to_pick, arm), noise=noise, margin=arm.stroke / 4, patience=patience, hold=hold
    )
    teleop, keyboard = chosen(operator, scripted, arm.action, clock=clock)
    return RobotEnv(
        SafeRobot(arm),
        judge=Predicate(lambda: lifted(arm.tool, arm.block)),
        task="pick up the block",
        fps=FPS,
        max_steps=max_steps,
        clock=clock,
        teleop=teleop,
        operator=keyboard,
    )
