"""The export process: it turns closed episodes into LeRobot shards, in the background, and tells the server which may
leave the store; and it records them for people to look at. No torch before there is something to write.

`export` is the process, a client of the server like the trainer; `export_run` does the same for a run that is stopped.
What is written, and what was when somebody killed it, is in datasets/shards.py.
"""

import fcntl
import logging
import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from serl_client import messages as m
from serl_client.connection import Connection
from serl_client.errors import ConfigError, Disconnected, ServerFailed, Timeout
from serl_client.spec import Spec

from serl_launcher.datasets import shards
from serl_launcher.datasets.episodes import Mismatch
from serl_launcher.datasets.exporter import Exporter
from serl_launcher.datasets.names import INSTALL, MANIFEST
from serl_launcher.store.index import Index
from serl_launcher.training.plan import Plan
from serl_launcher.utils import recording

log = logging.getLogger(__name__)

ROOM = "serl_launcher.datasets"  # whose log tells how far an export is
SOURCES = ("archived", "all")
NICE = 10
POLL_S = 0.25
RETRY_S = 5.0  # after a full disk, or a shard that differs from the store
FINISH_S = 60.0  # how long the end of a run waits for the rest
MOST_TOLD = 500  # episodes in one message
NO_COMMANDS = 1 << 53  # the operator's commands are the trainer's business


def archived(plan: Plan) -> frozenset[str]:
    """The sources whose episodes stay in the store until they are exported."""
    return frozenset(name for name, source in plan.sources.items() if source.archive == "lerobot")


def wanted(config: DictConfig, plan: Plan) -> list[str]:
    """The sources that are to be exported while the run goes on; none when what this needs is not installed.

    Raises ConfigError when a source must not go on without it.
    """
    if config.export.sources not in SOURCES:
        raise ConfigError(f"export.sources={config.export.sources}: say {' or '.join(SOURCES)}")
    if not isinstance(config.export.episodes, int) or config.export.episodes < 1:
        raise ConfigError(f"export.episodes={config.export.episodes}: a shard has at least one episode")
    kept = archived(plan)
    names = [name for name in plan.sources if config.export.sources == "all" or name in kept]
    if names and (lacking := shards.missing()):
        if kept:
            raise ConfigError(
                f"archive: lerobot of {', '.join(sorted(kept))} needs {', '.join(lacking)}: {INSTALL}, or say "
                f"plan.sources.{min(kept)}.archive=none"
            )
        log.warning("export: no shards are written, as %s is not installed: %s", ", ".join(lacking), INSTALL)
        return []
    return names


def recorded(config: DictConfig) -> bool:
    """Whether episodes are to be recorded for people to look at. Raises ConfigError for what cannot be."""
    if config.record not in recording.EPISODES:
        raise ConfigError(f"record={config.record}: say {', '.join(recording.EPISODES)}")
    return config.record != "none" or config.live is not None


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold the lock of a run's datasets. Raises ConfigError when somebody else writes there."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"another process is writing into {folder}: wait for it, or stop that run") from None
        yield


def export_run(run_dir: Path, count: int, sources: Sequence[str] | None = None) -> list[Path]:
    """Bring all that the store of a stopped run holds into shards; returns the folders of all shards that there are.

    `sources`: these alone. Raises ConfigError when there is no store, or something else writes there.
    """
    if lacking := shards.missing():
        raise ConfigError(f"to export, {', '.join(lacking)} must be there: {INSTALL}")
    if not (run_dir / "store" / "index.sqlite").exists():
        raise ConfigError(f"there is no store in {run_dir}")
    with _alone(run_dir / "datasets"):
        index = Index(run_dir / "store" / "index.sqlite")
        there = {name: source.capacity for name, source in index.sources().items()}
        if unknown := set(sources or ()) - set(there):
            raise ConfigError(f"{run_dir} has no source {', '.join(sorted(unknown))}; there are {', '.join(there)}")
        run, spec = index.meta("run"), Spec.from_dict(index.meta("spec"))
        committed = {name: (source.tail, source.head) for name, source in index.sources().items()}
        exporter = Exporter(run_dir, run, spec, there, sources or there, count, committed=committed)
        _, rows = index.catalog(0, -1)
        index.close()
        exporter.take(rows)
        while exporter.work(rest=True):
            pass
        return sorted(path.parent for path in exporter.folder.glob(f"*/*/{MANIFEST}"))


