"""E1 to E14: what was seen to break the known actor-learner transports, done to ours; what broke there holds here.

Each test is named after an experiment, and says in its first line what came of it with agentlace 0.0.2 or with Hi-ORS
around it.
"""

import hashlib
import os
import pickle
import queue
import signal
import threading
import time
from contextlib import ExitStack, suppress

import numpy as np
import pytest
import zmq
from serl_client import Feature, Segment, Spec, Stamp
from serl_client import messages as m
from serl_client.client import TrainerClient
from serl_client.errors import Refused, TrainerError

from tests.faults.proxy import Proxy
from tests.shared.clients import connected, directed, own_name, push_episodes
from tests.shared.common import until
from tests.shared.data import make_episode, make_segment
from tests.shared.servers import ServerProcess

CAMERAS = Spec(
    {f"observation.images.cam_{i}": Feature((224, 298, 3), "uint8") for i in range(3)},
    Feature((14,), low=-1, high=1), fps=10.0,
)  # fmt: skip


def running(tmp_path_factory, name, **capacities):
    made = ServerProcess(tmp_path_factory.mktemp(name) / "run", **capacities)
    made.report()
    yield made
    made.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    yield from running(tmp_path_factory, "peer")


@pytest.fixture(scope="module")
def camera_server(tmp_path_factory):
    yield from running(tmp_path_factory, "cameras", online=128)  # a few large rows


@pytest.fixture
def connect(server, spec, tmp_path):
    """connect(name) -> a TrainerClient that has got a directive to collect."""
    with ExitStack() as opened:

        def connect(name, *, outbox=None, port=None, to=server, spec=spec, **options):
            address = f"tcp://127.0.0.1:{port or to.port}"
            client = TrainerClient(address, actor=name, spec=spec, outbox=tmp_path / (outbox or name), **options)
            connected(opened.enter_context(client))
            to.direct()
            return directed(client)

        yield connect


def arrived(server, client, since=0):
    """The numbers, from `since` on, of the episodes of this client's life in the store, each whole and in order."""
    mine = {name: indices for name, indices in server.stored().items() if f"-{client.session[:8]}-" in name}
    found = {number: mine[name] for name in mine if (number := int(name.rsplit("-", 1)[1])) >= since}
    assert all(indices == list(range(8)) for indices in found.values())
    return sorted(found)


def delivered(client, numbers, seconds=30):
    push(client, numbers)
    assert client.drain(seconds)


def push(client, numbers):
    push_episodes(client, numbers, directive=client.directive["number"])


def test_e1_all_that_a_restarted_actor_makes_arrives(server, connect):
    """There: its numbers began again below what had come, and the first 100 new transitions were never sent."""
    first = connect("e1")
    delivered(first, range(25))
    first.close()
    second = connect("e1")
    delivered(second, range(12))
    assert arrived(server, first) == list(range(25))
    assert arrived(server, second) == list(range(12))


def test_e2_the_first_of_two_actors_of_one_name_is_told_and_its_records_come_later(server, connect):
    """There: all of one arrived, nothing of the other, and no error."""
    first = connect("e2", outbox="one")
    delivered(first, range(5))
    second = connect("e2", outbox="two")
    with pytest.raises(Refused, match="another client named e2 has connected"):
        until(lambda: first.check())
    for record in make_episode(own_name(first, 5), 5):
        with pytest.raises(Refused, match="another client"):
            first.push(record)
    delivered(second, range(5))
    assert first.pending[0] == 3
    first.close(), second.close()
    again = connect("e2", outbox="one")
    assert again.drain(20)
    assert arrived(server, first) == list(range(6))
    assert arrived(server, second) == list(range(5))


def test_e2_two_actors_of_different_names_that_take_turns_both_arrive_whole(server, connect):
    one, other = connect("e2-one"), connect("e2-other")
    for number in range(20):
        push(one, [number])
        push(other, [number])
    assert one.drain(30)
    assert other.drain(30)
    assert arrived(server, one) == arrived(server, other) == list(range(20))


def test_e3_a_handler_that_raises_is_answered_and_all_arrives(server, connect):
    """There: the thread that served died in silence, and the learner trained on with a frozen buffer."""
    client, other = connect("e3"), connect("e3-other")
    (server.run_dir / "raise").touch()
    push(client, range(5))
    push(other, range(5))
    assert client.drain(30)
    assert other.drain(30)
    assert not (server.run_dir / "raise").exists()
    assert arrived(server, client) == arrived(server, other) == list(range(5))


