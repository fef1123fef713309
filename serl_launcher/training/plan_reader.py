"""Reads a plan from its yaml, and checks all of it before anything moves."""

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from omegaconf import DictConfig, OmegaConf
from serl_client.errors import ConfigError
from serl_client.images import pixels
from serl_client.words import check_choice

from serl_launcher.replay.verdicts import rewards_of
from serl_launcher.replay.views import KEEP, SPLITS, START_STEPS, View
from serl_launcher.training import plan as p

MODES = ("idle", "collect", "teleop", "evaluate", "stop")
METRICS = ("success", "unassisted_success")
ARCHIVES = ("none", "lerobot")
EVERY = {"every_env_steps": "env_steps", "every_updates": "updates"}  # how often a phase evaluates: its unit
ACTIONS = ("checkpoint", "publish", "fit_normalizer")
EVAL_CAPACITY = 20_000  # steps, unless the plan says another
FILES = {  # words of a source: what they should be
    "dataset": "the folder of a LeRobot dataset, or a robomimic file", "calibration": "lerobot's calibration file",
}  # fmt: skip
CHANGES = ("rename", "crop", "size", "fps", "deltas")  # of a dataset, in its source
LEAST_CAPACITY = 100  # steps
LEAVING = "a metric of the last phase, as in 'success[20] >= 0.9', or what a source holds, as in 'online.steps >= 9000'"
EXAMPLE = "'env_steps >= 20000', 'demo.episodes >= 20', 'success[20] >= 0.9 and episodes >= 50' or 'operator'"


def plan_of(config: DictConfig, methods: Collection[str] | None = None) -> p.Plan:
    """Return the plan of a run's config, with all its phases. `methods`: as in `load_plan`.

    Raises ConfigError as `load_plan` does, if the config's `phase` is not in the plan, and as `rewards_of` does.
    """
    mapping: Any = OmegaConf.to_container(config.plan, resolve=True)
    plan = load_plan(mapping, methods=methods, has_operator=config.task.has_operator)
    plan.only(config.phase)
    return replace(plan, verdict=rewards_of(config))


def load_plan(mapping: Mapping[str, Any], *, methods: Collection[str] | None, has_operator: bool) -> p.Plan:
    """Return the plan that a mapping of plain containers describes.

    mapping: the yaml's content, with its interpolations resolved.
    methods: names of the algorithm's updates; None: they are not checked.
    has_operator: False: teleop phases are left out, and so is the data that only they would have filled.

    Raises ConfigError, which names the place and the nearest right word.
    """
    root = _Node("plan", mapping)
    root.keys(required=("phases",), optional=("sources", "repeat"))
    reader = _Reader(*_sources(root.at("sources", {})), methods, has_operator)
    phases = {name: reader.phase(name, node) for name, node in root.at("phases").entries()}
    plan = p.Plan(reader.sources | {p.EVAL: _evaluations(root.at("sources", {}))}, reader.views, phases)
    plan = plan if has_operator else p.without_operator(plan)
    if not plan.phases:
        raise root.at("phases").error("nothing to do" + " without an operator" * bool(plan.notes))
    return reader.repeated(plan, phases, root.at("repeat")) if "repeat" in mapping else plan


