"""Records CUDA graphs for fast inference: a function's kernels, once for each input shape, and launched together.

A chunk of PI0 takes thousands of kernels, most of which are done sooner than a CPU launches them. A recording that is
wrong says nothing: it may be empty, and repeat one answer for ever. So each recording is tried before it is used.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from serl_launcher.acting.device import Recorder, is_out_of_memory

log = logging.getLogger(__name__)

Inputs = Mapping[str, Tensor]
TOLERANCE = 0.05  # of the difference between two answers; the kernels are the same, but may add in another order


@dataclass(frozen=True, slots=True)
class Recording:
    """The kernels of one shape. They read `inputs` and `noise`, and write `result`; others may write there, too."""

    replay: Callable[[], None]
    inputs: dict[str, Tensor]
    noise: Tensor
    result: Tensor

    def __call__(self, inputs: Inputs, noise: Tensor) -> Tensor:
        for name, tensor in inputs.items():
            self.inputs[name].copy_(tensor)
        self.noise.copy_(noise)
        self.replay()
        return self.result.clone()  # the next replay writes there again, also that of another shape


class Graphs:
    """`function(inputs, noise) -> tensor`, without a gradient, that computes on one device and never looks at what it
    computes. What else it reads (weights) is read where it was at the first call of a shape: change it in place.

    One row is recorded in a memory pool of its own, all other shapes in another: begin with the largest of them.
    A recording that fails, or that answers otherwise than the function, turns recordings off: then the function runs.
    Raises torch.OutOfMemoryError if memory is lacking, also from a recording.
    """

    def __init__(self, function: Callable[[Inputs, Tensor], Tensor], device: Recorder) -> None:
        self._function, self._device = function, device
        self._recorded: dict[object, Recording] = {}
        self._of_one, self._of_more = device.pool(), device.pool()
        self.is_on = True

    @torch.no_grad()
    def __call__(self, inputs: Inputs, noise: Tensor) -> Tensor:
        shape = (noise.shape, *((name, tensor.shape, tensor.dtype) for name, tensor in inputs.items()))
        if self.is_on and shape not in self._recorded:
            self._add(shape, inputs, noise)
        return self._recorded[shape](inputs, noise) if self.is_on else self._function(inputs, noise)

    def _add(self, shape: object, inputs: Inputs, noise: Tensor) -> None:
        try:
            self._recorded[shape] = self._record(inputs, noise)
            reason = self._wrong(self._recorded[shape])
        except RuntimeError as error:
            if is_out_of_memory(error):
                self._recorded.pop(shape, None)
                raise torch.OutOfMemoryError("a CUDA graph was not recorded") from error
            reason = f"a recording failed ({str(error).partition(chr(10))[0]})"
        if reason:
            log.warning("CUDA graphs are off: %s. The policy answers without them, and takes longer", reason)
            self.is_on = False
            self._recorded.clear()
        self._device.release()  # what recording and trying took beside the pool

    def _record(self, inputs: Inputs, noise: Tensor) -> Recording:
        held, held_noise = {name: tensor.clone() for name, tensor in inputs.items()}, noise.clone()
        pool = self._of_one if len(next(iter(held.values()))) == 1 else self._of_more
        replay, result = self._device.record(lambda: self._function(held, held_noise), pool)
        return Recording(replay, held, held_noise, result)

    def _wrong(self, recording: Recording) -> str:
        """Say how the replays of two different inputs differ from the function; empty if they do not."""
        asked = [_other(recording, seed) for seed in (1, 2)]
        expected = [self._function(*each) for each in asked]
        replayed = [recording(*each) for each in asked]
        apart = float((expected[0] - expected[1]).abs().max())
        errors = [float((there - here).abs().max()) for there, here in zip(replayed, expected, strict=True)]
        if apart > 0 and all(error <= TOLERANCE * apart for error in errors):  # False for NaN
            return ""
        return (
            f"two inputs replayed for {len(recording.noise[0])} rows are off by {errors[0]:.3g} and {errors[1]:.3g}, "
            f"where the policy's own answers are {apart:.3g} apart"
        )


def _other(recording: Recording, seed: int) -> tuple[dict[str, Tensor], Tensor]:
    """Return inputs of the same shape and other values. Numbers of words stay, because an embedding bounds them."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point():
            return torch.randn(tensor.shape, generator=generator).to(tensor)
        if tensor.dtype == torch.uint8:
            return torch.randint(256, tensor.shape, generator=generator, dtype=torch.uint8).to(tensor.device)
        return tensor.clone()

    return {name: drawn(tensor) for name, tensor in recording.inputs.items()}, drawn(recording.noise)
