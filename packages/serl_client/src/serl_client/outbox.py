"""The outbox: sealed records that nobody has acknowledged yet, in append-only files; what is in them survives kill -9.

A file holds records of one epoch and is unlinked when its last one is acknowledged, which works on a full disk too.
Nothing is synced. Reading uses pread: a bad sector is then an OSError, and not the SIGBUS of a mapping, which would
end the process that moves the robot.
"""

import errno
import fcntl
import logging
import os
import secrets
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from serl_client import wire
from serl_client.errors import ConfigError, MessageError

log = logging.getLogger(__name__)

FILE_BYTES = 8 << 20
SLICE_BYTES = 512 << 10  # one Push: on a slow link a longer frame would hold up the heartbeat behind it


@dataclass(slots=True, eq=False)
class _File:
    path: Path
    epoch: str
    first: int  # seq of its first record
    ends: list[int] = field(default_factory=list)  # where each record ends

    @property
    def size(self) -> int:
        return self.ends[-1] if self.ends else 0

    @property
    def end(self) -> int:
        return self.first + len(self.ends)

    def size_below(self, seq: int) -> int:
        return self.ends[min(seq, self.end) - self.first - 1] if seq > self.first else 0


class Outbox:
    """A folder of unacknowledged records of one actor, at most `capacity` bytes.

    `id` names the folder and `run` the run that its records belong to ("" as long as it is bound to none; an outbox
    that is empty when it is opened belongs to no run). All but `pending` is used by one thread. Raises ConfigError
    when another process has the folder open.
    """

    def __init__(self, folder: Path, capacity: int) -> None:
        self.folder = folder
        self.fault = ""  # why the last append failed
        self._capacity = capacity
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = _locked(folder)
        self._files: list[_File] = []  # in the order of writing; replaced, never changed: `pending` reads it
        self._expected: dict[str, int] = {}  # first unacknowledged seq of an epoch
        self._bytes = 0
        self._number = 0
        self._tail: tuple[_File, int] | None = None  # the file that is written, and its descriptor
        self._load()
        if not self._files:
            (folder / "run").unlink(missing_ok=True)
        self.run = _text(folder / "run")
        self.id = _text(folder / "id") or secrets.token_hex(16)
        _publish(folder / "id", self.id)

    def bind(self, run: str) -> None:
        """From now on all that lies here belongs to `run`. Raises OSError."""
        _publish(self.folder / "run", run)
        self.run = run

    @property
    def epochs(self) -> dict[str, tuple[int, int]]:
        """{epoch: (first unacknowledged seq, end)} of the epochs that have some, oldest first."""
        spans: dict[str, tuple[int, int]] = {}
        for file in self._files:
            first = spans[file.epoch][0] if file.epoch in spans else self._first(file)
            spans[file.epoch] = (first, file.end)
        return spans

    @property
    def pending(self) -> tuple[int, int]:
        """(records, bytes) that are not acknowledged."""
        files = self._files
        left = [(file.end - self._first(file), file.size - file.size_below(self._first(file))) for file in files]
        return sum(records for records, _ in left), sum(size for _, size in left)

    def append(self, epoch: str, seq: int, record: Sequence[wire.Buffer]) -> bool:
        """Write one sealed record. False, with the reason in `fault`, if it is not in the outbox as a whole."""
        size = sum(len(part) for part in record)
        if self._bytes + size > self._capacity:
            self.fault = f"the outbox {self.folder} is full: {self._capacity >> 20} MiB"
            return False
        try:
            file, descriptor = self._writable(epoch, seq)
            if os.writev(descriptor, record) != size:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            self.fault = f"the outbox {self.folder} cannot be written: {error}"
            self._cut_back()
            return False
        if not file.ends:
            self._files = [*self._files, file]
        file.ends.append(file.size + size)
        self._bytes += size
        self.fault = ""
        return True

    def read(self, epoch: str, seq: int, limit: int) -> tuple[int, bytes]:
        """(next seq, bytes) of whole records from `seq` on: about SLICE_BYTES, at most `limit`. Raises OSError."""
        file = next(file for file in self._files if file.epoch == epoch and file.first <= seq < file.end)
        begin, index = file.size_below(seq), seq - file.first
        if file.ends[index] - begin > limit:
            return seq, b""
        stop = max(index + 1, bisect_right(file.ends, begin + min(limit, SLICE_BYTES)))
        with open(file.path, "rb", buffering=0) as opened:
            data = os.pread(opened.fileno(), file.ends[stop - 1] - begin, begin)
        if len(data) != file.ends[stop - 1] - begin:
            raise OSError(errno.EIO, f"{file.path} is shorter than it was")
        return file.first + stop, data

    def acknowledge(self, epoch: str, expected: int) -> None:
        """Records of `epoch` below `expected` are durable elsewhere; files without any other are unlinked."""
        self._expected[epoch] = max(expected, self._expected.get(epoch, 0))
        done = [file for file in self._files if file.epoch == epoch and file.end <= expected]
        if not done:
            return
        self._files = [file for file in self._files if file not in done]
        for file in done:
            self._bytes -= file.size
            if self._tail and self._tail[0] is file:
                self._close_tail()
            with suppress(OSError):  # it would come back at the next start, and be acknowledged again
                file.path.unlink()

    def close(self) -> None:
        """May be called twice."""
        self._close_tail()
        self._lock.close()

    def _first(self, file: _File) -> int:
        return min(max(file.first, self._expected.get(file.epoch, 0)), file.end)

    def _writable(self, epoch: str, seq: int) -> tuple[_File, int]:
        if self._tail and self._tail[0].size >= FILE_BYTES:
            self._close_tail()
        if self._tail is None:
            path = self.folder / f"{self._number + 1:08d}-{epoch}-{seq}.records"
            self._tail = _File(path, epoch, seq), os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            self._number += 1
        return self._tail

    def _cut_back(self) -> None:
        """Remove what a failed write left; where even that fails, the next record begins a new file."""
        if self._tail is None:
            return
        file, descriptor = self._tail
        try:
            os.ftruncate(descriptor, file.size)
        except OSError:
            self._close_tail()

    def _close_tail(self) -> None:
        if self._tail:
            os.close(self._tail[1])
            self._tail = None

    def _load(self) -> None:
        ends: dict[str, int] = {}
        for path in sorted(self.folder.glob("*.records")):
            number, epoch, first = path.stem.split("-")
            self._number = int(number)
            file = _File(path, epoch, int(first), _scan(path.read_bytes(), int(first)))
            if file.size < path.stat().st_size:
                log.warning("%s: the last %d bytes are no whole record", path, path.stat().st_size - file.size)
            if not file.ends or ends.setdefault(epoch, file.first) != file.first:
                log.warning("%s does not continue what lies before it; dropped", path)
                path.unlink()
                continue
            ends[epoch] = file.end
            self._files.append(file)
            self._bytes += file.size


def _scan(data: bytes, first: int) -> list[int]:
    """Where each of the whole, undamaged records that begin `data` ends; the first has the number `first`."""
    view, ends, begin = memoryview(data), [], 0
    with suppress(MessageError):
        while begin < len(view):
            end = begin + wire.sealed_length(view[begin:])
            if next(wire.unseal(view[begin:end]))[0] != first + len(ends):
                break
            ends.append(end)
            begin = end
    return ends


def _locked(folder: Path) -> IO[str]:
    lock = os.fdopen(os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600), "r+")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        with lock:
            lock.seek(0)
            raise ConfigError(
                f"the outbox {folder} is in use by process {lock.read()}: stop it, or give this actor a folder of "
                "its own"
            ) from None
    with suppress(OSError):  # a full disk
        lock.truncate(0)
        os.write(lock.fileno(), str(os.getpid()).encode())
    return lock


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def _publish(path: Path, text: str) -> None:
    aside = path.with_suffix(".new")
    aside.write_text(text)
    aside.replace(path)
