"""Writes our PI0 as a pretrained model of lerobot (type pi0), by lerobot's names and files, without lerobot.

It is the other direction of pi0_checkpoint.py. The names are those of lerobot 0.4 to 0.6. What PI0 never reads, and we
do not have (the end of the backbone's last layer, the expert's language head), is written as zeros.
"""

import json
import re
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from serl_client.errors import ConfigError
from serl_client.spec import IMAGES, Spec
from torch import Tensor

from serl_launcher.policies.heads.flow import Flow
from serl_launcher.policies.pi0 import PI0
from serl_launcher.policies.relative import STATE

TOKENIZER, TOKENS = "google/paligemma-3b-pt-224", 257152  # which lerobot's pi0 reads, and how many it knows
VARIANTS = {(2048, 16384): "gemma_2b", (1024, 4096): "gemma_300m"}  # {(width, mlp): lerobot's name of a stack}
WHOLE = "model.paligemma_with_expert."
NAMES = (  # (ours, theirs)
    (r"vision\.", WHOLE + "paligemma.model.vision_tower.vision_model."),
    (r"image_projection\.", WHOLE + "paligemma.model.multi_modal_projector.linear."),
    (r"language\.", WHOLE + "paligemma.model.language_model."),
    (r"expert\.", WHOLE + "gemma_expert.model."),
    (r"state_projection\.", "model.state_proj."), (r"action_in\.", "model.action_in_proj."),
    (r"action_out\.", "model.action_out_proj."), (r"action_time_in\.", "model.action_time_mlp_in."),
    (r"action_time_out\.", "model.action_time_mlp_out."),
)  # fmt: skip


def save(policy: PI0, spec: Spec, folder: Path) -> None:
    """Write config.json, model.safetensors and the processors' files.

    Raises ConfigError for a policy that lerobot's class cannot be: other sizes, a head without a velocity, LoRA that is
    not merged, more states than `observation.state`, the byte tokenizer, images that are resized otherwise, a scale
    with two sides, and relative entries that its steps cannot choose.
    """
    normalisation, relative = _normalisation(policy), _relative(policy, spec)
    config = _config(policy, spec, {kind: mode for kind, (mode, _) in normalisation.items()})
    if relative:
        config |= {
            "use_relative_actions": True, "relative_exclude_joints": relative["exclude_joints"],
            "action_feature_names": relative["action_names"],
        }  # fmt: skip
    tensors = {name: tensor.contiguous() for name, tensor in _tensors(policy).items()}
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config, indent=4))
    numbers = {
        f"{STATE if kind == 'STATE' else 'action'}.{name}": value.contiguous()
        for kind, (_, found) in normalisation.items() for name, value in found.items()
    }  # fmt: skip
    features = {**config["input_features"], **config["output_features"]}
    scales = {"eps": 1e-8, "norm_map": config["normalization_mapping"]}
    device = {"device": "cpu", "float_dtype": None}
    pipelines: dict[str, list[tuple[str, dict[str, Any]]]] = {
        "policy_preprocessor": [
            ("rename_observations_processor", {"rename_map": {}}), ("to_batch_processor", {}),
            ("pi0_new_line_processor", {}),
            ("tokenizer_processor", {
                "max_length": policy.prompt.length, "task_key": "task", "padding_side": "right",
                "padding": "max_length", "truncation": True, "tokenizer_name": TOKENIZER,
            }),
            ("device_processor", device), *[("relative_actions_processor", relative)] * bool(relative),
            ("normalizer_processor", {**scales, "features": features}),
        ],
        "policy_postprocessor": [
            ("unnormalizer_processor", {**scales, "features": config["output_features"]}),
            *[("absolute_actions_processor", {"enabled": True})] * bool(relative), ("device_processor", device),
        ],
    }  # fmt: skip
    for name, steps in pipelines.items():
        told = [{"registry_name": step, "config": options} for step, options in steps]
        for number, step in enumerate(told):
            if "norm_map" in step["config"]:
                step["state_file"] = f"{name}_step_{number}_{step['registry_name']}.safetensors"
                safetensors.torch.save_file(numbers, folder / str(step["state_file"]))
        (folder / f"{name}.json").write_text(json.dumps({"name": name, "steps": told}, indent=2))


