"""Runs any gymnasium task whose spaces gym_spaces.py knows (GymEnv); a person may drive one with a Box action."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Self

import numpy as np
from serl_client import clock
from serl_client.env import Observation, Step
from serl_client.errors import ConfigError, RetakeError, RobotFault, last_line
from serl_client.spec import Array, Feature, Spec

from robot_infra.interfaces import Operator, Teleop
from robot_infra.intervention import POLICY_ACTION, Intervention, policy_action
from robot_infra.pace import Pace
from robot_infra.tasks.gym_spaces import Actions, Observations
from robot_infra.teleop.hands import make_devices
from robot_infra.teleop.keyboard import Keyboard

SUCCESS = ("success", "is_success", "succeed", "next.success")  # keys of `info`; gym_hil uses the last two
HUMAN = {"is_intervention": ("teleop_action", "action_intervention")}  # gym_hil: a person drove this step, their action
SAID = {"rerecord_episode": "discard"}  # gym_hil: what a person said at the task's own device: our word
FPS = 30.0  # steps per second of a simulated task that does not say its rate: so fast plays a recording
EXTRAS = {"gym_hil": "hil", "Box2D": "carracing", "minigrid": "minigrid", "ale_py": "atari"}  # package: our extra

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

    fps: steps per second; None: the task's own metadata["render_fps"], else FPS on the simulated clock.
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
    scale: the largest action of a policy where the task's Box has no bound; a number, or one for each entry.

    Observations and Actions (gym_spaces.py) say what its spaces become. `recover` makes the task again.

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
        neutral: Sequence[float] | None = None, scale: float | Sequence[float] | None = None,
    ) -> None:  # fmt: skip
        self.task, self.clock, self._success, self._said = env_id, clock, tuple(success), dict(said)
        self._human = {flag: (keys,) if isinstance(keys, str) else tuple(keys) for flag, keys in human.items()}
        self._make = partial(_make, env_id, options or {}, wrap or (lambda env: env))
        self._env = self._make()
        fps = fps or self._env.metadata.get("render_fps") or (FPS if clock == "simulated" else None)
        if fps is None:
            raise ConfigError(f"{env_id} does not say its rate: say task.env.fps=...")
        self._pace = Pace(clock, fps)
        self._observations = Observations(env_id, self._env.observation_space)
        self._actions = Actions(env_id, self._env.action_space, names=names, neutral=neutral, scale=scale)
        self.action = action = self._actions.feature
        if self._actions.is_choice:
            log.info("%s takes %s: %s", env_id, self._env.action_space, self._actions.told)
        size = action.shape[0]
        if hold is not None and len(hold) != size:
            raise ConfigError(f"{env_id} takes actions of {size} entries: give as many numbers to hold")
        if self._actions.is_choice and operator != "none":
            raise ConfigError(f"{env_id} takes {size} choices, which nobody can drive: say task.env.operator=none")
        self._hold = self._actions.executable(np.array(hold or neutral or np.zeros(size), action.dtype))
        scripted = script(self._env) if script else None
        self._script = script if operator == "scripted" else None
        teleop, self._person = make_devices(operator, scripted, self, clock=clock, devices=devices)
        self.has_operator, self._intervention = teleop is not None, Intervention(teleop)
        extras = {POLICY_ACTION: Feature(action.shape)} if self.has_operator else {}
        self.spec = Spec(self._observations.features, action, fps, extras)
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
            observation = self._observations.read(self._env.reset(seed=seed)[0])
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
        executed = self._actions.executable(driven)
        taken, sent = self._actions.taken(executed), clock.monotonic()
        with self._explained("step"):
            raw, reward, terminated, truncated, info = self._env.step(taken)
            terminated, truncated = bool(terminated), bool(truncated and not terminated)
            success = self._succeeded(info) if terminated or truncated else None
            theirs = self._theirs(info)
            executed = executed if theirs is None else theirs
            observation, reward = self._observations.read(raw), float(reward)
            events = [word for key, word in self._said.items() if info.get(key)]
        if isinstance(self.operator, Reported):
            self.operator.said += events
        self._executed = executed
        extras = {POLICY_ACTION: policy_action(action, executed)} if self.has_operator else {}
        self._pace.wait(sent)
        self.observed = clock.monotonic()
        is_theirs, is_driven = is_theirs or theirs is not None, self._intervention.is_driven or theirs is not None
        return Step(observation, reward, executed, is_theirs, terminated, truncated, success, extras, driven=is_driven)

    def stop(self) -> None:
        """Do nothing: time stands still between two steps."""

    def recover(self) -> None:
        """Make the task again, because one that has raised may be broken.

        Raises RobotFault if it cannot be made, or, on a real clock, not be closed: it may still have its robot.
        """
        try:
            self._close()
        except RobotFault as error:
            if self.clock == "real":
                cure = "It may still have its robot: press r to try again, or end this actor and start it again"
                raise RobotFault(f"{error}. {cure}", "error") from error
        try:
            self._env = self._make()
        except ConfigError as error:
            raise RobotFault(str(error), "error") from error
        if self._script:
            self._intervention = Intervention(self._script(self._env))

    def close(self) -> None:
        """Close the task; an error of it is only logged."""
        if self._person is not None:
            self._person.close()
        with suppress(RobotFault):  # else it would hide the error that ended the run
            self._close()

    def _close(self) -> None:
        with self._explained("close"):
            self._env.close()

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
        return self._actions.executable(action)

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


def _make(env_id: str, options: Mapping[str, Any], wrap: Callable[[Any], Any]) -> Any:
    try:
        import gymnasium
    except ModuleNotFoundError:
        raise ConfigError("gymnasium is missing: run `. examples/install.sh --extra sim`") from None
    try:
        return wrap(gymnasium.make(env_id, disable_env_checker=True, **options))
    except (gymnasium.error.Error, ModuleNotFoundError, TypeError) as error:
        words = " ".join(str(error).split())
        cure = next((f": run `. examples/install.sh --extra {EXTRAS[name]}`" for name in EXTRAS if name in words), "")
        if not cure and isinstance(error, ModuleNotFoundError):
            cure = ". Where it lies in a folder of yours, put that on PYTHONPATH (docs/tutorials/own_task.md)"
        if ":" not in env_id and isinstance(error, gymnasium.error.UnregisteredEnv):
            cure = f" Say the module that registers it, too: task.env_id=my_module:{env_id}"
        raise ConfigError(f"gymnasium cannot make {env_id}: {words}{cure}") from None
    except Exception as error:
        log.exception("the environment %s raised in make", env_id)
        raise ConfigError(
            f"the environment {env_id} failed in make(): {said(error)}. Mend it, or take another task.env_id=..."
        ) from error


def said(error: Exception) -> str:
    """Return an exception in one line: as its traceback ends, and a hint if it is about drawing."""
    draws = any(word in str(error) for word in ("OpenGL", "GLFW", "gladLoad", "EGL"))
    return last_line(error) + ". No screen? Set MUJOCO_GL=egl (apt-get install libegl1)" * draws
