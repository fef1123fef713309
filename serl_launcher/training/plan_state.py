"""Tracks the phase, what ends it, the next update, when weights are published, the rate limiter (UTD)."""

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

log = logging.getLogger(__name__)

COMMANDS = ("next", "hold", "resume", "goto", "stop")
UNPACED = (  # why steps may come that are due more updates than are made
    "the learner is too slow for a real robot. Lower updates_per_step, or use a faster GPU",
    "there was no data for them",
)
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


class RateLimiter:
    """A token bucket between env steps and updates: a step adds `updates_per_step` tokens, an update takes one.

    Either side may run `tolerance` updates ahead, and always by one step or one update, so that the two never wait for
    each other. If the learner falls behind by more, the excess steps add no tokens: this caps the catching up after a
    slow stretch. `uncounted_steps`, the number of such steps, is the only state. `dropped` are the updates that they
    would have added.
    """

    def __init__(self, pace: Pace | None, uncounted_steps: float) -> None:
        self.pace, self.uncounted_steps, self.dropped = pace, uncounted_steps, 0.0
        self.unpaced, self._owed, self._report_at = UNPACED[0], 0.0, 1.0

    def resume(self, before: Pace | None, env_steps: int, updates: int) -> None:
        """Go on where a run was stopped: all updates that its steps were due, by the pace `before`, are made up for.
        Later steps add tokens by the pace of now."""
        if self.pace is None:
            return
        if before != self.pace:
            tokens = before.updates_per_step * (env_steps - self.uncounted_steps) if before else updates
            self.uncounted_steps = env_steps - tokens / self.pace.updates_per_step
        self._owed = max(0.0, self.pace.updates_per_step * (env_steps - self.uncounted_steps) - updates)

    def may_update(self, env_steps: int, updates: int) -> bool:
        """Return whether there is a token for one more update."""
        return self.pace is None or self._credit(self.pace, env_steps, updates) >= 1 - self.pace.tolerance

    def step_limit(self, env_steps: int, updates: int) -> int | None:
        """Return the env step up to which a simulated actor may go before the next update; None: no limit."""
        if self.pace is None:
            return None
        room = self.pace.tolerance + 1 - self._credit(self.pace, env_steps, updates)
        return env_steps + max(0, math.ceil(room / self.pace.updates_per_step - 1e-9))

    def _credit(self, pace: Pace, env_steps: int, updates: int) -> float:
        credit = pace.updates_per_step * (env_steps - self.uncounted_steps) - updates
        excess = credit - (pace.tolerance + 1 + pace.updates_per_step + self._owed)
        if excess > 1e-6 and self.unpaced:
            self.uncounted_steps += excess / pace.updates_per_step
            self.dropped += excess
            credit -= excess
            if self.dropped >= self._report_at:
                log.warning("%.0f updates dropped so far: %s", self.dropped, self.unpaced)
                self._report_at = 2 * self.dropped
        self._owed = max(0.0, min(self._owed, credit))
        return credit


@dataclass(slots=True)
class PhasePosition:
    """The position in the plan as plain numbers, which the checkpoint keeps. `phase` None: the plan has ended."""

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


