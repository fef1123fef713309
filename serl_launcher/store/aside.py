"""Sets an episode aside that holds a number beyond its limit (an outlier): it is kept, listed and never drawn.

One number that is finite and cannot be (3e38; serl_client/limits.py) makes the gradient of every batch that holds it
infinite. The record is stored as it came. Its episode is discarded by an Outcome of the learner itself, so that readers
have nothing new to know.
"""

from typing import Protocol

from serl_client.episode import Outcome
from serl_client.names import MAX_NAME

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


def outcome_of(episode: str, reason: str) -> Outcome:
    """Return what the learner says of an episode that it sets aside."""
    return Outcome(episode, None, discard=True, judged_by=f"{LEARNER}: {reason}"[:MAX_NAME])


def is_aside(said: Judged) -> bool:
    """Return whether an episode is set aside: the learner's word is the last one that counts."""
    return bool(said.discard) and said.judged_by.startswith(LEARNER)


def reason_of(said: Judged) -> str:
    return said.judged_by.removeprefix(f"{LEARNER}: ")
