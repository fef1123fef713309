"""Builds transformers over action chunks, whose tokens are the chunk's steps: that of Diffusion Policy, and DiT.

chi_transformer: Diffusion Policy (Chi et al. 2023, arXiv 2303.04137): time and observations are tokens, too, to which
    each step looks; a step looks at no later step. There a step does not see observations that are later than it. Here
    the chunk begins at the newest observation, so each step sees all of them.
dit: DiT (Peebles and Xie 2023, arXiv 2212.09748): time and observations scale and shift each layer (adaLN-Zero).
Sizes in config/network are those of much-ado-about-noising (arXiv 2512.01809). Its dropout is left out: a row's random
numbers come from its seed alone. Attention is two matrix products, so that it has a forward-mode derivative; chunks are
too short for a fused kernel to be faster.
"""

import math

import torch
from serl_client.errors import ConfigError
from torch import Tensor, nn

from serl_launcher.networks.chunks import ChunkNetwork, ChunkSizes, TimeFeatures

INITIAL_STD = 0.02  # of weights and places
EXPANSION = 4  # a layer's inner width, as a factor on its width


class ChiTransformer(ChunkNetwork):
    """width, heads, depth: of the decoder. Raises ConfigError for heads that do not divide the width."""

    hidden: Tensor

    def __init__(self, sizes: ChunkSizes, *, width: int, heads: int, depth: int) -> None:
        super().__init__(sizes)
        features = TimeFeatures(sizes.times, width // (2 * sizes.times))
        self.step, self.observed = nn.Linear(sizes.inputs, width), nn.Linear(sizes.condition, width)
        self.time = nn.Sequential(features, nn.Linear(features.size, width))
        self.places = nn.Parameter(torch.empty(sizes.horizon, width))
        self.seen_places = nn.Parameter(torch.empty(1 + sizes.history, width))  # of the time, then of the observations
        self.seen = nn.Sequential(nn.Linear(width, EXPANSION * width), nn.Mish(), nn.Linear(EXPANSION * width, width))
        self.layers = nn.ModuleList(_DecoderLayer(width, heads) for _ in range(depth))
        self.end = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, sizes.outputs))
        later = torch.ones(sizes.horizon, sizes.horizon, dtype=torch.bool).triu(1)
        self.register_buffer(
            "hidden", torch.zeros(sizes.horizon, sizes.horizon).masked_fill(later, -math.inf), persistent=False
        )
        self.apply(_begin)
        nn.init.normal_(self.places, std=INITIAL_STD)
        nn.init.normal_(self.seen_places, std=INITIAL_STD)

    def forward(self, chunk: Tensor, time: Tensor, condition: Tensor) -> Tensor:
        seen = torch.cat([self.time(time).unsqueeze(1), self.observed(condition)], 1)  # [B, 1 + To, width]
        seen = self.seen(seen + self.seen_places)
        x = self.step(chunk) + self.places  # [B, H, width]
        for layer in self.layers:
            x = layer(x, seen, self.hidden)
        return self.end(x)


class DiT(ChunkNetwork):
    """width, heads, depth: of the layers. Raises ConfigError for heads that do not divide the width."""

    def __init__(self, sizes: ChunkSizes, *, width: int, heads: int, depth: int) -> None:
        super().__init__(sizes)
        features = TimeFeatures(sizes.times, width // (2 * sizes.times))
        self.step = nn.Linear(sizes.inputs, width)
        self.time = nn.Sequential(features, nn.Linear(features.size, width), nn.SiLU(), nn.Linear(width, width))
        self.observed = nn.Sequential(
            nn.Linear(sizes.history * sizes.condition, width), nn.SiLU(), nn.Linear(width, width)
        )
        self.places = nn.Parameter(torch.empty(sizes.horizon, width).normal_(std=INITIAL_STD))
        self.layers = nn.ModuleList(_ModulatedLayer(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.act = nn.Sequential(nn.SiLU(), _zero(nn.Linear(width, 2 * width)))
        self.end = _zero(nn.Linear(width, sizes.outputs))

    def forward(self, chunk: Tensor, time: Tensor, condition: Tensor) -> Tensor:
        said = self.time(time) + self.observed(condition.flatten(1))  # [B, width]
        x = self.step(chunk) + self.places  # [B, H, width]
        for layer in self.layers:
            x = layer(x, said)
        scale, shift = self.act(said).unsqueeze(1).chunk(2, -1)
        return self.end(self.norm(x) * (1 + scale) + shift)


class Attention(nn.Module):
    """Attention of tokens x [B, N, width] to tokens y [B, M, width]. Raises ConfigError as DiT does."""

    def __init__(self, width: int, heads: int) -> None:
        if width % heads:
            raise ConfigError(f"network.heads={heads} does not divide network.width={width}")
        super().__init__()
        self.heads = heads
        self.asks, self.told, self.end = nn.Linear(width, width), nn.Linear(width, 2 * width), nn.Linear(width, width)

    def forward(self, x: Tensor, y: Tensor, hidden: Tensor | None = None) -> Tensor:
        """hidden: added to the scores [N, M], -inf where a token is not seen; None: all are."""
        query = self._split(self.asks(x))
        key, value = map(self._split, self.told(y).chunk(2, -1))
        scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])  # [B, heads, N, M]
        shares = (scores if hidden is None else scores + hidden).softmax(-1)
        return self.end((shares @ value).transpose(1, 2).flatten(2))

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class _DecoderLayer(nn.Module):
    """Attention to the steps, attention to time and observations, and an MLP; each behind a LayerNorm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.steps, self.seen, self.mlp = Attention(width, heads), Attention(width, heads), _mlp(width)

    def forward(self, x: Tensor, seen: Tensor, hidden: Tensor) -> Tensor:
        steps, others, last = self.norms
        y = steps(x)
        x = x + self.steps(y, y, hidden)
        x = x + self.seen(others(x), seen)
        return x + self.mlp(last(x))


class _ModulatedLayer(nn.Module):
    """Attention and an MLP, both scaled, shifted and gated by a vector; the gates begin at zero."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.steps, self.mlp = Attention(width, heads), _mlp(width)
        self.act = nn.Sequential(nn.SiLU(), _zero(nn.Linear(width, 6 * width)))

    def forward(self, x: Tensor, said: Tensor) -> Tensor:
        scale, shift, gate, mlp_scale, mlp_shift, mlp_gate = self.act(said).unsqueeze(1).chunk(6, -1)
        y = self.norm(x) * (1 + scale) + shift
        x = x + gate * self.steps(y, y)
        return x + mlp_gate * self.mlp(self.norm(x) * (1 + mlp_scale) + mlp_shift)


def _mlp(width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, EXPANSION * width), nn.GELU(), nn.Linear(EXPANSION * width, width))


def _begin(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=INITIAL_STD)
        nn.init.zeros_(module.bias)


def _zero(layer: nn.Linear) -> nn.Linear:
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer
