"""An explicit-state model of a record's way: two clients of one name, links that lose, repeat and break, a server.

A state is a tuple of tuples; `actions` names what may happen in it, `step` says what becomes of it. Every fault costs
one of `faults`, so that the states are finitely many and `explore` sees them all. The model keeps what the
implementation need not keep, the log of each session, so that a wrong watermark shows as a log with a hole or a double.
"""

from collections.abc import Iterator
from typing import NamedTuple

FAULTS = ("crash", "cut", "stall", "lose up", "lose down", "repeat", "break disk", "kill server", "forget")
PATIENCE = 500  # steps
Action = tuple  # (name, who): who is a client, or (client, number) for a link
Message = (
    tuple  # ("hello", session, earlier), ("push", session, seq), ("welcome", expected), ("ack", ...), ("failed", ...)
)


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


class Violation(Exception):
    """An invariant does not hold after this history."""


class Protocol:
    """The transition function. `lives` and `records` bound each client's starts and the pushes of each life."""

    window = 2

    def __init__(self, lives: tuple[int, ...], records: int, faults: int) -> None:
        self.lives, self.records = lives, records
        self.initial = State(tuple(Client() for _ in lives), faults=faults)

    def actions(self, state: State) -> Iterator[Action]:
        """All that may happen."""
        for who, client in enumerate(state.clients):
            if client.state == "alive":
                yield from ((name, who) for name in self._of_client(client, state.faults > 0))
            elif client.life + 1 < self.lives[who]:
                yield "start", who
        for link in state.links:
            yield from ((name, link.key) for name in self._of_link(link, state.faults > 0))
        yield from ((name, 0) for name in self._of_server(state.server, state.faults > 0))

    def _of_client(self, client: Client, may_fail: bool) -> Iterator[str]:
        if client.made[-1] < self.records:
            yield "push"
        if client.link < 0:
            yield "connect"
        if self.sendable(client):
            yield "send"
        if may_fail:
            yield "crash"
            yield from ("cut",) * (client.link >= 0)
            yield from ("stall",) * (client.welcomed and bool(client.flying))

    def _of_link(self, link: Connection, may_fail: bool) -> Iterator[str]:
        if link.up:
            yield "up"
            yield from ("lose up", "repeat")[: may_fail * (1 + link.attached)]
        if link.down:
            yield "down"
            yield from ("lose down",) * may_fail

    def _of_server(self, server: Server, may_fail: bool) -> Iterator[str]:
        if server.degraded or any(peer.touched for peer in server.peers):
            yield "commit"
        if server.broken:
            yield "mend"
        elif may_fail:
            yield "break disk"
        if may_fail and server.sessions:
            yield "kill server"
            yield "forget"

    def step(self, state: State, action: Action) -> State:
        name, who = action
        if name in FAULTS:
            state = state._replace(faults=state.faults - 1)
        return getattr(self, name.replace(" ", "_"))(state, who)

    # -- a client
    def start(self, state: State, who: int) -> State:
        client = state.clients[who]
        spans = tuple(span._replace(first=span.base) for span in client.spans)
        return _with(state, who, Client("alive", client.life + 1, spans, (*client.made, 0)))

    def crash(self, state: State, who: int) -> State:
        return self._leave(_with(state, who, state.clients[who]._replace(state="dead")), who)

    def push(self, state: State, who: int) -> State:
        client = state.clients[who]
        session, seq = self.name(who, client.life), client.made[-1]
        spans = client.spans
        if spans and spans[-1].session == session:
            spans = (*spans[:-1], spans[-1]._replace(end=seq + 1))
        else:
            spans = (*spans, Span(session, seq, seq, seq + 1))
        return _with(state, who, client._replace(spans=spans, made=(*client.made[:-1], seq + 1)))

    def name(self, who: int, life: int) -> str:
        return f"{'ab'[who]}{life}"

    def connect(self, state: State, who: int) -> State:
        client = state.clients[who]
        mine = self.name(who, client.life)
        taken = {link.key for link in state.links} | {peer.key for peer in state.server.peers}
        number = next(n for n in range(99) if (who, n) not in taken)
        hello = ("hello", mine, self.earlier(client, mine))
        links = tuple(sorted((*state.links, Connection((who, number), up=(hello,)))))
        return _with(state._replace(links=links), who, client._replace(link=number, welcomed=False))

    def earlier(self, client: Client, mine: str) -> tuple[tuple[str, int], ...]:
        return tuple((span.session, span.end - 1) for span in client.spans if span.session != mine)

    def cut(self, state: State, who: int) -> State:
        return self._leave(state, who)

    def _leave(self, state: State, who: int) -> State:
        """The client's side of its link is gone; what it has sent may still arrive."""
        client = state.clients[who]
        link = state.link((who, client.link))
        if link is not None:
            state = _relink(state, link._replace(attached=False, down=()))
        return _with(state, who, client._replace(link=-1, welcomed=False))

    def oldest(self, client: Client) -> Span | None:
        """The span that is sent first; the next one follows when all of it is acknowledged."""
        return client.spans[0] if client.spans else None

    def sendable(self, client: Client) -> bool:
        span = self.oldest(client)
        if span is None or not client.welcomed:
            return False
        fits = client.next < span.end and len(client.flying) < self.window
        return fits if client.sending == span.session else span.first < span.end

    def send(self, state: State, who: int, stalled: bool = False) -> State:
        client = state.clients[who]
        span, link = self.oldest(client), state.link((who, client.link))
        if span is None:
            return state
        if client.sending != span.session or stalled:
            client = client._replace(sending=span.session, next=span.first, flying=())
        while client.next < span.end and len(client.flying) < self.window:
            link = link._replace(up=(*link.up, ("push", span.session, client.next)))
            client = client._replace(next=client.next + 1, flying=(*client.flying, client.next + 1))
        return _with(_relink(state, link), who, self.sent(client))

    def sent(self, client: Client) -> Client:
        return client

    def stall(self, state: State, who: int) -> State:
        return self.send(state, who, stalled=True)

    # -- a link
    def up(self, state: State, key: tuple[int, int]) -> State:
        link = state.link(key)
        return self.handle(_relink(state, link._replace(up=link.up[1:])), key, link.up[0])

    def lose_up(self, state: State, key: tuple[int, int]) -> State:
        link = state.link(key)
        return _relink(state, link._replace(up=link.up[1:]))

    def repeat(self, state: State, key: tuple[int, int]) -> State:
        link = state.link(key)
        return _relink(state, link._replace(up=(link.up[0], *link.up)))

    def lose_down(self, state: State, key: tuple[int, int]) -> State:
        link = state.link(key)
        return _relink(state, link._replace(down=link.down[1:]))

    def down(self, state: State, key: tuple[int, int]) -> State:
        link = state.link(key)
        state = _relink(state, link._replace(down=link.down[1:]))
        kind, *rest = link.down[0]
        client = state.clients[key[0]]
        if kind == "failed":
            name, is_final = rest
            if is_final:
                state = _with(state, key[0], client._replace(state="told"))
            is_over = is_final or name == "Disconnected" or not client.welcomed
            return self._leave(state, key[0]) if is_over else state
        if kind == "ack":
            return _with(state, key[0], self.ack(client, *rest))
        state = _with(state, key[0], self.welcome(client, *rest))
        link = state.link(key)
        return _relink(state, link._replace(up=(*link.up, ("beat",))))

    def welcome(self, client: Client, expected: tuple[tuple[str, int], ...]) -> Client:
        wanted = dict(expected)
        if any(wanted.get(span.session, 0) < span.first for span in client.spans):
            return client._replace(state="lost")
        spans = client.spans
        for span in client.spans:
            spans = _acknowledged(spans, span.session, wanted.get(span.session, 0))
        return client._replace(spans=spans, sending="", welcomed=True)

    def ack(self, client: Client, session: str, expected: int, resend: bool) -> Client:
        client = client._replace(spans=_acknowledged(client.spans, session, expected))
        if session != client.sending:
            return client
        if resend:
            return client._replace(next=expected, flying=())
        flying = tuple(end for end in client.flying if end > expected)
        return client._replace(flying=flying, next=max(client.next, expected))

    # -- the server
    def handle(self, state: State, key: tuple[int, int], message: Message) -> State:
        if message[0] == "hello":
            return self.hello(state, key, *message[1:])
        peer = _peer(state, key)
        if peer is None:
            return _tell(state, key, ("failed", "Disconnected", False))
        if state.server.degraded:
            return state
        if not peer.speaks:
            state = self.take_over(state, peer)
            if (peer := _peer(state, key)) is None or not peer.speaks:
                return state
        return self.stage(state, peer, *message[1:]) if message[0] == "push" else state

    def hello(self, state: State, key: tuple[int, int], name: str, earlier: tuple[tuple[str, int], ...]) -> State:
        if state.server.degraded:
            return _tell(state, key, ("failed", "ServerFailed", False))
        if (mine := state.session(name)) is not None and mine.closed:
            return _tell(state, key, ("failed", "Refused", True))
        there = {session.name for session in state.server.sessions}
        names = (*(session for session, _ in earlier), name)
        new = tuple(Session(session, key[0]) for session in names if session not in there)
        committed = self.committed(state.server._replace(sessions=(*state.server.sessions, *new)))
        if committed is None:
            return _tell(self.degrade(state), key, ("failed", "ServerFailed", False))
        state = state._replace(server=committed)
        if self.outranked(state, name):
            return _tell(state, key, ("failed", "Refused", True))
        for echo in [each for each in state.server.peers if each.session == name and not each.speaks]:
            state = _hang_up(state, echo.key)
        peer = Peer(key, name, earlier, earlier)
        state = _with_peer(state, peer)
        expected = tuple((session, state.session(session).expected) for session in names)
        return _tell(self.close_drained(state, peer), key, ("welcome", expected))

    def take_over(self, state: State, peer: Peer) -> State:
        """The first message after a Hello: those before it are over. Of two clients of one name, the one whose first
        Hello came first is told."""
        if self.outranked(state, peer.session):
            return _tell(_hang_up(state, peer.key), peer.key, ("failed", "Refused", True))
        closed = self.without_earlier(state.server, peer)
        committed = closed if closed == state.server else self.committed(closed)
        if committed is None:
            return _tell(self.degrade(state), peer.key, ("failed", "ServerFailed", False))
        state = _with_peer(state._replace(server=committed), peer._replace(speaks=True))
        for other in committed.peers:
            if other.key != peer.key and other.speaks:
                state = _hang_up(state, other.key)
                if other.session != peer.session:
                    state = _tell(state, other.key, ("failed", "Refused", True))
        return state

    def without_earlier(self, server: Server, peer: Peer) -> Server:
        """Lives of this client of which it holds nothing any more are closed."""
        sessions, held = list(server.sessions), {session for session, _ in peer.named}
        for i, session in enumerate(sessions):
            if session.name == peer.session:
                break
            if session.client == peer.key[0] and session.name not in held and not session.closed:
                sessions[i] = session._replace(closed=True)
        return server._replace(sessions=tuple(sessions))

    def outranked(self, state: State, name: str) -> bool:
        return any(
            other.speaks and state.position(other.session) > state.position(name) for other in state.server.peers
        )

    def stage(self, state: State, peer: Peer, name: str, seq: int) -> State:
        if name not in (peer.session, *(session for session, _ in peer.named)):
            return _tell(state, peer.key, ("failed", "Refused", True))
        session = state.session(name)
        if seq > session.expected:
            peer = peer._replace(waiting=peer.waiting | {name})
        else:
            if seq == session.expected and session.closed:
                return _tell(state, peer.key, ("failed", "Refused", True))
            if seq == session.expected:
                state = _repoch(state, session._replace(expected=seq + 1, log=(*session.log, seq)))
            peer = peer._replace(waiting=peer.waiting - {name}, told=peer.told - {name})
        return _with_peer(state, peer._replace(touched=peer.touched | {name}))

    def commit(self, state: State, _: int) -> State:
        if state.server.degraded:
            return state if state.server.broken else self.reopen(state)
        committed = self.committed(state.server)
        if committed is None:
            return self.degrade(state)
        state = state._replace(server=committed)
        for peer in committed.peers:
            if peer.touched:
                state = self.acknowledge(state, peer)
        return state

    def committed(self, server: Server) -> Server | None:
        """With all that is staged made durable; None: the disk failed."""
        if server.broken and any(session.kept < len(session.log) for session in server.sessions):
            return None
        sessions = tuple(
            session._replace(durable=session.expected, kept=len(session.log)) for session in server.sessions
        )
        return server._replace(sessions=sessions)

    def acknowledge(self, state: State, peer: Peer) -> State:
        for name in sorted(peer.touched):
            resend = name in peer.waiting - peer.told
            peer = peer._replace(told=peer.told | (peer.waiting & {name}))
            state = _tell(state, peer.key, ("ack", name, state.session(name).expected, resend))
        peer = peer._replace(touched=frozenset())
        return self.close_drained(_with_peer(state, peer), peer)

    def close_drained(self, state: State, peer: Peer) -> State:
        drained = [session for session, last in peer.earlier if state.session(session).expected > last]
        for name in drained:
            state = _repoch(state, state.session(name)._replace(closed=True))
        earlier = tuple(pair for pair in peer.earlier if pair[0] not in drained)
        return _with_peer(state, peer._replace(earlier=earlier))

    def degrade(self, state: State) -> State:
        """What is not committed is not trusted."""
        server = self.restored(state.server)
        peers = tuple(peer._replace(touched=frozenset()) for peer in server.peers)
        return state._replace(server=server._replace(peers=peers, degraded=True))

    def restored(self, server: Server) -> Server:
        sessions = (
            session._replace(expected=session.durable, log=session.log[: session.kept]) for session in server.sessions
        )
        return server._replace(sessions=tuple(sessions))

    def reopen(self, state: State) -> State:
        state = state._replace(server=state.server._replace(degraded=False))
        for peer in state.server.peers:
            state = _with_peer(state, peer._replace(waiting=frozenset(), told=frozenset()))
            for name in (*(session for session, _ in peer.earlier), peer.session):
                state = _tell(state, peer.key, ("ack", name, state.session(name).expected, True))
        return state

    def break_disk(self, state: State, _: int) -> State:
        return state._replace(server=state.server._replace(broken=True))

    def mend(self, state: State, _: int) -> State:
        return state._replace(server=state.server._replace(broken=False))

    def kill_server(self, state: State, _: int) -> State:
        server = self.restored(state.server)._replace(peers=(), degraded=False)
        for who in range(len(state.clients)):
            state = self._leave(state, who)
        return state._replace(server=server, links=())

    def forget(self, state: State, _: int) -> State:
        """Nobody was heard for a long time."""
        return state._replace(server=state.server._replace(peers=()))


