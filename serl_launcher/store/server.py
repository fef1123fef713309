"""The server process: it owns the sockets and the store, and is the store's only writer. No torch.

One thread, one loop: take what has come, stage it, commit the group, acknowledge. While a group is being synced the
next one gathers in the sockets, so groups grow with the load. Training runs elsewhere and never delays this loop.
"""

import logging
import math
import os
import signal
import sqlite3
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import zmq
from serl_client import messages as m
from serl_client import wire
from serl_client.connection import has_come, received
from serl_client.episode import MAX_NAME, LostRecord, Outcome, QueuedRecord, Segment
from serl_client.errors import ConfigError, MessageError, Refused, RetakeError, ServerFailed, VersionMismatch
from serl_client.spec import Spec

from serl_launcher.store.access import CONNECTIONS, AccessControl
from serl_launcher.store.index import Index
from serl_launcher.store.peers import (
    ROLES,
    Batch,
    Forbidden,
    KeyOwner,
    Peer,
    bound,
    check_hello,
    check_role,
    cost,
    send,
)
from serl_launcher.store.store import Full, Gap, GroupFailed, Store, is_there
from serl_launcher.store.weights import WeightFiles

log = logging.getLogger(__name__)

WINDOW = 16 << 20  # bytes of one actor that may be unacknowledged on the wire
GROUP_S = 0.02  # of gathering a group, or as long as the last one took to commit, if that is more
LEAST_S = 0.002  # of it, before what has come meanwhile is looked at
SLICE_S = 0.001  # for the records of one client, until it is the next one's turn
STATUS_COST = 900_000  # of all clients' reports together (peer.cost): a status has to fit into one header
NOTICE_S = 1.0
SILENCE_S = 60.0  # after which the open episode of an actor with a simulated clock is truncated
ALONE_S = 60.0
MAKE_S = 2.0  # that the loop waits for a store to be made: most are made by then
TELL_S = 1.0
MISSING_S = 15.0  # longer than one large record takes over a slow link
MISSING = 64  # actors that are named as missing: the last ones
CATALOG_ROWS = (1000, 200)  # of a page: with five names of MAX_NAME characters of 4 bytes each, 200 fit into a header
SECOND = "another client named {} has connected; give each actor its own name"

Address = tuple[zmq.Socket, bytes]  # a connection