# -- the process
def export(config: DictConfig, run_dir: Path, local: str, plan: Plan) -> None:
    """Export until SIGTERM; then the rest, for at most FINISH_S."""
    os.nice(NICE)
    signalled: list[float] = []

    def stop(*_: object) -> None:
        signalled.append(time.monotonic())
        logging.getLogger(ROOM).setLevel(logging.INFO)  # from now on people wait for it

    signal.signal(signal.SIGTERM, stop)
    names = [] if shards.missing() else wanted(config, plan)  # the launcher has said what is missing
    with _alone(run_dir / "datasets"), Connection(local, m.Hello(m.PROTOCOL, "learner", "export")) as link:
        client = _Client(link)
        if (spec := client.spec(signalled)) is None:
            return
        made = [recording.Recordings(run_dir, spec, episodes=config.record, live=config.live)] * recorded(config)
        run = link.welcome.run if link.welcome else ""
        exporter = Exporter(run_dir, run, spec, plan.capacities, names, config.export.episodes, made)
        while client.step(exporter, rest=bool(signalled)):
            if signalled and time.monotonic() > signalled[0] + FINISH_S:
                log.warning(
                    "export: the run is over, and %d episodes are in no shard yet: `tools/data.py export %s` goes on",
                    exporter.remaining, run_dir,
                )  # fmt: skip
                return


class _Client:
    """Speaks with the server for an Exporter."""

    def __init__(self, link: Connection) -> None:
        self.link = link
        self._revision = 0
        self._next_beat = self._next_hear = 0.0

    def spec(self, stopping: Sequence[float]) -> Spec | None:
        """The run's Spec, as soon as the first actor has brought it; None when the run ends before."""
        while not stopping:
            try:
                if (spec := self.link.hello(timeout=1.0).spec) is not None:
                    return Spec.from_dict(spec)
            except (Timeout, Disconnected):
                pass
            time.sleep(POLL_S)
        return None

    def step(self, exporter: Exporter, *, rest: bool) -> bool:
        """Hear, write one shard, tell; waits a little when there is nothing to do. False: it is the end."""
        while self.link.receive() is not None:
            pass
        try:
            if rest or time.monotonic() >= self._next_hear:
                self._hear(exporter)
                self._next_hear = time.monotonic() + POLL_S
            worked = exporter.work(rest=rest)
            self._tell(exporter)
        except (Timeout, Disconnected, ServerFailed) as error:
            log.info("waiting for the server: %s", error)
            time.sleep(POLL_S)
            return True
        except (OSError, Mismatch) as error:
            log.error("export: %s; it is tried again", error)
            time.sleep(RETRY_S)
            return True
        if not worked and not rest:
            time.sleep(POLL_S)
        return worked or not rest

    def _hear(self, exporter: Exporter) -> None:
        more = True
        while more:
            synced: Any = self.link.call(m.Sync(self._revision, NO_COMMANDS), timeout=5.0)
            exporter.take(synced.episodes)
            self._revision, more = synced.revision, synced.more

    def _tell(self, exporter: Exporter) -> None:
        new = exporter.settled
        for begin in range(0, len(new), MOST_TOLD):
            self.link.call(m.Archived(new[begin : begin + MOST_TOLD]), timeout=5.0)
        exporter.told()
        if time.monotonic() > self._next_beat:
            self.link.send(m.Heartbeat({"pending": exporter.remaining}))
            self._next_beat = time.monotonic() + 1.0
