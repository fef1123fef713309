"""How fast records come in, against a plain TCP connection of the same bytes, and how fast they are durable, against
the smaller of wire and disk.

A record here is one row of an episode; the recorder puts some into a segment, and the client several of these into a
message. `over the wire`: the client's messages, from memory, to a process that decodes and checks them as the server
does. `pushed`: from push through the outbox to the same process. `end to end`: from push to the durable acknowledgement
of the real server. Raw TCP sends the same rows one at a time, and (`bulk`) 4 MiB at a time, into one buffer. The disk
writes the same bytes in as many groups as the server did, each with one fdatasync.
"""

import argparse
import itertools
import os
import socket
import tempfile
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from serl_client import Segment
from serl_client import messages as m
from serl_client.client import TrainerClient
from serl_client.connection import Connection
from serl_client.outbox import SLICE_BYTES

from serl_launcher.store.intake import MAX_UNACKNOWLEDGED

from .paired import Figure, cpu_seconds, machine, ratio, rounds, said
from .served import PROCESSES, Checked, Rows, Served, deliver, spec_of

SIZES = {"1 KB": 1000, "50 KB": 50_000, "500 KB": 500_000, "3 MB": 3_000_000}
BULK = 4 << 20


def main(words: Sequence[str], prog: str) -> None:
    parser = argparse.ArgumentParser(prog, description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="(7)")
    parser.add_argument("--mb", type=int, default=256, help="that each measurement sends (256; of 1 KB a quarter)")
    parser.add_argument("--sizes", choices=SIZES, nargs="+", default=list(SIZES), help="of a row (all)")
    parser.add_argument("--folder", type=Path, help="on the disk that is measured (the system's for temporary files)")
    parser.add_argument("--json", action="store_true", help="print one object")
    options = parser.parse_args(words)
    before = machine()
    figures = []
    for name in options.sizes:
        total = options.mb * 10**6 // (4 if SIZES[name] < 10_000 else 1)
        figures += ingest(name, SIZES[name], total, options.rounds, options.folder)
    said("ingest", before, figures, as_json=options.json)


