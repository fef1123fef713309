"""Stores all transitions durably: what it acknowledged is never lost, doubled, reordered or mixed up.

A group of records is written in this order, and only this order makes the promise hold:
    1. evict, if there is no room: commit the new tail, then publish it        (nothing is overwritten before that)
    2. pwrite rows and steps into free slots, fdatasync both
    3. commit the index: head, watermarks, episodes, outcomes                   (the only commit point)
    4. publish head in the mapped word
    5. acknowledge                                                              (the server's part)
After a crash everything beyond the committed head does not exist, and the store opens without reading data back.
If a write or a sync fails, nothing unacknowledged is trusted: close the store, open it again, let the actors resend.
"""

import json
import sqlite3
from collections.abc import Collection, Iterable, Mapping
from dataclasses import astuple
from pathlib import Path
from typing import Any

from serl_client.console import throttled
from serl_client.episode import LostRecord, Outcome, QueuedRecord, Segment
from serl_client.errors import ConfigError, Refused, RetakeError
from serl_client.limits import Limits
from serl_client.names import MAX_NAME, check_names, cleaned
from serl_client.spec import Array, Spec

from serl_launcher.store.archive import Archive
from serl_launcher.store.aside import LEARNER, SESSION
from serl_launcher.store.creation import INDEX, is_there, make_store
from serl_launcher.store.directives import EVALUATE, Directives
from serl_launcher.store.episodes import Episodes
from serl_launcher.store.errors import Full, Gap, GroupFailed
from serl_launcher.store.files import allocate
from serl_launcher.store.index import Index
from serl_launcher.store.ring import Ring, step_records
from serl_launcher.store.schema import Session, Source
from serl_launcher.store.sessions import Sessions

log = throttled(__name__)

GROUP_BYTES = 16 << 20  # a group this large is committed before more is staged
GROUP_OUTCOMES = 10_000  # and so is one with so many outcomes, or records that are lost


