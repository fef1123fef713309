"""Describes a plan: sources (replay capacity), views, and phases with updates, batch shares, pace (UTD), ends.

A phase that is repeated stands in the plan once for each time, as `practise#1`, `practise#2`, ... The evaluation within
a phase is a phase, too: `practise.evaluate`. The plan turns to it again and again, and then goes on with the phase.
"""

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import takewhile

from serl_client.errors import ConfigError
from serl_client.spec import IMAGES
from serl_client.words import check_choice

from serl_launcher.replay.verdicts import VerdictRewards
from serl_launcher.replay.views import View

UNITS = ("env_steps", "episodes", "successes", "interventions", "updates", "wall_s")
ANGLES = {"degrees": "deg", "percent": "percent", "radians": "rad"}  # what a plan says of a dataset: a Spec's unit
OPERATOR = "operator"  # the condition that a person meets with the command `next`
SEEN = "seen"  # the condition that each update with `order: once` has seen all steps that are there
TRAINED, *_ = POLICIES = ("trained", "random", "brownian")  # who gives the actions
RANDOM, ONCE = ORDERS = ("random", "once")
EVAL = "eval"  # the built-in source of evaluation episodes, which nothing trains on
LONGEST_WINDOW = 200  # episodes that a metric may look back on
TIME, WITHIN = "#", ".evaluate"  # in names: before the number of a repetition; of the evaluation within a phase

TERM = re.compile(r"(\w+)(?:\.(\w+)|\[(\d+)\])?\s*(>=|>)\s*(\d[\d_]*(?:\.\d+)?)")


ALL = "all"  # in place of names


@dataclass(frozen=True, slots=True)
class Change:
    """What becomes of a LeRobot dataset's rows before the run takes them. The order: names, images, rows.

    rename: {a column of the dataset, or an entry of a vector: its name in the run}.
    crop, size: {camera of the run: top, left, height and width of what is used; height and width after it}, in pixels;
        under "" for each other camera.
    fps: steps per second to which the rows are resampled by their time stamps; None: the dataset's own.
    deltas: entries of the action, by their names in the run, that are changes per step: resampled, those of a step's
        time are added up, where other entries are held. ALL: each entry.
    """

    rename: Mapping[str, str] = field(default_factory=dict)
    crop: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    size: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    fps: float | None = None
    deltas: tuple[str, ...] = ()

    def of(self, camera: str) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None]:
        """Return (crop, size) of a camera, such as `observation.images.front`; None: not said."""
        names = camera, camera.removeprefix(IMAGES), ""
        crop, size = (next((cuts[n] for n in names if n in cuts), None) for cuts in (self.crop, self.size))
        return crop, size


@dataclass(frozen=True, slots=True)
class PlanSource:
    """A physical source, into which actors write.

    capacity: steps that it holds; older episodes leave the store.
    archive: where an episode must be before it may leave: `lerobot` (in exported shards) or `none` (nowhere).
    dataset: a LeRobot dataset's folder, or robomimic's file, that fills this source before the first phase; None: none.
    units: what a dataset that does not say it is measured in: `degrees`, `percent` or `radians`; None: it is not asked.
    calibration: lerobot's file of the arm that was recorded, by which a dataset in percent becomes degrees; None: it
        stays as it is.
    change: what becomes of the dataset's rows before the run takes them.
    convert: whether a dataset of LeRobot's format v2.1 is converted to v3.0 first, into a folder beside it.
    on_silence: seconds without a message after which an actor's open episode is truncated. inf: keep it until the actor
        is back. None: keep it for an actor with a real clock, truncate it for a simulated one.
    """

    capacity: int
    archive: str = "none"
    dataset: str | None = None
    on_silence: float | None = None
    units: str | None = None
    calibration: str | None = None
    change: Change = Change()
    convert: bool = False


@dataclass(frozen=True, slots=True)
class Actors:
    """What the actors do in a phase, as its directive tells them.

    intervene: the operator may take over. policy: `trained`; `random`: each action is drawn uniformly between the
    bounds of the Spec; or `brownian`: it drifts between them. These two do without the learner; not on a real clock.
    by: the name of the actor that alone evaluates, and does nothing else in this plan; empty: all that are there do.
    """

    mode: str
    into: str | None = None
    explore: bool = False
    intervene: bool = False
    policy: str = TRAINED
    by: str = ""

    @property
    def told(self) -> str:
        """The mode in words, and who alone is meant."""
        return self.mode + f", by {self.by} alone" * bool(self.by)

    @property
    def act(self) -> bool:
        return self.mode in ("collect", "teleop", "evaluate")


@dataclass(frozen=True, slots=True)
class Update:
    """A method of the algorithm. Due in every `every`-th round, once the phase has made `from_updates` updates."""

    name: str
    data: Mapping[str, float]  # source or view: share; the shares sum to 1
    every: int = 1
    from_updates: int = 0
    batch: int | None = None  # rows of its batches; None: the run's batch_size
    order: str = RANDOM  # of the steps that it sees; once: each usable step of the phase's data once, one after another


