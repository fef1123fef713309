"""Scales the actions of a chunk relative to the present state, as openpi's DeltaActions and AbsoluteActions do.

    (1) unit_i = (a_i - m s - center) / half_range,    i = 0..H-1,
where s is the state in the newest observation, the same for all steps of the chunk, by the names of the action's
entries; m is 1 for the chosen entries, such as joints, and 0 for the others, such as a gripper. Center and half range
are statistics of a_i - m s. Outside of the policy all actions stay in the robot's units: those of the robot, of critics
and of the chunk under way.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from serl_client.errors import ConfigError
from serl_client.spec import Spec
from serl_client.words import check_choice
from torch import Tensor, nn

from serl_launcher.networks.mlp import ActionScale
from serl_launcher.networks.vision import ALL
from serl_launcher.types import Observation

STATE = "observation.state"  # whose entry counts where several observations have one of that name
COLUMN = "action.relative"  # of the statistics: a_i - m s

Place = tuple[str, int]  # an observation, and an index in it


class RelativeScale(nn.Module):
    """Make the scale of chunks from an observation.

    names: the entries of the action that are relative; `all`: every one. kind: of ActionScale, other than bounds.

    Raises ConfigError for a name that the action does not have, for an entry without a state of its name and unit, and
    for another kind.
    """

    low: Tensor
    high: Tensor

    def __init__(self, spec: Spec, names: Sequence[str], kind: str) -> None:
        super().__init__()
        if kind == "bounds":
            raise ConfigError(
                "policy.scale=bounds is of the robot's limits, and relative actions have none: say policy.scale=range"
            )
        self.places = _places(spec, names)  # [A]: where the present value of each entry stands; None: not relative
        self.names = [name for name, place in zip(spec.action.names, self.places, strict=True) if place]
        low, high = (np.asarray(bound, np.float32) for bound in (spec.action.low, spec.action.high))
        is_relative, furthest = np.array([place is not None for place in self.places]), high - low
        self.scale = ActionScale(
            replace(
                spec.action, low=np.where(is_relative, -furthest, low), high=np.where(is_relative, furthest, high),
                neutral=None,
            ),
            kind, COLUMN,
        )  # fmt: skip
        self.register_buffer("low", torch.as_tensor(low), persistent=False)  # not stored: known from the Spec
        self.register_buffer("high", torch.as_tensor(high), persistent=False)

    def present(self, observation: Observation) -> Tensor:
        """Return m s of {name: [B, n], or [B, To, n]} -> [B, 1, A]."""
        zero = self.low.new_zeros(len(next(iter(observation.values()))))
        columns = [zero if place is None else _newest(observation[place[0]])[:, place[1]] for place in self.places]
        return torch.stack([column.to(self.low.dtype) for column in columns], -1).unsqueeze(1)

    def at(self, observation: Observation, n: int = 1) -> "Around":
        """Return the scale of n chunks for each of B observations, in the order rows 0..B-1, n times."""
        return Around(self.scale, self.present(observation).repeat(n, 1, 1), self.low, self.high)


@dataclass(frozen=True, slots=True, eq=False)
class Around:
    """An ActionScale of chunks [n B, H, A] around `present` [n B, 1, A]. low, high: the Spec's bounds [A]."""

    scale: ActionScale
    present: Tensor
    low: Tensor
    high: Tensor

    def to_unit(self, action: Tensor) -> Tensor:
        return self.scale.to_unit(action - self.present)

    def from_unit(self, action: Tensor) -> Tensor:
        return self.scale.from_unit(action) + self.present

    def limits(self) -> tuple[Tensor, Tensor]:
        """Return the Spec's bounds, mapped by `to_unit`: [n B, 1, A] each."""
        return self.to_unit(self.low), self.to_unit(self.high)


def _newest(value: Tensor) -> Tensor:
    return value[:, -1] if value.ndim > 2 else value


def _places(spec: Spec, names: Sequence[str]) -> list[Place | None]:
    """Return of each entry of the action where the state of its name stands, if it is relative."""
    own = spec.action.names
    if not own:
        raise ConfigError(
            f"policy.relative={list(names)}: this robot's action has no names, so no state is known to be of the same "
            "entry: say policy.relative=[]"
        )
    for name in names:
        check_choice(name, (*own, ALL), "entry of the action", "policy.relative")
    places: list[Place | None] = []
    for index, name in enumerate(own):
        unit = spec.action.units[index] if spec.action.units else ""
        is_wanted = ALL in names or name in names
        places.append(_place(spec, name, unit) if is_wanted else None)
    return places


def _place(spec: Spec, name: str, unit: str) -> Place:
    """Return where the state of this name stands. Raises ConfigError if there is none, several, or another unit."""
    floats = {column: each for column, each in spec.observation.items() if each.dtype.startswith("float")}
    found = [column for column, feature in floats.items() if name in feature.names]
    found = [STATE] if STATE in found else found
    cure = "leave it out of policy.relative"
    if len(found) != 1:
        there = " and ".join(found) or "no observation"
        raise ConfigError(f"policy.relative: the action's {name!r} is in {there}, and should be in one: {cure}")
    column, feature = found[0], floats[found[0]]
    index = feature.names.index(name)
    measured = feature.units[index] if feature.units else ""
    if unit != measured:
        raise ConfigError(
            f"policy.relative: {name!r} is in {measured or 'no unit'} in {column}, and in {unit or 'no unit'} in the "
            f"action, so it is no position there: {cure}"
        )
    return column, index
