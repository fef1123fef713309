"""Runs the inference process (policy server): it answers many actors in batches, and tells the server how it does."""

import logging
import math
import os
import signal
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import zmq
from omegaconf import DictConfig
from serl_client import clock, wire
from serl_client import messages as m
from serl_client.connection import tcp
from serl_client.console import log_as
from serl_client.errors import ConfigError, MessageError, ServerFailed
from torch import Tensor

from serl_launcher.acting.bridge import bridge_of
from serl_launcher.acting.host import Loader, PolicyHost, Question
from serl_launcher.service.access import AccessControl
from serl_launcher.service.failures import Failures, Request
from serl_launcher.service.fair_queue import FairQueue
from serl_launcher.service.link import connect, wait_for_spec
from serl_launcher.service.peers import KeyOwner, check_hello, check_role
from serl_launcher.store.weights import path
from serl_launcher.supervisor import END
from serl_launcher.training import budget, memory
from serl_launcher.training.build import build, device_of, seed, untrained

log = logging.getLogger(__name__)

RECENT_S = 1.0  # an actor that asked within this time is expected to ask again
IDLE_S = 10.0  # without any request, until a batch size is recorded: an actor with long chunks asks less often
RECORD_S = 30.0  # between two recordings while actors ask, because answers wait for each, perhaps a minute
HEAR_S = 0.01  # for what has come, at one turn
COUNTED = 1000  # answers that the report is about
TURN = 50  # ms between two looks at what is published
WINDOW_S = 0.005  # seconds that a request waits, at most, for others to share its batch


