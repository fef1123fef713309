"""What the wire costs, beside raw TCP in the same rounds and, with --peers, beside what others do.

An observation (3 images of 224x224x3 uint8 and a state) goes to a process that answers a chunk of 50x14 float32 at
once: ours through the calls that a runner makes, to our inference server with a stand-in for its policy. The policy's
own time is no part of it. Then what encoding and decoding that observation takes, and how fast messages of 500 KB and
3 MB go one way, in clear and with CURVE.
"""

import argparse
import itertools
import os
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Self

import numpy as np
import zmq
from serl_client import messages as m
from serl_client import wire
from serl_client.client import TrainerClient
from serl_client.connection import Connection, received
from serl_client.errors import ConfigError
from serl_client.keys import Key
from serl_client.wire import Buffer

from serl_launcher.store.access import AccessControl
from serl_launcher.store.peers import send
from tests.shared.common import free_port
from tools.keys import locked, make

from .paired import JSON, Figure, cpu_seconds, option, quantiles, ratio, rounds
from .peers import ASKED, CHUNK, RAW, Call, Peer, peers
from .served import PATIENCE_S, SPEC, Child, RawTcp, Served

OURS, LINK, CURVE = "ours", "ours, one thread", "ours, CURVE"
GOALS = {"lerobot, two calls": 1 / 5, "agentlace": 1 / 5, "gRPC protobuf": 1 / 3, "websocket (openpi)": 1.0}
SIZES = {"500 KB": 500_000, "3 MB": 3_000_000}
ANSWER_S = 10.0


OPTIONS = {
    "--rounds": option(9, "of all contenders in turn (9)"),
    "--calls": option(200, "of each contender in each round (200)"),
    "--megabytes": option(100, "that go one way in each measurement (100)"),
    "--peers": option(False, "measure what others do, too"),
    "--agentlace": option("", "the folder of agentlace's public source", metavar="DIR"),
    **JSON,
}


def measure(folder: Path, options: argparse.Namespace) -> Iterator[Figure]:
    keys, others = keyed(folder / "keys"), peers(options.agentlace) if options.peers else []
    with Client(folder / "clear") as ours, Client(folder / "secure", keys) as secure:
        for each in (ours, secure):
            each.begin()
        yield from round_trips(ours, secure, others, options.rounds, options.calls)
    yield from coding()
    yield from streams(options.megabytes, options.rounds, keys)


# -- our side
class Stand:
    """In the place of a policy: answers each question with one chunk at once."""

    spec, version, most, unrecorded = SPEC, 1, 64, ()

    def warm_up(self, size: int) -> None:
        """There is nothing to be made."""

    def check(self, ask: m.InferenceRequest) -> None:
        if ask.arrays.keys() < SPEC.observation.keys():
            raise m.MessageError("the observation lacks something")

    def answer(self, questions: Sequence[Any]) -> list[m.InferenceResponse]:
        return [m.InferenceResponse(each.ask.step, 1, {"action": CHUNK}) for each in questions]


def infer(_: Any, address: str, keys: Path | None = None) -> None:
    from serl_launcher.acting.server import InferenceServer  # with torch

    host: Any = Stand()
    server = InferenceServer(host, Path("nothing is read"), address, window=0.0, keys=keys)  # two ask, none waits
    server.run(dict, lambda: False)


def keyed(folder: Path) -> Path:
    """A folder of keys, one of them an actor's: bench.key."""
    with locked(folder, True):
        make(folder, "bench", "actor")
    return folder


