"""Provides scripted operators: they see the true scene, demonstrate a task, and help a policy that is stuck."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from serl_client.errors import ConfigError
from serl_client.spec import Array


class Scripted:
    """Drives every step with the action of `intent`; a Teleop.

    intent: returns the action [A] for the scene as it is; it is clipped to [-1, 1].
    noise: standard deviation of Gaussian noise on each entry, or [A], which spreads demonstrations around the best way.
    space: of its actions.
    """

    def __init__(self, intent: Callable[[], Array], *, noise: float | Array, space: str = "ee_delta") -> None:
        self._intent, self._noise, self.space = intent, noise, space
        self.reset(0)

    def reset(self, seed: int, *, demonstrate: bool = True) -> None:
        self._random = np.random.default_rng((seed, 1))  # another stream than the one that laid out the scene

    def read(self, hold: Array) -> Array | None:
        intent = np.clip(self._intent(), -1, 1)  # [A]
        return np.clip(intent + self._random.normal(0, self._noise, intent.shape), -1, 1).astype(np.float32)

    def close(self) -> None:
        pass


class Rescuer(Scripted):
    """Takes over where the policy is stuck, and hands back once the task makes progress again.

    While it demonstrates, the script drives every step.
    remaining: returns how much of the task is left, in metres or any other unit.
    margin: a step makes progress if it lowers the least `remaining` so far by more than this, in that unit.
    takeover_after: steps in succession without progress, after which the script drives.
    handback_after: steps with progress, after which the policy drives again. Raises ConfigError if either is below 1.
    """

    def __init__(
        self, intent: Callable[[], Array], remaining: Callable[[], float], *, noise: float | Array, margin: float,
        takeover_after: int, handback_after: int, space: str = "ee_delta",
    ) -> None:  # fmt: skip
        if takeover_after < 1 or handback_after < 1:
            raise ConfigError(
                "takeover_after and handback_after of the scripted operator should be at least 1 step, not "
                f"{takeover_after} and {handback_after}"
            )
        self._remaining, self._margin = remaining, margin
        self._takeover_after, self._handback_after = takeover_after, handback_after
        super().__init__(intent, noise=noise, space=space)

    def reset(self, seed: int, *, demonstrate: bool = True) -> None:
        super().reset(seed)
        self._demonstrates = self._drives = demonstrate
        self._least = math.inf
        self._steps = 0  # without progress while the policy drives, with progress while the script does

    def read(self, hold: Array) -> Array | None:
        if not self._demonstrates:
            self._watch()
        return super().read(hold) if self._drives else None

    def _watch(self) -> None:
        """Decide who drives this step, by the progress of the step before."""
        remaining = self._remaining()
        progressed = remaining < self._least - self._margin
        if progressed:
            self._least = remaining
        if self._drives:
            self._steps += progressed
        else:
            self._steps = 0 if progressed else self._steps + 1
        if self._steps >= (self._handback_after if self._drives else self._takeover_after):
            self._drives, self._steps = not self._drives, 0
            self._least = remaining  # progress of the new driver counts from here


class Mover(Rescuer):
    """Moves a hand with the action [4] of `move`: x, y, z, and the gripper, which has no noise.

    As people differ, each episode has a speed of its own, drawn between the share `slowest` and all of the script's. It
    multiplies x, y and z before they are clipped to [-1, 1]: who is slow goes as fast as anyone where the way is long,
    and comes closer more slowly.
    """

    def __init__(
        self, move: Callable[[], Array], remaining: Callable[[], float], *, noise: float, slowest: float, **options: Any
    ) -> None:
        self._slowest = slowest

        def intent() -> Array:
            action = move()
            return np.append(action[:3] * self._speed, action[3])

        super().__init__(intent, remaining, noise=np.array([noise, noise, noise, 0]), **options)

    def reset(self, seed: int, *, demonstrate: bool = True) -> None:
        super().reset(seed, demonstrate=demonstrate)
        self._speed = self._random.uniform(self._slowest, 1)
