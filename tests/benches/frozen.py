"""Drawing a batch and one update of RLPD from two cameras, through a frozen ResNet18 whose features the replay keeps,
and through convolutions that are trained, each beside RLPD that sees states alone: the same batch, critics and widths.

All run on one thread, in turn, from a store whose images have all been encoded. Encoding them is a figure of its own.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from serl_client import Feature, Spec

from serl_launcher.config import composed
from serl_launcher.replay.mixture import ReplayMixture
from serl_launcher.training.build import build
from serl_launcher.training.encoders import encoders
from tests.shared.common import CONFIG

from .paired import Figure, option, ratio, rounds, seconds
from .replay import SMALL, fill

WAYS = {
    "a frozen backbone": "algo=rlpd_frozen",
    "trained convolutions": "algo=rlpd_pixels",
    "states": "algo=rlpd_frozen policy=gaussian",
}
ALL = 8  # draws for each step, after which one in 3,000 is not drawn yet
OPTIONS = {
    "--rounds": option(15, "(15)"), "--updates": option(10, "in each round (10)"),
    "--steps": option(1000, "in the source (1000)"), "--side": option(64, "pixels of an image's side (64)"),
}  # fmt: skip


def measure(folder: Path, options: argparse.Namespace) -> Iterator[Figure]:
    torch.set_num_threads(1)
    images = {f"observation.images.cam_{i}": Feature((options.side, options.side, 3), "uint8") for i in range(2)}
    spec = replace(SMALL, observation={**SMALL.observation, **images})
    _, episodes = fill(folder, spec, options.steps)
    made = {name: updates(folder, spec, options.steps, episodes, words) for name, words in WAYS.items()}
    frames = options.steps * len(images)
    once = seconds(made["a frozen backbone"][1]) / frames
    yield Figure("encoding an image, once, in batches", 1e3 * once, "ms")
    contenders = {name: partial(seconds, update, options.updates) for name, (update, _) in made.items()}
    measured = rounds(contenders, options.rounds, 2)
    for name, goal in (("a frozen backbone", "<= 1.3"), ("trained convolutions", "")):
        value, beside = 1e3 * median(measured[name]), ratio(measured, name, "states")
        yield Figure(f"drawing and updating RLPD, by {name}", value, "ms", "states alone", beside, goal)


def updates(
    folder: Path, spec: Spec, steps: int, episodes: list[Any], words: str
) -> tuple[Callable[[], object], Callable[[], object]]:
    """Return what draws a batch and makes an update of it, and what draws nearly every step of the source."""
    config = composed(CONFIG, words.split())
    algorithm: Any = build(config, spec)
    found = encoders(algorithm, spec, "cpu")
    sources = ReplayMixture(folder, spec, {"online": steps}, {}, seed=0, encoders=found)
    sources.update(episodes)
    window = algorithm.windows["update"]

    def update() -> object:
        return algorithm.update(sources.sample(config.batch_size, window, {"online": 1.0}))

    return update, lambda: sources.sample(ALL * steps, window, {"online": 1.0})
