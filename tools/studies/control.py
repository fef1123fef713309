"""SAC, or a small TD-MPC2, on tasks of two suites, from states, through actor, server and trainer (docs/learning.md).

Each run is algo=sac with the networks of its paper, two layers of 256 without LayerNorm, and with the tau 0.01 and the
initial temperature 0.1 of DrQ (Kostrikov et al. 2020, arXiv 2004.13649). Batches are of 256, with one update per step.
After AT steps each, 10 episodes are evaluated without exploration. A step is one action, which is repeated for two
simulator steps. On the DeepMind Control Suite episodes have 500 steps and returns up to 1,000. On Meta-World it is 100
steps, and success at the last of them counts. The actor runs in the Python of examples/dmc or examples/metaworld, which
its first start installs (0.4 GB).

With --algorithm tdmpc2_tiny the first 2,500 steps are random, and as many updates follow them at once; plan=tdmpc2 does
the same.
"""

import argparse
import json
import resource
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tools.studies.runs import Cell, Cells, example, phase

AT = (5, 10, 20, 30, 40, 50)  # thousand steps before each evaluation
EPISODES = 10  # of an evaluation
EARLY = 100  # steps before the end of an episode at which a part of the practice ends, so that no further one begins
# SAC of three seeds after 50 thousand steps: results/sac/*.csv of github.com/nicklashansen/tdmpc2 (Hansen et al. 2024,
# arXiv 2310.16828), whose step 100000 counts simulator steps. Returns; success of Meta-World 2, an older version.
RETURNS = {
    "cartpole-balance": (999.4, 998.3, 998.5),
    "ball_in_cup-catch": (949.2, 955.0, 970.1),
    "cartpole-swingup": (844.8, 825.8, 834.3),
    "walker-walk": (917.8, 509.6, 697.1),
    "reacher-easy": (739.3, 68.4, 813.4),
}
SUCCESS = {
    "door-close-v3": 1.0, "coffee-button-v3": 1.0, "handle-press-side-v3": 1.0, "window-open-v3": 0.9,
    "plate-slide-v3": 0.83,
}  # fmt: skip
OLD = ("baseline", "practise", "evaluate")  # phases of the quickstart, which these replace
SAC = [
    "algo=sac", "plan=quickstart", *(f"~plan.phases.{name}" for name in OLD), "plan.sources.online.capacity=100000",
    "policy.hidden=[256,256]", "policy.layer_norm=false", "critic.hidden=[256,256]", "algo.tau=0.01",
    "algo.initial_temperature=0.1",
]  # fmt: skip
RANDOM = 2500  # steps, five episodes
TDMPC2 = [
    "algo=tdmpc2_tiny", "plan=tdmpc2", "~plan.phases.practise", "~plan.phases.evaluate",
    f"random_steps={RANDOM - EARLY}", "plan.sources.online.capacity=100000", "algo.discount=0.99",
    "algo.model.episodic=false",
]  # fmt: skip


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--tasks", nargs="+", choices=[*RETURNS, *SUCCESS], default=list(RETURNS)[:3])
    parser.add_argument("--algorithm", choices=["sac", "tdmpc2_tiny"], default="sac", help="(sac)")
    parser.add_argument("--at", type=float, nargs="+", default=AT, help="thousand steps before each evaluation")


def study(cells: Cells, options: argparse.Namespace) -> Iterator[str]:
    """Measure what is missing, then yield the lines of the report."""
    found = []
    for seed in options.seeds:
        for task in options.tasks:
            key = {"task": task, "at": list(options.at), "words": options.words, "seed": seed}
            key |= {} if options.algorithm == "sac" else {"algorithm": options.algorithm}
            found.append(cells.get(key, partial(learned, task, seed, options)))
    yield from table(found, options.at)


def learned(task: str, seed: int, options: argparse.Namespace) -> Mapping[str, Any]:
    """Return what SAC has learned after each part, and what it took; cpu_s: of all processes, evaluations included."""
    folder, began, used = options.out / f"{options.algorithm}-{task}-{seed}", time.monotonic(), seconds()
    said = words(task, seed, options.at, options.algorithm)
    example("metaworld" if task in SUCCESS else "dmc", folder, *said, *options.words)
    spent = {"wall_s": round(time.monotonic() - began), "cpu_s": round(seconds() - used)}
    return evaluated(folder) | spent


