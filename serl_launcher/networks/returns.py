"""Computes lambda returns of windows [B, T], for any pattern of ends."""

import torch
from torch import Tensor


def lambda_return(
    reward: Tensor, value_next: Tensor, terminated: Tensor, truncated: Tensor, *, discount: float | Tensor, share: float
) -> Tensor:
    """Return R_t = r_t + discount ((1 - share) V_{t+1} + share R_{t+1}) -> [B, T], where `share` is lambda.

    value_next: [B, T], the value of the observation that follows each step. A step that `terminated` takes nothing of
    what follows. A step that `truncated`, and a window's last one, take `value_next`: the steps behind belong to
    another episode, or are not in the window.
    discount: of each step, or one for all. Sutton and Barto 2018, equation 12.2. Dreamer's returns are these; its
    imagined steps end by the probability that is in their discount.
    """
    last = torch.arange(truncated.shape[1], device=truncated.device) == truncated.shape[1] - 1
    is_end, kept = truncated | last, discount * ~terminated
    following, found = value_next[:, -1], []
    for step in reversed(range(reward.shape[1])):
        mixed = torch.lerp(value_next[:, step], following, share)
        following = reward[:, step] + kept[:, step] * torch.where(is_end[:, step], value_next[:, step], mixed)
        found.append(following)
    return torch.stack(found[::-1], 1)
