"""Reads a pretrained model of lerobot, fits it to the robot's features, and makes lerobot's own objects of it."""

import dataclasses
import importlib
import json
import logging
from collections.abc import Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from serl_client.errors import ConfigError
from serl_client.spec import IMAGES, Spec
from serl_client.words import check_choice, nearest
from torch import Tensor

from serl_launcher.networks.hollow import apart, is_hollow
from serl_launcher.networks.vision import ALL

log = logging.getLogger(__name__)

TYPES = ("act", "diffusion", "smolvla", "pi0", "pi05")
STATE, ENVIRONMENT = "observation.state", "observation.environment_state"  # what of a robot's states they read
LONGEST = 300  # characters that are told of an error of lerobot
PRE = "policy_preprocessor.json"
OLD = ("normalize_inputs.", "normalize_targets.", "unnormalize_outputs.")  # statistics among weights, until 2025

Numbers = dict[str, dict[str, Tensor]]  # {feature: {statistic: its numbers}}


def described(
    folder: Path | None, kind: str, types: Sequence[str] = TYPES, *, where: str = "policy", what: str = "policy"
) -> tuple[str, dict[str, Any]]:
    """Return the type of a policy, or of `what` lerobot saves alike, and the fields of its config.json.

    kind: the type where there is no folder. types: those that are known. where: what names both in a config.
    """
    fields: dict[str, Any] = {}
    if folder is not None:
        if (folder / "adapter_config.json").is_file():
            raise ConfigError(
                f"{where}.path={folder} is an adapter (PEFT): merge it with lerobot, and give the whole {what}"
            )
        try:
            fields = json.loads((folder / "config.json").read_text())
            kind = fields.pop("type")
        except (OSError, ValueError, LookupError, AttributeError, TypeError) as error:
            raise ConfigError(
                f"{where}.path={folder} is no {what} of lerobot ({error}): give the folder `pretrained_model` of a "
                "checkpoint, with its config.json"
            ) from None
    check_choice(kind, types, what, f"{where}.path={folder}" if folder else f"{where}.type")
    return kind, fields


def named(spec: Spec, cameras: Sequence[str], rename: Mapping[str, str]) -> dict[str, str]:
    """Return {the robot's name: the policy's} of what is offered to the policy."""
    for name in rename:
        if name not in spec.observation:
            near = nearest(name, spec.observation)
            raise ConfigError(f"policy.rename: the robot has no {name}: use its names; {near}")
    wanted = set(spec.observation) if ALL in cameras else {IMAGES + name for name in cameras}
    if lacking := sorted(wanted - set(spec.observation)):
        near = nearest(lacking[0], spec.observation)
        raise ConfigError(f"policy.cameras: the robot has no {lacking[0]}: use its names; {near}")
    names = {ours: rename.get(ours, ours) for ours in spec.observation}
    return {ours: theirs for ours, theirs in names.items() if not ours.startswith(IMAGES) or ours in wanted}


