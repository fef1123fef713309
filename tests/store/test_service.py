"""Actors and the server as real processes on loopback: what is lost, doubled or blocked when something breaks.

What is known to lose data in other systems (E1, E2, ...) is in test_peer_faults.py.
"""

import dataclasses
import json
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import zmq
from serl_client import Feature, Outcome, Spec, wire
from serl_client import messages as m
from serl_client.client import TrainerClient
from serl_client.connection import Connection
from serl_client.errors import Disconnected, Refused, ServerFailed, TrainerError, VersionMismatch
from serl_client.outbox import Outbox

from serl_launcher.store import weights
from serl_launcher.store.layout import Layout
from serl_launcher.store.store import Store
from tests.shared.common import free_port

SERVE = """
import json, os, sys, errno
from pathlib import Path
from serl_launcher.store.server import serve
import serl_launcher.store.server as server
run_dir, capacities, public, local = Path(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3], sys.argv[4]
sync = os.fdatasync
def failing(fd):
    if (run_dir / "fail").exists():
        raise OSError(errno.ENOSPC, "No space left on device")
    sync(fd)
os.fdatasync = failing
stage = server.Store._stage_segment
def buggy(*arguments):
    stage(*arguments)
    if (run_dir / "raise").exists():
        (run_dir / "raise").unlink()
        raise RuntimeError("a bug, when half of a record was staged")
server.Store._stage_segment = buggy
serve(run_dir, capacities, public=public, local=local, inference="tcp://127.0.0.1:1")
"""


class ServerProcess:
    """A server in a process of its own that can be killed, stopped and started again."""

    def __init__(self, run_dir, **capacities):
        self.run_dir, self.port = run_dir, free_port()
        self.capacities = capacities or {"online": 20_000, "demo": 1000}
        self.address, self.local = f"tcp://127.0.0.1:{self.port}", f"ipc://{run_dir}/server"
        self.admin = Connection(self.local, m.Hello(m.PROTOCOL, "learner", "trainer"))
        run_dir.mkdir(exist_ok=True)
        self.start()

    def start(self):
        arguments = [str(self.run_dir), json.dumps(self.capacities), self.address, self.local]
        self.process = subprocess.Popen([sys.executable, "-c", SERVE, *arguments])

    def kill(self):
        self.process.kill()
        self.process.wait()
        self.admin.close()

    def signal(self, number):
        self.process.send_signal(number)

    def ask(self, message):
        """The answer to a message of the learner's role; waits for a server that is starting."""
        deadline = time.monotonic() + 20
        while True:
            try:
                return self.admin.call(message, 2.0)
            except TrainerError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)

    def direct(self, **body):
        return self.ask(m.Direct({"phase": "practise", "mode": "collect", "into": "online", **body}, None)).value

    def episodes(self):
        """{id: {field: value}} of all episodes that the server knows."""
        rows, page = [], self.ask(m.Sync(0, 0))
        while page.episodes:
            rows += page.episodes
            page = self.ask(m.Sync(page.revision, 0))
        return {row[1]: dict(zip(m.EPISODE, row, strict=True)) for row in rows}

    def close(self):
        self.admin.close()
        self.process.send_signal(signal.SIGCONT)
        self.process.terminate()
        self.process.wait(10)


@pytest.fixture
def server(tmp_path):
    made = ServerProcess(tmp_path / "run")
    yield made
    made.close()


@pytest.fixture
def connect(server, spec, tmp_path):
    """connect(name) -> a TrainerClient that has got a directive to collect."""
    opened = []

    def connect(name="arm", *, outbox=None, spec=spec, directed=True, **options):
        client = TrainerClient(
            server.address, actor=name, spec=spec, outbox=tmp_path / (outbox or f"outbox-{name}"), **options
        )
        client.__enter__()
        opened.append(client)
        if directed:
            wait_until(lambda: client.connected or client.check())
            server.direct()
            wait_until(lambda: client.directive["number"] > 0)
        return client

    yield connect
    for client in opened:
        client.close()


def wait_until(condition, timeout=15.0):
    """What the condition gives when it holds at last."""
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)
    return value


def episode(make_segment, number, *, client, steps=8):
    """The records of one episode, as a runner pushes them: outcome, then the last segment."""
    name, half = f"{client.actor}-{client.session[:8]}-{number:06d}", steps // 2
    return [
        make_segment(name, number, 0, half),
        Outcome(name, number % 2 == 0),
        make_segment(name, number, half, steps - half, ends="terminated"),
    ]


