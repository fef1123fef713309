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
from serl_client.episode import MAX_NAME, LostRecord, Outcome, QueuedRecord, Segment
from serl_client.errors import ConfigError, Refused, RetakeError
from serl_client.spec import Array, Spec

from serl_launcher.store import layout
from serl_launcher.store.files import SourceFiles, allocate, make_folder, sync_folder
from serl_launcher.store.index import Episode, Index, Session, Source
from serl_launcher.store.layout import Layout
from serl_launcher.store.sessions import Sessions

log = logging.getLogger(__name__)

DATASET = "dataset"  # the mode of a directive that no actor hears of: an importer's
GROUP_BYTES = 64 << 20  # a group this large is committed before more is staged
MAKING = "index.making"  # the index of a store that is being made
GROUP_OUTCOMES = 10_000  # and so is one with so many outcomes, or records that are lost


class Gap(Exception):
    """A record came whose predecessor is missing; `expected` is the seq to begin again from."""

    def __init__(self, expected: int) -> None:
        super().__init__(expected)
        self.expected = expected


class Full(Exception):
    """A source has no room before the export has brought its oldest episodes into shards; the text says so."""


class GroupFailed(Exception):
    """A group could not be written, and not because of the disk: one of its records has set off a bug."""


@dataclass
class _Group:
    """What is staged for one source, and how many steps and rows that is."""

    segments: list[tuple[Segment, Array]] = field(default_factory=list)
    steps: int = 0
    rows: int = 0


