"""Reads a store as it lies on disk, and says what is wrong with it; it knows the files, and none of the code.

It imports nothing of the product: layout and checksums are written here a second time, from what the contract and the
files themselves say.
"""

import hashlib
import json
import sqlite3
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import xxhash

from tests.faults.truth import fingerprint

PAGE = 4096


@dataclass(frozen=True)
class Step:
    """One live step of a source."""

    number: int
    episode: int
    index: int
    origin: tuple[int, ...]  # what the row says of itself: seed, actor, life, seq, row
    hash: str
    record: np.ndarray
    seen: bytes  # of the row that was seen before it, a hash


@contextmanager
def opened(store: Path) -> Iterator[sqlite3.Connection]:
    """The index of a store, for reading."""
    with closing(sqlite3.connect(f"file:{store / 'index.sqlite'}?mode=ro", uri=True)) as index:
        index.row_factory = sqlite3.Row
        yield index


def spec_of(index: sqlite3.Connection) -> dict[str, Any]:
    return json.loads(index.execute("SELECT value FROM meta WHERE key = 'spec'").fetchone()[0])


def read(store: Path) -> "Found":
    """Everything in a store; `violations` of the result are what is wrong with it."""
    with opened(store) as index:
        return Found(store, index, [])


def whole(store: Path) -> "Found":
    """Read a store and assert that nothing is wrong with it."""
    found = read(store)
    assert not found.violations
    return found


def indices(store: Path, source: str = "online") -> dict[str, list[int]]:
    """{episode id: [index, ...]} in the order in which the steps of a whole store lie there."""
    found = whole(store)
    mine = sorted((row for row in found.episodes.values() if row["source"] == source), key=lambda row: row["first"])
    return {row["id"]: [step.index for step in steps] for row in mine if (steps := found.steps.get(row["number"]))}


class Found:
    """A store as it lies on disk: its tables, and every live step that fits its checksum."""

    def __init__(self, store: Path, index: sqlite3.Connection, violations: list[str]) -> None:
        self.violations = violations
        self.spec = spec_of(index)
        self.sources = {row["name"]: row for row in index.execute("SELECT * FROM sources")}
        self.sessions = {row["session"]: row for row in index.execute("SELECT * FROM sessions")}
        self.episodes = {row["id"]: row for row in index.execute("SELECT * FROM episodes")}
        self.outcomes = index.execute("SELECT rowid, * FROM outcomes ORDER BY rowid").fetchall()
        self.lost = {tuple(row) for row in index.execute("SELECT session, seq FROM lost")}
        self.archived = {row[0] for row in index.execute("SELECT number FROM archived")}
        self.steps: dict[int, list[Step]] = defaultdict(list)  # of each episode, by its number
        self.parts: dict[str, list[sqlite3.Row]] = defaultdict(list)  # of what an actor calls one episode, in order
        for row in sorted(self.episodes.values(), key=lambda row: row["number"]):
            self.parts[row["part_of"]].append(row)
        for source in self.sources.values():
            mine = [row for row in self.episodes.values() if row["source"] == source["name"]]
            for step in _steps(store / source["name"], self.spec, source, mine, violations):
                self.steps[step.episode].append(step)

    def forget(self, owners: Collection[str]) -> None:
        """Leave out the sessions, outcomes and losses that these keys have brought; their steps stay."""
        gone = {name for name, row in self.sessions.items() if row["owner"] in owners}
        self.sessions = {name: row for name, row in self.sessions.items() if name not in gone}
        self.outcomes = [row for row in self.outcomes if row["session"] not in gone]
        self.lost = {(session, seq) for session, seq in self.lost if session not in gone}

    def tail(self, episode: Mapping[str, Any]) -> int:
        return self.sources[episode["source"]]["tail"]

    def is_live(self, episode: Mapping[str, Any]) -> bool:
        return episode["first"] >= self.tail(episode)