def words(task: str, seed: int, at: Sequence[float], algorithm: str = "sac") -> list[str]:
    """Return what is said to learner and actor."""
    first, begin = (0, 1000) if algorithm == "sac" else (RANDOM / 1000, RANDOM - EARLY)
    practice = phases(at, "{online: 1.0}", EPISODES, begin=f"online.steps >= {begin}", early=EARLY, first=first)
    return [f"task.env_id={task}", f"seed={seed}", *(SAC if algorithm == "sac" else TDMPC2), *practice]


def phases(
    at: Sequence[float], data: str, episodes: int, *, begin: str, early: int = 0, first: float = 0
) -> list[str]:  # fmt: skip
    """Return the words for practice on `data`, with an evaluation after each part of it.

    at: thousand steps of practice before each evaluation. begin: condition of the first update. early: steps by which
        each part ends before, because the actor goes on to the end of its episode. first: thousand steps before all.
    """
    found = []
    for part, (before, until) in enumerate(zip((first, *at), at, strict=False), 1):
        practice = (
            f"actors: {{mode: collect, into: online}}, updates: ${{updates}}, data: {data}, "
            "pace: {updates_per_step: '${utd}', tolerance: 64}, publish: {every_updates: 50}, "
            f"on_end: [checkpoint, publish], until: ['env_steps >= {round(1000 * (until - before)) - early}']"
        ) + f", start_when: '{begin}'" * (part == 1)
        found.append(phase(f"practise_{part}", practice))
        found.append(phase(f"evaluate_{part}", f"actors: {{mode: evaluate}}, until: ['episodes >= {episodes}']"))
    return found


def evaluated(folder: Path) -> dict[str, Any]:
    """Return what each evaluation of a finished run found: its mean return, and the steps and updates before it."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    found: dict[str, Any] = {"returns": [], "successes": [], "env_steps": [], "updates": []}
    for each in (line for line in lines if line["kind"] == "evaluation"):
        assert each["distinct_starts"] == EPISODES, f"{folder}: starts were repeated"
        known = [line for line in lines[: lines.index(each)] if line["kind"] == "episode"]
        last = [line["return"] for line in known if line["phase"] == each["phase"]][:EPISODES]
        found["returns"].append(round(statistics.fmean(last), 1))
        found["env_steps"].append(sum(line["steps"] for line in known if not line["phase"].startswith("evaluate")))
        found["successes"].append(each["successes"])
        found["updates"].append(each["updates"])
    return found


def seconds() -> float:
    """Return the CPU time of all finished child processes."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def table(cells: Sequence[Cell], at: Sequence[float]) -> Iterator[str]:
    steps = " | ".join(f"{each:g}" for each in at)
    yield f"| after thousand steps | {steps} | by seed | SAC, published, after 50 | share of it |"
    yield "|---" * (len(at) + 4) + "|"
    for task in dict.fromkeys(cell["task"] for cell in cells):
        is_judged = task in SUCCESS
        mine = {cell["seed"]: _curve(cell, is_judged) for cell in cells if cell["task"] == task}
        means = [statistics.fmean(each) for each in zip(*mine.values(), strict=True)]
        published, digits = (SUCCESS[task], 2) if is_judged else (statistics.fmean(RETURNS[task]), 0)
        seeds = ", ".join(f"{seed}: {curve[-1]:.{digits}f}" for seed, curve in sorted(mine.items()))
        values = " | ".join(f"{mean:.{digits}f}" for mean in means)
        name = f"`{task}`, {'success' if is_judged else 'return'}"
        yield f"| {name} | {values} | {seeds} | {published:.{digits}f} | {means[-1] / published:.2f} |"


def _curve(cell: Cell, is_judged: bool) -> list[float]:
    return [count / EPISODES for count in cell["successes"]] if is_judged else cell["returns"]
