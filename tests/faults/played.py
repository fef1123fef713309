"""A short run of a real server that power.py records, all that it promised, and an independent look at what is left.

As a program it is the process that is recorded: a server with two actors whose records, groups and lives interleave,
directives, weights, evictions, a restart. Before an answer leaves, it is marked in the trace: all calls before the mark
are those on which the promise rests. The reader knows the layout of the files; of serl_launcher it imports nothing.
"""

import ctypes
import hashlib
import json
import random
import sqlite3
import sys
import threading
import zlib
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, cast

import numpy as np
from serl_client import Feature, Outcome, Segment, Spec, Stamp
from serl_client import messages as m
from serl_client.connection import Connection, failure
from serl_client.episode import LostRecord, QueuedRecord

CAPACITIES = {"demo": 48, "online": 64}
ADDED = {"late": 48}  # a source that the second life of the server adds
ARCHIVED = ("demo",)
STATE, IMAGE = "observation.state", "observation.images.eye"
SPEC = Spec(
    {STATE: Feature((3,)), IMAGE: Feature((12, 12, 3), "uint8")},
    Feature((2,), low=-np.ones(2), high=np.ones(2)), fps=10.0,
)  # fmt: skip
BODIES = [{"phase": "practise", "mode": "collect", "into": into} for into in ("demo", "online")]
PROCESS = ctypes.CDLL(None)  # with what was loaded before it
STEPS = 4  # of a segment; an episode has two
STEP = np.dtype([
    ("number", "<u8"), ("episode", "<u8"), ("first", "<u8"), ("row", "<u8"), ("final_row", "<i8"), ("checksum", "<u8"),
    ("time", "<f8"), ("weights", "<u8"), ("index", "<u4"), ("directive", "<u4"), ("flags", "<u4"), ("reward", "<f4"),
    ("action", "<f4", (2,)),
])  # fmt: skip


@cache
def record(session: str, seq: int) -> QueuedRecord:
    """What an actor pushes: an episode is a segment, an outcome and the segment that ends it; the first goes into
    `demo`, and the disk of `a1` has damaged its third."""
    number, part = divmod(seq, 3)
    if (session, number) == ("a1", 2) and part != 1:
        return LostRecord("its disk")
    episode = f"{session}-{number}"
    if part == 1:
        return Outcome(episode, number % 2 == 0, judged_by="operator" if number % 3 == 0 else "judge")
    generator = np.random.default_rng(zlib.crc32(f"{session}/{seq}".encode()))
    start, ends = (0, "") if part == 0 else (STEPS, ("terminated", "truncated")[number % 2])
    rows = STEPS + bool(ends)
    return Segment(
        episode, start, "reach", Stamp(1 if number == 0 else 2, "practise", seq),
        {STATE: generator.random((rows, 3), "f4"), IMAGE: generator.integers(0, 255, (rows, 12, 12, 3), "u1")},
        generator.random((STEPS, 2), np.float32), generator.random(STEPS, np.float32), generator.random(STEPS) < 0.5,
        generator.random(STEPS) < 0.5, generator.random(STEPS),
        terminated=ends == "terminated", truncated=ends == "truncated",
    )  # fmt: skip


# -- the process that is recorded
def mark(**promise: Any) -> None:
    text = json.dumps(promise).encode()
    PROCESS.retake_mark(text, ctypes.c_size_t(len(text)))


def _mark_answers() -> None:
    """Mark what is told to others, and what becomes visible in mapped memory, of which the shim sees nothing."""
    from serl_launcher.store.files import SourceFiles

    encode, publish, kind = m.encode, SourceFiles.publish, cast(Any, SourceFiles)

    def published(files: Any, tail: int, head: int) -> None:
        publish(files, tail, head)
        mark(mapped=str(files._published.filename), words=[tail, head])

    def marked(message: m.Message) -> Any:
        if isinstance(message, m.Ack):
            mark(expected=[[message.session, message.expected]])
        elif isinstance(message, m.Welcome):
            mark(run=message.run, expected=message.expected)
        elif isinstance(message, m.Done):
            mark(done=message.value)
        return encode(message)

    m.encode, kind.publish = marked, published