class InferenceServer:
    """Answers InferenceRequest on `address`, with the weights in the folder `weights`.

    The thread that calls `run` answers. A second thread warms up and swaps weights in, one job after the other; the
    loader's thread reads files. Requests that come during a batch wait in the socket. The latest of an actor counts. A
    batch begins when it has every actor that asked within RECENT_S, or when its first request waited `window` seconds.
    Batches of one request are warmed up before anything else, larger ones while nobody asks.
    """

    def __init__(
        self, host: PolicyHost, weights: Path, address: str, *, window: float = WINDOW_S, keys: Path | None = None
    ) -> None:
        """Listen. Raises ConfigError if it may not, or cannot, listen on `address`. `window` is in seconds.

        keys: the folder of tools/keys.py; None: no encryption, and every client is let in.
        """
        self.host, self.weights, self.window = host, weights, window
        self._access = AccessControl(address, keys, option="inference_port")
        self._access.connections.largest = host.spec.record_bytes
        self._failures, self._socket = Failures(self._access), self._access.socket
        self._queue = FairQueue(self._access)
        self._woken = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller = zmq.Poller()
        for polled in (self._woken, *self._access.polled):
            self._poller.register(polled, zmq.POLLIN)
        self._policy = ThreadPoolExecutor(1, "policy")
        self._loader = Loader(host, self._wake)
        self._job: Future[None] | None = None  # what the second thread is doing: meanwhile nothing is answered
        self._loaded: tuple[int, dict[str, Tensor]] | None = None  # to be swapped in
        self._recorded = self._last = 0.0  # when the last recording began, and when anybody asked last
        self._waiting: dict[bytes, Question] = {}  # the latest of each actor; who has waited longest comes first
        self._others: deque[Question] = deque()  # from other threads
        self._first = 0.0  # when the first of them came
        self._asked: dict[bytes, float] = {}  # when each actor asked last
        self._replaced = 0  # requests whose actor asked again before they were begun
        self._seconds: deque[float] = deque(maxlen=COUNTED)  # from a request's arrival, at the earliest, to its answer
        self._sizes: deque[int] = deque(maxlen=COUNTED)  # of batches

    def run(self, newest: Callable[[], dict[str, Any]], stopping: Callable[[], bool]) -> None:
        """Answer until `stopping()`. Raises what ended the work of another thread.

        newest: called at each turn; returns the valid weights as {version, sha256}, or an empty dict.
        """
        self._work(self.host.warm_up, 1)
        while not stopping():
            if (self._woken, zmq.POLLIN) in self._poller.poll(self._patience()):
                os.eventfd_read(self._woken)
            self._access.turn()
            self._hear(clock.monotonic())
            self._forget_gone()
            while self._others:
                self._put(self._others.popleft())
            self._finish()
            self._load(newest())
            if self._job is None:
                self._begin()

    def ask(self, question: Question) -> None:
        """Take a question that has a `deliver`, from any thread. `host.check` it before."""
        self._others.append(question)
        self._wake()

    def report(self) -> dict[str, Any]:
        """Return the report for the heartbeat: the version that acts, and figures over the last COUNTED answers.

        p50_ms, p99_ms: median and 99th percentile of the time from request to answer. batch: mean requests in a batch.
        replaced: requests whose actor asked again before they were begun.
        """
        report: dict[str, Any] = {"version": self.host.version}
        if self._seconds:
            p50, p99 = np.quantile(self._seconds, (0.5, 0.99)) * 1e3
            batch = sum(self._sizes) / len(self._sizes)
            report |= {"p50_ms": round(p50, 2), "p99_ms": round(p99, 2), "batch": round(batch, 2)}
        return {**report, "replaced": self._replaced, **(self._access.report if self._access.refusals.counts else {})}

    def close(self) -> None:
        """Let the threads finish their current job, then close the sockets."""
        self._policy.shutdown(cancel_futures=True)
        self._loader.close()
        self._access.context.destroy(linger=0)
        os.close(self._woken)

    def _wake(self) -> None:
        os.eventfd_write(self._woken, 1)

    def _patience(self) -> int:
        """Return how many ms the loop may sleep if no message comes."""
        if self._queue.waits:
            return 0
        if self._job is not None or not self._waiting or not self.host.version:
            return TURN
        return min(TURN, max(0, math.ceil((self._first + self.window - clock.monotonic()) * 1000)))

    def _hear(self, since: float) -> None:
        """Handle what has come to the socket, for HEAR_S at most; the first of it may have come at `since`."""
        end = clock.monotonic() + HEAR_S
        while clock.monotonic() < end:
            self._queue.fill()
            if not self._queue.serve(lambda _, identity, frames: self._take(identity, frames, since)):
                return

    def _take(self, identity: zmq.Frame, frames: Sequence[wire.Buffer], now: float) -> None:
        """Queue a question, or answer a Hello or what is faulty."""
        request = Request(identity)
        try:
            answer = self._handle(request, frames, now)
        except Exception as error:
            answer = self._failures.answer(request, error)
            if isinstance(request.message, m.InferenceRequest):
                answer = replace(answer, request=request.message.request)
        if answer is not None:
            self._tell(identity.bytes, answer, request.owner.name if request.owner else "")

    def _handle(self, request: Request, frames: Sequence[wire.Buffer], now: float) -> m.Message | None:
        if (owner := self._access.admit(request.identity, frames)) is None:
            return None
        request.owner = owner
        message = request.message = m.decode(frames)
        if not self._access.allows(request.identity, owner, message):
            raise ServerFailed(f"too many {type(message).__name__}s within a second: say it again")
        check_role(message, owner)
        if isinstance(message, m.Hello):
            return self._welcome(request.identity, message, owner)
        if not isinstance(message, m.InferenceRequest):
            raise MessageError("this is the port for actions: say the learner's port=..., not its inference_port")
        self.host.check(message)
        self._put(Question(request.identity.bytes, message, now, owner.name))
        return None

    def _welcome(self, identity: zmq.Frame, hello: m.Hello, owner: KeyOwner) -> m.Welcome:
        check_hello(hello, owner, run=hello.run)
        self._access.connections.welcome(identity, owner.name)
        return m.Welcome(hello.run, 0, 0, [], self.host.spec.to_dict(), "", asdict(m.StateUpdate({}, {})))

    def _put(self, question: Question) -> None:
        self._first = self._first if self._waiting else question.came
        self._replaced += question.actor in self._waiting
        self._waiting[question.actor] = question  # in the place of an earlier one
        self._asked[question.actor] = self._last = question.came

    def _forget_gone(self) -> None:
        """Forget what connections asked that have ended since."""
        connections, since = self._access.connections, clock.monotonic() - RECENT_S
        if connections.has_lost:
            connections.has_lost, living = False, connections.living
            self._waiting = {actor: each for actor, each in self._waiting.items() if each.deliver or actor in living}
            self._asked = {actor: last for actor, last in self._asked.items() if last > since}

    def _load(self, notice: Mapping[str, Any]) -> None:
        try:
            self._loaded = self._loader.pop() or self._loaded
        except ConfigError as error:
            log.info("%s", error)
        if notice and self._loaded is None and self._job is None:  # else there would be a third copy of the weights
            self._loader.begin(notice["version"], path(self.weights, notice["sha256"]))

    def _begin(self) -> None:
        """Begin the next job, if there is one: newer weights come before a batch."""
        now = clock.monotonic()
        if self._loaded is not None:
            loaded, self._loaded = self._loaded, None
            self._work(self.host.swap, *loaded)
        elif (sizes := self.host.unrecorded) and self._may_record(now):
            self._recorded = now
            self._work(self.host.warm_up, sizes[0])
        elif self._waiting and self.host.version and self._is_gathered(now):
            self._answer([self._waiting.pop(actor) for actor in list(self._waiting)[: self.host.most]])

    def _work(self, job: Callable[..., None], *arguments: Any) -> None:
        self._job = self._policy.submit(job, *arguments)
        self._job.add_done_callback(lambda _: self._wake())

    def _answer(self, batch: Sequence[Question]) -> None:
        begin = clock.monotonic()
        for question, answer in zip(batch, self.host.answer(batch), strict=True):
            if isinstance(answer, m.Failed):
                self._access.refuse("not finite", f"{question.owner or 'an actor'}, {answer.text}")
            if question.deliver is not None:
                question.deliver(answer)
            else:
                self._tell(question.actor, answer, question.owner)
            self._seconds.append(clock.monotonic() - question.came)
        self._sizes.append(len(batch))
        self._hear(begin)

    def _tell(self, actor: bytes, answer: m.Message, key: str = "") -> None:
        if not self._socket.tell(actor, answer):
            self._access.refuse("too much unread", f"{key or 'an actor'} asks again, and does not read the answers")

    def _may_record(self, now: float) -> bool:
        """Return whether nobody waits for an answer, or a batch was cut for want of a recording, some time ago."""
        is_idle = not self.host.version or (not self._waiting and now > self._last + IDLE_S)
        return is_idle or (self.host.is_short and now > self._recorded + RECORD_S)

    def _is_gathered(self, now: float) -> bool:
        self._asked = {actor: last for actor, last in self._asked.items() if last > now - RECENT_S}
        return self._waiting.keys() >= self._asked.keys() or now >= self._first + self.window

    def _finish(self) -> None:
        """Raise what ended the work of the policy's thread; weights that do not fit are only logged."""
        if self._job is not None and self._job.done():
            job, self._job = self._job, None
            try:
                job.result()
            except ConfigError as error:
                log.info("%s", error)


