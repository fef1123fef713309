"""Loads PI0 checkpoints of lerobot and openpi: a table from their tensor names to ours.

lerobot and openpi's PyTorch conversion share one layout. lerobot puts `model.` before every name, and its port of
January 2025 names the backbone's parts differently. In both, the word embeddings are tied to the language head and may
be stored under its name.
"""

import logging
import re
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
