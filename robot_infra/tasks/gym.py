"""Runs any gymnasium task with a Box or Discrete action (GymEnv); a person may drive one with a Box."""

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, Self

import numpy as np
from serl_client import clock
from serl_client.env import Observation, Step
from serl_client.errors import ConfigError, RetakeError, RobotFault
from serl_client.spec import Array, Feature, Spec

from robot_infra.interfaces import Operator, Teleop
from robot_infra.intervention import POLICY_ACTION, Intervention, policy_action
from robot_infra.pace import Pace
from robot_infra.teleop.hands import make_devices
from robot_infra.teleop.keyboard import Keyboard

SUCCESS = ("success", "is_success", "succeed", "next.success")  # keys of `info`; gym_hil uses the last two
HUMAN = {"is_intervention": ("teleop_action", "action_intervention")}  # gym_hil: a person drove this step, their action
SAID = {"rerecord_episode": "discard"}  # gym_hil: what a person said at the task's own device: our word
EXTRAS = {"gym_hil": "hil", "Box2D": "carracing", "minigrid": "minigrid", "ale_py": "atari"}  # package: our extra

MOST = 300  # characters of the error text of a task

log = logging.getLogger(__name__)


class Reported(Keyboard):
    """Gives the events of the task's own device, and those of a terminal's keys."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def poll(self) -> list[str]:
        said, self.said = self.said, []
        return [*super().poll(), *said]


class GymEnv:
    """Implements serl_client.env.Env over `gymnasium.make(env_id, **options)`.

    fps: steps per second; None: the task's own metadata["render_fps"].
    success: keys of info. An episode has success if its last info says so under any of them; None without these keys.
    human: keys of info of a task with its own device, {whether a person drove this step: their action, or several keys
        of which one holds it}. Such a step counts as intervened, with that action as executed.
    said: keys of info of such a device, {key: event of the operator}.
    clock: `real` or `simulated`, see Pace. operator, devices: who drives, and with what (teleop/hands.py); `none`:
        nobody. script: makes the operator `scripted` from the gymnasium task; None: there is none.
    wrap: puts gymnasium's wrappers around the task, so that its spaces fit; None: none.
    names: of the action's entries, so that devices know what they move (x, y, z, roll, pitch, yaw, gripper).
    neutral: the action at rest, which is the zero of policies (Feature.neutral); None: the middle of the bounds.
    hold: the action that holds; None: the neutral one if it is said, else the one nearest to zero, or the first choice.

    A Box observation becomes `observation.state`, flattened to float32; each Box of a Dict becomes
    `observation.<key>`. An image, uint8 [height, width, channel], becomes `observation.images.<key>` (`camera` without
    a key). The keys of a Dict in a Dict are joined by dots. The action is clipped to its bounds. That of a Discrete
    space is one-hot: the largest entry is taken, and is what was executed.

    Raises ConfigError for a task that does not exist, does not fit or cannot be made, and RobotFault where the task
    raises anything in reset or step: one sentence that names task and call, with the traceback in the log.
    """

    is_home, space = True, "ee_delta"

    def __init__(
        self, env_id: str, *, fps: float | None = None, success: Sequence[str] = SUCCESS,
        human: Mapping[str, str | Sequence[str]] = HUMAN, said: Mapping[str, str] = SAID,
        options: Mapping[str, Any] | None = None, clock: str = "simulated", operator: str = "none",
        devices: Mapping[str, Any] | None = None, names: Sequence[str] = (), hold: Sequence[float] | None = None,
        script: Callable[[Any], Teleop] | None = None, wrap: Callable[[Any], Any] | None = None,
        neutral: Sequence[float] | None = None,
    ) -> None:  # fmt: skip
        self.task, self.clock, self._success, self._said = env_id, clock, tuple(success), dict(said)
        self._human = {flag: (keys,) if isinstance(keys, str) else tuple(keys) for flag, keys in human.items()}
        self._env = _make(env_id, options or {}, wrap or (lambda env: env))
        fps = fps or self._env.metadata.get("render_fps")
        if fps is None:
            raise ConfigError(f"{env_id} does not say its rate: give fps")
        self._pace = Pace(clock, fps)
        boxes, self._space = _boxes(self._env), self._env.action_space
        self._keys = _named(boxes)
        observation = {name: _feature(boxes[key]) for name, key in self._keys.items()}
        action = _action(self._env, names)
        size = action.shape[0]
        if any(said is not None and len(said) != size for said in (names or None, hold, neutral)):
            raise ConfigError(
                f"{env_id} takes actions of {size} entries: give as many names, and numbers to hold and of the neutral "
                "action"
            )
        self.action = action = replace(action, neutral=None if neutral is None else list(neutral))
        if action.one_hot and operator != "none":
            raise ConfigError(
                f"{env_id} takes one of {size} actions, which nobody can drive: say task.env.operator=none"
            )
        self._hold = self._executable(np.array(hold or neutral or np.zeros(size), action.dtype))
        scripted = script(self._env) if script else None
        teleop, self._person = make_devices(operator, scripted, self, clock=clock, devices=devices)
        self.has_operator, self._intervention = teleop is not None, Intervention(teleop)
        extras = {POLICY_ACTION: Feature(action.shape)} if self.has_operator else {}
        self.spec = Spec(observation, action, fps, extras)
        self.operator: Operator = self._person or Reported()
        self.observed = 0.0
        self._executed: Array | None = None  # in the step before

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def home(self, seed: int) -> None:
        """Do nothing: `reset` sets up the scene."""

    def reset(self, seed: int, *, teleop: bool = False, intervene: bool = False) -> Observation:
        """Begin an episode, as Env.reset. Raises ConfigError for `teleop` if nobody can drive."""
        if teleop and not self.has_operator:
            raise ConfigError(f"{self.task} has no teleop: nobody can demonstrate (task.env.operator=keyboard)")
        self._intervention.reset(seed, demonstrate=teleop, intervene=intervene)
        self._executed = None
        with self._explained("reset"):
            np.random.seed(seed % 2**32)  # some tasks draw from numpy's global generator
            observation = self._observation(self._env.reset(seed=seed)[0])
        self._pace.begin()
        self.observed = clock.monotonic()
        return observation

    def look(self) -> bool:
        return self._intervention.look(self._hold)

    def step(self, action: Array | None) -> Step:
        """Make one step with an action [A]; None: hold. Raises ValueError for an action that is not finite."""
        feature = self.spec.action
        if action is not None:
            action = np.asarray(action, feature.dtype)
            feature.check("action", action)
            if not np.isfinite(action).all():
                raise ValueError(f"the action must be finite, not {action}")
        driven, is_theirs = self._intervention.drive(action, self._hold, self._executed)
        executed = self._executable(driven)
        taken, sent = self._taken(executed), clock.monotonic()
        with self._explained("step"):
            raw, reward, terminated, truncated, info = self._env.step(taken)
            terminated, truncated = bool(terminated), bool(truncated and not terminated)
            success = self._succeeded(info) if terminated or truncated else None
            theirs = self._theirs(info)
            executed = executed if theirs is None else theirs
            observation = self._observation(raw)
        if isinstance(self.operator, Reported):
            self.operator.said += [word for key, word in self._said.items() if info.get(key)]
        self._executed = executed
        extras = {POLICY_ACTION: policy_action(action, executed)} if self.has_operator else {}
        self._pace.wait(sent)
        self.observed = clock.monotonic()
        is_theirs, is_driven = is_theirs or theirs is not None, self._intervention.is_driven or theirs is not None
        return Step(
            observation, float(reward), executed, is_theirs, terminated, truncated, success, extras, driven=is_driven
        )

    def stop(self) -> None:
        """Do nothing: time stands still between two steps."""

    def recover(self) -> None:
        """Do nothing: the next `reset` begins anew."""

    def close(self) -> None:
        """Close the task; an error of it is only logged."""
        if self._person is not None:
            self._person.close()
        with suppress(RobotFault), self._explained("close"):  # else it would hide the error that ended the run
            self._env.close()

    def _executable(self, action: Array) -> Array:
        """Return the action [A] that is executed where this one is asked for."""
        if self.action.one_hot:
            return np.eye(len(action), dtype=action.dtype)[action.argmax()]
        return np.clip(action, self.action.low, self.action.high)

    def _taken(self, executed: Array) -> Any:
        """Return an executed action [A] as the task takes it."""
        if self.action.one_hot:
            return self._space.start + self._space.dtype.type(executed.argmax())
        return executed.astype(self._space.dtype).reshape(self._space.shape)

    def _succeeded(self, info: Mapping[str, Any]) -> bool | None:
        told = [bool(info[key]) for key in self._success if info.get(key) is not None]
        return any(told) if told else None

    def _theirs(self, info: Mapping[str, Any]) -> Array | None:
        """Return the action [A] of a person who drove this step with a device of the task; None: nobody did."""
        keys = [key for flag, several in self._human.items() if info.get(flag) for key in several if key in info]
        if not keys:
            return None
        feature = self.spec.action
        action = np.asarray(info[keys[0]], feature.dtype).reshape(-1)
        feature.check(keys[0], action)
        return self._executable(action)

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
            name: np.array(_at(raw, key), features[name].dtype).reshape(features[name].shape)
            for name, key in self._keys.items()
        }


def _make(env_id: str, options: Mapping[str, Any], wrap: Callable[[Any], Any]) -> Any:
    try:
        import gymnasium
    except ModuleNotFoundError:
        raise ConfigError("gymnasium is missing: run `uv sync --inexact --extra sim`") from None
    try:
        return wrap(gymnasium.make(env_id, disable_env_checker=True, **options))
    except (gymnasium.error.Error, ModuleNotFoundError, TypeError) as error:
        words = " ".join(str(error).split())
        extra = next((f": run `uv sync --inexact --extra {EXTRAS[name]}`" for name in EXTRAS if name in words), "")
        raise ConfigError(f"gymnasium cannot make {env_id}: {words}{extra}") from None
    except Exception as error:
        log.exception("the environment %s raised in make", env_id)
        raise ConfigError(f"the environment {env_id} failed in make(): {said(error)}") from error


def said(error: Exception) -> str:
    """Return an exception in one line: its kind, its first words, and a hint if it is about drawing."""
    words = " ".join(str(error).split())
    draws = any(word in words for word in ("OpenGL", "GLFW", "gladLoad", "EGL"))
    hint = ". No screen? Set MUJOCO_GL=egl (apt-get install libegl1)" if draws else ""
    return type(error).__name__ + f": {words[:MOST]}" * bool(words) + hint


def _boxes(env: Any) -> dict[tuple[str, ...], Any]:
    """Return the task's observation as {keys from the outermost Dict inwards: Box}."""
    from gymnasium.spaces import Box, Dict

    def flat(space: Any, key: tuple[str, ...]) -> dict[tuple[str, ...], Any]:
        if not isinstance(space, Dict):
            return {key: space}
        return {path: box for name, below in space.spaces.items() for path, box in flat(below, (*key, name)).items()}

    boxes = flat(env.observation_space, ())
    for box in boxes.values():
        if not isinstance(box, Box):
            raise ConfigError(f"{env.spec.id} sees a {type(box).__name__} space; only a Box fits, or a Dict of them")
    return boxes


