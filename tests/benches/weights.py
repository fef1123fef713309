"""How fast a weights file reaches several receivers at once, beside the same bytes over plain TCP.

Ours is the real server and the pull of real clients: each part is hashed and written down, and what counts is when
every receiver has the verified file. Its wire alone is the same pull into memory. Beside them stand plain TCP into
memory, plain TCP whose receivers hash and write as ours must, and with --peers one broadcast of lz4(pickle) over
ZeroMQ PUB, as agentlace does it. Then a receiver behind a slow link pulls beside two fast ones.
"""

import argparse
import hashlib
import os
import pickle
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import zmq
from serl_client import messages as m
from serl_client.client import TrainerClient
from serl_client.connection import Connection
from serl_client.errors import ConfigError
from serl_client.weights import OPEN_REQUESTS, PART_BYTES

from serl_launcher.store import weights
from tests.faults.proxy import Proxy
from tests.shared.common import free_port

from .paired import Figure, cpu_seconds, machine, ratio, rounds, said
from .peers import connected, receive
from .served import PROCESSES, Served, spec_of

OURS, WIRE, RAW, KEPT, BROADCAST = (
    "ours",
    "ours, the wire alone",
    "raw TCP",
    "raw TCP, hashed and written",
    "lz4(pickle) over PUB",
)
LOOK_S = 0.001  # between two looks whether the file is there
PATIENCE_S = 120.0
SLOW = 1_000_000  # bytes/s of the slow link


def main(words: Sequence[str], prog: str) -> None:
    parser = argparse.ArgumentParser(prog, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="of all contenders in turn (7)")
    parser.add_argument("--megabytes", type=int, default=100, help="of the file (100)")
    parser.add_argument("--receivers", type=int, nargs="+", default=[1, 2, 4], help="at the same time (1 2 4)")
    parser.add_argument("--peers", action="store_true", help="measure the broadcast, too")
    parser.add_argument("--json", action="store_true", help="print one object")
    options = parser.parse_args(words)
    before, figures = machine(), []
    data = np.random.default_rng(0).integers(0, 256, options.megabytes * 10**6, np.uint8)
    for count in options.receivers:
        figures += pulls(data, count, options.rounds, peers=options.peers)
    said("weights", before, [*figures, *beside_slow(data, options.rounds), *parts(data)], as_json=options.json)


class Group:
    """Receivers, each a process that says when it has all of what was sent; a context manager."""

    def __init__(self, target: Callable[..., None], arguments: Sequence[tuple[Any, ...]]) -> None:
        pipes = [PROCESSES.Pipe() for _ in arguments]
        self._pipes = [ours for ours, _ in pipes]
        self._processes = [
            PROCESSES.Process(target=target, args=(theirs, *words), daemon=True)
            for (_, theirs), words in zip(pipes, arguments, strict=True)
        ]

    def __enter__(self) -> "Group":
        for process in self._processes:
            process.start()
        return self

    def __exit__(self, *exception: object) -> None:
        for process in self._processes:
            process.kill()
            process.join()

    @property
    def pids(self) -> list[int]:
        return [process.pid or 0 for process in self._processes]

    def last(self) -> float:
        """time.monotonic() at which the last of them had it. Raises ConfigError when one does not say so."""
        said = []
        for pipe in self._pipes:
            if not pipe.poll(PATIENCE_S):
                raise ConfigError("a receiver of this bench does not get what was sent; its words are above")
            said.append(pipe.recv())
        return max(said)


# -- ours
class Published:
    """A real server, and files that differ in their first bytes; a context manager."""

    def __init__(self, folder: Path, data: np.ndarray) -> None:
        self.served, self._data, self._count = Served(folder / "learner", 1000), data, 0

    def __enter__(self) -> "Published":
        self.served.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self.served.__exit__(*exception)

    def next(self) -> float:
        """Publish another file; time.monotonic() of just before its number was asked for."""
        self._count += 1
        self._data[:8] = np.array([self._count], np.uint64).view(np.uint8)
        sha256, size = weights.write(self.served.folder / "weights", self._data.tobytes())
        begin = time.monotonic()
        self.served.learner.call(m.Publish(sha256, size, self._count), PATIENCE_S)
        return begin


