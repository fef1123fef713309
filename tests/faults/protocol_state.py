"""The states of the model of a record's way, tuples of tuples, and how one becomes another in one place."""

from typing import NamedTuple

# ("hello", session, earlier), ("push", session, seq), ("welcome", expected), ("ack", ...), ("failed", ...)
Message = tuple


class Span(NamedTuple):
    """The records of one session in an outbox: [base, end) lie on the disk, and those below `first` are
    acknowledged."""

    session: str
    base: int
    first: int
    end: int


class Client(NamedTuple):
    state: str = "dead"  # or alive, told (another client of this name has come), lost (the server lost records)
    life: int = -1
    spans: tuple[Span, ...] = ()
    made: tuple[int, ...] = ()  # records of each life so far
    sending: str = ""
    next: int = 0
    flying: tuple[int, ...] = ()  # ends of what was sent and not acknowledged
    link: int = -1  # the number of the link in use
    welcomed: bool = False


class Connection(NamedTuple):
    """A connection; what was sent on it may arrive after its client has left it."""

    key: tuple[int, int]
    attached: bool = True
    up: tuple[Message, ...] = ()
    down: tuple[Message, ...] = ()


class Session(NamedTuple):
    name: str
    client: int
    expected: int = 0
    log: tuple[int, ...] = ()  # what is staged or committed, in the order of its coming
    durable: int = 0  # `expected` as committed
    kept: int = 0  # how much of the log is committed
    closed: bool = False


class Peer(NamedTuple):
    key: tuple[int, int]
    session: str
    named: tuple[tuple[str, int], ...]  # (session, last seq) of the Hello
    earlier: tuple[tuple[str, int], ...]  # those of them that are not drained
    speaks: bool = False  # it has said something after its Hello, so that this is no echo of a connection that is dead
    touched: frozenset[str] = frozenset()
    waiting: frozenset[str] = frozenset()
    told: frozenset[str] = frozenset()


class Server(NamedTuple):
    sessions: tuple[Session, ...] = ()  # in the order of their first Hello
    peers: tuple[Peer, ...] = ()
    degraded: bool = False
    broken: bool = False  # the disk


class State(NamedTuple):
    clients: tuple[Client, ...]
    links: tuple[Connection, ...] = ()
    server: Server = Server()
    faults: int = 0

    def link(self, key: tuple[int, int]) -> Connection | None:
        return next((link for link in self.links if link.key == key), None)

    def session(self, name: str) -> Session | None:
        return next((session for session in self.server.sessions if session.name == name), None)

    def position(self, name: str) -> int:
        return next(i for i, session in enumerate(self.server.sessions) if session.name == name)


def with_client(state: State, who: int, client: Client) -> State:
    return state._replace(clients=(*state.clients[:who], client, *state.clients[who + 1 :]))


def relinked(state: State, link: Connection) -> State:
    """A link that was left, and on which nothing is to come, is gone."""
    links = tuple(link if other.key == link.key else other for other in state.links)
    return state._replace(links=tuple(other for other in links if other.attached or other.up))


def told(state: State, key: tuple[int, int], message: Message) -> State:
    link = state.link(key)
    if link is None or not link.attached:
        return state
    return relinked(state, link._replace(down=(*link.down, message)))


def peer_of(state: State, key: tuple[int, int]) -> Peer | None:
    return next((peer for peer in state.server.peers if peer.key == key), None)


def with_peer(state: State, peer: Peer) -> State:
    peers = {other.key: other for other in state.server.peers} | {peer.key: peer}
    return state._replace(server=state.server._replace(peers=tuple(peers.values())))


def hung_up(state: State, key: tuple[int, int]) -> State:
    peers = tuple(peer for peer in state.server.peers if peer.key != key)
    return state._replace(server=state.server._replace(peers=peers))


def with_session(state: State, session: Session) -> State:
    sessions = tuple(session if other.name == session.name else other for other in state.server.sessions)
    return state._replace(server=state.server._replace(sessions=sessions))


def acknowledged(spans: tuple[Span, ...], session: str, expected: int) -> tuple[Span, ...]:
    """A span goes from the disk when its last record is acknowledged."""
    changed = (
        span._replace(first=min(max(span.first, expected), span.end)) if span.session == session else span
        for span in spans
    )  # fmt: skip
    return tuple(span for span in changed if span.first < span.end)
