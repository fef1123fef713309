"""Acting with published weights, in the inference process or inside an actor: both are one PolicyHost. No socket.

The noise of a decision comes from the seed in the request. So the same weights, observation, task and seed give the
same action in either place. A Loader reads new weights in its own thread while older ones act.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
from serl_client import messages as m
from serl_client.client import TrainerClient
from serl_client.errors import ConfigError, MessageError
from serl_client.network import Answer
from serl_client.spec import Array, Spec
from torch import Tensor

from serl_launcher.acting.graphs import Graphs
from serl_launcher.algorithms.base import Algorithm
from serl_launcher.types import Carry
from serl_launcher.utils.finite import not_finite

log = logging.getLogger(__name__)

REMEMBERED = 1024  # connections whose carry is kept: the last ones that asked


@dataclass(frozen=True, slots=True)
class Question:
    """One actor's request. `actor`: any bytes that tell actors apart; `came`: its time.monotonic() on arrival."""

    actor: bytes
    ask: m.InferenceRequest
    came: float = 0.0


class PolicyHost:
    """An algorithm's acting part with some published weights, and one carry per actor.

    It owns the algorithm from then on, and drops what only training needs. Weights have the policy's precision; buffers
    keep theirs. On a GPU the method that the policy names as its `graph` becomes one CUDA graph per power of two, and
    batches are padded to that size. This was never run on a GPU.
    """

    def __init__(self, algorithm: Algorithm, spec: Spec, device: str) -> None:
        algorithm.only_acting()
        self.acting = algorithm.acting
        for weight in self.acting.parameters():
            weight.data = weight.data.to(self.acting.precision)
        self.algorithm = algorithm.to(device).eval()
        self.spec, self.device = spec, torch.device(device)
        self.version = 0  # none yet
        graph = self.acting.graph if self.device.type == "cuda" else None
        self.is_static = graph is not None  # only powers of two
        if graph is not None:
            self.acting.compile_layers()
            setattr(self.acting, graph, Graphs(getattr(self.acting, graph)))
        self._layout = {name: tensor.shape for name, tensor in self.acting.published().items()}
        self._carries: dict[bytes, Carry] = {}

    # -- weights
    def load(self, version: int, file: Path) -> None:
        """Read published weights and act with them. Raises what `read` and `swap` raise."""
        self.swap(version, self.read(file))

    def read(self, file: Path) -> dict[str, Tensor]:
        """Return published weights {name: tensor} on this host's device; `answer` may run meanwhile.

        Raises FileNotFoundError if the file is gone, ConfigError if it is damaged, not finite or of another policy.
        """
        try:
            tensors = safetensors.torch.load_file(file)
        except (safetensors.SafetensorError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"weights file {file.name} is damaged ({error}): keeping the current ones until the next"
            ) from None
        layout = {name: tensor.shape for name, tensor in tensors.items()}
        if layout != self._layout:
            name = min(name for name, _ in layout.items() ^ self._layout.items())
            there, here = (tuple(each.get(name, ("nothing",))) for each in (layout, self._layout))
            raise _unfit(f"{name} is {there} there and {here} here")
        if bad := not_finite(tensors):
            raise ConfigError(
                f"weights file {file.name} is not finite in {bad}: keeping the current ones until the next"
            )
        # The copy reads what load_file has only mapped.
        return {name: tensor.to(self.device, copy=True) for name, tensor in tensors.items()}

    def swap(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Act with these weights from now on. They overwrite the old ones in place, because CUDA graphs point there.

        Raises ConfigError for weights of another policy.
        """
        try:
            self.acting.load_published(tensors)
        except (RuntimeError, ValueError) as error:
            raise _unfit(str(error).splitlines()[-1].strip()) from None
        self.version = version

    # -- answers
    def check(self, ask: m.InferenceRequest) -> None:
        """Raise MessageError if an observation does not fit the Spec, or if the request holds anything else."""
        features = dict(self.spec.observation)
        if "previous_action" in ask.arrays:
            features["previous_action"] = self.spec.action
        if strange := ask.arrays.keys() - features.keys():
            raise MessageError(f"the observation has {min(strange)!r}, which is not in the Spec")
        for name, feature in features.items():
            if name not in ask.arrays:
                raise MessageError(f"the observation lacks {name}")
            try:
                feature.check(name, ask.arrays[name])
            except ValueError as error:
                raise MessageError(str(error)) from None

    def warm_up(self, most: int) -> None:
        """Record the graphs for batches of up to `most` requests, so that no answer waits for them."""
        arrays = {name: np.zeros(feature.shape, feature.dtype) for name, feature in self.spec.observation.items()}
        questions = [Question(b"", m.InferenceRequest(0, 0, True, explore, "", arrays)) for explore in (True, False)]
        for size in (1 << power for power in range(most.bit_length()) if self.is_static):
            for question in questions:  # the noise may have another shape where nothing is explored
                self.answer([question] * size)
        self._carries.clear()

    def answer(self, questions: Sequence[Question]) -> list[m.InferenceResponse]:
        """Return one answer per question, in their order. `check` each before, because a batch cannot be half done."""
        for question in questions:
            if question.ask.reset:
                self._carries.pop(question.actor, None)
        groups: dict[tuple[bool, bool], list[int]] = {}
        for i, question in enumerate(questions):
            groups.setdefault((question.ask.explore, question.actor in self._carries), []).append(i)
        answers: dict[int, m.InferenceResponse] = {}
        for (explore, remembers), members in groups.items():
            part = [questions[i] for i in members]
            answers.update(zip(members, self._act(part, explore, remembers), strict=True))
        return [answers[i] for i in range(len(questions))]

    def _act(self, questions: Sequence[Question], explore: bool, remembers: bool) -> list[m.InferenceResponse]:
        rows = self._padded(questions)
        asks = [question.ask for question in rows]
        observation = {name: self._stack([ask.arrays[name] for ask in asks]) for name in self.spec.observation}
        nothing = np.zeros(self.spec.action.shape, self.spec.action.dtype)
        previous_action = self._stack([ask.arrays.get("previous_action", nothing) for ask in asks])
        noise = torch.stack([self._noise(ask.seed) for ask in asks]).to(self.device)
        carry = _stacked([self._carries[question.actor] for question in rows]) if remembers else None
        decision, carry = self.algorithm.act(
            observation, previous_action, carry, task=tuple(ask.task for ask in asks), noise=noise, explore=explore
        )
        if carry is not None:
            for i, question in enumerate(questions):
                self._carries.pop(question.actor, None)  # so that whoever has not asked for longest comes first
                self._carries[question.actor] = _at(carry, i)
            while len(self._carries) > REMEMBERED:
                del self._carries[next(iter(self._carries))]
        arrays = {name: value.cpu().numpy() for name, value in {"action": decision.action, **decision.extras}.items()}
        return [
            m.InferenceResponse(question.ask.step, self.version, {name: array[i] for name, array in arrays.items()})
            for i, question in enumerate(questions)
        ]

    def _padded(self, questions: Sequence[Question]) -> list[Question]:
        """Repeat the last question until there are as many as the graph has rows."""
        size = 1 << (len(questions) - 1).bit_length() if self.is_static else len(questions)
        return [*questions, *[questions[-1]] * (size - len(questions))]

    def _stack(self, arrays: Sequence[Array]) -> Tensor:
        return torch.from_numpy(np.stack([np.asarray(array) for array in arrays])).to(self.device)

    def _noise(self, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(self.acting.noise_shape, generator=generator)


def _unfit(reason: str) -> ConfigError:
    return ConfigError(
        f"the published weights are not of this algorithm and policy ({reason}): "
        "start the actor with the learner's algo= and policy="
    )


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


class Loader:
    """Reads published weights for a host in its own thread, one file at a time. It calls `done` after each."""

    def __init__(self, host: PolicyHost, done: Callable[[], None] = lambda: None) -> None:
        self._host, self._done = host, done
        self._thread = ThreadPoolExecutor(1, "loader")
        self._reading: Future[dict[str, Tensor]] | None = None
        self._version = 0  # that was begun last

    def begin(self, version: int, file: Path) -> None:
        """Begin to read this file, unless it was the last one. Does nothing while another is being read: call again."""
        if self._reading is None and version != self._version:
            self._version = version
            self._reading = self._thread.submit(self._host.read, file)
            self._reading.add_done_callback(lambda _: self._done())

    def take(self, timeout: float = 0.0) -> tuple[int, dict[str, Tensor]] | None:
        """Return (version, weights) once they are read, else None after `timeout` seconds. Returns them only once.

        Raises what `read` raised, but FileNotFoundError: a file is removed only after newer weights were published.
        """
        reading = self._reading
        if reading is None or not wait([reading], timeout).done:
            return None
        self._reading = None
        try:
            return self._version, reading.result()
        except FileNotFoundError:
            log.warning("weights %d are gone already: keeping the current ones until the next", self._version)
            return None

    def close(self) -> None:
        self._thread.shutdown()


class LocalSource:
    """Answers a RemotePolicy inside the actor's own process. Its weights come over the wire."""

    def __init__(self, client: TrainerClient, host: PolicyHost) -> None:
        self.client, self.host = client, host
        self._loader = Loader(host)
        self._question: m.InferenceRequest | None = None
        host.warm_up(1)

    def ask(
        self, observation: Mapping[str, Array], *, step: int, seed: int, previous_action: Array | None, reset: bool,
        explore: bool, task: str,
    ) -> None:  # fmt: skip
        arrays = dict(observation) if previous_action is None else {**observation, "previous_action": previous_action}
        self._question = m.InferenceRequest(step, seed, reset, explore, task, arrays)
        self.host.check(self._question)

    def wait_answer(self, step: int, timeout: float) -> Answer | None:
        """Answer the last request, once, with the newest weights that are read; None after `timeout` s."""
        deadline = time.monotonic() + max(0.0, timeout)
        if (newest := self.client.weights(self.host.version)) is not None:
            self._loader.begin(*newest)
        try:
            if (loaded := self._loader.take(0.0 if self.host.version else max(0.0, timeout))) is not None:
                self.host.swap(*loaded)
        except ConfigError as error:  # perhaps those of an earlier plan, before the learner has published its own
            log.warning("%s", error)
        if not self.host.version or self._question is None:
            self.client.wait(max(0.0, deadline - time.monotonic()))
            return None
        question, self._question = self._question, None
        act = self.host.answer([Question(b"", question)])[0]
        arrays = dict(act.arrays)
        return Answer(act.step, act.version, arrays.pop("action"), arrays)

    def forget(self) -> None:
        self._question = None
