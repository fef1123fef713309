"""Gives each step's episode return, success and end as columns of a batch.

They are known once the episode is closed:
    episode.return: discounted sum of rewards from this step to the episode's end, with the reward of a verdict
    episode.success: the episode succeeded; not known of one that nobody has judged
    episode.index: the step's number in its episode, from 0
    episode.remaining: how many steps follow it in its episode
"""

from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray
from serl_client.spec import Array, Feature

from serl_launcher.replay.choice import Numbers

RETURN, SUCCESS, INDEX, REMAINING = (f"episode.{name}" for name in ("return", "success", "index", "remaining"))
EPISODE = {
    RETURN: Feature((), "float32"), SUCCESS: Feature((), "bool"), INDEX: Feature((), "int64"),
    REMAINING: Feature((), "int64"),
}  # fmt: skip
UNKNOWN = -1
NOWHERE = np.iinfo(np.uint64).max  # no step has this number


class EpisodeColumns:
    """Holds, for each step of a source's closed episodes, the return to go, the success and the steps that remain.

    A slot of the ring counts for the step that wrote it alone, so eviction needs no word.
    capacity: of the source, in steps.
    """

    def __init__(self, capacity: int) -> None:
        self._number = np.full(capacity, NOWHERE, np.uint64)
        self._remaining = np.zeros(capacity, np.int64)
        self._success = np.full(capacity, UNKNOWN, np.int8)
        self._returns: dict[float, Array] = {}  # by discount

    def wants(self, discount: float) -> bool:
        """Keep returns with this discount from now on. Returns whether it is new: then `put` all episodes again."""
        is_new = discount not in self._returns
        if is_new:
            self._returns[discount] = np.zeros(len(self._number), np.float32)
        return is_new

    def put(self, numbers: Numbers, rewards: Array, success: bool | None) -> None:
        """Take in a closed episode, or what has changed of it: all its steps [n], in order, and their rewards [n]."""
        slots = numbers % len(self._number)
        self._number[slots] = numbers
        self._remaining[slots] = np.arange(len(numbers) - 1, -1, -1)
        self._success[slots] = UNKNOWN if success is None else success
        for discount, column in self._returns.items():
            with np.errstate(over="ignore"):  # what is beyond float32 is found where it does harm (training/tracing.py)
                column[slots] = returns(rewards, discount)

    def is_known(self, names: Collection[str], numbers: Numbers) -> NDArray[np.bool_]:
        """Return for each of these steps whether all columns with these names are known."""
        slots = numbers % len(self._number)
        needs_end = not {RETURN, SUCCESS, REMAINING}.isdisjoint(names)
        found = (self._number[slots] == numbers) if needs_end else np.ones(numbers.shape, bool)
        return found & (self._success[slots] != UNKNOWN) if SUCCESS in names else found

    def values(self, name: str, numbers: Numbers, discount: float) -> Array:
        """Return a column, RETURN, SUCCESS or REMAINING, of these steps [...], where it is known."""
        slots = numbers % len(self._number)
        if name == RETURN:
            return self._returns[discount][slots]
        return self._success[slots] == 1 if name == SUCCESS else self._remaining[slots]


def returns(rewards: Array, discount: float) -> Array:
    """Return sum_k discount^k r_{t+k} for each step t of an episode, [n], in about log2(n) passes."""
    total, reach = rewards.astype(np.float64), 1  # the sums of the next `reach` rewards
    while reach < len(total):
        longer = total.copy()
        longer[:-reach] += discount**reach * total[reach:]
        total, reach = longer, 2 * reach
    return total
