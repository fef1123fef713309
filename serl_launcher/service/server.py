"""Runs the server process: it receives records, answers clients, and alone writes the store. No torch.

One thread, one loop: read messages, stage their records, commit the group, acknowledge. Training runs elsewhere and
never delays this loop. intake.py handles records, welcome.py the Hello of a client, failures.py each error, and
updates.py what clients are told unasked.
"""

import logging
import os
import signal
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import zmq
from omegaconf import DictConfig, OmegaConf
from serl_client import clock, wire
from serl_client import messages as m
from serl_client.connection import received, tcp
from serl_client.console import log_as, throttled
from serl_client.errors import MessageError, Refused, ServerFailed
from serl_client.names import check_names

from serl_launcher.service.access import AccessControl
from serl_launcher.service.driving import Driving
from serl_launcher.service.failures import Failures, Request
from serl_launcher.service.fair_queue import FairQueue
from serl_launcher.service.intake import Intake
from serl_launcher.service.keeper import StoreKeeper
from serl_launcher.service.peers import ROLES, Address, Forbidden, Peer, check_role, cost, newest
from serl_launcher.service.router import Router, bound
from serl_launcher.service.updates import StateUpdates
from serl_launcher.service.welcome import Welcomes
from serl_launcher.store.index import Index
from serl_launcher.store.store import Store
from serl_launcher.store.weights import WeightFiles
from serl_launcher.supervisor import END

log = throttled(__name__)

STATUS_COST = 900_000  # of all clients' reports together (peers.cost): a status has to fit into one header
CATALOG_ROWS = (1000, 200)  # of a page: with five names of MAX_NAME characters of 4 bytes each, 200 fit into a header


