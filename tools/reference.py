#!/usr/bin/env python
"""Writes three pages of docs/reference from the code and config/: algorithms, columns and hardware."""

import argparse
import ast
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

import numpy as np
import serl_client.episode
from omegaconf import OmegaConf
from serl_client.errors import ConfigError
from serl_client.spec import ROW, Feature, Spec

import serl_launcher.datasets.names
import serl_launcher.replay.columns
from robot_infra.teleop.hands import OPERATORS
from serl_launcher.algorithms.base import Algorithm
from serl_launcher.config import composed, factory, groups
from serl_launcher.store.extras import with_extras
from serl_launcher.training.memory import hollow, needed, said
from serl_launcher.training.plan_reader import plan_of

ROOT = Path(__file__).resolve().parent.parent
CONFIG, REFERENCE, EVIDENCE = ROOT / "config", ROOT / "docs/reference", ROOT / "docs/evidence"
ONES = np.ones(4, np.float32)
CAMERA = "observation.images.top"
SEEN = {"observation.state": Feature((10,)), CAMERA: Feature((64, 64, 3), "uint8")}
NUMBERS = Spec(SEEN, Feature((4,), low=-ONES, high=ONES), fps=10.0)
CHOICE = Spec(SEEN, Feature((4,), low=0 * ONES, high=ONES, one_hot=True), fps=10.0)

ALGORITHMS = """# Algorithms
`tools/reference.py` writes this page: it builds each yaml of `config/algo` for a robot with 10 numbers of state, a
camera of 64 x 64 pixels and 4 numbers of action, and for one that takes one of 4 choices. Other settings are their
defaults. [policies.md](../guides/policies.md) says which to take when.

- *Actions*: `numbers` (a Box), `choices` (Discrete), or both. *Images*: whether its default policy sees cameras.
- *Chunk*: how many actions it gives at once. *Values*: whether critics or a value are learned.
- *Plans* choose it, or are named with it. *Demonstrations*, *person*: whether at least one of them has them. Without a
  plan here: any that calls its updates.
- *Weights* in millions, copies included, a frozen backbone not. *Memory* of training on one CPU process, without the
  replay buffer.
- *Shown*: the page of evidence that names it; without one, nobody has measured how well it learns."""
COLUMNS = """# Columns
`tools/reference.py` writes this page. T is the number of steps, B that of windows in a batch, H that of steps in a
window. Observations, the action and the Spec's extras come besides, under their own names."""
HARDWARE = """# Hardware
`tools/reference.py` writes this page. **No driver has moved a real arm**: each was tested on simulated servos and
controllers ([faults.md](../evidence/faults.md)). [robots.md](../guides/robots.md) adds an arm."""
WHO = {True: "yes", False: "", None: "as its `robot`"}
STEP = "a step, as an actor sends it and the store keeps it"
SHARD = "a row of a LeRobot dataset that a run writes"
WINDOW = "a window, if `Algorithm.windows` asks for it"


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    for name, page in PAGES.items():
        (REFERENCE / f"{name}.md").write_text("\n".join(page()) + "\n")


def table(titles: str, rows: Iterable[Iterable[object]]) -> Iterator[str]:
    """Yield the lines of a table. titles: joined by `, `."""
    names = titles.split(", ")
    for row in (names, ["---"] * len(names), *rows):
        yield "| " + " | ".join(" ".join(str(cell).replace("|", "\\|").split()) for cell in row) + " |"


def about(file: Path) -> str:
    """Return the first sentence of the comment with which a yaml begins."""
    lines = [line for line in file.read_text().splitlines() if not line.startswith("# @package")]
    text = " ".join(line.removeprefix("# ") for line in lines[: next(i for i, x in enumerate(lines) if x[:1] != "#")])
    return first_sentence(re.sub(r" \(docs/\S+\)", "", text))


