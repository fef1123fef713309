"""Makes a run's episodes of a dataset's: cut where the task changes, and resampled by the time stamps.

A step of the run shows the newest row that had been recorded at its time: each number and each image is one of the
dataset's. What happened in a row (EVENTS) happens once, in the last step that begins before the next row does. What an
action changes per step happens evenly until the next row, and a step has the sum of what happens in its time.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from serl_client.spec import Array

from serl_launcher.datasets import names, tables

SLACK = 0.05  # share of a period by which time stamps may be off
GAP = 10  # periods between two rows, over which no row is shown
EVENTS = (names.REWARD, *names.ENDS)


@dataclass(frozen=True, slots=True, eq=False)
class Resampled:
    """Which rows the steps of a piece show. Rows count from the piece's first one.

    rows: [T], of each step. owner: [N], of each row the step in which its events happen. late: [T] seconds from the
    row's time to the step's. begins: [T + 1], in which row each step begins, and which share of it is over by then; the
    last one is where the last step ends.
    """

    rows: Array
    owner: Array
    late: Array
    begins: Array

    def added(self, changes: Array) -> Array:
        """Return what the changes of the rows, [N, D], come to in each step, [T, D]. No part of one is lost."""
        passed = np.vstack([np.zeros_like(changes[:1]), np.cumsum(changes, axis=0, dtype=np.float64)])
        at = np.arange(len(passed))
        return np.diff([np.interp(self.begins, at, column) for column in passed.T], axis=1).T


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Consecutive rows [begin, end) of a dataset's episode, which make an episode of a run.

    entry: of the episode, in meta/episodes. resampled: None: each row is a step. fault: why it cannot be read.
    """

    entry: Mapping[str, Any]
    begin: int
    end: int
    resampled: Resampled | None = None
    fault: str = ""

    def __len__(self) -> int:
        return self.end - self.begin if self.resampled is None else len(self.resampled.rows)

    @property
    def is_last(self) -> bool:
        """Whether it ends where the dataset's episode does."""
        return self.end == self.entry["length"]

    @property
    def shown(self) -> Array:
        """Which of its rows each step shows, [T], from 0 on."""
        return np.arange(len(self)) if self.resampled is None else self.resampled.rows

    def taken(self, rows: Any, deltas: Sequence[int] = ()) -> Any:
        """Return the table of its steps, of that of the rows of the dataset's episode (pyarrow.Table).

        deltas: which entries of the action are changes per step.
        """
        import pyarrow as pa

        rows = rows.slice(self.begin, self.end - self.begin)
        if self.resampled is None:
            return rows
        taken = rows.take(self.resampled.rows)
        for name in set(EVENTS) & {*rows.column_names}:
            told = tables.numbers(rows[name], name)
            happened = np.zeros(len(taken), told.dtype)
            add = np.add if name == names.REWARD else np.maximum
            add.at(happened, self.resampled.owner, told)
            taken = taken.set_column(taken.column_names.index(name), name, pa.array(happened))
        if deltas:
            told = tables.numbers(rows["action"], "action").reshape(len(rows), -1)
            actions = told[self.resampled.rows]
            actions[:, deltas] = self.resampled.added(told[:, deltas])
            taken = taken.set_column(taken.column_names.index("action"), "action", pa.array(actions.tolist()))
        if names.GAP in rows.column_names:  # before a row: before the first step that shows it, or what came after it
            gaps = np.flatnonzero(tables.numbers(rows[names.GAP], names.GAP))
            is_gap = np.isin(np.arange(len(taken)), np.searchsorted(self.resampled.rows, gaps))
            taken = taken.set_column(taken.column_names.index(names.GAP), names.GAP, pa.array(is_gap))
        return taken


def pieces(entry: Mapping[str, Any], tasks: Array, times: Array, fps: float, to: float) -> list[Piece]:
    """Return the pieces of an episode. tasks, times: [N], of each row. fps: the dataset's. to: the run's."""
    ends = [*(np.flatnonzero(np.diff(tasks)) + 1).tolist(), len(tasks)]
    with np.errstate(invalid="ignore"):  # of times that are no numbers
        passed = np.diff(times) * fps
    made = []
    for begin, end in zip([0, *ends], ends, strict=False):
        if fps == to:
            made.append(Piece(entry, begin, end))
        elif not ((own := passed[begin : end - 1]) > 0).all() or (own > GAP).any():
            made.append(Piece(entry, begin, end, fault=f"its time stamps stand still, go back, or leap {GAP} periods"))
        else:
            made.append(Piece(entry, begin, end, resample(times[begin:end], fps, to)))
    return made


def resample(times: Array, fps: float, to: float) -> Resampled:
    """Return the steps of rows with these time stamps, [N] seconds, each later than the one before."""
    slack = SLACK / max(fps, to)
    ends = np.append(times[1:], times[-1] + 1 / fps)
    steps = times[0] + np.arange(max(1, math.ceil((ends[-1] - times[0] - slack) * to))) / to
    rows = np.searchsorted(times, steps + slack, side="right") - 1
    owner = np.clip(np.searchsorted(steps, ends - slack, side="left") - 1, 0, len(steps) - 1)
    begins = np.interp(np.append(steps, ends[-1]), np.append(times, ends[-1]), np.arange(len(times) + 1))
    return Resampled(rows, owner, steps - times[rows], begins)
