"""Answers observations with actions of the newest weights (PolicyHost), in inference or an actor. No socket.

The noise of a decision comes from the seed in the request. So the same weights, observation, task and seed give the
same action in either place. A Loader reads new weights in its own thread while older ones act.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
from serl_client import episode
from serl_client import messages as m
from serl_client.errors import ConfigError, MessageError
from serl_client.limits import Limits
from serl_client.spec import Array, Spec
from torch import Tensor

from serl_launcher.acting.carries import Carries
from serl_launcher.acting.device import Recorder, open_device
from serl_launcher.acting.graphs import Graphs
from serl_launcher.algorithms.base import Algorithm
from serl_launcher.networks import compiler
from serl_launcher.policies.base import Acting
from serl_launcher.store import weights
from serl_launcher.training.finite import not_finite
from serl_launcher.types import Carry, Prefix

log = logging.getLogger(__name__)

MOST = 64  # requests in one batch; fewer where memory is lacking


@dataclass(frozen=True, slots=True)
class Question:
    """One actor's request. `actor`: any bytes that tell connections apart; `came`: its time.monotonic() on arrival.

    owner: name of the key that it came with; "": there are no keys.
    deliver: takes the answer where the actor is no peer of the server's socket. It must not block.
    """

    actor: bytes
    ask: m.InferenceRequest
    came: float = 0.0
    owner: str = ""
    deliver: Callable[["Answer"], None] | None = None


Answer = m.InferenceResponse | m.Failed


class PolicyHost:
    """An algorithm's acting part with some published weights, and one carry per actor.

    It owns the algorithm from then on, and drops what only training needs. Weights have the policy's precision; buffers
    keep theirs. On a GPU the method that the policy names as its `graph` becomes one CUDA graph per power of two, and
    batches are padded to that size. `warm_up` records one size. A batch whose size is not recorded is cut into smaller
    ones. `most`: requests in one batch; it falls when memory is lacking. Chunks that the one under way guides are
    computed apart, without a graph.
    """

    def __init__(self, algorithm: Algorithm, spec: Spec, device: str) -> None:
        algorithm.only_acting()
        self.acting = algorithm.acting
        for part in [each for each in self.acting.modules() if isinstance(each, Acting)]:  # the outer one first
            for weight in part.parameters():
                weight.data = weight.data.to(part.precision)
        self._on = open_device(device)
        self.spec, self.device = spec, self._on.device
        self.algorithm = algorithm.to(self.device).eval()
        self.version, self.most = 0, MOST  # version 0: no weights yet
        recorder = self._on if isinstance(self._on, Recorder) else None
        graph = self.acting.graph if recorder else None
        self.is_static = graph is not None  # only powers of two
        self._most_guided = MOST  # requests in a batch whose chunks are guided; 0: memory is lacking even for one
        self._is_seam_told = False
        self.is_short = False  # True: a batch was cut because its size was not recorded
        self._ready: set[int] = set()  # sizes that are recorded
        if recorder and graph is not None:
            if lacks := compiler.lacking():
                log.warning("the policy's layers are not compiled and answers take longer: %s is missing", lacks)
            else:
                self.acting.compile_layers()
            setattr(self.acting, graph, Graphs(getattr(self.acting, graph), recorder))
        self._layout = {name: tensor.shape for name, tensor in self.acting.published().items()}
        self._carries, self._limits = Carries(), Limits(replace(spec, extras={}))

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
                f"weights file {file.name} is damaged ({error}): nothing to do, the current ones act until the next"
            ) from None
        layout = {name: tensor.shape for name, tensor in tensors.items()}
        if layout != self._layout:
            name = min(name for name, _ in layout.items() ^ self._layout.items())
            there, here = (tuple(each.get(name, ("nothing",))) for each in (layout, self._layout))
            raise _unfit(f"{name} is {there} in {file.name} and {here} here")
        if bad := not_finite(tensors):
            raise ConfigError(
                f"weights file {file.name} is not finite in {bad}: nothing to do, the current ones act until the next"
            )
        return self._on.copies(tensors)  # this reads what load_file has only mapped

    def swap(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Act with these weights from now on. They overwrite the old ones in place, because CUDA graphs point there.

        Raises ConfigError for weights of another policy.
        """
        try:
            with self._on.here():
                self.acting.load_published(tensors)
                self._on.settle()  # the next copies are made where these `tensors` were
        except (RuntimeError, ValueError) as error:
            raise _unfit(str(error).splitlines()[-1].strip()) from None
        self.version = version

    # -- answers
    def check(self, ask: m.InferenceRequest) -> None:
        """Raise MessageError if an observation does not fit the Spec, if the request holds anything else, or a number
        that cannot be.

        An unknown task is refused, too: of such a policy it would be a motion that nobody asked for.
        """
        if self.acting.tasks and ask.task not in self.acting.tasks:
            tasks = ", ".join(map(repr, self.acting.tasks))
            raise MessageError(f"the policy has not learned the task {ask.task!r}; it knows {tasks} (policy.tasks)")
        features, seen = dict(self.spec.observation), self._seen
        if "previous_action" in ask.arrays:
            features["previous_action"] = self.spec.action
        self._check_prefix(ask)
        if strange := ask.arrays.keys() - features.keys() - {"prefix"}:
            raise MessageError(f"the observation has {min(strange)!r}, which is not in the Spec")
        for name, feature in features.items():
            if name not in ask.arrays:
                raise MessageError(f"the observation lacks {name}")
            try:
                feature.check(name, ask.arrays[name], seen if name in self.spec.observation else ())
            except ValueError as error:
                raise MessageError(str(error)) from None
        if broken := self._limits.broken(ask.arrays):
            raise MessageError(f"no action answers to what cannot be: {broken}")

    def _check_prefix(self, ask: m.InferenceRequest) -> None:
        prefix = ask.arrays.get("prefix")
        if prefix is None:
            if ask.committed:
                raise MessageError(f"a question without a prefix has committed=0, not {ask.committed}")
            return
        if self.acting.continues is None:
            raise MessageError(
                f"{type(self.acting).__name__} cannot continue a chunk: start the actor with chunks=async"
            )
        size, most = self.spec.action.shape[0], self.acting.horizon
        if prefix.ndim != 2 or prefix.shape[1] != size or len(prefix) > most or prefix.dtype != np.float32:
            raise MessageError(
                f"prefix should be float32 [1 to {most}, {size}], not {prefix.dtype} {list(prefix.shape)}"
            )
        if not 1 <= ask.committed <= len(prefix):
            raise MessageError(f"committed should be 1 to {len(prefix)}, the rows of the prefix, not {ask.committed}")

    @property
    def _seen(self) -> tuple[int, ...]:
        """The leading sizes of a request's observations."""
        return (self.acting.history,) if self.acting.history > 1 else ()

    @property
    def unrecorded(self) -> list[int]:
        """Return the sizes that `warm_up` has still to record, in the order in which to do so.

        One row is first, so that answers begin early. The others go down from the largest, whose memory they share.
        """
        sizes = [1 << power for power in range(self.most.bit_length()) if self.is_static]
        return sorted(set(sizes) - self._ready, key=lambda size: (size > 1, -size))

    def warm_up(self, size: int) -> None:
        """Record the graphs for batches of `size` requests, a power of two, so that no answer waits for them.

        If memory is lacking, `most` becomes half of that size. Raises torch.OutOfMemoryError if not even one row fits.
        """
        if not self.is_static:
            return
        observed = self.spec.observation.items()
        arrays = {name: np.zeros((*self._seen, *feature.shape), feature.dtype) for name, feature in observed}
        self.is_short = False
        try:
            for explore in (True, False):  # the noise may have another shape where nothing is explored
                question = Question(b"", m.InferenceRequest(0, 0, True, explore, "", arrays))
                self._decide([question] * size, explore, None)
            self._ready.add(size)
        except torch.OutOfMemoryError:
            if size == 1:
                raise
        if size not in self._ready:
            self._lower(size // 2)

    def answer(self, questions: Sequence[Question]) -> list[Answer]:
        """Return one answer per question, in their order: Failed where the policy's numbers are not finite.

        `check` each question before, because a batch cannot be half done.
        """
        for question in questions:
            if question.ask.reset:
                self._carries.forget(question.actor)
        groups: dict[tuple[bool, bool, bool], list[int]] = {}
        for i, question in enumerate(questions):
            guides = self.acting.continues == "guided" and "prefix" in question.ask.arrays  # costs more: apart
            groups.setdefault((question.ask.explore, question.actor in self._carries, guides), []).append(i)
            self._warn_of_seam(question.ask.committed)
        answers: dict[int, Answer] = {}
        known_first = sorted(groups.items(), key=lambda group: not group[0][1])  # a new one may displace what they keep
        for (explore, remembers, guides), members in known_first:
            part = [questions[i] for i in members]
            answered = self._guided(part, explore, remembers) if guides else self._answered(part, explore, remembers)
            answers.update(zip(members, answered, strict=True))
        return [answers[i] for i in range(len(questions))]

    def _answered(self, questions: Sequence[Question], explore: bool, remembers: bool) -> list[Answer]:
        """Answer in as few batches as fit. A batch for which memory is lacking is answered in halves."""
        answers: list[Answer] = []
        while left := questions[len(answers) :]:
            part = left[: self._fitting(len(left))]
            try:
                answers += self._act(part, explore, remembers)
                continue
            except torch.OutOfMemoryError:
                if len(part) == 1:
                    raise
            self._lower(self._size(len(part)) // 2)  # here the error holds no tensor any more
        return answers

    def _guided(self, questions: Sequence[Question], explore: bool, remembers: bool) -> list[Answer]:
        """Answer as `_answered`, apart from the others, whose batches stay as large as they are.

        If memory is lacking for even one chunk, these begin anew from now on, which is `chunks: async`.
        """
        answers: list[Answer] = []
        while (left := questions[len(answers) :]) and self._most_guided:
            part = left[: self._most_guided]
            try:
                answers += self._act(part, explore, remembers)
                continue
            except torch.OutOfMemoryError:
                self._most_guided = len(part) // 2
            self._on.release()
            log.warning("out of memory on %s: at most %d chunks are guided at once", self.device, self._most_guided)
        return answers + (self._answered([_anew(question) for question in left], explore, remembers) if left else [])

    def _warn_of_seam(self, committed: int) -> None:
        """Say once if the actors' delay is more than what the policy has learned to continue."""
        learned = self.acting.max_delay if self.acting.continues == "trained" else committed
        if committed > learned and not self._is_seam_told:
            self._is_seam_told = True
            log.warning(
                "an actor's answers come %d steps late, and the policy learned to continue %d: the arm may jump at the "
                "end of a chunk; train with policy.max_delay=%d", committed, learned, committed,
            )  # fmt: skip

    def _fitting(self, count: int) -> int:
        """Return how many of `count` questions the next batch takes."""
        count = min(count, self.most)
        if not self.is_static or self._size(count) in self._ready:
            return count
        self.is_short = True
        return max((size for size in self._ready if size <= count), default=1)

    def _lower(self, most: int) -> None:
        """Answer at most so many requests in a batch from now on."""
        self._on.release()
        self.most = min(self.most, most)
        self._ready = {size for size in self._ready if size <= most}
        log.warning("out of memory on %s: at most %d requests in a batch from now on", self.device, self.most)

    def _act(self, questions: Sequence[Question], explore: bool, remembers: bool) -> list[Answer]:
        rows = self._padded(questions)
        carry = self._carries.stacked([question.actor for question in rows]) if remembers else None
        arrays, carry, trouble = self._decide(rows, explore, carry)
        begins = carry is not None and not remembers
        answers: list[Answer] = []
        for i, question in enumerate(questions):
            own = {name: array[i] for name, array in arrays.items()}
            if bad := episode.not_finite(own):
                self._carries.forget(question.actor)  # it would keep what is not finite
                why = trouble or f"{bad} of the policy (weights {self.version}) is not finite"
                text = f"step {question.ask.step}: {why}: ask anew"
                answers.append(m.Failed("ServerFailed", text, request=question.ask.request))
                continue
            if carry is not None:
                self._carries.keep(question.actor, question.owner, carry, i)
            asked = question.ask
            answers.append(m.InferenceResponse(asked.step, self.version, own, reset=begins, request=asked.request))
        return answers

    def _decide(self, rows: Sequence[Question], explore: bool, carry: Carry) -> tuple[dict[str, Array], Carry, str]:
        """Return the decisions of these rows, {name: [B, ...]}, the new carry, and why some have none. Remembers
        nothing."""
        asks = [question.ask for question in rows]
        nothing = np.zeros(self.spec.action.shape, self.spec.action.dtype)
        with self._on.here():
            observation = {name: self._stack([ask.arrays[name] for ask in asks]) for name in self.spec.observation}
            previous_action = self._stack([ask.arrays.get("previous_action", nothing) for ask in asks])
            noise = torch.stack([self._noise(ask.seed) for ask in asks]).to(self.device)
            decision, carry = self.algorithm.act(
                observation, previous_action, carry, task=tuple(ask.task for ask in asks), noise=noise, explore=explore,
                **self._prefix(asks),
            )  # fmt: skip
            named = {"action": decision.action, **decision.extras}
            return {name: value.cpu().numpy() for name, value in named.items()}, carry, decision.trouble

    def _prefix(self, asks: Sequence[m.InferenceRequest]) -> dict[str, Prefix]:
        """Return the prefix of a batch as an argument of `act`; nothing if no request has one."""
        if not any("prefix" in ask.arrays for ask in asks):
            return {}
        action = np.zeros((len(asks), self.acting.horizon, *self.spec.action.shape), np.float32)
        left = [len(ask.arrays.get("prefix", ())) for ask in asks]
        for row, ask, count in zip(action, asks, left, strict=True):
            row[:count] = ask.arrays.get("prefix", 0.0)
        committed = torch.tensor([ask.committed for ask in asks])
        parts = (torch.from_numpy(action), committed, torch.tensor(left))
        return {"prefix": Prefix(*(part.to(self.device) for part in parts))}

    def _padded(self, questions: Sequence[Question]) -> list[Question]:
        """Repeat the last question until there are as many as the graph has rows."""
        return [*questions, *[questions[-1]] * (self._size(len(questions)) - len(questions))]

    def _size(self, count: int) -> int:
        """Return how many rows a batch of `count` questions has."""
        return 1 << (count - 1).bit_length() if self.is_static else count

    def _stack(self, arrays: Sequence[Array]) -> Tensor:
        return torch.from_numpy(np.stack([np.asarray(array) for array in arrays])).to(self.device)

    def _noise(self, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(self.acting.noise_shape, generator=generator)


def _anew(question: Question) -> Question:
    """Return the question without the chunk that it would continue."""
    arrays = {name: array for name, array in question.ask.arrays.items() if name != "prefix"}
    return replace(question, ask=replace(question.ask, arrays=arrays, committed=0))


def _unfit(reason: str) -> ConfigError:
    return ConfigError(
        f"the published weights are not of this algorithm and policy ({reason}): "
        "start the actor with the learner's algo= and policy="
    )


class Loader:
    """Reads published weights for a host in its own thread, one file at a time. It calls `done` after each."""

    def __init__(self, host: PolicyHost, done: Callable[[], None] = lambda: None) -> None:
        self._host, self._done = host, done
        self._thread = ThreadPoolExecutor(1, "loader")
        self._reading: Future[dict[str, Tensor]] | None = None
        self._begun = 0, 0  # the version that was begun last, and when its file was written

    def begin(self, version: int, file: Path) -> None:
        """Begin to read this file, unless it was the last one: one that was gone or damaged may be written anew. Does
        nothing while another is being read: call again."""
        if self._reading is None and (begun := (version, weights.written_at(file))) != self._begun:
            self._begun = begun
            self._reading = self._thread.submit(self._host.read, file)
            self._reading.add_done_callback(lambda _: self._done())

    def pop(self, timeout: float = 0.0) -> tuple[int, dict[str, Tensor]] | None:
        """Return (version, weights) once they are read, else None after `timeout` seconds. Returns them only once.

        Raises what `read` raised, but FileNotFoundError: a file is removed only after newer weights were published.
        """
        reading = self._reading
        if reading is None or not wait([reading], timeout).done:
            return None
        self._reading = None
        try:
            return self._begun[0], reading.result()
        except FileNotFoundError:
            log.warning("weights %d are gone already: keeping the current ones until the next", self._begun[0])
            return None

    def close(self) -> None:
        self._thread.shutdown()
