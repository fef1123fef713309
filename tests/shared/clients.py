"""Clients for tests: an actor whose messages are sent by hand, and what pushes whole episodes with a TrainerClient."""

import numpy as np
from serl_client import messages as m
from serl_client.connection import Connection
from serl_client.errors import Disconnected, ServerFailed
from serl_client.keys import Key

from .common import until
from .data import make_episode


def push_of(session, *records, begin=0):
    """The Push of these records, numbered from `begin` on; a pair (seq, record) has its own number."""
    pairs = [each if isinstance(each, tuple) else (begin + i, each) for i, each in enumerate(records)]
    data = b"".join(bytes(part) for seq, record in pairs for part in m.encode_record(seq, record))
    return m.Push(session, {"records": np.frombuffer(data, np.uint8)})


class RawActor:
    """One session of an actor by hand, on a connection of its own; a context manager.

    `hear` files what has come: `expected` is the newest acknowledgement, `acks` are all of them, `failed` the refusals.
    """

    def __init__(
        self, address, spec, name="arm", *, session="a" * 32, outbox="box", earlier=(), paced=False, key=None,
        protocol=m.PROTOCOL, has_operator=False,
    ):  # fmt: skip
        self.session, self.expected, self.acks, self.failed = session, 0, [], []
        hello = m.Hello(protocol, "actor", name, session, outbox, "", spec.to_dict(), earlier, paced, has_operator)
        self.link = Connection(address, hello, Key.read(key) if key else None)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.link.close()

    def welcome(self):
        """The Welcome of a server that may still be starting, or making its store."""

        def welcomed():
            try:
                return self.link.hello(5.0)
            except (Disconnected, ServerFailed):
                return None

        return until(welcomed, why="nobody is let in")

    def push(self, seq, *records, session=None):
        self.link.send(push_of(session or self.session, *records, begin=seq))

    def hear(self):
        """Take in what has come; the seq that is expected next."""
        while (message := self.link.receive()) is not None:
            if isinstance(message, m.Ack):
                self.expected = message.expected
                self.acks.append((message.expected, message.resend))
            elif isinstance(message, m.Failed):
                self.failed.append(message)
        return self.expected

    def told(self, expected, resend=False):
        """Wait for this acknowledgement among those since the last call; forgets them."""
        until(lambda: (self.hear(), (expected, resend) in self.acks)[1], why=lambda: f"{self.acks}, {self.failed}")
        self.acks.clear()

    def refused(self):
        """Wait for a refusal; its text."""
        return until(lambda: (self.hear(), self.failed)[1])[-1].text


def push_all(client, records):
    """Push records as the client has room for them."""
    for record in records:
        until(lambda: client.has_room)
        client.push(record)


def own_name(client, number):
    """The name of an actor's episode, as its runner makes it."""
    return f"{client.actor}-{client.session[:8]}-{number:06d}"


def push_episodes(client, numbers, *, steps=8, **stamp):
    """Push whole episodes whose key is their number; every second one is a success."""
    for number in numbers:
        push_all(client, make_episode(own_name(client, number), number, steps=steps, **stamp))


def connected(client):
    """Wait until a TrainerClient is connected; raises what it was refused with."""
    until(lambda: client.connected or client.check())
    return client


def directed(client):
    """Wait until a TrainerClient has heard a directive."""
    until(lambda: client.state.directive["number"] > 0)
    return client
