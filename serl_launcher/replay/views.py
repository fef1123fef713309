"""Filters episodes of the replay (views): successful, failed, intervened, train or held out. No torch."""

import hashlib
import heapq
from collections import Counter
from dataclasses import dataclass

from serl_launcher.store.schema import EpisodeInfo

KEEP = ("all", "successful", "failed", "intervened", "rewarded", "unrewarded")
START_STEPS = ("all", "intervened", "autonomous", "decisions")
SPLITS = ("train", "held_out")
HELD_OUT = 0.1  # the share of episodes in the split `held_out`


class Held(dict[int, EpisodeInfo]):
    """{number: episode} of one source, for the episodes that the store still holds."""

    def __init__(self) -> None:
        super().__init__()
        self.tasks: Counter[str] = Counter()  # how many of these episodes have each task
        self._oldest: list[tuple[int, int]] = []  # a heap of (first, number)

    def put(self, episode: EpisodeInfo) -> EpisodeInfo | None:
        """Add or replace an episode. Returns what was known of it before, or None."""
        before = self.get(episode.number)
        if before is None:
            heapq.heappush(self._oldest, (episode.first, episode.number))
            self.tasks[episode.task] += 1
        self[episode.number] = episode
        return before

    def evict(self, tail: int) -> list[EpisodeInfo]:
        """Drop and return the episodes that begin below step `tail`."""
        gone = []
        while self._oldest and self._oldest[0][0] < tail:
            gone.append(self.pop(heapq.heappop(self._oldest)[1]))
            self.tasks[gone[-1].task] -= 1
            self.tasks += Counter()  # without tasks that no episode has
        return gone


@dataclass(frozen=True, slots=True)
class View:
    """Selects whole episodes of some sources, and the steps at which windows may start.

    of: names of sources. keep: an episode is in the view if one of these (see KEEP) holds for it.
    min_length: least steps of an episode. split: `train`, `held_out`, or None for both.
    start_steps: start windows at `all` steps, at the human's (`intervened`), at the policy's (`autonomous`), or at the
        human's and where the policy began a chunk (`decisions`: the varied frequency of Hi-ORS, arXiv 2510.26406). A
        window that has started continues over all steps.
    """

    of: tuple[str, ...]
    keep: tuple[str, ...] = ("all",)
    min_length: int = 1
    split: str | None = None
    start_steps: str = "all"

    def holds(self, episode: EpisodeInfo) -> bool:
        """Return whether an episode is in this view. A discarded one is in none."""
        if episode.source not in self.of or episode.discard or episode.steps < self.min_length:
            return False
        if self.split is not None and (self.split == "held_out") != _held_out(episode.id):
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

    def count(self, episode: EpisodeInfo, decisions: int = 0) -> int:
        """Return at how many steps of an episode in this view windows may start. decisions: of its steps; see View."""
        steps, human = episode.steps, episode.intervened
        counts = {"all": steps, "intervened": human, "autonomous": steps - human, "decisions": decisions}
        return counts[self.start_steps]


def _held_out(episode: str) -> bool:
    digest = hashlib.sha256(episode.encode()).digest()
    return int.from_bytes(digest[:4], "big") < HELD_OUT * 2**32
