"""CUDA graphs: the kernels of a function, recorded once for each shape of its inputs and launched together.

A chunk of PI0 takes thousands of kernels, most of which are done sooner than a CPU launches them. Never run on a GPU.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

Inputs = Mapping[str, Tensor]
BEFORE = 3  # runs before a recording, in which libraries choose their kernels and compilers compile


class Graphs:
    """`function(inputs, noise) -> tensor`, without a gradient, that computes on one CUDA device and never looks at what
    it computes. What else it reads (weights) is read where it was at the first call of a shape: change it in place."""

    def __init__(self, function: Callable[[Inputs, Tensor], Tensor]) -> None:
        self._function = function
        self._recorded: dict[object, tuple[torch.cuda.CUDAGraph, dict[str, Tensor], Tensor, Tensor]] = {}

    @torch.no_grad()
    def __call__(self, inputs: Inputs, noise: Tensor) -> Tensor:
        shape = (noise.shape, *((name, tensor.shape, tensor.dtype) for name, tensor in inputs.items()))
        if shape not in self._recorded:
            self._recorded[shape] = self._record(inputs, noise)
        graph, held, held_noise, result = self._recorded[shape]
        for name, tensor in inputs.items():
            held[name].copy_(tensor)
        held_noise.copy_(noise)
        graph.replay()
        return result.clone()  # the next replay writes there again

    def _record(self, inputs: Inputs, noise: Tensor) -> tuple[torch.cuda.CUDAGraph, dict[str, Tensor], Tensor, Tensor]:
        held, held_noise = {name: tensor.clone() for name, tensor in inputs.items()}, noise.clone()
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(BEFORE):
                self._function(held, held_noise)
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # another thread may load weights meanwhile
            result = self._function(held, held_noise)
        return graph, held, held_noise, result