class Actor:
    """One life of an actor: it pushes the next records, and may wait for their acknowledgement."""

    def __init__(self, address: str, name: str, session: str, earlier: Sequence[Sequence[Any]]) -> None:
        hello = m.Hello(m.PROTOCOL, "actor", name, session, f"outbox-{name}", "", SPEC.to_dict(), earlier)
        self.session, self.pushed, self.link = session, 0, Connection(address, hello)

    def push(self, count: int) -> None:
        sealed = [m.encode_record(seq, record(self.session, seq)) for seq in range(self.pushed, self.pushed + count)]
        data = b"".join(bytes(part) for parts in sealed for part in parts)
        self.pushed += count
        self.link.send(m.Push(self.session, {"records": np.frombuffer(data, np.uint8)}))

    def wait(self) -> None:
        expected = 0
        while expected < self.pushed:
            message = self.link.receive()
            if isinstance(message, m.Failed):
                raise failure(message)
            if isinstance(message, m.Ack):
                expected = message.expected
            if message is None:
                self.link.wait(0.1)


class _Played:
    """The run, in two lives of the server; the actors and the trainer are links to it."""

    def __init__(self, folder: Path) -> None:
        self._run_dir, self._public, self._local = folder / "run", f"ipc://{folder}/public", f"ipc://{folder}/local"
        self._chance = random.Random(1)
        self._trainer = Connection(self._local, m.Hello(m.PROTOCOL, "learner", "trainer"))
        self._versions = 0

    def run(self) -> None:
        with self._server(CAPACITIES):
            first, other = self._actor("a", "a0"), self._actor("b", "b0")
            self._ask("directives", BODIES[0], m.Direct(BODIES[0], None))
            for actor in (first, other):
                actor.push(3)
                actor.wait()
            self._ask("archived", [1, 2], m.Archived([1, 2]))
            self._ask("directives", BODIES[1], m.Direct(BODIES[1], None))
            for actor in (first, other):
                actor.push(5)
            self._rounds(first, other, 9)
            first.push(-first.pushed % 3 + 1)  # an episode that its actor will not end
            first.wait()
            first.link.close()
            second = self._actor("a", "a1", [["a0", first.pushed - 1]])
            self._rounds(second, other, 5)
        for link in (self._trainer, second.link, other.link):
            link.close()
        with self._server(CAPACITIES | ADDED):
            for link in (second.link, other.link):
                link.hello(10.0)
            self._ask("commands", "hold", m.Command("hold"))
            self._rounds(second, other, 8)

    @contextmanager
    def _server(self, capacities: dict[str, int]) -> Iterator[None]:
        from serl_launcher.store.server import Server

        server = Server(
            self._run_dir, capacities, public=self._public, local=self._local, inference="", archived=ARCHIVED
        )
        thread = threading.Thread(target=server.run)
        thread.start()
        try:
            yield
        finally:
            server.stop()
            thread.join()
            server.close()

    def _actor(self, name: str, session: str, earlier: Sequence[Sequence[Any]] = ()) -> Actor:
        actor = Actor(self._public, name, session, earlier)
        actor.link.hello(10.0)
        return actor

    def _ask(self, what: str, value: Any, request: m.Message) -> None:
        mark(asked=[what, value])
        self._trainer.call(request, 10.0)

    def _rounds(self, one: Actor, other: Actor, count: int) -> None:
        """Groups of records of both, some acknowledged before the next ones come; weights every fourth time."""
        for number in range(count):
            one.push(self._chance.randint(1, 3))
            other.push(self._chance.randint(1, 3))
            if self._chance.random() < 0.6 or number == count - 1:
                one.wait()
                other.wait()
            if number % 4 == 0:
                self._publish()

    def _publish(self) -> None:
        from serl_launcher.store import weights

        self._versions += 1
        sha256, size = weights.write(self._run_dir / "weights", random.Random(self._versions).randbytes(5000))
        self._ask("weights", sha256, m.Publish(sha256, size, self._versions))


