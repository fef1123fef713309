"""Defines the interface of networks over action chunks (MLP, UNet, transformer, LSTM); has the MLP."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from serl_launcher.networks.mlp import mlp

FREQUENCIES = 16  # of the MLP's time features


@dataclass(frozen=True, slots=True)
class ChunkSizes:
    """What a network over chunks maps.

    horizon: H, steps of a chunk. inputs, outputs: numbers of a step; the last input may say which steps are those of an
        old chunk. times: how many times it reads, each from 1 (noise) to 0 (action).
    condition: C, numbers of an encoded observation. history: To, encoded observations, the newest last.
    """

    horizon: int
    inputs: int
    outputs: int
    times: int
    condition: int
    history: int


class ChunkNetwork(nn.Module, ABC):
    """Map a chunk, times and encoded observations to numbers for each step of the chunk."""

    has_forward_derivative = True  # False: torch.func.jvp cannot pass, as it cannot through fused attention or LSTMs

    def __init__(self, sizes: ChunkSizes) -> None:
        super().__init__()
        self.sizes = sizes

    @abstractmethod
    def forward(self, chunk: Tensor, time: Tensor, condition: Tensor) -> Tensor:
        """chunk [B, H, inputs], time [B, times], condition [B, To, C] -> [B, H, outputs]."""


class TimeFeatures(nn.Module):
    """Sines and cosines of times [B, times] -> [B, size]; `size` is 2 * times * frequencies.

    Frequencies rise from 1 to 100 quarter turns, in equal ratios.
    """

    frequencies: Tensor

    def __init__(self, times: int, frequencies: int) -> None:
        super().__init__()
        self.size = 2 * times * frequencies
        self.register_buffer("frequencies", torch.logspace(0, 2, frequencies), persistent=False)

    def forward(self, time: Tensor) -> Tensor:
        angle = (time.unsqueeze(-1) * self.frequencies * math.tau / 4).flatten(1)
        return torch.cat([angle.sin(), angle.cos()], -1)


class MLP(ChunkNetwork):
    """An MLP of the flattened chunk, sines and cosines of time, and the observations.

    hidden, layer_norm: as in networks.mlp.mlp.
    """

    def __init__(self, sizes: ChunkSizes, *, hidden: Sequence[int], layer_norm: bool) -> None:
        super().__init__(sizes)
        self.time = TimeFeatures(sizes.times, FREQUENCIES)
        flat = sizes.horizon * sizes.inputs + self.time.size + sizes.history * sizes.condition
        self.layers = mlp(flat, hidden, sizes.horizon * sizes.outputs, layer_norm=layer_norm)

    def forward(self, chunk: Tensor, time: Tensor, condition: Tensor) -> Tensor:
        features = [chunk.flatten(1), self.time(time), condition.flatten(1)]
        return self.layers(torch.cat(features, -1)).view(len(chunk), self.sizes.horizon, self.sizes.outputs)
