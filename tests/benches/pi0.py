"""What the benches of PI0 share: a robot and its options, clocks and memory, what PyTorch counts, and what the machine
does at most while they run."""

import argparse
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig
from serl_client.errors import ConfigError
from serl_client.spec import Feature, Spec
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from serl_launcher.config import composed

from .paired import JSON, Figure, option, processor

CONFIG = Path(__file__).resolve().parents[2] / "config"
CAMERA, STATE = "observation.images.cam_", "observation.state"
JOINTS = 7  # numbers of the state and of an action; the policy computes with zeros to its own width, whatever they are
TASK = "lift the block"
SIDES = {"cuda": 8192, "cpu": 1024}  # of the square matrices that are multiplied
SIZES = {"cuda": 2**30, "cpu": 2**28}  # bytes that are copied


def options(rounds: int, **own: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The options of a bench: its `own`, and those that all benches of PI0 have."""
    return {
        **{f"--{name}": more for name, more in own.items()},
        "--policy": option("pi0", "pi0, pi0_tiny, pi0_expert or pi0_lora (pi0)"),
        "--cameras": option(3, "how many (3)"),
        "--rounds": option(rounds, f"how often it is measured ({rounds})"),
        **JSON,
        "words": {"nargs": "*", "help": "for the config: policy.horizon=20 threads=2 device=cpu"},
    }


def configured(options: argparse.Namespace) -> DictConfig:
    """The config of a learner that imitates with this policy. Raises ConfigError where that is no PI0."""
    config = composed(CONFIG, (f"policy={options.policy}", "algo=rejection", *options.words))
    if "gemma" not in config.policy:
        raise ConfigError(f"--policy {options.policy} is no PI0: say pi0, pi0_tiny, pi0_expert or pi0_lora")
    torch.set_num_threads(config.threads)
    torch.manual_seed(config.seed)
    return config


def robot(config: DictConfig, cameras: int) -> Spec:
    """An arm with that many cameras, whose images have the size that the policy reads."""
    side, bounds = config.policy.vision.image, np.ones(JOINTS)
    images = {f"{CAMERA}{i}": Feature((side, side, 3), "uint8") for i in range(cameras)}
    return Spec({**images, STATE: Feature((JOINTS,))}, Feature((JOINTS,), low=-bounds, high=bounds), fps=30.0)


def counted(call: Callable[[], Any]) -> int:
    """FLOPs of a call as PyTorch counts them: matrix products, those of attention included."""
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        call()
    return counter.get_total_flops()


# -- the machine
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

    def figures(self) -> Iterator[Figure]:
        on_gpu = self._device.type == "cuda"
        name = (
            torch.cuda.get_device_name(self._device) if on_gpu else f"{processor()}, {torch.get_num_threads()} threads"
        )
        yield Figure(f"a big matrix product in {self._precision} on {name}", self.flops, "FLOP/s")
        yield Figure("a big copy", self.bytes, "B/s")


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
