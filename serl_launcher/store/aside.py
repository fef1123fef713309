"""Sets an episode aside that holds an absurd value (a limit for outliers): it is kept, listed and never drawn.

One value that is finite and absurd (3e38) makes the gradient of every batch that holds it infinite. The record is
stored as it came. Its episode is discarded by an Outcome of the learner itself, so that readers have nothing new to
know.
"""

from typing import Protocol

import numpy as np
from serl_client.episode import MAX_NAME, Outcome, Segment
from serl_client.spec import Array

LIMIT = 1e6  # of any float: in usual units no sensor exceeds it, and float32 holds the sum of many squares of it
LIMITS = {"time": 1e11}  # seconds, 3,000 years: robots count from 1970, or from their start
LEARNER = "learner"  # begins `judged_by` of the learner's own outcomes; the reason follows
SESSION = LEARNER.ljust(MAX_NAME + 1, ".")  # of these outcomes: longer than any that an actor may name
REMEDY = (
    "kept on disk and never drawn. tools/store.py show RUN lists it; if the value is right, tools/label.py EPISODE "
    "success or failure takes the episode back, and a unit with smaller numbers helps those to come"
)


class Judged(Protocol):
    """What was said of an episode: an Outcome, an Episode of the index, or an EpisodeInfo."""

    @property
    def discard(self) -> bool: ...
    @property
    def judged_by(self) -> str: ...


def absurd(segment: Segment) -> str:
    """Return which value of a segment cannot be, with its column and step; empty if none is beyond its limit."""
    columns = {**segment.observation, **segment.extras, "reward": segment.reward, "time": segment.time}
    for name, array in columns.items():
        limit = LIMITS.get(name, LIMIT)
        if array.dtype.kind == "f" and float(np.abs(array).max(initial=0)) > limit:
            row, value = _largest(array)
            return f"{name:.80} holds {value:.3g} at step {segment.start + row}, beyond {limit:.0e}"
    return ""


def outcome_of(episode: str, reason: str) -> Outcome:
    """Return what the learner says of an episode that it sets aside."""
    return Outcome(episode, None, discard=True, judged_by=f"{LEARNER}: {reason}"[:MAX_NAME])


def is_aside(said: Judged) -> bool:
    """Return whether an episode is set aside: the learner's word is the last one that counts."""
    return bool(said.discard) and said.judged_by.startswith(LEARNER)


def reason_of(said: Judged) -> str:
    return said.judged_by.removeprefix(f"{LEARNER}: ")


def _largest(array: Array) -> tuple[int, float]:
    """Return (row, value) of the number that is farthest from 0, in [T, ...]."""
    at = int(np.abs(array).argmax())
    return at // (array.size // len(array)), float(array.reshape(-1)[at])
