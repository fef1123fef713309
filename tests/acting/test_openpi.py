"""openpi's clients ask the inference process: the same chunks as for our own, and nobody suffers from a hostile one.

The client here is written from docs/guides/openpi.md. That page also says with which published one the chunks were
compared.
"""

import http.client
import socket
import threading
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

import msgpack
import numpy as np
import pytest
import torch
from serl_client import ConfigError
from serl_client.controller import decision_seed
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect as websocket

from serl_launcher.acting import bridge as module
from serl_launcher.acting import carries
from serl_launcher.acting.bridge import Bridge
from serl_launcher.acting.policy_server import PolicyServer
from tests.shared.common import PATIENCE, STATE, free_port, until
from tests.shared.inference import algorithm_of
from tests.shared.keys import do

from .gpu import FLOW
from .toy import POISON, Counting, Poisoned, ask, message, receive

KEYS = {"observation/state": STATE}


# -- a client
def unpacked(found):
    return np.ndarray(found[b"shape"], found[b"dtype"], found[b"data"]) if b"__ndarray__" in found else found


def state(key=0.0):
    return message(**{"observation/state": np.full(8, key)})  # float64, as scripts send it


class Client:
    def __init__(self, opened):
        self.socket = opened
        self.metadata = msgpack.unpackb(opened.recv(PATIENCE))

    def infer(self, data):
        self.socket.send(data)
        answer = self.socket.recv(PATIENCE)
        return answer if isinstance(answer, str) else msgpack.unpackb(answer, object_hook=unpacked)

    def act(self, key=0.0):
        return self.infer(state(key))["actions"]


@pytest.fixture
def bridged(inference, tmp_path, closes):
    """bridged(algorithm) -> (an inference server that acts, its bridge, the bridge's address)."""

    def make(algorithm, allowed=None, port=None, **options):
        there = inference(algorithm, **options)
        address = "127.0.0.1", port or free_port()
        bridge = closes(Bridge(there.server.host, address, KEYS, allowed, there.server.ask, tmp_path))
        there.acting()
        until(lambda: there.server.host.version)
        assert bridge.report()["openpi"]["trouble"] == "it listens once there are weights"
        bridge.start()
        return there, bridge, address

    return make


@pytest.fixture
def client(exits):
    """client(address) -> a Client."""

    def make(address, api_key=None, more=None, **options):
        headers = {"Authorization": f"Api-Key {api_key}"} if api_key else {}
        uri = f"ws://{address[0]}:{address[1]}"
        opening = websocket(uri, compression=None, additional_headers=headers | (more or {}), **options)
        return Client(exits.enter_context(opening))

    return make


def refusals(bridge):
    return bridge.report()["openpi"]["refusals"]


# -- the chunks
def test_a_client_of_openpi_gets_the_chunks_that_our_own_gets_for_its_seeds(bridged, client, link, spec, one_thread):
    there, bridge, address = bridged(algorithm_of(spec, *FLOW, seed=1))
    ours, chunks = link(there.address), []
    for number in (1, 2):
        theirs = client(address)
        assert theirs.metadata["observation"] == {
            "observation/state": {"feature": STATE, "dtype": "float32", "shape": [8]}
        }
        for count in range(3):
            answer = theirs.infer(state(count / 7))
            seed = decision_seed(f"openpi/{number}", count)
            ours.send(ask(count, seed=seed, reset=count == 0, key=count / 7))
            expected = receive(ours).arrays["action"]
            assert answer["actions"].dtype == np.float32
            assert np.array_equal(answer["actions"], expected)
            assert list(expected.shape[1:]) == theirs.metadata["action"]["shape"]
            assert answer["server_timing"].keys() == {"infer_ms"} | ({"prev_total_ms"} if count else set())
            chunks.append(expected)
    assert len(np.unique(chunks, axis=0)) == 6
    assert refusals(bridge) == {}


def test_a_connection_is_an_episode_of_a_policy_that_remembers_and_the_prompt_is_its_task(bridged, client):
    there, _, address = bridged(Counting())
    one, other = client(address), client(address)
    for count in (1, 2, 3):
        assert one.act(count).tolist() == [[count, sum(range(1, count + 1))]]
    assert other.act(7).tolist() == [[1, 7]]
    assert client(address).act(5).tolist() == [[1, 5]], "a new connection is a reset"
    one.infer(message(**{"observation/state": np.zeros(8), "prompt": "fold"}))
    assert there.server.host.algorithm.tasks[-1] == ("fold",)


