"""The actor of tools/bench.py control --faults: the real runner drives the fake robot and its three cameras on the real
clock and asks another process for every action, while the learner is killed, stopped, cut off and out of disk in turn.

Beside it, in a process of its own, the same runner drives the same robot, and its client is one that does nothing. A
tick is late when it lasted more than 1.1 of its time; the ratio is that of the shares of late ticks, because an actor
that hears of no action for some seconds ends its episode and waits. Of a call, `own` is its wall time without that in
which its thread could run and no processor was free (Linux counts it, schedstat): that belongs to the machine, and both
loops have it. A late tick stands in our calls if their own time is half of what was too much. Out of disk: whatever
the server writes to a file fails (RLIMIT_FSIZE).
"""

import os
import resource
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from serl_client import messages as m
from serl_client.client import TrainerClient
from serl_client.connection import Connection
from serl_client.controller import RemotePolicy
from serl_client.env import Observation, Step
from serl_client.errors import TrainerError
from serl_client.network import Answer
from serl_client.runner import run_actor
from serl_client.spec import Array, Feature

from robot_infra.env import RobotEnv
from robot_infra.interfaces import Frame
from robot_infra.judges import Predicate, near
from robot_infra.robots.fake import FakeRobot
from robot_infra.safety import SafeRobot
from tests.faults.proxy import Proxy
from tests.shared.common import free_port

from .learner_states import Learner
from .served import PROCESSES

FAULTS = ("killed", "stopped", "cut off", "no disk")
START = 5.0  # seconds before the first fault
CYCLE = 15.0  # seconds from one fault to the next
SHARE = 2 / 3  # of which it lasts
LATE = 1.1  # of a tick's time
VERY_LATE = 1.5  # as the actor's console counts
STEPS = 300  # of an episode
DEADLINE = 0.01  # seconds that a tick waits for an action: less than a tick, else each without one would be late
EXECUTE = 1  # rows of a chunk, then another is asked for
GOAL = 1.5  # late ticks with the client, of those without
CALLS = ("push", "ask", "answer")
BODY = {
    "phase": "bench", "mode": "collect", "into": "online", "explore": True, "weights": None, "intervene": False,
}  # fmt: skip
SIZE, HORIZON = (224, 224, 3), 50
Tick = tuple[float, float]  # when it ended (time.monotonic()), and how long it lasted
Call = tuple[float, int, int, int]  # when it began (time.monotonic()), and its wall, CPU and own nanoseconds


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


def with_client(queue: Any, address: str, folder: Path, hz: float) -> None:
    """The actor, until it is told to stop."""
    with Ticked(hz) as env, closing(Timed(address, actor="bench", spec=env.spec, outbox=folder / "outbox")) as client:
        client.__enter__()
        while not client.connected:
            client.wait(0.05)
        queue.put("connected")
        run_actor(env, RemotePolicy(client, deadline=DEADLINE, n_action_steps=EXECUTE), client, seed=0)
        queue.put((env.ticks, client.calls, client.pending[0]))


def without_client(queue: Any, until: float, hz: float) -> None:
    """The loop beside it, until a time."""
    with Ticked(hz) as env:
        client: Any = Nobody(env, until)
        run_actor(env, RemotePolicy(client, deadline=DEADLINE, n_action_steps=EXECUTE), client, seed=0)
        queue.put(env.ticks)


def faults(seconds: float, hz: float) -> dict[str, Any]:
    """The figures of a run of `seconds`."""
    inference = free_port()
    with (
        tempfile.TemporaryDirectory(prefix="bench-") as folder,
        Proxy("127.0.0.1", inference) as answers,
        Learner(Path(folder), f"tcp://127.0.0.1:{inference}", f"tcp://127.0.0.1:{answers.port}", size=2) as learner,
        Proxy("127.0.0.1", int(learner.address.rpartition(":")[2])) as records,
    ):
        actor, beside = PROCESSES.Queue(), PROCESSES.Queue()
        arguments = (actor, f"tcp://127.0.0.1:{records.port}", Path(folder), hz)
        processes = [PROCESSES.Process(target=with_client, args=arguments)]
        processes[0].start()
        actor.get()
        directed(learner, BODY)
        until = time.monotonic() + seconds
        processes.append(PROCESSES.Process(target=without_client, args=(beside, until, hz)))
        processes[1].start()
        time.sleep(min(START, seconds / 4))
        times = [*troubles(learner, (records, answers), until)]
        directed(learner, {"phase": "bench", "mode": "stop", "boundary": "now"})
        ticks, calls, left = actor.get()
        plain = beside.get()
        for process in processes:
            process.join()
    return {"hz": hz, "seconds": seconds, "undelivered": left, **compared(ticks, plain, times, hz), "calls": {
        name: call_figures(kept, times[0][1], until) for name, kept in calls.items()
    }, "in_a_call": in_a_call(ticks, calls, times[0][1], until, hz)}  # fmt: skip


def directed(learner: Learner, body: Mapping[str, Any]) -> None:
    """Give a directive; the server may be starting."""
    with Connection(learner.local, m.Hello(m.PROTOCOL, "learner", "bench")) as link:
        deadline = time.monotonic() + 30.0
        while True:
            try:
                link.call(m.Direct(dict(body), None), 5.0)
                return
            except TrainerError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)


