"""Normalises states and scales actions by statistics of the data (mean, std, range, quantiles); builds the MLP."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from serl_client.errors import ConfigError
from serl_client.spec import Array, Feature, Spec
from torch import Tensor, nn

from serl_launcher.types import Observation

Statistics = Mapping[str, Mapping[str, Array]]  # {"mean": {"action": [...]}, ...}; see replay/statistics.py

SCALES = ("bounds", "range", "std", "quantile")
ENDS = {"range": ("low", "high"), "quantile": ("q01", "q99")}  # statistics that become -1 and 1
CONSTANT = 1e-3  # an action that varies by less than this share of its bounds counts as constant
SMALLEST_STD = 1e-4  # a state with less (0.1 mm, 0.1 mrad) is noise around a constant: it is centred, not scaled


def mlp(inputs: int, hidden: Sequence[int], outputs: int, *, layer_norm: bool) -> nn.Sequential:
    """Make an MLP [B, inputs] -> [B, outputs]. Each layer of `hidden` widths has an optional LayerNorm and a ReLU."""
    layers: list[nn.Module] = []
    for width in hidden:
        layers += [nn.Linear(inputs, width), *([nn.LayerNorm(width)] if layer_norm else []), nn.ReLU()]
        inputs = width
    return nn.Sequential(*layers, nn.Linear(inputs, outputs))


class Normaliser(nn.Module, ABC):
    """A module that fits to statistics of the data, unless it was given some with its weights."""

    is_given = False  # True: the statistics came with the weights, and stay

    @abstractmethod
    def set_statistics(self, statistics: Statistics) -> None:
        """Normalise by these statistics from now on."""


class StateEncoder(Normaliser):
    """Concatenate the float features of a Spec, sorted by name, normalised by a fixed mean and std.

    Until `set_statistics`, mean is 0 and std is 1. Both are buffers: they are stored and published with the weights,
    and do not change during training. Raises ConfigError for a Spec without float features.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        floats = {name: feature for name, feature in spec.observation.items() if feature.dtype.startswith("float")}
        self.sizes = {name: math.prod(floats[name].shape) for name in sorted(floats)}
        self.size = sum(self.sizes.values())
        if not self.size:
            raise ConfigError(
                f"no observation of {sorted(spec.observation)} is a float: nothing for a state policy. To see cameras, "
                "say algo=rlpd_pixels, or name them, as in 'policy.encoder.cameras=[all]'"
            )
        self.register_buffer("mean", torch.zeros(self.size))
        self.register_buffer("std", torch.ones(self.size))

    def set_statistics(self, statistics: Statistics) -> None:
        """Set mean and std, {name: [...]} shaped as in the Spec. Other names are ignored."""
        if self.is_given:
            return
        for buffer, statistic in ((self.mean, statistics["mean"]), (self.std, statistics["std"])):
            buffer.copy_(torch.cat([torch.as_tensor(statistic[name]).reshape(-1) for name in self.sizes]))
        self.std[self.std < SMALLEST_STD] = 1

    def keep(self, mean: Tensor, std: Tensor) -> None:
        """Normalise by these [size] for good."""
        self.mean.copy_(mean)
        self.std.copy_(std)
        self.is_given = True

    def forward(self, observation: Observation) -> Tensor:
        """Encode {name: [B, ...]}, with or without a time axis of one step -> [B, size]."""
        columns = [observation[name].reshape(len(observation[name]), -1) for name in self.sizes]
        joined = columns[0] if len(columns) == 1 else torch.cat(columns, -1)
        return joined.to(self.mean.dtype).sub(self.mean).div_(self.std)


