"""Takes records in: queues them by client, takes turns, commits them in groups, and acknowledges.

While a group is being synced the next one gathers in the sockets, so groups grow with the load. But whoever brings
little does not wait for those who bring much: a group that holds a record of such a client ends soon after it.
"""

import sqlite3
import time
from collections import Counter

import zmq
from serl_client import clock, wire
from serl_client import messages as m
from serl_client.connection import has_come
from serl_client.console import throttled
from serl_client.episode import LostRecord, Outcome, QueuedRecord, Segment
from serl_client.errors import MessageError, Refused, RetakeError

from serl_launcher.service.access import AccessControl
from serl_launcher.service.failures import Failures, Request
from serl_launcher.service.keeper import StoreKeeper
from serl_launcher.service.peers import Address, Batch, Peer
from serl_launcher.service.updates import StateUpdates
from serl_launcher.store.directives import DATASET
from serl_launcher.store.episodes import MOST_OUTCOMES
from serl_launcher.store.errors import Full, Gap
from serl_launcher.store.store import Store

log = throttled(__name__)

MAX_UNACKNOWLEDGED = 16 << 20  # bytes of one actor on the wire
KEYS_WINDOWS = 2  # of that, may wait for their turn of all actors of a key: 16, 8, 4, ... MiB
GROUP_S = 0.02  # of gathering a group, or as long as the last one took to commit, if that is more
LEAST_S = 0.002  # of it, before what has come meanwhile is looked at
FEW = 4  # records of a group, for which it does not gather on: more than an actor brings at a time
SLICE_S = 0.001  # for the records of one client, until it is the next one's turn


