"""Mean-flow head: predicts a flow's mean velocity over a stretch of time (arXiv 2505.13447).

With x_t and dx/dt = v of flow.py, the mean velocity from t down to r is u(x_t, t, r) = 1 / (t - r) int_r^t v dt', so
    (1) x_r = x_t - (t - r) u(x_t, t, r),
and one step takes noise to an action. Its derivative by t, along the path and with r fixed, gives the identity
    (2) u = v - (t - r) du/dt,  du/dt = v d_x u + d_t u.
The network learns u towards the right side of (2), which gets no gradient, with v = e - a of each row, and du/dt by
forward-mode differentiation. In a share of the rows r < t; in the others r = t, and it is flow matching. As in the
paper's best runs, times are logistic normal with mean -0.4 and deviation 1, and the network reads t and t - r.
Two things are otherwise. The network reads its times divided by 64: d_t u carries its highest frequency of time, and
with ours, of 100 quarter turns, (2) was mostly noise and nothing was learned. And the squared errors are not divided by
their own size: where seven of ten chunks went one way, five of ten samples did so with that weight, and seven without.
A sample takes N steps of (1), from t = 1 and noise, each 1 / N long.
"""

from typing import Any

import torch
from serl_client.errors import ConfigError
from torch import Tensor

from serl_launcher.networks.seeded_noise import normal, uniform
from serl_launcher.policies.heads.base import Head, Predict, Target

TIMES, APART = 5, 6  # streams of a row's random numbers: its two times, and whether they differ; stream 0 is the noise
SLOWER = 1 / 64  # factor on the times that the network reads


class MeanFlow(Head):
    """steps: N. apart: share of the rows in which r < t, 0 to 1; 0.25 in the paper."""

    changeable = ("steps",)
    times = 2
    needs_forward_derivative = True

    def __init__(self, *, horizon: int, width: int, steps: int, apart: float) -> None:
        super().__init__(horizon=horizon, width=width)
        if steps < 1:
            raise ConfigError(f"head.steps={steps}: say 1 or more")
        if not 0 <= apart <= 1:
            raise ConfigError(f"head.apart={apart}: say a share between 0 and 1, such as 0.25")
        self.steps, self.apart = steps, apart

    @property
    def passes(self) -> int:
        return self.steps

    def errors(self, predict: Predict, target: Target) -> Tensor:
        """Compute the squared errors of (2)."""
        noise = normal(target.seed, (self.horizon, self.width))
        drawn = (normal(target.seed, (2,), TIMES) - 0.4).sigmoid()
        t, r = drawn.amax(1, keepdim=True), drawn.amin(1, keepdim=True)  # [B, 1]
        r = torch.where(uniform(target.seed, (1,), APART) < self.apart, r, t)
        later = t.unsqueeze(-1)
        velocity = noise - target.chunk

        def mean(chunk: Tensor, t: Tensor) -> Tensor:
            return predict(chunk, SLOWER * torch.cat([t, t - r], 1))

        noisy = later * noise + (1 - later) * target.chunk
        jvp: Any = torch.func.jvp
        found, slope = jvp(mean, (noisy, t), (velocity, torch.ones_like(t)))
        return (found - (velocity - (t - r).unsqueeze(-1) * slope).detach()).square()

    def sample(self, predict: Predict, noise: Tensor) -> Tensor:
        chunk = noise[:, 0]
        for step in range(self.steps):
            t = chunk.new_full((len(chunk), 1), 1 - step / self.steps)
            times = torch.cat([t, torch.full_like(t, 1 / self.steps)], 1)
            chunk = chunk - predict(chunk, SLOWER * times) / self.steps  # (1)
        return chunk
