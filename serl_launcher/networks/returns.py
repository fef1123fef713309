"""Computes returns of windows [B, T], for any pattern of ends: discounted, n-step, and lambda returns.

Each takes, for every step, `value_next` [B, T]: the value of the observation that follows it. A step that `terminated`
takes nothing of what follows. A step that `truncated`, and a window's last one, take `value_next`: the steps behind
belong to another episode, or are not in the window.
"""

import torch
from torch import Tensor


def discounted_return(
    reward: Tensor, value_next: Tensor, terminated: Tensor, truncated: Tensor, *, discount: float
) -> Tensor:
    """Return G_t = r_t + discount G_{t+1} up to the episode's end or the window's -> [B, T]; all given are [B, T]."""
    return lambda_return(reward, value_next, terminated, truncated, discount=discount, share=1.0)


def n_step_return(
    reward: Tensor, value_next: Tensor, terminated: Tensor, truncated: Tensor, *, discount: float, steps: int
) -> Tensor:
    """Return the sum of `steps` rewards and what follows them -> [B, T]; fewer where an end comes before.

    Sutton and Barto 2018, equation 7.1. Raises ValueError for less than one step.
    """
    if steps < 1:
        raise ValueError(f"an n-step return has at least one step, not {steps}")
    is_end, kept = _ends(truncated), discount * ~terminated
    found = reward + kept * value_next
    for _ in range(steps - 1):
        found = reward + kept * torch.where(is_end, value_next, found.roll(-1, 1))
    return found


def lambda_return(
    reward: Tensor, value_next: Tensor, terminated: Tensor, truncated: Tensor, *, discount: float | Tensor, share: float
) -> Tensor:
    """Return R_t = r_t + discount ((1 - share) V_{t+1} + share R_{t+1}) -> [B, T], where `share` is lambda.

    discount: of each step, or one for all. Sutton and Barto 2018, equation 12.2. Dreamer's returns are these; its
    imagined steps end by the probability that is in their discount.
    """
    is_end, kept = _ends(truncated), discount * ~terminated
    following, found = value_next[:, -1], []
    for step in reversed(range(reward.shape[1])):
        mixed = torch.lerp(value_next[:, step], following, share)
        following = reward[:, step] + kept[:, step] * torch.where(is_end[:, step], value_next[:, step], mixed)
        found.append(following)
    return torch.stack(found[::-1], 1)


def _ends(truncated: Tensor) -> Tensor:
    """Say behind which steps [B, T] nothing of this episode follows in the window, unless it terminated there."""
    last = torch.arange(truncated.shape[1], device=truncated.device) == truncated.shape[1] - 1
    return truncated | last