@dataclass(frozen=True, slots=True)
class _Node:
    """A value of the yaml and its place there, which each error names."""

    where: str
    value: Any

    def error(self, what: str) -> ConfigError:
        return ConfigError(f"{self.where}: {what}")

    def at(self, key: str, default: Any = None) -> "_Node":
        return _Node(f"{self.where}.{key}", self.value.get(key, default))

    def entries(self) -> list[tuple[str, "_Node"]]:
        if not isinstance(self.value, Mapping):
            raise self.error(f"should be a mapping, not {self.value!r}")
        return [(str(key), self.at(key)) for key in self.value]

    def keys(self, *, required: Collection[str] = (), optional: Collection[str] = ()) -> None:
        for key, _ in self.entries():
            check_choice(key, [*required, *optional], "key", self.where)
        for key in required:
            if key not in self.value:
                raise self.error(f"{key!r} is missing")

    def items(self) -> list["_Node"]:
        """Return the members of a list. A single text counts as a list of one."""
        values = [self.value] if isinstance(self.value, str) else self.value
        if not isinstance(values, list | tuple):
            raise self.error(f"should be a list, not {values!r}")
        return [_Node(f"{self.where}[{index}]", value) for index, value in enumerate(values)]

    def named(self) -> tuple[str, "_Node"]:
        """Return (name, value) of a list member that is either `name` or `name: value`; the value of `name` is None."""
        if isinstance(self.value, Mapping) and len(self.value) == 1:
            return self.entries()[0]
        if not isinstance(self.value, str):
            raise self.error(f"should be 'name' or 'name: ...', not {self.value!r}")
        return self.value, _Node(f"{self.where}.{self.value}", None)

    def word(self, words: Collection[str], kind: str) -> str:
        return check_choice(self.value, words, kind, self.where)

    def flag(self) -> bool:
        if not isinstance(self.value, bool):
            raise self.error(f"should be true or false, not {self.value!r}")
        return self.value

    def whole(self, least: int) -> int:
        if not isinstance(self.value, int) or isinstance(self.value, bool) or self.value < least:
            raise self.error(f"should be a whole number >= {least}, not {self.value!r}")
        return self.value

    def number(self) -> float:
        if not isinstance(self.value, int | float) or isinstance(self.value, bool) or not 0 < self.value < float("inf"):
            raise self.error(f"should be a positive number, not {self.value!r}")
        return float(self.value)


def _sources(node: _Node) -> tuple[dict[str, p.PlanSource], dict[str, View]]:
    sources, views = {}, {}
    for name, entry in node.entries():
        if name == p.EVAL:
            continue
        if not re.fullmatch(r"\w+", name):
            raise entry.error("a name has letters, digits and _ only")
        entry.entries()
        if "of" not in entry.value:
            entry.keys(required=("capacity",), optional=("archive", *FILES, "on_silence", "units", *CHANGES, "convert"))
            archive = entry.at("archive", "none").word(ARCHIVES, "archive")
            files = {word: entry.at(word) for word in FILES}
            for word, file in files.items():
                if file.value is not None and not isinstance(file.value, str):
                    raise file.error(f"should be {FILES[word]}, not {file.value!r}")
            silence = _on_silence(entry.at("on_silence"))
            units = entry.at("units")
            said = None if units.value is None else units.word(p.ANGLES, "unit")
            capacity = entry.at("capacity").whole(LEAST_CAPACITY)
            sources[name] = p.PlanSource(
                capacity, archive, files["dataset"].value, silence, said, files["calibration"].value, _change(entry),
                entry.at("convert", False).flag(),
            )  # fmt: skip
    for name, entry in node.entries():
        if name not in sources and name != p.EVAL:
            entry.keys(required=("of",), optional=("keep", "min_length", "split", "start_steps"))
            of = tuple(part.word(sources, "physical source") for part in entry.at("of").items())
            keep = tuple(part.word(KEEP, "filter") for part in entry.at("keep", "all").items())
            split = entry.at("split").word(SPLITS, "split") if "split" in entry.value else None
            start_steps = entry.at("start_steps", "all").word(START_STEPS, "choice of start steps")
            views[name] = View(of, keep, entry.at("min_length", 1).whole(1), split, start_steps)
    return sources, views


def _change(source: _Node) -> p.Change:
    """Read what a source says of its dataset's rows."""
    rename, fps = source.at("rename"), source.at("fps")
    told = {name: _name(node) for name, node in (rename.entries() if rename.value else ())}
    crop, size = _cuts(source.at("crop"), 4), _cuts(source.at("size"), 2)
    deltas = source.at("deltas", [])
    summed = tuple(_name(node) for node in (deltas.items() if deltas.value else ()))
    return p.Change(told, crop, size, None if fps.value is None else fps.number(), summed)