def push_all(client, records):
    for record in records:
        wait_until(lambda: client.has_room)
        client.push(record)


def stored(server, source="online"):
    """{episode id: [index, ...]} in the order in which the steps lie in the store, each row checked for its episode."""
    opened = Store(server.run_dir / "store")
    layout = opened.rings[source].layout
    steps, rows = layout.steps(opened.folder / source), layout.observations(opened.folder / source)
    ids = {row[0]: row[1] for row in opened.index.catalog(0, 100_000)[1]}
    found = {}
    for number in range(opened.sources[source].tail, opened.sources[source].head):
        record = steps[number % layout.capacity]
        name = ids[int(record["episode"])]
        assert rows["observation.state"][record["row"] % layout.rows][0] == int(name.rsplit("-", 1)[1])
        found.setdefault(name, []).append(int(record["index"]))
    opened.close()
    return found


def assert_whole(server, clients, count, steps=8):
    """Every episode of every client is there once, whole and in order."""
    found = stored(server)
    expected = {f"{c.actor}-{c.session[:8]}-{i:06d}" for c in clients for i in range(count)}
    assert set(found) == expected
    assert all(indices == list(range(steps)) for indices in found.values())


def test_what_an_actor_pushes_is_stored_once_and_in_order(server, connect, make_segment):
    client = connect()
    for i in range(50):
        push_all(client, episode(make_segment, i, client=client))
    assert client.drain(20)
    assert_whole(server, [client], 50)
    known = server.episodes().values()
    assert [e["success"] for e in known] == [1, 0] * 25
    assert all(e["closed"] and e["final"] and e["terminated"] for e in known)


def test_a_record_that_fails_is_answered_and_the_server_goes_on(server, connect, make_segment):
    good, bad = connect("good"), connect("bad")
    wrong = make_segment("x", 0, 5, 4)  # begins in the middle
    bad.push(wrong)
    with pytest.raises(Refused, match="came where the start of an episode was to come"):
        wait_until(lambda: bad.check())
    assert bad.pending[0] >= 1, "nothing was deleted"
    push_all(good, episode(make_segment, 0, client=good))
    assert good.drain(20)
    assert_whole(server, [good], 1)


def test_a_server_that_is_stopped_and_goes_on_has_everything_once(server, connect, make_segment):
    client = connect()
    server.signal(signal.SIGSTOP)
    for i in range(30):
        push_all(client, episode(make_segment, i, client=client))
    time.sleep(4.0)  # longer than the heartbeats' patience
    assert client.pending[0] == 90
    server.signal(signal.SIGCONT)
    assert client.drain(30)
    assert_whole(server, [client], 30)


def test_kill_of_the_server_again_and_again_loses_and_doubles_nothing(server, connect, make_segment):
    client, generator = connect(), np.random.default_rng(0)
    for i in range(120):
        push_all(client, episode(make_segment, i, client=client))
        time.sleep(generator.uniform(0, 0.01))
        if i % 20 == 19:
            server.kill()
            server.start()
    assert client.drain(40)
    assert_whole(server, [client], 120)


ACTOR = """
import numpy as np
from pathlib import Path
from serl_client import Feature, Segment, Spec, Stamp
from serl_client.client import TrainerClient
spec = Spec({{"observation.state": Feature((8,))}}, Feature((2,), low=-1, high=1), fps=10.0)
with TrainerClient({address!r}, actor="arm", spec=spec, outbox=Path({outbox!r})) as client:
    print(client.session, flush=True)
    while client.directive["number"] == 0:
        client.wait(0.05)
    for n in range(100_000):
        name = f"arm-{{client.session[:8]}}-{{n:06d}}"
        for start, end in ((0, False), (4, True)):
            rows = np.arange(start, start + 4 + end, dtype=np.float32)
            state = np.stack([np.full_like(rows, n), rows] * 4, axis=1)
            flags = np.zeros(4, bool)
            while not client.has_room:
                client.wait(0.01)
            client.push(Segment(name, start, "reach", Stamp(client.directive["number"], "practise", 1),
                {{"observation.state": state}}, np.zeros((4, 2), np.float32), rows[:4].copy(), flags, flags,
                rows[:4].astype(np.float64), terminated=end))
        client.wait(0.002)
"""


