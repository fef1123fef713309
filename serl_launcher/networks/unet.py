"""Builds 1D UNets (convolutions along the steps of an action chunk): those of Diffusion Policy and Diffuser.

chi_unet: Diffusion Policy (Chi et al. 2023, arXiv 2303.04137); observations and time scale and shift each layer (FiLM).
janner_unet: Diffuser (Janner et al. 2022, arXiv 2205.09991); they are added, and layers are narrower and deeper.
Sizes in config/network are those of much-ado-about-noising (arXiv 2512.01809), which also takes the time in this way.
"""

from collections.abc import Sequence

import torch
from serl_client.errors import ConfigError
from torch import Tensor, nn

from serl_launcher.networks.chunks import ChunkNetwork, ChunkSizes, TimeFeatures

GROUPS, LEAST = 8, 4  # groups of a GroupNorm, and the least channels in one


class UNet(ChunkNetwork):
    """Halve the steps between the `widths`, and double them again, each time with what was seen at that resolution.

    A horizon that cannot be halved so often is continued inside by copies of its last step.
    widths: channels of each resolution, multiples of 4. kernel: odd, steps that a convolution sees.
    embedding: numbers that time becomes, and the observations. scales: True: FiLM, False: both are added.
    Raises ConfigError for other widths, and for an even kernel.
    """

    steps: Tensor

    def __init__(self, sizes: ChunkSizes, *, widths: Sequence[int], kernel: int, embedding: int, scales: bool) -> None:
        if not widths or any(width % LEAST for width in widths) or kernel % 2 == 0:
            raise ConfigError(
                f"network.widths={list(widths)} network.kernel={kernel}: say multiples of {LEAST}, and an odd kernel"
            )
        super().__init__(sizes)
        features = TimeFeatures(sizes.times, max(1, embedding // (2 * sizes.times)))
        self.time = nn.Sequential(
            features, nn.Linear(features.size, 4 * embedding), nn.Mish(), nn.Linear(4 * embedding, embedding)
        )
        self.observed = nn.Linear(sizes.history * sizes.condition, embedding)

        def blocks(before: int, after: int) -> nn.ModuleList:
            return nn.ModuleList(_Block(width, after, kernel, 2 * embedding, scales) for width in (before, after))

        widths = list(widths)
        finer = list(zip(widths[:0:-1], widths[-2::-1], strict=True))
        self.down = nn.ModuleList(map(blocks, (sizes.inputs, *widths[:-1]), widths))
        self.shrink = nn.ModuleList(nn.Conv1d(width, width, 3, stride=2, padding=1) for width in widths[:-1])
        self.middle = blocks(widths[-1], widths[-1])
        self.up = nn.ModuleList(blocks(2 * before, after) for before, after in finer)
        self.grow = nn.ModuleList(nn.ConvTranspose1d(after, after, 4, 2, 1) for _, after in finer)
        self.end = nn.Sequential(_layer(widths[0], widths[0], kernel), nn.Conv1d(widths[0], sizes.outputs, 1))
        factor = 2 ** (len(widths) - 1)
        steps = torch.arange(-(-sizes.horizon // factor) * factor).clamp(max=sizes.horizon - 1)
        self.register_buffer("steps", steps, persistent=False)  # of the chunk, the last one repeated

    def forward(self, chunk: Tensor, time: Tensor, condition: Tensor) -> Tensor:
        embedding = torch.cat([self.time(time), self.observed(condition.flatten(1))], -1)
        x = chunk[:, self.steps].transpose(1, 2)  # [B, inputs, steps]
        seen = []
        for level, blocks in enumerate(self.down):
            x = _through(blocks, x, embedding)
            seen.append(x)
            if level < len(self.shrink):
                x = self.shrink[level](x)
        x = _through(self.middle, x, embedding)
        for blocks, grow in zip(self.up, self.grow, strict=True):
            x = grow(_through(blocks, torch.cat([x, seen.pop()], 1), embedding))
        return self.end(x).transpose(1, 2)[:, : self.sizes.horizon]


class _Block(nn.Module):
    """Two convolutions with a way around them; the embedding [B, E] acts between them."""

    def __init__(self, inputs: int, outputs: int, kernel: int, embedding: int, scales: bool) -> None:
        super().__init__()
        self.first, self.second = _layer(inputs, outputs, kernel), _layer(outputs, outputs, kernel)
        self.act = nn.Sequential(nn.Mish(), nn.Linear(embedding, outputs * (2 if scales else 1)))
        self.around = nn.Conv1d(inputs, outputs, 1) if inputs != outputs else nn.Identity()
        self.scales = scales

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        said = self.act(embedding).unsqueeze(-1)
        y = self.first(x)
        if self.scales:
            scale, bias = said.chunk(2, 1)
            y = scale * y + bias
        else:
            y = y + said
        return self.second(y) + self.around(x)


def _layer(inputs: int, outputs: int, kernel: int) -> nn.Sequential:
    norm = nn.GroupNorm(min(GROUPS, outputs // LEAST), outputs)
    return nn.Sequential(nn.Conv1d(inputs, outputs, kernel, padding=kernel // 2), norm, nn.Mish())


def _through(blocks: nn.Module, x: Tensor, embedding: Tensor) -> Tensor:
    for block in blocks.children():
        x = block(x, embedding)
    return x
