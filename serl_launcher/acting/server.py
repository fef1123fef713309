"""Acting with published weights: the process that answers many actors in batches, and the same inside an actor.

Both are one PolicyHost, and the noise of a decision comes from the seed in the question, so that the same weights,
observation, task and seed give the same action wherever they meet. Both read new weights in a thread of its own
(Loader) while older ones act.
"""

import logging
import math
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
import zmq
from serl_client import messages as m
from serl_client import wire
from serl_client.client import TrainerClient
from serl_client.connection import received
from serl_client.errors import ConfigError, MessageError, RetakeError
from serl_client.network import Answer
from serl_client.spec import Array, Spec
from torch import Tensor

from serl_launcher.acting.graphs import Graphs
from serl_launcher.algorithms.base import Algorithm
from serl_launcher.store.access import AccessControl
from serl_launcher.store.peers import KeyOwner, check_hello, check_role, send
from serl_launcher.store.weights import path
from serl_launcher.training.finite import not_finite
from serl_launcher.types import Carry

log = logging.getLogger(__name__)

MOST = 64  # questions in one batch
REMEMBERED = 1024  # connections whose carry is kept: the last ones that asked
RECENT_S = 1.0  # who asked within it is expected to ask again
HEARD = 256  # messages at one turn
COUNTED = 1000  # answers that the report is about
TURN = 50  # ms between two looks at what is published


@dataclass(frozen=True, slots=True)
class Question:
    """One actor's observation at one row; `actor` is whatever tells actors apart; `came`: time.monotonic()."""

    actor: bytes
    ask: m.InferenceRequest
    came: float = 0.0


class PolicyHost:
    """An algorithm's acting part with some published weights, and one carry per actor.

    It takes the algorithm over, and drops what only training needs. The weights are held in the policy's precision,
    its buffers as they are. On a GPU the method that the policy names as its `graph` becomes a CUDA graph per power
    of two, to which batches are padded. This was never run on a GPU.
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
        """Read published weights and act with them. Raises as `read` does."""
        self.swap(version, self.read(file))

    def read(self, file: Path) -> dict[str, Tensor]:
        """Published weights, in memory; `answer` may run meanwhile. Raises FileNotFoundError, and ConfigError when they
        are not of this algorithm and policy."""
        try:
            tensors = safetensors.torch.load_file(file)
        except (safetensors.SafetensorError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"the weights {file.name} are damaged ({error}): the next ones will do") from None
        layout = {name: tensor.shape for name, tensor in tensors.items()}
        if layout != self._layout:
            name = min(name for name, _ in layout.items() ^ self._layout.items())
            there, here = (tuple(each.get(name, ("nothing",))) for each in (layout, self._layout))
            raise _unfit(f"{name} is {there} there and {here} here")
        if bad := not_finite(tensors):
            raise ConfigError(f"the weights {file.name} are not finite in {bad}: the next ones will do")
        return {name: tensor.to(self.device, copy=True) for name, tensor in tensors.items()}  # what is mapped is read

    def swap(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Act with these weights from now on; they go where the old ones are. Raises ConfigError as `read` does."""
        try:
            self.acting.load_published(tensors)
        except (RuntimeError, ValueError) as error:
            raise _unfit(str(error).splitlines()[-1].strip()) from None
        self.version = version

    # -- answers
    def check(self, ask: m.InferenceRequest) -> None:
        """Raises MessageError when an observation does not fit the Spec, or something else comes with it."""
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
        """Make the graphs of batches of up to `most`, so that no answer waits for them; without graphs, nothing."""
        arrays = {name: np.zeros(feature.shape, feature.dtype) for name, feature in self.spec.observation.items()}
        questions = [Question(b"", m.InferenceRequest(0, 0, True, explore, "", arrays)) for explore in (True, False)]
        for size in (1 << power for power in range(most.bit_length()) if self.is_static):
            for question in questions:  # the noise may have another shape where nothing is explored
                self.answer([question] * size)
        self._carries.clear()

    def answer(self, questions: Sequence[Question]) -> list[m.InferenceResponse]:
        """One answer per question, in their order; each was checked before, because a batch cannot be half done."""
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
        """As many as the shape has rows: the last one again and again."""
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
    """Reads published weights for a host in a thread of its own: one file at a time. `done` is called, there, after
    each."""

    def __init__(self, host: PolicyHost, done: Callable[[], None] = lambda: None) -> None:
        self._host, self._done = host, done
        self._thread = ThreadPoolExecutor(1, "loader")
        self._reading: Future[dict[str, Tensor]] | None = None
        self._version = 0  # that was begun last

    def begin(self, version: int, file: Path) -> None:
        """Read this file, unless another one is being read (then say it again later) or it was the last one."""
        if self._reading is None and version != self._version:
            self._version = version
            self._reading = self._thread.submit(self._host.read, file)
            self._reading.add_done_callback(lambda _: self._done())

    def take(self, timeout: float = 0.0) -> tuple[int, dict[str, Tensor]] | None:
        """What was read, once, after at most `timeout` seconds. Raises what reading it raised, but for a file that is
        gone already: then newer ones have come."""
        reading = self._reading
        if reading is None or not wait([reading], timeout).done:
            return None
        self._reading = None
        try:
            return self._version, reading.result()
        except FileNotFoundError:
            log.warning("weights %d are gone already; the next ones will do", self._version)
            return None

    def close(self) -> None:
        self._thread.shutdown()


