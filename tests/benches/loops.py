"""The control loops that tools/bench.py control measures, with a client and without one, and the learner that fails."""

import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import zmq
from serl_client import Segment, Stamp
from serl_client import messages as m
from serl_client.client import TrainerClient
from serl_client.controller import RemotePolicy
from serl_client.env import Observation, Step
from serl_client.network import Answer
from serl_client.runner import run_actor
from serl_client.spec import Array, Feature

from robot_infra.env import RobotEnv
from robot_infra.interfaces import Frame
from robot_infra.judges import Predicate, near
from robot_infra.robots.fake import FakeRobot
from robot_infra.safety import SafeRobot
from tests.faults.proxy import Proxy

from .served import CAMERAS, STATE, Served

CALLS = ("push", "ask", "answer")
ROWS = 8  # per segment
STEPS = 300  # of an episode
DEADLINE = 0.01  # seconds that a tick waits for an action: less than a tick, else each without one would be late
BODY = {
    "phase": "bench", "mode": "collect", "into": "online", "explore": True, "weights": None, "intervene": False,
}  # fmt: skip
SIZE, HORIZON = (224, 224, 3), 50
Tick = tuple[float, float]  # when it ended (time.monotonic()), and how long it lasted
Call = tuple[float, int, int, int]  # when it began (time.monotonic()), and its wall, CPU and own nanoseconds


