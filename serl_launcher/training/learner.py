"""Runs the training loop: ask the plan for the next update, draw its batch, run it, publish weights, checkpoint.

Rank 0 is a client of the server: it sends the directive and the step limit, and hears which episodes have changed. It
reads the rows themselves from the mapped files.
"""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from serl_client import clock
from serl_client import messages as m
from serl_client.connection import Connection
from serl_client.console import Console
from serl_client.errors import RetakeError

from serl_launcher.replay.mixture import ReplayMixture, statistics
from serl_launcher.replay.once import Seen
from serl_launcher.replay.views import EpisodeInfo
from serl_launcher.service.link import ask
from serl_launcher.training.checkpoint import Checkpoints
from serl_launcher.training.counters import RunCounters, evaluation, succeeded, value_error
from serl_launcher.training.metrics import MetricsLog
from serl_launcher.training.plan import RANDOM, Phase, Plan, Update
from serl_launcher.training.plan_state import PlanState
from serl_launcher.training.presence import Presence
from serl_launcher.training.ranks import Ranks
from serl_launcher.training.tracing import Tracer, await_rows, sift
from serl_launcher.training.writers import Keeper, Patience, Publisher
from serl_launcher.types import Batch

log = logging.getLogger(__name__)

SYNC_S = 0.005
RETRY_S = 0.2  # after the server said that it cannot
ALLOW_S = 1.0  # the pace is told again this often: a server that was restarted does not know it
METRICS_S = 1.0
FAREWELL_S = 15.0  # how long the actors may take to deliver the rest
CLIPPED = 0.01  # share of critic targets outside of their range that is told


class Learner:
    """Runs a plan to its end, on all ranks.

    link: the connection to the server. sources: the replay buffers, from which batches are drawn.
    batch_size: rows of a batch, of all ranks together, where the plan says no other number.
    checkpoint_s: seconds between two checkpoints; 0: after each update; None: by their size.
    accept_plan: resume even if the current phase was edited.
    """

    def __init__(
        self, *, run_dir: Path, link: Connection, plan: Plan, ranks: Ranks, sources: ReplayMixture,
        checkpoints: Checkpoints,
        metrics: MetricsLog, console: Console, batch_size: int, checkpoint_s: float | None, accept_plan: bool,
    ) -> None:  # fmt: skip
        self.run_dir, self.link, self.plan, self.ranks, self.sources = run_dir, link, plan, ranks, sources
        self.algorithm, self.device = ranks.algorithm, ranks.world.device
        self.metrics, self.console = metrics, console
        self.batch_size, self.accept_plan = batch_size, accept_plan
        self.counters = RunCounters(sources)
        self.state = PlanState(plan)
        self._patience = Patience(run_dir)
        self.publisher = Publisher(run_dir / "weights", ranks, self._call, self._patience)
        self.keeper = Keeper(checkpoints, checkpoint_s, self._patience)
        self.evaluations: dict[str, dict[str, Any]] = {}  # the newest result of each phase that evaluates
        self._revision = self._command = self._number = 0
        self._orders: list[Sequence[Any]] = []  # commands that were heard and not carried out yet
        self._body: dict[str, Any] = {}
        self._welcome: m.Welcome | None = None  # of the connection on which the directive was given
        self._allowed: int | None = None
        self._starved = False  # an update is due and its sources hold nothing for it: actors may go on at any pace
        self._presence = Presence()
        self._asked = self._is_behind = False  # a Sync is under way; its latest answer was not all there is
        self._has_news = False  # episodes have come or changed
        self._next_sync = self._next_allow = self._next_metrics = 0.0
        self._wall_s, self._began = 0.0, clock.monotonic()
        self._rate = (clock.monotonic(), 0)  # when, and how many updates there were
        self._latest: Mapping[str, torch.Tensor] = {}
        self._tracer, self._is_clipping_told = Tracer(ranks, sources, self._set_aside), False

    @property
    def wall_s(self) -> float:
        """Seconds of work on this run, over all its starts."""
        return self._wall_s + clock.monotonic() - self._began

    # -- the loop
    def run(self) -> None:
        """Train until the plan ends. Then let the actors deliver their last data, and keep a last checkpoint.

        Nothing writes to the run's folder any more when this returns or raises.
        """
        try:
            self._run()
        finally:
            self._patience.end()
            self.publisher.writer.join()
            self.keeper.writer.join()

    def _run(self) -> None:
        saved = self.keeper.checkpoints.load()
        self._command = saved["command"] if saved else 0
        self._synchronise()
        sift(self.sources, self._set_aside)
        self._resume(saved)
        del saved  # it may be as large as all that is trained
        self._publish()
        self._direct()
        while self.state.phase is not None:
            self._hear()
            self._advance()
            if not self._update():
                self.link.wait(SYNC_S)
            self._tell()
        self._farewell()
        self.checkpoint()

    def _update(self) -> bool:
        """Make the update that is due. Returns False if none is due, or if its sources hold no data for it."""
        name, phase = self.state.next_update(self._progress()), self.state.phase
        batch, seen = self._batch(phase.update(name)) if name and phase else (None, None)
        if name and batch is None and seen is not None:
            self.state.did_see(name, seen, all_there_is=True)
            return not self.state.has_seen_all  # then another update may be due
        self._starved = (name is not None and batch is None) or self.state.has_seen_all
        if name is None or batch is None:
            return False
        for action, source in self.state.begin():
            self._do(action, source, "")
        metrics, columns = self.ranks.update(name, batch)
        self._tracer.updated(name, batch, self.state.updates)
        if columns:
            self.sources.derive(batch.step_id, columns)
        self._latest = {**self._latest, **metrics}
        self.state.did_update(name)
        if seen is not None:
            self.state.did_see(name, seen)
        if self.state.publish_due() and self.publisher.offer(self.state.updates):
            self.state.did_publish()
        return True

    def _batch(self, update: Update) -> tuple[Batch | None, dict[str, Seen] | None]:
        """Return the batch of an update, None: there is none now, and with `order: once` what it has seen then."""
        count, window = update.batch or self.batch_size, self.algorithm.windows[update.name]
        if update.order == RANDOM:
            return self.sources.sample(count, window, update.data), None
        return self.sources.unseen(count, window, update.data, self.state.at.seen.get(update.name, {}))

    def _advance(self) -> None:
        """If the phase has ended, do its on_end actions and go on to the next one."""
        self._obey()
        before, begin = self.state.phase, int(self.state.at.base["episodes"])
        actions = self.state.advance(self._progress())
        if self.state.phase is not before:
            assert before is not None
            self._show(clock.monotonic(), before)  # what its last updates said; those of the next say other things
            self._latest = {}
            self.publisher.settle(self.state.updates)  # the next phase begins with what this one published
            if before.actors.mode == "evaluate":
                self._evaluated(before, begin)
            for action, source in actions:
                self._do(action, source, before.name)
            if ("checkpoint", None) not in actions:  # a kill must not take the run back into a phase
                self.checkpoint(before.name)  # that the actors have left
        self._direct()

    def _obey(self) -> None:
        for _, name, argument in self._orders:
            try:
                self.state.command(name, argument)
            except RetakeError as error:
                log.warning("%s", error)
        self._orders.clear()

    def _do(self, action: str, source: str | None, ended: str) -> None:
        if action == "checkpoint":
            self.checkpoint(ended)
        elif action == "publish":
            self._publish()
        elif action == "fit_normalizer":
            assert source is not None
            await_rows(self.sources, source, self._turn, lambda: bool(self._orders))
            self.ranks.set_statistics(statistics(self.sources, source))

    def _turn(self) -> None:
        """Let actors go on, and hear of what they bring, while no update can be made."""
        self._starved = True
        self.link.wait(SYNC_S)
        self._hear()
        self._tell()

    def _evaluated(self, phase: Phase, begin: int) -> None:
        """Keep the result of an evaluation. Raises RetakeError if other weights acted than those that were trained."""
        result = evaluation(self.counters, phase.name, begin, phase.episodes)
        versions, published = result["versions"], self.publisher.version["version"]
        if any(version != published for version in versions):
            raise RetakeError(f"{phase.name} was to run weights {published}, but {versions} acted")
        if not self.ranks.still_published():
            raise RetakeError(f"the weights that {phase.name} ran are not the trained ones")
        self.evaluations[phase.name] = result
        counted = {key: result[key] for key in ("episodes", "distinct_starts", "successes")}
        counted |= self._value_error(self.counters.recent(phase.name, result["episodes"]))
        self._note("evaluation", {"phase": phase.name, **counted})

    def _value_error(self, episodes: Sequence[EpisodeInfo]) -> dict[str, float]:
        return value_error(self.sources, self.algorithm, episodes, self.device)

    # -- hearing
    def _progress(self) -> Any:
        return self.counters.progress(self.wall_s)

    def _hear(self) -> None:
        """Take what the server has sent, and ask again. Never waits."""
        self._receive()
        if self._is_behind:
            self._synchronise()  # or a step would be drawn whose episode the next page sets aside
        if self._has_news:
            self._has_news = False
            self.state.look_again()
        if self.link.connected and not self._asked and clock.monotonic() >= self._next_sync:
            self._asked = self.link.send(m.Sync(self._revision, self._command))
            self._next_sync = clock.monotonic() + SYNC_S

    def _receive(self) -> None:
        while (message := self.link.receive()) is not None:
            if isinstance(message, m.Synced):
                self._take(message)
            elif isinstance(message, m.Failed):
                log.warning("server: %s", message.text)
                self._asked, self._next_sync = False, clock.monotonic() + RETRY_S
        self._asked &= self.link.connected

    def _take(self, synced: m.Synced) -> None:
        self._asked, self._is_behind = False, synced.more
        self._revision = synced.revision
        self._presence.take(synced.actors)
        self._has_news |= bool(synced.episodes)
        for episode in self.counters.take(self.sources.update(synced.episodes, synced.heads)):
            self._log_episode(episode)
        self._orders += [command for command in synced.commands if command[0] > self._command]
        self._command = max(self._command, *(number for number, _, _ in synced.commands), 0)

    def _synchronise(self) -> None:
        """Hear of all episodes and commands that the server has."""
        while self._asked:  # an answer is under way already
            self.link.wait(SYNC_S)
            self._receive()
        more = True
        while more:
            synced = self._call(m.Sync(self._revision, self._command))
            self._take(synced)
            more = synced.more

    def _log_episode(self, episode: EpisodeInfo) -> None:
        values = {
            "phase": episode.phase, "steps": episode.steps, "return": episode.reward,
            "success": None if episode.success is None else succeeded(episode), "intervened": episode.intervened,
            "weights": episode.weights, "updates": self.state.updates, "wall_s": round(self.wall_s, 2),
        }  # fmt: skip
        self._patience(lambda: self.metrics.once("episode", episode.id, values))

    # -- telling
    def _direct(self) -> None:
        """Send the plan's directive if it has changed, or if the server may have been restarted."""
        body = self.state.directive()
        evaluates = body["mode"] == "evaluate"
        if evaluates and self._body.get("mode") != "evaluate":
            self._publish()
        allowed = self.state.step_limit(self._progress())
        body |= {"weights": self.publisher.version["version"] if evaluates else None, "paced": allowed is not None}
        if body != self._body or self.link.welcome is not self._welcome:
            number = self._call(m.Direct(body, allowed)).value
            if number != self._number:
                log.info("directive %d: %s", number, " ".join(filter(None, (body["phase"], body["mode"]))))
            self._number, self._body, self._allowed, self._welcome = number, body, allowed, self.link.welcome

    def _tell(self) -> None:
        """Send the step limit if it has changed. Write metrics, console and a checkpoint when they are due."""
        now = clock.monotonic()
        allowed = None if self._starved else self.state.step_limit(self._progress())
        if self._body.get("paced") and (allowed != self._allowed or now >= self._next_allow):
            self.link.send(m.StepLimit(self._number, allowed))
            self._allowed, self._next_allow = allowed, now + ALLOW_S
        if now >= self._next_metrics:
            self._next_metrics = now + METRICS_S
            self._show(now, self.state.phase)
        self.publisher.turn()
        self.keeper.turn(self.state.updates, self._state)

    def _publish(self) -> None:
        self.publisher.publish(self.state.updates)
        self.state.did_publish()

    def _note(self, kind: str, values: Mapping[str, Any]) -> None:
        self._patience(lambda: self.metrics.write(kind, {"updates": self.state.updates, **values}))

    def _call(self, message: m.Message) -> Any:
        """Return the server's answer. Where that took a new connection, a Sync under way on the old one was lost."""
        before = self.link.welcome
        answer = ask(self.link, message)
        self._asked &= self.link.welcome is before
        return answer

    def _set_aside(self, episode: str, reason: str) -> None:
        """Have the server keep an episode out of all views, and hear that it does."""
        self._call(m.SetAside(episode, reason))
        self._synchronise()

    def _farewell(self) -> None:
        """Send the directive `stop`, and wait until the actors have delivered their data and left."""
        deadline = clock.monotonic() + FAREWELL_S
        while clock.monotonic() < deadline:
            self._direct()
            self._synchronise()
            if not self._presence.here:
                return
            clock.sleep(0.05)
        log.warning("still connected at the end: %s", ", ".join(self._presence.here))

    # -- checkpoints
    def checkpoint(self, ended: str = "") -> None:
        """Keep the state, and return when it is durable. ended: name of the phase that ends here; "": none."""
        self.keeper.keep(self.state.updates, self._state(), ended)

    def _state(self) -> dict[str, Any]:
        """Return everything that a resumed run needs to continue bit by bit as this one would."""
        return {
            "algorithm": self.ranks.state_dict(), "plan": self.state.state_dict(),
            "sources": self.sources.state_dict(), "torch": torch.get_rng_state(), "command": self._command,
            "wall_s": self.wall_s, "phases": list(self.plan.phases), "evaluations": self.evaluations,
            "starts": self.counters.starts, "cost_s": self.keeper.schedule.cost,
        }  # fmt: skip

    def _resume(self, saved: Mapping[str, Any] | None) -> None:
        """Go on from a checkpoint. If the plan's phases are others, take only what was learned, and begin the plan.

        So does a run of demonstrations alone that goes on with another algorithm: nothing was learned there.
        """
        self.publisher.version = dict(self.link.notice.weights)
        self.ranks.begin(saved and saved["algorithm"])
        if saved is None:
            return
        self.sources.load_state_dict(saved["sources"])
        torch.set_rng_state(saved["torch"])
        self._wall_s = saved["wall_s"]
        self.keeper.resume(saved.get("cost_s", 0.0))
        self.counters.starts |= saved.get("starts", {})
        if saved["algorithm"] is not None and saved["phases"] == list(self.plan.phases):
            self.state.load_state_dict(saved["plan"], accept=self.accept_plan)
            self.evaluations = saved["evaluations"]
            over = "; the run is over: another run_dir= begins a new one" if self.state.at.phase is None else ""
            log.info("resumed in phase %s after %d updates%s", self.state.at.phase, self.state.updates, over)
        else:
            self.state = PlanState(self.plan, self._progress())
            self.state.updates = saved["plan"]["updates"]
            self._orders.clear()
            log.info("a new plan begins with what %s had learned", " -> ".join(saved["phases"]))

    # -- seeing
    def _show(self, now: float, phase: Phase | None) -> None:
        then, before = self._rate
        rate = (self.state.updates - before) / max(now - then, 1e-9)
        self._rate = (now, self.state.updates)
        refused = self._tracer.look(self.state.updates)
        if self._latest and rate:
            values = {name: float(value) for name, value in self._latest.items()}
            values |= self._value_error(self.counters.recent(phase.name, 20)) if phase else {}
            values |= {"refused": refused} if refused else {}
            self._warn_of_clipping(values.get("targets_outside", 0.0))
            self._note("update", {"rate": round(rate, 1), **values})
        name = phase.name if phase else "end"
        recent = [episode for episode in self.counters.recent(name, 20) if not episode.discard]
        assisted = [episode for episode in recent if episode.intervened]
        alone = [episode for episode in recent if not episode.intervened]
        self.console.show({
            "phase": f"{name} ({self._body.get('mode')}), {self.wall_s:.0f} s",
            "episodes": f"{self.counters.episodes}",
            "success": f"{_succeeded(alone)} unassisted, {_succeeded(assisted)} assisted, of the last {len(recent)}",
            "return": f"{sum(e.reward for e in recent) / max(1, len(recent)):.2f} mean of the last {len(recent)}",
            "store": ", ".join(f"{n} {b.head - b.tail}" for n, b in self.sources.buffers.items()),
            "updates": f"{self.state.updates}, {rate:.0f}/s",
            "waits for": self.state.waits_for(self._progress()) or ("data" if self._starved else "nothing"),
            "weights": f"version {self.publisher.version.get('version', 0)}",
            "actors": str(self._presence),
        })  # fmt: skip

    def _warn_of_clipping(self, share: float) -> None:
        """Say once if the critics cannot represent the returns that there are."""
        if share > CLIPPED and not self._is_clipping_told:
            self._is_clipping_told = True
            log.warning(
                "%.0f %% of the critics' targets lie outside of critic.values.low to critic.values.high and are "
                "clipped: begin another run with a range that holds the returns, or with critic=two_hot", 100 * share
            )  # fmt: skip


def _succeeded(episodes: list[EpisodeInfo]) -> str:
    judged = [episode for episode in episodes if episode.success is not None]
    return f"{sum(map(succeeded, judged))} of {len(judged)}"
