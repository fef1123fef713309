"""Computes attention whose query heads share keys and values (multi-query: Shazeer 2019, arXiv 1911.02150), for PI0.

The heads that share are rows of one long query: so nothing is copied for each of them. Kernels read a mask as numbers
that are added, and are fast where the number of keys is a multiple of ALIGNED: `bias` makes both once for all layers.
Such a kernel leaves most of a GPU idle where few tokens look at many keys, as each step of PI0's sampler does: there,
plain matrix products are faster (docs/evidence/gpu.md).
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

ALIGNED = 8
FEW = 4  # times as many keys as queries: faster by plain products at 7 and 17 times, slower at once as many


def bias(sees: Tensor, groups: int, dtype: torch.dtype) -> Tensor:
    """Return what `attention` adds to its scores: 0 where a token sees, else -inf; [B, 1, 1 or T groups, S].

    sees: bool [B, 1 or T, keys]; 1: all tokens see alike. groups: query heads for each head of keys.
    S is the number of keys, rounded up to a multiple of ALIGNED.
    """
    sees = functional.pad(sees, (0, -sees.shape[-1] % ALIGNED))
    added = torch.zeros(sees.shape, dtype=dtype, device=sees.device).masked_fill(~sees, -math.inf)
    if added.shape[1] > 1:
        added = added.unsqueeze(2).expand(-1, -1, groups, -1).flatten(1, 2)
    return added.unsqueeze(1)


def joined(parts: Sequence[Tensor], count: int) -> Tensor:
    """Join keys or values [B, heads, T, size] of several parts, with zeros behind them up to `count` tokens."""
    missing = count - sum(part.shape[2] for part in parts)
    if missing:
        batch, heads, _, size = parts[0].shape
        parts = [*parts, parts[0].new_zeros(batch, heads, missing, size)]
    return torch.cat(list(parts), 2) if len(parts) > 1 else parts[0]


def attention(query: Tensor, keys: Tensor, values: Tensor, added: Tensor) -> Tensor:
    """Attend with query [B, heads, T, size] -> [B, T, heads size].

    keys, values: [B, key heads, S, size]. added: what `bias` returned.
    """
    rows = query.unflatten(1, (keys.shape[1], -1)).transpose(2, 3)  # [B, key heads, T, groups, size]
    long = rows.flatten(2, 3)
    if query.shape[2] * FEW > keys.shape[2] or torch.is_grad_enabled():  # a gradient would keep all scores
        heard = functional.scaled_dot_product_attention(long, keys, values, attn_mask=added)
    else:
        scores = long @ keys.transpose(2, 3) * query.shape[-1] ** -0.5 + added
        heard = scores.softmax(-1, dtype=torch.float32).to(values.dtype) @ values
    return heard.unflatten(2, rows.shape[2:4]).transpose(1, 2).flatten(2)