class Server:
    """Serves one run folder. `capacities` are the steps of each physical source; `public` and `local` are the
    addresses for actors and for the learner's own processes (nobody else reaches the local one); episodes of the
    `archived` sources leave the store only after the export has named them. `keys` is the folder of those who are let
    in (gate.py); without one `public` has to be a loopback address. `on_silence` {source: seconds}: after how much
    silence of its actor an open episode is truncated; for other sources the actor's clock says it."""

    def __init__(
        self, run_dir: Path, capacities: Mapping[str, int], *, public: str, local: str, inference: str,
        archived: Collection[str] = (), keys: Path | None = None, on_silence: Mapping[str, float] | None = None,
    ) -> None:  # fmt: skip
        self.run_dir, self.capacities, self.inference, self.archived = run_dir, capacities, inference, archived
        self.weights, self.on_silence = WeightFiles(run_dir / "weights"), on_silence or {}
        is_new = not is_there(run_dir / "store")
        self.store = None if is_new else Store.resume(run_dir / "store", capacities, archived)
        self._making: Future[Store] | None = None
        self._heard: dict[str, float] = {}  # session of an open episode -> when its actor last spoke
        self._tells_until = 0.0  # why no store can be made: those who were told to wait come again, and hear it
        self._alone_until = 0.0  # until then each record is a group of its own
        self.degraded = self._over_because = ""
        self.fatal: ConfigError | None = None
        self.allowance: tuple[int, int | None] = (0, 0)  # (directive, steps)
        self._peers: dict[Address, Peer] = {}
        self._missing: dict[str, float] = {}  # actor -> when it was last seen
        self._stopping = self._directed = False
        self._welcomes: list[Peer] = []  # to be sent when their sessions are durable
        self._committing = 0.0  # seconds that the last group took to commit
        self._started, self._next_notice, self._next_reopen = time.monotonic(), 0.0, 0.0
        self.access = AccessControl(public, keys)
        self.public, self.local = self.access.socket, bound(self.access.context, local)
        self._handlers: dict[type, Callable[[Peer, Any], m.Message | None]] = {
            m.Heartbeat: self._heartbeat, m.WeightsRequest: self._weights, m.Status: self._status,
            m.Direct: self._direct, m.StepLimit: self._allow, m.Publish: self._publish, m.Sync: self._sync,
            m.Archived: self._archived, m.Command: self._command, m.Bye: self._bye, m.Over: self._over,
        }  # fmt: skip

    # -- the loop
    def run(self) -> None:
        """Serve until `stop`. Raises ConfigError when no store can be made for the first actor's Spec."""
        poller = zmq.Poller()
        for socket in (self.local, *self.access.polled):
            poller.register(socket, zmq.POLLIN)
        while not self._stopping and (self.fatal is None or time.monotonic() < self._tells_until):
            ready = dict(poller.poll(timeout=0 if self._has_work() else 100))
            self.access.turn()
            for socket in (self.local, self.public):
                if socket in ready:
                    self._drain(socket)
            self._take_made()
            self._welcome()
            self._work()
            self._commit()
            self._notices()
        if self.fatal is not None:
            raise self.fatal

    def stop(self) -> None:
        self._stopping = True

    def close(self) -> None:
        self.access.context.destroy(linger=2000)  # why the run ends must reach its actors
        if not self.degraded:
            self._store_closed(is_over=self._directed and self._shared()[0].get("mode") == "stop")

    def _drain(self, socket: zmq.Socket, most: int = 256) -> None:
        """Handle what has come on a socket, at most `most` messages and about GROUP_S long: a group must end."""
        end = time.monotonic() + self._patience()
        for _ in range(most):
            if time.monotonic() > end or not (came := received(socket)):
                return
            identity, *frames = came
            answer = self._answer(socket, identity, [frame.buffer for frame in frames])
            if answer is not None:
                send(socket, identity.bytes, answer)

    def _answer(self, socket: zmq.Socket, identity: zmq.Frame, frames: Sequence[wire.Buffer]) -> m.Message | None:
        """Handle one message, and return the answer, which names the number of its request."""
        address, owner = (socket, identity.bytes), None
        try:
            if socket is self.public and (owner := self.access.admit(identity)) is None:
                return None
            message = m.decode(frames)
        except VersionMismatch as error:
            self.access.refuse("other version", str(error))
            return m.Failed("VersionMismatch", str(error), final=True)
        except (MessageError, KeyError, TypeError, ValueError) as error:
            self.access.blame(identity, owner, error)
            return m.Failed("Refused", str(error))
        except RetakeError as error:
            return self._refusal(address, None, error)
        except Exception:
            log.exception("a message could not be read")
            return m.Failed("ServerFailed", "the learner failed on this message; its log says why")
        answer = self._answered(address, identity, message, owner)
        if isinstance(message, m.NUMBERED) and isinstance(answer, m.Done | m.Failed):
            return replace(answer, request=message.request)
        return answer

    def _answered(
        self, address: Address, identity: zmq.Frame, message: m.Message, owner: KeyOwner | None
    ) -> m.Message | None:  # fmt: skip
        """Do what a message asks for, and return the answer."""

        def answer() -> m.Message | None:
            if owner is not None and not self.access.allows(identity, owner, message):
                return m.Failed("ServerFailed", f"too many {type(message).__name__}s within a second: say it again")
            if isinstance(message, m.Hello):
                return self._hello(address, message, owner)
            return self._dispatch(address, identity, message, owner)

        return self._guarded(address, identity, message, owner, answer)

    def _guarded(
        self, address: Address, identity: zmq.Frame, message: m.Message, owner: KeyOwner | None,
        work: Callable[[], m.Message | None],
    ) -> m.Message | None:  # fmt: skip
        """Do what a message asks for; what goes wrong with it is counted, and is the answer."""
        try:
            return work()
        except (OSError, sqlite3.Error, GroupFailed) as error:
            self._degrade(error)
            return m.Failed("ServerFailed", f"the learner's store fails: {error}")
        except (MessageError, KeyError, TypeError, ValueError) as error:
            at_keyboard = isinstance(message, m.Command)  # a person who may not steer is told so, however often
            self.access.blame(identity, None if at_keyboard else owner, error)
            return m.Failed("Refused", str(error), final=isinstance(message, m.Hello))
        except Refused as error:
            if not isinstance(message, m.Push):
                return self._refusal(address, message, error)
            self.access.blame(identity, owner, error)  # an honest client stops at the first one
            return m.Failed("Refused", str(error), final=True)
        except RetakeError as error:
            return self._refusal(address, message, error)
        except Exception:
            log.exception("a handler failed")
            return m.Failed("ServerFailed", "the learner failed on this message; its log says why")

    def _refusal(self, address: Address, message: m.Message | None, error: RetakeError) -> m.Failed:
        """What a address is told whose message is fine, and yet not taken; without one it is not let in any more."""
        if message is None:
            self._peers.pop(address, None)
        elif not (self.degraded or self.fatal or isinstance(error, ServerFailed)):  # no fault of this address's
            self.access.refuse("not taken", str(error))
        final = isinstance(message, (m.Hello, m.Push, type(None))) and not isinstance(error, ServerFailed)
        return m.Failed(type(error).__name__, str(error), final)

    def _dispatch(
        self, address: Address, identity: zmq.Frame, message: m.Message, owner: KeyOwner | None
    ) -> m.Message | None:  # fmt: skip
        peer = self._peers.get(address)
        if peer is None or peer.owner != owner:
            return m.Failed("Disconnected", "say Hello first")
        peer.seen = time.monotonic()
        if type(message) not in ROLES[peer.hello.role]:
            raise Forbidden(f"{type(message).__name__} is not for the role {peer.hello.role}")
        if owner is not None:
            check_role(message, owner)
        is_over = isinstance(message, m.Bye)  # of a life that never spoke: it stops nobody
        if peer.hello.role == "actor" and self.store and peer.hello.session not in self.store.sessions:
            del self._peers[address]  # thousands have said Hello since, and it has brought nothing
            return m.Failed("Disconnected", "say Hello again")
        if not (peer.speaks or is_over) and (refusal := self._take_over(peer)) is not None:
            return refusal
        if isinstance(message, m.Push):
            return self._push(peer, message, identity)
        return self._handlers[type(message)](peer, message)

    # -- records
    def _push(self, peer: Peer, push: m.Push, identity: zmq.Frame) -> m.Message | None:
        """Queue records, and stage the first of them. What is left waits for its client's next turn."""
        if push.session not in (peer.hello.session, *peer.named):
            raise Refused(f"session {push.session} was not named in the Hello of this connection")
        if self.store is None or self.degraded or push.session in peer.full:
            return None
        if push.session not in self.store.sessions:
            return m.Failed("Disconnected", "say Hello again")
        data = push.arrays["records"]
        if peer.inbox and peer.queued + data.nbytes > 2 * WINDOW:
            self.access.refuse("too fast", f"{peer.hello.actor} sends more than its window holds")
            return None  # it is asked for this again, as what comes next leaves a gap
        is_first = not peer.inbox
        peer.inbox.append(Batch(push, identity, m.records(data.data)))
        peer.queued += data.nbytes
        if is_first and not self.access.is_exhausted(peer.account):
            self._stage(peer, time.monotonic() + SLICE_S)
        return None

    def _patience(self) -> float:
        """Seconds to gather a group."""
        return min(max(GROUP_S, self._committing), 10 * GROUP_S)

    def _has_work(self) -> bool:
        return any(s.inbox and not self.access.is_exhausted(s.account) for s in self._peers.values())

    def _work(self) -> None:
        """Stage what clients have queued, one slice of time for each by turns, until the group is large enough.

        A group ends early when something has come meanwhile, so that a client with much to say holds up nobody.
        """
        now = begin = time.monotonic()
        end = begin + self._patience()
        while now < end and (waiting := [address for address, s in self._peers.items() if s.inbox]):
            if now > begin + LEAST_S and (has_come(self.public) or has_come(self.local)):
                return
            waiting = [address for address in waiting if not self.access.is_exhausted(self._peers[address].account)]
            if not waiting:
                return
            for address in waiting:
                if (peer := self._peers.pop(address, None)) is None:
                    continue
                self._peers[address] = peer  # the others come before its next turn
                batch = peer.inbox[0]
                stage = partial(self._stage, peer, now + SLICE_S)
                answer = self._guarded(address, batch.identity, batch.push, peer.owner, stage)
                if answer is not None:
                    peer.send(answer)
                if peer.leaves and not peer.inbox:
                    self._peers.pop(address, None)
                if (now := time.monotonic()) > end:
                    return

    def _stage(self, peer: Peer, end: float) -> None:
        """Stage queued records of a client until the time `end`, at least one. Nothing is answered here: a gap, too, is
        named only when what came before it is durable."""
        while peer.inbox:
            batch = peer.inbox[0]
            session = batch.push.session
            try:
                for seq, record in batch.records:
                    if not self._take(peer, session, seq, record):
                        break  # the rest of this batch comes again
                    if self.access.charge(peer.account) or time.monotonic() > end:
                        return
            except MessageError:
                peer.waiting.add(session)  # its actor looks at what it sent, and sends it again
                peer.touched.add(session)
                peer.drop_batch()
                raise
            except BaseException:
                peer.drop_batch()
                raise
            peer.drop_batch()

    def _take(self, peer: Peer, session: str, seq: int, record: QueuedRecord) -> bool:
        """Stage one record. False: it cannot be taken now, nor what follows it."""
        if self.store is None or self.degraded or session in peer.full:
            return False
        self._check_owner(peer, session, record)
        try:
            self.store.stage(session, seq, record)
            if time.monotonic() < self._alone_until:
                self._commit_alone(peer, seq)
        except Gap:
            peer.waiting.add(session)
            peer.touched.add(session)
            return False
        except Full as full:
            log.warning("%s: %s waits, and keeps what it records", full, peer.hello.actor)
            peer.full[session] = str(full)
            return False
        except (RetakeError, OSError, sqlite3.Error):
            raise
        except Exception as error:
            self._degrade(error)  # what is staged may be half of something: begin again from what is committed
            raise
        peer.waiting.discard(session)
        peer.told.discard(session)
        peer.touched.add(session)
        return True

    # -- the group

    def _commit(self) -> None:
        """Make the group durable, then acknowledge it."""
        if self.store is None:
            return
        begin = time.monotonic()
        touched = [peer for peer in self._peers.values() if peer.touched]
        if not (self.store.staged or self.store.released or touched or self.degraded):
            return
        try:
            if self.degraded:
                self._reopen()
            else:
                self.store.commit()
                for peer in touched:
                    self._acknowledge(peer)
                self._release(self.store)
                self._committing = time.monotonic() - begin
        except (OSError, sqlite3.Error) as error:
            self._degrade(error)
        except Exception as error:
            log.exception("the group could not be committed")
            self._degrade(error)

    def _acknowledge(self, peer: Peer) -> None:
        assert self.store is not None
        for session in peer.touched:
            expected = self.store.expected(session)
            resend = session in peer.waiting - peer.told
            peer.told |= peer.waiting & {session}
            ack = m.Ack(session, expected, resend, self._step_limit(peer))
            peer.send(ack)
        peer.touched.clear()
        self._close_drained(peer)

    def _release(self, store: Store) -> None:
        """InferenceRequest those for their records whose source was full, when something has left it."""
        if not store.released:
            return
        store.released = False
        for peer in self._peers.values():
            for session in peer.full:
                peer.send(m.Ack(session, store.expected(session), True, self._step_limit(peer)))
            peer.full.clear()

    def _close_drained(self, peer: Peer) -> None:
        """End the earlier lives of an actor of which everything has come."""
        assert self.store is not None
        drained = [session for session, last in peer.earlier.items() if self.store.expected(session) > last]
        for session in drained:
            del peer.earlier[session]
            self.store.close_session(session)
        if drained:
            self.store.commit()

    def _degrade(self, error: Exception) -> None:
        """The disk failed: acknowledge nothing, trust nothing that is not committed, try again every second.

        When it was not the disk, each record is a group of its own for a while, to find out whose it was.
        """
        if self.store is None:
            log.error("%s", error)
            return
        if not self.degraded:
            log.error("DEGRADED: %s", error)
            self._store_closed()
        if not isinstance(error, OSError | sqlite3.Error):
            self._alone_until = time.monotonic() + ALONE_S
        self.degraded, self._next_reopen = str(error) or repr(error), time.monotonic() + 1.0
        for peer in self._peers.values():
            peer.touched.clear()
            peer.inbox.clear()
            peer.queued = 0

    def _store_closed(self, *, is_over: bool = False) -> None:
        """Close the store; when the run is over, no episode stays open."""
        try:
            if self.store is not None:
                if is_over:
                    self.store.close_open()
                self.store.close()
        except (OSError, sqlite3.Error) as error:
            log.error("closing the store: %s", error)

    def _reopen(self) -> None:
        if time.monotonic() < self._next_reopen:
            return
        store = Store(self.run_dir / "store", self.archived)
        try:
            store.probe()
        except BaseException:
            store.close()
            raise
        self.store = store
        log.warning("the store works again after: %s", self.degraded)
        self.degraded = ""
        for peer in self._peers.values():
            peer.waiting.clear()
            peer.told.clear()
            peer.full.clear()
            for session in [*peer.earlier, peer.hello.session]:
                if session in self.store.sessions:
                    peer.send(m.Ack(session, self.store.expected(session), True))

    # -- notices
    def _notices(self) -> None:
        """Tell each connection what is valid: when it changed, and every second."""
        now = time.monotonic()
        due = now >= self._next_notice
        if due:
            self._next_notice = now + NOTICE_S
            self._forget(now)
            self._cut_silent(now)
        shared = self._shared()
        for peer in self._peers.values():
            notice = m.StateUpdate(*shared, self._step_limit(peer), self.degraded or peer.waits_for)
            if due or notice != peer.noticed:
                peer.noticed = notice
                peer.send(notice)

    def _shared(self) -> tuple[dict[str, Any], dict[str, Any]]:
        if self.store is None:
            return {}, {}
        newest = self.store.newest_weights
        weights = {key: newest[key] for key in ("version", "sha256", "size")} if newest else {}
        number = self.store.directive
        directive = {"number": number, **self.store.directives[number]} if number else {}
        if directive.get("mode") == "stop" and not self._directed:
            directive = {}  # the end of an earlier run: what this one will do is not said yet
        return directive, weights

    def _step_limit(self, peer: Peer) -> int | None:
        """How many steps this peer's session may have made in all; None: no limit."""
        if self.store is None or not peer.hello.paced:
            return None
        number = self.store.directive
        if not number or not self.store.directives[number].get("paced"):
            return None
        directive, steps = self.allowance
        if directive == number and steps is None:
            return None
        made = self.store.sessions[peer.hello.session].steps
        if directive != number or steps is None:
            return made  # the learner has not said yet how far we may go
        left = max(0, steps - self.store.phase_steps.get(self.store.directives[number]["phase"], 0))
        paced = sum(other.hello.paced for other in self._peers.values())
        return made + -(-left // max(1, paced))

    def _forget(self, now: float) -> None:
        for address, peer in list(self._peers.items()):
            if peer.hello.role != "learner" and now - peer.seen > MISSING_S:
                log.warning("%s %s is silent", peer.hello.role, peer.hello.actor)
                self._missing[peer.hello.actor] = peer.seen
                del self._peers[address]
        while len(self._missing) > MISSING:
            del self._missing[next(iter(self._missing))]

    def _cut_silent(self, now: float) -> None:
        """Truncate the episodes that silent actors left open, where nobody is to come back for them."""
        if self.store is None or self.degraded:
            return
        for peer in self._peers.values():
            self._heard |= dict.fromkeys((peer.hello.session, *peer.earlier), peer.seen)
        episodes = list(self.store.open_episodes)
        self._heard = {episode.session: self._heard.get(episode.session, now) for episode in episodes}
        for episode in episodes:
            by_clock = SILENCE_S if self.store.sessions[episode.session].simulated else math.inf
            silent = now - self._heard[episode.session]
            if silent >= self.on_silence.get(episode.source, by_clock):
                log.warning("%s is truncated, as %s was silent for %.0f s", episode.id, episode.actor, silent)
                self.store.cut(episode.session)

    # -- handlers
    def _hello(self, address: Address, hello: m.Hello, owner: KeyOwner | None) -> m.Message | None:
        check_hello(hello, owner, run=self.store.run if self.store else "")
        if len(self._peers) >= CONNECTIONS and address not in self._peers:
            raise ServerFailed(f"the learner has {CONNECTIONS} clients already: wait until one has left")
        if hello.role == "actor":
            if self._over_because:
                raise Refused(self._over_because)
            self._welcome_actor(hello, owner)
            if not self._store.staged:
                self._check_outranked(hello)
            self._drop_echoes(address, hello)
        peer = self._peers[address] = Peer(*address, hello, owner, time.monotonic())
        self._missing.pop(hello.actor, None)
        if hello.role == "actor" and self._store.staged:
            self._welcomes.append(peer)
            return None
        return self._welcome_of(peer)

    def _drop_echoes(self, address: Address, hello: m.Hello) -> None:
        """Forget connections of this life that have said nothing but Hello: it has come again, so they broke."""
        for other, peer in list(self._peers.items()):
            mine = peer.hello.role == "actor" and peer.hello.session == hello.session
            if mine and not peer.speaks and other != address:
                del self._peers[other]

    def _welcome(self) -> None:
        """Make the sessions of all who said Hello in this turn durable at once, and answer them."""
        welcomes, self._welcomes = self._welcomes, []
        for peer in welcomes:
            address = peer.socket, peer.identity
            if self._peers.get(address) is not peer:
                continue
            try:
                self._store.commit()  # the first time; then there is nothing to do
                self._check_outranked(peer.hello)
                answer = self._welcome_of(peer)
            except (OSError, sqlite3.Error, GroupFailed) as error:
                self._degrade(error)
                answer = m.Failed("ServerFailed", f"the learner's store fails: {error}")
            except RetakeError as error:
                answer = self._refusal(address, peer.hello, error)
            if isinstance(answer, m.Failed):
                del self._peers[address]
            peer.send(answer)

    def _welcome_of(self, peer: Peer) -> m.Welcome:
        """The answer to the Hello of this peer; what it acknowledges is durable."""
        hello, expected, ordinal = peer.hello, [], 0
        if hello.role == "actor" and self.store is not None:
            expected = [
                [session, self.store.expected(session)] for session in [*(e for e, _ in hello.earlier), hello.session]
            ]
            peer.earlier = {session: last for session, last in hello.earlier}
            self._close_drained(peer)
            ordinal = self._position(hello.session)
        peer.noticed = m.StateUpdate(*self._shared(), self._step_limit(peer), self.degraded)
        run, spec = (self.store.run, self.store.spec.to_dict()) if self.store else ("", None)
        inference = self.inference if peer.owner is not None else ""  # on the learner's own address nobody asks
        return m.Welcome(run, ordinal, WINDOW, expected, spec, inference, asdict(peer.noticed))

    def _welcome_actor(self, hello: m.Hello, owner: KeyOwner | None) -> None:
        """Check the actor's Spec against the run's, or make the store of the first one."""
        if hello.spec is None or not hello.session or not hello.outbox:
            raise Refused("an actor's Hello names its session, its outbox and its Spec")
        spec = Spec.from_dict(hello.spec)
        if self.degraded:
            raise ServerFailed(f"the learner's store fails: {self.degraded}")
        if self.store is None:
            self._make(spec)
        assert self.store is not None
        if difference := self.store.spec.difference(spec):
            raise Refused(
                f"this run is of another robot or task (the run, yours): {difference}. Start the learner with another "
                "run_dir=..., or the actor with the run's task"
            )
        earlier = [session for session, _ in hello.earlier]
        lives = self.store.lives
        lives.hello(
            hello.actor, hello.outbox, hello.session, earlier, owner.name if owner else "", simulated=hello.paced
        )

    def _make(self, spec: Spec) -> None:
        """Make the store for the first actor's Spec, beside the loop where it is large.

        Raises ServerFailed while it is being made, so that the actor comes again, and Refused when it cannot be.
        """
        if self._making is None and self.fatal is None:
            self._making = made = Future()

            def make() -> None:
                try:
                    made.set_result(Store.create(self.run_dir / "store", spec, self.capacities, self.archived))
                except BaseException as error:
                    made.set_exception(error)

            threading.Thread(target=make, name="make the store", daemon=True).start()
            wait([made], MAKE_S)
            self._take_made()
        if self.fatal is not None:
            raise Refused(str(self.fatal))
        if self.store is None:
            raise ServerFailed("the learner is making the files of its replay buffer, which are large: wait")

    def _take_made(self) -> None:
        """Use the store that was being made, when it is; or end, when those who wait have heard why."""
        if self._making is None or not self._making.done():
            return
        made, self._making = self._making, None
        try:
            self.store = made.result()
        except Exception as error:
            known = isinstance(error, ConfigError)
            self.fatal = error if known else ConfigError(f"no store can be made in {self.run_dir}: {error}")
            self._tells_until = time.monotonic() + TELL_S

    def _namesakes(self, hello: m.Hello) -> list[Peer]:
        """The clients of this role and name that have said something after their Hello."""
        peers = (peer for peer in self._peers.values() if peer.speaks)
        return [other for other in peers if (other.hello.role, other.hello.actor) == (hello.role, hello.actor)]

    def _check_outranked(self, hello: m.Hello) -> None:
        """Of two living clients with one name, the one whose first Hello came first is refused."""
        if any(self._position(other.hello.session) > self._position(hello.session) for other in self._namesakes(hello)):
            raise Refused(SECOND.format(hello.actor))

    def _take_over(self, peer: Peer) -> m.Message | None:
        """The first message after a Hello, which is thus no echo of a dead connection: those before it are over."""
        hello = peer.hello
        if hello.role == "actor":
            if self.degraded:
                return None
            try:
                self._check_outranked(hello)
            except Refused as error:
                del self._peers[peer.socket, peer.identity]
                return self._refusal((peer.socket, peer.identity), hello, error)
            if len(hello.earlier) < m.MAX_EARLIER:  # or else its outbox may hold more than it could name
                self._store.close_before(hello.session, peer.named)
        for other in self._namesakes(hello):
            if hello.role == "actor" and other.hello.session != hello.session:
                other.send(m.Failed("Refused", SECOND.format(hello.actor), final=True))
            del self._peers[other.socket, other.identity]
        peer.speaks = True
        return None

    def _position(self, session: str) -> int:
        state = self._store.sessions.get(session)
        return state.position if state else -1

    def _commit_alone(self, peer: Peer, seq: int) -> None:
        """After a group that failed, and not by the disk: find whose record it was. Raises Refused for that one."""
        try:
            self._store.commit()
        except (OSError, sqlite3.Error):
            raise
        except Exception as error:
            log.exception("record %d of %s cannot be written", seq, peer.hello.actor)
            self._degrade(error)
            raise Refused(f"record {seq} cannot be written: {error}") from None

    def _check_owner(self, peer: Peer, session: str, record: QueuedRecord) -> None:
        """Raise Refused for another actor's episode, which only an operator's key may label, or begin."""
        if peer.owner is None or peer.owner.role != "actor" or isinstance(record, LostRecord):
            return
        if isinstance(record, Segment) and record.start:
            return  # it goes on with one of its own session, or is refused
        actors = self._store.actors_of(record.episode)
        if actors and actors.isdisjoint((peer.hello.actor, self._store.sessions[session].actor)):
            what = "labelling" if isinstance(record, Outcome) else "recording"
            raise Refused(
                f"{record.episode} is an episode of {min(actors)}: {what} it needs a key with the role operator"
            )

    def _heartbeat(self, peer: Peer, heartbeat: m.Heartbeat) -> None:
        peer.report, peer.cost = heartbeat.report, cost(heartbeat.report)

    def _bye(self, peer: Peer, _: m.Bye) -> None:
        peer.leaves = True
        if not peer.inbox:
            del self._peers[peer.socket, peer.identity]

    def _weights(self, peer: Peer, request: m.WeightsRequest) -> m.Message:
        if not self._store.index.has_weights(request.sha256):
            raise Refused(f"no weights {request.sha256[:12]} were published in this run")
        try:
            data = self.weights.read(request.sha256, request.offset, request.length)
        except (OSError, OverflowError) as error:
            raise ServerFailed(f"the weights cannot be read: {error}") from None
        return m.WeightsChunk(request.sha256, request.offset, {"data": data})

    def _direct(self, peer: Peer, direct: m.Direct) -> m.Message:
        number = self._store.direct(dict(direct.body))
        if number == self._store.directive:
            self._directed, self.allowance = True, (number, direct.steps)
        return m.Done(number)

    def _allow(self, peer: Peer, allow: m.StepLimit) -> None:
        self.allowance = (allow.directive, allow.steps)

    def _publish(self, peer: Peer, publish: m.Publish) -> m.Message:
        version = self._store.publish_weights(publish.sha256, publish.size, publish.update)
        self.weights.clean(self._store.index.weights(2))
        return m.Done(version)

    def _archived(self, peer: Peer, archived: m.Archived) -> m.Message:
        if not all(type(number) is int for number in archived.episodes):
            raise MessageError("episodes are archived by their numbers")
        self._store.archive(archived.episodes)
        return m.Done(len(archived.episodes))

    def _sync(self, peer: Peer, sync: m.Sync) -> m.Message:
        if self.store is None:
            return m.Synced(0, [], [], [], False)
        store = self._store
        revision, rows, more = page_of(store.index, sync.revision)
        living = sorted(s.hello.actor for s in self._peers.values() if s.hello.role == "actor")
        return m.Synced(revision, rows, store.index.commands(sync.command), living, more)

    def _over(self, peer: Peer, over: m.Over) -> m.Message:
        """Tell the actors why the run ends. Where it has not begun they end, too, and so does who comes now; else they
        wait for the next start of the learner, which goes on."""
        reason = f"the learner has ended: {over.reason}"
        self._over_because = "" if self._directed else reason
        for other in self._peers.values():
            if other.hello.role == "actor":
                other.send(m.Failed("Refused", reason, final=not self._directed))
        return m.Done(0)

    def _command(self, peer: Peer, command: m.Command) -> m.Message:
        if len(command.name) > MAX_NAME or len(command.argument) > MAX_NAME:
            raise Refused(f"a command has at most {MAX_NAME} characters")
        log.info("%s says %s %s", peer.hello.actor, command.name, command.argument)
        return m.Done(self._store.command(command.name, command.argument, peer.hello.actor))

    def _status(self, peer: Peer, _: m.Status) -> m.Message:
        now, room, clients = time.monotonic(), STATUS_COST, []
        others = [other for other in self._peers.values() if other is not peer]
        for s in sorted(others, key=lambda other: other.cost):  # the largest reports are left out
            entry = {"role": s.hello.role, "actor": s.hello.actor, "seen_s": round(now - s.seen, 1)}
            room -= cost(entry) + s.cost
            clients.append({**(s.report if room > 0 else {"left_out": s.cost}), **entry})
        directive, weights = self._shared()
        return m.Status({
            "run": self.store.run if self.store else "", "uptime_s": round(now - self._started, 1), "time": time.time(),
            "degraded": self.degraded, "full": sorted({s.waits_for for s in self._peers.values()} - {""}),
            **self.access.report, "directive": directive, "weights": weights,
            "sources": self.store.manifest() if self.store else {}, "clients": clients,
            "missing": {actor: round(now - seen, 1) for actor, seen in self._missing.items()},
        })  # fmt: skip

    @property
    def _store(self) -> Store:
        if self.store is None:
            raise ServerFailed("no actor has said Hello yet, so there is no store: start an actor")
        if self.degraded:
            raise ServerFailed(f"the learner's store fails: {self.degraded}")
        return self.store


def page_of(index: Index, since: int) -> tuple[int, list[list[Any]], bool]:
    """(revision, rows, more): the oldest changes after `since`, as many as surely fit into one header."""
    most, fewer = CATALOG_ROWS
    revision, rows = index.catalog(since, most)
    if sum(4 * len(value) for row in rows for value in row if type(value) is str) > wire.MAX_HEADER // 2:
        most, (revision, rows) = fewer, index.catalog(since, fewer)
    return revision, rows, len(rows) == most


def serve(
    run_dir: Path, capacities: Mapping[str, int], *, public: str, local: str, inference: str,
    archived: Collection[str] = (), keys: Path | None = None, on_silence: Mapping[str, float] | None = None,
    begun: Callable[[], None] = lambda: None,
) -> None:  # fmt: skip
    """Run a server until SIGTERM; `begun` is called once it listens."""
    server = Server(
        run_dir, capacities, public=public, local=local, inference=inference, archived=archived, keys=keys,
        on_silence=on_silence,
    )  # fmt: skip
    begun()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: server.stop())
    log.info("serving %s on %s, process %d", run_dir, public, os.getpid())
    try:
        server.run()
    finally:
        server.close()
