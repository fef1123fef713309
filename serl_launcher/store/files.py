"""Writes and syncs the open files of one source, for the server alone: into rings, with every byte or an error."""

import ctypes
import errno
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from serl_client.errors import ConfigError
from serl_client.spec import Array, Spec

from serl_launcher.store import layout
from serl_launcher.store.layout import Layout

log = logging.getLogger(__name__)

IOV_MAX = 1024
LEFT_FREE = 16 << 20  # bytes that weights and checkpoints leave free on the disk, so that the store can go on
BEGIN_WRITING = ctypes.CDLL(None).sync_file_range  # Linux; it waits for nothing, and a failure shows at the sync
BEGIN_WRITING.argtypes = ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint
SYNC_FILE_RANGE_WRITE = 2


class SourceFiles:
    """The open files of one source."""

    def __init__(self, folder: Path, files: Layout) -> None:
        """Raises ConfigError as `check_sizes` does."""
        self.layout = files
        check_sizes(folder, files)
        self._fds = {name: os.open(folder / name, os.O_RDWR) for name in ("rows", "steps")}
        self._published = layout.published(folder, writable=True)
        self._beside = ThreadPoolExecutor(len(self._fds), f"sync {folder.name}")
        self._begun: dict[str, Future[None]] = {}

    def write(self, name: str, offset: int, slots: int, start: int, arrays: list[Array]) -> None:
        """Write [n, ...] arrays one after the other into the ring of `slots` items at `offset`, from number `start`.

        They set out for the disk at once, so that it has begun when the last is written.
        """
        itemsize, fd = arrays[0][:1].nbytes, self._fds[name]
        for slot, pieces in _runs(start, slots, arrays):
            begin, size = offset + slot * itemsize, sum(map(len, pieces))
            _write_all(fd, begin, pieces)
            BEGIN_WRITING(fd, begin, size, SYNC_FILE_RANGE_WRITE)

    def begin_sync(self, name: str) -> None:
        """Begin to sync a file, beside what goes on here: the two at once take hardly longer than one."""
        self._begun[name] = self._beside.submit(os.fdatasync, self._fds[name])

    def sync(self) -> None:
        """Sync what has not begun to be, and wait for both. Raises OSError."""
        for name in self._fds.keys() - self._begun.keys():
            self.begin_sync(name)
        begun, self._begun = self._begun, {}
        for each in begun.values():
            each.result()

    @property
    def published(self) -> int:
        """The head that readers see: what was committed once."""
        return int(self._published[1])

    def publish(self, tail: int, head: int) -> None:
        self._published[0] = tail  # first: a reader that sees the new head must not see an older tail
        self._published[1] = head

    def close(self) -> None:
        self._beside.shutdown()
        for fd in self._fds.values():
            os.close(fd)


def check_sizes(folder: Path, files: Layout) -> None:
    """Raise ConfigError if a file of a source is not there, or not of the size that it was made with."""
    for name, size in sizes(files):
        found = (folder / name).stat().st_size if (folder / name).exists() else None
        if found != size:
            raise ConfigError(
                f"{folder / name} should have {size} bytes, not {found}: it was damaged; take a copy of the run's "
                "folder, or begin another run_dir"
            )


def sizes(files: Layout) -> tuple[tuple[str, int], ...]:
    """(name, bytes) of each file of a source."""
    return ("rows", files.rows_bytes), ("steps", files.steps_bytes), ("published", 16)


def allocate(folder: Path, spec: Spec, capacities: Mapping[str, int]) -> None:
    """Make the files of new sources, in full, and say first how large they will be. What lies there of them is deleted:
    their making was interrupted, so no index knows of a step in it."""
    layouts = {name: Layout(spec, capacity) for name, capacity in capacities.items()}
    for name, files in layouts.items():
        for file, _ in sizes(files):
            (folder / name / file).unlink(missing_ok=True)
    log.info("the files of the replay buffer are made in %s: %s", folder, layout.check_space(folder, layouts))
    for name, files in layouts.items():
        (folder / name).mkdir(exist_ok=True)
        for file, size in sizes(files):
            with open(folder / name / file, "wb") as handle:
                os.posix_fallocate(handle.fileno(), 0, size)
                os.fsync(handle.fileno())
        sync_folder(folder / name)
    sync_folder(folder)


def _runs(start: int, slots: int, arrays: list[Array]) -> Iterator[tuple[int, list[memoryview]]]:
    """(slot, pieces): what lies in consecutive slots of the ring, cut where it wraps."""
    slot, free, pieces = start % slots, slots - start % slots, []
    for array in arrays:
        while len(array) > free:
            pieces.append(_bytes(array[:free]))
            yield slot, pieces
            array, slot, free, pieces = array[free:], 0, slots, []
        pieces.append(_bytes(array))
        free -= len(array)
    yield slot, pieces


def _bytes(array: Array) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _write_all(fd: int, offset: int, pieces: list[memoryview]) -> None:
    pieces = [piece for piece in pieces if len(piece)]
    while pieces:
        written = os.pwritev(fd, pieces[:IOV_MAX], offset)
        offset += written
        while pieces and written >= len(pieces[0]):
            written -= len(pieces.pop(0))
        if written:
            pieces[0] = pieces[0][written:]


def write_synced(path: Path, data: bytes | memoryview) -> None:
    """Write a file whose content survives a power cut. Raises OSError, and leaves no part of it, where the disk fails,
    or would have less than LEFT_FREE for the index and the log."""
    try:
        if len(data) + LEFT_FREE > shutil.disk_usage(path.parent).free:
            raise OSError(errno.ENOSPC, f"no room for {len(data):,} bytes and {LEFT_FREE:,} more", str(path))
        with open(path, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        path.unlink(missing_ok=True)
        raise


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """Give the name of a file to write aside, which takes the place of `path` at once. After an error it is removed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.aside")
    try:
        yield aside
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    aside.replace(path)


def make_folder(folder: Path) -> None:
    """Make a folder, and those above it that are not there, so that they survive a power cut."""
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in made:
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make what was created or renamed in a folder survive a power cut."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
