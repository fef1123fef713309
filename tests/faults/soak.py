"""A chaos stage on which nothing fails but actors, who come and go for as long as it takes: does anything grow?"""

import gc
import os
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tests.shared.oracle import opened

from .stage import Actor, Setting, Stage, context
from .trainer import Part

LIFE = 12.0  # seconds that an actor of those who come and go lives, on average
RECORDS = 128.0  # a second, of all actors together
KILL = 15.0  # seconds from one kill -9 to the next
PUBLISH = 10.0  # seconds
SAMPLES = 120  # at most four in a second
STEPS = 160  # that the store holds for each actor: some episodes
WEIGHTS = 1 << 20  # bytes
GRACE = 60.0  # seconds on top where nothing has left the store yet: such a soak shows nothing
WARM_UP = 0.2  # of the samples are left out: what fills up once is no drift
ONE_EACH = ("rows of ", "index KB")  # grow with the run's history
BOUNDS = {  # what may come on top of the first quarter: (a share of it, and so much besides)
    "server MB": (0.05, 16.0), "actors MB": (0.05, 16.0), "server files": (0.05, 4.0), "actors files": (0.05, 4.0),
    "server threads": (0.0, 0.5), "actors threads": (0.05, 2.0), "server CPU ms a record": (0.5, 1.0),
    "server blocks": (0.05, 4000.0),
}  # fmt: skip


