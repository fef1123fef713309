"""A task of the DeepMind Control Suite (Tassa et al. 2018, arXiv 1801.00690) as a gymnasium task, from its states."""

import importlib
import logging
import os
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict
from serl_client.errors import ConfigError
from serl_client.spec import Array

log = logging.getLogger(__name__)


class Suite(gymnasium.Env[Any, Array]):
    """Make `repeat` simulator steps with each action. Its reward is their sum: each is in [0, 1].

    task: `domain-task` with the suite's own names, such as cartpole-balance or ball_in_cup-catch.
    repeat: simulator steps per action, which count as one step of the run.

    The suite ends an episode after 1,000 simulator steps (of most tasks), and that is a truncation: its discount is 1.
    A reset draws the start from the seed alone.

    Raises ConfigError for a task that the suite does not have, and without dm_control.
    """

    def __init__(self, task: str, *, repeat: int) -> None:
        self._suite, self._repeat = _loaded(task), repeat
        seconds = repeat * self._suite.control_timestep()
        self.metadata = {"render_fps": 1 / seconds}
        observations, action = self._suite.observation_spec(), self._suite.action_spec()
        self._shapes = {name: each.shape or (1,) for name, each in observations.items()}
        self.observation_space = Dict({name: Box(-np.inf, np.inf, shape) for name, shape in self._shapes.items()})
        self.action_space = Box(action.minimum, action.maximum, action.shape, np.float64)
        log.info("%s: each step is %d simulator steps, %g s", task, repeat, seconds)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[dict[str, Array], dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self._suite.task.random.seed(seed % 2**32)
        return self._seen(self._suite.reset()), {}

    def step(self, action: Array) -> tuple[dict[str, Array], float, bool, bool, dict[str, Any]]:
        found = self._suite.step(action)
        reward = found.reward
        for _ in range(1, self._repeat):
            if not found.last():
                found = self._suite.step(action)
                reward += found.reward
        terminated = found.last() and found.discount == 0
        return self._seen(found), reward, terminated, found.last() and not terminated, {}

    def close(self) -> None:
        self._suite.close()

    def _seen(self, found: Any) -> dict[str, Array]:
        return {name: np.reshape(value, self._shapes[name]) for name, value in found.observation.items()}


def _loaded(task: str) -> Any:
    os.environ.setdefault("MUJOCO_GL", "disabled")  # read at import: states need no OpenGL
    try:
        suite: Any = importlib.import_module("dm_control.suite")
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error.name} is missing here: examples/dmc/run_actor.sh installs it") from None
    known = [f"{domain}-{name}" for domain, name in suite.ALL_TASKS]
    if task not in known:
        raise ConfigError(f"task.env_id={task} is no task of the suite: say one of {', '.join(known)}")
    return suite.load(*task.split("-"))
