"""An LSTM along the steps of a chunk, as in much-ado-about-noising (Pan et al. 2025, arXiv 2512.01809)."""

import torch
from torch import Tensor, nn

from serl_launcher.networks.chunks import ChunkNetwork, TimeFeatures


class LSTM(ChunkNetwork):
    """Read step by step the chunk, with time and observations at each step; a step depends on none that is later.

    width, depth: of the LSTM. The source's dropout is left out, as in ResidualMLP.
    """

    has_forward_derivative = False

    def __init__(
        self, *, horizon: int, inputs: int, outputs: int, times: int, condition: int, history: int, width: int,
        depth: int,
    ) -> None:  # fmt: skip
        sizes = {"inputs": inputs, "outputs": outputs, "times": times, "condition": condition, "history": history}
        super().__init__(horizon=horizon, **sizes)
        self.time = TimeFeatures(times, 32)
        self.layers = nn.LSTM(inputs + self.time.size + history * condition, width, depth, batch_first=True)
        self.end = nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.GELU(), nn.Linear(width, outputs))

    def forward(self, chunk: Tensor, time: Tensor, condition: Tensor) -> Tensor:
        same = torch.cat([self.time(time), condition.flatten(1)], -1)
        steps, _ = self.layers(torch.cat([chunk, same.unsqueeze(1).expand(-1, self.horizon, -1)], -1))
        return self.end(steps)
