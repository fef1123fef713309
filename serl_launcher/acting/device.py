"""Runs policies on their device: CUDA streams, recorded kernels, copies of new weights; on a CPU all at once.

Streams and graphs belong to the thread's current device, whatever their tensors' device. So each is made and used
inside `here`.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

BEFORE = 3  # runs before a recording, in which libraries choose their kernels and compilers compile
PIECE = 64 << 20  # bytes of the staging memory, because pinned memory is taken from all programs: 3 ms over PCIe 4

Call = Callable[[], Tensor]


@runtime_checkable
class Recorder(Protocol):
    """A device that records kernels."""

    def pool(self) -> Any:
        """Return a new memory pool, which recordings may share: a replay overwrites what another one has left there."""

    def record(self, call: Call, pool: Any) -> tuple[Callable[[], None], Tensor]:
        """Return (what runs the kernels of `call` again, the tensor that it overwrites with their result)."""
        ...

    def release(self) -> None:
        """Give back the memory that is kept for later."""


class Cpu:
    """Does in their order the things that a GPU does on several streams. It is no Recorder."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._staging: Tensor | None = None  # made for the first copy, used by one thread: that of the loader

    @contextmanager
    def here(self) -> Iterator[None]:
        """Make this the thread's current device."""
        yield

    def release(self) -> None:
        """Give back the memory that is kept for later."""

    def settle(self) -> None:
        """Wait for what this thread has begun on the device."""

    def copies(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return copies on this device of tensors on the CPU, once they are whole. Other threads compute meanwhile."""
        with self.here(), self._beside():
            return {name: self._copied(tensor) for name, tensor in tensors.items()}

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """Copy on a stream of its own."""
        yield

    def _pinned(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8)

    def _copied(self, tensor: Tensor) -> Tensor:
        """Copy piece by piece through the staging memory, which a device reads while its other streams compute."""
        made = torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device)
        source, target = (each.reshape(-1).view(torch.uint8) for each in (tensor, made))
        if self._staging is None:
            self._staging = self._pinned(PIECE)
        for begin in range(0, len(source), PIECE):
            piece = source[begin : begin + PIECE]
            staged = self._staging[: len(piece)]
            staged.copy_(piece)
            target[begin : begin + PIECE].copy_(staged, non_blocking=True)
            self.settle()  # the staging memory is written again
        return made


class Cuda(Cpu):
    """One CUDA device, with a stream for recordings and one for copies; a Recorder."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        with self.here():
            self._recordings, self._copies = torch.cuda.Stream(), torch.cuda.Stream()

    @contextmanager
    def here(self) -> Iterator[None]:
        with torch.cuda.device(self.device):
            yield

    def pool(self) -> Any:
        with self.here():
            return torch.cuda.graph_pool_handle()

    def record(self, call: Call, pool: Any) -> tuple[Callable[[], None], Tensor]:
        """See Recorder. Another thread may load weights meanwhile, so only this thread's errors count."""
        with self.here():
            before = torch.cuda.current_stream()
            self._recordings.wait_stream(before)
            # The outer `stream` gives this thread its own stream back also when the end of a recording fails.
            with torch.cuda.stream(self._recordings):
                for _ in range(BEFORE):
                    call()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(
                    graph, pool=pool, stream=self._recordings, capture_error_mode="thread_local"
                ):  # fmt: skip
                    result = call()
            before.wait_stream(self._recordings)

        def replay() -> None:
            with self.here():
                graph.replay()

        return replay, result

    def release(self) -> None:
        with self.here():
            torch.cuda.empty_cache()

    def settle(self) -> None:
        with self.here():
            torch.cuda.current_stream().synchronize()

    @contextmanager
    def _beside(self) -> Iterator[None]:
        with torch.cuda.stream(self._copies):
            yield

    def _pinned(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)


def open_device(device: str) -> Cpu:
    """Return what `device` (`cpu`, `cuda` or `cuda:1`) can do. `cuda` is the thread's current device from then on."""
    found = torch.device(device)
    if found.type != "cuda":
        return Cpu(found)
    return Cuda(found if found.index is not None else torch.device("cuda", torch.cuda.current_device()))


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether memory was lacking: the end of a recording may fail for that, and hide it behind its own error."""
    while error is not None and not isinstance(error, torch.OutOfMemoryError):
        error = error.__cause__ or error.__context__
    return error is not None
