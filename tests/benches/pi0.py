"""How fast PI0 answers and is trained, beside what its sizes and this machine allow.

All that is compared is measured in turn, round after round, and so are the ceilings: a big matrix product (FLOP/s) and
a big copy (bytes/s).
    answer    each answer as the inference process makes it, from arrays in memory to arrays in memory; the floor is the
              time of its FLOPs and bytes at the ceilings. Eager, and compiled: on a GPU, or with --compile
    train     updates of algo=rejection on random rows, from the copy to the device to the moving average of the
              weights, with --ranks processes: one for each GPU, or several on the CPU. Work counts the FLOPs of the
              loss and its gradient, without what `checkpointing` computes again. Several ranks replicate or shard
              (config/sharding); one way runs after the other, and a way that is too large is left out
One H200 has run it (docs/evidence/gpu.md); several GPUs never have.
"""

import argparse
import json
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing import connection
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf
from serl_client import messages as m
from serl_client.errors import ConfigError
from serl_client.spec import Feature, Spec
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from serl_launcher.acting.host import PolicyHost, Question
from serl_launcher.config import composed
from serl_launcher.optim.distributed import World, join
from serl_launcher.policies.pi0 import PI0
from serl_launcher.replay.batches import blank
from serl_launcher.training import budget, memory
from serl_launcher.training.build import build, device_of, seed, untrained
from serl_launcher.training.ranks import Ranks
from serl_launcher.types import Batch, Window
from tests.shared.common import CONFIG, STATE, free_port

from .paired import Figure, option, processor, quantiles, ratio, rounds

JOINTS = 7  # numbers of the state and of an action; the policy computes with zeros to its own width, whatever they are
TASK = "lift the block"
SIDES = {"cuda": 8192, "cpu": 1024}  # of the square matrices that are multiplied
SIZES = {"cuda": 2**30, "cpu": 2**28}  # bytes that are copied
PRODUCT, COPY, UPDATE = "a big matrix product", "a big copy", "an update"
WARM = 2  # rounds before it counts
EACH_STEP = ("expert.", "action_")  # weights that every step reads, by the beginning of their names
WAYS = ("replicas", "zero2", "zero3")
OPTIONS = {
    "--parts": option(["answer", "train"], "(answer train)", choices=("answer", "train")),
    "--policy": option("pi0", "pi0, pi0_tiny, pi0_expert or pi0_lora (pi0)"),
    "--cameras": option(3, "how many (3)"),
    "--rounds": option(20, "(20)"),
    "--rows": option([1, 8, 32], "of one answer (1 8 32)"),
    "--compile": {"action": argparse.BooleanOptionalAction, "help": "answer compiled, too (on a GPU)"},
    "--batch": option(32, "samples of an update, of all ranks together (32)"),
    "--ranks": option(1, "processes that train (1)"),
    "--ways": option(list(WAYS), "to train with several ranks (replicas zero2 zero3)", choices=WAYS),
    "words": {"nargs": "*", "help": "for the config: policy.horizon=20 threads=2 device=cpu"},
}  # fmt: skip


def measure(folder: Path, options: argparse.Namespace) -> Iterator[Figure]:
    config = configured(options)
    if "answer" in options.parts:
        yield from answers(config, options)
    if "train" in options.parts:
        yield from trained(folder, config, options)


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
    images = {f"observation.images.cam_{i}": Feature((side, side, 3), "uint8") for i in range(cameras)}
    return Spec({**images, STATE: Feature((JOINTS,))}, Feature((JOINTS,), low=-bounds, high=bounds), fps=30.0)


# -- the machine
def counted(call: Callable[[], Any]) -> int:
    """FLOPs of a call as PyTorch counts them: matrix products, those of attention included."""
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        call()
    return counter.get_total_flops()


def seconds(call: Callable[[], Any], device: torch.device) -> float:
    """How long a call takes, with all that it leaves the device to do."""
    finish = partial(torch.cuda.synchronize, device) if device.type == "cuda" else lambda: None
    finish()
    begin = perf_counter()
    call()
    finish()
    return perf_counter() - begin


def ceilings(device: torch.device, precision: torch.dtype) -> dict[str, Callable[[], float]]:
    """What the device does at most: FLOP/s in the precision of what is measured, and bytes/s read and written."""
    side, size = SIDES[device.type], SIZES[device.type]

    def product() -> float:
        factors = torch.randn(2, side, side, device=device).to(precision)
        result = torch.mm(*factors)  # the memory is there, and the kernel chosen
        return 2 * side**3 / seconds(lambda: torch.mm(*factors, out=result), device)

    def copy() -> float:
        source, target = torch.zeros(2, size, dtype=torch.uint8, device=device)
        return 2 * size / seconds(lambda: target.copy_(source), device)

    return {PRODUCT: product, COPY: copy}


