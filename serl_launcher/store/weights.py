"""Writes and serves published weights, as immutable files named by their sha256. No torch.

Beside each lies <sha256>.checksums, the checksums of its parts. Both are of the same bytes in the trainer's memory, so
that a receiver finds what this disk has damaged since, and the server computes nothing.
"""

import hashlib
import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from serl_client import clock
from serl_client.errors import Refused
from serl_client.spec import Array
from serl_client.weights import PART_BYTES, part_checksum

from serl_launcher.store.files import make_folder, sync_folder, write_synced

CHECKSUM_BYTES = 16
POPULATE_READ = 22  # MADV_POPULATE_READ of Linux 5.14
PULL_S = 30.0  # a file that was asked for this recently is not deleted


def write(folder: Path, data: bytes | memoryview, sha256: str | None = None) -> tuple[str, int]:
    """Keep `data` (a safetensors file) as <sha256>.safetensors; returns (sha256, size). Durable when it returns. Files
    that are there and whole stay as they are.

    sha256: that of `data`, where it is known already.
    """
    make_folder(folder)
    for left in folder.glob("*.part"):  # by a trainer or a server that was killed, or that found no room
        left.unlink(missing_ok=True)
    sha256, size = sha256 or hashlib.sha256(data).hexdigest(), len(data)
    parts = (memoryview(data)[begin : begin + PART_BYTES] for begin in range(0, size, PART_BYTES))
    checksums = b"".join(bytes.fromhex(part_checksum(part, sha256, size, i)) for i, part in enumerate(parts))
    files = ((_checksums(folder, sha256), checksums), (path(folder, sha256), data))
    for file, content in () if _is_whole(folder, sha256, checksums) else files:
        aside = folder / f"{sha256}.{os.getpid()}{file.suffix}.part"
        write_synced(aside, content)
        aside.rename(file)
    sync_folder(folder)
    return sha256, size


def written_at(file: Path) -> int:
    """Return when a file was written, in ns since 1970; 0: it is gone."""
    try:
        return file.stat().st_mtime_ns
    except OSError:
        return 0


def _is_whole(folder: Path, sha256: str, checksums: bytes) -> bool:
    try:
        with open(path(folder, sha256), "rb") as file:
            is_read = hashlib.file_digest(file, "sha256").hexdigest() == sha256
        return is_read and _checksums(folder, sha256).read_bytes() == checksums
    except OSError:
        return False


def path(folder: Path, sha256: str) -> Path:
    return folder / f"{sha256}.safetensors"


def _checksums(folder: Path, sha256: str) -> Path:
    return folder / f"{sha256}.checksums"


class WeightFiles:
    """The weights folder as the server serves it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._asked: dict[str, float] = {}
        self.mapped: dict[str, tuple[mmap.mmap, bytes, int]] = {}  # the file, its checksums, when it was written
        self._beside = ThreadPoolExecutor(1, "deletes weights")  # it takes 0.3 s for each GB that was in memory

    def read(self, sha256: str, part: int) -> tuple[Array, str]:
        """Return a part of a published file, without a copy, and its checksum. Raises Refused when it is gone or has no
        such part, and OSError when it cannot be read."""
        try:
            mapped, checksums, written = self.mapped.get(sha256) or self._open(sha256)
            if written != written_at(path(self.folder, sha256)):  # a damaged file was written anew
                mapped, checksums, _ = self._open(sha256)
        except FileNotFoundError:
            raise Refused(f"the weights {sha256[:12]} are gone: take the newest") from None
        self._asked[sha256] = clock.monotonic()
        begin, end = part * PART_BYTES, min((part + 1) * PART_BYTES, len(mapped))
        if not 0 <= begin < end:
            raise Refused(f"the weights {sha256[:12]} have no part {part}")
        checksum = checksums[part * CHECKSUM_BYTES :][:CHECKSUM_BYTES].hex()
        try:
            mapped.madvise(POPULATE_READ, begin, end - begin)  # whoever sends what cannot be read would die of it
        except OSError:  # or an older Linux
            with open(path(self.folder, sha256), "rb") as file:
                return np.frombuffer(os.pread(file.fileno(), end - begin, begin), np.uint8), checksum
        return np.frombuffer(mapped, np.uint8)[begin:end], checksum

    def _open(self, sha256: str) -> tuple[mmap.mmap, bytes, int]:
        written = written_at(path(self.folder, sha256))
        with open(path(self.folder, sha256), "rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.mapped[sha256] = mapped, _checksums(self.folder, sha256).read_bytes(), written
        return self.mapped[sha256]

    def clean(self, newest: list[dict[str, Any]]) -> None:
        """Delete what is neither one of the `newest` versions nor being pulled (checkpoints hold their own)."""
        needed = {version["sha256"] for version in newest}
        recent = clock.monotonic() - PULL_S
        self._asked = {sha256: asked for sha256, asked in self._asked.items() if asked > recent}
        needed |= self._asked.keys()
        for file in self.folder.iterdir():
            if file.suffix in (".safetensors", ".checksums") and file.stem not in needed:
                gone = file.rename(file.with_suffix(f"{file.suffix}.part"))  # the next of its name is another
                self._beside.submit(_delete, gone, self.mapped.pop(file.stem, None))


def _delete(file: Path, _opened: object) -> None:
    """Delete a file; the last reference to its mapping ends here, too."""
    file.unlink(missing_ok=True)