@dataclass(frozen=True, slots=True)
class Pace:
    """The ratio of updates to env steps, and by how many updates either side may run ahead of the other."""

    updates_per_step: float
    tolerance: int


@dataclass(frozen=True, slots=True)
class Term:
    """One comparison `name >= bound`: of a unit, of a source's `count`, or of a metric over `window` episodes."""

    name: str
    count: str | None = None
    window: int | None = None
    strict: bool = False
    bound: float = 0.0

    def met_by(self, value: float) -> bool:
        return value > self.bound if self.strict else value >= self.bound


@dataclass(frozen=True, slots=True)
class Evaluation:
    """An evaluation within a phase, whenever the phase has made `every` more of a unit: env_steps or updates."""

    every: int
    unit: str
    phase: "Phase"  # as which it runs, while the phase around it stands still


@dataclass(frozen=True, slots=True)
class Repeat:
    """Phases that follow one another `times` times. until: conditions, any of which ends that earlier. They are looked
    at when the last of the phases ends, of whose episodes their metrics are."""

    phases: tuple[str, ...]
    times: int
    until: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Phase:
    """What actors and learner do at the same time, and until when. `parse` reads the texts of the conditions."""

    name: str
    actors: Actors
    until: tuple[str, ...]  # any of them
    updates: tuple[Update, ...] = ()
    pace: Pace | None = None  # None: free
    start_when: str | None = None
    publish_every: int | None = None  # updates
    on_begin: tuple[tuple[str, str | None], ...] = ()  # (action, source), before the first update
    on_end: tuple[tuple[str, str | None], ...] = ()
    evaluate: Evaluation | None = None

    def named(self, name: str) -> "Phase":
        """Return this phase under another name, with the evaluation within it."""
        within = self.evaluate and replace(self.evaluate, phase=self.evaluate.phase.named(f"{name}{WITHIN}"))
        return replace(self, name=name, evaluate=within)

    @property
    def episodes(self) -> int | None:
        """The number of episodes of an evaluation; None in other phases, and if `until` has no such bound."""
        return self._bound("episodes") if self.actors.mode == "evaluate" else None

    @property
    def env_steps(self) -> int | None:
        """The number of env steps of a phase that collects without updates; None as in `episodes`."""
        return self._bound("env_steps") if self.actors.mode == "collect" and not self.updates else None

    @property
    def ends_alone(self) -> bool:
        """Whether time or updates end this phase, whatever its actors do."""
        return any({term.name for term in parse(text)} <= {"wall_s", "updates"} for text in self.until)

    def _bound(self, unit: str) -> int | None:
        """Return the least whole number of this unit that ends the phase alone."""
        terms = [parse(text) for text in self.until]
        bounds = [term[0] for term in terms if len(term) == 1 and term[0].name == unit]
        return min((math.floor(t.bound) + 1 if t.strict else math.ceil(t.bound) for t in bounds), default=None)

    def update(self, name: str) -> Update:
        """Return the update of that name; all entries of one name have the same data and batch."""
        return next(entry for entry in self.updates if entry.name == name)


