"""RobotEnv makes a robot, its cameras, its judge and its teleoperation one Env that moves at a fixed rate."""

import time
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Self

import numpy as np
from serl_client.env import Observation, Step
from serl_client.errors import ConfigError
from serl_client.spec import Array, Feature, Spec

from robot_infra.interfaces import Camera, Judge, Operator, Robot, Teleop
from robot_infra.intervention import POLICY_ACTION, Intervention, policy_action
from robot_infra.safety import check_guarded

CLOCKS = ("real", "simulated")
IMAGES, AGE = "observation.images.", "age."  # and a camera's name


class RobotEnv:
    """Implements serl_client.env.Env over a robot; a context manager, so that every way out stops the robot.

    judge: gives reward and success; only it terminates an episode. Its success counts once the episode has ended.
    task: in words. fps: steps per second. max_steps: an episode of so many steps is truncated.
    clock: "real": a step lasts 1/fps seconds (see `_wait`). "simulated": nothing waits.
    teleop: the device of the human; None: nobody can take over.
    operator: the person at the keys, if the teleop is their keyboard too; it is closed with the env.

    Each row also records `age.<camera>`, the age of each image when its observation was complete (seconds). With a
    teleop it records `policy_action` (intervention.py). Raises ConfigError for an unknown clock, and for a teleop
    whose action space differs from the robot's.
    """

    def __init__(
        self, robot: Robot, *, judge: Judge, task: str, fps: float, max_steps: int, clock: str = "real",
        cameras: Mapping[str, Camera] | None = None, teleop: Teleop | None = None, operator: Operator | None = None,
    ) -> None:  # fmt: skip
        if clock not in CLOCKS:
            raise ConfigError(f"clock {clock!r} is unknown; use one of {', '.join(CLOCKS)}")
        check_guarded(robot, clock, fps)
        if teleop is not None and teleop.space != robot.space:
            raise ConfigError(f"the teleop gives {teleop.space} actions, the robot takes {robot.space}")
        self.robot, self.judge, self.teleop, self.operator = robot, judge, teleop, operator
        self.cameras = {IMAGES + name: camera for name, camera in (cameras or {}).items()}
        images = {name: camera.feature for name, camera in self.cameras.items()}
        extras = {AGE + name: Feature(()) for name in cameras or ()}
        if teleop is not None:
            extras[POLICY_ACTION] = Feature(robot.action.shape, robot.action.dtype)
        self.spec = Spec({**robot.observation, **images}, robot.action, fps, extras)
        self.task, self.clock, self.has_operator = task, clock, teleop is not None
        self._max_steps = max_steps
        self._steps = 0
        self._began = 0.0  # when the tick under way began; seconds, time.monotonic()
        self._homed: int | None = None  # the seed that the robot went home for
        self._ages: dict[str, Array] = {}  # of the latest observation
        self._intervention = Intervention(teleop)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def is_home(self) -> bool:
        return self.robot.is_home

    def home(self, seed: int) -> None:
        self.robot.home(seed)
        self._homed = seed

    def reset(self, seed: int, *, teleop: bool = False, intervene: bool = False) -> Observation:
        """Begin an episode, as Env.reset. Raises ConfigError for `teleop` if the env has no teleop."""
        self._intervention.reset(seed, demonstrate=teleop, intervene=intervene)
        if self._homed != seed:
            self.home(seed)
        while not self.is_home:
            time.sleep(1 / self.spec.fps)
        self._homed, self._steps = None, 0
        self._began = time.monotonic()
        return self._observe()

    def look(self) -> bool:
        return self._intervention.look()

    def step(self, action: Array | None) -> Step:
        """Make one control step, as Env.step: send the action [A], wait for the end of the step, observe, judge."""
        driven, is_theirs = self._intervention.drive(action)
        sent = time.monotonic()
        executed = self.robot.command(self.robot.hold_action() if driven is None else driven)
        extras = dict(self._ages)  # of the observation before this action
        if self.has_operator:
            extras[POLICY_ACTION] = policy_action(action, executed)
        self._wait(sent)
        observation = self._observe()
        verdict = self.judge(observation)
        self._steps += 1
        truncated = self._steps >= self._max_steps and not verdict.terminated
        success = verdict.success if verdict.terminated or truncated else None
        return Step(observation, verdict.reward, executed, is_theirs, verdict.terminated, truncated, success, extras)

    def stop(self) -> None:
        """Hold now; may be called twice."""
        self._homed = None
        self.robot.stop()

    def recover(self) -> None:
        self.robot.recover()

    def close(self) -> None:
        """Stop the robot and give every device back, even if one of them fails; may be called twice."""
        with ExitStack() as stack:
            for part in (self.operator, self.teleop, *self.cameras.values(), self.robot):
                if part is not None:
                    stack.callback(part.close)
            self.stop()

    def _observe(self) -> Observation:
        observation = self.robot.observe()
        frames = {name: camera.latest() for name, camera in self.cameras.items()}
        now = time.monotonic()
        ages = {name: np.array(now - frame.time, np.float32) for name, frame in frames.items()}
        self._ages = {AGE + name.removeprefix(IMAGES): age for name, age in ages.items()}
        return observation | {name: frame.image for name, frame in frames.items()}

    def _wait(self, sent: float) -> None:
        """Wait for the end of the tick whose command was `sent` then.

        A tick begins with its observation and lasts one period. If its command is sent in the second half of it, the
        period counts from the command, so that each action has time to act, and the robot need not hurry afterwards.
        """
        if self.clock == "simulated":
            return
        period = 1 / self.spec.fps
        end = (sent if sent > self._began + period / 2 else self._began) + period
        if (remaining := end - time.monotonic()) > 0:
            time.sleep(remaining)
        self._began = max(end, time.monotonic())
