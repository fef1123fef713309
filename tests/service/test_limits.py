"""What one client can cost the others: a server whose turns the test takes by hand, and limits of what is kept."""

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import zmq
from serl_client import ConfigError, Feature, Outcome, Segment, Spec, Stamp, wire
from serl_client import messages as m
from serl_client.episode import MAX_NUMBER

from serl_launcher.service import access, intake, peers
from serl_launcher.service.peers import Peer, cost
from serl_launcher.service.router import Router
from serl_launcher.service.server import Server
from serl_launcher.store import episodes, sessions
from serl_launcher.store.index import Index
from serl_launcher.store.store import Store
from tests.shared.clients import push_of
from tests.shared.common import PATIENCE, free_port
from tests.shared.data import BAD_NAMES, make_segment

# A client leaves 101,000 messages to a socket that nobody reads, says how long it lives, and breaks off.
BROKEN_OFF = """
import sys, time, zmq
from serl_launcher.service.router import bound
context, clients = zmq.Context(), zmq.Context()
router, dealer = bound(context, sys.argv[1]), clients.socket(zmq.DEALER)
for option, value in ((zmq.HEARTBEAT_IVL, 50), (zmq.HEARTBEAT_TTL, 200), (zmq.SNDHWM, 0), (zmq.LINGER, 0)):
    dealer.set(option, value)
dealer.connect(sys.argv[1])
for _ in range(101_000):
    dealer.send(b"x")
time.sleep(1.0)
clients.destroy(linger=0)
time.sleep(0.5)
while router.poll(200):
    router.recv()
"""


class Turns:
    """A server without a loop. Clients are numbers; what it sends them is in `sent`."""

    def __init__(self, folder, spec, monkeypatch):
        self.spec, self.sent = spec, []
        Store.create(folder / "store", spec, {"online": 4096}).close()
        self.server = Server(
            folder, {"online": 4096}, public=f"ipc://{folder}/public", local=f"ipc://{folder}/local", inference=""
        )
        self.store = self.server.store
        self.number = self.store.direct({"into": "online", "phase": "practise", "mode": "collect"})
        monkeypatch.setattr(Router, "tell", lambda _, *told: self.sent.append(told[:2]) is None)

    def say(self, client, message):
        frames = [bytes(frame) for frame in m.encode(message)]
        self.server._take(self.server.public, zmq.Frame(b"client %d" % client), frames)

    def hello(self, client, session=None, earlier=(), paced=False):
        name = f"arm/{client}"
        self.say(client, m.Hello(m.PROTOCOL, "actor", name, session or session_of(client), f"box of {name}", "",
                                 self.spec.to_dict(), earlier, paced))  # fmt: skip

    def push(self, client, *records, begin=0):
        self.say(client, push_of(session_of(client), *records, begin=begin))

    def work(self):
        """Take turns until nothing waits; then commit."""
        while self.server.intake.has_work:
            self.server.intake.work()
        self.server.intake.commit()

    def got(self, client, kind):
        return [message for to, message in self.sent if to == b"client %d" % client and isinstance(message, kind)]

    def welcome(self, *clients):
        for client in clients:
            self.hello(client)
        self.server.welcomes.send()


def session_of(client):
    return f"{client:032x}"


@pytest.fixture
def turns(tmp_path, spec, monkeypatch, exits):
    made = Turns(tmp_path, spec, monkeypatch)
    exits.callback(made.server.close)
    return made


def outcomes(count):
    return [Outcome(f"e{i}", True) for i in range(count)]


def test_what_waits_for_its_turn_is_staged_in_order_and_all_of_it(turns, monkeypatch):
    monkeypatch.setattr(access, "RECORDS", 10**9)
    monkeypatch.setattr(intake, "SLICE_S", 0.0)  # one record at each turn
    turns.welcome(0, 1)
    for client in (0, 1):
        for begin in range(0, 90, 30):
            turns.push(client, *outcomes(30), begin=begin)
    turns.work()
    assert [turns.got(client, m.Ack)[-1].expected for client in (0, 1)] == [90, 90]
    assert not turns.got(0, m.Failed)