class PlanState:
    """Follows a plan. Rank 0 of the trainer owns it, and tells it what was accepted and what was done."""

    def __init__(self, plan: Plan, progress: Progress | None = None) -> None:
        """`progress`: what a store that is not empty held when this plan began."""
        self.plan = plan
        self.updates = 0  # made in this run
        self.ended: dict[str, dict[str, Any]] = {}  # the state_dict of each phase that has ended, as it stood then
        self._dropped = 0.0  # updates that the learner was too slow for, in the phases that have ended
        self._command: tuple[str, str] | None = None
        self._enter(next(iter(plan.phases)), progress or Progress())

    @property
    def phase(self) -> Phase | None:
        """The current phase; None when the plan has ended."""
        return None if self.at.phase is None else self.plan.phases[self.at.phase]

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
        return None if bucket.may_update(self._env_steps(progress), self.at.updates) else "env steps: pace"

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
            raise ConfigError(f"operator: {name} takes nothing, not {argument!r}")
        if name in ("hold", "resume"):
            self.at.held = name == "hold"
        else:
            self._command = (name, argument)

    def advance(self, progress: Progress) -> list[tuple[str, str | None]]:
        """Go on to the next phase if this one has ended. Returns its on_end actions: [(action, source), ...]."""
        (command, argument), self._command = self._command or ("", ""), None
        phase = self.phase
        reason = command or (phase and not self.at.held and self._ended_by(phase, progress))
        if not reason:
            return []
        log.info("phase %s ends after %d updates: %s", self.at.phase, self.at.updates, reason)
        self._dropped = self.dropped
        if phase:
            self.ended[phase.name] = self._position() | {"wall_s": progress.wall_s}
        names = list(self.plan.phases)
        after = names[names.index(phase.name) + 1 :] if phase else []
        self._enter({"goto": argument, "stop": None}.get(command, after[0] if after else None), progress)
        return list(phase.on_end) if phase else []

    def directive(self) -> dict[str, Any]:
        """Return what the actors are to do, without the directive's number."""
        phase = self.phase
        if phase is None or self.at.held:
            mode = "stop" if phase is None else "idle"
            return {"phase": self.at.phase or "", **asdict(Actors(mode)), "episodes": None, "boundary": "now"}
        return {"phase": phase.name, **asdict(phase.actors), "episodes": phase.episodes, "boundary": "episode"}

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
        return {**self._position(), **run, "phase": plain(self.phase)}

    def _position(self) -> dict[str, Any]:
        uncounted_steps = self.bucket.uncounted_steps if self.bucket else None
        return {"at": asdict(self.at), "uncounted_steps": uncounted_steps, "phase": plain(self.phase)}

    def load_state_dict(
        self, state: Mapping[str, Any], *, accept: bool = False, progress: Progress | None = None
    ) -> list[str]:  # fmt: skip
        """Go on from a checkpoint in the phase of that name, and return what of that phase was edited since.

        A plan that had ended goes on in the first of its phases whose bound was raised and which trains, or in its last
        one, with all that come later. progress: what the store holds. Raises ConfigError if the plan has no such phase
        any more, and as `check_edits` does.
        """
        self.updates, self.ended, self._dropped = state["updates"], state.get("ended", {}), state.get("dropped", 0.0)
        if state["at"]["phase"] is None:
            state = next(self._longer(progress or Progress()), state)
        at = PhasePosition(**{**state["at"], "turn": tuple(state["at"]["turn"])})
        edits = check_edits(self.plan, at.phase, state["phase"], accept=accept)
        self.at = at
        self.bucket = self._bucket(state["uncounted_steps"])
        if self.bucket and progress:
            before = state["phase"]["pace"]
            self.bucket.resume(before and Pace(**before), self._env_steps(progress), at.updates)
        return edits

    def _longer(self, progress: Progress) -> Iterator[dict[str, Any]]:
        """Yield where the plan may go on that had ended: at the ends of phases whose bound is higher now."""
        last = [*self.plan.phases][-1]
        for name, phase in self.plan.phases.items():
            kept = self.ended.get(name)
            if kept and (phase.updates or name == last) and is_raised(kept["phase"]["until"], phase.until, truly=True):
                base = kept["at"]["base"]
                since = progress.wall_s - kept["wall_s"]  # seconds of the phases that came later
                yield {**kept, "at": {**kept["at"], "held": False, "base": {**base, "wall_s": base["wall_s"] + since}}}

    def _enter(self, name: str | None, progress: Progress) -> None:
        self.at = PhasePosition(name, {})
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

    def _ended_by(self, phase: Phase, progress: Progress) -> str | None:
        return next((text for text in phase.until if self._met(text, progress)), None)

    def _met(self, condition: str, progress: Progress) -> bool:
        return all(term.met_by(self._value(term, progress)) for term in parse(condition))

    def _value(self, term: Term, progress: Progress) -> float:
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
        found = [progress.phases.get(key, PhaseCounts()) for key in self.at.directives or [self.at.phase or ""]]
        totals = {name: sum(getattr(counts, name) for counts in found) for name in COUNTED}
        return found[0] if len(found) == 1 else PhaseCounts(**totals, recent=list(chain(*(c.recent for c in found))))

    def _env_steps(self, progress: Progress) -> int:
        return int(self._count("env_steps", progress))
