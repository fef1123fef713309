"""Takes in a client (Hello, Welcome), and decides which of two clients of one name goes on.

Of one outbox the later start goes on: the earlier one is dead. Of two outboxes, which are two robots, the one that is
at work does. A Hello alone ends nobody: it may be the late echo of a dead connection. The first message after it does.
"""

import logging
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from serl_client import clock
from serl_client import messages as m
from serl_client.errors import Refused, Replaced, ServerFailed
from serl_client.spec import IMAGES, Spec

from serl_launcher.service.connections import CONNECTIONS, Connections, window
from serl_launcher.service.failures import Failures, Request
from serl_launcher.service.intake import Intake
from serl_launcher.service.keeper import StoreKeeper
from serl_launcher.service.peers import Address, KeyOwner, Peer, check_hello
from serl_launcher.service.updates import StateUpdates
from serl_launcher.store.extras import with_extras

log = logging.getLogger(__name__)

SECOND = "another client named {} has connected; give each actor its own name"
TAKEN = (
    "an actor named {0} works here already, and goes on (heard {1:.0f} s ago); this one has another outbox, and is not "
    "taken. Two robots with copies of one key, or with one name: say name={2}/second at this one, or make each a key "
    "of its own (`tools/keys.py make NAME --role actor` on the learner). If both are one robot, end the other one first"
)


