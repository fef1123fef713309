"""The connections of a public socket: who has a place, what may wait unread on either side, and whose a message is."""

import contextlib
import resource
import socket
import time
import types
from hashlib import sha256

import pytest
from serl_client import messages as m
from serl_client.connection import received
from serl_client.errors import ServerFailed

from serl_launcher.service import access as module
from serl_launcher.service import connections
from serl_launcher.service.access import AccessControl
from serl_launcher.service.connections import CONNECTIONS
from tests.faults.fuzzing import hostile
from tests.shared.common import PATIENCE, free_port, until


@pytest.mark.slow
@pytest.mark.parametrize("has_keys", [False, True])
def test_whoever_says_nothing_takes_the_place_of_nobody_else(keys, serve, monkeypatch, has_keys):
    """A thousand silent sockets of one address, while twenty clients of another one come."""
    monkeypatch.setattr(module, "HANDSHAKE_MS", 600_000)
    served, key = serve(keys=keys if has_keys else None), "eye" if has_keys else None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with served.link("viewer", "eye", key=key) as first, contextlib.ExitStack() as stack:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        first.call(m.Status(), PATIENCE)
        for count in range(1000):
            silent = socket.create_connection(("127.0.0.1", served.port), PATIENCE, ("127.0.0.2", 0))
            stack.enter_context(silent)
            if count % 50 == 0:
                link = stack.enter_context(served.link("viewer", f"eye/{count}", key=key))
                assert until(lambda link=link: link.call(m.Status(), PATIENCE)).report["connections"] <= 2 * CONNECTIONS
        until(lambda: served.refusals().get("too many connections", 0) >= 1000 - CONNECTIONS)
        first.call(m.Status(), PATIENCE)
    until(lambda: served.report()["connections"] == 0)


def test_of_too_many_clients_the_newest_of_the_key_with_most_goes_and_newcomers_of_that_key_are_told(
    keys, serve, monkeypatch
):
    monkeypatch.setattr(connections, "CONNECTIONS", 3)
    served = serve(keys=keys)
    with contextlib.ExitStack() as stack:
        left = [stack.enter_context(served.link("viewer", f"left/{number}", key="left")) for number in range(4)]
        for link in left[:3]:
            link.call(m.Status(), PATIENCE)
        with pytest.raises(ServerFailed, match="3 clients already"):
            left[3].call(m.Status(), PATIENCE)
        left[3].close()
        eye = stack.enter_context(served.link("viewer", "eye", key="eye"))
        eye.call(m.Status(), PATIENCE)
        until(lambda: left[2].receive() is None and not left[2].connected)
        assert all(link.call(m.Status(), PATIENCE) for link in (left[0], left[1], eye))


@pytest.mark.parametrize("limit", ["STRANGER_BYTES", "GUEST_BYTES"])
def test_a_message_that_never_ends_is_cut_before_it_takes_the_memory(serve, monkeypatch, limit):
    monkeypatch.setattr(connections, limit, 2 << 20)
    served = serve()
    with served.link("viewer", "eye") as link, hostile.Peer(served.port) as peer:
        link.call(m.Status(), PATIENCE)
        assert limit == "STRANGER_BYTES" or (peer.send(hostile.VALID) and peer.read())
        until(lambda: not peer.send(hostile.frame(bytes(1 << 16), hostile.MORE)))
        until(lambda: served.refusals() == {"too much unread": 1})
        link.call(m.Status(), PATIENCE)


def test_of_answers_that_nobody_reads_so_many_bytes_wait_and_no_more_are_made_until_they_are_read(serve, spec):
    served, weights = serve(), bytes(1 << 20)
    hello = {**hostile.HELLO, "role": "actor", "session": "e" * 32, "outbox": "box", "spec": spec.to_dict()}
    asked = {"type": "WeightsRequest", "sha256": sha256(weights).hexdigest(), "part": 0, "request": 1}
    request = hostile.message(hostile.header(None, **asked))
    with hostile.Peer(served.port) as peer:
        assert peer.send(hostile.message(hostile.header(None, **hello)))
        served.publish(weights)
        assert peer.send(60 * request)
        until(lambda: served.refusals().get("too much unread"))
        held = served.server.access.connections._held.values()
        refusals = 60 * 1000  # bytes at most: what is small is sent in any case
        assert max(each.sent - each.got for each in held) <= connections.UNHEARD_BYTES + refusals
        assert peer.is_open()  # and it has read all
        assert peer.send(request)
        assert len(peer.read(len(weights))) >= len(weights)


