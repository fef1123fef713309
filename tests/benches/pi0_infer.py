"""How fast PI0 answers: latency and throughput beside the floor that its sizes and this machine set.

Everything that is compared is measured in turn, again and again, and so are the ceilings that the floor comes from: a
big matrix product (FLOP/s) and a big copy (bytes/s). Each answer is made as the inference process makes it, from
arrays in memory to arrays in memory. The ways are
    eager              the policy as it is
    compiled           its layers compiled, and on a GPU the whole as one CUDA graph; elsewhere with --compile
    no prefix cache    eager, each step computing images and words again, as a simple port does
    one prefix         several samples of one row; beside it are as many rows with a sample each
    lerobot            the PI0 of an installed lerobot, eager, where it runs
Nothing of it was ever run on a GPU.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from serl_client import messages as m
from serl_client.errors import ConfigError
from serl_client.spec import Spec
from torch import Tensor

from serl_launcher.acting.graphs import Graphs
from serl_launcher.acting.host import PolicyHost, Question
from serl_launcher.policies.pi0 import PI0
from serl_launcher.training import memory
from serl_launcher.training.build import build, device_of
from serl_launcher.types import Observation

from .measured import Ceilings, forget_peak, named, peak, said, scaled, seconds
from .paired import option
from .pi0 import TASK, Work, at_least, configured, options, robot

LEROBOT = (1152, 2048, 1024)  # the widths of tower, backbone and expert that it has
WARM = 3  # runs before it counts
Chunks = Callable[[Observation, Tensor], Tensor]  # as FlowMatching.chunks


@dataclass
class Case:
    """One way to make `samples` chunks for each of so many `rows`, and what was measured of it."""

    way: str
    rows: int
    samples: int
    flops: int
    call: Callable[[], Any]
    times: list[float] = field(default_factory=list)
    peak: int = 0

    def measure(self, device: torch.device) -> None:
        forget_peak(device)
        self.times.append(seconds(self.call, device))
        self.peak = max(self.peak, peak(device))

    def figures(self, work: Work, ceilings: Ceilings) -> dict[str, Any]:
        p50, p99 = np.quantile(self.times, (0.5, 0.99))
        floor = work.floor(ceilings.flops, ceilings.bytes, self.rows, self.samples)
        return {
            "way": self.way, "rows": self.rows, "samples": self.samples, "p50_ms": p50 * 1e3, "p99_ms": p99 * 1e3,
            "chunks_per_s": self.rows * self.samples / p50, "flops": self.flops, "floor_ms": floor * 1e3,
            "share": floor / p50, "peak_bytes": self.peak,
        }  # fmt: skip


OPTIONS = options(
    100,
    batch=option([1, 8, 32], "rows of one answer (1 8 32)", type=at_least(1)),
    samples=option(8, "chunks of one prefix (8)", type=at_least(1)),
    steps=option(None, "of the sampler (the policy's)", type=at_least(1)),
    compile={"action": argparse.BooleanOptionalAction, "help": "(on a GPU)"},
)


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Everything, as plain data. Raises ConfigError."""
    config = configured(options, *([] if options.steps is None else [f"policy.steps={options.steps}"]))
    spec, device = robot(config, options.cameras), torch.device(device_of(config))
    memory.check_built(lambda: build(config, spec), 1)
    host = PolicyHost(build(config, spec), spec, str(device))
    policy: PI0 = host.acting  # type: ignore[assignment]
    work = Work.of(config.policy, options.cameras)
    cases = made(options, host, policy, work)
    absent = {}
    try:
        call = lerobot(work, policy, question(spec, 0), device)
        cases.append(Case("lerobot", 1, 1, replace(work, whole=True).inference(), call))
    except ConfigError as error:
        absent["lerobot"] = str(error)
    ceilings = Ceilings(device, policy.precision)
    for case in cases:
        for _ in range(WARM):
            case.call()
    for _ in range(options.rounds):
        ceilings.measure()
        for case in cases:
            case.measure(device)
    return {
        "policy": options.policy, "device": named(device), "precision": str(policy.precision), "rounds": options.rounds,
        "cameras": options.cameras, "image": work.tower.image, "words": work.words, "horizon": work.horizon,
        "steps": work.steps, "ceilings": ceilings.figures(), "flops": work.inference(),
        "flops_whole": replace(work, whole=True).inference(),
        "cases": [case.figures(work, ceilings) for case in cases], "absent": absent,
    }  # fmt: skip


