"""Averages gradients over all ranks (GPUs) in buckets, as PyTorch's DDP does (Li et al. 2020, arXiv 2006.15704)."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed, nn

from serl_launcher.optim.distributed import World

BUCKET = 25 << 20  # bytes of gradients that are sent at once: each message costs its latency


class GradientAverage:
    """Averages the gradients of `weights`. Every rank has the same weights and makes the same calls.

    A bucket is sent once its gradients are there, while the others are still computed. All ranks send the buckets in
    one order, whatever the order in which gradients come. A gradient that only some ranks have is zero on the others. A
    weight that no rank has used keeps no gradient.
    """

    def __init__(self, weights: Sequence[nn.Parameter], world: World) -> None:
        self._world, self._buckets = world, list(_buckets(weights))
        self._lacking: list[int] = []  # gradients of each bucket that have not come
        self._there: list[bool] = []  # whether this rank had a gradient, for each weight of the buckets that were sent
        self._sent: list[tuple[Tensor, Any]] = []  # (gradients of a bucket, what to wait for)
        for number, bucket in enumerate(self._buckets):
            for weight in bucket:
                weight.register_post_accumulate_grad_hook(partial(self._came, number))

    def begin(self) -> None:
        """Average the gradients that the next backward pass completes."""
        self._lacking = [len(bucket) for bucket in self._buckets]
        self._there, self._sent = [], []

    def finish(self) -> None:
        """Send what is left, and wait until each weight has its average."""
        while len(self._sent) < len(self._buckets):
            self._send()
        used = torch.tensor(self._there, dtype=torch.int32)
        distributed.all_reduce(used, group=self._world.orders)  # on the CPU, so that nobody waits for a GPU
        ranks = iter(used.tolist())
        for bucket, (gradients, work) in zip(self._buckets, self._sent, strict=True):
            work.wait()
            parts = gradients.split([weight.numel() for weight in bucket])
            for weight, part in zip(bucket, parts, strict=True):
                weight.grad = part.view_as(weight) if next(ranks) else None
        self._lacking = []

    def _came(self, number: int, _: Tensor) -> None:
        if not self._lacking:
            return  # of a part of a batch that is not the last
        self._lacking[number] -= 1
        while len(self._sent) < len(self._buckets) and not self._lacking[len(self._sent)]:
            self._send()

    def _send(self) -> None:
        """Begin to average the next bucket. A bucket of one weight, which may be large, is not copied."""
        bucket = self._buckets[len(self._sent)]
        self._there += [weight.grad is not None for weight in bucket]
        parts = [(torch.zeros_like(each) if each.grad is None else each.grad).flatten() for each in bucket]
        gradients = torch.cat(parts) if len(parts) > 1 else parts[0]
        for weight in bucket:
            weight.grad = None
        gradients /= self._world.size
        self._sent.append((gradients, distributed.all_reduce(gradients, async_op=True)))


def _buckets(weights: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Yield groups of BUCKET bytes at most, or of one weight. The last layers come first, as in a backward pass."""
    bucket: list[nn.Parameter] = []
    for weight in reversed(weights):
        if bucket and sum(each.nbytes for each in [*bucket, weight]) > BUCKET:
            yield bucket
            bucket = []
        bucket.append(weight)
    if bucket:
        yield bucket
