"""Creates and opens the run's store, and opens it again after its disk failed (DEGRADED)."""

import sqlite3
import threading
from collections.abc import Collection, Mapping
from concurrent.futures import Future, wait
from pathlib import Path

from serl_client import clock
from serl_client.console import throttled
from serl_client.errors import ConfigError, Refused, ServerFailed
from serl_client.spec import Spec

from serl_launcher.store.creation import is_there
from serl_launcher.store.store import Store

log = throttled(__name__)

ALONE_S = 60.0
MAKE_S = 2.0  # that the loop waits for a store to be made: most are made by then
TELL_S = 1.0
REOPEN_S = 1.0
START_S = 30.0  # that a start waits for a disk that fails: the launcher starts the server again then


class StoreKeeper:
    """Makes, opens, closes and reopens the store in `run_dir`.

    capacities: {source: steps}. archived: sources whose episodes stay until they are exported.
    Raises ConfigError for a store that is there and does not fit.
    """

    def __init__(self, run_dir: Path, capacities: Mapping[str, int], archived: Collection[str]) -> None:
        self._run_dir, self._folder = run_dir, run_dir / "store"
        self._capacities, self._archived = capacities, archived
        self.store = self._resumed() if is_there(self._folder) else None
        self.degraded = ""  # why the disk fails
        self.fatal: ConfigError | None = None  # why no store can be made
        self._making: Future[Store] | None = None
        self._tells_until = 0.0  # actors that were told to wait come again until then, and hear of `fatal`
        self._alone_until = 0.0
        self._next_reopen = 0.0

    def _resumed(self) -> Store:
        """Open the store, and try for START_S while its disk fails or another program reads its index."""
        end = clock.monotonic() + START_S
        while True:
            try:
                return Store.resume(self._folder, self._capacities, self._archived)
            except (OSError, sqlite3.Error) as error:
                if isinstance(error, PermissionError) or clock.monotonic() > end:
                    raise
                log.warning("the store in %s cannot be opened, and is tried again: %s", self._folder, error)
                clock.sleep(REOPEN_S)

    @property
    def ready(self) -> Store:
        """The store. Raises ServerFailed where there is none, or where its disk fails."""
        if self.store is None:
            raise ServerFailed("no actor has said Hello yet, so there is no store: start an actor")
        if self.degraded:
            raise ServerFailed(f"the learner's store fails: {self.degraded}")
        return self.store

    @property
    def has_failed(self) -> bool:
        """Whether no store can be made, and the actors have had time to hear why."""
        return self.fatal is not None and clock.monotonic() >= self._tells_until

    @property
    def is_suspicious(self) -> bool:
        """Whether each record is a group of its own now, because one of them broke a group a moment ago."""
        return clock.monotonic() < self._alone_until

    def make(self, spec: Spec) -> None:
        """Make the store for the first actor's Spec, in a thread, because large files take long.

        Raises ServerFailed while it is being made, so that the actor comes again, and Refused when it cannot be made.
        """
        if self._making is None and self.fatal is None:
            self._making = made = Future()

            def make() -> None:
                try:
                    made.set_result(Store.create(self._folder, spec, self._capacities, self._archived))
                except BaseException as error:
                    made.set_exception(error)

            threading.Thread(target=make, name="make the store", daemon=True).start()
            wait([made], MAKE_S)
            self.adopt_made()
        if self.fatal is not None:
            raise Refused(str(self.fatal))
        if self.store is None:
            raise ServerFailed("the learner is making the files of its replay buffer, which are large: wait")

    def adopt_made(self) -> None:
        """Use the store that was being made, if it is ready. If it failed, set `fatal`."""
        if self._making is None or not self._making.done():
            return
        made, self._making = self._making, None
        try:
            self.store = made.result()
        except Exception as error:
            is_clear = isinstance(error, ConfigError)
            self.fatal = (
                error
                if is_clear
                else ConfigError(
                    f"no store can be made in {self._run_dir}: {error}. Mend that, or say another run_dir=..."
                )
            )
            self._tells_until = clock.monotonic() + TELL_S

    def degrade(self, error: Exception) -> None:
        """Close the store after a failed write. Until it is open again, nothing is acknowledged or staged.

        If the disk was not at fault, each record is a group of its own for ALONE_S, to find the one that fails.
        """
        if self.store is None:
            log.error("%s", error)
            return
        if not self.degraded:
            log.error("DEGRADED: %s", error)
            self.close()
        if not isinstance(error, OSError | sqlite3.Error):
            self._alone_until = clock.monotonic() + ALONE_S
        self.degraded, self._next_reopen = str(error) or repr(error), clock.monotonic() + REOPEN_S

    def reopen(self) -> Store | None:
        """Open the store again, at most once in REOPEN_S; None before that.

        Raises OSError, sqlite3.Error or ConfigError while the disk still fails.
        """
        if clock.monotonic() < self._next_reopen:
            return None
        store = Store(self._folder, self._archived)
        try:
            store.probe()
        except BaseException:
            store.close()
            raise
        log.warning("the store works again after: %s", self.degraded)
        self.store, self.degraded = store, ""
        return store

    def close(self, *, is_over: bool = False) -> None:
        """Close the store, unless its disk fails; if the run is over, no episode stays open."""
        try:
            if self.store is not None and not self.degraded:
                if is_over:
                    self.store.close_open()
                self.store.close()
        except (OSError, sqlite3.Error) as error:
            log.error("closing the store: %s", error)
