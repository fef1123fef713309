#!/usr/bin/env python
"""Hours in minutes: many actors come and go, cleanly and by kill -9, at a real server whose store is so small that it
evicts all the time, with an archive and new weights now and then. What does not stay as it is is said.

tools/soak.py [--minutes M] [--actors N] [--processes P]

Each line is a series with its first quarter, its last quarter and its slope per hour (two standard errors). The last
line is JSON; exit status 1 when memory, files, threads or latency leave their bounds (soaking/drift.py), or when an
actor was refused. Of the actors' processes the second half is killed now and then, so only the first half is measured.
"""

import argparse
import json
import multiprocessing
import os
import sqlite3
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from serl_client import messages as m
from serl_client.connection import Connection
from serl_client.errors import Disconnected
from serl_client.messages import EPISODE

from serl_launcher.store.weights import write
from tests.benches.served import BODY, check
from tests.faults.soaking.drift import Drift, broken, drift
from tests.faults.soaking.processes import run_actors, run_server
from tests.shared.common import free_port

PROCESSES = multiprocessing.get_context("spawn")  # each reads the environment of its own start
LIFE = 8.0  # seconds that an actor lives, on average
RECORDS = 128.0  # a second, of all actors together
KILL = 15.0  # seconds from one kill -9 to the next
PUBLISH = 10.0  # seconds
SAMPLES = 120  # at most four in a second
STEPS = 160  # that the store holds for each actor: four episodes
WEIGHTS = 1 << 20  # bytes
ONE_EACH = ("rows of ", "index KB", "server.store.sessions")  # grow with the run's history


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="(10)")
    parser.add_argument("--actors", type=int, default=64, help="(64)")
    parser.add_argument("--processes", type=int, default=4, help="that the actors are in (4)")
    options = parser.parse_args()
    if options.minutes < 0.05 or options.processes < 2:
        parser.error("at least 0.05 minutes, and 2 processes: one is measured, one is killed")
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        soak = Soak(Path(folder), options.actors, options.processes, 60 * options.minutes)
        try:
            soak.run()
        finally:
            soak.close()
    drifts = {name: drift(soak.times, values) for name, values in soak.series.items()}
    print("\n".join(lines(drifts)))
    result = verdict(soak, drifts)
    print(json.dumps(result))
    sys.exit(0 if result["holds"] else 1)