def test_the_bridges_clients_and_our_actors_share_batches(bridged, client, link, clock):
    there, _, address = bridged(Counting(), window=10 * PATIENCE)
    theirs, ours = client(address), link(there.address)
    ours.send(ask(0, reset=True))
    receive(ours)
    theirs.socket.send(state(3))
    until(lambda: there.server._waiting)  # for the other, who asked lately
    ours.send(ask(1, reset=True))
    assert receive(ours).step == 1
    assert msgpack.unpackb(theirs.socket.recv(PATIENCE), object_hook=unpacked)["actions"].tolist() == [[1, 3]]
    assert there.server.host.algorithm.batches == [1, 2]


# -- who is let in
@pytest.mark.parametrize(
    ("value", "sentence", "reason"),
    [
        (np.nan, f"{STATE} [0] is nan, which is not finite", "bad message"),
        (1e300, f"{STATE} [0] is inf, which is not finite", "bad message"),
        (-2e6, f"{STATE} [0] is -2e+06, beyond its limit of -1e+06", "bad message"),
        (POISON, "action of the policy (weights 1) is not finite", "not finite"),
    ],
)
def test_a_number_that_cannot_be_is_neither_taken_nor_answered(bridged, client, value, sentence, reason):
    _, bridge, address = bridged(Poisoned())
    assert sentence in client(address).infer(state(value))
    assert refusals(bridge) == {reason: 1}


def test_a_port_that_is_taken_is_said_once_and_tried_again(bridged, client, spec, caplog):
    taken = socket.create_server(("127.0.0.1", 0))
    _, bridge, address = bridged(algorithm_of(spec, *FLOW), port=taken.getsockname()[1])
    bridge.start()
    assert caplog.text.count("the bridge serves nobody: it cannot listen on") == 1
    assert "Address already in use" in bridge.report()["openpi"]["trouble"]
    taken.close()
    bridge.start()
    assert client(address).act().shape[1:] == spec.action.shape
    assert "trouble" not in bridge.report()["openpi"]


def test_the_end_of_the_bridges_thread_is_told_and_our_own_actors_are_answered(
    bridged, link, spec, monkeypatch, caplog, tmp_path
):
    monkeypatch.setattr(Bridge, "_listen", lambda *_: 1 / 0)
    there, bridge, _ = bridged(algorithm_of(spec, *FLOW))
    until(lambda: "trouble" in bridge.report()["openpi"])
    assert bridge.report()["openpi"]["trouble"] == "ZeroDivisionError: division by zero"
    assert "Traceback" in (tmp_path / "errors.log").read_text()
    arm = link(there.address)
    arm.send(ask())
    assert receive(arm)


def test_healthz_says_ok(bridged):
    _, _, address = bridged(Counting())
    asked = http.client.HTTPConnection(*address, timeout=PATIENCE)
    asked.request("GET", "/healthz")
    answer = asked.getresponse()
    assert (answer.status, answer.read()) == (200, b"OK\n")
    asked.close()


def refused_by(client, *arguments, **options):
    """The sentence with which a client is not let in."""
    with pytest.raises(InvalidStatus) as refused:
        client(*arguments, **options)
    return f"{refused.value.response.status_code} {refused.value.response.body.decode()}"


def test_with_keys_an_api_key_of_an_actor_opens_and_nothing_else(bridged, client, keys):
    _, bridge, address = bridged(Counting(), keys)
    good = do("api", keys, "left")
    assert client(address, good).act(2).tolist() == [[1, 2]]
    assert client(address, do("api", keys, "boss")).act(2).tolist() == [[1, 2]]
    assert "401 this learner wants an Api-Key" in refused_by(client, address)
    public = next(line.split()[2] for line in do("list", keys).splitlines() if line.startswith("left"))
    _, mac = good.split(":")
    of_left = [f"left:{wrong}" for wrong in ("", mac[:-1], f"{mac}é", f"{mac}0", public)]
    for wrong in (mac, public, f"right:{mac}", *of_left):
        assert "401 the Api-Key of nobody is unknown" in refused_by(client, address, wrong)
    assert "401 the key eye has the role viewer" in refused_by(client, address, do("api", keys, "eye"))
    assert refusals(bridge) == {"no key": 1, "unknown key": 8, "role": 1}


