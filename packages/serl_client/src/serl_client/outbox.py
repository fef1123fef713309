"""Keeps unacknowledged records in a write-ahead log on the actor's disk (the outbox), which survives kill -9.

A file holds records of one session. When its last one is acknowledged it is unlinked, which works on a full disk too.
While much is written it is reused instead, because the pages of a new file cost more than the rest of the work on a
record. Its old content are records of the same session with lower numbers, which a scan ignores. Nothing is synced.
A large record that was just appended is sent from memory (`recent.py`), once. A small one, and what is sent again or
lay in the folder, is read by pread, so that a bad sector is an OSError. A mapping would get SIGBUS, which ends us.

If the disk damages a record, a `LostRecord` with its number is sent in its place. The later records of its episode are
lost too, because they cannot be stored without it. The files stay until all of these are acknowledged, so that the next
start finds the same records lost. Then they are kept as *.damaged.
"""

import errno
import itertools
import logging
import math
import os
import re
import secrets
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import serl_client.clock as clock
import serl_client.messages as messages
import serl_client.wire as wire
from serl_client.episode import LostRecord
from serl_client.errors import ConfigError, MessageError
from serl_client.lockfile import lock_folder, sign
from serl_client.recent import RecentRecords

log = logging.getLogger(__name__)

NAMED = re.compile(r"(\d+)-([^-]+)-(\d+)")  # number, session and first record of a file
FILE_BYTES = 8 << 20
SPARE_FILES = 4  # files that are kept for reuse
SPARE_SECONDS = 2.0  # a file is reused at most at this age: the kernel writes older pages to the disk, for nothing
SLICE_BYTES = 512 << 10  # of one Push: a longer frame would delay the heartbeat on a slow link


@dataclass(slots=True, eq=False)
class _File:
    path: Path
    session: str
    first: int  # seq of its first record
    ends: list[int] = field(default_factory=list)  # end of each record, bytes
    lost: dict[int, bytes] = field(default_factory=dict)  # seq -> what is sent in place of that record
    born: float = field(default_factory=clock.monotonic)
    needed: float = 0  # the file stays until every record below this seq is acknowledged

    @property
    def size(self) -> int:
        return self.ends[-1] if self.ends else 0

    @property
    def end(self) -> int:
        return self.first + len(self.ends)

    def size_below(self, seq: int) -> int:
        return self.ends[min(seq, self.end) - self.first - 1] if seq > self.first else 0


