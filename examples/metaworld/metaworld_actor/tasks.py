"""A task of Meta-World (Yu et al. 2020, arXiv 1910.10897) as a gymnasium task, from its states."""

import importlib
import logging
from typing import Any

import gymnasium
from serl_client.errors import ConfigError
from serl_client.spec import Array

log = logging.getLogger(__name__)


class Task(gymnasium.Env[Array, Array]):
    """Make `repeat` simulator steps with each action. Its reward is the sum of theirs, and info says `success`.

    task: a name of Meta-World 3, such as door-close-v3. The goal can be seen, and each reset draws goal and objects
    anew, from its seed alone.
    steps: of an episode, in actions; then it is truncated. Success at its last step counts.
    ends: an episode ends with its first success. Its reward is then 1 in that step, and 0 elsewhere: the simulator's
        are positive before it, so that who succeeds sooner would get less.

    `name` is that of the task, `seen` what was observed last, and `reward` what the last simulator step gave.

    Raises ConfigError for a task that Meta-World does not have, and without Meta-World.
    """

    def __init__(self, task: str, *, repeat: int, steps: int, ends: bool = False) -> None:
        self._world, self._repeat, self._steps, self._done = _made(task), repeat, steps, 0
        self.name, self._ends = task, ends
        seconds = repeat * self._world.dt
        self.metadata = {"render_fps": 1 / seconds}
        self.observation_space, self.action_space = self._world.observation_space, self._world.action_space
        log.info("%s: each step is %d simulator steps, %g s", task, repeat, seconds)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Array, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self._world.seed(seed)
        self._done, self.reward = 0, 0.0
        self.seen = self._world.reset()[0]
        return self.seen, {}

    def step(self, action: Array) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        total, success, is_over = 0.0, False, False
        for _ in range(self._repeat):
            self.seen, self.reward, _, is_over, info = self._world.step(action)
            total, success = total + self.reward, bool(info["success"])
            if is_over or (self._ends and success):
                break
        self._done += 1
        is_over = is_over or self._done >= self._steps
        reward = float(success) if self._ends else total
        return self.seen, reward, self._ends and success, is_over, {"success": success}

    def close(self) -> None:
        self._world.close()


def _made(task: str) -> Any:
    try:
        tasks: Any = importlib.import_module("metaworld").ALL_V3_ENVIRONMENTS_GOAL_OBSERVABLE
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error.name} is missing here: examples/metaworld/run_actor.sh installs it") from None
    if f"{task}-goal-observable" not in tasks:
        known = ", ".join(name.removesuffix("-goal-observable") for name in tasks)
        raise ConfigError(f"task.env_id={task} is no task of Meta-World: say one of {known}")
    world = tasks[f"{task}-goal-observable"]()
    world._freeze_rand_vec, world.seeded_rand_vec = False, True  # each reset draws, from the generator that seed() sets
    return world
