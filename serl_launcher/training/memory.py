"""Estimates the memory that training will need (parameters, optimiser, batch), before any of it is taken.

It makes each of the algorithm's updates, and counts the tensors that are alive. A small algorithm does so with one row
and with two; the need of a batch follows from them. A large one is built of tensors that have a shape and no memory
(PyTorch's FakeTensorMode, whose import takes a second). Such tensors have no values, so an update that asks for a value
(`.item()`, `.numpy()`, an `if` on a tensor) cannot be counted. The estimate says so and leaves that update out; the run
goes on. An update that is marked as `uncounted` is left out in either case.
"""

import logging
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from serl_client.errors import ConfigError
from serl_client.spec import Spec
from torch import Tensor, nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from serl_launcher.algorithms.base import Algorithm
from serl_launcher.optim.optimizer import Optimizer
from serl_launcher.replay.batches import blank
from serl_launcher.replay.derived import prefixed
from serl_launcher.training.encoders import backbones, features

log = logging.getLogger(__name__)

# Bytes of weights and copies below which an algorithm is small. With so many, two rows take 0.2 s and 126 MB; shapes
# alone take 0.7 s and 88 MB, mostly for the import. Four times as many take 0.7 s either way (SFT of an MLP, one core).
SMALL = 64 << 20
SHARE = 0.95  # of what is free may be taken: an allocator wastes some
GROUP = Path("/sys/fs/cgroup")
LIMITS = ("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes")


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes of one rank: the `weights` that are trained, others (`copies`: averages, targets, frozen parts),
    `gradients`, what the `optimizer` keeps, and `activations` of one part of a batch at the worst moment. On a GPU
    also copies of the weights that are `published`, and what CUDA and NCCL take (`context`). On a CPU also the copies
    from which weights and checkpoints are written (`staged`). With several ranks also what these send each other at
    once (`exchanged`)."""

    weights: int
    copies: int
    gradients: int
    optimizer: int
    activations: int
    published: int = 0
    context: int = 0
    staged: int = 0
    exchanged: int = 0

    @property
    def total(self) -> int:
        return sum(asdict(self).values())

    def __str__(self) -> str:
        return f"{said(self.total)} of memory for each rank ({parts(self)})"


def check_built(make: Callable[[], Algorithm], processes: int) -> None:
    """Raise ConfigError if this machine's memory is too small for so many processes to build the algorithm."""
    size = processes * _size(make)
    if size > SHARE * (there := free("cpu", 1)):
        raise ConfigError(
            f"the weights and their copies alone take {said(size)} of this machine's memory, of which {said(there)} "
            "are free: choose a smaller policy, or fewer ranks"
        )


