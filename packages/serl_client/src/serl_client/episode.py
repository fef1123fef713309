"""Defines what an actor records: segments of transitions of one episode, checked for NaN, and late outcomes."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from serl_client.names import check_names
from serl_client.spec import ROW, Array, Feature, Spec

COLUMNS = ROW  # each [T]
MAX_NUMBER = 1 << 53
UNSET = np.empty(0)
BEYOND = 100  # an executed action may exceed its bounds by this many times their distance


class NotFinite(ValueError):
    """Says that a column holds NaN, infinity, or a number that no sensor and no robot gives."""


@dataclass(frozen=True, slots=True)
class Stamp:
    """Names the directive, the phase and the version of the weights of a step; constant within a segment."""

    directive: int
    phase: str
    weights_version: int


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """Holds T consecutive steps of one episode, streamed as they happen.

    observation: {name: [T, ...]}. The segment that ends the episode has T+1 rows; the last is the final observation.
        An episode that a crash has cut has no such segment.
    action: [T, A], as executed.
    reward: float32 [T].
    intervened: bool [T], a human drove.
    chunk_start: bool [T], a new chunk of the policy began here.
    time: float64 [T], when the row's observation was there; seconds, the robot's clock.
    gap: bool [T], time passed without a step just before this one, so that no window joins the two. Default: False.
    chunk_delay: uint16 [T], where a chunk starts, how many of its first actions were skipped as too late: at most the
        number of the step, as it was asked for in this episode. Default: 0.
    extras: {name: [T, ...]}.
    """

    episode: str
    start: int
    task: str
    stamp: Stamp
    observation: Mapping[str, Array]
    action: Array
    reward: Array
    intervened: Array
    chunk_start: Array
    time: Array
    gap: Array = field(default_factory=lambda: UNSET)
    chunk_delay: Array = field(default_factory=lambda: UNSET)
    terminated: bool = False
    truncated: bool = False
    extras: Mapping[str, Array] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("gap", "chunk_delay"):
            if getattr(self, name) is UNSET:
                object.__setattr__(self, name, np.zeros(len(self.action), COLUMNS[name]))

    def __len__(self) -> int:
        return len(self.action)

    @property
    def ends(self) -> bool:
        """Return whether this is the last segment of its episode."""
        return self.terminated or self.truncated

    @property
    def columns(self) -> dict[str, Array]:
        """Return all that is recorded, {name: [T, ...]}; observations have T+1 rows if `ends`."""
        columns = {name: getattr(self, name) for name in ("action", *COLUMNS)}
        return {**self.observation, **self.extras, **columns}

    def check(self, spec: Spec) -> None:
        """Raise ValueError, naming the array, unless every array has the shape and dtype that `spec` gives it."""
        length = len(self)
        self._check_names_and_numbers()
        for kind, features, arrays, rows in (
            ("observation", spec.observation, self.observation, length + self.ends),
            ("extras", spec.extras, self.extras, length),
        ):
            if set(features) != set(arrays):
                raise ValueError(f"{kind} should hold {sorted(features)}, not {sorted(arrays)}")
            for name, feature in features.items():
                feature.check(name, arrays[name], (rows,))
        spec.action.check("action", self.action, (length,))
        for name, dtype in COLUMNS.items():
            array = getattr(self, name)
            if array.shape != (length,) or array.dtype != dtype:
                raise ValueError(f"{name} should be {dtype} [{length}], not {array.dtype} {list(array.shape)}")
        for name, array in self.columns.items():
            if array.dtype == bool and array.size and np.ascontiguousarray(array).view(np.uint8).max() > 1:
                raise ValueError(f"{name} should hold flags: each byte is 0 or 1")
        if (self.chunk_delay > np.where(self.chunk_start, self.start + np.arange(length), 0)).any():
            raise ValueError("chunk_delay is at most the number of its step where a chunk starts, and 0 elsewhere")
        self._check_values(spec)

    def _check_values(self, spec: Spec) -> None:
        """Raise NotFinite with the column's name, because training on one such number makes every weight NaN."""
        if name := not_finite(self.columns):
            raise NotFinite(f"{name} must be finite: it holds NaN or infinity")
        low, high = action_limits(spec.action)
        if not ((self.action >= low) & (self.action <= high)).all():
            raise NotFinite(f"action lies more than {BEYOND} times the distance of its bounds outside of them")
        if spec.action.one_hot and not (((self.action == 1).sum(1) == 1) & ((self.action != 0).sum(1) == 1)).all():
            raise NotFinite("action should be one-hot: 1 at the entry that was chosen, and 0 elsewhere")

    def _check_names_and_numbers(self) -> None:
        if len(self) == 0 or self.start < 0 or not self.episode:
            raise ValueError("a segment has an episode, a start >= 0 and at least one step")
        check_names("a segment", self.episode, self.task, self.stamp.phase)
        numbers = self.start, self.stamp.directive, self.stamp.weights_version
        if not all(0 <= number < MAX_NUMBER for number in numbers):
            raise ValueError("start, directive and weights version are numbers from 0 on")
        if self.terminated and self.truncated:
            raise ValueError("an episode is terminated or truncated, not both")


@lru_cache(8)
def action_limits(action: Feature) -> tuple[Array, Array]:
    """Return [A], [A]: the least and the largest action; a robot outside of its bounds returns step by step."""
    low, high = np.asarray(action.low, np.float64), np.asarray(action.high, np.float64)
    margin = BEYOND * (high - low)
    return low - margin, high + margin


def not_finite(arrays: Mapping[str, Array]) -> str:
    """Return the name of the first array that holds NaN or infinity; empty when none does."""
    named = ((name, array) for name, array in arrays.items() if array.dtype.kind == "f")
    return next((name for name, array in named if not np.isfinite(array).all()), "")


@dataclass(frozen=True, slots=True)
class Outcome:
    """Says how an episode ended. It is durable like a segment, and a later one may correct it.

    judged_by: `judge` (the environment), `reward model` (of stored episodes) or `operator`. The operator's latest
        outcome wins; all are kept. An actor's own discard, as of a demonstration that nobody drove, is that of a judge.
    """

    episode: str
    success: bool | None
    discard: bool = False
    judged_by: str = "judge"


Record = Segment | Outcome


@dataclass(frozen=True, slots=True)
class LostRecord:
    """Takes the place of a record that its actor cannot send.

    The actor's disk has damaged that record or an earlier one of the same episode. The store keeps a LostRecord like
    any record; the open episode ends before it, as truncated.
    """

    reason: str


QueuedRecord = Record | LostRecord  # each has one number of its session


def join(segments: Sequence[Segment]) -> Segment:
    """Join consecutive segments of one episode. Raises ValueError when one does not follow the one before it."""
    first, last = segments[0], segments[-1]
    for before, after in itertools.pairwise(segments):
        if after.episode != first.episode or after.start != before.start + len(before) or before.ends:
            raise ValueError(f"{after.episode}[{after.start}] does not follow {before.episode}[{before.start}]")

    def column(name: str) -> Array:
        return np.concatenate([getattr(segment, name) for segment in segments])

    def group(name: str) -> dict[str, Array]:
        return {key: np.concatenate([getattr(s, name)[key] for s in segments]) for key in getattr(first, name)}

    return Segment(
        first.episode, first.start, first.task, first.stamp, group("observation"), column("action"),
        *(column(name) for name in COLUMNS), terminated=last.terminated, truncated=last.truncated,
        extras=group("extras"),
    )  # fmt: skip