def ingest(name: str, size: int, total: int, count: int, folder: Path | None) -> list[Figure]:
    """`count` rounds of about `total` bytes in rows of `size`."""
    rows = Rows(spec_of(size))
    segments = max(1, total // rows.bytes)
    total, groups, costs = segments * rows.bytes, [max(1, total >> 23)], defaultdict[str, list[float]](list)
    with ExitStack() as stack:
        there = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-", dir=folder)))
        served = stack.enter_context(Served(there / "run", 2 * segments * rows.length))
        checked = stack.enter_context(Checked())
        client, other = (
            stack.enter_context(TrainerClient(where.address, actor="bench", spec=rows.spec, outbox=there / str(i)))
            for i, where in enumerate((served, checked))
        )
        served.direct(client)
        link = stack.enter_context(Connection(checked.address, m.Hello(m.PROTOCOL, "actor", "bench", "memory")))
        link.hello(20.0)
        messages = sealed(rows.episode(rows.pool, 1))
        raw, disk = stack.enter_context(RawTcp()), stack.enter_context(plain_disk(there / "disk", total, rows.records))
        bulk = pieces(rows.records, BULK)

        def end_to_end() -> float:
            commits = served.commits
            seconds = deliver(client, rows.episode(segments, client.directive["number"]))
            groups[0] = max(1, served.commits - commits)
            return seconds

        def gigabytes(key: str, call: Callable[[], float], *others: int) -> Callable[[], float]:
            """The rate of a call that takes so many seconds; what it costs in CPU time is kept."""

            def rate() -> float:
                before = cpu_seconds(os.getpid(), *others)
                seconds = call()
                costs[key].append((cpu_seconds(os.getpid(), *others) - before) / total * 1e9)
                return total / seconds / 1e9

            return rate

        contenders = {
            "raw": gigabytes("raw", lambda: raw.send(rows.records, total), raw.pid),
            "bulk": gigabytes("bulk", lambda: raw.send(bulk, total), raw.pid),
            "wire": gigabytes("wire", lambda: send_all(link, messages, total), checked.pid),
            "pushed": gigabytes("pushed", lambda: deliver(other, rows.episode(segments, 1)), checked.pid),
            "end to end": gigabytes("end to end", end_to_end, served.pid),
            "disk": gigabytes("disk", lambda: disk(groups[0])),
        }
        rounds(contenders, 2)  # every block of the files is written, each buffer grown
        costs.clear()
        measured = rounds(contenders, count)
    for key, part in (("least", "wire"), ("least pushed", "pushed")):
        measured[key] = [min(pair) for pair in zip(measured[part], measured["disk"], strict=True)]
    middle, cost = ({key: median(values) for key, values in all.items()} for all in (measured, costs))

    def figure(key: str, against: str, words: str, goal: str = "") -> Figure:
        title = {"wire": f"{name} over the wire", "end to end": f"{name} end to end, {groups[0]} groups"}
        beside = f"{words} ({middle[against]:.2f})"
        return Figure(title.get(key, f"{name} {key}"), middle[key], "GB/s", beside, ratio(measured, key, against), goal)

    return [
        figure("wire", "raw", "raw TCP, row by row", ">= 0.75"),
        figure("wire", "bulk", "raw TCP in bulk"),
        figure("pushed", "raw", "raw TCP, row by row"),
        figure("end to end", "least pushed", "the smaller of pushed and disk", ">= 0.7"),
        figure("end to end", "least", "the smaller of wire and disk"),
        *(Figure(f"{name} {key}, CPU of both sides", cost[key], "s/GB", f"raw TCP ({cost['raw']:.2f})",
                 cost[key] / cost["raw"]) for key in ("wire", "pushed", "end to end")),
    ]  # fmt: skip


def sealed(segments: Sequence[Segment]) -> list[m.Push]:
    """These segments in messages as the outbox gives them."""
    pushes, batch = [], bytearray()
    for seq, segment in enumerate(segments):
        record = b"".join(m.encode_record(seq, segment))
        if batch and len(batch) + len(record) > SLICE_BYTES:
            pushes.append(m.Push("memory", {"records": np.frombuffer(batch, np.uint8)}))
            batch = bytearray()
        batch += record
    return [*pushes, m.Push("memory", {"records": np.frombuffer(batch, np.uint8)})]


def send_all(link: Connection, pushes: Sequence[m.Push], total: int) -> float:
    """Send these again and again, `total` bytes, MAX_UNACKNOWLEDGED at a time. Return the seconds until all are
    acknowledged."""
    begin, left, sizes = time.perf_counter(), total, deque[int]()
    for push in itertools.cycle(pushes):
        size = push.arrays["records"].nbytes
        while sizes and (left <= 0 or sum(sizes) + size > MAX_UNACKNOWLEDGED):
            link.wait(1.0)
            while (message := link.receive()) is not None:
                if isinstance(message, m.Ack):
                    sizes.popleft()
        if left <= 0:
            return time.perf_counter() - begin
        link.send(push)
        sizes.append(size)
        left -= size
    raise AssertionError("a cycle has no end")


def pieces(records: Sequence[memoryview], size: int) -> list[memoryview]:
    """The same bytes, cut anew."""
    data = memoryview(b"".join(records))
    return [data[begin : begin + size] for begin in range(0, len(data), size)]


class RawTcp:
    """A plain connection to a process that only receives; a context manager."""

    def __enter__(self) -> "RawTcp":
        self._pipe, theirs = PROCESSES.Pipe()
        self._process = PROCESSES.Process(target=receive, args=(theirs,))
        self._process.start()
        self._connection = socket.create_connection(("127.0.0.1", self._pipe.recv()))
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return self

    @property
    def pid(self) -> int:
        return self._process.pid or 0

    def send(self, records: Sequence[memoryview], total: int) -> float:
        """Send these again and again, `total` bytes; seconds until all have come."""
        self._pipe.send((len(records[0]), total))
        self._pipe.recv()
        begin, left = time.perf_counter(), total
        for record in itertools.cycle(records):
            self._connection.sendall(record[:left])
            left -= len(record)
            if left <= 0:
                break
        self._pipe.recv()
        return time.perf_counter() - begin

    def __exit__(self, *exception: object) -> None:
        self._connection.close()
        self._process.kill()
        self._process.join()


def receive(pipe: Any) -> None:
    """The other end: into one buffer, record by record."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        pipe.send(listening.getsockname()[1])
        connection, _ = listening.accept()
    while True:
        size, left = pipe.recv()
        buffer = memoryview(bytearray(size))
        pipe.send("ready")
        while left:
            wanted = min(size, left)
            left -= wanted
            while wanted:
                wanted -= connection.recv_into(buffer[:wanted])
        pipe.send("done")


@contextmanager
def plain_disk(path: Path, total: int, records: Sequence[memoryview]) -> Iterator[Callable[[int], float]]:
    """A call (groups) that writes `total` bytes of these records into a file that is there, each group with a sync."""
    data = memoryview(b"".join(records))
    file = os.open(path, os.O_RDWR | os.O_CREAT)
    os.posix_fallocate(file, 0, total)

    def write(groups: int) -> float:
        begin, offset = time.perf_counter(), 0
        for group in range(1, groups + 1):
            while left := total * group // groups - offset:
                offset += os.pwrite(file, data[:left], offset)
            os.fdatasync(file)
        return time.perf_counter() - begin

    yield write
    os.close(file)