def troubles(learner: Learner, proxies: Sequence[Proxy], until: float) -> Iterator[tuple[str, float, float]]:
    """(what, from, to) of each fault and of the time after it, as they happen, each fault at least once."""
    begin = time.monotonic()
    cycle = min(CYCLE, (until - begin) / len(FAULTS))
    for number in range(max(len(FAULTS), int((until - begin) / cycle))):
        fault = FAULTS[number % len(FAULTS)]
        now = time.monotonic()
        inflict(fault, learner, proxies)
        time.sleep(SHARE * cycle)
        yield fault, now, time.monotonic()
        now = time.monotonic()
        mend(fault, learner, proxies)
        time.sleep(max(0.0, begin + (number + 1) * cycle - time.monotonic()))
        yield "well", now, time.monotonic()


def inflict(fault: str, learner: Learner, proxies: Sequence[Proxy]) -> None:
    if fault == "killed":
        os.kill(learner.pid, signal.SIGKILL)
    elif fault == "stopped":
        os.kill(learner.pid, signal.SIGSTOP)
    elif fault == "cut off":
        for proxy in proxies:
            proxy.set("half_open")
    else:
        resource.prlimit(learner.pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))


def mend(fault: str, learner: Learner, proxies: Sequence[Proxy]) -> None:
    if fault == "killed":
        learner.start()
    elif fault == "stopped":
        os.kill(learner.pid, signal.SIGCONT)
    elif fault == "cut off":
        for proxy in proxies:
            proxy.set("pass")
    else:
        resource.prlimit(learner.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def compared(ticks: list[Tick], plain: list[Tick], times: list[tuple[str, float, float]], hz: float) -> dict[str, Any]:
    """Both loops beside each other, as a whole and by what was wrong at that time."""
    begin, end = times[0][1], times[-1][2]
    spans = {"all": [(begin, end)]} | {
        state: [(since, until) for name, since, until in times if name == state] for state in ("well", *FAULTS)
    }
    states = {
        state: {"with": tick_figures(ticks, within, hz), "without": tick_figures(plain, within, hz)}
        for state, within in spans.items()
    }
    ours, plain_loop = states["all"]["with"], states["all"]["without"]
    ratio = ours["late"] / ours["ticks"] * plain_loop["ticks"] / max(1, plain_loop["late"])
    return {"states": states, "ratio": ratio, "goal": GOAL, "holds": ratio <= GOAL}


def tick_figures(ticks: list[Tick], spans: list[tuple[float, float]], hz: float) -> dict[str, Any]:
    lasted = [period for end, period in ticks if any(since <= end < until for since, until in spans)]
    return {
        "ticks": len(lasted), "late": sum(period > LATE / hz for period in lasted),
        "very_late": sum(period > VERY_LATE / hz for period in lasted),
        "p999_ms": float(np.quantile(lasted or [0.0], 0.999)) * 1e3, "max_ms": max(lasted, default=0.0) * 1e3,
    }  # fmt: skip


def call_figures(kept: list[Call], since: float, until: float) -> dict[str, float]:
    """Microseconds per call."""
    found = [times for began, *times in kept if since <= began < until]
    columns = dict(zip(("wall", "cpu", "own"), np.array(found or [(0, 0, 0)]).T / 1e3, strict=True))
    figures = {"count": float(len(found))}
    for name, column in columns.items():
        figures |= {f"{name}_p50": float(np.median(column)), f"{name}_p999": float(np.quantile(column, 0.999))}
        figures[f"{name}_max"] = float(column.max())
    return figures


def in_a_call(
    ticks: list[Tick], calls: Mapping[str, list[Call]], since: float, until: float, hz: float
) -> list[dict[str, float]]:
    """The late ticks that stand in our calls, with the own milliseconds of each call in them."""
    late = [(end, lasted) for end, lasted in ticks if since <= end < until and lasted > LATE / hz]
    found = []
    for end, lasted in late:
        spent = {
            name: sum(own for began, _, _, own in kept if end - lasted <= began < end) / 1e6
            for name, kept in calls.items()
        }
        if sum(spent.values()) > (lasted - 1 / hz) * 1e3 / 2:
            found.append({"lasted": lasted * 1e3, **spent})
    return found


def lines(result: Mapping[str, Any]) -> Iterator[str]:
    """What a person reads."""
    yield f"{'learner':9} {'ticks':>13}     {'late':>11}     {'>1.5':>9}     {'p99.9 ms':>13}     {'max ms':>13}"
    yield " " * 9 + " with   without" * 5
    for state, both in result["states"].items():
        cells = ("ticks", "late", "very_late", "p999_ms", "max_ms")
        yield f"{state:9}" + "".join(f"{both['with'][c]:6.0f}  {both['without'][c]:6.0f} " for c in cells)
    verdict = "holds" if result["holds"] else "does not hold"
    yield f"share of late ticks with / without the client: {result['ratio']:.2f} (goal <= {result['goal']}: {verdict})"
    yield f"late ticks that stand in push, ask or answer: {len(result['in_a_call'])}"
    yield "us per call       count    CPU: p50  p99.9    max    own: p50  p99.9    max   wall: p50  p99.9    max"
    for name, call in result["calls"].items():
        cells = "".join(
            f"   {call[f'{time}_p50']:9.0f} {call[f'{time}_p999']:6.0f} {call[f'{time}_max']:6.0f}"
            for time in ("cpu", "own", "wall")
        )
        yield f"{name:12} {call['count']:10.0f}{cells}"
    yield f"records that were not delivered at the end: {result['undelivered']}"