@dataclass(frozen=True, slots=True)
class Plan:
    """A checked plan: phases in order, physical sources (`eval` among them), views, and notes for the operator.

        config = composed(Path("config"), ["plan=hiors", "task=sim_arm"])  # the words of a command line
        plan = plan_of(config)  # raises ConfigError for what cannot be followed
        for phase in plan.phases.values():
            print(phase.name, phase.actors, phase.until)

    verdict: the rewards of the operator's verdicts, which the task gives.
    """

    sources: Mapping[str, PlanSource]
    views: Mapping[str, View]
    phases: Mapping[str, Phase]
    notes: tuple[str, ...] = ()
    verdict: VerdictRewards = field(default_factory=VerdictRewards)
    repeat: Repeat | None = None

    @property
    def evaluators(self) -> set[str]:
        """The names of the actors that do nothing but evaluate."""
        within = [phase.evaluate.phase for phase in self.phases.values() if phase.evaluate]
        return {phase.actors.by for phase in (*self.phases.values(), *within)} - {""}

    @property
    def outline(self) -> list[str]:
        """The names of the phases without the later repetitions: a plan of another outline is another plan."""
        return [name for name in self.phases if name.partition(TIME)[2] in ("", "1")]

    @property
    def closing(self) -> set[str]:
        """The names of the phases behind the last one that trains."""
        return {phase.name for phase in takewhile(lambda phase: not phase.updates, reversed([*self.phases.values()]))}

    def repeats(self, name: str) -> bool:
        """Return whether this is one of the phases that are repeated."""
        return TIME in name

    def may_leave(self, name: str) -> tuple[str, ...]:
        """Return the conditions, any of which ends the repetitions when this phase ends."""
        closes = self.repeat is not None and name.startswith(f"{self.repeat.phases[-1]}{TIME}")
        return self.repeat.until if self.repeat and closes else ()

    def after(self, name: str, *, leaves: bool) -> str | None:
        """Return the phase that follows one; None: it is the last. leaves: no repetition follows."""
        names = [*self.phases]
        names = [each for each in names[names.index(name) + 1 :] if not (leaves and self.repeats(each))]
        return names[0] if names else None

    def new_repetition(self, times: int, ended: Collection[str]) -> str | None:
        """Return the phase with which the first repetition begins that this plan lacked while it had so many `times`.

        ended: the phases that have ended. None: there is no new one, or `until` has ended the repetitions before.
        """
        if self.repeat is None or self.repeat.times <= times or f"{self.repeat.phases[-1]}{TIME}{times}" not in ended:
            return None
        return f"{self.repeat.phases[0]}{TIME}{times + 1}"

    @property
    def capacities(self) -> dict[str, int]:
        """{physical source: steps} of the sources that a phase fills or reads, or a dataset fills. No other is made."""
        names: set[str | None] = {name for name, source in self.sources.items() if source.dataset is not None}
        for phase in self.phases.values():
            seen = {name for update in phase.updates for name in update.data}
            seen |= {name for _, name in (*phase.on_begin, *phase.on_end) if name}
            seen |= {t.name for text in (*phase.until, phase.start_when or "") for t in parse(text) if t.count}
            names.update({phase.actors.into}, *((self.views[n].of if n in self.views else (n,)) for n in seen))
        return {name: source.capacity for name, source in self.sources.items() if name in names}

    def batches(self, batch_size: int) -> dict[str, int]:
        """Return {update: rows of its largest batch}. batch_size: rows where the plan says none."""
        rows: dict[str, int] = {}
        for update in (update for phase in self.phases.values() for update in phase.updates):
            rows[update.name] = max(rows.get(update.name, 0), update.batch or batch_size)
        return rows

    @property
    def on_silence(self) -> dict[str, float]:
        """{physical source: seconds} of the sources with such an option."""
        return {name: s.on_silence for name, s in self.sources.items() if s.on_silence is not None}

    @property
    def archived(self) -> frozenset[str]:
        """The sources whose episodes stay in the store until they are exported."""
        return frozenset(name for name, source in self.sources.items() if source.archive == "lerobot")

    def only(self, name: str | None) -> "Plan":
        """Return this plan with that one phase, once; None: with all. Raises ConfigError if it has no such phase."""
        if name is None:
            return self
        phases = {unrepeated(each): self.phases[each] for each in self.outline}
        check_choice(name, phases, "phase", "phase")
        return replace(self, phases={name: phases[name].named(name)}, repeat=None)


def unrepeated(name: str) -> str:
    """Return the name of a phase without the number of its repetition."""
    return name.partition(TIME)[0]


@cache
def parse(text: str) -> tuple[Term, ...]:
    """Return the terms of a condition, all of which must hold; an empty tuple if the text is no condition."""
    if (word := text.strip()) in (OPERATOR, SEEN):
        return (Term(word),)
    matches = [TERM.fullmatch(part.strip()) for part in text.split(" and ")]
    groups = [match.groups() for match in matches if match] if None not in matches else []
    return tuple(Term(name, count, int(n) if n else None, sign == ">", float(x)) for name, count, n, sign, x in groups)


def without_operator(plan: Plan) -> Plan:
    """Return the plan without its teleop phases, and without the shares of sources that only they fill."""
    left_out = [name for name, phase in plan.phases.items() if phase.actors.mode == "teleop"]
    phases = {name: phase for name, phase in plan.phases.items() if name not in left_out}
    filled = {phase.actors.into for phase in phases.values()}
    filled |= {name for name, source in plan.sources.items() if source.dataset is not None}
    missing = {plan.phases[name].actors.into for name in left_out} - filled
    empty = missing | {name for name, view in plan.views.items() if missing.issuperset(view.of)}
    notes = [f"left out, as there is no operator: {', '.join(left_out)}"] if left_out else []
    for name, phase in phases.items():
        dropped = sorted({source for update in phase.updates for source in update.data if source in empty})
        if dropped:
            notes.append(f"{name} trains without {', '.join(dropped)}, which only an operator fills")
        updates = tuple(replace(update, data=_rest(name, update.data, empty)) for update in phase.updates)
        phases[name] = replace(phase, updates=updates)
    return replace(plan, phases=phases, notes=tuple(notes))


def _rest(phase: str, data: Mapping[str, float], empty: Collection[str | None]) -> dict[str, float]:
    left = {source: share for source, share in data.items() if source not in empty}
    if not left:
        raise ConfigError(
            f"plan.phases.{phase}.data: only an operator fills {', '.join(data)}: say task.has_operator=true, or "
            "other data"
        )
    return {source: share / sum(left.values()) for source, share in left.items()}
