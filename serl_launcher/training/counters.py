"""Counts env steps, episodes, success rate and interventions of each phase, for the plan and for people."""

from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import numpy as np
import xxhash
from serl_client.spec import Array

from serl_launcher.algorithms.base import Algorithm
from serl_launcher.replay.mixture import ReplayMixture
from serl_launcher.replay.views import EpisodeInfo
from serl_launcher.training.plan import EVAL, LONGEST_WINDOW
from serl_launcher.training.plan_state import PhaseCounts, Progress, SourceCounts
from serl_launcher.training.rate_limiter import UNPACED
from serl_launcher.training.tallies import counts, is_trained_on, succeeded

COUNTED, SUCCEEDED, INTERVENED, JUDGED, TRAINED, ASSISTED = 1, 2, 4, 8, 16, 32
NUMBER = attrgetter("number")
ENTRY = np.dtype([
    ("phase", "<i4"), ("flags", "<i4"), ("steps", "<i8"), ("directive", "<i8"), ("weights", "<i8"), ("reward", "<f8"),
    ("intervened", "<i8"),
])  # fmt: skip


@dataclass
class _Phase(PhaseCounts):
    index: int = 0
    newest: list[EpisodeInfo] = field(default_factory=list)  # LONGEST_WINDOW that finished, by number

    def __post_init__(self) -> None:
        self.recent = _Recent(self.newest)


class RunCounters:
    """Counts per phase, updated by each change of an episode. Late data count for the phase of their directive.

    Evaluated episodes count for their directive, too: an evaluation has no others than those of its own directives.
    `starts`: {episode's number: hash of its first observation} of evaluated episodes. The hash is taken when the
    episode is first seen, because it may have left the store when the evaluation ends.
    """

    def __init__(self, sources: ReplayMixture) -> None:
        self.sources = sources
        self.starts: dict[int, int] = {}
        self.episodes = self.env_steps = 0  # all that were heard of; the steps that a policy may learn from
        self._phases: dict[str | int, _Phase] = {}  # by name; those that evaluate also by their directives' numbers
        self._history = np.zeros(1024, ENTRY)  # by number; an episode may be corrected long after it left the store

    def update(self, changed: Iterable[EpisodeInfo]) -> list[EpisodeInfo]:
        """Count the episodes that changed, and return those that ended by it."""
        ended = []
        for now in changed:
            self._begun(now)
            keys = (now.phase, now.directive) if now.source == EVAL else (now.phase,)
            phases = [self._phases.setdefault(key, _Phase(index=len(self._phases) + 1)) for key in keys]
            has_ended = self._count(phases, now)
            ended += [now] * has_ended
            for newest in [phase.newest for phase in phases if counts(now)]:
                place = bisect_left(newest, now.number, key=NUMBER)
                if has_ended:
                    newest.insert(place, now)  # not by arrival, which a restart does not know any more
                    del newest[:-LONGEST_WINDOW]
                elif place < len(newest) and newest[place].number == now.number:
                    newest[place] = now
        return ended

    def _count(self, phases: Sequence[_Phase], now: EpisodeInfo) -> bool:
        """Count an episode in place of its earlier state. Returns whether it ended by that."""
        if now.number >= len(self._history):
            self._history = np.concatenate([self._history, np.zeros(max(len(self._history), now.number), ENTRY)])
        is_known, before, steps, *_ = self._history[now.number].item()
        flags = _flags(now)
        told = now.steps, now.directive, now.weights, now.reward, now.intervened
        self._history[now.number] = phases[0].index, flags, *told
        changed = flags & ~before, before & ~flags  # what came, what went
        more, less = ((bool(f & COUNTED), bool(f & SUCCEEDED), bool(f & INTERVENED)) for f in changed)
        for phase in phases:
            phase.env_steps += now.steps - steps
            phase.finished_steps += now.steps * bool(flags & COUNTED) - steps * bool(before & COUNTED)
            phase.episodes += more[0] - less[0]
            phase.successes += more[1] - less[1]
            phase.interventions += more[2] - less[2]
        self.env_steps += (now.steps - steps) * bool(flags & TRAINED)
        self.episodes += not is_known
        return more[0]

    def index(self, phase: str) -> int:
        """Return the number of a phase in `finished`; 0: it has no episodes yet."""
        return self._phases[phase].index if phase in self._phases else 0

    def finished(self, column: str = "", among: Collection[int] = ()) -> Array:
        """Return the finished episodes in order: [n] with ENTRY's fields and `number`.

        column: a field of ENTRY; only episodes whose value there is one of `among` are returned. Default: all.
        """
        ended = self._history["flags"] & COUNTED > 0
        if column:
            ended &= np.isin(self._history[column], list(among))
        found = np.zeros(ended.sum(), [*ENTRY.descr, ("number", "<i8")])
        found["number"] = np.flatnonzero(ended)
        for name in ENTRY.names or ():
            found[name] = self._history[name][ended]
        return found

    def _begun(self, episode: EpisodeInfo) -> None:
        """Hash an evaluated episode's first observation while the store has it."""
        if episode.source != EVAL or not episode.steps or episode.number in self.starts:
            return
        buffer, first = self.sources.buffers[EVAL], np.array([episode.first], np.int64)
        columns = [buffer.observed(name, first) for name in self.sources.spec.observation]
        buffer.refresh(buffer.head)  # it tells what was overwritten while it was read
        if episode.first >= buffer.tail and all(len(column) for column in columns):
            self.starts[episode.number] = xxhash.xxh3_64_intdigest(b"".join(column.tobytes() for column in columns))

    def progress(self, wall_s: float, unpaced: str = UNPACED[0]) -> Progress:
        """Return the numbers that a plan's conditions compare. Sources are counted when a condition asks for them."""
        return Progress(self._phases, _Sizes(self.sources), wall_s, unpaced)

    def recent(self, phase: str, count: int) -> list[EpisodeInfo]:
        """Return the newest `count` finished episodes of a phase, the newest last."""
        return self._phases[phase].newest[-count:] if count and phase in self._phases else []


