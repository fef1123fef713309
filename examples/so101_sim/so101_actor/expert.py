"""Lets the script of lerobot-env-so101 be the operator of its task: it demonstrates, and helps a stuck policy."""

import importlib
from typing import Any

import numpy as np
from serl_client.spec import Array

from robot_infra.teleop.scripted import Mover

MARGIN = 0.002  # metres by which a step makes progress
HELD = 0.01  # metres above the table from which the block is in the hand


class Expert(Mover):
    """Drives SO101PickPlace with the script, which goes from phase to phase, and never back. So it begins anew with
    each takeover, and where it is done without success: above the block, which may have moved, or, where that is in the
    air, by lifting it further.

    What is left of the task is the way from the hand to the block, and from there to the goal.
    task: of gymnasium; the gripper's entry of its actions is from 0, closed, to 1. options: of Mover.
    """

    def __init__(self, task: Any, **options: Any) -> None:
        self._scene = task.unwrapped
        scripts: Any = importlib.import_module("lerobot_env_so101.scripted.pick_place")
        self._script = scripts.PickPlaceController()
        super().__init__(self._move, self._left, margin=MARGIN, **options)

    def reset(self, seed: int, *, demonstrate: bool = True) -> None:
        super().reset(seed, demonstrate=demonstrate)
        self._begin()

    def read(self, hold: Array) -> Array | None:
        action = super().read(hold)
        if action is None:
            self._begin()
        return action

    def _begin(self) -> None:
        self._script.reset()
        self._script._table_z = self._scene._block_z  # else the block's height of now, which may be in the air
        if self._block[2] > self._scene._block_z + HELD:
            self._script._phase = type(self._script.phase).LIFT

    def _move(self) -> Array:
        if self._script.done:
            self._begin()
        return self._script.act(self._scene.ik_point_pos, self._block, self._scene.goal_pos)

    def _left(self) -> float:
        hand, goal = self._scene.ik_point_pos, self._scene.goal_pos
        return float(np.linalg.norm(self._block - hand) + np.linalg.norm(goal - self._block))

    @property
    def _block(self) -> Array:
        return self._scene.data.sensor("block_pos").data
