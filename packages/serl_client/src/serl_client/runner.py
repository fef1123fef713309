"""The actor's loop: one environment, one controller, one client; it follows the directive."""

from dataclasses import dataclass
from typing import Protocol

from serl_client.spec import Array, Spec

Observation = dict[str, Array]


@dataclass(frozen=True, slots=True)
class Step:
    """What one tick gave: the next observation, and what was really executed for it.

    `success` is None while undecided (and always, where the task knows no success).
    """

    observation: Observation
    reward: float
    executed: Array  # [A]
    intervened: bool
    terminated: bool
    truncated: bool
    success: bool | None


class Env(Protocol):
    """What the runner drives: a RobotEnv, or any gymnasium task."""

    spec: Spec
    task: str  # the task in words: the prompt of a policy that reads one
    clock: str  # "real": step() takes 1/fps; "simulated": it takes what it takes, and waits for nobody's permission
    has_operator: bool  # a teleop that can demonstrate

    def reset(self, seed: int, *, teleop: bool = False) -> Observation:
        """Begin an episode at the start that `seed` names; with `teleop` the operator drives all of it."""
        ...

    def step(self, action: Array | None) -> Step:
        """One tick. None: no action came in time, hold. In a teleop episode the argument is ignored."""
        ...

    def stop(self) -> None:
        """Hold now; may be called twice."""
        ...

    def close(self) -> None: ...
