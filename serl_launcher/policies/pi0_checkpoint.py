"""Loads PI0 checkpoints of lerobot and openpi: a table from their tensor names to ours.

lerobot and openpi's PyTorch conversion share one layout. lerobot puts `model.` before every name, and its port of
January 2025 names the backbone's parts differently. In both, the word embeddings are tied to the language head and may
be stored under its name.
"""

import json
import logging
import re
from collections.abc import Sequence
from pathlib import Path

import safetensors.torch
import torch
from serl_client.errors import ConfigError
from torch import Tensor, nn

log = logging.getLogger(__name__)

BACKBONE, EXPERT = r"paligemma_with_expert\.paligemma\.", r"paligemma_with_expert\.gemma_expert\."
TABLE = (  # (their name, ours)
    (BACKBONE + r"(model\.)?vision_tower\.(vision_model\.)?", "vision."),
    (BACKBONE + r"(model\.)?multi_modal_projector\.linear\.", "image_projection."),
    (BACKBONE + r"lm_head\.weight$", "language.embed_tokens.weight"),
    (BACKBONE + r"language_model\.lm_head\.weight$", "language.embed_tokens.weight"),
    (BACKBONE + r"model\.language_model\.", "language."),
    (BACKBONE + r"language_model\.model\.", "language."),
    (EXPERT + r"model\.", "expert."),
    (r"state_proj\.", "state_projection."),
    (r"action_in_proj\.", "action_in."),
    (r"action_out_proj\.", "action_out."),
    (r"action_time_mlp_in\.", "action_time_in."),
    (r"action_time_mlp_out\.", "action_time_out."),
)
UNUSED = (  # tensors that are not needed: the expert's word embeddings, the last layer beyond its keys and values, and
    # the statistics of other robots
    r"expert\.embed_tokens\.", EXPERT + r"lm_head\.", r"language\.norm\.", r"vision\.head\.",
    r"(un)?normalize_(inputs|targets|outputs)\.",
    r"language\.layers\.{last}\.(mlp|post_attention_layernorm|self_attn\.[qo]_proj)\.",
)  # fmt: skip

NAMES = {  # what statistics are called: lerobot's processors, lerobot until 2025, openpi
    "state": r"(observation\.state|normalize_inputs\.buffer_observation_state|state)",
    "action": r"(action|unnormalize_outputs\.buffer_action|actions)",
}


def load_pretrained(policy: nn.Module, weights: str) -> None:
    """Load a checkpoint into the policy.

    weights: path of a `model.safetensors`, or of its folder.
    Raises ConfigError, and changes nothing, if the file does not exist, if a tensor of the policy is missing or has
    another shape, or if the file has unknown tensors.
    """
    file = Path(weights).expanduser()
    file = file / "model.safetensors" if file.is_dir() else file
    if not file.is_file():
        raise ConfigError(f"policy.weights={weights}: no such file; give a pi0 model.safetensors, or the folder of one")
    own = dict(policy.named_parameters())
    last = max(int(name.split(".")[2]) for name in own if name.startswith("language.layers."))
    unused = [pattern.replace("{last}", str(last)) for pattern in UNUSED]
    found = {name: value for name, value in _read(file).items() if not any(re.match(part, name) for part in unused)}
    missing = sorted(own.keys() - found.keys() - {"head.log_noise_level"})
    unknown = sorted(found.keys() - own.keys())
    if not any(name.startswith("vision.") for name in own):  # a robot without cameras
        unknown = [name for name in unknown if not name.startswith(("vision.", "image_projection."))]
    shapes = [
        f"{name}: {tuple(found[name].shape)} there, {tuple(own[name].shape)} here"
        for name in sorted(own.keys() & found.keys()) if own[name].shape != found[name].shape
    ]  # fmt: skip
    if missing or unknown or shapes:
        kinds = {"missing": missing, "unknown": unknown, "of another shape": shapes}
        text = "; ".join(f"{kind}: {_some(names)}" for kind, names in kinds.items() if names)
        raise ConfigError(f"{file} does not fit this policy ({text}): choose the policy's sizes as in the checkpoint")
    with torch.no_grad():
        for name in own.keys() & found.keys():
            own[name].copy_(found[name])
    log.info("policy.weights: %d tensors loaded from %s", len(found), file)


def is_lerobots(weights: str) -> bool:
    """Return whether a checkpoint has lerobot's layout, which puts `model.` before every name; openpi's has not."""
    path = Path(weights).expanduser()
    with safetensors.safe_open(path / "model.safetensors" if path.is_dir() else path, "pt") as tensors:
        return any(name.startswith("model.") for name in tensors.keys())  # noqa: SIM118 - no dict


def statistics_at(weights: str) -> dict[str, dict[str, Tensor]]:
    """Read {state, action: {mean, std: [n]}} with which a checkpoint was trained; what it does not bring is left out.

    lerobot keeps them beside its processors, until 2025 among the weights; openpi in assets/<dataset>/norm_stats.json.
    Raises ConfigError if openpi's has several datasets.
    """
    folder = Path(weights).expanduser()
    folder = folder if folder.is_dir() else folder.parent
    found: dict[str, dict[str, Tensor]] = {}
    for name, value in _numbers(folder).items():
        for ours, theirs in NAMES.items():
            for kind in ("mean", "std"):
                if re.fullmatch(rf"{theirs}\.{kind}", name) and value.isfinite().all():
                    found.setdefault(ours, {})[kind] = value.float().flatten()
    return {name: kinds for name, kinds in found.items() if len(kinds) == 2}


def relative_at(weights: str, names: Sequence[str]) -> list[str] | None:
    """Return which entries of the action a checkpoint of lerobot has learned relative to the state.

    names: of the robot's action. None: it is not lerobot's, and does not say.
    """
    folder = Path(weights).expanduser()
    file = (folder if folder.is_dir() else folder.parent) / "config.json"
    fields = json.loads(file.read_text()) if file.is_file() else {}
    if "type" not in fields:
        return None
    theirs = fields.get("action_feature_names")
    excluded = [str(part).lower() for part in fields.get("relative_exclude_joints") or [] if theirs]
    return [
        name for name, their in zip(names, theirs or names, strict=False)
        if fields.get("use_relative_actions") and not any(part in their.lower() for part in excluded)
    ]  # fmt: skip


def _numbers(folder: Path) -> dict[str, Tensor]:
    """Return all statistics that are there, by the names that they have."""
    found: dict[str, Tensor] = {}
    for file in (*folder.glob("*normalizer_processor.safetensors"), folder / "model.safetensors"):
        if file.is_file():
            with safetensors.safe_open(file, "pt") as tensors:
                names = [name for name in tensors.keys() if name.endswith((".mean", ".std"))]  # noqa: SIM118 - no dict
                found |= {name.removeprefix("model."): tensors.get_tensor(name) for name in names}
    assets = [*folder.glob("assets/**/norm_stats.json"), *folder.glob("norm_stats.json")]
    if len(assets) > 1:
        raise ConfigError(f"{folder / 'assets'} has statistics of several datasets: remove all but this robot's")
    for file in assets:
        told = json.loads(file.read_text())
        for name, kinds in told.get("norm_stats", told).items():
            found |= {f"{name}.{kind}": torch.tensor(kinds[kind]) for kind in ("mean", "std")}
    return found


def _read(file: Path) -> dict[str, Tensor]:
    """Read the file's tensors under our names. If it has both embeddings and language head, the embeddings count:
    lerobot of 2026 does not tie them, trains only the embeddings, and stores an outdated head."""
    try:
        tensors = safetensors.torch.load_file(file)
    except safetensors.SafetensorError as error:
        raise ConfigError(f"policy.weights: {file} is no safetensors file ({error}): give another") from None
    return {translated(name): tensors[name] for name in sorted(tensors, key=lambda name: "lm_head" not in name)}


def translated(name: str) -> str:
    """Return our name of a checkpoint's tensor, or its own name if the table has none."""
    name = name.removeprefix("model.")
    for pattern, ours in TABLE:
        if (match := re.match(pattern, name)) is not None:
            return ours + name[match.end() :]
    return name


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
