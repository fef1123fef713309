"""The server process: it owns the sockets and the store, and is the store's only writer. No torch.

One thread, one loop: take what has come, stage it, commit the group, acknowledge. While a group is being synced the
next one gathers in the sockets, so groups grow with the load. Training runs elsewhere and never delays this loop.
"""

import logging
import os
import signal
import sqlite3
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import zmq
from serl_client import messages as m
from serl_client import wire
from serl_client.episode import MAX_NAME, Entry, Lost, Outcome, Segment
from serl_client.errors import ConfigError, MessageError, Refused, RetakeError, ServerFailed
from serl_client.link import received
from serl_client.spec import Spec

from serl_launcher.data.store import Full, Gap, Store
from serl_launcher.service.gate import CONNECTIONS, Gate
from serl_launcher.service.session import ROLES, Forbidden, Holder, Session, bound, check_hello, check_role, send
from serl_launcher.service.weights import WeightFiles

log = logging.getLogger(__name__)

WINDOW = 16 << 20  # bytes of one actor that may be unacknowledged on the wire
NOTICE_S = 1.0
MISSING_S = 15.0  # longer than one large record takes over a slow link
MISSING = 64  # actors that are named as missing: the last ones
CATALOG_ROWS = 200  # with five names of MAX_NAME characters of 4 bytes each they fit into one header
SECOND = "another client named {} has connected; give each actor its own name"

Peer = tuple[zmq.Socket, bytes]  # a connection


