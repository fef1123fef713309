"""Simulates a point behind a wall with several gaps: demonstrations are multimodal, so that their mean is wrong."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from serl_client.env import Observation
from serl_client.errors import ConfigError
from serl_client.spec import Array, Feature

from robot_infra.env import RobotEnv
from robot_infra.interfaces import Verdict
from robot_infra.judges import Function, near
from robot_infra.tasks.fake import FPS, FakeArm, Point, guarded
from robot_infra.teleop.scripted import Rescuer

START, GOAL = np.array([-0.5, 0.0]), np.array([0.5, 0.0])
SPREAD = 0.02  # metres: starts differ by up to this much
HALF_WIDTH = 0.12  # of a gap, metres
TAKEOVER_AFTER = 12  # steps without progress, after which the script takes over
HANDBACK_AFTER = 10  # steps with progress, after which it hands back to the policy


class WallArm(FakeArm):
    """Is the fake arm with a wall at x = 0. Between start and goal lie `gaps` gaps, evenly along y in [-1, 1].

    Nothing that a policy observes tells the gaps apart. The column `wall` tells the judge and the script the y of the
    gap that a demonstration takes, drawn at each start, and 1 once the point has touched the wall.

    **Assumed:** a wall stops the point at once, and nothing breaks. It cannot show the force of a collision.
    """

    observation: Mapping[str, Feature] = {**FakeArm.observation, "wall": Feature((2,))}

    def __init__(self, address: str, *, gaps: int, **options: Any) -> None:
        if gaps < 1:
            raise ConfigError(f"task.env.gaps={gaps}: a wall needs at least 1 gap")
        self.gaps = (2 * np.arange(gaps) + 1) / gaps - 1  # y of their centres
        super().__init__(address, **options)

    def scene(self, seed: int) -> None:
        random = np.random.default_rng((seed, 2))
        self.position, self.goal = START + random.uniform(-SPREAD, SPREAD, 2), GOAL
        self.gap, self.has_crashed = random.choice(self.gaps), False

    def write(self, positions: Array) -> None:
        before = self.position
        super().write(positions)
        if before[0] < 0 <= self.position[0]:
            share = before[0] / (before[0] - self.position[0])
            y = before[1] + share * (self.position[1] - before[1])
            if np.abs(self.gaps - y).min() > HALF_WIDTH:
                self.has_crashed, self.position = True, np.array([0.0, y])

    def sense(self) -> Observation:
        return {**super().sense(), "wall": np.array([self.gap, self.has_crashed], np.float32)}


class SeenWall(Point):
    """Is what the judge and the script see: the point, and the wall."""

    def to_go(self) -> Array:
        """Return the vector [x, y] in metres to the gap's centre, and behind the wall to the goal."""
        target = np.array([0.02, self._robot.seen["wall"][0]]) if self.position[0] < 0 else self.goal
        return target - self.position

    def judged(self, observation: Observation) -> Verdict:
        """Give 1 at the goal. Touching the wall ends the episode as a failure."""
        success = near(self.position, self.goal, 0.05)
        return Verdict(float(success), success or bool(self._robot.seen["wall"][1]), success)


def make(*, gaps: int, max_steps: int, noise: float, clock: str) -> RobotEnv:
    """Make the task as an Env, with a scripted operator.

    noise: standard deviation of the scripted operator's actions.
    """
    robot = guarded(WallArm, fps=FPS, gaps=gaps)
    point = SeenWall(robot)

    def intent() -> Array:
        action = point.to_go() / point.stroke
        return action / max(1.0, float(np.abs(action).max()))  # straight, at full speed

    operator = Rescuer(
        intent, lambda: float(np.linalg.norm(point.to_go())), noise=noise, margin=point.stroke / 4,
        takeover_after=TAKEOVER_AFTER, handback_after=HANDBACK_AFTER,
    )  # fmt: skip
    return RobotEnv(
        robot, judge=Function(point.judged), task="pass the wall", fps=FPS, max_steps=max_steps, clock=clock,
        teleop=operator,
    )  # fmt: skip
