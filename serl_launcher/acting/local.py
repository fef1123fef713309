"""Runs the policy in a thread of the actor's own process (inference=local), with weights from the wire."""

import threading
from collections.abc import Mapping

from serl_client import clock
from serl_client import messages as m
from serl_client.client import TrainerClient
from serl_client.controller import asked
from serl_client.errors import ConfigError
from serl_client.network import Answer
from serl_client.spec import Array

from serl_launcher.acting.host import Loader, PolicyHost, Question, log


class LocalSource:
    """Answers a RemotePolicy inside the actor's own process; close it at the end.

    One thread computes answers and swaps newer weights in, so that the control thread only waits where it says so. The
    latest question counts. Raises, at the next call, what ended that thread.
    """

    def __init__(self, client: TrainerClient, host: PolicyHost) -> None:
        self.client, self.host = client, host
        self._changed = threading.Condition()  # guards what follows
        self._question: tuple[int, m.InferenceRequest] | None = None  # with its number
        self._answer: Answer | None = None
        self._asked = self._forgotten = 0  # numbers of questions
        self._looks = False  # True: the control thread looks for an answer, so newer weights may be there
        self._is_closed = False
        self._error: BaseException | None = None
        self._loader = Loader(host, self._look)
        host.warm_up(1)
        self._thread = threading.Thread(target=self._run, name="policy", daemon=True)
        self._thread.start()

    def ask(
        self, observation: Mapping[str, Array], *, step: int, seed: int, previous_action: Array | None, reset: bool,
        explore: bool, task: str, prefix: Array | None = None, committed: int = 0,
    ) -> None:  # fmt: skip
        arrays = asked(self.host.spec, observation, previous_action, prefix)
        question = m.InferenceRequest(step, seed, reset, explore, task, arrays, committed)
        self.host.check(question)
        with self._changed:
            self._check()
            self._asked += 1
            self._question = self._asked, question
            self._changed.notify_all()

    def wait_answer(self, step: int, timeout: float) -> Answer | None:
        """Return the answer for step `step` or a later one, once; None after `timeout` s."""
        deadline = clock.monotonic() + timeout
        self._look()
        with self._changed:
            while True:
                self._check()
                answer, self._answer = self._answer, None
                if answer is not None and answer.step >= step:
                    return answer
                left = deadline - clock.monotonic()
                if left <= 0:
                    return None
                self._changed.wait(left)

    def forget(self) -> None:
        """Drop the answers to all earlier questions, also to the one that is being answered."""
        with self._changed:
            self._forgotten, self._question, self._answer = self._asked, None, None

    def close(self) -> None:
        """End the thread, after what it is doing."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join()
        self._loader.close()

    def _check(self) -> None:
        self.client.check()
        if self._error is not None:
            raise self._error

    def _look(self) -> None:
        """Let the thread look for newer weights."""
        with self._changed:
            self._looks = True
            self._changed.notify_all()

    # -- the thread
    def _run(self) -> None:
        try:
            while (question := self._next()) is not None:
                self._turn(*question)
        except BaseException as error:  # the control thread raises it
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _next(self) -> tuple[int, m.InferenceRequest | None] | None:
        """Wait for something to do. Return the question with its number, if one can be answered; None: the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._looks or (self._question and self.host.version))
            self._looks = False
            if self._is_closed:
                return None
            if self._question is None or not self.host.version:
                return 0, None
            question, self._question = self._question, None
            return question

    def _turn(self, number: int, question: m.InferenceRequest | None) -> None:
        """Swap in weights that are read, then answer the question."""
        if (newest := self.client.weights(self.host.version)) is not None:
            self._loader.begin(*newest)
        try:
            if (loaded := self._loader.pop()) is not None:
                self.host.swap(*loaded)
        except ConfigError as error:  # perhaps those of an earlier plan, before the learner has published its own
            log.warning("%s", error)
        if question is None:
            return
        act = self.host.answer([Question(b"", question)])[0]
        if isinstance(act, m.Failed):
            log.warning("%s", act.text)
            return
        arrays = dict(act.arrays)
        answer = Answer(act.step, act.version, arrays.pop("action"), arrays, act.reset)
        with self._changed:
            if number > self._forgotten:
                self._answer = answer
                self._changed.notify_all()