class Welcomes:
    """Answers each Hello, and keeps `peers`.

    inference: the address that answers InferenceRequests. extras: what the algorithm adds to each robot's rows.
    history: observations of a question. unread: of a run that stores no images but those that it reads, where its
    robot is simulated: {cameras: whose images it reads, say: how to have the others}; None: it stores all.
    """

    def __init__(
        self, keeper: StoreKeeper, peers: dict[Address, Peer], connections: Connections, intake: Intake,
        updates: StateUpdates, failures: Failures, *, inference: str, extras: Mapping[str, Any], history: int,
        unread: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self._keeper, self._peers, self._intake, self._updates = keeper, peers, intake, updates
        self._connections = connections
        self._failures, self._inference, self._extras, self._history = failures, inference, extras, history
        self._unread = unread
        self.over_because = ""  # why no actor is let in any more
        self._waiting: list[tuple[Peer, Request]] = []  # for their sessions to be durable

    def hello(self, address: Address, hello: m.Hello, request: Request) -> m.Message | None:
        """Make the sender of a Hello a peer. None: its Welcome follows when its sessions are durable (`send`)."""
        store, owner = self._keeper.store, request.owner
        check_hello(hello, owner, run=store.run if store else "")
        if hello.role == "actor":
            if self.over_because:
                raise Refused(self.over_because)
            self._enter(hello, owner)
            if not self._keeper.ready.staged:
                self._check_outranked(hello)
            self._drop_echoes(address, hello)
        was_cut = self._connections.welcome(request.identity, owner.name) if owner is not None else ""
        if address not in self._peers:
            self._make_room()
        peer = self._peers[address] = Peer(
            *address, replace(hello, spec=None), owner, clock.monotonic(), was_cut=was_cut
        )
        self._updates.came(peer)
        if hello.role == "actor" and self._keeper.ready.staged:
            self._waiting.append((peer, request))
            return None
        return self._welcome(peer)

    def _make_room(self) -> None:
        """Forget clients without a connection if there are too many. Raises ServerFailed if they still are."""
        if len(self._peers) >= CONNECTIONS:
            living = self._connections.living
            for other, peer in list(self._peers.items()):
                if peer.owner is not None and peer.identity not in living:
                    del self._peers[other]
        if len(self._peers) >= CONNECTIONS:
            raise ServerFailed(f"the learner has {CONNECTIONS} clients already: wait until one has left")

    def _drop_echoes(self, address: Address, hello: m.Hello) -> None:
        """Forget connections of this session that have said nothing but Hello: it has come again, so they broke."""
        for other, peer in list(self._peers.items()):
            mine = peer.hello.role == "actor" and peer.hello.session == hello.session
            if mine and not peer.speaks and other != address:
                del self._peers[other]

    def send(self) -> None:
        """Make the sessions of all who said Hello in this turn durable at once, and answer them."""
        waiting, self._waiting = self._waiting, []
        for peer, request in waiting:
            if self._peers.get(peer.address) is not peer:
                continue
            try:
                self._keeper.ready.commit()  # the first time; then there is nothing to do
                self._check_outranked(peer.hello)
                if not peer.send(self._welcome(peer)):
                    raise ServerFailed("too much that you were answered is not read yet: read it, then say Hello again")
            except Exception as error:
                self._peers.pop(peer.address, None)
                peer.send(self._failures.answer(request, error))

    def _welcome(self, peer: Peer) -> m.Welcome:
        """The answer to the Hello of this peer; what it acknowledges is durable."""
        hello, store, expected, ordinal = peer.hello, self._keeper.store, [], 0
        if hello.role == "actor" and store is not None:
            sessions = [*(session for session, _ in hello.earlier), hello.session]
            expected = [[session, store.expected(session)] for session in sessions]
            for session, last in hello.earlier:
                peer.incoming[session].last = last
            self._intake.close_drained(store, peer)
            ordinal = self._position(hello.session)
        peer.updated = self._updates.of(peer)
        run, spec = (store.run, store.spec.to_dict()) if store else ("", None)
        mine = [other.hello for other in self._peers.values() if other.account == peer.account]
        share = window(len({other.actor for other in mine if other.role == "actor"}))
        inference = self._inference if peer.owner is not None else ""  # on the learner's own address nobody asks
        state = asdict(peer.updated)
        return m.Welcome(run, ordinal, share, expected, spec, inference, state, self._history)

    def _enter(self, hello: m.Hello, owner: KeyOwner | None) -> None:
        """Check the actor's Spec against the run's, or make the store of the first one, and note its sessions."""
        if hello.spec is None or not hello.session or not hello.outbox:
            raise Refused("an actor's Hello names its session, its outbox and its Spec")
        spec = with_extras(Spec.from_dict(hello.spec), self._extras)
        if hello.paced:
            spec = self._stored(spec)
        if self._keeper.store is None:
            self._keeper.make(spec)
        store = self._keeper.ready
        self._connections.largest = store.spec.record_bytes
        if not hello.paced and spec.images != store.spec.images and not store.spec.difference(spec.as_in(store.spec)):
            more = ", ".join(sorted(set(spec.images) - set(store.spec.images)))
            raise Refused(
                f"this run stores no {more}: it began without, or with a simulated robot, whose images nothing reads. "
                "Begin another run with this robot, or with unread_images=true"
            )
        if difference := store.spec.difference(spec):
            raise Refused(
                f"this run is of another robot or task (the run, yours): {difference}. Start the learner with another "
                "run_dir=..., or the actor with the run's task"
            )
        earlier, key = [session for session, _ in hello.earlier], owner.name if owner else ""
        store.lives.hello(hello.actor, hello.outbox, hello.session, earlier, owner=key, simulated=hello.paced)

    def _stored(self, spec: Spec) -> Spec:
        """Return a simulated robot's Spec without the images that this run does not store."""
        if store := self._keeper.store:
            return spec.as_in(store.spec)
        if self._unread is None:
            return spec
        read = {IMAGES + camera for camera in self._unread["cameras"]}
        left = spec.without(set(spec.images) - read)
        if names := sorted(spec.observation.keys() - left.observation.keys()):
            size = sum(spec.observation[name].nbytes for name in names) / 1e3
            told = "not stored, because nothing of this run reads it: %s, %.0f kB a step; %s, in another run_dir"
            log.info(told, ", ".join(names), size, self._unread["say"])
        return left

    def _namesakes(self, hello: m.Hello) -> list[Peer]:
        """The clients of this role and name that have said something after their Hello."""
        peers = (peer for peer in self._peers.values() if peer.speaks)
        return [other for other in peers if (other.hello.role, other.hello.actor) == (hello.role, hello.actor)]

    def _check_outranked(self, hello: m.Hello) -> None:
        """Raise Refused while another robot of this name is connected, and Replaced if a later start of this one is."""
        mine, living = self._position(hello.session), self._connections.living
        for other in self._namesakes(hello):
            is_own = other.hello.outbox == hello.outbox
            if is_own and self._position(other.hello.session) > mine:
                raise Replaced(SECOND.format(hello.actor))
            if not is_own and other.identity in living:
                heard = clock.monotonic() - other.seen
                raise Refused(TAKEN.format(hello.actor, heard, hello.actor.partition("/")[0]))

    def replace_earlier(self, peer: Peer, request: Request) -> m.Failed | None:
        """End the earlier clients of this name: `request`, the first after its Hello, shows that this one is no echo.

        Returns the refusal of its Hello if this client is outranked, else None.
        """
        hello = peer.hello
        if hello.role == "actor":
            if self._keeper.degraded:
                return None
            try:
                self._check_outranked(hello)
            except Refused as error:
                del self._peers[peer.address]
                return self._failures.answer(replace(request, message=hello), error)
            if len(hello.earlier) < m.MAX_EARLIER:  # or else its outbox may hold more than it could name
                self._keeper.ready.close_before(hello.session, peer.named)
        for other in self._namesakes(hello):
            if hello.role == "actor" and other.hello.session != hello.session:
                other.send(m.Failed("Replaced", SECOND.format(hello.actor), final=True))
            del self._peers[other.address]
        peer.speaks = True
        return None

    def _position(self, session: str) -> int:
        """When this session first said Hello, as an order; -1 for one that is not known."""
        state = self._keeper.ready.sessions.get(session)
        return state.position if state else -1