def flat(report: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Return a report as a Heartbeat takes it: {"a b": value} for {"a": {"b": value}}."""
    found: dict[str, Any] = {}
    for name, value in report.items():
        found |= flat(value, f"{above}{name} ") if isinstance(value, dict) else {above + name: value}
    return found


def infer(config: DictConfig, run_dir: Path, local: str, begun: Callable[[], None] = lambda: None) -> None:
    """Answer actors until END; `begun` is called once there are weights to act with.

    Weights that are not of the config's algorithm are left aside: the trainer says what they mean for the run.
    """
    seed(config)
    with connect(local, "inference") as link:
        spec = wait_for_spec(link)
        assert spec is not None
        make, device = untrained(config, spec), device_of(config)
        memory.check_built(make, 1)
        if device != "cpu":
            budget.check_acting(budget.of_acting(make), memory.free(device, 1), device)
        server = InferenceServer(
            PolicyHost(build(config, spec), spec, device), run_dir / "weights",
            tcp(config.host, config.inference_port), keys=Path(config["keys"]) if config["keys"] else None,
        )  # fmt: skip
        bridge = bridge_of(config, server.host, server.ask, run_dir)
        stopped: list[int] = []
        signal.signal(END, lambda number, _: stopped.append(number))
        beat = 0.0

        def newest() -> Any:
            """Return which weights the server says are valid; every second, tell it how this process does."""
            nonlocal beat
            while link.receive() is not None:
                pass
            if link.connected and clock.monotonic() > beat:
                link.send(m.Heartbeat(flat(server.report() | (bridge.report() if bridge else {}))))
                if server.host.version:
                    begun()
                    if bridge is not None:
                        bridge.start()
                beat = clock.monotonic() + 1.0
            return link.notice.weights

        try:
            server.run(newest, lambda: bool(stopped))
        finally:
            if bridge is not None:
                bridge.close()
            server.close()


def main(config: DictConfig, run_dir: Path, local: str, begun: Callable[[], None]) -> None:
    """Run the inference process of a run."""
    log_as("inference", logging.WARNING)
    infer(config, run_dir, local, begun)