def test_an_actor_that_is_killed_leaves_a_prefix_which_its_next_life_delivers(server, connect, tmp_path, make_segment):
    outbox = tmp_path / "outbox-arm"
    sessions = []
    for life in range(3):
        code = ACTOR.format(address=server.address, outbox=str(outbox))
        actor = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        sessions.append(actor.stdout.readline().strip())
        if life == 0:
            wait_until(lambda: server.admin.is_open or server.ask(m.Status()).report["run"])
            server.direct()
        time.sleep(1.0)
        if life == 1:
            server.kill()  # and the server with it
            time.sleep(0.3)
        actor.kill()
        actor.wait()
        actor.stdout.close()
        if life == 1:
            server.start()
    last = connect()
    push_all(last, episode(make_segment, 0, client=last))
    assert last.drain(30)
    wait_until(lambda: all(e["closed"] for e in server.episodes().values()))
    found, known = stored(server), server.episodes()
    for session in sessions:
        mine = sorted(name for name in found if session[:8] in name)
        assert mine == [f"arm-{session[:8]}-{i:06d}" for i in range(len(mine))], "a prefix, without holes"
        assert len(mine) > 10
        assert all(found[name] == list(range(8)) for name in mine[:-1])
        assert found[mine[-1]] in (list(range(4)), list(range(8)))
        if len(found[mine[-1]]) == 4:
            assert (known[mine[-1]]["truncated"], known[mine[-1]]["terminated"], known[mine[-1]]["final"]) == (1, 0, 0)


def test_a_full_disk_is_degraded_nothing_false_is_acknowledged_and_space_brings_it_back(server, connect, make_segment):
    client = connect()
    push_all(client, episode(make_segment, 0, client=client))
    assert client.drain(20)
    (server.run_dir / "fail").touch()
    for i in range(1, 10):
        push_all(client, episode(make_segment, i, client=client))
    wait_until(lambda: "No space left" in client.degraded)
    assert client.pending[0] == 27
    assert "No space left" in server.ask(m.Status()).report["degraded"]
    (server.run_dir / "fail").unlink()
    assert client.drain(30)
    wait_until(lambda: client.degraded == "")
    assert_whole(server, [client], 10)


def raw_actor(server, spec, session="a" * 32, earlier=()):
    """A connection that speaks for an actor by hand."""
    return Connection(
        server.address, m.Hello(m.PROTOCOL, "actor", "arm", session, "box", "", spec.to_dict(), earlier)
    )  # fmt: skip


def welcomed(link):
    """The Welcome of a server that may still be starting, or making its store."""
    deadline = time.monotonic() + 30.0
    while True:
        try:
            return link.hello(5.0)
        except (Disconnected, ServerFailed):
            assert time.monotonic() < deadline, "nobody is let in"
            time.sleep(0.05)


def push_raw(link, session, *records):
    data = b"".join(bytes(part) for seq, record in records for part in m.encode_record(seq, record))
    link.send(m.Push(session, {"records": np.frombuffer(data, np.uint8)}))


def acks(link, seconds):
    """What is acknowledged within some time."""
    found, deadline = [], time.monotonic() + seconds
    while time.monotonic() < deadline:
        link.wait(0.02)
        while (message := link.receive()) is not None:
            if isinstance(message, m.Ack):
                found.append((message.expected, message.resend))
    return found


def refused(link):
    """The Failed that comes."""
    while True:
        link.wait(0.05)
        if isinstance(message := link.receive(), m.Failed):
            return message


