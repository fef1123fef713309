"""RLPD picks up gym-hil's cube, placed at random, from 20 demonstrations of its script (docs/learning.md), by seed.

algo=rlpd as it is, and nobody takes over. After AT steps of practice each, the policy acts on the same 30 starts.
Needs the extra `hil`.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from robot_infra.cameras import gl
from tools.studies.control import phases, seconds
from tools.studies.runs import Cell, Cells, run

AT = (2, 4, 6, 8, 10)  # thousand steps of practice before each evaluation
STARTS = 30
GOAL = 24  # of them, in the mean of three seeds after 10 thousand steps
OLD = ("baseline", "practise", "evaluate")  # phases of the quickstart, which these replace


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--at", type=float, nargs="+", default=AT, help="thousand steps before each evaluation")


def study(cells: Cells, options: argparse.Namespace) -> Iterator[str]:
    """Measure what is missing, then yield the lines of the report."""
    found = []
    for seed in options.seeds:
        key = {"task": "pick_cube", "at": list(options.at), "words": options.words, "seed": seed}
        found.append(cells.get(key, partial(picked, seed, options)))
    yield from table(found, options.at)


def picked(seed: int, options: argparse.Namespace) -> Mapping[str, Any]:
    """Return the successes after each part of the practice, and what it took; cpu_s: of all processes."""
    os.environ.setdefault("MUJOCO_GL", gl.backend())  # the task makes a renderer, though nothing is drawn
    folder: Path = options.out / f"seed-{seed}"
    began, used = time.monotonic(), seconds()
    scripted = ["task.env.operator=scripted", "task.env.clock=simulated", f"seed={seed}"]
    run(folder, *words(seed, options.at), *options.words, task="pick_cube", actor=scripted)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    evaluations = [line for line in lines if line["kind"] == "evaluation"]
    assert all(line["distinct_starts"] == STARTS for line in evaluations), f"{folder}: starts were repeated"
    return {
        "successes": [line["successes"] for line in evaluations],
        "updates": [line["updates"] for line in evaluations],
        "wall_s": round(time.monotonic() - began),
        "cpu_s": round(seconds() - used),
    }


def words(seed: int, at: Sequence[float]) -> list[str]:
    """Return what is said to the learner: the quickstart's demonstrations, then practice with evaluations between."""
    practice = phases(at, "{online: 0.5, demo: 0.5}", STARTS, begin="online.steps >= 200")
    return [f"seed={seed}", "algo=rlpd", "plan=quickstart", *(f"~plan.phases.{name}" for name in OLD), *practice]


def table(cells: Sequence[Cell], at: Sequence[float]) -> Iterator[str]:
    yield f"| of {STARTS} starts, after thousand steps | {' | '.join(f'{each:g}' for each in at)} |"
    yield "|---" * (len(at) + 1) + "|"
    for cell in cells:
        yield f"| seed {cell['seed']} | {' | '.join(map(str, cell['successes']))} |"
    means = [f"{statistics.fmean(each):.1f}" for each in zip(*(cell["successes"] for cell in cells), strict=True)]
    yield f"| mean | {' | '.join(means)} |"