class _Recent(Sequence[tuple[bool, bool]]):
    """(success, assisted) of a phase's newest episodes whose success is known."""

    def __init__(self, episodes: Sequence[EpisodeInfo]) -> None:
        self._episodes = episodes

    def _values(self) -> list[tuple[bool, bool]]:
        return [(succeeded(e), e.intervened > 0) for e in self._episodes if e.success is not None or e.discard]

    def __getitem__(self, index: Any) -> Any:
        return self._values()[index]

    def __len__(self) -> int:
        return len(self._values())


class _Sizes(Mapping[str, SourceCounts]):
    def __init__(self, sources: ReplayMixture) -> None:
        self._sources = sources

    def __getitem__(self, name: str) -> SourceCounts:
        return SourceCounts(*self._sources.size(name))

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources.views)

    def __len__(self) -> int:
        return len(self._sources.views)


def _flags(episode: EpisodeInfo) -> int:
    return (
        COUNTED * counts(episode) | SUCCEEDED * succeeded(episode) | INTERVENED * (episode.intervened > 0)
        | JUDGED * (episode.success is not None) | TRAINED * is_trained_on(episode)
        | ASSISTED * (0 < episode.intervened < episode.steps)
    )  # fmt: skip


def evaluation(counters: RunCounters, directives: Collection[int], weights: int, count: int | None) -> dict[str, Any]:
    """Return the result of an evaluation: {episodes, distinct_starts, successes, returns, trials}.

    trials: (start, success or None, return) of each episode whose first observation was seen.

    directives: the numbers under which it ran. weights: the version that it was to run; episodes in which others acted
    are none of its. count: episodes to take; None: all.
    A takeover counts as a failure. `successes` is None for a task without success. Two starts are equal if their first
    observations are.
    """
    done = counters.finished("directive", directives)
    done = done[done["weights"] == weights][:count]
    is_labelled, alone = bool((done["flags"] & JUDGED).any()), done["flags"] & (SUCCEEDED | INTERVENED) == SUCCEEDED
    each = zip(*(column.tolist() for column in (done["number"], alone, done["reward"])), strict=True)
    starts = counters.starts
    trials = [(f"{starts[n]:016x}", won if is_labelled else None, reward) for n, won, reward in each if n in starts]
    return {
        "episodes": len(done),
        "distinct_starts": len({start for start, _, _ in trials}),
        "successes": int(alone.sum()) if is_labelled else None,
        "returns": done["reward"].tolist(),
        "trials": trials,
    }


def value_error(
    sources: ReplayMixture, algorithm: Algorithm, episodes: Collection[EpisodeInfo], device: str
) -> dict[str, float]:
    """Compare the values Q of these episodes' first chunks with the discounted returns G that followed.

    Returns {value_error: mean |Q - G|, value_bias: mean (Q - G)}; empty for an algorithm that learns no values.
    G ends with the episode, also where a time limit ended it.
    """
    window = algorithm.windows.get("update") or next(iter(algorithm.windows.values()))
    begun = sources.beginnings(episodes, window, algorithm.discount)
    if begun is None or (value := algorithm.value(begun[0].to(device))) is None:
        return {}
    difference = value.cpu() - begun[1]
    return {"value_error": float(difference.abs().mean()), "value_bias": float(difference.mean())}


def curve(counters: RunCounters, phases: Collection[str]) -> list[dict[str, Any]]:
    """Return the finished episodes of some phases in order, with the env steps up to each one's end."""
    names = {counters.index(name): name for name in phases}
    done = counters.finished("phase", names)
    rows = zip(*(done[name].tolist() for name in ("phase", "flags", "reward")), strict=True)
    return [
        {
            "env_steps": total, "phase": names[phase], "success": bool(flags & SUCCEEDED) if flags & JUDGED else None,
            "return": reward, "intervened": bool(flags & INTERVENED),
        }
        for (phase, flags, reward), total in zip(rows, np.cumsum(done["steps"]).tolist(), strict=True)
    ]  # fmt: skip