def first_sentence(text: str | None) -> str:
    words = " ".join((text or "").split("\n\n")[0].split())
    return re.split(r"(?<=[.]) (?=[A-Z`])", words)[0].rstrip(".: ")


# -- algorithms
def algorithms() -> Iterator[str]:
    """Yield the lines of the page: one row for each yaml that acts."""
    yield ALGORITHMS + "\n"
    names = [name for name in groups(CONFIG)["algo"] if name not in ("judge", "reward_classifier")]
    titles = "algo, actions, images, chunk, values, plans, demonstrations, person, weights, memory, shown, what it is"
    yield from table(titles, map(algorithm, names))


def algorithm(name: str) -> list[str]:
    """Return the cells of an algorithm's row."""
    config = composed(CONFIG, [f"algo={name}"])
    spec = with_extras(NUMBERS, OmegaConf.to_container(config.extras))  # type: ignore[arg-type]
    made = hollow(lambda: factory(config, "algo", spec)(spec))
    try:
        hollow(lambda: factory(config, "algo", CHOICE)(with_extras(CHOICE, config.extras)))
        actions = "numbers, choices"
    except ConfigError:
        actions = "numbers"
    sees = any(CAMERA in window.offsets for window in made.windows.values())
    size = needed(lambda: factory(config, "algo", spec)(spec), spec, config.batch_size, 1, 0).total
    used, words = plans_of(name), {f"algo={name}", f"`{name}`", *(f"plan={plan}" for plan in choosing(name))}
    phases = [phase for plan in used for phase in plan_of(composed(CONFIG, [f"plan={plan}"])).phases.values()]
    shown = [file for file in sorted(EVIDENCE.glob("*.md")) if names(file.read_text(), words) and file.stem != "gpu"]
    judges = type(made).value is not Algorithm.value or "update_value" in made.windows
    weights = sum(weight.numel() for weight in made.parameters()) / 1e6
    return [
        f"`{name}`", actions, yes(sees), str(made.acting.horizon), yes(judges),
        ", ".join(f"`{plan}`" for plan in used), yes(any(phase.actors.mode == "teleop" for phase in phases)),
        yes(any(phase.actors.intervene for phase in phases)),
        f"{weights:,.0f}" if weights >= 10 else f"{weights:.2g}", said(size),
        ", ".join(f"[{file.stem}](../evidence/{file.name})" for file in shown), about(CONFIG / f"algo/{name}.yaml"),
    ]  # fmt: skip


def yes(is_so: bool) -> str:
    return "yes" if is_so else ""


def names(text: str, words: Iterable[str]) -> bool:
    """Return whether one of these words stands in a text, and not as the beginning of a longer one."""
    return re.search(rf"({'|'.join(map(re.escape, words))})(?!\w)", text) is not None


def choosing(name: str) -> list[str]:
    """Return the plans that choose an algorithm."""
    return [plan for plan, text in plans().items() if names(text, [f"algo: {name}"])]


def plans_of(name: str) -> list[str]:
    """Return the plans that choose an algorithm, or are named with it; else those of the yaml that it continues."""
    for file in continued(CONFIG / f"algo/{name}.yaml"):
        used = choosing(file.stem) + [plan for plan, text in plans().items() if names(text, [f"algo={file.stem}"])]
        used += [plan for plan in re.findall(r"plan=(\w+)", head(file)) if plan in plans()]
        if used:
            return list(dict.fromkeys(used))
    return []


def head(file: Path) -> str:
    return file.read_text().split("\ndefaults")[0]


@cache
def plans() -> dict[str, str]:
    """Return the texts of all plans, with that of base.yaml for the plan that it chooses."""
    texts = {name: (CONFIG / f"plan/{name}.yaml").read_text() for name in groups(CONFIG)["plan"]}
    base = (CONFIG / "base.yaml").read_text()
    return {name: text + base * (f"- plan: {name}\n" in base) for name, text in texts.items()}


