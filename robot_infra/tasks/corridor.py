"""Simulates a task that needs memory: only an episode's first observation tells where the goal is."""

from collections.abc import Mapping

import numpy as np
from serl_client.env import Observation
from serl_client.spec import Array, Feature

from robot_infra.env import RobotEnv
from robot_infra.interfaces import Reading, Verdict
from robot_infra.judges import Function
from robot_infra.safety import SafeRobot
from robot_infra.tasks.fake import FakeRobot

FPS = 5.0  # steps per second
COST = 0.5  # what each metre to the goal takes of a step's reward
END = 0.5  # metres from the middle: there the episode ends
START = 0.3  # metres from the middle, within which it begins


class CorridorRobot(FakeRobot):
    """Is the fake robot on the line from -END to END, with a goal at one end, -1 or 1, drawn at each start.

    `observation.state` holds x, uniform within START at first, and the goal, which is 0 from the first step on. In that
    step the point stands still. So nothing but memory tells the goal later, and who has none finds it in half of the
    episodes.
    """

    observation: Mapping[str, Feature] = {"observation.state": Feature((2,), names=("point.x", "goal"))}
    action = Feature((1,), names=("x",), low=np.array(-1), high=np.array(1))

    def home(self, seed: int) -> None:
        super().home(seed)
        random = np.random.default_rng((seed, 2))
        self.position = np.array([random.uniform(-START, START), 0.0])
        self.commanded, self.side = self.position, random.choice([-1, 1])

    def observe(self) -> Reading:
        reading = super().observe()
        state = np.array([self.position[0], 0 if self.steps else self.side], np.float32)
        return Reading({"observation.state": state}, reading.time)

    def command(self, action: Array) -> Array:
        sent = action if self.steps else self.hold_action()
        super().command(np.array([sent[0], 0.0]))
        return sent

    def hold_action(self) -> Array:
        return np.zeros(1, np.float32)

    def judged(self, observation: Observation) -> Verdict:
        """End the episode at either end. Give 1 at the goal, and take COST for each metre to it."""
        x, goal = self.position[0], self.side * END
        success = bool(x * self.side >= END)
        return Verdict(float(success - COST * abs(goal - x)), bool(abs(x) >= END), success)


def make(*, max_steps: int, clock: str) -> RobotEnv:
    """Make the task as an Env. max_steps: of an episode."""
    robot = CorridorRobot(fps=FPS)
    return RobotEnv(
        SafeRobot(robot), judge=Function(robot.judged), task="go to the goal", fps=FPS, max_steps=max_steps, clock=clock
    )
