"""What those who share a key, or the server with a flood, cost each other."""

import pytest
import zmq
from serl_client import messages as m

from serl_launcher.service import access, intake
from serl_launcher.service import server as module
from serl_launcher.service.connections import FLEET, GUEST_BYTES, WINDOW
from serl_launcher.service.peers import KeyOwner
from tests.shared.data import make_segment

from .test_limits import Turns, outcomes, session_of


@pytest.fixture
def turns(tmp_path, spec, monkeypatch):
    made = Turns(tmp_path, spec, monkeypatch)
    yield made
    made.server.close()


@pytest.mark.parametrize("flood", ["records", "messages"])
def test_a_group_ends_soon_after_a_record_of_who_brings_little(turns, monkeypatch, flood):
    monkeypatch.setattr(intake, "GROUP_S", 2.0)
    turns.welcome(0, 1)
    if flood == "records":
        turns.push(0, *outcomes(9_000))
        turns.push(1, make_segment("x", directive=turns.number))
        turns.server.intake.work()
        assert 0 < turns.store.sessions[session_of(0)].expected < access.RECORDS
    else:
        turns.push(1, make_segment("x", directive=turns.number))
        said, beat = [], [zmq.Frame(bytes(frame)) for frame in m.encode(m.Heartbeat({}))]
        monkeypatch.setattr(module, "received", lambda _: said.append(1) or [zmq.Frame(b"client 0"), *beat])
        turns.server._drain(turns.server.public, most=20_000)
        assert len(said) < 20_000
    turns.server.intake.commit()
    assert [ack.expected for ack in turns.got(1, m.Ack)] == [1]
    assert not turns.server.intake.is_awaited


def test_a_key_has_no_more_waiting_for_many_connections_than_for_one(turns, monkeypatch):
    monkeypatch.setattr(access, "OPEN", KeyOwner("arm", "operator"))
    monkeypatch.setattr(intake, "MAX_UNACKNOWLEDGED", 1 << 12)
    monkeypatch.setattr(access, "RECORDS", 1)
    clients = range(20)
    turns.welcome(*clients)
    for client in clients:
        turns.push(client, *outcomes(50))
    assert 0 < sum(peer.queued for peer in turns.server.peers.values()) <= 4 << 12
    assert turns.server.access.refusals.counts.keys() == {"too fast"}
    monkeypatch.setattr(access, "RECORDS", 10**9)
    turns.work()
    for client in clients:  # whose records found no room is asked for them again
        (ack,) = turns.got(client, m.Ack)
        assert (ack.expected, ack.resend) in [(50, False), (0, True)]
        turns.push(client, *outcomes(50), begin=ack.expected)
        turns.work()
    assert {turns.store.expected(session_of(client)) for client in clients} <= {50, 100}


def test_the_actors_of_a_key_share_what_may_be_on_its_way_so_that_all_windows_fit_into_what_may_be_unread(
    turns, monkeypatch
):
    monkeypatch.setattr(access, "OPEN", KeyOwner("arm", "operator"))
    monkeypatch.setattr(turns.server.access.connections, "_unread", lambda _: 0)
    guests, windows = turns.server.access.connections.places.guests, []
    for client in range(FLEET + 4):
        guests[client] = "arm"
        turns.welcome(client)
        windows.append(turns.got(client, m.Welcome)[0].max_unacknowledged)
    assert windows[:2] + windows[FLEET:] == [WINDOW, WINDOW // 2] + [WINDOW // FLEET] * 4
    assert sum(windows) < GUEST_BYTES
    guests.clear()


def test_a_key_brings_no_more_by_many_connections_than_by_one(turns, monkeypatch):
    watched, cut = turns.server.access.connections, []
    monkeypatch.setattr(watched, "_has_keys", True)
    monkeypatch.setattr(watched, "_unread", lambda descriptor: (GUEST_BYTES >> 3) + descriptor)
    monkeypatch.setattr(watched, "_cut", lambda descriptor, *_: cut.append(descriptor))
    watched.places.guests |= {number: "arm" for number in range(7)} | {7: "other", 8: "other"}
    watched._look()
    assert not cut
    watched.places.guests |= {9: "arm"}
    watched._look()
    assert cut == [9]
    watched.places.guests.clear()
