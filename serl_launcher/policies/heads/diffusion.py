"""Diffusion head over action chunks: DDPM (Ho et al. 2020, arXiv 2006.11239) and DDIM (Song et al. 2021, 2010.02502).

Noise is added in T steps. With the chunk a, noise e ~ N(0, I) and the share of signal s_k after step k,
    (1) x_k = sqrt(s_k) a + sqrt(1 - s_k) e,
    (2) the network eps(x_k, t, observation) learns e, for k = 1..T drawn evenly and t = k / T,
    (3) s_k = prod_{i <= k} (1 - b_i),  b_i = min(1 - f_i / f_{i-1}, 0.999),  f_i = cos^2((i / T + 0.008) pi / 2.016)
(the squared cosine schedule: Nichol and Dhariwal 2021, arXiv 2102.09672). A sample starts with noise and goes down N of
the steps, the last of each T / N (Lin et al. 2023, arXiv 2305.08891). At each one, with s, the next one's s' (1 in the
end), b = 1 - s / s', and the guess a' = (x - sqrt(1 - s) eps) / sqrt(s), clipped to [-1, 1] or not,
    (4) DDPM  x <- N(sqrt(s') b / (1 - s) a' + sqrt(s / s') (1 - s') / (1 - s) x,  (1 - s') b / (1 - s)),
    (5) DDIM  x <- sqrt(s') a' + sqrt(1 - s') eps.
A critic leads samples (policies/guidance.py): with the slope g, before the clip,
    (6) a' <- a' + sqrt(1 - s) g(a'),  and eps follows from it and x by (1).
At k = T the guess holds the network's error 2,000 times, because sqrt(s_T) = 0.0005 for T = 100. The clip bounds that.
Without it a sample starts at the last k with sqrt(s_k) >= 0.01, where x is noise all the same.
T = 100, the schedule, eps and the clip are those of Diffusion Policy (Chi et al. 2023, arXiv 2303.04137).
"""

import math
from itertools import pairwise

import torch
from serl_client.errors import ConfigError
from torch import Tensor

from serl_launcher.networks.seeded_noise import normal, uniform
from serl_launcher.policies.heads.base import Head, Predict, Slope, Target, asked

LEAST_SIGNAL = 0.01  # sqrt(s) of the step at which an unclipped sample starts
TIME = 1  # stream of a row's random numbers for its step; stream 0 is the noise


class Diffusion(Head):
    """train_steps: T. steps: N. fresh_noise: True: DDPM (4); False: DDIM (5). clip: whether guesses are clipped.

    Raises ConfigError for more steps than train_steps.
    """

    changeable = ("steps", "fresh_noise", "clip")
    steers = True
    signal: Tensor

    def __init__(
        self, *, horizon: int, width: int, train_steps: int, steps: int, fresh_noise: bool, clip: bool
    ) -> None:  # fmt: skip
        super().__init__(horizon=horizon, width=width)
        if not 1 <= steps <= train_steps:
            raise ConfigError(f"head.steps={steps}: say 1 to head.train_steps={train_steps}")
        self.train_steps, self.steps, self.fresh_noise, self.clip = train_steps, steps, fresh_noise, clip
        self.keeps_unit = clip
        self._shares = _shares(train_steps)
        self._start = train_steps if clip else max(k for k, s in enumerate(self._shares) if s >= LEAST_SIGNAL**2)
        self.register_buffer("signal", torch.tensor(self._shares[1:]), persistent=False)

    @property
    def passes(self) -> int:
        return self.steps

    @property
    def noise_shape(self) -> tuple[int, ...]:
        """[N, H, D], the first noise and one more for each step but the last; [1, H, D] for DDIM."""
        return (self.steps if self.fresh_noise else 1, self.horizon, self.width)

    def errors(self, predict: Predict, target: Target) -> Tensor:
        """Compute the squared errors of (2)."""
        noise = normal(target.seed, (self.horizon, self.width))
        step = (uniform(target.seed, (1,), TIME) * self.train_steps).long()  # [B, 1], k - 1
        share = self.signal[step].unsqueeze(-1)
        noisy = share.sqrt() * target.chunk + (1 - share).sqrt() * noise
        return (predict(noisy, (step + 1) / self.train_steps) - noise).square()

    def sample(self, predict: Predict, noise: Tensor) -> Tensor:
        return self._denoised(predict, noise, None)

    def steered(self, predict: Predict, noise: Tensor, slope: Slope) -> Tensor:
        """Do what `sample` does, led by a slope: (6)."""
        return self._denoised(predict, noise, slope)

    def _denoised(self, predict: Predict, noise: Tensor, slope: Slope | None) -> Tensor:
        chunk = noise[:, 0]
        levels = [round(self.train_steps * (1 - i / self.steps)) for i in range(self.steps + 1)]  # T down to 0
        levels = [min(k, self._start) for k in levels]  # from one to the same, (4) and (5) leave x as it is
        for i, (k, following) in enumerate(pairwise(levels)):
            s, s_next = self._shares[k], self._shares[following]
            found = asked(predict, chunk, k / self.train_steps)
            guess = (chunk - math.sqrt(1 - s) * found) / math.sqrt(s)
            if slope is not None:
                guess = guess + math.sqrt(1 - s) * slope(guess)
                found = (chunk - math.sqrt(s) * guess) / math.sqrt(1 - s)
            guess = guess.clamp(-1, 1) if self.clip else guess
            if not self.fresh_noise:
                chunk = math.sqrt(s_next) * guess + math.sqrt(1 - s_next) * found  # (5)
                continue
            b = 1 - s / s_next
            chunk = math.sqrt(s_next) * b / (1 - s) * guess + math.sqrt(s / s_next) * (1 - s_next) / (1 - s) * chunk
            if following:
                chunk = chunk + math.sqrt((1 - s_next) * b / (1 - s)) * noise[:, 1 + i]  # (4)
        return chunk


def _shares(steps: int) -> list[float]:
    """Compute s_0..s_T of (3), where s_0 = 1."""
    f = [math.cos((i / steps + 0.008) / 1.008 * math.pi / 2) ** 2 for i in range(steps + 1)]
    shares = [1.0]
    for i in range(1, steps + 1):
        shares.append(shares[-1] * (1 - min(1 - f[i] / f[i - 1], 0.999)))
    return shares
