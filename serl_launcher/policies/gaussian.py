"""Builds the squashed (tanh) Gaussian policy of SAC (Haarnoja et al. 2018b, arXiv 1812.05905, appendix C)."""

import math
from collections.abc import Callable, Sequence

import torch
from serl_client.spec import Spec
from torch import Tensor
from torch.nn import functional

from serl_launcher.networks.mlp import ActionScale, mlp
from serl_launcher.networks.vision import ObservationEncoder
from serl_launcher.policies.base import Policy
from serl_launcher.types import Batch, Metrics, Observation, Prefix

LARGEST_UNIT = 1 - 1e-6  # an executed action on its bound would be infinite before the tanh


class GaussianPolicy(Policy):
    """action = tanh(mean + std * noise), scaled to the Spec's bounds; one action per decision.

    Zero noise gives the deterministic action, tanh(mean). hidden, layer_norm: as in mlp.
    log_std_low, log_std_high: bounds of the log standard deviation, before the tanh.
    """

    horizon = 1
    mode_at_zero = True

    def __init__(
        self, spec: Spec, *, encoder: Callable[[Spec], ObservationEncoder], hidden: Sequence[int], layer_norm: bool,
        log_std_low: float, log_std_high: float,
    ) -> None:  # fmt: skip
        super().__init__()
        self.encoder = encoder(spec)
        self.scale = ActionScale(spec.action)
        self.inputs = self.encoder.inputs
        self.network = mlp(self.encoder.size, hidden, 2 * spec.action.shape[0], layer_norm=layer_norm)
        self.log_std_bounds = (log_std_low, log_std_high)

    @property
    def noise_shape(self) -> tuple[int, ...]:
        return (self.horizon, *self.scale.center.shape)

    def forward(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """Return the behaviour cloning loss: the negative log density of the batch's actions, [B]."""
        return -self.log_prob(batch.observation, batch.action), {}

    def sample(
        self, observation: Observation, *, task: Sequence[str] = (), n: int = 1, noise: Tensor | None = None,
        prefix: Prefix | None = None,
    ) -> Tensor:  # fmt: skip
        mean, log_std = self._gaussian(observation)  # [B, 1, A]
        noise = torch.randn(n, *mean.shape, device=mean.device) if noise is None else noise
        return self.scale.from_unit(torch.tanh(mean + log_std.exp() * noise))  # [n, B, 1, A]

    def rsample(self, observation: Observation, *, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Sample one action per observation, with a gradient -> action [B, 1, A], log_prob [B].

        noise: [B, 1, A], standard normal.
        """
        mean, log_std = self._gaussian(observation)
        raw = mean + log_std.exp() * noise
        return self.scale.from_unit(torch.tanh(raw)), squashed_log_prob(noise, log_std, raw)

    def log_prob(self, observation: Observation, action: Tensor) -> Tensor:
        """Return the log density [B] of action [B, 1, A], in the robot's units; it is over actions in [-1, 1]."""
        mean, log_std = self._gaussian(observation)
        raw = torch.atanh(self.scale.to_unit(action).clamp(-LARGEST_UNIT, LARGEST_UNIT))
        return squashed_log_prob((raw - mean) * (-log_std).exp(), log_std, raw)

    def _gaussian(self, observation: Observation) -> tuple[Tensor, Tensor]:
        mean, log_std = self.network(self.encoder(observation)).unsqueeze(1).chunk(2, -1)  # [B, 1, A] each
        return mean, log_std.clamp(*self.log_std_bounds)


def squashed_log_prob(noise: Tensor, log_std: Tensor, raw: Tensor) -> Tensor:
    """Compute log N(raw) - log |d tanh(raw) / d raw|, summed over [B, 1, A] -> [B].

    log(1 - tanh(u)^2) is written as 2 (log 2 - u - softplus(-2u)), which does not round to log 0. The constant terms
    are added once.
    """
    log_density = 2 * (raw + functional.softplus(-2 * raw)) - log_std - 0.5 * noise.square()
    constant = raw[0].numel() * (0.5 * math.log(2 * math.pi) + 2 * math.log(2))
    return log_density.sum((-2, -1)) - constant
