"""Heads that clone the same demonstrations."""

from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from tools.studies import runs
from tools.studies.cells import Study

HEADS = sorted(file.stem for file in (runs.ROOT / "config/head").glob("*.yaml"))


def heads(cell: Namespace) -> Mapping[str, Any]:
    """Which head learns what from the same demonstrations? (docs/evidence/heads.md, docs/guides/robomimic.md)

    heads   on sim_arm, where every demonstration does the same thing, with noise, and on a wall with two gaps, where
            each takes one at random, so that the mean of two good ways hits the wall
    lift    on robosuite's Lift, from the state, with a scripted expert. The actor runs in the Python of
            examples/robomimic, which its first start installs (1.1 GB)
    Of each seed the heads clone the same --demonstrations with as many --updates, then act on --starts distinct starts.
    """
    task = vars(cell).get("task")
    side: dict[str, Any] = {"task": task} if task else {"example": "robomimic"}
    begun = cell.folder / (task or "lift") / "demonstrations"
    runs.demonstrations(begun, cell.seed, cell.demonstrations, **side)
    words = ["plan=sft", "policy=chunk", f"head={cell.head}", f"network={cell.network}", f"seed={cell.seed}"]
    words += [f"plan.phases.clone.until=['updates >= {cell.updates}']", f"eval_episodes={cell.starts}"]
    words += [*["envs=2"] * (not task), *cell.words]
    made = runs.finished(begun.with_name(cell.head), *words, of=begun, forgets=True, **side)
    return {"successes": runs.successes(made, cell.starts)[-1]}


SETTINGS = {"network": "mlp", "demonstrations": 20, "updates": 1500, "starts": 50}
BOTH = {f"{task}/{head}": {"task": task, "head": head} for task in ("sim_arm", "wall") for head in HEADS}
STUDIES = {
    "heads": Study(heads, SETTINGS, BOTH),
    "lift": Study(heads, {**SETTINGS, "demonstrations": 100}, {head: {"head": head} for head in ("regression", "mip")}),
}
