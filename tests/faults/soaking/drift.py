"""Whether a series of samples drifts: its slope per hour, how sure that is, and its first quarter beside its last."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

WARM_UP = 0.2  # of the samples are left out: what fills up once is no drift


@dataclass(frozen=True, slots=True)
class Drift:
    """`first` and `last` are means of the first and the last quarter; `per_hour` +- `error` (two standard errors, as
    neighbouring samples are alike counted as fewer)."""

    first: float
    last: float
    per_hour: float
    error: float

    @property
    def grows(self) -> bool:
        return self.per_hour > self.error and self.last > self.first


def drift(times: Sequence[float], values: Sequence[float]) -> Drift:
    """Of values [n] at `times` [n] (seconds), n >= 8."""
    begin = int(WARM_UP * len(times))
    x, y = np.array(times[begin:]) / 3600, np.array(values[begin:], float)
    quarter = max(1, len(y) // 4)
    slope, level = np.polyfit(x, y, 1)
    rest = y - slope * x - level
    spread = float(rest @ rest)
    alike = float(np.clip(rest[1:] @ rest[:-1] / spread, 0.0, 0.95)) if spread > 0 else 0.0
    count = max(3.0, len(y) * (1 - alike) / (1 + alike))
    error = 2 * float(np.sqrt(spread / len(y) * count / (count - 2) / count) / x.std())
    return Drift(float(y[:quarter].mean()), float(y[-quarter:].mean()), float(slope), error)


# What may come on top of the first quarter: (a share of it, and so much besides).
BOUNDS = {
    "server MB": (0.05, 16.0),
    "actors MB": (0.05, 16.0),
    "server files": (0.05, 4.0),
    "actors files": (0.05, 4.0),
    "server threads": (0.0, 0.5),
    "actors threads": (0.05, 2.0),
    "ack p99 ms": (0.5, 20.0),
}


def broken(drifts: Mapping[str, Drift]) -> list[str]:
    """Which bounds do not hold, in words."""
    return [
        f"{name} went from {found.first:.1f} to {found.last:.1f}, beyond {limit:.1f}"
        for name, (share, slack) in BOUNDS.items()
        if (found := drifts[name]).last > (limit := found.first * (1 + share) + slack)
    ]
