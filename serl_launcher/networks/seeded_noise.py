"""Draws random numbers for the rows of a batch, as pure functions of each row's seed.

A row gets the same noise on every rank, in every micro-batch and on every device.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def normal(seed: Tensor, shape: Sequence[int], stream: int = 0) -> Tensor:
    """Draw standard normal float32 [B, *shape], none beyond 5.5, from the rows' seeds [B] int64.

    Each is the quantile of one uniform number. stream: number that separates draws from one seed.
    """
    return _drawn(seed, shape, stream).mul_(2).erfinv_().mul_(math.sqrt(2))


def uniform(seed: Tensor, shape: Sequence[int], stream: int) -> Tensor:
    """Draw uniform float32 in (0, 1), [B, *shape], as `normal` does; no stream of it collides with one of `normal`."""
    return _drawn(seed, shape, stream + 2**32).add_(0.5).clamp_(1e-7, 1 - 1e-7)


def _drawn(seed: Tensor, shape: Sequence[int], stream: int) -> Tensor:
    """Draw uniform float32 in (-0.5, 0.5), [B, *shape]: 24 bits of SplitMix64 (Steele et al. 2014) of seed, stream and
    place, in wrapping int64.

    Rows whose seeds differ by a multiple of its increment would share numbers; small and random seeds do not.
    """
    first = (stream * 0x632BE59BD9B4E019 + 2**63) % 2**64 - 2**63
    places = torch.arange(1, 1 + math.prod(shape), device=seed.device).mul_(0x1E3779B97F4A7C15).add_(first)
    bits = seed.unsqueeze(1) + places  # `>>` fills with the sign, whose bits are masked
    bits = (bits >> 30).bitwise_and_(2**34 - 1).bitwise_xor_(bits).mul_(-0x40A7B892E31B1A47)  # 0xBF58476D1CE4E5B9
    bits = (bits >> 27).bitwise_and_(2**37 - 1).bitwise_xor_(bits).mul_(-0x6B2FB644ECCEEE15)  # 0x94D049BB133111EB
    # SplitMix64 then mixes the upper bits into the lower ones, which are not used.
    return (bits >> 40).float().add_(0.5).mul_(2.0**-24).view(len(seed), *shape)
