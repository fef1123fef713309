"""Heads on robosuite's Lift, from the state, with the demonstrations of a scripted expert (docs/robomimic.md), by seed.

For each seed the heads clone the same --demonstrations with the same number of updates, then act on 50 distinct starts.
The actor runs in the Python of examples/robomimic, which its first start installs (1.1 GB).
"""

import argparse
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from tools.studies.runs import EVALUATED, Cell, Cells, copied, example, said, successes


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--heads", nargs="+", default=["regression", "mip"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--demonstrations", type=int, default=100, help="episodes by the scripted expert (100)")
    parser.add_argument("--updates", type=int, default=1500, help="of each clone (1500)")


def study(cells: Cells, options: argparse.Namespace) -> Iterator[str]:
    """Measure what is missing, then yield the lines of the report."""
    found: list[Cell] = []
    for seed in options.seeds:
        for head in options.heads:
            key = {"demonstrations": options.demonstrations, "updates": options.updates, "words": options.words}
            key |= {"seed": seed, "head": head}
            found.append(cells.get(key, partial(cloned, seed, head, options)))
    yield f"| Lift, {options.updates} updates | of {EVALUATED}, seeds {' / '.join(map(str, options.seeds))} | mean |"
    yield "|---|---|---|"
    for head in options.heads:
        mine = [cell["successes"] for cell in found if cell["head"] == head]
        yield f"| {head} | {' / '.join(map(str, mine))} | {said([count / EVALUATED for count in mine])} |"


def cloned(seed: int, head: str, options: argparse.Namespace) -> Mapping[str, Any]:
    """Clone the seed's demonstrations, and return how many of the evaluated episodes succeed."""
    folder: Path = options.out / f"seed-{seed}"
    begun, target, began = folder / "demonstrations", folder / head, time.monotonic()
    if not (begun / "summary.json").exists():
        until = f'plan.phases.demonstrate.until=["demo.episodes >= {options.demonstrations}"]'
        example("robomimic", begun, f"seed={seed}", "plan=collect", until)
    words = [f"plan.phases.clone.until=['updates >= {options.updates}']", f"eval_episodes={EVALUATED}"]
    words += [f"seed={seed}", "plan=sft", "policy=chunk", f"head={head}", "envs=2", *options.words]
    example("robomimic", copied(begun, target), *words)
    return {"successes": successes(target)[-1], "wall_s": round(time.monotonic() - began)}
