"""What durability costs: groups of rows and index through the store, against plain writes of the same bytes with one
fdatasync for each group; and how late the acknowledgements of the real server come, against the disk's own fdatasync.

A record is one row of 3 cameras of 224x224 and a state (0.45 MB). They come in segments as the client makes them; the
acknowledgements are those of segments of one row, 30 a second. Every file lies there in full before it is measured.
"""

import argparse
import itertools
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from serl_client.client import TrainerClient

from serl_launcher.store.layout import Layout
from serl_launcher.store.store import Store

from .paired import COMMON, Figure, option, quantiles, ratio, rounds
from .served import BODY, SPEC, Latencies, Rows, Served, plain_disk

GROUPS = (64, 8)  # records in each


OPTIONS = {
    "--rounds": option(9, "(9)"),
    "--steps": option(1024, "that the store holds (1024; 0.45 MB each)"),
    "--seconds": option(20.0, "of acknowledgements (20)"),
    **COMMON,
}


def measure(folder: Path, options: argparse.Namespace) -> Iterator[Figure]:
    for records in GROUPS:
        yield commits(folder / "groups", records, options.steps, options.rounds)
    shutil.rmtree(folder / "groups")
    yield from acknowledgements(folder, options.steps, options.seconds)


def commits(folder: Path, records: int, steps: int, count: int) -> Figure:
    """Groups of so many records; each measurement writes 128, in segments of 8 rows."""
    folder.mkdir(exist_ok=True)
    rows, layout, groups = Rows(SPEC, length=8), Layout(SPEC, steps), 128 // records
    total = 128 * (sum(feature.nbytes for feature in SPEC.observation.values()) + layout.step.itemsize)
    with (
        stored(folder / f"store-{records}", rows, steps, records) as ours,
        plain_disk(folder / f"plain-{records}", total, rows.records) as plain,
    ):
        contenders = {"ours": lambda: ours(groups), "plain": lambda: plain(groups)}
        rounds(contenders, 2 + layout.rows // 128)  # every block is written
        measured = rounds(contenders, count)
    rates = {name: total / median(seconds) / 1e9 for name, seconds in measured.items()}
    beside = f"plain pwrite + fdatasync ({rates['plain']:.2f})"
    title = f"commits of {records} records"
    return Figure(title, rates["ours"], "GB/s", beside, ratio(measured, "plain", "ours"), ">= 0.85")


@contextmanager
def stored(folder: Path, rows: Rows, steps: int, records: int) -> Iterator[Callable[[int], float]]:
    """A call that stages and commits so many groups, in seconds."""
    store = Store.create(folder, SPEC, {"online": steps})
    number = store.direct(BODY)
    store.hello("bench", "outbox", "session", [])
    segments = enumerate(
        segment for _ in itertools.count() for segment in rows.episode(steps // 2 // rows.length, number)
    )

    def write(groups: int) -> float:
        begin = time.perf_counter()
        for _ in range(groups):
            for seq, segment in itertools.islice(segments, records // rows.length):
                store.stage("session", seq, segment)
            store.commit()
        return time.perf_counter() - begin

    yield write
    store.close()


def acknowledgements(folder: Path, steps: int, seconds: float) -> Iterator[Figure]:
    """In turn: a segment of one row until its acknowledgement, then as many bytes into a plain file and fdatasync."""
    rows = Rows(SPEC, length=1)
    with (
        Served(folder / "run", steps) as served,
        TrainerClient(served.address, actor="bench", spec=SPEC, outbox=folder / "outbox") as client,
        plain_disk(folder / "plain", rows.bytes, rows.records) as plain,
    ):
        served.collect(client)
        late, syncs = Latencies(client), []
        segments = rows.episode(round(seconds * SPEC.fps) + 30, client.state.directive["number"])
        begin = time.monotonic()
        for i, segment in enumerate(segments):
            time.sleep(max(0.0, begin + i / SPEC.fps - time.monotonic()))
            late.push(segment)
            while client.pending[0]:
                client.wait(0.001)
            syncs.append(plain(1))
    (p50, p99), (disk_p50, disk_p99) = quantiles(late.seconds[30:]), quantiles(syncs[30:])
    goal = max(0.020, 3 * disk_p99)
    disk = f"pwrite + fdatasync p50 ({disk_p50 * 1e3:.2f})"
    most = f"max (20 ms, 3 x its p99 of {disk_p99 * 1e3:.2f})"
    yield Figure("acknowledgement p50", p50 * 1e3, "ms", disk, p50 / disk_p50)
    yield Figure("acknowledgement p99", p99 * 1e3, "ms", most, p99 / goal, "<= 1")