# -- states, changed in one place


def _with(state: State, who: int, client: Client) -> State:
    return state._replace(clients=(*state.clients[:who], client, *state.clients[who + 1 :]))


def _relink(state: State, link: Connection) -> State:
    """A link that was left, and on which nothing is to come, is gone."""
    links = tuple(link if other.key == link.key else other for other in state.links)
    return state._replace(links=tuple(other for other in links if other.attached or other.up))


def _tell(state: State, key: tuple[int, int], message: Message) -> State:
    link = state.link(key)
    if link is None or not link.attached:
        return state
    return _relink(state, link._replace(down=(*link.down, message)))


def _peer(state: State, key: tuple[int, int]) -> Peer | None:
    return next((peer for peer in state.server.peers if peer.key == key), None)


def _with_peer(state: State, peer: Peer) -> State:
    peers = {other.key: other for other in state.server.peers} | {peer.key: peer}
    return state._replace(server=state.server._replace(peers=tuple(peers.values())))


def _hang_up(state: State, key: tuple[int, int]) -> State:
    peers = tuple(peer for peer in state.server.peers if peer.key != key)
    return state._replace(server=state.server._replace(peers=peers))


def _repoch(state: State, session: Session) -> State:
    sessions = tuple(session if other.name == session.name else other for other in state.server.sessions)
    return state._replace(server=state.server._replace(sessions=sessions))


