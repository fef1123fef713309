"""The other side for the benches of the data path: the real server as a process, and one that only checks; and what the
benches push to them."""

import multiprocessing
import socket
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

import numpy as np
import zmq
from serl_client import Feature, Segment, Spec, Stamp
from serl_client import messages as m
from serl_client.client import TrainerClient
from serl_client.connection import Connection
from serl_client.recorder import segment_rows

from serl_launcher.store.intake import MAX_UNACKNOWLEDGED
from serl_launcher.store.peers import bound, send
from serl_launcher.store.server import serve
from tests.shared.common import free_port

PROCESSES = multiprocessing.get_context("forkserver")  # each process has this module as soon as it starts
PROCESSES.set_forkserver_preload([__name__])
BODY = {"phase": "bench", "mode": "collect", "into": "online"}
STATE = "observation.state"
AHEAD = 2 * MAX_UNACKNOWLEDGED  # bytes


class Served:
    """The real server of a run in `folder`, with one source of `capacity` steps; a context manager.

    `beside(address)` is a process that serves those who look for inference, at `inference` (a free port, by default);
    actors are told that it is at `told`. The server may be killed and started again.
    """

    def __init__(
        self,
        folder: Path,
        capacity: int,
        beside: Callable[[str], None] | None = None,
        inference: str = "",
        told: str = "",
    ) -> None:
        self.folder = folder
        self.address, free = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
        self.local, inference = f"ipc://{folder}/server", inference or free
        self._words = (folder, capacity, self.address, self.local, told or inference)
        self._beside = PROCESSES.Process(target=beside or check, args=(inference,))
        self.learner = Connection(self.local, m.Hello(m.PROTOCOL, "learner", "bench"))

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._beside.start()
        self.start()
        return self

    def start(self) -> None:
        self._process = PROCESSES.Process(target=run_server, args=self._words)
        self._process.start()

    @property
    def pid(self) -> int:
        return self._process.pid or 0

    def kill(self) -> None:
        """As kill -9 does."""
        self._process.kill()
        self._process.join()
        self.learner.close()

    def direct(self, client: TrainerClient) -> None:
        """Give the directive to collect, and wait until the client has it."""
        while not client.connected:
            client.wait(0.05)
        self.learner.call(m.Direct(BODY, None), 20.0)
        while not client.directive["number"]:
            client.wait(0.05)

    @property
    def commits(self) -> int:
        """How many groups with a part of the newest episode were made durable until now."""
        revision = 0
        page: Any = self.learner.call(m.Sync(0, 0), 20.0)
        while page.episodes:
            revision = page.revision
            page = self.learner.call(m.Sync(revision, 0), 20.0)
        return revision

    def __exit__(self, *exception: object) -> None:
        self.kill()
        self._beside.kill()
        self._beside.join()


def run_server(run_dir: Path, capacity: int, public: str, local: str, inference: str) -> None:
    serve(run_dir, {"online": capacity}, public=public, local=local, inference=inference)


class Checked:
    """`check` as a process; a context manager."""

    def __init__(self) -> None:
        self._port = free_port()
        self.address = f"tcp://127.0.0.1:{self._port}"
        self._process = PROCESSES.Process(target=check, args=(self.address,))

    def __enter__(self) -> "Checked":
        self._process.start()
        while True:
            with suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", self._port)):
                return self
            time.sleep(0.05)

    @property
    def pid(self) -> int:
        return self._process.pid or 0

    def __exit__(self, *exception: object) -> None:
        self._process.kill()
        self._process.join()


def check(address: str) -> None:
    """What the server does with records, without a store: decode them, check them, acknowledge each message."""
    router = bound(zmq.Context.instance(), address)
    notice = asdict(m.StateUpdate({"number": 1, **BODY}, {}))
    while True:
        identity, *parts = router.recv_multipart(copy=False)
        message = m.decode([part.buffer for part in parts])
        if isinstance(message, m.Hello):
            expected = [[message.session, 0]]
            send(router, identity.bytes, m.Welcome("bench", 0, MAX_UNACKNOWLEDGED, expected, None, address, notice))
        elif isinstance(message, m.Push):
            *_, (seq, _) = m.decode_records(message.arrays["records"].data)
            send(router, identity.bytes, m.Ack(message.session, seq + 1))


class Rows:
    """Segments of `length` rows (as many as the recorder takes, if 0), over about `pool` bytes that are made once."""

    def __init__(self, spec: Spec, *, length: int = 0, pool: int = 32 << 20) -> None:
        self.spec, self.length = spec, length or segment_rows(spec)
        generator = np.random.default_rng(0)
        self.bytes = self.length * sum(feature.nbytes for feature in spec.observation.values())
        self._pool = [
            {name: _values(generator, feature, self.length) for name, feature in spec.observation.items()}
            for _ in range(max(1, min(256, pool // self.bytes)))
        ]
        self.pool = len(self._pool)  # segments
        self._episodes = 0

    def episode(self, count: int, number: int, *, prefix: str = "bench") -> list[Segment]:
        """`count` segments of one new episode, which stays open."""
        self._episodes += 1
        flags, zeros = np.zeros(self.length, bool), np.zeros(self.length, np.float32)
        action, times = np.zeros((self.length, *self.spec.action.shape), np.float32), zeros.astype(np.float64)
        return [
            Segment(
                f"{prefix}-{self._episodes}", i * self.length, "bench", Stamp(number, "bench", 1),
                self._pool[i % len(self._pool)], action, zeros, flags, flags, times,
            )
            for i in range(count)
        ]  # fmt: skip

    @property
    def records(self) -> list[memoryview]:
        """Row after row as they lie in memory, feature by feature."""
        arrays = [array for part in self._pool for array in part.values()]
        return [row.reshape(-1).view(np.uint8).data for array in arrays for row in array]


def spec_of(size: int, *, fps: float = 300.0) -> Spec:
    """Rows of one array of `size` bytes, and an action of 7."""
    return Spec({STATE: Feature((size,), "uint8")}, Feature((7,), low=-np.ones(7), high=np.ones(7)), fps=fps)


def _values(generator: np.random.Generator, feature: Feature, count: int) -> Any:
    values = generator.integers(0, 256, (count, *feature.shape), np.uint8)
    return values.astype(feature.dtype)


class Latencies:
    """How late acknowledgements come: the `seconds` from each push through this to its Ack in the network thread."""

    def __init__(self, client: TrainerClient) -> None:
        self.seconds: list[float] = []
        self._client, self._pushed = client, deque[float]()
        self._seq = client._send_queue._put
        self._before, client._send_queue.acknowledge = client._send_queue.acknowledge, self._acknowledged

    def push(self, segment: Segment) -> None:
        self._pushed.append(time.perf_counter())
        self._client.push(segment)

    def _acknowledged(self, ack: m.Ack) -> None:
        self._before(ack)
        now = time.perf_counter()
        while self._pushed and self._seq < ack.expected:
            self.seconds.append(now - self._pushed.popleft())
            self._seq += 1


def deliver(client: TrainerClient, segments: list[Segment]) -> float:
    """Push them as fast as they are acknowledged, AHEAD bytes before that; seconds until all are."""
    begin = time.perf_counter()
    for segment in segments:
        while not client.has_room or client.pending[1] > AHEAD:
            time.sleep(0.0002)
        client.push(segment)
    while client.pending[0]:
        time.sleep(0.0005)
        client.check()
    return time.perf_counter() - begin