def _action(env: Any, names: Sequence[str]) -> Feature:
    """Return the action of the task, whose entries have these names."""
    from gymnasium.spaces import Box, Discrete

    space = env.action_space
    if isinstance(space, Discrete):
        return Feature((int(space.n),), names=tuple(names), low=np.array(0), high=np.array(1), one_hot=True)
    if not isinstance(space, Box) or not np.issubdtype(space.dtype, np.floating):
        kind = space.dtype if isinstance(space, Box) else type(space).__name__
        raise ConfigError(f"{env.spec.id} takes actions of {kind}; only a Box of floats fits, or Discrete")
    low, high = space.low.reshape(-1), space.high.reshape(-1)
    return Feature(low.shape, names=tuple(names), low=low, high=high)


def _is_image(box: Any) -> bool:
    return box.dtype == np.uint8 and len(box.shape) == 3


def _named(boxes: Mapping[tuple[str, ...], Any]) -> dict[str, tuple[str, ...]]:
    """Return {name of the observation: its keys}. An image is called by its last key; where two share that, by all."""
    last = Counter(key[-1:] for key, box in boxes.items() if _is_image(box))
    found: dict[str, tuple[str, ...]] = {}
    for key, box in boxes.items():
        if _is_image(box):
            name = f"observation.images.{'_'.join(key[-1:] if last[key[-1:]] == 1 else key) or 'camera'}"
        else:
            name = f"observation.{'.'.join(key) or 'state'}"
        if name in found:
            raise ConfigError(
                f"{'.'.join(found[name])} and {'.'.join(key)} of the task would both be {name}: rename one"
            )
        found[name] = key
    return found


def _at(raw: Any, key: tuple[str, ...]) -> Any:
    for name in key:
        raw = raw[name]
    return raw


def _feature(box: Any) -> Feature:
    if not _is_image(box):
        return Feature((math.prod(box.shape),))
    if box.shape[2] not in (1, 3, 4):
        raise ConfigError(f"an image must be [height, width, channel], not {list(box.shape)}")
    return Feature(box.shape, "uint8")