def _acknowledged(spans: tuple[Span, ...], session: str, expected: int) -> tuple[Span, ...]:
    """A span goes from the disk when its last record is acknowledged."""
    changed = (
        span._replace(first=min(max(span.first, expected), span.end)) if span.session == session else span
        for span in spans
    )  # fmt: skip
    return tuple(span for span in changed if span.first < span.end)


# -- what must hold


def broken(state: State) -> str:
    """Which promise does not hold in this state; empty when all do."""
    server = state.server
    if sum(peer.speaks for peer in server.peers) > 1:
        return "two clients of one name are served at once"
    for session in server.sessions:
        if session.log != tuple(range(len(session.log))):
            return f"{session.name} is stored as {session.log}: doubled, out of order or with a hole"
    kept = {session.name: session.kept for session in server.sessions}
    for link in state.links:
        for message in link.down:
            told = message[1] if message[0] == "welcome" else [message[1:3]] if message[0] == "ack" else []
            if any(expected > kept.get(session, 0) for session, expected in told):
                return f"{message} acknowledges what is not committed"
    return next(filter(None, (_broken_client(state, who, kept) for who in range(len(state.clients)))), "")


def _broken_client(state: State, who: int, kept: dict[str, int]) -> str:
    client = state.clients[who]
    first = {span.session: span.first for span in client.spans}
    closed = {session.name for session in state.server.sessions if session.closed}
    waits = ""  # the oldest session of which something is still to come
    for life, made in enumerate(client.made):
        name = f"{'ab'[who]}{life}"
        there = kept.get(name, 0)
        if first.get(name, made) > there:
            return f"records of {name} left the outbox, and {there} are committed"
        if name in closed and (there < made or (client.state == "alive" and life == client.life)):
            return f"{name} was closed, and not all of it has come"
        if waits and there:
            return f"{name} was stored before all of {waits}"
        waits = waits or (name if there < made else "")
    if client.state == "lost":
        return "a client found that its learner has lost data"
    if client.state == "told":
        places = {session.name: i for i, session in enumerate(state.server.sessions)}
        mine = places[f"{'ab'[who]}{client.life}"]
        if not any(place > mine and name[0] != "ab"[who] for name, place in places.items()):
            return "a client was stopped though no other of its name came after it"
    return ""


