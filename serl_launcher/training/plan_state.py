"""Tracks the phase, what ends it, the next update, when weights are published, and when it evaluates."""

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from typing import Any

from serl_client.errors import ConfigError
from serl_client.words import check_choice

from serl_launcher.training.plan import ONCE, OPERATOR, SEEN, UNITS, Actors, Pace, Phase, Plan, Term, Update, parse
from serl_launcher.training.plan_edits import check_edits, is_raised, plain
from serl_launcher.training.rate_limiter import UNPACED, RateLimiter

log = logging.getLogger(__name__)

PACED = "env steps: pace"  # what the learner waits for where its actors are too slow for its ratio
ENDING = ("next", "goto", "stop")
COMMANDS = (*ENDING, "hold", "resume")
COUNTED = ("env_steps", "episodes", "successes", "interventions", "finished_steps")  # of PhaseCounts


@dataclass
class PhaseCounts:
    """What the learner has accepted of the data stamped with one phase, since the run began.

    `recent`: (success, assisted) of that phase's finished episodes, the newest last; at least LONGEST_WINDOW of them,
    or all that there are. An episode is assisted when a person took over in any of its steps. `finished_steps` are the
    env steps of the finished episodes.
    """

    env_steps: int = 0
    episodes: int = 0
    successes: int = 0
    interventions: int = 0
    recent: Sequence[tuple[bool, bool]] = ()
    finished_steps: int = 0


@dataclass(frozen=True, slots=True)
class SourceCounts:
    """What a source or view holds now."""

    steps: int = 0
    episodes: int = 0


@dataclass(frozen=True, slots=True)
class Progress:
    """The numbers that conditions compare: by phase name, or an evaluation's directive; by source or view name; and the
    run's seconds of work. unpaced: why steps may come beyond the step limit; empty: every actor waits for it."""

    phases: Mapping[str | int, PhaseCounts] = field(default_factory=dict)
    sources: Mapping[str, SourceCounts] = field(default_factory=dict)
    wall_s: float = 0.0
    unpaced: str = UNPACED[0]


@dataclass(slots=True)
class PhasePosition:
    """The position in the plan as plain numbers, which the checkpoint keeps. `phase` None: the plan has ended.

    evaluates: it is in the evaluation within this phase, whose own position is kept until then in `ended`.
    """

    phase: str | None
    base: dict[str, float]  # unit: the phase's count when it was entered
    updates: int = 0  # made in this phase
    turn: tuple[int, int] = (0, 0)  # round of the list of updates, index in it
    published_at: int = 0  # updates made at the latest publication
    held: bool = False
    begun: bool = False  # its on_begin actions are done
    directives: list[int] = field(default_factory=list)  # under which it evaluates: only their episodes are its own
    seen: dict[str, dict[str, Any]] = field(default_factory=dict)  # by update with `order: once`; see once.next_steps
    exhausted: list[str] = field(default_factory=list)  # those of them that found nothing new when they came last
    evaluates: bool = False
    evaluated_at: int = 0  # the count of the unit of the evaluation within the phase, when that last began


