"""How fast a weights file reaches several receivers at once, beside the same bytes over plain TCP.

Ours is the real server and the pull of real clients: each part is verified (xxh3_128) and written, and what counts is
when every receiver has the verified file. Beside it stand plain TCP into memory, plain TCP whose receivers hash and
write as ours must, and with --peers one broadcast of lz4(pickle) over ZeroMQ PUB, as agentlace does it.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import zmq
from serl_client import messages as m
from serl_client.client import TrainerClient

from serl_launcher.store import weights
from tests.shared.common import free_port

from .paired import Figure, cpu_seconds, option, ratio, rounds
from .peers import released, squeezed
from .served import Group, RawTcp, Served, spec_of

OURS, RAW = "ours", "raw TCP"
KEPT, BROADCAST = "raw TCP, hashed and written", "lz4(pickle) over PUB"
LOOK_S = 0.001  # between two looks whether the file is there
OPTIONS = {
    "--rounds": option(7, "of all contenders in turn (7)"),
    "--megabytes": option(100, "of the file (100)"),
    "--receivers": option([1, 2, 4], "at the same time (1 2 4)"),
    "--peers": option(False, "measure the broadcast, too"),
}


def measure(folder: Path, options: argparse.Namespace) -> Iterator[Figure]:
    data = np.random.default_rng(0).integers(0, 256, options.megabytes * 10**6, np.uint8)
    for count in options.receivers:
        yield from pulls(folder / str(count), data, count, options.rounds, peers=options.peers)


# -- ours
class Published(Served):
    """A real server, and files that differ in their first bytes; a context manager."""

    def __init__(self, folder: Path, data: np.ndarray) -> None:
        super().__init__(folder / "learner", 1000)
        self._data, self._count = data, 0

    def reach(self, group: Group) -> float:
        """Publish another file; seconds from when its number is asked for until each of a group has it."""
        self._count += 1
        self._data[:8] = np.array([self._count], np.uint64).view(np.uint8)
        sha256, size = weights.write(self.run_dir / "weights", self._data.tobytes())
        begin = time.monotonic()
        self.ask(m.Publish(sha256, size, self._count))
        return max(group.heard()) - begin


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


# -- beside it
def listen(pipe: Any, port: int) -> None:
    """A subscriber that unpacks what it is sent."""
    subscriber = zmq.Context.instance().socket(zmq.SUB)
    subscriber.connect(f"tcp://127.0.0.1:{port}")
    subscriber.subscribe(b"")
    while True:
        released(subscriber.recv())
        pipe.send(time.monotonic())


@contextmanager
def broadcast(data: np.ndarray, count: int) -> Iterator[Callable[[], float]]:
    """call() publishes lz4(pickle(data)) once to so many subscribers; seconds until all have it."""
    port = free_port()
    with zmq.Context.instance().socket(zmq.XPUB) as publisher, Group(listen, [(port,)] * count) as group:
        publisher.set(zmq.XPUB_VERBOSE, 1)
        publisher.bind(f"tcp://127.0.0.1:{port}")
        for _ in range(count):
            publisher.recv()

        def call() -> float:
            begin = time.monotonic()
            publisher.send(squeezed({"weights": data}))
            return max(group.heard()) - begin

        yield call


# -- figures
def pulls(folder: Path, data: np.ndarray, count: int, times: int, *, peers: bool) -> Iterator[Figure]:
    """GB/s that reach `count` receivers together, ours beside each other way."""
    with ExitStack() as exits:
        ours = exits.enter_context(Published(folder, data))
        words = [(ours.address, folder, number) for number in range(count)]
        group = exits.enter_context(Group(follow, words))
        group.heard()
        pids, spent = [ours.pid, *group.pids], [0.0]

        def reached() -> float:
            spent[0] -= cpu_seconds(*pids)
            seconds = ours.reach(group)
            spent[0] += cpu_seconds(*pids)
            return seconds

        raw = exits.enter_context(RawTcp([None] * count))
        kept = exits.enter_context(RawTcp([folder / f"kept-{number}" for number in range(count)]))
        calls = {
            OURS: reached,
            RAW: lambda: raw.send([data.data], data.nbytes),
            KEPT: lambda: kept.send([data.data], data.nbytes),
        }
        if peers:
            calls[BROADCAST] = exits.enter_context(broadcast(data, count))
        for call in calls.values():
            call()
        spent[0] = 0.0
        seconds = rounds(calls, times)
    rates = {name: [data.nbytes * count / each / 1e9 for each in values] for name, values in seconds.items()}

    for other, goal in {RAW: ">= 0.9", KEPT: "", BROADCAST: ">= 15"}.items():
        if other in rates:
            beside = ratio(rates, OURS, other)
            yield Figure(f"weights to {count}, {OURS}", median(rates[OURS]), "GB/s", other, beside, goal)
            yield Figure(f"weights to {count}, {other}", median(rates[other]), "GB/s")
    yield Figure(f"weights to {count}, ours: CPU of all sides", spent[0] / (times * count * data.nbytes / 1e9), "s/GB")