def test_another_learner_that_improves_what_we_do_is_let_in_by_the_api_key_in_its_file(bridged, keys, spec, tmp_path):
    _, _, address = bridged(Counting(), keys)
    for text, sentence in (
        ("", "401 this learner wants an Api-Key"),
        ("left:0", "401 the Api-Key of nobody is unknown"),
    ):
        assert sentence in improver(spec, address, tmp_path, text)
    assert improver(spec, address, tmp_path, do("api", keys, "left")) == ""


def improver(spec, address, folder, api_key):
    """Why a PolicyServer with this Api-Key gets no chunk."""
    (file := folder / "api_key").write_text(f"{api_key}\n")
    file.chmod(0o600)
    url, path = f"ws://{address[0]}:{address[1]}", str(file) if api_key else None
    options = {"cameras": [], "n_action_steps": 1, "timeout_s": PATIENCE, "scale": "bounds"}
    asks = PolicyServer(spec, url=url, api_key=path, keys=KEYS, **options)
    return asks.ask({STATE: torch.zeros(1, 8)}, [""])[1]


def test_a_key_that_connects_again_and_again_makes_the_policy_forget_its_own_connections_alone(
    bridged, client, keys, monkeypatch
):
    monkeypatch.setattr(carries, "REMEMBERED", 3)
    _, _, address = bridged(Counting(), keys)
    victim, greedy = client(address, do("api", keys, "left")), do("api", keys, "boss")
    assert victim.act(2).tolist() == [[1, 2]]
    for _ in range(4):
        client(address, greedy).act(1)
    assert victim.act(2).tolist() == [[2, 4]]


def test_a_revoked_key_is_refused_at_its_next_request_and_a_new_one_of_that_name_is_another(bridged, client, keys):
    _, bridge, address = bridged(Counting(), keys)
    before = do("api", keys, "left")
    there = client(address, before)
    there.act()
    do("revoke", keys, "left")
    assert "the Api-Key of left is revoked" in there.infer(state())
    with pytest.raises(ConnectionClosed):
        there.act()
    with pytest.raises(ConfigError, match="nobody is let in as left"):
        do("api", keys, "left")
    do("make", keys, "left", "actor")
    assert "is revoked" in refused_by(client, address, before)
    assert do("api", keys, "left") != before
    client(address, do("api", keys, "left")).act()
    assert refusals(bridge) == {"revoked key": 2}


def test_no_page_in_a_browser_of_this_machine_gets_in(bridged, client):
    _, bridge, address = bridged(Counting())
    assert "403" in refused_by(client, address, more={"Origin": "http://127.0.0.1"})
    assert refusals(bridge) == {"a browser": 1}


def test_other_addresses_need_keys_and_a_policy_must_look_at_one_observation(inference, spec):
    host = inference(Counting()).server.host
    with pytest.raises(ConfigError, match=r"bridge\.host=0\.0\.0\.0: without keys"):
        Bridge(host, ("0.0.0.0", 1), {}, None, lambda _: None, Path())
    host.acting.history = 3
    with pytest.raises(ConfigError, match="looks at 3 observations"):
        Bridge(host, ("127.0.0.1", 1), {}, None, lambda _: None, Path())


# -- those who do not behave
def test_each_hostile_message_is_answered_with_a_sentence_and_counted_and_nobody_else_waits(bridged, client, clock):
    there, bridge, address = bridged(Counting())
    honest = client(address)
    bad = [b"\xc1", "a text", message(), message(**{"observation/state": np.zeros(3)})]
    for count, data in enumerate(bad, 1):
        hostile = client(address)
        answer = hostile.infer(data)
        assert isinstance(answer, str)
        assert "Traceback" not in answer
        with pytest.raises(ConnectionClosed):
            hostile.socket.recv(PATIENCE)
        assert honest.act(1).tolist() == [[count, count]]
        assert refusals(bridge) == {"bad message": count}
    huge = client(address)
    with pytest.raises(ConnectionClosed, match="1009"):
        huge.infer(bytes(bridge.form.limit + 1))
    until(lambda: refusals(bridge) == {"bad message": 5})
    flood = client(address)
    with suppress(ConnectionClosed):
        for _ in range(10 * module.FRAMES):
            flood.socket.ping()
    assert until(lambda: refusals(bridge) == {"bad message": 5, "too fast": 1})
    assert honest.act(1).tolist() == [[5, 5]]
    assert there.server.host.algorithm.batches == [1] * 5, "none of them has reached the policy"


