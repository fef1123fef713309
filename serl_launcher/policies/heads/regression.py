"""Regression heads: predict the chunk in one pass; straight flow (Pan et al. 2025, arXiv 2512.01809).

With the chunk a and the network f(x, t, observation), asked at time t = 1:
    (1) regression     |f(0, 1) - a|^2,
    (2) straight flow  |f(z, 1) - a|^2,  z ~ N(0, I).
Both have their optimum at the mean of the chunks, E[a | observation], because z says nothing of a. A sample is f(0, 1).
"""

import torch
from torch import Tensor

from serl_launcher.networks.seeded_noise import normal
from serl_launcher.policies.heads.base import Head, Predict, Target, asked


class Regression(Head):
    """The mean chunk, by (1). Where demonstrations differ, it goes between them."""

    is_deterministic = mode_at_zero = True

    def errors(self, predict: Predict, target: Target) -> Tensor:
        return (asked(predict, torch.zeros_like(target.chunk), 1.0) - target.chunk).square()

    def sample(self, predict: Predict, noise: Tensor) -> Tensor:
        return asked(predict, noise.new_zeros(len(noise), self.horizon, self.width), 1.0)


class StraightFlow(Regression):
    """Regression whose network sees noise while it learns, by (2), and zeros when it acts."""

    def errors(self, predict: Predict, target: Target) -> Tensor:
        noise = normal(target.seed, (self.horizon, self.width))
        return (asked(predict, noise, 1.0) - target.chunk).square()
