"""E6 to E14: what was seen to break the known actor-learner transports, done to ours; what broke there holds here.

Each test is named after an experiment, and says in its first line what came of it with agentlace 0.0.2 or with Hi-ORS
around it. The others are elsewhere: E1 in test_service.py, E2 in test_protocol_model.py, E3 in test_store_service.py,
E4 in test_fuzz.py, E5 (a pickled message) in tests/watch beside every test, E8 in test_outbox.py, E9, E11 and E13 in
test_weights.py, E12 in test_network.py.
"""

import signal
import threading
import time
from contextlib import closing

import pytest
from serl_client import Feature, Spec

from tests.faults.proxy import Proxy
from tests.shared.clients import own_name, push_episodes
from tests.shared.common import until
from tests.shared.data import blank_segment
from tests.shared.servers import ServerProcess

CAMERAS = Spec(
    {f"observation.images.cam_{i}": Feature((224, 298, 3), "uint8") for i in range(3)},
    Feature((14,), low=-1, high=1), fps=10.0,
)  # fmt: skip


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with closing(ServerProcess(tmp_path_factory.mktemp("peer") / "run")) as made:
        yield made


def arrived(server, client):
    """The numbers of the episodes of this client's life in the store, each whole and in order."""
    mine = {name: indices for name, indices in server.stored().items() if f"-{client.session[:8]}-" in name}
    assert all(indices == list(range(8)) for indices in mine.values())
    return sorted(int(name.rsplit("-", 1)[1]) for name in mine)


def test_e6_a_slow_learner_gets_everything_once_and_holds_nobody_up(server, join):
    """There: each update failed by its time-out, while the robot waited for it."""
    client, over = join(server, "e6"), threading.Event()

    def slow():
        while not over.wait(0.01):
            server.signal(signal.SIGSTOP)
            over.wait(0.05)
            server.signal(signal.SIGCONT)

    slowing = threading.Thread(target=slow)
    slowing.start()
    push_episodes(client, range(60))
    over.set()
    slowing.join()
    assert client.drain(30)
    assert arrived(server, client) == list(range(60))


@pytest.mark.slow
def test_e7_without_a_learner_pushing_goes_on_and_its_return_gets_everything_once(server, join):
    """There: each call blocked for its time-out, and a learner that had kept its buffer got all of it twice."""
    client = join(server, "e7")
    push_episodes(client, range(10))
    assert client.drain(30)
    server.kill()
    began = time.thread_time()
    push_episodes(client, range(10, 40))
    assert time.thread_time() - began < 30 * 3 * 0.05, "a push costs less than 50 ms, whoever listens"
    assert client.pending[0] == 30 * 3, "nobody was there, and yet each push came back"
    server.start()
    assert client.drain(30)
    assert arrived(server, client) == list(range(40))


@pytest.mark.slow
def test_e14_over_a_slow_link_all_arrives_once_and_the_heartbeat_lives(join, tmp_path):
    """There: over 5 MB/s every update returned True, and 9 of 49 items were there at the end. And E10: 20 steps of
    three cameras were 96 MB of pickled float32, and a success was sent twice."""
    server = ServerProcess(tmp_path / "run", online=128)  # a few large rows
    with closing(server), Proxy("127.0.0.1", server.port) as proxy:
        client = join(server, "e14", address=f"tcp://127.0.0.1:{proxy.port}", spec=CAMERAS)
        welcome = client._network.server.welcome
        proxy.set("trickle", rate=5_000_000)
        for number in range(6):
            until(lambda: client.has_room)
            client.push(blank_segment(CAMERAS, own_name(client, number), steps=4, ends="terminated"))
        until(lambda: not client.pending[0], 60)
        assert client._network.server.welcome is welcome, "the link never broke"
        episodes = [each for each in server.episodes().values() if each["actor"] == "e14"]
        assert [(each["steps"], each["terminated"]) for each in episodes] == [(4, 1)] * 6
        raw = 6 * 5 * 3 * 224 * 298 * 3
        assert raw < proxy.moved["up"] < 1.01 * raw, "once, and in its own size"
