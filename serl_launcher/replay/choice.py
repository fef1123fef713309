"""Holds which steps of a source a window may start at: a bool per slot, so that a change costs little."""

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.int64]
BLOCK = 128  # slots that are counted together


class Choice:
    """A set of the steps [tail, head) of a ring with `capacity` slots.

    `put` and `evict` cost as much as they change. `nth` looks at one block of slots for each step that it finds.
    """

    def __init__(self, capacity: int) -> None:
        self.tail = self.head = 0
        self._capacity = capacity
        self._chosen = np.zeros((-(-capacity // BLOCK), BLOCK), bool)
        self._counts = np.zeros(len(self._chosen), np.int64)
        self._ends: Numbers | None = None  # [blocks] steps chosen up to each block's end; None: count again

    def put(self, numbers: Numbers, chosen: NDArray[np.bool_]) -> None:
        """Set for each of these steps [n] whether it is chosen [n]. No two of them may share a slot."""
        slots, flat = numbers % self._capacity, self._chosen.reshape(-1)
        changed = chosen != flat[slots]
        if changed.any():
            flat[slots] = chosen
            np.add.at(self._counts, slots[changed] // BLOCK, np.where(chosen[changed], 1, -1))
            self._ends = None

    def evict(self, tail: int) -> None:
        """Forget the steps below `tail`."""
        if tail > self.tail:
            numbers = np.arange(max(self.tail, self.head - self._capacity), min(tail, self.head))
            self.put(numbers, np.zeros(len(numbers), bool))
            self.tail, self.head = tail, max(self.head, tail)

    def holds(self, numbers: Numbers) -> NDArray[np.bool_]:
        """Return for each of these steps [n], none below `tail`, whether it is chosen."""
        return (numbers < self.head) & self._chosen.reshape(-1)[numbers % self._capacity]

    def __len__(self) -> int:
        return int(self._totals()[-1])

    def nth(self, ranks: Numbers) -> Numbers:
        """Return the chosen steps [n] with these ranks [n], counted in the order of their slots from 0."""
        totals = self._totals()
        blocks = np.searchsorted(totals, ranks, side="right")
        inside = ranks - (totals[blocks] - self._counts[blocks])
        seen = np.cumsum(self._chosen[blocks], axis=1, dtype=np.uint8)
        slots = blocks * BLOCK + (seen <= inside[:, None]).sum(1)
        return self.tail + (slots - self.tail) % self._capacity

    def _totals(self) -> Numbers:
        if self._ends is None:
            self._ends = np.cumsum(self._counts)
        return self._ends
