"""Reads what a run's folder tells: the numbers that console, status, page and report show, from one place. No torch.

Nothing needs to run, and nothing is changed. Of files that grow for ever, only a bounded part is read.
"""

import shutil
import sqlite3
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from serl_client.errors import ConfigError
from serl_client.lockfile import holder
from serl_client.spec import Spec

from serl_launcher.config import saved
from serl_launcher.error_log import ERRORS
from serl_launcher.replay.verdicts import rewards_of
from serl_launcher.store.aside import is_aside
from serl_launcher.store.directives import DATASET, EVALUATE, ends_run
from serl_launcher.store.index import Index
from serl_launcher.store.schema import EpisodeInfo, Source
from serl_launcher.training import metrics
from serl_launcher.training.machine import MACHINES, Control, control_of, disk_of, errors_of, weights_age
from serl_launcher.training.plan import EVAL, WITHIN
from serl_launcher.training.plan_reader import plan_of
from serl_launcher.training.report import Evaluated, evaluations, read
from serl_launcher.training.tallies import (
    RECENT,
    Point,
    Share,
    Tally,
    counts,
    is_trained_on,
    mean_curve,
    succeeded,
    success_curve,
    tally,
    thinned,
)  # fmt: skip

FULL = 0.95  # share of a disk in use from which on we warn
NEW, RUNNING, STOPPED, ENDED = STATES = ("new", "running", "stopped", "ended")
DONE, NOW, TO_COME = "done", "now", "to come"
NO_LOSS = {"kind", "time", "updates", "rate", "id"}  # what a record of the kind "update" holds besides its metrics


@dataclass(frozen=True, slots=True)
class PhaseFacts:
    """A phase of the plan. state: `done`, `now` or `to come`. until: conditions, any of which ends it.

    env_steps, episodes: those made so far. recent: of its newest RECENT episodes.
    """

    name: str
    mode: str
    state: str
    until: tuple[str, ...]
    env_steps: int
    episodes: int
    recent: Tally


@dataclass(frozen=True, slots=True)
class Curves:
    """Curves since the run began, of POINTS points at most.

    success, assisted, returns, interventions: over the env steps of practice, each of the last RECENT episodes:
    unassisted success (0 to 1), success of those in which a person took over, mean return, share of steps that a person
    drove. losses: {name: (updates, value)}; among them `rate`, in updates per second. machines: {name of
    machine.MACHINES: (minutes since the run began, value)}.
    """

    success: Sequence[Point] = ()
    assisted: Sequence[Point] = ()
    returns: Sequence[Point] = ()
    interventions: Sequence[Point] = ()
    losses: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict)
    machines: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict)


@dataclass(frozen=True)
class Facts:
    """What a run's folder tells; an empty folder gives zeros.

    state: one of STATES. run: the store's random id. words: the choices with which the run began (`algo=sac`).
    phase: the one under way; empty: none. mode: what actors do in it.
    env_steps, episodes, assisted, updates: of the whole run; episodes finished, assisted ones in part. wall_s: seconds.
    evaluations: in their order. recent: of the newest RECENT finished episodes of practice, or of demonstrations.
    newest: the latest values of the losses. updates_per_s: of the latest record; None: there is none.
    weights: {version, sha256, size (bytes), update}; empty: none. weights_age_s: seconds since they were published.
    person: minutes, as in summary.json. sources: as the store has them. disk: {part of the folder: bytes}; free_bytes:
    of its disk. warnings: sentences. changes: of settings, as in summary.json. all_episodes: those that the index
    holds, by number, as their operators judged them.
    """

    run_dir: Path
    state: str
    config: DictConfig
    run: str = ""
    spec: Spec | None = None
    phase: str = ""
    mode: str = ""
    phases: Sequence[PhaseFacts] = ()
    env_steps: int = 0
    episodes: int = 0
    assisted: int = 0
    updates: int = 0
    wall_s: float = 0.0
    evaluations: Sequence[Evaluated] = ()
    recent: Tally = field(default_factory=lambda: tally(()))
    newest: Mapping[str, float] = field(default_factory=dict)
    updates_per_s: float | None = None
    weights: Mapping[str, Any] = field(default_factory=dict)
    weights_age_s: float | None = None
    control: Control | None = None
    person: Mapping[str, float] = field(default_factory=dict)
    sources: Mapping[str, Source] = field(default_factory=dict)
    disk: Mapping[str, int] = field(default_factory=dict)
    free_bytes: int = 0
    warnings: Sequence[str] = ()
    changes: Sequence[Mapping[str, Any]] = ()
    curves: Curves = field(default_factory=Curves)
    all_episodes: Sequence[EpisodeInfo] = ()

    @property
    def words(self) -> list[str]:
        return list(self.config.get("remembered") or ())

    @property
    def task(self) -> str:
        """The name of the task; empty: no learner was ever started here."""
        return str(OmegaConf.select(self.config, "task.name", default=""))


