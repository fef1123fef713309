"""A chaos stage on which nothing fails but processes of actors, for as long as it takes: does anything grow?"""

import gc
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from serl_client import messages as m
from serl_client.connection import Connection

from serl_launcher.store.server import Server
from tests.benches.served import check
from tests.faults.stage import Player, Setting, Stage, context
from tests.faults.trainer import SOURCE
from tests.shared.common import free_port
from tests.shared.oracle import opened

from . import actors
from .drift import Drift, broken, drift
from .tables import tables

LIFE = 8.0  # seconds that an actor lives, on average
RECORDS = 128.0  # a second, of all actors together
KILL = 15.0  # seconds from one kill -9 to the next
PUBLISH = 10.0  # seconds
SAMPLES = 120  # at most four in a second
STEPS = 160  # that the store holds for each actor: four episodes
WEIGHTS = 1 << 20  # bytes
GRACE = 60.0  # seconds on top where nothing has left the store yet: such a soak shows nothing
ONE_EACH = ("rows of ", "index KB", "server.keeper.store.sessions")  # grow with the run's history


def _begun(pipe: Any) -> None:
    """In the server's process: whatever is said through the pipe is answered with the sizes of its tables."""
    threading.Thread(target=_tell, args=(pipe,), daemon=True).start()


def _tell(pipe: Any) -> None:
    server = next(thing for thing in gc.get_objects() if isinstance(thing, Server))
    while pipe.recv():
        pipe.send({"tables": tables(server, "server"), "objects": len(gc.get_objects())})


class Group(Player):
    """A process of actors; it hears and answers through a pipe."""

    def __init__(self, soak: "Soak", number: int, part: actors.Part) -> None:
        super().__init__(soak.context, f"actors{number}", actors.play, self._told, soak.folder / f"actors{number}.log")
        self._made = part

    def _told(self, life: int) -> actors.Part:
        self.pipe, theirs = self._context.Pipe()
        return replace(self._made, pipe=theirs)

    def heard(self) -> dict[str, Any]:
        """What its actors tell."""
        self.pipe.send(True)
        return self.pipe.recv()


