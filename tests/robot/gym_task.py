"""A gymnasium task that ends, and fails, as it is told.

**Assumed:** it is made anew in its first state, and raises in the call that it is told alone.
"""

import numpy as np
import pytest

gymnasium = pytest.importorskip("gymnasium")
spaces = gymnasium.spaces
VECTOR = spaces.Box(-np.inf, np.inf, (2, 3), np.float64)
IMAGE = spaces.Box(0, 255, (4, 6, 3), np.uint8)
ACTION = spaces.Box(np.array([[-2.0, 1.0]]), np.array([[2.0, 3.0]]), dtype=np.float64)


class FatalError(Exception):
    """Of no kind that anybody could know beforehand, as mujoco's of this name."""


class Task(gymnasium.Env):
    """Ends after its third step in the way it is told; keeps the action it got, and gives out the same array each time.

    fails: {the call that fails: its error}.
    """

    def __init__(self, observation=VECTOR, action=ACTION, end=(True, False), info=None, fps=20, fails=None):
        self.observation_space, self.action_space = observation, action
        self.metadata = {"render_fps": fps} if fps else {}
        self.end, self.info, self.fails = end, info or {}, fails or {}
        self.raw = self.seen("make")

    def seen(self, call):
        if call in self.fails:
            raise self.fails[call]
        sample = self.observation_space.sample()
        if call != "make" and isinstance(sample, np.ndarray):
            self.raw[:], sample = sample, self.raw
        return sample

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        self.observation_space.seed(seed)
        return self.seen("reset"), {}

    def step(self, action):
        self.action = action
        self.steps += 1
        terminated, truncated = self.end if self.steps == 3 else (False, False)
        return self.seen("step"), 0.5, terminated, truncated, self.info
