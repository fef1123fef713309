"""What durability costs: groups of rows and index through the store, against plain writes of the same bytes with one
fdatasync for each group; and how late the acknowledgements of the real server come, against the disk's own fdatasync.

A record is one row of 3 cameras of 224x224 and a state (0.45 MB). They come in segments as the client makes them; the
acknowledgements are those of segments of one row, 30 a second. Every file lies there in full before it is measured.
"""

import argparse
import itertools
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from serl_client.client import TrainerClient

from serl_launcher.store.layout import Layout
from serl_launcher.store.store import Store

from .control import SPEC
from .ingest import plain_disk
from .paired import Figure, machine, quantiles, ratio, rounds, said
from .served import BODY, Latencies, Rows, Served

GROUPS = (64, 8)  # records in each


def main(words: Sequence[str], prog: str) -> None:
    parser = argparse.ArgumentParser(prog, description=__doc__)
    parser.add_argument("--rounds", type=int, default=9, help="(9)")
    parser.add_argument("--steps", type=int, default=1024, help="that the store holds (1024; 0.45 MB each)")
    parser.add_argument("--seconds", type=float, default=20.0, help="of acknowledgements (20)")
    parser.add_argument("--folder", type=Path, help="on the disk that is measured (the system's for temporary files)")
    parser.add_argument("--json", action="store_true", help="print one object")
    options = parser.parse_args(words)
    before = machine()
    with tempfile.TemporaryDirectory(prefix="bench-", dir=options.folder) as folder:
        figures = [commits(Path(folder), records, options.steps, options.rounds) for records in GROUPS]
    with tempfile.TemporaryDirectory(prefix="bench-", dir=options.folder) as folder:
        figures += acknowledgements(Path(folder), options.steps, options.seconds)
    said("durable", before, figures, as_json=options.json)


def commits(folder: Path, records: int, steps: int, count: int) -> Figure:
    """Groups of so many records; each measurement writes 128, in segments of 8 rows."""
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


def acknowledgements(folder: Path, steps: int, seconds: float) -> list[Figure]:
    """In turn: a segment of one row until its acknowledgement, then as many bytes into a plain file and fdatasync."""
    rows = Rows(SPEC, length=1)
    with (
        Served(folder / "run", steps) as served,
        TrainerClient(served.address, actor="bench", spec=SPEC, outbox=folder / "outbox") as client,
        plain_disk(folder / "plain", rows.bytes, rows.records) as plain,
    ):
        served.direct(client)
        late, syncs = Latencies(client), []
        segments = rows.episode(round(seconds * SPEC.fps) + 30, client.directive["number"])
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
    return [
        Figure("acknowledgement p50", p50 * 1e3, "ms", disk, p50 / disk_p50),
        Figure("acknowledgement p99", p99 * 1e3, "ms", most, p99 / goal, "<= 1"),
    ]