def features(spec: Spec, names: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Return input_features and output_features of lerobot's config, as plain data."""
    found: dict[str, Any] = {}
    for ours, theirs in names.items():
        shape = list(spec.observation[ours].shape)
        if theirs.startswith(IMAGES):
            found[theirs] = {"type": "VISUAL", "shape": [shape[2], *shape[:2]]}
        elif theirs in (STATE, ENVIRONMENT):
            found[theirs] = {"type": "STATE" if theirs == STATE else "ENV", "shape": shape}
        else:
            log.warning("the policy does not read %s: lerobot's read %s, %s and images", ours, STATE, ENVIRONMENT)
    action = {"type": "ACTION", "shape": list(spec.action.shape)}
    return {"input_features": found, "output_features": {"action": action}}


def fitting(fields: Mapping[str, Any], robot: dict[str, dict[str, Any]], kind: str) -> dict[str, dict[str, Any]]:
    """Return the features of the folder's policy, as this robot has them. Raises ConfigError if it lacks one."""
    resizes, chosen = "max_state_dim" in fields, dict[str, Any]()
    for name, about in (fields.get("input_features") or robot["input_features"]).items():
        here = robot["input_features"].get(name)
        if here is None and "empty_camera" in name:
            continue
        if here is None:
            there = sorted(robot["input_features"])
            raise ConfigError(
                f"policy.path: this {kind} reads {name}, and the robot has {', '.join(there)}: say which one it is, as "
                f"in 'policy.rename={{{there[0] if there else 'observation.state'}: {name}}}'"
            )
        if not resizes and list(about["shape"]) != here["shape"]:
            raise ConfigError(
                f"policy.path: this {kind} reads {name} as {about['shape']}, and the robot has {here['shape']}: take "
                "another policy, or for an image say task.env.cameras.NAME.width and height, and neither crop nor size"
            )
        chosen[name] = here
    action, own = (fields.get("output_features") or {}).get("action"), robot["output_features"]["action"]
    if action is not None and not resizes and list(action["shape"]) != own["shape"]:
        raise ConfigError(
            f"policy.path: this {kind} gives {action['shape'][0]} numbers for an action, and the robot takes "
            f"{own['shape'][0]}: take a policy of this robot"
        )
    return {"input_features": chosen, "output_features": robot["output_features"]}


def config(kind: str, fields: Mapping[str, Any], options: Mapping[str, Any], features: Mapping[str, Any]) -> Any:
    """Make lerobot's config. fields: those of the folder, empty without one. options: what is to differ."""
    policies, draccus = importlib.import_module("lerobot.configs.policies"), importlib.import_module("draccus")
    importlib.import_module("lerobot.policies.factory")  # registers the types
    kind_of = policies.PreTrainedConfig.get_choice_class(kind)
    names = {field.name for field in dataclasses.fields(kind_of)}
    if strange := sorted(options.keys() - names):
        near = nearest(strange[0], names)
        raise ConfigError(f"policy.options: {kind} has no field {strange[0]!r}: use those of lerobot; {near}")
    if strange := sorted(fields.keys() - names):
        log.warning("config.json has %s, which this lerobot does not know: left out", ", ".join(strange))
    known = {name: value for name, value in fields.items() if name in names}
    known |= {**options, **features, "device": "cpu", "push_to_hub": False}
    if (fields or is_hollow()) and "pretrained_backbone_weights" in names:
        known["pretrained_backbone_weights"] = None  # the folder has them
    try:
        return draccus.decode(kind_of, known)
    except Exception as error:  # draccus has many of its own
        raise ConfigError(f"policy.options: {_sentence(error)}: give what lerobot's config takes") from None


def made(kind: str, config: Any) -> Any:
    """Build lerobot's policy."""
    if torch.empty(0).is_meta:  # else pi0 goes from there to its config's device
        config = copy(config)
        vars(config)["device"] = "meta"
    try:
        policy = importlib.import_module("lerobot.policies.factory").get_policy_class(kind)(config)
    except (AttributeError, ImportError, OSError, ValueError, NotImplementedError) as error:
        cure = ": install what is missing with `. examples/install.sh --extra vla`, or bring the files that it names"
        if isinstance(error, OSError) and getattr(config, "pretrained_backbone_weights", None):
            cure = ": without a network say 'policy.options={pretrained_backbone_weights: null}'"
        elif not config.image_features and kind in ("act", "diffusion"):
            cure = f": say policy.cameras=[all], or 'policy.rename={{{STATE}: {ENVIRONMENT}}}'"
        raise ConfigError(f"lerobot cannot build {kind}: {_sentence(error)}{cure}") from None
    trained = {name: weight for name, weight in policy.named_parameters() if weight.requires_grad}
    if low := [name for name, weight in trained.items() if weight.dtype.itemsize < 4]:
        raise ConfigError(f"{low[0]} would be trained in 16 bits: say 'policy.options={{dtype: float32}}'")
    return policy


def processors(
    config: Any, folder: Path | None, tokenizer: str | None
) -> tuple[Any, Any, dict[str, dict[str, Tensor]]]:
    """Return lerobot's pre- and postprocessor, and the statistics that they bring."""
    factory = importlib.import_module("lerobot.policies.factory")
    words: dict[str, Any] = {}
    if folder is not None and (folder / PRE).is_file():
        device, reads = {"device_processor": {"device": "cpu"}}, dict[str, Any]()
        if tokenizer is not None:
            reads = {"tokenizer_processor": {"tokenizer_name": str(Path(tokenizer).expanduser())}}
        words = {
            "pretrained_path": str(folder), "preprocessor_overrides": {**device, **reads},
            "postprocessor_overrides": device,
        }  # fmt: skip
    elif tokenizer is not None:
        raise ConfigError("policy.tokenizer goes with a policy.path that has processors: leave it out")
    try:
        pipelines = apart(factory.make_pre_post_processors)(config, **words)
    except (ImportError, OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"lerobot cannot make the processors of {config.type}: {_sentence(error)}: bring the files that they name, "
            "or say policy.tokenizer=FOLDER"
        ) from None
    found: Numbers = {}
    for step in (step for pipeline in pipelines for step in pipeline.steps):
        found |= getattr(step, "_tensor_stats", {})
        if is_hollow() and hasattr(step, "_tensor_stats"):  # copies are made of all that is there
            step.stats = step._tensor_stats = {}
    if is_hollow():
        found = {name: {kind: torch.empty(each.shape) for kind, each in own.items()} for name, own in found.items()}
    return *pipelines, found


def load(policy: Any, folder: Path) -> None:
    """Load the folder's weights, all of them. Raises ConfigError if one is missing or not known."""
    file = folder / "model.safetensors"
    try:
        if hasattr(policy, "_fix_pytorch_state_dict_keys"):  # pi0 and pi0.5, whose files may have openpi's names
            fixed = policy._fix_pytorch_state_dict_keys(safetensors.torch.load_file(file), policy.config)
            named = {name if name.startswith("model.") else f"model.{name}": value for name, value in fixed.items()}
            missing, unknown = policy.load_state_dict(named, strict=False)
        else:
            missing, unknown = safetensors.torch.load_model(policy, file, strict=False)
    except (OSError, RuntimeError, safetensors.SafetensorError) as error:
        raise ConfigError(f"policy.path: {file}: {_sentence(error)}: give the folder of a whole checkpoint") from None
    unknown = [name for name in unknown if not name.startswith(OLD)]
    for kind, names in (("lacks", missing), ("has", unknown)):
        if names:
            raise ConfigError(
                f"policy.path: {file} {kind} {min(names)}, unlike the policy of its config.json: bring both from one "
                "checkpoint"
            )


def statistics_among(folder: Path, config: Any) -> Numbers:
    """Read the statistics that lerobot kept among the weights until 2025."""
    found: Numbers = {}
    features = [*config.input_features, *config.output_features]
    with safetensors.safe_open(folder / "model.safetensors", "pt") as file:
        for name in (name for name in file.keys() if name.startswith(OLD)):  # noqa: SIM118 - it is no dict
            _, buffer, kind = name.split(".")
            for feature in features:
                if buffer == "buffer_" + feature.replace(".", "_"):
                    found.setdefault(feature, {})[kind] = file.get_tensor(name)
    return found


def _sentence(error: BaseException) -> str:
    """Say an error of lerobot in one line."""
    text = " ".join(str(error).split())
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} ..."
