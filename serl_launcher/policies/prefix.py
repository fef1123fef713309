"""Continues the action chunk that is running: real-time chunking of a flow policy, trained or guided.

The question of an actor says which actions are left of the old chunk, y, and that the first d of them are committed.
trained (Black et al. 2025, arXiv 2512.05964): the network learns chunks whose first d rows are clean, at time 0, while
    the others have noise. A sample keeps y there. It costs nothing.
guided (Black et al. 2025, arXiv 2506.07339), for a network that did not learn that: each Euler step at time t pulls the
    chunk towards y, as images are inpainted (Pokle et al. 2023, arXiv 2310.04432). With the guess a = x - t v,
    (1) v <- v - min(GUIDANCE, (t^2 + (1 - t)^2) / (t (1 - t))) (da / dx)^T W (y - a),
    (2) W_i = 1 for i < d; c (e^c - 1) / (e - 1) with c = (r - i) / (r - d + 1) for d <= i < r; 0 from r on,
    where r rows are left of the old chunk. It costs a gradient by the network's input at each step.
"""

import math
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional

from serl_launcher.types import Observation, Prefix

GUIDANCE = 5.0  # largest weight of (1); the paper's
ACTION, COMMITTED, LEFT = "prefix.action", "prefix.committed", "prefix.left"  # added to a prepared observation


def named(prefix: Prefix | None, count: int, horizon: int, size: int, device: torch.device) -> dict[str, Tensor]:
    """Return the prefix of `count` chunks as tensors by name; without one, of chunks [horizon, size] that begin anew.

    So a graph of a `trained` policy has the same inputs with and without a prefix.
    """
    if prefix is None:
        none = torch.zeros(count, dtype=torch.int64, device=device)
        return {ACTION: torch.zeros(count, horizon, size, device=device), COMMITTED: none, LEFT: none}
    return {ACTION: prefix.action, COMMITTED: prefix.committed, LEFT: prefix.left}


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """The old chunk's rows in a sampler: `unit` [B, H, D] scaled, with zeros behind the robot's A numbers, and `action`
    [B, H, A] in the robot's units."""

    action: Tensor
    unit: Tensor
    committed: Tensor
    left: Tensor

    @classmethod
    def of(cls, prepared: Observation, unit: Tensor, n: int, width: int) -> Self:
        """Repeat the rows of a prepared observation for n samples each. unit: its actions, scaled [B, H, A]."""
        unit = functional.pad(unit, (0, width - unit.shape[-1]))
        action, committed, left = (prepared[name] for name in (ACTION, COMMITTED, LEFT))
        return cls(action.repeat(n, 1, 1), unit.repeat(n, 1, 1), committed.repeat(n), left.repeat(n))

    def first(self, most: int | None = None) -> Tensor:
        """Return which rows are committed, at most the first `most` -> bool [B, H]."""
        committed = self.committed if most is None else self.committed.clamp(max=most)
        return torch.arange(self.unit.shape[1], device=committed.device) < committed.unsqueeze(1)

    def weights(self) -> Tensor:
        """Compute W of (2) -> [B, H]."""
        row = torch.arange(self.unit.shape[1], device=self.left.device)
        left, committed = self.left.unsqueeze(1), self.committed.unsqueeze(1)
        c = ((left - row) / (left - committed + 1)).clamp(0, 1)
        return torch.where(row < committed, 1.0, c * (c.exp() - 1) / (math.e - 1))

    def kept(self, action: Tensor) -> Tensor:
        """Return actions [B, H, A] whose committed rows are the old ones, bit by bit."""
        return torch.where(self.first().unsqueeze(-1), self.action, action)


def strength(t: float) -> float:
    """Compute the factor of (1)."""
    return GUIDANCE if t >= 1 else min(GUIDANCE, (t**2 + (1 - t) ** 2) / (t * (1 - t)))
