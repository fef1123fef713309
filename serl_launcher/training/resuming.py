"""Checks, without torch, that the newest checkpoint fits config and plan, before a start changes anything.

It is the run's own, which it resumes, or that of another run, with which it begins (`from`).
"""

import json
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from serl_client.errors import ConfigError
from serl_client.spec import Spec, difference

from serl_launcher.config import changeable, renamed, saved
from serl_launcher.sharing import denied
from serl_launcher.training.plan import Plan
from serl_launcher.training.plan_edits import check_edits

FORMAT = 4  # of the state; 4: tensors lie in a file of their own
MANIFEST = "manifest.json"
ADDED = ("batch_size", "policy.resize")  # checkpoints of earlier versions do not tell these
UNTOLD = (  # options by which nothing changes, as it was before there were these: earlier checkpoints do not tell them
    ("relative", []),
    ("times", "beta"),
    ("normalize_values", True),
    ("ema_decay", 0.0),
)
DAMAGE = (AttributeError, KeyError, OSError, RecursionError, TypeError, ValueError)  # what a damaged manifest sets off


def checkpoints(folder: Path) -> list[Path]:
    """Return the folders of a run's checkpoints, the newest last."""
    return sorted((path for path in folder.glob("[0-9]*") if path.name.isdecimal()), key=lambda path: int(path.name))


def kept_settings(config: DictConfig) -> dict[str, Any]:
    """Return the settings that a checkpoint keeps, as plain data."""
    return {"algo": OmegaConf.to_container(config.algo, resolve=True), "batch_size": config.batch_size}


def free_settings(config: DictConfig) -> set[str]:
    """Return the full names of those that may change when a run resumes. This imports torch."""
    return {"batch_size", *changeable(config, "algo")}


def check_resumable(folder: Path, config: DictConfig, plan: Plan) -> bool:
    """Return whether a run goes on with what its newest checkpoint in `folder` has; False also if there is none.

    Raises ConfigError if it was made with another algorithm, or if the phase that it stands in was edited. What does
    not read is left to the trainer, which looks for the newest whole one.
    """
    plan = plan.only(config.phase)
    for path in reversed(checkpoints(folder)):
        with suppress(*DAMAGE):
            manifest = json.loads((path / MANIFEST).read_text())
            fits, _ = check_fit(path, manifest, kept_settings(config), lambda: free_settings(config))
            at = manifest.get("plan")
            if at and fits and at["phases"] == plan.outline:
                check_edits(plan, at["phase"], at["said"], accept=config.accept_plan)
            return fits
    return False


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
    now, then, free = _settings(settings, manifest, may_change)
    differs, changed = (difference(_part(now, free, among), _part(then, free, among), ADDED) for among in (False, True))
    algorithm = "another algorithm" if "algo._target_:" in differs else "other settings of this algorithm"
    for kind, found in (("another robot (its Spec)", other), (algorithm, differs)):
        if found and (other or manifest["updates"]):
            is_taken = not other and not _of_policies(now, then, free)
            weights = f"another run with its weights, by from={path.parent.parent} run_dir=OTHER"
            raise ConfigError(
                f"{path} was made with {kind}. This run's value, then the checkpoint's: {found}. "
                f"Ask for what the checkpoint has, or begin {weights if is_taken else 'anew with another run_dir'}"
            )
    return not differs, changed


# -- the checkpoint of another run
def origin_of(config: DictConfig) -> str | None:
    """Return the absolute path of what a run begins `from`: what a person says, else what it began with; None: nothing.

    Raises ConfigError for the run itself, and for a run that has begun otherwise.
    """
    run_dir = Path(str(config.run_dir)).resolve()
    before = OmegaConf.select(saved(run_dir), "from")
    if not config["from"]:
        return before
    said = Path(str(config["from"])).expanduser().resolve()
    if run_dir in (said, *said.parents):
        raise ConfigError(f"from={said} is this run itself, which resumes anyway: leave it out, or say another run_dir")
    if str(said) != before and checkpoints(run_dir / "checkpoints"):
        begun = f"from {before}" if before else "without other weights"
        raise ConfigError(f"from={said}: {run_dir} has begun {begun}: leave it out, or say another run_dir")
    return str(said)


