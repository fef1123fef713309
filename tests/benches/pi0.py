"""What PI0 costs at least, in FLOPs and bytes, from its sizes alone; and the making of one that is measured.

A product of m x k and k x n numbers is 2 m k n FLOPs; what else there is (norms, softmax, rotations) is left out. The
sizes of performance-and-delivery.md give its numbers where `whole` is said: published counts take all of the backbone,
and ours leaves out what nobody reads of its last layer.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from omegaconf import DictConfig
from serl_client.errors import ConfigError
from serl_client.spec import Feature, Spec

from serl_launcher.config import composed
from serl_launcher.policies.pi0 import Gemma, Tower

from .paired import JSON, option

CONFIG = Path(__file__).resolve().parents[2] / "config"
CAMERA, STATE = "observation.images.cam_", "observation.state"
JOINTS = 7  # numbers of the state and of an action; the policy computes with zeros to its own width, whatever they are
TASK = "lift the block"
FPS = 30.0


class Part(NamedTuple):
    """A part of the model as it works on one request."""

    weights: int  # that each token is multiplied by
    tokens: int
    attention: int = 0  # FLOPs of queries with keys, and of weights with values
    last: int = 0  # those of its weights whose product no gradient reads, being the last of a layer

    @property
    def products(self) -> int:
        return 2 * self.weights * self.tokens

    @property
    def flops(self) -> int:
        return self.products + self.attention

    @property
    def again(self) -> int:
        """FLOPs of computing it again for its gradient, as far as that is read."""
        return self.flops - 2 * self.last * self.tokens

    def backward(self, trained: bool, passes: bool) -> int:
        """FLOPs of the gradients: of the weights if they are `trained`, of the inputs if one `passes` further down."""
        return self.products * (trained + passes) + 2 * self.attention * passes


@dataclass(frozen=True)
class Work:
    """PI0 at certain sizes, with so many `cameras`; a number takes `element` bytes."""

    tower: Tower
    gemma: Gemma
    cameras: int
    words: int
    horizon: int
    width: int
    state_size: int
    steps: int
    element: int
    whole: bool = False  # the backbone's last layer is computed to its end

    @classmethod
    def of(cls, policy: DictConfig, cameras: int) -> "Work":
        """What the node `policy` of a config asks for."""
        return cls(
            Tower(**policy.vision), Gemma(**policy.gemma), cameras, policy.prompt_tokens, policy.horizon, policy.width,
            policy.state_size, policy.steps, getattr(torch, policy.precision).itemsize,
        )  # fmt: skip

    # -- the parts
    @property
    def patches(self) -> int:
        return (self.tower.image // self.tower.patch) ** 2

    @property
    def prefix(self) -> int:
        """Tokens of images and words."""
        return self.cameras * self.patches + self.words

    @property
    def pixels(self) -> Part:
        """From squares of pixels to tokens."""
        return Part(3 * self.tower.patch**2 * self.tower.width, self.cameras * self.patches)

    @property
    def vision(self) -> Part:
        width, depth = self.tower.width, self.tower.depth
        attention = self.cameras * depth * 4 * self.patches**2 * width
        return Part(depth * (4 * width**2 + 2 * width * self.tower.mlp), self.cameras * self.patches, attention)

    @property
    def projection(self) -> Part:
        return Part(self.tower.width * self.gemma.width, self.cameras * self.patches)

    @property
    def language(self) -> Part:
        gemma, unread = self.gemma, not self.whole
        weights = gemma.depth * self._layer(gemma.width, gemma.mlp)
        weights -= unread * (2 * gemma.width * gemma.heads * gemma.head_dim + 3 * gemma.width * gemma.mlp)
        layers = gemma.depth - unread  # those that are whole
        attention = layers * self._attention(self.prefix, self.prefix)
        return Part(weights, self.prefix, attention, layers * gemma.width * gemma.mlp)

    @property
    def expert(self) -> Part:
        """One step of a sample, or one loss."""
        gemma, suffix = self.gemma, 1 + self.horizon
        weights = gemma.depth * self._layer(gemma.expert_width, gemma.expert_mlp)
        attention = gemma.depth * self._attention(suffix, self.prefix + suffix)
        return Part(weights, suffix, attention, gemma.depth * gemma.expert_width * gemma.expert_mlp)

    @property
    def actions(self) -> Part:
        """Into the expert, with the time, and out of it."""
        return Part(2 * self.width * self.gemma.expert_width + 3 * self.gemma.expert_width**2, self.horizon)

    @property
    def state(self) -> Part:
        return Part(self.state_size * self.gemma.expert_width, 1)

    def _layer(self, width: int, mlp: int) -> int:
        gemma = self.gemma
        return 2 * width * (gemma.heads + gemma.kv_heads) * gemma.head_dim + 3 * width * mlp

    def _attention(self, queries: int, keys: int) -> int:
        return 4 * queries * keys * self.gemma.heads * self.gemma.head_dim

    # -- inference
    @property
    def once(self) -> int:
        """FLOPs of what the steps of a sample share."""
        return self.seen + self.language.flops + self.state.flops

    @property
    def seen(self) -> int:
        """FLOPs from the images to their tokens in the backbone."""
        return self.pixels.flops + self.vision.flops + self.projection.flops

    @property
    def step(self) -> int:
        """FLOPs of one step of one sample."""
        return self.expert.flops + self.actions.flops

    def inference(self, rows: int = 1, samples: int = 1, *, cached: bool = True) -> int:
        """FLOPs of `samples` chunks for each of so many rows; without the `cached` prefix each step computes it."""
        if not cached:
            return rows * samples * self.steps * (self.once + self.step)
        return rows * (self.once + samples * self.steps * self.step)

    def floor(self, flops: float, bandwidth: float, rows: int = 1, samples: int = 1) -> float:
        """Seconds that `inference` takes at least at so many FLOP/s and bytes/s: the prefix and then each step has to
        compute, and has to read its weights; a step reads the keys and values of the prefix, too."""
        gemma = self.gemma
        once = self.element * sum(
            part.weights for part in (self.pixels, self.vision, self.projection, self.language, self.state)
        )
        kept = 2 * gemma.depth * gemma.kv_heads * gemma.head_dim * self.prefix  # keys and values of one row
        step = self.element * (self.expert.weights + self.actions.weights + rows * kept)
        return max(rows * self.once / flops, once / bandwidth) + self.steps * max(
            rows * samples * self.step / flops, step / bandwidth
        )

    # -- training
    def training(self, freeze: Sequence[str] = (), lora: int | None = None) -> int:
        """FLOPs of one sample's loss and gradient. What is frozen has no gradient of its weights, and none passes
        through it unless something below is trained; the low-rank updates themselves (1 %) are not counted."""
        vision, language, expert, prefix = self._trained(freeze, lora)
        return (
            self.once
            + self.step
            + self.pixels.backward(vision, False)
            + self.vision.backward(vision, vision)
            + self.projection.backward(vision, vision)
            + self.language.backward(language, prefix)
            + self.expert.backward(expert, True)
            + self.actions.backward(True, True)
            + self.state.backward(True, False)
        )

    def recomputed(self, freeze: Sequence[str] = (), lora: int | None = None) -> int:
        """FLOPs of computing again, for one sample's gradient, what `checkpointing` does not keep."""
        vision, _, _, prefix = self._trained(freeze, lora)
        return self.expert.again + prefix * self.language.again + vision * (self.pixels.flops + self.vision.flops)

    def _trained(self, freeze: Sequence[str], lora: int | None) -> tuple[bool, bool, bool, bool]:
        """Are the weights of vision, language and expert trained, and does a gradient pass through language?"""
        vision, language, expert = (part not in freeze and lora is None for part in ("vision", "language", "expert"))
        vision = vision and self.cameras > 0
        return vision, language, expert, vision or language or lora is not None


