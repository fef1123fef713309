"""Sets apart the three versions of Dreamer, V1 to V3, beside their sizes and learning rates, which their yamls have.

V1: Hafner et al. 2020, "Dream to control" (arXiv 1912.01603). V2: Hafner et al. 2021, "Mastering Atari with discrete
world models" (arXiv 2010.02193). V3: dreamer.py. These rules are theirs; convolutions, distributions of actions and the
beginnings of weights are V3's in all.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from torch import Tensor, nn

from serl_launcher.networks import rssm
from serl_launcher.networks.critics import symlog
from serl_launcher.networks.world_heads import Mean, Scalar


@dataclass(frozen=True, slots=True)
class Rules:
    """Holds the rules of one version.

    latent, cell, layers, prior_layers: of the RSSM; `layers` are those of all other networks, too.
    squash: of vectors, before they are seen and predicted. scalar: head of rewards and values.
    reconstruction: factor on its loss; 0.5 makes it the likelihood of a normal with variance 1.
    dynamics, representation: factors on KL(sg(q) || p) and KL(q || sg(p)). free_nats: below these a divergence costs
        nothing; averaged: their mean over the batch does not, else each row's.
    climbs: the policy climbs the returns through the model, if its actions are continuous, instead of REINFORCE.
    normalises: whether advantages are divided by the range of returns.
    slow: what the slow value is for: the value stays near it (`anchor`), returns are made of it (`target`), or nothing.
    noise: standard deviation of what practice adds to an action near [-1, 1].
    """

    latent: rssm.Latent
    cell: Callable[..., nn.Module]
    layers: rssm.Layers
    prior_layers: int
    squash: Callable[[Tensor], Tensor]
    scalar: type[Scalar | Mean]
    reconstruction: float
    dynamics: float
    representation: float
    free_nats: float
    averaged: bool
    climbs: bool
    normalises: bool
    slow: Literal["anchor", "target", "nothing"]
    noise: float

    def divergence(self, posterior: Tensor, prior: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the two divergences of distributions [B, T, V, P], in nats: [B, T] each, [] if `averaged`."""
        both = self.latent.kl(posterior.detach(), prior), self.latent.kl(posterior, prior.detach())
        dynamics, representation = ((each.mean() if self.averaged else each).clamp(min=self.free_nats) for each in both)
        return dynamics, representation


def unchanged(vector: Tensor) -> Tensor:
    return vector


RULES: Mapping[str, Rules] = MappingProxyType({
    "v3": Rules(
        latent=rssm.Categorical(rssm.UNIMIX), cell=rssm.BlockGRU, layers=rssm.layers, prior_layers=2, squash=symlog,
        scalar=Scalar, reconstruction=1.0, dynamics=1.0, representation=0.1, free_nats=1.0, averaged=False,
        climbs=False, normalises=True, slow="anchor", noise=0.0,
    ),
    "v2": Rules(
        latent=rssm.Categorical(0.0), cell=rssm.NormedGRU, layers=rssm.plain, prior_layers=1, squash=unchanged,
        scalar=Mean, reconstruction=0.5, dynamics=0.8, representation=0.2, free_nats=1.0, averaged=True,
        climbs=True, normalises=False, slow="target", noise=0.0,
    ),
    "v1": Rules(
        latent=rssm.Gaussian(), cell=rssm.PlainGRU, layers=rssm.plain, prior_layers=1, squash=unchanged,
        scalar=Mean, reconstruction=0.5, dynamics=1.0, representation=1.0, free_nats=3.0, averaged=True,
        climbs=True, normalises=False, slow="nothing", noise=0.3,
    ),
})  # fmt: skip