class Client(Served):
    """A TrainerClient whose learner and inference server run beside it, with keys or without; a context manager."""

    def __init__(self, folder: Path, keys: Path | None = None) -> None:
        self.asked_at = f"tcp://127.0.0.1:{free_port()}"
        super().__init__(folder, 100, partial(infer, keys=keys), self.asked_at, keys=keys)
        key, self._step = keys / "bench.key" if keys else None, 0
        self.client = TrainerClient(self.address, actor="bench", spec=SPEC, outbox=folder / "outbox", key=key)

    def __enter__(self) -> Self:
        super().__enter__()
        self.client.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self.client.close()
        super().__exit__(*exception)

    def begin(self) -> None:
        """Until there is an answer. Raises ConfigError when there is none for long."""
        deadline = time.monotonic() + PATIENCE_S
        while self._answer(1.0) is None:
            if time.monotonic() > deadline:
                raise ConfigError("our own inference server does not answer; its words are above")

    def __call__(self) -> Any:
        """One round trip. Raises ConfigError when nothing comes."""
        if (answer := self._answer(ANSWER_S)) is None:
            raise ConfigError("our own inference server did not answer")
        return answer

    def _answer(self, timeout: float) -> Any:
        self._step += 1
        self.client.ask(ASKED, step=self._step, seed=0, previous_action=None, reset=False, explore=False, task="bench")
        return self.client.wait_answer(self._step, timeout)


@contextmanager
def link_to(address: str) -> Iterator[Call]:
    """The same question, asked and answered in the one thread that owns the connection."""
    steps = itertools.count(1)
    with Connection(address, m.Hello(m.PROTOCOL, "actor", "bench")) as link:
        link.receive()

        def call() -> Any:
            link.send(m.InferenceRequest(next(steps), 0, False, False, "bench", ASKED))
            return answer_of(link, ANSWER_S, "inference server")

        call()  # it is welcomed
        yield call


def answer_of(link: Connection, seconds: float, who: str) -> m.Message:
    """The next message. Raises ConfigError when none comes."""
    deadline = time.monotonic() + seconds
    while (answer := link.receive()) is None:
        if time.monotonic() > deadline:
            raise ConfigError(f"our own {who} did not answer")
        link.wait(0.1)
    return answer


# -- round trips
def round_trips(ours: Client, secure: Client, others: Sequence[Peer], count: int, calls: int) -> Iterator[Figure]:
    """p50, p99 and CPU of each, and ours beside each other; of who cannot be measured stderr says why."""
    with ExitStack() as exits:
        found: dict[str, tuple[Call, int]] = {OURS: (ours, ours.beside.pid), CURVE: (secure, secure.beside.pid)}
        found[LINK] = exits.enter_context(link_to(ours.asked_at)), ours.beside.pid
        for peer in (RAW, *others):
            try:
                found[peer.name] = exits.enter_context(peer.running())
            except (ConfigError, ImportError) as error:
                print(f"{peer.name} is not beside it: {type(error).__name__}: {error}", file=sys.stderr)
        for call, _ in found.values():
            for _ in range(30):
                call()
        times: dict[str, list[tuple[float, float]]] = defaultdict(list)  # (p50, p99) of each round
        cpu: dict[str, float] = defaultdict(float)

        def measure(name: str) -> float:
            call, process_id = found[name]
            spent, seconds = -cpu_seconds(os.getpid(), process_id), []
            for _ in range(calls):
                begin = time.perf_counter()
                call()
                seconds.append(time.perf_counter() - begin)
            cpu[name] += (spent + cpu_seconds(os.getpid(), process_id)) / (calls * count)
            times[name].append(quantiles(seconds))
            return times[name][-1][0]

        p50 = rounds({name: partial(measure, name) for name in found}, count)
    tails = {name: [p99 / p50 for p50, p99 in each] for name, each in times.items()}
    for name in found:
        yield Figure(f"round trip, {name}: p50", median(p50[name]) * 1e6, "us", RAW.name, ratio(p50, name, RAW.name))
        yield Figure(f"round trip, {name}: p99", median(p99 for _, p99 in times[name]) * 1e6, "us")
        goal = "<= 1.5" if name == OURS else ""
        yield Figure(
            f"round trip, {name}: p99 / p50", median(tails[name]), "", RAW.name, ratio(tails, name, RAW.name), goal
        )
        yield Figure(f"round trip, {name}: CPU of both sides", cpu[name] * 1e6, "us")
    for name in [name for name in GOALS if name in found]:
        goal = f"<= {GOALS[name]:.4f}"
        yield Figure("round trip, ours: p50", median(p50[OURS]) * 1e6, "us", name, ratio(p50, OURS, name), goal)