class Intake:
    """Brings the records of all `peers` into the store that `keeper` holds."""

    def __init__(
        self, keeper: StoreKeeper, access: AccessControl, peers: dict[Address, Peer], failures: Failures,
        updates: StateUpdates,
    ) -> None:  # fmt: skip
        self._keeper, self._access, self._peers = keeper, access, peers
        self._failures, self._updates = failures, updates
        self._committing = 0.0  # seconds that the last group took to commit
        self._group: dict[str, tuple[float, int]] = {}  # of each account in it: (since when, records)

    # -- queues
    def push(self, peer: Peer, push: m.Push, identity: zmq.Frame) -> m.Message | None:
        """Queue records, and stage the first of them. What is left waits for its client's next turn."""
        if push.session not in peer.incoming:
            raise Refused(f"session {push.session} was not named in the Hello of this connection")
        store = self._keeper.store
        if store is None or self._keeper.degraded or peer.incoming[push.session].full:
            return None
        if push.session not in store.sessions:
            return m.Failed("Disconnected", "say Hello again")
        if push.nbytes > wire.MAX_ARRAY:
            raise Refused(f"a Push holds at most {wire.MAX_ARRAY >> 20} MiB of records")
        if not self._has_room(peer.account, push.nbytes):
            self._access.refuse("too fast", f"{peer.hello.actor} or others of its key send more than has room")
            peer.incoming[push.session].is_crowded = True
            return None
        is_first = not peer.inbox
        peer.inbox.append(Batch(push, identity, m.records(*push.parts)))
        peer.queued += push.nbytes
        if is_first and not self._access.is_exhausted(peer.account):
            self._stage(peer, clock.monotonic() + SLICE_S)
        return None

    def _has_room(self, account: str, size: int) -> bool:
        """Whether so many bytes may wait beside what waits of all connections of a key (without keys: of an actor)."""
        waits = self.queued()[account]
        return not waits or waits + size <= KEYS_WINDOWS * MAX_UNACKNOWLEDGED

    def queued(self) -> Counter[str]:
        """{account: bytes} of what waits for its turn."""
        waits = Counter[str]()
        for peer in self._peers.values():
            waits[peer.account] += peer.queued
        return waits

    @property
    def patience(self) -> float:
        """Seconds to gather a group."""
        return min(max(GROUP_S, self._committing), 10 * GROUP_S)

    @property
    def is_awaited(self) -> bool:
        """Whether the group is to end now, for somebody who has few records in it, since LEAST_S."""
        due = clock.monotonic() - LEAST_S
        return any(since < due and count <= FEW for since, count in self._group.values())

    @property
    def has_work(self) -> bool:
        """Whether records wait that may be staged now."""
        return any(peer.inbox and not self._access.is_exhausted(peer.account) for peer in self._peers.values())

    def work(self, *sockets: zmq.Socket) -> None:
        """Stage what clients have queued, one slice of time for each key by turns, until the group is large enough. Who
        has brought least within this second comes first.

        A group ends early when something has come to `sockets` meanwhile, or when it is awaited, so that a client with
        much to say holds up nobody.
        """
        now = begin = clock.monotonic()
        end = begin + self.patience
        while now < end and (waiting := [address for address, peer in self._peers.items() if peer.inbox]):
            if now > begin + LEAST_S and any(has_come(socket) for socket in sockets):
                return
            waiting = [each for each in waiting if not self._access.is_exhausted(self._peers[each].account)]
            if not waiting:
                return
            firsts: dict[str, Address] = {}  # of each key
            for address in waiting:
                firsts.setdefault(self._peers[address].account, address)
            for account in sorted(firsts, key=self._access.brought):
                address = firsts[account]
                if (peer := self._peers.pop(address, None)) is None:
                    continue
                self._peers[address] = peer  # the others come before its next turn
                spent = time.thread_time()
                self._turn(peer, now + SLICE_S)
                self._access.spend(account, time.thread_time() - spent)
                if (now := clock.monotonic()) > end or self.is_awaited:
                    return

    def _turn(self, peer: Peer, end: float) -> None:
        batch = peer.inbox[0]
        try:
            self._stage(peer, end)
        except Exception as error:
            peer.send(self._failures.answer(Request(batch.identity, peer.owner, batch.push), error))
        if peer.leaves and not peer.inbox:
            self._peers.pop(peer.address, None)

    # -- the group
    def _stage(self, peer: Peer, end: float) -> None:
        """Stage queued records of a client until the time `end`, at least one. Nothing is answered here: a gap, too, is
        named only when what came before it is durable."""
        while peer.inbox:
            batch = peer.inbox[0]
            session = batch.push.session
            try:
                for seq, record in batch.records:
                    if not self._stage_record(peer, session, seq, record):
                        break  # the rest of this batch comes again
                    if self._access.charge(peer.account) or clock.monotonic() > end:
                        return
            except MessageError:
                incoming = peer.incoming[session]  # its actor looks at what it sent, and sends it again
                incoming.has_gap = incoming.due = True
                peer.drop_batch()
                raise
            except BaseException:
                peer.drop_batch()
                raise
            peer.drop_batch()

    def _stage_record(self, peer: Peer, session: str, seq: int, record: QueuedRecord) -> bool:
        """Stage one record. False: it cannot be taken now, nor what follows it."""
        store, incoming = self._keeper.store, peer.incoming[session]
        is_forgotten = store is not None and session not in store.sessions  # thousands have said Hello since
        if store is None or self._keeper.degraded or incoming.full or is_forgotten:
            return False
        if seq >= store.expected(session):  # what has come before was looked at then
            self._check_owner(store, peer, session, record)
        try:
            store.stage(session, seq, record)
            if self._keeper.is_suspicious:
                self._commit_alone(store, peer, seq)
        except Gap:
            incoming.has_gap = incoming.due = True
            return False
        except Full as full:
            log.warning("%s: %s waits, and keeps what it records", full, peer.hello.actor)
            incoming.full = str(full)
            return False
        except (RetakeError, OSError, sqlite3.Error):
            raise
        except Exception as error:
            self._keeper.degrade(error)  # what is staged may be half of something: begin again from what is committed
            raise
        incoming.has_gap = incoming.is_told = False
        incoming.due = True
        since, count = self._group.get(peer.account, (clock.monotonic(), 0))
        self._group[peer.account] = since, count + 1
        return True

    def _check_owner(self, store: Store, peer: Peer, session: str, record: QueuedRecord) -> None:
        """Raise Refused for another actor's episode, which only an operator's key may label, or begin; for one outcome
        too many of an episode; and for the importer's directive, under which nobody out there may write."""
        if peer.owner is None or isinstance(record, LostRecord):
            return
        if isinstance(record, Segment) and store.directives.mode(record.stamp.directive) == DATASET:
            raise Refused(f"directive {record.stamp.directive}, of {record.episode}, is the importer's own")
        if peer.owner.role != "actor":
            return
        if isinstance(record, Segment) and record.start:
            return  # it goes on with one of its own session, or is refused
        actors = store.actors_of(record.episode)
        if actors and actors.isdisjoint((peer.hello.actor, store.sessions[session].actor)):
            what = "labelling" if isinstance(record, Outcome) else "recording"
            raise Refused(
                f"{record.episode} is an episode of {min(actors)}: {what} it needs a key with the role operator"
            )
        if isinstance(record, Outcome) and store.episodes.is_much_judged(record.episode):
            raise Refused(f"{record.episode} has {MOST_OUTCOMES:,} outcomes: one more needs an operator's key")

    def _commit_alone(self, store: Store, peer: Peer, seq: int) -> None:
        """After a group that failed, and not by the disk: find whose record it was. Raises Refused for that one."""
        try:
            store.commit()
        except (OSError, sqlite3.Error):
            raise
        except Exception as error:
            log.exception("record %d of %s cannot be written", seq, peer.hello.actor)
            self._keeper.degrade(error)
            raise Refused(f"record {seq} cannot be written: {error}") from None

    def commit(self) -> None:
        """Make the group durable, then acknowledge it; or try to open a store again whose disk failed."""
        store, begin = self._keeper.store, clock.monotonic()
        self._group.clear()
        if store is None:
            return
        due = [peer for peer in self._peers.values() if any(each.due for each in peer.incoming.values())]
        crowded = any(each.is_crowded for peer in self._peers.values() for each in peer.incoming.values())
        if not (store.staged or store.archive.released or due or crowded or self._keeper.degraded):
            return
        try:
            if self._keeper.degraded:
                self._reopen()
            else:
                store.commit()
                for peer in due:
                    self._acknowledge(store, peer)
                self._release(store)
                self._invite(store)
                self._committing = clock.monotonic() - begin
        except (OSError, sqlite3.Error) as error:
            self._keeper.degrade(error)
        except Exception as error:
            log.exception("the group could not be committed")
            self._keeper.degrade(error)

    def _acknowledge(self, store: Store, peer: Peer) -> None:
        peer.was_cut = ""
        for session, incoming in peer.incoming.items():
            if incoming.due:
                resend = incoming.has_gap and not incoming.is_told
                incoming.is_told, incoming.due = incoming.has_gap, False
                peer.send(m.Ack(session, store.expected(session), resend, self._updates.step_limit(peer)))
        self.close_drained(store, peer)

    def _release(self, store: Store) -> None:
        """Ask those for their records whose source was full, when something has left it."""
        if not store.archive.released:
            return
        store.archive.released = False
        for peer in self._peers.values():
            for session, incoming in peer.incoming.items():
                if incoming.full:
                    peer.send(m.Ack(session, store.expected(session), True, self._updates.step_limit(peer)))
                    incoming.full = ""

    def _invite(self, store: Store) -> None:
        """Ask those again whose records found no room, once there is some for a window."""
        for peer in self._peers.values():
            for session, incoming in peer.incoming.items():
                if incoming.is_crowded and self._has_room(peer.account, MAX_UNACKNOWLEDGED):
                    incoming.is_crowded = False
                    peer.send(m.Ack(session, store.expected(session), True, self._updates.step_limit(peer)))

    def close_drained(self, store: Store, peer: Peer) -> None:
        """Close the earlier sessions of an actor of which everything has come."""
        drained = {
            session: incoming for session, incoming in peer.incoming.items()
            if incoming.last is not None and store.expected(session) > incoming.last
        }  # fmt: skip
        for session, incoming in drained.items():
            incoming.last = None
            store.close_session(session)
        if drained:
            store.commit()

    def _reopen(self) -> None:
        """Open the store again, if it can be. What was queued is forgotten: its actors are asked to send it again."""
        if (store := self._keeper.reopen()) is None:
            return
        for peer in self._peers.values():
            peer.inbox.clear()
            peer.queued = 0
            for incoming in peer.incoming.values():
                incoming.due = incoming.has_gap = incoming.is_told = False
                incoming.full = ""
            for session in peer.living:
                if session in store.sessions:
                    peer.send(m.Ack(session, store.expected(session), True, self._updates.step_limit(peer)))
