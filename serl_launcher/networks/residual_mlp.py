"""Builds a deep residual MLP over action chunks, as in much-ado-about-noising (Pan et al. 2025, arXiv 2512.01809)."""

import torch
from torch import Tensor, nn

from serl_launcher.networks.chunks import ChunkNetwork, ChunkSizes, TimeFeatures

EXPANSION = 4  # a block's inner width, as a factor on `width`


class ResidualMLP(ChunkNetwork):
    """Flatten chunk, time and observations; add `depth` blocks of width `width`, each with LayerNorm and GELU.

    The source's dropout is left out: a row's random numbers come from its seed alone.
    """

    def __init__(self, sizes: ChunkSizes, *, width: int, depth: int) -> None:
        super().__init__(sizes)
        self.time = TimeFeatures(sizes.times, 32)
        flat = sizes.horizon * sizes.inputs + self.time.size + sizes.history * sizes.condition
        self.begin = nn.Sequential(nn.Linear(flat, width), nn.LayerNorm(width), nn.GELU())
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(width), nn.Linear(width, EXPANSION * width), nn.GELU(),
                nn.LayerNorm(EXPANSION * width), nn.Linear(EXPANSION * width, width),
            )
            for _ in range(depth)
        )  # fmt: skip
        self.end = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, sizes.horizon * sizes.outputs))

    def forward(self, chunk: Tensor, time: Tensor, condition: Tensor) -> Tensor:
        x = self.begin(torch.cat([chunk.flatten(1), self.time(time), condition.flatten(1)], -1))
        for block in self.blocks:
            x = x + block(x)
        return self.end(x).view(len(chunk), self.sizes.horizon, self.sizes.outputs)
