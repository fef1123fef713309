"""Stops the run before NaN or infinity is published or kept, because one such value would ruin the policy for good.

An optimiser skips its step if a gradient is not finite (optim/optimizer.py). So one bad batch costs one update, which
is counted here, and traced to the episode that caused it (tracing.py). Many in a row that nothing in their batches
explains end the run, and so do bad weights, while the last good ones are still there.
"""

import logging
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from serl_client.errors import RetakeError
from torch import Tensor

log = logging.getLogger(__name__)

MOST_IN_A_ROW = 100  # steps that may be refused one after another before the run ends


def check_finite(tree: Any, doing: str) -> None:
    """Raise RetakeError if a float tensor in this tree of dicts holds NaN or infinity.

    doing: what was about to happen to the tensors, for the error's text.
    """
    if name := not_finite(tree):
        raise RetakeError(
            f"{name} holds a value that is not finite, so the learner stopped before {doing}. The last good weights "
            "and checkpoints are kept: give the same command to resume from them, with a smaller learning rate if it "
            "happens again"
        )


def not_finite(tree: Any) -> str:
    """Return the name of the first float tensor in this tree that holds NaN or infinity; empty if none does.

    Sums the tensors, because a sum carries either of them and takes a tenth of the time of a look at each number.
    """
    return next((name for name, tensor in _tensors(tree) if not _is_finite(tensor)), "")


class Refusals:
    """Counts the steps that the optimisers refuse. total: all of them."""

    def __init__(self) -> None:
        self.total = 0
        self._then: dict[str, tuple[int, int]] = {}
        self._in_a_row: dict[str, int] = {}
        self._told: dict[str, int] = {}

    def look(self, steps: Mapping[str, tuple[int, int]]) -> bool:
        """Take {optimiser: (steps asked for, refused)}. Return whether any was refused since the last look."""
        before = self.total
        for name, (asked, refused) in steps.items():
            asked_then, refused_then = self._then.get(name, (0, 0))
            new = refused - refused_then
            self._in_a_row[name] = self._in_a_row.get(name, 0) + new if new == asked - asked_then else 0
        self._then, self.total = dict(steps), sum(refused for _, refused in steps.values())
        return self.total > before

    def tell(self, updates: int) -> None:
        """Log what was refused since this was called last."""
        for name, (_, refused) in self._then.items():
            if new := refused - self._told.get(name, 0):
                log.warning("%s: %d steps up to update %d had no finite gradient: skipped", name, new, updates)
            self._told[name] = refused

    def explained(self) -> None:
        """Begin to count anew what is refused in a row: the reason is found and set aside."""
        self._in_a_row.clear()

    def check(self, updates: int) -> None:
        """Raise RetakeError when MOST_IN_A_ROW steps in a row were refused, and nobody knows why."""
        for name, row in self._in_a_row.items():
            if row >= MOST_IN_A_ROW:
                raise RetakeError(
                    f"{name}: the gradients of the last {row} steps up to update {updates} were not finite, and "
                    "changed nothing. The weights and checkpoints of before are kept. No episode explains it, because "
                    "batches without their largest values fail, too: resume with a smaller learning rate"
                )


def _is_finite(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or math.isfinite(float(tensor.detach().sum(dtype=torch.float32)))


def _tensors(tree: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    if isinstance(tree, Tensor):
        yield name, tree
    elif isinstance(tree, Mapping):
        for key, branch in tree.items():
            yield from _tensors(branch, f"{name}.{key}" if name else str(key))
