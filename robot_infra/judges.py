"""Judges give the reward of a step, and say when the task is done. Without one, an operator says it."""

from collections.abc import Callable

import numpy as np
from serl_client.env import Observation
from serl_client.spec import Array

from robot_infra.interfaces import Verdict


class Predicate:
    """Gives reward 1 and ends the episode as soon as a predicate on the true scene holds; else reward 0."""

    def __init__(self, holds: Callable[[], bool]) -> None:
        self._holds = holds

    def __call__(self, observation: Observation) -> Verdict:
        success = self._holds()
        return Verdict(float(success), success, success)


def unjudged(observation: Observation) -> Verdict:
    """Leave reward, success and the end to the operator."""
    return Verdict(reward=0.0, terminated=False, success=None)


def near(first: Array, second: Array, distance: float) -> bool:
    """Return whether two points lie closer together than `distance` (all in metres)."""
    return float(np.linalg.norm(first - second)) < distance


def lifted(tool: Array, block: Array, height: float = 0.12) -> bool:
    """Return whether the block is above `height` and at the tool, so held and not thrown; points [3] in metres."""
    return bool(block[2] > height) and near(tool, block, 0.04)