# -- columns
def columns() -> Iterator[str]:
    """Yield the lines of the page: three tables of names, with types and shapes from the code."""
    yield COLUMNS
    meant = dict(re.findall(r"(\w+): \w+ \[T\], ([^.]*)", doc(serl_client.episode.Segment)))
    row = {name: (f"{dtype} [T]", meant.get(name, "what the task gave")) for name, dtype in ROW.items()}
    names, replay = serl_launcher.datasets.names, serl_launcher.replay.columns
    shard, window = described(names.COLUMNS, names, "[1]"), described(replay.EPISODE, replay, "[B, H]")
    for title, known in ((STEP, row), (SHARD, shard), (WINDOW, window)):
        yield f"\n## Of {title}\n"
        yield from table("column, type, meaning", ((f"`{name}`", *cells) for name, cells in known.items()))


def described(features: Mapping[str, Feature], module: object, shape: str) -> dict[str, tuple[str, str]]:
    """Return {column: (type, meaning)}. The module's docstring has a line `name: meaning` for each."""
    meant = dict(re.findall(r"^ *(\S+): (.*)$", doc(module), flags=re.MULTILINE))
    return {name: (f"{feature.dtype} {shape}", meant[name]) for name, feature in features.items()}


def doc(thing: object) -> str:
    return inspect.getdoc(thing) or ""


# -- hardware
def hardware() -> Iterator[str]:
    """Yield the lines of the page: tasks, drivers, devices of a person and cameras."""
    yield HARDWARE
    yield "\n## Robots and simulations\n"
    yield from table("task, what it is, demonstrations, steps per second, needs", map(task, groups(CONFIG)["task"]))
    infra = ROOT / "robot_infra"
    yield "\n## Drivers of arms\n"
    yield from table("class, what it drives", drivers(infra))
    yield "\n## What a person drives by\n"
    files = [infra / f"teleop/{name}.py" for name in OPERATORS]
    yield from table("device, how it is read", ((f"`{file.stem}`", module_says(file)) for file in files))
    yield "\n## Cameras\n"
    files = sorted((infra / "cameras").glob("[!_]*.py"))
    yield from table("module, what it does", ((f"`{file.stem}`", module_says(file)) for file in files))


def task(name: str) -> list[object]:
    """Return the cells of a task's row. A yaml without its own word has that of the one that it continues."""
    yamls = list(continued(CONFIG / f"task/{name}.yaml"))
    settings = OmegaConf.merge(*map(OmegaConf.load, reversed(yamls)))
    needs = re.findall(r"Needs the extra `(\w+)`|(examples/\w+)/run_actor", "".join(map(head, yamls)))
    return [
        f"`{name}`", about(yamls[0]),
        WHO[OmegaConf.select(settings, "has_operator")], OmegaConf.select(settings, "env.fps") or "its own",
        ", ".join(dict.fromkeys(f"extra `{extra}`" if extra else place for extra, place in needs)),
    ]  # fmt: skip


def continued(file: Path) -> Iterator[Path]:
    """Yield a yaml and those that it continues."""
    yield file
    for entry in OmegaConf.select(OmegaConf.load(file), "defaults") or []:
        if isinstance(entry, str) and entry != "_self_":
            yield from continued(file.with_name(f"{entry}.yaml"))


def drivers(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield (full name, first sentence) of each class derived from Arm there."""
    for file in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef) and any(ast.unparse(base) == "Arm" for base in node.bases):
                place = ".".join(file.relative_to(folder.parent).with_suffix("").parts)
                yield f"`{place}.{node.name}`", first_sentence(ast.get_docstring(node))


def module_says(file: Path) -> str:
    return first_sentence(ast.get_docstring(ast.parse(file.read_text())))


PAGES: dict[str, Callable[[], Iterator[str]]] = {"algorithms": algorithms, "columns": columns, "hardware": hardware}

if __name__ == "__main__":
    main()