class ActionScale(Normaliser):
    """Map actions [..., A] between the robot's units and the network's numbers near [-1, 1].

    kind: `bounds`: the Spec's bounds become -1 and 1. `range`: the smallest and largest action of the data become -1
        and 1. `quantile`: the data's quantiles of 1 and 99 % become -1 and 1, as for pi0.5 in openpi. `std`: the data
        get mean 0 and standard deviation 1. These three are for bounds much wider than the actions that the robot uses.
        They equal `bounds` until `set_statistics`, and are published with the weights. Their zero comes from the data
        alone, whatever the Spec says of the neutral action.
    column: column of the data that holds the actions.
    entries: indices of the actions in that column's flattened values; None: all.

    Where the Spec says a neutral action, it is the zero of `bounds`, and the map is linear on either side of it, up to
    1 and down to -1. An entry whose neutral value is one of its bounds has one side alone: numbers on the other side
    are clipped to that bound, as the brake of Ha and Schmidhuber 2018 is, clip(tanh, 0, 1) (carracing/model.py of
    their WorldModelsExperiments). So to_unit is exact for every action, and from_unit takes it back; see `executed`.
    Raises ConfigError for another kind, and for a choice of actions (Feature.one_hot).
    """

    low: Tensor
    high: Tensor
    center: Tensor
    half_range: Tensor
    sides: Tensor

    def __init__(
        self, action: Feature, kind: str = "bounds", column: str = "action", entries: Sequence[int] | None = None
    ) -> None:
        super().__init__()
        if kind not in SCALES:
            raise ConfigError(f"policy.scale={kind}: say one of {', '.join(SCALES)}")
        if action.one_hot:
            raise ConfigError(
                f"this robot takes one of {action.shape[0]} actions, and the algorithm gives continuous ones: say "
                "plan=dreamer algo=dreamer"
            )
        self.kind, self.column, self.entries = kind, column, entries
        low, high = (np.asarray(bound, np.float32) for bound in (action.low, action.high))
        self.register_buffer("low", torch.as_tensor(low), persistent=False)  # not stored: known from the Spec
        self.register_buffer("high", torch.as_tensor(high), persistent=False)
        self._has_sides = kind == "bounds" and action.neutral is not None
        center = np.asarray(action.neutral, np.float32) if self._has_sides else (high + low) / 2
        below, above = center - low, high - center
        sides = np.stack([np.where(below > 0, below, above), np.where(above > 0, above, below)])
        self.register_buffer("center", torch.as_tensor(center), persistent=kind != "bounds")
        self.register_buffer("half_range", torch.as_tensor((high - low) / 2), persistent=kind != "bounds")
        self.register_buffer("sides", torch.as_tensor(sides), persistent=False)  # [2, A], below and above the neutral
        is_unit = bool((low == -1).all() and (high == 1).all() and (center == 0).all())
        self._is_unit = kind == "bounds" and is_unit  # both maps change nothing

    def set_statistics(self, statistics: Statistics) -> None:
        """Scale by the data's statistics from now on, unless the kind is `bounds`.

        Data outside the Spec's bounds do not count. A constant entry is scaled by 10 * CONSTANT of its bounds, so that
        its later values stay small enough to learn.
        """
        if self.kind == "bounds" or self.is_given:
            return
        if self.kind == "std":
            mean, std = (self._own(statistics[name]) for name in ("mean", "std"))
        else:
            low, high = (self._own(statistics[name]) for name in ENDS[self.kind])
            low, high = torch.maximum(low, self.low), torch.minimum(high, self.high)
            mean, std = (low + high) / 2, (high - low) / 2
        self.center.copy_(torch.clamp(mean, self.low, self.high))
        bounds = (self.high - self.low) / 2
        self.half_range.copy_(torch.where(std < CONSTANT * bounds, 10 * CONSTANT * bounds, std))

    def keep(self, mean: Tensor, std: Tensor) -> None:
        """Scale by these [A] for good."""
        self.center.copy_(mean)
        self.half_range.copy_(std)
        self.is_given = True

    def _own(self, statistic: Mapping[str, Array]) -> Tensor:
        values = torch.as_tensor(statistic[self.column], dtype=self.low.dtype, device=self.low.device).reshape(-1)
        return values if self.entries is None else values[list(self.entries)]

    def to_unit(self, action: Tensor) -> Tensor:
        """Map [..., A] in the robot's units to [..., A] near [-1, 1]."""
        action = action.to(self.center.dtype)
        if self._is_unit:
            return action
        distance = action - self.center
        return distance / self._scale_of(distance)

    def from_unit(self, action: Tensor) -> Tensor:
        """Map [..., A] near [-1, 1] to [..., A] in the robot's units."""
        if self._is_unit:
            return action
        mapped = torch.addcmul(self.center, action, self._scale_of(action))
        return mapped.clamp(self.low, self.high) if self._has_sides else mapped

    def executed(self, action: Tensor) -> Tensor:
        """Return what `to_unit` gives of the actions that the robot executes for [..., A] near [-1, 1].

        A model that learns from executed actions is asked about these, where the Spec says a neutral action. Elsewhere
        they stay as they are.
        """
        return action.clamp(*self.limits()) if self._has_sides else action

    def _scale_of(self, distance: Tensor) -> Tensor:
        """Return what 1 is worth in the robot's units, on the side of the center that `distance` [..., A] is on."""
        return torch.where(distance < 0, *self.sides) if self._has_sides else self.half_range

    def limits(self) -> tuple[Tensor, Tensor]:
        """Return the Spec's bounds, mapped by `to_unit`: low [A], high [A]."""
        return self.to_unit(self.low), self.to_unit(self.high)
