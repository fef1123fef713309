"""Copies tensors into a safetensors file in memory that stays allocated; a thread writes it to disk."""

import json
import math
from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import Tensor

NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


class Staging:
    """Holds copies of tensors as one file of the safetensors format (its README: header's length, header, tensors)."""

    def __init__(self) -> None:
        self._layout: dict[str, tuple[torch.dtype, torch.Size]] = {}
        self._tensors: dict[str, Tensor] = {}  # views of the file
        self._file = torch.empty(0, dtype=torch.uint8)
        self._copies: list[Any] = []  # events of CUDA streams: the copies are there when these are over

    def copy(self, tensors: Mapping[str, Tensor]) -> Self:
        """Copy all tensors as they are now; from a GPU into pinned memory, beside what the GPU does next."""
        self.tensors()  # copies of before are over
        layout = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
        devices = {tensor.device for tensor in tensors.values() if tensor.is_cuda}
        if layout != self._layout:
            self._allocate(layout, pinned=bool(devices))
        for name, tensor in tensors.items():
            self._tensors[name].copy_(tensor.detach(), non_blocking=True)
        self._copies = [torch.cuda.current_stream(device).record_event() for device in devices]
        return self

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return len(self._file)

    def tensors(self) -> Mapping[str, Tensor]:
        """Return the copies, on the CPU. Waits until they are there."""
        for copy in self._copies:
            copy.synchronize()
        return self._tensors

    def data(self) -> memoryview:
        """Return the file's bytes. Waits until the copies are there."""
        self.tensors()
        return self._file.numpy().data

    def holds(self, tensors: Mapping[str, Tensor]) -> bool:
        """Return whether the copies equal these tensors."""
        held = self.tensors()
        return held.keys() == tensors.keys() and all(torch.equal(held[name], tensors[name].cpu()) for name in held)

    def _allocate(self, layout: dict[str, tuple[torch.dtype, torch.Size]], *, pinned: bool) -> None:
        """Lay out the file: the largest types first, so that each tensor is aligned."""
        header, end = {}, 0
        for name, (dtype, shape) in sorted(layout.items(), key=lambda item: (-item[1][0].itemsize, item[0])):
            begin, end = end, end + dtype.itemsize * math.prod(shape)
            header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        head = torch.frombuffer(bytearray(len(text).to_bytes(8, "little") + text), dtype=torch.uint8)
        self._tensors = {}
        self._file = torch.empty(0, dtype=torch.uint8)  # free the old file first
        self._file = torch.empty(len(head) + end, dtype=torch.uint8, pin_memory=pinned)
        self._file[: len(head)] = head
        for name, (dtype, shape) in layout.items():
            begin, end = (len(head) + offset for offset in header[name]["data_offsets"])
            self._tensors[name] = self._file[begin:end].view(dtype).view(shape)
        self._layout = layout
