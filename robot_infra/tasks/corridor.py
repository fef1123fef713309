"""Simulates a task that needs memory: only an episode's first observation tells where the goal is."""

from collections.abc import Mapping
from functools import partial

import numpy as np
from serl_client.env import Observation
from serl_client.spec import Array, Feature

from robot_infra.env import RobotEnv
from robot_infra.guard.robot import STATE, GuardedRobot
from robot_infra.interfaces import Verdict
from robot_infra.judges import Function
from robot_infra.tasks.fake import FakeArm, guarded

FPS = 5.0  # steps per second
COST = 0.5  # what each metre to the goal takes of a step's reward
END = 0.5  # metres from the middle: there the episode ends
START = 0.3  # metres from the middle, within which it begins


class CorridorArm(FakeArm):
    """Is the fake arm on the line from -END to END, with a goal at one end, -1 or 1, drawn at each start.

    `observation.state` holds x, uniform within START at first, and the goal, which is 0 from the first step on. So
    nothing but memory tells the goal later, and who has none finds it in half of the episodes. The column `side` tells
    the judge.

    **Assumed:** as the fake arm. It cannot show two joints that depend on each other.
    """

    entries: Mapping[str, str] = {"x": "m"}
    observation: Mapping[str, Feature] = {STATE: Feature((2,), names=("point.x", "goal")), "side": Feature((1,))}

    def scene(self, seed: int) -> None:
        random = np.random.default_rng((seed, 2))
        self.position = random.uniform(-START, START, 1)
        self.goal, self._shows = random.choice([-1.0, 1.0], 1), 1.0

    def write(self, positions: Array) -> None:
        super().write(positions)
        self._shows = 0.0

    def sense(self) -> Observation:
        state = np.concatenate([self.position, self._shows * self.goal])
        return {STATE: state.astype(np.float32), "side": self.goal.astype(np.float32)}


class CorridorRobot(GuardedRobot):
    """Stands still in the first step, so that the way does not tell later what the first observation has told."""

    def command(self, action: Array) -> Array:
        return super().command(action if self.steps else np.zeros_like(action))


def judged(robot: GuardedRobot, observation: Observation) -> Verdict:
    """End the episode at either end. Give 1 at the goal, and take COST for each metre to it."""
    x, side = float(observation[STATE][0]), float(robot.seen["side"][0])
    success = x * side >= END
    return Verdict(success - COST * abs(side * END - x), abs(x) >= END, success)


def make(*, max_steps: int, clock: str) -> RobotEnv:
    """Make the task as an Env. max_steps: of an episode."""
    robot = guarded(CorridorArm, CorridorRobot, fps=FPS)
    judge = Function(partial(judged, robot))
    return RobotEnv(robot, judge=judge, task="go to the goal", fps=FPS, max_steps=max_steps, clock=clock)