class Server:
    """Serves one run folder.

    capacities: {physical source: steps}. public, local: the addresses for actors and for the learner's own processes;
    nobody else reaches the local one. inference: the address that actors ask for actions.
    archived: sources whose episodes leave the store only after the export has named them.
    keys: the folder of those who are let in (access.py); without one `public` has to be a loopback address.
    on_silence {source: seconds}: after how much silence of its actor an open episode is truncated; for other sources
    the actor's clock says it.
    extras, history, unread: see Welcomes.
    """

    def __init__(
        self, run_dir: Path, capacities: Mapping[str, int], *, public: str, local: str, inference: str,
        archived: Collection[str] = (), keys: Path | None = None, on_silence: Mapping[str, float] | None = None,
        extras: Mapping[str, Any] | None = None, history: int = 1, unread: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self.weights = WeightFiles(run_dir / "weights")
        self.keeper = StoreKeeper(run_dir, capacities, archived)
        self.access = AccessControl(public, keys)
        self.public, self.local = self.access.socket, bound(self.access.context, local)
        self.queue = FairQueue(self.access)
        self.peers: dict[Address, Peer] = {}
        self.updates = StateUpdates(self.keeper, self.peers, on_silence or {})
        self.failures = Failures(self.access, self.keeper)
        self.intake = Intake(self.keeper, self.access, self.peers, self.failures, self.updates)
        self.access.connections.queued = self.intake.queued
        self.welcomes = Welcomes(
            self.keeper, self.peers, self.access.connections, self.intake, self.updates, self.failures,
            inference=inference, extras=extras or {}, history=history, unread=unread,
        )  # fmt: skip
        self._stopping, self._started, self._passed_on = False, clock.monotonic(), 0
        self._late = set[int]()  # numbers of each `next` about a phase that was over before the trainer heard of it
        driving = Driving(self.peers)
        self._handlers: dict[type, Callable[[Peer, Any], m.Message | None]] = {
            m.Heartbeat: self._heartbeat, m.WeightsRequest: self._weights, m.Status: self._status,
            m.Direct: self._direct, m.StepLimit: self._allow, m.Publish: self._publish, m.Sync: self._sync,
            m.Archived: self._archived, m.SetAside: self._set_aside, m.Command: self._command, m.Bye: self._bye,
            m.Over: self._over, m.Drive: driving.drive, m.DriverUpdate: driving.update,
        }  # fmt: skip

    @property
    def store(self) -> Store | None:
        """The run's store; None before the first actor's Spec has come."""
        return self.keeper.store

    # -- the loop
    def run(self) -> None:
        """Serve until `stop`. Raises ConfigError when no store can be made for the first actor's Spec."""
        poller = zmq.Poller()
        for socket in (self.local, *self.access.polled):
            poller.register(socket, zmq.POLLIN)
        while not self._stopping and not self.keeper.has_failed:
            poller.poll(timeout=0 if self.intake.has_work or self.queue.waits else 100)
            self.access.turn()
            self._hear()
            self.keeper.adopt_made()
            self.welcomes.send()
            self.intake.work(self.public, self.local)
            self.intake.commit()
            self.updates.send()
        if self.keeper.fatal is not None:
            raise self.keeper.fatal

    def stop(self) -> None:
        self._stopping = True

    def close(self) -> None:
        self.access.context.destroy(linger=2000)  # why the run ends must reach its actors
        self.keeper.close(is_over=self.updates.is_over)

    def _hear(self) -> None:
        """Handle what has come, no longer than a group may take to gather: by turns a message of the learner's own
        processes, and one of a client."""
        end = clock.monotonic() + self.intake.patience
        while clock.monotonic() < end and not self.intake.is_awaited:
            self.access.turn()  # what comes is looked at as often as ever
            self.queue.fill()
            if came := received(self.local):
                identity, *frames = came
                self._take(self.local, identity, [frame.buffer for frame in frames])
            if not self.queue.serve(self._take) and not came:
                return

    def _take(self, socket: Router, identity: zmq.Frame, frames: Sequence[wire.Buffer]) -> None:
        """Handle one message, and send its answer, or why it failed: also that its answer cannot be encoded, or sent to
        who does not read."""
        request = Request(identity)
        try:
            if not self._answer(socket, request, self._handle((socket, identity.bytes), request, frames)):
                self.access.refuse("too much unread", "a client asks for more, and does not read what it is answered")
                raise ServerFailed("too much that you were answered is not read yet: read it, then ask again")
        except Exception as error:
            self._answer(socket, request, self.failures.answer(request, error))

    def _answer(self, socket: Router, request: Request, answer: m.Message | None) -> bool:
        """Send the answer to a request, if there is one, as Router.tell. It names the number of the request."""
        if isinstance(request.message, m.NUMBERED) and isinstance(answer, m.Done | m.Failed):
            answer = replace(answer, request=request.message.request)
        try:
            return answer is None or socket.tell(request.identity.bytes, answer)
        except Exception as error:  # no mistake of the client's
            raise RuntimeError(f"the answer cannot be encoded: {error}") from error

    def _handle(self, address: Address, request: Request, frames: Sequence[wire.Buffer]) -> m.Message | None:
        """Decode a message, check who sent it, and do what it asks for. Raises what is wrong with it."""
        if address[0] is self.public:
            try:
                request.owner = self.access.admit(request.identity, frames)
            except Refused:
                self.peers.pop(address, None)
                raise
            if request.owner is None:
                return None
        message = request.message = m.decode(frames)
        if request.owner is not None and not self.access.allows(request.identity, request.owner, message):
            raise ServerFailed(f"too many {type(message).__name__}s within a second: say it again")
        if isinstance(message, m.Hello):
            return self.welcomes.hello(address, message, request)
        return self._dispatch(address, message, request)

    def _dispatch(self, address: Address, message: m.Message, request: Request) -> m.Message | None:
        peer = self.peers.get(address)
        if peer is None or peer.owner != request.owner:
            return m.Failed("Disconnected", "say Hello first")
        peer.seen = clock.monotonic()
        if type(message) not in ROLES[peer.hello.role]:
            raise Forbidden(f"{type(message).__name__} is not for the role {peer.hello.role}")
        if request.owner is not None:
            check_role(message, request.owner)
        if peer.hello.role == "actor" and self.store and peer.hello.session not in self.store.sessions:
            del self.peers[address]  # thousands have said Hello since, and it has brought nothing
            return m.Failed("Disconnected", "say Hello again")
        is_new = not peer.speaks and not isinstance(message, m.Bye)  # whoever says only Bye ends no other client
        if is_new and (refusal := self.welcomes.replace_earlier(peer, request)) is not None:
            return refusal
        if isinstance(message, m.Push):
            return self.intake.push(peer, message, request.identity)
        return self._handlers[type(message)](peer, message)

    # -- handlers
    def _heartbeat(self, peer: Peer, heartbeat: m.Heartbeat) -> None:
        peer.report, peer.cost = heartbeat.report, cost(heartbeat.report)

    def _bye(self, peer: Peer, _: m.Bye) -> None:
        peer.leaves = True
        if not peer.inbox:
            del self.peers[peer.address]

    def _weights(self, peer: Peer, request: m.WeightsRequest) -> m.Message:
        index = self.keeper.ready.index
        if request.sha256 not in self.weights.mapped and not index.has_weights(request.sha256):
            raise Refused(f"no weights {request.sha256[:12]} were published in this run")
        try:
            data, checksum = self.weights.read(request.sha256, request.part)
        except OSError as error:
            raise ServerFailed(f"the weights cannot be read: {error}") from None
        return m.WeightsChunk(request.sha256, request.part, checksum, {"data": data})

    def _direct(self, peer: Peer, direct: m.Direct) -> m.Message:
        """Take a directive. Where its phase is another one, each `next` of which this peer has not heard is late."""
        store = self.keeper.ready
        before = store.directives.get(store.directives.newest, {}).get("phase")
        number = store.direct(dict(direct.body), self.updates.here)
        if number == store.directives.newest:
            self.updates.is_directed, self.updates.allowance = True, (number, direct.steps)
            if direct.body.get("phase") != before:
                self._late |= {each for each, name, _ in store.index.commands(peer.heard) if name == "next"}
        return m.Done(number)

    def _allow(self, peer: Peer, allow: m.StepLimit) -> None:
        self.updates.allowance = (allow.directive, allow.steps)

    def _publish(self, peer: Peer, publish: m.Publish) -> m.Message:
        version = self.keeper.ready.publish_weights(publish.sha256, publish.size, publish.update)
        self.weights.clean(self.keeper.ready.index.weights(2))
        return m.Done(version)

    def _archived(self, peer: Peer, archived: m.Archived) -> m.Message:
        if not all(type(number) is int for number in archived.episodes):
            raise MessageError("episodes are archived by their numbers")
        self.keeper.ready.add_archived(archived.episodes)
        return m.Done(len(archived.episodes))

    def _set_aside(self, peer: Peer, message: m.SetAside) -> m.Message:
        self.keeper.ready.set_aside(message.episode, message.reason)
        return m.Done()

    def _sync(self, peer: Peer, sync: m.Sync) -> m.Message:
        if self.store is None:
            return m.Synced(0, [], [], [], False)
        store = self.keeper.ready
        revision, rows, more = page_of(store.index, sync.revision)
        actors = [peer for peer in self.peers.values() if peer.hello.role == "actor"]
        living = sorted([each.hello.actor, each.because, each.hello.paced] for each in actors)
        heads = {source.name: source.head for source in store.sources.values()}
        commands = [
            [number, "" if number in self._late else name, argument]
            for number, name, argument in store.index.commands(sync.command)
        ]
        peer.heard = max(sync.command, *(number for number, _, _ in commands), 0)
        return m.Synced(revision, rows, commands, living, more, heads)

    def _over(self, peer: Peer, over: m.Over) -> m.Message:
        """Tell the actors why the run ends. Before the first directive they end, too, and later ones are refused; else
        they wait for the next start of the learner, which resumes the run."""
        reason = f"the learner has ended: {over.reason}"
        self.welcomes.over_because = "" if self.updates.is_directed else reason
        for other in self.peers.values():
            if other.hello.role == "actor":
                other.send(m.Failed("Ended", reason, final=not self.updates.is_directed))
        return m.Done(0)

    def _command(self, peer: Peer, command: m.Command) -> m.Message:
        check_names("a command", command.name, command.argument, command.actor, error=Refused)
        log.info("%s says %s %s %s", peer.hello.actor, command.name, command.argument, command.actor)
        if command.actor:
            return m.Done(self._pass_on(command))
        directives = self.keeper.ready.directives
        phase, now = (directives.get(number, {}).get("phase") for number in (command.directive, directives.newest))
        if command.directive and phase != now:
            raise Refused(
                f"nothing was done: {command.name} was said about phase {phase}, and it is {now} now: look, and say it"
                " again"
            )
        return m.Done(self.keeper.ready.command(command.name, command.argument, peer.hello.actor))

    def _pass_on(self, command: m.Command) -> int:
        """Send a command to its actor, once; return its number, which no earlier one has had."""
        if command.name not in m.WORDS:
            raise Refused(f"an actor is told one of {', '.join(m.WORDS)}")
        if (actor := newest(self.peers.values(), command.actor)) is None:
            raise Refused(f"no actor {command.actor} is connected")
        self._passed_on = max(self._passed_on + 1, int(1000 * clock.time()))  # also later than before a restart
        if not actor.send(replace(command, request=self._passed_on)):
            raise ServerFailed(f"{command.actor} does not read what it is told")
        return self._passed_on

    def _status(self, peer: Peer, _: m.Status) -> m.Message:
        now, room, clients = clock.monotonic(), STATUS_COST, []
        others = [other for other in self.peers.values() if other is not peer]
        for s in sorted(others, key=lambda other: other.cost):  # the largest reports are left out
            entry = {"role": s.hello.role, "actor": s.hello.actor, "seen_s": round(now - s.seen, 1)}
            entry |= {"because": s.because} if s.because else {}
            room -= cost(entry) + s.cost
            clients.append({**(s.report if room > 0 else {"left_out": s.cost}), **entry})
        directive, weights = self.updates.shared()
        return m.Status({
            "run": self.store.run if self.store else "", "uptime_s": round(now - self._started, 1),
            "degraded": self.keeper.degraded, "full": sorted({s.waits_for for s in self.peers.values()} - {""}),
            **self.access.report, "time": clock.time(), "directive": directive, "weights": weights,
            "sources": self.store.manifest() if self.store else {}, "clients": clients,
            "set_aside": self.store.episodes.aside if self.store else 0,
            "missing": {actor: round(now - seen, 1) for actor, seen in self.updates.missing.items()},
        })  # fmt: skip


def page_of(index: Index, since: int) -> tuple[int, list[list[Any]], bool]:
    """(revision, rows, more): the oldest changes after `since`, as many as surely fit into one header."""
    most, fewer = CATALOG_ROWS
    revision, rows = index.catalog(since, most)
    if sum(4 * len(value) for row in rows for value in row if type(value) is str) > wire.MAX_HEADER // 2:
        most, (revision, rows) = fewer, index.catalog(since, fewer)
    return revision, rows, len(rows) == most


def serve(run_dir: Path, *arguments: Any, begun: Callable[[], None] = lambda: None, **options: Any) -> None:
    """Run a Server of these arguments until END; `begun` is called once it listens."""
    server = Server(run_dir, *arguments, **options)
    begun()
    for number in (END, signal.SIGINT):
        signal.signal(number, lambda *_: server.stop())
    log.info("serving %s on %s, process %d", run_dir, options["public"], os.getpid())
    try:
        server.run()
    finally:
        server.close()


def main(config: DictConfig, run_dir: Path, local: str, begun: Callable[[], None]) -> None:
    """Run the server process of a run until END; `begun` is called once it listens.

    `config.store` holds what the server needs of the plan: the launcher writes it before it starts us.
    """
    log_as("server", logging.WARNING)
    for told in ("store.files", "service.welcome"):  # how large the store will be, and what it leaves out
        logging.getLogger(f"serl_launcher.{told}").setLevel(logging.INFO)
    host = "*" if config.host in ("0.0.0.0", "::") else config.host  # an actor puts the host there by which it came
    store: Any = OmegaConf.to_container(config.store)
    serve(
        run_dir, store["capacities"], public=tcp(config.host, config.port), local=local,
        inference=tcp(host, config.inference_port), archived=store["archived"], on_silence=store["on_silence"],
        keys=Path(config["keys"]) if config["keys"] else None, extras=store["extras"], history=store["history"],
        unread=store["unread"], begun=begun,
    )  # fmt: skip
