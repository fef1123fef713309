"""Attention with shared keys is the plain one, whatever is masked, and copies nothing for each head."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from serl_launcher.networks.attention import ALIGNED, attention, bias, joined

pytestmark = pytest.mark.usefixtures("one_thread")

BATCH, HEADS, SIZE = 3, 4, 8
MASKS = {  # [B, 1 or T, keys]
    "all": lambda own, keys: torch.ones(BATCH, 1, keys, dtype=torch.bool),
    "padding": lambda own, keys: (torch.arange(keys) < keys - torch.arange(BATCH)[:, None]).unsqueeze(1),
    "causal": lambda own, keys: torch.cat([
        torch.ones(BATCH, own, keys - own, dtype=torch.bool), torch.ones(own, own).tril().bool().expand(BATCH, -1, -1)
    ], 2),
}  # fmt: skip


def plain(query, keys, values, sees):
    """Every head for itself, with keys and values of its own."""
    groups = HEADS // keys.shape[1]
    keys, values = (each.repeat_interleave(groups, 1) for each in (keys, values))
    scores = torch.einsum("bhtd,bhsd->bhts", query, keys) / math.sqrt(SIZE)
    weights = scores.masked_fill(~sees.unsqueeze(1), -math.inf).softmax(-1)
    return torch.einsum("bhts,bhsd->bthd", weights, values).flatten(2)


class Largest(TorchDispatchMode):
    """How many numbers the largest tensor has that an operation makes in memory of its own."""

    numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        given, found = (
            [leaf for leaf in tree_leaves(part) if isinstance(leaf, torch.Tensor)] for part in ((args, kwargs), made)
        )
        there = {tensor.untyped_storage().data_ptr() for tensor in given}
        new = [tensor.numel() for tensor in found if tensor.untyped_storage().data_ptr() not in there]
        self.numbers = max([self.numbers, *new])
        return made


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("prefix", [0, 7, 16, 33], ids=lambda tokens: f"{tokens} before")  # of 0 to 3 cameras
@pytest.mark.parametrize("key_heads", [1, 2, HEADS])
def test_it_is_plain_attention_and_so_is_its_gradient(key_heads, prefix, mask):
    torch.manual_seed(0)
    own = 5
    query = torch.randn(BATCH, HEADS, own, SIZE, requires_grad=True)
    past, new = (
        [torch.randn(BATCH, key_heads, tokens, SIZE, requires_grad=True) for _ in range(2)] for tokens in (prefix, own)
    )
    sees = MASKS[mask](own, prefix + own)
    added = bias(sees, HEADS // key_heads, query.dtype)
    assert added.shape[-1] % ALIGNED == 0
    seen = [joined(pair, added.shape[-1]) for pair in zip(past, new, strict=True)]
    expected = plain(query, *(torch.cat(pair, 2) for pair in zip(past, new, strict=True)), sees)
    found = attention(query, *seen, added)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)
    with torch.no_grad():  # few tokens that look at many keys take another way
        torch.testing.assert_close(attention(query, *seen, added), expected, atol=1e-6, rtol=1e-5)
    direction, inputs = torch.randn_like(found), [query, *past, *new]
    gradients, others = (torch.autograd.grad((each * direction).sum(), inputs) for each in (found, expected))
    torch.testing.assert_close(gradients, others, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("way", [torch.no_grad, torch.enable_grad], ids=["by products", "by a kernel"])
def test_keys_and_values_are_there_once_for_all_heads(way):
    query = torch.randn(1, 1, HEADS, SIZE).transpose(1, 2)  # as a projection leaves it: [B, heads, T, size]
    keys, values = torch.randn(2, 1, 1, 800, SIZE)
    added = bias(torch.ones(1, 1, 800, dtype=torch.bool), HEADS, query.dtype)
    with way(), Largest() as largest:
        attention(query, keys, values, added)
    assert largest.numbers < keys.numel()
