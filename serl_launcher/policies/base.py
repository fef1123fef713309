"""What every policy offers: a loss, samples, and the shape of the noise that decides a sample."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from serl_launcher.types import Batch, Metrics, Observation


class Policy(nn.Module, ABC):
    """Maps observations to chunks of H actions in the robot's units.

    A policy that is a tractable density also has `rsample(observation, *, generator=None) -> (action [B, H, A] with a
    gradient, log_prob [B])` and `log_prob(observation, action [B, H, A]) -> [B]`; algorithms that need them refuse
    others. Densities are over actions scaled to [-1, 1], so that an entropy means the same in radians and metres.
    """

    inputs: tuple[str, ...]  # the observations that it reads
    horizon: int  # H, the number of actions of one decision
    mode_at_zero = False  # noise of zeros gives the most likely action, which is what acts where nothing is explored

    @property
    @abstractmethod
    def noise_shape(self) -> tuple[int, ...]:
        """The shape of the standard normal noise of one decision: the same noise gives the same action anywhere."""

    @property
    def offsets(self) -> dict[str, tuple[int, ...]]:
        """What the batch of `forward` holds, as Window.offsets."""
        return {**dict.fromkeys(self.inputs, (0,)), "action": tuple(range(self.horizon))}

    @abstractmethod
    def forward(self, batch: Batch, generator: torch.Generator | None = None) -> tuple[Tensor, Metrics]:
        """The loss of imitating the batch, one per row [B], and metrics; chance comes from `generator`."""

    @abstractmethod
    def sample(
        self,
        observation: Observation,
        *,
        n: int = 1,
        noise: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """n chunks per observation {[B, ...]} -> [n, B, H, A]; `noise` [n, B, *noise_shape] is drawn unless given."""


def draw_noise(shape: tuple[int, ...], device: torch.device, generator: torch.Generator | None) -> Tensor:
    """Standard normal noise on `device`, drawn where the generator lives: one seed, one run, on whatever device."""
    source = device if generator is None else generator.device
    return torch.randn(shape, device=source, generator=generator).to(device)