def test_who_has_had_a_turn_comes_last_in_the_next_group(turns, monkeypatch):
    monkeypatch.setattr(intake, "GROUP_S", 1e-6)  # one turn in each group
    monkeypatch.setattr(intake, "SLICE_S", 0.0)
    clients = range(3)
    turns.welcome(*clients)
    for client in clients:
        turns.push(client, *outcomes(100))
    before = [turns.store.expected(session_of(client)) for client in clients]
    for _ in clients:
        turns.server.intake.work()
    assert all(turns.store.expected(session_of(client)) > before[client] for client in clients)


def test_a_farewell_waits_for_what_was_said_before_it(turns, clock):
    turns.welcome(0)
    turns.push(0, *outcomes(3_000))
    turns.say(0, m.Bye())
    while turns.server.intake.has_work:
        turns.server.intake.work()
        clock.advance(1.1)
    assert (turns.store.expected(session_of(0)), turns.server.peers) == (3_000, {})


def test_records_are_limited_by_their_number_and_wait_for_the_next_second(turns, monkeypatch, clock):
    monkeypatch.setattr(access, "RECORDS", 100)
    turns.welcome(0)
    turns.push(0, *outcomes(250))
    for expected in (100, 200, 250):
        turns.work()
        assert turns.store.expected(session_of(0)) == expected
        clock.advance(1.1)


def test_more_than_the_window_holds_is_not_kept_and_asked_for_again(turns, monkeypatch):
    monkeypatch.setattr(intake, "MAX_UNACKNOWLEDGED", 1 << 12)
    monkeypatch.setattr(access, "RECORDS", 1)
    turns.welcome(0)
    for begin in range(0, 1000, 50):
        turns.push(0, *outcomes(50), begin=begin)
    (peer,) = turns.server.peers.values()
    assert peer.queued <= 4 << 12
    assert turns.server.access.refusals.counts.keys() == {"too fast"}
    monkeypatch.setattr(access, "RECORDS", 10**9)
    turns.work()
    reached = turns.store.expected(session_of(0))
    turns.push(0, *outcomes(50), begin=950)
    turns.work()
    assert (turns.got(0, m.Ack)[-1].expected, turns.got(0, m.Ack)[-1].resend) == (reached, True)


def test_an_outcome_that_comes_again_is_no_outcome_more_of_its_episode(turns, monkeypatch):
    monkeypatch.setattr(episodes, "MOST_OUTCOMES", 3)
    monkeypatch.setattr(access, "OPEN", replace(access.OPEN, role="actor"))
    turns.welcome(0)
    for _ in range(2):
        turns.push(0, *[Outcome("e0", True)] * 3)
        turns.work()
    assert not turns.got(0, m.Failed)


def test_a_push_holds_no_more_in_several_arrays_than_in_one(turns, monkeypatch):
    monkeypatch.setattr(intake.wire, "MAX_ARRAY", 999)
    turns.welcome(0)
    data = np.frombuffer(push_of(session_of(0), *outcomes(2)).arrays["records"], np.uint8)
    turns.say(0, m.Push(session_of(0), {"0": data[:50], "1": data[50:], "2": np.zeros(900, np.uint8)}))
    assert "a Push holds at most" in turns.got(0, m.Failed)[-1].text
    turns.say(0, m.Push(session_of(0), {"0": data[:50], "1": data[50:]}))
    turns.work()
    assert turns.store.expected(session_of(0)) == 2


def test_a_gap_that_follows_another_within_one_group_is_told_too(turns):
    turns.welcome(0)
    segments = [make_segment("x", start=4 * i, directive=turns.number) for i in range(4)]
    turns.push(0, segments[1], begin=1)
    turns.work()
    for seq in (0, 2):
        turns.push(0, segments[seq], begin=seq)
    turns.work()
    assert [(ack.expected, ack.resend) for ack in turns.got(0, m.Ack)] == [(0, True), (1, True)]