def made(options: argparse.Namespace, host: PolicyHost, policy: PI0, work: Work) -> list[Case]:
    """What is compared, but for other people's code."""
    on_gpu = host.device.type == "cuda"
    eager: Chunks = torch.compiler.set_stance("force_eager")(partial(PI0.chunks, policy))
    shared: Chunks = partial(several, policy, options.samples)
    ways: dict[str, Chunks] = {"eager": eager}
    if on_gpu if options.compile is None else options.compile:
        if not on_gpu:
            policy.compile_layers()
        ways["compiled"] = policy.chunks
        shared = Graphs(shared) if on_gpu else shared
    rows = sorted({1, options.samples, *options.batch})
    cases = [
        Case(way, count, 1, work.inference(count), answering(host, chunks, count))
        for way, chunks in ways.items() for count in rows
    ]  # fmt: skip
    simple = answering(host, partial(uncached, policy), 1)
    cases.append(Case("no prefix cache", 1, 1, work.inference(cached=False), simple))
    samples = options.samples
    cases.append(Case("one prefix", 1, samples, work.inference(1, samples), answering(host, shared, 1)))
    return cases


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
        name: generator.integers(0, 256, feature.shape, np.uint8)
        if feature.dtype == "uint8"
        else generator.standard_normal(feature.shape, np.float32)
        for name, feature in spec.observation.items()
    }
    return m.InferenceRequest(0, seed, True, True, TASK, arrays)


def several(policy: PI0, samples: int, prepared: Observation, noise: Tensor) -> Tensor:
    """So many chunks of each row from one prefix, of which the first is answered."""
    return PI0.chunks(policy, prepared, noise.expand(samples, *noise.shape[1:]))[:1]


def uncached(policy: PI0, prepared: Observation, noise: Tensor) -> Tensor:
    """The chunks of `policy.chunks`, with the prefix computed at each step."""
    chunk = noise[0, :, 0]
    for step in range(policy.steps):
        time = chunk.new_full((len(chunk),), 1 - step / policy.steps)
        chunk = chunk - policy.velocity(chunk, time, policy.condition(prepared)).float() / policy.steps
    return policy.scale.from_unit(chunk[..., : policy.size].clamp(-1, 1)).unsqueeze(0)


def lerobot(work: Work, policy: PI0, ask: m.InferenceRequest, device: torch.device) -> Callable[[], Tensor]:
    """lerobot's PI0 with random weights, which answers one question. Raises ConfigError with the reason, where it
    cannot be had."""
    if (work.tower.width, work.gemma.width, work.gemma.expert_width) != LEROBOT:
        raise ConfigError("it has the full size alone (--policy pi0)")
    try:
        from lerobot.policies.pi0.configuration_pi0 import PI0Config
        from lerobot.policies.pi0.modeling_pi0 import PI0Pytorch

        config = PI0Config(
            dtype=str(policy.precision).removeprefix("torch."), chunk_size=work.horizon, n_action_steps=work.horizon,
            num_inference_steps=work.steps, image_resolution=(work.tower.image, work.tower.image), device=device.type,
        )  # fmt: skip
        with torch.device("meta"):
            PI0Pytorch(config)  # what it refuses costs nothing here
        with torch.device(device):
            model = PI0Pytorch(config).eval()
        images = [array for name, array in ask.arrays.items() if name in policy.inputs and array.ndim == 3]
        state = torch.zeros(1, work.state_size, device=device)

        def answer() -> Tensor:
            pixels = [torch.from_numpy(image).to(device).permute(2, 0, 1)[None] / 127.5 - 1 for image in images]
            there = [torch.ones(1, dtype=torch.bool, device=device)] * len(pixels)
            tokens, words = (part.to(device) for part in policy.prompt([ask.task]))
            return model.sample_actions(pixels, there, tokens, words, state).cpu()

        answer()
    except (ImportError, ValueError, TypeError, AttributeError, RuntimeError) as error:
        raise ConfigError(f"{type(error).__name__}: {str(error).splitlines()[0]}") from None
    return answer


HEADER = "                 rows samples   p50 ms   p99 ms  chunks/s      FLOP floor ms  share peak GB"
ROW = (
    "{way:16} {rows:4} {samples:7} {p50_ms:8.2f} {p99_ms:8.2f} {chunks_per_s:9.1f} {work:>9} {floor_ms:8.3f} "
    "{share:6.1%} {peak_gb:7.2f}"
)


def lines(result: dict[str, Any]) -> Iterator[str]:
    """What a person reads."""
    yield (
        "{policy} on {device}, {precision}: {cameras} cameras of {image} pixels, {words} words, chunks of {horizon}, "
        "{steps} steps; {rounds} rounds".format(**result)
    )
    yield said(result["ceilings"])
    yield (
        f"a chunk takes {scaled(result['flops'])}FLOP; {scaled(result['flops_whole'])}FLOP with all of the backbone's "
        "last layer, as published counts have it"
    )
    yield HEADER
    for case in result["cases"]:
        yield ROW.format(**case, work=scaled(case["flops"]), peak_gb=case["peak_bytes"] / 1e9)
    for name, reason in result["absent"].items():
        yield f"{name} is not beside it: {reason}"
