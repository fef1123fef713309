"""Lets the control thread push records, and get actions, directives and the Spec. Only wait and drain wait."""

import logging
import os
import select
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import serl_client.clock as clock
from serl_client.closing import Closing
from serl_client.controller import asked
from serl_client.driving import RemoteDriver
from serl_client.episode import Record
from serl_client.errors import ConfigError
from serl_client.keys import Key
from serl_client.messages import Command, InferenceRequest
from serl_client.network import UNANSWERED, Answer, Network, State
from serl_client.outbox import Outbox
from serl_client.spec import Array, Spec

log = logging.getLogger(__name__)

CAPACITY = 4 << 30  # bytes of the outbox
SWITCH = 0.0005  # seconds until the control thread gets its turn; Python's default is 5 ms


class TrainerClient(Closing):
    """Pushes records, asks for actions and follows directives; a context manager.

        with TrainerClient("tcp://10.0.0.5:5555", actor="arm", spec=spec, outbox=Path("outbox")) as client:
            client.push(segment)  # a Segment: some steps of an episode
            client.ask(observation, step=4, seed=1, previous_action=action, reset=False, explore=True, task="lift")
            answer = client.wait_answer(4, timeout=1.0)  # None, or its `action` [H, A] is for the steps from 4 on
            client.drain(10.0)  # wait until the learner has the records

    outbox: folder of unacknowledged records; each actor has its own. It survives the end of this process.
    capacity: limit of the outbox, bytes.
    paced: take only the steps that the learner allows.
    has_operator: this actor can demonstrate.
    weights_folder: where weights are pulled to, this client's own folder; None: no weights are pulled.
    key: file that lets this actor in (docs/guides/security.md); None: the learner asks for no keys.
    inference_port: of the learner's host as it is reached from here, as by a tunnel; None: the port that it says.
    remote: whom somebody at the page drives this actor's robot by; None: nobody there may.

    A learner that is away, slow or stopped is no error: see `connected` and `pending`. The next call
    raises TrainerError for what cannot be mended: another run, another Spec, a second client of this name, or a bug
    in the network thread. Raises ConfigError for a key of another actor, or an outbox that cannot be used.
    """

    def __init__(
        self, address: str, *, actor: str, spec: Spec, outbox: Path, capacity: int = CAPACITY, paced: bool = False,
        has_operator: bool = False, weights_folder: Path | None = None, key: Path | None = None,
        inference_port: int | None = None, remote: RemoteDriver | None = None,
    ) -> None:  # fmt: skip
        self.actor = actor
        own = Key.read(key) if key else None
        if own and not own.owns(actor):
            raise ConfigError(f"the key {key} is that of {own.name}, not of {actor}: say name={own.name}")
        self._outbox = Outbox(outbox, capacity)
        self._network = Network(
            address, actor=actor, spec=spec, outbox=self._outbox, weights_folder=weights_folder, paced=paced,
            has_operator=has_operator, key=own, inference_port=inference_port, remote=remote,
        )  # fmt: skip
        self.session = self._network.session  # names this start of the actor
        self._send_queue = self._network.send_queue
        self._news = select.poll()
        self._news.register(self._network.news, select.POLLIN)
        self.remote = remote
        if remote:
            remote.wake = self._network.wake
        self._asked = self._forgotten = 0  # numbers of questions
        self._began = clock.monotonic()

    def __enter__(self) -> Self:
        sys.setswitchinterval(min(SWITCH, sys.getswitchinterval()))
        self._network.start()
        return self

    def close(self) -> None:
        """End the network thread; unacknowledged records stay in the outbox. May be called twice."""
        self._network.close()
        self._outbox.close()

    def push(self, record: Record) -> None:
        """Hand over a record; the caller must not change its arrays afterwards. Check `has_room` before each step.

        Raises TrainerError when the queue is full; a record that ends an episode always has room. After a segment
        that does not fit the Spec, a later call raises TrainerError.
        """
        self._send_queue.put(record)
        self._network.wake()
        self.check()

    @property
    def has_room(self) -> bool:
        """Return whether an episode may go on: the outbox keeps up with the pushed records."""
        return self._send_queue.has_room

    def ask(
        self, observation: Mapping[str, Array], *, step: int, seed: int, previous_action: Array | None, reset: bool,
        explore: bool, task: str, prefix: Array | None = None, committed: int = 0,
    ) -> None:  # fmt: skip
        """Ask for the actions from step `step` on. A newer question replaces one that was not sent yet."""
        self.check()
        self._asked += 1
        arrays = asked(self.spec, observation, previous_action, prefix)
        question = InferenceRequest(step, seed, reset, explore, task, arrays, committed, self._asked)
        self._network.questions.append(question)
        self._network.wake()

    def answer(self) -> Answer | None:
        """Return the latest answer, once; None if there is no new one."""
        self.check()
        if not self._network.answers:
            return None
        number, answer = self._network.answers.pop()
        return answer if number > self._forgotten else None

    def wait_answer(self, step: int, timeout: float) -> Answer | None:
        """Return the answer for step `step` or a later one, or None after `timeout` seconds; drop older answers."""
        deadline = clock.monotonic() + timeout
        while (answer := self.answer()) is None or answer.step < step:
            left = deadline - clock.monotonic()
            if left <= 0:
                return None
            self.wait(left)
        return answer

    def forget(self) -> None:
        """Drop the answers to all earlier questions: a new episode begins, or a human had the robot."""
        self._forgotten = self._asked

    def weights(self, newer_than: int) -> tuple[int, Path] | None:
        """Return (version, verified file) of the newest weights here, or None. The two newest files are kept."""
        newest = self._network.weights.newest if self._network.weights else None
        return newest if newest and newest[0] > newer_than else None

    def command(self, name: str, argument: str = "", *, seen: Mapping[str, Any] | None = None) -> None:
        """Queue an operator's command to the plan; the log tells its result.

        seen: the directive that its person sees, which `next` is about; None: the newest one.
        """
        self._network.commands.say(name, argument, seen or self.state.directive, self.state.directive)
        self._network.wake()

    def words(self) -> Iterator[Command]:
        """Yield what operators elsewhere have said to this actor since the last call."""
        while self._network.words:
            yield self._network.words.popleft()

    @property
    def over(self) -> str:
        """Return `next` or `stop` if that was said here under the current directive, also to a learner that is away.
        Empty: it was not, or the learner has refused it."""
        numbers, name = self._network.commands.ended
        return name if self.state.directive["number"] in numbers else ""

    @property
    def refusal(self) -> str:
        """Return why no learner takes this client at present, which asks again; empty: none has refused it."""
        return self._network.refusal

    @property
    def no_action(self) -> str:
        """Return why the inference process had no action for the newest question; empty: it had, or is silent."""
        when, text = self._network.no_action
        return text if clock.monotonic() < when + UNANSWERED else ""

    def report(self, numbers: Mapping[str, Any]) -> None:
        """Let the heartbeat tell the learner these each second; the mapping is read anew each time."""
        self._network.report = numbers

    def wait(self, timeout: float) -> None:
        """Wait for an answer or another state; at most `timeout` seconds."""
        if self._news.poll(timeout * 1000):
            os.eventfd_read(self._network.news)
        self.check()

    def drain(self, timeout: float, *, patient: bool = True) -> bool:
        """Wait until every record is acknowledged. Return False if that takes more than `timeout` seconds, or, if not
        `patient`, once the learner is away."""
        deadline = clock.monotonic() + timeout
        while self.pending[0]:
            if clock.monotonic() > deadline or not (patient or self.connected):
                return False
            self.wait(0.01)
        return True

    def check(self) -> None:
        """Raise the error that stopped the network thread, if any, or that of a segment that does not fit the Spec."""
        if (error := self._network.error or self._send_queue.error) is not None:
            raise error

    @property
    def state(self) -> State:
        """Return what the learner said last: directive, step limit. A change replaces the whole object."""
        return self._network.state

    @property
    def spec(self) -> Spec:
        """Return the Spec of the rows: the robot's and, once connected, with the extras that the algorithm gives."""
        return self._network.spec

    @property
    def history(self) -> int:
        """Return how many observations, the newest last, the policy is asked with."""
        return self._network.history

    @property
    def connected(self) -> bool:
        """Return whether the learner has welcomed this session."""
        return self._network.connected

    @property
    def silence(self) -> float:
        """Return for how many seconds nothing was heard of the learner; 0.0 while it has welcomed this session."""
        return 0.0 if self.connected else clock.monotonic() - max(self._began, self._network.server.heard)

    @property
    def inference(self) -> str:
        """Return the address that is asked for actions; empty while the learner has named none."""
        return self._network.inference

    @property
    def pulling(self) -> str:
        """Return how far the weights are that are pulled, or why there are none; empty where none are pulled."""
        return str(self._network.weights or "")

    @property
    def pending(self) -> tuple[int, int]:
        """Return the number of unacknowledged records and their bytes."""
        return self._send_queue.pending

    @property
    def fault(self) -> str:
        """Return why the outbox takes no record; empty while it does."""
        return self._send_queue.fault
