"""Says how long a plan takes: before it runs, by its bounds and a known rate of updates; and while it runs."""

import math
import statistics
from collections.abc import Callable
from pathlib import Path

from serl_client import clock

from serl_launcher.training.metrics import read
from serl_launcher.training.plan import OPERATOR, SEEN, Phase, Plan, Term, parse
from serl_launcher.training.plan_state import PACED, PlanState, Progress

DAY = 24 * 60  # minutes
EARLY_S = 10.0  # seconds of a phase in which nothing is said yet: rates are not known


def rate_of(run_dir: Path) -> float | None:
    """Return the updates per second that a run made, the median of its metrics; None if it made none."""
    updates = (record for record in read(run_dir / "metrics.jsonl") if record.get("kind") == "update")
    rates = [record["rate"] for record in updates if "rate" in record]  # the first one of a start has none
    return statistics.median(rates) if rates else None


def planned(plan: Plan, fps: float, longest: int, rate: float | None) -> dict[str, str]:
    """Return {phase: minutes at most, of the robot, a person and training}; of the plan as a whole by the name "".

    fps: steps per second of a robot. longest: steps of an episode at most. rate: updates per second; None: not known.
    What ends a phase early, such as a share of successes, is not counted on, nor are ways home.
    """
    total, told = [0.0, 0.0, 0.0], dict[str, str]()
    for phase in plan.phases.values():
        updates, of_robot = _updates(phase, longest), _steps(phase, longest) / fps / 60
        is_persons = phase.actors.mode == "teleop" or phase.actors.intervene
        minutes = [of_robot, of_robot if is_persons else 0.0, updates / rate / 60 if rate and updates else 0.0]
        total = [before + now for before, now in zip(total, minutes, strict=True)]
        told[phase.name] = _told(minutes, 0.0 if rate else updates)
    return {**told, "": _told(total, 0.0)}


def _told(minutes: list[float], updates: float) -> str:
    """updates: of which nobody knows how long they take."""
    robot, person, training = minutes
    parts = [f"{name} {lasting(value)}" for name, value in
             (("robot", robot), ("person", person), ("training", training)) if value]  # fmt: skip
    parts += [f"training {updates:,.0f} updates"] if 0 < updates < math.inf else []
    longest = "training takes" if training > robot else "the robot takes"
    return ", ".join(parts) + (f"; {longest} longest" if robot and training else "")


def lasting(value: float) -> str:
    """Return so many minutes in words; inf: nothing but a person ends it."""
    if not math.isfinite(value):
        return "until a person ends it"
    if value >= 2 * DAY:
        return f"{value / DAY:,.0f} days"
    return f"{value:,.0f} min" if value >= 1 else f"{60 * value:.0f} s"


def _steps(phase: Phase, longest: int) -> float:
    """Return the env steps of a phase at most; inf if nothing bounds them, 0 if nobody acts."""
    per = {"env_steps": 1.0, "episodes": longest, "successes": longest}
    return _least(phase, lambda term: per.get(term.count or term.name)) if phase.actors.act else 0.0


def _updates(phase: Phase, longest: int) -> float:
    if not phase.updates:
        return 0.0
    paced = _steps(phase, longest) * phase.pace.updates_per_step if phase.pace and phase.actors.act else math.inf
    return min(paced, _least(phase, lambda term: 1.0 if term.name == "updates" else None))


def _least(phase: Phase, each: Callable[[Term], float | None]) -> float:
    """Return the least bound that ends a phase. each: what one of a term's counts for; None: nothing bounds it."""
    least = math.inf
    for text in phase.until:
        terms = parse(text)
        bounds = [term.bound * value for term in terms if (value := each(term)) is not None]
        if len(bounds) == len(terms):
            least = min(least, max(bounds))
    return least


class Forecast:
    """Estimates how long the phase under way still takes, at the rates since it began, or was resumed."""

    def __init__(self) -> None:
        self._phase: str | None = None
        self._since = 0.0
        self._then = dict[str, float]()  # condition's term: its value at that moment
        self._looks = self._paced = 0  # how often the learner was looked at, and waited for steps

    def look(self, state: PlanState, progress: Progress, waits_for: str) -> str:
        """Return it for a person, with what sets the pace. waits_for: what the learner waits for now."""
        phase, now = state.phase, clock.monotonic()
        if phase is None:
            return "nothing"
        if phase.name != self._phase:
            self._phase, self._since, self._then, self._looks, self._paced = phase.name, now, {}, 0, 0
        self._looks += 1
        self._paced += waits_for == PACED
        left = min((self._left(state, progress, text, now) for text in phase.until), default=math.inf)
        if now < self._since + EARLY_S or not math.isfinite(left):
            return "not known yet"
        setter = "the robots set" if 2 * self._paced > self._looks else "training sets"
        return f"about {lasting(left / 60)} at most" + (f", {setter} the pace" if phase.pace else "")

    def _left(self, state: PlanState, progress: Progress, text: str, now: float) -> float:
        """Return the seconds until a condition is met; inf for one that has no rate."""
        seconds = 0.0
        for term in parse(text):
            if term.window is not None or term.name in (OPERATOR, SEEN):
                return math.inf
            value = state.value(term, progress)
            begun = self._then.setdefault(f"{term.name}.{term.count}", value)
            rate = (value - begun) / max(now - self._since, 1e-9)
            seconds = max(seconds, (term.bound - value) / rate if rate > 0 else math.inf)
        return seconds