def _name(node: _Node) -> str:
    """Read a name in the run."""
    if not isinstance(node.value, str):
        raise node.error(f"should be the name in the run, not {node.value!r}")
    return node.value


def _cuts(node: _Node, count: int) -> dict[str, tuple[int, ...]]:
    """Read the crop or the size of each camera, or of all, under ""."""
    said = node.entries() if isinstance(node.value, Mapping) else [("", node)] if node.value is not None else []
    return {camera: pixels(each.where, each.value, count) for camera, each in said}


def _evaluations(node: _Node) -> p.PlanSource:
    """Read the built-in source, whose capacity a plan may give."""
    found = node.at(p.EVAL, {"capacity": EVAL_CAPACITY})
    found.keys(required=("capacity",))
    return p.PlanSource(found.at("capacity").whole(LEAST_CAPACITY))


def _on_silence(node: _Node) -> float | None:
    if node.value in (None, "keep"):
        return None if node.value is None else math.inf
    if not isinstance(node.value, Mapping):
        raise node.error(f"should be 'keep' or {{truncate: <seconds>}}, not {node.value!r}")
    node.keys(required=("truncate",))
    return node.at("truncate").number()


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reads phases; `sources` are the physical ones without `eval`."""

    sources: dict[str, p.PlanSource]
    views: dict[str, View]
    methods: Collection[str] | None
    has_operator: bool

    def phase(self, name: str, node: _Node) -> p.Phase:
        if {".", p.TIME} & {*name}:
            raise node.error(f"the name of a phase has no '.' and no {p.TIME!r}: repetitions and evaluations have them")
        learning = ("data", "start_when", "pace", "publish", "on_begin", "evaluate")
        node.keys(required=("actors", "until"), optional=("updates", "on_end", *learning))
        updates = self.updates(node)
        if not updates and any(key in node.value for key in learning):
            raise node.error(f"only a phase with updates has {', '.join(learning)}")
        if "publish" in node.value:
            node.at("publish").keys(required=("every_updates",))
        phase = p.Phase(
            name,
            self.actors(node.at("actors")),
            tuple(str(text.value) for text in node.at("until").items()),
            updates,
            self.pace(node.at("pace", "free")),
            node.value.get("start_when"),
            node.at("publish").at("every_updates").whole(1) if "publish" in node.value else None,
            *(tuple(self.action(item) for item in node.at(key, []).items()) for key in ("on_begin", "on_end")),
            evaluate=self.evaluation(name, node.at("evaluate")) if "evaluate" in node.value else None,
        )
        self.check(node, phase)
        return phase

    def evaluation(self, name: str, node: _Node) -> p.Evaluation:
        """Read the evaluation within a phase."""
        node.keys(required=("until",), optional=("by", *EVERY))
        said = [key for key in EVERY if key in node.value]
        if len(said) != 1:
            raise node.error(f"should say how often: either {' or '.join(EVERY)}, as in {{{next(iter(EVERY))}: 1000}}")
        by = {"by": node.value["by"]} if "by" in node.value else {}
        words = {"actors": {"mode": "evaluate", **by}, "until": node.value["until"]}
        phase = self.phase("evaluate", _Node(node.where, words))
        return p.Evaluation(node.at(said[0]).whole(1), EVERY[said[0]], phase.named(f"{name}{p.WITHIN}"))

    def repeated(self, plan: p.Plan, read: Collection[str], node: _Node) -> p.Plan:
        """Return the plan with the phases in it as often as they are repeated. read: the names in the yaml."""
        node.keys(required=("phases", "times"), optional=("until",))
        said, names = tuple(item.word(read, "phase") for item in node.at("phases").items()), [*read]
        if not said or said != tuple(names[names.index(said[0]) :][: len(said)]):
            raise node.at("phases").error(f"should be phases that follow one another in the plan: {', '.join(names)}")
        phases = tuple(name for name in said if name in plan.phases)  # without an operator some are left out
        if not phases:
            return plan
        until = node.at("until", [])
        repeat = p.Repeat(phases, node.at("times").whole(1), tuple(str(text.value) for text in until.items()))
        for item in until.items():
            for term in self.terms(item):
                if term.window is None and term.count is None:
                    raise item.error(f"{term.name} is of one phase, and not of all repetitions: write {LEAVING}")
                able = phases[-1:] if term.window else phases
                if not any(self.can_be_met(term, plan.phases[name]) for name in able):
                    raise item.error(f"nothing in {', '.join(able)} meets {item.value!r}")
        found = dict[str, p.Phase]()
        for name, phase in plan.phases.items():
            if name == phases[0]:
                turns = (f"{each}{p.TIME}{time}" for time in range(1, repeat.times + 1) for each in phases)
                found |= {turn: plan.phases[p.unrepeated(turn)].named(turn) for turn in turns}
            elif name not in phases:
                found[name] = phase
        return replace(plan, phases=found, repeat=repeat)

    def actors(self, node: _Node) -> p.Actors:
        node.keys(required=("mode",), optional=("into", "explore", "intervene", "policy", "by"))
        mode = node.at("mode").word(MODES, "mode")
        into = node.at("into", p.EVAL if mode == "evaluate" else None)
        if (mode == "evaluate") != (into.value == p.EVAL):
            raise into.error(f"evaluation, and only evaluation, goes into the built-in source {p.EVAL!r}")
        if mode in ("collect", "teleop"):
            into.word(self.sources, "physical source")
        elif mode != "evaluate" and into.value is not None:
            raise into.error(f"actors in mode {mode!r} make no data")
        intervene = node.at("intervene", False)
        if intervene.flag() and mode != "collect":
            raise intervene.error(f"the operator takes over in mode 'collect', not in {mode!r}")
        policy = node.at("policy", p.TRAINED)
        is_trained = policy.word(p.POLICIES, "policy") == p.TRAINED
        if not is_trained and (mode != "collect" or "explore" in node.value):
            raise policy.error(f"random actions are for mode 'collect', not {mode!r}, and without 'explore'")
        explore = node.at("explore", mode == "collect").flag() and is_trained
        by = node.at("by", "")
        if "by" in node.value and (mode != "evaluate" or not isinstance(by.value, str) or not by.value.isprintable()):
            raise by.error("is of mode 'evaluate', and names the actor that evaluates alone: its name=")
        return p.Actors(mode, into.value, explore, intervene.value, policy.value, by.value)

    def updates(self, node: _Node) -> tuple[p.Update, ...]:
        updates = []
        for item in node.at("updates", []).items():
            name, options = item.named()
            if self.methods is not None:
                check_choice(name, self.methods, "update of the algorithm", item.where)
            options = _Node(options.where, options.value or {})
            options.keys(optional=("every", "from_updates", "data", "batch", "order"))
            data = self.shares(options.at("data") if "data" in options.value else node.at("data", {}))
            every, from_updates = options.at("every", 1).whole(1), options.at("from_updates", 0).whole(0)
            batch = options.at("batch").whole(1) if "batch" in options.value else None
            order = options.at("order", p.RANDOM).word(p.ORDERS, "order")
            updates.append(p.Update(name, data, every, from_updates, batch, order))
        if updates and all(update.from_updates for update in updates):
            raise node.at("updates").error("one update must begin at once (from_updates: 0), or none is ever made")
        twice = [(a, b) for a in updates for b in updates if a.name == b.name]
        if any((a.data, a.batch, a.order) != (b.data, b.batch, b.order) for a, b in twice):
            text = "an update that is listed twice trains on the same data, in equal batches and in the same order"
            raise node.at("updates").error(text)
        return tuple(updates)

    def shares(self, node: _Node) -> dict[str, float]:
        shares = {}
        for name, share in node.entries():
            if name == p.EVAL:
                raise node.error(f"nothing trains on the built-in source {p.EVAL!r}")
            check_choice(name, [*self.sources, *self.views], "source", node.where)
            is_out = share.value == 0 and share.value is not False  # of a plan that begins with another one's shares
            if not is_out:
                shares[name] = share.number()
        if not shares:
            raise node.error("an update needs data, as in {online: 0.5, demo: 0.5}")
        return {name: share / sum(shares.values()) for name, share in shares.items()}

    def pace(self, node: _Node) -> p.Pace | None:
        if isinstance(node.value, str):
            return {"free": None, "lockstep": p.Pace(1.0, 0)}[node.word(("free", "lockstep"), "pace")]
        node.keys(required=("updates_per_step", "tolerance"))
        return p.Pace(node.at("updates_per_step").number(), node.at("tolerance").whole(0))

    def action(self, node: _Node) -> tuple[str, str | None]:
        name, source = node.named()
        check_choice(name, ACTIONS, "action", node.where)
        if name == "fit_normalizer":
            source.word([*self.sources, *self.views], "source")
        elif source.value is not None:
            raise source.error("takes no value")
        return name, source.value

    def check(self, node: _Node, phase: p.Phase) -> None:
        """Raise ConfigError if the learner would wait for data that no actor makes, or if nothing can end the phase."""
        if phase.pace and not phase.actors.act:
            raise node.at("pace").error(f"actors in mode {phase.actors.mode!r} make no env steps to keep pace with")
        if phase.updates and phase.actors.mode == "evaluate":
            raise node.at("updates").error(
                "an evaluation counts the episodes of one version of the weights, so nothing trains in it: train in a "
                "phase of its own, and evaluate in the next one, or say evaluate: in the one that trains"
            )
        if phase.evaluate and phase.evaluate.unit == "env_steps" and not phase.actors.act:
            why = f"actors in mode {phase.actors.mode!r} make no env steps: say every_updates"
            raise node.at("evaluate").error(why)
        if phase.start_when is not None:
            terms = self.terms(node.at("start_when"))
            if not phase.actors.act or any(term.name in (p.OPERATOR, p.SEEN, "updates") for term in terms):
                raise node.at("start_when").error("nothing can meet it before the first update of this phase")
        until = node.at("until")
        conditions = [self.terms(item) for item in until.items()]
        if not any(all(self.can_be_met(term, phase) for term in terms) for terms in conditions):
            alone = "" if self.has_operator else " without an operator"
            raise until.error(f"this phase can never end{alone}: nothing in it meets [{', '.join(phase.until)}]")

    def terms(self, node: _Node) -> tuple[p.Term, ...]:
        terms = p.parse(str(node.value))
        if not terms:
            raise node.error(f"cannot read {node.value!r}: write {EXAMPLE}")
        for term in terms:
            if term.window is not None:
                check_choice(term.name, METRICS, "metric", node.where)
                if not 1 <= term.window <= p.LONGEST_WINDOW:
                    raise node.error(f"a window has 1 to {p.LONGEST_WINDOW} episodes, not {term.window}")
            elif term.count is not None:
                check_choice(term.name, [*self.sources, *self.views], "source", node.where)
                check_choice(term.count, ("steps", "episodes"), "count of a source", node.where)
            elif term.name in METRICS:
                raise node.error(f"a metric has a window, as in '{term.name}[20] >= 0.9'")
            else:
                check_choice(term.name, (*p.UNITS, p.OPERATOR, p.SEEN), "unit", node.where)
        return terms

    def can_be_met(self, term: p.Term, phase: p.Phase) -> bool:
        actors = phase.actors
        if term.window is not None:
            return actors.act and term.met_by(1.0) and (term.name == "success" or actors.mode != "teleop")
        if term.count is not None:
            parts = self.views[term.name].of if term.name in self.views else (term.name,)
            return actors.into in parts and term.met_by(sum(self.sources[part].capacity for part in parts))
        special = {
            p.OPERATOR: True,
            p.SEEN: any(update.order == p.ONCE for update in phase.updates),
            "wall_s": True,
            "updates": bool(phase.updates),
            "interventions": actors.mode == "teleop" or (actors.intervene and self.has_operator),
        }
        return special.get(term.name, actors.act)
