"""Tasks of studies: ours, and others' with their own scripts as operators."""

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.studies import runs

TASKS = {  # name: (the example whose Python its actor has; empty: this one; the words of the task)
    "sim_arm": ("", []),
    "so101": ("so101_sim", []),
    **{
        name: ("metaworld", ["task=metaworld_expert", f"task.env_id={name}-v3", *more])
        for name, more in {
            "stick-pull": [], "peg-insert-side": [], "pick-place-wall": ["task.env.script.noise=0.1"], "assembly": [],
        }.items()
    },
}  # fmt: skip
GOOD = "+plan.sources.good={of: [demo], keep: [successful]}"  # demonstrations that succeeded


def demonstrated(cell: Namespace) -> Path:
    """Return the run that holds a cell's demonstrations: so many have succeeded."""
    enough = f'plan.phases.demonstrate.until=["good.episodes >= {cell.demonstrations}"]'
    return finished(cell, "demonstrations", ["plan=collect", GOOD, enough])


def finished(cell: Namespace, name: str, words: Sequence[str], **options: Any) -> Path:
    """Return the run of that name in the cell's folder, on its task."""
    example, task = TASKS[cell.task]
    folder = cell.folder / name.replace(" ", "-")
    return runs.finished(folder, *task, f"seed={cell.seed}", *words, *cell.words, example=example, **options)
