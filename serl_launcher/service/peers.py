"""Describes a connected client of the server, and what its role may send."""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import zmq
from serl_client import messages as m
from serl_client import wire
from serl_client.episode import MAX_NUMBER, QueuedRecord
from serl_client.errors import MessageError, Refused
from serl_client.keys import owns
from serl_client.names import check_names

from serl_launcher.service.router import Router

ROLES: dict[str, tuple[type, ...]] = {
    "actor": (m.Push, m.Heartbeat, m.Bye, m.WeightsRequest, m.Command, m.DriverUpdate, m.Status),
    "learner": (
        m.Direct, m.StepLimit, m.Publish, m.Archived, m.SetAside, m.Over, m.Sync, m.Heartbeat, m.WeightsRequest,
        m.Command, m.Status,
    ),
    "viewer": (m.Heartbeat, m.Bye, m.Command, m.Drive, m.Status),
}  # fmt: skip
WATCHING = (m.Hello, m.Heartbeat, m.Bye, m.Status)
ACTING = (*WATCHING, m.Push, m.WeightsRequest, m.InferenceRequest, m.DriverUpdate)
ORDERING = (*ACTING, m.Command, m.Drive)
GRANTS: dict[str, tuple[type, ...]] = {"viewer": WATCHING, "actor": ACTING, "operator": ORDERING}  # of keys


Address = tuple[Router, bytes]  # of a connection


class Forbidden(MessageError):
    """A message that the sender's role does not allow."""


@dataclass(frozen=True, slots=True)
class KeyOwner:
    """Whose key it is that a message came with, and what it may do (GRANTS)."""

    name: str
    role: str


@dataclass(frozen=True, slots=True)
class Batch:
    """Records of one Push that are not all staged yet."""

    push: m.Push
    identity: zmq.Frame
    records: Iterator[tuple[int, QueuedRecord]]


@dataclass(slots=True)
class Incoming:
    """What one connection brings of one session."""

    last: int | None = None  # the number of an earlier session's last record, until all of them have come
    due: bool = False  # an acknowledgement follows the commit
    has_gap: bool = False  # a record is missing, until it has come
    is_told: bool = False  # and its sender knows that
    full: str = ""  # why its source takes nothing now
    is_crowded: bool = False  # records found no room beside those of its key that wait for their turn


@dataclass
class Peer:
    """One connection, from its Hello on."""

    socket: Router
    identity: bytes
    hello: m.Hello
    owner: KeyOwner | None  # None: on the learner's own address
    seen: float
    speaks: bool = False  # it has said something after its Hello
    leaves: bool = False  # it has said Bye
    inbox: deque[Batch] = field(default_factory=deque)  # what is to be staged, when it is its turn
    queued: int = 0  # bytes of it
    report: Mapping[str, Any] = field(default_factory=dict)
    cost: int = 0  # of the report
    updated: m.StateUpdate | None = None
    was_cut: str = ""  # why its connection before this one was, until something is acknowledged
    heard: int = 0  # the number of the newest command that a learner's process was told of

    def __post_init__(self) -> None:
        self.named = frozenset(session for session, _ in self.hello.earlier)
        self.incoming = {session: Incoming() for session in (*self.named, self.hello.session)}
        self.account = self.owner.name if self.owner and self.owner.name else self.hello.actor

    def drop_batch(self) -> None:
        """The first of the inbox is done with, or comes again."""
        if self.inbox:
            self.queued -= self.inbox.popleft().push.nbytes

    @property
    def waits_for(self) -> str:
        """Why nothing more of this actor is acknowledged; empty when nothing holds it up."""
        return next((each.full for each in self.incoming.values() if each.full), "")

    @property
    def because(self) -> str:
        """Why this actor makes no steps now, as it was told; empty when nothing hinders it."""
        return self.updated.directive.get("because", "") if self.updated else ""

    @property
    def address(self) -> Address:
        return self.socket, self.identity

    @property
    def living(self) -> list[str]:
        """The sessions that this connection goes on with: its own, and earlier ones of which not all has come."""
        earlier = [session for session, each in self.incoming.items() if each.last is not None]
        return [*earlier, self.hello.session]

    def send(self, message: m.Message) -> bool:
        """Send as Router.tell."""
        return self.socket.tell(self.identity, message)


def newest(peers: Iterable[Peer], actor: str) -> Peer | None:
    """Return the connection of this actor that was heard last; None: none is connected."""
    mine = (peer for peer in peers if (peer.hello.role, peer.hello.actor) == ("actor", actor))
    return max(mine, key=lambda peer: peer.seen, default=None)


def cost(report: Mapping[str, Any]) -> int:
    """Return how many bytes a report takes of a status."""
    return len(wire.pack(report, {})[0])


def check_role(message: m.Message, owner: KeyOwner) -> None:
    """Raise Forbidden for a message that the owner of this key may not send."""
    if type(message) not in GRANTS[owner.role]:
        raise Forbidden(f"{type(message).__name__} is not for the key {owner.name}, whose role is {owner.role}")


def check_hello(hello: m.Hello, owner: KeyOwner | None, *, run: str) -> None:
    """Raise MessageError or Refused for a Hello that nobody may say here.

    run: the store's id. owner: None on the learner's own address.
    """
    pairs = all(isinstance(pair, list) and [type(part) for part in pair] == [str, int] for pair in hello.earlier)
    if not pairs:
        raise MessageError("a Hello names earlier sessions as [session, seq] pairs")
    names = {session for session, _ in hello.earlier} | {hello.session}
    check_names("a Hello", hello.actor, hello.outbox, *names, error=MessageError)
    if len(hello.earlier) > m.MAX_EARLIER or len(names) <= len(hello.earlier):
        raise MessageError(f"a Hello names at most {m.MAX_EARLIER} sessions besides its own, each of them once")
    if any(not 0 <= last < MAX_NUMBER for _, last in hello.earlier):
        raise MessageError("the last record of an earlier session has a number from 0 on")
    if hello.role not in ROLES or (hello.role == "learner" and owner is not None):
        raise Refused(f"the role {hello.role!r} is not given on this address")
    if owner is not None and owner.name:
        _check_claim(hello, owner)
    if hello.run and hello.run != run:
        raise Refused(
            f"this learner serves the run {run[:12] or '(new)'}, your outbox belongs to {hello.run[:12]}. Nothing "
            "was deleted: start the learner with that run's folder, or the actor with another run_dir"
        )


def _check_claim(hello: m.Hello, owner: KeyOwner) -> None:
    """Raise Forbidden for a name or a role that this key does not have: identity is the key."""
    if not owns(owner.name, hello.actor):
        raise Forbidden(f"the key {owner.name} is not that of {hello.actor!r}: go by the name {owner.name}")
    if hello.role == "actor" and owner.role == "viewer":
        raise Forbidden(f"the key {owner.name} has the role viewer, and appends nothing: make one with --role actor")
