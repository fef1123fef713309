"""Gives the actor its side of a guard: a Robot whose arm only the guard may move."""

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from serl_client import clock
from serl_client.env import Observation
from serl_client.errors import ConfigError, RobotFault
from serl_client.faults import READY
from serl_client.spec import Array, Feature
from serl_client.words import check_choice

from robot_infra.guard.channel import Reply, Start
from robot_infra.guard.link import ANSWER, SLOW, GuardLink
from robot_infra.guard.simulated import SimulatedGuard
from robot_infra.interfaces import Frame, Reading

log = logging.getLogger(__name__)

STATE, IMAGES = "observation.state", "observation.images."
PERCENT = {"%": "percent"}  # an arm's unit: a Spec's
SPACES = ("joint_position", "joint_delta", "ee_position", "ee_delta")


class GuardedRobot:
    """Is a Robot whose arm a guard owns, which limits, interpolates, holds and goes home.

    driver: full name of a class derived from Arm; the guard makes it with `address` and `options`.
    address: where the arm is, such as /dev/ttyACM0 or 10.0.0.7; an arm has one owner.
    fps: steps per second. servo_hz: set points per second.
    limits: {entry: {range, speed, jump, tracking}} (guard/limits.py). home: {entry: position} where episodes start.
    home_speed: share of the speed limits on the way home.
    waypoints: {name: {entry: position, or [low, high] to draw it from}}, through which `return_home` leads, in order.
    space: what an action means: `joint_position`, `ee_position`: the target itself; `joint_delta`, `ee_delta`: its
        distance from the last target, in strokes. stroke: of each entry, or one for all; only with a delta.
    process: the guard is a process of its own, which holds the arm if this one ends. False: only for a simulated arm,
        whose time then passes by commands alone.

    A real arm moves nothing before `recover` was called, which a person's word does. `seen` has all that the arm told
    at the latest observation, as `features` says, for judges and scripts. `cameras` has those of the arm itself,
    `steps` counts the commands since it was told to go home. Raises ConfigError for whatever cannot be, also if
    somebody else owns the arm.
    """

    def __init__(
        self, driver: str, *, address: str, fps: float,
        limits: Mapping[str, Any] | None = None, home: Mapping[str, Any] | None = None,
        space: str = "joint_position", stroke: float | Sequence[float] | None = None,
        options: Mapping[str, Any] | None = None, servo_hz: float = 100.0, home_speed: float = 0.25,
        process: bool = True, waypoints: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        check_choice(space, SPACES, "space", "task.env.space")
        if space.endswith("_delta") == (stroke is None):
            raise ConfigError(f"task.env.space={space}: {'say' if stroke is None else 'leave out'} task.env.stroke")
        if not (0 < fps <= servo_hz <= 1000 and 0 < home_speed <= 1):
            raise ConfigError(
                f"task.env.fps={fps:g} task.env.servo_hz={servo_hz:g} task.env.home_speed={home_speed:g}: "
                "servo_hz is at most 1000 and at least fps, home_speed a share of the speed limits, above 0, at most 1"
            )
        self.space, self.fps, self.steps = space, fps, 0
        self.waypoints = tuple(map(str, waypoints or ()))
        self.seen: Observation = {}
        start = Start(
            driver, str(address), _plain(options or {}), _plain(limits or {}), _plain(home or {}), float(fps),
            float(servo_hz), float(home_speed), _plain(waypoints or {}),
        )  # fmt: skip
        self.guard: GuardLink | SimulatedGuard = (GuardLink if process else SimulatedGuard)(start)
        started = self.guard.begin()
        units = [PERCENT.get(unit, unit) for unit in started.entries.values()]
        state = Feature((len(started.entries),), names=tuple(started.entries), units=units)
        observed = {name: Feature(**feature) for name, feature in started.observation.items()}
        self.features = features = {STATE: state, **observed}
        images = {name for name in features if name.startswith(IMAGES)}
        self.cameras = {name.removeprefix(IMAGES): GuardedCamera(features[name]) for name in sorted(images)}
        self.observation: Mapping[str, Feature] = {
            name: feature
            for name, feature in features.items()
            if name.startswith("observation.") and name not in images
        }
        self._before = np.array(self.guard.latest.target)  # the newest command
        self._leads = started.leads
        self._stroke = None if stroke is None else np.broadcast_to(np.asarray(_plain(stroke), float), state.shape)
        self._ends = np.array(started.low), np.array(started.high)
        low, high = self._ends if stroke is None else (np.array(-1), np.array(1))
        units = units if stroke is None else ()  # a share of the stroke has none
        self.action = Feature(state.shape, names=state.names, low=low, high=high, units=units)

    @property
    def counts(self) -> dict[str, int]:
        """How many targets were limited and refused since the guard began."""
        return {"limited": self.guard.latest.limited, "refused": self.guard.latest.refused}

    def observe(self) -> Reading:
        """Return the latest measurement. Raises RobotFault if the arm holds because of a fault.

        One may look at an arm before somebody has said ready.
        """
        reply = self._asked("observe", but=READY)
        self.seen = found = {STATE: np.array(reply.measured, np.float32), **self.guard.seen()}
        for name, camera in self.cameras.items():
            camera.frame = Frame(found[IMAGES + name], reply.time)
        values = {name: found[name].copy() for name in self.observation}
        return Reading(values, reply.time, self._action(np.array(reply.executed)) if reply.executed else None)

    def command(self, action: Array) -> Array:
        """Send an action [A]; return the one that the guard has accepted. An action that is not finite holds.

        An entry that would leave its range ends there, and is returned as it was said.
        """
        action = np.asarray(action, self.action.dtype)
        self.action.check("action", action)
        finite = np.isfinite(action).all()
        wanted = (np.clip(action, self.action.low, self.action.high) if finite else action).astype(float)
        self._before = np.array(self.guard.latest.target)
        target = wanted if self._stroke is None else self._before + self._stroke * wanted
        accepted = np.array(self._asked("target", target.tolist()).target)
        self.steps += 1
        is_as_said = accepted == np.clip(target, *self._ends)  # beyond the range all actions mean its end
        return np.where(is_as_said, wanted.astype(action.dtype), self._action(accepted))

    def hold_action(self) -> Array:
        """Return zeros for a delta, else the newest accepted target [A]."""
        return np.array(self.guard.latest.target if self._stroke is None else 0 * self._stroke, self.action.dtype)

    def home(self, seed: int) -> None:
        """Begin the slow way home; a simulation is there at once, in the scene that `seed` names."""
        self._asked("home", seed=seed, patience=SLOW)
        self.steps = 0

    def return_home(self, seed: int) -> None:
        self._asked("return_home", seed=seed, patience=SLOW)
        self.steps = 0

    @property
    def is_home(self) -> bool:
        """Return whether the way home has ended. Whoever waits for it asks in each step: it is a sign of life."""
        return self._asked("state").is_home

    @property
    def leader(self) -> str:
        """Return what the leader arm does: LIMP, FOLLOWS or TOUCHED (guard/lead.py)."""
        return self.guard.latest.leader

    def lead(self, *, follows: bool) -> None:
        """Let the leader arm follow from now on, or go limp. One that cannot be led stays as it is."""
        if self._leads:
            with suppress(RobotFault):
                self.guard.call("follow" if follows else "let_go")

    def hold_leader(self, holds: bool) -> None:
        """Let a leader arm that follows stay where it is until the robot moves, or come to it although it holds."""
        if self._leads:
            with suppress(RobotFault):
                self.guard.call("stay" if holds else "come")

    def stop(self) -> None:
        """Hold now, also after a fault; without a guard there is nothing that could move."""
        with suppress(RobotFault):
            self.guard.call("hold")

    def recover(self) -> None:
        """Clear a fault, once a person has said ready; start a new guard if there is none. Moves nothing."""
        if not self.guard.is_open:
            try:
                self.guard.begin()
            except ConfigError as error:
                raise RobotFault(str(error), "guard") from None
        self._asked("recover", patience=SLOW)

    def close(self) -> None:
        """Hold, give the arm back and end the guard; may be called twice."""
        with suppress(RobotFault):
            self.guard.call("close", patience=SLOW)
            if any(self.counts.values()):
                log.info("targets since the guard began: %(limited)d limited, %(refused)d refused", self.counts)
        self.guard.end("is closed")

    def _action(self, target: Array) -> Array:
        """Return the action [A] that leads to this target [J] from the one before it."""
        action = target if self._stroke is None else (target - self._before) / self._stroke
        return np.clip(action.astype(self.action.dtype), self.action.low, self.action.high)

    def _asked(
        self, kind: str, positions: Sequence[float] = (), *, seed: int = 0, patience: float = ANSWER, but: str = ""
    ) -> Reply:
        """Return the guard's reply. Raises RobotFault if there is none, or for a fault of another kind than `but`."""
        reply = self.guard.call(kind, positions, seed=seed, patience=patience)
        failed, text = reply.fault or (but, "")
        if failed != but:
            raise RobotFault(text, failed)
        return reply


class GuardedCamera:
    """Gives an image that the arm itself observes; a Camera. It is as new as the robot's latest observation."""

    trouble = ""

    def __init__(self, feature: Feature) -> None:
        self.feature = feature
        self.frame = Frame(np.zeros(feature.shape, np.uint8), clock.monotonic())

    def latest(self) -> Frame:
        return self.frame

    def close(self) -> None:
        pass


def _plain(written: Any) -> Any:
    """Return a yaml's mappings and lists as those of Python."""
    if isinstance(written, Mapping):
        return {str(name): _plain(value) for name, value in written.items()}
    if isinstance(written, Sequence) and not isinstance(written, str):
        return [_plain(value) for value in written]
    return written
