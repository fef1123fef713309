"""Says how far the window of a drawn step looks back and ahead (n steps, history), and shapes its arrays."""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from serl_client.errors import ConfigError
from serl_client.spec import Feature, Spec

from serl_launcher.replay.columns import EPISODE
from serl_launcher.store.layout import Layout
from serl_launcher.types import IdleFilter, Window


def is_single(window: Window, spec: Spec) -> bool:
    """Return whether the window is one step, seen now and after it, of stored columns alone."""
    is_plain = window.idle_filter is None and not window.joins and not further(window, spec)
    return is_plain and window.horizon == 1 and not any(observed(window))


def further(window: Window, spec: Spec) -> list[str]:
    """Return the names of the columns that no stored row has."""
    stored = {"action", "next_observation", *spec.observation, *spec.extras} - EPISODE.keys()
    return [name for name in window.offsets if name not in stored]


def batch_arrays(
    layout: Layout, count: int, window: Window, made: Mapping[str, Feature] = MappingProxyType({})
) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return {name: (shape, dtype)} of all arrays that `gather` fills. Next observations are `next.<name>`.

    made: features of DerivedColumns; and of EncodedRows, by the observation in whose place they are.
    Raises ValueError for offsets that fit no column, and ConfigError for a column that no row has, and for an idle
    filter that fits none.
    """
    spec, steps = layout.spec, (count, window.horizon)
    extras = {**spec.extras, **EPISODE, **made}
    arrays: dict[str, tuple[tuple[int, ...], Any]] = {
        "action": ((*steps, *spec.action.shape), spec.action.dtype), "reward": (steps, "float32"),
        **dict.fromkeys(("valid", "terminated", "truncated", "intervened"), (steps, "bool")),
        "length": ((count,), "int64"), "step_id": (steps if window.joins else (count,), "int64"),
    }  # fmt: skip
    for name, offsets in window.offsets.items():
        if name in spec.observation:
            feature = made.get(name, spec.observation[name])
            prefixes = ("", "next.") if "next_observation" in window.offsets else ("",)
            for prefix in prefixes:
                arrays[prefix + name] = ((count, len(offsets), *feature.shape), feature.dtype)
        elif name in extras:
            if offsets not in (window.offsets["action"], (0,)):
                raise ValueError(
                    f"column {name!r} has offsets {offsets}; it must use (0,), or the action's: "
                    f"{window.offsets['action']}"
                )
            arrays[name] = ((count, len(offsets), *extras[name].shape), extras[name].dtype)
        elif name not in ("action", "next_observation"):
            there = sorted({*spec.observation, *extras})
            raise ConfigError(
                f"the algorithm reads the column {name!r}, which the rows of this run lack; they have {there}. If it "
                "began with another algorithm, go on with that one, or begin another run_dir"
            )
    if window.idle_filter is not None:
        _check_idle_filter(window.idle_filter, spec)
    return arrays


def _check_idle_filter(idle_filter: IdleFilter, spec: Spec) -> None:
    feature = {"action": spec.action, **spec.observation}.get(idle_filter.column)
    if feature is None or not feature.dtype.startswith("float"):
        floats = [name for name, feature in spec.observation.items() if feature.dtype.startswith("float")]
        raise ConfigError(
            f"algo.idle_filter.column={idle_filter.column!r}: no float column; name one of "
            f"{['action', *sorted(floats)]}"
        )
    size = math.prod(feature.shape)
    if idle_filter.entries is not None and not (idle_filter.entries and set(idle_filter.entries) <= {*range(size)}):
        raise ConfigError(
            f"algo.idle_filter.entries={list(idle_filter.entries)}: {idle_filter.column} has the entries 0 to "
            f"{size - 1}; name some of these, or null for all"
        )


def observed(window: Window) -> list[int]:
    """Return 0 and all offsets of observations and extras."""
    names = [name for name in window.offsets if name not in ("action", "next_observation")]
    return [0, *(offset for name in names for offset in window.offsets[name])]


def reach(window: Window) -> int:
    """Return K, the number of steps after the first one that a window may look at."""
    furthest = max(observed(window))
    return max(window.horizon - 1, furthest) if not wants_next(window) else window.horizon + furthest


def past(window: Window) -> int:
    """Return P, the number of steps before the first one that a window looks at."""
    return -min(observed(window))


def sees_after(window: Window) -> bool:
    """Return whether the window needs an observation after its last step."""
    return wants_next(window) or max(observed(window)) >= window.horizon


def wants_next(window: Window) -> bool:
    return "next_observation" in window.offsets
