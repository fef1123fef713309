"""Queues an actor's records until they are acknowledged; a slow learner holds the actor back (backpressure).

The control thread calls `put`, `has_room`, `pending` and `fault`; the network thread calls the rest. They share no
lock, because each counter is written by one of the two threads.
"""

import logging
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np

import serl_client.clock as clock
import serl_client.messages as messages
import serl_client.wire as wire
from serl_client.episode import COLUMNS, LostRecord, NotFinite, Outcome, QueuedRecord, Record
from serl_client.errors import Refused, TrainerError
from serl_client.messages import MAX_EARLIER, Ack, Push
from serl_client.names import MAX_NAME, check_names
from serl_client.outbox import Outbox
from serl_client.spec import Spec

log = logging.getLogger(__name__)

QUEUE_SECONDS = 2.0  # of steps that fit into the queue
QUEUE_ROWS = 8  # steps that fit at least
SPOOL_BYTES = 1 << 20  # written to the outbox before the thread sends again
STALL = 15.0  # seconds without an Ack; then every unacknowledged record is sent again
OUTCOME_BYTES = 1024
COLUMN_BYTES = sum(np.dtype(dtype).itemsize for dtype in COLUMNS.values())


class SendQueue:
    """Numbers the records of one `session` from 0 and sends them, after those of earlier sessions in the outbox."""

    def __init__(self, outbox: Outbox, session: str, spec: Spec) -> None:
        self._outbox, self._session = outbox, session
        self.use_spec(spec)
        self._queue: deque[tuple[Record, int]] = deque()
        self._put = self._put_bytes = 0  # written by the control thread only,
        self._written = self._spooled_bytes = 0  # and these by the network thread only
        self._encoded: Sequence[wire.Buffer] | None = None  # the first of the queue
        self._is_lost = False  # it is a LostRecord, in place of what the actor pushed
        self._sending, self._next = "", 0  # the session that is on its way, and its next record
        self._flying: deque[tuple[int, int]] = deque()  # (end, bytes) of each Push without an Ack
        self._heard = 0.0  # when the last Ack came
        self._window = 0
        self._steps: deque[tuple[int, int, bool]] = deque()  # (seq, steps, is lost) of records without an Ack
        self.lost_steps = 0  # of this session that the learner never gets
        self._named: Collection[str] = ()  # the sessions that this connection may bring
        self.needs_hello = False  # another connection has to name what is next
        self._cut = ""  # the episode that goes on no more, since a segment of it could not be taken
        self.error: TrainerError | None = None  # what was pushed does not fit the Spec

    def use_spec(self, spec: Spec) -> None:
        """Expect rows of this Spec from now on."""
        features = (*spec.observation.values(), *spec.extras.values(), spec.action)
        row = sum(feature.nbytes for feature in features) + COLUMN_BYTES
        self._spec, self._capacity = spec, int(row * max(QUEUE_ROWS, QUEUE_SECONDS * spec.fps)) + OUTCOME_BYTES

    def put(self, record: Record) -> None:
        """Queue a record for the network thread.

        Raises TrainerError when the queue is full; room is reserved for a record that ends an episode. Raises
        TypeError for an outcome that the wire cannot carry.
        """
        size = OUTCOME_BYTES
        if isinstance(record, Outcome):
            if type(record.discard) is not bool or type(record.success) not in (bool, type(None)):
                raise TypeError(f"an outcome's success and discard are Python's bool (numpy's is not): {record}")
            check_names("an outcome", record.episode, record.judged_by, error=TypeError)
        else:
            arrays = (*record.observation.values(), *record.extras.values(), record.action)
            size = sum(array.nbytes for array in arrays) + COLUMN_BYTES * len(record)
        ends = isinstance(record, Outcome) or record.ends
        if self._put_bytes - self._spooled_bytes + size > self._capacity * (2 if ends else 1):
            raise TrainerError(f"the queue to the outbox is full: {self.fault or 'the disk is too slow'}")
        self._queue.append((record, size))
        self._put += 1
        self._put_bytes += size

    @property
    def has_room(self) -> bool:
        """Return whether less than half of the queue waits for the outbox."""
        return (self._put_bytes - self._spooled_bytes) * 2 <= self._capacity

    @property
    def fault(self) -> str:
        """Return why the outbox takes no record; empty while it does."""
        return self._outbox.fault

    @property
    def pending(self) -> tuple[int, int]:
        """Return the number of records that are not acknowledged, and their bytes."""
        # Read the counters before the outbox.
        records, size = self._put - self._written, self._put_bytes - self._spooled_bytes
        stored, stored_bytes = self._outbox.pending
        return records + stored, size + stored_bytes

    def move_to_outbox(self) -> bool:
        """Move queued records to the outbox, about SPOOL_BYTES of them. Return True if more can follow: send first."""
        begin = self._spooled_bytes
        while self._queue and self._spooled_bytes < begin + SPOOL_BYTES:
            record, size = self._queue[0]
            if self._encoded is None:
                checked = self._checked(record)
                self._encoded = messages.encode_record(self._written, checked)
                self._is_lost = isinstance(checked, LostRecord)
            before = self.fault
            if not self._outbox.append(self._session, self._written, self._encoded):
                if self.fault != before:
                    log.warning("%s", self.fault)
                return False
            self._encoded = None
            self._queue.popleft()
            self._steps.append((self._written, 0 if isinstance(record, Outcome) else len(record), self._is_lost))
            self._spooled_bytes += size
            self._written += 1
        return bool(self._queue)

    def _checked(self, record: Record) -> QueuedRecord:
        """Return the record; or a LostRecord, if it does not fit the Spec or follows such a one in its episode.

        The network thread checks, because the control thread has no time for it. A sensor may give a value that is
        not finite, so the actor goes on. A wrong shape is a bug of the program, which gets it as `error`.
        """
        if isinstance(record, Outcome):
            return record
        if record.start and record.episode == self._cut:
            return LostRecord("its episode lacks an earlier record")
        try:
            record.check(self._spec)
        except ValueError as error:
            text = f"{record.episode} ends before row {record.start}: {error}"
            log.warning("%s", text)
            self._cut = record.episode
            if not isinstance(error, NotFinite):
                self.error = self.error or TrainerError(f"a segment does not fit the Spec, so {text}")
            return LostRecord(str(error)[:MAX_NAME])
        return record

    @property
    def earlier(self) -> list[list[Any]]:
        """Return [session, last seq] of the oldest MAX_EARLIER earlier sessions in the outbox."""
        held = [[session, end - 1] for session, (_, end) in self._outbox.sessions.items() if session != self._session]
        return held[:MAX_EARLIER]

    def resume(self, expected: Sequence[Sequence[Any]], window: int) -> None:
        """Begin a connection whose server expects [session, seq] next. Raises Refused if that record is gone."""
        self._window, self._sending = window, ""
        wanted = {session: seq for session, seq in expected}
        self._named, self.needs_hello = wanted.keys(), False
        for session, first in self._outbox.expected.items():
            seq = wanted.get(session, first)
            if seq < first:
                raise Refused(
                    f"the learner expects record {seq} of session {session[:8]} and has acknowledged {first} before: "
                    f"its store lost data. Start it with a newer copy of the run's folder, or this actor with another "
                    f"run_dir=...; nothing was deleted from {self._outbox.folder}"
                )
            self._drop(session, seq)

    def pushes(self) -> Iterator[Push]:
        """Yield the Push messages that fit the send window. Raises OSError if the outbox cannot be read.

        A message counts as sent once the caller asks for the next. A session is sent once the one before it is
        acknowledged.
        """
        for session, (first, end) in self._outbox.sessions.items():
            if first == end:
                continue
            if session not in self._named:
                self.needs_hello = True  # there were more sessions than one Hello names
                return
            if session != self._sending or (self._flying and clock.monotonic() > self._heard + STALL):
                self._rewind(session, first)
            while self._next < end:
                flying = sum(size for _, size in self._flying)
                stop, data = self._outbox.read(session, self._next, self._window - flying, alone=not flying)
                if not data:
                    return
                yield Push(session, {str(part): np.frombuffer(data[part], np.uint8) for part in range(len(data))})
                if not flying:
                    self._heard = clock.monotonic()
                self._flying.append((stop, sum(map(len, data))))
                self._next = stop
            return

    def acknowledge(self, ack: Ack) -> None:
        """Take in that records are durable at the server, or that the server wants them again."""
        self._drop(ack.session, ack.expected)
        if ack.session != self._sending:
            return
        if ack.resend:
            self._outbox.recheck(ack.session, self._next)
            self._rewind(ack.session, ack.expected)
            return
        while self._flying and self._flying[0][0] <= ack.expected:
            self._flying.popleft()
        self._next = max(self._next, ack.expected)
        self._heard = clock.monotonic()

    def _drop(self, session: str, expected: int) -> None:
        """Drop the records that are durable at the server. Count the steps of those for which a LostRecord was sent."""
        lost = self._outbox.lost(session)
        while session == self._session and self._steps and self._steps[0][0] < expected:
            seq, steps, is_lost = self._steps.popleft()
            self.lost_steps += steps if is_lost or seq in lost else 0
        self._outbox.acknowledge(session, expected)

    def _rewind(self, session: str, seq: int) -> None:
        self._sending, self._next = session, seq
        self._flying.clear()
        self._heard = clock.monotonic()