class Long(Counting):
    """Its chunks are too long for the buffers of a connection."""

    def act(self, *arguments, **options):
        decision, carry = super().act(*arguments, **options)
        return replace(decision, action=decision.action.expand(-1, 100_000, -1)), carry


def test_a_client_that_stops_reading_waits_alone_and_loses_its_place(bridged, client, running_clock):
    there, bridge, address = bridged(Long())
    bridge._loop.time = running_clock.monotonic
    honest, stuck = client(address), client(address, max_queue=1, close_timeout=0.1)
    for _ in range(40):
        stuck.socket.send(state())
    until(lambda: len(there.server.host.algorithm.batches) > 1)
    for count in range(1, 20):
        assert honest.act(1)[0].tolist() == [count, count]
    assert len(there.server.host.algorithm.batches) < 19 + 40, "its requests wait, unread"
    running_clock.advance(module.SEND_S)
    bridge._loop.call_soon_threadsafe(int)  # wakes it
    until(lambda: refusals(bridge) == {"does not read": 1})
    until(lambda: bridge.report()["openpi"]["connections"] == 1)
    assert honest.act(1)[0].tolist() == [20, 20]


def test_the_bridge_ends_though_a_client_does_not_read(bridged, client):
    there, bridge, address = bridged(Long())
    stuck = client(address, max_queue=1, close_timeout=0.1)
    for _ in range(40):
        stuck.socket.send(state())
    until(lambda: len(there.server.host.algorithm.batches) > 1)
    bridge.close()
    with pytest.raises(OSError, match="refused"):
        client(address)


def test_the_bridge_ends_though_nobody_answers_a_question(bridged, client, tmp_path):
    there, _, _ = bridged(Counting())
    address, asked = ("127.0.0.1", free_port()), []
    bridge = Bridge(there.server.host, address, KEYS, None, asked.append, tmp_path)
    bridge.start()
    client(address, close_timeout=0.1).socket.send(state())
    until(lambda: asked)
    ending = threading.Thread(target=bridge.close, daemon=True)
    ending.start()
    ending.join(PATIENCE)
    assert not ending.is_alive()
    assert bridge.report()["openpi"]["connections"] == 0


HANDSHAKE = (
    b"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
)


@pytest.mark.parametrize("said", [b"", HANDSHAKE], ids=["silent", "idle"])
def test_idle_sockets_of_another_address_take_the_place_of_nobody(bridged, client, said):
    _, bridge, address = bridged(Counting())
    with ExitStack() as stack:
        for _ in range(128):
            idle = stack.enter_context(socket.create_connection(address, PATIENCE, ("127.0.0.2", 0)))
            idle.sendall(said)
        until(lambda: refusals(bridge).get("too many connections", 0) >= 64)
        for count in range(20):
            assert client(address).act(count).tolist() == [[1, count]]


def test_no_more_connections_than_the_limit_are_served(bridged, client, monkeypatch):
    monkeypatch.setattr(module, "CONNECTIONS", 2)
    _, bridge, address = bridged(Counting())
    one, _ = client(address), client(address)
    assert "503 there are 2 connections already" in refused_by(client, address)
    idle = [socket.create_connection(address, PATIENCE) for _ in range(4)]  # they never finish their handshake
    until(lambda: refusals(bridge).get("too many connections", 0) > 1)
    assert one.act(1).tolist() == [[1, 1]]
    for each in idle:
        each.close()
    one.socket.close()
    until(lambda: bridge.report()["openpi"]["connections"] == 1)
    assert client(address).act(1).tolist() == [[1, 1]]
