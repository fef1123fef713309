"""A short run of a real server that power.py records, all that it promised, and an independent look at what is left.

As a program it is the process that is recorded: a server with two actors whose records, groups and lives interleave,
directives, weights, evictions, a restart. Before an answer leaves, it is marked in the trace: all calls before the mark
are those on which the promise rests. What is left is read by tests/shared/oracle.py, which knows the files alone.
"""

import ctypes
import json
import random
import sqlite3
import sys
import threading
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, cast

import numpy as np
from serl_client import Feature, Outcome, Segment, Spec, Stamp
from serl_client import messages as m
from serl_client.connection import Connection
from serl_client.episode import LostRecord, QueuedRecord

from tests.shared.clients import RawActor
from tests.shared.common import until
from tests.shared.oracle import Found, opened

from . import checker
from .actor import facts_of

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
        episode, start, "reach", Stamp(1 if number == 0 else 2, "practise", seq % 2),
        {STATE: generator.random((rows, 3), "f4"), IMAGE: generator.integers(0, 255, (rows, 12, 12, 3), "u1")},
        generator.random((STEPS, 2), np.float32), generator.random(STEPS, np.float32), generator.random(STEPS) < 0.5,
        generator.random(STEPS) < 0.5, part + np.sort(generator.random(STEPS)),
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


class Actor(RawActor):
    """One life of an actor: it pushes the next records, and may wait for their acknowledgement."""

    pushed = 0

    def __init__(self, address: str, name: str, session: str, earlier: Sequence[Sequence[Any]] = ()) -> None:
        super().__init__(address, SPEC, name, session=session, outbox=f"outbox-{name}", earlier=earlier)

    def push_next(self, count: int) -> None:
        self.push(self.pushed, *[record(self.session, self.pushed + i) for i in range(count)])
        self.pushed += count

    def wait(self) -> None:
        until(lambda: self.hear() >= self.pushed or self.failed)
        assert not self.failed, self.failed


class _Played:
    """The run, in two lives of the server; the actors and the trainer are links to it."""

    def __init__(self, folder: Path) -> None:
        self._run_dir, self._public, self._local = folder / "run", f"ipc://{folder}/public", f"ipc://{folder}/local"
        self._chance = random.Random(1)
        self._trainer = Connection(self._local, m.Hello(m.PROTOCOL, "learner", "trainer"))
        self._versions = 0

    def run(self) -> None:
        with self._server(CAPACITIES):
            first, other = Actor(self._public, "a", "a0"), Actor(self._public, "b", "b0")
            for actor in (first, other):
                actor.welcome()
            self._publish()
            self._ask("directive", BODIES[0], m.Direct(BODIES[0], None))
            for actor in (first, other):
                actor.push_next(3)
                actor.wait()
            self._ask("archived", [1, 2], m.Archived([1, 2]))
            self._ask("directive", BODIES[1], m.Direct(BODIES[1], None))
            for actor in (first, other):
                actor.push_next(5)
            self._rounds(first, other, 9)
            first.push_next(-first.pushed % 3 + 1)  # an episode that its actor will not end
            first.wait()
            first.link.close()
            second = Actor(self._public, "a", "a1", [["a0", first.pushed - 1]])
            second.welcome()
            self._rounds(second, other, 5)
        for link in (self._trainer, second.link, other.link):
            link.close()
        with self._server(CAPACITIES | ADDED):
            for actor in (second, other):
                actor.welcome()
            self._ask("command", "hold", m.Command("hold"))
            self._rounds(second, other, 8)

    @contextmanager
    def _server(self, capacities: dict[str, int]) -> Iterator[None]:
        from serl_launcher.service.server import Server

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

    def _ask(self, what: str, value: Any, request: m.Message) -> None:
        mark(asked=[what, value])
        self._trainer.call(request, 10.0)

    def _rounds(self, one: Actor, other: Actor, count: int) -> None:
        """Groups of records of both, some acknowledged before the next ones come; weights every fourth time."""
        for number in range(count):
            one.push_next(self._chance.randint(1, 3))
            other.push_next(self._chance.randint(1, 3))
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
    """All that was promised by the marks so far: {session: records}, and the numbers that were given, as the checker
    takes them."""

    run: str = ""
    expected: dict[str, int] = field(default_factory=dict)
    numbers: list[dict[str, Any]] = field(default_factory=list)
    damaged: set[tuple[str, int]] = field(default_factory=set)  # (session, seq) of records that could not be sent
    _asked: tuple[str, Any] = ("", None)

    def add(self, said: dict[str, Any]) -> None:
        """One mark."""
        self.run = said.get("run", self.run)
        for session, expected in said.get("expected", ()):
            self.expected[session] = max(expected, self.expected.get(session, 0))
        self._asked = said.get("asked", self._asked)
        if "done" in said:
            self.given(self._asked[0], said["done"], self._asked[1])

    def given(self, what: str, number: int, value: Any) -> None:
        """The number was given to a directive, command or weights; or what is archived."""
        pair = {"weights": {"weights": [number, value]}, "archived": {"archived": value}}
        self.numbers.append(pair.get(what, {what: number, "body": value}))


@cache
def note(session: str, seq: int) -> dict[str, Any]:
    """What the actor knows of a record, as the checker takes it."""
    made = record(session, seq)
    return {"lost": True} if isinstance(made, LostRecord) else facts_of(made)


def broken(run_dir: Path, promises: Promises) -> list[str]:
    """What of the promises the folder does not keep; nothing may have the store open."""
    report, lives = checker.Report(), dict[str, checker.Life]()
    with opened(run_dir / "store") as index:
        found = Found(run_dir / "store", index, report.violations)
        for number, session in enumerate(sorted({*found.sessions, *promises.expected})):
            count = found.sessions[session]["expected"] if session in found.sessions else 0
            damaged = {seq for name, seq in promises.damaged if name == session}
            notes = {seq: {"lost": True} if seq in damaged else note(session, seq) for seq in range(count)}
            lives[session] = checker.Life(session, number, session, notes, promises.expected.get(session, 0))
        checker.compare(found, lives, (), report)
        _check_lost(index, lives, report)
        checker.check_numbers(index, promises.numbers, "the learner", report)
        ((run,),) = index.execute("SELECT value FROM meta WHERE key = 'run'")
        if promises.run not in ("", json.loads(run)):
            report.violations.append(f"the store is of run {run}, not {promises.run}")
        newest = [sha256 for (sha256,) in index.execute("SELECT sha256 FROM weights ORDER BY version DESC LIMIT 2")]
        checker.check_weights(run_dir / "weights", newest, report)
    return report.violations


def _check_lost(index: sqlite3.Connection, lives: dict[str, checker.Life], report: checker.Report) -> None:
    wanted = {(session, seq) for session, life in lives.items() for seq, one in life.records.items() if "lost" in one}
    if wanted != {tuple(row) for row in index.execute("SELECT session, seq FROM lost")}:
        report.violations.append(f"other records than {sorted(wanted)} are known as lost")


if __name__ == "__main__":
    _mark_answers()
    _Played(Path(sys.argv[1])).run()
