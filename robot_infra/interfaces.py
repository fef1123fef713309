"""What RobotEnv asks of a robot, a camera, a teleoperation device and a judge, and what the person at the keys says."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from serl_client.env import Observation
from serl_client.errors import RetakeError
from serl_client.spec import Array, Feature


class RobotFault(RetakeError):
    """The robot, a sensor or its link failed: it was told to stop, and a person looks at it before it moves again."""


@dataclass(frozen=True, slots=True, eq=False)
class Frame:
    """One image, uint8 [height, width, channel], and when it was taken (seconds, time.monotonic())."""

    image: Array
    time: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a judge says of one row; `success` is None where it cannot tell."""

    reward: float
    terminated: bool
    success: bool | None


class Robot(Protocol):
    """A robot that takes one command for each row; a simulated one lives one tick for each command.

    A failure is raised as RobotFault. Arrays that it returns are fresh: the caller keeps them.
    """

    observation: Mapping[str, Feature]  # what observe() gives, without images
    action: Feature  # with bounds and names
    space: str  # what an action means: "ee_delta", "joint_position", ...

    def observe(self) -> Observation:
        """The state now, {name: array of the feature's shape and dtype}."""
        ...

    def command(self, action: Array) -> Array:
        """Send an action [A]; return [A], what was really sent."""
        ...

    def hold_action(self) -> Array:
        """The action [A] that keeps the robot where it is: zeros for a delta, the last command for a position."""
        ...

    def home(self, seed: int) -> None:
        """Move to where episodes start; a simulated robot lays out the scene that `seed` names, a real one cannot."""
        ...

    def stop(self) -> None:
        """Hold now; may be called twice, and after a fault."""
        ...

    def close(self) -> None:
        """Give the connection back; may be called twice, and after a fault."""
        ...


class Camera(Protocol):
    """A camera that captures on its own; asking for its latest frame does not wait for the next one."""

    feature: Feature  # uint8 [height, width, channel]

    def latest(self) -> Frame: ...

    def close(self) -> None: ...


class Teleop(Protocol):
    """A device, or a script, with which somebody moves the robot."""

    space: str  # the Robot.space of its actions

    def reset(self, seed: int, *, demonstrate: bool = True) -> None:
        """An episode begins: one to `demonstrate` as a whole, or else one to take over where it seems right.

        A script draws its noise from `seed`.
        """
        ...

    def read(self) -> Array | None:
        """The action [A] wanted now, or None while nobody touches the device. Never blocks."""
        ...

    def close(self) -> None: ...


class Judge(Protocol):
    """Reward and success of a row, from its observation. Never blocks."""

    def __call__(self, observation: Observation) -> Verdict: ...


class Operator(Protocol):
    """The person who watches, and what they say: pause, stop, success, failure, discard, next."""

    def poll(self) -> Sequence[str]:
        """The events since the last poll, oldest first. Never blocks."""
        ...

    def close(self) -> None: ...
