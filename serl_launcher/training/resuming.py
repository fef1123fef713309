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
from serl_launcher.training.plan_state import check_unedited

FORMAT = 4  # of the state; 4: tensors lie in a file of their own
MANIFEST = "manifest.json"
DAMAGE = (AttributeError, KeyError, OSError, RecursionError, TypeError, ValueError)  # what a damaged manifest sets off


def checkpoints(folder: Path) -> list[Path]:
    """Return the folders of a run's checkpoints, the newest last."""
    return sorted(path for path in folder.glob("[0-9]*") if path.name.isdecimal())


def algorithm_of(config: DictConfig) -> dict[str, Any]:
    """Return what must be equal when a run resumes, as plain data."""
    return {"algo": OmegaConf.to_container(config.algo, resolve=True)}


def check_resumable(folder: Path, config: DictConfig, plan: Plan) -> None:
    """Raise ConfigError if the newest checkpoint in `folder` was made with another algorithm, or if the phase that it
    stands in was edited. What does not read is left to the trainer, which looks for the newest whole one."""
    for path in reversed(checkpoints(folder)):
        with suppress(*DAMAGE):
            manifest = json.loads((path / MANIFEST).read_text())
            fits = check_fit(path, manifest, algorithm_of(config), lambda: changeable(config, "algo"))
            at, phases = manifest.get("plan"), list(plan.only(config.phase).phases)
            if at and fits and at["phases"] == phases:
                check_unedited(plan, at["phase"], at["said"], accept=config.accept_plan)
            return


def check_fit(
    path: Path, manifest: Mapping[str, Any], config: Mapping[str, Any], changes: Callable[[], Collection[str]],
    spec: Spec | None = None,
) -> bool:  # fmt: skip
    """Return whether a checkpoint is of this config; False only for one that had learned nothing.

    changes: returns what may differ in it, which takes torch to find out. spec: the robot's; None: not known yet.
    Raises ConfigError for a checkpoint of another version of this program, and for one that does not fit.
    """
    if manifest.get("format") != FORMAT:
        raise ConfigError(f"{path} was made by another version of this program: begin anew with another run_dir")
    other = spec.difference(Spec.from_dict(manifest["spec"])) if spec else ""
    said = json.loads(json.dumps(config)), renamed(manifest["config"])
    if differs := difference(*said):
        free = changes()
        differs = difference(*(_without(each, free) for each in said))
    for kind, found in (("robot (its Spec)", other), ("algorithm", differs)):
        if found and (other or manifest["updates"]):
            raise ConfigError(
                f"{path} was made with another {kind}. This run's value, then the checkpoint's: {found}. "
                "Ask for what the checkpoint has, or begin anew with another run_dir"
            )
    return not differs


def _without(tree: Any, names: Collection[str], where: str = "") -> Any:
    """Return a tree of plain data without the entries of these dotted names."""
    if not isinstance(tree, Mapping):
        return tree
    kept = {key: (f"{where}{key}", value) for key, value in tree.items() if f"{where}{key}" not in names}
    return {key: _without(value, names, f"{name}.") for key, (name, value) in kept.items()}