class RunReader:
    """Reads the facts of one run again and again: of the store's episodes each time only what has changed."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self._config: tuple[int, DictConfig] | None = None
        self._run, self._revision, self._episodes = "", 0, dict[int, EpisodeInfo]()

    def look(self) -> Facts:
        """Read the facts as they are now. Raises ConfigError for a config.yaml that cannot be read."""
        run_dir, config, warnings = self.run_dir, self._saved(), list[str]()
        summary, records = read(run_dir / "summary.json"), [*metrics.sample(run_dir / "metrics.jsonl")]
        try:
            stored = self._stored(config)
        except FileNotFoundError:
            stored = _Stored()
        except (ConfigError, OSError, sqlite3.Error) as error:
            stored = _Stored()
            warnings.append(f"the store cannot be read: {error}")
        trained = [episode for episode in stored.episodes if is_trained_on(episode)]
        finished = [episode for episode in trained if counts(episode)]
        modes = {number: str(body.get("mode", "")) for number, body in stored.directives.items()}
        practice = [episode for episode in finished if modes.get(episode.directive) == "collect"]
        directive = _newest(stored.directives)
        is_current = bool(summary) and summary.get("weights_sha256") == stored.weights.get("sha256")
        newest = next((record for record in reversed(records) if record.get("kind") == "update"), {})
        of = [summary] if is_current else [summary, *records]
        told = {name: max(_number(each, name) for each in of) for name in ("updates", "wall_s")}
        people = [record for record in records if record.get("kind") == "person"]
        disk, free = disk_of(run_dir)
        return Facts(
            run_dir=run_dir, config=config, run=stored.run, spec=stored.spec, state=_state(run_dir, directive),
            phase=str(directive.get("phase", "")), mode=str(directive.get("mode", "")),
            phases=_phases(config, stored, directive, warnings),
            env_steps=sum(episode.steps for episode in trained), episodes=len(finished),
            assisted=sum(0 < episode.intervened < episode.steps for episode in finished),
            updates=int(told["updates"]), wall_s=told["wall_s"],
            evaluations=[*evaluations(summary), *_again(run_dir, summary)] if is_current else _evaluations_of(stored),
            recent=tally((practice or finished)[-RECENT:]), newest=_losses(newest), updates_per_s=newest.get("rate"),
            weights=stored.weights, weights_age_s=weights_age(run_dir, stored.weights),
            control=_control(run_dir, stored),
            person=summary.get("person", {}) if is_current else _minutes(people[-1] if people else {}),
            sources=stored.sources, disk=disk, free_bytes=free, changes=summary.get("changes", ()),
            warnings=[*warnings, *_warnings(run_dir, stored, records, summary, free)],
            curves=_curves(practice, records), all_episodes=stored.episodes,
        )  # fmt: skip

    def _saved(self) -> DictConfig:
        """Read the config if it is another one than before: reading it takes longer than all the rest."""
        file = self.run_dir / "config.yaml"
        written = file.stat().st_mtime_ns if file.exists() else 0
        if self._config is None or self._config[0] != written:
            self._config = written, saved(self.run_dir)
        return self._config[1]

    def _stored(self, config: DictConfig) -> "_Stored":
        with closing(Index(self.run_dir / "store/index.sqlite")) as index:
            if (run := str(index.meta("run") or "")) != self._run:
                self._run, self._revision, self._episodes = run, 0, {}
            self._revision, rows = index.catalog(self._revision, -1)
            self._episodes |= {row[0]: EpisodeInfo(*row) for row in rows}
            spec, verdict = index.meta("spec"), rewards_of(config)
            return _Stored(
                run=run, spec=Spec.from_dict(spec) if spec else None, sources=index.sources(),
                directives=index.directives(), weights=next(iter(index.weights(1)), {}),
                published={each["version"]: each["update"] for each in index.weights(-1)},
                lost=sum(index.lost_counts().values()),
                episodes=[verdict.applied(self._episodes[number]) for number in sorted(self._episodes)],
            )  # fmt: skip


def facts_of(run_dir: Path) -> Facts:
    """Read the facts of a run once. Raises ConfigError as `RunReader.look` does."""
    return RunReader(run_dir).look()


@dataclass(frozen=True)
class _Stored:
    """What the store's index tells. published: {version of weights: updates made before}. lost: records."""

    run: str = ""
    spec: Spec | None = None
    sources: Mapping[str, Source] = field(default_factory=dict)
    directives: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    weights: Mapping[str, Any] = field(default_factory=dict)
    published: Mapping[int, int] = field(default_factory=dict)
    lost: int = 0
    episodes: Sequence[EpisodeInfo] = ()


