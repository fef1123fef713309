"""Connects the processes ("ranks") of training on several GPUs or machines; rank 0 leads.

`accelerate launch` starts them and sets in the environment who is who. A process that is alone is rank 0 of one, and
imports nothing for it.
"""

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import msgpack
import torch
from serl_client.errors import ConfigError
from torch import Tensor, distributed, nn

PATIENCE = timedelta(days=30)  # a rank waits that long for its next order, because robots may stand still for days
TENSOR = 1  # msgpack's extension type of a tensor, which is sent beside the message
LONGEST = 2000  # bytes of a refusal


@dataclass(frozen=True, slots=True)
class World:
    """The ranks of a run as one of them sees it.

    device: where this rank computes. orders: the process group for rank 0's messages, always on the CPU.
    """

    rank: int = 0
    size: int = 1
    device: str = "cpu"
    orders: Any = None

    def broadcast(self, tree: Any = None) -> Any:
        """Return rank 0's `tree` on every rank: dicts and lists of tensors and plain data, tensors on the device.

        A rank that is alone gets the same object back.
        """
        if self.size == 1:
            return tree
        mine, sent = self._packed(tree) if self.rank == 0 else (b"", [])
        tree, tensors = self._unpacked(self._message(mine), sent)
        for tensor in tensors:
            self.broadcast_into(tensor)
        return tree

    def scatter(self, trees: Sequence[Any] = ()) -> Any:
        """Return this rank's of rank 0's `trees`, one for each rank. They differ in no tensor's shape and type."""
        packed = [self._packed(tree) for tree in trees]
        every: Any = msgpack.packb([message for message, _ in packed])
        messages = msgpack.unpackb(self._message(every))
        tree, tensors = self._unpacked(messages[self.rank])
        for i, tensor in enumerate(tensors):
            if tensor.numel():
                distributed.scatter(_raw(tensor), [_raw(sent[i]) for _, sent in packed] or None, 0)
        return tree

    def broadcast_into(self, tensor: Tensor) -> None:
        """Overwrite a contiguous tensor on the device with rank 0's."""
        if self.size > 1 and tensor.numel():
            distributed.broadcast(_raw(tensor), 0)

    def mean(self, value: Tensor) -> Tensor:
        """Return the mean over all ranks of a tensor on the device."""
        if self.size == 1:
            return value
        value = value.clone()
        distributed.all_reduce(value)
        return value / self.size

    def least(self, value: Tensor) -> Tensor:
        """Return the least of all ranks of each number of a tensor on the device."""
        if self.size == 1:
            return value
        value = value.clone()
        distributed.all_reduce(value, op=distributed.ReduceOp.MIN)
        return value

    def joined(self, part: Tensor) -> Tensor:
        """Return the equal parts of all ranks on the device, one after the other: [B, ...] -> [ranks B, ...]."""
        if self.size == 1:
            return part
        part = part.detach().contiguous()
        every = [torch.empty_like(part) for _ in range(self.size)]
        distributed.all_gather(every, part)
        return torch.cat(every)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Raise ConfigError on all ranks if one raises it in here; only rank 0's has a text."""
        if self.size == 1:
            yield
            return
        text = ""
        try:
            yield
        except ConfigError as error:
            text = str(error)
        mine = text.encode()[:LONGEST].ljust(LONGEST)
        every = [torch.empty(LONGEST, dtype=torch.uint8) for _ in range(self.size)]
        distributed.all_gather(every, torch.frombuffer(bytearray(mine), dtype=torch.uint8), group=self.orders)
        for rank, other in enumerate(every):
            if text := bytes(other.tolist()).decode(errors="replace").rstrip():
                text = text if rank == 0 else f"rank {rank}: {text}"
                raise ConfigError(text if self.rank == 0 else "")

    def _message(self, mine: bytes) -> bytes:
        length = torch.tensor([len(mine)])
        distributed.broadcast(length, 0, group=self.orders)
        message = torch.frombuffer(bytearray(mine if self.rank == 0 else int(length)), dtype=torch.uint8)
        distributed.broadcast(message, 0, group=self.orders)
        return message.numpy().tobytes()

    def _packed(self, tree: Any) -> tuple[Any, list[Tensor]]:
        """Return a message that describes the tree, and its tensors, on the device."""
        sent: list[Tensor] = []

        def described(value: Any) -> msgpack.ExtType:
            if not isinstance(value, Tensor):
                raise TypeError(f"{type(value)} cannot be sent to other ranks")
            sent.append(value.detach().to(self.device).contiguous())
            return msgpack.ExtType(TENSOR, msgpack.packb([str(value.dtype).removeprefix("torch."), list(value.shape)]))

        return msgpack.packb(tree, default=described), sent

    def _unpacked(self, message: bytes, given: Sequence[Tensor] = ()) -> tuple[Any, list[Tensor]]:
        """Return the tree that a message describes, and its tensors: those `given`, or new ones to be overwritten."""
        tensors: list[Tensor] = []

        def taken(_: int, description: bytes) -> Tensor:
            dtype, shape = msgpack.unpackb(description)
            new = None if given else torch.empty(shape, dtype=getattr(torch, dtype), device=self.device)
            tensors.append(given[len(tensors)] if new is None else new)
            return tensors[-1]

        return msgpack.unpackb(message, ext_hook=taken, strict_map_key=False), tensors


def _raw(tensor: Tensor) -> Tensor:
    return tensor.detach().view(-1).view(torch.uint8)


def join(device: str) -> World:
    """Return the World of this process. device: `cpu`, or `cuda`, where each rank takes its own GPU."""
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        if device.startswith("cuda:"):  # pinned memory would else open a context on GPU 0, too
            torch.cuda.set_device(device)
        return World(device=device)
    if device == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    from accelerate import PartialState

    with quiet():
        state = PartialState(cpu=device == "cpu", backend="gloo" if device == "cpu" else "nccl")
        orders = distributed.new_group(backend="gloo", timeout=PATIENCE)
    own = device if device == "cpu" else str(state.device)
    return World(state.process_index, state.num_processes, own, orders)


@contextmanager
def quiet() -> Iterator[None]:
    """Hide what gloo prints about each group that it makes."""
    sys.stdout.flush()
    screen, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    try:
        yield
    finally:
        os.dup2(screen, 1)
        os.close(screen)
        os.close(nowhere)


def gathered(parameters: Iterable[nn.Parameter]) -> AbstractContextManager[Any]:
    """Make these parameters whole on every rank while it lasts, for reading. Every rank has to call it."""
    shards = [parameter for parameter in parameters if hasattr(parameter, "ds_id")]
    if not shards:
        return nullcontext()
    from deepspeed.runtime.zero import GatheredParameters

    return GatheredParameters(shards)
