"""Minimal iterative policies (MIP, TSD): two passes without fitting a distribution (Pan et al. 2025, arXiv 2512.01809).

The authors' time runs from 0 (noise) to 1 (action), and their t* = 0.9 is our t = 1 - t* = 0.1. With the chunk a, noise
e ~ N(0, I) and the network f(x, t, observation), as in the authors' code (much-ado-about-noising, 9f28318):
    (1) MIP, two passes  |f(0, 1) - a|^2 / t*^2 + |f(x, 1 - t*) - a|^2 / (1 - t*)^2,  x = a + (1 - t*) e,
    (2) TSD              |f(z, 1) - x|^2 / t*^2 + |f(x, 1 - t*) - a|^2 / (1 - t*)^2,  z ~ N(0, I),
    (3) a sample of both is f(f(0, 1), 1 - t*).
The authors take the norm before they divide by t*, which weights the second pass 81 times as much as the first; we keep
that. The first pass learns E[a | observation]; in (2) x has the same mean, because e has none. The second learns
E[a | x, observation]. For a ~ N(m, v) that is (m (1 - t*)^2 + v x) / ((1 - t*)^2 + v).
As in the authors' port to pi0, each row may draw one of the passes by a coin, and the network predicts a velocity:
    (4) |v(0, 1) + a|^2 or |v(x, 1 - t*) - (e - a)|^2,  x = (1 - t*) e + t* a,
    (5) a sample takes two Euler steps: x = -t* v(0, 1), then x - (1 - t*) v(x, 1 - t*).
So an update costs one pass, and a pre-trained velocity remains one. An error of v at t counts as one of a over t, so
the passes keep about the weights of (1).
"""

import torch
from serl_client.errors import ConfigError
from torch import Tensor

from serl_launcher.networks.seeded_noise import normal, uniform
from serl_launcher.policies.heads.base import Head, Predict, Target, asked

COIN, INPUT = 3, 4  # streams of a row's random numbers: its pass, and z; stream 0 is e


class MIP(Head):
    """Equations (1) and (3). t_star: t*, between 0 and 1."""

    is_deterministic = mode_at_zero = True

    def __init__(self, *, horizon: int, width: int, t_star: float = 0.9) -> None:
        super().__init__(horizon=horizon, width=width)
        if not 0 < t_star < 1:
            raise ConfigError(f"head.t_star={t_star}: say a number between 0 and 1, such as 0.9")
        self.t_star = t_star

    @property
    def passes(self) -> int:
        return 2

    def errors(self, predict: Predict, target: Target) -> Tensor:
        noisy = target.chunk + (1 - self.t_star) * normal(target.seed, (self.horizon, self.width))
        given, wanted = self._first(target, noisy)
        first = (asked(predict, given, 1.0) - wanted).square()
        second = (asked(predict, noisy, 1 - self.t_star) - target.chunk).square()
        return first / self.t_star**2 + second / (1 - self.t_star) ** 2

    def _first(self, target: Target, noisy: Tensor) -> tuple[Tensor, Tensor]:
        """Return what the first pass is given, and what it should predict."""
        return torch.zeros_like(noisy), target.chunk

    def sample(self, predict: Predict, noise: Tensor) -> Tensor:
        start = noise.new_zeros(len(noise), self.horizon, self.width)
        return asked(predict, asked(predict, start, 1.0), 1 - self.t_star)


class TSD(MIP):
    """Equations (2) and (3): what MIP would be with noise at both steps."""

    def _first(self, target: Target, noisy: Tensor) -> tuple[Tensor, Tensor]:
        return normal(target.seed, (self.horizon, self.width), INPUT), noisy


class CoinFlipMIP(MIP):
    """Equations (4) and (5): one pass for each update, by a network that predicts a velocity."""

    is_velocity = True

    def errors(self, predict: Predict, target: Target) -> Tensor:
        noise = normal(target.seed, (self.horizon, self.width))
        is_first = (uniform(target.seed, (1,), COIN) < 0.5).float()  # [B, 1]
        time = is_first + (1 - is_first) * (1 - self.t_star)
        t = time.unsqueeze(-1)
        noise = noise * (1 - is_first).unsqueeze(-1)
        return (predict(t * noise + (1 - t) * target.chunk, time) - (noise - target.chunk)).square()

    def sample(self, predict: Predict, noise: Tensor) -> Tensor:
        start = noise.new_zeros(len(noise), self.horizon, self.width)
        chunk = start - self.t_star * asked(predict, start, 1.0)
        return chunk - (1 - self.t_star) * asked(predict, chunk, 1 - self.t_star)
