"""Runs the actor's network thread: sends records, receives actions and weights, reconnects and resends."""

import dataclasses
import logging
import os
import threading
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import zmq

import serl_client.clock as clock
import serl_client.messages as m
from serl_client.commands import Commands
from serl_client.connection import SILENCE, Connection, failure, inference_at, is_local
from serl_client.driving import RemoteDriver
from serl_client.errors import ConfigError, Ended, MessageError, Refused, Replaced, TrainerError, VersionMismatch
from serl_client.keys import Key
from serl_client.outbox import Outbox
from serl_client.send_queue import SendQueue
from serl_client.spec import Array, Spec
from serl_client.weights import WeightsFolder

log = logging.getLogger(__name__)

TURN = 100  # ms between two looks at what no message announces: a full disk, the clock
BEAT = 1.0  # seconds between two heartbeats
PATIENCE = 0.5  # seconds to wait for an answer before a newer question is sent
FAREWELL = 200  # ms for the last messages to leave
UNANSWERED = 20.0  # seconds without an answer until the connection to the inference process is
REFUSED = 2.0  # seconds until a learner that takes no client, or not this one, is asked again
PULL = 1  # request number of every WeightsRequest; commands have higher numbers


@dataclass(frozen=True, slots=True)
class State:
    """Holds what the learner said last.

    directive: {number, phase, mode, ...}; its mode is idle before the first one.
    step_limit: how many steps this session may make in all; None: no limit.
    ordinal: number of this session among all of the run; 0 before the first directive.
    degraded: why the learner acknowledges nothing; empty while it does.
    """

    directive: Mapping[str, Any]
    step_limit: int | None
    ordinal: int = 0
    degraded: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    """Holds the actions [H, A] for the steps from `step` on, made with weights `version`; reset: as in
    InferenceResponse."""

    step: int
    version: int
    action: Array
    extras: Mapping[str, Array]
    reset: bool = False