def test_what_a_peer_was_told_before_the_disk_failed_counts_no_more_after_it(turns):
    """Its records of the meantime were dropped: a gap is told again, and no source is taken for full."""
    turns.welcome(0, 1)
    segments = [make_segment("x", start=4 * i, directive=turns.number) for i in range(3)]
    turns.push(0, segments[1], begin=1)
    turns.work()
    turns.server.peers[turns.server.public, b"client 1"].incoming[session_of(1)].full = "online"
    turns.server.keeper.degrade(OSError(28, "No space left on device"))
    turns.server.keeper._next_reopen = 0.0
    turns.server.intake.commit()
    turns.sent.clear()
    turns.push(0, segments[2], begin=2)
    turns.push(1, make_segment("y", directive=turns.number))
    turns.work()
    assert [(ack.expected, ack.resend) for ack in turns.got(0, m.Ack)] == [(0, True)]
    assert turns.got(1, m.Ack)[-1].expected == 1


# -- Hello


def test_all_hellos_of_a_turn_cost_one_commit_and_one_that_says_nothing_new_none(turns, monkeypatch):
    commits, commit = [], Index.commit

    def counted(index):
        commits.append(index._db.in_transaction)
        commit(index)

    monkeypatch.setattr(Index, "commit", counted)
    turns.welcome(*range(50))
    assert sum(commits) == 1
    assert all(turns.got(client, m.Welcome) for client in range(50))
    turns.hello(7)
    assert (sum(commits), len(turns.got(7, m.Welcome))) == (1, 2)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        *(({name: bad}, "printable") for name in ("actor", "session", "outbox") for bad in BAD_NAMES),
        *(({"earlier": [pair]}, "pairs") for pair in (["b"], ["b", "1"], ["b", True], ["b", 1, 1], "b1", 7)),
        *(({"earlier": [[bad, 1]]}, "printable") for bad in BAD_NAMES),
        ({"earlier": [["a", 1]]}, "besides its own"),
        ({"earlier": [["b", 1], ["b", 2]]}, "each of them once"),
        ({"earlier": [[f"b{i}", 1] for i in range(m.MAX_EARLIER + 1)]}, "names at most"),
        *(({"earlier": [["b", last]]}, "a number from 0 on") for last in (-1, MAX_NUMBER)),
    ],
)  # fmt: skip
def test_a_hello_that_nobody_may_say_is_one_sentence(change, sentence):
    hello = m.Hello(m.PROTOCOL, "actor", "arm", "a", "box")
    peers.check_hello(hello, None, run="")
    with pytest.raises(m.MessageError, match=sentence):
        peers.check_hello(replace(hello, **change), None, run="")


def test_a_storm_of_hellos_is_told_to_come_again(turns):
    turns.server.access._second = float("inf")
    for i in range(access.LIMITS[m.Hello] + 10):
        turns.hello(0, session=session_of(1000 + i))
    turns.server.welcomes.send()
    told = turns.got(0, m.Failed)
    assert len(told) == 10
    assert (told[0].kind, told[0].final, "too many Hellos" in told[0].text) == ("ServerFailed", False, True)
    turns.server.access._counts.clear()
    lives = [[session_of(5000 + i), 0] for i in range(m.MAX_EARLIER)]
    for _ in range(3):  # each one that is named counts
        turns.hello(0, earlier=lives)
    assert len(turns.got(0, m.Failed)) == 12


def test_lives_without_a_record_are_forgotten_and_the_others_are_not(turns, monkeypatch):
    monkeypatch.setattr(sessions, "EMPTY", 20)
    turns.welcome(0)
    turns.push(0, make_segment("x", directive=turns.number))
    turns.server.intake.commit()
    turns.welcome(*range(1, 100))
    assert len(turns.store.sessions) == len(turns.store.index.sessions()) == 21
    assert turns.store.index.sessions()[session_of(0)].expected == 1
    turns.say(1, m.Heartbeat({}))
    assert [failed.kind for failed in turns.got(1, m.Failed)] == ["Disconnected"]
    turns.say(99, m.Heartbeat({}))
    turns.welcome(1)
    places = [state.position for state in turns.store.sessions.values()]
    assert len(set(places)) == len(places)
    assert max(places) == 100


