"""How long training stands still while weights are published and a checkpoint is kept, beside one copy of as many bytes
into memory that is in use already; and how much slower updates of SAC are while the files are written.

What stands still is the time of Publisher.begin and Keeper.begin; the rest is done by a thread.
"""

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import torch
from serl_client import messages as m
from torch import Tensor

from serl_launcher.config import composed
from serl_launcher.training.build import build
from serl_launcher.training.ranks import Ranks
from serl_launcher.training.writers import Keeper, Patience, Publisher, Writer
from serl_launcher.utils.checkpoint import Checkpoints
from serl_launcher.utils.distributed import World

from .paired import COMMON, Figure, option, ratio, rounds
from .replay import SMALL
from .update import ROOT, filled

OPTIONS = {
    "--rounds": option(9, "(9)"), "--weights": option(200, "megabytes of weights (200)"),
    "--checkpoint": option(1000, "megabytes of a checkpoint (1000)"), **COMMON,
}  # fmt: skip


def measure(folder: Path, options: argparse.Namespace) -> Iterator[Figure]:
    torch.set_num_threads(1)
    acting: Any = Acting(tensors(options.weights))
    algorithm: Any = SimpleNamespace(acting=acting)
    versions = iter(range(1, 10**9))
    publisher = Publisher(
        folder / "weights", Ranks(algorithm, World(), {}), lambda _: m.Done(0, next(versions)), Patience(folder)
    )
    keeper = Keeper(Checkpoints(folder / "checkpoints", spec=SMALL, config={}, keep=1), 60.0, Patience(folder))
    state = {"algorithm": tensors(options.checkpoint)}
    yield from stalls(
        f"publishing {options.weights} MB", options.rounds, acting.tensors, publisher.writer,
        lambda: publisher.begin(0), publisher.finish,
    )  # fmt: skip
    yield from stalls(
        f"a checkpoint of {options.checkpoint} MB", options.rounds, state["algorithm"], keeper.writer,
        lambda: keeper.begin(0, state), keeper.finish,
    )  # fmt: skip


class Acting(torch.nn.Module):
    """Weights that are published as they are."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        self.tensors = tensors

    def published(self) -> dict[str, Tensor]:
        return self.tensors


def tensors(megabytes: int) -> dict[str, Tensor]:
    """As many weights, one megabyte each."""
    return {f"layer.{number}.weight": torch.randn(512, 512) for number in range(megabytes * 10**6 // 2**20 + 1)}


def stalls(
    name: str, count: int, weights: dict[str, Tensor], writer: Writer[Any], begin: Callable[[], None],
    finish: Callable[[], None],
) -> Iterator[Figure]:  # fmt: skip
    update, rates = sac(), {"idle": [0.0], "writing": [0.0]}
    source = torch.cat([tensor.flatten() for tensor in weights.values()])
    target = torch.zeros_like(source)

    def ours() -> float:
        next(iter(weights.values())).add_(1)  # other weights than before are written
        taken = timed(begin)
        rates["writing"].append(rate(update, lambda: writer.done))
        finish()
        return taken

    def copied() -> float:
        end = perf_counter() + 0.3
        rates["idle"].append(rate(update, lambda: perf_counter() > end))
        return timed(lambda: target.copy_(source))

    contenders = {"ours": ours, "copy": copied}
    rounds(contenders, 2)
    for each in rates.values():
        each.clear()
    measured = rounds(contenders, count)
    beside = ratio(measured, "ours", "copy")
    yield Figure(f"{name}: training stands still", 1e3 * median(measured["ours"]), "ms", "one copy", beside, "<= 1.5")
    slower = ratio(rates, "writing", "idle")
    yield Figure(f"{name}: updates meanwhile", median(rates["writing"]), "1/s", "updates alone", slower)


def sac() -> Callable[[], Any]:
    config = composed(ROOT / "config", ["algo=sac"])
    algorithm: Any = build(config, SMALL)
    batch = filled(config.batch_size, algorithm)
    return lambda: algorithm.update(batch)


def timed(work: Callable[[], Any]) -> float:
    begin = perf_counter()
    work()
    return perf_counter() - begin


def rate(update: Callable[[], Any], over: Callable[[], bool]) -> float:
    """Return updates per second until `over` says true, after one at least."""
    begin, count = perf_counter(), 0
    while not count or not over():
        update()
        count += 1
    return count / (perf_counter() - begin)