def _config(policy: PI0, spec: Spec, modes: dict[str, str]) -> dict[str, Any]:
    sizes = policy.sizes
    stacks = [VARIANTS.get(each) for each in ((sizes.width, sizes.mlp), (sizes.expert_width, sizes.expert_mlp))]
    if None in stacks:
        raise ConfigError("lerobot's pi0 has the sizes of policy=pi0 alone: export that")
    if list(policy.state.sizes) != [STATE]:
        raise ConfigError(
            f"lerobot's pi0 reads {STATE} alone, and this one {', '.join(policy.state.sizes)}: train that"
        )
    if not isinstance(policy.head, Flow):
        raise ConfigError("lerobot's pi0 samples by Euler steps: say head=flow for a policy that goes there")
    sides = [max(spec.observation[name].shape[:2]) for name in policy.inputs if name.startswith(IMAGES)]
    if policy.antialias and max(sides, default=0) > policy.image:
        raise ConfigError("lerobot makes images smaller without antialiasing: train with policy.resize=plain")
    if policy.prompt.is_bytes:
        raise ConfigError("lerobot's pi0 reads PaliGemma's tokens, and this one bytes: train with policy.tokenizer=...")
    images = {
        name: {"type": "VISUAL", "shape": [3, *spec.observation[name].shape[:2]]}
        for name in policy.inputs if name.startswith(IMAGES)
    }  # fmt: skip
    return {
        "type": "pi0", "n_obs_steps": 1, "device": "cpu", "use_amp": False, "push_to_hub": False,
        "input_features": {**images, STATE: {"type": "STATE", "shape": [policy.state.size]}},
        "output_features": {"action": {"type": "ACTION", "shape": [policy.size]}},
        "paligemma_variant": stacks[0], "action_expert_variant": stacks[1], "dtype": "float32",
        "chunk_size": policy.horizon, "n_action_steps": policy.horizon, "max_state_dim": policy.state_size,
        "max_action_dim": policy.width, "num_inference_steps": policy.head.steps,
        "image_resolution": [policy.image, policy.image], "tokenizer_max_length": policy.prompt.length,
        "normalization_mapping": {"VISUAL": "IDENTITY", **modes},
    }  # fmt: skip


def _relative(policy: PI0, spec: Spec) -> dict[str, Any]:
    """Return the options of lerobot's step that subtracts the state (since 0.6); empty where nothing is relative.

    It takes the state's entries in their order, and leaves out every entry whose name holds one of the words.
    """
    if policy.relative is None:
        return {}
    names = spec.action.names
    words = [name for name, place in zip(names, policy.relative.places, strict=True) if place is None]
    taken = [name for name in names if not any(word.lower() in name.lower() for word in words)]
    stands = [place in (None, (STATE, index)) for index, place in enumerate(policy.relative.places)]
    if taken != policy.relative.names or not all(stands) or policy.state.size < policy.size:
        raise ConfigError(
            f"lerobot subtracts the first {policy.size} numbers of {STATE} in their order, but those whose name holds "
            f"one of {words}. That is another choice than policy.relative=[{','.join(policy.relative.names)}] here: "
            "export without --lerobot"
        )
    return {"enabled": True, "exclude_joints": words, "action_names": list(names)}


def _normalisation(policy: PI0) -> dict[str, tuple[str, dict[str, Tensor]]]:
    """Return {kind of feature: (lerobot's mode, its statistics)}."""
    scale = policy.relative.scale if policy.relative else policy.scale
    center, half = scale.center, scale.half_range
    state = ("MEAN_STD", {"mean": policy.state.mean, "std": policy.state.std})
    if scale.kind == "std":
        return {"STATE": state, "ACTION": ("MEAN_STD", {"mean": center, "std": half})}
    if not torch.equal(scale.sides[0], scale.sides[1]):
        raise ConfigError(
            "lerobot's scales are the same on both sides of the neutral action: train with policy.scale=std"
        )
    return {"STATE": state, "ACTION": ("MIN_MAX", {"min": center - half, "max": center + half})}


def _tensors(policy: PI0) -> dict[str, Tensor]:
    """Return all weights that lerobot's class has, by its names."""
    weights = {name: weight.detach().float() for name, weight in policy.named_parameters()}
    if any("lora_" in name for name in weights):
        raise ConfigError("lerobot's pi0 has no LoRA of ours: export a policy=pi0 or pi0_expert")
    found = {}
    for name, value in weights.items():
        ours, theirs = next((pair for pair in NAMES if re.match(pair[0], name)), ("", ""))
        if theirs:  # a head's own weights are not the policy's
            found[re.sub(f"^{ours}", theirs, name)] = value
    last = policy.sizes.depth - 1
    language = WHOLE + "paligemma.model.language_model."
    found[WHOLE + "paligemma.lm_head.weight"] = found[language + "embed_tokens.weight"].clone()
    found[WHOLE + "gemma_expert.lm_head.weight"] = torch.zeros(TOKENS, policy.sizes.expert_width)
    like = f"{language}layers.{max(0, last - 1)}."
    for part in ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
                 "post_attention_layernorm"):  # fmt: skip
        found[f"{language}layers.{last}.{part}.weight"] = torch.zeros_like(found[f"{like}{part}.weight"])
    found[language + "norm.weight"] = torch.zeros(policy.sizes.width)
    return found
