"""What durability costs: groups of rows and index through the store, against plain writes of the same bytes with one
fdatasync for each group; and how late the acknowledgements of the real server come, against the disk's own fdatasync.

A record is one row of 3 cameras of 224x224 and a state (0.45 MB). They come in segments as the client makes them; the
acknowledgements are those of segments of one row, 30 a second. Every file lies there in full before it is measured.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from benches.control import SPEC
from benches.ingest import plain_disk
from benches.paired import Figure, machine, quantiles, ratio, rounds, said
from benches.served import BODY, Latencies, Rows, Served
from serl_client.client import TrainerClient

from serl_launcher.data.layout import Layout
from serl_launcher.data.store import Store

CAPACITY = 512  # steps
GROUPS = (64, 8)  # records in each


def main(words: Sequence[str], prog: str) -> None:
    parser = argparse.ArgumentParser(prog, description=__doc__)
    parser.add_argument("--rounds", type=int, default=9, help="(9)")
    parser.add_argument("--seconds", type=float, default=20.0, help="of acknowledgements (20)")
    parser.add_argument("--folder", type=Path, help="on the disk that is measured (the system's for temporary files)")
    parser.add_argument("--json", action="store_true", help="print one object")
    options = parser.parse_args(words)
    before = machine()
    with tempfile.TemporaryDirectory(prefix="bench-", dir=options.folder) as folder:
        figures = commits(Path(folder), options.rounds)
    with tempfile.TemporaryDirectory(prefix="bench-", dir=options.folder) as folder:
        figures += acknowledgements(Path(folder), options.seconds)
    said("durable", before, figures, as_json=options.json)


def commits(folder: Path, count: int) -> list[Figure]:
    """Each measurement writes 128 records, with a length of the segments that divides the group."""
    figures = []
    for records in GROUPS:
        rows = Rows(SPEC, length=min(8, records))
        groups, total = 128 // records, 128 * sum(f.nbytes for f in SPEC.observation.values())
        total += 128 * Layout(SPEC, CAPACITY).step.itemsize
        with stored(folder / f"store-{records}", rows, records) as ours, plain_disk(
            folder / f"plain-{records}", total, rows.records
        ) as plain:  # fmt: skip
            contenders = {"ours": lambda: ours(groups), "plain": lambda: plain(groups)}  # noqa: B023
            rounds(contenders, 6)  # every block is written
            measured = rounds(contenders, count)
        rates = {name: total / median(seconds) / 1e9 for name, seconds in measured.items()}
        figures.append(Figure(
            f"commits of {records} records", rates["ours"], "GB/s", f"plain pwrite + fdatasync ({rates['plain']:.2f})",
            ratio(measured, "plain", "ours"), ">= 0.85",
        ))  # fmt: skip
    return figures


@contextmanager
def stored(folder: Path, rows: Rows, records: int) -> Iterator[Callable[[int], float]]:
    """A call that stages and commits so many groups, in seconds."""
    store = Store.create(folder, SPEC, {"online": CAPACITY})
    number = store.direct(BODY)
    store.hello("bench", "outbox", "epoch", [])
    seq = 0

    def write(groups: int) -> float:
        nonlocal seq
        segments = rows.episode(groups * records // rows.length, number)
        begin = time.perf_counter()
        for at, segment in enumerate(segments, 1):
            store.stage("epoch", seq, segment)
            seq += 1
            if at * rows.length % records == 0:
                store.commit()
        return time.perf_counter() - begin

    yield write
    store.close()


def acknowledgements(folder: Path, seconds: float) -> list[Figure]:
    """In turn: a segment of one row until its acknowledgement, then as many bytes into a plain file and fdatasync."""
    rows = Rows(SPEC, length=1)
    with Served(folder / "run", CAPACITY) as served, TrainerClient(
        served.address, actor="bench", spec=SPEC, outbox=folder / "outbox"
    ) as client, plain_disk(folder / "plain", rows.bytes, rows.records) as plain:  # fmt: skip
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