class Store:
    """The sources of one run, in `folder`: stage(session, seq, record) any number of times, then commit().

    An episode of an `archived` source leaves the store only after `archive` has named it.
    """

    def __init__(self, folder: Path, archived: Collection[str] = ()) -> None:
        """Open the store that `create` made. Raises ConfigError when there is none, or none of this format."""
        if not is_there(folder):
            raise ConfigError(f"there is no store in {folder}: name the folder of a run")
        self.folder = folder
        self.index, self.rings = Index(folder / INDEX, writes=True), dict[str, Ring]()
        try:
            self._load(archived)
        except BaseException:
            self.close()
            raise
        self._clear()
        self._publish()

    def _load(self, archived: Collection[str]) -> None:
        self.index.probe()  # an earlier life may have died after a sync that failed
        self.run: str = self.index.meta("run")
        self.spec = Spec.from_dict(self.index.meta("spec"))
        self.limits = Limits(self.spec)
        self.sources = self.index.sources()
        self.lives = Sessions(self.index.sessions())
        self.sessions = self.lives.all
        self.directives = Directives(self.index)
        self.newest_weights = next(iter(self.index.weights(1)), None)
        self.phase_steps = self.index.phases()
        self.episodes = Episodes(self.index)
        for name, source in self.sources.items():
            files = (ring := Ring(self.folder / name, source, self.spec)).files
            self.rings[name] = ring
            if files.published > source.head:
                raise ConfigError(
                    f"the index of {self.folder} knows {source.head} steps of {name}, and {files.published} were "
                    "published: one of both was damaged; take a copy of the run's folder, or begin another run_dir"
                )
        self.archive = Archive(self.index, self.sources, archived)

    @classmethod
    def create(
        cls, folder: Path, spec: Spec, capacities: Mapping[str, int], archived: Collection[str] = ()
    ) -> "Store":  # fmt: skip
        """A new store with these sources (steps per source), or the one that is there, if it is of this Spec.

        Files are allocated in full. Raises ConfigError, naming both, when the Spec differs from what is there, or when
        the disk cannot hold it.
        """
        if not is_there(folder):
            make_store(folder, spec, capacities)
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
        """The store that is there, with sources added that it lacks; the others keep their capacity. Raises
        ConfigError as `create` does."""
        store = cls(folder, archived)
        if added := {name: capacities[name] for name in capacities if name not in store.sources}:
            allocate(folder, store.spec, added)
            store.index.put(*(Source(name, capacity) for name, capacity in added.items()))
            store.index.commit()
            store.close()
            store = cls(folder, archived)
        return store

    def close(self) -> None:
        self.index.close()
        for ring in self.rings.values():
            ring.files.close()

    # -- connections
    def close_before(self, session: str, held: Collection[str]) -> None:
        """Close, durably, the sessions before this one whose records have all left the outbox that they share.

        held: the earlier sessions of which the outbox still holds records. Ask this only for a client that has spoken
        after its Hello: the Hello of a killed client can arrive after that of its next life, and would close that one.
        """
        over = self.lives.over(session, held)
        for name in over:
            self.close_session(name)
        if over:
            self.commit()

    def close_session(self, session: str) -> None:
        """Close a session for good. Its open episode is truncated, without a final observation."""
        self.lives.close(session)
        self.episodes.cut(session)

    def close_open(self) -> None:
        """Truncate all open episodes, durably, because the run is over. Later steps of them become parts."""
        for session in list(self.episodes.open):
            self.episodes.cut(session)
        self.commit()

    def expected(self, session: str) -> int:
        """Return the seq that this session's next record must have; 0 for an unknown session."""
        state = self.sessions.get(session)
        return state.expected if state else 0

    # -- records
    def stage(self, session: str, seq: int, record: QueuedRecord) -> bool:
        """Add a record to the current group, which commit() makes durable; False if the store has it already.

        Raises, and stages nothing: Gap if an earlier record is missing; Refused if the record is wrong; Full if its
        source has no room before the export: it may come again once `archive.released` is set.
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
            self._stage_segment(state, seq, record)
        elif isinstance(record, LostRecord):
            self._stage_lost(state, seq, record)
        else:
            self._stage_outcome(state, seq, record)
        state.expected += 1
        self.lives.note_record(state)
        return True

    def _stage_segment(self, state: Session, seq: int, segment: Segment) -> None:
        source, records = self._checked(state, segment)
        if segment.start == 0:
            self.episodes.cut(state.session)  # even if this segment has to wait: what is open is never exported
        self._wait_for_archive(source, segment)
        nbytes = sum(array.nbytes for array in segment.observation.values())
        ring = self.rings[source.name]
        if ring.is_half_full(len(segment)) or self._staged_bytes + nbytes > GROUP_BYTES:
            self.commit()
        self.episodes.cut_long(state.session, source, segment)
        if (episode := self.episodes.open.get(state.session)) is None:
            episode = self.episodes.begin(state, ring, segment)
            self.archive.begun(episode)
        ring.place(records, segment, episode)
        self._staged_bytes += nbytes
        state.steps += len(segment)
        self.phase_steps[episode.phase] = self.phase_steps.get(episode.phase, 0) + len(segment)
        self._phases.add(episode.phase)
        self.episodes.grow(episode, segment)
        if reason := self.limits.broken(segment.columns, segment.start):
            self.episodes.set_aside(segment.episode, reason, state.session, seq)

    def _checked(self, state: Session, segment: Segment) -> tuple[Source, Array]:
        """Return the source of a segment, and its [T] step records without numbers.

        Raises Refused, and changes nothing, if it does not fit the Spec, its episode, its directive, or the records.
        """
        try:
            segment.check(self.spec)
            source = self._source_of(state, segment)
            return source, step_records(segment, self.rings[source.name].layout.step)
        except RetakeError:
            raise
        except Exception as error:
            raise Refused(f"a segment of {segment.episode} does not fit the run's Spec: {error}") from None

    def _source_of(self, state: Session, segment: Segment) -> Source:
        """Return where a segment goes. Its directive's own record says that, and its phase; so must its stamp."""
        body = self.directives.of(segment, state.actor, (self.newest_weights or {}).get("version", 0))
        if segment.start > 0:
            source = self.sources[self.episodes.continued_by(segment, state).source]
        else:
            name = body.get("into")
            if name not in self.sources:
                raise Refused(f"directive {segment.stamp.directive} of {segment.episode} collects into no source")
            if self.episodes.find(segment.episode) is not None:
                raise Refused(f"episode {segment.episode} is there already")
            self.lives.texts.drop(state.owner, segment.episode)  # it may have been judged already
            source = self.sources[name]
        if len(segment) > source.capacity // 2:
            raise Refused(f"a segment of {len(segment)} steps does not fit source {source.name} of {source.capacity}")
        self.lives.texts.add(state.owner, segment.task)
        return source

    def _stage_lost(self, state: Session, seq: int, lost: LostRecord) -> None:
        """Note a record that its actor lost, and cut the actor's episode, of which it may have been a part."""
        reason = cleaned(lost.reason[:MAX_NAME])
        log.warning("record %d of %s is lost (%s)", seq, state.actor, reason)
        if len(self._staged_lost) >= GROUP_OUTCOMES:
            self.commit()
        reason = reason if self.lives.texts.takes(state.owner, reason) else ""
        self._staged_lost.append((state.session, seq, reason))
        if episode := self.episodes.continued(state):  # open, or closed from elsewhere
            episode.continued = True  # perhaps by the lost record: so a verdict is not about the last step here
            self.episodes.changed[episode.id] = episode
        self.episodes.cut(state.session)

    def _stage_outcome(self, state: Session, seq: int, outcome: Outcome) -> None:
        """Apply an outcome. It may come before its episode's first segment, or long after its last."""
        check_names("an outcome", outcome.episode, outcome.judged_by, error=Refused)
        if outcome.judged_by.startswith(LEARNER):
            raise Refused(f"an outcome by {outcome.judged_by!r} is the learner's own: no client says it")
        is_early = bool(state.owner) and self.episodes.find(outcome.episode) is None
        self.lives.texts.add(state.owner, outcome.judged_by, *[outcome.episode] * is_early)
        if len(self.episodes.said) >= GROUP_OUTCOMES:
            self.commit()
        self.episodes.judge(outcome, state.session, seq)

    def set_aside(self, id: str, reason: str) -> None:
        """Keep an episode out of all views from now on, durably, until an operator says otherwise."""
        self.episodes.set_aside(id, reason, SESSION, self.index.next_said(SESSION))
        self.commit()

    def actors_of(self, id: str) -> set[str]:
        """Return the actor of this episode; before it begins, what Sessions.actors_of says of its name."""
        if episode := self.episodes.find(id):
            return {episode.actor}
        return self.lives.actors_of(id)

    # -- the archive
    def add_archived(self, episodes: Iterable[int]) -> None:
        """Let these episodes, by number, leave the store from now on, durably."""
        self.index.add("archived", *((number,) for number in episodes), instead="OR IGNORE")
        self.commit()
        self.archive.release()

    def _wait_for_archive(self, source: Source, segment: Segment) -> None:
        """Raise Full if this segment needs the slots of an episode that was not exported. If that one is still open, it
        is cut first, so that it can be exported: its actor may be gone."""
        if (oldest := self.archive.oldest(source.name)) is None:
            return
        first, first_row, id = oldest
        if not self.rings[source.name].would_overwrite(first, first_row, segment):
            return
        for episode in [episode for episode in self.episodes.open.values() if episode.id == id]:
            self.episodes.cut(episode.session)
        raise Full(f"source {source.name} is full, and its episode {id} waits for its export")

    # -- the group
    @property
    def staged(self) -> bool:
        """Whether there is anything to commit."""
        return bool(self.lives.changed or self.lives.forgotten or self.episodes.changed)

    def commit(self) -> None:
        """Make all that was staged durable, then visible to readers.

        Raises OSError or sqlite3.Error if the disk or the memory is at fault, and GroupFailed if this program is. Close
        this object then, because a part of the group may count as written.
        """
        try:
            self._commit()
        except (OSError, sqlite3.Error):
            raise
        except MemoryError as error:
            raise OSError(f"a group could not be written: {error!r}") from error
        except Exception as error:
            raise GroupFailed(f"a group could not be written: {error!r}") from error

    def _commit(self) -> None:
        busy = [ring for ring in self.rings.values() if ring.segments]
        for ring in busy:
            self._make_room(ring)
        for ring in busy:
            ring.write()
        for ring in busy:
            ring.files.sync()
        self.index.put(*(ring.source for ring in busy))
        self.index.put(*self.lives.changed.values())
        self.index.drop_sessions(self.lives.forgotten)
        self.index.put(*self.episodes.number_revisions())
        self.index.add("phases", *((phase, self.phase_steps[phase]) for phase in self._phases), instead="OR REPLACE")
        self.index.add("outcomes", *((session, seq, *astuple(said)) for session, seq, said in self.episodes.said))
        self.index.add("lost", *self._staged_lost)
        self.index.commit()
        self._clear()
        self._publish()

    def _clear(self) -> None:
        self._staged_bytes, self._staged_lost = 0, []
        self._phases: set[str] = set()
        self.lives.committed()
        self.episodes.committed()

    def _make_room(self, ring: Ring) -> None:
        """Evict the oldest episodes, whole, until the group fits; the new tail is committed and published first."""
        if (least := ring.least_tails()) is None:
            return
        source, before = ring.source, ring.source.tail
        found = self.index.first_from(source.name, *least)
        source.tail, source.row_tail = found or (source.head, source.row_head)
        if (oldest := self.archive.oldest(source.name)) is not None and oldest[0] < source.tail:
            source.tail, source.row_tail, _ = oldest
        # What is staged is not in this transaction: a tail may move without the group that needs it.
        self.index.put(source)
        self.index.drop_archived(source.name, before, source.tail)
        self.index.commit()
        self._publish()

    def _publish(self) -> None:
        for ring in self.rings.values():
            ring.files.publish(ring.source.tail, ring.source.head)

    # -- numbers that never go back
    def direct(self, body: dict[str, Any], actors: Collection[str] = ()) -> int:
        """Make `body` the directive, durably, and return its number: the same one when nothing changed.

        An evaluation is for the actor that it is `by`; else for these `actors` and all that have brought steps before.
        A body of the mode DATASET only names the source of the steps that are stamped with its number.
        """
        if number := self.directives.same(body):
            return number
        number = self.index.add("directives", (json.dumps(body),))
        if body.get("mode") == EVALUATE:
            known = {*actors, *(state.actor for state in self.sessions.values() if state.steps)}
            self.directives.deal(number, {body["by"]} if body.get("by") else known)
        self.commit()
        self.directives[number] = body
        return number

    def deal(self, actors: Collection[str]) -> None:
        """Let these actors, durably, run the newest directive, if that is an evaluation which none of them runs, and
        which is not by one alone."""
        number = self.directives.newest
        is_anybodys = self.directives.mode(number) == EVALUATE and not self.directives[number].get("by")
        if is_anybodys and actors and not any(self.directives.is_for(number, actor) for actor in actors):
            self.directives.deal(number, actors)
            self.commit()

    def publish_weights(self, sha256: str, size: int, update: int) -> int:
        """Give the weights file `sha256` the next version number, durably."""
        version = self.index.add("weights", (sha256, size, update))
        self.commit()
        self.newest_weights = self.index.weights(1)[0]
        return version

    def command(self, name: str, argument: str, actor: str) -> int:
        """Log an operator's command, durably."""
        number = self.index.add("commands", (name, argument, actor))
        self.commit()
        return number

    def probe(self) -> None:
        """Write and sync something; raises OSError or sqlite3.Error while the disk still fails."""
        for ring in self.rings.values():
            ring.files.sync()
        self.index.probe()

    def manifest(self) -> dict[str, dict[str, int]]:
        """{source: {capacity, tail, head}} as committed."""
        return {s.name: {"capacity": s.capacity, "tail": s.tail, "head": s.head} for s in self.sources.values()}