# -- what must be left
@dataclass
class Promises:
    """All that was promised by the marks so far: {session: records}, and {number: what was asked for} of each kind."""

    run: str = ""
    expected: dict[str, int] = field(default_factory=dict)
    directives: dict[int, Any] = field(default_factory=dict)
    weights: dict[int, Any] = field(default_factory=dict)
    commands: dict[int, Any] = field(default_factory=dict)
    archived: dict[int, Any] = field(default_factory=dict)
    damaged: set[tuple[str, int]] = field(default_factory=set)  # (session, seq) of records that could not be sent
    _asked: tuple[str, Any] = ("", None)

    def add(self, said: dict[str, Any]) -> None:
        """One mark."""
        self.run = said.get("run", self.run)
        for session, expected in said.get("expected", ()):
            self.expected[session] = max(expected, self.expected.get(session, 0))
        if "asked" in said:
            self._asked = said["asked"]
        if "done" in said:
            what, value = self._asked
            getattr(self, what)[said["done"]] = value


def broken(run_dir: Path, promises: Promises) -> list[str]:
    """What of the promises the folder does not keep; nothing may have the store open."""
    with closing(sqlite3.connect(f"file:{run_dir}/store/index.sqlite?mode=ro", uri=True)) as index:
        return list(_Reader(run_dir, index, promises).complaints())