class Learner(Served):
    """A real server and a stand-in for inference that answers at once with actions of `size` entries."""

    def __init__(self, folder: Path, inference: str = "", told: str = "", *, size: int = 14) -> None:
        super().__init__(folder / "run", 2000, partial(answer, size=size), inference, told)
        self._ended = threading.Event()

    def enter(self, state: str, proxies: Sequence[Proxy] = ()) -> None:
        if state in ("dead", "full", "killed"):
            os.kill(self.pid, signal.SIGKILL)
        elif state == "stopped":
            os.kill(self.pid, signal.SIGSTOP)
        elif state == "slow":
            threading.Thread(target=self._stutter, args=(self.pid,), daemon=True).start()
        elif state == "no disk":
            resource.prlimit(self.pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        for proxy in proxies if state == "cut off" else ():
            proxy.set("half_open")

    def leave(self, state: str, proxies: Sequence[Proxy]) -> None:
        if state == "killed":
            self.start()
        elif state == "stopped":
            os.kill(self.pid, signal.SIGCONT)
        elif state == "no disk":
            resource.prlimit(self.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        for proxy in proxies:
            proxy.set("pass")

    def _stutter(self, pid: int) -> None:
        """Stop the server for nine tenths of each second."""
        with suppress(ProcessLookupError):
            while not self._ended.wait(0.1):
                os.kill(pid, signal.SIGSTOP)
                self._ended.wait(0.9)
                os.kill(pid, signal.SIGCONT)

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        super().__exit__(*exception)


def answer(_: Any, address: str, size: int) -> None:
    """Answers every InferenceRequest with a chunk of zeros."""
    router = zmq.Context.instance().socket(zmq.ROUTER)
    router.bind(address)
    chunk = np.zeros((HORIZON, size), np.float32)
    while True:
        identity, *parts = router.recv_multipart(copy=False)
        message = m.decode([part.buffer for part in parts])
        if isinstance(message, m.InferenceRequest):
            router.send_multipart([identity.bytes, *m.encode(m.InferenceResponse(message.step, 1, {"action": chunk}))])


class Timed(TrainerClient):
    """A client for one thread that keeps what its calls took."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.calls: dict[str, list[Call]] = {name: [] for name in CALLS}
        self._schedule = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
        for name in CALLS:
            setattr(self, name, partial(self._timed, self.calls[name], getattr(self, name)))

    def _timed(self, kept: list[Call], call: Callable[..., Any], *words: Any, **named: Any) -> Any:
        began, queued = time.monotonic(), self._queued()
        wall, cpu = time.perf_counter_ns(), time.thread_time_ns()
        result = call(*words, **named)
        cpu, wall = time.thread_time_ns() - cpu, time.perf_counter_ns() - wall
        kept.append((began, wall, cpu, max(0, wall - (self._queued() - queued))))
        return result

    def _queued(self) -> int:
        """Nanoseconds in which this thread could run and no processor was free."""
        return int(os.pread(self._schedule, 64, 0).split()[1])


# -- the loop alone
def ticks(tick: Callable[[int], None], seconds: float, hz: float) -> list[float]:
    """Run `tick` at a rate by deadline; how late each one ended, counted from when it should have begun."""
    late, begin = [], time.monotonic()
    for i in range(int(seconds * hz)):
        due = begin + i / hz
        time.sleep(max(0.0, due - time.monotonic()))
        tick(i)
        late.append(time.monotonic() - due)
    return late


def plain(pipe: Any, seconds: float, hz: float) -> None:
    """The loop without the calls."""
    pipe.recv()
    pipe.send("started")
    pipe.send(ticks(Loop(None).tick, seconds, hz))


class Loop:
    """A control loop: fresh arrays in every row, as cameras would give them, and the calls that a runner makes."""

    def __init__(self, client: Timed | None) -> None:
        self._client, self._generator, self._episode = client, np.random.default_rng(0), 0
        self._rows: list[dict[str, Any]] = []

    def tick(self, i: int) -> None:
        row: dict[str, Any] = {name: self._generator.integers(0, 256, SIZE, np.uint8) for name in CAMERAS}
        row[STATE], action = self._generator.standard_normal(14).astype(np.float32), np.zeros(14, np.float32)
        if self._client is not None:
            self._client.answer()
            self._client.ask(row, step=i, seed=i, previous_action=action, reset=False, explore=True, task="bench")
        self._rows.append(row)
        if len(self._rows) == ROWS:
            stacked = {name: np.stack([row[name] for row in self._rows]) for name in row}
            if self._client is not None and self._client.has_room:
                self._client.push(self._segment(stacked, self._client.directive["number"]))
            self._rows = []

    def _segment(self, rows: dict[str, Any], number: int) -> Segment:
        self._episode += 1
        flags, zeros = np.zeros(ROWS - 1, bool), np.zeros(ROWS - 1, np.float32)
        return Segment(
            f"bench-{self._episode}", 0, "bench", Stamp(number, "bench", 1), rows,
            np.zeros((ROWS - 1, 14), np.float32), zeros, flags, flags, zeros.astype(np.float64), truncated=True,
        )  # fmt: skip


# -- the whole actor
class Noise:
    """A camera that always has a new image."""

    feature = Feature(SIZE, "uint8")

    def __init__(self, seed: int) -> None:
        self._generator = np.random.default_rng(seed)

    def latest(self) -> Frame:
        return Frame(self._generator.integers(0, 256, SIZE, np.uint8), time.monotonic())

    def close(self) -> None:
        pass


class Ticked(RobotEnv):
    """The fake robot with three cameras, at `hz`; keeps its `ticks`, without the first of each episode."""

    def __init__(self, hz: float) -> None:
        robot = FakeRobot()
        super().__init__(
            SafeRobot(robot), judge=Predicate(lambda: near(robot.position, robot.goal, 0.05)), task="bench", fps=hz,
            max_steps=STEPS, cameras={f"cam_{i}": Noise(i) for i in range(3)},
        )  # fmt: skip
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


class Nobody:
    """What a runner takes for its client, where nothing is sent and each question has its answer at once."""

    actor, session, ordinal, connected, has_room = "beside", "0" * 32, 1, True, True
    step_limit, fault, pending = None, "", (0, 0)

    def __init__(self, env: Ticked, until: float) -> None:
        self.spec, self.report, self._until = env.spec, {}, until
        self._answer: Answer | None = None
        self._chunk = np.zeros((HORIZON, *env.spec.action.shape), np.float32)

    @property
    def directive(self) -> Mapping[str, Any]:
        return {**BODY, "number": 1, "mode": "collect" if time.monotonic() < self._until else "stop"}

    def ask(self, observation: Observation, *, step: int, **_: Any) -> None:
        self._answer = Answer(step, 1, self._chunk, {})

    def wait_answer(self, step: int, timeout: float) -> Answer | None:
        return self._answer

    def forget(self) -> None:
        self._answer = None

    def push(self, record: Any) -> None:
        pass

    def wait(self, timeout: float) -> None:
        time.sleep(timeout)

    def drain(self, timeout: float) -> bool:
        return True

    def close(self) -> None:
        pass


def actor(pipe: Any, address: str, folder: Path, hz: float) -> None:
    """The actor, until it is told to stop; without an `address` with a client that does nothing, until a time."""
    until = 0.0 if address else pipe.recv()
    with Ticked(hz) as env:
        client: Any = Nobody(env, until)
        if address:
            client = Timed(address, actor="bench", spec=env.spec, outbox=folder / "outbox")
        with closing(client):
            if address:
                client.__enter__()
                while not client.connected:
                    client.wait(0.05)
                pipe.send("connected")
            run_actor(env, RemotePolicy(client, deadline=DEADLINE, n_action_steps=1), client, seed=0)
            pipe.send((env.ticks, client.calls if address else {}, client.pending[0]))
