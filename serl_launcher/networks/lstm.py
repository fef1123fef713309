"""Builds an LSTM along the steps of an action chunk (much-ado-about-noising, arXiv 2512.01809)."""

import torch
from torch import Tensor, nn

from serl_launcher.networks.chunks import ChunkNetwork, ChunkSizes, TimeFeatures


class LSTM(ChunkNetwork):
    """Read step by step the chunk, with time and observations at each step; a step depends on none that is later.

    width, depth: of the LSTM. The source's dropout is left out, as in ResidualMLP.
    """

    has_forward_derivative = False

    def __init__(self, sizes: ChunkSizes, *, width: int, depth: int) -> None:
        super().__init__(sizes)
        self.time = TimeFeatures(sizes.times, 32)
        self.layers = nn.LSTM(
            sizes.inputs + self.time.size + sizes.history * sizes.condition, width, depth, batch_first=True
        )
        self.end = nn.Sequential(
            nn.Linear(width, width), nn.LayerNorm(width), nn.GELU(), nn.Linear(width, sizes.outputs)
        )

    def forward(self, chunk: Tensor, time: Tensor, condition: Tensor) -> Tensor:
        same = torch.cat([self.time(time), condition.flatten(1)], -1)
        steps, _ = self.layers(torch.cat([chunk, same.unsqueeze(1).expand(-1, self.sizes.horizon, -1)], -1))
        return self.end(steps)
