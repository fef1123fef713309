"""Runs the training loop: ask the plan for the next update, draw its batch, run it, publish weights, checkpoint.

Rank 0 is a client of the server (server_sync.py): it tells the directive and the step limit, and hears which episodes
have changed. It reads the rows themselves from the mapped files.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from serl_client import clock
from serl_client import messages as m
from serl_client.connection import Connection
from serl_client.console import Console
from serl_client.errors import RetakeError

from serl_launcher.replay.mixture import ReplayMixture
from serl_launcher.replay.once import Seen
from serl_launcher.replay.statistics import statistics
from serl_launcher.training.checkpoint import Checkpoints
from serl_launcher.training.counters import RunCounters, evaluation
from serl_launcher.training.forecast import Forecast
from serl_launcher.training.metrics import MetricsLog
from serl_launcher.training.monitor import Monitor
from serl_launcher.training.plan import RANDOM, Phase, Plan, Update, unrepeated
from serl_launcher.training.plan_state import ENDING, PhaseCounts, PlanState
from serl_launcher.training.ranks import Ranks
from serl_launcher.training.rate_limiter import UNPACED
from serl_launcher.training.server_sync import LATE, SYNC_S, Director, ServerSync
from serl_launcher.training.tracing import Tracer, await_rows, check_filled, sift
from serl_launcher.training.writers import CheckpointKeeper, Patience, Publisher
from serl_launcher.types import Batch

log = logging.getLogger(__name__)

OVER = (
    ": a higher bound of a phase that trains, such as max_env_steps=, or more times of what is "
    "repeated, goes on with it, and another run_dir= begins a new one"
)
HOPE_S = 60.0  # that an update waits for data that no actor adds now: late records or a label may still come
LONGEST = 1000  # characters of what the learner says it waits for in a status
FAREWELL_S = 15.0  # how long the actors may take to deliver the rest


class _Stopped(Exception):
    """The run is stopped where no state can be kept: a normaliser waits for its data."""


class Learner:
    """Runs a plan to its end, on all ranks.

    link: the connection to the server. sources: the replay buffers, from which batches are drawn.
    batch_size: rows of a batch, of all ranks together, where the plan says no other number.
    checkpoint_s: seconds between two checkpoints; 0: after each update; None: by their size.
    accept_plan: resume even if the current phase was edited. is_stopped: whether a person or a cluster stops the run.
    origin: whose weights and normalisers it began with (`from`), so that no plan fits these anew; None: nobody's.
    """

    def __init__(
        self, *, run_dir: Path, link: Connection, plan: Plan, ranks: Ranks, sources: ReplayMixture,
        checkpoints: Checkpoints, metrics: MetricsLog, console: Console, batch_size: int,
        checkpoint_s: float | None, accept_plan: bool, is_stopped: Callable[[], bool], origin: str | None = None,
    ) -> None:  # fmt: skip
        self._is_stopped, self._origin = is_stopped, origin
        self.ranks, self.sources = ranks, sources
        self.batch_size, self.accept_plan = batch_size, accept_plan
        self.counters, self.state = RunCounters(sources), PlanState(plan)
        self._patience = Patience(run_dir)
        self.monitor = Monitor(metrics, console, self.counters, ranks, self._patience)
        self.server = ServerSync(
            link, self.counters,
            lambda episode: self.monitor.write_episode(episode, self.state.updates, self.wall_s),
        )  # fmt: skip
        self.director = Director(self.server)
        self.publisher = Publisher(run_dir / "weights", ranks, self.server.call, self._patience)
        self.keeper = CheckpointKeeper(checkpoints, checkpoint_s, self._patience)
        self._tracer = Tracer(ranks, sources, self.server.set_aside)
        self.changes: list[dict[str, Any]] = []  # {updates: at which, what} of settings, over all starts
        self.evaluations: dict[str, dict[str, Any]] = {}  # by phase, or phase@updates within one; the newest last
        self._aside: dict[str, dict[str, Any]] = {}  # by outline: where plans stood when another one came
        self._forecast = Forecast()
        self._is_starved = False  # an update is due and its sources hold nothing for it: actors may go on at any pace
        self._began = self._fed = clock.monotonic()  # fed: when an update last had its data, or none was due

    @property
    def wall_s(self) -> float:
        """Seconds of work on this run, over all its starts."""
        return clock.monotonic() - self._began

    # -- the loop
    def run(self) -> None:
        """Train until the plan ends; then let the actors deliver their last data. Keep a last checkpoint, also of a run
        that is stopped.

        Nothing writes to the run's folder any more when this returns or raises.
        """
        try:
            self._run()
        except _Stopped:
            log.info("stopped: the same command goes on from the last checkpoint")
        finally:
            self._patience.end()
            self.publisher.writer.join()
            self.keeper.writer.join()

    def _run(self) -> None:
        saved = self.keeper.checkpoints.load()
        self.server.newest_command = saved["command"] if saved else 0
        self.server.synchronise()
        sift(self.sources, self.server.set_aside)
        self._resume(saved)
        del saved  # it may be as large as all that is trained
        self._publish()
        self._direct()
        self._fed = clock.monotonic()
        while self.state.phase is not None and not self._is_stopped():
            self._hear()
            self._advance()
            if self._is_ending():
                continue  # `stop` comes before another directive or update
            if not self._update():
                self.server.link.wait(SYNC_S)
            self._tell()
            self.keeper.turn(self.state.updates, self._state)
        if self.state.phase is None:
            self._farewell()
        elif self.keeper.schedule.cost >= 1:
            log.info("keeping a checkpoint, which takes about %.0f s", self.keeper.schedule.cost)
        self.checkpoint()
        if self.state.phase is not None:
            log.info("stopped after %d updates: the same command goes on from here", self.state.updates)

    def _update(self) -> bool:
        """Make the update that is due. Returns False if none is due, or if its sources hold no data for it."""
        name, phase = self.state.next_update(self._progress()), self.state.phase
        batch, seen = self._batch(phase.update(name)) if name and phase else (None, None)
        if name and batch is None and seen is not None:
            self.state.did_see(name, seen, all_there_is=True)
            return not self.state.has_seen_all  # then another update may be due
        self._is_starved = (name is not None and batch is None) or self.state.has_seen_all
        if name is None or batch is None:
            self._check_hope(phase, name)
            return False
        self._fed = clock.monotonic()
        for action, source in self.state.begin():
            self._do(action, source, "")
        if self._is_ending():
            self.state.at.begun = False
            return False
        metrics, columns = self.ranks.update(name, batch)
        self._tracer.updated(name, batch, self.state.updates)
        if columns:
            self.sources.derive(batch.step_id, columns)
        self.monitor.add(metrics)
        self.state.did_update(name)
        if seen is not None:
            self.state.did_see(name, seen)
        if self.state.publish_due() and self.publisher.offer(self.state.updates):
            self.state.did_publish()
        return True

    def _check_hope(self, phase: Phase | None, name: str | None) -> None:
        """Raise ConfigError for an update that has waited long for data which nobody adds: imports ended before."""
        if phase is None or name is None or phase.update(name).order != RANDOM:
            self._fed = clock.monotonic()
        elif clock.monotonic() > self._fed + HOPE_S:
            check_filled(self.sources, phase, name)

    def _batch(self, update: Update) -> tuple[Batch | None, dict[str, Seen] | None]:
        """Return the batch of an update, None: there is none now, and with `order: once` what it has seen then."""
        count, window = update.batch or self.batch_size, self.ranks.algorithm.windows[update.name]
        if update.order == RANDOM:
            return self.sources.sample(count, window, update.data), None
        return self.sources.unseen(count, window, update.data, self.state.at.seen.get(update.name, {}))

    def _advance(self) -> None:
        """If the phase has ended, do its on_end actions and go on to the next one."""
        self._obey()
        before, at = self.state.phase, self.state.at
        actions = self.state.advance(self._progress())
        if self.state.at is not at:  # `goto` may begin the same phase again
            assert before is not None
            self._fed = clock.monotonic()
            self._show(before)  # with the metrics of its last updates
            self.monitor.begin_phase()
            self.server.presence.begin_phase()
            self.publisher.settle(self.state.updates)  # the next phase begins with what this one published
            if before.actors.mode == "evaluate" and at.directives:
                self._evaluated(before, at.directives)
            ended = unrepeated(before.name)
            self.monitor.write("person", self.state.updates, {"phase": before.name, **self.person_time()})
            for action, source in actions:
                self._do(action, source, ended)
            if ("checkpoint", None) not in actions:  # a kill must not take the run back into a phase
                self.checkpoint(ended)  # that the actors have left
            if self.state.phase is not None and self._is_ending():
                return
        self._direct()
        if self.state.at is not at and self.state.phase is not before:  # a phase that begins again has its directive
            self.server.drop(("next",), LATE)

    def person_time(self) -> dict[str, Any]:
        """Return how long the run has needed a person until now; see PersonTime."""
        return self.server.person.told(self.counters, self.sources.spec.fps)

    def _obey(self) -> None:
        """Take the operator's commands, up to the first one that ends the phase: those after it are of the next one."""
        commands, is_over = self.server.commands, False
        while commands and not is_over:
            _, name, argument = commands.pop(0)
            try:
                self.state.command(name, argument)
                is_over = name in ENDING
            except RetakeError as error:
                log.warning("%s", error)

    def _do(self, action: str, source: str | None, ended: str) -> None:
        if action == "checkpoint":
            self.checkpoint(ended)
        elif action == "publish":
            self._publish()
        elif action == "fit_normalizer" and self._origin:
            log.info("fit_normalizer: %s: the normalisers stay those of from=%s", source, self._origin)
        elif source is not None:
            self._fit(source)

    def _fit(self, source: str) -> None:
        """Fit the normalisers, once there are rows; not if the plan ends before that."""
        await_rows(self.sources, source, self._turn, lambda: self._is_stopped() or self._is_ending())
        if self.sources.size(source)[0] or not (self._is_stopped() or self._is_ending()):
            self.ranks.set_statistics(statistics(self.sources, source, self.ranks.algorithm.measured))
        elif self._is_stopped():
            raise _Stopped
        else:
            log.warning("fit_normalizer: %s holds no step as the plan ends: nothing was fitted", source)

    def _is_ending(self) -> bool:
        return self.state.phase is None or any(name == "stop" for _, name, _ in self.server.commands)

    def _turn(self) -> None:
        """Let actors go on, and hear of what they bring, while a normaliser waits: no state of now could be resumed."""
        self._is_starved = True
        self.server.link.wait(SYNC_S)
        self._hear()
        self._tell()

    def _evaluated(self, phase: Phase, directives: Sequence[int]) -> None:
        """Keep the result of an evaluation. Raises RetakeError if other weights were to act than those trained."""
        result = evaluation(self.counters, directives, self.publisher.version["version"], phase.episodes)
        if not self.ranks.still_published():
            raise RetakeError(f"the weights that {phase.name} ran are not the trained ones")
        is_first = phase.name in [*self.evaluations][:1]  # that of before training stays
        alone = self.state.plan.closing if is_first else self.state.plan.phases
        name = phase.name if phase.name in alone else f"{phase.name}@{self.state.updates}"
        self.evaluations.pop(name, None)
        told = {"phase": phase.name, "updates": self.state.updates, "weights_sha256": self.publisher.version["sha256"]}
        self.evaluations[name] = result | told
        counted = {key: result[key] for key in ("episodes", "distinct_starts", "successes")}
        counted |= self.monitor.value_error(phase.name, result["episodes"])
        self.monitor.write("evaluation", self.state.updates, {"phase": phase.name, **counted})
        self.counters.starts.clear()  # a later one of more episodes hashes those again that the store holds

    # -- the server
    def _progress(self) -> Any:
        unpaced = UNPACED[1] if self._is_starved else "" if self.server.presence.waits else UNPACED[0]
        return self.counters.progress(self.wall_s, unpaced)

    def _hear(self) -> None:
        if self.server.hear():
            self.state.look_again()

    def _direct(self) -> None:
        """Tell the server the plan's directive, once the weights that an evaluation runs are published."""
        body = self.state.directive()
        evaluates = body["mode"] == "evaluate"
        if evaluates and self.director.body.get("mode") != "evaluate":
            self._publish()
        limit = self.state.step_limit(self._progress())
        body |= {"weights": self.publisher.version["version"] if evaluates else None, "paced": limit is not None}
        if evaluates and not self.state.at.directives and body == self.director.body:
            self.director.direct({**body, "mode": "idle"}, None)  # it begins again: its episodes get another number
        self.director.direct(body, limit)
        if evaluates:
            self.state.did_direct(self.director.number)

    def _tell(self) -> None:
        """Tell the step limit; none where actors have come to it and what an update needs has not. Write metrics and
        console when they are due."""
        phase, progress = self.state.phase, self._progress()
        counts = progress.phases.get(phase.name if phase else "", PhaseCounts())
        made, limit = counts.env_steps, self.state.step_limit(progress)
        self.director.pace(None if self._is_starved and limit is not None and made >= limit else limit)
        if self.monitor.is_due():
            self.server.presence.look(phase, made)
            self.server.link.send(m.Heartbeat(self._show(phase)))
            self.monitor.write_machines(self.server.clients, self.publisher.version, self.state.updates)
            self.server.link.send(m.Status())  # its answer tells of the person's time, and of the machines
        self.publisher.turn()

    def _publish(self) -> None:
        self.publisher.publish(self.state.updates)
        self.state.did_publish()

    def _farewell(self) -> None:
        """Send the directive `stop`, and wait until the actors have delivered their data and left."""
        deadline = clock.monotonic() + FAREWELL_S
        while clock.monotonic() < deadline:
            self._direct()
            self.server.synchronise()
            if not self.server.presence.here:
                return
            clock.sleep(0.05)
        log.warning("still connected at the end: %s", ", ".join(self.server.presence.here))

    # -- checkpoints
    def checkpoint(self, ended: str = "") -> None:
        """Keep the state, and return when it is durable. ended: name of the phase that ends here; "": none."""
        self.keeper.keep(self.state.updates, self._state(), ended)

    def _state(self) -> dict[str, Any]:
        """Return everything that a resumed run needs to continue bit by bit as this one would."""
        return {
            "algorithm": self.ranks.state_dict(), "plan": self.state.state_dict(),
            "sources": self.sources.state_dict(), "torch": torch.get_rng_state(), "command": self.server.obeyed,
            "wall_s": self.wall_s, "phases": self.state.plan.outline, "evaluations": self.evaluations,
            "starts": self.counters.starts, "cost_s": self.keeper.schedule.cost, "changes": self.changes,
            "person": self.server.person.state_dict(), "aside": self._aside,
        }  # fmt: skip

    def _resume(self, saved: Mapping[str, Any] | None) -> None:
        """Go on from a checkpoint. If the plan's phases are others, take only what was learned, and begin the plan, or
        go on where it stood if nothing was learned since, as in an evaluation.

        It begins, too, in a run of demonstrations alone that goes on with another algorithm: nothing was learned there.
        """
        self.publisher.version = dict(self.server.link.notice.weights)
        self.ranks.begin(saved and saved["algorithm"])
        if saved is None:
            if self.monitor.metrics.updates > 0:  # its checkpoints were deleted
                log.warning(
                    "no checkpoint is left: learning anew from the data there is, with phases that count from here"
                )
                self.state = PlanState(self.state.plan, self._progress())
                self.server.synchronise()
                self.server.drop(ENDING, "`next`, `goto` and `stop` from before are not obeyed: say them again")
            self.monitor.metrics.updates = -1  # those of an earlier start are not made again
            return
        self.sources.load_state_dict(saved["sources"])
        torch.set_rng_state(saved["torch"])
        self._began -= saved["wall_s"]
        self.keeper.resume(saved.get("cost_s", 0.0))
        self.counters.starts |= saved.get("starts", {})
        self.changes = list(saved.get("changes", ()))
        if told := saved.get("person"):  # checkpoints of before have none
            self.server.person.load_state_dict(told)
        now, before = (" -> ".join(names) for names in (self.state.plan.outline, saved["phases"]))
        self._aside = dict(saved.get("aside", {}))
        self._aside[before] = {name: saved[name] for name in ("plan", "evaluations", "wall_s")}
        stood = self._aside.pop(now, None)
        if now != before:
            self.server.commands.clear()
        if saved["algorithm"] is not None and stood and stood["plan"]["updates"] == saved["plan"]["updates"]:
            edits = self.state.load_state_dict(stood["plan"], accept=self.accept_plan, progress=self._progress())
            if stood["plan"]["at"]["phase"]:
                self.state.at.base["wall_s"] += saved["wall_s"] - stood["wall_s"]
            self.evaluations = stood["evaluations"]
            phase = self.state.phase
            where, over = (f"resumed in phase {phase.name}", "") if phase else ("the run was over", OVER)
            log.info("%s after %d updates%s", where, self.state.updates, over)
        else:
            edits = []
            self.state = PlanState(self.state.plan, self._progress())
            self.state.updates = saved["plan"]["updates"]
            self.server.commands.clear()
            log.info("the plan %s begins%s, with what %s had learned", now, " anew" * bool(stood), before)
        self._changed("; ".join(filter(None, [*edits, self.keeper.checkpoints.changed])))

    def _changed(self, what: str) -> None:
        """Note, for log, metrics and summary, that settings are others than at the checkpoint."""
        if what:
            log.info("changed since the checkpoint (now, then): %s", what)
            self.changes.append({"updates": self.state.updates, "what": what})
            self.monitor.write("changed", self.state.updates, {"what": what})

    def _waits_for(self) -> str:
        lacks_data = "data" if self._is_starved else "nothing"
        return self.server.presence.lack or self.state.waits_for(self._progress()) or lacks_data

    def _show(self, phase: Phase | None) -> dict[str, str]:
        """Write metrics and console, and return the report for the heartbeat."""
        waits_for = self._waits_for()
        left = self._forecast.look(self.state, self._progress(), waits_for)
        self.monitor.show(
            phase, updates=self.state.updates, refused=self._tracer.look(self.state.updates), wall_s=self.wall_s,
            mode=self.director.body.get("mode"), waits_for=waits_for, left=left, actors=str(self.server.presence),
            version=self.publisher.version.get("version", 0), evaluations=self.evaluations,
        )  # fmt: skip
        return {"waits_for": waits_for[:LONGEST], "left": left}