def spoiled(segment, column, value):
    """The segment with `value` in one place of a column."""
    array = np.array(segment.observation[column] if column.startswith("observation") else getattr(segment, column))
    array[len(array) // 2] = value
    if column.startswith("observation"):
        return dataclasses.replace(segment, observation={**segment.observation, column: array})
    return dataclasses.replace(segment, **{column: array})


def test_a_value_that_is_not_finite_is_refused_by_its_column(server, spec, make_segment):
    for column in ("observation.state", "time", "reward", "action"):
        for value in (np.nan, np.inf, -np.inf):
            with raw_actor(server, spec) as link:
                welcomed(link)
                server.direct()
                push_raw(link, "a" * 32, (0, spoiled(make_segment("e0"), column, value)))
                assert f"{column} must be finite" in refused(link).text
    assert server.episodes() == {}


def test_an_action_far_outside_of_its_bounds_is_refused_and_one_near_them_is_not(server, spec, make_segment):
    with raw_actor(server, spec) as link:
        welcomed(link)
        server.direct()
        push_raw(link, "a" * 32, (0, spoiled(make_segment("e0"), "action", 1.5)))  # of a robot that stood there
        wait_until(lambda: acks(link, 0.1) == [(1, False)])
        push_raw(link, "a" * 32, (1, spoiled(make_segment("e0", start=4), "action", 1e30)))
        assert "outside of them" in refused(link).text


def test_a_sensor_that_fails_ends_the_episode_before_it_and_its_actor_goes_on(server, connect, make_segment, caplog):
    client = connect()
    name = f"arm-{client.session[:8]}-000000"
    push_all(client, [
        make_segment(name, 0), spoiled(make_segment(name, 0, 4), "observation.state", np.nan), make_segment(name, 0, 8),
        make_segment(name, 0, 12, ends="terminated"), *episode(make_segment, 1, client=client),
    ])  # fmt: skip
    assert client.drain(20)
    found, known = stored(server), server.episodes()
    assert found == {name: list(range(4)), name[:-1] + "1": list(range(8))}
    assert (known[name]["closed"], known[name]["truncated"], known[name]["final"]) == (1, 1, 0)
    assert f"{name} ends before row 4: observation.state must be finite" in caplog.text


def test_a_segment_of_another_shape_is_one_sentence_and_what_was_good_before_it_arrives(server, connect, make_segment):
    client = connect()
    push_all(client, episode(make_segment, 0, client=client))
    wrong = make_segment("x", 1)
    client.push(dataclasses.replace(wrong, observation={"observation.state": np.zeros((4, 9), np.float32)}))
    with pytest.raises(TrainerError, match=r"observation\.state should be float32 \[4, 8\], not float32 \[4, 9\]"):
        wait_until(lambda: client.check())
    client.close()
    wait_until(lambda: [known["steps"] for known in server.episodes().values()] == [8])


def test_a_gap_is_answered_once_and_only_with_what_is_durable(server, spec, make_segment):
    session = "a" * 32
    with raw_actor(server, spec) as link:
        welcomed(link)
        server.direct()
        (server.run_dir / "fail").touch()
        push_raw(link, session, (0, make_segment("e0")))
        push_raw(link, session, (2, make_segment("e0", start=8)))
        assert acks(link, 1.0) == [], "nothing is durable: not even the number of what is missing may be told"
        (server.run_dir / "fail").unlink()
        wait_until(lambda: acks(link, 0.1) == [(0, True)])
        push_raw(link, session, (0, make_segment("e0")))
        wait_until(lambda: acks(link, 0.1) == [(1, False)])
        for _ in range(3):
            push_raw(link, session, (2, make_segment("e0", start=8)))
        told = acks(link, 0.5)
        assert told.count((1, True)) == 1
        assert set(told) <= {(1, True), (1, False)}
        push_raw(link, session, (1, make_segment("e0", start=4)), (2, make_segment("e0", start=8, ends="terminated")))
        wait_until(lambda: acks(link, 0.1) == [(3, False)])


def test_a_life_that_died_before_it_saw_its_last_ack_is_closed_all_the_same(server, spec, make_segment):
    first, second = "a" * 32, "b" * 32
    with raw_actor(server, spec) as link:
        welcomed(link)
        server.direct()
        push_raw(link, first, (0, make_segment("e0")), (1, make_segment("e0", start=4)))
        wait_until(lambda: acks(link, 0.1) == [(2, False)])
    with raw_actor(server, spec, second, [[first, 1]]) as link:
        assert dict(welcomed(link).expected) == {first: 2, second: 0}
        episode = server.episodes()["e0"]
        assert (episode["closed"], episode["truncated"], episode["final"]) == (1, 1, 0)
        push_raw(link, first, (1, make_segment("e0", start=4)))  # once more: acknowledged, not stored again
        wait_until(lambda: acks(link, 0.1) == [(2, False)])
        assert server.episodes()["e0"]["steps"] == 8


def test_a_life_that_is_over_takes_no_new_record_and_no_new_hello(server, spec, make_segment):
    first, second = "a" * 32, "b" * 32
    with raw_actor(server, spec) as link:
        welcomed(link)
        server.direct()
        push_raw(link, first, (0, make_segment("e0")))
        wait_until(lambda: acks(link, 0.1) == [(1, False)])
    with raw_actor(server, spec, second, [[first, 0]]) as link:
        assert dict(welcomed(link).expected) == {first: 1, second: 0}
        push_raw(link, first, (1, make_segment("z1", ends="terminated")))
        assert f"session {first} is over" in refused(link).text
    with raw_actor(server, spec, first) as link, pytest.raises(Refused, match="is over: another client named arm"):
        welcomed(link)
    assert server.episodes().keys() == {"e0"}


def test_an_outbox_of_more_lives_than_a_hello_names_is_delivered_in_order(server, spec, tmp_path, make_segment):
    """Each of them had said Hello, so that a server which took the rest for lost could have closed it."""
    lives = [f"{i:032x}" for i in range(m.MAX_EARLIER + 6)]
    with raw_actor(server, spec) as link:
        welcomed(link)
        server.direct()
    for i, life in enumerate(lives):
        box = Outbox(tmp_path / "outbox-arm", 1 << 30)
        box.append(
            life, 0, [b"".join(bytes(part) for part in m.encode_record(0, make_segment(f"e{i:02}", ends="terminated")))]
        )
        earlier = [[session, 0] for session in lives[:i]][: m.MAX_EARLIER]
        with Connection(
            server.address, m.Hello(m.PROTOCOL, "actor", "arm", life, box.id, "", spec.to_dict(), earlier)
        ) as link:
            welcomed(link)
            link.call(m.Status(), 5.0)
        box.close()
    with TrainerClient(server.address, actor="arm", spec=spec, outbox=tmp_path / "outbox-arm") as client:
        client.push(make_segment("last", ends="terminated"))
        assert client.drain(60)
    known = sorted(server.episodes().values(), key=lambda episode: episode["number"])
    assert [episode["id"] for episode in known] == [*(f"e{i:02}" for i in range(len(lives))), "last"]


def test_a_hello_that_names_too_many_lives_is_refused(server, spec):
    many = [[f"{i:032x}", 0] for i in range(m.MAX_EARLIER + 1)]
    for earlier in (many, [["b" * 32, 0]] * 2, [["a" * 32, 0]], [["b" * 32, -1]]):
        with (
            raw_actor(server, spec, earlier=earlier) as link,
            pytest.raises(Refused, match=r"earlier session|besides its"),
        ):
            welcomed(link)


def test_connections_of_one_life_that_broke_before_a_word_leave_no_session(server, spec):
    server.ask(m.Status())
    for _ in range(8):
        with raw_actor(server, spec) as link:
            welcomed(link)
    clients = server.ask(m.Status()).report["clients"]
    assert [client["actor"] for client in clients] == ["arm"]


def test_a_second_gap_of_one_life_is_told_too(server, spec, make_segment):
    session = "a" * 32
    with raw_actor(server, spec) as link:
        welcomed(link)
        server.direct()
        for seq in (0, 1):
            push_raw(link, session, (seq + 1, make_segment("e0", start=4 * seq + 4)))
            wait_until(lambda seq=seq: (seq, True) in acks(link, 0.1))
            push_raw(link, session, (seq, make_segment("e0", start=4 * seq)))
            wait_until(lambda seq=seq: (seq + 1, False) in acks(link, 0.1))


def test_a_gap_before_the_disk_failed_is_told_again_after_it(server, spec, make_segment):
    session = "a" * 32
    with raw_actor(server, spec) as link:
        welcomed(link)
        server.direct()
        push_raw(link, session, (1, make_segment("e0", start=4)))
        wait_until(lambda: (0, True) in acks(link, 0.1))
        (server.run_dir / "fail").touch()
        push_raw(link, session, (0, make_segment("e0")))
        wait_until(lambda: server.ask(m.Status()).report["degraded"])
        (server.run_dir / "fail").unlink()
        wait_until(lambda: (0, True) in acks(link, 0.1))
        push_raw(link, session, (1, make_segment("e0", start=4)))
        wait_until(lambda: (0, True) in acks(link, 0.1))


def test_a_second_client_of_one_name_stops_the_first_and_its_records_wait(server, connect, make_segment):
    first = connect("arm", outbox="one")
    push_all(first, episode(make_segment, 0, client=first)[:1])
    assert first.drain(20)
    second = connect("arm", outbox="two")
    with pytest.raises(Refused, match="another client named arm has connected"):
        wait_until(lambda: first.check())
    push_all(second, episode(make_segment, 0, client=second))
    assert second.drain(20)
    assert not server.episodes()[f"arm-{first.session[:8]}-000000"]["closed"], "silence never closes an episode"


def test_the_first_of_two_clients_does_not_push_the_second_out_when_its_link_comes_back(server, spec):
    first, second = raw_actor(server, spec, "a" * 32), raw_actor(server, spec, "b" * 32)
    with first, second:
        welcomed(first)
        first.close()  # its link is cut; the robot PC is replaced
        welcomed(second)
        second.call(m.Status(), 5.0)
        with pytest.raises(Refused, match="another client named arm has connected"):
            first.hello(5.0)
        push_raw(second, "b" * 32)
        assert second.call(m.Status(), 5.0).report["refused"] == 1
        assert second.connected


def test_the_hello_of_a_dead_life_that_comes_late_stops_and_closes_nothing(server, spec, make_segment):
    living, ghost = raw_actor(server, spec, "b" * 32), raw_actor(server, spec, "a" * 32)
    with living, ghost:
        welcomed(living)
        server.direct()
        push_raw(living, "b" * 32, (0, make_segment("e0")))
        wait_until(lambda: acks(living, 0.1) == [(1, False)])
        welcomed(ghost)  # the network held it up; its process, which was killed before, says nothing more
        push_raw(living, "b" * 32, (1, make_segment("e0", start=4, ends="terminated")))
        wait_until(lambda: acks(living, 0.1) == [(2, False)])
        assert server.episodes()["e0"]["terminated"]


def test_the_hello_and_the_farewell_of_a_life_that_come_late_stop_nobody(server, spec, make_segment):
    living, ghost = raw_actor(server, spec, "b" * 32), raw_actor(server, spec, "a" * 32)
    with living, ghost:
        welcomed(living)
        server.direct()
        push_raw(living, "b" * 32, (0, make_segment("e0")))
        wait_until(lambda: acks(living, 0.1) == [(1, False)])
        welcomed(ghost)
        ghost.send(m.Bye())
        with pytest.raises(Disconnected, match="say Hello first"):
            ghost.call(m.Status(), 5.0)
        push_raw(living, "b" * 32, (1, make_segment("e0", start=4, ends="terminated")))
        wait_until(lambda: acks(living, 0.1) == [(2, False)])
        assert server.episodes()["e0"]["terminated"]


def test_numbers_that_no_actor_gives_are_refused_and_the_server_goes_on(server, spec, make_segment):
    for version in (-1, 2**63):
        with raw_actor(server, spec) as link:
            welcomed(link)
            server.direct()
            push_raw(link, "a" * 32, (0, make_segment(weights=version)))
            failed = None
            while not isinstance(failed, m.Failed):
                link.wait(0.05)
                failed = link.receive()
            assert "numbers from 0 on" in failed.text
    assert server.process.poll() is None


def test_another_spec_is_refused_with_both_values(server, connect):
    connect("one")
    other = Spec({"observation.state": Feature((9,))}, Feature((2,), low=-1, high=1), fps=10.0)
    client = connect("two", spec=other, directed=False)
    with pytest.raises(Refused, match=r"observation\.state\.shape: \[8\], \[9\]"):
        wait_until(lambda: client.check())


def test_another_run_is_refused_and_nothing_is_deleted(server, connect, tmp_path, make_segment):
    client = connect("arm", outbox="box")
    server.kill()
    push_all(client, episode(make_segment, 0, client=client))
    wait_until(lambda: client.pending[0] == 3)
    client.close()
    run = Store(server.run_dir / "store").run
    (server.run_dir / "store").rename(server.run_dir / "elsewhere")
    server.start()
    again = connect("arm", outbox="box", directed=False)
    with pytest.raises(Refused, match=run[:12]):
        wait_until(lambda: again.check())
    assert again.pending[0] == 3


def test_another_protocol_is_refused_with_both_versions(server):
    link = Connection(server.address, m.Hello((7, 9), "actor", "arm"))
    server.ask(m.Status())
    with pytest.raises(VersionMismatch, match="this client 7-9, this learner {}-{}".format(*m.PROTOCOL)):
        link.call(m.Status(), 5.0)
    link.close()


def test_a_hello_of_another_version_is_told_so_whatever_else_it_holds(server, spec):
    """And in the words that a client of protocol 3 understands: type, kind, text and final, and nothing else."""
    server.ask(m.Status())
    strange = {"type": "Hello", "protocol": [3, 4], "role": "actor", "actor": "arm", "new": 1}
    for hello, versions in ((strange | {"protocol": [3, 3]}, "3-3"), (strange | {"protocol": [9, 9]}, "9-9"),
                            (strange, "3-4")):  # fmt: skip
        with zmq.Context.instance().socket(zmq.DEALER) as socket:
            socket.linger = 0
            socket.connect(server.address)
            socket.send_multipart(wire.pack(hello, {}))
            assert socket.poll(15_000)
            header, _ = wire.unpack(socket.recv_multipart())
        assert header.keys() == {"type", "kind", "text", "final"}
        assert (header["type"], header["kind"], header["final"]) == ("Failed", "VersionMismatch", True)
        assert f"this client {versions}, this learner {m.PROTOCOL[0]}-{m.PROTOCOL[1]}" in header["text"]
    assert server.ask(m.Status()).report["refusals"] == {"other version": 3}


def test_the_learners_messages_are_refused_from_the_actors_address(server, connect):
    connect()
    link = Connection(server.address, m.Hello(m.PROTOCOL, "learner", "intruder"))
    with pytest.raises(Refused, match="role 'learner' is not given on this address"):
        link.call(m.Direct({"mode": "stop", "phase": ""}, None), 5.0)
    viewer = Connection(server.address, m.Hello(m.PROTOCOL, "viewer", "intruder"))
    with pytest.raises(Refused, match="not for the role viewer"):
        viewer.call(m.Publish("0" * 64, 1, 1), 5.0)
    link.close(), viewer.close()


def publish(server, content):
    sha256, size = weights.write(server.run_dir / "weights", content)
    return server.ask(m.Publish(sha256, size, 0)).value


def test_a_paced_actor_gets_its_share_of_the_steps_and_no_more(server, connect, make_segment):
    client = connect(paced=True, directed=False)
    wait_until(lambda: client.connected)
    number = server.ask(m.Direct({"phase": "practise", "mode": "collect", "into": "online", "paced": True}, 20)).value
    wait_until(lambda: client.step_limit == 20)
    push_all(client, episode(make_segment, 0, client=client))
    assert client.drain(20)
    assert client.step_limit == 20
    other = connect("other", paced=True, directed=False)
    wait_until(lambda: other.step_limit == 6 and client.step_limit == 8 + 6)
    server.admin.send(m.StepLimit(number, None))
    wait_until(lambda: client.step_limit is None)


def test_an_operators_command_is_acknowledged_and_reaches_the_learner(server, connect):
    client = connect()
    client.command("goto", "practise")
    wait_until(lambda: server.ask(m.Sync(0, 0)).commands == [[1, "goto", "practise"]])


def test_the_end_of_a_run_leaves_no_episode_open(server, spec, make_segment):
    with raw_actor(server, spec) as link:
        welcomed(link)
        server.direct()
        push_raw(link, "a" * 32, (0, make_segment("e0")))
        wait_until(lambda: acks(link, 0.1) == [(1, False)])
    server.direct(mode="stop")
    server.process.terminate()
    server.process.wait(10)
    server.start()
    server.admin.close()
    episode = server.episodes()["e0"]
    assert (episode["steps"], episode["closed"], episode["truncated"], episode["final"]) == (4, 1, 1, 0)


def test_a_clock_that_is_an_hour_off_changes_nothing(server, connect, make_segment, tmp_path):
    early, late = connect("early"), connect("late")
    number = early.directive["number"]
    for i in range(3):
        for client, hours in ((early, -1 + 2 * (i % 2)), (late, 1)):  # one clock jumps, the other is ahead
            segment = make_segment(client.actor, start=4 * i, ends="terminated" * (i == 2), directive=number)
            client.push(dataclasses.replace(segment, time=segment.time + 3600.0 * hours))
    assert early.drain(15)
    assert late.drain(15)
    for episode in server.episodes().values():
        assert (episode["steps"], episode["terminated"]) == (12, 1)
    store = server.run_dir / "store/online"
    steps = Layout(early.spec, 20_000).steps(store)[:24]
    for number in set(steps["episode"]):
        assert steps["index"][steps["episode"] == number].tolist() == list(range(12))
