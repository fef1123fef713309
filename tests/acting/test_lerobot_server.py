"""lerobot's policy server is asked for chunks, and nothing that it answers ends, holds up or runs anything here.

tests/policies/test_lerobot.py asks the real one. **Assumed** of it, as of 0.4.4 and 0.6.1: it answers nothing where
anything went wrong, also before it has loaded a policy, and forgets its policy when it is started anew.
"""

import pickle
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import numpy as np
import pytest
import torch
from serl_client import ConfigError
from serl_client import messages as m

from serl_launcher.acting import lerobot_server
from serl_launcher.acting.host import PolicyHost, Question
from serl_launcher.acting.lerobot_server import HELPERS, LerobotServer
from tests.shared.common import PATIENCE, STATE, free_port, until
from tests.shared.inference import algorithm_of
from tests.shared.models import robot

from .toy import ask

grpc = pytest.importorskip("grpc", reason="the extra `vla` is not installed: . examples/install.sh --extra vla")
services = pytest.importorskip("lerobot.transport.services_pb2_grpc", reason="the extra `data` is not installed")
words = pytest.importorskip("lerobot.transport.services_pb2")

CAMERA = "observation.images.top"
SEEN = robot(states=2, shape=(4, 6, 3))
CHUNK = torch.linspace(-1, 1, 10).view(5, 2)
OPTIONS = {
    "type": "act", "path": "/there", "device": "cpu", "keys": None, "cameras": ["all"], "n_action_steps": 3,
    "timeout_s": PATIENCE, "scale": "bounds",
}  # fmt: skip


@dataclass
class TimedAction:
    timestamp: float
    timestep: int
    action: Any


class Named(pickle.Unpickler):
    """Reads what the client sends, whatever class it names."""

    def find_class(self, module, name):
        return type(name, (), {"__module__": module}) if module == HELPERS else super().find_class(module, name)


def read(data):
    return Named(BytesIO(data)).load()


def answer(chunk, number):
    """What a server answers, as of lerobot's own class."""
    actions = [TimedAction(0.0, number + at, action) for at, action in enumerate(chunk)]
    said = pickle.dumps(actions, 3)
    return said.replace(f"{TimedAction.__module__}\n".encode(), f"{HELPERS}\n".encode())


class Server(services.AsyncInferenceServicer):
    """On loopback. `act(number, observation)` returns the bytes of an answer.

    policies: what it was told to load. loads: whether it does, or what it raises.
    """

    def __init__(self, port, act):
        self.act, self.policies, self.loads, self.seen = act, [], True, None
        self._server = grpc.server(ThreadPoolExecutor(4))
        services.add_AsyncInferenceServicer_to_server(self, self._server)
        assert self._server.add_insecure_port(f"127.0.0.1:{port}") == port
        self._server.start()

    def Ready(self, request, context):
        return words.Empty()

    def SendPolicyInstructions(self, request, context):
        while self.loads is False:
            time.sleep(0.01)
        if isinstance(self.loads, Exception):
            raise self.loads
        self.policies.append(read(request.data))
        return words.Empty()

    def SendObservations(self, request_iterator, context):
        self.seen = read(b"".join(part.data for part in request_iterator))
        return words.Empty()

    def GetActions(self, request, context):
        said = self.act(self.seen.timestep, self.seen.observation) if self.policies else b""
        return words.Actions(data=said)

    def close(self):
        self._server.stop(0).wait()


@pytest.fixture
def server(exits):
    """server(act, port) -> a Server."""

    def made(act=lambda number, _: answer(CHUNK, number), port=0):
        port = port or free_port()
        there = Server(port, act)
        there.url = f"127.0.0.1:{port}"
        exits.callback(there.close)
        return there

    return made


def asking(there, **options):
    return LerobotServer(SEEN, **{**OPTIONS, "url": getattr(there, "url", there), **options})


