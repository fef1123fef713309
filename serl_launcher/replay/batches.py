"""Allocates the memory of batches once, uses it again for each, and makes a Batch of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
from serl_client.spec import Array, Feature, Spec

from serl_launcher.replay.windows import batch_arrays
from serl_launcher.store.layout import Layout
from serl_launcher.types import Batch, Window


@dataclass(slots=True, eq=False)
class BatchMemory:
    """The memory of all batches of one window and size, or a part of it.

    window: kept, because the memory is found by its id. batch: of this memory, as it was drawn last.
    """

    window: Window
    batch: Batch
    seeds: Array  # of the batch
    arrays: dict[str, Array]  # the other columns that are drawn
    is_single: bool
    copied: Any = None  # an event of a GPU: the last batch has left this memory
    _shares: dict[tuple[int, int], "BatchMemory"] = field(init=False, default_factory=dict)

    def __len__(self) -> int:
        return len(self.arrays["step_id"])

    def share(self, begin: int, end: int) -> "BatchMemory":
        """Return a part, which is kept for the next batch."""
        if (begin, end) not in self._shares:
            self._shares[begin, end] = self.part(begin, end)
        return self._shares[begin, end]

    def part(self, begin: int, end: int) -> "BatchMemory":
        if begin == 0 and end == len(self):
            return self
        return replace(self, arrays={name: array[begin:end] for name, array in self.arrays.items()})


def batch_of(
    arrays: Mapping[str, torch.Tensor], spec: Spec, window: Window, seed: torch.Tensor, weight: torch.Tensor,
    task: tuple[str, ...],
) -> Batch:  # fmt: skip
    names = [name for name in window.offsets if name in spec.observation]
    columns = ("action", "reward", "valid", "terminated", "truncated", "intervened", "length", "step_id")
    following = {name: arrays[f"next.{name}"] for name in names} if "next_observation" in window.offsets else None
    return Batch(
        observation={name: arrays[name] for name in names},
        **{name: arrays[name] for name in columns},
        weight=weight,
        seed=seed,
        next_observation=following,
        task=task,
        extras={name: arrays[name] for name in window.offsets if name in arrays and name not in (*names, "action")},
    )


def blank(
    spec: Spec, window: Window, count: int, made: Mapping[str, Feature] = MappingProxyType({})
) -> Batch:  # fmt: skip
    """Return a batch of zeros in the shapes of ReplayMixture.sample. made: as in batch_arrays."""
    arrays = {
        name: torch.zeros(shape, dtype=getattr(torch, dtype))
        for name, (shape, dtype) in batch_arrays(Layout(spec, 1), count, window, made).items()
    }
    return batch_of(arrays, spec, window, torch.zeros(count, dtype=torch.int64), torch.ones(count), ("",) * count)
