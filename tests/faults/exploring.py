"""Every state that the model of a record's way can reach: what must hold in each, and how each goes on to the end."""

from .protocol_model import Action, Protocol
from .protocol_state import State

PATIENCE = 500  # steps


class Violation(Exception):
    """An invariant does not hold after this history."""


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
        mine = "ab"[who]
        if not any(session.name[0] != mine for session in state.server.sessions):
            return "a client was stopped though no other of its name has come"
    return ""


def _stopped(before: State, after: State) -> str:
    """Which client that works this step has ended; empty: none."""
    for peer in before.server.peers:
        link = after.link(peer.key)
        is_told = link is not None and any(message[0] == "failed" and message[2] for message in link.down)
        if peer.speaks and is_told and peer.key not in {other.key for other in after.server.peers}:
            return f"the client of {peer.session} works, and is ended"
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
                    if text := broken(new) or _stopped(state, new):
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