def asked(client, *states):
    """The chunks for these states, and what went wrong."""
    states = states or (0.0,)
    images = torch.full((len(states), 4, 6, 3), 7, dtype=torch.uint8)
    seen = {STATE: torch.tensor([[each, -each] for each in states]), CAMERA: images}
    return client.ask({name: seen[name] for name in client.inputs}, ["fold"] * len(states))


def answered(client, clock, *states):
    """The first chunks that it gives, after it has loaded its policy."""

    def given():
        clock.advance(PATIENCE)
        chunks, trouble = asked(client, *states)
        assert not trouble or "it is loading its policy" in trouble
        return [] if trouble else [chunks]

    return until(given)[0]


def test_a_server_loads_what_it_is_told_to_and_gives_a_chunk_for_each_observation(server, clock):
    there = server(lambda number, seen: answer(CHUNK + seen["0"], number))
    client = asking(there, keys={"observation.images.wrist": CAMERA})
    chunks = answered(client, clock, 0.25, 0.5)
    torch.testing.assert_close(chunks, torch.stack([CHUNK[:3] + each for each in (0.25, 0.5)]))
    (policy,), seen = there.policies, there.seen.observation
    assert (policy.policy_type, policy.pretrained_name_or_path, policy.actions_per_chunk) == ("act", "/there", 3)
    assert {key: feature["dtype"] for key, feature in policy.lerobot_features.items()} == {
        STATE: "float32", "observation.images.wrist": "image"
    }  # fmt: skip
    assert (seen["0"], seen["1"], seen["task"], seen["wrist"].shape) == (0.5, -0.5, "fold", (4, 6, 3))
    assert there.seen.must_go


class Evil:
    def __reduce__(self):
        return print, ("this has run",)


RUDE = {
    "nothing": (lambda _: b"", "it answers nothing; its own log says why"),
    "nan": (lambda number: answer(CHUNK * np.nan, number), "its actions are not finite"),
    "size": (lambda number: answer(torch.zeros(5, 3), number), "its actions are [5, 3], not [3"),
    "short": (lambda number: answer(CHUNK[:2], number), "its actions are [2, 2], not [3"),
    "another's": (lambda number: answer(CHUNK, number - 1), "its answer is to another question"),
    "two numbers": (
        lambda number: answer(CHUNK, torch.tensor([number, number])),
        "its answer is to another question",
    ),
    "repeated": (lambda number: answer(CHUNK[:, :1].expand(5, 1 << 20), number), "its answer is no chunk (ValueError)"),
    "places": (lambda number: b"\x80\x03]r\xff\xff\xff\x0f.", "its answer is no chunk (ValueError)"),
    "changed": (
        lambda number: (
            b"\x80\x03c%b\nTimedAction\nN}X\x0c\x00\x00\x00__setstate__c%b\nTimedAction\ns\x86b0]."
            % (HELPERS.encode(), HELPERS.encode())
        ),
        "its answer is no chunk (IndexError)",
    ),
    "uneven": (lambda number: answer([CHUNK[0], CHUNK[0, :1]], number), "its answer is no chunk (ValueError)"),
    "empty": (lambda _: pickle.dumps([], 3), "its answer is no chunk (IndexError)"),
    "bytes": (lambda _: b"x" * 99, "its answer is no chunk ("),
    "code": (lambda _: pickle.dumps([Evil()], 3), "its answer names builtins.print, which is not read"),
    "inner": (lambda number: answer([Evil()] * 3, number), "its answer names builtins.print, which is not read"),
}


@pytest.mark.parametrize("way", RUDE)
def test_a_rude_answer_is_a_sentence_and_no_chunk_and_the_next_question_is_answered(server, clock, way, capfd):
    rude, sentence = RUDE[way]
    there = server()
    client = asking(there)
    answered(client, clock)
    there.act = lambda number, _: rude(number)
    chunks, trouble = asked(client, 0.0, 0.5)
    assert chunks.isnan().all()
    assert trouble.startswith(f"the policy server at {there.url} gives no chunk ({sentence}")
    there.act = lambda number, _: answer(CHUNK, number)
    assert asked(client)[1] == trouble, "it is left alone for a while"
    assert torch.equal(answered(client, clock)[0], CHUNK[:3])
    assert len(there.policies) == (2 if way == "nothing" else 1), "it is set up anew where it may have no policy"
    assert "this has run" not in capfd.readouterr().out


