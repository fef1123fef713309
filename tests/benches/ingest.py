"""How fast records come in, against a plain TCP connection of the same bytes, and how fast they are durable, against
the smaller of wire and disk.

A record here is one row of an episode; the recorder puts some into a segment, and the client several of these into a
message. `over the wire`: the client's messages, from memory, to a process that decodes and checks them as the server
does. `pushed`: from push through the outbox to the same process. `end to end`: from push to the durable acknowledgement
of the real server. Raw TCP sends the same rows one at a time, and (`bulk`) 4 MiB at a time, into one buffer. The disk
writes the same bytes in groups of 8 MiB, each with one fdatasync. `one segment`: pushed alone, until it is durable,
beside one write of its bytes with fdatasync.
"""

import argparse
import itertools
import os
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
from serl_client import Segment
from serl_client import messages as m
from serl_client.client import TrainerClient
from serl_client.connection import Connection
from serl_client.outbox import SLICE_BYTES

from serl_launcher.service.intake import MAX_UNACKNOWLEDGED
from tests.shared.common import free_port

from .paired import Figure, cpu_seconds, option, ratio, rounds
from .served import Child, RawTcp, Rows, Served, check, deliver, plain_disk, spec_of

SIZES = {"1 KB": 1000, "50 KB": 50_000, "500 KB": 500_000, "3 MB": 3_000_000}
BULK, GROUP = 4 << 20, 8 << 20
OPTIONS = {
    "--rounds": option(7, "(7)"),
    "--mb": option(256, "that each measurement sends (256; of 1 KB a quarter)"),
    "--sizes": option(list(SIZES), "of a row (all)", choices=SIZES),
}


def measure(folder: Path, options: argparse.Namespace) -> Iterator[Figure]:
    for name in options.sizes:
        yield from ingest(name, options.mb, options.rounds, folder / name)


def ingest(name: str, megabytes: int, count: int, folder: Path) -> Iterator[Figure]:
    """`count` rounds of about so many megabytes in rows of the size `name`."""
    rows, total = Rows(spec_of(SIZES[name])), megabytes * 10**6 // (4 if SIZES[name] < 10_000 else 1)
    segments = max(1, total // rows.bytes)
    total, costs = segments * rows.bytes, defaultdict[str, list[float]](list)
    with ExitStack() as stack:
        served = stack.enter_context(Served(folder / "run", 2 * segments * rows.length))
        address = f"tcp://127.0.0.1:{free_port()}"
        checks = stack.enter_context(Child(check, address))
        checks.heard()
        ours, other = (
            stack.enter_context(TrainerClient(where, actor="bench", spec=rows.spec, outbox=folder / str(i)))
            for i, where in enumerate((served.address, address))
        )
        number = served.collect(ours)
        link = stack.enter_context(Connection(address, m.Hello(m.PROTOCOL, "actor", "bench", "memory")))
        link.hello(20.0)
        messages, data = encoded(rows.episode(rows.pool, 1)), memoryview(b"".join(rows.records))
        bulk = [data[begin : begin + BULK] for begin in range(0, len(data), BULK)]
        raw = stack.enter_context(RawTcp())
        disk = stack.enter_context(plain_disk(folder / "disk", total, rows.records))
        one = stack.enter_context(plain_disk(folder / "one", rows.bytes, rows.records))

        def rate(key: str, call: Callable[[], float], *others: int) -> float:
            """GB/s of a call that takes so many seconds; what it costs in CPU time is kept."""
            before = cpu_seconds(os.getpid(), *others)
            seconds = call()
            costs[key].append((cpu_seconds(os.getpid(), *others) - before) / total * 1e9)
            return total / seconds / 1e9

        contenders = {
            "raw": partial(rate, "raw", lambda: raw.send(rows.records, total), raw.pid),
            "bulk": partial(rate, "bulk", lambda: raw.send(bulk, total), raw.pid),
            "wire": partial(rate, "wire", lambda: send_all(link, messages, total), checks.pid),
            "pushed": partial(rate, "pushed", lambda: deliver(other, rows.episode(segments, 1)), checks.pid),
            "end to end": partial(
                rate, "end to end", lambda: deliver(ours, rows.episode(segments, number)), served.pid
            ),
            "disk": partial(rate, "disk", lambda: disk(max(1, total // GROUP))),
            "one segment": lambda: deliver(ours, rows.episode(1, number)),
            "one sync": lambda: one(1),
        }
        rounds(contenders, 2)  # every block of the files is written, each buffer grown
        costs.clear()
        yield from figures(name, rounds(contenders, count), costs)


def figures(name: str, measured: dict[str, list[float]], costs: Mapping[str, Sequence[float]]) -> Iterator[Figure]:
    measured["least"] = [min(pair) for pair in zip(measured["pushed"], measured["disk"], strict=True)]
    middle, cost = ({key: median(values) for key, values in all.items()} for all in (measured, costs))
    for key, against, words, goal in (
        ("wire", "raw", "raw TCP, row by row", ">= 0.75"),
        ("wire", "bulk", "raw TCP in bulk", ""),
        ("pushed", "raw", "raw TCP, row by row", ""),
        ("end to end", "least", "the smaller of pushed and disk", ">= 0.7"),
    ):
        beside = f"{words} ({middle[against]:.2f})"
        title = f"{name} over the wire" if key == "wire" else f"{name} {key}"
        yield Figure(title, middle[key], "GB/s", beside, ratio(measured, key, against), goal)
    for key in ("wire", "pushed", "end to end"):
        beside = f"raw TCP ({cost['raw']:.2f})"
        yield Figure(f"{name} {key}, CPU of both sides", cost[key], "s/GB", beside, cost[key] / cost["raw"])
    beside = f"write and fdatasync ({middle['one sync'] * 1e3:.2f})"
    late = ratio(measured, "one segment", "one sync")
    yield Figure(f"{name}, one segment until it is durable", middle["one segment"] * 1e3, "ms", beside, late)


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
