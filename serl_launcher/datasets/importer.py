"""Imports demonstrations or offline datasets (LeRobot, robomimic) into a plan's sources, before training.

The importer is an actor like any other, named `dataset-<source>`, so each episode is stored durably and once. At the
next start it skips episodes that are whole in the store. One that a crash has cut is discarded and imported again.
"""

import logging
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from omegaconf import DictConfig
from serl_client import clock
from serl_client import messages as m
from serl_client.client import TrainerClient
from serl_client.connection import Connection
from serl_client.console import log_as
from serl_client.episode import Outcome, Segment, Stamp
from serl_client.errors import ConfigError, is_machines
from serl_client.identity import IMPORTED
from serl_client.names import MAX_NAME
from serl_client.spec import Spec

from serl_launcher.datasets import columns, lerobot_api, robomimic
from serl_launcher.datasets.reader import Dataset
from serl_launcher.datasets.robomimic import RobomimicFile
from serl_launcher.datasets.units import Conversion, conversions, degrees_per_percent
from serl_launcher.error_log import ERRORS, write_traceback
from serl_launcher.replay.views import EpisodeInfo
from serl_launcher.service.link import ask, connect, wait_for_spec
from serl_launcher.store.directives import DATASET
from serl_launcher.training.plan import Change, Plan, PlanSource
from serl_launcher.training.plan_reader import plan_of

log = logging.getLogger(__name__)

PENDING = 32 << 20  # bytes that may wait for the server; until then they are on the disk twice
TELL_S = 10.0  # seconds between two lines of progress
DAMAGED = "importer: "  # begins `judged_by` of an episode that could be read in part only; the reason follows
PART = re.compile(r"\.part\d+$")  # the store adds it to the id of an episode's part
NAME = re.compile(r"(.*)-\d{6,}(-deg\w{8}|-as\w{8})?(~\d+)?")  # an id of ours: dataset, index, conversion, attempt
OUTSIDE = 0.01  # warn if a larger share of the action's values is outside the run's bounds


def dataset_at(source: PlanSource) -> Dataset | RobomimicFile:
    """Open a folder as a LeRobot dataset, a file as robomimic's. Raises ConfigError as they do."""
    name, is_file = str(source.dataset), robomimic.is_file(str(source.dataset))
    if is_file and (source.change != Change() or source.convert):
        raise ConfigError("rename, crop, size, fps, deltas and convert are for datasets of LeRobot: leave them out")
    if is_file:
        return RobomimicFile(name)
    if (folder := lerobot_api.read_from(name, source.convert)) != Path(name):
        lerobot_api.converted(Path(name))
    return Dataset(folder, source.change)


def open_datasets(plan: Plan) -> dict[str, Dataset | RobomimicFile]:
    """Open the datasets of a plan, {source: dataset}. Raises ConfigError for one that is missing or too large.

    The same for a calibration that cannot be read.
    """
    found = {}
    for name, source in plan.sources.items():
        try:
            found |= {name: dataset_at(source)} if source.dataset else {}
        except ConfigError as error:
            raise ConfigError(f"plan.sources.{name}.dataset={source.dataset}: {error}") from None
    for name, dataset in found.items():
        if (calibration := plan.sources[name].calibration) is not None:
            degrees_per_percent(calibration)
        steps, longest, capacity = sum(dataset.lengths), max(dataset.lengths, default=0), plan.sources[name].capacity
        if steps + longest > capacity:
            raise ConfigError(
                f"plan.sources.{name}.capacity is {capacity:,} steps, {dataset.folder} has {steps:,}; its longest "
                f"episode has {longest:,}, which a crash may cut and leave there: say at least {steps + longest:,}"
            )
    return found


def import_datasets(plan: Plan, run_dir: Path, *, local: str, waits: bool) -> None:
    """Import every dataset of the plan into the run's store. Returns once all of it is durable.

    An episode that cannot be read, or whose rows a store refuses, is left out by name; the others are imported.
    local: the server's address. waits: wait for the first actor's Spec; else a new store gets the first dataset's.
    Raises ConfigError for a dataset that does not fit the run's Spec, has no room, or no episode that can be imported.
    """
    datasets = open_datasets(plan)
    with connect(local, "importer") as link:
        spec = wait_for_spec(link, needs_actor=waits, announces=waits) or next(iter(datasets.values())).spec()
        for name, dataset in datasets.items():
            if misfit := dataset.misfit(spec):
                words = columns.remedy(dataset, spec, name) if isinstance(dataset, Dataset) else ""
                raise ConfigError(
                    f"plan.sources.{name}.dataset: {dataset.folder} is not of this run's robot: {misfit}. "
                    + f"If it is, say {words}; else take" * bool(words)
                    + "Take" * (not words)
                    + " a dataset of this robot, or another task or run_dir"
                )
        for name, conversion in conversions(plan, datasets, spec).items():
            _Import(link, name, datasets[name], spec, local, run_dir, conversion).run()


