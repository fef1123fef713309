"""The durable store of all transitions: its only writer is the server, and what it acknowledged is never lost, doubled,
reordered or mixed with another episode.

A group of records is written in this order, and only this order makes the promise hold:
    1. evict, if there is no room: commit the new tail, then publish it        (nothing is overwritten before that)
    2. pwrite rows and steps into free slots, fdatasync both
    3. commit the index: head, watermarks, episodes, outcomes                   (the only commit point)
    4. publish head in the mapped word
    5. acknowledge                                                              (the server's part)
After a crash everything beyond the committed head does not exist, and the store opens without reading data back.
If a write or a sync fails, nothing unacknowledged is trusted: close the store, open it again, let the actors resend.
"""

import logging
import sqlite3
import uuid
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from serl_client.episode import MAX_NAME, Entry, Lost, Outcome, Segment
from serl_client.errors import ConfigError, Refused
from serl_client.spec import Array, Spec

from serl_launcher.data import layout
from serl_launcher.data.files import SourceFiles, allocate, make_folder, sync_folder
from serl_launcher.data.index import Episode, Epoch, Index, Source
from serl_launcher.data.layout import Layout

log = logging.getLogger(__name__)

DATASET = "dataset"  # the mode of a directive that no actor hears of: an importer's
GROUP_BYTES = 64 << 20  # a group this large is committed before more is staged
GROUP_OUTCOMES = 10_000  # and so is one with so many outcomes, or records that are lost


class Gap(Exception):
    """A record came whose predecessor is missing; `expected` is the seq to begin again from."""

    def __init__(self, expected: int) -> None:
        super().__init__(expected)
        self.expected = expected


class Full(Exception):
    """A source has no room before the export has brought its oldest episodes into shards; the text says so."""


@dataclass
class _Group:
    """What is staged for one source, and how many steps and rows that is."""

    segments: list[tuple[Segment, Episode]] = field(default_factory=list)
    steps: int = 0
    rows: int = 0


