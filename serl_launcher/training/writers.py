"""Publishes weights and saves checkpoints in a thread, from copies; the longest time between checkpoints."""

import hashlib
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Generic, TypeVar

from serl_client import clock
from serl_client import messages as m
from serl_client.console import throttled
from serl_client.errors import full_disk

from serl_launcher.store import weights
from serl_launcher.training.checkpoint import Checkpoints, Schedule
from serl_launcher.training.finite import check_finite
from serl_launcher.training.ranks import Ranks

log = throttled(__name__)

Kept = TypeVar("Kept")

FULL_S = 1.0  # between two tries on a full disk
LONGEST_S, S_PER_GB = 30.0, 60.0  # between two checkpoints, where nobody said how long: a PI0 writes 50 GB each time


class Patience:
    """Repeats a write while the disk is full, because a full disk ends no run."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._over = folder, threading.Event()

    def __call__(self, write: Callable[[], Kept]) -> Kept:
        """Return what `write` returns. After `end`, raises what it raises."""
        while True:
            try:
                return write()
            except (OSError, RuntimeError) as error:
                if (full := full_disk(error)) is None or self._over.is_set():
                    raise
                log.warning("cannot write: %s. Make room in %s", full, self._folder)
                self._over.wait(FULL_S)

    def end(self) -> None:
        """Let writes in other threads end: the run does."""
        self._over.set()


class Writer(Generic[Kept]):
    """Does one piece of work at a time in a thread of its own."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._work: Future[Kept] | None = None

    @property
    def busy(self) -> bool:
        """Return whether there is work whose result was not taken yet."""
        return self._work is not None

    @property
    def done(self) -> bool:
        """Return whether a result can be taken without waiting."""
        return self._work is not None and self._work.done()

    def begin(self, work: Callable[[], Kept]) -> None:
        pool = ThreadPoolExecutor(1, self._name)
        self._work = pool.submit(work)
        pool.shutdown(wait=False)

    def result(self) -> Kept | None:
        """Wait for the result and return it; None without work. Raises what the work raised."""
        if (work := self._work) is None:
            return None
        try:
            return work.result()
        finally:
            self._work = None if work.done() else work

    def join(self) -> None:
        """Wait for the work, and drop its result."""
        if self._work is not None:
            self._work.exception()


class Publisher:
    """Makes the acting part's weights new versions. call: sends a message to the server and returns its answer."""

    def __init__(self, folder: Path, ranks: Ranks, call: Callable[[m.Message], Any], patience: Patience) -> None:
        self.version: Mapping[str, Any] = {}  # the newest: {version, sha256}
        self.writer: Writer[tuple[str, int, int]] = Writer("weights")  # (sha256, size, updates)
        self._behind = False  # weights were offered while earlier ones were being written
        self._folder, self._ranks, self._call, self._patience = folder, ranks, call, patience

    def publish(self, updates: int) -> None:
        """Publish the weights as they are after `updates`; return when they are the newest version."""
        self.finish()
        self.begin(updates)
        self.finish()

    def offer(self, updates: int) -> bool:
        """Begin to publish, and return True. While earlier weights are being written, return False: offer them again
        after the next update."""
        self._behind = self.writer.busy
        if not self._behind:
            self.begin(updates)
        return not self._behind

    def settle(self, updates: int) -> None:
        """Wait until all weights that were offered are published, or newer ones."""
        if self._behind:
            self.publish(updates)
        self.finish()

    def begin(self, updates: int) -> None:
        """Copy the weights and let a thread write them; `finish` makes them a version."""
        self._behind = False
        staged = self._ranks.published()

        def write() -> tuple[str, int, int]:
            check_finite(staged.tensors(), f"publishing the weights of update {updates}")
            data = staged.data()
            sha256 = hashlib.sha256(data).hexdigest()
            self._patience(lambda: weights.write(self._folder, data, sha256))
            return sha256, len(data), updates

        self.writer.begin(write)

    def turn(self) -> None:
        """Finish what is written."""
        if self.writer.done:
            self.finish()

    def finish(self) -> None:
        """Wait until the weights are written, and tell the server. Raises what the thread raised."""
        written = self.writer.result()
        if written is not None and written[0] != self.version.get("sha256"):
            self.version = {"version": self._call(m.Publish(*written)).value, "sha256": written[0]}


class CheckpointKeeper:
    """Keeps checkpoints. longest: largest number of seconds between two of them; 0: one after each update; None: by
    their size."""

    def __init__(self, checkpoints: Checkpoints, longest: float | None, patience: Patience) -> None:
        self.checkpoints, self._longest, self._patience = checkpoints, longest, patience
        self.writer: Writer[float] = Writer("checkpoint")  # seconds that it took
        self.resume(0.0)

    def resume(self, cost: float) -> None:
        """Begin to count time. cost: seconds that the last checkpoint took, before this start."""
        longest = LONGEST_S if self._longest is None else self._longest
        self.schedule = Schedule(longest, clock.monotonic(), cost)

    def turn(self, updates: int, state: Callable[[], Mapping[str, Any]]) -> None:
        """Finish a checkpoint that is written, and begin one that is due."""
        if self.writer.done:
            self.finish()
        if not self.writer.busy and self.schedule.due(clock.monotonic()):
            self.begin(updates, state())
            if self._longest == 0:
                self.finish()

    def keep(self, updates: int, state: Mapping[str, Any], ended: str = "") -> None:
        """Keep `state`, which is durable when this returns. ended: the phase that ends with it, whose newest checkpoint
        stays."""
        self.finish()
        self.begin(updates, state, ended)
        self.finish()

    def begin(self, updates: int, state: Mapping[str, Any], ended: str = "") -> None:
        """Copy the state and let a thread write it."""
        begun, write = clock.monotonic(), self.checkpoints.stage(updates, state, pinned=ended)

        def checked() -> float:
            check_finite(self.checkpoints.staging.tensors(), f"keeping a checkpoint of update {updates}")
            self._patience(write)
            return clock.monotonic() - begun

        if self._longest is None:
            self.schedule.longest = max(LONGEST_S, S_PER_GB * self.checkpoints.staging.size / 1e9)
        self.writer.begin(checked)

    def finish(self) -> None:
        """Wait until the checkpoint is written. Raises what the thread raised."""
        cost = self.writer.result()
        if cost is not None:
            self.schedule.saved(clock.monotonic(), cost)
