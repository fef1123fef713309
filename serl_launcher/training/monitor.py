"""Shows the training while it runs: records in the metrics file, and the console's lines."""

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from serl_client import clock
from serl_client.console import Console

from serl_launcher.replay.views import EpisodeInfo
from serl_launcher.training.counters import RunCounters, value_error
from serl_launcher.training.machine import machines_of
from serl_launcher.training.metrics import MetricsLog
from serl_launcher.training.plan import Phase
from serl_launcher.training.ranks import Ranks
from serl_launcher.training.tallies import RECENT, Share, succeeded, tally
from serl_launcher.training.writers import Patience

log = logging.getLogger(__name__)

METRICS_S, MACHINES_S = 1.0, 10.0
FALLEN = 50  # episodes of practice that are compared with the policy before it
CLIPPED = 0.01  # share of critic targets outside of their range from which a warning is logged


class Monitor:
    """Writes each ended episode, and once a second the newest metrics, to the metrics file and the console."""

    def __init__(
        self, metrics: MetricsLog, console: Console, counters: RunCounters, ranks: Ranks, patience: Patience
    ) -> None:
        self.metrics, self.console = metrics, console
        self._counters, self._ranks, self._patience = counters, ranks, patience
        self._latest: Mapping[str, torch.Tensor] = {}  # metrics of the phase's updates
        self._rate: tuple[float, int] | None = None  # when, and how many updates there were; None: not shown yet
        self._next = self._next_machines = 0.0
        self._is_clipping_told = False
        self._fallen = set[str]()  # phases of which was said that they do worse than the policy before

    def add(self, metrics: Mapping[str, torch.Tensor]) -> None:
        """Keep the metrics of an update until they are shown."""
        self._latest = {**self._latest, **metrics}

    def begin_phase(self) -> None:
        """Forget the metrics of the phase that ended: those of the next phase's updates have other names."""
        self._latest = {}

    def is_due(self) -> bool:
        """Return whether METRICS_S have passed since this was last True."""
        now = clock.monotonic()
        is_due = now >= self._next
        self._next = now + METRICS_S if is_due else self._next
        return is_due

    def write(self, kind: str, updates: int, values: Mapping[str, Any]) -> None:
        self._patience(lambda: self.metrics.write(kind, {"updates": updates, **values}))

    def write_episode(self, episode: EpisodeInfo, updates: int, wall_s: float) -> None:
        """Write an episode that ended, once, whatever is told of it later."""
        values = {
            "phase": episode.phase, "task": episode.task, "steps": episode.steps, "return": episode.reward,
            "success": None if episode.success is None else succeeded(episode), "intervened": episode.intervened,
            "weights": episode.weights, "updates": updates, "wall_s": round(wall_s, 2),
        }  # fmt: skip
        self._patience(lambda: self.metrics.once("episode", episode.id, values))

    def write_machines(
        self, clients: Iterable[Mapping[str, Any]], weights: Mapping[str, Any], updates: int
    ) -> None:  # fmt: skip
        """Write how the machines do, once each MACHINES_S. clients: of the server's status. weights: the newest."""
        if (now := clock.monotonic()) >= self._next_machines:
            self._next_machines = now + MACHINES_S
            self.write("machines", updates, machines_of(self.metrics.path.parent, clients, weights))

    def value_error(self, phase: str, count: int) -> dict[str, float]:
        """Compare values with returns, for the newest `count` episodes of a phase; see counters.value_error."""
        episodes = self._counters.recent(phase, count)
        return value_error(self._counters.sources, self._ranks.algorithm, episodes, self._ranks.world.device)

    def show(
        self, phase: Phase | None, *, updates: int, refused: int, mode: Any, wall_s: float, waits_for: str,
        left: str, version: int, actors: str, evaluations: Mapping[str, Mapping[str, Any]],
    ) -> None:  # fmt: skip
        """Write the newest metrics, if there were updates since the last call, and show the console's lines.

        evaluations: those of the run so far, the first of them first."""
        now = clock.monotonic()
        is_first, (then, before) = self._rate is None, self._rate or (now, updates)
        rate = (updates - before) / max(now - then, 1e-9)
        self._rate = (now, updates)
        if self._latest and (rate or is_first):
            values = {name: float(value) for name, value in self._latest.items()}
            values |= self.value_error(phase.name, RECENT) if phase else {}
            values |= {"refused": refused} if refused else {}
            self._warn_of_clipping(values.get("targets_outside", 0.0))
            self.write("update", updates, values | ({"rate": round(rate, 1)} if rate else {}))
        if phase is not None and phase.actors.mode == "collect" and phase.updates:
            self._warn_of_harm(phase.name, next(iter(evaluations.values()), {}))
        name = phase.name if phase else "end"
        recent = tally(self._counters.recent(name, RECENT))
        self.console.show({
            "phase": f"{name}" + f" ({mode})" * (mode != name) + f", {wall_s:.0f} s",
            "left": left,
            "episodes": f"{self._counters.episodes}",
            "success": f"{recent.alone} unassisted, {recent.assisted} assisted, of the last {recent.episodes}",
            "return": f"{recent.return_mean or 0.0:.2f} mean of the last {recent.episodes}",
            "store": ", ".join(f"{n} {b.head - b.tail}" for n, b in self._counters.sources.buffers.items()),
            "updates": f"{updates}" + f", {rate:.0f}/s" * bool(rate),
            "waits for": waits_for,
            "weights": f"version {version}",
            "actors": actors,
        })  # fmt: skip

    def _warn_of_harm(self, phase: str, first: Mapping[str, Any]) -> None:
        """Say once in a phase if its policy succeeds less than at the run's first evaluation, beyond chance: the 95 %
        intervals do not touch. Episodes with a person's help count on neither side."""
        before = Share(first.get("successes") or 0, first.get("episodes", 0))
        newest = self._counters.recent(phase, FALLEN)
        alone = tally(newest).alone
        if len(newest) == FALLEN and alone.interval[1] < before.interval[0] and phase not in self._fallen:
            self._fallen.add(phase)
            log.warning(
                "%s does harm so far: without help its newest episodes succeed in %s, and at the first evaluation it "
                "was %s. Stop it with tools/plan.py stop, and begin another run with more demonstrations, or with "
                "plan=hiors, which imitates what has succeeded (docs/guides/policies.md)", phase, alone, before,
            )  # fmt: skip

    def _warn_of_clipping(self, share: float) -> None:
        """Say once if the critics cannot represent the returns that there are."""
        if share > CLIPPED and not self._is_clipping_told:
            self._is_clipping_told = True
            log.warning(
                "%.0f %% of the critics' targets lie outside of critic.values.low to critic.values.high and are "
                "clipped: begin another run with a range that holds the returns, or with critic=two_hot", 100 * share
            )  # fmt: skip