class _Reader:
    def __init__(self, run_dir: Path, index: sqlite3.Connection, promises: Promises) -> None:
        self._run_dir, self._index, self._promises = run_dir, index, promises
        self._sources = self._table("sources", "name, capacity, tail, head")
        self._sessions = dict(self._table("sessions", "session, expected"))
        self._episodes = {row[0]: row[1:] for row in self._table("episodes", "number, id, source, first, session")}

    def _table(self, name: str, columns: str) -> list[Any]:
        return self._index.execute(f"SELECT {columns} FROM {name}").fetchall()

    def complaints(self) -> Iterator[str]:
        promises = self._promises
        (run,) = self._index.execute("SELECT value FROM meta WHERE key = 'run'").fetchone()
        if promises.run not in ("", json.loads(run)):
            yield f"the store is of run {run}, not {promises.run}"
        yield from self._numbers()
        steps: dict[tuple[str, int], int] = {}
        for name, capacity, tail, head in self._sources:
            yield from self._source(name, capacity, tail, head, steps)
        for session, expected in promises.expected.items():
            if self._sessions.get(session, 0) < expected:
                yield f"session {session} is at {self._sessions.get(session)}, {expected} was acknowledged"
        for session, expected in self._sessions.items():
            yield from self._records(session, expected, steps)

    def _numbers(self) -> Iterator[str]:
        """Directives, weights and commands that were answered."""
        found = {
            "directives": {number: json.loads(body) for number, body in self._table("directives", "number, body")},
            "weights": dict(self._table("weights", "version, sha256")),
            "commands": dict(self._table("commands", "number, name")),
        }
        for what, there in found.items():
            for number, value in getattr(self._promises, what).items():
                if there.get(number) != value:
                    yield f"{what}: number {number} was given to {value}, and is {there.get(number)}"
        for numbers in self._promises.archived.values():
            if not set(numbers) <= {number for (number,) in self._table("archived", "number")}:
                yield f"the episodes {numbers} are not known as archived"
        for sha256 in [found["weights"][version] for version in sorted(found["weights"])[-2:]]:
            path = self._run_dir / "weights" / f"{sha256}.safetensors"
            if not path.exists() or hashlib.sha256(path.read_bytes()).hexdigest() != sha256:
                yield f"{path.name} is not what was published"

    def _source(
        self, name: str, capacity: int, tail: int, head: int, steps: dict[tuple[str, int], int]
    ) -> Iterator[str]:  # fmt: skip
        """Each step that a reader may draw is undamaged, and there once; they are added to `steps`."""
        folder, slots = self._run_dir / "store" / name, capacity + capacity // 8 + 64
        if tuple(np.fromfile(folder / "published", "<u8")) != (tail, head):
            yield f"source {name} publishes another range than [{tail}, {head})"
        least = capacity - capacity // 2 - capacity // 64 - 2 * STEPS  # half for a group; episodes leave whole
        if head > capacity and head - tail < least:
            yield f"source {name} has evicted all but [{tail}, {head})"
        records = np.fromfile(folder / "steps", STEP)
        rows = np.fromfile(folder / "rows", "u1")
        behind = _pages(slots * 432)  # where the images end and the states begin
        if (len(records), len(rows)) != (capacity, behind + _pages(slots * 12)):
            yield f"the files of source {name} are shorter than it"
            return
        images = rows[: slots * 432].reshape(slots, 12, 12, 3)
        states = rows[behind : behind + slots * 12].view("<f4").reshape(slots, 3)
        for number in range(tail, head):
            step = records[number % capacity]
            if step["number"] != number or int(step["episode"]) not in self._episodes:
                yield f"source {name}: step {number} is not there"
                return
            id, _, first, _ = self._episodes[int(step["episode"])]
            if (id, int(step["index"])) in steps:
                yield f"step {step['index']} of {id} is there twice"
            if first >= tail:  # of an older episode, what is above the tail is drawn no more
                steps[id, int(step["index"])] = number
            seen = [int(step[column]) % slots for column in ("row", "final_row") if step[column] >= 0]
            if not _is_as_made(id, step, images[seen], states[seen]):
                yield f"step {step['index']} of {id} is damaged"

    def _records(self, session: str, expected: int, steps: dict[tuple[str, int], int]) -> Iterator[str]:
        """All of this session's records below `expected` are there, in order, and none above."""
        episodes = {id: (source, first) for id, source, first, _ in self._episodes.values()}
        tails = {name: tail for name, _, tail, *_ in self._sources}
        outcomes = {row[0]: row[1:] for row in self._index.execute(
            "SELECT seq, episode, success, discard, judged_by FROM outcomes WHERE session = ?", (session,)
        )}  # fmt: skip
        lost = {seq for name, seq in self._table("lost", "session, seq") if name == session}
        mine, order = 0, []
        for seq in range(expected):
            made = record(session, seq)
            if isinstance(made, LostRecord) or (session, seq) in self._promises.damaged:
                if seq not in lost:
                    yield f"record {seq} of session {session} is not known as lost"
                continue
            if isinstance(made, Outcome):
                if outcomes.pop(seq, None) != (made.episode, made.success, made.discard, made.judged_by):
                    yield f"outcome {seq} of session {session} is not there"
                continue
            source, first = episodes.get(made.episode, ("", 0))
            if not source or first >= tails[source]:
                numbers = [steps.get((made.episode, index)) for index in range(made.start, made.start + STEPS)]
                order += [(source, number) for number in numbers]
                mine += STEPS
                if None in numbers:
                    yield f"record {seq} of session {session} is not there"
                    return
        there = sum(id.startswith(f"{session}-") for id, _ in steps)
        if outcomes or there != mine:
            yield f"session {session} has {there} steps and should have {mine}, and of nobody: {outcomes}"
        if order != sorted(order):
            yield f"the steps of session {session} do not lie in order"


def _pages(size: int) -> int:
    return size + -size % 4096


def _is_as_made(id: str, step: Any, images: Any, states: Any) -> bool:
    session, number = id.rsplit("-", 1)
    part, at = divmod(int(step["index"]), STEPS)
    made = record(session, int(number) * 3 + 2 * part)
    assert isinstance(made, Segment)
    last = made.ends and at == STEPS - 1
    flags = 4 * made.intervened[at] + 8 * made.chunk_start[at] + last * (made.terminated + 2 * made.truncated)
    said = (step["time"], step["reward"], step["flags"], step["directive"], step["weights"], *step["action"])
    meant = (made.time[at], made.reward[at], flags, made.stamp.directive, made.stamp.weights, *made.action[at])
    rows = slice(at, at + 1 + last)
    return (
        said == meant
        and np.array_equal(images, made.observation[IMAGE][rows])
        and np.array_equal(states, made.observation[STATE][rows])
    )


if __name__ == "__main__":
    _mark_answers()
    _Played(Path(sys.argv[1])).run()
