"""What the benches of the data path compare with: contenders in turn, round after round, and the medians of the ratios
within the rounds, because the load of a machine changes from one second to the next.

    measured = rounds({"ours": ours, "raw TCP": raw}, 9)  # each call measures once
    Figure("ingest, 50 KB", median(measured["ours"]), "GB/s", "raw TCP", ratio(measured, "ours", "raw TCP"), ">= 0.75")
"""

import os
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

WHERE = "{processor}, {cores} cores, {system}, Python {python}, {date}, load {load} to {load_after}"


@dataclass(frozen=True, slots=True)
class Figure:
    """One number beside its ceiling or its peer `against`; `ratio` is value / theirs. `goal` (">= 0.75") speaks of the
    ratio, or of the value where nothing is beside it; "" where there is none."""

    figure: str
    value: float
    unit: str
    against: str = ""
    ratio: float | None = None
    goal: str = ""

    @property
    def holds(self) -> bool | None:
        """Whether the goal is reached; None without one."""
        if not self.goal:
            return None
        bound, number = self.goal.split()
        value = self.value if self.ratio is None else self.ratio
        return value >= float(number) if bound == ">=" else value <= float(number)


def rounds(contenders: Mapping[str, Callable[[], float]], count: int, warm: int = 0) -> dict[str, list[float]]:
    """What each contender returned in each of `count` rounds, after `warm` that do not count; every round begins with
    another one."""
    names = list(contenders)
    measured: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(-warm, count):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            measured[name].append(contenders[name]())
    return {name: values[warm:] for name, values in measured.items()}


def seconds(call: Callable[[], object], count: int = 1) -> float:
    """How long a call takes: the mean of `count`."""
    begin = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - begin) / count


def ratio(measured: Mapping[str, Sequence[float]], name: str, against: str) -> float:
    """The median over the rounds of name / against."""
    return median(a / b for a, b in zip(measured[name], measured[against], strict=True))


def quantiles(seconds: Sequence[float] | np.ndarray) -> tuple[float, float]:
    """(median, 99th percentile)."""
    p50, p99 = np.quantile(seconds, (0.5, 0.99))
    return float(p50), float(p99)


def cpu_seconds(*processes: int) -> float:
    """CPU time that these processes have used until now, all their threads together (Linux)."""
    return sum(time.clock_gettime(~process << 3 | 2) for process in processes)  # their CPUCLOCK_SCHED


def processor() -> str:
    info = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(": ")[2] for line in info if line.startswith("model name")), platform.machine())


def result(bench: str, figures: Iterable[Figure]) -> dict[str, Any]:
    """What a bench gives back: its figures, measured while this runs, and where and when. load: how many processes ran
    or waited to, before and after."""
    where = {
        "processor": processor(), "cores": os.cpu_count(), "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(), "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "load": round(os.getloadavg()[0], 2),
    }  # fmt: skip
    found = [asdict(figure) for figure in figures]
    return {"bench": bench, "machine": {**where, "load_after": round(os.getloadavg()[0], 2)}, "figures": found}


def lines(result: Mapping[str, Any]) -> Iterator[str]:
    """A section of Markdown, which a person can read in a terminal, too."""
    yield from (f"## {result['bench']}", "", WHERE.format(**result["machine"]), "")
    figures = [Figure(**plain) for plain in result["figures"]]
    width = max((len(figure.figure) for figure in figures), default=0)
    yield f"| {'figure':{width}} | value | beside | ratio | goal |"
    yield "|---|---|---|---|---|"
    for each in figures:
        ratio = "" if each.ratio is None else f"{each.ratio:.3g}"
        goal = "" if each.holds is None else f"{each.goal}: {'holds' if each.holds else '**missed**'}"
        yield f"| {each.figure:{width}} | {each.value:.4g} {each.unit} | {each.against} | {ratio} | {goal} |"


def option(default: Any, words: str, **more: Any) -> dict[str, Any]:
    """An option of a bench as argparse takes it: a list takes several values, False is a switch."""
    if default is False:
        return {"action": "store_true", "help": words}
    several = isinstance(default, list)
    kind = {"type": type(default[0] if several else default), "default": default, "help": words}
    return {**kind, **({"nargs": "+"} if several else {}), **more}
