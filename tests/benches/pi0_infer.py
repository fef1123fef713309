"""How fast PI0 answers: latency and throughput beside the floor that its sizes and this machine set.

Everything that is compared is measured in turn, again and again, and so are the ceilings that the floor comes from: a
big matrix product (FLOP/s) and a big copy (bytes/s). Each answer is made as the inference process makes it, from
arrays in memory to arrays in memory. The ways are
    eager              the policy as it is
    compiled           its layers compiled, and on a GPU the whole as one CUDA graph; elsewhere with --compile
    one prefix         several samples of one row; beside it are as many rows with a sample each
Nothing of it was ever run on a GPU.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from serl_client import messages as m
from serl_client.spec import Spec
from torch import Tensor

from serl_launcher.acting.device import Recorder, opened
from serl_launcher.acting.graphs import Graphs
from serl_launcher.acting.host import PolicyHost, Question
from serl_launcher.policies.pi0 import PI0
from serl_launcher.training import memory
from serl_launcher.training.build import build, device_of
from serl_launcher.types import Observation

from .paired import Figure, option, quantiles
from .pi0 import TASK, Ceilings, configured, counted, forget_peak, options, peak, robot, seconds

WARM = 3  # runs before it counts
EACH_STEP = ("expert.", "action_")  # weights that every step reads, by the beginning of their names
Chunks = Callable[[Observation, Tensor], Tensor]  # as HeadPolicy.chunks


@dataclass(frozen=True)
class Work:
    """FLOPs of one row, and bytes of weights: `once` for all steps of its samples, and for each `step` of one."""

    once: int
    step: int
    once_bytes: int
    step_bytes: int
    kept: int  # bytes of one row's keys and values, which each step reads
    steps: int

    @classmethod
    @torch.no_grad()
    def of(cls, policy: PI0, spec: Spec) -> "Work":
        device = policy.frequencies.device
        seen = {name: torch.from_numpy(array)[None].to(device) for name, array in question(spec, 0).arrays.items()}
        prepared = policy.prepared(seen, [TASK])
        prefix = policy.condition(prepared)
        chunk, time = torch.zeros(1, policy.horizon, policy.width, device=device), torch.ones(1, 1, device=device)
        sizes = {
            name: weight.numel() * policy.precision.itemsize for name, weight in policy.named_parameters()
            if "embed_tokens" not in name
        }  # fmt: skip
        step_bytes = sum(size for name, size in sizes.items() if name.startswith(EACH_STEP))
        return cls(
            counted(lambda: policy.condition(prepared)), counted(lambda: policy.velocity(chunk, time, prefix)),
            sum(sizes.values()) - step_bytes, step_bytes,
            sum(part.nbytes for layer in prefix.layers for part in layer), policy.head.passes,
        )  # fmt: skip

    def flops(self, rows: int = 1, samples: int = 1) -> int:
        """Those of `samples` chunks for each of so many rows."""
        return rows * (self.once + samples * self.steps * self.step)

    def floor(self, flops: float, bandwidth: float, rows: int = 1, samples: int = 1) -> float:
        """Seconds that this takes at least at so many FLOP/s and bytes/s: the prefix and then each step has to compute,
        and has to read its weights; a step reads the keys and values of the prefix, too."""
        step = max(rows * samples * self.step / flops, (self.step_bytes + rows * self.kept) / bandwidth)
        return max(rows * self.once / flops, self.once_bytes / bandwidth) + self.steps * step


@dataclass
class Case:
    """One way to make `samples` chunks for each of so many `rows`, and what was measured of it."""

    way: str
    rows: int
    samples: int
    call: Callable[[], Any]
    times: list[float] = field(default_factory=list)
    peak: int = 0

    def measure(self, device: torch.device) -> None:
        forget_peak(device)
        self.times.append(seconds(self.call, device))
        self.peak = max(self.peak, peak(device))

    def figures(self, work: Work, ceilings: Ceilings) -> Iterator[Figure]:
        (p50, p99), name = quantiles(self.times), f"{self.way}, rows {self.rows}, samples {self.samples}"
        floor = work.floor(ceilings.flops, ceilings.bytes, self.rows, self.samples)
        yield Figure(f"{name}: p50", p50 * 1e3, "ms", f"the floor ({floor * 1e3:.3g})", p50 / floor)
        yield Figure(f"{name}: p99", p99 * 1e3, "ms")
        yield Figure(f"{name}: chunks", self.rows * self.samples / p50, "/s")
        yield Figure(f"{name}: work", work.flops(self.rows, self.samples) / 1e12, "TFLOP")
        yield Figure(f"{name}: peak memory", self.peak / 1e9, "GB")


OPTIONS = options(
    100,
    batch=option([1, 8, 32], "rows of one answer (1 8 32)"),
    samples=option(8, "chunks of one prefix (8)"),
    compile={"action": argparse.BooleanOptionalAction, "help": "(on a GPU)"},
)


def measure(folder: Path, options: argparse.Namespace) -> Iterator[Figure]:
    config = configured(options)
    spec, device = robot(config, options.cameras), torch.device(device_of(config))
    memory.check_built(lambda: build(config, spec), 1)
    host = PolicyHost(build(config, spec), spec, str(device))
    policy: PI0 = host.acting  # type: ignore[assignment]
    work, cases, ceilings = Work.of(policy, spec), made(options, host, policy), Ceilings(device, policy.precision)
    for case in cases:
        for _ in range(WARM):
            case.call()
    for _ in range(options.rounds):
        ceilings.measure()
        for case in cases:
            case.measure(device)
    yield from ceilings.figures()
    for case in cases:
        yield from case.figures(work, ceilings)


def made(options: argparse.Namespace, host: PolicyHost, policy: PI0) -> list[Case]:
    """What is compared."""
    on_gpu = host.device.type == "cuda"
    eager: Chunks = torch.compiler.set_stance("force_eager")(partial(PI0.chunks, policy))
    shared: Chunks = partial(several, policy, options.samples)
    ways: dict[str, Chunks] = {"eager": eager}
    if on_gpu if options.compile is None else options.compile:
        if not on_gpu:
            policy.compile_layers()
        ways["compiled"] = policy.chunks
        recorder = opened(str(host.device))
        shared = Graphs(shared, recorder) if isinstance(recorder, Recorder) else shared
    rows = sorted({1, options.samples, *options.batch})
    for count in rows:
        host.warm_up(1 << (count - 1).bit_length())
    cases = [Case(way, count, 1, answering(host, chunks, count)) for way, chunks in ways.items() for count in rows]
    return [*cases, Case("one prefix", 1, options.samples, answering(host, shared, 1))]


def answering(host: PolicyHost, chunks: Chunks, rows: int) -> Callable[[], list[m.InferenceResponse]]:
    """The host's answer to so many questions, its chunks made in this way."""
    questions = [Question(b"", question(host.spec, i)) for i in range(rows)]

    def answer() -> list[m.InferenceResponse]:
        host.acting.chunks = chunks  # type: ignore[assignment]
        return host.answer(questions)

    return answer


def question(spec: Spec, seed: int) -> m.InferenceRequest:
    """What an actor asks: images and a state that are random."""
    generator = np.random.default_rng(seed)
    arrays = {
        name: generator.integers(0, 256, feature.shape).astype(feature.dtype)
        for name, feature in spec.observation.items()
    }
    return m.InferenceRequest(0, seed, True, True, TASK, arrays)


def several(policy: PI0, samples: int, prepared: Observation, noise: Tensor) -> Tensor:
    """So many chunks of each row from one prefix, of which the first is answered."""
    return PI0.chunks(policy, prepared, noise.expand(samples, *noise.shape[1:]))[:1]
