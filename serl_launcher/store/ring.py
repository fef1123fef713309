"""Holds the ring buffer of one source for its writer: capacity, eviction, and the group that is staged."""

from pathlib import Path

import numpy as np
from serl_client.episode import Segment
from serl_client.spec import Array, Spec

from serl_launcher.store import layout
from serl_launcher.store.files import SourceFiles
from serl_launcher.store.layout import Layout
from serl_launcher.store.schema import Episode, Source

SPARE = 64  # an eviction frees one part in so many of the ring more than it must, so that not every group evicts


class Ring:
    """Gives staged steps their numbers, and writes them behind the head of `source`."""

    def __init__(self, folder: Path, source: Source, spec: Spec) -> None:
        """Open the files of a source. Raises ConfigError when they are damaged."""
        self.source, self.layout = source, Layout(spec, source.capacity)
        self.files = SourceFiles(folder, self.layout)
        self.clear()

    def clear(self) -> None:
        self.segments: list[tuple[Segment, Array]] = []  # staged, with their [T] step records
        self._steps = self._rows = 0  # staged

    @property
    def next_step(self) -> int:
        return self.source.head + self._steps

    @property
    def next_row(self) -> int:
        return self.source.row_head + self._rows

    def is_half_full(self, count: int) -> bool:
        """Return whether `count` more steps would make the group larger than half of the ring."""
        return self._steps + count > self.source.capacity // 2

    def would_overwrite(self, first: int, first_row: int, segment: Segment) -> bool:
        """Return whether this segment needs the slots of the episode that begins at this step and row."""
        steps, rows = self.next_step - first, self.next_row - first_row
        return (
            steps + len(segment) > self.layout.capacity or rows + len(segment) + segment.ends > self.layout.rows
        )  # fmt: skip

    def place(self, records: Array, segment: Segment, episode: Episode) -> None:
        """Give the [T] step records of a segment their numbers, and add them to the group."""
        step, row, count = self.next_step, self.next_row, len(segment)
        records["number"], records["row"] = np.arange(step, step + count), np.arange(row, row + count)
        records["episode"], records["first"] = episode.number, episode.first
        records["index"] = np.arange(episode.steps, episode.steps + count)
        records["flags"][segment.time < np.append(episode.latest, segment.time[:-1])] |= layout.GAP
        episode.latest = float(segment.time[-1])
        if segment.ends:
            records["final_row"][-1] = row + count
        self.segments.append((segment, records))
        self._steps += count
        self._rows += count + segment.ends

    def least_tails(self) -> tuple[int, int] | None:
        """Return the (step, row) below which all has to be evicted before the group is written; None if it fits."""
        tail, row_tail = self.next_step - self.layout.capacity, self.next_row - self.layout.rows
        if tail <= self.source.tail and row_tail <= self.source.row_tail:
            return None
        spare = self.layout.capacity // SPARE
        return max(tail + spare, self.source.tail), max(row_tail + spare, self.source.row_tail)

    def write(self) -> None:
        """Write the group's rows and steps behind the head, and move the head in memory. `files.sync` makes it durable.

        The rows are on their way to the disk while the steps are made of them.
        """
        for name, offset in self.layout.blocks.items():
            arrays = [segment.observation[name] for segment, _ in self.segments]
            self.files.write("rows", offset, self.layout.rows, self.source.row_head, arrays)
        self.files.begin_sync("rows")
        for segment, records in self.segments:
            columns = [array for _, array in sorted(segment.observation.items())]
            records["checksum"] = layout.checksums(records, columns)
        self.files.write("steps", 0, self.layout.capacity, self.source.head, [records for _, records in self.segments])
        self.source.head, self.source.row_head = self.next_step, self.next_row
        self.clear()


def step_records(segment: Segment, kind: np.dtype) -> Array:
    """Make the [T] step records of a segment, without their numbers and checksums."""
    records = np.zeros(len(segment), kind)
    records["final_row"] = -1
    records["directive"], records["weights_version"] = segment.stamp.directive, segment.stamp.weights_version
    records["time"], records["reward"], records["action"] = segment.time, segment.reward, segment.action
    records["chunk_delay"] = segment.chunk_delay
    records["flags"] = (
        segment.intervened * layout.INTERVENED + segment.chunk_start * layout.CHUNK_START + segment.gap * layout.GAP
    )
    for name, extra in segment.extras.items():
        records[f"extras.{name}"] = extra
    if segment.ends:
        records["flags"][-1] |= segment.terminated * layout.TERMINATED + segment.truncated * layout.TRUNCATED
    return records
