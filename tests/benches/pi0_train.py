"""How fast PI0 is trained: samples per second of the learner's own update, beside the matrix products of this machine.

Each update imitates a batch of random rows as `algo=rejection` does, from its copy to the device to the moving average
of the weights. FLOPs are those that PyTorch counts of one sample's loss and gradient, without what `checkpointing`
computes again. The share of the machine's rate of a big matrix product is measured between the updates.
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
from serl_client.spec import Spec

from serl_launcher.algorithms.base import Algorithm
from serl_launcher.policies.pi0 import PI0
from serl_launcher.replay.batches import blank
from serl_launcher.training import memory
from serl_launcher.training.build import build, device_of
from serl_launcher.types import Batch, Window

from .paired import Figure, option
from .pi0 import TASK, Ceilings, configured, counted, forget_peak, options, peak, robot, seconds

WARM = 2  # updates before it counts
OPTIONS = options(20, batch=option(32, "samples of an update (32)"))


def measure(folder: Path, options: argparse.Namespace) -> Iterator[Figure]:
    config, rows = configured(options), options.batch
    spec, device = robot(config, options.cameras), torch.device(device_of(config))
    predicted = fitting(config, spec, rows, device)
    forget_peak(device)
    before = peak(device)
    algorithm: Any = build(config, spec).to(device)
    batch = random_batch(spec, algorithm.windows["update"], rows)
    ceilings, times, most = Ceilings(device, algorithm.acting.precision), [], 0
    for _ in range(WARM + options.rounds):
        ceilings.measure()
        forget_peak(device)
        times.append(seconds(lambda: algorithm.update(batch.to(device)), device))
        most = max(most, peak(device))
    rate, flops = rows / median(times[WARM:]), needed(algorithm.policy, spec)
    yield from ceilings.figures()
    yield Figure("samples", rate, "/s")
    yield Figure("work of one sample", flops / 1e12, "TFLOP")
    share = rate * flops / ceilings.flops
    yield Figure("work", rate * flops / 1e12, "TFLOP/s", "a big matrix product", share)
    yield Figure("peak memory", (most - before) / 1e9, "GB", "what was predicted", (most - before) / predicted)


def fitting(config: DictConfig, spec: Spec, rows: int, device: torch.device) -> int:
    """Bytes that the learner would predict for this. Raises ConfigError where they are not there, as it would."""

    def make() -> Algorithm:
        return build(config, spec)

    memory.check_built(make, 1)
    need = memory.needed(make, spec, rows, ranks=1, stage=0)
    memory.check(need, memory.free(str(device), 1), str(device))
    return need.total


def needed(policy: PI0, spec: Spec) -> int:
    """FLOPs of one sample's loss and gradient."""
    policy.checkpointing = False
    batch = random_batch(spec, Window(policy.offsets), 1).to(policy.frequencies.device)
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
