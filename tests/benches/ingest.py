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
import tempfile
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
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

from .paired import COMMON, Figure, cpu_seconds, option, ratio, rounds
from .served import RawTcp, Rows, Served, checked, deliver, plain_disk, spec_of

SIZES = {"1 KB": 1000, "50 KB": 50_000, "500 KB": 500_000, "3 MB": 3_000_000}
BULK = 4 << 20


OPTIONS = {
    "--rounds": option(7, "(7)"),
    "--mb": option(256, "that each measurement sends (256; of 1 KB a quarter)"),
    "--sizes": option(list(SIZES), "of a row (all)", choices=SIZES),
    **COMMON,
}


def measure(folder: Path, options: argparse.Namespace) -> Iterator[Figure]:
    for name in options.sizes:
        yield from ingest(name, options.mb, options.rounds, folder)


def ingest(name: str, megabytes: int, count: int, folder: Path) -> list[Figure]:
    """`count` rounds of about so many megabytes in rows of the size `name`."""
    rows, total = Rows(spec_of(SIZES[name])), megabytes * 10**6 // (4 if SIZES[name] < 10_000 else 1)
    segments = max(1, total // rows.bytes)
    total, groups, costs = segments * rows.bytes, [max(1, total >> 23)], defaultdict[str, list[float]](list)
    with ExitStack() as stack:
        there = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=folder)))
        served = stack.enter_context(Served(there / "run", 2 * segments * rows.length))
        address, checked_pid = stack.enter_context(checked())
        client, other = (
            stack.enter_context(TrainerClient(where, actor="bench", spec=rows.spec, outbox=there / str(i)))
            for i, where in enumerate((served.address, address))
        )
        served.collect(client)
        link = stack.enter_context(Connection(address, m.Hello(m.PROTOCOL, "actor", "bench", "memory")))
        link.hello(20.0)
        messages = encoded(rows.episode(rows.pool, 1))
        raw, disk = stack.enter_context(RawTcp()), stack.enter_context(plain_disk(there / "disk", total, rows.records))
        bulk = pieces(rows.records, BULK)

        def end_to_end() -> float:
            commits = served.commits
            seconds = deliver(client, rows.episode(segments, client.state.directive["number"]))
            groups[0] = max(1, served.commits - commits)
            return seconds

        def rate(key: str, call: Callable[[], float], *others: int) -> float:
            """GB/s of a call that takes so many seconds; what it costs in CPU time is kept."""
            before = cpu_seconds(os.getpid(), *others)
            seconds = call()
            costs[key].append((cpu_seconds(os.getpid(), *others) - before) / total * 1e9)
            return total / seconds / 1e9

        calls: dict[str, tuple[Any, ...]] = {
            "raw": (lambda: raw.send(rows.records, total), raw.pid),
            "bulk": (lambda: raw.send(bulk, total), raw.pid),
            "wire": (lambda: send_all(link, messages, total), checked_pid),
            "pushed": (lambda: deliver(other, rows.episode(segments, 1)), checked_pid),
            "end to end": (end_to_end, served.pid),
            "disk": (lambda: disk(groups[0]),),
        }
        contenders = {key: partial(rate, key, *words) for key, words in calls.items()}
        rounds(contenders, 2)  # every block of the files is written, each buffer grown
        costs.clear()
        measured = rounds(contenders, count)
    for key, part in (("least", "wire"), ("least pushed", "pushed")):
        measured[key] = [min(pair) for pair in zip(measured[part], measured["disk"], strict=True)]
    return figures(name, measured, costs, groups[0])


def figures(
    name: str, measured: Mapping[str, Sequence[float]], costs: Mapping[str, Sequence[float]], groups: int
) -> list[Figure]:  # fmt: skip
    middle, cost = ({key: median(values) for key, values in all.items()} for all in (measured, costs))

    def figure(key: str, against: str, words: str, goal: str = "") -> Figure:
        title = {"wire": f"{name} over the wire", "end to end": f"{name} end to end, {groups} groups"}
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


def encoded(segments: Sequence[Segment]) -> list[m.Push]:
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