class Soak:
    """All processes of a soak of `seconds`, and the `series` of samples at `times`."""

    def __init__(self, folder: Path, actors: int, processes: int, seconds: float) -> None:
        self.folder, self._seconds = folder, seconds
        self._address, inference = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
        local = f"ipc://{folder}/server"
        self.link = Connection(local, m.Hello(m.PROTOCOL, "learner", "trainer"))
        self._revision, self._period = 0, actors / RECORDS
        self._pipe, theirs = PROCESSES.Pipe()
        words = (theirs, folder / "run", STEPS * actors, self._address, local, inference)
        self._server = PROCESSES.Process(target=run_server, args=words)
        self._inference = PROCESSES.Process(target=check, args=(inference,))
        self._parts = [[str(name) for name in part] for part in np.array_split(np.arange(actors), processes)]
        self._groups: list[tuple[Any, Any]] = []
        self.times: list[float] = []
        self.series: dict[str, list[float]] = {}
        self.errors: list[str] = []
        self.lives = self.kills = self.acknowledged = 0
        self._gone = 0  # lives in processes that were killed

    def run(self) -> None:
        self._server.start()
        self._inference.start()
        os.environ["MALLOC_ARENA_MAX"] = "1"  # hundreds of threads of short lives would scatter over many arenas
        self._groups = [self._start(part) for part in self._parts]
        self._direct()
        begin = time.monotonic()
        every = max(0.25, self._seconds / SAMPLES)
        due = {self._sample: every, self._kill: min(KILL, self._seconds / 4), self._publish: min(PUBLISH, every * 3)}
        next_time = {action: begin + period for action, period in due.items()}
        while (now := time.monotonic()) < begin + self._seconds:
            self._archive()
            for action, period in due.items():
                if now >= next_time[action]:
                    action()
                    next_time[action] += period
            time.sleep(0.2)
        self.status = self._status()

    def close(self) -> None:
        for process, _ in self._groups:
            process.kill()
        self._server.terminate()
        self._inference.kill()
        for process in (self._server, self._inference, *(process for process, _ in self._groups)):
            process.join()
        self.link.close()

    def _start(self, names: list[str]) -> tuple[Any, Any]:
        ours, theirs = PROCESSES.Pipe()
        words = (theirs, self._address, self.folder / "actors", names, min(LIFE, self._seconds / 4), self._period)
        process = PROCESSES.Process(target=run_actors, args=words)
        process.start()
        return process, ours

    def _direct(self) -> None:
        """As soon as the first actor has made the store."""
        while not self._status()["run"]:
            time.sleep(0.1)
        self.link.call(m.Direct(BODY, None), 20.0)

    def _status(self) -> dict[str, Any]:
        with suppress(Disconnected):  # it is starting
            status: Any = self.link.call(m.Status(), 20.0)
            return status.report
        return {"run": ""}

    def _archive(self) -> None:
        """What the export says: every closed episode may leave the store."""
        page: Any = self.link.call(m.Sync(self._revision, 0), 20.0)
        self._revision = page.revision
        rows = [dict(zip(EPISODE, row, strict=True)) for row in page.episodes]
        if closed := [row["number"] for row in rows if row["closed"]]:
            self.link.call(m.Archived(closed), 20.0)

    def _publish(self) -> None:
        sha256, size = write(self.folder / "run" / "weights", os.urandom(WEIGHTS))
        self.link.call(m.Publish(sha256, size, 1), 20.0)

    def _kill(self) -> None:
        """kill -9 one of the second half of the actors' processes, and start it again."""
        half = len(self._groups) // 2
        number = half + self.kills % (len(self._groups) - half)
        self._gone += self._heard(number)["lives"]
        process, _ = self._groups[number]
        process.kill()
        process.join()
        self._groups[number] = self._start(self._parts[number])
        self.kills += 1

    def _heard(self, number: int) -> dict[str, Any]:
        """What the actors of a process tell."""
        _, pipe = self._groups[number]
        pipe.send(True)
        return pipe.recv()

    def _sample(self) -> None:
        heard = [self._heard(number) for number in range(len(self._groups))]
        measured = range(max(1, len(self._groups) // 2))
        self._pipe.send(True)
        server = self._pipe.recv()
        late = np.array([seconds for told in heard for seconds in told["late"]] or [0.0]) * 1e3
        self.acknowledged += sum(len(told["late"]) for told in heard)
        self.lives = self._gone + sum(told["lives"] for told in heard)
        self.errors += [error for told in heard for error in told["errors"]]
        sample = {"ack p50 ms": float(np.median(late)), "ack p99 ms": float(np.quantile(late, 0.99))}
        sample |= process_sizes("server", [self._server.pid]) | {"server objects": server["objects"]}
        sample |= process_sizes("actors", [self._groups[number][0].pid for number in measured])
        sample |= {"actors objects": sum(heard[number]["objects"] for number in measured)}
        sample |= index_sizes(self.folder / "run" / "store") | server["tables"]
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
    with closing(sqlite3.connect(f"file:{store}/index.sqlite?mode=ro", uri=True)) as index:
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


def verdict(soak: Soak, drifts: dict[str, Drift]) -> dict[str, Any]:
    """What the last line says."""
    grown = [name for name, found in drifts.items() if found.grows]
    bad = broken(drifts)
    source = soak.status["sources"]["online"]
    return {
        "minutes": round((soak.times[-1] - soak.times[0]) / 60, 2), "lives": soak.lives, "kills": soak.kills,
        "acknowledged": soak.acknowledged, "evicted": source["tail"], "refused": soak.status["refusals"],
        "errors": soak.errors[:10], "broken": bad,
        "grows_with_history": [name for name in grown if name.startswith(ONE_EACH)],
        "grows": [name for name in grown if not name.startswith(ONE_EACH)],
        "drift": {
            name: {key: round(value, 2) for key, value in asdict(found).items()}
            for name, found in drifts.items() if " " in name or found.grows
        },
        "holds": not bad and not soak.errors and source["tail"] > 0,
    }  # fmt: skip


if __name__ == "__main__":
    main()
