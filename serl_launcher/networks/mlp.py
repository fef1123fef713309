"""Plain networks over states: what turns a robot's observation and action into numbers, and the MLP between them."""

import math
from collections.abc import Mapping, Sequence

import torch
from serl_client.errors import ConfigError
from serl_client.spec import Array, Feature, Spec
from torch import Tensor, nn

from serl_launcher.types import Observation

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

    def set_statistics(self, mean: Mapping[str, Array], std: Mapping[str, Array]) -> None:
        """Normalise by these, {name: [...]} shaped as in the Spec; names that are not read here are ignored."""
        for buffer, statistic in ((self.mean, mean), (self.std, std)):
            buffer.copy_(torch.cat([torch.as_tensor(statistic[name]).reshape(-1) for name in self.sizes]))
        self.std[self.std < SMALLEST_STD] = 1

    def forward(self, observation: Observation) -> Tensor:
        """{name: [B, ...]}, with or without a time axis of one step -> [B, size]."""
        columns = [observation[name].reshape(len(observation[name]), -1) for name in self.sizes]
        return (torch.cat(columns, -1).to(self.mean.dtype) - self.mean) / self.std


class ActionScale(nn.Module):
    """Maps actions between the robot's units and [-1, 1], by the bounds of the Spec."""

    center: Tensor
    half_range: Tensor

    def __init__(self, action: Feature) -> None:
        super().__init__()
        low, high = (torch.as_tensor(bound, dtype=torch.float32) for bound in (action.low, action.high))
        self.register_buffer("center", (high + low) / 2, persistent=False)  # known from the Spec
        self.register_buffer("half_range", (high - low) / 2, persistent=False)

    def to_unit(self, action: Tensor) -> Tensor:
        """[..., A] in the robot's units -> [..., A], within [-1, 1] if the action was within its bounds."""
        return (action.to(self.center.dtype) - self.center) / self.half_range

    def from_unit(self, action: Tensor) -> Tensor:
        """[..., A] within [-1, 1] -> [..., A] in the robot's units."""
        return torch.addcmul(self.center, action, self.half_range)
