"""Simulates a puck that slides on ice: one picture shows no speed, so a policy needs several past images."""

from collections.abc import Mapping

import numpy as np
from serl_client.env import Observation
from serl_client.spec import Array, Feature

from robot_infra.alignment import IMAGES
from robot_infra.env import RobotEnv
from robot_infra.interfaces import Verdict
from robot_infra.judges import Function
from robot_infra.tasks.simulated import Simulated

FPS = 10.0  # steps per second
PUSH = 3.0  # metres per second squared, under an action of 1
START, SPEED = 0.7, 1.0  # a start lies within so many metres of the middle, and is as fast as so many metres per second
SIZE = 32  # pixels of a picture, which shows [-1, 1] metres, height and width
BLUR = 0.3  # metres, standard deviation of the light that shows it: the camera is out of focus
CAMERA = "top"


class Puck(Simulated):
    """A puck on a table without friction; metres, within [-1, 1], with cushions that take its speed.

    An action is the push along x and y, from -1 to 1. Nothing but the picture is observed.

    **Assumed:** there is no friction, and a push comes at once. It cannot show how an arm would touch a puck.
    """

    space = "push"
    observation: Mapping[str, Feature] = {IMAGES + CAMERA: Feature((SIZE, SIZE, 3), "uint8")}
    action = Feature((2,), names=("x", "y"), low=np.array(-1), high=np.array(1))

    def __init__(self) -> None:
        self._middle = (np.arange(SIZE) + 0.5) / SIZE * 2 - 1  # of each pixel, metres
        self.home(0)

    def home(self, seed: int) -> None:
        random = np.random.default_rng(seed)
        self.position, self.velocity = random.uniform(-START, START, 2), random.uniform(-SPEED, SPEED, 2)

    def sense(self) -> Observation:
        return {IMAGES + CAMERA: self.picture()}

    def picture(self) -> Array:
        """Return the puck, white on black and blurred."""
        across, down = np.exp(-0.5 * ((self._middle - self.position[:, None]) / BLUR) ** 2)  # [SIZE] each
        light = (255 * down[:, None] * across).astype(np.uint8)
        return np.repeat(light[..., None], 3, -1)

    def act(self, action: Array) -> None:
        self.velocity = self.velocity + PUSH / FPS * action
        moved = self.position + self.velocity / FPS
        self.position = np.clip(moved, -1, 1)
        self.velocity = np.where(moved == self.position, self.velocity, 0)

    def judged(self, observation: Observation) -> Verdict:
        """Take the distance to the middle, in metres, of the reward. Success is to lie near it."""
        distance, speed = np.linalg.norm(self.position), np.linalg.norm(self.velocity)
        return Verdict(-float(distance), False, bool(distance < 0.2 and speed < 0.4))


def make(*, max_steps: int, clock: str) -> RobotEnv:
    """Make the task as an Env: keep the puck near the middle. max_steps: of an episode."""
    puck = Puck()
    return RobotEnv(
        puck, judge=Function(puck.judged), task="stop in the middle", fps=FPS, max_steps=max_steps, clock=clock
    )
