"""How a control loop lives with a slow policy, under each rule of `chunks`; a part of bench control (--latency).

The runner drives the fake robot on the real clock. Another process answers with chunks of 50 actions after 12, 50 or
100 ms, over a link that takes 5 ms there and back. That policy is made up: each chunk follows a sine whose phase is
drawn anew; a chunk that continues an old one leaves it by a tenth of the way at each step. So jumps show what a rule
does with chunks that disagree, and nothing about a real policy.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import zmq
from serl_client import messages as m
from serl_client.chunks import RULES, chunk_policy, deadline_of
from serl_client.client import TrainerClient
from serl_client.controller import Controller
from serl_client.runner import run_actor
from serl_client.spec import Array

from robot_infra.env import RobotEnv
from robot_infra.robots.fake import FakeRobot
from robot_infra.safety import SafeRobot
from tests.faults.proxy import Proxy
from tests.shared.common import free_port
from tests.shared.robots import never

from .paired import Figure
from .served import Child, Served

LATENCIES = (12, 50, 100)  # ms of computation
LINK = 0.005  # seconds, there and back
HORIZON, N_ACTION_STEPS = 50, 10
PERIOD, REACH, SPREAD = 40, 0.8, 0.5  # of the sine: steps, amplitude, and radians of its phase
STEPS = 10_000  # of an episode
LATE = 1.1  # of a tick's time


def measure(folder: Path, seconds: float, hz: float) -> Iterator[Figure]:
    """The figures of each latency and rule, `seconds` in all."""
    for latency in LATENCIES:
        for rule in RULES:
            place = folder / f"{latency}-{rule}"
            seen = tried(place, latency / 1000, rule, seconds / len(LATENCIES) / len(RULES), hz)
            name = f"{latency} ms, {rule}"
            yield Figure(f"{name}: ticks held", 100 * seen["held"] / seen["ticks"], "%")
            yield Figure(f"{name}: ticks longer than {LATE} periods", 100 * seen["late"] / seen["ticks"], "%")
            for share in (50, 95):
                yield Figure(f"{name}: age of the action p{share}", float(np.percentile(seen["ages"], share)), "ms")
            yield Figure(f"{name}: jump at a border p95", float(np.percentile(seen["jumps"], 95)), "")


def tried(folder: Path, latency: float, rule: str, seconds: float, hz: float) -> dict[str, Any]:
    """What an actor saw under this rule."""
    inference = free_port()
    with (
        Proxy("127.0.0.1", inference) as link,
        Served(
            folder / "run", 100_000, partial(answer, latency), f"tcp://127.0.0.1:{inference}",
            f"tcp://127.0.0.1:{link.port}",
        ) as learner,
        Child(actor, learner.address, folder, rule, hz) as child,
    ):  # fmt: skip
        link.set("delay", seconds=LINK / 2)
        child.heard()
        learner.direct(explore=True, weights=None, intervene=False)
        child.heard()
        time.sleep(seconds)
        learner.direct({"phase": "bench", "mode": "stop", "boundary": "now"})
        return child.heard()


def answer(latency: float, _: Any, address: str) -> None:
    """Answer one InferenceRequest after the other, each after `latency` seconds."""
    router = zmq.Context.instance().socket(zmq.ROUTER)
    router.bind(address)
    while True:
        identity, *parts = router.recv_multipart(copy=False)
        message = m.decode([part.buffer for part in parts])
        if isinstance(message, m.InferenceRequest):
            time.sleep(latency)
            reply = m.InferenceResponse(message.step, 1, {"action": chunk(message)})
            router.send_multipart([identity.bytes, *m.encode(reply)])


def chunk(question: m.InferenceRequest) -> Array:
    """The actions [HORIZON, 2] of the policy that is made up."""
    phase = np.random.default_rng(question.seed).uniform(-SPREAD, SPREAD)
    angle = 2 * np.pi * (question.step + np.arange(HORIZON)) / PERIOD + phase
    action = REACH * np.stack([np.sin(angle), np.cos(angle)], 1)
    if count := question.committed:
        committed = question.arrays["prefix"][:count]
        left = (committed[-1] - action[count - 1]) * 0.9 ** np.arange(1, HORIZON - count + 1)[:, None]
        action = np.concatenate([committed, action[count:] + left])
    return action.astype(np.float32)


class Watched:
    """A controller whose ticks are counted: those without an action, and age and jump of the others.

    `begun` is called at the first one.
    """

    def __init__(self, policy: Any, source: TrainerClient, hz: float, begun: Callable[[], None]) -> None:
        self._policy, self._ask, self._hz, self._begun = policy, source.ask, hz, begun
        source.ask = self._asked
        self._began: dict[int, float] = {}  # when each step was asked about
        self._ticked: float | None = None
        self._before: Array | None = None
        self.seen: dict[str, Any] = {"ticks": 0, "held": 0, "late": 0, "ages": [], "jumps": []}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)

    def _asked(self, observation: Mapping[str, Array], *, step: int, **question: Any) -> None:
        self._began[step] = time.monotonic()
        self._ask(observation, step=step, **question)

    def act(self, observation: Mapping[str, Array], *, step: int, **about: Any) -> Array | None:
        action, seen = self._policy.act(observation, step=step, **about), self.seen
        if step:  # before the first action the robot waits
            now = time.monotonic()
            if not seen["ticks"]:
                self._begun()
            seen["ticks"] += 1
            seen["held"] += action is None
            seen["late"] += self._ticked is not None and now - self._ticked > LATE / self._hz
            self._ticked = now
            if action is not None:
                seen["ages"].append(1000 * (now - self._began[self._policy._chunk.step]))
            if self._policy.chunk_start and action is not None and self._before is not None:
                seen["jumps"].append(float(np.linalg.norm(action - self._before)))
        self._before = action
        return action


def actor(pipe: Any, address: str, folder: Path, rule: str, hz: float) -> None:
    """The actor, until it is told to stop."""
    env = RobotEnv(SafeRobot(FakeRobot()), judge=never, task="bench", fps=hz, max_steps=STEPS, clock="real")
    with env, TrainerClient(address, actor="bench", spec=env.spec, outbox=folder / "outbox") as client:
        while not client.connected:
            client.wait(0.05)
        pipe.send("connected")
        deadline = deadline_of("auto", hz, "real")
        policy = chunk_policy(client, chunks=rule, deadline=deadline, n_action_steps=N_ACTION_STEPS, clock="real")
        watched: Any = Watched(policy, client, hz, lambda: pipe.send("moving"))
        controller: Controller = watched
        run_actor(env, controller, client, seed=0)
        pipe.send(watched.seen)
