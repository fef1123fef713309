"""Acting with published weights: the process that answers many actors in batches, and the same inside an actor.

Both are one PolicyHost, and the noise of a decision comes from the seed in the question, so that the same weights,
observation and seed give the same action wherever they meet.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
import zmq
from serl_client import messages as m
from serl_client import wire
from serl_client.client import TrainerClient
from serl_client.errors import ConfigError, MessageError
from serl_client.network import Answer
from serl_client.spec import Array, Spec

from serl_launcher.algorithms.base import Algorithm
from serl_launcher.service.weights import path
from serl_launcher.types import Carry, Decision

log = logging.getLogger(__name__)

MOST = 64  # questions in one batch


@dataclass(frozen=True, slots=True)
class Question:
    """One actor's observation at one row; `actor` is whatever tells actors apart."""

    actor: bytes
    ask: m.Ask


class PolicyHost:
    """An algorithm's acting part with some published weights, and one carry per actor."""

    def __init__(self, algorithm: Algorithm, spec: Spec, device: str) -> None:
        self.algorithm = algorithm.to(device).eval()
        self.spec, self.device = spec, device
        self.version = 0  # none yet
        self._carries: dict[bytes, Carry] = {}

    def load(self, version: int, file: Path) -> None:
        """Swap to these weights. Raises ConfigError when they are not of this algorithm and policy."""
        try:
            self.algorithm.acting.load_state_dict(safetensors.torch.load_file(file, device=self.device))
        except (RuntimeError, ValueError) as error:
            raise ConfigError(
                f"the published weights are not of this algorithm and policy ({str(error).splitlines()[-1].strip()}): "
                "start the actor with the learner's algo= and policy="
            ) from None
        self.version = version

    def check(self, ask: m.Ask) -> None:
        """Raises MessageError when an observation does not fit the Spec."""
        features = dict(self.spec.observation)
        if "previous_action" in ask.arrays:
            features["previous_action"] = self.spec.action
        for name, feature in features.items():
            if name not in ask.arrays:
                raise MessageError(f"the observation lacks {name}")
            try:
                feature.check(name, ask.arrays[name])
            except ValueError as error:
                raise MessageError(str(error)) from None

    def answer(self, questions: Sequence[Question]) -> list[m.Act]:
        """One answer per question, in their order; each was checked before, because a batch cannot be half done."""
        for question in questions:
            if question.ask.reset:
                self._carries.pop(question.actor, None)
        groups: dict[tuple[bool, bool], list[int]] = {}
        for i, question in enumerate(questions):
            groups.setdefault((question.ask.explore, question.actor in self._carries), []).append(i)
        answers: dict[int, m.Act] = {}
        for (explore, remembers), members in groups.items():
            part = [questions[i] for i in members]
            answers.update(zip(members, self._act(part, explore, remembers), strict=True))
        return [answers[i] for i in range(len(questions))]

    def _act(self, questions: Sequence[Question], explore: bool, remembers: bool) -> list[m.Act]:
        observation = {
            name: self._stack([question.ask.arrays[name] for question in questions]) for name in self.spec.observation
        }
        nothing = np.zeros(self.spec.action.shape, self.spec.action.dtype)
        previous_action = self._stack([question.ask.arrays.get("previous_action", nothing) for question in questions])
        noise = torch.stack([self._noise(question.ask.seed) for question in questions]).to(self.device)
        carry = _stacked([self._carries[question.actor] for question in questions]) if remembers else None
        decision, carry = self.algorithm.act(observation, previous_action, carry, noise=noise, explore=explore)
        if carry is not None:
            self._carries.update({q.actor: _at(carry, i) for i, q in enumerate(questions)})
        return [self._answer(question, decision, i) for i, question in enumerate(questions)]

    def _stack(self, arrays: Sequence[Array]) -> torch.Tensor:
        return torch.from_numpy(np.stack([np.asarray(array) for array in arrays])).to(self.device)

    def _noise(self, seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        shape: Any = self.algorithm.acting.noise_shape
        return torch.randn(shape, generator=generator)

    def _answer(self, question: Question, decision: Decision, i: int) -> m.Act:
        arrays = {name: value[i].cpu().numpy() for name, value in decision.extras.items()}
        return m.Act(question.ask.step, self.version, {"action": decision.action[i].cpu().numpy(), **arrays})


class LocalSource:
    """Answers a RemotePolicy from inside the actor's own process: the weights come over the wire, the rest is the same
    as in the inference process."""

    def __init__(self, client: TrainerClient, host: PolicyHost) -> None:
        self.client, self.host = client, host
        self._question: m.Ask | None = None

    def ask(
        self, observation: Mapping[str, Array], *, step: int, seed: int, previous_action: Array | None, reset: bool,
        explore: bool,
    ) -> None:  # fmt: skip
        arrays = dict(observation) if previous_action is None else {**observation, "previous_action": previous_action}
        self._question = m.Ask(step, seed, reset, explore, arrays)
        self.host.check(self._question)

    def wait_answer(self, step: int, timeout: float) -> Answer | None:
        """The answer with the newest weights that have arrived, once; else None, after `timeout` seconds."""
        if (newest := self.client.weights(self.host.version)) is not None:
            self.host.load(*newest)
        if not self.host.version or self._question is None:
            self.client.wait(max(0.0, timeout))
            return None
        question, self._question = self._question, None
        act = self.host.answer([Question(b"", question)])[0]
        arrays = dict(act.arrays)
        return Answer(act.step, act.version, arrays.pop("action"), arrays)

    def forget(self) -> None:
        self._question = None


def _stacked(carries: Sequence[Carry]) -> Carry:
    first = carries[0]
    if isinstance(first, dict):
        return {name: _stacked([carry[name] for carry in carries]) for name in first}
    if isinstance(first, (tuple, list)):
        return type(first)(_stacked(parts) for parts in zip(*carries, strict=True))
    return torch.stack(list(carries))


def _at(carry: Carry, i: int) -> Carry:
    if isinstance(carry, dict):
        return {name: _at(part, i) for name, part in carry.items()}
    if isinstance(carry, (tuple, list)):
        return type(carry)(_at(part, i) for part in carry)
    return carry[i]


class InferenceServer:
    """Answers Ask on `address`; `newest` tells which weights are valid ({version, sha256} or empty)."""

    def __init__(self, host: PolicyHost, weights: Path, address: str) -> None:
        self.host, self.weights = host, weights
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, wire.MAX_ARRAY)
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            raise ConfigError(
                f"cannot listen on {address}: {error.strerror}. Is another learner running? "
                "Stop it, or choose inference_port=..."
            ) from None

    def run(self, newest: Callable[[], dict[str, Any]], stopping: Callable[[], bool]) -> None:
        """Answer until `stopping()`; weights are swapped between two batches."""
        while not stopping():
            ready = self._socket.poll(50)
            notice = newest()
            if notice and notice["version"] != self.host.version:
                self._load(notice)
            if ready:
                self._serve(self._take())

    def _load(self, notice: dict[str, Any]) -> None:
        try:
            self.host.load(notice["version"], path(self.weights, notice["sha256"]))
        except FileNotFoundError:
            log.warning("weights %d are gone already; the next ones will do", notice["version"])

    def _take(self) -> list[Question]:
        """All questions that have come and can be answered, the latest of each actor."""
        questions: dict[bytes, Question] = {}
        for _ in range(MOST):
            try:
                identity, *frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
                message = m.decode([frame.buffer for frame in frames])
                if isinstance(message, m.Ask):
                    self.host.check(message)
                    questions[identity.bytes] = Question(identity.bytes, message)
            except zmq.Again:
                break
            except MessageError as error:
                log.warning("refused: %s", error)
        return list(questions.values())

    def _serve(self, questions: list[Question]) -> None:
        if not questions or not self.host.version:
            return
        for question, answer in zip(questions, self.host.answer(questions), strict=True):
            self._socket.send_multipart([question.actor, *m.encode(answer)], zmq.NOBLOCK)

    def close(self) -> None:
        self._context.destroy(linger=0)
