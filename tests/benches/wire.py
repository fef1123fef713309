"""What the wire costs, beside raw TCP in the same rounds and, with --peers, beside what others do.

An observation (3 images of 224x224x3 uint8 and a state) goes to a process that answers a chunk of 50x14 float32 at
once: ours through the calls that a runner makes, to our inference server with a stand-in for its policy. The policy's
own time is no part of it. Then what encoding and decoding that observation takes, and how fast messages of 500 KB and
3 MB go one way, in clear and with CURVE. --profile says where the time of a round trip goes.
"""

import argparse
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

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
from serl_launcher.store.server import serve
from tests.shared.common import free_port
from tools.keys import locked, make

from .control import SPEC
from .paired import Figure, cpu_seconds, machine, quantiles, ratio, rounds, said
from .peers import CHUNK, RAW, START_S, Call, Peer, accepted, connected, observation, peers, process, receive, wait
from .served import PROCESSES

OURS, LINK, CURVE = "ours", "ours, one thread", "ours, CURVE"
GOALS = {"lerobot, two calls": 1 / 5, "agentlace": 1 / 5, "gRPC protobuf": 1 / 3, "websocket (openpi)": 1.0}
SIZES = {"500 KB": 500_000, "3 MB": 3_000_000}
ANSWER_S = 10.0
STAGES = (
    "ask() puts the question and wakes the network thread", "the network thread has it",
    "it is encoded and given to ZeroMQ", "the inference server has it and has decoded it",
    "the policy has it", "the policy has answered", "the network thread has the answer",
    "the control thread has it",
)  # fmt: skip


def main(words: Sequence[str], prog: str) -> None:
    parser = argparse.ArgumentParser(prog, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="of all contenders in turn (9)")
    parser.add_argument("--calls", type=int, default=200, help="of each contender in each round (200)")
    parser.add_argument("--megabytes", type=int, default=100, help="that go one way in each measurement (100)")
    parser.add_argument("--peers", action="store_true", help="measure what others do, too")
    parser.add_argument("--agentlace", default="", metavar="DIR", help="the folder of agentlace's public source")
    parser.add_argument("--profile", action="store_true", help="say where the time of our round trip goes")
    parser.add_argument("--json", action="store_true", help="print one object")
    options = parser.parse_args(words)
    before, absent = machine(), {}
    others = peers(options.agentlace) if options.peers else []
    with Client() as ours, Client(secure=True) as secure:
        for each in (ours, secure):
            each.begin()
        figures = [*round_trips(ours, secure, others, options.rounds, options.calls, absent)]
        stages = profile(ours, options.calls) if options.profile else {}
    figures += [*coding(), *streams(options.megabytes, options.rounds)]
    said("wire", before, figures, as_json=options.json, absent=absent, profile_us=stages)
    if not options.json:
        for name, reason in absent.items():
            print(f"{name} is not beside it: {reason}")
        for stage, (p50, p99) in stages.items():
            print(f"{p50:8.0f} us (p99 {p99:6.0f}) until {stage}")


# -- our side
class Stand:
    """In the place of a policy: answers each question with one chunk at once, and with when it did what."""

    spec, version = SPEC, 1

    def warm_up(self, most: int) -> None:
        """There is nothing to be made."""

    def check(self, ask: m.InferenceRequest) -> None:
        if ask.arrays.keys() < SPEC.observation.keys():
            raise m.MessageError("the observation lacks something")

    def answer(self, questions: Sequence[Any]) -> list[m.InferenceResponse]:
        begin = time.monotonic()
        stamps = [np.array([each.came, begin, time.monotonic()]) for each in questions]
        return [
            m.InferenceResponse(each.ask.step, 1, {"action": CHUNK, "times": times})
            for each, times in zip(questions, stamps, strict=True)
        ]


def learn(folder: Path, public: str, inference: str, keys: Path | None) -> None:
    serve(folder / "run", {"online": 100}, public=public, local=f"ipc://{folder}/s", inference=inference, keys=keys)


def infer(address: str, keys: Path | None) -> None:
    from serl_launcher.acting.server import InferenceServer  # with torch

    host: Any = Stand()
    server = InferenceServer(host, Path("nothing is read"), address, window=0.0, keys=keys)  # two ask, none waits
    server.run(dict, lambda: False)


