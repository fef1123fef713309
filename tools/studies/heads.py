"""Which head learns what from the same demonstrations? Two tasks, by seed, with the network of --network.

    sim_arm   the simulated arm; every demonstration does the same thing, with noise
    wall      a wall with two gaps; each demonstration takes one at random, so the mean of two good ways hits the wall
For each seed the heads clone the same --demonstrations with the same number of updates, then act on 50 distinct starts.
"""

import argparse
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tools.studies.runs import EVALUATED, ROOT, Cell, Cells, copied, demonstrations, run, said, successes

TASKS = ("sim_arm", "wall")
HEADS = tuple(sorted(file.stem for file in (ROOT / "config/head").glob("*.yaml")))


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--heads", nargs="+", choices=HEADS, default=list(HEADS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--network", default="mlp")
    parser.add_argument("--demonstrations", type=int, default=20, help="episodes by the scripted operator (20)")
    parser.add_argument("--updates", type=int, default=1500, help="of each clone (1500)")


def study(cells: Cells, options: argparse.Namespace) -> Iterator[str]:
    """Measure what is missing, then yield the lines of the report."""
    for task in options.tasks:
        found = []
        for seed in options.seeds:
            for head in options.heads:
                key = {"task": task, "network": options.network, "demonstrations": options.demonstrations}
                key |= {"updates": options.updates, "words": options.words, "seed": seed, "head": head}
                found.append(cells.get(key, partial(cloned, task, seed, head, options)))
        yield from table(found, task, options)


def cloned(task: str, seed: int, head: str, options: argparse.Namespace) -> Mapping[str, Any]:
    """Clone the seed's demonstrations, and return how many of the evaluated episodes succeed."""
    folder: Path = options.out / f"{task}-{seed}"
    choice = ["policy=chunk", f"head={head}", f"network={options.network}"]
    begun = demonstrations(folder / "demonstrations", seed, options.demonstrations, task=task)
    words = [f"plan.phases.clone.until=['updates >= {options.updates}']", f"eval_episodes={EVALUATED}"]
    began, target = time.monotonic(), folder / f"{head}-{options.network}"
    source = copied(begun, target)
    (source / "config.yaml").unlink(missing_ok=True)  # it would remember the policy of the demonstrations
    run(source, "plan=sft", f"seed={seed}", *choice, *words, *options.words, task=task)
    return {"successes": successes(target)[-1], "wall_s": round(time.monotonic() - began)}


def table(cells: Sequence[Cell], task: str, options: argparse.Namespace) -> Iterator[str]:
    """Yield the successes of each head by seed, and their mean."""
    yield f"| {task}, {options.updates} updates | of {EVALUATED}, seeds {' / '.join(map(str, options.seeds))} | mean |"
    yield "|---|---|---|"
    for head in options.heads:
        mine = [cell["successes"] for cell in cells if cell["head"] == head]
        yield f"| {head} | {' / '.join(map(str, mine))} | {said([count / EVALUATED for count in mine])} |"
