"""Runs the export process: it writes datasets and recordings during a run, and of a stopped run.

The process is a client of the server, like the trainer. It tells the server which episodes may leave the store.
exporter.py decides what is written; shards.py says how, and what a killed export leaves. No torch.
"""

import logging
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

from omegaconf import DictConfig, OmegaConf
from serl_client import clock
from serl_client import messages as m
from serl_client.connection import Connection
from serl_client.console import log_as, throttled
from serl_client.errors import ConfigError, Disconnected, ServerFailed, Timeout, is_machines
from serl_client.lockfile import lock_folder
from serl_client.spec import Spec

from serl_launcher.config import saved
from serl_launcher.datasets import recording, shards
from serl_launcher.datasets.exporter import Exporter
from serl_launcher.datasets.lerobot_api import read_from
from serl_launcher.datasets.names import INSTALL, LEFT_OUT, MANIFEST
from serl_launcher.replay.verdicts import rewards_of_run
from serl_launcher.service.link import capacities, connect, wait_for_spec
from serl_launcher.store.index import Index
from serl_launcher.supervisor import END, give_way
from serl_launcher.training.plan import Plan
from serl_launcher.training.plan_reader import plan_of

log = throttled(__name__)

ROOM = "serl_launcher.datasets"  # whose log tells how far an export is
SOURCES = ("archived", "all")
NICE = 10  # priority below the trainer's
POLL_S = 0.25  # seconds between two looks for new episodes
RETRY_S = 5.0  # seconds to wait after a full disk
FINISH_S = 60.0  # seconds that the end of a run waits for the rest
MOST_TOLD = 500  # episodes in one message to the server
NO_COMMANDS = 1 << 53  # revision that no command reaches: the trainer takes them


def wanted(config: DictConfig, plan: Plan) -> list[str]:
    """Return the sources to export while the run goes on; none if packages for it are missing.

    Raises ConfigError for a wrong setting, and if a source with `archive: lerobot` lacks these packages.
    """
    if config.export.sources not in SOURCES:
        raise ConfigError(f"export.sources={config.export.sources}: say {' or '.join(SOURCES)}")
    if not isinstance(config.export.episodes, int) or config.export.episodes < 1:
        raise ConfigError(f"export.episodes={config.export.episodes}: a shard has at least one episode, say 1 or more")
    kept = plan.archived
    names = [name for name in plan.sources if config.export.sources == "all" or name in kept]
    if names and (lacking := shards.missing()):
        if kept:
            raise ConfigError(
                f"archive: lerobot of {', '.join(sorted(kept))} needs {', '.join(lacking)}: {INSTALL}, or say "
                f"plan.sources.{min(kept)}.archive=none"
            )
        log.warning("export: no datasets are written, because %s is not installed: %s", ", ".join(lacking), INSTALL)
        return []
    return names


def recorded(config: DictConfig) -> bool:
    """Return whether episodes are recorded for people to look at. Raises ConfigError for a wrong `record`."""
    if config.record not in recording.EPISODES:
        raise ConfigError(f"record={config.record}: say {', '.join(recording.EPISODES)}")
    return config.record != "none" or config.live is not None


def imported(run_dir: Path) -> dict[str, Any]:
    """Return {source that a dataset fills: its words in the plan} with which a learner was last started here.

    Their `dataset` is the place from which it was read, also where it was converted.
    """
    config: Any = OmegaConf.to_container(saved(run_dir))
    sources = (config.get("plan") or {}).get("sources") or {}
    filled = {name: words for name, words in sources.items() if words and words.get("dataset")}
    return {
        name: {**words, "dataset": str(read_from(words["dataset"], words.get("convert", False)))}
        for name, words in filled.items()
    }


def _alone(folder: Path) -> IO[str]:
    """Lock the folder of a run's datasets. Raises ConfigError if another process holds it."""
    folder.mkdir(parents=True, exist_ok=True)
    return lock_folder(folder, lambda _: f"another process is writing into {folder}: wait for it, or stop that run")


def export_run(run_dir: Path, count: int, sources: Sequence[str] | None = None) -> list[Path]:
    """Write all episodes in the store of a stopped run, and those that were left out, into shards.

    Returns the folders of all its shards.

    count: episodes in a shard. sources: export only these; None: all.
    Raises ConfigError if packages or the store are missing, a source is unknown, or another process exports.
    """
    if lacking := shards.missing():
        raise ConfigError(f"an export needs {', '.join(lacking)}: {INSTALL}")
    if not (run_dir / "store" / "index.sqlite").exists():
        raise ConfigError(f"there is no store in {run_dir}: name the folder of a run")
    with _alone(run_dir / "datasets"):
        index = Index(run_dir / "store" / "index.sqlite")
        there = {name: source.capacity for name, source in index.sources().items()}
        if unknown := set(sources or ()) - set(there):
            raise ConfigError(f"{run_dir} has no source {', '.join(sorted(unknown))}: name one of {', '.join(there)}")
        run, spec = index.meta("run"), Spec.from_dict(index.meta("spec"))
        committed = {name: (source.tail, source.head) for name, source in index.sources().items()}
        verdict = rewards_of_run(run_dir)
        exporter = Exporter(
            run_dir, run, spec, there, sources or there, count, committed=committed, verdict=verdict, again=True,
            datasets={name: words["dataset"] for name, words in imported(run_dir).items()},
        )  # fmt: skip
        _, rows = index.catalog(0, -1)
        index.close()
        exporter.update(rows)
        while exporter.work(rest=True):
            pass
        folders = (path.parent for path in exporter.folder.glob(f"*/*/{MANIFEST}"))
        return sorted(folder for folder in folders if folder.parent.name != LEFT_OUT)