def of_machine(device: torch.device, precision: torch.dtype, measured: dict[str, list[float]]) -> Iterator[Figure]:
    name = f"{processor()}, {torch.get_num_threads()} threads"
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else name
    yield Figure(f"{PRODUCT} in {precision} on {name}", median(measured[PRODUCT]), "FLOP/s")
    if COPY in measured:
        yield Figure(COPY, median(measured[COPY]), "B/s")


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


# -- answers
@dataclass(frozen=True)
class Work:
    """FLOPs of one row, and bytes of weights: `once`, and for each `step` of the sampler."""

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

    def floor(self, flops: float, bandwidth: float, rows: int = 1) -> float:
        """Seconds that this takes at least at so many FLOP/s and bytes/s: the prefix and then each step has to compute,
        and has to read its weights; a step reads the keys and values of the prefix, too."""
        step = max(rows * self.step / flops, (self.step_bytes + rows * self.kept) / bandwidth)
        return max(rows * self.once / flops, self.once_bytes / bandwidth) + self.steps * step


def answers(config: DictConfig, options: argparse.Namespace) -> Iterator[Figure]:
    spec, device = robot(config, options.cameras), torch.device(device_of(config))
    memory.check_built(lambda: build(config, spec), 1)
    host = PolicyHost(build(config, spec), spec, str(device))
    policy: Any = host.acting
    work, on_gpu = Work.of(policy, spec), device.type == "cuda"
    ways = {"eager": torch.compiler.set_stance("force_eager")(partial(PI0.chunks, policy))}
    if on_gpu if options.compile is None else options.compile:
        if not on_gpu:
            policy.compile_layers()
        ways["compiled"] = policy.chunks

    def answering(chunks: Any, questions: list[Question]) -> float:
        policy.chunks = chunks
        return seconds(lambda: host.answer(questions), device)

    calls = ceilings(device, policy.precision)
    for rows in options.rows:
        host.warm_up(1 << (rows - 1).bit_length())
        questions = [Question(b"", question(spec, i)) for i in range(rows)]
        calls |= {f"{way}, rows {rows}": partial(answering, chunks, questions) for way, chunks in ways.items()}
    measured = rounds(calls, options.rounds, WARM)
    yield from of_machine(device, policy.precision, measured)
    for name in list(calls)[2:]:
        p50, p99 = quantiles(measured[name])
        least = work.floor(median(measured[PRODUCT]), median(measured[COPY]), int(name.split()[-1]))
        yield Figure(f"{name}: p50", p50 * 1e3, "ms", f"the floor ({least * 1e3:.3g})", p50 / least)
        yield Figure(f"{name}: p99", p99 * 1e3, "ms")


def question(spec: Spec, seed: int) -> m.InferenceRequest:
    """What an actor asks: images and a state that are random."""
    generator = np.random.default_rng(seed)
    arrays = {
        name: generator.integers(0, 256, feature.shape).astype(feature.dtype)
        for name, feature in spec.observation.items()
    }
    return m.InferenceRequest(0, seed, True, True, TASK, arrays)


# -- training
def trained(folder: Path, config: DictConfig, options: argparse.Namespace) -> Iterator[Figure]:
    """The figures of each way to train, beside the first one's."""
    if device_of(config) != "cpu" and (there := torch.cuda.device_count()) < options.ranks:
        raise ConfigError(f"{options.ranks} ranks need as many GPUs, and this machine has {there}: say device=cpu")
    rates: dict[str, float] = {}
    spawn = multiprocessing.get_context("spawn")
    for way in options.ways if options.ranks > 1 else ["replicas"]:
        words = folder / way, options, way, free_port()
        ranks = [spawn.Process(target=be_rank, args=(*words, rank)) for rank in range(options.ranks)]
        for rank in ranks:
            rank.start()
        while not any(rank.exitcode for rank in ranks) and (there := [each for each in ranks if each.exitcode is None]):
            connection.wait([rank.sentinel for rank in there])
        for rank in ranks:
            rank.kill()  # one that waits for a rank that failed
            rank.join()
        if not (folder / way).exists():
            raise ConfigError(f"{way}: a rank failed; its words are above")
        title = f"{way}, {options.ranks} ranks" if options.ranks > 1 else "one rank"
        for figure in (Figure(**plain) for plain in json.loads((folder / way).read_text())):
            beside: dict[str, Any] = {}
            if figure.figure == "samples" and rates:
                first, rate = next(iter(rates.items()))
                beside = {"against": first, "ratio": figure.value / rate}
            if figure.figure == "samples":
                rates[way] = figure.value
            yield replace(figure, figure=f"{title}: {figure.figure}", **beside)


