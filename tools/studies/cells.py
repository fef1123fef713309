"""What a study is, its cells, and their table: one runner for all of them."""

import ast
import hashlib
import json
import math
import resource
import statistics
import subprocess
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import yaml

from tools.studies.runs import ROOT

CODE = (  # what a cell follows from: git's words for files
    "packages", "robot_infra", "serl_launcher", "config", "examples", "tools/studies", ":!tools/studies/cells.py"
)  # fmt: skip
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)  # Student's t, two-sided 95 %, 1 to 9 degrees

Cell = dict[str, Any]
Rows = Mapping[str, list[Cell]]  # the cells of each way, by seed
Column = Callable[[Cell], Any]


def last(cell: Cell) -> float:
    """Return the successes of a cell's last evaluation."""
    found = cell["successes"]
    return found[-1] if isinstance(found, list) else found


def each(titles: Iterable[str]) -> dict[str, Column]:
    """Return a column for each evaluation of a cell."""
    return {title: lambda cell, at=at: cell["successes"][at] for at, title in enumerate(titles)}


@dataclass(frozen=True)
class Study:
    """One comparison: ways, each by seed. A cell's key has the settings, the words, the seed and what tells its way.

    measure: makes the runs of a cell and returns what it found; it is given the values of the key and the `folder` of
        all runs with this seed and these settings. Its docstring explains the study.
    settings: their defaults; each is an option of the command, and holds for finished cells that do not name it.
    ways: names and what the key says of each. usual: how many are measured if nobody names any (None: all).
    words: of every learner, before those of the command.
    goes_on: whether the other ways are measured for a seed, told by the first one's cell, with which they begin.
    parts: instead of ways, names of the successes that one cell holds, and their titles.
    columns: of the table, given the options; the last one's mean is told, as a share of the setting `of`.
    control: the way that the others are compared with. more: further columns. notes: further lines.
    """

    measure: Callable[[Namespace], Mapping[str, Any]]
    settings: Mapping[str, Any]
    ways: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: {"": {}})
    usual: int | None = None
    seeds: Sequence[int] = (0, 1, 2)
    words: Sequence[str] = ()
    goes_on: Callable[[Cell], object] | None = None
    parts: Mapping[str, str] = field(default_factory=dict)
    columns: Callable[[Namespace], Mapping[str, Column]] = lambda _: {"successes": last}
    of: str = "starts"
    control: str = ""
    more: Mapping[str, Column] = field(default_factory=dict)
    notes: Callable[[Rows, Namespace], Iterable[str]] = lambda *_: ()


class Cells:
    """The finished cells of a study in a file, one JSON object in each line. The same command goes on with the rest.

    usual: what holds for cells that do not name it.
    """

    def __init__(self, file: Path, usual: Mapping[str, Any]) -> None:
        self.file, self.usual = file, usual
        self.all: list[Cell] = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def found(self, key: Mapping[str, Any]) -> Cell | None:
        return next((cell for cell in self.all if key.items() <= {**self.usual, **cell}.items()), None)

    def get(self, key: Mapping[str, Any], measure: Callable[[], Mapping[str, Any]]) -> Cell:
        """Return the cell of this key. If it is missing, measure it, and write it with what it was made of first."""
        if cell := self.found(key):
            return cell
        began, used = time.monotonic(), cpu_s()
        commit = git("rev-parse", "--short", "HEAD").strip()
        made = {**key, "commit": commit, "date": f"{date.today()}", "digest": digest(key)}
        cell = {**made, **measure(), "wall_s": round(time.monotonic() - began), "cpu_s": round(cpu_s() - used)}
        self.all.append(cell)
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with open(self.file, "a") as file:
            file.write(json.dumps(cell) + "\n")
        print(json.dumps(cell), flush=True)
        return cell


