"""How late PI0's answers are while newer weights are read beside them, and how long they wait for the swap.

One actor asks again and again. In each round answers are measured alone, then while the loader reads and copies the
weights, then the swap, in which nobody is answered. The file was just written, so it is read from memory.
Nothing of it was ever run on a GPU.
"""

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import safetensors.torch
import torch

from serl_launcher.acting.host import Loader, PolicyHost, Question
from serl_launcher.training import memory
from serl_launcher.training.build import build, device_of

from .paired import Figure, quantiles
from .pi0 import configured, options, robot
from .pi0_infer import question

WARM, ALONE = 3, 10  # answers before it counts; answers of a round without a loader
OPTIONS = options(20)


def measure(folder: Path, options: argparse.Namespace) -> Iterator[Figure]:
    config = configured(options)
    spec, device = robot(config, options.cameras), torch.device(device_of(config))
    memory.check_built(lambda: build(config, spec), 1)
    host = PolicyHost(build(config, spec), spec, str(device))
    file = folder / "weights.safetensors"
    safetensors.torch.save_file({name: each.cpu().clone() for name, each in host.acting.published().items()}, file)
    host.warm_up(1)
    asked, loader = [Question(b"", question(spec, 0))], Loader(host)
    for _ in range(WARM):
        host.answer(asked)
    alone, beside, swaps, whole = [], [], [], []
    for version in range(1, options.rounds + 1):
        alone += [timed(lambda: host.answer(asked)) for _ in range(ALONE)]
        begin, loaded = perf_counter(), None
        loader.begin(version, file)
        while loaded is None:
            beside.append(timed(lambda: host.answer(asked)))
            loaded = loader.take()
        swaps.append(timed(lambda ready=loaded: host.swap(*ready)))
        whole.append(perf_counter() - begin)
    loader.close()
    (usual, late), (p50, p99) = quantiles(alone), quantiles(beside)
    yield Figure("weights", file.stat().st_size / 1e9, "GB")
    yield Figure("an answer alone: p50", 1e3 * usual, "ms")
    yield Figure("an answer alone: p99", 1e3 * late, "ms")
    yield Figure("while weights are read: p50", 1e3 * p50, "ms", "alone", p50 / usual)
    yield Figure("while weights are read: p99", 1e3 * p99, "ms", "alone", p99 / late)
    yield Figure(
        "the swap, which answers wait for", 1e3 * median(swaps), "ms", "an answer alone", median(swaps) / usual
    )
    yield Figure("from the file to the weights that act", median(whole), "s")


def timed(call: Callable[[], Any]) -> float:
    """Seconds of a call that waits for its own results. The device is not waited for: it may copy beside."""
    begin = perf_counter()
    call()
    return perf_counter() - begin
