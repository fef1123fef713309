"""The other side for the benches of the data path: processes, the real server, one that only checks, plain TCP; and
what the benches push to them."""

import itertools
import multiprocessing
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

import numpy as np
import xxhash
import zmq
from serl_client import Feature, Segment, Spec, Stamp
from serl_client import messages as m
from serl_client.client import TrainerClient
from serl_client.errors import ConfigError
from serl_client.recorder import segment_rows
from serl_client.spec import Array
from serl_client.weights import PART_BYTES

from serl_launcher.service.intake import MAX_UNACKNOWLEDGED
from serl_launcher.service.router import bound
from serl_launcher.service.server import serve
from tests.shared.clients import connected, directed
from tests.shared.common import STATE
from tests.shared.servers import ServerProcess

FIRST = (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH"))  # before packages that bring a `tests`
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, FIRST))
PROCESSES = multiprocessing.get_context("forkserver")  # each process has this module as soon as it starts
PROCESSES.set_forkserver_preload([__name__])
PATIENCE_S = 120.0  # a process that imports torch on a busy machine
BODY = {"phase": "bench", "mode": "collect", "into": "online"}
SPEC = Spec(  # a robot with three cameras
    {**{f"observation.images.cam_{i}": Feature((224, 224, 3), "uint8") for i in range(3)}, STATE: Feature((14,))},
    Feature((14,), low=-np.ones(14), high=np.ones(14)), fps=30.0,
)  # fmt: skip
AHEAD = 2 * MAX_UNACKNOWLEDGED  # bytes


# -- processes
class Child:
    """A process that runs target(pipe, *arguments) and is killed at the end; a context manager."""

    def __init__(self, target: Callable[..., None], *arguments: Any) -> None:
        self._pipe, theirs = PROCESSES.Pipe()
        self._process = PROCESSES.Process(target=target, args=(theirs, *arguments), daemon=True)

    def __enter__(self) -> Self:
        self._process.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.kill()
        self._process.join()

    @property
    def pid(self) -> int:
        return self._process.pid or 0

    def tell(self, value: Any) -> None:
        self._pipe.send(value)

    def heard(self, patience: float = PATIENCE_S) -> Any:
        """What it says next. Raises ConfigError when it ends, or says nothing for `patience` seconds."""
        deadline = time.monotonic() + patience
        with suppress(EOFError):
            while not self._pipe.poll(0.05):
                if not self._process.is_alive() or time.monotonic() > deadline:
                    break
            else:
                return self._pipe.recv()
        raise ConfigError("a process of this bench does not say what it should; its words are above")


class Group(ExitStack):
    """Processes of one kind, each with its own arguments; a context manager."""

    def __init__(self, target: Callable[..., None], arguments: Sequence[tuple[Any, ...]]) -> None:
        super().__init__()
        self.children = [Child(target, *words) for words in arguments]

    def __enter__(self) -> Self:
        for child in self.children:
            self.enter_context(child)
        return self

    @property
    def pids(self) -> list[int]:
        return [child.pid for child in self.children]

    def heard(self, patience: float = PATIENCE_S) -> list[Any]:
        return [child.heard(patience) for child in self.children]

    def tell(self, value: Any) -> None:
        for child in self.children:
            child.tell(value)


class Served(ServerProcess):
    """The real server of a run in `folder`, with one source of `capacity` steps; a context manager.

    inference: where actors are told that it is. Killed, the server can be started again.
    """

    def __init__(
        self, folder: Path, capacity: int, inference: str = "tcp://127.0.0.1:1", keys: Path | None = None
    ) -> None:  # fmt: skip
        self._inference, self.keys = inference, keys
        super().__init__(folder, online=capacity)

    def start(self) -> None:
        options = {"public": self.address, "local": self.local, "inference": self._inference, "keys": self.keys}
        self._server = Child(serve_run, self.run_dir, self.capacities, options).__enter__()

    def __enter__(self) -> Self:
        return self

    @property
    def pid(self) -> int:
        return self._server.pid

    def collect(self, client: TrainerClient) -> int:
        """Give the directive to collect, and wait until the client has it; its number."""
        connected(client)
        self.ask(m.Direct(BODY, None))
        directed(client)
        return client.state.directive["number"]

    def __exit__(self, *exception: object) -> None:
        self._server.__exit__()
        self.hang_up()


def serve_run(_: Any, run_dir: Path, capacities: dict[str, int], options: dict[str, Any]) -> None:
    serve(run_dir, capacities, **options)


def check(pipe: Any, address: str) -> None:
    """What the server does with records, without a store: decode them, check them, acknowledge each message."""
    router = bound(zmq.Context.instance(), address)
    pipe.send("bound")
    notice = asdict(m.StateUpdate({"number": 1, **BODY}, {}))
    while True:
        identity, *parts = router.recv_multipart(copy=False)
        message = m.decode([part.buffer for part in parts])
        if isinstance(message, m.Hello):
            expected = [[message.session, 0]]
            router.tell(identity.bytes, m.Welcome("bench", 0, MAX_UNACKNOWLEDGED, expected, None, address, notice))
        elif isinstance(message, m.Push):
            *_, (seq, _) = m.records(*message.parts)
            router.tell(identity.bytes, m.Ack(message.session, seq + 1))