def follow(pipe: Any, address: str, folder: Path, number: int) -> None:
    """A client that pulls whatever is published; first it says that it is connected."""
    name = f"receiver-{number}"
    with TrainerClient(
        address, actor=name, spec=spec_of(1000), outbox=folder / name, weights_folder=folder / name / "weights"
    ) as client:
        while not client.connected:
            client.wait(0.05)
        pipe.send(time.monotonic())
        version = 0
        while True:
            if (newest := client.weights(version)) is not None:
                version = newest[0]
                pipe.send(time.monotonic())
            client.check()
            time.sleep(LOOK_S)


def pull(pipe: Any, address: str, number: int) -> None:
    """A client that pulls as the real one does, without checksum and file."""
    name, spec = f"puller-{number}", spec_of(1000).to_dict()
    with Connection(address, m.Hello(m.PROTOCOL, "actor", name, os.urandom(16).hex(), name, "", spec)) as link:
        while not link.connected:
            link.receive()
            link.wait(0.05)
        pipe.send(time.monotonic())
        version = size = taken = asked = 0
        while True:
            message = link.receive()
            if message is None:
                link.send(m.Heartbeat({}))
                link.wait(1.0)
            elif isinstance(message, m.WeightsChunk):
                taken += len(message.arrays["data"])
                if taken == size:
                    pipe.send(time.monotonic())
            offer = link.notice.weights
            if taken == size and offer and offer["version"] > version:
                version, size, taken, asked = offer["version"], offer["size"], 0, 0
            while asked < min(size, taken + OPEN_REQUESTS * PART_BYTES):
                link.send(m.WeightsRequest(offer["sha256"], asked, min(PART_BYTES, size - asked)))
                asked += PART_BYTES


# -- beside it
def take(pipe: Any, port: int, size: int, file: Path | None) -> None:
    """Receives over plain TCP, again and again; with a `file` it hashes and writes each part, as ours does."""
    memory = memoryview(bytearray(size))
    with connected(port) as connection, suppress(EOFError):
        pipe.send(time.monotonic())
        while True:
            if file is None:
                receive(connection, memory)
            else:
                keep(connection, memory, file)
            pipe.send(time.monotonic())


def keep(connection: socket.socket, memory: memoryview, file: Path) -> None:
    checksum = hashlib.sha256()
    with open(file, "wb", buffering=0) as kept:
        for begin in range(0, len(memory), PART_BYTES):
            part = memory[begin : begin + PART_BYTES]
            receive(connection, part)
            kept.write(part)
            checksum.update(part)
    checksum.hexdigest()


