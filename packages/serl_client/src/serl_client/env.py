"""Defines the environment interface (Env), and what a step returns: observation, reward, end, success."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from serl_client.spec import Array, Spec

Observation = dict[str, Array]
# Who brings the scene back between two episodes; a Resets does in all but the first two.
AUTO, OPERATOR, WAYPOINTS, OTHER_TASK, POLICY = RESETS = ("auto", "operator", "waypoints", "other_task", "policy")
KEPT = (WAYPOINTS, OTHER_TASK, POLICY)


@dataclass(frozen=True, slots=True)
class Step:
    """Holds what one control step gave: the next observation, and what was really executed for it.

    success: None while undecided, and always None where the task knows no success.
    extras: columns of this step that the Spec names and the environment knows, such as the age of a camera's image.
    stale: what in `observation` does not show the world as it is now, such as the image of a camera that stands still.
        Such a step is not recorded, and the episode is cut off before it; empty: all is well.
    driven: False: whoever was to drive this step, policy or operator, gave no action, and the robot held.
    """

    observation: Observation
    reward: float
    executed: Array  # [A]
    intervened: bool
    terminated: bool
    truncated: bool
    success: bool | None
    extras: Mapping[str, Array] = field(default_factory=dict)
    stale: str = ""
    driven: bool = True


class Env(Protocol):
    """Describes what the runner drives: a RobotEnv, or any gymnasium task. Each method may raise RobotFault; whatever
    else it raises is taken for one."""

    spec: Spec
    clock: str  # "real": step() takes 1/fps seconds; "simulated": it waits for nothing
    has_operator: bool  # a teleop that can demonstrate
    observed: float  # when the latest observation's state was measured; seconds, time.monotonic(). Real clock only

    @property
    def task(self) -> str:
        """The task of this episode, or of the next one, in words: the prompt of a policy that reads one."""
        ...

    @property
    def is_home(self) -> bool:
        """Whether the robot has arrived where `home` sends it."""
        ...

    def home(self, seed: int) -> None:
        """Begin to move to the start that `seed` names, until `stop`. A simulated robot is there at once."""

    def reset(self, seed: int, *, teleop: bool = False, intervene: bool = False) -> Observation:
        """Begin an episode at the start that `seed` names, and return its first observation.

        It goes there first, and waits, unless `home` has been called for this seed.
        teleop: the operator drives all of it. intervene: the operator may take over single steps; else nobody does.
        """
        ...

    def look(self) -> bool:
        """Read the operator's device for the next step, and return whether they drive it. Without a look before it,
        the step reads the device itself."""
        ...

    def step(self, action: Array | None) -> Step:
        """Make one control step with `action` [A]; None: hold, because no action came in time.

        In a step that the operator drives, the operator's action is executed instead.
        """
        ...

    def stop(self) -> None:
        """Hold now; may be called twice."""

    def recover(self) -> None:
        """Clear a RobotFault, and hold. Of a real robot, once a person has said that it may move again; a simulated one
        is made again where that can help."""

    def close(self) -> None:
        """Give the devices back; may be called twice."""


class Resets(Protocol):
    """Describes what brings the scene back between two episodes, as far as it can without a person."""

    @property
    def trouble(self) -> str:
        """Why the scene cannot be a start, so that a person has to set it up; empty: it can. The robot is home."""
        ...

    @property
    def returns(self) -> bool:
        """Whether the policy has to bring the scene back, before the next episode: nothing of that is recorded."""
        ...

    def ended(self, success: bool | None) -> None:
        """Take note that an episode, or a way back, has ended: it decides on the task of the next one."""

    def corrected(self, success: bool | None) -> None:
        """Take note that a person has judged the latest episode after its end."""

    def set_up(self) -> None:
        """Take note that a person has set up the scene. A simulation does it itself, on the next way home."""