class Server:
    """Serves one run folder. `capacities` are the steps of each physical source; `public` and `local` are the
    addresses for actors and for the learner's own processes (nobody else reaches the local one); episodes of the
    `archived` sources leave the store only after the export has named them. `keys` is the folder of those who are let
    in (gate.py); without one `public` has to be a loopback address."""

    def __init__(
        self, run_dir: Path, capacities: Mapping[str, int], *, public: str, local: str, inference: str,
        archived: Collection[str] = (), keys: Path | None = None,
    ) -> None:  # fmt: skip
        self.run_dir, self.capacities, self.inference, self.archived = run_dir, capacities, inference, archived
        self.weights = WeightFiles(run_dir / "weights")
        self.store = Store(run_dir / "store") if (run_dir / "store" / "index.sqlite").exists() else None
        if self.store is not None:
            self.store.close()
            self.store = Store.create(run_dir / "store", self.store.spec, capacities, archived)
        self.degraded = ""
        self.fatal: ConfigError | None = None
        self.allowance: tuple[int, int | None] = (0, 0)  # (directive, steps)
        self._sessions: dict[Peer, Session] = {}
        self._missing: dict[str, float] = {}  # actor -> when it was last seen
        self._stopping = self._directed = False
        self._started, self._next_notice, self._next_reopen = time.monotonic(), 0.0, 0.0
        self.gate = Gate(public, keys)
        self.public, self.local = self.gate.socket, bound(self.gate.context, local)
        self._handlers: dict[type, Callable[[Session, Any], m.Message | None]] = {
            m.Push: self._push, m.Heartbeat: self._heartbeat, m.WeightsRequest: self._weights, m.Status: self._status,
            m.Direct: self._direct, m.Allow: self._allow, m.Publish: self._publish, m.Sync: self._sync,
            m.Archived: self._archived, m.Command: self._command, m.Bye: self._bye,
        }  # fmt: skip

    # -- the loop
    def run(self) -> None:
        """Serve until `stop`. Raises ConfigError when no store can be made for the first actor's Spec."""
        poller = zmq.Poller()
        for socket in (self.local, *self.gate.polled):
            poller.register(socket, zmq.POLLIN)
        while not self._stopping and self.fatal is None:
            ready = dict(poller.poll(timeout=100))
            self.gate.turn()
            for socket in (self.local, self.public):
                if socket in ready:
                    self._drain(socket)
            self._commit()
            self._notices()
        if self.fatal is not None:
            raise self.fatal

    def stop(self) -> None:
        self._stopping = True

    def close(self) -> None:
        self.gate.context.destroy(linger=2000)  # why the run ends must reach its actors
        if not self.degraded:
            self._store_closed(is_over=self._directed and self._shared()[0].get("mode") == "stop")

    def _drain(self, socket: zmq.Socket, most: int = 256) -> None:
        """Handle what has come on a socket, at most `most` messages: a group must end."""
        for _ in range(most):
            if not (came := received(socket)):
                return
            identity, *frames = came
            answer = self._answer(socket, identity, [frame.buffer for frame in frames])
            if answer is not None:
                send(socket, identity.bytes, answer)

    def _answer(self, socket: zmq.Socket, identity: zmq.Frame, frames: Sequence[wire.Buffer]) -> m.Message | None:
        """Handle one message; what goes wrong with it is counted, and is the answer."""
        peer, holder, message = (socket, identity.bytes), None, None
        try:
            if socket is self.public and (holder := self.gate.admit(identity)) is None:
                return None
            message = m.decode(frames)
            if isinstance(message, m.Hello):
                return self._hello(peer, message, holder)
            return self._dispatch(peer, message, holder)
        except (OSError, sqlite3.Error) as error:
            self._degrade(error)
            return m.Failed("ServerFailed", f"the learner's store fails: {error}")
        except (MessageError, KeyError, TypeError, ValueError) as error:
            at_keyboard = isinstance(message, m.Command)  # a person who may not steer is told so, however often
            self.gate.blame(identity, None if at_keyboard else holder, error)
            return m.Failed("Refused", str(error), final=isinstance(message, m.Hello))
        except RetakeError as error:
            return self._refusal(peer, message, error)
        except Exception:
            log.exception("a handler failed")
            return m.Failed("ServerFailed", "the learner failed on this message; its log says why")

    def _refusal(self, peer: Peer, message: m.Message | None, error: RetakeError) -> m.Failed:
        """What a peer is told whose message is fine, and yet not taken; without one it is not let in any more."""
        if message is None:
            self._sessions.pop(peer, None)
        elif not self.degraded:
            self.gate.refuse("refused", str(error))
        final = isinstance(message, (m.Hello, m.Push, type(None))) and not isinstance(error, ServerFailed)
        return m.Failed(type(error).__name__, str(error), final)

    def _dispatch(self, peer: Peer, message: m.Message, holder: Holder | None) -> m.Message | None:
        session = self._sessions.get(peer)
        if session is None or session.holder != holder:
            return m.Failed("Disconnected", "say Hello first")
        session.seen = time.monotonic()
        if type(message) not in ROLES[session.hello.role]:
            raise Forbidden(f"a {type(message).__name__} is not for the role {session.hello.role}")
        if holder is not None:
            check_role(message, holder)
        is_over = isinstance(message, m.Bye)  # of a life that never spoke: it stops nobody
        if not (session.speaks or is_over) and (refusal := self._take_over(session)) is not None:
            return refusal
        return self._handlers[type(message)](session, message)

    def _commit(self) -> None:
        """Make the group durable, then acknowledge it."""
        if self.store is None:
            return
        touched = [session for session in self._sessions.values() if session.touched]
        if not (self.store.staged or self.store.released or touched or self.degraded):
            return
        try:
            if self.degraded:
                self._reopen()
            else:
                self.store.commit()
                for session in touched:
                    self._acknowledge(session)
                self._release(self.store)
        except (OSError, sqlite3.Error) as error:
            self._degrade(error)
        except Exception as error:
            log.exception("the group could not be committed")
            self._degrade(error)

    def _acknowledge(self, session: Session) -> None:
        assert self.store is not None
        for epoch in session.touched:
            expected = self.store.expected(epoch)
            resend = epoch in session.waiting - session.told
            session.told |= session.waiting & {epoch}
            ack = m.Ack(epoch, expected, resend, self._steps_allowed(session))
            session.send(ack)
        session.touched.clear()
        self._close_drained(session)

    def _release(self, store: Store) -> None:
        """Ask those for their records whose source was full, when something has left it."""
        if not store.released:
            return
        store.released = False
        for session in self._sessions.values():
            for epoch in session.full:
                session.send(m.Ack(epoch, store.expected(epoch), True, self._steps_allowed(session)))
            session.full.clear()

    def _close_drained(self, session: Session) -> None:
        """End the earlier lives of an actor of which everything has come."""
        assert self.store is not None
        drained = [epoch for epoch, last in session.earlier.items() if self.store.expected(epoch) > last]
        for epoch in drained:
            del session.earlier[epoch]
            self.store.close_epoch(epoch)
        if drained:
            self.store.commit()

    def _degrade(self, error: Exception) -> None:
        """The disk failed: acknowledge nothing, trust nothing that is not committed, try again every second."""
        if self.store is None:
            log.error("%s", error)
            return
        if not self.degraded:
            log.error("DEGRADED: %s", error)
            self._store_closed()
        self.degraded, self._next_reopen = str(error) or repr(error), time.monotonic() + 1.0
        for session in self._sessions.values():
            session.touched.clear()

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
        for session in self._sessions.values():
            session.waiting.clear(), session.told.clear(), session.full.clear()
            for epoch in [*session.earlier, session.hello.epoch]:
                if epoch in self.store.epochs:
                    session.send(m.Ack(epoch, self.store.expected(epoch), True))

    # -- notices
    def _notices(self) -> None:
        """Tell each connection what is valid: when it changed, and every second."""
        now = time.monotonic()
        due = now >= self._next_notice
        if due:
            self._next_notice = now + NOTICE_S
            self._forget(now)
        shared = self._shared()
        for session in self._sessions.values():
            notice = m.Notice(*shared, self._steps_allowed(session), self.degraded or session.waits_for)
            if due or notice != session.noticed:
                session.noticed = notice
                session.send(notice)

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

    def _steps_allowed(self, session: Session) -> int | None:
        """How many steps this session's epoch may have made in all; None: no limit."""
        if self.store is None or not session.hello.paced:
            return None
        number = self.store.directive
        if not number or not self.store.directives[number].get("paced"):
            return None
        directive, steps = self.allowance
        if directive == number and steps is None:
            return None
        made = self.store.epoch_steps.get(session.hello.epoch, 0)
        if directive != number or steps is None:
            return made  # the learner has not said yet how far we may go
        left = max(0, steps - self.store.phase_steps.get(self.store.directives[number]["phase"], 0))
        paced = sum(other.hello.paced for other in self._sessions.values())
        return made + -(-left // max(1, paced))

    def _forget(self, now: float) -> None:
        for peer, session in list(self._sessions.items()):
            if session.hello.role != "learner" and now - session.seen > MISSING_S:
                log.warning("%s %s is silent", session.hello.role, session.hello.actor)
                self._missing[session.hello.actor] = session.seen
                del self._sessions[peer]
        while len(self._missing) > MISSING:
            del self._missing[next(iter(self._missing))]

    # -- handlers
    def _hello(self, peer: Peer, hello: m.Hello, holder: Holder | None) -> m.Message:
        check_hello(hello, holder, run=self.store.run if self.store else "")
        if len(self._sessions) >= CONNECTIONS and peer not in self._sessions:
            raise ServerFailed(f"the learner has {CONNECTIONS} clients already: wait until one has left")
        if hello.role == "actor":
            self._welcome_actor(hello)
            self._check_outranked(hello)
        session = self._sessions[peer] = Session(*peer, hello, holder, time.monotonic())
        self._missing.pop(hello.actor, None)
        expected, ordinal = [], 0
        if hello.role == "actor" and self.store is not None:
            known = {epoch: self.store.expected(epoch) for epoch in [*(e for e, _ in hello.earlier), hello.epoch]}
            session.earlier = {epoch: last for epoch, last in hello.earlier}
            self._close_drained(session)
            expected, ordinal = [[epoch, seq] for epoch, seq in known.items()], self.store.epochs[hello.epoch].position
        session.noticed = m.Notice(*self._shared(), self._steps_allowed(session), self.degraded)
        run, spec = (self.store.run, self.store.spec.to_dict()) if self.store else ("", None)
        inference = self.inference if holder is not None else ""  # on the learner's own address nobody asks
        return m.Welcome(run, ordinal, WINDOW, expected, spec, inference, asdict(session.noticed))

    def _welcome_actor(self, hello: m.Hello) -> None:
        """Check the actor's Spec against the run's, or make the store of the first one."""
        if hello.spec is None or not hello.epoch or not hello.outbox:
            raise Refused("an actor's Hello names its epoch, its outbox and its Spec")
        spec = Spec.from_dict(hello.spec)
        if self.degraded:
            raise ServerFailed(f"the learner's store fails: {self.degraded}")
        if self.store is None:
            try:
                self.store = Store.create(self.run_dir / "store", spec, self.capacities, self.archived)
            except (ConfigError, OSError, sqlite3.Error) as error:
                known = isinstance(error, ConfigError)
                self.fatal = error if known else ConfigError(f"no store can be made in {self.run_dir}: {error}")
                raise Refused(str(self.fatal)) from None
        elif difference := self.store.spec.difference(spec):
            raise Refused(
                f"this run is of another robot or task (the run, yours): {difference}. Start the learner with another "
                "run_dir=..., or the actor with the run's task"
            )
        self.store.hello(hello.actor, hello.outbox, hello.epoch, [(epoch, last) for epoch, last in hello.earlier])

    def _namesakes(self, hello: m.Hello) -> list[Session]:
        """The clients of this role and name that have said something after their Hello."""
        sessions = (session for session in self._sessions.values() if session.speaks)
        return [other for other in sessions if (other.hello.role, other.hello.actor) == (hello.role, hello.actor)]

    def _check_outranked(self, hello: m.Hello) -> None:
        """Of two living clients with one name, the one whose first Hello came first is refused."""
        if any(self._position(other.hello.epoch) > self._position(hello.epoch) for other in self._namesakes(hello)):
            raise Refused(SECOND.format(hello.actor))

    def _take_over(self, session: Session) -> m.Message | None:
        """The first message after a Hello, which is thus no echo of a dead connection: those before it are over."""
        hello = session.hello
        if hello.role == "actor":
            if self.degraded:
                return None
            try:
                self._check_outranked(hello)
            except Refused as error:
                del self._sessions[session.socket, session.identity]
                return self._refusal((session.socket, session.identity), hello, error)
            self._store.close_before(hello.epoch, [epoch for epoch, _ in hello.earlier])
        for other in self._namesakes(hello):
            if hello.role == "actor" and other.hello.epoch != hello.epoch:
                other.send(m.Failed("Refused", SECOND.format(hello.actor), final=True))
            del self._sessions[other.socket, other.identity]
        session.speaks = True
        return None

    def _position(self, epoch: str) -> int:
        return self._store.epochs[epoch].position

    def _push(self, session: Session, push: m.Push) -> None:
        """Stage records. Nothing is answered here: a gap, too, is named only when what came before is durable."""
        if push.epoch not in (session.hello.epoch, *(epoch for epoch, _ in session.hello.earlier)):
            raise Refused(f"epoch {push.epoch} was not named in the Hello of this connection")
        if self.store is None or self.degraded or push.epoch in session.full:
            return
        try:
            records = m.unseal(push.arrays["records"].data)
        except MessageError:
            session.waiting.add(push.epoch)  # its actor looks at what it sent, and sends it again
            session.touched.add(push.epoch)
            raise
        for seq, record in records:
            self._check_owner(session, push.epoch, record)
            try:
                self.store.stage(push.epoch, seq, record)
            except Gap:
                session.waiting.add(push.epoch)
                session.touched.add(push.epoch)
                return
            except Full as full:
                log.warning("%s: %s waits, and keeps what it records", full, session.hello.actor)
                session.full[push.epoch] = str(full)
                return
            except (RetakeError, OSError, sqlite3.Error):
                raise
            except Exception as error:
                self._degrade(error)  # what is staged may be half of something: begin again from what is committed
                raise
            session.waiting.discard(push.epoch)
            session.told.discard(push.epoch)
            session.touched.add(push.epoch)

    def _check_owner(self, session: Session, epoch: str, record: Entry) -> None:
        """Raise Refused for another actor's episode, which only an operator's key may label, or begin."""
        if session.holder is None or session.holder.role != "actor" or isinstance(record, Lost):
            return
        if isinstance(record, Segment) and record.start:
            return  # it goes on with one of its own epoch, or is refused
        actors = self._store.actors_of(record.episode)
        if actors and actors.isdisjoint((session.hello.actor, self._store.epochs[epoch].actor)):
            what = "labelling" if isinstance(record, Outcome) else "recording"
            raise Refused(
                f"{record.episode} is an episode of {min(actors)}: {what} it needs a key with the role operator"
            )

    def _heartbeat(self, session: Session, heartbeat: m.Heartbeat) -> None:
        session.report = heartbeat.report

    def _bye(self, session: Session, _: m.Bye) -> None:
        del self._sessions[session.socket, session.identity]

    def _weights(self, session: Session, request: m.WeightsRequest) -> m.Message:
        if not self._store.index.has_weights(request.sha256):
            raise Refused(f"no weights {request.sha256[:12]} were published in this run")
        try:
            data = self.weights.read(request.sha256, request.offset, request.length)
        except (OSError, OverflowError) as error:
            raise ServerFailed(f"the weights cannot be read: {error}") from None
        return m.WeightsChunk(request.sha256, request.offset, {"data": data})

    def _direct(self, session: Session, direct: m.Direct) -> m.Message:
        number = self._store.direct(dict(direct.body))
        if number == self._store.directive:
            self._directed, self.allowance = True, (number, direct.steps)
        return m.Done(number)

    def _allow(self, session: Session, allow: m.Allow) -> None:
        self.allowance = (allow.directive, allow.steps)

    def _publish(self, session: Session, publish: m.Publish) -> m.Message:
        version = self._store.publish_weights(publish.sha256, publish.size, publish.update)
        self.weights.clean(self._store.index.weights(2))
        return m.Done(version)

    def _archived(self, session: Session, archived: m.Archived) -> m.Message:
        if not all(type(number) is int for number in archived.episodes):
            raise MessageError("episodes are archived by their numbers")
        self._store.archive(archived.episodes)
        return m.Done(len(archived.episodes))

    def _sync(self, session: Session, sync: m.Sync) -> m.Message:
        if self.store is None:
            return m.Synced(0, [], [], [], False)
        store = self._store
        revision, rows = store.index.catalog(sync.revision, CATALOG_ROWS)
        living = sorted(s.hello.actor for s in self._sessions.values() if s.hello.role == "actor")
        return m.Synced(revision, rows, store.index.commands(sync.command), living, len(rows) == CATALOG_ROWS)

    def _command(self, session: Session, command: m.Command) -> m.Message:
        if len(command.name) > MAX_NAME or len(command.argument) > MAX_NAME:
            raise Refused(f"a command has at most {MAX_NAME} characters")
        log.info("%s says %s %s", session.hello.actor, command.name, command.argument)
        return m.Done(self._store.command(command.name, command.argument, session.hello.actor))

    def _status(self, session: Session, _: m.Status) -> m.Message:
        now = time.monotonic()
        clients = [
            {**s.report, "role": s.hello.role, "actor": s.hello.actor, "seen_s": round(now - s.seen, 1)}
            for s in self._sessions.values() if s is not session
        ]  # fmt: skip
        directive, weights = self._shared()
        return m.Status({
            "run": self.store.run if self.store else "", "uptime_s": round(now - self._started, 1), "time": time.time(),
            "degraded": self.degraded, "full": sorted({s.waits_for for s in self._sessions.values()} - {""}),
            **self.gate.report, "directive": directive, "weights": weights,
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


def serve(
    run_dir: Path, capacities: Mapping[str, int], *, public: str, local: str, inference: str,
    archived: Collection[str] = (), keys: Path | None = None,
) -> None:  # fmt: skip
    """Run a server until SIGTERM."""
    server = Server(run_dir, capacities, public=public, local=local, inference=inference, archived=archived, keys=keys)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: server.stop())
    log.info("serving %s on %s, process %d", run_dir, public, os.getpid())
    try:
        server.run()
    finally:
        server.close()