def send_raw(server, *messages):
    """As any ZMTP peer may; returns what was answered to each."""
    with zmq.Context.instance().socket(zmq.DEALER) as peer:
        peer.linger = 0
        peer.connect(server.address)
        answers = []
        for frames in messages:
            peer.send_multipart(frames)
            assert peer.poll(10_000), "no answer came"
            answers.append(m.decode(peer.recv_multipart()))
    return answers


def test_e4_five_bytes_of_a_stranger_end_nothing(server, connect):
    """There: the thread that served died of them."""
    client = connect("e4")
    for answer in send_raw(server, [b"hello"], [b""], [b"\x04\x22\x4d\x18\x00"]):
        assert answer.kind == "Refused"
    delivered(client, range(3))
    assert arrived(server, client) == list(range(3))


class Payload:
    """What runs `touch` wherever it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def test_e5_a_pickled_object_is_refused_and_runs_nothing(server, connect, make_segment, tmp_path):
    """There: whoever reached the port ran code as the learner's user."""
    client, trace = connect("e5"), tmp_path / "ran"
    pickled = pickle.dumps(Payload(trace))
    before = server.report()["refused"]
    push = m.encode(m.Push(client.session, {"records": np.frombuffer(pickled, np.uint8)}))
    answers = send_raw(server, [pickled], [bytes(push[0]), pickled], [bytes(push[0]), pickled, pickled])
    assert [type(answer) for answer in answers] == [m.Failed] * 3
    assert server.report()["refused"] >= before + 2
    assert not trace.exists()
    pickle.loads(pickled)
    assert trace.exists(), "the payload does what it says"
    delivered(client, range(2))


def test_e6_a_slow_learner_gets_everything_once_and_holds_nobody_up(server, connect):
    """There: each update failed by its time-out, while the robot waited for it."""
    client, over = connect("e6"), threading.Event()

    def slow():
        while not over.wait(0.01):
            server.signal(signal.SIGSTOP)
            over.wait(0.05)
            server.signal(signal.SIGCONT)

    slowing = threading.Thread(target=slow)
    slowing.start()
    push(client, range(60))
    over.set()
    slowing.join()
    assert client.drain(30)
    assert arrived(server, client) == list(range(60))


def test_e7_without_a_learner_pushing_goes_on_and_its_return_gets_everything_once(server, connect):
    """There: each call blocked for its time-out, and a learner that had kept its buffer got all of it twice."""
    client = connect("e7")
    delivered(client, range(10))
    server.kill()
    began = time.thread_time()
    push(client, range(10, 40))
    assert time.thread_time() - began < 30 * 3 * 0.05, "a push costs less than 50 ms, whoever listens"
    assert client.pending[0] == 30 * 3, "nobody was there, and yet each push came back"
    server.start()
    assert client.drain(30)
    assert arrived(server, client) == list(range(40))


def test_e8_a_little_outbox_says_that_it_is_full_and_loses_nothing(server, connect):
    """There: of 1000 transitions between two updates a queue of 100 lost 900, without a signal."""
    client = connect("e8", capacity=20_000)
    server.signal(signal.SIGSTOP)
    taken = 0
    with suppress(TrainerError):
        for number in range(250):
            for record in make_episode(own_name(client, number), number, directive=client.directive["number"]):
                client.push(record)
                taken += 1
    assert 0 < taken < 300
    with pytest.raises(TrainerError, match="full"):
        client.push(make_segment("more", 0, 0, 8))
    assert not client.has_room
    assert client.pending[0] == taken
    server.signal(signal.SIGCONT)
    assert client.drain(30)
    assert client.has_room
    delivered(client, range(1000, 1125))  # 1000 steps
    assert arrived(server, client, since=1000) == list(range(1000, 1125))
    assert client.pending == (0, 0)


def test_e9_a_receiver_that_was_away_gets_the_newest_weights_alone(server, connect, tmp_path):
    """There: a slow actor went through all twelve versions one after the other."""
    with Proxy("127.0.0.1", server.port) as proxy:
        client = connect("e9", port=proxy.port, weights_folder=tmp_path / "weights")
        first = server.publish(os.urandom(100_000))
        until(lambda: client.weights(0))
        proxy.set("half_open")
        last = [server.publish(os.urandom(100_000)) for _ in range(11)][-1]
        proxy.set("pass")
        seen = {first}
        until(lambda: seen.add(client.weights(0)[0]) or last in seen)
        assert len(seen) < 6, "the first, at most one that was on its way with each turn, and the newest"


def test_e9b_a_late_joiner_is_told_of_the_weights_with_its_welcome(server, connect, tmp_path):
    """There: what was published before it came never reached it."""
    connect("e9b-early")
    content = os.urandom(300_000)
    version = server.publish(content)
    client = connect("e9b", weights_folder=tmp_path / "weights")
    assert client._network.server.welcome.state["weights"]["version"] == version
    until(lambda: client.weights(0))
    assert client.weights(0)[1].read_bytes() == content


