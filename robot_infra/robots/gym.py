"""Any gymnasium task with a continuous action, as an Env."""

import math
from collections.abc import Mapping
from typing import Any, Self

import numpy as np
from serl_client.errors import ConfigError
from serl_client.runner import Observation, Step
from serl_client.spec import Array, Feature, Spec


class GymEnv:
    """The Env of serl_client.runner over `gymnasium.make(env_id, **options)`, on the simulated clock.

    A Box observation becomes `observation.state`, flattened to float32; each Box of a Dict `observation.<key>`; an
    image, uint8 [height, width, channel], `observation.images.<key>` (`camera` where it has no key). The action is
    clipped to its bounds; to hold is the action nearest to zero. An episode's success is the last row's
    info["success"] or info["is_success"], None where the task gives neither. fps is the task's own
    metadata["render_fps"] unless it is given. Raises ConfigError for a task that does not exist or does not fit.
    """

    clock = "simulated"
    has_operator = False
    operator = None

    def __init__(self, env_id: str, *, fps: float | None = None, options: Mapping[str, Any] | None = None) -> None:
        self.task = env_id
        self._env = _make(env_id, options or {})
        fps = fps or self._env.metadata.get("render_fps")
        if fps is None:
            raise ConfigError(f"{env_id} does not say its rate: give fps")
        boxes, self._box = _boxes(self._env), self._env.action_space
        self._keys = {_name(key, box): key for key, box in boxes.items()}
        observation = {name: _feature(boxes[key]) for name, key in self._keys.items()}
        low, high = self._box.low.reshape(-1), self._box.high.reshape(-1)
        self.spec = Spec(observation, Feature(low.shape, low=low, high=high), fps)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def reset(self, seed: int, *, teleop: bool = False, intervene: bool = False) -> Observation:
        """Begin an episode at the start that `seed` names, in which nobody intervenes.

        Raises ConfigError for `teleop`: nobody can drive.
        """
        if teleop:
            raise ConfigError(f"{self.task} has no teleop: nobody can demonstrate")
        return self._observation(self._env.reset(seed=seed)[0])

    def step(self, action: Array | None) -> Step:
        """One tick with an action [A]; None holds. Raises ValueError for an action that is not finite."""
        feature = self.spec.action
        executed = np.zeros(feature.shape, feature.dtype) if action is None else np.asarray(action, feature.dtype)
        feature.check("action", executed)
        if not np.isfinite(executed).all():
            raise ValueError(f"the action must be finite, not {executed}")
        executed = np.clip(executed, feature.low, feature.high)
        taken = executed.astype(self._box.dtype).reshape(self._box.shape)
        raw, reward, terminated, truncated, info = self._env.step(taken)
        terminated, truncated = bool(terminated), bool(truncated and not terminated)
        success = info.get("success", info.get("is_success")) if terminated or truncated else None
        success = None if success is None else bool(success)
        return Step(self._observation(raw), float(reward), executed, False, terminated, truncated, success)

    def stop(self) -> None:
        """Nothing to do: time stands still between two steps."""

    def close(self) -> None:
        self._env.close()

    def _observation(self, raw: Any) -> Observation:
        features = self.spec.observation
        return {
            name: np.array(raw[key] if key else raw, features[name].dtype).reshape(features[name].shape)
            for name, key in self._keys.items()
        }


def _make(env_id: str, options: Mapping[str, Any]) -> Any:
    try:
        import gymnasium
    except ModuleNotFoundError:
        raise ConfigError("gymnasium is missing: run `uv sync --inexact --extra sim`") from None
    try:
        return gymnasium.make(env_id, disable_env_checker=True, **options)
    except (gymnasium.error.Error, ModuleNotFoundError, TypeError) as error:
        raise ConfigError(f"gymnasium cannot make {env_id}: {error}") from None


def _boxes(env: Any) -> dict[str, Any]:
    """The task's observation as {key: Box}, under an empty key where it is one Box."""
    from gymnasium.spaces import Box, Dict

    space = env.observation_space
    boxes = dict(space.spaces) if isinstance(space, Dict) else {"": space}
    for box in (*boxes.values(), env.action_space):
        if not isinstance(box, Box):
            raise ConfigError(f"{env.spec.id} has a {type(box).__name__} space; only a Box fits, or a Dict of them")
    if not np.issubdtype(env.action_space.dtype, np.floating):
        raise ConfigError(f"{env.spec.id} takes {env.action_space.dtype} actions, and only continuous ones are given")
    return boxes


def _is_image(box: Any) -> bool:
    return box.dtype == np.uint8 and len(box.shape) == 3


def _name(key: str, box: Any) -> str:
    return f"observation.images.{key or 'camera'}" if _is_image(box) else f"observation.{key or 'state'}"


def _feature(box: Any) -> Feature:
    if not _is_image(box):
        return Feature((math.prod(box.shape),))
    if box.shape[2] not in (1, 3, 4):
        raise ConfigError(f"an image must be [height, width, channel], not {list(box.shape)}")
    return Feature(box.shape, "uint8")