def _newest(directives: Mapping[int, Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the newest directive that was for actors."""
    return next((body for body in reversed([*directives.values()]) if body.get("mode") != DATASET), {})


def _state(run_dir: Path, directive: Mapping[str, Any]) -> str:
    if holder(run_dir):
        return RUNNING
    return NEW if not directive else ENDED if ends_run(directive) else STOPPED


def _phases(
    config: DictConfig, stored: _Stored, directive: Mapping[str, Any], warnings: list[str]
) -> list[PhaseFacts]:  # fmt: skip
    if "plan" not in config:  # no learner was ever started here
        return []
    try:
        planned = plan_of(config).only(config.phase).phases
    except (ConfigError, OmegaConfBaseException) as error:
        warnings.append(f"the plan cannot be read: {error}")
        return []
    names, is_over = [*planned], ends_run(directive)
    within = str(directive.get("phase", "")).removesuffix(WITHIN)
    place = len(names) if is_over else names.index(within) if within in names else -1
    by_phase: dict[str, list[EpisodeInfo]] = {name: [] for name in names}
    for episode in stored.episodes:
        if episode.phase in by_phase:
            by_phase[episode.phase].append(episode)
    finished = {name: [episode for episode in mine if counts(episode)] for name, mine in by_phase.items()}
    return [
        PhaseFacts(
            name, phase.actors.told, DONE if at < place else NOW if at == place else TO_COME, phase.until,
            sum(episode.steps for episode in by_phase[name]), len(finished[name]), tally(finished[name][-RECENT:]),
        ) for at, (name, phase) in enumerate(planned.items())
    ]  # fmt: skip


# -- evaluations and curves
def _again(run_dir: Path, summary: Mapping[str, Any]) -> list[Evaluated]:
    """Return the evaluation that a plan of its own has made of the weights of this summary."""
    result = read(run_dir / "evaluation.json").get("eval")
    if not result or result == summary.get("eval") or result.get("weights_sha256") != summary.get("weights_sha256"):
        return []
    return [each._replace(name="evaluated again") for each in evaluations({"eval": result})]


def _evaluations_of(stored: _Stored) -> list[Evaluated]:
    """Return the evaluations of a run that has not come to its end, from its store, which knows no starts."""
    said = {number: body for number, body in stored.directives.items() if body.get("mode") == EVALUATE}
    done = [e for e in stored.episodes if e.directive in said and e.source == EVAL and counts(e)]
    done = [e for e in done if e.weights == said[e.directive].get("weights")]
    found = []
    key = attrgetter("weights", "phase")
    for (version, phase), group in groupby(sorted(done, key=key), key):
        episodes = [*group]
        wanted = said[episodes[-1].directive].get("episodes")
        episodes = episodes[:wanted]
        is_judged, updates = any(e.success is not None for e in episodes), stored.published.get(version)
        alone = sum(succeeded(e) and not e.intervened for e in episodes)
        name = f"{phase}, {updates or 0:,} updates" + f" ({len(episodes)} of {wanted} so far)" * (
            wanted is not None and len(episodes) < wanted
        )
        share = Share(alone, len(episodes)) if is_judged else Share(0, 0)
        mean = statistics.fmean(e.reward for e in episodes)
        found.append(Evaluated(name, updates, share, len(episodes), 0, mean))
    return found


def _curves(practice: Sequence[EpisodeInfo], records: Sequence[Mapping[str, Any]]) -> Curves:
    ends = np.cumsum([episode.steps for episode in practice]).tolist()
    judged = [(end, episode) for end, episode in zip(ends, practice, strict=True) if episode.success is not None]
    success = success_curve([end for end, _ in judged], [succeeded(e) and not e.intervened for _, e in judged])
    helped = [(end, succeeded(episode)) for end, episode in judged if episode.intervened]
    assisted = success_curve([end for end, _ in helped], [won for _, won in helped])
    returns = mean_curve(ends, [episode.reward for episode in practice])
    interventions = mean_curve(ends, [episode.intervened / max(1, episode.steps) for episode in practice])
    losses: dict[str, list[tuple[float, float]]] = {}
    for record in thinned([record for record in records if record.get("kind") == "update"]):
        for name, value in {**_losses(record), "rate": record.get("rate")}.items():
            if isinstance(value, int | float):
                losses.setdefault(name, []).append((_number(record, "updates"), value))
    return Curves(success, assisted, returns, interventions, losses, _machines(records))


def _machines(records: Sequence[Mapping[str, Any]]) -> dict[str, list[tuple[float, float]]]:
    began = next((_number(record, "time") for record in records), 0.0)
    noted = thinned([record for record in records if record.get("kind") == "machines"])
    points = {
        name: [((_number(record, "time") - began) / 60, _number(record, name)) for record in noted if name in record]
        for name in MACHINES
    }
    return {name: its for name, its in points.items() if its}


def _losses(record: Mapping[str, Any]) -> dict[str, float]:
    return {name: value for name, value in record.items() if name not in NO_LOSS and isinstance(value, int | float)}


def _number(record: Mapping[str, Any], name: str) -> float:
    value = record.get(name)
    return value if isinstance(value, int | float) else 0.0


def _minutes(record: Mapping[str, Any]) -> dict[str, float]:
    return {name: value for name, value in record.items() if name not in ("kind", "time", "updates", "phase")}


def _control(run_dir: Path, stored: _Stored) -> Control | None:
    newest = max(stored.episodes, key=lambda episode: episode.number * (episode.steps > 1), default=None)
    return control_of(run_dir / "store", stored.spec, stored.sources, newest) if newest and stored.spec else None


def _warnings(
    run_dir: Path, stored: _Stored, records: Sequence[Mapping[str, Any]], summary: Mapping[str, Any], free: int
) -> Iterator[str]:  # fmt: skip
    if aside := sum(map(is_aside, stored.episodes)):
        yield f"{aside} episodes hold values that cannot be: tools/store.py show RUN lists them"
    if stored.lost:
        yield f"{stored.lost} records were damaged on an actor's disk, and lost"
    if refused := max((_number(record, "refused") for record in records), default=0):
        yield f"{refused:,.0f} updates were refused because a number of them was not finite"
    if dropped := summary.get("updates_dropped"):
        yield f"the learner was too slow: {dropped:,} updates that steps were due were not made"
    if run_dir.is_dir() and free < (1 - FULL) * shutil.disk_usage(run_dir).total:
        yield f"the disk is nearly full: {free / 1e9:.1f} GB are free"
    yield from errors_of(run_dir / ERRORS)
