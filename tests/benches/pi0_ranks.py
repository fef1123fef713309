"""How fast several ranks train PI0 together, replicated and sharded, and the memory that rank 0 takes.

Each way (config/sharding) has processes of its own, one for each GPU, or two or more on the CPU. Rank 0 draws random
batches, as in pi0-train, and the others follow it as in a run. A way that is too large for the device is left out.
On a CPU the peak is that of a process with all its libraries. Nothing of it was ever run on a GPU.
"""

import argparse
import json
import multiprocessing
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing import connection
from pathlib import Path
from statistics import median
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from serl_client.errors import ConfigError
from serl_client.spec import Spec

from serl_launcher.training import budget, memory
from serl_launcher.training.build import build, device_of, seed, untrained
from serl_launcher.training.ranks import Ranks
from serl_launcher.utils.distributed import join
from tests.shared.common import free_port

from .paired import Figure, figure_of, option
from .pi0 import configured, forget_peak, options, peak, robot, seconds
from .pi0_train import WARM, random_batch

WAYS = ("replicas", "zero2", "zero3")
OPTIONS = options(
    10, batch=option(32, "samples of an update, of all ranks together (32)"), ranks=option(2, "processes (2)"),
    ways=option(list(WAYS), "of config/sharding (replicas zero2 zero3)", choices=WAYS),
)  # fmt: skip


def measure(folder: Path, options: argparse.Namespace) -> Iterator[Figure]:
    config = configured(options)
    if device_of(config) != "cpu" and (there := torch.cuda.device_count()) < options.ranks:
        raise ConfigError(f"{options.ranks} ranks need as many GPUs, and this machine has {there}: say device=cpu")
    for way in options.ways:
        port = free_port()
        spawn = multiprocessing.get_context("spawn")
        ranks = [spawn.Process(target=run, args=(folder, options, way, rank, port)) for rank in range(options.ranks)]
        for rank in ranks:
            rank.start()
        while not any(rank.exitcode for rank in ranks) and (there := [each for each in ranks if each.exitcode is None]):
            connection.wait([rank.sentinel for rank in there])
        for rank in ranks:
            rank.kill()  # one that waits for a rank that failed
            rank.join()
        if not (folder / way).exists():
            raise ConfigError(f"{way}: a rank failed; its words are above")
        yield from map(figure_of, json.loads((folder / way).read_text()))


def run(folder: Path, options: argparse.Namespace, way: str, rank: int, port: int) -> None:
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
    zero: Any = OmegaConf.to_container(config.sharding)
    need, free = needed(config, spec, options), memory.free(world.device, options.ranks)
    if world.broadcast(need <= memory.SHARE * free):
        ranks = Ranks(build(config, spec), world, zero)
        found = list(figures(ranks, spec, options, need)) if rank == 0 else ranks.follow()
    else:
        found = [Figure("left out, because it needs", need / 1e9, "GB", "what is free", need / free)]
    if rank == 0:
        named = [replace(figure, figure=f"{way}: {figure.figure}").plain() for figure in found or ()]
        (folder / way).write_text(json.dumps(named))
    sys.stdout.flush()
    os._exit(0)  # the threads of gloo and NCCL do not survive an orderly end


def needed(config: DictConfig, spec: Spec, options: argparse.Namespace) -> int:
    """Bytes that the learner would predict for each rank's tensors."""
    make, zero = untrained(config, spec), config.sharding.zero_optimization
    need = memory.needed(make, spec, options.batch, options.ranks, zero.stage)
    return need.total + budget.of_exchange(make, zero)


def figures(ranks: Ranks, spec: Spec, options: argparse.Namespace, need: int) -> Iterator[Figure]:
    """What rank 0 measures."""
    device = torch.device(ranks.world.device)
    forget_peak(device)
    ranks.begin(None)
    beginning = peak(device)
    batch = random_batch(spec, ranks.algorithm.windows["update"], options.batch).to(ranks.world.device)
    times = [seconds(lambda: ranks.update("update", batch), device) for _ in range(WARM + options.rounds)]
    most = peak(device)
    ranks.end()
    yield Figure("samples", options.batch / median(times[WARM:]), "/s")
    yield Figure(
        "peak memory of rank 0 until it is spread", beginning / 1e9, "GB", "what was predicted", beginning / need
    )
    yield Figure("peak memory of rank 0", most / 1e9, "GB", "what was predicted", most / need)
