"""Builds ensembles of critics (Q networks): value distributions (C51, two-hot, HL-Gauss), minimum for targets.

How an ensemble of E critics represents values (`values`, one yaml of config/critic each):
    Scalar: one number, learned by its squared error.
    C51: a distribution over K atoms (Bellemare et al. 2017, arXiv 1707.06887). Its target is the distribution of the
        next value, moved by the Bellman equation and projected on the atoms: equation 7 there.
    TwoHot: K logits over symlog(value), sign(y) ln(1 + |y|) (Hafner et al. 2023, arXiv 2301.04104). The target is a
        number, shared by the two nearest bins.
    HLGauss: K logits over intervals (Farebrother et al. 2024, arXiv 2403.03950). The target is a number, spread as a
        normal distribution: p_i = [Phi((e_{i+1} - y) / s) - Phi((e_i - y) / s)] / Z, with s in widths of an interval.
The last three are learned by their cross-entropy, which does not depend on the size of the returns. C51 and HLGauss
know values within a range alone, and clip targets to it.

An ensemble takes as the value of a target (`Critic.target`): of m critics, drawn at random as in RLPD, the mean of the
lowest share, minus k standard deviations. The lowest alone is the minimum of SAC and RLPD, all of them are the mean.
"""

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from serl_client.errors import ConfigError
from serl_client.spec import Spec
from torch import Tensor, nn

from serl_launcher.networks.mlp import ActionScale
from serl_launcher.networks.vision import ObservationEncoder
from serl_launcher.types import Observation

LEAST = 1e-4  # added to each bin of what an untrained critic says, so that no bin begins as impossible

Backup = Callable[[Tensor], Tensor]  # maps values of what follows [..., B] to targets [..., B]


@dataclass(frozen=True, slots=True, eq=False)
class Spread:
    """A distribution of each row's target: values [N, B] with their shares [N, B], which sum to 1."""

    values: Tensor
    shares: Tensor


Target = Tensor | Spread  # a number of each row [B], or its distribution


class EnsembleLinear(nn.Module):
    """E linear layers at once: [E, B, inputs] -> [E, B, outputs], each initialised as nn.Linear is."""

    def __init__(self, num_critics: int, inputs: int, outputs: int) -> None:
        super().__init__()
        bound = 1 / math.sqrt(inputs)
        self.weight = nn.Parameter(torch.empty(num_critics, inputs, outputs).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(num_critics, 1, outputs).uniform_(-bound, bound))

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.baddbmm(self.bias, inputs, self.weight)


class EnsembleHead(nn.Module):
    """E linear layers with one output each: [E, B, inputs] -> [E, B].

    It uses a product and a sum: on a CPU these are twice as fast, forward and backward, as a matrix product with one
    column.
    """

    def __init__(self, num_critics: int, inputs: int) -> None:
        super().__init__()
        bound = 1 / math.sqrt(inputs)
        self.weight = nn.Parameter(torch.empty(num_critics, 1, inputs).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(num_critics, 1).uniform_(-bound, bound))

    def forward(self, inputs: Tensor) -> Tensor:
        return (inputs * self.weight).sum(-1) + self.bias


class Values(nn.Module, ABC):
    """How E critics represent the values of B rows. Their predictions are [E, B], or [E, B, K] with K logits."""

    @abstractmethod
    def layer(self, num_critics: int, inputs: int) -> nn.Module:
        """Make the last layer of E critics: [E, B, inputs] -> predictions."""

    @abstractmethod
    def mean(self, prediction: Tensor) -> Tensor:
        """Return the values [E, B] that predictions mean."""

    @abstractmethod
    def loss(self, prediction: Tensor, target: Target) -> Tensor:
        """Return the loss of each critic and row [E, B]."""

    def target(self, prediction: Tensor, order: Tensor, value: Tensor, backup: Backup) -> Target:
        """Return the target that follows from an ensemble's value [B].

        order: [n, B], the critics of the prediction whose mean it is, though it may be less by a penalty.
        """
        return backup(value)

    def outside(self, target: Target) -> Tensor | None:
        """Return the share of the targets that are clipped []; None: these values have no range."""
        return None


class Scalar(Values):
    """One number, learned by its squared error."""

    def layer(self, num_critics: int, inputs: int) -> nn.Module:
        return EnsembleHead(num_critics, inputs)

    def mean(self, prediction: Tensor) -> Tensor:
        return prediction

    def loss(self, prediction: Tensor, target: Target) -> Tensor:
        assert isinstance(target, Tensor)
        return (prediction - target).square()


