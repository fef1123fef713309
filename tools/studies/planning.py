"""Does planning in the learned model act better than the prior alone? On the point task, by seed, by TD-MPC2.

A point must come within 5 cm of a goal (task=fake); each step costs its distance in metres, the goal gives 1. It
practises by plan=tdmpc2 with algo=tdmpc2_tiny: --random steps of random actions, as many updates, then one update for
each step.
    prior             the prior's actions, without planning (algo.plan=false), after half of the --steps
    planning          planned actions of the same weights, on the same starts
    planning, whole   planned actions after all of the --steps
Each on --starts distinct starts. The difference of the first two is paired, start by start; its interval is over seeds.
The clock is simulated: a step waits for its action. Words at the end go to every learner.
"""

import argparse
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tools.compare import compared, trials
from tools.studies.runs import Cell, Cells, copied, mean_of, run, said

TASK = ["task.env.cost=1.0"]
ALGORITHM = ["algo=tdmpc2_tiny", "algo.discount=0.95"]  # episodes of 50 steps: 1 - 5/50, at least 0.95


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--random", type=int, default=500, help="steps of random actions (500)")
    parser.add_argument("--steps", type=int, default=3000, help="of training, the random ones included (3000)")
    parser.add_argument("--starts", type=int, default=100, help="of each evaluation (100)")


def study(cells: Cells, options: argparse.Namespace) -> Iterator[str]:
    """Measure what is missing, then yield the lines of the report."""
    found = []
    for seed in options.seeds:
        key = {"task": "point", "random": options.random, "steps": options.steps, "starts": options.starts}
        key |= {"words": options.words, "seed": seed}
        found.append(cells.get(key, partial(point, seed, options)))
    yield from table(found)


def point(seed: int, options: argparse.Namespace) -> Mapping[str, Any]:
    """Return what planning and the prior reach after each half of the steps."""
    folder, began, part = options.out / f"seed-{seed}", time.monotonic(), options.steps // 2
    common = [*ALGORITHM, *TASK, *options.words, f"seed={seed}"]
    begun = ["plan=tdmpc2", f"random_steps={options.random}", f"max_env_steps={options.steps}"]

    def practise(name: str, steps: int, *words: str) -> Path:
        if not (folder / name / "summary.json").exists():
            until = f"plan.phases.practise.until=['env_steps >= {steps}']"
            run(folder / name, *begun, *common, until, *words, task="fake", actor=TASK)
        return folder / name

    def evaluated(source: Path, name: str, *words: str) -> Path:
        target = copied(source, folder / name)
        many = [f"eval_episodes={options.starts}", f"eval_steps={options.starts * 1000}"]
        run(target, "plan=evaluate", *common, *many, *words, task="fake", actor=TASK)
        return target

    half = practise("half", part - options.random, "~plan.phases.evaluate")
    planned, prior = evaluated(half, "planning"), evaluated(half, "prior", "algo.plan=false")
    if not (folder / "whole").exists():
        copied(half, folder / "whole")
    planned_at_end = evaluated(practise("whole", part, "phase=practise"), "planning-at-end")
    tried = [(path, trials(path)) for path in (prior, planned, planned_at_end)]
    pair = compared(tried[0], tried[1])
    counts = [sum(bool(trial.success) for trial in each.values()) for _, each in tried]
    return {
        "prior": counts[0], "planning": counts[1], "planning_at_end": counts[2],
        "starts": pair["shared"], "difference": pair["difference"],
        "return_difference": pair["return_difference"][0], "wall_s": round(time.monotonic() - began),
    }  # fmt: skip


def table(cells: Sequence[Cell]) -> Iterator[str]:
    """Yield the successes by seed, and planning minus prior with its interval over the seeds."""
    yield f"| of {cells[0]['starts']}, seeds {' / '.join(str(cell['seed']) for cell in cells)} | successes | mean |"
    yield "|---|---|---|"
    for name, title in {"prior": "prior", "planning": "planning", "planning_at_end": "planning, whole"}.items():
        counts, shares = zip(*[(cell[name], cell[name] / cell["starts"]) for cell in cells], strict=True)
        yield f"| {title} | {' / '.join(map(str, counts))} | {said(shares)} |"
    yield f"planning minus prior after half of the steps: {said([cell['difference'] for cell in cells], 'points')}"
    mean, low, high = mean_of([cell["return_difference"] for cell in cells])
    yield f"its difference of returns: {mean:.3f} ({low:.3f} to {high:.3f})"
