"""Pulls weights files into a folder, one at a time and in parts; a file with its final name was verified."""

import hashlib
import logging
import os
import re
import time
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from serl_client.errors import MessageError
from serl_client.messages import WeightsChunk, WeightsRequest
from serl_client.spec import Array

log = logging.getLogger(__name__)

PART_BYTES = 1 << 20  # a longer frame would delay the heartbeat on a slow link
OPEN_REQUESTS = 4  # parts that are requested at a time
PAUSE = 5.0  # seconds until the next try after the disk or the server failed


class _Pull:
    """Pulls one file: `position` bytes of it are in the folder and were given to the thread `hashing`, which computes
    the checksum, because this takes longer than everything else."""

    def __init__(self, folder: Path, hashing: ThreadPoolExecutor, version: int, sha256: str, size: int) -> None:
        self.version, self.sha256, self.size = version, sha256, size
        self.final, self.part = folder / f"{sha256}.safetensors", folder / f"{sha256}.part"
        if self.final.exists():  # of an earlier process: a crash may have cut it, so check it again
            self.final.replace(self.part)
        self.descriptor = os.open(self.part, os.O_RDWR | os.O_CREAT, 0o600)
        self.found = min(size, os.fstat(self.descriptor).st_size)  # bytes that an earlier process pulled
        self.position = 0
        self.requested = self.found
        self._checksum, self._hashing = hashlib.sha256(), hashing
        self._hashed: deque[Future[None]] = deque()

    def read_again(self) -> None:
        """Add the next part that an earlier process pulled to the checksum."""
        self._count(os.pread(self.descriptor, min(PART_BYTES, self.found - self.position), self.position))

    def write(self, data: Array) -> None:
        """Append a part, uint8 [bytes]. Raises OSError."""
        if os.pwrite(self.descriptor, data.data, self.position) != len(data):
            raise OSError("the disk is full")
        self._count(data.data)

    def close(self) -> bool:
        """Close the file; give it its final name and return True if it is whole and undamaged."""
        os.close(self.descriptor)
        self._await(0)
        whole = self.position == self.size and self._checksum.hexdigest() == self.sha256
        if whole:
            self.part.replace(self.final)
        elif self.position == self.size:
            log.warning("weights %d were damaged on their way; they are pulled again", self.version)
            self.part.unlink()
        return whole

    def _count(self, data: bytes | memoryview) -> None:
        self._await(OPEN_REQUESTS)
        self._hashed.append(self._hashing.submit(self._checksum.update, data))
        self.position += len(data)

    def _await(self, most: int) -> None:
        while len(self._hashed) > most:
            self._hashed.popleft().result()


class WeightsFolder:
    """Pulls the weights that the server offers into `folder`, which belongs to it alone.

    It finishes the pull that it began, then takes the newest offer. `newest` is (version, path); that file and the one
    before it are kept. One thread uses all of it; other threads read `newest`.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.newest: tuple[int, Path] | None = None
        self._folder, self._hashing = folder, ThreadPoolExecutor(1, "checksum of weights")
        self._offer: tuple[int, str, int] | None = None
        self._pull: _Pull | None = None
        self._resume = 0.0

    @property
    def busy(self) -> bool:
        """Return whether there is work that waits for no message."""
        return self._pull is not None and self._pull.position < self._pull.found

    def offer(self, weights: Mapping[str, Any]) -> None:
        """Take in what the server has: {version, sha256, size}, or nothing. Raises MessageError."""
        if not weights:
            return
        version, sha256, size = weights["version"], weights["sha256"], weights["size"]
        if not (isinstance(version, int) and isinstance(size, int) and re.fullmatch("[0-9a-f]{64}", sha256)):
            raise MessageError(f"these weights cannot be named: {dict(weights)}")
        self._offer = version, sha256, size

    def restart(self) -> None:
        """Forget the open requests: their connection is gone."""
        if self._pull:
            self._pull.requested = max(self._pull.position, self._pull.found)

    def requests(self) -> Iterator[WeightsRequest]:
        """Yield the requests to send now. Raises OSError."""
        if self._pull is None and self._offer and (self.newest is None or self._offer[0] > self.newest[0]):
            self._pull = _Pull(self._folder, self._hashing, *self._offer)
        pull = self._pull
        if pull is None or time.monotonic() < self._resume:
            return
        if self.busy:
            pull.read_again()
        if pull.position == pull.size:
            self._finish(pull)
            return
        while pull.requested < min(pull.size, pull.position + OPEN_REQUESTS * PART_BYTES) and not self.busy:
            length = min(PART_BYTES, pull.size - pull.requested)
            yield WeightsRequest(pull.sha256, pull.requested, length)
            pull.requested += length

    def add(self, chunk: WeightsChunk) -> None:
        """Write a part that came. Raises MessageError for a part that was not requested, and OSError."""
        pull, data = self._pull, chunk.arrays["data"]
        if pull is None or chunk.sha256 != pull.sha256 or chunk.offset != pull.position:
            return  # requested on an earlier connection
        if data.dtype != "uint8" or data.ndim != 1 or pull.position + len(data) > pull.requested:
            raise MessageError("a part of weights has another length than was asked for")
        pull.write(data)

    def pause(self) -> None:
        """Begin again after PAUSE, because the disk failed or the server no longer has this file."""
        self._resume = time.monotonic() + PAUSE
        self._drop()

    def close(self) -> None:
        """End the thread; the parts that were pulled stay, and the next process continues with them."""
        self._drop()
        self._hashing.shutdown()

    def _drop(self) -> None:
        if self._pull:
            os.close(self._pull.descriptor)
            self._pull = None

    def _finish(self, pull: _Pull) -> None:
        self._pull = None
        if not pull.close():
            return
        kept = {pull.final, self.newest[1] if self.newest else pull.final}
        for path in self._folder.iterdir():
            if path.suffix in (".safetensors", ".part") and path not in kept:
                path.unlink()
        self.newest = pull.version, pull.final
