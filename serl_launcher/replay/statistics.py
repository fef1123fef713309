"""Computes the statistics by which states are normalised and actions are scaled."""

from collections.abc import Iterator
from types import MappingProxyType

import numpy as np
import torch
from serl_client.errors import ConfigError
from serl_client.limits import Limits
from serl_client.spec import Array

from serl_launcher.replay.batches import batch_of
from serl_launcher.replay.mixture import ReplayMixture
from serl_launcher.replay.windows import batch_arrays
from serl_launcher.types import Batch, Measured, Window

WINDOWS = 1 << 15  # windows that are measured, at most; evenly spaced over the source
BLOCK = 1024  # windows that are copied at once


def statistics(
    mixture: ReplayMixture, name: str, measured: Measured = MappingProxyType({})
) -> dict[str, dict[str, Array]]:  # fmt: skip
    """Return {mean, std, low, high, q01, q99 (the quantiles of 1 and 99 %): {column: [*shape]}} of the actions, of each
    float observation, and of what is measured of windows.

    name: the source or view. Values beyond their limits are left out, unless there are no others: an operator may
    have taken such an episode back. Raises ConfigError if it is empty, or shorter than a window that is measured.
    """
    found: dict[str, dict[str, Array]] = {kind: {} for kind in ("mean", "std", "low", "high", "q01", "q99")}
    parts, limits = mixture.views[name].of, Limits(mixture.spec)
    features = {"action": mixture.spec.action, **mixture.spec.observation}
    for key in [key for key, feature in features.items() if feature.dtype.startswith("float")]:
        rows = np.concatenate([mixture.buffers[part].observed(key, mixture.in_view(name, part)) for part in parts])
        rows = _finite(rows, key, name)
        _, low, high = limits.found[key]
        usual = ((low <= rows) & (rows <= high)).reshape(len(rows), -1).all(1)
        _describe(rows[usual] if usual.any() else rows, key, found)
    for key, (window, numbers) in measured.items():
        none = np.empty((0, *mixture.spec.action.shape), np.float32)
        rows = [numbers(batch).cpu().numpy() for batch in _windows(mixture, name, window)]
        _describe(_finite(np.concatenate([none, *rows]), key, name), key, found)
    return found


def _finite(rows: Array, key: str, name: str) -> Array:
    rows = rows[np.isfinite(rows).all(tuple(range(1, rows.ndim)))]
    if not len(rows):
        raise ConfigError(f"no statistics of {key}: source or view {name!r} holds no steps yet; collect some first")
    return rows


def _describe(rows: Array, key: str, found: dict[str, dict[str, Array]]) -> None:
    found["mean"][key], found["std"][key] = rows.mean(0, dtype=np.float64), rows.std(0, dtype=np.float64)
    found["low"][key], found["high"][key] = rows.min(0), rows.max(0)
    found["q01"][key], found["q99"][key] = np.quantile(rows, (0.01, 0.99), axis=0)


def _windows(mixture: ReplayMixture, name: str, window: Window) -> Iterator[Batch]:
    """Yield the windows of a source or view, one for each step at which one may start, in blocks; those that were
    evicted meanwhile are left out."""
    stride = 1 + mixture.size(name)[0] // WINDOWS
    for part in mixture.views[name].of:
        buffer, among = mixture.buffers[part], mixture.in_view(name, part)
        numbers = np.arange(buffer.tail, buffer.head) if among is None else among
        numbers = buffer.usable(numbers[::stride], window)
        for begin in range(0, len(numbers), BLOCK):
            block = numbers[begin : begin + BLOCK]
            arrays = {
                key: torch.empty(shape, dtype=getattr(torch, dtype))
                for key, (shape, dtype) in batch_arrays(buffer.layout, len(block), window).items()
            }
            if buffer.gather(
                buffer.windows(block, window), window, {key: each.numpy() for key, each in arrays.items()}
            ):
                seed = torch.zeros(len(block), dtype=torch.int64)
                yield batch_of(arrays, mixture.spec, window, seed, torch.ones(len(block)), ("",) * len(block))
