"""What the benches measure with: clocks, memory, and what the machine does at most while they run."""

import platform
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

SIDES = {"cuda": 8192, "cpu": 1024}  # of the square matrices that are multiplied
SIZES = {"cuda": 2**30, "cpu": 2**28}  # bytes that are copied


def seconds(call: Callable[[], Any], device: torch.device) -> float:
    """How long a call takes, with all that it leaves the device to do."""
    finish(device)
    begin = time.perf_counter()
    call()
    finish(device)
    return time.perf_counter() - begin


def finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Ceilings:
    """The rates of a big matrix product (FLOP/s, in the precision of what is measured) and of a big copy on the device
    (bytes/s, read and written). Both are measured again and again between the measurements that are compared with
    them; the medians count."""

    def __init__(self, device: torch.device, precision: torch.dtype) -> None:
        self._device, self._precision = device, precision
        self._flops: list[float] = []
        self._bytes: list[float] = []

    def measure(self) -> None:
        side, size = SIDES[self._device.type], SIZES[self._device.type]
        factors = torch.randn(2, side, side, device=self._device).to(self._precision)
        product = torch.empty_like(factors[0])
        self._flops.append(2 * side**3 / self._seconds(lambda: torch.mm(*factors, out=product)))
        source = torch.zeros(size, dtype=torch.uint8, device=self._device)
        copy = torch.zeros_like(source)
        self._bytes.append(2 * size / self._seconds(lambda: copy.copy_(source)))

    def _seconds(self, call: Callable[[], Any]) -> float:
        call()  # the memory is there, and the kernel chosen
        return seconds(call, self._device)

    @property
    def flops(self) -> float:
        return median(self._flops)

    @property
    def bytes(self) -> float:
        return median(self._bytes)

    def figures(self) -> dict[str, float]:
        """{flops per second, bytes per second}."""
        return {"flops": self.flops, "bytes": self.bytes}


def forget_peak(device: torch.device) -> None:
    """Count the peak from here."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        Path("/proc/self/clear_refs").write_text("5")


def peak(device: torch.device) -> int:
    """The most bytes at one time: what tensors had on a GPU, all of this process without one."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def named(device: torch.device) -> str:
    """The device in words."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    name = names[0].partition(": ")[2] if names else platform.machine()
    return f"{name}, threads: {torch.get_num_threads()}"


def scaled(value: float) -> str:
    """Three digits and a prefix: 4.38e12 is `4.38 T`."""
    for prefix, unit in (("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if abs(value) >= unit:
            return f"{value / unit:.3g} {prefix}"
    return f"{value:.3g} "


def said(ceilings: dict[str, float]) -> str:
    """The figures of Ceilings in words."""
    return (
        f"this machine, between these measurements: {scaled(ceilings['flops'])}FLOP/s in a big matrix product, "
        f"{scaled(ceilings['bytes'])}B/s in a big copy"
    )
