"""Defines how steps lie on disk (file layout of a replay buffer), for the writer (store.py) and the readers (replay/).

A physical source is a folder with three files of fixed size:
    rows       each observation once; per feature one block [rows, *shape], so that a gather is one contiguous copy
    steps      one fixed-size record per step
    published  two u64, tail and head: what a reader may draw is [tail, head)
Step and row numbers only grow; the slot of a number is number mod the ring's size. Rows of one episode need not be
adjacent, because actors interleave.
"""

import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import xxhash
from serl_client.errors import ConfigError
from serl_client.spec import Array, Spec

PAGE = 4096
SPARE = 64 << 20  # bytes that must stay free for the index, the weights and the log
TERMINATED, TRUNCATED, INTERVENED, CHUNK_START, GAP = 1, 2, 4, 8, 16


@dataclass(frozen=True)
class Layout:
    """The file layout of one source that keeps `capacity` steps of `spec`."""

    spec: Spec
    capacity: int

    @cached_property
    def rows(self) -> int:
        """Slots for observations: an episode of T steps has T+1, so there are some more than steps."""
        return self.capacity + self.capacity // 8 + 64

    @cached_property
    def step(self) -> np.dtype:
        """The record of one step; `final_row` is -1 but for the step that ended its episode with an observation."""
        fields: list[tuple] = [
            ("number", "<u8"), ("episode", "<u8"), ("first", "<u8"), ("row", "<u8"), ("final_row", "<i8"),
            ("checksum", "<u8"), ("time", "<f8"), ("weights_version", "<u8"), ("index", "<u4"), ("directive", "<u4"),
            ("flags", "<u2"), ("chunk_delay", "<u2"), ("reward", "<f4"), ("action", self.spec.action.dtype,
            self.spec.action.shape),
        ]  # fmt: skip
        fields += [(f"extras.{name}", item.dtype, item.shape) for name, item in sorted(self.spec.extras.items())]
        size = np.dtype(fields).itemsize
        return np.dtype([*fields, ("padding", "u1", (-size % 8,))])

    @cached_property
    def blocks(self) -> dict[str, int]:
        """Where each feature's block begins in the file `rows`."""
        offsets, offset = {}, 0
        for name, feature in sorted(self.spec.observation.items()):
            offsets[name] = offset
            offset += _pages(feature.nbytes * self.rows)
        return offsets

    @property
    def rows_bytes(self) -> int:
        return sum(_pages(feature.nbytes * self.rows) for feature in self.spec.observation.values())

    @property
    def steps_bytes(self) -> int:
        return self.step.itemsize * self.capacity

    def observations(self, folder: Path) -> dict[str, Array]:
        """{name: [rows, *shape]}, mapped read-only."""
        return {
            name: np.memmap(folder / "rows", feature.dtype, "r", self.blocks[name], (self.rows, *feature.shape))
            for name, feature in self.spec.observation.items()
        }

    def steps(self, folder: Path) -> Array:
        """[capacity] step records, mapped read-only."""
        return np.memmap(folder / "steps", self.step, "r", 0, (self.capacity,))


def published(folder: Path, *, writable: bool = False) -> Array:
    """[tail, head] of a source, mapped; each is one aligned word, written by the server alone."""
    return np.memmap(folder / "published", "<u8", "r+" if writable else "r", 0, (2,))


def checksum(record: Array, observations: Iterable[Array]) -> int:
    """xxh3_64 of one step: its record (the checksum itself as 0), its observation, and the final one if it has it."""
    blank = record.copy()
    blank["checksum"] = 0
    digest = xxhash.xxh3_64(blank.tobytes())
    for observation in observations:
        digest.update(np.ascontiguousarray(observation).reshape(-1).view(np.uint8).data)
    return digest.intdigest()


def checksums(records: Array, columns: Sequence[Array]) -> list[int]:
    """The `checksum` of each of T consecutive steps, [T] records that have none yet; the columns of their observations
    are [T, ...], or [T+1, ...] where the last of these is final."""
    lines = _lines(records)
    rows = list(zip(*map(_lines, columns), strict=True))
    found = []
    for i, line in enumerate(lines):
        digest = xxhash.xxh3_64(line)
        for row in rows[i:] if i == len(lines) - 1 else rows[i : i + 1]:
            for part in row:
                digest.update(part)
        found.append(digest.intdigest())
    return found


def _lines(array: Array) -> list[memoryview]:
    """The bytes of each item of [n, ...]."""
    data, size = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data, array[:1].nbytes
    return [data[begin : begin + size] for begin in range(0, len(data), size)]


def check_space(folder: Path, layouts: dict[str, Layout]) -> str:
    """A sentence that says how large the sources will be. Raises ConfigError when the disk cannot hold them."""
    needed = sum(layout.rows_bytes + layout.steps_bytes for layout in layouts.values())
    free = shutil.disk_usage(folder).free
    shares = ", ".join(
        f"{name} {layout.capacity:,} steps = {_size(layout.rows_bytes + layout.steps_bytes)}"
        for name, layout in layouts.items()
    )
    if needed + SPARE > free:
        raise ConfigError(
            f"the replay buffer does not fit: {shares}, and {_size(SPARE)} have to stay free for index, weights and "
            f"log, {_size(needed + SPARE)} in all; free on the disk of {folder}: {_size(free)}. "
            "Lower plan.sources.<name>.capacity or choose a run_dir on a larger disk"
        )
    return f"{shares}; free before: {_size(free)}"


def _pages(length: int) -> int:
    return length + -length % PAGE


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"
