"""What pushing records and asking for actions costs a control loop, while the learner is well and while it fails.

The runner drives the fake robot and three cameras of 224x224 on the real clock and asks another process for every
action, while its learner is killed, stopped, cut off and out of disk in turn; beside it the same runner drives
the same robot, and its client is one that does nothing. A tick is late when it lasted more than 1.1 of its time; the
ratio is that of the shares of late ticks, because an actor that hears of no action for some seconds ends its episode
and waits. What a call costs by itself is measured by `wire` and `ingest`. Out of disk: whatever the server writes to a
file fails (RLIMIT_FSIZE).
"""

import argparse
import os
import resource
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import zmq
from serl_client import messages as m
from serl_client.client import TrainerClient
from serl_client.controller import RemotePolicy
from serl_client.env import Observation, Step
from serl_client.runner import run_actor
from serl_client.spec import Array, Feature

from robot_infra.env import RobotEnv
from robot_infra.interfaces import Frame
from robot_infra.tasks.fake import guarded
from tests.faults.proxy import Proxy
from tests.shared.actors import Chunks, FakeClient
from tests.shared.common import free_port
from tests.shared.robots import never

from .paired import Figure, option
from .served import Child, Served

FAULTS = ("killed", "stopped", "cut off", "no disk")
START = 5.0  # seconds before the first fault
SHARE = 2 / 3  # of the time from one fault to the next
LATE = 1.1  # of a tick's time
STEPS = 300  # of an episode
DEADLINE = 0.01  # seconds that a tick waits for an action: less than a tick, else each without one would be late
BODY = {
    "phase": "bench", "mode": "collect", "into": "online", "explore": True, "weights": None, "intervene": False,
}  # fmt: skip
HORIZON, ACTION = 50, 2
Tick = tuple[float, float]  # when it ended (time.monotonic()), and how long it lasted
Span = tuple[str, float, float]  # what was, from, to
OPTIONS = {"--seconds": option(100.0, "for all of it (100)"), "--hz": option(30.0, "of the loop (30)")}


def measure(folder: Path, options: argparse.Namespace) -> Iterator[Figure]:
    """Ours beside a loop without a client, while the learner fails."""
    hz, inference = options.hz, free_port()
    with (
        Proxy("127.0.0.1", inference) as answers,
        Child(answer, f"tcp://127.0.0.1:{inference}"),
        Served(folder / "run", 2000, f"tcp://127.0.0.1:{answers.port}") as learner,
        Proxy("127.0.0.1", int(learner.address.rpartition(":")[2])) as records,
        Child(actor, f"tcp://127.0.0.1:{records.port}", folder, hz) as ours,
        Child(actor, "", folder, hz) as other,
    ):
        ours.heard()
        learner.direct(BODY)
        until = time.monotonic() + options.seconds
        other.tell(until)
        time.sleep(min(START, options.seconds / 4))
        spans = [*troubles(learner, (records, answers), until)]
        learner.direct({"phase": "bench", "mode": "stop", "boundary": "now"})
        ticks, left = ours.heard()
        plain, _ = other.heard()
    begin, end = spans[0][1], spans[-1][2]
    for state in ("all", "well", *FAULTS):
        within = [span for span in [*spans, ("all", begin, end)] if span[0] == state]
        yield from beside_plain(state, during(ticks, within), during(plain, within), 1 / hz)
    yield Figure("records that were not delivered at the end", left, "", goal="<= 0")


def troubles(learner: Served, proxies: Sequence[Proxy], until: float) -> Iterator[Span]:
    """Each fault and the time after it, as they happen."""
    cycle = (until - time.monotonic()) / len(FAULTS)
    for fault in FAULTS:
        begin = time.monotonic()
        with failing(learner, fault, proxies):
            time.sleep(SHARE * cycle)
            yield fault, begin, time.monotonic()
        well = time.monotonic()
        time.sleep(max(0.0, begin + cycle - well))
        yield "well", well, time.monotonic()


def during(ticks: Sequence[Tick], spans: Sequence[Span]) -> list[Tick]:
    return [tick for tick in ticks if any(since <= tick[0] < until for _, since, until in spans)]