@dataclass(frozen=True, slots=True)
class _Missing:
    """An episode of a dataset that is not whole in the store."""

    index: int  # in the dataset
    id: str  # its id in the store
    cut: tuple[str, ...]  # ids of its earlier imports, which a crash has cut


class _Import:
    def __init__(
        self, link: Connection, source: str, dataset: Dataset | RobomimicFile, spec: Spec, address: str, run_dir: Path,
        conversion: Conversion,
    ) -> None:  # fmt: skip
        self._conversion, self._begin = conversion, f"dataset-{source}-{dataset.name[:100]}"
        self._link, self._source, self._dataset, self._spec = link, source, dataset, spec
        self._address, self._run_dir, self._folder = address, run_dir, run_dir / "actors" / f"{IMPORTED}{source}"
        self._left_out: dict[int, str] = {}  # index of an episode in the dataset -> why it is not imported
        self._actions = self._outside = self._revision = 0
        self._parts: dict[str, dict[str, EpisodeInfo]] = {}  # id -> {id of a part: part} in the store

    def run(self) -> None:
        is_whole = not self._missing()
        if isinstance(self._dataset, Dataset) and not self._is_noted(self._dataset, is_whole):
            told = columns.became(self._dataset, self._spec, self._conversion)
            for line in columns.note(self._dataset, self._source, told, self._run_dir):
                log.info("%s", line)
        if is_whole:
            return
        with self._client() as client:
            _settle(client)  # deliver what an earlier session left,
            self._await_closed(client)  # until the server has closed that session's episodes
            missing = self._missing()
            self._check_room(missing)
            self._push_all(client, missing)
            _settle(client)
        with self._client() as client:  # a new session, so the server closes the last episode
            self._await_closed(client)
        lengths = [length for index, length in enumerate(self._dataset.lengths) if index not in self._left_out]
        log.info("%s: %d episodes, %d steps of %s", self._source, len(lengths), sum(lengths), self._dataset.folder)
        if self._left_out:
            why = next(iter(self._left_out.values()))
            if not lengths:
                raise ConfigError(f"{why}. Mend the dataset or take the episode out of it, and begin in a new run_dir")
            log.warning(
                "%s: %d episodes of %s are left out, such as %s (where: %s)",
                self._source, len(self._left_out), self._dataset.folder, why, self._run_dir / ERRORS,
            )  # fmt: skip
        if self._outside > OUTSIDE * self._actions:
            share = self._outside / self._actions
            log.warning(
                "%s: %.1f %% of the action's values are outside the run's bounds", self._dataset.folder, 100 * share
            )

    def _push_all(self, client: TrainerClient, missing: list[_Missing]) -> None:
        body = {"mode": DATASET, "phase": DATASET, "into": self._source}
        stamp, told = Stamp(ask(self._link, m.Direct(body, None)).value, DATASET, 0), clock.monotonic()
        for done, entry in enumerate(missing):
            for id in entry.cut:
                client.push(Outcome(id, None, discard=True))
            for record in self._records(client.spec, entry, stamp):
                self._push(client, record)
            if clock.monotonic() > told + TELL_S:
                told = clock.monotonic()
                log.info("%s: %d of %d episodes of %s", self._source, done, len(missing), self._dataset.folder)

    def _records(self, spec: Spec, entry: _Missing, stamp: Stamp) -> Iterator[Segment | Outcome]:
        """Yield what the store is to know of an episode. One that fails is left out; what came of it is discarded."""
        where, has_begun = f"episode {entry.index} of {self._dataset.folder}", False
        try:
            episode = self._dataset.episode(entry.index)
            where = episode.where
            if episode.success is not None:
                yield Outcome(entry.id, episode.success)
            for segment in episode.segments(spec, entry.id, stamp):
                converted = self._conversion.converted(segment)
                converted.check(spec)
                yield converted
                has_begun = True
        except Exception as error:
            if is_machines(error):
                raise  # the next start tries again
            self._left_out[entry.index] = why = f"{where}: {error}"
            write_traceback(self._run_dir, f"importer: {where}", error, is_item=True)
            if has_begun:
                yield Outcome(entry.id, None, discard=True, judged_by=f"{DAMAGED}{why}"[:MAX_NAME])

    def _push(self, client: TrainerClient, record: Segment | Outcome) -> None:
        if isinstance(record, Segment):
            bounds, action = self._spec.action, record.action
            self._actions += action.size
            self._outside += int(np.count_nonzero((action < bounds.low) | (action > bounds.high)))
            while not client.has_room or client.pending[1] > PENDING:
                _nap(client)
        client.push(record)

    def _check_room(self, missing: list[_Missing]) -> None:
        held = ask(self._link, m.Status()).report["sources"][self._source]
        steps, to_come = held["head"] - held["tail"], sum(self._dataset.lengths[entry.index] for entry in missing)
        if steps + to_come > held["capacity"]:
            raise ConfigError(
                f"source {self._source} holds {steps:,} of {held['capacity']:,} steps, and {to_come:,} of "
                f"{self._dataset.folder} are still to come: use another run_dir, with a larger capacity"
            )

    def _missing(self) -> list[_Missing]:
        self._hear()
        there = [found for id in self._parts if (found := NAME.fullmatch(id)) and found[1] == self._begin]
        if any((found[2] or "") != self._conversion.mark for found in there):
            raise ConfigError(
                f"source {self._source} holds {self._dataset.folder} as it was imported with another unit, "
                "calibration, rename, crop, size, fps or deltas: say the same again, or use another run_dir"
            )
        missing = []
        for index, length in enumerate(self._dataset.lengths):
            cut: list[str] = []
            for id in self._names(index):
                parts = self._parts.get(id, {}).values()
                if not parts:
                    missing.append(_Missing(index, id, tuple(cut)))
                    break
                is_whole = all(part.closed for part in parts) and sum(part.steps for part in parts) == length
                if is_whole or any(part.judged_by.startswith(DAMAGED) for part in parts):
                    break
                cut += [id] * (not all(part.discard for part in parts))
        return missing

    def _is_noted(self, dataset: Dataset, is_whole: bool) -> bool:
        """Return whether the run's folder tells what the source takes. is_whole: that of it no episode is missing.

        Raises ConfigError if episodes are missing, and others come from another dataset that was in its place.
        """
        kept = columns.noted(dataset, self._source, self._run_dir)
        if kept is None or not any(id.startswith(self._begin) for id in self._parts):
            return False
        count = kept["episodes"]
        if kept["hash"] == columns.digest(dataset, count):
            return is_whole and count == len(dataset.lengths)
        changed = f"{dataset.folder} has changed since source {self._source} imported episodes of it"
        if is_whole:
            log.warning("%s: the run goes on with those", changed)
            return True
        raise ConfigError(f"{changed}: put it back as it was, or use another run_dir")

    def _await_closed(self, client: TrainerClient) -> None:
        """Wait until no episode of this dataset is open. The server closes those of earlier sessions."""
        self._hear()
        while any(not part.closed for parts in self._parts.values() for part in parts.values()):
            _nap(client)
            self._hear()

    def _names(self, index: int) -> Iterator[str]:
        name = f"{self._begin}-{index:06d}{self._conversion.mark}"
        yield name
        attempt = 1
        while True:
            attempt += 1
            yield f"{name}~{attempt}"

    def _hear(self) -> None:
        """Ask the server for this dataset's episodes. The store keeps a long one in parts."""
        more = True
        while more:
            synced = ask(self._link, m.Sync(self._revision, 0))
            self._revision, more = synced.revision, synced.more
            for episode in (EpisodeInfo(*row) for row in synced.episodes):
                if episode.actor == self._folder.name:
                    self._parts.setdefault(PART.sub("", episode.id), {})[episode.id] = episode

    def _client(self) -> TrainerClient:
        actor = self._folder.name
        return TrainerClient(self._address, actor=actor, spec=self._spec, outbox=self._folder / "outbox")


def _settle(client: TrainerClient) -> None:
    while not client.connected or client.pending[0]:
        _nap(client)


def _nap(client: TrainerClient) -> None:
    """Wait a moment. Raises ConfigError if the outbox cannot be written."""
    if client.fault:
        raise ConfigError(f"{client.fault}: make room there, then run the same command again")
    client.wait(0.005)


def main(config: DictConfig, run_dir: Path, local: str, begun: Callable[[], None]) -> None:
    """Run the importer process of a run. It calls `begun` at once: a failure of its first work is worth another start.

    The store is made for the first actor's Spec where an actor will come, else for that of the first dataset.
    """
    begun()
    log_as("importer")
    plan = plan_of(config)
    waits = any(phase.actors.act for phase in plan.only(config.phase).phases.values())
    import_datasets(plan, run_dir, local=local, waits=waits)