def test_an_actor_whose_life_was_forgotten_is_told_of_the_run_like_the_others(turns, monkeypatch):
    """Also where a record of it waits for its turn."""
    monkeypatch.setattr(sessions, "EMPTY", 1)
    turns.store.direct({"into": "online", "phase": "practise", "mode": "collect", "paced": True})
    turns.hello(0, paced=True)
    with monkeypatch.context() as patch:
        patch.setattr(access, "RECORDS", 0)
        turns.push(0, *outcomes(1))
    turns.welcome(1)
    turns.work()
    turns.server.updates.send()
    assert not turns.got(0, m.Failed)
    assert [turns.got(client, m.StateUpdate)[-1].step_limit for client in (0, 1)] == [0, None]


def test_closing_what_is_over_looks_at_one_outbox_only(turns):
    turns.welcome(*range(30))
    for _ in range(3):
        assert turns.store.lives.over(session_of(29), ()) == []
    turns.hello(3, session=session_of(333))
    turns.server.welcomes.send()
    assert turns.store.lives.over(session_of(333), ()) == [session_of(3)]


# -- status, and the size of things


def test_a_status_fits_however_much_the_clients_report(turns):
    reports = [{"text": "x" * 7900}, dict.fromkeys(map(str, range(1000))), {"rate": 1.0}]
    for i in range(256):
        hello, report = m.Hello(m.PROTOCOL, "actor", f"{i:03}" + "\u00e9" * 197), reports[i % 3]
        peer = Peer(None, b"%d" % i, hello, None, 0.0, report=report, cost=cost(report))
        turns.server.peers[None, b"%d" % i] = peer
    asking = Peer(None, b"", m.Hello(m.PROTOCOL, "viewer", "eye"), None, 0.0)
    status = m.decode(m.encode(turns.server._status(asking, m.Status())))
    turns.server.peers.clear()
    clients = status.report["clients"]
    assert len(clients) == 256
    assert sum("rate" in client for client in clients) == 85, "small reports are all there"
    assert any("text" in client for client in clients)
    assert any("left_out" in client for client in clients)


@pytest.mark.slow
def test_a_connection_that_breaks_off_with_a_long_queue_does_not_abort_the_process():
    command = [sys.executable, "-c", BROKEN_OFF, f"tcp://127.0.0.1:{free_port()}"]
    assert subprocess.run(command, timeout=4 * PATIENCE, check=False).returncode == 0


def camera(*shape):
    return Feature(shape, "uint8")


def test_a_row_that_could_never_arrive_is_refused_with_its_size_and_the_limit():
    images = {f"observation.images.{side}": camera(2160, 3840, 3) for side in ("left", "right", "top")}
    with pytest.raises(ConfigError, match=r"has 142\.4 MiB .* at most 63 MiB .*left alone has 23\.7 MiB"):
        Spec(images, Feature((2,), low=-1, high=1), 30.0)
    Spec({name: camera(1080, 1920, 3) for name in images}, Feature((2,), low=-1, high=1), 30.0)
    scalars = {f"observation.{i}": Feature(()) for i in range(300)}
    with pytest.raises(ConfigError, match="at most 240 features, not 300"):
        Spec(scalars, Feature((2,), low=-1, high=1), 30.0)
    bounded = {f"observation.{i}": Feature((4096,), low=-1.5, high=1.5) for i in range(10)}
    with pytest.raises(ConfigError, match="at most 512 KiB"):
        Spec(bounded, Feature((2,), low=-1, high=1), 30.0)


def test_the_largest_row_that_is_accepted_arrives():
    size = (63 << 20) // 2 - 100
    spec = Spec({"observation.image": camera(size)}, Feature((2,), low=-1, high=1), 30.0)
    flags, zeros = np.zeros(1, bool), np.zeros(1, np.float32)
    segment = Segment(
        "e" * 200, 0, "t" * 200, Stamp(1, "p" * 200, 1), {"observation.image": np.zeros((2, size), np.uint8)},
        np.zeros((1, 2), np.float32), zeros, flags, flags, np.zeros(1), truncated=True,
    )  # fmt: skip
    segment.check(spec)
    frames = wire.joined(m.encode(push_of("e" * 32, segment)))
    assert max(map(len, frames)) <= wire.MAX_ARRAY
    assert len(list(m.records(*m.decode(frames).parts))) == 1
