"""What those who share a key, or the server with a flood, cost each other."""

import pytest
import zmq
from serl_client import messages as m

from serl_launcher.service import access, connections, fair_queue, intake
from serl_launcher.service.connections import GUEST_BYTES, LEAST_WINDOW, SENT, UNHEARD_BYTES, WINDOW, Connections, _Held
from serl_launcher.service.peers import KeyOwner
from tests.shared.data import make_segment

from .test_limits import Turns, outcomes, session_of


@pytest.fixture
def turns(tmp_path, spec, monkeypatch, exits):
    made = Turns(tmp_path, spec, monkeypatch)
    exits.callback(made.server.close)
    return made


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
        monkeypatch.setattr(fair_queue, "received", lambda _: said.append(1) or [zmq.Frame(b"client 0"), *beat])
        monkeypatch.setattr(fair_queue, "FRAMES", 40_000)
        turns.server._hear()
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
    monkeypatch.setitem(access.LIMITS, m.Hello, 1000)
    windows = []
    for client in range(88):
        turns.say(100 + client, m.Hello(m.PROTOCOL, "viewer", f"arm/eye {client}"))  # a viewer's is none of them
        turns.welcome(client)
        windows.append(turns.got(client, m.Welcome)[0].max_unacknowledged)
    assert windows[:8] == [WINDOW >> before for before in range(8)]
    assert {*windows[8:]} == {LEAST_WINDOW}
    assert sum(windows) < GUEST_BYTES


def test_the_records_of_a_key_take_turns_with_those_of_another_however_many_connections_bring_them(turns, monkeypatch):
    monkeypatch.setattr(intake, "GROUP_S", 1e-6)  # one turn in each group
    monkeypatch.setattr(intake, "SLICE_S", 0.0)
    clients = range(10)
    turns.welcome(*clients)
    for client, peer in enumerate(turns.server.peers.values()):
        peer.account = "left" if client else "right"
    for client in reversed(clients):
        turns.push(client, *outcomes(100))
    for _ in range(40):
        turns.server.intake.work()
    right, *left = (turns.store.expected(session_of(client)) for client in clients)
    assert abs(right - sum(left)) <= len(left)


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
    assert cut == [9, 6, 5, 4, 3], "those that have brought most, until half of what may be unread is left"
    watched.largest = GUEST_BYTES  # of a robot with so large images
    watched._look()
    assert cut == [9, 6, 5, 4, 3]
    watched.places.guests.clear()


def test_what_a_connection_had_brought_that_was_cut_is_not_handled(turns, monkeypatch):
    def ended(_):
        raise OSError("its descriptor is of nobody here")

    monkeypatch.setattr(connections, "_borrowed", ended)
    watched, queue, heard = turns.server.access.connections, turns.server.queue, []
    watched.places.guests[7], watched._held[7] = "arm", _Held(1, identity=b"cut")
    queue._lines["arm"] = line = fair_queue._Line()
    line.waiting.extend([[zmq.Frame(b"cut")], [zmq.Frame(b"another of the key")]])
    watched._cut(7, "too much unread", "more than it may")
    while queue.serve(lambda _, identity, frames: heard.append(identity.bytes)):
        pass
    assert heard == [b"another of the key"]
    watched._held.clear()


def test_what_was_taken_out_of_the_socket_and_waits_is_counted_with_what_was_not(turns, monkeypatch):
    watched, cut = turns.server.access.connections, []
    monkeypatch.setattr(access, "OPEN", KeyOwner("arm", "operator"))
    monkeypatch.setattr(access, "RECORDS", 0)
    monkeypatch.setattr(watched, "_has_keys", True)
    monkeypatch.setattr(watched, "_unread", lambda descriptor: GUEST_BYTES)
    monkeypatch.setattr(watched, "_cut", lambda descriptor, *_: cut.append(descriptor))
    turns.welcome(0)
    watched.places.guests |= {7: "arm", 8: "other"}
    watched._look()
    assert not cut
    turns.push(0, *outcomes(1))
    watched._look()
    assert cut == [7]
    watched.places.guests.clear()


def test_who_has_cost_a_share_of_a_second_waits_for_the_next_one_if_others_have_something_to_say(turns):
    queue, costs, heard = turns.server.queue, turns.server.access, []
    costs._spending = float("inf")  # when this second began
    for client in (b"0", b"1"):
        queue._lines.setdefault(client, fair_queue._Line()).waiting.append([zmq.Frame(client)])
    costs.spend(b"0", access.SHARE_S)
    assert not costs.is_dear(b"0"), "it has the server to itself"

    def serve():
        while queue.serve(lambda _, identity, frames: heard.append(identity.bytes)):
            pass
        return heard, queue.waits

    assert serve() == ([b"1"], False)
    costs._spending = 0.0
    assert (queue.waits, serve()) == (True, ([b"1", b"0"], False))


def test_the_records_of_who_has_cost_a_share_of_a_second_wait_for_the_next_one(turns):
    costs = turns.server.access
    costs._spending = float("inf")
    turns.welcome(0, 1)
    for client in (0, 1):
        costs.spend(f"arm/{client}", (1 - client) * access.SHARE_S)
    for client in (0, 1):
        turns.push(client, *outcomes(30))
    for staged in (0, 30):
        turns.work()
        assert [turns.store.expected(session_of(client)) for client in (0, 1)] == [staged, 30]
        costs._spending = 0.0


def test_what_is_sent_to_a_key_and_not_received_is_counted_for_all_its_connections(turns, monkeypatch):
    watched = turns.server.access.connections
    monkeypatch.setattr(watched, "_has_keys", True)
    monkeypatch.setattr(Connections, "_ask", lambda self, descriptor: self._held[descriptor])
    for number in range(SENT + 1):
        assert watched.has_room(b"%d" % number, UNHEARD_BYTES)
        watched._held[number], watched._descriptors[b"%d" % number] = _Held(number), number
        watched.places.guests[number] = "arm"
        assert watched.has_room(b"%d" % number, UNHEARD_BYTES) == (number < SENT)
        watched.sent(b"%d" % number, UNHEARD_BYTES if number < SENT else 0)
        assert not watched.has_room(b"0", 1)
    watched._held[0].got = 10
    assert (watched.has_room(b"1", 10), watched.has_room(b"1", 11)) == (True, False)
    watched.places.guests.clear()
    watched._held.clear()


def test_many_actors_with_a_limit_do_not_count_each_other_for_each_of_them(turns, monkeypatch):
    number = turns.store.direct({"into": "online", "phase": "practise", "mode": "collect", "paced": True})
    turns.server.updates.allowance = (number, 1000)
    asked, is_for = [], turns.store.directives.is_for
    monkeypatch.setattr(turns.store.directives, "is_for", lambda *who: asked.append(1) or is_for(*who))

    def shares(count):
        for client in range(count):
            turns.hello(client, paced=True)
        turns.server.welcomes.send()
        asked.clear()
        turns.server.updates.send()
        assert count <= len(asked) <= 3 * count
        return {peer.updated.step_limit for peer in turns.server.peers.values()}

    assert shares(50) == {20}
    assert shares(100) == {10}
