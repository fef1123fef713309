"""Computes reward and success of each step (reward functions), with a penalty for gripper use.

Without a judge, an operator says it.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import takewhile

import numpy as np
from serl_client.env import Observation
from serl_client.spec import Array

from robot_infra.interfaces import Judge, Verdict


class Predicate(Judge):
    """Gives reward 1 and ends the episode as soon as a predicate on the true scene holds; else reward 0.

    before: return whether the scene shows the stages before success, in their order.
    """

    def __init__(self, holds: Callable[[], bool], before: Sequence[Callable[[], bool]] = ()) -> None:
        self._holds, self._before = holds, before

    def __call__(self, observation: Observation) -> Verdict:
        success = self._holds()
        stage = sum(1 for _ in takewhile(lambda shows: shows(), self._before))
        return Verdict(float(success), success, success, len(self._before) + 1 if success else stage)


class Function(Judge):
    """Judges each observation by a function alone."""

    def __init__(self, judge: Callable[[Observation], Verdict]) -> None:
        self._judge = judge

    def __call__(self, observation: Observation) -> Verdict:
        return self._judge(observation)


class Wrapped(Judge):
    """Is the base of judges that change the verdicts of another one, `judge`."""

    def __init__(self, judge: Judge) -> None:
        self.judge = judge

    def reset(self) -> None:
        self.judge.reset()

    def close(self) -> None:
        self.judge.close()


class DistanceCost(Wrapped):
    """Takes `cost` of another judge's rewards for every metre that `remaining` says is left."""

    def __init__(self, judge: Judge, cost: float, remaining: Callable[[Observation], float]) -> None:
        super().__init__(judge)
        self._cost, self._remaining = cost, remaining

    def __call__(self, observation: Observation) -> Verdict:
        verdict = self.judge(observation)
        return replace(verdict, reward=verdict.reward - self._cost * self._remaining(observation))


class TogglePenalty(Wrapped):
    """Takes `penalty` from another judge's reward for each gripper that a step toggled; `toggled` says how many did."""

    def __init__(self, judge: Judge, toggled: Callable[[], int], penalty: float) -> None:
        super().__init__(judge)
        self._toggled, self._penalty = toggled, penalty

    def __call__(self, observation: Observation) -> Verdict:
        verdict = self.judge(observation)
        return replace(verdict, reward=verdict.reward - self._penalty * self._toggled())


class Unjudged(Judge):
    """Leaves reward, success and the end to the operator."""

    def __call__(self, observation: Observation) -> Verdict:
        return Verdict(reward=0.0, terminated=False, success=None)


def near(first: Array, second: Array, distance: float) -> bool:
    """Return whether two points lie closer together than `distance` (all in metres)."""
    return float(np.linalg.norm(first - second)) < distance


def lifted(tool: Array, block: Array, height: float = 0.12) -> bool:
    """Return whether the block is above `height` and at the tool, so held and not thrown; points [3] in metres."""
    return bool(block[2] > height) and near(tool, block, 0.04)
