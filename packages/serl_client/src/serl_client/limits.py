"""Says which number of a row cannot be (limits for outliers): it is not finite, or beyond the limit of its feature."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from serl_client.episode import action_limits
from serl_client.spec import ROW, Array, Feature, Spec

LIMIT = 1e6  # of a number whose Spec says none: no sensor exceeds it in usual units, and float32 holds sums of squares
ACTIONS = ("action", "previous_action", "prefix")  # the latter two in a question
TIME = 1e11  # seconds, 3,000 years: robots count from 1970, or from their start


class Limits:
    """Holds the limits of each column of a Spec: what it says of an observation or an extra, else LIMIT.

    Images and flags (uint8, bool) have none, unless the Spec says some. The bounds of the action are widened.
    found: {column: (its Feature, least, greatest)} of those that have limits.
    """

    def __init__(self, spec: Spec) -> None:
        action = spec.action, *action_limits(spec.action)
        self.found: dict[str, tuple[Feature, Array, Array]] = dict.fromkeys(ACTIONS, action)
        self.found |= {
            name: (feature, _limit(feature.low, -LIMIT), _limit(feature.high, LIMIT))
            for name, feature in {**spec.observation, **spec.extras}.items()
            if feature.dtype not in ("bool", "uint8") or feature.low is not None or feature.high is not None
        }
        for name, most in (("reward", LIMIT), ("time", TIME)):
            self.found[name] = Feature((), ROW[name]), np.array(-most), np.array(most)

    def broken(self, columns: Mapping[str, Any], start: int | None = None) -> str:
        """Return which number of these columns cannot be, with its unit and its limit; empty if all can be.

        columns: {name: [*shape], or [..., *shape] of several rows}. start: the step of the first row; None: no step is
        named.
        """
        with np.errstate(over="ignore"):  # what is too large for its dtype becomes infinite
            for name, values in columns.items():
                if name in self.found:
                    feature, low, high = self.found[name]
                    stored = np.asarray(values, feature.dtype if feature.dtype[0] == "f" else None)
                    if not ((low <= stored) & (stored <= high)).all():  # NaN is not <= anything
                        return self._told(name, stored.reshape(-1, *feature.shape), start)
        return ""

    def _told(self, name: str, rows: Array, start: int | None) -> str:
        """Return the text about the first number of these rows [T, *shape] that is beyond the limits of the column."""
        feature, low, high = self.found[name]
        row, *place = np.argwhere(~((low <= rows) & (rows <= high)))[0].tolist()
        value = float(rows[row, *place])
        bounds = [float(np.broadcast_to(bound, feature.shape)[*place]) for bound in (low, high)]
        limit = bounds[value > bounds[0]]
        is_named = len(place) == 1 and len(feature.names) == feature.shape[0]
        entry = f" ({feature.names[place[0]]:.40})" if is_named else f" {place}" if place else ""
        unit = feature.units[place[0]] if feature.units else "s" if name == "time" else ""
        unit, step = f" {unit}" if unit else "", "" if start is None else f" at step {start + row}"
        why = f"beyond its limit of {limit:.6g}{unit}" if np.isfinite(value) else "which is not finite"
        return f"{name:.60}{entry} is {value:.6g}{unit}{step}, {why}"


def _limit(said: Array | None, default: float) -> Array:
    limit = np.asarray(default if said is None else said, np.float64)
    return np.where(np.isinf(limit), default, limit)