def check_origin(config: DictConfig) -> None:
    """Raise ConfigError if the newest checkpoint with which a run is to begin cannot be taken, as its manifest says.

    What does not read is left to the trainer, which looks for the newest whole one.
    """
    for path in reversed(checkpoints_at(config["from"])):
        with suppress(*DAMAGE):
            manifest = json.loads((path / MANIFEST).read_text())
            check_taken(path, manifest, kept_settings(config), lambda: free_settings(config))
            return


def checkpoints_at(origin: str) -> list[Path]:
    """Return the checkpoints of a run's folder, the newest last, or the one whose folder it is.

    Raises ConfigError if there is none.
    """
    try:
        found = [Path(origin)] if (Path(origin) / MANIFEST).exists() else checkpoints(Path(origin) / "checkpoints")
    except PermissionError as error:
        raise ConfigError(f"from={origin}: {denied(error)}") from None
    if not found:
        raise ConfigError(f"from={origin} has no checkpoint: say the folder of a run that has trained")
    return found


def check_taken(
    path: Path, manifest: Mapping[str, Any], settings: Mapping[str, Any], may_change: Callable[[], Collection[str]],
    spec: Spec | None = None,
) -> bool:  # fmt: skip
    """Return whether a run of these settings takes all networks of another run's checkpoint, because the algorithm is
    the same; False: the policy alone. The arguments are those of `check_fit`.

    Raises ConfigError for a checkpoint of another version of this program, or without an update; for another robot, of
    which it names columns, units and bounds that differ; and for another policy.
    """
    if manifest.get("format") != FORMAT:
        raise ConfigError(f"from={path} was made by another version of this program: begin without it")
    if not manifest["updates"]:
        raise ConfigError(f"from={path} has learned nothing yet: say a run that has trained, or begin without it")
    theirs = Spec.from_dict(manifest["spec"]) if spec else None
    if spec and theirs and (other := replace(spec, extras={}).difference(replace(theirs, extras={}))):
        raise ConfigError(
            f"from={path} is of another robot. This run's value, then the checkpoint's: {other}. Begin without it, or "
            "with the task that it was made with"
        )
    now, then, free = _settings(settings, manifest, may_change)
    if not difference(_part(now, free, False), _part(then, free, False), ADDED):
        return True
    if differs := _of_policies(now, then, free):
        words = ""
        with suppress(ConfigError, TypeError):  # of a run whose config does not read
            words = " ".join(OmegaConf.select(saved(path.parent.parent), "remembered", default=[]))
        raise ConfigError(
            f"from={path} has another policy. This run's value, then the checkpoint's: {differs}. Ask for what the "
            "checkpoint has" + f"; its run: {words}" * bool(words)
        )
    return False


# -- settings
def _settings(
    settings: Mapping[str, Any], manifest: Mapping[str, Any], may_change: Callable[[], Collection[str]]
) -> tuple[dict[str, Any], dict[str, Any], Collection[str]]:
    """Return this run's settings and the checkpoint's, as trees, and the names of those that may differ."""
    now, then = _told(json.loads(json.dumps(settings))), _told(renamed(manifest["config"]))
    return now, then, may_change() if difference(now, then, ADDED) else ()


def _told(tree: Any) -> Any:
    if not isinstance(tree, Mapping):
        return tree
    return {key: _told(value) for key, value in tree.items() if (key, value) not in UNTOLD}


def _of_policies(now: Mapping[str, Any], then: Mapping[str, Any], free: Collection[str]) -> str:
    """Return what differs between the policies of two algorithms; empty if one may act with the other's weights.

    Of an algorithm without a policy of that name all differs.
    """
    algos = [tree.get("algo") for tree in (now, then)]
    mine, theirs = ({"algo": {"policy": algo.get("policy") if isinstance(algo, dict) else None}} for algo in algos)
    if not (mine["algo"]["policy"] and theirs["algo"]["policy"]):
        mine, theirs = now, then
    said = difference(_part(mine, free, False), _part(theirs, free, False), ADDED)
    kinds = [each for each in said.split("; ") if each.startswith(("algo._target_", "algo.policy._target_"))]
    return "; ".join(kinds) or said


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
