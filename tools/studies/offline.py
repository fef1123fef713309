"""What is learned from a dataset of successes and failures alone? On the simulated arm, by seed.

A draw is a seed with its own --demonstrations, all with the block on the left, and the first --episodes of RLPD's
practice on them (plan=quickstart): it begins by failing. From copies of that data, --updates of all kinds together,
while nobody acts:
    cloning all       the control: all episodes are imitated
    successes alone   another: those that succeeded are imitated
    iql, calql        the algorithms of plan=offline_to_online
    iql beta 10       the same with algo.beta=10, which was the best of 3, 10 and 30 on seed 9
    recap             it acts under the condition that a row was good
    unconditioned     the same weights without the condition (algo.task_weight=0)
An evaluation on 50 distinct starts follows. Of recap the rank correlation (Spearman) between its value and the returns
of that evaluation's rows is told: nothing has trained on them. Words at the end go to every learner.
"""

import argparse
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from serl_client.spec import Array

from serl_launcher.store.index import Index
from tools.studies.runs import (
    EVALUATE,
    EVALUATED,
    Cell,
    Cells,
    copied,
    demonstrations,
    draw,
    one_draw,
    phase,
    run,
    said,
    successes,
)
from tools.studies.trained import trained

CONTROL, SUCCESSES = "cloning all", "successes alone"
SMALL = ["policy.head.steps=4", "batch_size=64"]
WAYS = {  # name: (words of its learner, its updates)
    CONTROL: (["algo=qc", *SMALL], "[update_clone]"),
    SUCCESSES: (["algo=qc", "+plan.sources.success={of: [online], keep: [successful]}", *SMALL], "[update_clone]"),
    "iql": (["algo=iql", *SMALL], "${updates}"),
    "iql beta 10": (["algo=iql", "algo.beta=10", *SMALL], "${updates}"),
    "calql": (["algo=calql", "algo.cql_samples=4", "batch_size=64"], "${updates}"),
    "recap": (["algo=recap", *SMALL], "${updates}"),
    "unconditioned": (["algo=recap", "algo.task_weight=0", *SMALL], ""),
}
OLD = [f"~plan.phases.{name}" for name in ("demonstrate", "clone", "baseline", "warm_up", "practise", "evaluate")]
IDLE = "actors: {mode: idle}, on_begin: [{fit_normalizer: online}], on_end: [checkpoint, publish]"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--demonstrations", type=int, default=3, help="episodes by the scripted operator (3)")
    parser.add_argument("--episodes", type=int, default=400, help="of practice, in the dataset (400)")
    parser.add_argument("--updates", type=int, default=6000, help="of each way (6000)")


def study(cells: Cells, options: argparse.Namespace) -> Iterator[str]:
    """Measure what is missing, then yield the lines of the report."""
    found = []
    for seed in options.seeds:
        for way in options.ways:
            key = {"demonstrations": options.demonstrations, "episodes": options.episodes}
            key |= {"updates": options.updates, "words": options.words, "seed": seed, "way": way}
            found.append(cells.get(key, partial(learned, seed, way, options)))
    one_draw(found)
    yield from table(found, options)


def learned(seed: int, way: str, options: argparse.Namespace) -> Mapping[str, Any]:
    """Return the successes of this way, and what the dataset held."""
    folder, began = options.out / f"seed-{seed}", time.monotonic()
    words, updates = WAYS[way]
    target = folder / way.replace(" ", "-")
    found: dict[str, Any] = {}
    if way == "unconditioned":
        if not (folder / "recap/summary.json").exists():
            learned(seed, "recap", options)
        run(copied(folder / "recap", target), "plan=evaluate", f"seed={seed}", f"eval_episodes={EVALUATED}", *words)
    else:
        (copied(dataset(folder, seed, options), target) / "config.yaml").unlink()  # it names the dataset's algorithm
        data = f"{{{'success' if way == SUCCESSES else 'online'}: 0.9, demo: 0.1}}"
        training = f"{IDLE}, data: {data}, updates: {updates}, until: ['updates >= {options.updates}']"
        plan = ["plan=value_guided", *OLD, phase("learn", training), phase("evaluate_1", EVALUATE)]
        run(target, *plan, *words, f"seed={seed}", *options.words)
    with closing(Index(target / "store/index.sqlite")) as index:
        given = [bool(episode.success) for episode in index.latest(1_000_000) if episode.source == "online"]
    if way == "recap":
        found["rank_correlation"] = rank_correlation(target)
    return found | {
        "successes": successes(target)[-1], "given": len(given), "given_successes": sum(given),
        "draw": draw(target, "online"), "wall_s": round(time.monotonic() - began),
    }  # fmt: skip


def dataset(folder: Path, seed: int, options: argparse.Namespace) -> Path:
    """Return the run that holds the demonstrations and the episodes of practice, and no checkpoint."""
    made = folder / "dataset"
    if not (made / "summary.json").exists():
        begun = demonstrations(folder / "demonstrations", seed, options.demonstrations, actor=["task.env.side=left"])
        (copied(begun, made) / "config.yaml").unlink(missing_ok=True)
        words = ["plan=quickstart", "~plan.phases.baseline", "~plan.phases.evaluate", "algo=rlpd", f"seed={seed}"]
        words += ["plan.sources.demo.capacity=20000"]
        words += [f"plan.phases.demonstrate.until=['demo.episodes >= {options.demonstrations}']"]
        run(made, *words, f"plan.phases.practise.until=['online.episodes >= {options.episodes}']")
        shutil.rmtree(made / "checkpoints")
    return made


def rank_correlation(folder: Path) -> float:
    """Return Spearman's correlation between the value that a run has learned and the returns of its evaluation."""
    algorithm, batch = trained(folder, "update_value")
    with torch.no_grad():
        values, returns = algorithm.values(batch.observation), algorithm.returns(batch)
    return round(float(np.corrcoef(ranks(values.numpy()), ranks(returns.numpy()))[0, 1]), 3)


def ranks(values: Array) -> Array:
    """Return the ranks of values [n], where equal ones share theirs."""
    _, place, count = np.unique(values, return_inverse=True, return_counts=True)
    return (count.cumsum() - (count - 1) / 2)[place]


def table(cells: Sequence[Cell], options: argparse.Namespace) -> Iterator[str]:
    """Yield the successes of each way by seed, their mean, and the gain over the control."""
    control = {cell["seed"]: cell["successes"] for cell in cells if cell["way"] == CONTROL}
    yield f"| of {EVALUATED}, seeds {' / '.join(map(str, options.seeds))} | successes | mean | over cloning all |"
    yield "|---|---|---|---|"
    for way in options.ways:
        mine = [cell for cell in cells if cell["way"] == way]
        more = [(cell["successes"] - control[cell["seed"]]) / EVALUATED for cell in mine if cell["seed"] in control]
        gained = said(more, "points") if more and way != CONTROL else ""
        counts = " / ".join(str(cell["successes"]) for cell in mine)
        yield f"| {way} | {counts} | {said([cell['successes'] / EVALUATED for cell in mine])} | {gained} |"
    told = [str(cell["rank_correlation"]) for cell in cells if cell["way"] == "recap"]
    yield f"rank correlation of recap's value with held-out returns: {' / '.join(told)}"
    given = [f"{cell['given_successes']} of {cell['given']}" for cell in cells if cell["way"] == CONTROL]
    yield f"episodes of practice that succeeded, in the dataset: {' / '.join(given)}"