def beside_plain(state: str, ours: list[Tick], plain: list[Tick], period: float) -> Iterator[Figure]:
    late, plain_late = (sum(lasted > LATE * period for _, lasted in ticks) for ticks in (ours, plain))
    share = 100 * late / max(1, len(ours))
    against = f"without a client ({plain_late} of {len(plain)})"
    ratio = share / 100 * len(plain) / max(1, plain_late)
    yield Figure(f"{state}: late ticks", share, "%", against, ratio, "<= 1.5" if state == "all" else "")
    most, plain_most = (float(np.quantile([lasted for _, lasted in ticks] or [0.0], 0.999)) for ticks in (ours, plain))
    yield Figure(f"{state}: tick p99.9", most * 1e3, "ms", "without a client", most / (plain_most or period))


@contextmanager
def failing(learner: Served, fault: str, proxies: Sequence[Proxy]) -> Iterator[None]:
    """Let the learner fail in this way, and be well again at the end."""
    server, endless = learner.pid, resource.RLIM_INFINITY
    if fault == "killed":
        os.kill(server, signal.SIGKILL)
        yield
        learner.start()
    elif fault == "stopped":
        os.kill(server, signal.SIGSTOP)
        yield
        os.kill(server, signal.SIGCONT)
    elif fault == "no disk":
        resource.prlimit(server, resource.RLIMIT_FSIZE, (0, endless))
        yield
        resource.prlimit(server, resource.RLIMIT_FSIZE, (endless, endless))
    else:
        for proxy in proxies:
            proxy.set("half_open")
        yield
        for proxy in proxies:
            proxy.set("pass")


def answer(_: Any, address: str) -> None:
    """Welcomes everybody, and answers every InferenceRequest with a chunk of zeros."""
    router = zmq.Context.instance().socket(zmq.ROUTER)
    router.bind(address)
    chunk = np.zeros((HORIZON, ACTION), np.float32)
    while True:
        identity, *parts = router.recv_multipart(copy=False)
        message = m.decode([part.buffer for part in parts])
        said: m.Message | None = None
        if isinstance(message, m.Hello):
            said = m.Welcome(message.run, 0, 0, [], None, "", asdict(m.StateUpdate({}, {})))
        elif isinstance(message, m.InferenceRequest):
            said = m.InferenceResponse(message.step, 0, {"action": chunk}, request=message.request)
        if said:
            router.send_multipart([identity.bytes, *m.encode(said)])


# -- the actor
class Noise:
    """A camera that always has a new image."""

    trouble, feature = "", Feature((224, 224, 3), "uint8")

    def __init__(self, seed: int) -> None:
        self._generator = np.random.default_rng(seed)

    def latest(self) -> Frame:
        return Frame(self._generator.integers(0, 256, self.feature.shape, np.uint8), time.monotonic())

    def close(self) -> None:
        pass


class Ticked(RobotEnv):
    """The fake robot with three cameras, at `hz`; keeps its `ticks`, without the first of each episode."""

    def __init__(self, hz: float) -> None:
        cameras = {f"cam_{i}": Noise(i) for i in range(3)}
        super().__init__(
            guarded(fps=hz), judge=never, task="bench", fps=hz, max_steps=STEPS, clock="real", cameras=cameras
        )
        self.ticks: list[Tick] = []
        self._ended: float | None = None

    def reset(self, seed: int, *, teleop: bool = False, intervene: bool = False) -> Observation:
        self._ended = None
        return super().reset(seed, teleop=teleop, intervene=intervene)

    def step(self, action: Array | None) -> Step:
        step, now = super().step(action), time.monotonic()
        if self._ended is not None:
            self.ticks.append((now, now - self._ended))
        self._ended = now
        return step


class Nobody(FakeClient):
    """A client that sends nothing and keeps nothing."""

    def push(self, record: Any) -> None:
        pass

    def wait(self, timeout: float) -> None:
        time.sleep(timeout)

    def close(self) -> None:
        pass


def actor(pipe: Any, address: str, folder: Path, hz: float) -> None:
    """The actor, until it is told to stop; without an `address` with a client that does nothing, until a time."""
    until = 0.0 if address else pipe.recv()
    with Ticked(hz) as env:
        client: Any = Nobody(env.spec, intervene=False)
        policy: Any = Chunks(HORIZON, scale=0.0)
        if address:
            client = policy = TrainerClient(address, actor="bench", spec=env.spec, outbox=folder / "outbox").__enter__()
            while not client.connected:
                client.wait(0.05)
            pipe.send("connected")
        else:
            threading.Timer(until - time.monotonic(), client.direct, ("stop", 2)).start()
        with closing(client):
            run_actor(env, RemotePolicy(policy, deadline=DEADLINE, n_action_steps=1), client, seed=0)
            pipe.send((env.ticks, client.pending[0]))