class Store:
    """The sources of one run, in `folder`: stage(epoch, seq, record) any number of times, then commit().

    An episode of an `archived` source leaves the store only after `archive` has named it.
    """

    def __init__(self, folder: Path, archived: Collection[str] = ()) -> None:
        """Open the store that `create` made. Raises ConfigError when there is none, or none of this format."""
        if not (folder / "index.sqlite").exists():
            raise ConfigError(f"there is no store in {folder}")
        self.folder = folder
        self.index = Index(folder / "index.sqlite")
        self.index.probe()  # an earlier life may have died after a sync that failed
        self.run: str = self.index.meta("run")
        self.spec = Spec.from_dict(self.index.meta("spec"))
        self.sources = self.index.sources()
        self.epochs = self.index.epochs()
        self.directives = self.index.directives()
        self.newest_weights = next(iter(self.index.weights(1)), None)
        self.epoch_steps, self.phase_steps = self.index.step_counts()
        self._open = self.index.open_episodes()
        self._episode_number, self._revision = self.index.last_numbers()
        self._files = {
            name: SourceFiles(folder / name, Layout(self.spec, s.capacity)) for name, s in self.sources.items()
        }
        self.archived = frozenset(archived) & frozenset(self.sources)
        self._kept = {name: self._first_kept(name) for name in self.archived}
        self.released = False  # since somebody last set it so: whether what was Full may find room now
        self._clear()
        for name, source in self.sources.items():
            if (head := self._files[name].published) > source.head:
                self.close()
                raise ConfigError(
                    f"the index of {folder} knows {source.head} steps of {name}, and {head} were published: one of "
                    "both was damaged; take a copy of the run's folder, or begin another run_dir"
                )
        self._publish()

    @classmethod
    def create(
        cls, folder: Path, spec: Spec, capacities: Mapping[str, int], archived: Collection[str] = ()
    ) -> "Store":  # fmt: skip
        """A new store with these sources (steps per source), or the one that is there, if it is of this Spec.

        Files are allocated in full. Raises ConfigError, naming both, when the Spec or a capacity differs from what
        is there, or when the disk cannot hold it.
        """
        if not (folder / "index.sqlite").exists():
            _found(folder, spec, capacities)
        store = cls(folder, archived)
        if difference := store.spec.difference(spec):
            store.close()
            raise ConfigError(
                f"the run in {folder.parent} is of another robot or task (there, here): {difference}. "
                "Use another run_dir, or the task it was made with"
            )
        there = {name: store.sources[name].capacity for name in capacities if name in store.sources}
        if there != {name: capacities[name] for name in there}:
            store.close()
            raise ConfigError(
                f"the run in {folder.parent} has sources of these capacities: {there}, the plan says "
                f"{dict(capacities)}. A capacity is for the life of a run: take the old one, or another run_dir"
            )
        if added := {name: capacities[name] for name in capacities if name not in there}:
            allocate(folder, spec, added)
            store.index.put_sources(Source(name, capacity) for name, capacity in added.items())
            store.index.commit()
            store.close()
            store = cls(folder, archived)
        return store

    def close(self) -> None:
        self.index.close()
        for files in self._files.values():
            files.close()

    # -- connections
    def hello(self, actor: str, outbox: str, epoch: str, earlier: Iterable[tuple[str, int]]) -> None:
        """Make this epoch and the `earlier` ones (epoch, last seq), which its outbox still holds, known, durably."""
        alive = {epoch, *(name for name, _ in earlier)}
        if strangers := [name for name in alive if name in self.epochs and self.epochs[name].outbox != outbox]:
            raise Refused(f"epoch {strangers[0]} belongs to another actor's outbox")
        for name in [*(name for name, _ in earlier), epoch]:
            if name not in self.epochs:
                self.epochs[name] = Epoch(name, len(self.epochs), actor, outbox)
            self._changed_epochs[name] = self.epochs[name]
        self.commit()

    def close_before(self, epoch: str, held: Collection[str]) -> None:
        """Close, durably, what is over: epochs of this one's outbox before it of which that holds nothing any more.

        Only a client that lives may ask this. The Hello of one that was killed can come after that of its next life,
        which would then be closed, and its records never taken.
        """
        now = self.epochs[epoch]
        for state in list(self.epochs.values()):
            mine = (state.outbox, state.actor) == (now.outbox, now.actor) and state.position < now.position
            if mine and state.epoch not in held and not state.closed:
                self.close_epoch(state.epoch)
        self.commit()

    def close_epoch(self, epoch: str) -> None:
        """This actor's life is over: an episode it left open is truncated, without a final observation."""
        self.epochs[epoch].closed = True
        self._changed_epochs[epoch] = self.epochs[epoch]
        if episode := self._open.pop(epoch, None):
            self._seal_cut(episode)

    def close_open(self) -> None:
        """The run is over: what is open is truncated, durably. If its actor brings more of it, it is open again."""
        for episode in self._open.values():
            self._seal_cut(episode)
        self._open.clear()
        self.commit()

    def expected(self, epoch: str) -> int:
        """The seq that this epoch's next record must have."""
        return self.epochs[epoch].expected

    # -- records
    def stage(self, epoch: str, seq: int, record: Entry) -> bool:
        """Take a record into the current group; False when it is there already. Not durable before commit().

        Raises Gap when an earlier record is missing, Refused (and stages nothing) when the record is wrong, and Full
        (and stages nothing of it) when it has to wait for the export, until `released` says that it may come again.
        """
        state = self.epochs[epoch]
        if seq < state.expected:
            return False
        if seq > state.expected:
            raise Gap(state.expected)
        if isinstance(record, Segment):
            self._stage_segment(state, record)
        elif isinstance(record, Lost):
            self._stage_lost(state, seq, record)
        else:
            self._stage_outcome(state, seq, record)
        state.expected += 1
        self._changed_epochs[epoch] = state
        return True

    def _stage_segment(self, state: Epoch, segment: Segment) -> None:
        source = self._checked(state, segment)
        if segment.start == 0 and (left := self._open.pop(state.epoch, None)):
            self._seal_cut(left)  # even if this segment has to wait: what is open is never exported
        self._wait_for_archive(source, segment)
        nbytes = sum(array.nbytes for array in segment.observation.values())
        full = self._staged[source.name].steps + len(segment) > source.capacity // 2
        if full or self._staged_bytes + nbytes > GROUP_BYTES:
            self.commit()
        episode = self._open[state.epoch] if segment.start else self._begin(state, source, segment)
        group = self._staged[source.name]
        group.segments.append((segment, episode))
        group.steps += len(segment)
        group.rows += len(segment) + segment.ends
        self._staged_bytes += nbytes
        self.epoch_steps[state.epoch] = self.epoch_steps.get(state.epoch, 0) + len(segment)
        self.phase_steps[episode.phase] = self.phase_steps.get(episode.phase, 0) + len(segment)
        episode.steps += len(segment)
        episode.reward += float(segment.reward.sum(dtype=np.float64))
        episode.intervened += int(segment.intervened.sum())
        episode.weights = min(episode.weights, segment.stamp.weights)
        episode.terminated, episode.truncated = segment.terminated, segment.truncated
        episode.final = episode.sealed = segment.ends
        self._changed_episodes[episode.id] = episode
        if segment.ends:
            del self._open[state.epoch]

    def _checked(self, state: Epoch, segment: Segment) -> Source:
        """The source that this segment goes to. Raises Refused when it fits no Spec, no episode or no directive."""
        try:
            segment.check(self.spec)
        except ValueError as error:
            raise Refused(f"a segment of {segment.episode} does not fit the run's Spec: {error}") from None
        episode = self._open.get(state.epoch) or self._opened_again(state, segment)
        if segment.start > 0:
            if episode is None or (episode.id, episode.steps) != (segment.episode, segment.start):
                there = f"{episode.id}[{episode.steps}]" if episode else "the start of an episode"
                raise Refused(f"step {segment.episode}[{segment.start}] came where {there} was to come")
            source = self.sources[episode.source]
        else:
            name = self.directives.get(segment.stamp.directive, {}).get("into")
            if name not in self.sources:
                raise Refused(f"directive {segment.stamp.directive} of {segment.episode} collects into no source")
            if self._find(segment.episode) is not None:
                raise Refused(f"episode {segment.episode} is there already")
            source = self.sources[name]
        if len(segment) > source.capacity // 2:
            raise Refused(f"a segment of {len(segment)} steps does not fit source {source.name} of {source.capacity}")
        return source

    def _begin(self, state: Epoch, source: Source, segment: Segment) -> Episode:
        self._episode_number += 1
        group = self._staged[source.name]
        episode = Episode(
            self._episode_number, segment.episode, source.name, state.epoch, state.actor, segment.task,
            segment.stamp.directive, segment.stamp.phase,
            first=source.head + group.steps, first_row=source.row_head + group.rows,
            weights=segment.stamp.weights,
        )  # fmt: skip
        staged = [outcome for _, _, outcome in self._staged_outcomes if outcome.episode == episode.id]
        for outcome in [*self.index.outcomes(episode.id), *staged]:
            _judge(episode, outcome)
        self._open[state.epoch] = episode
        if source.name in self.archived and self._kept[source.name] is None:
            self._kept[source.name] = (episode.first, episode.first_row, episode.id)
        return episode

    def _stage_lost(self, state: Epoch, seq: int, lost: Lost) -> None:
        """What an actor cannot send any more may have been a part of its open episode."""
        log.warning("record %d of %s is lost (%r)", seq, state.actor, lost.lost[:MAX_NAME])
        if len(self._staged_lost) >= GROUP_OUTCOMES:
            self.commit()
        self._staged_lost.append((state.epoch, seq, lost.lost[:MAX_NAME]))
        if episode := self._open.pop(state.epoch, None):
            self._seal_cut(episode)

    def _stage_outcome(self, state: Epoch, seq: int, outcome: Outcome) -> None:
        """An outcome may come before its episode's first segment, or long after its last."""
        if len(outcome.episode) > MAX_NAME or len(outcome.by) > MAX_NAME:
            raise Refused(f"the names in an outcome have at most {MAX_NAME} characters")
        if len(self._staged_outcomes) >= GROUP_OUTCOMES:
            self.commit()
        self._staged_outcomes.append((state.epoch, seq, outcome))
        if episode := self._find(outcome.episode):
            _judge(episode, outcome)
            self._changed_episodes[episode.id] = episode
            if outcome.by == "operator" and episode is self._open.get(episode.epoch) and episode.epoch != state.epoch:
                self._seal_cut(self._open.pop(episode.epoch))  # said from elsewhere, as its actor is gone

    def _seal_cut(self, episode: Episode) -> None:
        episode.truncated = episode.sealed = True
        self._changed_episodes[episode.id] = episode

    def _opened_again(self, state: Epoch, segment: Segment) -> Episode | None:
        """The newest episode of a living epoch, when it was closed from elsewhere and yet goes on."""
        episode = self._find(segment.episode) if segment.start > 0 and not state.closed else None
        if episode is None or (episode.epoch, episode.final, episode.steps) != (state.epoch, False, segment.start):
            return None
        staged = (other.number for other in self._changed_episodes.values() if other.epoch == state.epoch)
        if episode.number < max(self.index.newest(state.epoch), *staged, 0):
            return None
        episode.truncated = episode.sealed = False
        self._open[state.epoch] = episode
        return episode

    def _find(self, id: str) -> Episode | None:
        still_open = (episode for episode in self._open.values() if episode.id == id)
        return self._changed_episodes.get(id) or next(still_open, None) or self.index.episode(id)

    def actors_of(self, id: str) -> set[str]:
        """Whose episode this is; before it begins, who names episodes so (actor-epoch-number); empty: anybody may."""
        if episode := self._find(id):
            return {episode.actor}
        return {state.actor for state in self.epochs.values() if id.startswith(f"{state.actor}-{state.epoch[:8]}-")}

    # -- the archive
    def archive(self, episodes: Iterable[int]) -> None:
        """These episodes, by number, may leave the store from now on, durably."""
        self.index.add_archived(episodes)
        self.commit()
        self._kept = {name: self._first_kept(name) for name in self.archived}
        self.released = True

    def _first_kept(self, source: str) -> tuple[int, int, str] | None:
        return self.index.first_kept(source, self.sources[source].tail)

    def _wait_for_archive(self, source: Source, segment: Segment) -> None:
        """Raise Full when this segment needs the place of an episode that is kept.

        A new episode begins only while they take less than half of the source, so that those that are open can end.
        When the oldest is open and the source is full, its own next step would wait for its own end: it goes, and the
        log says so.
        """
        kept = self._kept.get(source.name)
        if kept is None:
            return
        first, first_row, id = kept
        files, group = self._files[source.name].layout, self._staged[source.name]
        steps, rows = source.head + group.steps - first, source.row_head + group.rows - first_row
        is_crowded = segment.start == 0 and (steps >= files.capacity // 2 or rows >= files.rows // 2)
        fits = steps + len(segment) <= files.capacity and rows + len(segment) + segment.ends <= files.rows
        if fits and not is_crowded:
            return
        if id != segment.episode:
            is_open = any(episode.id == id for episode in self._open.values())
            why = (
                "is still open: start its actor again, or label it by tools/label.py"
                if is_open
                else "waits for its export"
            )
            raise Full(f"source {source.name} is full, and its episode {id} {why}")
        log.warning("%s is too long for source %s: it leaves the store without an archive", id, source.name)
        self.commit()  # so that the index knows every episode
        episode = self._find(id)
        self.archive([episode.number] if episode else [])
        self._wait_for_archive(source, segment)

    # -- the group
    @property
    def staged(self) -> bool:
        """Whether there is anything to commit."""
        return bool(self._changed_epochs or self._changed_episodes)

    def commit(self) -> None:
        """Make all that was staged durable, then visible to readers. Raises OSError or sqlite3.Error, after which this
        object is of no use: a part of the group may count as written."""
        try:
            self._commit()
        except (OSError, sqlite3.Error):
            raise
        except Exception as error:  # no memory, no thread
            raise OSError(f"a group could not be written: {error!r}") from error

    def _commit(self) -> None:
        busy = [name for name, group in self._staged.items() if group.segments]
        for name in busy:
            self._make_room(self.sources[name], self._staged[name])
        for name in busy:
            self._write(self.sources[name], self._staged[name])
        for name in busy:
            self._files[name].sync()
        for episode in self._changed_episodes.values():
            self._revision += 1
            episode.revision = self._revision
        self.index.put_sources(self.sources[name] for name in busy)
        self.index.put_epochs(self._changed_epochs.values())
        self.index.put_episodes(self._changed_episodes.values())
        self.index.add_outcomes(self._staged_outcomes)
        self.index.add_lost(self._staged_lost)
        self.index.commit()
        self._clear()
        self._publish()

    def _clear(self) -> None:
        self._staged = {name: _Group() for name in self.sources}
        self._staged_bytes, self._staged_outcomes, self._staged_lost = 0, [], []
        self._changed_epochs, self._changed_episodes = {}, {}

    def _make_room(self, source: Source, group: _Group) -> None:
        """Evict the oldest episodes, whole, until the group fits; the new tail is committed and published first."""
        files = self._files[source.name].layout
        tail = source.head + group.steps - files.capacity
        row_tail = source.row_head + group.rows - files.rows
        if tail <= source.tail and row_tail <= source.row_tail:
            return
        spare = files.capacity // 64  # so that not every group evicts
        least = (max(tail + spare, source.tail), max(row_tail + spare, source.row_tail))
        found = self.index.first_from(source.name, *least)
        source.tail, source.row_tail = found or (source.head, source.row_head)
        if (kept := self._kept.get(source.name)) is not None and kept[0] < source.tail:
            source.tail, source.row_tail, _ = kept
        for episode in self._open.values():
            if episode.source == source.name and episode.first < source.tail:
                log.warning("%s is longer than source %s: nothing of it can be drawn", episode.id, source.name)
        # What is staged is not in this transaction: a tail may move without the group that needs it.
        self.index.put_sources([source])
        self.index.commit()
        self._publish()

    def _write(self, source: Source, group: _Group) -> None:
        """Write the group's rows and steps behind the head, and move the head (in memory).

        The rows are on their way to the disk while the steps are made of them.
        """
        files = self._files[source.name]
        for name, offset in files.layout.blocks.items():
            arrays = [segment.observation[name] for segment, _ in group.segments]
            files.write("rows", offset, files.layout.rows, source.row_head, arrays)
        files.begin_sync("rows")
        records = np.zeros(group.steps, files.layout.step)
        step, row, begin = source.head, source.row_head, 0
        for segment, episode in group.segments:
            part = records[begin : begin + len(segment)]
            _fill(part, segment, episode, step, row, sorted(self.spec.extras))
            step, row, begin = step + len(segment), row + len(segment) + segment.ends, begin + len(segment)
        files.write("steps", 0, files.layout.capacity, source.head, [records])
        source.head, source.row_head = step, row

    def _publish(self) -> None:
        for name, source in self.sources.items():
            self._files[name].publish(source.tail, source.head)

    # -- numbers that never go back
    @property
    def directive(self) -> int:
        """The number of the newest directive that is for actors; 0: there is none."""
        return next((n for n, body in reversed(self.directives.items()) if body.get("mode") != DATASET), 0)

    def direct(self, body: dict[str, Any]) -> int:
        """Make `body` the directive, durably, and return its number: the same one when nothing changed.

        A body of the mode DATASET only says where the steps go that are stamped with its number.
        """
        latest = self.directives if body.get("mode") == DATASET else [self.directive]
        if number := next((n for n in latest if n and self.directives[n] == body), 0):
            return number
        number = self.index.add_directive(body)
        self.commit()
        self.directives[number] = body
        return number

    def publish_weights(self, sha256: str, size: int, update: int) -> int:
        """Give the weights file `sha256` the next version number, durably."""
        version = self.index.add_weights(sha256, size, update)
        self.commit()
        self.newest_weights = self.index.weights(1)[0]
        return version

    def command(self, name: str, argument: str, actor: str) -> int:
        """Log an operator's command, durably."""
        number = self.index.add_command(name, argument, actor)
        self.commit()
        return number

    def probe(self) -> None:
        """Write and sync something; raises OSError or sqlite3.Error while the disk still fails."""
        for files in self._files.values():
            files.sync()
        self.index.probe()

    def manifest(self) -> dict[str, dict[str, int]]:
        """{source: {capacity, tail, head}} as committed."""
        return {s.name: {"capacity": s.capacity, "tail": s.tail, "head": s.head} for s in self.sources.values()}


def _found(folder: Path, spec: Spec, capacities: Mapping[str, int]) -> None:
    """Make a new store; the index comes last, by rename, so that a store is whole or not there."""
    make_folder(folder)
    allocate(folder, spec, capacities)
    making = folder / "index.making"
    making.unlink(missing_ok=True)
    index = Index(making)
    index.set_meta("run", uuid.uuid4().hex)
    index.set_meta("spec", spec.to_dict())
    index.put_sources(Source(name, capacity) for name, capacity in capacities.items())
    index.commit()
    index.close()
    making.rename(folder / "index.sqlite")
    sync_folder(folder)


def _judge(episode: Episode, outcome: Outcome) -> None:
    """The operator's latest word wins; without one, the judge's."""
    if outcome.by == "operator" or episode.judge != "operator":
        episode.success, episode.discard, episode.judge = outcome.success, outcome.discard, outcome.by


def _fill(part: Array, segment: Segment, episode: Episode, step: int, row: int, extras: list[str]) -> None:
    """The step records of one segment, whose first step and row get the numbers `step` and `row`."""
    count = len(segment)
    part["number"] = np.arange(step, step + count)
    part["episode"], part["first"] = episode.number, episode.first
    part["row"] = np.arange(row, row + count)
    part["final_row"] = -1
    part["index"] = np.arange(segment.start, segment.start + count)
    part["directive"], part["weights"] = segment.stamp.directive, segment.stamp.weights
    part["time"], part["reward"], part["action"] = segment.time, segment.reward, segment.action
    part["flags"] = segment.intervened * layout.INTERVENED + segment.decision * layout.DECISION
    for name in extras:
        part[f"extras.{name}"] = segment.extras[name]
    if segment.ends:
        part["final_row"][-1] = row + count
        part["flags"][-1] |= segment.terminated * layout.TERMINATED + segment.truncated * layout.TRUNCATED
    part["checksum"] = layout.checksums(part, [array for _, array in sorted(segment.observation.items())])
