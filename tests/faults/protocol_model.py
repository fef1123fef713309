"""An explicit-state model of a record's way: two clients of one name, links that lose, repeat and break, a server.

A state is a tuple of tuples; `actions` names what may happen in it, `step` says what becomes of it. Every fault costs
one of `faults`, so that the states are finitely many and `explore` sees them all. The model keeps what the
implementation need not keep, the log of each session, so that a wrong watermark shows as a log with a hole or a double.
"""

from collections.abc import Iterator

from .protocol_state import (
    Client,
    Connection,
    Message,
    Peer,
    Server,
    Session,
    Span,
    State,
    acknowledged,
    hung_up,
    peer_of,
    relinked,
    told,
    with_client,
    with_peer,
    with_session,
)  # fmt: skip

FAULTS = ("crash", "cut", "stall", "lose up", "lose down", "repeat", "break disk", "kill server", "forget")
Action = tuple  # (name, who): who is a client, or (client, number) for a link


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
        return with_client(state, who, Client("alive", client.life + 1, spans, (*client.made, 0)))

    def crash(self, state: State, who: int) -> State:
        return self.cut(with_client(state, who, state.clients[who]._replace(state="dead")), who)

    def push(self, state: State, who: int) -> State:
        client = state.clients[who]
        session, seq = self.name(who, client.life), client.made[-1]
        spans = client.spans
        if spans and spans[-1].session == session:
            spans = (*spans[:-1], spans[-1]._replace(end=seq + 1))
        else:
            spans = (*spans, Span(session, seq, seq, seq + 1))
        return with_client(state, who, client._replace(spans=spans, made=(*client.made[:-1], seq + 1)))

    def name(self, who: int, life: int) -> str:
        return f"{'ab'[who]}{life}"

    def connect(self, state: State, who: int) -> State:
        client = state.clients[who]
        mine = self.name(who, client.life)
        taken = {link.key for link in state.links} | {peer.key for peer in state.server.peers}
        number = next(n for n in range(99) if (who, n) not in taken)
        hello = ("hello", mine, tuple((span.session, span.end - 1) for span in client.spans if span.session != mine))
        links = tuple(sorted((*state.links, Connection((who, number), up=(hello,)))))
        return with_client(state._replace(links=links), who, client._replace(link=number, welcomed=False))

    def cut(self, state: State, who: int) -> State:
        """The client's side of its link is gone; what it has sent may still arrive."""
        client = state.clients[who]
        link = state.link((who, client.link))
        if link is not None:
            state = relinked(state, link._replace(attached=False, down=()))
        return with_client(state, who, client._replace(link=-1, welcomed=False))

    def sendable(self, client: Client) -> bool:
        if not client.spans or not client.welcomed:
            return False
        span = client.spans[0]
        fits = client.next < span.end and len(client.flying) < self.window
        return fits if client.sending == span.session else span.first < span.end

    def send(self, state: State, who: int, stalled: bool = False) -> State:
        """From the oldest span; the next one follows when all of it is acknowledged."""
        client = state.clients[who]
        if not client.spans:
            return state
        span, link = client.spans[0], state.link((who, client.link))
        if client.sending != span.session or stalled:
            client = client._replace(sending=span.session, next=span.first, flying=())
        while client.next < span.end and len(client.flying) < self.window:
            link = link._replace(up=(*link.up, ("push", span.session, client.next)))
            client = client._replace(next=client.next + 1, flying=(*client.flying, client.next + 1))
        return with_client(relinked(state, link), who, client)

    def stall(self, state: State, who: int) -> State:
        return self.send(state, who, stalled=True)

    # -- a link
    def up(self, state: State, key: tuple[int, int]) -> State:
        return self.handle(self.lose_up(state, key), key, state.link(key).up[0])

    def lose_up(self, state: State, key: tuple[int, int]) -> State:
        link = state.link(key)
        return relinked(state, link._replace(up=link.up[1:]))

    def repeat(self, state: State, key: tuple[int, int]) -> State:
        link = state.link(key)
        return relinked(state, link._replace(up=(link.up[0], *link.up)))

    def lose_down(self, state: State, key: tuple[int, int]) -> State:
        link = state.link(key)
        return relinked(state, link._replace(down=link.down[1:]))

    def down(self, state: State, key: tuple[int, int]) -> State:
        kind, *rest = state.link(key).down[0]
        state = self.lose_down(state, key)
        client = state.clients[key[0]]
        if kind == "failed":
            name, is_final = rest
            if is_final:
                state = with_client(state, key[0], client._replace(state="told"))
            is_over = is_final or name == "Disconnected" or not client.welcomed
            return self.cut(state, key[0]) if is_over else state
        if kind == "ack":
            return with_client(state, key[0], self.ack(client, *rest))
        state = with_client(state, key[0], self.welcome(client, *rest))
        link = state.link(key)
        return relinked(state, link._replace(up=(*link.up, ("beat",))))

    def welcome(self, client: Client, expected: tuple[tuple[str, int], ...]) -> Client:
        wanted = dict(expected)
        if any(wanted.get(span.session, 0) < span.first for span in client.spans):
            return client._replace(state="lost")
        spans = client.spans
        for span in client.spans:
            spans = acknowledged(spans, span.session, wanted.get(span.session, 0))
        return client._replace(spans=spans, sending="", welcomed=True)

    def ack(self, client: Client, session: str, expected: int, resend: bool) -> Client:
        client = client._replace(spans=acknowledged(client.spans, session, expected))
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
        peer = peer_of(state, key)
        if peer is None:
            return told(state, key, ("failed", "Disconnected", False))
        if state.server.degraded:
            return state
        if not peer.speaks:
            state = self.take_over(state, peer)
            if (peer := peer_of(state, key)) is None or not peer.speaks:
                return state
        return self.stage(state, peer, *message[1:]) if message[0] == "push" else state

    def hello(self, state: State, key: tuple[int, int], name: str, earlier: tuple[tuple[str, int], ...]) -> State:
        if state.server.degraded:
            return told(state, key, ("failed", "ServerFailed", False))
        if (mine := state.session(name)) is not None and mine.closed:
            return told(state, key, ("failed", "Replaced", True))
        there = {session.name for session in state.server.sessions}
        names = (*(session for session, _ in earlier), name)
        new = tuple(Session(session, key[0]) for session in names if session not in there)
        committed = self.committed(state.server._replace(sessions=(*state.server.sessions, *new)))
        if committed is None:
            return told(self.degrade(state), key, ("failed", "ServerFailed", False))
        state = state._replace(server=committed)
        if why := self.outranked(state, name, key[0]):
            return told(state, key, ("failed", why, True))
        for echo in [each for each in state.server.peers if each.session == name and not each.speaks]:
            state = hung_up(state, echo.key)
        peer = Peer(key, name, earlier, earlier)
        state = with_peer(state, peer)
        expected = tuple((session, state.session(session).expected) for session in names)
        return told(self.close_drained(state, peer), key, ("welcome", expected))

    def take_over(self, state: State, peer: Peer) -> State:
        """The first message after a Hello: those before it are over. Of two lives of one client the later one goes on,
        and of two clients of one name the one that is connected."""
        if why := self.outranked(state, peer.session, peer.key[0]):
            return told(hung_up(state, peer.key), peer.key, ("failed", why, True))
        closed = self.without_earlier(state.server, peer)
        committed = closed if closed == state.server else self.committed(closed)
        if committed is None:
            return told(self.degrade(state), peer.key, ("failed", "ServerFailed", False))
        state = with_peer(state._replace(server=committed), peer._replace(speaks=True))
        for other in committed.peers:
            if other.key != peer.key and other.speaks:
                state = hung_up(state, other.key)
                if other.session != peer.session:
                    state = told(state, other.key, ("failed", "Replaced", True))
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

    def outranked(self, state: State, name: str, who: int) -> str:
        """Why this session of this client is refused; empty: it is not."""
        for other in state.server.peers:
            link = state.link(other.key)
            if other.speaks and other.key[0] == who and state.position(other.session) > state.position(name):
                return "Replaced"
            if other.speaks and other.key[0] != who and link is not None and link.attached:
                return "Refused"
        return ""

    def stage(self, state: State, peer: Peer, name: str, seq: int) -> State:
        if name not in (peer.session, *(session for session, _ in peer.named)):
            return told(state, peer.key, ("failed", "Refused", True))
        session = state.session(name)
        if seq > session.expected:
            peer = peer._replace(waiting=peer.waiting | {name})
        else:
            if seq == session.expected and session.closed:
                return told(state, peer.key, ("failed", "Refused", True))
            if seq == session.expected:
                state = with_session(state, session._replace(expected=seq + 1, log=(*session.log, seq)))
            peer = peer._replace(waiting=peer.waiting - {name}, told=peer.told - {name})
        return with_peer(state, peer._replace(touched=peer.touched | {name}))

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
            state = told(state, peer.key, ("ack", name, state.session(name).expected, resend))
        peer = peer._replace(touched=frozenset())
        return self.close_drained(with_peer(state, peer), peer)

    def close_drained(self, state: State, peer: Peer) -> State:
        drained = [session for session, last in peer.earlier if state.session(session).expected > last]
        for name in drained:
            state = with_session(state, state.session(name)._replace(closed=True))
        earlier = tuple(pair for pair in peer.earlier if pair[0] not in drained)
        return with_peer(state, peer._replace(earlier=earlier))

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
            state = with_peer(state, peer._replace(waiting=frozenset(), told=frozenset()))
            for name in (*(session for session, _ in peer.earlier), peer.session):
                state = told(state, peer.key, ("ack", name, state.session(name).expected, True))
        return state

    def break_disk(self, state: State, _: int) -> State:
        return state._replace(server=state.server._replace(broken=True))

    def mend(self, state: State, _: int) -> State:
        return state._replace(server=state.server._replace(broken=False))

    def kill_server(self, state: State, _: int) -> State:
        server = self.restored(state.server)._replace(peers=(), degraded=False)
        for who in range(len(state.clients)):
            state = self.cut(state, who)
        return state._replace(server=server, links=())

    def forget(self, state: State, _: int) -> State:
        """Nobody was heard for a long time."""
        return state._replace(server=state.server._replace(peers=()))