class Network:
    """The thread that owns every socket and every file of a client.

    The control thread writes `questions`, `report` and, by `say`, `commands`, calls `wake`, and only reads the other
    attributes.
    `news` is an eventfd that this thread sets when there is something new to read.
    """

    def __init__(
        self, address: str, *, actor: str, spec: Spec, outbox: Outbox, weights_folder: Path | None, paced: bool,
        has_operator: bool, key: Key | None, inference_port: int | None, remote: RemoteDriver | None,
    ) -> None:  # fmt: skip
        self._thread = threading.Thread(target=self._run, name=f"network of {actor}", daemon=True)
        self.session = os.urandom(16).hex()
        self.state = State({"number": 0, "phase": "", "mode": "idle"}, 0 if paced else None)  # replaced, never changed
        self.spec = spec  # the run's, once the learner has said it: with the extras that the algorithm gives
        self.history = 1  # observations of a question
        self.report: Mapping[str, Any] = {}
        self.error: TrainerError | None = None
        self.refusal = ""  # why no learner takes this client at present; it asks again
        self.questions: deque[m.InferenceRequest] = deque(maxlen=1)  # the latest wins
        self.answers: deque[tuple[int, Answer]] = deque(maxlen=1)  # with the numbers of their questions
        self.commands = Commands(PULL)
        self.words: deque[m.Command] = deque(maxlen=16)  # what operators elsewhere have said to this actor
        is_certain = key is not None or is_local(address)  # that nobody but the learner sends us weights
        self.weights = WeightsFolder(weights_folder, verify=not is_certain) if weights_folder else None
        self.send_queue = SendQueue(outbox, self.session, spec)
        self.news = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._actor, self._robot, self._outbox = actor, spec, outbox
        self._paced, self._has_operator = paced, has_operator
        self._key, self._inference_port, self.remote = key, inference_port, remote
        self.server = Connection(address, self._greeting(), key)
        self._inference: Connection | None = None
        self._asked: deque[tuple[int, int]] = deque(maxlen=64)  # (number, step) of the questions that were sent
        self._asked_at = self._asked_since = self._beaten_at = 0.0  # since: the first that is not answered
        self._complaint, self.no_action = "", (-UNANSWERED, "")  # when the newest question got none, and why
        self._is_moving = self._misfit_told = self._closing = self._is_in = False  # in: both sides have agreed
        self._handlers = {
            m.Welcome: self._welcomed, m.StateUpdate: self._noticed, m.Ack: self._acknowledged,
            m.InferenceResponse: self._answered, m.WeightsChunk: self._weights_came, m.Done: self._done,
            m.Failed: self._failed, m.Command: self._heard, m.Drive: self._driven,
        }  # fmt: skip

    def start(self) -> None:
        """Begin the thread."""
        self._thread.start()

    def wake(self) -> None:
        """Let the thread look at once at what the control thread has written."""
        os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """End the thread, after it has written the queue to the outbox. May be called twice."""
        if self._closing:
            return
        self._closing = True
        self.wake()
        if self._thread.ident is not None:
            self._thread.join()
        os.close(self._wake)
        os.close(self.news)

    def _run(self) -> None:
        try:
            while not self._closing:
                self._turn()
            while self.send_queue.move_to_outbox():
                pass
            if self.error is None:
                self._send()
            self.server.send(m.Bye())
        except Exception as error:
            log.exception("the %s died", self._thread.name)
            self._fail(TrainerError(f"the {self._thread.name} died: {error!r}; its traceback is in the log"))
        finally:
            for link in self._links:
                link.close(FAREWELL)
            if self.weights:
                self.weights.close()

    @property
    def connected(self) -> bool:
        """Return whether the learner's Welcome has come, and all that it says is in place here."""
        return self._is_in and self.server.connected

    @property
    def inference(self) -> str:
        """Return the address that is asked for actions; empty while the learner has named none."""
        return self._inference.address if self._inference else ""

    @property
    def _links(self) -> list[Connection]:
        return [self._inference, self.server] if self._inference else [self.server]  # an answer is waited for

    def _turn(self) -> None:
        pulls = self.weights is not None and self.weights.busy and self.server.connected
        polled = [entry for link in self._links for entry in link.polled]
        ready = zmq.zmq_poll([(self._wake, zmq.POLLIN), *polled], 0 if pulls or self._is_moving else TURN)
        if (self._wake, zmq.POLLIN) in ready:
            os.eventfd_read(self._wake)
        if self.error is None:
            self._ask()
            self._receive()
        self._is_moving = self.send_queue.move_to_outbox()
        if self.send_queue.error and not self._misfit_told:
            self._misfit_told = True
            self._tell()
        if self.error is None:
            self._send()

    def _receive(self) -> None:
        if not self.server.is_open:
            self.server.greeting, self._is_in = self._greeting(), False
        try:
            for link in self._links:
                while self.error is None and (message := link.receive()) is not None:
                    if link is not self.server and isinstance(message, m.Failed) and not message.final:
                        self._unanswered(message)
                    elif link is self.server or isinstance(message, m.InferenceResponse | m.Failed):
                        self._handle(link, message)
        except Refused as error:
            self._fail(error)
        now = clock.monotonic()
        if self.server.connected and now > self.server.heard + SILENCE:  # it speaks each second
            self.server.close()
        if self._inference and self._asked and now > self._asked_since + UNANSWERED:
            self._inference.close()
            self._asked.clear()

    def _handle(self, link: Connection, message: m.Message) -> None:
        try:
            self._handlers[type(message)](message)
        except TrainerError as error:
            self._fail(error)
        except OSError as error:
            self._disk_failed(error)
        except (MessageError, ConfigError, KeyError, TypeError, ValueError) as error:
            log.warning("a %s from %s is not understood: %r", type(message).__name__, link.address, error)

    def _disk_failed(self, error: OSError) -> None:
        self._complain(str(error))
        if self.weights:
            self.weights.pause()
        if not self._outbox.run:  # the run is not on the disk, so no record may be sent to it
            self.server.close()

    def _fail(self, error: TrainerError) -> None:
        if self._outlives(error):
            self.refusal = str(error)
            self._complain(f"{error}. This actor waits, keeps what it has, and goes on by itself; Ctrl-C ends it")
            for link in self._links:
                link.rest(REFUSED)
            return
        self.error = self.error or error
        for link in self._links:
            link.close()
        self._tell()

    def _outlives(self, error: TrainerError) -> bool:
        """Return whether a client that has worked for its run waits: who refuses it is a learner that was started
        wrongly, of another run, or that has ended, and a person starts the right one. A stranger is told and ends."""
        is_at_door = isinstance(error, Refused | VersionMismatch) and not self._is_in
        is_final = isinstance(error, Replaced) or self.state.directive["number"] == 0
        return not is_final and (is_at_door or isinstance(error, Ended))

    def _complain(self, text: str) -> None:
        if text != self._complaint:
            log.warning("%s", text, extra={"is_shown": bool(self.refusal)})
        self._complaint = text

    def _change(self, **changes: Any) -> None:
        before, self.state = self.state, dataclasses.replace(self.state, **changes)
        if self.state != before:
            self._tell()

    def _tell(self) -> None:
        os.eventfd_write(self.news, 1)

    # -- to the other side

    def _ask(self) -> None:
        """Send one question at a time, so that a slow link carries no stale ones."""
        if not self.questions or self._inference is None or not self._inference.connected:
            return
        if self._asked and clock.monotonic() < self._asked_at + PATIENCE:
            return
        question = self.questions.pop()
        if self._inference.send(question):
            self._asked_since = self._asked_since if self._asked else clock.monotonic()
            self._asked.append((question.request, question.step))
            self._asked_at = clock.monotonic()

    def _send(self) -> None:
        try:
            if self.server.connected:
                self._send_all(self.send_queue.pushes())
                if self.send_queue.needs_hello:
                    self.server.close()
                    return
                pulls = self.weights.requests() if self.weights else ()
                self._send_all(dataclasses.replace(pull, request=PULL) for pull in pulls)
                self._send_all(self.remote.updates() if self.remote else ())
        except OSError as error:
            self._disk_failed(error)
        if self.server.connected and (command := self.commands.to_send()) and self.server.send(command):
            self.commands.sent()
        if self.server.connected and clock.monotonic() > self._beaten_at + BEAT:
            self._beat()

    def _beat(self) -> None:
        self._beaten_at = clock.monotonic()
        try:
            self.server.send(m.Heartbeat({**self.report, "outbox": self.send_queue.pending[1]}))
        except MessageError as error:  # the report is too long: send the heartbeat without it
            self._complain(str(error))
            self.server.send(m.Heartbeat({}))

    def _send_all(self, messages: Iterable[m.Message]) -> None:
        for message in messages:
            if not self.server.send(message):
                return

    def _greeting(self) -> m.Hello:
        return m.Hello(
            m.PROTOCOL, "actor", self._actor, self.session, self._outbox.id, self._outbox.run, self._robot.to_dict(),
            self.send_queue.earlier, self._paced, self._has_operator,
        )  # fmt: skip

    # -- from the other side

    def _welcomed(self, welcome: m.Welcome) -> None:
        bound = self._outbox.run
        if bound and welcome.run != bound:
            raise Refused(
                f"the outbox {self._outbox.folder} belongs to run {bound}, and the learner at {self.server.address} "
                f"is run {welcome.run}: start it with that run's folder, or this actor with another run_dir=...; "
                "nothing was deleted"
            )
        if not bound:
            self._outbox.bind(welcome.run)
        self.history = welcome.history
        if welcome.spec is not None:
            self.spec = self._robot.widened(welcome.spec)
            self.send_queue.use_spec(self.spec)
        self.send_queue.resume(welcome.expected, welcome.max_unacknowledged)
        if self.weights:
            self.weights.restart()
        if lost := self.commands.welcomed():
            log.warning("the link broke before the learner answered to %s: look whether it was done", lost)
        address = inference_at(welcome.inference, self.server.address, self._inference_port)
        if self._inference is None or self._inference.address != address:
            if self._inference:
                self._inference.close()
            self._inference = Connection(address, self._greeting(), self._key) if address else None
        self._change(ordinal=welcome.ordinal)
        self._noticed(self.server.notice)
        self._is_in, self.refusal = True, ""
        self._tell()

    def _noticed(self, notice: m.StateUpdate) -> None:
        before = self.state
        is_newer = notice.directive and notice.directive["number"] >= before.directive["number"]
        if notice.degraded != before.degraded:
            said = f"nothing: {notice.degraded}" if notice.degraded else "again"
            log.warning("the learner acknowledges %s", said, extra={"is_shown": True})
        directive = notice.directive if is_newer else before.directive
        self.commands.directed(before.directive, directive)
        limit = self._limited(notice.step_limit)
        self._change(directive=directive, degraded=notice.degraded, step_limit=limit)
        if self.weights:
            self.weights.offer(notice.weights)

    def _acknowledged(self, ack: m.Ack) -> None:
        self.send_queue.acknowledge(ack)
        self._change(step_limit=self._limited(ack.step_limit))

    def _limited(self, steps: int | None) -> int | None:
        """Return how many steps this session may make, if the learner may get so many of it."""
        return steps + self.send_queue.lost_steps if self._paced and steps is not None else None

    def _answered(self, act: m.InferenceResponse) -> None:
        extras = dict(act.arrays)
        action = extras.pop("action")
        if action.ndim != 2 or action.shape[1:] != self._robot.action.shape or not np.isfinite(action).all():
            raise MessageError(f"actions should be finite and [H, {self._robot.action.shape[0]}]")
        self._asked_since, self.no_action = clock.monotonic(), (-UNANSWERED, "")
        if self._close_questions(act.request) == act.step:
            self.answers.append((act.request, Answer(act.step, act.version, action, extras, act.reset)))
            self._tell()

    def _unanswered(self, failed: m.Failed) -> None:
        self.no_action = clock.monotonic(), failed.text
        self._complain(f"the inference process: {failed.text}")
        self._asked_since = clock.monotonic()
        self._close_questions(failed.request)

    def _close_questions(self, request: int) -> int | None:
        """Wait no more for the answers up to this one. Return the step of its question; None: nobody waits for it."""
        step = dict(self._asked).get(request)
        while self._asked and (self._asked[0][0] <= request or not request):
            self._asked.popleft()
        return step

    def _weights_came(self, chunk: m.WeightsChunk) -> None:
        if self.weights:
            self.weights.add(chunk)

    def _done(self, done: m.Done) -> None:
        self.commands.done(done.request, done.value)

    def _heard(self, word: m.Command) -> None:
        self.words.append(word)
        self._tell()

    def _driven(self, drive: m.Drive) -> None:
        if self.remote:
            self.remote.hear(drive)

    def _failed(self, failed: m.Failed) -> None:
        if failed.final:
            raise failure(failed)
        text = f"the learner: {failed.text}"
        if self.commands.take_back(failed.request):
            log.warning("%s", text)  # also when it is said again
        else:
            self._complain(text)
        if failed.request == PULL and self.weights:
            self.weights.pause()