class LocalSource:
    """Answers a RemotePolicy from inside the actor's own process: the weights come over the wire, the rest is the same
    as in the inference process."""

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
        """The answer with the newest weights that have been read, once; else None, after `timeout` seconds."""
        deadline = time.monotonic() + max(0.0, timeout)
        if (newest := self.client.weights(self.host.version)) is not None:
            self._loader.begin(*newest)
        if (loaded := self._loader.take(0.0 if self.host.version else max(0.0, timeout))) is not None:
            self.host.swap(*loaded)
        if not self.host.version or self._question is None:
            self.client.wait(max(0.0, deadline - time.monotonic()))
            return None
        question, self._question = self._question, None
        act = self.host.answer([Question(b"", question)])[0]
        arrays = dict(act.arrays)
        return Answer(act.step, act.version, arrays.pop("action"), arrays)

    def forget(self) -> None:
        self._question = None


class InferenceServer:
    """Answers InferenceRequest on `address`, with the weights in the folder `weights`.

    The thread that calls `run` does all but warming up, swapping weights in (another thread, one job after the other)
    and reading a file (the loader's). What comes while it computes a batch lies in the socket and is heard after it,
    when of one actor's questions the latest counts. A batch begins when everybody who asked within the last second is
    in it, or when its first question has waited for `window` seconds.
    """

    def __init__(
        self, host: PolicyHost, weights: Path, address: str, *, window: float, keys: Path | None = None
    ) -> None:
        """Raises ConfigError when it may not, or cannot, listen on `address`; `keys` as the server's."""
        self.host, self.weights, self.window = host, weights, window
        self._access = AccessControl(address, keys, option="inference_port")
        self._socket = self._access.socket
        self._woken = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller = zmq.Poller()
        for polled in (self._woken, *self._access.polled):
            self._poller.register(polled, zmq.POLLIN)
        self._policy = ThreadPoolExecutor(1, "policy")
        self._loader = Loader(host, self._wake)
        self._job: Future[None] | None = None  # what the policy's thread is doing: meanwhile nothing is answered
        self._loaded: tuple[int, dict[str, Tensor]] | None = None  # to be swapped in
        self._waiting: dict[bytes, Question] = {}  # the latest of each actor; who has waited longest comes first
        self._first = 0.0  # when the first of them came
        self._asked: dict[bytes, float] = {}  # when each actor asked last
        self._replaced = 0  # questions whose asker asked again before they were begun
        self._seconds: deque[float] = deque(maxlen=COUNTED)  # from a question's coming, at worst, to its answer's going
        self._sizes: deque[int] = deque(maxlen=COUNTED)  # of batches

    def run(self, newest: Callable[[], dict[str, Any]], stopping: Callable[[], bool]) -> None:
        """Answer until `stopping()`; `newest`, called at every turn, tells which weights are valid ({version, sha256}
        or empty). Raises what ended the work of another thread."""
        self._work(self.host.warm_up, MOST)
        while not stopping():
            if (self._woken, zmq.POLLIN) in self._poller.poll(self._patience()):
                os.eventfd_read(self._woken)
            self._access.turn()
            self._hear(time.monotonic())
            self._finish()
            self._load(newest())
            if self._job is None:
                self._begin()

    def report(self) -> dict[str, Any]:
        """For the heartbeat: the version that acts, and of the last answers the median and the 99th percentile of the
        time from question to answer, in ms, and how many a batch had."""
        report: dict[str, Any] = {"version": self.host.version}
        if self._seconds:
            p50, p99 = np.quantile(self._seconds, (0.5, 0.99)) * 1e3
            batch = sum(self._sizes) / len(self._sizes)
            report |= {"p50_ms": round(p50, 2), "p99_ms": round(p99, 2), "batch": round(batch, 2)}
        return {**report, "replaced": self._replaced, **(self._access.report if self._access.refused else {})}

    def close(self) -> None:
        """End the threads, after what they are at, and the sockets."""
        self._policy.shutdown(cancel_futures=True)
        self._loader.close()
        self._access.context.destroy(linger=0)
        os.close(self._woken)

    def _wake(self) -> None:
        os.eventfd_write(self._woken, 1)

    def _patience(self) -> int:
        """How many ms nothing has to be done if nothing comes."""
        if self._job is not None or not self._waiting or not self.host.version:
            return TURN
        return min(TURN, max(0, math.ceil((self._first + self.window - time.monotonic()) * 1000)))

    def _hear(self, since: float) -> None:
        """Take the questions that have come and can be answered; the first of them may have come at `since`."""
        for _ in range(HEARD):
            if not (came := received(self._socket)):
                break
            identity, *frames = came
            if (answer := self._heard(identity, frames, since)) is not None:
                send(self._socket, identity.bytes, answer)

    def _heard(self, identity: zmq.Frame, frames: Sequence[zmq.Frame], now: float) -> m.Message | None:
        """Take one message; what is wrong with it is counted, and is the answer."""
        owner, message = None, None
        try:
            if (owner := self._access.admit(identity)) is None:
                return None
            message = m.decode([frame.buffer for frame in frames])
            check_role(message, owner)
            if isinstance(message, m.Hello):
                return self._welcome(message, owner)
            if not isinstance(message, m.InferenceRequest):
                raise MessageError(f"{type(message).__name__} is not for the inference process")
            self.host.check(message)
            self._put(Question(identity.bytes, message, now))
        except (MessageError, TypeError, ValueError) as error:
            self._access.blame(identity, owner, error)
            return m.Failed("Refused", str(error), final=isinstance(message, m.Hello))
        except RetakeError as error:
            return m.Failed(type(error).__name__, str(error), final=True)
        return None

    def _welcome(self, hello: m.Hello, owner: KeyOwner) -> m.Welcome:
        check_hello(hello, owner, run=hello.run)
        return m.Welcome(hello.run, 0, 0, [], self.host.spec.to_dict(), "", asdict(m.StateUpdate({}, {})))

    def _put(self, question: Question) -> None:
        self._first = self._first if self._waiting else question.came
        self._replaced += question.actor in self._waiting
        self._waiting[question.actor] = question  # in the place of an earlier one
        self._asked[question.actor] = question.came

    def _load(self, notice: Mapping[str, Any]) -> None:
        try:
            self._loaded = self._loader.take() or self._loaded
        except ConfigError as error:
            log.info("%s", error)
        if notice:
            self._loader.begin(notice["version"], path(self.weights, notice["sha256"]))

    def _begin(self) -> None:
        """Do what is next, if anything is: newer weights before a batch."""
        if self._loaded is not None:
            loaded, self._loaded = self._loaded, None
            self._work(self.host.swap, *loaded)
        elif self._waiting and self.host.version and self._is_gathered(time.monotonic()):
            self._answer([self._waiting.pop(actor) for actor in list(self._waiting)[:MOST]])

    def _work(self, job: Callable[..., None], *arguments: Any) -> None:
        self._job = self._policy.submit(job, *arguments)
        self._job.add_done_callback(lambda _: self._wake())

    def _answer(self, batch: Sequence[Question]) -> None:
        begin = time.monotonic()
        for question, answer in zip(batch, self.host.answer(batch), strict=True):
            self._socket.send_multipart([question.actor, *wire.joined(m.encode(answer))], zmq.NOBLOCK)
            self._seconds.append(time.monotonic() - question.came)
        self._sizes.append(len(batch))
        self._hear(begin)

    def _is_gathered(self, now: float) -> bool:
        self._asked = {actor: last for actor, last in self._asked.items() if last > now - RECENT_S}
        return self._waiting.keys() >= self._asked.keys() or now >= self._first + self.window

    def _finish(self) -> None:
        """Raises what ended the work of the policy's thread, but for weights that do not fit."""
        if self._job is not None and self._job.done():
            job, self._job = self._job, None
            try:
                job.result()
            except ConfigError as error:
                log.info("%s", error)
