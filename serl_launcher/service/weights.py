"""Weights as immutable files named by their sha256: written aside, synced, renamed, then only read. No torch."""

import hashlib
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
from serl_client.errors import Refused
from serl_client.spec import Array

from serl_launcher.data.files import make_folder, sync_folder

CHUNK = 4 << 20
PULL_S = 30.0  # a file that was asked for this recently is not deleted


def write(folder: Path, data: bytes) -> tuple[str, int]:
    """Keep `data` (a safetensors file) as <sha256>.safetensors; returns (sha256, size). Durable when it returns."""
    make_folder(folder)
    sha256 = hashlib.sha256(data).hexdigest()
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

    def read(self, sha256: str, offset: int, length: int) -> Array:
        """Up to `length` bytes of a published file, at most CHUNK. Raises Refused when it is gone."""
        try:
            with open(path(self.folder, sha256), "rb") as file:
                file.seek(max(0, offset))
                data = file.read(max(0, min(length, CHUNK)))
        except FileNotFoundError:
            raise Refused(f"the weights {sha256[:12]} are gone: take the newest") from None
        self._asked[sha256] = time.monotonic()
        return np.frombuffer(data, np.uint8)

    def clean(self, newest: list[dict[str, Any]]) -> None:
        """Delete what is neither one of the `newest` versions nor being pulled (checkpoints hold their own)."""
        needed = {version["sha256"] for version in newest}
        recent = time.monotonic() - PULL_S
        self._asked = {sha256: asked for sha256, asked in self._asked.items() if asked > recent}
        needed |= self._asked.keys()
        for file in self.folder.glob("*.safetensors"):
            if file.stem not in needed:
                file.unlink()
