"""What the learner has accepted, by phase: the numbers that a plan's conditions look at and that people read."""

import itertools
from bisect import insort
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from serl_launcher.algorithms.base import Algorithm
from serl_launcher.data.episodes import EpisodeInfo
from serl_launcher.data.sources import Sources
from serl_launcher.service.plan import LONGEST_WINDOW
from serl_launcher.service.progress import PhaseCounts, Progress, SourceCounts


@dataclass
class _Phase:
    env_steps: int = 0
    episodes: int = 0
    successes: int = 0
    interventions: int = 0
    recent: list[int] = field(default_factory=list)  # numbers of finished episodes, the newest LONGEST_WINDOW


class Ledger:
    """Counts per phase, kept up to date by what changed; late data count for the phase that their stamp names."""

    def __init__(self, sources: Sources) -> None:
        self.sources = sources
        self._phases: dict[str, _Phase] = {}

    def take(self, changed: Iterable[tuple[EpisodeInfo | None, EpisodeInfo]]) -> list[EpisodeInfo]:
        """Count what changed; returns the episodes that ended by it."""
        ended = []
        for before, now in changed:
            phase = self._phases.setdefault(now.phase, _Phase())
            for episode, sign in ((before, -1), (now, 1)):
                if episode is not None:
                    phase.env_steps += sign * episode.steps
                    phase.episodes += sign * counts(episode)
                    phase.successes += sign * succeeded(episode)
                    phase.interventions += sign * (episode.intervened > 0)
            if counts(now) and not (before and counts(before)):
                insort(phase.recent, now.number)  # by number, not by arrival, which a restart does not know any more
                del phase.recent[:-LONGEST_WINDOW]
                ended.append(now)
        return ended

    def progress(self, wall_s: float) -> Progress:
        """What a plan's conditions look at; sources are counted when they are asked for."""
        phases = {
            name: PhaseCounts(
                phase.env_steps, phase.episodes, phase.successes, phase.interventions, _Recent(self, phase)
            )
            for name, phase in self._phases.items()
        }
        return Progress(phases, _Sizes(self.sources), wall_s)

    def recent(self, phase: str, count: int) -> list[EpisodeInfo]:
        """The newest `count` finished episodes of a phase, the newest last."""
        numbers = self._phases[phase].recent if phase in self._phases else ()
        return [self.sources.episodes[number] for number in numbers[-count:]]


class _Recent(Sequence[tuple[bool, bool]]):
    """(success, assisted) of a phase's newest episodes whose task knows success."""

    def __init__(self, ledger: Ledger, phase: _Phase) -> None:
        self._episodes, self._numbers = ledger.sources.episodes, phase.recent

    def _values(self) -> list[tuple[bool, bool]]:
        episodes = (self._episodes[number] for number in self._numbers)
        return [(succeeded(e), e.intervened > 0) for e in episodes if e.success is not None or e.discard]

    def __getitem__(self, index: Any) -> Any:
        return self._values()[index]

    def __len__(self) -> int:
        return len(self._values())


class _Sizes(Mapping[str, SourceCounts]):
    def __init__(self, sources: Sources) -> None:
        self._sources = sources

    def __getitem__(self, name: str) -> SourceCounts:
        return SourceCounts(*self._sources.size(name))

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources.views)

    def __len__(self) -> int:
        return len(self._sources.views)


def counts(episode: EpisodeInfo) -> bool:
    """Whether an episode is over and was seen to its end; one that a crash cut has no verdict."""
    return bool(episode.sealed and episode.final)


def succeeded(episode: EpisodeInfo) -> bool:
    """A success that the operator did not discard."""
    return bool(counts(episode) and episode.success and not episode.discard)


def evaluation(sources: Sources, phase: str, begin: int, count: int | None) -> dict[str, Any]:
    """The evaluated episodes of a phase from the `begin`-th on, `count` of them or all:
    {episodes, distinct_starts, successes, returns, versions}.

    A takeover is a failure; `successes` is None for a task that knows no success. Starts are compared by their first
    observation, as it lies in the store.
    """
    done = [episode for episode in sources.episodes.values() if episode.phase == phase and counts(episode)][begin:][
        :count
    ]
    if not done:
        return {"episodes": 0, "distinct_starts": 0, "successes": None, "returns": [], "versions": []}
    tail = sources.buffers["eval"].tail
    firsts = np.array([episode.first for episode in done if episode.first >= tail], np.int64)  # the rest was evicted
    columns = [
        sources.buffers["eval"].observed(name, firsts).reshape(len(firsts), -1) for name in sources.spec.observation
    ]
    starts = {b"".join(parts) for parts in zip(*([row.tobytes() for row in column] for column in columns), strict=True)}
    judged = any(episode.success is not None for episode in done)
    return {
        "episodes": len(done),
        "distinct_starts": len(starts),
        "successes": sum(succeeded(e) and e.intervened == 0 for e in done) if judged else None,
        "returns": [episode.reward for episode in done],
        "versions": sorted({episode.weights for episode in done}),
    }


def value_error(
    sources: Sources, algorithm: Algorithm, episodes: Collection[EpisodeInfo], device: str
) -> dict[str, float]:
    """How far the values of the first chunks of these episodes, Q, are from the discounted returns that followed, G:
    {value_error: mean |Q - G|, value_bias: mean (Q - G)}. Empty for an algorithm that learns no values.

    G holds what was seen: where a time limit ended an episode, nothing after it.
    """
    begun = sources.beginnings(episodes, algorithm.windows["update"], algorithm.discount)
    if begun is None or (value := algorithm.value(begun[0].to(device))) is None:
        return {}
    difference = value.cpu() - begun[1]
    return {"value_error": float(difference.abs().mean()), "value_bias": float(difference.mean())}


def curve(sources: Sources, phases: Iterable[str]) -> list[dict[str, Any]]:
    """The finished episodes of some phases in order, with the env steps up to each one's end."""
    done = [e for e in sources.episodes.values() if e.phase in set(phases) and counts(e)]
    steps = itertools.accumulate(episode.steps for episode in done)
    return [
        {
            "env_steps": total, "phase": e.phase, "success": None if e.success is None else succeeded(e),
            "return": e.reward, "intervened": e.intervened > 0,
        }
        for e, total in zip(done, steps, strict=True)
    ]  # fmt: skip