class Soak(Stage):
    """All processes of a soak of `seconds`, and the `series` of samples at `times`. A context manager."""

    def __init__(self, folder: Path, count: int, processes: int, seconds: float) -> None:
        setting = Setting(0, STEPS * count, archives=True, weights_bytes=WEIGHTS, skew=0.0, paced=False, early=False)
        self.groups: list[Group] = []
        self._seconds, self._every = seconds, max(0.25, seconds / SAMPLES)
        super().__init__(context(), folder, 0, setting, None)
        self._pipe, theirs = self.context.Pipe()
        inference = f"tcp://127.0.0.1:{free_port()}"
        self._served = partial(self._served, inference=inference, begun=partial(_begun, theirs))
        self._bound, theirs = self.context.Pipe()
        self._inference = self.context.Process(target=check, args=(theirs, inference), daemon=True)
        os.environ["MALLOC_ARENA_MAX"] = "1"  # hundreds of threads of short lives would scatter over many arenas
        self._public = self._served.keywords["public"]
        part = actors.Part(None, self._public, folder / "actors", (), min(LIFE, seconds / 4), count / RECORDS)
        names = [[str(name) for name in some] for some in np.array_split(np.arange(count), processes)]
        self.groups = [Group(self, number, replace(part, names=some)) for number, some in enumerate(names)]
        self.times: list[float] = []
        self.series: dict[str, list[float]] = {}
        self.errors: list[str] = []
        self.lives = self.kills = self.acknowledged = 0
        self._gone = 0  # lives in processes that were killed

    @property
    def players(self) -> list[Player]:
        return [self.server, self.trainer, *self.groups]

    def _trainer_part(self, local: str, life: int) -> Any:
        period = min(PUBLISH, self._seconds / 4)
        return replace(super()._trainer_part(local, life), publishes=max(2, round(period / 0.05)))

    def __enter__(self) -> "Soak":
        self._inference.start()
        super().__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        self._inference.kill()

    def run(self) -> None:
        """Play for its seconds, as soon as the first actor has made the store: sample and kill when it is time."""
        self.until(lambda: self._published[1] > 0, 60.0)
        end, due = time.monotonic() + self._seconds, {self._sample: self._every, self._come_and_go: self._kill_every}
        next_time = {action: time.monotonic() + period for action, period in due.items()}
        while (now := time.monotonic()) < end + GRACE * (self._published[0] == 0):
            self.watch()
            for action, period in due.items():
                if now >= next_time[action]:
                    action()
                    next_time[action] += period
            time.sleep(0.05)
        with Connection(self._public, m.Hello(m.PROTOCOL, "viewer", "soak")) as link:
            status: Any = link.call(m.Status(), 20.0)
        self.status = status.report

    @property
    def _kill_every(self) -> float:
        return min(KILL, self._seconds / 4)

    def _come_and_go(self) -> None:
        """kill -9 one of the second half of the actors' processes, and start it again; within, they come and go."""
        half = len(self.groups) // 2
        group = self.groups[half + self.kills % (len(self.groups) - half)]
        self._gone += group.heard()["lives"]
        group.signal(signal.SIGKILL)
        group.join()
        group.start()
        self.kills += 1

    def _sample(self) -> None:
        heard = [group.heard() for group in self.groups]
        measured = range(max(1, len(self.groups) // 2))
        self._pipe.send(True)
        server = self._pipe.recv()
        late = np.array([seconds for told in heard for seconds in told["late"]] or [0.0]) * 1e3
        self.acknowledged += sum(len(told["late"]) for told in heard)
        self.lives = self._gone + sum(told["lives"] for told in heard)
        self.errors += [error for told in heard for error in told["errors"]]
        sample = {"ack p50 ms": float(np.median(late)), "ack p99 ms": float(np.quantile(late, 0.99))}
        sample |= process_sizes("server", [self.server.pid]) | {"server objects": server["objects"]}
        sample |= process_sizes("actors", [self.groups[number].pid for number in measured])
        sample |= {"actors objects": sum(heard[number]["objects"] for number in measured)}
        sample |= index_sizes(self.disk / "run/store") | server["tables"]
        for number in measured:
            for name, size in heard[number]["tables"].items():
                sample[name] = sample.get(name, 0) + size
        for name, value in sample.items():
            self.series.setdefault(name, [0.0] * len(self.times)).append(value)
        self.times.append(time.monotonic())
        for values in self.series.values():
            values.extend([0.0] * (len(self.times) - len(values)))


def process_sizes(name: str, pids: list[int | None]) -> dict[str, float]:
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
    files = {"index KB": "index.sqlite", "index log KB": "index.sqlite-wal"}
    sizes = {name: (store / file).stat().st_size / 1024 for name, file in files.items()}
    with opened(store) as index:
        names = [name for (name,) in index.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        counts = {f"rows of {name}": index.execute(f"SELECT count(*) FROM {name}").fetchone()[0] for name in names}
    return sizes | counts


def lines(drifts: dict[str, Drift]) -> Iterator[str]:
    """What a person reads: first what has a bound, then what grows."""
    yield f"{'':42} {'first':>10} {'last':>10} {'per hour':>12} {'+-':>10}"
    for name, found in drifts.items():
        if " " in name or found.grows:
            mark = "  grows" if found.grows else ""
            yield f"{name:42} {found.first:10.1f} {found.last:10.1f} {found.per_hour:12.1f} {found.error:10.1f}{mark}"


def verdict(soak: Soak) -> tuple[dict[str, Any], dict[str, Drift]]:
    """What the last line says, and the drift of each series."""
    drifts = {name: drift(soak.times, values) for name, values in soak.series.items()}
    grown = [name for name, found in drifts.items() if found.grows]
    bad = broken(drifts)
    source = soak.status["sources"][SOURCE]
    said = {
        "minutes": round((soak.times[-1] - soak.times[0]) / 60, 2), "lives": soak.lives, "kills": soak.kills,
        "acknowledged": soak.acknowledged, "evicted": source["tail"], "refused": soak.status["refusals"],
        "errors": [*soak.violations, *soak.errors][:10], "broken": bad,
        "grows_with_history": [name for name in grown if name.startswith(ONE_EACH)],
        "grows": [name for name in grown if not name.startswith(ONE_EACH)],
        "drift": {
            name: {key: round(value, 2) for key, value in asdict(found).items()}
            for name, found in drifts.items() if " " in name or found.grows
        },
        "holds": not bad and not soak.errors and not soak.violations and source["tail"] > 0,
    }  # fmt: skip
    return said, drifts
