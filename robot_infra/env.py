"""A robot, its cameras, its judge and its teleoperation as one Env that moves at a fixed rate."""

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

CLOCKS = ("real", "simulated")
IMAGES, AGE = "observation.images.", "age."  # and a camera's name


class RobotEnv:
    """The Env of serl_client.env over a robot; a context manager, so that every way out stops the robot.

    On the real clock a step lasts 1/fps seconds, counted by deadline; `late` counts the steps that took longer, and
    after one of them the count goes on from there. On the simulated clock nothing waits. An episode of `max_steps`
    is truncated; only the judge terminates one, and its success counts once the episode has ended. Each row also
    records `age.<camera>`, how old each image was when its observation was complete (seconds), and with a teleop
    `policy_action` (intervention.py). `operator` is the person at the keys, where the teleop is their keyboard too.
    Raises ConfigError for an unknown clock and for a teleop that speaks of another action space.
    """

    def __init__(
        self,
        robot: Robot,
        *,
        judge: Judge,
        task: str,
        fps: float,
        max_steps: int,
        clock: str = "real",
        cameras: Mapping[str, Camera] | None = None,
        teleop: Teleop | None = None,
        operator: Operator | None = None,
    ) -> None:
        if clock not in CLOCKS:
            raise ConfigError(f"clock {clock!r} is unknown; use one of {', '.join(CLOCKS)}")
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
        self.late = 0
        self._max_steps = max_steps
        self._steps = 0
        self._deadline = 0.0
        self._ages: dict[str, Array] = {}  # of the latest observation
        self._intervention = Intervention(teleop)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def reset(self, seed: int, *, teleop: bool = False, intervene: bool = False) -> Observation:
        """Begin an episode at the start that `seed` names; with `teleop` the operator drives all of it, and with
        `intervene` the rows in which they touch the device.

        Raises ConfigError for `teleop` when there is no operator to drive.
        """
        self._intervention.reset(seed, demonstrate=teleop, intervene=intervene)
        self.robot.home(seed)
        self._steps = 0
        observation = self._observe()
        self._deadline = time.monotonic()
        return observation

    def step(self, action: Array | None) -> Step:
        """One tick: send the action [A], wait for the end of the tick, observe, judge.

        None holds. In a row that the operator drives theirs is sent instead.
        """
        driven, is_theirs = self._intervention.drive(action)
        executed = self.robot.command(self.robot.hold_action() if driven is None else driven)
        extras = {POLICY_ACTION: policy_action(action, executed), **self._ages}  # of what this action answered
        self._wait()
        observation = self._observe()
        verdict = self.judge(observation)
        self._steps += 1
        truncated = self._steps >= self._max_steps and not verdict.terminated
        success = verdict.success if verdict.terminated or truncated else None
        return Step(observation, verdict.reward, executed, is_theirs, verdict.terminated, truncated, success, extras)

    def stop(self) -> None:
        """Hold now; may be called twice."""
        self.robot.stop()

    def close(self) -> None:
        """Stop the robot and give every device back, each of them even if another fails; may be called twice."""
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

    def _wait(self) -> None:
        if self.clock == "simulated":
            return
        self._deadline += 1 / self.spec.fps
        remaining = self._deadline - time.monotonic()
        if remaining > 0:
            time.sleep(remaining)
        else:
            self.late += 1
            self._deadline -= remaining  # no short ticks to catch up: the robot would be asked to hurry
