"""What an algorithm asks of the replay (Window), what it gets (Batch) and what it answers an actor (Decision)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import torch
from torch import Tensor

Observation = Mapping[str, Tensor]
Metrics = dict[str, Tensor]  # scalars without a gradient, by name
Carry = Any  # an actor's memory between decisions: a tree of tensors, None for a policy without memory


@dataclass(frozen=True, slots=True)
class IdleFilter:
    """When a window shows a robot that waits, so that a policy which imitates it would wait for ever.

    It does when no entry of `column` has a standard deviation above `threshold`, in the column's unit, from the
    window's first step to its end. `column`: `action`, or a float observation; `entries`: indices of its flattened
    values, None: all. An action that is a velocity or a step is constant in straight motion too, so for such a robot
    name an observation with measured positions.
    """

    threshold: float
    column: str = "action"
    entries: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Window:
    """Which columns an update wants, at which steps relative to the step t that was drawn.

    `offsets` maps a column to integer steps, each row of the batch being one t:
    - an observation's name (`observation.state`): that observation at t + offset, {name: [B, To, ...]}. A step before
      the episode's first or after its final observation repeats that one;
    - `action`: always there, and always 0..H-1. The columns of a step (reward, terminated, truncated, intervened,
      valid) come at the same offsets, [B, H]; what lies past the episode's end is zero with valid False. A gap, where
      time passed without a step, is such an end, too;
    - `next_observation`: (H,) if it is wanted at all. Every observation of this window at its own offsets plus the
      number of valid steps, so that a window that the end cut short sees the episode's final observation;
    - any other name: one of Spec.extras, or a derived column, at the action's offsets, in `Batch.extras`, [B, H, ...].
    `starts` says which steps may be drawn: `any`, or `chunk_start`, those where a new chunk began. With
    `idle_filter` no window starts where the robot waits; rows in which it waits still occur inside other windows.

    Raises ValueError for offsets that break these rules.
    """

    offsets: Mapping[str, tuple[int, ...]]
    starts: Literal["any", "chunk_start"] = "any"
    idle_filter: IdleFilter | None = None

    def __post_init__(self) -> None:
        actions = self.offsets.get("action", ())
        if not actions or actions != tuple(range(len(actions))):
            raise ValueError(f"a window's action is at the offsets 0..H-1, not {actions}")
        if self.offsets.get("next_observation", (self.horizon,)) != (self.horizon,):
            raise ValueError(f"next_observation follows the window's {self.horizon} actions: its offset is that number")

    @property
    def horizon(self) -> int:
        """H, the number of steps of this window."""
        return len(self.offsets["action"])


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """B windows of H steps, on one device; floats are float32, flags bool, images uint8.

    observation {name: [B, To, ...]}; action [B, H, A] in the robot's units; reward, valid, terminated, truncated,
    intervened [B, H]; length [B] int64, the number of valid steps (at least 1); weight [B], a factor on each row's
    loss; step_id [B] int64; seed [B] int64, which all chance in a row's loss comes from; next_observation
    {name: [B, To, ...]}, or None where the window does not ask for it; task: B names; extras {name: [B, H, ...]}.
    """

    observation: dict[str, Tensor]
    action: Tensor
    reward: Tensor
    valid: Tensor
    terminated: Tensor
    truncated: Tensor
    intervened: Tensor
    length: Tensor
    weight: Tensor
    step_id: Tensor
    seed: Tensor
    next_observation: dict[str, Tensor] | None = None
    task: tuple[str, ...] = ()
    extras: dict[str, Tensor] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.action)

    def to(self, device: torch.device | str) -> "Batch":
        """The same batch on `device`; the copy is done on return, so that the memory it came from may be used again."""
        return self._each(lambda value: value.to(device) if isinstance(value, Tensor) else value)

    def part(self, index: int, count: int) -> "Batch":
        """The rows of one of `count` equal parts."""
        size = len(self) // count
        return self._each(lambda value: value[index * size : (index + 1) * size])

    def _each(self, change: Callable[[Any], Any]) -> "Batch":
        return replace(self, **{column.name: _each(getattr(self, column.name), change) for column in fields(self)})


@dataclass(frozen=True, slots=True, eq=False)
class Decision:
    """What a policy chose: action [B, H, A] in the robot's units, and extras {name: [B, ...]} for the rows."""

    action: Tensor
    extras: dict[str, Tensor] = field(default_factory=dict)


def _each(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, dict):
        return {name: change(item) for name, item in value.items()}
    return None if value is None else change(value)
