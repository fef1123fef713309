"""Says how long a plan takes: before it runs, by its bounds and a known rate of updates; and while it runs."""

import math
import statistics
from collections.abc import Iterator
from pathlib import Path

from serl_client import clock

from serl_launcher.training.metrics import read
from serl_launcher.training.plan import OPERATOR, SEEN, Phase, Plan, parse
from serl_launcher.training.plan_state import PACED, PlanState, Progress

EARLY_S = 10.0  # seconds of a phase in which nothing is said yet: rates are not known


def rate_of(run_dir: Path) -> float | None:
    """Return the updates per second that a run made, the median of its metrics; None if it made none."""
    rates = [record["rate"] for record in read(run_dir / "metrics.jsonl") if record.get("kind") == "update"]
    return statistics.median(rates) if rates else None


def planned(plan: Plan, fps: float, longest: int, rate: float | None) -> Iterator[str]:
    """Yield, of each phase and of all, the minutes at most: of the robot, of a person, of training.

    fps: steps per second of a robot. longest: steps of an episode at most. rate: updates per second; None: not known.
    What ends a phase early, such as a share of successes, is not counted on.
    """
    total = [0.0, 0.0, 0.0]
    for phase in plan.phases.values():
        steps, updates = _steps(phase, longest), _updates(phase, longest)
        of_robot = steps / fps / 60
        is_persons = phase.actors.mode == "teleop" or phase.actors.intervene
        of_training = updates / rate / 60 if rate and updates else 0.0
        minutes = [of_robot, of_robot if is_persons else 0.0, of_training]
        total = [a + b for a, b in zip(total, minutes, strict=True)]
        yield f"{phase.name}: {_told(minutes, updates, rate)}"
    yield f"in all: {_told(total, math.nan, rate)}"


def _told(minutes: list[float], updates: float, rate: float | None) -> str:
    names = ("robot", "person", "training")
    parts = [f"{name} {_minutes(value)}" for name, value in zip(names, minutes, strict=True) if value]
    if updates > 0 and not rate:
        parts.append(f"training {updates:,.0f} updates (say --like RUN for its minutes)")
    longest = max(range(3), key=lambda i: minutes[i] * (i != 1))  # robot and training go on side by side
    slow = f"; {names[longest]} dominates" if minutes[0] and minutes[2] else ""
    return (", ".join(parts) or "no time") + slow


def _minutes(value: float) -> str:
    return f"{value:,.0f} min" if math.isfinite(value) else "until a person ends it"


def _steps(phase: Phase, longest: int) -> float:
    """Return the env steps of a phase at most; inf if nothing bounds them, 0 if nobody acts."""
    per = {"env_steps": 1.0, "episodes": longest, "successes": longest}
    return _least(phase, lambda name, count: per.get(count or name)) if phase.actors.act else 0.0


def _updates(phase: Phase, longest: int) -> float:
    if not phase.updates:
        return 0.0
    paced = _steps(phase, longest) * phase.pace.updates_per_step if phase.pace and phase.actors.act else math.inf
    return min(paced, _least(phase, lambda name, count: 1.0 if name == "updates" else None))


def _least(phase: Phase, unit) -> float:
    """Return the least bound that ends a phase alone, in the units that `unit` knows of: (name, count) -> how many."""
    ends = [parse(text) for text in phase.until]
    bounds = [
        [term.bound * each for term in terms if (each := unit(term.name, term.count)) is not None] for terms in ends
    ]
    return min(
        (max(each) for each, terms in zip(bounds, ends, strict=True) if len(each) == len(terms)), default=math.inf
    )


class Forecast:
    """Estimates how long the phase under way still takes, at the rates since it began, or was resumed."""

    def __init__(self) -> None:
        self._phase: str | None = None
        self._since = 0.0
        self._then = dict[str, float]()  # condition's term: its value at that moment
        self._looks = self._paced = 0  # how often the learner was looked at, and waited for steps

    def look(self, state: PlanState, progress: Progress, waits_for: str) -> str:
        """Return it for a person, with what sets the pace; empty while nothing is known."""
        phase, now = state.phase, clock.monotonic()
        if phase is None:
            return ""
        if phase.name != self._phase:
            self._phase, self._since, self._then, self._looks, self._paced = phase.name, now, {}, 0, 0
        self._looks += 1
        self._paced += waits_for == PACED
        left, condition = min(
            ((self._left(state, progress, text, now), text) for text in phase.until), default=(math.inf, "")
        )
        if now < self._since + EARLY_S or not math.isfinite(left):
            return ""
        pace = (
            f"; {'the robots set' if 2 * self._paced > self._looks else 'training sets'} the pace" if phase.pace else ""
        )
        return (
            f"about {left / 60:,.0f} min at most, until {condition}{pace}"
            if left >= 60
            else f"about {left:.0f} s{pace}"
        )

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
