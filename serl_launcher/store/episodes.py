"""Tracks the episodes of a store: which are open, how they end (also from elsewhere), their parts and outcomes.

An episode that was closed from elsewhere (by an operator, by silence, for an export) is never opened again: what its
actor still brings of it is a part, an episode of its own named `<id>.part<number>`. An outcome of `<id>` holds for all
its parts.
"""

from collections.abc import Iterable

import numpy as np
from serl_client.console import throttled
from serl_client.episode import Outcome, Segment
from serl_client.errors import Refused

from serl_launcher.store.aside import REMEDY, is_aside, outcome_of
from serl_launcher.store.index import Index
from serl_launcher.store.ring import Ring
from serl_launcher.store.schema import Episode, Session, Source

log = throttled(__name__)

ASIDE = "set_aside"  # in the index's table meta
MOST_OUTCOMES = 1000  # of an episode, of keys that are no operator's: all are kept, and read when a part of it begins
MOST_PARTS = 1000  # of an episode, unless it is that long: whatever is said of it is written to each


class Episodes:
    """`open` is {session: its open episode}; `changed` is {id: episode} that the next commit writes, `said` the
    (session, seq, outcome) that go with it; `aside` is how many episodes are set aside."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self.open = index.open_episodes()
        self.aside: int = index.meta(ASIDE) or 0  # counted, because a start does not read past episodes
        self._number, self._revision = index.last_numbers()
        self.committed()

    def committed(self) -> None:
        self.changed: dict[str, Episode] = {}
        self._begun: dict[str, list[Episode]] = {}  # in this group, by their ids and those of what they are parts of
        self._newest: dict[str, Episode] = {}  # in this group, by their sessions
        self.said: list[tuple[str, int, Outcome]] = []
        self._said: dict[str, list[Outcome]] = {}  # the same, by episode

    def number_revisions(self) -> Iterable[Episode]:
        """Give each changed episode the next revision, by which readers find it, and return them all. Write down how
        many are set aside."""
        if self.aside != (self._index.meta(ASIDE) or 0):
            self._index.set_meta(ASIDE, self.aside)
        for episode in self.changed.values():
            self._revision += 1
            episode.revision = self._revision
        return self.changed.values()

    def cut(self, session: str) -> None:
        """Truncate the open episode of this session, if there is one, without a final observation."""
        if episode := self.open.pop(session, None):
            episode.truncated = episode.closed = True
            self.changed[episode.id] = episode

    def cut_long(self, session: str, source: Source, segment: Segment) -> None:
        """Truncate the open episode before it takes more than a quarter of its source, or when its first steps have
        left that. What comes goes on as a part, so that a source is never one open episode alone."""
        episode, most = self.open.get(session), source.capacity // 4
        if episode is None or (episode.steps + len(segment) <= most and episode.first >= source.tail):
            return
        log.warning("%s goes on as another episode from step %d on: one takes at most %d steps, a quarter of source %s",
                    episode.part_of, segment.start, most, source.name)  # fmt: skip
        self.cut(session)

    def begin(self, state: Session, ring: Ring, segment: Segment) -> Episode:
        """Open the episode that begins with this segment, at the next step and row of its source."""
        self._number += 1
        earlier = self.continued(state) if segment.start else None
        episode = Episode(
            self._number, self._free_id(segment, earlier), ring.source.name, state.session, state.actor, segment.task,
            segment.stamp.directive, segment.stamp.phase, first=ring.next_step, first_row=ring.next_row,
            part_of=segment.episode, part_start=segment.start, weights=segment.stamp.weights_version,
        )  # fmt: skip
        for id in dict.fromkeys((episode.part_of, episode.id)):
            self._begun.setdefault(id, []).append(episode)
        if earlier is not None and (whole := self.find(segment.episode)):  # what was said of the whole holds for this
            earlier.continued, self.changed[earlier.id] = True, earlier
            self._judge(episode, Outcome(episode.id, whole.success, whole.discard, whole.judged_by))
        for outcome in [*self._index.outcomes(episode.id), *self._said.get(episode.id, ())]:
            self._judge(episode, outcome)
        self.open[state.session] = self._newest[state.session] = episode
        return episode

    def grow(self, episode: Episode, segment: Segment) -> None:
        """Add the steps of a segment to its open episode, and close it if the segment ends it."""
        episode.steps += len(segment)
        episode.reward += float(segment.reward.sum(dtype=np.float64))
        episode.last_reward = float(segment.reward[-1])
        episode.intervened += int(segment.intervened.sum())
        episode.weights = min(episode.weights, segment.stamp.weights_version)
        episode.terminated, episode.truncated = segment.terminated, segment.truncated
        episode.final = episode.closed = segment.ends
        self.changed[episode.id] = episode
        if segment.ends:
            del self.open[episode.session]

    def judge(self, outcome: Outcome, session: str, seq: int) -> None:
        """Apply an outcome that this session brought to the episode and its parts; it may come before the episode.

        What an episode's own session says of it does not take back that it is set aside: nobody there has seen why.
        """
        self._keep(outcome, session, seq)
        for episode in self.parts(outcome.episode):
            if is_aside(episode) and episode.session == session:
                continue
            self._judge(episode, outcome)
            self.changed[episode.id] = episode
            is_open = episode is self.open.get(episode.session)
            if outcome.judged_by == "operator" and is_open and episode.session != session:
                self.cut(episode.session)  # its actor is gone, or somebody else would not label it

    def is_much_judged(self, id: str) -> bool:
        """Return whether MOST_OUTCOMES of this episode are kept already."""
        staged = len(self._said.get(id, ()))
        return staged + self._index.outcome_count(id, MOST_OUTCOMES) >= MOST_OUTCOMES

    def set_aside(self, id: str, reason: str, session: str, seq: int) -> None:
        """Discard an episode and its parts in the learner's own name. Nothing changes if they are set aside already.

        session, seq: name the record that showed why.
        """
        if parts := [part for part in self.parts(id) if not is_aside(part)]:
            log.warning("episode %r: set aside, because %s. It is %s", id, reason, REMEDY)
            outcome = outcome_of(id, reason)
            self._keep(outcome, session, seq)
            for part in parts:
                self._judge(part, outcome)
                self.changed[part.id] = part

    def _keep(self, outcome: Outcome, session: str, seq: int) -> None:
        self.said.append((session, seq, outcome))
        self._said.setdefault(outcome.episode, []).append(outcome)

    def find(self, id: str) -> Episode | None:
        """Return the episode of exactly this id, as it is now."""
        found = self.changed.get(id) or self._index.episode(id)
        return found and self._now(found)

    def parts(self, id: str) -> list[Episode]:
        """Return the episode of this id and the parts that came after it, in order, as they are now."""
        found = {each.number: self._now(each) for each in self._index.parts(id)}
        return [*found.values(), *(each for each in self._begun.get(id, ()) if each.number not in found)]

    def _now(self, episode: Episode) -> Episode:
        """Return an episode of the index as it is now."""
        still_open = self.open.get(episode.session)
        if still_open is not None and still_open.number == episode.number:
            return still_open
        return self.changed.get(episode.id, episode)

    def continued(self, state: Session) -> Episode | None:
        """Return the episode that this session's next segment goes on with: its open one, or its newest one if that
        was closed from elsewhere; None if there is neither."""
        if episode := self.open.get(state.session):
            return episode
        newest = self._newest.get(state.session) or self._index.newest(state.session)
        newest = newest and self._now(newest)
        return None if state.closed or newest is None or newest.final else newest

    def continued_by(self, segment: Segment, state: Session) -> Episode:
        """Return the episode that this later segment goes on with. Raises Refused if it does not follow, or names
        another directive or task than the episode's."""
        episode, at = self.continued(state), f"{segment.episode}[{segment.start}]"
        if episode is None or (episode.part_of, next_step(episode)) != (segment.episode, segment.start):
            there = f"{episode.part_of}[{next_step(episode)}]" if episode else "the start of an episode"
            raise Refused(f"step {at} came where {there} was to come")
        if episode.closed and _part_number(episode) >= MOST_PARTS:
            raise Refused(f"{segment.episode} was closed from elsewhere {MOST_PARTS:,} times: begin another episode")
        if (number := segment.stamp.directive) != episode.directive:
            raise Refused(f"step {at} names directive {number}, and its episode began under {episode.directive}")
        if segment.task != episode.task:
            raise Refused(f"step {at} names the task {segment.task!r}, and its episode {episode.task!r}")
        return episode

    def _judge(self, episode: Episode, outcome: Outcome) -> None:
        """Apply one outcome: the latest word of an operator or of the learner itself wins; without one, the judge's."""
        was_aside = is_aside(episode)
        is_final = outcome.judged_by == "operator" or is_aside(outcome)
        if is_final or not (episode.judged_by == "operator" or was_aside):
            episode.success, episode.discard, episode.judged_by = outcome.success, outcome.discard, outcome.judged_by
        self.aside += is_aside(episode) - was_aside

    def _free_id(self, segment: Segment, earlier: Episode | None) -> str:
        if earlier is None:
            return segment.episode
        number = _part_number(earlier)
        while self.find(id := f"{segment.episode}.part{(number := number + 1)}"):
            pass
        return id


def _part_number(episode: Episode) -> int:
    """Return which part an episode is of what its actor records; the first is 1."""
    return int(episode.id.rpartition(".part")[2]) if episode.part_start else 1


def next_step(episode: Episode) -> int:
    """Return the step of its actor's episode that comes next."""
    return episode.part_start + episode.steps