@contextmanager
def over_tcp(data: np.ndarray, files: Sequence[Path | None]) -> Iterator[Callable[[], float]]:
    """call() sends `data` to as many receivers as there are files; bytes/s of all of them together."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        with Group(take, [(port, data.nbytes, file) for file in files]) as group, ExitStack() as exits:
            connections = [exits.enter_context(listening.accept()[0]) for _ in files]
            group.last()

            def call() -> float:
                begin = time.monotonic()
                threads = [threading.Thread(target=each.sendall, args=(data,)) for each in connections]
                for thread in threads:
                    thread.start()
                return data.nbytes * len(files) / (group.last() - begin)

            yield call


def listen(pipe: Any, port: int) -> None:
    """A subscriber that unpacks what it is sent."""
    import lz4.frame

    subscriber = zmq.Context.instance().socket(zmq.SUB)
    subscriber.connect(f"tcp://127.0.0.1:{port}")
    subscriber.subscribe(b"")
    while True:
        pickle.loads(lz4.frame.decompress(subscriber.recv()))
        pipe.send(time.monotonic())


@contextmanager
def broadcast(data: np.ndarray, count: int) -> Iterator[Callable[[], float]]:
    """call() publishes lz4(pickle(data)) once to so many subscribers; bytes/s of all of them together."""
    import lz4.frame

    port = free_port()
    with zmq.Context.instance().socket(zmq.XPUB) as publisher, Group(listen, [(port,)] * count) as group:
        publisher.set(zmq.XPUB_VERBOSE, 1)
        publisher.bind(f"tcp://127.0.0.1:{port}")
        for _ in range(count):
            publisher.recv()

        def call() -> float:
            begin = time.monotonic()
            publisher.send(lz4.frame.compress(pickle.dumps({"weights": data})))
            return data.nbytes * count / (group.last() - begin)

        yield call


# -- figures
def pulls(data: np.ndarray, count: int, times: int, *, peers: bool) -> Iterator[Figure]:
    """GB/s that reach `count` receivers together, ours beside each other way."""
    with ExitStack() as exits:
        folder = Path(exits.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        published = exits.enter_context(Published(folder, data))
        address = published.served.address
        group = exits.enter_context(Group(follow, [(address, folder, number) for number in range(count)]))
        group.last()
        beside = exits.enter_context(Published(folder / "beside", data))
        pullers = exits.enter_context(Group(pull, [(beside.served.address, number) for number in range(count)]))
        pullers.last()
        pids, spent = [published.served.pid, *group.pids], [0.0]

        def ours() -> float:
            spent[0] -= cpu_seconds(*pids)
            begin = published.next()
            rate = data.nbytes * count / (group.last() - begin)
            spent[0] += cpu_seconds(*pids)
            return rate

        files = [folder / f"kept-{number}" for number in range(count)]

        def wire() -> float:
            begin = beside.next()
            return data.nbytes * count / (pullers.last() - begin)

        calls = {
            OURS: ours,
            WIRE: wire,
            RAW: exits.enter_context(over_tcp(data, [None] * count)),
            KEPT: exits.enter_context(over_tcp(data, files)),
        }
        if peers:
            calls[BROADCAST] = exits.enter_context(broadcast(data, count))
        for call in calls.values():
            call()
        spent[0] = 0.0
        rates = rounds(calls, times)
    value, to = median(rates[OURS]) / 1e9, f"weights to {count}"
    yield Figure(f"{to}, ours", value, "GB/s", RAW, ratio(rates, OURS, RAW), ">= 0.9")
    yield Figure(f"{to}, ours", value, "GB/s", KEPT, ratio(rates, OURS, KEPT))
    yield Figure(f"{to}, {WIRE}", median(rates[WIRE]) / 1e9, "GB/s", RAW, ratio(rates, WIRE, RAW), ">= 0.9")
    if peers:
        yield Figure(
            f"{to}, {WIRE}", median(rates[WIRE]) / 1e9, "GB/s", BROADCAST, ratio(rates, WIRE, BROADCAST), ">= 15"
        )
        yield Figure(f"{to}, ours", value, "GB/s", BROADCAST, ratio(rates, OURS, BROADCAST), ">= 15")
    for name in list(calls)[2:]:
        yield Figure(f"{to}, {name}", median(rates[name]) / 1e9, "GB/s")
    yield Figure(f"{to}, ours: CPU of all sides", spent[0] / (times * count * data.nbytes / 1e9), "s/GB")


def beside_slow(data: np.ndarray, times: int) -> Iterator[Figure]:
    """How long two fast receivers take, with and without one on a slow link beside them."""
    with ExitStack() as exits:
        folder = Path(exits.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        published = exits.enter_context(Published(folder, data))
        address = published.served.address
        proxy = exits.enter_context(Proxy("127.0.0.1", int(address.rpartition(":")[2])))
        fast = exits.enter_context(Group(follow, [(address, folder, number) for number in range(2)]))
        slow = exits.enter_context(Group(follow, [(f"tcp://127.0.0.1:{proxy.port}", folder, 2)]))
        fast.last()
        slow.last()

        def measure(mode: str, **options: Any) -> float:
            proxy.set(mode, **options)
            time.sleep(0.5)  # it is connected again, or gone
            return -published.next() + fast.last()

        calls = {"beside": partial(measure, "trickle", rate=SLOW), "alone": partial(measure, "cut")}
        for call in calls.values():
            call()
        seconds = rounds(calls, times)
    value = median(seconds["beside"])
    yield Figure(
        "two fast receivers beside a slow one", value, "s", "alone", ratio(seconds, "beside", "alone"), "<= 1.1"
    )


def parts(data: np.ndarray) -> Iterator[Figure]:
    """What one core does alone: the parts of a receiver's work."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder, open(Path(folder) / "file", "wb", 0) as file:
        for name, call in (("sha256", hashlib.sha256), ("write to a new file", file.write), ("copy", bytes)):
            begin = time.perf_counter()
            call(data.data)
            yield Figure(f"{name}, one core", data.nbytes / (time.perf_counter() - begin) / 1e9, "GB/s")
