"""PI0, a vision-language-action model (VLA) with a flow-matching action expert (arXiv 2410.24164); LoRA.

Two transformers share their attention, layer by layer. The backbone (PaliGemma: a SigLIP tower and Gemma 2B) reads the
prefix, which does not change while a chunk is sampled. The action expert (a narrower Gemma) reads the suffix:
    prefix   the image tokens of each camera, the tokens of the task      every token sees the whole prefix
    suffix   the state                                                    sees the prefix and itself
             the H noisy actions x_t                                      see prefix, state and all actions
So the prefix is computed once, and the suffix needs only its keys and values (appendix B of the paper).
Loss, sampler and time are (1) to (4) of heads/flow.py, as in section IV of the paper. The velocity is
    v = W_out expert(...),   of tokens   W_3 silu(W_2 [W_1 x_t, phi(t)])   with sines and cosines phi of t.
The layers are the unchanged ones of the transformers package, called one by one; versions 4.57 and 5 agree.
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from serl_client.errors import ConfigError
from serl_client.spec import IMAGES, Spec
from serl_client.words import check_choice
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import GemmaConfig, SiglipVisionConfig, SiglipVisionModel
from transformers.models.gemma.modeling_gemma import GemmaModel, apply_rotary_pos_emb

from serl_launcher.networks import compiler
from serl_launcher.networks.attention import attention, bias, joined
from serl_launcher.networks.mlp import StateEncoder
from serl_launcher.networks.prompt import Prompt
from serl_launcher.networks.vision import ALL
from serl_launcher.policies.chunk import HeadPolicy
from serl_launcher.policies.frozen import PartlyFrozen
from serl_launcher.policies.heads.base import Head
from serl_launcher.policies.pi0_checkpoint import is_lerobots, load_pretrained, relative_at, statistics_at
from serl_launcher.types import Observation

log = logging.getLogger(__name__)

SHORTEST, LONGEST = 4e-3, 4.0  # periods of the time features
TOKENS, WORDS = "task.tokens", "task.words"  # added to an observation by `prepared`
PARTS = {"vision": ("vision", "image_projection"), "language": ("language",), "expert": ("expert",)}
RESIZES = ("auto", "antialias", "plain")
PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16}
LORA = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

KeysValues = tuple[Tensor, Tensor]  # [B, kv heads, T, head_dim] each


@dataclass(frozen=True, slots=True)
class Tower:
    """Sizes of the SigLIP tower: square images of `image` pixels a side, cut into squares of `patch` pixels."""

    width: int
    depth: int
    heads: int
    mlp: int
    patch: int
    image: int


@dataclass(frozen=True, slots=True)
class Gemma:
    """Sizes of both Gemma stacks. The expert differs only in `expert_width` and `expert_mlp`."""

    width: int
    mlp: int
    expert_width: int
    expert_mlp: int
    depth: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int


class Memory(NamedTuple):
    """What the suffix needs: keys and values of the prefix per layer, the mask of its tokens, and the state."""

    layers: list[KeysValues]
    there: Tensor  # [B, P] bool, False for padding
    state: Tensor  # [B, 1, expert width]


class PI0(PartlyFrozen, HeadPolicy):
    """PI0 for any robot: cameras and state come from the Spec, and the task is the prompt.

    vision, gemma: fields of Tower and of Gemma.
    cameras: names in the order in which the backbone reads them; `all`: every camera, by name. A camera that the robot
        lacks is left out, which has the effect of masking its tokens.
    state_size, width: sizes of state and action in the network; shorter ones are padded with zeros.
    prompt_tokens: tokens of the task; longer tasks are cut.
    tokenizer: tokenizer.json or its folder; None: the task is read as bytes.
    weights: pi0_base checkpoint of lerobot or openpi, model.safetensors or its folder; None: random weights.
    freeze: parts of PARTS that are not trained.
    lora: rank of LoRA (Hu et al. 2021): all three parts are frozen, and low-rank updates of both stacks' projections
        are trained; None: no LoRA.
    resize: how images become smaller: `antialias`, as in openpi's JAX code; `plain`, bilinear without it, as in lerobot
        and in openpi's PyTorch code; `auto`: plain for weights in lerobot's layout, else antialias.
    precision: float32 or bfloat16, of matrix products; trained weights stay float32.
    checkpointing: True: recompute tower and layers in the backward pass to save memory.
    The other arguments are those of HeadPolicy.
    Raises ConfigError for sizes that do not fit the Spec or the checkpoint, if a robot with cameras has none of those
    named, and for a head that wants something else than a velocity.
    """

    changeable = ("checkpointing",)
    reads_words = True
    frequencies: Tensor

    def __init__(
        self, spec: Spec, *, vision: Mapping[str, int], gemma: Mapping[str, int], cameras: Sequence[str], horizon: int,
        head: Callable[..., Head], imitation_target: str, width: int, state_size: int, prompt_tokens: int,
        tokenizer: str | None, weights: str | None, freeze: Sequence[str], lora: int | None, precision: str,
        checkpointing: bool, resize: str = "auto", scale: str = "bounds", max_delay: int = 0,
        relative: Sequence[str] = (),
    ) -> None:  # fmt: skip
        super().__init__(
            spec, head=head, horizon=horizon, imitation_target=imitation_target, width=width, scale=scale,
            max_delay=max_delay, relative=relative,
        )  # fmt: skip
        self.sizes, self.image = Gemma(**gemma), Tower(**vision).image
        self.state = StateEncoder(spec)
        self.state_size, self.checkpointing = state_size, checkpointing
        _check(self, freeze, precision)
        self.precision = PRECISIONS[precision]
        self._images = _images(spec, cameras)
        self.inputs = (*self.state.sizes, *self._images)
        self.feature_size = self.state.size + self.sizes.width * len(self._images)
        self.prompt = Prompt(tokenizer, length=prompt_tokens, vocabulary=self.sizes.vocabulary)
        self._build(Tower(**vision), self.sizes)
        if weights is not None:
            self._begin_with(weights, spec)
        check_choice(resize, RESIZES, "resize", "policy.resize")
        is_plain = resize == "plain" or (resize == "auto" and weights is not None and is_lerobots(weights))
        self.antialias = not is_plain
        self._freeze(freeze, lora)
        self.frozen = {name for name, weight in self.named_parameters() if not weight.requires_grad}

    def _build(self, tower: Tower, gemma: Gemma) -> None:
        if self._images:
            vision = SiglipVisionModel(_siglip(tower))
            self.vision = getattr(vision, "vision_model", vision)  # transformers 4 wraps it, which changes its names
            self.image_projection = nn.Linear(tower.width, gemma.width)
        self.language = GemmaModel(_gemma(gemma, gemma.width, gemma.mlp))
        self.expert: Any = GemmaModel(_gemma(gemma, gemma.expert_width, gemma.expert_mlp))
        words = torch.randn(gemma.vocabulary, gemma.width) / math.sqrt(gemma.width)
        self.language.embed_tokens = nn.Embedding.from_pretrained(words, freeze=False)  # that of transformers 5 scales
        self.expert.embed_tokens = None  # its tokens come from state and actions
        _drop_unused(self.language)
        size = gemma.expert_width
        self.state_projection = nn.Linear(self.state_size, size)
        self.action_in = nn.Linear(self.width, size)  # W_1
        self.action_time_in, self.action_time_out = nn.Linear(2 * size, size), nn.Linear(size, size)  # W_2, W_3
        self.action_out = nn.Linear(size, self.width)  # W_out
        periods = SHORTEST * (LONGEST / SHORTEST) ** torch.linspace(0, 1, size // 2, dtype=torch.float64)
        self.register_buffer("frequencies", math.tau / periods, persistent=False)  # turns of up to 1571: float64

    def _begin_with(self, path: str, spec: Spec) -> None:
        """Load a checkpoint, and the statistics that it was trained with, if it brings any of this robot's size."""
        load_pretrained(self, path)
        found, scale = statistics_at(path), self.relative.scale if self.relative else self.scale
        for name, module, size in (("state", self.state, self.state.size), ("action", scale, self.size)):
            if name not in found:
                log.warning("policy.weights: %s brings no statistics of the %s: they are fitted here", path, name)
            elif len(found[name]["mean"]) != size:
                log.warning(
                    "policy.weights: %s brings statistics of %d numbers of the %s, and this robot has %d: they are "
                    "fitted here", path, len(found[name]["mean"]), name, size,
                )  # fmt: skip
            elif name == "action" and scale.kind != "std":
                raise ConfigError(f"{path} was trained on actions of mean 0 and deviation 1: say policy.scale=std")
            else:
                if name == "action":
                    self._check_relative(path, spec)
                module.keep(found[name]["mean"], found[name]["std"])
                log.info("policy.weights: the %s is normalised as there: %s", name, {
                    kind: [round(each, 4) for each in values.tolist()] for kind, values in found[name].items()
                })  # fmt: skip

    def _check_relative(self, path: str, spec: Spec) -> None:
        own = self.relative.names if self.relative else []
        learned = relative_at(path, spec.action.names)
        if learned is not None and learned != own:
            raise ConfigError(
                f"{path} was trained on actions of which these are relative to the state: {learned}. "
                f"Say policy.relative=[{','.join(learned)}]"
            )
        if learned is None and not own:
            log.warning(
                "policy.weights: %s does not say whether its actions are relative to the state (openpi's "
                "use_delta_joint_actions): if they are, say policy.relative=[...]",
                path,
            )

    def _freeze(self, freeze: Sequence[str], lora: int | None) -> None:
        for name in (name for part in (freeze if lora is None else PARTS) for name in PARTS[part]):
            if hasattr(self, name):
                getattr(self, name).requires_grad_(False)
        if lora is not None:
            from peft import LoraConfig, inject_adapter_in_model

            for stack in (self.language, self.expert):
                inject_adapter_in_model(LoraConfig(r=lora, lora_alpha=lora, target_modules=LORA), stack)

    # -- the prefix
    def prepared(self, observation: Observation, task: Sequence[str]) -> Observation:
        tokens, words = self.prompt(task or [""] * len(next(iter(observation.values()))))
        device = self.frequencies.device
        return {**observation, TOKENS: tokens.to(device), WORDS: words.to(device)}

    def condition(self, prepared: Observation) -> Memory:
        with self._autocast():
            tokens = self._camera_tokens(prepared)
            tokens.append(self.language.embed_tokens(prepared[TOKENS]) * math.sqrt(self.sizes.width))
            hidden = torch.cat([part.to(self.precision) for part in tokens], 1)  # [B, P, width]
            words = prepared[WORDS]
            there = torch.cat([words.new_ones(len(words), hidden.shape[1] - words.shape[1]), words], 1)
            turned = self._turned(self.language, hidden, there.cumsum(1) - 1)
            added = self._bias(there.unsqueeze(1))  # every token sees every token that is no padding
            layers = []
            for layer in self.language.layers:
                hidden, keys_values = self._run(self._attend, layer, hidden, turned, added, None)
                layers.append(keys_values)
        state = functional.pad(self.state(prepared), (0, self.state_size - self.state.size))
        return Memory(layers, there, _linear(self.state_projection, state).unsqueeze(1))

    def repeated(self, condition: Memory, n: int) -> Memory:
        layers = [(keys.repeat(n, 1, 1, 1), values.repeat(n, 1, 1, 1)) for keys, values in condition.layers]
        return Memory(layers, condition.there.repeat(n, 1), condition.state.repeat(n, 1, 1))

    def _camera_tokens(self, observation: Observation) -> list[Tensor]:
        """Encode each camera's images -> [B, patches, width]; each camera apart where a gradient needs memory."""
        images = [observation[name] for name in self._images]
        if torch.is_grad_enabled() or not images:
            return [self._run(self._seen, image) for image in images]
        return list(self._seen(*images).chunk(len(images)))

    def _seen(self, *images: Tensor) -> Tensor:
        """Encode the images of n cameras, uint8 [B, h, w, 3] each -> tokens [n B, patches, width]."""
        rows = [image.flatten(0, image.ndim - 4).permute(0, 3, 1, 2) for image in images]
        pixels = torch.cat([fitted(row.float() / 127.5 - 1, self.image, antialias=self.antialias) for row in rows])
        features = self.vision(pixel_values=pixels.to(self.precision)).last_hidden_state
        return _linear(self.image_projection, features)

    def features(self, observation: Observation) -> Tensor:
        """Concatenate the state and the mean token of each camera -> [B, feature_size]."""
        with self._autocast():
            means = [tokens.mean(1).float() for tokens in self._camera_tokens(observation)]
        return torch.cat([self.state(observation), *means], -1)

    # -- the suffix
    def predict(self, chunk: Tensor, time: Tensor, condition: Memory, old: Tensor | None) -> Tensor:
        return self.velocity(chunk, time if old is None else time * ~old, condition)

    def velocity(self, chunk: Tensor, time: Tensor, condition: Memory) -> Tensor:
        """Compute v(x_t, t, condition) -> [B, H, D]. time: t of each step [B, H], or [B, 1] for all steps."""
        hidden = torch.cat([condition.state, self._action_tokens(chunk, time)], 1)  # [B, 1 + H, expert width]
        there, count = condition.there, hidden.shape[1]
        sees = torch.ones(count, count, dtype=torch.bool, device=chunk.device)
        sees[0, 1:] = False  # the state sees no action
        added = self._bias(torch.cat([there.unsqueeze(1).expand(-1, count, -1), sees.expand(len(there), -1, -1)], 2))
        positions = there.sum(1, keepdim=True) + torch.arange(count, device=chunk.device)
        with self._autocast():
            hidden = hidden.to(self.precision)
            turned = self._turned(self.expert, hidden, positions)
            for layer, past in zip(self.expert.layers, condition.layers, strict=True):
                hidden, _ = self._run(self._attend, layer, hidden, turned, added, past)
            hidden = self.expert.norm(hidden)
        return _linear(self.action_out, hidden[:, 1:])  # [B, H, D]

    def _action_tokens(self, chunk: Tensor, time: Tensor) -> Tensor:
        angle = time.unsqueeze(-1) * self.frequencies  # [B, 1 or H, width / 2]
        phi = torch.cat([angle.sin(), angle.cos()], -1).expand(-1, chunk.shape[1], -1)  # [B, H, width]
        mixed = torch.cat([_linear(self.action_in, chunk), phi.to(self.action_in.weight.dtype)], -1)
        return _linear(self.action_time_out, functional.silu(_linear(self.action_time_in, mixed)))

    # -- one layer of either stack
    def _run(self, part: Callable[..., Any], *inputs: Any) -> Any:
        if self.checkpointing and torch.is_grad_enabled():
            return checkpoint(part, *inputs, use_reentrant=False, preserve_rng_state=False)
        return part(*inputs)

    def _attend(
        self, layer: Any, hidden: Tensor, turned: tuple[Tensor, Tensor], added: Tensor, past: KeysValues | None
    ) -> tuple[Tensor, KeysValues]:
        """Run one pre-norm layer on hidden [B, T, width] -> new hidden, keys and values.

        past: keys and values of earlier tokens, or None. added: what `_bias` says of all tokens.
        """
        own, normed = layer.self_attn, layer.input_layernorm(hidden)
        keys, values = self._heads(own.k_proj(normed)), self._heads(own.v_proj(normed))
        if own.q_proj is None:  # the backbone's last layer: only its keys and values are needed
            return hidden, (apply_rotary_pos_emb(keys, keys, *turned)[1], values)
        query, keys = apply_rotary_pos_emb(self._heads(own.q_proj(normed)), keys, *turned)
        parts = [(keys, values)] if past is None else [past, (keys, values)]
        every_key, every_value = (joined(part, added.shape[-1]) for part in zip(*parts, strict=True))
        hidden = hidden + own.o_proj(attention(query, every_key, every_value, added))
        return hidden + layer.mlp(layer.post_attention_layernorm(hidden)), (keys, values)

    def _bias(self, sees: Tensor) -> Tensor:
        return bias(sees, self.sizes.heads // self.sizes.kv_heads, self.precision)

    def compile_layers(self) -> None:
        compiler.keep_private()
        self._attend = torch.compile(self._attend, fullgraph=True)

    def _heads(self, projected: Tensor) -> Tensor:
        return projected.unflatten(-1, (-1, self.sizes.head_dim)).transpose(1, 2)  # [B, heads, T, head_dim]

    def _turned(self, stack: Any, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of the rotary embedding at positions [B, T]."""
        return stack.rotary_emb(hidden, positions)

    def _autocast(self) -> torch.autocast:
        """Compute in `precision`; weights that are in it already need no casts around each layer norm."""
        is_cast = self.action_in.weight.dtype != self.precision
        return torch.autocast(self.frequencies.device.type, self.precision, enabled=is_cast)


def fitted(pixels: Tensor, size: int, *, antialias: bool) -> Tensor:
    """Resize images [B, 3, h, w] in [-1, 1] into a square of `size` pixels; keep their aspect, fill with black (-1)."""
    height, width = pixels.shape[-2:]
    longest = max(height, width)
    inner = (max(1, height * size // longest), max(1, width * size // longest))
    if inner != (height, width):
        pixels = functional.interpolate(
            pixels, inner, mode="bilinear", align_corners=False, antialias=antialias and size < longest
        )
    top, left = (size - inner[0]) // 2, (size - inner[1]) // 2
    return functional.pad(pixels, (left, size - inner[1] - left, top, size - inner[0] - top), value=-1.0)


def _linear(layer: nn.Linear, inputs: Tensor) -> Tensor:
    """Apply a projection in the precision of its own weights."""
    return layer(inputs.to(layer.weight.dtype))


def _siglip(tower: Tower) -> SiglipVisionConfig:
    return SiglipVisionConfig(
        hidden_size=tower.width, intermediate_size=tower.mlp, num_hidden_layers=tower.depth,
        num_attention_heads=tower.heads, image_size=tower.image, patch_size=tower.patch, vision_use_head=False,
        attn_implementation="sdpa",
    )  # fmt: skip


def _gemma(sizes: Gemma, width: int, mlp: int) -> GemmaConfig:
    """Return the config of one stack, without word embeddings."""
    return GemmaConfig(
        vocab_size=1, pad_token_id=0, bos_token_id=0, eos_token_id=0, hidden_size=width,
        intermediate_size=mlp, num_hidden_layers=sizes.depth, num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads, head_dim=sizes.head_dim, initializer_range=1 / math.sqrt(width),
    )  # fmt: skip


def _drop_unused(language: Any) -> None:
    """Delete the rest of the backbone's last layer: only its keys and values are needed."""
    last = language.layers[-1]
    last.self_attn.q_proj = last.self_attn.o_proj = None
    last.mlp = last.post_attention_layernorm = language.norm = None


def _images(spec: Spec, cameras: Sequence[str]) -> tuple[str, ...]:
    """Return the observation names of these cameras; warn of cameras that the robot lacks."""
    there = sorted(name.removeprefix(IMAGES) for name in spec.observation if name.startswith(IMAGES))
    named = there if ALL in cameras else list(dict.fromkeys(cameras))
    if lacking := [name for name in named if name not in there]:
        has = ", ".join(there) or "none"
        text = f"policy.cameras: this robot has no camera {', '.join(lacking)}; it has {has}: name those"
        if there and len(lacking) == len(named):
            raise ConfigError(text)
        log.warning("%s", text)
    return tuple(IMAGES + name for name in named if name in there)


def _check(policy: PI0, freeze: Sequence[str], precision: str) -> None:
    if policy.size > policy.width or policy.state.size > policy.state_size:
        raise ConfigError(
            f"this robot's action has {policy.size} numbers and its state {policy.state.size}: policy.width="
            f"{policy.width} and policy.state_size={policy.state_size} must be at least that (both are 32 in pi0_base)"
        )
    if unknown := [part for part in freeze if part not in PARTS]:
        raise ConfigError(f"policy.freeze: there is no part {', '.join(unknown)}; name some of {', '.join(PARTS)}")
    if not policy.head.is_velocity:
        raise ConfigError("PI0 predicts velocities, as this head does not: say head=flow or head=mip_coin_flip")
    if precision not in PRECISIONS:
        raise ConfigError(f"policy.precision={precision}: say one of {', '.join(PRECISIONS)}")
