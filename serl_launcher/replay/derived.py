"""Caches columns that an algorithm computes of stored steps (encodings, advantages): `derived.<name>`.

They are a part of the trainer's state, so that a run that resumes sees them as they were at its checkpoint.
"""

from collections.abc import Mapping
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from serl_client.spec import Array, Feature

from serl_launcher.replay.choice import Numbers

PREFIX = "derived."
NOWHERE = -1  # no step has this number
Named = TypeVar("Named")


def prefixed(named: Mapping[str, Named]) -> dict[str, Named]:
    return {PREFIX + name: each for name, each in named.items()}


class DerivedColumns:
    """Holds, for each step of a source, what was computed of it.

    A slot of the ring counts for the step that it was computed of alone. So the columns of an evicted step are gone,
    and the step that takes its place has none until they are computed.
    capacity: of the source, in steps. features: {name, with its PREFIX: one step's shape and dtype}.
    """

    def __init__(self, capacity: int, features: Mapping[str, Feature]) -> None:
        self.features, self._capacity = features, capacity
        self._numbers = {name: np.full(capacity, NOWHERE, np.int64) for name in features}
        self._values = {name: np.zeros((capacity, *each.shape), each.dtype) for name, each in features.items()}

    def put(self, name: str, numbers: Numbers, values: Array) -> None:
        """Keep what was computed of these steps, [n] and [n, ...]."""
        slots = numbers % self._capacity
        self._numbers[name][slots], self._values[name][slots] = numbers, values

    def is_known(self, name: str, numbers: Numbers) -> NDArray[np.bool_]:
        """Return for each of these steps [...] whether a column is known."""
        return self._numbers[name][numbers % self._capacity] == numbers

    def values(self, name: str, numbers: Numbers) -> Array:
        """Return a column of these steps [...]; zero where it is not known."""
        values, is_known = self._values[name][numbers % self._capacity], self.is_known(name, numbers)
        return np.where(is_known[(..., *[None] * (values.ndim - is_known.ndim))], values, values.dtype.type(0))

    def state_dict(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return the columns of which something is known, as they are in memory."""
        both = {"numbers": self._numbers, "values": self._values}
        named = [name for name in self.features if (self._numbers[name] != NOWHERE).any()]
        return {name: {kind: torch.from_numpy(each[name]) for kind, each in both.items()} for name in named}

    def load_state_dict(self, state: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Take over these columns. Those of another algorithm, or of another capacity, are left out."""
        for name, kept in state.items():
            if name in self.features and kept["values"].shape == self._values[name].shape:
                self._numbers[name][:], self._values[name][:] = kept["numbers"].numpy(), kept["values"].numpy()
