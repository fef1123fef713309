"""Joins windows that reach past an episode's end with another episode, so that each entry is of use (Window.joins)."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from serl_launcher.replay.choice import Numbers

NONE = -1  # no such step, or no such row


@dataclass(frozen=True, slots=True)
class Drawn:
    """B windows as step and row numbers: H steps each, observed from P steps before the first to K after it."""

    steps: Numbers  # [B, H], the last valid one repeated where `valid` is False
    valid: NDArray[np.bool_]  # [B, H]
    length: Numbers  # [B], valid steps
    rows: Numbers  # [B, P + K + 1]: the row at each offset -P..K, clamped to the episode
    first: int  # P


@dataclass(frozen=True, slots=True)
class Links:
    """What the slot of each step says: [capacity] each, NONE where there is nothing."""

    row: Numbers  # of the observation before the step
    final: Numbers  # row of the episode's final observation, at its last step
    first: Numbers  # the episode's first step
    following: Numbers  # the next step of the episode
    ends: NDArray[np.bool_]  # it is the episode's last step


def joined(
    numbers: Numbers, horizon: int, links: Links, beginnings: Numbers, generator: np.random.Generator
) -> Drawn:  # fmt: skip
    """Return windows of `horizon` entries from these steps [B] on.

    beginnings: first steps of the episodes in which a window may go on. Every one is as likely, so that each entry is
        uniform over all steps, as the first one is. If there are none, a window begins its own episode anew.
    """
    shape = len(numbers), horizon
    steps, rows, valid = np.empty(shape, np.int64), np.empty(shape, np.int64), np.empty(shape, bool)
    is_final, own = np.zeros(len(numbers), bool), links.first[numbers % len(links.first)]
    for k in range(horizon):
        slots = numbers % len(links.row)
        final, following = links.final[slots], links.following[slots]
        steps[:, k], valid[:, k] = numbers, ~is_final
        rows[:, k] = np.where(is_final, final, links.row[slots])
        is_over = following == NONE
        goes_elsewhere = is_final | (is_over & ~(links.ends[slots] & (final != NONE)))
        is_final = is_over & ~goes_elsewhere
        numbers = np.where(is_over, numbers, following)
        if goes_elsewhere.any():
            among = beginnings if len(beginnings) else own
            numbers[goes_elsewhere] = among[generator.integers(len(among), size=goes_elsewhere.sum())]
    return Drawn(steps, valid, valid.sum(1), rows, 0)