def options(rounds: int, **own: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The options of a bench: its `own`, and those that all benches of PI0 have."""
    return {
        **{f"--{name}": more for name, more in own.items()},
        "--policy": option("pi0", "pi0, pi0_tiny, pi0_expert or pi0_lora (pi0)"),
        "--cameras": option(3, "how many (3)", type=at_least(0)),
        "--rounds": option(rounds, f"how often it is measured ({rounds})", type=at_least(1)),
        "--device": option("auto", "cpu, cuda or cuda:1 (auto: cuda if there is one)"),
        **JSON,
        "words": {"nargs": "*", "help": "after --, for the config: -- policy.horizon=20 threads=2"},
    }


def at_least(least: int) -> Callable[[str], int]:
    """What reads a number of an option."""

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text} should be a whole number, at least {least}")
        return int(text)

    return read


def configured(options: argparse.Namespace, *words: str) -> DictConfig:
    """The config of a learner that imitates with this policy. Raises ConfigError where that is no PI0."""
    words = (f"policy={options.policy}", "algo=rejection", f"device={options.device}", *words, *options.words)
    config = composed(CONFIG, words)
    if "gemma" not in config.policy:
        raise ConfigError(f"--policy {options.policy} is no PI0: say pi0, pi0_tiny, pi0_expert or pi0_lora")
    torch.set_num_threads(config.threads)
    torch.manual_seed(config.seed)
    return config


def robot(config: DictConfig, cameras: int) -> Spec:
    """An arm with that many cameras, whose images have the size that the policy reads."""
    side, bounds = config.policy.vision.image, np.ones(JOINTS)
    images = {f"{CAMERA}{i}": Feature((side, side, 3), "uint8") for i in range(cameras)}
    return Spec({**images, STATE: Feature((JOINTS,))}, Feature((JOINTS,), low=-bounds, high=bounds), fps=FPS)