class Outbox:
    """Keeps the unacknowledged records of one actor in a folder.

    capacity: limit of all records, bytes.

    `id` names the folder. `run` names the run that its records belong to; it is "" while they belong to none, as after
    opening an empty outbox. One thread uses all but `pending`. Raises ConfigError when another process has the folder
    open, or its disk fails.
    """

    def __init__(self, folder: Path, capacity: int) -> None:
        self.folder = folder
        self.fault = ""  # why the last append failed
        self._capacity = capacity
        folder.mkdir(0o700, parents=True, exist_ok=True)
        taken = "the outbox {} is in use by process {}: stop it, or give this actor a name of its own (name=...)"
        self._lock = lock_folder(folder, lambda process: taken.format(folder, process))
        sign(self._lock)
        self._files: list[_File] = []  # in the order of writing; replaced, never changed: `pending` reads it
        self._expected: dict[str, int] = {}  # first unacknowledged seq of a session
        self._writing = ""  # the session that grows
        self._doubted: dict[str, float] = {}  # records of a session below this seq are checked before they are sent
        self._seen: dict[str, int] = {}  # records of a session below this seq were checked
        self._cut: dict[str, _File] = {}  # sessions whose latest episode lacks a record, and the file of that record
        self._recent = RecentRecords()  # of that session
        self._bytes = 0
        self._number = 0
        self._tail: tuple[_File, int] | None = None  # the file under writing, and its descriptor
        self._spares: list[_File] = []  # files for reuse, of the session under writing
        try:
            self._load()
            self.run, self.id = self._names()
        except OSError as error:
            self._lock.close()
            raise ConfigError(
                f"the outbox {folder} cannot be used: {error}; make room there, or mend its disk"
            ) from None
        except ConfigError:
            self._lock.close()
            raise

    def bind(self, run: str) -> None:
        """Bind every record in the folder to `run`. Raises OSError."""
        _publish(self.folder / "run", run)
        self.run = run

    @property
    def sessions(self) -> dict[str, tuple[int, int]]:
        """Return {session: (first unacknowledged seq, end)}, oldest session first."""
        spans: dict[str, tuple[int, int]] = {}
        for file in self._files:
            first, _ = spans.get(file.session) or (max(file.first, self._expected.get(file.session, 0)), 0)
            spans[file.session] = (first, file.end)
        return {session: (min(first, end), end) for session, (first, end) in spans.items()}

    @property
    def expected(self) -> dict[str, int]:
        """Return {session: first unacknowledged seq}, also of sessions of which nothing is left."""
        return {**self._expected, **{session: first for session, (first, _) in self.sessions.items()}}

    @property
    def pending(self) -> tuple[int, int]:
        """Return the number of unacknowledged records and their bytes."""
        files = self._files
        left = [(file.end - self._first(file), file.size - file.size_below(self._first(file))) for file in files]
        return sum(records for records, _ in left), sum(size for _, size in left)

    def lost(self, session: str) -> set[int]:
        """Return the numbers of the unacknowledged records in whose place a LostRecord is sent."""
        return {seq for file in self._files if file.session == session for seq in file.lost}

    def append(self, session: str, seq: int, record: Sequence[wire.Buffer]) -> bool:
        """Write one encoded record. If that fails, return False, with the reason in `fault`."""
        size = sum(len(part) for part in record)
        if self._bytes + size + sum(spare.size for spare in self._spares) > self._capacity:
            self._drop_spares()
        if self._bytes + size > self._capacity:
            self.fault = f"the outbox {self.folder} is full: {self._capacity >> 20} MiB"
            return False
        try:
            file, descriptor = self._writable(session, seq)
            if os.pwritev(descriptor, record, file.size) != size:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            self.fault = f"the outbox {self.folder} cannot be written: {error}"
            self._cut_back()
            return False
        if not file.ends:
            self._files = [*self._files, file]
        if session != self._writing:
            self._recent = RecentRecords()
        self._writing = session
        self._recent.add(seq, size, record)
        file.ends.append(file.size + size)
        self._bytes += size
        self.fault = ""
        return True

    def read(self, session: str, seq: int, limit: int, *, alone: bool = False) -> tuple[int, list[wire.Buffer]]:
        """Return (next seq, buffers) of whole records from `seq` on: about SLICE_BYTES, and at most `limit`.

        alone: the first record may exceed `limit`.

        The first reading finds the latest large records in memory; every other reads the file. Raises OSError.
        """
        file = next(file for file in self._files if file.session == session and file.first <= seq < file.end)
        begin, index = file.size_below(seq), seq - file.first
        if file.ends[index] - begin > limit and not alone:
            return seq, []
        stop = max(index + 1, bisect_right(file.ends, begin + min(limit, SLICE_BYTES)))
        recent = self._recent.take(seq, file.first + stop) if session == self._writing else []
        is_doubted = file.lost or session in self._cut or seq < self._doubted.get(session, 0)
        if recent and not is_doubted:
            return file.first + stop, recent
        size = file.ends[stop - 1] - begin
        if self._tail and self._tail[0] is file:
            data = os.pread(self._tail[1], size, begin)
        else:
            with open(file.path, "rb", buffering=0) as opened:
                data = os.pread(opened.fileno(), size, begin)
        if len(data) != size:
            raise OSError(errno.EIO, f"{file.path} is shorter than it was")
        if is_doubted:
            data = b"".join(self._looked_at(file, *record) for record in _records(file, index, stop, data))
        return file.first + stop, [data]

    def recheck(self, session: str, end: int) -> None:
        """Check each record of `session` below `end` before sending it again: the server received damaged data."""
        expected = self._expected.get(session, 0)
        self._doubted[session] = max(end, self._doubted.get(session, 0))
        self._seen[session] = min(expected, self._seen.get(session, 0))
        if any(max(file.lost, default=-1) >= expected for file in self._files if file.session == session):
            self._cut.pop(session, None)  # the check finds it again

    def acknowledge(self, session: str, expected: int) -> None:
        """Remove the files whose records are all below `expected`: these are durable at the server."""
        expected = self._expected[session] = max(expected, self._expected.get(session, 0))
        mine = [file for file in self._files if file.session == session]
        is_over = bool(mine) and session != self._writing and mine[-1].end <= expected
        done = list(itertools.takewhile(lambda file: is_over or max(file.end, file.needed) <= expected, mine))
        for file in done:
            if self._tail and self._tail[0] is file:
                self._close_tail()
            try:
                with suppress(FileNotFoundError):
                    self._spare(file)
            except OSError:  # none goes before it: a hole between two files is taken for a loss
                return
            self._files = [other for other in self._files if other is not file]
            self._bytes -= file.size

    def close(self) -> None:
        """Give the folder back; may be called twice."""
        self._close_tail()
        self._drop_spares()
        self._lock.close()

    def _first(self, file: _File) -> int:
        return min(max(file.first, self._expected.get(file.session, 0)), file.end)

    def _writable(self, session: str, seq: int) -> tuple[_File, int]:
        if self._tail and self._tail[0].size >= FILE_BYTES:
            self._close_tail()
        if session != self._writing:
            self._drop_spares()
        if self._tail is None:
            path = self.folder / f"{self._number + 1:08d}-{session}-{seq}.records"
            if self._spares:
                with suppress(OSError):
                    self._spares.pop().path.rename(path)
            self._tail = _File(path, session, seq), os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            self._number += 1
        return self._tail

    def _cut_back(self) -> None:
        """Remove what a failed write left. If that fails too, the next record begins a new file."""
        if self._tail is None:
            return
        file, descriptor = self._tail
        try:
            os.ftruncate(descriptor, file.size)
        except OSError:
            self._close_tail()

    def _spare(self, file: _File) -> None:
        """Unlink a file, or keep it: for reuse, or because it is damaged. Raises OSError."""
        if file.lost:
            kept = file.path.replace(file.path.with_suffix(".damaged"))
            log.warning("%s holds records that could not be sent; it stays until you delete it", kept)
            return
        is_quick = file.session == self._writing and clock.monotonic() < file.born + SPARE_SECONDS
        if is_quick and len(self._spares) < SPARE_FILES and file.size <= 2 * FILE_BYTES:
            with suppress(OSError):  # a new name may need room on a full disk
                file.path = file.path.rename(file.path.with_suffix(".spare"))
                self._spares.append(file)
                return
        file.path.unlink()

    def _drop_spares(self) -> None:
        for spare in self._spares:
            with suppress(OSError):
                spare.path.unlink()
        self._spares = []

    def _close_tail(self) -> None:
        if self._tail:
            os.close(self._tail[1])
            self._tail = None

    def _names(self) -> tuple[str, str]:
        """Return the names of the run and of the folder. They are written only once: the disk may be full now."""
        if not self._files:
            (self.folder / "run").unlink(missing_ok=True)
        run, id = _text(self.folder / "run"), _text(self.folder / "id")
        if not id:
            id = secrets.token_hex(16)
            _publish(self.folder / "id", id)
        return run, id

    def _load(self) -> None:
        """Take in the files of earlier sessions. Raises ConfigError for a file that cannot be read."""
        for path in self.folder.glob("*.spare"):
            with suppress(OSError):  # nothing reads it
                path.unlink()
        latest: dict[str, _File] = {}
        for path in sorted(self.folder.glob("*.records")):
            if not (named := NAMED.fullmatch(path.stem)):
                raise ConfigError(f"{path} has no name of an outbox's file: move it out of this folder")
            self._number, session, first = int(named[1]), named[2], int(named[3])
            file = _scanned(_File(path, session, first))
            if (before := latest.get(session)) is not None:
                del before.ends[max(0, file.first - before.first) :]  # a write that failed, whole and not taken back
                _miss(before, file.first, before.size)
            latest[session] = file
            self._files.append(file)
        for file in [file for file in self._files if not file.ends]:
            log.warning("%s holds no whole record; dropped", file.path)
            self._files.remove(file)
            file.path.unlink()
        for session in {file.session for file in self._files if file.lost}:
            for file in [file for file in self._files if file.session == session]:
                for seq, record in _records(file, 0, len(file.ends), file.path.read_bytes()):
                    self._looked_at(file, seq, record)
        self._bytes = sum(file.size for file in self._files)

    def _looked_at(self, file: _File, seq: int, record: bytes) -> bytes:
        """Check the record `seq`, and return what is sent for it: the record, or a LostRecord."""
        if seq < self._seen.get(file.session, 0):
            return file.lost.get(seq, record)
        self._seen[file.session] = seq + 1
        header = None if seq in file.lost else _header(record, seq)
        if header is None:
            self._doubted[file.session] = math.inf  # a disk that has damaged one may have damaged more
            self._cut.setdefault(file.session, file).needed = math.inf
            log.error("%s: record %d is damaged, it and the rest of its episode are lost", file.path, seq)
            self._lose(file, seq, "the actor's disk has damaged it")
        elif file.session in self._cut and header.get("start"):
            self._lose(file, seq, "its episode lacks an earlier record")
        elif file.session in self._cut and "start" in header:
            self._cut.pop(file.session).needed = seq
        return file.lost.get(seq, record)

    @staticmethod
    def _lose(file: _File, seq: int, why: str) -> None:
        file.lost[seq] = b"".join(bytes(part) for part in messages.encode_record(seq, LostRecord(why)))


