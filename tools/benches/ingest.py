"""How fast records come in, against a plain TCP connection of the same bytes, and how fast they are durable, against the
smaller of wire and disk.

A record here is one row of an episode; the recorder puts some into a segment, and the client several of these into a
message. `over the wire`: the client's messages, from memory, to a process that decodes and checks them as the server
does. `pushed`: from push through the outbox to the same process. `end to end`: from push to the durable acknowledgement
of the real server. Raw TCP sends the same rows one at a time, and (`bulk`) 4 MiB at a time, into one buffer. The disk
writes the same bytes in as many groups as the server did, each with one fdatasync.
"""

import argparse
import os
import socket
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median

import numpy as np
from benches.paired import Figure, machine, ratio, rounds, said
from benches.served import PROCESSES, Checked, Rows, Served, deliver, spec_of
from serl_client import Segment
from serl_client import messages as m
from serl_client.client import TrainerClient
from serl_client.link import Link
from serl_client.outbox import SLICE_BYTES

from serl_launcher.service.server import WINDOW

SIZES = {"1 KB": 1000, "50 KB": 50_000, "500 KB": 500_000, "3 MB": 3_000_000}
BULK = 4 << 20


def main(words: Sequence[str], prog: str) -> None:
    parser = argparse.ArgumentParser(prog, description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="(7)")
    parser.add_argument("--mb", type=int, default=256, help="that each measurement sends (256; of 1 KB a quarter)")
    parser.add_argument("--folder", type=Path, help="on the disk that is measured (the system's for temporary files)")
    parser.add_argument("--json", action="store_true", help="print one object")
    options = parser.parse_args(words)
    before = machine()
    figures = []
    for name, size in SIZES.items():
        figures += ingest(name, size, options.mb * 10**6 // (4 if size < 10_000 else 1), options.rounds, options.folder)
    said("ingest", before, figures, as_json=options.json)


def ingest(name: str, size: int, total: int, count: int, folder: Path | None) -> list[Figure]:
    rows = Rows(spec_of(size))
    segments = max(1, total // rows.bytes)
    total, capacity = segments * rows.bytes, 2 * segments * rows.length
    with ExitStack() as stack:
        there = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-", dir=folder)))
        served, checked = stack.enter_context(Served(there / "run", capacity)), stack.enter_context(Checked())
        clients = {
            where.address: stack.enter_context(
                TrainerClient(where.address, actor="bench", spec=rows.spec, outbox=there / where.address[-5:])
            )
            for where in (served, checked)
        }
        served.direct(clients[served.address])
        send = stack.enter_context(raw_tcp())
        disk = stack.enter_context(plain_disk(there / "disk", total, rows.records))
        groups = [max(1, total >> 23)]

        def end_to_end() -> float:
            commits = served.commits
            client = clients[served.address]
            rate = total / deliver(client, rows.episode(segments, client.directive["number"])) / 1e9
            groups[0] = max(1, served.commits - commits)
            return rate

        def pushed() -> float:
            return total / deliver(clients[checked.address], rows.episode(segments, 1)) / 1e9

        messages = sealed(rows.episode(segments, 1))
        link = stack.enter_context(Link(checked.address, m.Hello(m.PROTOCOL, "actor", "bench", "memory")))
        link.hello(10.0)

        contenders = {
            "raw TCP": lambda: total / send(rows.records, total) / 1e9,
            "bulk": lambda: total / send(pieces(rows.records, BULK), total) / 1e9,
            "wire": lambda: total / send_all(link, messages) / 1e9, "pushed": pushed, "end to end": end_to_end, "disk": lambda: total / disk(groups[0]) / 1e9,
        }  # fmt: skip
        rounds(contenders, 2)  # every block of the files is written, each buffer grown
        measured = rounds(contenders, count)
    measured["the smaller"] = [min(pair) for pair in zip(measured["wire"], measured["disk"], strict=True)]
    middle = {key: median(values) for key, values in measured.items()}
    return [
        Figure(f"{name} over the wire", middle["wire"], "GB/s", f"raw TCP ({middle['raw TCP']:.2f})",
               ratio(measured, "wire", "raw TCP"), ">= 0.75"),
        Figure(f"{name} over the wire", middle["wire"], "GB/s", f"raw TCP in bulk ({middle['bulk']:.2f})",
               ratio(measured, "wire", "bulk")),
        Figure(f"{name} pushed", middle["pushed"], "GB/s", f"raw TCP ({middle['raw TCP']:.2f})",
               ratio(measured, "pushed", "raw TCP")),
        Figure(f"{name} end to end, {groups[0]} groups", middle["end to end"], "GB/s",
               f"the smaller of wire and disk ({middle['disk']:.2f})",
               ratio(measured, "end to end", "the smaller"), ">= 0.7"),
    ]  # fmt: skip


def sealed(segments: Sequence[Segment]) -> list[m.Push]:
    """These segments in messages as the outbox gives them."""
    pushes, batch = [], bytearray()
    for seq, segment in enumerate(segments):
        record = b"".join(m.seal(seq, segment))
        if batch and len(batch) + len(record) > SLICE_BYTES:
            pushes.append(m.Push("memory", {"records": np.frombuffer(batch, np.uint8)}))
            batch = bytearray()
        batch += record
    return [*pushes, m.Push("memory", {"records": np.frombuffer(batch, np.uint8)})]


def send_all(link: Link, pushes: Sequence[m.Push]) -> float:
    """Seconds until the last message is acknowledged; at most WINDOW bytes are on their way."""
    begin, sizes = time.perf_counter(), deque[int]()
    for push in [*pushes, None]:
        while sizes and (push is None or sum(sizes) + push.arrays["records"].nbytes > WINDOW):
            link.wait(1.0)
            while (message := link.receive()) is not None:
                if isinstance(message, m.Ack):
                    sizes.popleft()
        if push is not None:
            link.send(push)
            sizes.append(push.arrays["records"].nbytes)
    return time.perf_counter() - begin


def pieces(records: Sequence[memoryview], size: int) -> list[memoryview]:
    """The same bytes, cut anew."""
    data = memoryview(b"".join(records))
    return [data[begin : begin + size] for begin in range(0, len(data), size)]


@contextmanager
def raw_tcp() -> Iterator:
    """A call (records, total) that sends these again and again, `total` bytes; seconds until all have come."""
    ours, theirs = PROCESSES.Pipe()
    process = PROCESSES.Process(target=receive, args=(theirs,))
    process.start()
    with socket.create_connection(("127.0.0.1", ours.recv())) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

        def send(records: Sequence[memoryview], total: int) -> float:
            ours.send((len(records[0]), total))
            ours.recv()
            begin, left = time.perf_counter(), total
            while left:
                for record in records:
                    piece = record[:left]
                    connection.sendall(piece)
                    left -= len(piece)
            ours.recv()
            return time.perf_counter() - begin

        yield send
    process.kill()
    process.join()


def receive(pipe) -> None:
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
def plain_disk(path: Path, total: int, records: Sequence[memoryview]) -> Iterator:
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