def be_rank(file: Path, options: argparse.Namespace, way: str, port: int, rank: int) -> None:
    """Be one rank of one way; rank 0 writes down the figures."""
    os.environ |= {
        "OMP_NUM_THREADS": "1",
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(options.ranks), "MASTER_ADDR": "127.0.0.1",
        "LOCAL_WORLD_SIZE": str(options.ranks), "MASTER_PORT": str(port),
    }  # fmt: skip
    options.words = [*options.words, f"sharding={way}"]
    config = configured(options)
    world, spec = join(device_of(config)), robot(config, options.cameras)
    seed(config)
    need, free = needed(config, spec, options), memory.free(world.device, options.ranks)
    if world.broadcast(need <= memory.SHARE * free):
        found = updates(config, spec, world, options, need)
    else:
        found = [Figure("left out, because it needs", need / 1e9, "GB", "what is free", need / free)]
    if rank == 0:
        file.write_text(json.dumps([asdict(figure) for figure in found]))
    sys.stdout.flush()
    os._exit(0)  # the threads of gloo and NCCL do not survive an orderly end


def needed(config: DictConfig, spec: Spec, options: argparse.Namespace) -> int:
    """Bytes that the learner would predict for each rank's tensors."""
    make, zero = untrained(config, spec), config.sharding.zero_optimization
    several = options.ranks > 1
    need = memory.needed(make, spec, options.batch, options.ranks, zero.stage if several else 0)
    return need.total + (budget.of_exchange(make, zero) if several else 0)


def updates(config: DictConfig, spec: Spec, world: World, options: argparse.Namespace, need: int) -> list[Figure]:
    """What rank 0 measures; nothing on the others, which follow it."""
    device, zero = torch.device(world.device), OmegaConf.to_container(config.sharding)
    forget_peak(device)
    before = peak(device)
    algorithm: Any = build(config, spec)
    ranks = Ranks(algorithm, world, zero)  # type: ignore[arg-type]
    if world.rank:
        ranks.obey()
        return []
    ranks.begin(None)
    peaks, batch = [peak(device)], random_batch(spec, algorithm.windows["update"], options.batch)

    def update() -> float:
        forget_peak(device)
        taken = seconds(lambda: ranks.update("update", batch.to(world.device)), device)
        peaks.append(peak(device))
        return taken

    precision = algorithm.acting.precision
    calls = {UPDATE: update, PRODUCT: ceilings(device, precision)[PRODUCT]}
    measured = rounds(calls, options.rounds, WARM)
    ranks.end()
    measured["samples"] = [options.batch / taken for taken in measured[UPDATE]]
    with memory._shapes():
        flops = flops_of(untrained(config, spec)(), spec)
    measured["work"] = [flops * rate for rate in measured["samples"]]
    measured["allowed"] = [options.ranks * rate for rate in measured[PRODUCT]]
    beside = f"{PRODUCT} on each rank"
    return [
        *of_machine(device, precision, measured),
        Figure("samples", median(measured["samples"]), "/s"),
        Figure("work", median(measured["work"]) / 1e12, "TFLOP/s", beside, ratio(measured, "work", "allowed")),
        *(Figure(f"peak memory of rank 0{when}", (most - before) / 1e9, "GB", "what was predicted",
                 (most - before) / need) for when, most in ((" until it is spread", peaks[0]), ("", max(peaks)))),
    ]  # fmt: skip


def flops_of(algorithm: Any, spec: Spec) -> int:
    """FLOPs of one sample's loss and gradient."""
    policy: PI0 = algorithm.policy
    policy.checkpointing = False
    batch = random_batch(spec, Window(policy.offsets), 1)
    return counted(lambda: policy(batch)[0].sum().backward())


def random_batch(spec: Spec, window: Window, rows: int) -> Batch:
    """What the replay would give, with random pixels."""
    batch = blank(spec, window, rows)
    observation = {
        name: torch.randint_like(value, 256) if value.dtype == torch.uint8 else torch.randn_like(value)
        for name, value in batch.observation.items()
    }
    return replace(
        batch, observation=observation, action=torch.rand_like(batch.action) * 2 - 1,
        valid=torch.ones_like(batch.valid), length=torch.full_like(batch.length, window.horizon),
        weight=torch.ones_like(batch.weight), seed=torch.arange(rows), task=(TASK,) * rows,
    )  # fmt: skip