def cpu_s() -> float:
    """Return the CPU time of all child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def git(*command: str) -> str:
    return subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def digest(key: Mapping[str, Any], code: Sequence[str] = CODE) -> str:
    """Return a digest of the key and of the files that lie there: the configs of a cell's runs follow from these.

    Comments and docstrings do not count.
    """
    read = hashlib.sha256(json.dumps(key, sort_keys=True).encode())
    listed = git("ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *code) if code else ""
    for name in sorted(listed.split("\0")):
        if (ROOT / name).is_file():
            read.update(f"\0{name}\0".encode() + what_counts(ROOT / name))
    return read.hexdigest()[:12]


def what_counts(file: Path) -> bytes:
    """Return the bytes of a file; of Python and of yaml, what it says to a machine."""
    if file.suffix == ".yaml":
        return json.dumps(yaml.safe_load(file.read_text()), default=str).encode()
    if file.suffix != ".py":
        return file.read_bytes()
    tree = ast.parse(file.read_text())
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node) is not None:
            del node.body[0]
    return ast.dump(tree).encode()


# -- the report
def lines(study: Study, options: Namespace) -> Iterator[str]:
    """Measure what is missing, unless only `finished` cells are wanted, then yield the lines of the report."""
    first = next(iter(study.ways)) if study.goes_on else ""
    rows = measured(study, options, first)
    told = age([cell for cells in rows.values() for cell in cells])
    for seed in seeds_of(rows):
        one_draw(seed, rows)
    begun = {cell["seed"]: last(cell) for cell in rows.pop(first)} if study.goes_on else {}
    if begun:
        rows = {
            way: [{**cell, "successes": [begun[cell["seed"]], *cell["successes"]]} for cell in cells]
            for way, cells in rows.items()
        }
    if study.parts:
        (cells,) = rows.values()
        rows = {title: [{**cell, "successes": cell[name]} for cell in cells] for name, title in study.parts.items()}
    rows = {way: cells for way, cells in rows.items() if cells}
    yield from table(study, rows, options)
    yield told
    if left := {seed: count for seed, count in begun.items() if seed not in seeds_of(rows)}:
        yield f"seeds that were not gone on with, and the successes of their {first}: {left}"
    yield from study.notes(rows, options)


def age(cells: Sequence[Cell]) -> str:
    """Say when cells were measured, and of how many nobody can look up the code: without a digest, of a lost commit."""
    if not cells:
        return "Nothing is measured yet."
    days = sorted({cell["date"] for cell in cells})
    when = f"Measured {days[0]}" + f" to {days[-1]}" * bool(days[1:]) + "."
    if lost := sum(cell.get("history") == "lost" for cell in cells):
        when += f" History lost: nobody can look up the code that measured {lost} of {len(cells)} cells."
    return when


def measured(study: Study, options: Namespace, first: str) -> dict[str, list[Cell]]:
    """Return the cells of each way; of a seed that is not gone on with, that of the first way alone."""
    setting = {name: getattr(options, name) for name in study.settings}
    setting["words"] = [*study.words, *options.words]
    cells = Cells(options.results, {**study.settings, "words": list(study.words)})
    rows: dict[str, list[Cell]] = {way: [] for way in ([first] if study.goes_on else []) + options.ways}
    for seed in options.seeds:
        folder = options.out / f"{seed}-{digest(setting, code=())[:6]}"
        for way in rows:
            key = {**setting, "seed": seed, **study.ways[way]}
            here = Namespace(**key, folder=folder)
            cell = cells.found(key) if options.finished else cells.get(key, lambda here=here: study.measure(here))
            rows[way] += [cell] if cell else []
            if cell and study.goes_on and way == first and not study.goes_on(cell):
                break
    return rows


def seeds_of(rows: Rows) -> list[int]:
    return sorted({cell["seed"] for cells in rows.values() for cell in cells})


def one_draw(seed: int, rows: Rows) -> None:
    """Raise ValueError if cells of this seed began with different data."""
    mine = {
        way: cell["draw"] for way, cells in rows.items() for cell in cells if cell["seed"] == seed and "draw" in cell
    }
    if len(set(mine.values())) > 1:
        raise ValueError(
            f"cells of seed {seed} began with different data, so they cannot be compared: {mine}. Keep those of one "
            "draw, and measure the others again with the --out that holds it, or all of them with new --results"
        )


def table(study: Study, rows: Rows, options: Namespace) -> Iterator[str]:
    """Yield columns by seed, the mean of the last one, and by how much it is above the control, paired by seed."""
    of, control, columns = getattr(options, study.of), study.control, study.columns(options)
    if not columns:
        return
    result = list(columns.values())[-1]
    over = [f"over {control}"] * bool(control)
    titles = [f"of {of}, seeds {joined(seeds_of(rows))}", *columns, "mean", *over, *study.more]
    yield f"| {' | '.join(titles)} |"
    yield "|---" * len(titles) + "|"
    before = {cell["seed"]: result(cell) for cell in rows.get(control, [])}
    for way, cells in rows.items():
        gains = [(result(cell) - before[cell["seed"]]) / of for cell in cells if cell["seed"] in before]
        shown = [joined(map(column, cells)) for column in columns.values()]
        shown += [said([result(cell) / of for cell in cells])]
        shown += [said(gains, "points") if gains and way != control else ""] * bool(control)
        shown += [joined(map(column, cells)) for column in study.more.values()]
        yield f"| {way} | {' | '.join(shown)} |"
    cells = next(iter(rows.values()), [])
    if differences := [cell["return_difference"] for cell in cells if "return_difference" in cell]:
        yield "difference of returns: {:.3f} ({:.3f} to {:.3f})".format(*mean_of(differences))


def joined(values: Iterable[object]) -> str:
    return " / ".join("-" if value is None else str(value) for value in values)


def mean_of(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the mean, and its 95 % interval by Student's t: each value is one draw. NaN for fewer than two draws."""
    center = statistics.fmean(values)
    if len(values) < 2:
        return center, math.nan, math.nan
    half = T_95[min(len(values) - 1, len(T_95)) - 1] * statistics.stdev(values) / math.sqrt(len(values))
    return center, center - half, center + half


def said(values: Sequence[float], unit: str = "%") -> str:
    """Say a mean of shares and its interval, as in `73 % (60 to 86)`."""
    center, low, high = (100 * value for value in mean_of(values))
    if unit == "%":
        low, high = max(low, 0.0), min(high, 100.0)
    return f"{center:.0f} {unit}" + (f" ({low:.0f} to {high:.0f})" if len(values) > 1 else "")
