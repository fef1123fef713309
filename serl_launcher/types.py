"""Defines what an algorithm asks of the replay (Window), what it gets (Batch), and what a policy answers (Decision)."""

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
    """Excludes windows in which the robot waits, because a policy that imitates them would wait for ever.

    A robot waits if no entry of a column has a standard deviation above the threshold, from the window's first step to
    its end.
    threshold: standard deviation, in the column's unit.
    column: `action`, or a float observation. A velocity or a relative step is constant in straight motion, too. If
        actions are of that kind, name an observation with measured positions.
    entries: indices of the column's flattened values; None: all.
    """

    threshold: float
    column: str = "action"
    entries: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Window:
    """Names the columns that an update needs, and at which steps. Each row of a batch is one drawn step t.

    offsets: {column: whole steps relative to t}. The columns are:
        - an observation (`observation.state`), [B, To, ...]: before the episode's first step it repeats the first one,
          after the episode's end the final one;
        - `action`: required, and always 0..H-1. Reward, terminated, truncated, intervened and valid have the same
          offsets, [B, H]. Behind the episode's end they are zero, and valid is False. A gap, where time passed without
          a step, counts as an end;
        - `next_observation`: (H,). Each observation of this window, at its own offsets plus the number of valid steps.
          A window that the end cut short sees the episode's final observation;
        - one of Spec.extras: at the action's offsets, in `Batch.extras`, [B, H, ...]; or at (0,), [B, 1, ...];
        - `episode.return`, `episode.success`, `episode.index`, `episode.remaining`: likewise, [B, H]. They tell of each
          step: the sum of rewards from it to its episode's end, discounted by `discount` per step, with the reward of
          an operator's verdict (float32); whether the episode succeeded (bool); its index in the episode, and how many
          steps follow it there (int64). A gap does not end them: they are of the whole episode. Each part of an episode
          that was cut is an episode of its own, with the success of the whole.
        - `derived.<name>` for a name in `Algorithm.derived`: likewise. An update has computed it, of these steps.
    starts: which steps may be drawn: `any`; `chunk_start`: steps at which a new chunk began; `episode_start`: the first
        step of each episode.
    idle_filter: no window starts where the robot waits; such steps may still occur later in a window. None: no filter.
    discount: of `episode.return`, per step.
    joins: a window that is drawn goes on in other episodes of its source, so that every entry is of use. An episode is
        followed by its final observation, where valid is False and action and reward are zero; then by the beginning of
        one that is drawn uniformly, whose `episode.index` is 0. So each entry of a window, too, is uniform over all
        steps. After a gap, or the newest step, no final observation is known, and the next beginning follows at once.
        All columns are at the action's offsets. A derived one may be at (0,) and is zero where it is not known.
        Batch.step_id is [B, H], -1 where there is no step.

    A window starts only where all that it asks for is known. Of an open episode return, success and remaining are not
    known yet, because its end is not. Success is not known of an episode that nobody has judged. A verdict that comes
    late, or is taken back, changes all of them.

    Raises ValueError for offsets that break these rules.
    """

    offsets: Mapping[str, tuple[int, ...]]
    starts: Literal["any", "chunk_start", "episode_start"] = "any"
    idle_filter: IdleFilter | None = None
    discount: float = 1.0
    joins: bool = False

    def __post_init__(self) -> None:
        actions = self.offsets.get("action", ())
        if not actions or actions != tuple(range(len(actions))):
            raise ValueError(f"a window's action is at the offsets 0..H-1, not {actions}")
        if self.offsets.get("next_observation", (self.horizon,)) != (self.horizon,):
            raise ValueError(f"next_observation follows the window's {self.horizon} actions: its offset is that number")
        strange = {name for name, offsets in self.offsets.items() if offsets != actions}
        strange -= {name for name in strange if name.startswith("derived.") and self.offsets[name] == (0,)}
        strange |= {name for name in self.offsets if name.startswith("episode.")} - {"episode.index"}
        if self.joins and (strange or self.idle_filter is not None):
            raise ValueError(
                f"a window that joins episodes has no idle_filter, and not these columns: {sorted(strange)}"
            )

    @property
    def horizon(self) -> int:
        """H, the number of steps of this window."""
        return len(self.offsets["action"])


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Holds B windows of H steps, on one device; floats are float32, flags bool, images uint8.

    observation: {name: [B, To, ...]}.
    action: [B, H, A], in the robot's units.
    reward, valid, terminated, truncated, intervened: [B, H].
    length: [B] int64, the number of valid steps, at least 1.
    weight: [B], a factor on each row's loss.
    step_id: [B] int64; [B, H] of a window that joins episodes.
    seed: [B] int64. All random numbers in a row's loss come from it.
    next_observation: {name: [B, To, ...]}; None if the window does not ask for it.
    task: B tasks in words.
    extras: {name: [B, H, ...], or [B, 1, ...]}, as the window asks.
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

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> "Batch":
        """Copy the batch to `device`.

        non_blocking: return at once. The source, in pinned memory, must stay as it is until the device has copied it.
        """
        return self._each(
            lambda value: value.to(device, non_blocking=non_blocking) if isinstance(value, Tensor) else value
        )

    def part(self, index: int, count: int) -> "Batch":
        """The rows of one of `count` equal parts."""
        size = len(self) // count
        return self._each(lambda value: value[index * size : (index + 1) * size])

    def rows(self, chosen: Tensor) -> "Batch":
        """Return the rows with these numbers, [n] int64, copied."""
        numbers = chosen.tolist()
        return self._each(
            lambda value: value[chosen] if isinstance(value, Tensor) else tuple(value[number] for number in numbers)
        )

    def _each(self, change: Callable[[Any], Any]) -> "Batch":
        return replace(self, **{column.name: _each(getattr(self, column.name), change) for column in fields(self)})


@dataclass(frozen=True, slots=True, eq=False)
class Prefix:
    """What is left of B chunks under way when the next ones are asked for.

    action: [B, H, A] float32, in the robot's units, from the step of the question on; zeros behind what is left.
    committed: [B] int64, how many of these actions the robot executes before the answer is due; 0: nothing is left.
    left: [B] int64, how many of them there are.
    """

    action: Tensor
    committed: Tensor
    left: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Decision:
    """What a policy chose.

    action: [B, H, A], in the robot's units.
    extras: {name: [B, ...]}, named in `extras` of the algorithm's yaml. Each row on which an action of the chunk acts
        has them as columns; in other rows they are zero.
    trouble: why rows whose action is not finite have none, in words for the log; "": the network's numbers.
    """

    action: Tensor
    extras: dict[str, Tensor] = field(default_factory=dict)
    trouble: str = ""


Measured = Mapping[str, tuple[Window, Callable[[Batch], Tensor]]]  # {name of statistics: (window, its numbers [n, A])}


def _each(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, dict):
        return {name: change(item) for name, item in value.items()}
    return None if value is None else change(value)
