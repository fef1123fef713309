"""Protocols of the parts of a RobotEnv: robot, camera, teleoperation device, judge and operator."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from serl_client import person
from serl_client.env import Observation
from serl_client.spec import Array, Feature


@dataclass(frozen=True, slots=True, eq=False)
class Frame:
    """Holds one image, uint8 [height, width, channel], and its time (seconds, time.monotonic())."""

    image: Array
    time: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """Holds a judge's verdict on one step; `success` is None if the judge cannot tell."""

    reward: float
    terminated: bool
    success: bool | None


class Robot(Protocol):
    """Describes a robot that takes one command per step; in simulation one command is one step of time.

    It raises RobotFault for a failure, and holds then. It returns fresh arrays, which the caller may keep.
    """

    observation: Mapping[str, Feature]  # what observe() gives, without images
    action: Feature  # with bounds and names
    space: str  # what an action means: "ee_delta", "joint_position", ...

    @property
    def is_home(self) -> bool:
        """Whether the way that `home` began has ended."""
        ...

    def observe(self) -> Observation:
        """Return the state now, {name: array of the feature's shape and dtype}."""
        ...

    def command(self, action: Array) -> Array:
        """Send an action [A]; return the action [A] that was really sent."""
        ...

    def hold_action(self) -> Array:
        """Return the action [A] that holds the robot still: zeros for a delta, the last command for a position."""
        ...

    def home(self, seed: int) -> None:
        """Begin to move, slowly, to where episodes start; `stop` ends the way. A simulated robot is there at once, and
        sets up the scene that `seed` names."""
        ...

    def recover(self) -> None:
        """Clear a fault, once a person has said that the robot may move again; hold. Without a fault do nothing."""
        ...

    def stop(self) -> None:
        """Hold now; may be called twice, and after a fault."""
        ...

    def close(self) -> None:
        """Give the connection back; may be called twice, and after a fault."""
        ...


class Camera(Protocol):
    """Describes a camera that captures on its own; `latest` does not wait for the next frame."""

    feature: Feature  # uint8 [height, width, channel]

    def latest(self) -> Frame:
        """Return the latest frame. Its image is not written into again."""
        ...

    def close(self) -> None:
        """Give the device back; may be called twice."""
        ...


class Teleop(Protocol):
    """Describes a device, or a script, that moves the robot instead of the policy."""

    space: str  # the Robot.space of its actions

    def reset(self, seed: int, *, demonstrate: bool = True) -> None:
        """Begin an episode.

        seed: a script draws its noise from it.
        demonstrate: the device drives the whole episode; else it takes over where it seems right.
        """
        ...

    def read(self) -> Array | None:
        """Return the action [A] wanted now, or None while nobody touches the device. Never blocks."""
        ...

    def close(self) -> None: ...


class Judge(Protocol):
    """Describes a judge, which gives reward and success of a step from its observation. Never blocks."""

    def __call__(self, observation: Observation) -> Verdict: ...


class Operator(person.Operator, Protocol):
    """Describes the person who watches, at a device that is given back."""

    def close(self) -> None: ...
