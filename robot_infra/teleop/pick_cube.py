"""Scripts the operator of gym-hil's cube: it sees the true scene, demonstrates, and helps a policy that is stuck."""

from functools import partial
from typing import Any

import numpy as np
from serl_client.spec import Array

from robot_infra.teleop.scripted import Rescuer

STEP = 0.025  # metres that the hand moves under an action of 1
HOVER = 0.08  # metres above the cube, up to which the hand comes before it goes down
BESIDE, ABOVE = 0.02, 0.015  # metres beside and above the cube, within which the hand goes down, and closes
CLOSED = 0.3  # radians of the finger's joint, which stands at 0.45 around the cube
LIFTED = 0.1  # metres, which is success
OPEN, CLOSE = -1.0, 1.0


class Picker(Rescuer):
    """Drives gym_hil's task PandaPickCube, whose actions [4] are x, y, z in [-1, 1] and the gripper in [0, 2].

    noise: standard deviation of the noise on each entry. takeover_after, handback_after: as in Rescuer.
    """

    def __init__(self, task: Any, *, noise: float, takeover_after: int, handback_after: int) -> None:
        scene = task.unwrapped
        super().__init__(
            partial(pick, scene), partial(remaining, scene), noise=noise, margin=STEP / 4,
            takeover_after=takeover_after, handback_after=handback_after,
        )  # fmt: skip

    def read(self, hold: Array) -> Array | None:
        action = super().read(hold)
        return None if action is None else action + np.array([0, 0, 0, 1], np.float32)


def pick(scene: Any) -> Array:
    """Return the next action [4] in [-1, 1] for the scene as it is: above the cube, down, close, up."""
    to_cube = _to_cube(scene)
    if np.hypot(*to_cube[:2]) > BESIDE:
        return np.array([*to_cube / STEP + [0, 0, HOVER / STEP], OPEN])
    if to_cube[2] < -ABOVE:
        return np.array([*to_cube / STEP, OPEN])
    return np.array([0, 0, float(scene.data.joint("right_driver_joint").qpos[0] > CLOSED), CLOSE])


def remaining(scene: Any) -> float:
    """Return how much of the task is left, in metres: from hand to cube, and up."""
    return float(np.linalg.norm(_to_cube(scene))) + max(0.0, LIFTED - float(scene.data.sensor("block_pos").data[2]))


def _to_cube(scene: Any) -> Array:
    """Return the way [3] from the hand to the cube, in metres."""
    return scene.data.sensor("block_pos").data - scene.data.sensor("2f85/pinch_pos").data
