"""Downloads published weights to the actor (inference=local), in parts, each with its checksum."""

import hashlib
import logging
import os
import re
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import xxhash

import serl_client.clock as clock
from serl_client.errors import MessageError
from serl_client.messages import WeightsChunk, WeightsRequest
from serl_client.spec import Array

log = logging.getLogger(__name__)

PART_BYTES = 1 << 20  # a longer frame would delay the heartbeat on a slow link
OPEN_REQUESTS = 4  # parts that are requested at a time
PAUSE = 5.0  # seconds until the next try after the disk or the server failed, or something came damaged


def part_checksum(data: bytes | memoryview, sha256: str, size: int, part: int) -> str:
    """Return the xxh3_128 of a part of the weights file `sha256`, as hex. It fits no other file and no other place."""
    return xxhash.xxh3_128_hexdigest(data, seed=xxhash.xxh3_64_intdigest(f"{sha256}/{size}/{part}".encode()))


class _Pull:
    """Pulls one file of `count` parts, of which the first `position` are verified and in the folder.

    The sha256 of the whole is compared, too, if `verify`, or if an earlier process left a part: what lies on a disk may
    change. The thread `hashing` computes it, because this takes longer than everything else.
    """

    def __init__(
        self, folder: Path, hashing: ThreadPoolExecutor, verify: bool, version: int, sha256: str, size: int
    ) -> None:  # fmt: skip
        self.version, self.sha256, self.count = version, sha256, -(-size // PART_BYTES)
        self.final, self.part = folder / f"{sha256}.safetensors", folder / f"{sha256}.part"
        if self.final.exists():  # of an earlier process: a crash may have cut it, so check it again
            self.final.replace(self.part)
        self._size, self._descriptor = size, os.open(self.part, os.O_RDWR | os.O_CREAT, 0o600)
        self.found = min(size, os.fstat(self._descriptor).st_size) // PART_BYTES  # whole parts of an earlier process
        os.ftruncate(self._descriptor, self.found * PART_BYTES)
        self.position, self.requested = 0, self.found
        self._checksum = hashlib.sha256() if verify or self.found else None
        self._hashing, self._hashed = hashing, deque[Future[None]]()

    def read_again(self) -> None:
        """Add the next part that an earlier process pulled to the sha256. Raises OSError."""
        self._count(os.pread(self._descriptor, PART_BYTES, self.position * PART_BYTES))

    def write(self, data: Array, checksum: str) -> None:
        """Append a part, uint8 [bytes]. Raises OSError if it is damaged, or not on the disk."""
        begin = self.position * PART_BYTES
        fits = data.dtype == "uint8" and data.shape == (min(PART_BYTES, self._size - begin),)
        if not fits or part_checksum(data.data, self.sha256, self._size, self.position) != checksum:
            raise OSError(f"part {self.position} of weights {self.version} was damaged on its way; it is pulled again")
        if os.pwrite(self._descriptor, data.data, begin) != len(data):
            raise OSError("the disk is full")
        self._count(data.data)

    def finish(self) -> None:
        """Give the whole file its final name. Raises OSError if it is damaged."""
        self._await(0)
        if self._checksum and self._checksum.hexdigest() != self.sha256:
            os.ftruncate(self._descriptor, 0)
            raise OSError(f"weights {self.version} are not what their sha256 says; they are pulled again")
        self.part.replace(self.final)

    def close(self) -> None:
        os.close(self._descriptor)

    def _count(self, data: bytes | memoryview) -> None:
        if self._checksum:
            self._await(OPEN_REQUESTS)
            self._hashed.append(self._hashing.submit(self._checksum.update, data))
        self.position += 1

    def _await(self, most: int) -> None:
        while len(self._hashed) > most:
            self._hashed.popleft().result()


class WeightsFolder:
    """Pulls the weights that the server offers into `folder`, which belongs to it alone.

    It finishes the pull that it began, then takes the newest offer. `newest` is (version, path); that file and the one
    before it are kept. One thread uses all of it; other threads read `newest`.

    verify: compare the sha256 of each whole file, because the server may be somebody else.
    """

    def __init__(self, folder: Path, *, verify: bool) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.newest: tuple[int, Path] | None = None
        self._folder, self._verify, self._beside = folder, verify, ThreadPoolExecutor(1, "hashes and deletes weights")
        self._offer: tuple[int, str, int] | None = None
        self._pull: _Pull | None = None
        self._resume = 0.0

    def __str__(self) -> str:
        """Return how far the pull is, for a person who waits for it."""
        pull = self._pull
        if pull is not None:
            return f"part {pull.position + 1} of {pull.count} of weights {pull.version} was asked for, and has not come"
        return "no weights are complete here" if self._offer else "the learner has published no weights yet"

    @property
    def busy(self) -> bool:
        """Return whether there is work that waits for no message."""
        return self._pull is not None and self._pull.position < self._pull.found

    def offer(self, weights: Mapping[str, Any]) -> None:
        """Take in what the server has: {version, sha256, size}, or nothing. Raises MessageError."""
        if not weights:
            return
        version, sha256, size = weights["version"], weights["sha256"], weights["size"]
        named = isinstance(version, int) and re.fullmatch("[0-9a-f]{64}", sha256)
        if not named or not isinstance(size, int) or size < 1:
            raise MessageError(f"these weights cannot be named: {dict(weights)}")
        self._offer = version, sha256, size

    def restart(self) -> None:
        """Forget the open requests: their connection is gone, or one was lost."""
        if self._pull:
            self._pull.requested = max(self._pull.position, self._pull.found)

    def requests(self) -> Iterator[WeightsRequest]:
        """Yield the requests to send now. Raises OSError for the disk, and for a part or a file that is damaged."""
        if clock.monotonic() < self._resume:
            return
        if self._pull is None and self._offer and (self.newest is None or self._offer[0] > self.newest[0]):
            self._pull = _Pull(self._folder, self._beside, self._verify, *self._offer)
        pull = self._pull
        if pull is None:
            return
        if self.busy:
            pull.read_again()
        if pull.position == pull.count:
            self._finish(pull)
            return
        pull.requested = max(pull.requested, pull.position)  # what came may have been forgotten
        while pull.requested < min(pull.count, pull.position + OPEN_REQUESTS) and not self.busy:
            yield WeightsRequest(pull.sha256, pull.requested)
            pull.requested += 1

    def add(self, chunk: WeightsChunk) -> None:
        """Take a part that came. Raises OSError like `requests`."""
        pull = self._pull
        if pull is None or chunk.sha256 != pull.sha256 or chunk.part < pull.position:
            return  # requested on an earlier connection
        if chunk.part > pull.position:
            self.restart()
        elif chunk.part < pull.count:
            pull.write(chunk.arrays["data"], chunk.checksum)

    def pause(self) -> None:
        """Begin again after PAUSE: the disk failed, something was damaged, or the server has no such file any more."""
        self._resume = clock.monotonic() + PAUSE
        self._drop()

    def close(self) -> None:
        """End the thread; the parts that were pulled stay, and the next process continues with them."""
        self._drop()
        self._beside.shutdown()

    def _drop(self) -> None:
        if self._pull:
            self._pull.close()
            self._pull = None

    def _finish(self, pull: _Pull) -> None:
        pull.finish()
        self._drop()
        kept = {pull.final, self.newest[1] if self.newest else pull.final}
        self.newest = pull.version, pull.final
        for path in self._folder.iterdir():
            if path.suffix in (".safetensors", ".part") and path not in kept:
                path = path.replace(path.with_suffix(".old"))  # the next of its name is another
            if path.suffix == ".old":  # one that was there may go at any moment: the thread deletes it
                self._beside.submit(path.unlink, missing_ok=True)  # it takes 0.3 s for each GB