class Binned(Values):
    """K logits over bins between `low` and `high`, learned by their cross-entropy. An untrained critic says about 0.

    Raises ConfigError for less than two bins, and if `low` is not below `high`.
    """

    centers: Tensor  # [K], what the bins mean

    def __init__(self, bins: int, low: float, high: float, *, of_intervals: bool = False) -> None:
        super().__init__()
        if bins < 2 or low >= high:
            raise ConfigError(
                f"critic.values: {bins} bins from {low} to {high}: say at least two, and a `low` that is below `high`"
            )
        self.low, self.high, self.bins = low, high, bins
        self.width = (high - low) / (bins if of_intervals else bins - 1)
        first = low + self.width / 2 if of_intervals else low
        self.register_buffer("centers", first + self.width * torch.arange(bins), persistent=False)

    @abstractmethod
    def encode(self, value: Tensor) -> Tensor:
        """Return the probabilities of the bins for numbers [...] -> [..., K]."""

    def layer(self, num_critics: int, inputs: int) -> nn.Module:
        layer = EnsembleLinear(num_critics, inputs, self.bins)
        with torch.no_grad():
            layer.weight.zero_()
            layer.bias.copy_((self.encode(torch.zeros(())) + LEAST).log().expand_as(layer.bias))
        return layer

    def mean(self, prediction: Tensor) -> Tensor:
        return prediction.softmax(-1) @ self.centers

    def loss(self, prediction: Tensor, target: Target) -> Tensor:
        if isinstance(target, Spread):
            shares = (self.encode(target.values) * target.shares.unsqueeze(-1)).sum(0)  # [B, K]
        else:
            shares = self.encode(target)
        return -(shares * prediction.log_softmax(-1)).sum(-1)

    def outside(self, target: Target) -> Tensor | None:
        values, shares = (target.values, target.shares) if isinstance(target, Spread) else (target, torch.ones(()))
        is_clipped = (values < self.low - self.width) | (values > self.high + self.width)
        return (is_clipped * shares).sum() / values.shape[-1]

    def _shared(self, position: Tensor) -> Tensor:
        """Share numbers [...] between the bins before and behind their position, in bins from the first one."""
        position = position.clamp(0, self.bins - 1).unsqueeze(-1)
        return (1 - (position - torch.arange(self.bins, device=position.device)).abs()).clamp(min=0)


class C51(Binned):
    """A distribution over `atoms` values from `low` to `high`."""

    def __init__(self, *, atoms: int, low: float, high: float) -> None:
        super().__init__(atoms, low, high)

    def encode(self, value: Tensor) -> Tensor:
        return self._shared((value - self.low) / self.width)

    def target(self, prediction: Tensor, order: Tensor, value: Tensor, backup: Backup) -> Target:
        """Return the atoms, moved, with the mean of those critics' distributions; the penalty moves them down."""
        lowest = prediction.gather(0, order.unsqueeze(-1).expand(-1, -1, self.bins))  # [n, B, K]
        shares = lowest.softmax(-1).mean(0)  # [B, K]
        penalty = shares @ self.centers - value
        return Spread(backup(self.centers.unsqueeze(-1) - penalty), shares.T)


class TwoHot(Binned):
    """Logits over `bins` values of symlog(value), from -`reach` to `reach`: 10 reaches values of 22,000."""

    def __init__(self, *, bins: int, reach: float) -> None:
        super().__init__(bins, -reach, reach)

    def encode(self, value: Tensor) -> Tensor:
        return self._shared((symlog(value) - self.low) / self.width)

    def mean(self, prediction: Tensor) -> Tensor:
        return symexp(super().mean(prediction))

    def outside(self, target: Target) -> Tensor | None:
        assert isinstance(target, Tensor)
        return super().outside(symlog(target))


class HLGauss(Binned):
    """Logits over `bins` intervals from `low` to `high`. sigma: of the normal distribution, in widths of an interval.

    A value nearer to an end than two or three intervals is drawn inwards, so leave some room at both.
    """

    edges: Tensor

    def __init__(self, *, bins: int, low: float, high: float, sigma: float) -> None:
        super().__init__(bins, low, high, of_intervals=True)
        self.scale = math.sqrt(2) * sigma * self.width  # of erf, which has no factor of its own
        self.register_buffer("edges", low + self.width * torch.arange(bins + 1), persistent=False)

    def encode(self, value: Tensor) -> Tensor:
        below = torch.erf((self.edges - value.clamp(self.low, self.high).unsqueeze(-1)) / self.scale)  # [..., K + 1]
        return below.diff(dim=-1) / (below[..., -1:] - below[..., :1])


def symlog(value: Tensor) -> Tensor:
    return value.sign() * value.abs().log1p()


def symexp(value: Tensor) -> Tensor:
    return value.sign() * value.abs().expm1()


