"""Does Dreamer remember what a task shows once? In a corridor, by seed, beside SAC and itself without memory.

The goal is at one of two ends, and only the first observation of an episode tells at which (task=corridor). Who forgets
it finds it in half of the episodes.
    SAC               sees each observation alone (plan=from_scratch algo=sac): as many steps, one update for each
    Dreamer           algo=dreamer_tiny after --steps, --random of them random, with one update for each of the others
    its carry reset   the same weights on the same starts, with the carry forgotten at each step (algo.remembers=false)
Each is evaluated on --starts distinct starts. The clock is simulated: a step waits for its action. Words at the end go
to every learner of Dreamer.
"""

import argparse
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tools.compare import trials
from tools.studies.runs import Cell, Cells, copied, run, said

DREAMER = [  # chosen on seed 9: the discount fits episodes of 5 to 20 steps, and the entropy keeps both ways open
    "algo=dreamer_tiny", "utd=1", "algo.discount_steps=20", "algo.entropy_scale=0.03",
]  # fmt: skip
SAC = ["algo=sac", "policy=gaussian", "utd=1", "algo.discount=0.95"]
TITLES = {"sac": "SAC", "dreamer": "Dreamer", "reset": "Dreamer, its carry reset at each step"}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--random", type=int, default=1000, help="steps of random actions (1000)")
    parser.add_argument("--steps", type=int, default=3000, help="of training, the random ones included (3000)")
    parser.add_argument("--starts", type=int, default=100, help="of each evaluation (100)")


def study(cells: Cells, options: argparse.Namespace) -> Iterator[str]:
    """Measure what is missing, then yield the lines of the report."""
    found = []
    for seed in options.seeds:
        key = {"random": options.random, "steps": options.steps, "starts": options.starts}
        key |= {"words": options.words, "seed": seed}
        found.append(cells.get(key, partial(remembered, seed, options)))
    yield from table(found)


def remembered(seed: int, options: argparse.Namespace) -> Mapping[str, Any]:
    """Return how many of the starts end at the goal, for each of TITLES."""
    folder, began = options.out / f"seed-{seed}", time.monotonic()
    common = [f"seed={seed}", f"eval_episodes={options.starts}", f"eval_steps={options.starts * 1000}"]
    begun = [f"random_steps={options.random}", f"max_env_steps={options.steps}"]

    def finished(name: str, *words: str) -> Path:
        if not (folder / name / "summary.json").exists():
            run(folder / name, *words, *common, task="corridor")
        return folder / name

    def evaluated(source: Path, name: str, *words: str) -> int:
        if not (folder / name / "summary.json").exists():
            copied(source, folder / name)
        return successes(finished(name, "plan=evaluate", *dreamer, *words))

    dreamer = [*DREAMER, *options.words]
    learned = finished("practice", "plan=dreamer", *dreamer, *begun, "~plan.phases.evaluate")
    counts = {
        "sac": successes(finished("sac", "plan=from_scratch", *SAC, *begun)),
        "dreamer": evaluated(learned, "dreamer"), "reset": evaluated(learned, "reset", "algo.remembers=false"),
    }  # fmt: skip
    return {**counts, "wall_s": round(time.monotonic() - began)}


def successes(folder: Path) -> int:
    return sum(bool(trial.success) for trial in trials(folder).values())


def table(cells: Sequence[Cell]) -> Iterator[str]:
    """Yield the successes by seed."""
    yield f"| of {cells[0]['starts']}, seeds {' / '.join(str(cell['seed']) for cell in cells)} | successes | mean |"
    yield "|---|---|---|"
    for name, title in TITLES.items():
        counts, shares = zip(*[(cell[name], cell[name] / cell["starts"]) for cell in cells], strict=True)
        yield f"| {title} | {' / '.join(map(str, counts))} | {said(shares)} |"