def keyed(folder: Path) -> Path:
    """A folder of keys, one of them an actor's: bench.key."""
    with locked(folder, True):
        make(folder, "bench", "actor")
    return folder


class Client:
    """A TrainerClient whose learner and inference server run beside it, with keys or without; a context manager."""

    def __init__(self, *, secure: bool = False) -> None:
        self._exits, self._secure, self._step = ExitStack(), secure, 0

    def __enter__(self) -> "Client":
        folder = Path(self._exits.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        self.address, learner = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
        keys = keyed(folder / "keys") if self._secure else None
        self._exits.enter_context(process(learn, folder, learner, self.address, keys))
        self.pid = self._exits.enter_context(process(infer, self.address, keys)).pid
        key = keys / "bench.key" if keys else None
        self.client = self._exits.enter_context(
            TrainerClient(learner, actor="bench", spec=SPEC, outbox=folder / "outbox", key=key)
        )
        self._observation = observation()
        return self

    def begin(self) -> None:
        """Until there is an answer. Raises ConfigError when there is none for long."""
        deadline = time.monotonic() + START_S
        while self._answer(1.0) is None:
            if time.monotonic() > deadline:
                raise ConfigError("our own inference server does not answer; its words are above")

    def __exit__(self, *exception: object) -> None:
        self._exits.close()

    def __call__(self) -> Any:
        """One round trip. Raises ConfigError when nothing comes."""
        if (answer := self._answer(ANSWER_S)) is None:
            raise ConfigError("our own inference server did not answer")
        return answer

    def _answer(self, timeout: float) -> Any:
        self._step += 1
        self.client.ask(
            self._observation, step=self._step, seed=0, previous_action=None, reset=False, explore=False, task="bench"
        )
        return self.client.wait_answer(self._step, timeout)


@contextmanager
def link_to(address: str) -> Iterator[Call]:
    """The same question, asked and answered in the one thread that owns the connection."""
    asked, step = observation(), 0
    with Connection(address, m.Hello(m.PROTOCOL, "actor", "bench")) as link:
        link.receive()

        def call() -> Any:
            nonlocal step
            step += 1
            link.send(m.InferenceRequest(step, 0, False, False, "bench", asked))
            deadline = time.monotonic() + ANSWER_S
            while (answer := link.receive()) is None:
                if time.monotonic() > deadline:
                    raise ConfigError("our own inference server did not answer")
                link.wait(ANSWER_S)
            return answer

        call()  # it is welcomed
        yield call


# -- round trips
def round_trips(
    ours: Client, secure: Client, others: Sequence[Peer], count: int, calls: int, absent: dict[str, str]
) -> Iterator[Figure]:
    """p50, p99 and CPU of each, and ours beside each other; who cannot be measured is put into `absent`."""
    with ExitStack() as exits:
        found: dict[str, tuple[Call, int]] = {OURS: (ours, ours.pid), CURVE: (secure, secure.pid)}
        found[LINK] = exits.enter_context(link_to(ours.address)), ours.pid
        for peer in (RAW, *others):
            try:
                found[peer.name] = exits.enter_context(peer.running())
            except (ConfigError, ImportError) as error:
                absent[peer.name] = f"{type(error).__name__}: {error}"
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


def profile(call: Client, calls: int) -> dict[str, tuple[float, float]]:
    """{stage: (p50, p99)} in us: how long after the one before it each stage of a round trip was reached."""
    stamps: list[tuple[float, ...]] = []
    network: Any = call.client._network
    link, answered = network._inference, network._handlers[m.InferenceResponse]
    sent, handled = [0.0, 0.0], [0.0]

    def send(message: m.Message) -> bool:
        sent[0] = time.monotonic()
        done = type(link).send(link, message)
        sent[1] = time.monotonic()
        return done

    def handle(act: m.InferenceResponse) -> None:
        handled[0] = time.monotonic()
        answered(act)

    link.send, network._handlers[m.InferenceResponse] = send, handle
    ask = call.client.ask

    def asking(*words: Any, **more: Any) -> None:
        ask(*words, **more)
        asked[0] = time.monotonic()

    asked = [0.0]
    call.client.ask = asking  # type: ignore[method-assign]
    for _ in range(calls + 30):
        begin = time.monotonic()
        answer = call()
        stamps.append((begin, asked[0], *sent, *answer.extras["times"], handled[0], time.monotonic()))
    steps = np.diff(np.array(stamps[30:]), axis=1).T
    found = {stage: quantiles(each) for stage, each in zip(STAGES, steps, strict=True)}
    return {stage: (1e6 * p50, 1e6 * p99) for stage, (p50, p99) in found.items()}


# -- the parts
def coding() -> Iterator[Figure]:
    """What encoding and decoding the observation takes, and what of it encoding copies."""
    ask = m.InferenceRequest(1, 0, False, False, "bench", observation())
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
def absorb(address: str, keys: Path | None, started: Any) -> None:
    """Takes records as the server does, but for their checksums and the store; a question for the status is answered
    after all that came before it."""
    gate, poller = AccessControl(address, keys), zmq.Poller()
    for polled in gate.polled:
        poller.register(polled, zmq.POLLIN)
    started.set()
    while True:
        poller.poll()
        gate.turn()
        while came := received(gate.socket):
            identity, *frames = came
            gate.admit(identity)
            if isinstance(m.decode([frame.buffer for frame in frames]), m.Status):
                send(gate.socket, identity.bytes, m.Status({}))


def absorb_raw(port: int, size: int, started: Any) -> None:
    """The same over plain TCP, into memory that is there; first comes how many messages there will be."""
    memory, count = memoryview(bytearray(size)), memoryview(bytearray(8))
    with accepted(port, started.set) as connection, suppress(EOFError):
        while True:
            receive(connection, count)
            for _ in range(int.from_bytes(count)):
                receive(connection, memory)
            connection.sendall(b".")


@contextmanager
def link_sending(size: int, count: int, keys: Path | None) -> Iterator[Call]:
    """call() is how many bytes/s `count` messages of `size` bytes go one way."""
    address, started = f"tcp://127.0.0.1:{free_port()}", PROCESSES.Event()
    push = m.Push("bench", {"records": np.random.default_rng(0).integers(0, 256, size, np.uint8)})
    key = Key.read(keys / "bench.key") if keys else None
    hello = m.Hello(m.PROTOCOL, "actor", "bench")
    with process(absorb, address, keys, started) as receiver, Connection(address, hello, key) as link:
        wait(receiver, started)
        link.receive()

        def call() -> float:
            begin = time.perf_counter()
            for message in [push] * count + [m.Status()]:
                if not link.send(message):
                    raise ConfigError("there is no connection to our own receiver")
            while link.receive() is None:
                if time.perf_counter() > begin + 120.0 or not receiver.is_alive():
                    raise ConfigError("our own receiver does not answer")
                link.wait(0.1)
            return size * count / (time.perf_counter() - begin)

        yield call


@contextmanager
def tcp_sending(size: int, count: int) -> Iterator[Call]:
    """The same over plain TCP."""
    port, started = free_port(), PROCESSES.Event()
    data = np.random.default_rng(0).integers(0, 256, size, np.uint8)
    with process(absorb_raw, port, size, started) as receiver:
        wait(receiver, started)
        with connected(port) as connection:

            def call() -> float:
                begin = time.perf_counter()
                connection.sendall(count.to_bytes(8))
                for _ in range(count):
                    connection.sendall(data.data)
                connection.recv(1)
                return size * count / (time.perf_counter() - begin)

            yield call


def streams(megabytes: int, count: int) -> Iterator[Figure]:
    """GB/s of records one way, in clear beside plain TCP, and with CURVE beside in clear."""
    for name, size in SIZES.items():
        number = max(1, megabytes * 10**6 // size)
        with ExitStack() as exits:
            folder = Path(exits.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
            calls = {
                RAW.name: exits.enter_context(tcp_sending(size, number)),
                "clear": exits.enter_context(link_sending(size, number, None)),
                "CURVE": exits.enter_context(link_sending(size, number, keyed(folder / "keys"))),
            }
            for call in calls.values():
                call()
            rates = rounds(calls, count)
        yield Figure(f"one way, {name}, raw TCP", median(rates[RAW.name]) / 1e9, "GB/s")
        clear, secret = (median(rates[kind]) / 1e9 for kind in ("clear", "CURVE"))
        yield Figure(f"one way, {name}, clear", clear, "GB/s", RAW.name, ratio(rates, "clear", RAW.name))
        yield Figure(f"one way, {name}, CURVE", secret, "GB/s", "clear", ratio(rates, "CURVE", "clear"), ">= 0.3")