def test_the_memory_of_what_came_and_went_is_given_back(serve, monkeypatch):
    given = []
    monkeypatch.setattr(connections, "TRIM_BYTES", 1 << 20)
    monkeypatch.setattr(connections, "LIBC", types.SimpleNamespace(malloc_trim=given.append))
    with serve().link("viewer", "eye") as link:
        link.call(m.Status(), PATIENCE)
        assert not given
        until(lambda: link.send(m.Heartbeat({"text": "x" * 7900})) and given)
    assert given[0] == 0


@pytest.fixture
def door():
    """A public socket that nobody serves but the test."""
    access = AccessControl(f"tcp://127.0.0.1:{free_port()}", None)
    yield access
    access.context.destroy(linger=0)


def test_a_key_waits_for_none_of_the_messages_of_another_that_cost_more(keys, serve):
    served, heard = serve(keys=keys), []
    served.stop()
    access, queue = served.server.access, served.server.queue

    def handle(_, identity, frames):
        heard.append(access.account(identity))
        end = time.thread_time() + 1e-3
        while time.thread_time() < end:
            pass

    with contextlib.ExitStack() as stack:
        for number in range(9):
            key, count = ("left", 20) if number else ("right", 2)
            link = stack.enter_context(served.link("viewer", f"{key}/{number}", key=key))
            link._open()
            for _ in range(count):
                link.send(m.Heartbeat({}))
        total = 8 * 21 + 3
        until(
            lambda: access.turn() or queue.fill() or sum(len(each.waiting) for each in queue._lines.values()) == total
        )
        while queue.serve(handle):
            pass
    right = min(set(heard), key=heard.count)
    assert len(heard) == total
    assert [number for number, key in enumerate(heard) if key == right][-1] < 9, "libzmq alone would end with it at 20"


def knock(door):
    """A peer that shakes hands, and lies about when it was let in; and the descriptors of the connections there are."""
    before = len(door.connections.places)
    peer = hostile.Peer(int(door.socket.last_endpoint.rpartition(b":")[2]), greeted=False)
    lie = b"\x08Admitted" + bytes([0, 0, 0, 4]) + b"1000"
    assert peer.send(hostile.GREETING + hostile.frame(hostile.READY + lie, hostile.COMMAND))
    until(lambda: door.turn() or len(peer.socket.recv(100, socket.MSG_PEEK)) > len(hostile.GREETING))
    assert peer.send(hostile.VALID)
    until(lambda: door.turn() or len(door.connections.places) > before)
    return peer, list(door.connections.places)


def test_what_a_connection_left_unread_is_not_taken_for_that_of_the_next_one_with_its_descriptor(door):
    gone, descriptors = knock(door)
    until(lambda: door.turn() or door.socket.poll(0))
    gone.socket.close()
    until(lambda: door.turn() or not door.connections.places)
    peer, same = knock(door)
    assert same == descriptors
    with peer:
        for guests in (set(), set(same)):
            for _ in ("Hello", "Heartbeat"):
                identity, *frames = until(lambda: door.turn() or received(door.socket))
                door.admit(identity, [frame.buffer for frame in frames])
            door.connections.welcome(identity, "a key")
            assert door.connections.places.guests.keys() == guests
            assert door.connections.living == ({identity.bytes} if guests else set())


def test_no_connection_is_cut_for_the_one_that_had_its_descriptor_before(door):
    gone, (descriptor,) = knock(door)
    gone.socket.close()
    until(lambda: door.connections.monitor.poll(0))  # that it has, and nobody looks
    with hostile.Peer(int(door.socket.last_endpoint.rpartition(b":")[2]), greeted=False) as peer:
        until(lambda: connections._address(descriptor))
        door.connections._cut(descriptor, "too many connections", "")
        assert peer.is_open()


def test_of_many_newcomers_few_are_looked_at_at_once_and_who_has_gone_by_then_takes_nobodys_place(door):
    honest, _ = knock(door)
    port, watched = int(door.socket.last_endpoint.rpartition(b":")[2]), door.connections
    flood = [hostile.Peer(port, greeted=False) for _ in range(connections.CONNECTIONS + 10)]
    for peer in flood:
        peer.socket.close()
    until(lambda: watched._receive() or (watched._accepted == len(flood) + 1 and not watched._new))
    late = [hostile.Peer(port, greeted=False) for _ in range(3)]
    until(lambda: watched._receive() or len(watched._new) == 3)
    for count in range(2, 5):
        watched.turn(end=0.0)
        assert len(watched.places) == count
    assert honest.is_open()
    assert not door.refusals.counts
    for peer in (honest, *late):
        peer.socket.close()