def test_a_slow_server_is_not_told_to_load_again(server, clock):
    slow = []

    def act(number, _):
        time.sleep(0.5 if slow else 0)
        return answer(CHUNK, number)

    there = server(act)
    client = asking(there, timeout_s=0.2)
    there.loads = False
    assert all("it is loading its policy" in asked(client)[1] for _ in range(3) if clock.advance(1) is None)
    there.loads = True
    answered(client, clock)
    slow.append(True)
    clock.advance(PATIENCE)
    assert "no answer within 0.2 s" in asked(client)[1]
    slow.clear()
    answered(client, clock)
    assert len(there.policies) == 1


def test_one_that_is_away_cannot_load_or_starts_anew_is_told_and_set_up_again(server, clock):
    port = free_port()
    client = asking(f"127.0.0.1:{port}")
    assert "it says: " in asked(client)[1]
    there = server(port=port)
    there.loads = ValueError("no such folder")
    sentence = "it has not loaded its policy: Exception calling application: no such folder"
    until(lambda: clock.advance(PATIENCE) or sentence in asked(client)[1])
    there.loads = True
    until(lambda: clock.advance(PATIENCE) or "it is loading" in asked(client)[1] or there.policies)
    answered(client, clock)
    there.close()
    again = server(port=port)
    until(lambda: clock.advance(PATIENCE) or (asked(client)[1] == "" and again.policies))


def test_a_run_improves_it(server, spec, clock, one_thread):
    there = server(lambda number, seen: answer(torch.full((2, spec.action.shape[0]), 0.01 + seen["7"]), number))
    words = ["+algo=residual", "+policy=lerobot_server", f"policy.url={there.url}", "policy.path=/there"]
    host = PolicyHost(algorithm_of(spec, *words, "n_action_steps=2"), spec, "cpu")

    def answered():
        clock.advance(PATIENCE)
        (found,) = host.answer([Question(b"left", ask(0, reset=True, key=0.1))])
        return [] if isinstance(found, m.Failed) else [found]

    (found,) = until(answered)
    np.testing.assert_allclose(found.arrays["base_action"], 0.11, rtol=1e-5)
    assert found.arrays["action"].shape == (1, *spec.action.shape)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"url": "ws://here:8000"},
            r"policy\.url=ws://here:8000: say the address of lerobot's policy server, HOST:PORT",
        ),
        ({"url": "here"}, r"policy\.url=here: say"),
        ({"url": "here:99999"}, r"policy\.url=here:99999: say"),
        ({"type": "mlp"}, r"policy\.type=mlp, policy\.path=/there: say one of act"),
        ({"path": ""}, "the folder on the server"),
        ({"keys": {"observation.joints": STATE}}, r"wants a vector observation\.state: .* policy\.keys="),
        ({"keys": {STATE: STATE, "x": STATE}}, "name each feature once$"),
        (
            {"keys": {"observation.image": CAMERA}},
            r"an image goes as observation\.images\.NAME, not as observation\.image;",
        ),
        ({"keys": {"observation.images.0": CAMERA}}, "`task` and numbers are taken"),
        ({"timeout_s": 0.0}, "say a number above 0"),
    ],
)
def test_a_value_that_cannot_be_is_refused(options, sentence):
    with pytest.raises(ConfigError, match=sentence):
        asking("127.0.0.1:1", **options)


def test_without_grpc_its_install_is_named(monkeypatch):
    def missing(name):
        raise ModuleNotFoundError(name=name)

    monkeypatch.setattr(lerobot_server, "import_module", missing)
    with pytest.raises(ConfigError, match=r"examples/install\.sh --extra data --extra vla"):
        asking("127.0.0.1:1")
