"""Weights as immutable files named by their sha256: written aside, synced, renamed, then only read. No torch."""

import hashlib
import mmap
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
from serl_client.errors import Refused
from serl_client.spec import Array

from serl_launcher.store.files import make_folder, sync_folder

CHUNK = 4 << 20
POPULATE_READ = 22  # MADV_POPULATE_READ of Linux 5.14
PULL_S = 30.0  # a file that was asked for this recently is not deleted


def write(folder: Path, data: bytes | memoryview, sha256: str | None = None) -> tuple[str, int]:
    """Keep `data` (a safetensors file) as <sha256>.safetensors; returns (sha256, size). Durable when it returns.

    sha256: that of `data`, where it is known already.
    """
    make_folder(folder)
    for left in folder.glob("*.part"):  # by a trainer that was killed, or that found no room
        left.unlink(missing_ok=True)
    sha256 = sha256 or hashlib.sha256(data).hexdigest()
    aside = folder / f"{sha256}.{os.getpid()}.part"
    with open(aside, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    aside.rename(path(folder, sha256))
    sync_folder(folder)
    return sha256, len(data)


def path(folder: Path, sha256: str) -> Path:
    return folder / f"{sha256}.safetensors"


class WeightFiles:
    """The weights folder as the server serves it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._asked: dict[str, float] = {}
        self._mapped: dict[str, mmap.mmap] = {}

    def read(self, sha256: str, offset: int, length: int) -> Array:
        """Up to `length` bytes of a published file, at most CHUNK, without a copy. Raises Refused when it is gone, and
        OSError when it cannot be read."""
        try:
            mapped = self._mapped.get(sha256) or self._map(sha256)
        except FileNotFoundError:
            raise Refused(f"the weights {sha256[:12]} are gone: take the newest") from None
        self._asked[sha256] = time.monotonic()
        begin = min(max(0, offset), len(mapped))
        end = min(begin + max(0, min(length, CHUNK)), len(mapped))
        page = begin - begin % mmap.PAGESIZE
        try:
            mapped.madvise(POPULATE_READ, page, end - page)  # whoever sends what cannot be read would die of it
        except OSError:  # or an older Linux
            with open(path(self.folder, sha256), "rb") as file:
                return np.frombuffer(os.pread(file.fileno(), end - begin, begin), np.uint8)
        return np.frombuffer(mapped, np.uint8)[begin:end]

    def _map(self, sha256: str) -> mmap.mmap:
        with open(path(self.folder, sha256), "rb") as file:
            self._mapped[sha256] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return self._mapped[sha256]

    def clean(self, newest: list[dict[str, Any]]) -> None:
        """Delete what is neither one of the `newest` versions nor being pulled (checkpoints hold their own)."""
        needed = {version["sha256"] for version in newest}
        recent = time.monotonic() - PULL_S
        self._asked = {sha256: asked for sha256, asked in self._asked.items() if asked > recent}
        needed |= self._asked.keys()
        for file in self.folder.glob("*.safetensors"):
            if file.stem not in needed:
                file.unlink()
                self._mapped.pop(file.stem, None)
