"""The actor's side of the data path, for the control thread: nothing in it waits, except where its name says so."""

import os
import select
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from serl_client.episode import Record
from serl_client.errors import ConfigError
from serl_client.keys import Key
from serl_client.messages import Command, InferenceRequest
from serl_client.network import Answer, Network
from serl_client.outbox import Outbox
from serl_client.spec import Array, Spec

CAPACITY = 4 << 30  # bytes
SWITCH = 0.0005  # seconds


class TrainerClient:
    """Pushes records, asks for actions and follows directives; a context manager.

    A learner that is away, slow or stopped is no error: it shows in `connected`, `last_seen` and `pending`, and what
    was pushed lies in the folder `outbox` (one for each actor) until it is acknowledged, over this process's end too.
    What cannot be mended (another run, another Spec, a second client of this name, a bug in the network thread) is
    raised by the next call, as a TrainerError. Weights are pulled only into a `weights_folder`, which is this
    client's own. `key` is the file that lets this actor in (docs/security.md). The control thread gets its turn within
    SWITCH of this process: Python would let the network thread go on for 5 ms.
    """

    def __init__(
        self, address: str, *, actor: str, spec: Spec, outbox: Path, capacity: int = CAPACITY, paced: bool = False,
        has_operator: bool = False, weights_folder: Path | None = None, key: Path | None = None,
    ) -> None:  # fmt: skip
        self.actor, self.spec = actor, spec
        opened = Key.read(key) if key else None
        if opened and not opened.owns(actor):
            raise ConfigError(f"the key {key} is that of {opened.name}, not of {actor}: go by the name {opened.name}")
        self._outbox = Outbox(outbox, capacity)
        self._network = Network(
            address, actor=actor, spec=spec, outbox=self._outbox, weights_folder=weights_folder, paced=paced,
            has_operator=has_operator, key=opened,
        )  # fmt: skip
        self._send_queue = self._network.send_queue
        self._news = select.poll()
        self._news.register(self._network.news, select.POLLIN)
        self._asked = self._forgotten = 0  # numbers of questions

    def __enter__(self) -> "TrainerClient":
        sys.setswitchinterval(min(SWITCH, sys.getswitchinterval()))
        self._network.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """End the network thread; what is not acknowledged lies in the outbox. May be called twice."""
        self._network.close()
        self._outbox.close()

    def push(self, record: Record) -> None:
        """Hand over a record; its arrays belong to the client from now on. Look at `room` before an episode goes on.

        Raises TrainerError when the queue is full; there is always room for what ends an episode. A segment that does
        not fit the Spec ends the network thread, and the next call says so.
        """
        self._send_queue.put(record)
        self._network.wake()
        self.check()

    @property
    def has_room(self) -> bool:
        """Whether an episode may go on: the outbox keeps up with what is pushed."""
        return self._send_queue.has_room

    def ask(
        self, observation: Mapping[str, Array], *, step: int, seed: int, previous_action: Array | None, reset: bool,
        explore: bool, task: str,
    ) -> None:  # fmt: skip
        """Ask for the actions from row `step` on; a newer question replaces one that was not sent yet."""
        self.check()
        self._asked += 1
        arrays = dict(observation) if previous_action is None else {**observation, "previous_action": previous_action}
        self._network.questions.append((self._asked, InferenceRequest(step, seed, reset, explore, task, arrays)))
        self._network.wake()

    def answer(self) -> Answer | None:
        """The latest answer, once."""
        self.check()
        if not self._network.answers:
            return None
        number, answer = self._network.answers.pop()
        return answer if number > self._forgotten else None

    def wait_answer(self, step: int, timeout: float) -> Answer | None:
        """The answer to the question of row `step` or of a later one, within `timeout` seconds; others are dropped."""
        deadline = time.monotonic() + timeout
        while (answer := self.answer()) is None or answer.step < step:
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            self.wait(left)
        return answer

    def forget(self) -> None:
        """Drop the answers to all that was asked so far: a new episode begins, or a human had the robot."""
        self._forgotten = self._asked

    def weights(self, newer_than: int) -> tuple[int, Path] | None:
        """(version, verified file) of the newest weights here, if newer. The two newest files are kept."""
        newest = self._network.weights.newest if self._network.weights else None
        return newest if newest and newest[0] > newer_than else None

    def command(self, name: str, argument: str = "") -> None:
        """Queue an operator's command to the plan; what became of it is logged."""
        self._network.commands.append(Command(name, argument))
        self._network.wake()

    def wait(self, timeout: float) -> None:
        """Until there is an answer, another directive or permission; at most `timeout` seconds."""
        if self._news.poll(timeout * 1000):
            os.eventfd_read(self._network.news)
        self.check()

    def drain(self, timeout: float) -> bool:
        """Wait until all is acknowledged. False: it is not, after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while self.pending[0]:
            if time.monotonic() > deadline:
                return False
            self.wait(0.01)
        return True

    def check(self) -> None:
        """Raise what ended the work of the network thread, if anything did, and for a segment that does not fit."""
        if (error := self._network.error or self._send_queue.error) is not None:
            raise error

    @property
    def session(self) -> str:
        """Names this start of the actor."""
        return self._network.session

    @property
    def ordinal(self) -> int:
        """The number of this actor in its run; known with the first directive."""
        return self._network.ordinal

    @property
    def directive(self) -> Mapping[str, Any]:
        """The latest {number, phase, mode, ...}; idle before the first one."""
        return self._network.directive

    @property
    def step_limit(self) -> int | None:
        """How many steps this session may have made in all; None: no limit."""
        return self._network.step_limit

    @property
    def connected(self) -> bool:
        return self._network.server.connected

    @property
    def last_seen(self) -> float:
        """Seconds since the learner was last heard; infinite before the first time."""
        heard = self._network.server.heard
        return time.monotonic() - heard if heard else float("inf")

    @property
    def degraded(self) -> str:
        """Why the learner acknowledges nothing; empty while it does."""
        return self._network.degraded

    @property
    def pending(self) -> tuple[int, int]:
        """(records, bytes) that are not acknowledged."""
        return self._send_queue.pending

    @property
    def fault(self) -> str:
        """Why the outbox takes nothing; empty while it does."""
        return self._send_queue.fault

    @property
    def report(self) -> Mapping[str, Any]:
        """What the heartbeat of each second tells the learner; it is read anew each time."""
        return self._network.report

    @report.setter
    def report(self, report: Mapping[str, Any]) -> None:
        self._network.report = report
