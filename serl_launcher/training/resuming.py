"""Checks, without torch, that the newest checkpoint fits config and plan, before a start changes anything."""

import json
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from serl_client.errors import ConfigError
from serl_client.spec import Spec, difference

from serl_launcher.config import changeable, renamed
from serl_launcher.training.plan import Plan
from serl_launcher.training.plan_edits import check_edits

FORMAT = 4  # of the state; 4: tensors lie in a file of their own
MANIFEST = "manifest.json"
ADDED = ("batch_size",)  # checkpoints of earlier versions do not tell it
DAMAGE = (AttributeError, KeyError, OSError, RecursionError, TypeError, ValueError)  # what a damaged manifest sets off


def checkpoints(folder: Path) -> list[Path]:
    """Return the folders of a run's checkpoints, the newest last."""
    return sorted(path for path in folder.glob("[0-9]*") if path.name.isdecimal())


def kept_settings(config: DictConfig) -> dict[str, Any]:
    """Return the settings that a checkpoint keeps, as plain data."""
    return {"algo": OmegaConf.to_container(config.algo, resolve=True), "batch_size": config.batch_size}


def free_settings(config: DictConfig) -> set[str]:
    """Return the full names of those that may change when a run resumes. This imports torch."""
    return {"batch_size", *changeable(config, "algo")}


def check_resumable(folder: Path, config: DictConfig, plan: Plan) -> None:
    """Raise ConfigError if the newest checkpoint in `folder` was made with another algorithm, or if the phase that it
    stands in was edited. What does not read is left to the trainer, which looks for the newest whole one."""
    for path in reversed(checkpoints(folder)):
        with suppress(*DAMAGE):
            manifest = json.loads((path / MANIFEST).read_text())
            fits, _ = check_fit(path, manifest, kept_settings(config), lambda: free_settings(config))
            at, phases = manifest.get("plan"), plan.only(config.phase).outline
            if at and fits and at["phases"] == phases:
                check_edits(plan, at["phase"], at["said"], accept=config.accept_plan)
            return


def check_fit(
    path: Path, manifest: Mapping[str, Any], settings: Mapping[str, Any], may_change: Callable[[], Collection[str]],
    spec: Spec | None = None,
) -> tuple[bool, str]:  # fmt: skip
    """Return whether a checkpoint is of these settings, False only for one that had learned nothing; and what of them
    has changed that may, by their full names. spec: the robot's; None: not known yet.

    Raises ConfigError for a checkpoint of another version of this program, and for one that does not fit.
    """
    if manifest.get("format") != FORMAT:
        raise ConfigError(f"{path} was made by another version of this program: begin anew with another run_dir")
    other = spec.difference(Spec.from_dict(manifest["spec"])) if spec else ""
    now, then = json.loads(json.dumps(settings)), renamed(manifest["config"])
    free = may_change() if difference(now, then, ADDED) else ()
    differs, changed = (difference(_part(now, free, among), _part(then, free, among), ADDED) for among in (False, True))
    for kind, found in (("robot (its Spec)", other), ("algorithm", differs)):
        if found and (other or manifest["updates"]):
            raise ConfigError(
                f"{path} was made with another {kind}. This run's value, then the checkpoint's: {found}. "
                "Ask for what the checkpoint has, or begin anew with another run_dir"
            )
    return not differs, changed


def _part(tree: Any, names: Collection[str], among: bool, where: str = "") -> Any:
    """Return a tree of plain data with the entries of these dotted names alone, or (among: False) without them."""
    if not isinstance(tree, Mapping):
        return {} if among else tree
    found = {}
    for key, value in tree.items():
        if (name := f"{where}{key}") not in names:
            found[key] = _part(value, names, among, f"{name}.")
        elif among:
            found[key] = value
    return found
