"""Defines hardware interfaces: what a robot, camera, teleoperation device, judge or operator implements."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from serl_client import person
from serl_client.env import Observation
from serl_client.spec import Array, Feature


@dataclass(frozen=True, slots=True, eq=False)
class Reading:
    """Holds what a robot measured at one time: its state, without images.

    time: when it was measured; seconds, time.monotonic().
    executed: the action [A] that the arm itself made of the latest command; None: it took the command as it was.
    """

    values: Observation
    time: float
    executed: Array | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Frame:
    """Holds one image, uint8 [height, width, channel], and its time (seconds, time.monotonic()).

    changed: when the image last differed from the one before it, seconds; None: it is drawn anew whenever one asks.
    """

    image: Array
    time: float
    changed: float | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Hand:
    """Holds what a person does with one device at one time.

    motion: {entry of an action: share of its full speed, -1 to 1}, of x (forwards), y (to the left), z (up), roll,
        pitch and yaw; empty: nobody moves the device.
    gripper: 1 closes it, -1 opens it, 0: neither.
    positions: where a leader arm is, as an action [A]; None: the device is no arm.
    words: what was said since the reading before: events of serl_client.person.Operator, "toggle" (take over, or hand
        back) and "take over" (until a toggle).
    moved: a leader arm has moved since `forget`.
    """

    motion: Mapping[str, float] = field(default_factory=dict)
    gripper: int = 0
    positions: Array | None = None
    words: Sequence[str] = ()
    moved: bool = False


STAGE = "stage"  # a row's column, where the task has stages: how many of them the observation after its step shows


@dataclass(frozen=True, slots=True)
class Verdict:
    """Holds a judge's verdict on one step; `success` and `stage` are None if the judge cannot tell.

    stage: how many of the task's stages the observation shows, 0 to all of them; the last one is success.
    """

    reward: float
    terminated: bool
    success: bool | None
    stage: int | None = None


class Robot(Protocol):
    """Describes a robot that takes one command per step; in simulation one command is one step of time.

    It raises RobotFault for a failure, and holds then. It returns fresh arrays, which the caller may keep.
    """

    observation: Mapping[str, Feature]  # what observe() gives, without images
    action: Feature  # with bounds and names
    space: str  # what an action means: "ee_delta", "joint_position", ...

    @property
    def is_home(self) -> bool:
        """Whether the robot has arrived where `home` sends it."""
        ...

    def observe(self) -> Reading:
        """Return the state now: its values are {name: array of the feature's shape and dtype}."""
        ...

    def command(self, action: Array) -> Array:
        """Send an action [A]; return the action [A] that was really sent."""
        ...

    def hold_action(self) -> Array:
        """Return the action [A] that holds the robot still: zeros for a delta, the last command for a position."""
        ...

    def home(self, seed: int) -> None:
        """Begin to move slowly to where episodes start, until `stop`. A simulated robot is there at once, and sets up
        the scene that `seed` names."""

    def return_home(self, seed: int) -> None:
        """Begin to drive home through the robot's waypoints, until `stop`. The scene stays, in a simulation, too.

        seed: of what the waypoints leave to chance. Raises ConfigError for a robot that cannot.
        """

    def recover(self) -> None:
        """Clear a fault, once a person has said that the robot may move again; hold. Without a fault do nothing."""

    def stop(self) -> None:
        """Hold now; may be called twice, and after a fault."""

    def close(self) -> None:
        """Give the connection back; may be called twice, and after a fault."""


class Camera(Protocol):
    """Describes a camera that captures on its own; `latest` does not wait for the next frame."""

    feature: Feature  # uint8 [height, width, channel]
    trouble: str  # why there are no new frames; empty: it knows of nothing

    def latest(self) -> Frame:
        """Return the latest frame. Its image is not written into again."""
        ...

    def close(self) -> None:
        """Give the device back; may be called twice."""


class Teleop(Protocol):
    """Describes a device, or a script, that moves the robot instead of the policy."""

    space: str  # the Robot.space of its actions

    def reset(self, seed: int, *, demonstrate: bool = True) -> None:
        """Begin an episode.

        seed: a script draws its noise from it.
        demonstrate: the device drives the whole episode; else it takes over where it seems right.
        """

    def read(self, hold: Array) -> Array | None:
        """Return the action [A] wanted now, or None while nobody drives. Never blocks.

        hold: the action [A] that would hold the robot, and what it grips, still. Raises RobotFault if the device fails.
        """
        ...

    def close(self) -> None: ...


class Device(Protocol):
    """Describes what a person has in hand; `Hands` (teleop/hands.py) makes a Teleop of several."""

    asks: bool  # whether a person can say ready with it
    legend: Mapping[str, str]  # {name: what its keys do}, for the console

    @property
    def moves(self) -> frozenset[str] | None:
        """The entries of an action that it can move; None: all."""
        ...

    def read(self) -> Hand:
        """Return what the person does now. Never blocks. Raises RobotFault if the device is gone."""
        ...

    def forget(self, *, hands_back: bool) -> None:
        """Forget motions that were begun before now. hands_back: and a leader arm may come to its robot; else it stays
        where it is until the robot moves."""

    def hand_over(self, *, to_person: bool) -> None:
        """Take note of who drives from now on: the person, or the policy or nobody."""

    def close(self) -> None:
        """Give the device back; may be called twice."""


class Judge(Protocol):
    """Describes a judge, which gives reward and success of a step from its observation. Never blocks."""

    def __call__(self, observation: Observation) -> Verdict: ...

    def reset(self) -> None:
        """Begin an episode."""

    def close(self) -> None:
        """Give back what it holds; may be called twice."""


class Operator(person.Operator, Protocol):
    """Describes the person who watches, at a device that is given back."""

    def close(self) -> None: ...
