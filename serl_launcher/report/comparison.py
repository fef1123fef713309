"""Compares the newest evaluations of two runs on the starts that they share (paired)."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from serl_client.errors import ConfigError

from serl_launcher.training.report import read
from serl_launcher.training.tallies import Z_95, mean_interval

FILES = ("evaluation.json", "summary.json")


class Trial(NamedTuple):
    """One evaluated episode. success: None where the task knows none."""

    success: bool | None
    total: float  # its return


def trials(path: Path) -> dict[str, Trial]:
    """Return {start: trial} of the newest evaluation of a run. Raises ConfigError if there is none."""
    files = [path] if path.is_file() else sorted(path / name for name in FILES if (path / name).is_file())
    evaluated = [(file.stat().st_mtime, found) for file in files if (found := read(file).get("eval"))]
    if not evaluated:
        raise ConfigError(f"{path} has no evaluation: run `plan=evaluate run_dir={path}` first")
    newest = max(evaluated, key=lambda each: each[0])[1].get("trials", [])
    if not newest:
        raise ConfigError(f"the evaluation of {path} does not tell its starts: say plan=evaluate run_dir={path} again")
    return {start: Trial(success, total) for start, success, total in reversed(newest)}  # of equal ones the first


def compared(one: tuple[Path, Mapping[str, Trial]], two: tuple[Path, Mapping[str, Trial]]) -> dict[str, Any]:
    """Return counts, difference (two minus one), interval and p on the shared starts.

    Raises ConfigError without any.
    """
    shared = [start for start in one[1] if start in two[1]]
    if not shared:
        raise ConfigError(
            f"{one[0]} and {two[0]} share no start: compare runs of the same simulation, which were started equally "
            "often before"
        )
    pairs = [(one[1][start], two[1][start]) for start in shared]
    found: dict[str, Any] = {"starts": [len(one[1]), len(two[1])], "shared": len(shared)}
    if all(trial.success is not None for pair in pairs for trial in pair):
        lost = sum(bool(a.success and not b.success) for a, b in pairs)
        gained = sum(bool(b.success and not a.success) for a, b in pairs)
        successes = [sum(bool(pair[i].success) for pair in pairs) for i in (0, 1)]
        difference, interval = (gained - lost) / len(pairs), paired_interval(gained, lost, len(pairs))
        found |= {"successes": successes, "gained": gained, "lost": lost, "p": mcnemar(gained, lost)}
        found |= {"difference": difference, "interval": interval}
    found["return_difference"] = mean_interval([b.total - a.total for a, b in pairs])
    return found


def paired_interval(gained: int, lost: int, count: int) -> tuple[float, float]:
    """Return the 95 % interval of a difference of paired shares (Bonett and Price 2012, adjusted Wald)."""
    more, less = (gained + 1) / (count + 2), (lost + 1) / (count + 2)
    half = Z_95 * math.sqrt((more + less - (more - less) ** 2) / (count + 2))
    return max(-1.0, more - less - half), min(1.0, more - less + half)


def mcnemar(gained: int, lost: int) -> float:
    """Return the exact two-sided p: how often a fair coin divides the differing pairs at least so unevenly."""
    differing = gained + lost
    tail = sum(math.comb(differing, k) for k in range(min(gained, lost) + 1)) / 2**differing
    return min(1.0, 2 * tail)