# -- plain TCP: the ceiling
def joined(port: int) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def receive(connection: socket.socket, memory: memoryview) -> None:
    """Fill `memory`. Raises EOFError at the end of the connection."""
    while memory:
        count = connection.recv_into(memory)
        if not count:
            raise EOFError
        memory = memory[count:]


def take(pipe: Any, port: int, file: Path | None) -> None:
    """Receives over plain TCP, as often as it is told, (bytes of a part, bytes of all), into one buffer; with a `file`
    it hashes and writes each part of a pull, as ours does. Says time.monotonic() of when it has all."""
    with joined(port) as connection, suppress(EOFError):
        while True:
            size, left = pipe.recv()
            buffer = memoryview(bytearray(size))
            pipe.send("ready")
            while left:
                wanted = min(size, left)
                left -= wanted
                if file is not None:
                    keep(connection, file, buffer[:wanted])
                    continue
                while wanted:  # as lean as it can be: others stand beside it
                    wanted -= connection.recv_into(buffer[:wanted]) or sys.exit()
            pipe.send(time.monotonic())


def keep(connection: socket.socket, file: Path, memory: memoryview) -> None:
    with open(file, "wb", buffering=0) as kept:
        for begin in range(0, len(memory), PART_BYTES):
            part = memory[begin : begin + PART_BYTES]
            receive(connection, part)
            xxhash.xxh3_128_hexdigest(part)
            kept.write(part)


class RawTcp:
    """Plain connections, one for each of `files`, to processes that only receive (`take`); a context manager."""

    def __init__(self, files: Sequence[Path | None] = (None,)) -> None:
        self._files, self._exits = files, ExitStack()

    def __enter__(self) -> Self:
        listening = self._exits.enter_context(socket.create_server(("127.0.0.1", 0)))
        port = listening.getsockname()[1]
        self._group = self._exits.enter_context(Group(take, [(port, file) for file in self._files]))
        self._connections = [self._exits.enter_context(listening.accept()[0]) for _ in self._files]
        for connection in self._connections:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.pid = self._group.pids[0]
        return self

    def __exit__(self, *exception: object) -> None:
        self._exits.close()

    def send(self, records: Sequence[Any], total: int) -> float:
        """Send these again and again to each, `total` bytes; seconds until all have come."""
        self._group.tell((len(records[0]), total))
        self._group.heard()
        first, *others = self._connections
        begin, threads = time.monotonic(), [threading.Thread(target=_send, args=(e, records, total)) for e in others]
        for thread in threads:
            thread.start()
        _send(first, records, total)
        return max(self._group.heard()) - begin


def _send(connection: socket.socket, records: Sequence[Any], left: int) -> None:
    for record in itertools.cycle(records):
        connection.sendall(record if left >= len(record) else record[:left])
        left -= len(record)
        if left <= 0:
            return


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


# -- what is pushed
class Rows:
    """Segments of as many rows as the recorder takes, over about 32 MB that are made once."""

    def __init__(self, spec: Spec) -> None:
        self.spec, self.length = spec, segment_rows(spec)
        generator = np.random.default_rng(0)
        self.bytes = self.length * sum(feature.nbytes for feature in spec.observation.values())
        self._pool = [
            {name: _values(generator, feature, self.length) for name, feature in spec.observation.items()}
            for _ in range(max(1, min(256, (32 << 20) // self.bytes)))
        ]
        self.pool = len(self._pool)  # segments
        self._episodes = 0

    def episode(self, count: int, number: int) -> list[Segment]:
        """`count` segments of one new episode, which stays open."""
        self._episodes += 1
        flags, zeros = np.zeros(self.length, bool), np.zeros(self.length, np.float32)
        action, times = np.zeros((self.length, *self.spec.action.shape), np.float32), zeros.astype(np.float64)
        return [
            Segment(
                f"bench-{self._episodes}", i * self.length, "bench", Stamp(number, "bench", 0),
                self._pool[i % len(self._pool)], action, zeros, flags, flags, times,
            )
            for i in range(count)
        ]  # fmt: skip

    @property
    def records(self) -> list[memoryview]:
        """Row after row as they lie in memory, feature by feature."""
        arrays = [array for part in self._pool for array in part.values()]
        return [row.reshape(-1).view(np.uint8).data for array in arrays for row in array]


def spec_of(size: int) -> Spec:
    """Rows of one array of `size` bytes, and an action of 7."""
    return Spec({STATE: Feature((size,), "uint8")}, Feature((7,), low=-np.ones(7), high=np.ones(7)), fps=300.0)


def _values(generator: np.random.Generator, feature: Feature, count: int) -> Array:
    return generator.integers(0, 256, (count, *feature.shape), np.uint8).astype(feature.dtype)


def observation() -> dict[str, Array]:
    """One of SPEC."""
    generator = np.random.default_rng(0)
    return {name: _values(generator, feature, 1)[0] for name, feature in SPEC.observation.items()}


def deliver(client: TrainerClient, segments: list[Segment]) -> float:
    """Push them as fast as they are acknowledged, AHEAD bytes before that; seconds until all are."""
    begin = time.perf_counter()
    for segment in segments:
        while not client.has_room or client.pending[1] > AHEAD:
            time.sleep(0.002)
        client.push(segment)
    while client.pending[0]:
        time.sleep(0.0005)
        client.check()
    return time.perf_counter() - begin
