"""Does a controller need the memory of World Models where one picture does not tell all? On a puck, by seed.

A puck slides on ice, and each step costs its distance to the middle in metres. Pictures of 32x32 show where it is, but
not its speed (task=puck). By plan=world_models with algo=world_models_tiny: --random steps that drift by chance, 2,000
updates of V, 1,000 of M. Then, twice from there, --steps steps of evolution:
    full              a controller of the code z and the memory h
    z alone           a controller of the code (algo.remembers=false)
Each evolved mean acts on the same --starts starts. The difference of returns, full minus z alone, is paired, start by
start; its interval is over seeds. A goal is missed if the interval has 0 in it, or lies below. The actor computes its
actions in its own process. Words at the end go to every learner, and those that begin with `algo` to the actors.
"""

import argparse
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tools.compare import compared, trials
from tools.studies.runs import Cell, Cells, copied, mean_of, run

TASK = "puck"
WAYS = {"full": "algo.remembers=true", "z_alone": "algo.remembers=false"}
LEARNED = ("drift", "see", "encode", "predict")  # phases that both have in common


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--random", type=int, default=8000, help="steps of chance (8000)")
    parser.add_argument("--steps", type=int, default=80000, help="of each evolution (80000)")
    parser.add_argument("--starts", type=int, default=20, help="of each evaluation (20)")


def study(cells: Cells, options: argparse.Namespace) -> Iterator[str]:
    """Measure what is missing, then yield the lines of the report."""
    found = []
    for seed in options.seeds:
        key = {"task": TASK, "random": options.random, "steps": options.steps, "starts": options.starts}
        key |= {"words": options.words, "seed": seed}
        found.append(cells.get(key, partial(measured, seed, options)))
    yield from table(found)


def measured(seed: int, options: argparse.Namespace) -> Mapping[str, Any]:
    """Return the mean returns of both ways, and what comes of it start by start."""
    folder, began = options.out / f"seed-{seed}", time.monotonic()
    common = ["plan=world_models", "algo=world_models_tiny", f"seed={seed}", *options.words]
    common += [f"random_steps={options.random}", f"max_env_steps={options.steps}", f"eval_episodes={options.starts}"]
    own = ["inference=local", "algo=world_models_tiny", *(word for word in options.words if word.startswith("algo"))]
    learned = folder / "learned"
    if not (learned / "summary.json").exists():
        run(learned, *common, "~plan.phases.evolve", "~plan.phases.evaluate", task=TASK, actor=own)
    tried: dict[str, tuple[Path, Any]] = {}
    for way, word in WAYS.items():
        if not (folder / way / "summary.json").exists():
            copied(learned, folder / way)
            words = [word, *(f"~plan.phases.{phase}" for phase in LEARNED)]
            run(folder / way, *common, *words, task=TASK, actor=[*own, word])
        tried[way] = folder / way, trials(folder / way)
    pair = compared(tried["z_alone"], tried["full"])
    means = {way: statistics.fmean(trial.total for trial in each.values()) for way, (_, each) in tried.items()}
    counts = {f"{way}_successes": count for way, count in zip(("z_alone", "full"), pair["successes"], strict=True)}
    return {
        **means, **counts, "shared": pair["shared"], "return_difference": pair["return_difference"][0],
        "wall_s": round(time.monotonic() - began),
    }  # fmt: skip


def table(cells: Sequence[Cell]) -> Iterator[str]:
    """Yield the mean returns by seed, and full minus z alone with its interval over the seeds."""
    yield f"| {cells[0]['starts']} starts, seeds {' / '.join(str(cell['seed']) for cell in cells)} | return | success |"
    yield "|---|---|---|"
    for way, title in {"full": "z and h", "z_alone": "z alone"}.items():
        returns = " / ".join(f"{cell[way]:.1f}" for cell in cells)
        yield f"| {title} | {returns} | {' / '.join(str(cell[f'{way}_successes']) for cell in cells)} |"
    mean, low, high = mean_of([cell["return_difference"] for cell in cells])
    missed = " MISSED: not above 0" * (low <= 0)  # one seed has no interval, and says nothing
    yield f"full minus z alone: {mean:.1f} ({low:.1f} to {high:.1f})" + missed