def needed(
    make: Callable[[], Algorithm], spec: Spec, batch_size: int, ranks: int, stage: int,
    batches: Mapping[str, int] = MappingProxyType({}),
) -> Need:  # fmt: skip
    """Return what training takes of each rank, with batches of `batch_size` rows for all ranks together.

    stage: ZeRO's, of the largest network; 0: no sharding. batches: {update: rows} where these differ from `batch_size`.
    """

    def rows(name: str, optimizers: list[Optimizer]) -> int:
        return _part(optimizers, batches.get(name, batch_size) // ranks)

    if _size(make) < SMALL:
        _, _, one = _counted(make, spec, lambda *_: 1)
        algorithm, optimizers, two = _counted(make, spec, lambda *_: 2)
        most = {name: one[name] + (two[name] - one[name]) * (rows(name, optimizers) - 1) for name in one}
    else:
        with _shapes():
            algorithm, optimizers, most = _counted(make, spec, rows)
    activations = max(most.values(), default=0)
    trained = {id(weight): weight for each in optimizers for weight in each.parameters.values()}
    largest = max((_bytes(optimizer.parameters.values()) for optimizer in optimizers), default=0)
    whole = _bytes(trained.values())

    def spread(size: int, beginning: int) -> int:
        return size - largest * (ranks - 1) // ranks if ranks > 1 and stage >= beginning else size

    frozen = sum({each.words: each.nbytes for each in backbones(algorithm).values()}.values())
    masters = largest // ranks if ranks > 1 and stage else 0  # DeepSpeed has its own
    return Need(
        weights=spread(whole, 3), copies=_bytes(algorithm.parameters()) - whole + frozen, gradients=spread(whole, 2),
        optimizer=spread(whole, 1) + spread(whole, 1) + masters, activations=activations,
    )  # fmt: skip


def check(need: Need, free: int, device: str) -> None:
    """Raise ConfigError, which says what to change, if a rank needs more than `free` bytes."""
    if need.total <= SHARE * free:
        return
    changes = ["a smaller batch_size, or a larger accumulation of the optimizer", "policy.checkpointing=true"]
    if need.activations < need.total - need.activations:
        less = "a policy that trains less (policy=pi0_expert, policy=pi0_lora)"
        changes = [less, "sharding=zero3 on several ranks", *changes]
    raise ConfigError(f"training takes {need}, and {said(free)} are free on {device}. What helps: {'; '.join(changes)}")


def free(device: str, ranks_here: int) -> int:
    """Bytes that one of the ranks on this machine may take."""
    if device != "cpu":
        return torch.cuda.mem_get_info(device)[0]
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    return min([available, *_limits()]) // ranks_here


def _limits() -> list[int]:
    """What the control group of this process leaves, where it has a limit."""
    for most, used in LIMITS:
        try:
            return [int((GROUP / most).read_text()) - int((GROUP / used).read_text())]
        except (OSError, ValueError):  # no such group, or `max`
            continue
    return []


def _counted(
    make: Callable[[], Algorithm], spec: Spec, rows_of: Callable[[str, list[Optimizer]], int]
) -> tuple[Algorithm, list[Optimizer], dict[str, int]]:
    """(the algorithm, its optimisers, {update: bytes of activations of a batch with `rows_of(update, optimisers)` rows}
    )."""
    algorithm = make()
    optimizers = list(algorithm.optimizers.values())
    rows = {name: rows_of(name, optimizers) for name in algorithm.windows}
    made = {**prefixed(algorithm.derived), **features(algorithm, spec)}
    for optimizer in optimizers:
        optimizer.accumulation = 1
        for weight in optimizer.parameters.values():
            weight.register_post_accumulate_grad_hook(_forget)
    most = {}
    for name, window in algorithm.windows.items():
        if getattr(getattr(algorithm, name), "is_uncounted", False):
            log.info("the memory that %s takes is not counted", name)
            continue
        batch = blank(spec, window, rows[name], made)
        with _Alive([*algorithm.parameters(), *algorithm.buffers()]) as alive:
            try:
                getattr(algorithm, name)(batch)
            except RuntimeError as error:
                log.warning("the memory that %s takes is not counted: %s", name, str(error).partition("\n")[0])
        most[name] = alive.most
    return algorithm, optimizers, most


def _part(optimizers: list[Optimizer], rows: int) -> int:
    """How many of a rank's rows are in its memory at once."""
    return max(1, rows // min((optimizer.accumulation for optimizer in optimizers), default=1))


def _size(make: Callable[[], Algorithm]) -> int:
    """The bytes of all weights, found without any of them."""
    return _bytes(hollow(make).parameters())


def hollow(make: Callable[[], Algorithm]) -> Algorithm:
    """Build the algorithm on `meta`: its weights have a shape and no memory."""
    with torch.device("meta"), _Unfilled():
        return make()


class _Unfilled(TorchFunctionMode):
    """Leaves out the random numbers of new weights: on `meta` they only import PyTorch's compiler."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        fills = function in (Tensor.uniform_, Tensor.normal_) or getattr(function, "__module__", "") == "torch.nn.init"
        return (args or tuple((kwargs or {}).values()))[0] if fills else function(*args, **(kwargs or {}))


def _forget(weight: Tensor) -> None:
    """Gradients are counted apart; a step without any leaves the optimiser without a state."""
    weight.grad = None


@contextmanager
def _shapes() -> Iterator[None]:
    module: Any = nn.Module
    moves, constants = module.to, fake_tensor.CONSTANT_NUMEL_LIMIT
    with _Shapes(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")  # by copy.deepcopy
        module.to = lambda self, *_, **__: self  # peft moves its layers, and PyTorch cannot swap such weights
        fake_tensor.CONSTANT_NUMEL_LIMIT = 0  # a tensor of one number keeps its value otherwise, and cannot be copied
        try:
            yield
        finally:
            nn.Module.to, fake_tensor.CONSTANT_NUMEL_LIMIT = moves, constants


class _Shapes(FakeTensorMode):
    """Tensors with a shape and no memory; an algorithm that copies its networks copies not this, too."""

    def __deepcopy__(self, memo: Any) -> "_Shapes":
        return self


class _Alive(TorchDispatchMode):
    """Counts the bytes of the tensors that operations made and that are still there; `most` is the largest number.
    `before` are tensors that do not count."""

    def __init__(self, before: Iterable[Tensor]) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known: dict[int, Any] = {tensor.untyped_storage()._cdata: None for tensor in before}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        return made

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._known:
            self._known[key] = weakref.ref(storage, lambda _: self._gone(key, size))
            self.now += size
            self.most = max(self.most, self.now)

    def _gone(self, key: int, size: int) -> None:
        del self._known[key]
        self.now -= size


def _bytes(weights: Any) -> int:
    return sum(weight.numel() * weight.element_size() for weight in {id(weight): weight for weight in weights}.values())


def parts(need: Any) -> str:
    """Say the bytes in the fields of a dataclass, without those that are zero."""
    return ", ".join(f"{name} {said(size)}" for name, size in asdict(need).items() if size)


def said(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"