class Soak(Stage):
    """All processes of a soak of `seconds`, and the `series` of samples at `times`. Of `count` actors the first half
    stays and is measured, the others come and go. A context manager."""

    starts = 1 << 20

    def __init__(self, folder: Path, count: int, seconds: float) -> None:
        self._seconds, self._every = seconds, max(0.25, seconds / SAMPLES)
        setting = Setting(
            count, STEPS * count, archives=True, weights_bytes=WEIGHTS, skew=0.0, paced=False, early=False,
            pace_s=count / RECORDS,
        )  # fmt: skip
        super().__init__(context(), folder, 0, setting, None)
        self._pipe, theirs = self.context.Pipe()
        self._served = partial(self._served, begun=partial(_begun, theirs))
        os.environ["MALLOC_ARENA_MAX"] = "1"  # many threads of short lives would scatter over many arenas
        self.times: list[float] = []
        self.series: dict[str, list[float]] = {}
        self.lives, self.kills, self.acknowledged, self._spent = count, 0, 0, 0.0
        self._stay, self._go = self.actors[: count // 2], self.actors[count // 2 :]

    def _trainer_part(self, local: str, life: int) -> Part:
        period = min(PUBLISH, self._seconds / 4)
        return replace(super()._trainer_part(local, life), publishes=max(2, round(period / 0.05)))

    def run(self) -> None:
        """Play for its seconds, as soon as all actors are there: sample, send away and kill when it is time."""
        self.resumed(0.0)
        end, life = time.monotonic() + self._seconds, min(LIFE, self._seconds / 4)
        due = {
            self._sample: self._every, self._leave: life / len(self._go), self._kill: min(KILL, self._seconds / 4),
        }  # fmt: skip
        next_time = {action: time.monotonic() + period for action, period in due.items()}
        first = self.lives
        while (now := time.monotonic()) < end + GRACE * (not self._published[0] or self.lives == first + self.kills):
            self.watch()
            self._come()
            for action, period in due.items():
                if now >= next_time[action]:
                    action()
                    next_time[action] += period
            time.sleep(0.05)

    def _leave(self) -> None:
        """The one that has been here longest drains and ends."""
        self._go.append(self._go.pop(0))
        self._go[-1].stop_file.touch()

    def _come(self) -> None:
        """Who has left comes again."""
        for actor in self._go:
            if not actor.wanted:
                if not actor.end.get("drained"):
                    self.violations.append(f"{actor.name} did not drain")
                actor.stop_file.unlink()
                actor.wanted = True
                actor.start()
                self.lives += 1

    def _kill(self) -> None:
        self.kill(self._go[len(self._go) // 2], 0.0)
        self.kills += 1
        self.lives += 1

    def _sample(self) -> None:
        late = np.array([seconds for actor in self.actors for seconds in _heard(actor)] or [0.0]) * 1e3
        self.acknowledged += len(late)
        spent = time.clock_gettime(~self.server.pid << 3 | 2)  # Linux' name for that process' CPU clock
        sample = {"server CPU ms a record": (spent - self._spent) * 1e3 / max(1, len(late))}
        self._spent = spent
        sample |= {"ack p50 ms": float(np.median(late)), "ack p99 ms": float(np.quantile(late, 0.99))}
        self._pipe.send(True)
        sample |= process_sizes("server", [self.server.pid]) | self._pipe.recv()
        sample |= process_sizes("actors", [actor.pid for actor in self._stay]) | index_sizes(self.disk / "run/store")
        for name, value in sample.items():
            self.series.setdefault(name, [0.0] * len(self.times)).append(value)
        self.times.append(time.monotonic())
        for values in self.series.values():
            values.extend([0.0] * (len(self.times) - len(values)))


def _heard(actor: Actor) -> list[float]:
    """Seconds of the acknowledgements that came since this was asked last."""
    actor.hear()
    late, actor.late = actor.late, []
    return late


# -- how large everything is
def _begun(pipe: Any) -> None:
    """In the server's process: whatever is said through the pipe is answered with its blocks of memory."""
    threading.Thread(target=_tell, args=(pipe,), daemon=True).start()


def _tell(pipe: Any) -> None:
    """gc.get_objects() would be more exact; it also breaks the tuples that other threads are just making."""
    while pipe.recv():
        gc.collect()
        pipe.send({"server blocks": sys.getallocatedblocks()})


def process_sizes(name: str, pids: Iterable[int]) -> dict[str, float]:
    """Memory, open files and threads of some processes."""
    found = {f"{name} MB": 0.0, f"{name} files": 0.0, f"{name} threads": 0.0}
    for pid in pids:
        fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        found[f"{name} MB"] += int(fields["VmRSS"].split()[0]) / 1024
        found[f"{name} files"] += len(os.listdir(f"/proc/{pid}/fd"))
        found[f"{name} threads"] += int(fields["Threads"])
    return found


def index_sizes(store: Path) -> dict[str, float]:
    """The index's files in KB, and the rows of its tables."""
    files = {"index KB": store / "index.sqlite", "index log KB": store / "index.sqlite-wal"}
    sizes = {name: file.stat().st_size / 1024 for name, file in files.items() if file.exists()}
    with opened(store) as index:
        names = [name for (name,) in index.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        counts = {f"rows of {name}": index.execute(f"SELECT count(*) FROM {name}").fetchone()[0] for name in names}
    return sizes | counts


# -- does it drift?
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


def broken(drifts: Mapping[str, Drift]) -> list[str]:
    """Which bounds do not hold, in words."""
    return [
        f"{name} went from {found.first:.1f} to {found.last:.1f}, beyond {limit:.1f}"
        for name, (share, slack) in BOUNDS.items()
        if (found := drifts[name]).last > (limit := found.first * (1 + share) + slack)
    ]


def verdict(soak: Soak) -> tuple[dict[str, Any], list[str]]:
    """What the last line says, and the lines that a person reads."""
    drifts = {name: drift(soak.times, values) for name, values in soak.series.items()}
    grown, bad, report = [name for name, found in drifts.items() if found.grows], broken(drifts), soak.check()
    lines = [f"{'':42} {'first':>10} {'last':>10} {'per hour':>12} {'+-':>10}"]
    for name, found in drifts.items():
        numbers = f"{found.first:10.1f} {found.last:10.1f} {found.per_hour:12.1f} {found.error:10.1f}"
        lines.append(f"{name:42} {numbers}{'  grows' * found.grows}")
    said = {
        "minutes": round((soak.times[-1] - soak.times[0]) / 60, 2), "lives": soak.lives, "kills": soak.kills,
        "acknowledged": soak.acknowledged, "evicted": soak._published[0], "errors": report.violations[:10],
        "broken": bad, "grows_with_history": [name for name in grown if name.startswith(ONE_EACH)],
        "grows": [name for name in grown if not name.startswith(ONE_EACH)],
        "drift": {name: {key: round(v, 2) for key, v in asdict(found).items()} for name, found in drifts.items()},
        "holds": not bad and not report.violations and soak._published[0] > 0,
    }  # fmt: skip
    return said, lines