def explore(protocol: Protocol, depth: int = 999) -> dict[State, tuple[State, Action] | None]:
    """Every state within `depth` actions, with the one before it and how it came. Raises Violation."""
    found: dict[State, tuple[State, Action] | None] = {protocol.initial: None}
    layer = [protocol.initial]
    for _ in range(depth):
        after = []
        for state in layer:
            for action in protocol.actions(state):
                new = protocol.step(state, action)
                if new not in found:
                    found[new] = state, action
                    after.append(new)
                    if text := broken(new):
                        raise Violation(f"{text}, after {history(found, new)}")
        layer = after
        if not layer:
            break
    return found


def history(found: dict[State, tuple[State, Action] | None], state: State) -> list[Action]:
    """The actions that lead to a state."""
    actions = []
    while (before := found[state]) is not None:
        state, action = before
        actions.append(action)
    return actions[::-1]


def fair(protocol: Protocol, state: State) -> Action | None:
    """What happens next when faults have ended and whoever holds records runs alone; None: all is delivered."""
    if state.server.broken:
        return "mend", 0
    if moving := next((link for link in state.links if link.up), None):
        return "up", moving.key
    if state.server.degraded or any(peer.touched for peer in state.server.peers):
        return "commit", 0
    if moving := next((link for link in state.links if link.down), None):
        return "down", moving.key
    holders = [who for who, client in enumerate(state.clients) if client.spans]
    if not holders:
        return None
    who = next((who for who in holders if state.clients[who].state == "alive"), holders[0])
    return _fair_client(protocol, state, who)


def _fair_client(protocol: Protocol, state: State, who: int) -> Action:
    client = state.clients[who]
    other = next((i for i, other in enumerate(state.clients) if i != who and other.state == "alive"), None)
    if client.state != "alive":
        return ("start", who) if other is None else ("crash", other)
    if client.link < 0:
        return "connect", who
    if not client.welcomed:
        return "cut", who
    if protocol.sendable(client):
        return "send", who
    if client.flying:
        return "stall", who
    raise Violation("a connected client holds records, and will neither send them nor ask for an answer")


def drain(protocol: Protocol, state: State, known: set[State]) -> None:
    """Go on without faults until all is delivered, or a state of `known`. Raises Violation."""
    path = []
    while state not in known:
        path.append(state)
        if len(path) > PATIENCE:
            raise Violation(f"after {PATIENCE} steps without a fault not all is delivered")
        action = fair(protocol, state)
        if action is None:
            break
        state = protocol.step(state, action)
        if text := broken(state):
            raise Violation(text)
    known.update(path)