def camera_segment(client, number, steps):
    generator = np.random.default_rng(number)
    images = {
        name: generator.integers(0, 256, (steps + 1, *feature.shape), np.uint8)
        for name, feature in CAMERAS.observation.items()
    }
    flags, numbers = np.zeros(steps, bool), np.arange(steps, dtype=np.float32)
    stamp = Stamp(client.directive["number"], "practise", 1)
    return Segment(
        f"{client.actor}-{client.session[:8]}-{number:06d}", 0, "pack", stamp, images, np.zeros((steps, 14),
        np.float32),
        numbers, flags, flags, numbers.astype(np.float64), terminated=True,
    )  # fmt: skip


def test_e10_an_episode_of_three_cameras_travels_once_in_its_own_size(camera_server, connect):
    """There: 20 steps were 96 MB of pickled float32, and a success was sent twice."""
    with Proxy("127.0.0.1", camera_server.port) as relay:
        client = connect("e10", port=relay.port, to=camera_server, spec=CAMERAS)
        segment = camera_segment(client, 0, 20)
        raw = sum(images.nbytes for images in segment.observation.values())
        assert raw == 21 * 3 * 224 * 298 * 3
        client.push(segment)
        assert client.drain(30)
        assert raw < relay.moved["up"] < 1.01 * raw


def test_e11_weights_travel_as_they_are_and_a_cut_repeats_nothing_of_them(server, connect, tmp_path):
    """There: 1 GB cost 7 s to encode and 4.6 s to decode, every time, in one message without a second try."""
    content = os.urandom(12 << 20)
    with Proxy("127.0.0.1", server.port, cut_after=6 << 20) as relay:
        client = connect("e11", port=relay.port, weights_folder=tmp_path / "weights")
        version = server.publish(content)
        until(lambda: client.weights(version - 1), 30)
        assert client.weights(0)[1].read_bytes() == content
        assert relay.cuts == 1
        on_their_way = 5 << 20  # when it was cut: the window of a pull
        assert len(content) < relay.moved["down"] < len(content) + on_their_way


def test_e12_a_control_loop_that_hangs_does_not_break_the_link(server, connect):
    """There: a blocking call inside the handler froze the event loop, and the keepalive ended the connection."""
    client = connect("e12")
    welcome = client._network.server.welcome
    push(client, [0])
    with pytest.raises(queue.Empty):
        queue.Queue().get(timeout=3.5)  # longer than any heartbeat's patience
    (seen,) = [each for each in server.report()["clients"] if each["actor"] == "e12"]
    assert seen["seen_s"] < 3.0
    assert client._network.server.welcome is welcome, "it never had to connect again"
    assert client.pending == (0, 0)
    assert arrived(server, client) == [0]


def test_e13_nobody_reads_a_mix_of_two_versions(server, connect, tmp_path):
    """There: weights were copied in place while others read: 71 of 1443 passes saw two versions at once."""
    client, over = connect("e13", weights_folder=tmp_path / "weights"), threading.Event()
    mixed, versions, reads = [], set(), 0

    def read():
        nonlocal reads
        while not over.is_set():
            found = client.weights(0)
            with suppress(FileNotFoundError):  # two newer ones have come in between
                content = found[1].read_bytes() if found else b""
                if content and hashlib.sha256(content).hexdigest() != found[1].stem:
                    mixed.append(found)
                versions.update({content[:1]} - {b""})
                reads += 1

    reading = threading.Thread(target=read)
    reading.start()
    for number in range(1, 21):
        version = server.publish(bytes([number]) * 500_000)
        until(lambda newest=version: client.weights(newest - 1))
    over.set()
    reading.join()
    assert mixed == []
    assert reads > len(versions) > 3


def test_e14_over_a_slow_link_all_arrives_once_and_the_heartbeat_lives(camera_server, connect):
    """There: over 5 MB/s every update returned True, and 9 of 49 items were there at the end."""
    with Proxy("127.0.0.1", camera_server.port) as proxy:
        client = connect("e14", port=proxy.port, to=camera_server, spec=CAMERAS)
        welcome = client._network.server.welcome
        proxy.set("trickle", rate=5_000_000)
        for number in range(6):
            until(lambda: client.has_room)
            client.push(camera_segment(client, number, 4))
        until(lambda: client.last_seen < 3.0 and not client.pending[0], 60)
        assert client._network.server.welcome is welcome, "the link never broke"
        episodes = [each for each in camera_server.episodes().values() if each["actor"] == "e14"]
        assert [(each["steps"], each["terminated"]) for each in episodes] == [(4, 1)] * 6
