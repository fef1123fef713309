"""The real outboxes, streams and server, made to take the same steps as the model of a record's way."""

import os

import zmq
from serl_client import messages as m
from serl_client import send_queue as stream_module
from serl_client.outbox import Outbox
from serl_client.send_queue import SendQueue

from serl_launcher.service.server import Server
from serl_launcher.store.store import Store

from .protocol_state import State


class Real:
    """Outboxes, streams and a server, joined by queues that the history empties; no time passes by itself."""

    def __init__(self, folder, spec, make_segment):
        self.folder, self.spec, self.make_segment = folder, spec, make_segment
        self.played, self.stored, self.disk_fails = 0, {}, False
        store = Store.create(folder / "run" / "store", spec, {"online": 4096})
        store.direct({"into": "online", "phase": "practise"})
        self.run = store.run
        store.close()
        self.server = self._serve()

    def _serve(self):
        return Server(
            self.folder / "run", {"online": 4096}, public=f"ipc://{self.folder}/public",
            local=f"ipc://{self.folder}/local", inference="tcp://127.0.0.1:1",
        )  # fmt: skip

    def close(self):
        self.begin()
        self.server.close()

    def begin(self):
        """A new history: other names, nothing on its way."""
        for _, outbox in getattr(self, "clients", {}).values():
            outbox.close()
        self.server.updates.forget(float("inf"))
        self.disk_fails = False
        self._commit(0, None)
        self.played += 1
        self.lives, self.clients = {}, {}  # of each client: its starts, its (stream, outbox)
        self.up, self.down, self.current, self.welcomed = {}, {}, {}, set()  # of each link; its clients
        self.identities, self.sent = {}, []  # of each link; (identity, message) of the server since the last action

    @property
    def living(self):
        """The routing ids of the connections whose client has not left them."""
        return {self.identities[key] for key in self.current.values() if key in self.identities}

    # -- names of this history: "a0" is the first life of client 0
    def session(self, name):
        return f"{self.played:06d}{name}"

    def act(self, action, state):
        name, who = action
        getattr(self, f"_{name.replace(' ', '_')}")(who, state)
        for key, identity in self.identities.items():
            self.down[key] += _ordered([message for to, message in self.sent if to == identity])
        self.sent.clear()
        for key in set(self.identities) - {link.key for link in state.links}:
            del self.identities[key]

    def send(self, _, identity, message):
        """In the place of the server's sockets."""
        self.sent.append((identity, m.decode([bytes(frame) for frame in m.encode(message)])))

    def _start(self, who, _):
        self.lives[who] = self.lives.get(who, -1) + 1
        outbox = Outbox(self.folder / f"outbox-{self.played}-{who}", 1 << 20)
        self.clients[who] = SendQueue(outbox, self.session(f"{'ab'[who]}{self.lives[who]}"), self.spec), outbox

    def _crash(self, who, _):
        self._cut(who, _)
        self.clients.pop(who)[1].close()

    def _push(self, who, state):
        stream, name = self.clients[who][0], f"{'ab'[who]}{self.lives[who]}"
        start = state.clients[who].made[-1] - 1
        stream.put(self.make_segment(self.session(name), 0, start, 1))
        stream.move_to_outbox()

    def _connect(self, who, state):
        stream, outbox = self.clients[who]
        key = self.current[who] = (who, state.clients[who].link)
        actor, mine = f"arm {self.played}", self.session(f"{'ab'[who]}{self.lives[who]}")
        hello = m.Hello(
            m.PROTOCOL, "actor", actor, mine, outbox.id, outbox.run, self.spec.to_dict(), stream.earlier
        )  # fmt: skip
        self.up[key], self.down[key] = [hello], []
        self.identities[key] = os.urandom(8)

    def _cut(self, who, _):
        self.current.pop(who, None)
        self.welcomed.discard(who)

    def _send(self, who, _):
        self.up[self.current[who]].extend(self.clients[who][0].pushes())

    def _stall(self, who, _):
        stream_module.STALL = -1.0
        self._send(who, _)
        stream_module.STALL = float("inf")

    def _up(self, key, _):
        frames, identity = [bytes(frame) for frame in m.encode(self.up[key].pop(0))], self.identities[key]
        self.server._take(self.server.public, zmq.Frame(identity), frames)
        self.server.welcomes.send()  # as the turn goes on
        while self.server.intake.has_work:
            self.server.intake.work()

    def _lose_up(self, key, _):
        self.up[key].pop(0)

    def _repeat(self, key, _):
        self.up[key].insert(0, self.up[key][0])

    def _lose_down(self, key, _):
        self.down[key].pop(0)

    def _down(self, key, _):
        """As network.py and connection.py handle it."""
        who, message = key[0], self.down[key].pop(0)
        if isinstance(message, m.Failed):
            if message.final:
                self.clients.pop(who)[1].close()
            if message.final or message.kind == "Disconnected" or who not in self.welcomed:
                self._cut(who, None)
            return
        stream, outbox = self.clients[who]
        if isinstance(message, m.Ack):
            stream.acknowledge(message)
            return
        outbox.bind(message.run)
        stream.resume(message.expected, message.max_unacknowledged)
        self.welcomed.add(who)
        self.up[key].append(m.Heartbeat({}))

    def _commit(self, _, __):
        self.server.keeper._next_reopen = 0.0
        self.server.intake.commit()

    def _break_disk(self, _, __):
        self.disk_fails = True

    def _mend(self, _, __):
        self.disk_fails = False

    def _kill_server(self, _, __):
        """What was not committed is gone, and every link."""
        self.identities, self.current, self.welcomed = {}, {}, set()
        self.server.close()
        self.server = self._serve()

    def _forget(self, _, __):
        self.server.updates.forget(float("inf"))

    # -- what can be seen
    def seen(self):
        """The same shape as `shown` gives for the model."""
        length = len(self.session(""))
        clients = {who: _spans(outbox, length) for who, (_, outbox) in self.clients.items()}
        links = {
            key: ([_plain(message, length) for message in self.up[key]],
                  [_plain(message, length) for message in self.down[key]] if key in self.current.values() else [])
            for key in self.identities
        }  # fmt: skip
        store, sessions = self.server.store, {}
        if not self.server.keeper.degraded:
            mine = [session for session in store.sessions.values() if session.session.startswith(self.session(""))]
            durable = store.index.sessions()
            for one in sorted(mine, key=lambda session: session.position):
                kept = durable[one.session]
                sessions[one.session[length:]] = one.expected, kept.expected, kept.closed
        return clients, links, bool(self.server.keeper.degraded), sessions

    def rows(self):
        """{session: [index of each of its steps, in the order of the store]}, for the sessions of this history."""
        store = self.server.store
        layout = store.rings["online"].layout
        steps = layout.steps(store.folder / "online")[: store.sources["online"].head]
        ids = {row[0]: row[1] for row in store.index.catalog(0, 100_000)[1]}
        found = {}
        for step in steps:
            if (id := ids[int(step["episode"])]).startswith(self.session("")):
                found.setdefault(id.removeprefix(self.session("")), []).append(int(step["index"]))
        return found


