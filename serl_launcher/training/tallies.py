"""Counts successes, returns and a person's help among episodes, with intervals: the one place where this is done.

Console, status, page and report show what these functions return. No torch.
"""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from serl_launcher.store.directives import DATASET
from serl_launcher.store.schema import EpisodeInfo
from serl_launcher.training.plan import EVAL

Z_95 = 1.959964  # the normal quantile of a two-sided 95 % interval
RECENT = 20  # episodes that a point of a curve averages over, and that the console counts
POINTS = 300  # of a curve that is shown at most
T = TypeVar("T")


def counts(episode: EpisodeInfo) -> bool:
    """Return whether an episode is closed and has its final observation. One that a crash cut does not count, nor one
    that its actor itself discards, because nobody drove its demonstration; an evaluation's counts whatever is said."""
    is_unattended = episode.discard and episode.judged_by == "judge" and episode.source != EVAL
    return bool(episode.closed and episode.final and not is_unattended)


def succeeded(episode: EpisodeInfo) -> bool:
    """Return whether an episode is a finished success that the operator did not discard."""
    return bool(counts(episode) and episode.success and not episode.discard)


def is_trained_on(episode: EpisodeInfo) -> bool:
    """Return whether a policy may learn from an episode that actors of this run brought."""
    return episode.source != EVAL and episode.phase != DATASET


@dataclass(frozen=True, slots=True)
class Share:
    """How many of the judged episodes were successes. As a text: `3 of 20`, or `-` if none was judged."""

    successes: int
    episodes: int

    @property
    def rate(self) -> float | None:
        return self.successes / self.episodes if self.episodes else None

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval of the rate (Wilson)."""
        return wilson(self.successes, self.episodes)

    def __str__(self) -> str:
        return f"{self.successes} of {self.episodes}" if self.episodes else "-"


@dataclass(frozen=True, slots=True)
class Tally:
    """What some finished episodes came to. alone: without a person's help; assisted: with it.

    return_mean: None without episodes. interventions: episodes in which a person took over.
    """

    episodes: int
    alone: Share
    assisted: Share
    return_mean: float | None
    interventions: int


def tally(episodes: Iterable[EpisodeInfo]) -> Tally:
    """Count finished episodes; those that an operator discarded are left out."""
    kept = [episode for episode in episodes if not episode.discard]
    alone, assisted = ([e for e in kept if bool(e.intervened) == helped] for helped in (False, True))
    mean = statistics.fmean(episode.reward for episode in kept) if kept else None
    return Tally(len(kept), _share(alone), _share(assisted), mean, len(assisted))


def _share(episodes: Iterable[EpisodeInfo]) -> Share:
    judged = [succeeded(episode) for episode in episodes if episode.success is not None]
    return Share(sum(judged), len(judged))


class Point(NamedTuple):
    """A point of a curve with its 95 % interval."""

    x: float
    value: float
    low: float
    high: float


def wilson(successes: int, episodes: int) -> tuple[float, float]:
    """Return the 95 % interval of a success rate (Wilson 1927); (0, 1) without episodes."""
    if not episodes:
        return 0.0, 1.0
    rate, square = successes / episodes, Z_95**2 / episodes
    center = (rate + square / 2) / (1 + square)
    half = Z_95 / (1 + square) * math.sqrt(rate * (1 - rate) / episodes + square / (4 * episodes))
    return max(0.0, center - half), min(1.0, center + half)


def mean_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the mean of values and its 95 % interval by the normal distribution; the mean alone thrice for one."""
    mean = statistics.fmean(values)
    half = Z_95 * statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return mean, mean - half, mean + half


def success_curve(ends: Sequence[float], wins: Sequence[bool]) -> list[Point]:
    """Return the success rate of the last RECENT episodes at the ends of POINTS of them at most.

    ends: what is on the x axis there.
    """
    found = []
    for i in thinned(range(1, len(wins) + 1)):
        share = Share(sum(wins[max(0, i - RECENT) : i]), min(i, RECENT))
        found.append(Point(ends[i - 1], share.rate or 0.0, *share.interval))
    return found


def mean_curve(ends: Sequence[float], values: Sequence[float]) -> list[Point]:
    """Return the mean of the last RECENT values at POINTS of them at most. ends: as in `success_curve`."""
    return [
        Point(ends[i - 1], *mean_interval(values[max(0, i - RECENT) : i])) for i in thinned(range(1, len(values) + 1))
    ]


def thinned(values: Sequence[T], most: int = POINTS) -> list[T]:
    """Return `most` of the values at most, evenly spaced, the first and the last among them."""
    if len(values) <= most:
        return list(values)
    return [values[round(i * (len(values) - 1) / (most - 1))] for i in range(most)]
