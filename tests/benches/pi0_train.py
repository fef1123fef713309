"""How fast PI0 is trained: samples per second of the learner's own update, beside the matrix products of this machine.

Each update imitates a batch of random rows as `algo=rejection` does, from its copy to the device to the moving average
of the weights. FLOPs are counted from the sizes: forward, twice that backward (none where it is frozen), and forward
once more, where `checkpointing` computes it again. `share` is how much of the machine's rate of a big matrix product,
measured between the updates, the update reaches; `useful` leaves out what was computed again.
The peak of the memory counts from before anything was built; on a CPU what Python and PyTorch keep for themselves is in
it, and the small policies are lost in that.
Nothing of it was ever run on a GPU.
"""

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from omegaconf import DictConfig
from serl_client.errors import ConfigError
from serl_client.spec import Spec

from serl_launcher.algorithms.base import Algorithm
from serl_launcher.replay.mixture import blank
from serl_launcher.training import memory
from serl_launcher.training.build import build, device_of
from serl_launcher.types import Batch, Window

from .measured import Ceilings, forget_peak, named, peak, said, scaled, seconds
from .paired import option
from .pi0 import TASK, Work, at_least, configured, options, robot

WARM = 2  # updates before it counts


RECOMPUTE = "compute layers again, keep less (the policy's)"
OPTIONS = options(
    20,
    batch=option(32, "samples of an update (32)", type=at_least(1)),
    accumulation=option(1, "parts of it, one after the other (1)", type=at_least(1)),
    checkpointing={"action": argparse.BooleanOptionalAction, "help": RECOMPUTE},
)


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Everything, as plain data. Raises ConfigError, also where the memory will not do."""
    rows = options.batch
    if rows % options.accumulation:
        raise ConfigError(f"--batch {rows} cannot be cut into {options.accumulation} equal parts: say another number")
    words = [f"algo.optimizer.accumulation={options.accumulation}"]
    if options.checkpointing is not None:
        words.append(f"policy.checkpointing={str(options.checkpointing).lower()}")
    config = configured(options, *words)
    spec, device = robot(config, options.cameras), torch.device(device_of(config))
    predicted = fitting(config, spec, rows, device)
    forget_peak(device)
    before = peak(device)
    algorithm = build(config, spec).to(device)
    batch = random_batch(spec, algorithm.windows["update"], rows)
    ceilings = Ceilings(device, algorithm.acting.precision)
    update: Any = algorithm.update
    times, most = [], 0
    for _ in range(WARM + options.rounds):
        ceilings.measure()
        forget_peak(device)
        times.append(seconds(lambda: update(batch.to(device)), device))
        most = max(most, peak(device))
    policy = config.policy
    work = Work.of(policy, options.cameras)
    needed = work.training(policy.freeze, policy.lora)
    recomputed = work.recomputed(policy.freeze, policy.lora) if policy.checkpointing else 0
    rate = rows / median(times[WARM:])
    return {
        "policy": options.policy, "device": named(device), "precision": str(algorithm.acting.precision),
        "rounds": options.rounds, "cameras": options.cameras, "batch": rows, "accumulation": options.accumulation,
        "checkpointing": policy.checkpointing, "weights": sum(w.numel() for w in algorithm.acting.parameters()),
        "ceilings": ceilings.figures(), "needed": needed, "recomputed": recomputed, "samples_per_s": rate,
        "flops_per_s": rate * (needed + recomputed), "share": rate * (needed + recomputed) / ceilings.flops,
        "useful_share": rate * needed / ceilings.flops, "peak_bytes": most - before, "predicted_bytes": predicted,
    }  # fmt: skip


def fitting(config: DictConfig, spec: Spec, rows: int, device: torch.device) -> int:
    """Bytes that the learner would predict for this. Raises ConfigError where they are not there, as it would."""

    def make() -> Algorithm:
        return build(config, spec)

    memory.check_built(make, 1)
    need = memory.needed(make, spec, rows, ranks=1, stage=0)
    memory.check(need, memory.free(str(device), 1), str(device))
    return need.total


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


def lines(result: dict[str, Any]) -> Iterator[str]:
    """What a person reads."""
    yield (
        "{policy} on {device}, {precision}: {millions:.1f} million weights, {cameras} cameras, batches of {batch} in "
        "{accumulation} parts, checkpointing {checkpointing}; {rounds} rounds".format(
            **result, millions=result["weights"] / 1e6
        )
    )
    yield said(result["ceilings"])
    yield (
        f"a sample takes {scaled(result['needed'])}FLOP, and {scaled(result['recomputed'])}FLOP that are computed again"
    )
    yield (
        f"{result['samples_per_s']:.1f} samples/s, {scaled(result['flops_per_s'])}FLOP/s: share {result['share']:.1%}, "
        f"useful {result['useful_share']:.1%}"
    )
    yield f"peak memory {result['peak_bytes'] / 1e9:.2f} GB; predicted were {result['predicted_bytes'] / 1e9:.2f} GB"
