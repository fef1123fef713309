"""Gaussian head over action chunks, whose mean is bounded and whose density is not squashed.

With the network's outputs m and l, asked once for zeros at time 1:
    mean = tanh(m),  log std = low + (high - low) sigmoid(l),  action = mean + std * noise.
Its loss is the negative log density. As the mean keeps within [-1, 1], a target on a bound has a finite density, which
that of the squashed Gaussian of policies/gaussian.py has not. Samples are clipped to the robot's bounds afterwards.
"""

import math

from serl_client.errors import ConfigError
from torch import Tensor

from serl_launcher.policies.heads.base import Head, Predict, Target, asked


class Gaussian(Head):
    """log_std_low, log_std_high: bounds of the log standard deviation of actions scaled to [-1, 1].

    Its numbers are independent of each other, given the observation. Zero noise gives the mean.
    """

    mode_at_zero = True
    keeps_unit = True

    def __init__(self, *, horizon: int, width: int, log_std_low: float, log_std_high: float) -> None:
        super().__init__(horizon=horizon, width=width)
        if log_std_low >= log_std_high:
            raise ConfigError(f"head.log_std_low={log_std_low}: say less than head.log_std_high={log_std_high}")
        self.low, self.high = log_std_low, log_std_high

    @property
    def outputs(self) -> int:
        return 2 * self.width

    def errors(self, predict: Predict, target: Target) -> Tensor:
        return -self.log_prob(predict, target.chunk)

    def log_prob(self, predict: Predict, chunk: Tensor) -> Tensor:
        """Return the log density of each number of a chunk, [B, H, D] -> [B, H, D]."""
        mean, log_std = self._gaussian(predict, chunk.new_zeros(chunk.shape))
        return -0.5 * ((chunk - mean) * (-log_std).exp()).square() - log_std - 0.5 * math.log(math.tau)

    def sample(self, predict: Predict, noise: Tensor) -> Tensor:
        mean, log_std = self._gaussian(predict, noise.new_zeros(len(noise), self.horizon, self.width))
        return mean + log_std.exp() * noise[:, 0]

    def _gaussian(self, predict: Predict, zeros: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_std = asked(predict, zeros, 1.0).chunk(2, -1)
        return mean.tanh(), self.low + (self.high - self.low) * log_std.sigmoid()