class PlanState:
    """Follows a plan. Rank 0 of the trainer owns it, and tells it what was accepted and what was done."""

    def __init__(self, plan: Plan, progress: Progress | None = None) -> None:
        """`progress`: what a store that is not empty held when this plan began."""
        self.plan = plan
        self.updates = 0  # made in this run
        self.ended: dict[str, dict[str, Any]] = {}  # the state_dict of each phase that has ended, as it stood then
        self._dropped = 0.0  # updates that the learner was too slow for, in the phases that have ended
        self._command: tuple[str, str] | None = None
        self._paused: RateLimiter | None = None  # of the phase that stands still for its evaluation
        self._enter(next(iter(plan.phases)), progress or Progress())

    @property
    def phase(self) -> Phase | None:
        """The current phase, or the evaluation within it; None when the plan has ended."""
        if self.at.phase is None:
            return None
        phase = self.plan.phases[self.at.phase]
        return phase.evaluate.phase if self.at.evaluates and phase.evaluate else phase

    def waits_for(self, progress: Progress) -> str | None:
        """Return why no update is due now, for the status line; None if one is due."""
        phase = self.phase
        if phase is None:
            return "nothing: the plan has ended"
        if self.at.held:
            return "the operator: held"
        if not phase.updates and phase.actors.mode == "teleop":
            return "demonstrations: a person begins each one at the actor, by r or a motion"
        if not phase.updates:
            return "the actors: this phase has no updates"
        if self.has_seen_all:
            return "new steps: its updates have seen all"
        bucket = self._begin(phase, progress)
        if bucket is None:
            return f"the start: {phase.start_when}"
        return None if bucket.may_update(self._env_steps(progress), self.at.updates) else PACED

    def next_update(self, progress: Progress) -> str | None:
        """Return the name of the update that is due; None while there is none."""
        return None if self.waits_for(progress) else self._turn()[2]

    def begin(self) -> list[tuple[str, str | None]]:
        """Return the actions before the phase's first update, once: [(action, source), ...]."""
        actions = [] if self.at.begun or self.phase is None else list(self.phase.on_begin)
        self.at.begun = True
        return actions

    def did_update(self, name: str) -> None:
        """Count the update that `next_update` named. Do not call it for a skipped one, which then stays due."""
        turn, index, due = self._turn()
        if name != due:
            raise ValueError(f"{due!r} was due, not {name!r}")
        self.at.turn = (turn, index + 1)
        self.at.updates += 1
        self.updates += 1

    @property
    def has_seen_all(self) -> bool:
        """Return whether no update can come, because those with `order: once` have seen all that is there."""
        return bool(self.at.exhausted) and self.phase is not None and not any(map(self._may_come, self.phase.updates))

    def did_see(self, name: str, seen: Mapping[str, Any], *, all_there_is: bool = False) -> None:
        """Note what an update with `order: once` has seen. all_there_is: it does not come again before `look_again`."""
        self.at.seen[name] = dict(seen)
        if all_there_is and name not in self.at.exhausted:
            self.at.exhausted.append(name)

    def look_again(self) -> None:
        """Let updates with `order: once` come again, because there may be new steps."""
        self.at.exhausted.clear()

    def publish_due(self) -> bool:
        """Return whether the phase asks for the weights to be published now."""
        every = self.phase.publish_every if self.phase else None
        return every is not None and self.at.updates - self.at.published_at >= every

    def did_publish(self) -> None:
        self.at.published_at = self.at.updates

    def step_limit(self, progress: Progress) -> int | None:
        """Return the limit of `progress.phases[phase].env_steps` for simulated actors; None: no limit."""
        phase = self.phase
        bucket = self._begin(phase, progress) if phase and phase.updates else None
        allowed = bucket.step_limit(self._env_steps(progress), self.at.updates) if bucket else phase and phase.env_steps
        return None if allowed is None else allowed + int(self.at.base["env_steps"])

    def command(self, name: str, argument: str = "") -> None:
        """Take an operator's command: next, hold, resume, stop, or goto with a phase. Raises ConfigError for any other.

        `advance` carries out next, stop and goto. However a phase ends, its on_end actions are done.
        """
        check_choice(name, COMMANDS, "command", "operator")
        if name == "goto":
            check_choice(argument, self.plan.phases, "phase", "operator")
        elif argument:
            raise ConfigError(f"operator: say {name} without {argument!r}")
        if name in ("hold", "resume"):
            self.at.held = name == "hold"
        else:
            self._command = (name, argument)

    def advance(self, progress: Progress) -> list[tuple[str, str | None]]:
        """Go on to the next phase if this one has ended, or to the evaluation within it that is due, or back from that.

        Returns the on_end actions of the phase that has ended: [(action, source), ...].
        """
        (command, argument), self._command = self._command or ("", ""), None
        phase, name = self.phase, self.at.phase
        if phase is None or name is None:
            if command in ("goto", "stop"):
                self._enter(argument or None, progress)
            return []
        met = (text for text in phase.until if self._met(text, progress))
        reason = command or ("" if self.at.held else next(met, ""))
        if not reason:
            if self._is_evaluation_due(phase, progress):
                self._leave(name, progress)
                self._paused = self.bucket
                self._enter(name, progress, evaluates=True)
            return []
        log.info("phase %s ends after %d updates: %s", phase.name, self.at.updates, reason)
        if self.at.evaluates and command in ("", "next"):
            bucket, self._dropped = self._paused, self.dropped
            self._stand(self._left(self.ended.pop(name), progress), progress)
            if bucket:  # not after a restart
                self.bucket, self._dropped = bucket, self._dropped - bucket.dropped
            return []
        if not self.at.evaluates:
            self._leave(name, progress)
        self._enter({"goto": argument, "stop": None}.get(command, self._after(name, progress)), progress)
        return list(self.plan.phases[name].on_end)

    def _after(self, name: str, progress: Progress) -> str | None:
        """Return the phase that follows one that ends; None: it is the last one."""
        leaves = any(self._met(text, progress) for text in self.plan.may_leave(name))
        return self.plan.after(name, leaves=leaves)

    def _is_evaluation_due(self, phase: Phase, progress: Progress) -> bool:
        """Return whether the phase has come to the next multiple of what its evaluation asks for, and note where."""
        if phase.evaluate is None or self.at.held:
            return False
        count, every = int(self._count(phase.evaluate.unit, progress)), phase.evaluate.every
        is_due = count // every > self.at.evaluated_at // every
        self.at.evaluated_at = count if is_due else self.at.evaluated_at
        return is_due

    def directive(self) -> dict[str, Any]:
        """Return what the actors are to do, without the directive's number."""
        phase = self.phase
        if phase is None or self.at.held:
            mode = "stop" if phase is None else "idle"
            return {"phase": phase.name if phase else "", **asdict(Actors(mode)), "episodes": None, "boundary": "now"}
        said = {"phase": phase.name, **asdict(phase.actors), "episodes": phase.episodes, "boundary": "episode"}
        spared = [] if phase.actors.mode == "evaluate" else sorted(self.plan.evaluators)
        return {**said, **({"without": spared} if spared else {})}

    def did_direct(self, number: int) -> None:
        """Note the directive under which this phase evaluates. From the first one on only such episodes count."""
        if not self.at.directives:
            self.at.base |= dict.fromkeys(self.at.base.keys() - {"wall_s"}, 0)
        if number not in self.at.directives:
            self.at.directives.append(number)

    @property
    def dropped(self) -> float:
        """The number of updates that steps were due and the learner was too slow for."""
        return self._dropped + (self.bucket.dropped if self.bucket else 0.0)

    def state_dict(self) -> dict[str, Any]:
        """Return the position as plain containers, with the phase as it is now, so that a later edit is noticed."""
        run = {"updates": self.updates, "ended": self.ended, "dropped": self.dropped}
        return {**self._position(), **run, "times": self.plan.repeat.times if self.plan.repeat else 0}

    def _position(self) -> dict[str, Any]:
        """Return the position, with the phase as it is now, and with the evaluation within it."""
        uncounted_steps = self.bucket.uncounted_steps if self.bucket else None
        phase = None if self.at.phase is None else self.plan.phases[self.at.phase]
        return {"at": asdict(self.at), "uncounted_steps": uncounted_steps, "phase": plain(phase)}

    def load_state_dict(
        self, state: Mapping[str, Any], *, accept: bool = False, progress: Progress | None = None
    ) -> list[str]:  # fmt: skip
        """Go on from a checkpoint in the phase of that name, and return what of that phase was edited since.

        A plan that had ended goes on in its first new repetition, or in the first of its phases whose bound was raised
        and which trains and is not repeated, or in its last one, with all that come later. progress: what the store
        holds. Raises ConfigError if the plan has no such phase any more, and as `check_edits` does.
        """
        now = progress or Progress()
        self.updates, self.ended, self._dropped = state["updates"], state.get("ended", {}), state.get("dropped", 0.0)
        if state["at"]["phase"] is None:
            if repetition := self.plan.new_repetition(state.get("times", 0), self.ended):
                self._enter(repetition, now)
                return []
            state = next(self._longer(now), state)
        edits = check_edits(self.plan, state["at"]["phase"], state["phase"], accept=accept)
        if state["at"].get("evaluates") and not self.plan.phases[state["at"]["phase"]].evaluate:
            state = self._left(self.ended.pop(state["at"]["phase"]), now)  # it does not evaluate any more
        self._stand(state, progress)
        return edits

    def _longer(self, progress: Progress) -> Iterator[dict[str, Any]]:
        """Yield where the plan may go on that had ended: at the ends of phases whose bound is higher now."""
        last = [*self.plan.phases][-1]
        for name, phase in self.plan.phases.items():
            kept, may_go_on = self.ended.get(name), name == last or (phase.updates and not self.plan.repeats(name))
            if kept and may_go_on and is_raised(kept["phase"]["until"], phase.until, truly=True):
                yield self._left(kept, progress)

    def _leave(self, name: str, progress: Progress) -> None:
        """Keep the position in a phase that ends here, or stands still for its evaluation."""
        self._dropped = self.dropped
        self.ended[name] = self._position() | {"wall_s": progress.wall_s}

    def _left(self, kept: Mapping[str, Any], progress: Progress) -> dict[str, Any]:
        """Return the position in a phase that was left, without the seconds since then."""
        base, since = kept["at"]["base"], progress.wall_s - kept["wall_s"]
        return {**kept, "at": {**kept["at"], "held": False, "base": {**base, "wall_s": base["wall_s"] + since}}}

    def _stand(self, state: Mapping[str, Any], progress: Progress | None) -> None:
        """Take a position that was kept. progress: what the store holds, whose steps are due their updates."""
        self.at = PhasePosition(**{**state["at"], "turn": tuple(state["at"]["turn"])})
        self.bucket = self._bucket(state["uncounted_steps"])
        if self.bucket and progress:
            before = state["phase"]["pace"]
            self.bucket.resume(before and Pace(**before), self._env_steps(progress), self.at.updates)
        now, then = self.phase and self.phase.evaluate, state["phase"].get("evaluate")
        if now and now.unit != (then or {}).get("unit"):  # it was counted in another unit, if at all
            self.at.evaluated_at = int(self._count(now.unit, progress or Progress()))

    def _enter(self, name: str | None, progress: Progress, *, evaluates: bool = False) -> None:
        self.at = PhasePosition(name, {}, evaluates=evaluates)
        self.at.base = {unit: self._total(unit, progress) for unit in UNITS if unit != "updates"}
        self.bucket: RateLimiter | None = None  # until start_when is met

    def _bucket(self, uncounted_steps: float | None) -> RateLimiter | None:
        return None if uncounted_steps is None or self.phase is None else RateLimiter(self.phase.pace, uncounted_steps)

    def _begin(self, phase: Phase, progress: Progress) -> RateLimiter | None:
        """Return the bucket; None before start_when is met. Steps before that moment add no tokens."""
        if self.bucket is None and (phase.start_when is None or self._met(phase.start_when, progress)):
            self.bucket = self._bucket(self._env_steps(progress))
        if self.bucket:
            self.bucket.unpaced = progress.unpaced
        return self.bucket

    def _turn(self) -> tuple[int, int, str]:
        """Return (round, index, name) of the next update in the phase's list."""
        updates = self.phase.updates if self.phase else ()
        if not updates:
            raise ValueError(f"phase {self.at.phase!r} has no updates")
        turn, index = self.at.turn
        while True:
            if index >= len(updates):
                turn, index = turn + 1, 0
            update = updates[index]
            if (turn + 1) % update.every == 0 and self._may_come(update):
                return turn, index, update.name
            index += 1

    def _may_come(self, update: Update) -> bool:
        return self.at.updates >= update.from_updates and update.name not in self.at.exhausted

    def _met(self, condition: str, progress: Progress) -> bool:
        return all(term.met_by(self.value(term, progress)) for term in parse(condition))

    def value(self, term: Term, progress: Progress) -> float:
        """Return what a term compares with its bound; nan, which meets no bound, if there is no value yet."""
        if term.name == OPERATOR:
            return math.nan
        if term.name == SEEN:
            once = {update.name for update in self.phase.updates if update.order == ONCE} if self.phase else set()
            return 1.0 if once <= set(self.at.exhausted) else math.nan
        if term.window is not None:
            recent = self._counts(progress).recent[-term.window :]
            if min(len(recent), self._count("episodes", progress)) < term.window:
                return math.nan
            alone = term.name == "unassisted_success"
            return sum(success and not (alone and assisted) for success, assisted in recent) / term.window
        if term.count is not None:
            return getattr(progress.sources.get(term.name, SourceCounts()), term.count)
        return self._count(term.name, progress)

    def _count(self, unit: str, progress: Progress) -> float:
        """Return the current phase's count of a unit since it was entered."""
        return self.at.updates if unit == "updates" else self._total(unit, progress) - self.at.base[unit]

    def _total(self, unit: str, progress: Progress) -> float:
        """Return the count of a unit since the run began. An evaluation counts steps of finished episodes only, because
        a limit of steps would else favour short episodes."""
        if unit == "wall_s":
            return progress.wall_s
        counts = self._counts(progress)
        evaluates = self.phase is not None and self.phase.actors.mode == "evaluate"
        return counts.finished_steps if evaluates and unit == "env_steps" else getattr(counts, unit)

    def _counts(self, progress: Progress) -> PhaseCounts:
        name = self.phase.name if self.phase else ""
        found = [progress.phases.get(key, PhaseCounts()) for key in self.at.directives or [name]]
        totals = {name: sum(getattr(counts, name) for counts in found) for name in COUNTED}
        return found[0] if len(found) == 1 else PhaseCounts(**totals, recent=list(chain(*(c.recent for c in found))))

    def _env_steps(self, progress: Progress) -> int:
        return int(self._count("env_steps", progress))
