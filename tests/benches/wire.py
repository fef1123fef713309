"""What the wire costs, beside raw TCP in the same rounds and, with --peers, beside what others do.

An observation (3 images of 224x224x3 uint8 and a state) goes to a process that answers a chunk of 50x14 float32 at
once: ours through the calls that a runner makes, to our inference server with a stand-in for its policy. The policy's
own time is no part of it. With keys the same goes through CURVE. Then what encoding and decoding the observation takes.
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
from typing import Any

import numpy as np
from serl_client import messages as m
from serl_client import wire
from serl_client.client import TrainerClient
from serl_client.errors import ConfigError
from serl_client.wire import Buffer

from tests.shared.common import free_port
from tools.keys import locked, make

from .paired import Figure, cpu_seconds, option, quantiles, ratio, rounds, seconds
from .peers import ASKED, CHUNK, PEERS, RAW, Call, Peer
from .served import PATIENCE_S, SPEC, Child, Served

OURS, CURVE = "ours", "ours, CURVE"
GOALS = {"lerobot, two calls": 1 / 5, "lz4(pickle) over ZeroMQ": 1 / 5, "websocket (openpi)": 1.0}
OPTIONS = {
    "--rounds": option(9, "of all contenders in turn (9)"),
    "--calls": option(200, "of each contender in each round (200)"),
    "--peers": option(False, "measure what others do, too"),
}


def measure(folder: Path, options: argparse.Namespace) -> Iterator[Figure]:
    keys, others = folder / "keys", PEERS if options.peers else []
    with locked(keys, True):
        make(keys, "bench", "actor")
    with ours(folder / "clear") as clear, ours(folder / "secure", keys) as secure:
        yield from round_trips({OURS: clear, CURVE: secure}, others, options.rounds, options.calls)
    yield from coding()


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
        asks = [each.ask for each in questions]
        return [m.InferenceResponse(ask.step, 1, {"action": CHUNK}, request=ask.request) for ask in asks]


def infer(_: Any, address: str, keys: Path | None = None) -> None:
    from serl_launcher.acting.server import InferenceServer  # with torch

    host: Any = Stand()
    server = InferenceServer(host, Path("nothing is read"), address, window=0.0, keys=keys)  # two ask, none waits
    server.run(dict, lambda: False)


@contextmanager
def ours(folder: Path, keys: Path | None = None) -> Iterator[tuple[Call, int]]:
    """(one round trip of a TrainerClient, with keys or without, the id of the inference server's process)."""
    inference, steps, key = f"tcp://127.0.0.1:{free_port()}", itertools.count(1), keys / "bench.key" if keys else None
    with (
        Child(infer, inference, keys) as host,
        Served(folder, 100, inference, keys) as served,
        TrainerClient(served.address, actor="bench", spec=SPEC, outbox=folder / "outbox", key=key) as client,
    ):

        def call() -> Any:
            deadline = time.monotonic() + PATIENCE_S
            while time.monotonic() < deadline:
                step = next(steps)
                client.ask(ASKED, step=step, seed=0, previous_action=None, reset=False, explore=False, task="bench")
                if (answer := client.wait_answer(step, 1.0)) is not None:
                    return answer
            raise ConfigError("our own inference server does not answer; its words are above")

        yield call, host.pid


# -- round trips
def round_trips(
    found: dict[str, tuple[Call, int]], others: Sequence[Peer], count: int, calls: int
) -> Iterator[Figure]:  # fmt: skip
    """p50, p99 and CPU of each, and ours beside each other; of who cannot be measured stderr says why."""
    with ExitStack() as exits:
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
            spent = -cpu_seconds(os.getpid(), process_id)
            lasted = [seconds(call) for _ in range(calls)]
            cpu[name] += (spent + cpu_seconds(os.getpid(), process_id)) / (calls * count)
            times[name].append(quantiles(lasted))
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
    yield Figure("round trip, ours, CURVE: p50", median(p50[CURVE]) * 1e6, "us", "ours", ratio(p50, CURVE, OURS))
    for name in [name for name in GOALS if name in found]:
        goal = f"<= {GOALS[name]:.4f}"
        yield Figure("round trip, ours: p50", median(p50[OURS]) * 1e6, "us", name, ratio(p50, OURS, name), goal)


# -- the parts
def coding() -> Iterator[Figure]:
    """What encoding and decoding the observation takes, and what of it encoding copies."""
    ask = m.InferenceRequest(1, 0, False, False, "bench", ASKED)
    took, frames = median(seconds(lambda: m.decode(m.encode(ask))) for _ in range(2000)), m.encode(ask)
    yield Figure("encode + decode of the observation", took * 1e6, "us", goal="<= 10")
    yield Figure("bytes of it that encoding copies", copied(ask, frames[1:]), "B", goal="<= 0")
    yield Figure(
        "bytes of it that are joined to one frame for the socket", len(wire.joined(frames)[1]), "B", goal="<= 0"
    )


def copied(ask: m.InferenceRequest, frames: Sequence[Buffer]) -> int:
    """How many bytes of the frames are not the arrays' own memory."""
    arrays = zip(ask.arrays.values(), frames, strict=True)
    return sum(len(frame) for array, frame in arrays if not np.shares_memory(array, np.frombuffer(frame, np.uint8)))
