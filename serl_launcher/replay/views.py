"""What the server tells of an episode, and which episodes a view holds. No torch."""

import hashlib
import heapq
from dataclasses import dataclass
from typing import NamedTuple

from serl_client.messages import EPISODE

KEEP = ("all", "successful", "failed", "intervened", "rewarded", "unrewarded")
ROWS = ("all", "intervened", "autonomous")
FOLDS = ("train", "held_out")
HELD_OUT = 0.1  # the share of episodes in the fold `held_out`


class EpisodeInfo(NamedTuple):
    """What the server tells of an episode: the fields of messages.EPISODE."""

    number: int
    id: str
    source: str
    actor: str
    task: str
    directive: int
    phase: str
    first: int
    steps: int
    reward: float
    intervened: int
    weights: int
    terminated: bool
    truncated: bool
    final: bool
    closed: bool
    success: bool | None
    discard: bool
    judged_by: str


assert EpisodeInfo._fields == EPISODE


class Held(dict[int, EpisodeInfo]):
    """The episodes of one source that the store still holds, by number."""

    def __init__(self) -> None:
        super().__init__()
        self._oldest: list[tuple[int, int]] = []  # a heap of (first, number)

    def put(self, episode: EpisodeInfo) -> EpisodeInfo | None:
        """Take in an episode that is new or has changed; returns what it was before."""
        before = self.get(episode.number)
        if before is None:
            heapq.heappush(self._oldest, (episode.first, episode.number))
        self[episode.number] = episode
        return before

    def evict(self, tail: int) -> list[EpisodeInfo]:
        """Drop, and return, the episodes that begin below step `tail`."""
        gone = []
        while self._oldest and self._oldest[0][0] < tail:
            gone.append(self.pop(heapq.heappop(self._oldest)[1]))
        return gone


@dataclass(frozen=True, slots=True)
class View:
    """Whole episodes of some physical sources: those that any of `keep` lets in, from `min_length` steps on.

    `rows` says where windows may start: at all steps, at those of the human, or at those of the policy. No row is left
    out, so a window goes on over those of the other.
    """

    of: tuple[str, ...]
    keep: tuple[str, ...] = ("all",)
    min_length: int = 1
    fold: str | None = None
    rows: str = "all"

    def holds(self, episode: EpisodeInfo) -> bool:
        """Whether an episode is in this view; a discarded one is in none."""
        if episode.source not in self.of or episode.discard or episode.steps < self.min_length:
            return False
        if self.fold is not None and (self.fold == "held_out") != _held_out(episode.id):
            return False
        kept = {
            "all": True,
            "successful": episode.closed and episode.success is not None and bool(episode.success),
            "failed": episode.closed and episode.success is not None and not episode.success,
            "intervened": episode.intervened > 0,
            "rewarded": episode.reward > 0,
            "unrewarded": episode.closed and episode.reward <= 0,
        }
        return any(kept[name] for name in self.keep)

    def count(self, episode: EpisodeInfo) -> int:
        """How many steps of an episode in this view windows may start at."""
        shares = {"all": episode.steps, "intervened": episode.intervened}
        return shares.get(self.rows, episode.steps - episode.intervened)


def _held_out(episode: str) -> bool:
    digest = hashlib.sha256(episode.encode()).digest()
    return int.from_bytes(digest[:4], "big") < HELD_OUT * 2**32
