"""Operators that are programs: they see the true scene and demonstrate a task, more or less precisely."""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from serl_client.spec import Array

if TYPE_CHECKING:
    from robot_infra.robots.fake import FakeRobot
    from robot_infra.robots.sim_arm import SimArm


class Scripted:
    """A Teleop that does what `intent` wants of the scene as it is; actions in [-1, 1].

    noise is the standard deviation of what is added to each entry: it spreads demonstrations around the best way.
    """

    space = "ee_delta"

    def __init__(self, intent: Callable[[], Array], *, noise: float) -> None:
        self._intent, self._noise = intent, noise
        self.reset(0)

    def reset(self, seed: int) -> None:
        self._random = np.random.default_rng((seed, 1))  # another stream than the one that laid out the scene

    def read(self) -> Array:
        intent = np.clip(self._intent(), -1, 1)  # [A]
        return np.clip(intent + self._random.normal(0, self._noise, intent.shape), -1, 1).astype(np.float32)

    def close(self) -> None:
        pass


def reach(robot: "FakeRobot") -> Array:
    """Straight to the goal: [x, y], more than 1 when it is far."""
    return (robot.goal - robot.position) / robot.stroke


def pick(arm: "SimArm") -> Array:
    """Above the block, down, close, up: [x, y, z, gripper]; from the scene alone, so it also recovers a lost block."""
    x, y, z = arm.block - arm.tool
    beside = math.hypot(x, y) > 0.02
    if beside or abs(z) > 0.025:
        return np.array([x, y, z + 0.08 * beside, -arm.stroke]) / arm.stroke
    return np.array([0.0, 0.0, 1.0 if arm.holds else 0.0, 1.0])
