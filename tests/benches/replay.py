"""Drawing 256 pairs of observations (3 cameras of 224x224 and a state) from a warm source into memory that is used
again, against a copy of the same bytes and against lerobot's ReplayBuffer with the same observations on the CPU.

Also: the bytes that are written per byte of frame; how the two draw rows of 8 numbers, where there is little to copy
and what is done around it counts; and what a batch costs right after an episode was discarded, as an operator or an
evaluation may do twice a second, for windows that start anywhere and for those that start where a chunk began.
"""

import argparse
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch
from serl_client import Feature, Outcome, Spec

from serl_launcher.replay.mixture import ReplayMixture
from serl_launcher.store.layout import Layout
from serl_launcher.store.store import Store
from serl_launcher.types import Window

from .control import SPEC
from .paired import Figure, machine, ratio, rounds, said
from .served import BODY, STATE, Rows

BATCH = 256
EPISODE = 48  # steps; shorter ones would store more final observations
SMALL = Spec({STATE: Feature((8,))}, Feature((7,), low=-np.ones(7), high=np.ones(7)), fps=300.0)


def main(words: Sequence[str], prog: str) -> None:
    parser = argparse.ArgumentParser(prog, description=__doc__)
    parser.add_argument("--rounds", type=int, default=9, help="(9)")
    parser.add_argument("--steps", type=int, default=1500, help="in the source (1500; 0.45 MB each)")
    parser.add_argument("--theirs", type=int, default=300, help="in lerobot's buffer (300; 3.6 MB each); 0: without")
    parser.add_argument(
        "--large", type=int, nargs="*", default=[200_000], help="steps in the sources with discards (200000)"
    )
    parser.add_argument("--folder", type=Path, help="of the source (the system's for temporary files)")
    parser.add_argument("--json", action="store_true", help="print one object")
    options = parser.parse_args(words)
    torch.set_num_threads(1)
    before, figures = machine(), []
    for name, spec, steps, goals in (
        ("3x224x224x3", SPEC, options.steps, (">= 0.85", ">= 25")),
        ("8 numbers", SMALL, options.steps * 40 // 3, ("", "")),
    ):  # fmt: skip
        with tempfile.TemporaryDirectory(prefix="bench-", dir=options.folder) as folder:
            figures += replay(name, Path(folder), spec, steps, options.theirs, options.rounds, goals)
    for steps in options.large:
        with tempfile.TemporaryDirectory(prefix="bench-", dir=options.folder) as folder:
            figures += discards(Path(folder), steps, options.rounds)
    said("replay", before, figures, as_json=options.json)


def replay(
    name: str, folder: Path, spec: Spec, steps: int, theirs: int, count: int, goals: tuple[str, str]
) -> list[Figure]:  # fmt: skip
    stored = fill(folder, spec, steps)
    sources = ReplayMixture(folder, spec, {"online": steps}, {}, seed=0)
    sources.update([])
    window = Window({**dict.fromkeys(spec.observation, (0,)), "action": (0,), "next_observation": (1,)})
    frame = sum(feature.nbytes for feature in spec.observation.values())
    here, there = np.ones((2 * BATCH * frame,), np.uint8), np.empty((2 * BATCH * frame,), np.uint8)
    ours = timed(lambda: sources.sample(BATCH, window, {"online": 1.0}))
    measured = interleaved({"ours": ours, "a copy": timed(lambda: np.copyto(there, here))}, count)
    seconds = median(measured["ours"])
    figures = [
        Figure(f"{BATCH} pairs of {name}", 2 * BATCH * frame / seconds / 1e9, "GB/s", "a copy of the same bytes",
               ratio(measured, "a copy", "ours"), goals[0]),
        Figure(f"bytes written per byte of {name}", stored, "", goal="<= 1.02" if goals[0] else ""),
    ]  # fmt: skip
    if theirs:  # apart: it leaves the caches to whoever comes next as nothing else here does
        measured = interleaved({"ours": ours, "lerobot": timed(lerobot(spec, theirs))}, count)
        rate, faster = BATCH / median(measured["ours"]), ratio(measured, "lerobot", "ours")
        figures.append(
            Figure(f"{BATCH} pairs of {name}", rate, "/s", "lerobot's ReplayBuffer.sample", faster, goals[1])
        )
    return figures


def discards(folder: Path, steps: int, count: int) -> list[Figure]:
    """A batch after one more episode was discarded, against one from a source where nothing was."""
    fill(folder, SMALL, steps)
    store = Store(folder)
    cursor, rows = store.index.catalog(0, -1)
    ids = [row[1] for row in rows]

    def opened() -> ReplayMixture:
        sources = ReplayMixture(folder, SMALL, {"online": steps}, {}, seed=0)
        sources.update(rows)
        return sources

    def discarded(window: Window) -> float:
        nonlocal cursor
        store.stage("session", store.expected("session"), Outcome(ids.pop(len(ids) // 2), None, discard=True))
        store.commit()
        cursor, changed = store.index.catalog(cursor, 100)
        return timed(lambda: (told.update(changed), told.sample(BATCH, window, {"online": 1.0})))()

    untold, told, figures = opened(), opened(), []
    offsets = {STATE: (0,), "action": (0,), "next_observation": (1,)}
    for name, window in (("", Window(offsets)), (", starts of chunks", Window(offsets, starts="chunk_start"))):
        contenders = {
            "none": timed(lambda window=window: untold.sample(BATCH, window, {"online": 1.0})),
            "one": lambda window=window: discarded(window),
        }  # fmt: skip
        measured = interleaved(contenders, count)
        figures.append(
            Figure(f"a batch after a discard{name}, {steps:,} steps", 1e3 * median(measured["one"]), "ms",
                   "a batch where nothing was discarded", ratio(measured, "one", "none"), "<= 3" if not name else "")
        )  # fmt: skip
    store.close()
    return figures


def interleaved(contenders: dict[str, Callable[[], float]], count: int) -> dict[str, list[float]]:
    rounds(contenders, 3)  # the pages are there
    return rounds(contenders, count)


def fill(folder: Path, spec: Spec, steps: int) -> float:
    """Fill a source with episodes; the bytes that this wrote per byte of frame."""
    store, rows = Store.create(folder, spec, {"online": steps}), Rows(spec)
    number = store.direct(BODY)
    store.hello("bench", "outbox", "session", [])
    seq, per = 0, max(1, EPISODE // rows.length)
    while (seq + per) * rows.length <= steps:
        for segment in rows.episode(per, number):
            store.stage("session", seq, replace(segment, chunk_start=np.arange(len(segment)) % 8 == 0))
            seq += 1
        store.commit()
    store.index.probe()  # the log is brought into the database
    frames = store.sources["online"].row_head * sum(feature.nbytes for feature in spec.observation.values())
    records = store.sources["online"].head * Layout(spec, steps).step.itemsize
    store.close()
    return (frames + records + (folder / "index.sqlite").stat().st_size) / frames


def timed(call: Callable[[], Any]) -> Callable[[], float]:
    def seconds() -> float:
        begin = perf_counter()
        call()
        return perf_counter() - begin

    return seconds


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