# -- the process
def export(config: DictConfig, run_dir: Path, local: str, plan: Plan) -> None:
    """Run the export process: export until END, then the rest for at most FINISH_S."""
    give_way(NICE)
    signalled: list[float] = []

    def stop(*_: object) -> None:
        signalled.append(clock.monotonic())
        logging.getLogger(ROOM).setLevel(logging.INFO)  # from now on people wait for the export

    signal.signal(END, stop)
    names = [] if shards.missing() else wanted(config, plan)  # the launcher has logged what is missing
    with _alone(run_dir / "datasets"), connect(local, "export") as link:
        if (spec := wait_for_spec(link, stopping=lambda: bool(signalled))) is None:
            return
        client = _Client(link)
        made = list[recording.Recordings]()
        try:
            made += [recording.Recordings(run_dir, spec, episodes=config.record, live=config.live)] * recorded(config)
        except ConfigError as error:  # pictures for people must not keep episodes in the store
            log.error("%s; nothing is recorded", error)
        run = link.welcome.run if link.welcome else ""
        kept = {name: steps for name, steps in capacities(link).items() if name in plan.capacities}
        filled = ((name, source.dataset, source.convert) for name, source in plan.sources.items())
        datasets = {name: str(read_from(dataset, convert)) for name, dataset, convert in filled if dataset}
        exporter = Exporter(
            run_dir, run, spec, kept, names, config.export.episodes, made, verdict=plan.verdict, datasets=datasets
        )
        while client.step(exporter, rest=bool(signalled)):
            if signalled and clock.monotonic() > signalled[0] + FINISH_S:
                log.warning(
                    "export: the run is over, but %d episodes are in no dataset yet: `tools/data.py export %s` goes on",
                    exporter.remaining, run_dir,
                )  # fmt: skip
                return


class _Client:
    """Asks the server what is new for an Exporter, and tells it what may leave the store."""

    def __init__(self, link: Connection) -> None:
        self.link = link
        self._revision = 0
        self._next_beat = self._next_hear = 0.0
        self._complaint = ""

    def step(self, exporter: Exporter, *, rest: bool) -> bool:
        """Ask the server what is new, write at most one shard, and tell the server. Waits if nothing is due, unless the
        run is over (`rest`). Returns False once nothing is left to do then."""
        while self.link.receive() is not None:
            pass
        try:
            if rest or clock.monotonic() >= self._next_hear:
                self._hear(exporter)
                self._next_hear = clock.monotonic() + POLL_S
            worked = exporter.work(rest=rest)
            self._tell(exporter)
        except (Timeout, Disconnected, ServerFailed) as error:
            log.info("export: waiting for the server: %s", error)
            clock.sleep(POLL_S)
            return True
        except Exception as error:
            if not (isinstance(error, OSError) or is_machines(error)):
                raise
            if str(error) != self._complaint:
                log.error("export: %s; it is tried again", error)
            self._complaint = str(error)
            clock.sleep(RETRY_S)
            return True
        self._complaint = self._complaint * (not worked)
        if not worked and not rest:
            clock.sleep(POLL_S)
        return worked or not rest

    def _hear(self, exporter: Exporter) -> None:
        more = True
        while more:
            synced: Any = self.link.call(m.Sync(self._revision, NO_COMMANDS), timeout=5.0)
            exporter.update(synced.episodes)
            self._revision, more = synced.revision, synced.more

    def _tell(self, exporter: Exporter) -> None:
        """Tell the server which episodes may leave the store, and each second that we live."""
        new = exporter.settled
        for begin in range(0, len(new), MOST_TOLD):
            self.link.call(m.Archived(new[begin : begin + MOST_TOLD]), timeout=5.0)
        exporter.told()
        if clock.monotonic() > self._next_beat:
            self.link.send(m.Heartbeat({"pending": exporter.remaining}))
            self._next_beat = clock.monotonic() + 1.0


def main(config: DictConfig, run_dir: Path, local: str, begun: Callable[[], None]) -> None:
    """Run the export process of a run. It calls `begun` at once: a failure of its first work is worth another start."""
    begun()
    log_as("export", logging.WARNING)
    export(config, run_dir, local, plan_of(config))