def _steps(
    folder: Path, spec: dict[str, Any], source: Mapping[str, Any], episodes: Sequence[Any], violations: list[str]
) -> Iterator[Step]:  # fmt: skip
    """The steps of a source in [tail, head) whose episode begins there; `episodes` are those of this source."""
    firsts, starts = {row["first"] for row in episodes}, {row["number"]: row["part_start"] for row in episodes}
    capacity, tail, head = source["capacity"], source["tail"], source["head"]
    room, words = slots(capacity), np.fromfile(folder / "published", "<u8").tolist()
    if words != [tail, head] or not max(0, head - capacity) <= tail <= head:
        violations.append(f"{folder.name} holds [{tail}, {head}) of {capacity}, and {words} is published")
    if tail not in (0, head, *firsts):
        violations.append(f"{folder.name}: its tail {tail} lies within an episode")
    longest = max((row["steps"] for row in episodes), default=0)
    least = capacity - capacity // 2 - capacity // 64 - longest  # half for a group, and episodes leave whole
    if tail and head - tail < least and source["row_head"] - source["row_tail"] < room // 4:
        violations.append(f"{folder.name}: only {head - tail} steps of {capacity} were kept")
    steps, columns = np.memmap(folder / "steps", kind(spec), "r"), rows(folder / "rows", spec, room)
    for number in range(tail, head):
        record = steps[number % capacity].copy()
        if record["number"] == number and record["first"] < tail:
            continue  # its episode is evicted
        seen = [int(record["row"]), *([int(record["final_row"])] if record["final_row"] >= 0 else [])]
        arrays = [columns[name][row % room] for row in seen for name in sorted(columns)]
        if record["number"] != number or checksum(record, arrays) != record["checksum"]:
            violations.append(f"{folder.name}: step {number} is damaged, or not there")
            continue
        if not source["row_tail"] <= min(seen) <= max(seen) < source["row_head"]:
            violations.append(f"{folder.name}: step {number} points to a row that is not kept")
        yield Step(
            number, int(record["episode"]), int(record["index"]),
            tuple(columns["observation.state"][seen[0] % room].tolist()),
            fingerprint(
                arrays, record["action"], reward=float(record["reward"]), time=float(record["time"]),
                weights=int(record["weights"]), directive=int(record["directive"]),
                index=starts.get(int(record["episode"]), 0) + int(record["index"]),
                flags=int(record["flags"]),
            ),
            record, hashlib.blake2b(b"".join(array.tobytes() for array in arrays[: len(columns)])).digest(),
        )  # fmt: skip


def kind(spec: dict[str, Any]) -> np.dtype:
    """The record of a step."""
    action = spec["action"]
    fields: list[Any] = [(name, "<u8") for name in ("number", "episode", "first", "row")]
    fields += [("final_row", "<i8"), ("checksum", "<u8"), ("time", "<f8"), ("weights", "<u8")]
    fields += [("index", "<u4"), ("directive", "<u4"), ("flags", "<u4"), ("reward", "<f4")]
    fields += [("action", action["dtype"], tuple(action["shape"]))]
    fields += [(name, extra["dtype"], tuple(extra["shape"])) for name, extra in sorted(spec["extras"].items())]
    return np.dtype([*fields, ("padding", "u1", (-np.dtype(fields).itemsize % 8,))])


def slots(capacity: int) -> int:
    """How many rows a source of so many steps has."""
    return capacity + capacity // 8 + 64


def rows(path: Path, spec: dict[str, Any], slots: int, mode: Literal["r", "r+"] = "r") -> dict[str, np.ndarray]:
    """The columns of the rows."""
    found, offset = {}, 0
    for name, feature in sorted(spec["observation"].items()):
        found[name] = np.memmap(path, feature["dtype"], mode, offset, (slots, *feature["shape"]))
        offset += -(-found[name].nbytes // PAGE) * PAGE
    return found


def checksum(record: np.ndarray, arrays: Sequence[np.ndarray]) -> int:
    """That of a step, over its record and the arrays of its rows."""
    blank = record.copy()
    blank["checksum"] = 0
    return xxhash.xxh3_64_intdigest(blank.tobytes() + b"".join(array.tobytes() for array in arrays))
