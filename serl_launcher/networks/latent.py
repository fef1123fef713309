"""Builds TD-MPC2's world model without a decoder: encoder, latent dynamics, rewards, terminations and critics.

TD-MPC2: Hansen et al. 2024, "TD-MPC2: Scalable, Robust World Models for Continuous Control" (arXiv 2310.16828):
layers with LayerNorm and Mish, latents of simplices (SimNorm), numbers as two-hot logits. TD-MPC (Hansen et al. 2022,
arXiv 2203.04955) is the same with plain latents, two critics and scalar values.
"""

from collections.abc import Callable, Sequence

import torch
from serl_client.errors import ConfigError
from serl_client.spec import Spec
from torch import Tensor, nn

from serl_launcher.networks.critics import EnsembleLinear, Scalar, TwoHot
from serl_launcher.networks.mlp import ActionScale
from serl_launcher.networks.vision import ObservationEncoder
from serl_launcher.types import Observation

STD = 0.02  # of the initial weights, normal


class SimNorm(nn.Module):
    """Make each group of `size` numbers a distribution, by a softmax: [..., L] -> [..., L]."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, latent: Tensor) -> Tensor:
        return latent.unflatten(-1, (-1, self.size)).softmax(-1).flatten(-2)


class EnsembleNorm(nn.Module):
    """LayerNorm of [E, B, width], with a scale and an offset for each of E members."""

    def __init__(self, members: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(members, 1, width))
        self.bias = nn.Parameter(torch.zeros(members, 1, width))
        self.width = (width,)

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.addcmul(self.bias, nn.functional.layer_norm(inputs, self.width), self.weight)


class LatentCritics(nn.Module):
    """E critics Q(latent, action): [B, inputs] -> numbers or logits [E, B, outputs].

    dropout: share of the first layer's numbers that `forward` sets to zero where it is given a `generator`.
    """

    def __init__(self, inputs: int, hidden: Sequence[int], outputs: int, members: int, dropout: float) -> None:
        super().__init__()
        self.members, self.dropout = members, dropout
        widths = (inputs, *hidden)
        self.layers = nn.ModuleList(EnsembleLinear(members, *pair) for pair in zip(widths, hidden, strict=False))
        self.norms = nn.ModuleList(EnsembleNorm(members, width) for width in hidden)
        self.last = EnsembleLinear(members, widths[-1], outputs)

    def forward(self, inputs: Tensor, generator: torch.Generator | None = None) -> Tensor:
        features = inputs.expand(self.members, *inputs.shape)
        for place, (layer, norm) in enumerate(zip(self.layers, self.norms, strict=True)):
            features = layer(features)
            if place == 0 and generator is not None and self.dropout:
                chance = torch.rand(features.shape, generator=generator).to(features.device, non_blocking=True)
                kept = chance >= self.dropout
                features = features * kept / (1 - self.dropout)
            features = nn.functional.mish(norm(features))
        return self.last(features)


def normed(inputs: int, hidden: Sequence[int], outputs: int | None, last: nn.Module | None = None) -> nn.Sequential:
    """Make an MLP whose layers of `hidden` widths have a LayerNorm and Mish: [..., inputs] -> [..., outputs].

    outputs: of a linear layer behind them; None: there is none. last: in the place of the last Mish, or behind a linear
    layer of its own with a LayerNorm.
    """
    layers: list[nn.Module] = []
    for width in hidden:
        layers += [nn.Linear(inputs, width), nn.LayerNorm(width), nn.Mish()]
        inputs = width
    if outputs is not None:
        layers += [nn.Linear(inputs, outputs)]
    if last is not None and outputs is not None:
        layers += [nn.LayerNorm(outputs), last]
    return nn.Sequential(*layers)


class LatentModel(nn.Module):
    """Encode observations, and say of a latent [B, latent] and an action [B, A] in [-1, 1] what follows.

    encoder: makes the encoder of states and cameras from the Spec; its features pass `encoder_hidden` layers.
    latent: numbers of a latent. simplex: group size of SimNorm; 0: latents have no bounds, as in TD-MPC.
    hidden: widths of the layers of dynamics, rewards, terminations and critics.
    num_critics: E. dropout: of their first layer.
    bins, reach: of the logits that are rewards and values, see critics.TwoHot; bins 0: plain numbers, as in TD-MPC.
    episodic: True: it learns where episodes terminate. False: nothing terminates.
    Raises ConfigError for latents that are no whole simplices.
    """

    def __init__(
        self, spec: Spec, *, encoder: Callable[[Spec], ObservationEncoder], encoder_hidden: Sequence[int], latent: int,
        simplex: int, hidden: Sequence[int], num_critics: int, dropout: float, bins: int, reach: float,
        episodic: bool,
    ) -> None:  # fmt: skip
        super().__init__()
        if simplex and latent % simplex:
            raise ConfigError(f"algo.model: latent={latent} should be a multiple of simplex={simplex}")
        self.values, self.latent = TwoHot(bins=bins, reach=reach) if bins else Scalar(), latent
        self.scale, inputs, outputs = ActionScale(spec.action), latent + spec.action.shape[0], bins or 1

        def norm() -> nn.Module | None:
            return SimNorm(simplex) if simplex else None

        sensors = encoder(spec)
        self.inputs = sensors.inputs
        self.encoder = nn.ModuleDict(
            {"sensors": sensors, "layers": normed(sensors.size, encoder_hidden, latent, norm())}
        )
        self.dynamics = normed(inputs, hidden, latent, norm())
        self.rewards = normed(inputs, hidden, outputs)
        self.terminations = normed(latent, hidden, 1) if episodic else None
        self.critics = LatentCritics(inputs, hidden, outputs, num_critics, dropout)
        for part in (self.encoder["layers"], self.dynamics, self.rewards, self.terminations, self.critics):
            if part is not None:
                part.apply(initialise)
        for last in (self.rewards[-1], self.critics.last):
            assert isinstance(last, nn.Linear | EnsembleLinear)
            nn.init.zeros_(last.weight)

    def forward(
        self, observation: Observation, action: Tensor, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Follow T actions [B, T, A] in the model, from an observation {name: [B, ...]}.

        generator: of the critics' dropout; None: none. Returns latents [B, T+1, L], predictions of rewards [B, T, ...]
        and values [E, B, T, ...], and logits of a termination [B, T], None without episodes.
        """
        latents = [self.encode(observation)]
        for step in range(action.shape[1]):
            latents.append(self.following(latents[-1], action[:, step]))
        path = torch.stack(latents, 1)
        inputs = torch.cat([path[:, :-1], action], -1)
        values = self.critics(inputs.flatten(0, 1), generator).unflatten(1, inputs.shape[:2])
        logits = None if self.terminations is None else self.terminations(path[:, 1:]).squeeze(-1)
        return path, self._said(self.rewards(inputs)), self._said(values), logits

    def encode(self, observation: Observation) -> Tensor:
        """Encode {name: [B, ...]} -> [B, latent]."""
        return self.encoder["layers"](self.encoder["sensors"](observation))

    def encode_steps(self, observation: Observation) -> Tensor:
        """Encode {name: [B, T, ...]} -> [B, T, latent]."""
        steps = {name: observation[name] for name in self.inputs}
        shape = next(iter(steps.values())).shape[:2]
        return self.encode({name: value.flatten(0, 1) for name, value in steps.items()}).unflatten(0, shape)

    def following(self, latent: Tensor, action: Tensor) -> Tensor:
        """Return the next latent [..., L]."""
        return self.dynamics(self._with(latent, action))

    def reward(self, latent: Tensor, action: Tensor) -> Tensor:
        """Return the reward [...] of an action."""
        return self.values.mean(self._said(self.rewards(self._with(latent, action))))

    def judge(self, latent: Tensor, action: Tensor) -> Tensor:
        """Return what each critic says of actions of latents [B, L] -> [E, B]."""
        return self.judge_by(self.critics, latent, action)

    def judge_by(self, critics: LatentCritics, latent: Tensor, action: Tensor) -> Tensor:
        """Return what each of other critics, such as a target's, says likewise."""
        return self.values.mean(self._said(critics(self._with(latent, action))))

    def _with(self, latent: Tensor, action: Tensor) -> Tensor:
        return torch.cat([latent, self.scale.executed(action)], -1)

    def _said(self, prediction: Tensor) -> Tensor:
        """Drop the last axis of a number that has no logits."""
        return prediction.squeeze(-1) if isinstance(self.values, Scalar) else prediction


def initialise(layer: nn.Module) -> None:
    """Draw a layer's weights as TD-MPC2 does, with offsets of zero."""
    if isinstance(layer, nn.Linear | EnsembleLinear):
        nn.init.trunc_normal_(layer.weight, std=STD)
        nn.init.zeros_(layer.bias)
