"""Random numbers for the rows of a batch, as pure functions of each row's seed.

A row gets the same noise on every rank, in every micro-batch and on every device.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def normal(seed: Tensor, shape: Sequence[int], stream: int = 0) -> Tensor:
    """Draw standard normal float32 [B, *shape] from the rows' seeds [B] int64 (Box and Muller 1958).

    stream: number that separates draws from one seed.
    """
    first, second = (_uniform(seed, shape, 2 * stream + half) for half in (0, 1))
    return ((-2 * first.log()).sqrt() * (math.tau * second).cos()).float()


def uniform(seed: Tensor, shape: Sequence[int], stream: int) -> Tensor:
    """Draw uniform float32 in (0, 1), [B, *shape], as `normal` does; no stream of it collides with one of `normal`."""
    return _uniform(seed, shape, 2 * stream + 2**32).float().clamp(1e-7, 1 - 1e-7)


def _uniform(seed: Tensor, shape: Sequence[int], stream: int) -> Tensor:
    """Draw float64 in (0, 1): SplitMix64 (Steele et al. 2014) of seed, stream and place, in wrapping int64."""
    place = torch.arange(1, 1 + math.prod(shape), device=seed.device)
    bits = _mixed(_mixed(_mixed(seed) + stream).unsqueeze(1) + 0x1E3779B97F4A7C15 * place)
    return (((bits >> 11) & (2**53 - 1)).double() + 0.5).mul_(2.0**-53).view(len(seed), *shape)


def _mixed(bits: Tensor) -> Tensor:
    bits = (bits ^ (bits >> 30 & (2**34 - 1))) * -0x40A7B892E31B1A47  # 0xBF58476D1CE4E5B9
    bits = (bits ^ (bits >> 27 & (2**37 - 1))) * -0x6B2FB644ECCEEE15  # 0x94D049BB133111EB
    return bits ^ (bits >> 31 & (2**33 - 1))
