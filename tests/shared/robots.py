"""Robots for tests: an env over the fake robot, its cameras and clock, episodes played to their end."""

import time

import numpy as np
from hydra.utils import instantiate
from omegaconf import OmegaConf
from serl_client import clock
from serl_client.spec import Feature

from robot_infra.env import RobotEnv
from robot_infra.guard.robot import GuardedRobot
from robot_infra.interfaces import Frame, Verdict
from robot_infra.interfaces import Hand as Said
from robot_infra.judges import Function
from robot_infra.tasks.fake import guarded

from .clock import Clock
from .common import TASKS

RIGHT, LEFT = np.array([1, 0], np.float32), np.array([-1, 0], np.float32)

never = Function(lambda observation: Verdict(0.0, False, False))


def point(kind=GuardedRobot, fps=10, **options):
    """The fake arm behind a guard in this process; its driver is `point().guard.arm`."""
    return guarded(robot=kind, fps=fps, **options)


def build(robot=None, **changes):
    """An env of the fake arm whose episodes end by nothing but their time limit."""
    arguments = {"judge": never, "task": "test", "fps": 10, "max_steps": 1000, "clock": "simulated"}
    arguments |= changes
    return RobotEnv(robot or point(fps=arguments["fps"]), **arguments)


def from_yaml(name, changes=None, **options):
    """The env of a task's yaml, with `changes` to the yaml."""
    task = OmegaConf.merge(OmegaConf.load(TASKS / f"{name}.yaml"), changes or {})
    config = OmegaConf.create({"task": OmegaConf.merge(OmegaConf.load(TASKS.parent / "base.yaml").task, task)})
    env = instantiate(config.task.env)(**options)
    assert env.has_operator is config.task.has_operator
    return env


def check_rows(env, *observations):
    """Each of them has what the Spec says, and nothing else."""
    for observation in observations:
        assert sorted(observation) == sorted(env.spec.observation)
        for name, feature in env.spec.observation.items():
            feature.check(name, observation[name])


def play(env, seed, action=None, **reset):
    """The steps of one episode with the same action in each row."""
    env.reset(seed, **reset)
    steps = [env.step(action)]
    while not (steps[-1].terminated or steps[-1].truncated):
        steps.append(env.step(action))
    return steps


class TimedRobot(GuardedRobot):
    """Remembers when its commands came, and when it was observed."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.sent, self.looked = [], []

    def command(self, action):
        self.sent.append(clock.monotonic())
        return super().command(action)

    def observe(self):
        self.looked.append(clock.monotonic())
        return super().observe()


class FakeCamera:
    """Each image holds its number; it was taken so many seconds ago as `delays` say, and at `taken`."""

    feature, trouble, closed = Feature((4, 6, 3), "uint8"), "", False

    def __init__(self, clock=None, delays=()):
        self._clock, self._delays, self.taken = clock or Clock(), delays, []

    def latest(self):
        number = len(self.taken)
        self.taken.append(self._clock.monotonic() - (self._delays[number] if self._delays else 0.0))
        return Frame(np.full((4, 6, 3), number, np.uint8), self.taken[-1])

    def close(self):
        self.closed = True


class TimedCamera:
    """Gives an image `rate` times a second, `age` seconds old, after `waits` seconds; it differed last at `changed`."""

    feature = Feature((4, 6, 3), "uint8")

    def __init__(self, rate=1000.0, age=0.0, shape=(4, 6, 3), pixels=(0, 255), waits=0.0, changed=None):
        self.rate, self.age, self.waits, self.changed = rate, age, waits, changed
        self.image = np.resize(np.array(pixels, np.uint8), shape)

    def latest(self):
        time.sleep(self.waits)
        return Frame(self.image, int(time.monotonic() * self.rate) / self.rate - self.age, self.changed)

    def close(self):
        pass


class Hand:
    """An operator who touches the device in some rows of each episode, and pushes it to the left."""

    space, closed = "ee_delta", False

    def __init__(self, rows=()):
        self.rows, self.row, self.reads, self.demonstrates = rows, -1, 0, []

    def reset(self, seed, *, demonstrate=True):
        self.row = -1
        self.demonstrates.append(demonstrate)

    def read(self, hold):
        self.row += 1
        self.reads += 1
        return LEFT if self.row in self.rows else None

    def close(self):
        self.closed = True


class Scripted:
    """A device that gives these hands, one for each reading, and then nothing."""

    asks, legend = True, {}

    def __init__(self, *hands, moves=frozenset(("x", "y", "z", "gripper"))):
        self.hands, self.moves, self.closed = list(hands), moves, False

    def read(self):
        return self.hands.pop(0) if self.hands else Said()

    def forget(self, *, hands_back):
        pass

    def hand_over(self, *, to_person):
        pass

    def close(self):
        self.closed = True