def _ordered(messages):
    """Acks that one commit gave are in no order."""
    if all(isinstance(message, m.Ack) for message in messages):
        return sorted(messages, key=lambda ack: ack.session)
    return messages


def _spans(outbox, length):
    return [(session[length:], first, end) for session, (first, end) in outbox.sessions.items()]


def _plain(message, length):
    match message:
        case m.Hello():
            earlier = tuple((session[length:], last) for session, last in message.earlier)
            return "hello", message.session[length:], earlier
        case m.Push():
            ((seq, _),) = m.records(*message.parts)
            return "push", message.session[length:], seq
        case m.Heartbeat():
            return ("beat",)
        case m.Welcome():
            return "welcome", tuple((session[length:], seq) for session, seq in message.expected)
        case m.Ack():
            return "ack", message.session[length:], message.expected, message.resend
        case m.Failed():
            return "failed", message.kind, message.final
    raise AssertionError(message)


def shown(state: State):
    """What of the model's state can be seen in the implementation."""
    clients = {
        who: [(span.session, span.first, span.end) for span in client.spans]
        for who, client in enumerate(state.clients) if client.state == "alive"
    }  # fmt: skip
    links = {link.key: (list(link.up), list(link.down)) for link in state.links}
    sessions = {session.name: (session.expected, session.durable, session.closed) for session in state.server.sessions}
    return clients, links, state.server.degraded, {} if state.server.degraded else sessions