class Critic(nn.Module):
    """E estimates of Q(observation, actions): MLPs that share only their encoder.

    horizon: h. A chunk's first h actions count, as one action of h * A numbers. 0: they estimate the value V of an
        observation.
    values: makes what represents a value. hidden: widths of the layers, each with an optional LayerNorm and a ReLU.
    num_critics: E. num_target_critics: m, how many of them are drawn for each target; all, if there are no more.
    lowest: share of the drawn critics, the lowest, whose mean a target takes. 0: the lowest alone; 1: the mean of all.
    std_penalty: k, standard deviations of the drawn critics by which a target is lower.
    scale: how the policy scales actions. Wide bounds, or data's statistics, leave critics the same numbers as the
        policy. None: the Spec's bounds.
    Raises ConfigError for numbers of critics below 1, and for a share outside of 0 to 1.
    """

    changeable = ("num_target_critics", "lowest", "std_penalty")  # see config.changeable

    def __init__(
        self, spec: Spec, *, encoder: ObservationEncoder, horizon: int, values: Callable[[], Values],
        hidden: Sequence[int], layer_norm: bool, num_critics: int, num_target_critics: int, lowest: float,
        std_penalty: float, scale: ActionScale | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        if num_critics < 1 or num_target_critics < 1 or not 0 <= lowest <= 1:
            raise ConfigError(
                "critic: num_critics and num_target_critics are at least 1, lowest is a share between 0 and 1, not "
                f"num_critics={num_critics}, num_target_critics={num_target_critics}, lowest={lowest}"
            )
        self.horizon = horizon
        self.num_critics, self.num_drawn = num_critics, min(num_critics, num_target_critics)
        self.num_lowest = max(1, math.ceil(lowest * self.num_drawn))
        self.std_penalty = std_penalty
        self.encoder, self.values = encoder, values()
        self.scale = copy.deepcopy(scale) if scale else ActionScale(spec.action)
        layers: list[nn.Module] = []
        inputs = self.encoder.size + horizon * spec.action.shape[0]
        for width in hidden:
            norm = [nn.LayerNorm(width, elementwise_affine=False)] if layer_norm else []
            layers += [EnsembleLinear(num_critics, inputs, width), *norm, nn.ReLU()]
            inputs = width
        self.network = nn.Sequential(*layers, self.values.layer(num_critics, inputs))

    def forward(self, observation: Observation, action: Tensor) -> Tensor:
        """Predict [E, B, ...] for observation {name: [B, ...]} and chunks [B, H, A] in the robot's units, H >= h.

        n actions of each observation, [n, B, H, A], are predicted at once: [E, n, B, ...].
        """
        features, unit = self.encoder(observation), self.scale.to_unit(action[..., : self.horizon, :]).flatten(-2)
        if unit.ndim == 3:  # an observation is encoded once for all its actions
            inputs = torch.cat([features.expand(len(unit), -1, -1), unit], -1).flatten(0, 1)
            return self.network(inputs.expand(self.num_critics, -1, -1)).unflatten(1, unit.shape[:2])
        return self.network(torch.cat([features, unit], -1).expand(self.num_critics, -1, -1))

    def mean_value(self, observation: Observation, action: Tensor) -> Tensor:
        """Return the ensemble's mean value [B] of chunks [B, H, A], or [n, B] of n chunks for each observation."""
        return self.value(observation, action).mean(0)

    def loss(self, prediction: Tensor, target: Target) -> Tensor:
        """Sum the losses of predictions [E, B, ...] over the ensemble -> [B]."""
        return self.values.loss(prediction, target).sum(0)

    def value(self, observation: Observation, action: Tensor) -> Tensor:
        """Return Q(observation, action) of each critic [E, B], or [E, n, B], in the units of the return."""
        return self.values.mean(self(observation, action))

    def state_value(self, observation: Observation) -> Tensor:
        """Return V(observation) of each critic [E, B], of critics with a horizon of 0."""
        center = self.scale.center
        return self.value(observation, center.new_zeros(len(next(iter(observation.values()))), 0, len(center)))

    @torch.no_grad()
    def target(self, observation: Observation, action: Tensor, backup: Backup, generator: torch.Generator) -> Target:
        """Compute the target of `loss`: what `backup` makes of Q(observation, action), which follows.

        backup: maps values [..., B] to targets [..., B], such as y = r + gamma V. generator: draws the critics.
        """
        prediction = self(observation, action)
        if self.num_drawn < self.num_critics:
            drawn = torch.randperm(self.num_critics, generator=generator)[: self.num_drawn]
            prediction = prediction[drawn.to(prediction.device, non_blocking=True)]
        values = self.values.mean(prediction)  # [m, B]
        if self.num_lowest == 1:
            lowest, order = values.min(0, keepdim=True)
        else:
            lowest, order = values.topk(self.num_lowest, 0, largest=False)
        penalty = self.std_penalty * values.std(0, correction=0) if self.std_penalty else 0.0
        value = lowest[0] if self.num_lowest == 1 else lowest.mean(0)  # [B]
        return self.values.target(prediction, order, value - penalty, backup)