def _scanned(file: _File) -> _File:
    """Return the file with the ends of the records that were found in it."""
    try:
        data = file.path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"{file.path} cannot be read: {error}. If the file cannot be saved, put an empty one of the "
            "same name in its place: its records are lost then, and the rest is sent"
        ) from None
    begin = 0
    while (found := _next_record(data, begin, file.end)) is not None:
        seq, begin, end = found
        _miss(file, seq, begin)
        file.ends.append(end)
        begin = end
    return file


def _miss(file: _File, end: int, size: int) -> None:
    """Mark the records from the end of `file` up to `end` as missing; the bytes in their place end at `size`."""
    missing = range(file.end, end)
    file.lost.update(dict.fromkeys(missing, b""))
    file.ends += [size] * len(missing)


def _next_record(data: bytes, begin: int, seq: int) -> tuple[int, int, int] | None:
    """Return (number, begin, end) of the first undamaged record from `begin` on with a number of at least `seq`."""
    view, start = memoryview(data), begin
    while (begin := data.find(wire.MAGIC, begin)) >= 0:
        with suppress(MessageError):
            end = begin + wire.record_length(view[begin:])
            number, _, _ = next(wire.decode_records(view[begin:end]))
            if 0 <= (number - seq) * wire.PREFIX.size <= begin - start:  # as many as can lie before it
                return number, begin, end
        begin += 1
    return None


def _records(file: _File, begin: int, stop: int, data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield (seq, record) for the indices [begin, stop); `data` begins with the first of these records."""
    low = offset = file.size_below(file.first + begin)
    for index in range(begin, stop):
        yield file.first + index, data[low - offset : file.ends[index] - offset]
        low = file.ends[index]


def _header(record: bytes, seq: int) -> dict[str, Any] | None:
    """Return the header of one record, or None if the record is damaged."""
    try:
        (number, header, _), *others = wire.decode_records(record)
    except (MessageError, ValueError):
        return None
    return header if number == seq and not others else None


def _text(path: Path) -> str:
    try:
        return path.read_text() if path.exists() else ""
    except ValueError:
        raise ConfigError(f"{path} is damaged: delete it, and the next learner gets the records beside it") from None


def _publish(path: Path, text: str) -> None:
    aside = path.with_suffix(".new")
    aside.write_text(text)
    aside.replace(path)
