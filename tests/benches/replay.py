"""Drawing 256 pairs of observations (3 cameras of 224x224 and a state) from a warm source into memory that is used
again, against a copy of the same bytes and against lerobot's ReplayBuffer with the same observations on the CPU.

Also: the bytes that are written per byte of frame, and how rows of 8 numbers are drawn, where there is little to copy
and what is done around it counts. There lerobot's buffer holds as many steps as ours, so that caches help neither, and
so does another peer: a ring of five numpy arrays.
"""

import argparse
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from serl_client import Feature, Spec

from serl_launcher.replay.mixture import ReplayMixture
from serl_launcher.store.layout import Layout
from serl_launcher.store.store import Store
from serl_launcher.types import Window

from .paired import Figure, option, ratio, rounds, seconds
from .served import BODY, SPEC, STATE, Rows

BATCH = 256
WARM = 3  # rounds until the pages are there
EPISODE = 48  # steps; shorter ones would store more final observations
SMALL = Spec({STATE: Feature((8,))}, Feature((7,), low=-np.ones(7), high=np.ones(7)), fps=300.0)
OPTIONS = {
    "--rounds": option(9, "(9)"),
    "--steps": option(1500, "in the source (1500; 0.45 MB each)"),
    "--theirs": option(300, "with images in lerobot's buffer (300; 3.6 MB each); 0: without lerobot"),
}


def measure(folder: Path, options: argparse.Namespace) -> Iterator[Figure]:
    torch.set_num_threads(1)
    images, small = folder / "images", folder / "small"
    yield from replay("3x224x224x3", images, SPEC, options.steps, options, (">= 0.85", ">= 25", ""), options.theirs)
    shutil.rmtree(images)
    steps = options.steps * 40 // 3
    yield from replay("8 numbers", small, SMALL, steps, options, ("", ">= 1", ">= 0.3"), steps)


def replay(
    name: str, folder: Path, spec: Spec, steps: int, options: argparse.Namespace, goals: tuple[str, str, str],
    theirs: int,
) -> Iterator[Figure]:  # fmt: skip
    stored, episodes = fill(folder, spec, steps)
    sources = ReplayMixture(folder, spec, {"online": steps}, {}, seed=0)
    sources.update(episodes)
    window = Window({**dict.fromkeys(spec.observation, (0,)), "action": (0,), "next_observation": (1,)})
    frame = sum(feature.nbytes for feature in spec.observation.values())
    here, there = np.ones((2 * BATCH * frame,), np.uint8), np.empty((2 * BATCH * frame,), np.uint8)
    ours = partial(seconds, lambda: sources.sample(BATCH, window, {"online": 1.0}))
    copy = partial(seconds, lambda: np.copyto(there, here))
    measured = rounds({"ours": ours, "a copy": copy}, options.rounds, WARM)
    rate, beside = 2 * BATCH * frame / median(measured["ours"]) / 1e9, ratio(measured, "a copy", "ours")
    yield Figure(f"{BATCH} pairs of {name}", rate, "GB/s", "a copy of the same bytes", beside, goals[0])
    yield Figure(f"bytes written per byte of {name}", stored, "", goal="<= 1.02" if goals[0] else "")
    for peer, make, size, goal in (
        ("lerobot's ReplayBuffer.sample", lerobot, theirs if options.theirs else 0, goals[1]),
        ("a ring of numpy arrays", ring, steps if goals[2] else 0, goals[2]),
    ):
        if size:  # apart: each leaves other caches to whoever comes next
            measured = rounds({"ours": ours, peer: partial(seconds, make(spec, size))}, options.rounds, WARM)
            rate, faster = BATCH / median(measured["ours"]), ratio(measured, peer, "ours")
            yield Figure(f"{BATCH} pairs of {name}", rate, "/s", peer, faster, goal)


def fill(folder: Path, spec: Spec, steps: int) -> tuple[float, list[Any]]:
    """Fill a source with episodes. Return the bytes that this wrote per byte of frame, and the episodes."""
    store, rows = Store.create(folder, spec, {"online": steps}), Rows(spec)
    number = store.direct(BODY)
    store.lives.hello("bench", "outbox", "session", [])
    seq, per = 0, max(1, EPISODE // rows.length)
    while (seq + per) * rows.length <= steps:
        for segment in rows.episode(per, number):
            store.stage("session", seq, segment)
            seq += 1
        store.commit()
    store.index.probe()  # the log is brought into the database
    frames = store.sources["online"].row_head * sum(feature.nbytes for feature in spec.observation.values())
    records = store.sources["online"].head * Layout(spec, steps).step.itemsize
    episodes = store.index.catalog(0, -1)[1]
    store.close()
    return (frames + records + (folder / "index.sqlite").stat().st_size) / frames, episodes


def ring(spec: Spec, capacity: int) -> Callable[[], Any]:
    """One array for each column of that many transitions; a call that samples, and checks nothing."""
    shapes = [feature.shape for feature in (*spec.observation.values(), *spec.observation.values(), spec.action)]
    columns = [np.zeros((capacity, *shape), np.float32) for shape in (*shapes, (), ())]  # reward and terminated
    generator = np.random.default_rng(0)

    def sample() -> list[torch.Tensor]:
        picks = generator.integers(capacity, size=BATCH)
        return [torch.from_numpy(column[picks]) for column in columns]

    return sample


def lerobot(spec: Spec, capacity: int) -> Callable[[], Any]:
    """lerobot's buffer of that many transitions, without its augmentation; a call that samples."""
    from lerobot.rl.buffer import ReplayBuffer

    buffer = ReplayBuffer(capacity, device="cpu", state_keys=list(spec.observation), use_drq=False)
    generator = torch.Generator().manual_seed(0)
    for _ in range(capacity):
        state = {
            name: torch.randint(256, (1, *feature.shape), generator=generator, dtype=torch.uint8)
            for name, feature in spec.observation.items()
        }
        buffer.add(state, torch.zeros(1, *spec.action.shape), 0.0, state, False, False)
    return lambda: buffer.sample(BATCH)
