"""Who is let in by the inference process: as by the server, and with the same words."""

import re

import numpy as np
import pytest
from serl_client import ConfigError
from serl_client import messages as m
from serl_client.connection import Connection
from serl_client.errors import Disconnected, Refused, TrainerError
from serl_client.keys import Key

from serl_launcher.acting.server import InferenceServer
from serl_launcher.service import access, fair_queue
from serl_launcher.service.server import Server
from tests.shared.common import PATIENCE, STATE, until
from tests.shared.data import make_segment
from tests.shared.inference import rlpd
from tests.shared.keys import do


@pytest.fixture
def answering(inference, spec, one_thread):
    """answering(keys) -> an inference server in a thread, with weights."""
    return lambda keys=None: inference(rlpd(spec), window=0, keys=keys).acting()


QUESTION = dict(step=0, seed=1, previous_action=None, reset=True, explore=False, task="")


@pytest.mark.parametrize("has_keys", [False, True])
def test_an_actor_pushes_and_asks(keys, serve, join, answering, has_keys):
    keys = keys if has_keys else None
    inference = answering(keys)
    served = serve(keys=keys, inference=inference.address)
    left = join(served, "left")
    left.push(make_segment("e0", directive=left.state.directive["number"], ends="terminated"))
    assert left.drain(PATIENCE)
    left.ask({STATE: np.zeros(8, np.float32)}, **QUESTION)
    assert left.wait_answer(0, PATIENCE).action.shape[1] == 2
    assert "refused" not in inference.server.report()
    assert served.refusals() == {}


def test_the_inference_process_lets_in_and_refuses_as_the_server_does(keys, answering):
    inference = answering(keys)
    ask = m.InferenceRequest(0, 1, True, False, "", {STATE: np.zeros(8, np.float32)})

    def link(role, name, key):
        hello = m.Hello(m.PROTOCOL, role, name)
        return Connection(inference.address, hello, Key.read(keys / f"{key}.key") if key else None)

    def answer(asked):
        def first():
            message = asked.receive()
            return message if isinstance(message, m.InferenceResponse | m.Failed) else None

        asked.hello(PATIENCE)
        asked.send(ask)
        return until(first)

    with link("viewer", "eye", "eye") as eye:
        assert "InferenceRequest is not for the key eye" in answer(eye).text
    with link("actor", "right", "left") as claimed, pytest.raises(Refused, match="is not that of 'right'"):
        claimed.hello(PATIENCE)
    while "no key" not in inference.server.report()["refusals"]:
        with link("actor", "left", None) as plain, pytest.raises(Disconnected):
            plain.hello(PATIENCE)
    with link("actor", "left", "left") as left:
        assert isinstance(answer(left), m.InferenceResponse)
        do("revoke", keys, "left")
        left.send(ask)
        assert "the key left is revoked" in until(left.receive).text
        left.close()
        with pytest.raises(Refused, match="does not let the key left in"):
            left.hello(PATIENCE)
    until(lambda: inference.server.report()["refusals"] | {"no key": 0} == {"no key": 0, "role": 2, "revoked key": 2})


def test_a_storm_is_told_to_come_again_and_a_flood_is_cut(inference, spec, monkeypatch):
    monkeypatch.setitem(access.LIMITS, m.Hello, 5)
    monkeypatch.setattr(fair_queue, "FRAMES", 1000)
    there = inference(rlpd(spec)).start()
    with Connection(there.address, m.Hello(m.PROTOCOL, "actor", "left")) as left:
        left.hello(PATIENCE)
        for _ in range(50):
            left.send(left.greeting)
        assert "too many Hellos" in until(lambda: getattr(left.receive(), "text", ""))
        for _ in range(500):
            left.send(m.Heartbeat({}))
        until(lambda: (left.receive(), not left.is_open)[1])


def test_what_a_connection_asked_is_forgotten_when_it_ends(inference, spec):
    there = inference(rlpd(spec)).start()  # without weights nobody is answered
    with Connection(there.address, m.Hello(m.PROTOCOL, "actor", "left")) as left:
        left.hello(PATIENCE)
        left.send(m.InferenceRequest(0, 1, True, False, "", {STATE: np.zeros(8, np.float32)}))
        until(lambda: there.server._waiting)
    until(lambda: not there.server._waiting)


def test_the_inference_process_answers_a_hello_so_that_nobody_takes_it_for_mute(answering, spec):
    address = answering().address
    with Connection(address, m.Hello(m.PROTOCOL, "actor", "arm", spec=spec.to_dict())) as link:
        welcome = link.hello(PATIENCE)
        assert (welcome.spec, welcome.inference, link.heard > 0) == (spec.to_dict(), "", True)
    with (
        Connection(address, m.Hello((1, 1), "actor", "arm")) as link,
        pytest.raises(TrainerError, match="this client 1-1"),
    ):
        link.hello(PATIENCE)


@pytest.mark.parametrize("host", ["0.0.0.0", "*", "10.0.0.5", "gpu-box"])
def test_another_address_than_loopback_needs_keys_of_the_server_and_of_the_inference_process(tmp_path, host):
    sentence = f"host={re.escape(host)}: without keys the learner listens on loopback only"
    with pytest.raises(ConfigError, match=sentence):
        Server(tmp_path, {"online": 10}, public=f"tcp://{host}:1", local=f"ipc://{tmp_path}/s", inference="")
    with pytest.raises(ConfigError, match=sentence):
        InferenceServer(None, tmp_path, f"tcp://{host}:1", window=0.0)
