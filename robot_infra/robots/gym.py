"""GymEnv makes any gymnasium task with a continuous action an Env."""

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Self

import numpy as np
from serl_client.env import Observation, Step
from serl_client.errors import ConfigError, RetakeError, RobotFault
from serl_client.spec import Array, Feature, Spec

SUCCESS = ("success", "is_success", "succeed", "next.success")  # keys of `info`; gym_hil uses the last two
HUMAN = {"is_intervention": "action_intervention"}  # gym_hil: {whether a person drove this step: their action}

MOST = 300  # characters of the error text of a task

log = logging.getLogger(__name__)


class GymEnv:
    """Implements serl_client.env.Env over `gymnasium.make(env_id, **options)`, on the simulated clock.

    fps: steps per second; None: the task's own metadata["render_fps"].
    success: keys of info. An episode has success if its last info says so under any of them; None without these keys.
    human: keys of info of a task with its own device, {whether a person drove this step: their action}. Such a step
        counts as intervened, with that action as executed.

    A Box observation becomes `observation.state`, flattened to float32; each Box of a Dict becomes
    `observation.<key>`. An image, uint8 [height, width, channel], becomes `observation.images.<key>` (`camera` without
    a key). The action is clipped to its bounds. To hold, the action nearest to zero is sent.

    Raises ConfigError for a task that does not exist, does not fit or cannot be made, and RobotFault where the task
    raises anything in reset or step: one sentence that names task and call, with the traceback in the log.
    """

    clock = "simulated"
    has_operator = False
    is_home = True
    operator = None

    def __init__(
        self, env_id: str, *, fps: float | None = None, success: Sequence[str] = SUCCESS,
        human: Mapping[str, str] = HUMAN, options: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self.task, self._success, self._human = env_id, tuple(success), dict(human)
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

    def home(self, seed: int) -> None:
        """Do nothing: `reset` sets up the scene."""

    def reset(self, seed: int, *, teleop: bool = False, intervene: bool = False) -> Observation:
        """Begin an episode in which nobody intervenes. Raises ConfigError for `teleop`: nobody can drive."""
        if teleop:
            raise ConfigError(f"{self.task} has no teleop: nobody can demonstrate")
        with self._explained("reset"):
            return self._observation(self._env.reset(seed=seed)[0])

    def look(self) -> bool:
        return False

    def step(self, action: Array | None) -> Step:
        """Make one step with an action [A]; None: hold. Raises ValueError for an action that is not finite."""
        feature = self.spec.action
        executed = np.zeros(feature.shape, feature.dtype) if action is None else np.asarray(action, feature.dtype)
        feature.check("action", executed)
        if not np.isfinite(executed).all():
            raise ValueError(f"the action must be finite, not {executed}")
        executed = np.clip(executed, feature.low, feature.high)
        taken = executed.astype(self._box.dtype).reshape(self._box.shape)
        with self._explained("step"):
            raw, reward, terminated, truncated, info = self._env.step(taken)
            terminated, truncated = bool(terminated), bool(truncated and not terminated)
            success = self._succeeded(info) if terminated or truncated else None
            theirs = self._theirs(info)
            executed = executed if theirs is None else theirs
            is_theirs = theirs is not None
            return Step(self._observation(raw), float(reward), executed, is_theirs, terminated, truncated, success)

    def stop(self) -> None:
        """Do nothing: time stands still between two steps."""

    def recover(self) -> None:
        """Do nothing: the next `reset` begins anew."""

    def close(self) -> None:
        """Close the task; an error of it is only logged."""
        with suppress(RobotFault), self._explained("close"):  # else it would hide the error that ended the run
            self._env.close()

    def _succeeded(self, info: Mapping[str, Any]) -> bool | None:
        told = [bool(info[key]) for key in self._success if info.get(key) is not None]
        return any(told) if told else None

    def _theirs(self, info: Mapping[str, Any]) -> Array | None:
        """Return the action [A] of a person who drove this step with a device of the task; None: nobody did."""
        keys = [key for flag, key in self._human.items() if info.get(flag)]
        if not keys:
            return None
        feature = self.spec.action
        action = np.asarray(info[keys[0]], feature.dtype).reshape(-1)
        feature.check(keys[0], action)
        return np.clip(action, feature.low, feature.high)

    @contextmanager
    def _explained(self, call: str) -> Iterator[None]:
        """Turn whatever the task raises into a RobotFault of one sentence."""
        try:
            yield
        except RetakeError:
            raise
        except Exception as error:
            log.exception("the environment %s raised in %s", self.task, call)
            raise RobotFault(f"the environment {self.task} failed in {call}(): {said(error)}") from error

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
        raise ConfigError(f"gymnasium cannot make {env_id}: {' '.join(str(error).split())}") from None
    except Exception as error:
        log.exception("the environment %s raised in make", env_id)
        raise ConfigError(f"the environment {env_id} failed in make(): {said(error)}") from error


def said(error: Exception) -> str:
    """Return an exception in one line: its kind, its first words, and a hint if it is about drawing."""
    words = " ".join(str(error).split())
    draws = any(word in words for word in ("OpenGL", "GLFW", "gladLoad", "EGL"))
    hint = ". No screen? Set MUJOCO_GL=egl (apt-get install libegl1)" if draws else ""
    return type(error).__name__ + f": {words[:MOST]}" * bool(words) + hint


def _boxes(env: Any) -> dict[str, Any]:
    """Return the task's observation as {key: Box}; a single Box has the empty key."""
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