# -- the parts
def coding() -> Iterator[Figure]:
    """What encoding and decoding the observation takes, and what of it encoding copies."""
    ask = m.InferenceRequest(1, 0, False, False, "bench", ASKED)
    times = []
    for _ in range(2000):
        begin = time.perf_counter()
        m.decode(m.encode(ask))
        times.append(time.perf_counter() - begin)
    frames, joined, joining = m.encode(ask), list[Any](), []
    for _ in range(2000):
        begin = time.perf_counter()
        joined = wire.joined(frames)
        joining.append(time.perf_counter() - begin)
    yield Figure("encode + decode of the observation", median(times) * 1e6, "us", goal="<= 10")
    yield Figure("bytes of it that encoding copies", copied(ask, frames[1:]), "B", goal="<= 0")
    yield Figure("bytes of it that are joined to one frame for the socket", len(joined[1]), "B", goal="<= 0")
    yield Figure("  which takes", median(joining) * 1e6, "us")


def copied(ask: m.InferenceRequest, frames: Sequence[Buffer]) -> int:
    """How many bytes of the frames are not the arrays' own memory."""
    arrays = zip(ask.arrays.values(), frames, strict=True)
    return sum(len(frame) for array, frame in arrays if not np.shares_memory(array, np.frombuffer(frame, np.uint8)))


# -- one way
def absorb(pipe: Any, address: str, keys: Path | None) -> None:
    """Takes records as the server does, but for their checksums and the store; a question for the status is answered
    after all that came before it."""
    gate, poller = AccessControl(address, keys), zmq.Poller()
    for polled in gate.polled:
        poller.register(polled, zmq.POLLIN)
    pipe.send("ready")
    while True:
        poller.poll()
        gate.turn()
        while came := received(gate.socket):
            identity, *frames = came
            gate.admit(identity)
            if isinstance(m.decode([frame.buffer for frame in frames]), m.Status):
                send(gate.socket, identity.bytes, m.Status({}))


@contextmanager
def link_sending(size: int, count: int, keys: Path | None) -> Iterator[Call]:
    """call() is how many bytes/s `count` messages of `size` bytes go one way."""
    address, key = f"tcp://127.0.0.1:{free_port()}", Key.read(keys / "bench.key") if keys else None
    push = m.Push("bench", {"records": np.random.default_rng(0).integers(0, 256, size, np.uint8)})
    hello = m.Hello(m.PROTOCOL, "actor", "bench")
    with Child(absorb, address, keys) as receiver, Connection(address, hello, key) as link:
        receiver.heard()
        link.receive()

        def call() -> float:
            begin = time.perf_counter()
            for message in [push] * count + [m.Status()]:
                if not link.send(message):
                    raise ConfigError("there is no connection to our own receiver")
            answer_of(link, PATIENCE_S, "receiver")
            return size * count / (time.perf_counter() - begin)

        yield call


def streams(megabytes: int, count: int, keys: Path) -> Iterator[Figure]:
    """GB/s of records one way, in clear beside plain TCP, and with CURVE beside in clear."""
    for name, size in SIZES.items():
        number = max(1, megabytes * 10**6 // size)
        data = np.random.default_rng(0).integers(0, 256, size, np.uint8).data
        with ExitStack() as exits:
            raw = exits.enter_context(RawTcp())
            calls = {
                RAW.name: lambda raw=raw, data=data, total=size * number: total / raw.send([data], total),
                "clear": exits.enter_context(link_sending(size, number, None)),
                "CURVE": exits.enter_context(link_sending(size, number, keys)),
            }
            for call in calls.values():
                call()
            rates = rounds(calls, count)
        yield Figure(f"one way, {name}, raw TCP", median(rates[RAW.name]) / 1e9, "GB/s")
        clear, secret = (median(rates[kind]) / 1e9 for kind in ("clear", "CURVE"))
        yield Figure(f"one way, {name}, clear", clear, "GB/s", RAW.name, ratio(rates, "clear", RAW.name))
        yield Figure(f"one way, {name}, CURVE", secret, "GB/s", "clear", ratio(rates, "CURVE", "clear"), ">= 0.3")
