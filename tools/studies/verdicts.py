"""Does RLPD learn from a person's verdicts alone what it learns from a judge? On the simulated arm, by seed.

    judge      the scene gives reward 1 and ends the episode when the block is up
    operator   the judge is silent; a scripted operator says success when the block is up, and failure after an episode
               whose time ran out
Both have the same plan, the same number of demonstrations, updates and steps, and evaluations on 50 distinct starts.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from serl_launcher.store.index import Index
from serl_launcher.utils.report import read, wilson
from tools.studies.runs import EVALUATE, EVALUATED, Cell, Cells, phase, run, successes

WHO = ("judge", "operator")
UPDATES = (3000, 3000, 6000)  # before each evaluation; two for each step of the arm
OLD = ("baseline", "practise", "evaluate")  # phases of the quickstart, which these replace


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])


def study(cells: Cells, options: argparse.Namespace) -> Iterator[str]:
    """Measure what is missing, then yield the lines of the report."""

    def measure(seed: int, who: str) -> Mapping[str, Any]:
        folder = options.out / f"{who}-{seed}"
        run(folder, *words(seed), *options.words, actor=[f"seed={seed}", f"task.env.verdict_by={who}"])
        return measured(folder)

    for seed in options.seeds:
        for who in WHO:
            cells.get({"seed": seed, "verdict_by": who}, lambda seed=seed, who=who: measure(seed, who))
    yield from table(cells.all)


def words(seed: int) -> list[str]:
    """What is said to the learner: the quickstart's demonstrations, then practice with evaluations between."""
    found = [f"seed={seed}", "plan=quickstart", *(f"~plan.phases.{name}" for name in OLD)]
    for part, updates in enumerate(UPDATES, 1):
        practice = (
            "actors: {mode: collect, into: online}, updates: [update_critic, update], data: {online: 0.5, demo: 0.5}, "
            "pace: {updates_per_step: 2, tolerance: 64}, publish: {every_updates: 50}, on_end: [checkpoint, publish], "
            f"until: ['updates >= {updates}']" + ", start_when: 'online.steps >= 200'" * (part == 1)
        )
        found += [phase(f"practise_{part}", practice), phase(f"evaluate_{part}", EVALUATE)]
    return found


def measured(folder: Path) -> dict[str, Any]:
    """What a finished run says of itself. `stored_reward`: the sum of all rewards as they were recorded."""
    with closing(Index(folder / "store" / "index.sqlite")) as index:
        episodes = index.latest(1_000_000)
    summary = read(folder / "summary.json")
    return {
        "successes": successes(folder),
        "env_steps": summary["env_steps"], "updates": summary["updates"], "wall_s": round(summary["wall_s"]),
        "stored_reward": sum(episode.reward for episode in episodes),
        "verdicts": sum(episode.judged_by == "operator" for episode in episodes), "episodes": len(episodes),
    }  # fmt: skip


def table(cells: Sequence[Cell]) -> Iterator[str]:
    seeds = sorted({cell["seed"] for cell in cells})
    steps = [f"after {sum(UPDATES[: part + 1]):,}" for part in range(len(UPDATES))]
    names = " / ".join(map(str, seeds))
    yield f"| successes of {EVALUATED}, seeds {names} | {' | '.join(steps)} updates | at the end |"
    yield "|---" * (len(UPDATES) + 2) + "|"
    for who in WHO:
        mine = sorted((cell for cell in cells if cell["verdict_by"] == who), key=lambda cell: cell["seed"])
        parts = [" / ".join(str(cell["successes"][part]) for cell in mine) for part in range(len(UPDATES))]
        count, total = sum(cell["successes"][-1] for cell in mine), EVALUATED * len(mine)
        low, high = wilson(count, total) if total else (0.0, 1.0)
        yield f"| {who} | {' | '.join(parts)} | {count} of {total} ({low:.0%} to {high:.0%}) |"