class Store:
    """The sources of one run, in `folder`: stage(session, seq, record) any number of times, then commit().

    An episode of an `archived` source leaves the store only after `archive` has named it.
    """

    def __init__(self, folder: Path, archived: Collection[str] = ()) -> None:
        """Open the store that `create` made. Raises ConfigError when there is none, or none of this format."""
        if not is_there(folder):
            raise ConfigError(f"there is no store in {folder}")
        self.folder = folder
        self.index, self._files = Index(folder / "index.sqlite"), {}
        try:
            self._load(archived)
        except BaseException:
            self.close()
            raise
        self._clear()
        self._publish()

    def _load(self, archived: Collection[str]) -> None:
        """Read what is there."""
        self.index.probe()  # an earlier life may have died after a sync that failed
        self.run: str = self.index.meta("run")
        self.spec = Spec.from_dict(self.index.meta("spec"))
        self.sources = self.index.sources()
        self.lives = Sessions(self.index.sessions())
        self.sessions = self.lives.all
        self.directives = self.index.directives()
        self.newest_weights = next(iter(self.index.weights(1)), None)
        self.phase_steps = self.index.phases()
        self._open = self.index.open_episodes()
        self._episode_number, self._revision = self.index.last_numbers()
        for name, source in self.sources.items():
            files = self._files[name] = SourceFiles(self.folder / name, Layout(self.spec, source.capacity))
            if files.published > source.head:
                raise ConfigError(
                    f"the index of {self.folder} knows {source.head} steps of {name}, and {files.published} were "
                    "published: one of both was damaged; take a copy of the run's folder, or begin another run_dir"
                )
        self.archived = frozenset(archived) & frozenset(self.sources)
        self._kept = {name: self._first_kept(name) for name in self.archived}
        self.released = False  # since somebody last set it so: whether what was Full may find room now

    @classmethod
    def create(
        cls, folder: Path, spec: Spec, capacities: Mapping[str, int], archived: Collection[str] = ()
    ) -> "Store":  # fmt: skip
        """A new store with these sources (steps per source), or the one that is there, if it is of this Spec.

        Files are allocated in full. Raises ConfigError, naming both, when the Spec or a capacity differs from what
        is there, or when the disk cannot hold it.
        """
        if not is_there(folder):
            _found(folder, spec, capacities)
        store = cls.resume(folder, capacities, archived)
        if difference := store.spec.difference(spec):
            store.close()
            raise ConfigError(
                f"the run in {folder.parent} is of another robot or task (there, here): {difference}. "
                "Use another run_dir, or the task it was made with"
            )
        return store

    @classmethod
    def resume(cls, folder: Path, capacities: Mapping[str, int], archived: Collection[str] = ()) -> "Store":
        """The store that is there, with sources added that it lacks. Raises ConfigError as `create` does."""
        store = cls(folder, archived)
        there = {name: store.sources[name].capacity for name in capacities if name in store.sources}
        if there != {name: capacities[name] for name in there}:
            store.close()
            raise ConfigError(
                f"the run in {folder.parent} has sources of these capacities: {there}, the plan says "
                f"{dict(capacities)}. A capacity is for the life of a run: take the old one, or another run_dir"
            )
        if added := {name: capacities[name] for name in capacities if name not in there}:
            allocate(folder, store.spec, added)
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
    def hello(
        self, actor: str, outbox: str, session: str, earlier: Iterable[tuple[str, int]], *, owner: str = "",
        simulated: bool = False,
    ) -> None:  # fmt: skip
        """Make this session and the `earlier` ones (session, last seq), which its outbox still holds, known, durably.
        `owner` is the key that names them; "": nobody needs one; `simulated`: whether this actor's clock is. The server
        asks `lives`, and commits for many at once.

        Raises Refused, and changes nothing, for a session of another outbox or key, and when `session` is over.
        """
        self.lives.hello(actor, outbox, session, [name for name, _ in earlier], owner, simulated=simulated)
        self.commit()

    def close_before(self, session: str, held: Collection[str]) -> None:
        """Close, durably, what is over: sessions of this one's outbox before it of which that holds nothing any more.

        Only a client that lives may ask this. The Hello of one that was killed can come after that of its next life,
        which would then be closed, and its records never taken.
        """
        over = self.lives.over(session, held)
        for name in over:
            self.close_session(name)
        if over:
            self.commit()

    def close_session(self, session: str) -> None:
        """This actor's life is over: an episode it left open is truncated, without a final observation."""
        self.lives.close(session)
        self.cut(session)

    def close_open(self) -> None:
        """The run is over: what is open is truncated, durably; what its actor brings of it later is a part."""
        for session in list(self._open):
            self.cut(session)
        self.commit()

    @property
    def open_episodes(self) -> Collection[Episode]:
        """Those that have not ended."""
        return self._open.values()

    def cut(self, session: str) -> None:
        """Truncate the open episode of this session, without a final observation; not durable before commit()."""
        if episode := self._open.pop(session, None):
            episode.truncated = episode.closed = True
            self._changed_episodes[episode.id] = episode

    def expected(self, session: str) -> int:
        """The seq that this session's next record must have; 0 for one that is not known (any more)."""
        state = self.sessions.get(session)
        return state.expected if state else 0

    # -- records
    def stage(self, session: str, seq: int, record: QueuedRecord) -> bool:
        """Take a record into the current group; False when it is there already. Not durable before commit().

        Raises Gap when an earlier record is missing, Refused (and stages nothing) when the record is wrong, and Full
        (and stages nothing of it) when it has to wait for the export, until `released` says that it may come again.
        """
        state = self.sessions[session]
        if seq < state.expected:
            return False
        if seq > state.expected:
            raise Gap(state.expected)
        if state.closed:
            raise Refused(
                f"session {session} is over: a later start of {state.actor} has delivered what came before it"
            )
        if isinstance(record, Segment):
            self._stage_segment(state, record)
        elif isinstance(record, LostRecord):
            self._stage_lost(state, seq, record)
        else:
            self._stage_outcome(state, seq, record)
        state.expected += 1
        self.lives.taken(state)
        return True

    def _stage_segment(self, state: Session, segment: Segment) -> None:
        source, records = self._checked(state, segment)
        if segment.start == 0:
            self.cut(state.session)  # even if this segment has to wait: what is open is never exported
        self._wait_for_archive(source, segment)
        nbytes = sum(array.nbytes for array in segment.observation.values())
        full = self._staged[source.name].steps + len(segment) > source.capacity // 2
        if full or self._staged_bytes + nbytes > GROUP_BYTES:
            self.commit()
        self._cut_long(state.session, source, segment)
        episode = self._open.get(state.session) or self._begin(state, source, segment)
        self._place(records, segment, source, episode)
        self._staged_bytes += nbytes
        state.steps += len(segment)
        self.phase_steps[episode.phase] = self.phase_steps.get(episode.phase, 0) + len(segment)
        self._changed_phases.add(episode.phase)
        episode.steps += len(segment)
        episode.reward += float(segment.reward.sum(dtype=np.float64))
        episode.intervened += int(segment.intervened.sum())
        episode.weights = min(episode.weights, segment.stamp.weights)
        episode.terminated, episode.truncated = segment.terminated, segment.truncated
        episode.final = episode.closed = segment.ends
        self._changed_episodes[episode.id] = episode
        if segment.ends:
            del self._open[state.session]

    def _place(self, records: Array, segment: Segment, source: Source, episode: Episode) -> None:
        """Give the steps of a segment their numbers, and add them to the group."""
        group, count = self._staged[source.name], len(segment)
        step, row = source.head + group.steps, source.row_head + group.rows
        records["number"], records["row"] = np.arange(step, step + count), np.arange(row, row + count)
        records["episode"], records["first"] = episode.number, episode.first
        records["index"] = np.arange(episode.steps, episode.steps + count)
        if segment.ends:
            records["final_row"][-1] = row + count
        group.segments.append((segment, records))
        group.steps += count
        group.rows += count + segment.ends

    def _checked(self, state: Session, segment: Segment) -> tuple[Source, Array]:
        """The source that this segment goes to, and its [T] records, not numbered yet. Raises Refused, and has changed
        nothing, when it fits no Spec, no episode or no directive, or has anything that no record can hold."""
        try:
            segment.check(self.spec)
            source = self._source_of(state, segment)
            return source, _records(segment, self._files[source.name].layout.step)
        except RetakeError:
            raise
        except Exception as error:
            raise Refused(f"a segment of {segment.episode} does not fit the run's Spec: {error}") from None

    def _source_of(self, state: Session, segment: Segment) -> Source:
        body = self.directives.get(segment.stamp.directive, {})
        if segment.start > 0:
            episode = self._open.get(state.session) or self._cut_from_elsewhere(state)
            if episode is None or (episode.part_of, _end(episode)) != (segment.episode, segment.start):
                there = f"{episode.part_of}[{_end(episode)}]" if episode else "the start of an episode"
                raise Refused(f"step {segment.episode}[{segment.start}] came where {there} was to come")
            if not body:
                raise Refused(f"no directive {segment.stamp.directive}, of {segment.episode}, was ever given")
            source = self.sources[episode.source]
        else:
            name = body.get("into")
            if name not in self.sources:
                raise Refused(f"directive {segment.stamp.directive} of {segment.episode} collects into no source")
            if self._find(segment.episode) is not None:
                raise Refused(f"episode {segment.episode} is there already")
            source = self.sources[name]
        if len(segment) > source.capacity // 2:
            raise Refused(f"a segment of {len(segment)} steps does not fit source {source.name} of {source.capacity}")
        return source

    def _cut_from_elsewhere(self, state: Session) -> Episode | None:
        """The newest episode of a living session, when it ended without its actor's doing, who may bring the rest."""
        staged = [episode for episode in self._changed_episodes.values() if episode.session == state.session]
        newest = max([*staged, *self.index.newest(state.session)], key=lambda episode: episode.number, default=None)
        return None if state.closed or newest is None or newest.final else newest

    def _cut_long(self, session: str, source: Source, segment: Segment) -> None:
        """End the open episode before it takes more than a quarter of its source, or when its begin has left that: what
        comes goes on as a part, so that a source is never one open episode alone."""
        episode, most = self._open.get(session), source.capacity // 4
        if episode is None or (episode.steps + len(segment) <= most and episode.first >= source.tail):
            return
        log.warning("%s goes on as another episode from step %d on: one takes at most %d steps, a quarter of source %s",
                    episode.part_of, segment.start, most, source.name)  # fmt: skip
        self.cut(session)

    def _begin(self, state: Session, source: Source, segment: Segment) -> Episode:
        self._episode_number += 1
        group = self._staged[source.name]
        episode = Episode(
            self._episode_number, self._free_id(segment), source.name, state.session, state.actor, segment.task,
            segment.stamp.directive, segment.stamp.phase,
            first=source.head + group.steps, first_row=source.row_head + group.rows,
            part_of=segment.episode, part_start=segment.start, weights=segment.stamp.weights,
        )  # fmt: skip
        for id in dict.fromkeys((episode.part_of, episode.id)):
            self._begun.setdefault(id, []).append(episode)
            for outcome in [*self.index.outcomes(id), *self._said.get(id, ())]:
                _judge(episode, outcome)
        self._open[state.session] = episode
        if source.name in self.archived and self._kept[source.name] is None:
            self._kept[source.name] = (episode.first, episode.first_row, episode.id)
        return episode

    def _free_id(self, segment: Segment) -> str:
        """What the episode is called that begins with this segment: a part is <its episode>.part<its number>."""
        id, number = segment.episode, len(self._parts(segment.episode))
        while segment.start and self._find(id):
            number += 1
            id = f"{segment.episode}.part{number}"
        return id

    def _stage_lost(self, state: Session, seq: int, lost: LostRecord) -> None:
        """What an actor cannot send any more may have been a part of its open episode."""
        log.warning("record %d of %s is lost (%r)", seq, state.actor, lost.reason[:MAX_NAME])
        if len(self._staged_lost) >= GROUP_OUTCOMES:
            self.commit()
        self._staged_lost.append((state.session, seq, lost.reason[:MAX_NAME]))
        self.cut(state.session)

    def _stage_outcome(self, state: Session, seq: int, outcome: Outcome) -> None:
        """An outcome may come before its episode's first segment, or long after its last."""
        if len(outcome.episode) > MAX_NAME or len(outcome.judged_by) > MAX_NAME:
            raise Refused(f"the names in an outcome have at most {MAX_NAME} characters")
        if len(self._staged_outcomes) >= GROUP_OUTCOMES:
            self.commit()
        self._staged_outcomes.append((state.session, seq, outcome))
        self._said.setdefault(outcome.episode, []).append(outcome)
        for episode in self._parts(outcome.episode):
            _judge(episode, outcome)
            self._changed_episodes[episode.id] = episode
            is_open = episode is self._open.get(episode.session)
            if outcome.judged_by == "operator" and is_open and episode.session != state.session:
                self.cut(episode.session)  # said from elsewhere, as its actor is gone

    def _find(self, id: str) -> Episode | None:
        return next((episode for episode in self._parts(id) if episode.id == id), None)

    def _parts(self, id: str) -> list[Episode]:
        """The episode of this id and the parts that came after it, in order, as they are now."""
        found = {}
        for each in self.index.parts(id):
            still_open = self._open.get(each.session)
            is_open = still_open is not None and still_open.number == each.number
            found[each.number] = still_open if is_open else self._changed_episodes.get(each.id, each)
        return [*found.values(), *(each for each in self._begun.get(id, ()) if each.number not in found)]

    def actors_of(self, id: str) -> set[str]:
        """Whose episode this is; before it begins, who names episodes so (actor-session-number); empty: anybody may."""
        if episode := self._find(id):
            return {episode.actor}
        return self.lives.actors_of(id)

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

        When that is still open, it is cut, so that it can be exported: nobody waits for an actor that may be gone.
        """
        if (kept := self._kept.get(source.name)) is None:
            return
        first, first_row, id = kept
        files, group = self._files[source.name].layout, self._staged[source.name]
        steps, rows = source.head + group.steps - first, source.row_head + group.rows - first_row
        if steps + len(segment) <= files.capacity and rows + len(segment) + segment.ends <= files.rows:
            return
        for episode in [episode for episode in self._open.values() if episode.id == id]:
            self.cut(episode.session)
        raise Full(f"source {source.name} is full, and its episode {id} waits for its export")

    # -- the group
    @property
    def staged(self) -> bool:
        """Whether there is anything to commit."""
        return bool(self.lives.changed or self.lives.forgotten or self._changed_episodes)

    def commit(self) -> None:
        """Make all that was staged durable, then visible to readers. After whatever it raises this object is of no use,
        as a part of the group may count as written: OSError or sqlite3.Error when the disk is at fault, or memory, and
        GroupFailed when this program is."""
        try:
            self._commit()
        except (OSError, sqlite3.Error):
            raise
        except MemoryError as error:
            raise OSError(f"a group could not be written: {error!r}") from error
        except Exception as error:
            raise GroupFailed(f"a group could not be written: {error!r}") from error

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
        self.index.put_sessions(self.lives.changed.values())
        self.index.drop_sessions(self.lives.forgotten)
        self.index.put_episodes(self._changed_episodes.values())
        self.index.put_phases({phase: self.phase_steps[phase] for phase in self._changed_phases})
        self.index.add_outcomes(self._staged_outcomes)
        self.index.add_lost(self._staged_lost)
        self.index.commit()
        self._clear()
        self._publish()

    def _clear(self) -> None:
        self._staged = {name: _Group() for name in self.sources}
        self._staged_bytes, self._staged_outcomes, self._staged_lost = 0, [], []
        self._changed_episodes, self._changed_phases = {}, set()
        self.lives.committed()
        self._begun: dict[str, list[Episode]] = {}  # in this group, by their ids and those of what they are parts of
        self._said: dict[str, list[Outcome]] = {}  # in this group, of an episode

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
        for segment, records in group.segments:
            columns = [array for _, array in sorted(segment.observation.items())]
            records["checksum"] = layout.checksums(records, columns)
        records = np.concatenate([records for _, records in group.segments])
        files.write("steps", 0, files.layout.capacity, source.head, [records])
        source.head, source.row_head = source.head + group.steps, source.row_head + group.rows

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


def is_there(folder: Path) -> bool:
    """Whether a store lies here. Raises ConfigError when only its files do: without the index they are not readable,
    and a new one would overwrite them."""
    if (folder / "index.sqlite").exists():
        return True
    if (folder / MAKING).exists():  # somebody died while making it, before anything could be stored
        return False
    left = [
        *folder.glob("*/rows"),
        *folder.glob("*/steps"),
        *folder.glob("*/published"),
        *folder.glob("index.sqlite-*"),
    ]
    if left:
        raise ConfigError(
            f"{folder} holds {left[0].relative_to(folder)}, but no index.sqlite, without which nobody can read it: "
            "bring that file back, or begin another run_dir. Nothing was changed"
        )
    return False


def _found(folder: Path, spec: Spec, capacities: Mapping[str, int]) -> None:
    """Make a new store. The index comes first under another name, and gets its own, by rename, when all is there."""
    make_folder(folder)
    making = folder / MAKING
    making.unlink(missing_ok=True)
    index = Index(making)
    index.set_meta("run", uuid.uuid4().hex)
    index.set_meta("spec", spec.to_dict())
    index.put_sources(Source(name, capacity) for name, capacity in capacities.items())
    index.commit()  # SQLite has synced the folder by now, so the files below are never there without it
    index.close()
    allocate(folder, spec, capacities)
    making.rename(folder / "index.sqlite")
    sync_folder(folder)


def _end(episode: Episode) -> int:
    """The step of its actor's episode that comes next."""
    return episode.part_start + episode.steps


def _judge(episode: Episode, outcome: Outcome) -> None:
    """The operator's latest word wins; without one, the judge's."""
    if outcome.judged_by == "operator" or episode.judged_by != "operator":
        episode.success, episode.discard, episode.judged_by = outcome.success, outcome.discard, outcome.judged_by


def _records(segment: Segment, kind: np.dtype) -> Array:
    """The [T] step records of a segment, without their numbers and checksums."""
    records = np.zeros(len(segment), kind)
    records["final_row"] = -1
    records["directive"], records["weights"] = segment.stamp.directive, segment.stamp.weights
    records["time"], records["reward"], records["action"] = segment.time, segment.reward, segment.action
    records["chunk_delay"] = segment.chunk_delay
    flags = (
        (segment.intervened, layout.INTERVENED),
        (segment.chunk_start, layout.CHUNK_START),
        (segment.gap, layout.GAP),
    )
    records["flags"] = sum(flag * bit for flag, bit in flags)
    for name, extra in segment.extras.items():
        records[f"extras.{name}"] = extra
    if segment.ends:
        records["flags"][-1] |= segment.terminated * layout.TERMINATED + segment.truncated * layout.TRUNCATED
    return records
