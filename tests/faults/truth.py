"""What a process of a round notes of its own work, before it does it: lines of JSON that survive its kill -9."""

import hashlib
import json
import os
import struct
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

NUMBERS = struct.Struct("<fdQIII")


class Truth:
    """An append-only file of notes; each is one write, so that a kill leaves whole lines."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def note(self, **fields: Any) -> None:
        """One line of these fields and `t`, time.monotonic()."""
        os.write(self._file, (json.dumps({"t": round(time.monotonic(), 4), **fields}) + "\n").encode())


def notes(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a Truth."""
    with open(path) as file:
        yield from map(json.loads, file)


def fingerprint(
    rows: Iterable[Any], action: Any, *, reward: float, time: float, weights: int, directive: int, index: int,
    flags: int,
) -> str:  # fmt: skip
    """The hash of one step: the arrays of its observation (and of the final one), in the order of their names, its
    action and its numbers; `flags` are 1 terminated, 2 truncated, 4 intervened, 8 decision, 16
    gap."""
    digest = hashlib.blake2b(digest_size=8)
    for array in (*rows, action):
        digest.update(np.ascontiguousarray(array).data)
    digest.update(NUMBERS.pack(reward, time, weights, directive, index, flags))
    return digest.hexdigest()
