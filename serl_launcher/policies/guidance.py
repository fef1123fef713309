"""Guides samples of a diffusion or flow: by gradients of critics, or by the task (classifier-free).

`weight` w, of a critic: the critic sees the guess a' of the denoised action, never the noisy one, and its slope is
    (1) g = w d/da' mean_e Q_e(s, a') / (mean |Q| + 1e-6),
by actions scaled to [-1, 1] and clipped to the bounds, with the mean of training, so that no row depends on others.
Each head says how the slope moves its guess: by the share of noise that is left. w = 0 is the policy alone.
`task_weight` u, of classifier-free guidance (Ho and Salimans 2022, arXiv 2207.12598): the network's answer is
    (2) null + u (conditioned - null),
where null has no task. u = 1 is the condition alone, above 1 is beyond it. (Others write 1 + u for this u.) The policy
has to be trained with the task left out in some rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from serl_launcher.networks.mlp import ActionScale
from serl_launcher.policies.heads.base import Predict, Slope
from serl_launcher.policies.relative import Around

DROPPED = 7  # stream of a row's random numbers for leaving its task or its condition out; no head or policy has it
LEAST = 1e-6  # added to the mean absolute value by which slopes are divided


@dataclass(frozen=True, slots=True, eq=False)
class Guidance:
    """value: maps chunks [B, H, A] in the robot's units to values [B]. size: mean |Q| []. weight, task_weight: w, u."""

    value: Callable[[Tensor], Tensor]
    size: Tensor
    weight: float
    task_weight: float = 1.0

    def slope(self, scale: ActionScale | Around) -> Slope:
        """Return (1) as a function of guesses [B, H, D], whose first A numbers are scaled actions."""
        low, high = scale.limits()
        numbers = low.shape[-1]

        def slope(guess: Tensor) -> Tensor:
            with torch.enable_grad():
                tried = guess[..., :numbers].detach().clamp(low, high).requires_grad_()
                (found,) = torch.autograd.grad(self.value(scale.from_unit(tried)).sum(), tried)
            moved = torch.zeros_like(guess)
            moved[..., :numbers] = self.weight * found / (self.size + LEAST)
            return moved

        return slope


def contrasted(conditioned: Predict, null: Predict, weight: float) -> Predict:
    """Return (2)."""

    def predict(chunk: Tensor, time: Tensor) -> Tensor:
        base = null(chunk, time)
        return base + weight * (conditioned(chunk, time) - base)

    return predict


def pick_words(which: Tensor, words: Sequence[str], others: Sequence[str]) -> tuple[str, ...]:
    """Return the words of the rows where `which` [B] is true, and the others elsewhere."""
    return tuple(one if is_one else other for is_one, one, other in zip(which.tolist(), words, others, strict=True))
