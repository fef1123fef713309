"""The page of a full run: what the benches printed with --json, one file each, as a table with a picture beside it."""

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

from .paired import WHERE, Figure, figure_of, option

TITLE = """# Speed of the data path, beside other systems and the limits of the machine

Each system and its baseline alternate within one run. A ratio is the median of the rounds' ratios. In the plot, bars
that reach beyond 1 meet the goal. Figures whose goal is 0 are only in the tables.
`.venv/bin/python tools/bench.py NAME --help` says how to repeat a measurement.
"""


OPTIONS = {
    "results": option([Path()], "what one printed with --json"),
    "--out": option(Path("docs/benchmarks.md"), "(docs/benchmarks.md)"),
}


def measure(_: Path, options: argparse.Namespace) -> str:
    """Write the page and its picture; what to say of it."""
    results = [printed(path) for path in options.results]
    picture = options.out.with_suffix(".png")
    draw(results, picture)
    options.out.write_text("\n".join([TITLE, f"![ratio to goal]({picture.name})", *map(section, results)]) + "\n")
    return f"wrote {options.out}"


def printed(path: Path) -> Mapping[str, Any]:
    try:
        result = json.loads(path.read_text().splitlines()[-1])
        return {name: result[name] for name in ("bench", "machine", "figures")}
    except (OSError, IndexError, ValueError, KeyError, TypeError):
        sys.exit(f"{path} is not what a bench with figures has printed with --json")


def section(result: Mapping[str, Any]) -> str:
    """The heading, the machine and the table of one bench."""
    rows = [row(figure) for figure in map(figure_of, result["figures"])]
    head = ["| figure | value | beside | ratio | goal |", "|---|---|---|---|---|"]
    return "\n".join([f"\n## {result['bench']}\n", WHERE.format(**result["machine"]) + "\n", *head, *rows])


def row(figure: Figure) -> str:
    ratio = "" if figure.ratio is None else f"{figure.ratio:.3g}"
    goal = "" if figure.holds is None else f"{figure.goal}: {'holds' if figure.holds else '**missed**'}"
    return f"| {figure.figure} | {figure.value:.4g} {figure.unit} | {figure.against} | {ratio} | {goal} |"


def draw(results: Sequence[Mapping[str, Any]], path: Path) -> None:
    """One bar for each figure that has a goal, on a logarithmic axis."""
    matplotlib.use("agg")
    from matplotlib import pyplot

    goals = [figure for result in results for figure in map(figure_of, result["figures"]) if figure.goal]
    figures = [figure for figure in goals if 0 < figure.margin < math.inf]
    canvas, axes = pyplot.subplots(figsize=(9, 1 + 0.25 * len(figures)))
    names = [f"{figure.figure} ({figure.goal})" for figure in figures]
    axes.barh(names, [f.margin for f in figures], color=["tab:green" if f.holds else "tab:red" for f in figures])
    axes.axvline(1.0, color="black")
    axes.set_xscale("log")
    axes.invert_yaxis()
    axes.set_xlabel("margin to the goal")
    canvas.tight_layout()
    canvas.savefig(path, dpi=100)
    pyplot.close(canvas)
