"""Plain networks over states: what turns a robot's observation and action into numbers, and the MLP between them."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from serl_client.errors import ConfigError
from serl_client.spec import Array, Feature, Spec
from torch import Tensor, nn

from serl_launcher.types import Observation

Statistics = Mapping[str, Mapping[str, Array]]  # mean, std, low and high of columns: {"mean": {"action": [...]}, ...}

SCALES = ("bounds", "range", "std")
CONSTANT = 1e-3  # an action that varies by less than this share of its bounds is constant but for noise
SMALLEST_STD = 1e-4  # what varies less (0.1 mm, 0.1 mrad) is noise around a constant: it is centred and not scaled


def mlp(inputs: int, hidden: Sequence[int], outputs: int, *, layer_norm: bool) -> nn.Sequential:
    """[B, inputs] -> [B, outputs]: linear layers, each but the last followed by an optional LayerNorm and by a ReLU."""
    layers: list[nn.Module] = []
    for width in hidden:
        layers += [nn.Linear(inputs, width), *([nn.LayerNorm(width)] if layer_norm else []), nn.ReLU()]
        inputs = width
    return nn.Sequential(*layers, nn.Linear(inputs, outputs))


class StateEncoder(nn.Module):
    """The float features of a Spec side by side, in the order of their names, each normalised by a frozen mean and std.

    The statistics (identity until `set_statistics`) are buffers: they travel with the weights and never run along.
    Raises ConfigError for a Spec without float features.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        floats = {name: feature for name, feature in spec.observation.items() if feature.dtype.startswith("float")}
        self.sizes = {name: math.prod(floats[name].shape) for name in sorted(floats)}
        self.size = sum(self.sizes.values())
        if not self.size:
            raise ConfigError(f"no observation of {sorted(spec.observation)} is a float: nothing for a state policy")
        self.register_buffer("mean", torch.zeros(self.size))
        self.register_buffer("std", torch.ones(self.size))

    def set_statistics(self, statistics: Statistics) -> None:
        """Normalise by mean and std, {name: [...]} shaped as in the Spec; names that are not read here are ignored."""
        for buffer, statistic in ((self.mean, statistics["mean"]), (self.std, statistics["std"])):
            buffer.copy_(torch.cat([torch.as_tensor(statistic[name]).reshape(-1) for name in self.sizes]))
        self.std[self.std < SMALLEST_STD] = 1

    def forward(self, observation: Observation) -> Tensor:
        """{name: [B, ...]}, with or without a time axis of one step -> [B, size]."""
        columns = [observation[name].reshape(len(observation[name]), -1) for name in self.sizes]
        return (torch.cat(columns, -1).to(self.mean.dtype) - self.mean) / self.std


class ActionScale(nn.Module):
    """Maps actions [..., A] between the robot's units and the numbers near [-1, 1] that networks see.

    kind: `bounds`: the Spec's bounds become -1 and 1. `range`: the smallest and largest action of the data do. `std`:
    the data get mean 0 and standard deviation 1. The last two are for bounds far wider than what the robot does. They
    begin as `bounds`, until `set_statistics` freezes them, and travel with the weights.
    column, entries: the data's column that holds the actions, and which of its flattened values they are (None: all).
    Raises ConfigError for another kind.
    """

    low: Tensor
    high: Tensor
    center: Tensor
    half_range: Tensor

    def __init__(
        self, action: Feature, kind: str = "bounds", column: str = "action", entries: Sequence[int] | None = None
    ) -> None:
        super().__init__()
        if kind not in SCALES:
            raise ConfigError(f"policy.scale={kind}: say one of {', '.join(SCALES)}")
        self.kind, self.column, self.entries = kind, column, entries
        low, high = (np.asarray(bound, np.float32) for bound in (action.low, action.high))
        self.register_buffer("low", torch.as_tensor(low), persistent=False)  # known from the Spec
        self.register_buffer("high", torch.as_tensor(high), persistent=False)
        self.register_buffer("center", torch.as_tensor((high + low) / 2), persistent=kind != "bounds")
        self.register_buffer("half_range", torch.as_tensor((high - low) / 2), persistent=kind != "bounds")

    def set_statistics(self, statistics: Statistics) -> None:
        """Scale by these from now on, unless the kind is `bounds`. What the data hold outside of the bounds does not
        count. A constant entry is scaled by ten times CONSTANT, so that what it does later stays of a size to learn."""
        if self.kind == "bounds":
            return
        mean, std, low, high = (self._own(statistics[name]) for name in ("mean", "std", "low", "high"))
        if self.kind == "range":
            low, high = torch.maximum(low, self.low), torch.minimum(high, self.high)
            mean, std = (low + high) / 2, (high - low) / 2
        self.center.copy_(torch.clamp(mean, self.low, self.high))
        bounds = (self.high - self.low) / 2
        self.half_range.copy_(torch.where(std < CONSTANT * bounds, 10 * CONSTANT * bounds, std))

    def _own(self, statistic: Mapping[str, Array]) -> Tensor:
        values = torch.as_tensor(statistic[self.column], dtype=self.low.dtype, device=self.low.device).reshape(-1)
        return values if self.entries is None else values[list(self.entries)]

    def to_unit(self, action: Tensor) -> Tensor:
        """[..., A] in the robot's units -> [..., A]."""
        return (action.to(self.center.dtype) - self.center) / self.half_range

    def from_unit(self, action: Tensor) -> Tensor:
        """[..., A] near [-1, 1] -> [..., A] in the robot's units."""
        return torch.addcmul(self.center, action, self.half_range)

    def limits(self) -> tuple[Tensor, Tensor]:
        """The Spec's bounds as `to_unit` maps them: [A], [A]."""
        return self.to_unit(self.low), self.to_unit(self.high)
