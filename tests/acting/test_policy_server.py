"""A policy server that is not ours is asked for chunks, and nothing that it does ends or holds up who asks."""

import socket

import numpy as np
import pytest
import torch
from serl_client import ConfigError
from serl_client import messages as m

from serl_launcher.acting.host import PolicyHost, Question
from serl_launcher.acting.policy_server import PolicyServer
from tests.shared.common import PATIENCE, STATE, free_port
from tests.shared.here import thread
from tests.shared.inference import algorithm_of
from tests.shared.models import robot
from tests.shared.policy_servers import answer, policy

from .toy import ask

CAMERA = "observation.images.top"
SEEN = robot(states=2, shape=(4, 6, 3))
CHUNK = np.linspace(-1, 1, 10).reshape(5, 2)  # float64, longer than what runs
OPTIONS = {
    "api_key": None,
    "keys": None,
    "cameras": ["all"],
    "n_action_steps": 3,
    "timeout_s": PATIENCE,
    "scale": "bounds",
}


@pytest.fixture
def server(exits):
    """server(act, port) -> a foreign policy server, see tests/shared/policy_servers.py."""
    return lambda act, port=0: exits.enter_context(policy(act, port))


def asking(there, **options):
    return PolicyServer(SEEN, url=getattr(there, "url", there), **{**OPTIONS, **options})


def observed(*states):
    return {
        STATE: torch.tensor([[each, -each] for each in states]),
        CAMERA: torch.full((len(states), 4, 6, 3), 7, dtype=torch.uint8),
    }  # fmt: skip


def asked(client, *states):
    """The chunks for these states, and what went wrong."""
    return client.ask(observed(*states), ["fold"] * len(states))


def test_a_server_that_is_not_ours_gets_what_its_keys_name_and_gives_a_chunk_for_each_row(server):
    there = server(lambda request: CHUNK + request["observation/state"])
    client = asking(there, keys={"observation/state": STATE, "observation/image": CAMERA})
    chunks, trouble = asked(client, 0.25, 0.5)
    expected = np.stack([CHUNK[:3] + np.array([each, -each]) for each in (0.25, 0.5)]).astype(np.float32)
    assert (trouble, chunks.dtype) == ("", torch.float32)
    assert np.array_equal(chunks.numpy(), expected)
    first = there.requests[0]
    assert first.keys() == {"observation/state", "observation/image", "prompt"}
    assert (first["observation/state"].dtype, first["observation/image"].dtype) == (np.float32, np.uint8)
    assert first["observation/image"].shape == (4, 6, 3)
    assert first["prompt"] == "fold"
    assert there.opened == 1


def test_without_keys_a_server_gets_our_names_and_without_cameras_no_images(server):
    there = server(lambda _: CHUNK)
    assert asked(asking(there, cameras=[]), 0.0)[1] == ""
    assert asked(asking(there), 0.0)[1] == ""
    assert [request.keys() for request in there.requests] == [{STATE, "prompt"}, {STATE, CAMERA, "prompt"}]


def late(connection):
    """It never answers."""


def closing(connection):
    connection.close_socket()


def failing(connection):
    connection.send("Traceback (most recent call last):\n  ...\nValueError: no such \x1b[2J camera")
    connection.close(1011)


RUDE = {
    "late": (late, "no answer within"),
    "cut": (closing, "no close frame received"),
    "text": (failing, "it says: ValueError: no such ?[2J camera"),
    "size": (np.zeros((5, 3)), r"its actions are [5, 3], not [3 (n_action_steps) or more, 2]"),
    "short": (np.zeros((2, 2)), "its actions are [2, 2], not [3"),
    "flat": (np.zeros(2), "its actions are [2], not [3"),
    "nan": (np.full((5, 2), np.nan), "its actions are not finite"),
    "huge": (np.full((5, 2), 1e300), "its actions are not finite"),
    "words": (np.ones((5, 2), bool), "its answer has no array `actions`"),
    "bytes": (lambda connection: connection.send(b"\xc1"), "this is no answer of a policy server"),
    "list": (lambda connection: connection.send(answer(actions=[[0.0, 0.0]] * 5)), "has no array `actions`"),
    "other": (lambda connection: connection.send(answer(action=CHUNK)), "has no array `actions`"),
    "long": (lambda connection: connection.send(bytes(5 << 20)), "1009"),
}


@pytest.mark.parametrize("way", RUDE)
def test_a_rude_answer_is_a_sentence_and_no_chunk_and_the_next_question_is_answered(server, clock, way):
    rude, sentence = RUDE[way]
    polite = []
    there = server(lambda _: CHUNK if polite else rude)
    client = asking(there, timeout_s=0.2 if way == "late" else PATIENCE)
    chunks, trouble = asked(client, 0.0, 0.5)
    assert chunks.isnan().all()
    assert trouble.startswith(f"the policy server at {there.url} gives no chunk (")
    assert sentence in trouble
    assert len(there.requests) == 1, "after the first question that fails the others are not asked"
    polite.append(True)
    assert asked(client, 0.0)[1] == trouble, "it is left alone for a while"
    assert len(there.requests) == 1
    clock.advance(PATIENCE)
    chunks, trouble = asked(client, 0.0)
    assert trouble == ""
    assert np.array_equal(chunks[0].numpy(), CHUNK[:3].astype(np.float32))
    assert there.opened == 2, "an answer that comes late is none to the next question"


def test_a_server_that_is_away_or_restarts_is_asked_again(server, clock):
    port = free_port()
    client = asking(f"ws://127.0.0.1:{port}")
    assert "Connection refused" in asked(client, 0.0)[1]
    for _ in range(2):
        there = server(lambda _: CHUNK, port)
        clock.advance(PATIENCE)
        assert asked(client, 0.0)[1] == ""
        there.close()
        assert "gives no chunk" in asked(client, 0.0)[1]


@pytest.mark.parametrize(("said", "sentence"), [(b"", "no answer within 0.2 s"), (b"220 mail\r\n", "gives no chunk (")])
def test_who_listens_and_is_no_policy_server_is_told(said, sentence):
    with socket.create_server(("127.0.0.1", 0)) as there:

        def serve():
            with there.accept()[0] as connection:
                connection.sendall(said)
                connection.recv(1 << 16)
                while connection.recv(1 << 16):
                    pass

        with thread(serve) as errors:
            assert sentence in asked(asking(f"ws://127.0.0.1:{there.getsockname()[1]}", timeout_s=0.2), 0.0)[1]
        assert not errors


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"url": "127.0.0.1:8000"}, r"policy\.url=127.0.0.1:8000: say the address of a policy server, ws://HOST:PORT"),
        ({"url": "http://here"}, r"policy\.url=http://here: say"),
        ({"url": "ws://here:70000"}, r"policy\.url=ws://here:70000: say"),
        ({"timeout_s": 0.0}, r"policy\.timeout_s=0\.0, n_action_steps=3: say a number above 0"),
        ({"n_action_steps": 0}, "1 or more steps"),
        ({"keys": {"x": "observation.y"}}, r"policy\.keys names observation\.y, which is not sent: name some of"),
        ({"keys": {"x": CAMERA}, "cameras": []}, "or its camera in policy.cameras"),
        ({"keys": {"x": STATE, "y": STATE}}, "name each feature once"),
        ({"keys": {"prompt": STATE}}, "and none 'prompt'"),
        ({"cameras": ["wrist"]}, "this robot has no camera wrist"),
        (
            {"api_key": "/no/such"},
            r"cannot read /no/such \(No such file or directory\): policy\.api_key names",
        ),
    ],
)
def test_a_value_that_cannot_be_is_refused(options, sentence):
    with pytest.raises(ConfigError, match=sentence):
        PolicyServer(SEEN, **{**OPTIONS, "url": "ws://127.0.0.1:1", **options})


@pytest.mark.parametrize(
    ("content", "mode", "sentence"),
    [
        (b"left:1a2b", 0o644, "has mode 0644, so others may use the key: say chmod 600"),
        *((content, 0o600, "should hold an Api-Key alone") for content in (b"", b"a\nb", b"\xff", "lé:1".encode())),
    ],
)
def test_a_file_that_holds_no_api_key_for_us_alone_is_refused(content, mode, sentence, tmp_path):
    (file := tmp_path / "key").write_bytes(content)
    file.chmod(mode)
    with pytest.raises(ConfigError, match=sentence):
        asking("ws://127.0.0.1:1", api_key=str(file))


# -- within the inference process


def test_an_actor_without_a_chunk_gets_a_sentence_and_the_others_their_actions(server, spec, clock, one_thread):
    rude, size = [], spec.action.shape[0]

    def act(request):
        return failing if rude else np.full((2, size), 0.01) + request[STATE][0]

    there = server(act)
    words = ["+algo=residual", "+policy=server", f"policy.url={there.url}", "n_action_steps=2"]
    host = PolicyHost(algorithm_of(spec, *words), spec, "cpu")

    def answers(**steps):
        questions = [Question(name.encode(), ask(step, reset=step == 0, key=0.1)) for name, step in steps.items()]
        return host.answer(questions)

    (left,) = answers(left=0)
    assert left.arrays["action"].shape == (1, size)
    np.testing.assert_allclose(left.arrays["base_action"], 0.11, rtol=1e-5)
    assert left.arrays["has_base"].tolist() == [True]
    answers(left=1, right=0)
    assert len(there.requests) == 2, "each is asked about once for two steps"
    rude.append(True)
    left, right = answers(left=2, right=1)
    assert isinstance(left, m.Failed)
    assert left.text.startswith(f"step 2: the policy server at {there.url} gives no chunk (it says: ValueError")
    assert np.isfinite(right.arrays["action"]).all(), "its chunk still lasts"
    rude.clear()
    clock.advance(PATIENCE)
    (left,) = answers(left=3)
    assert np.isfinite(left.arrays["action"]).all()
    assert left.reset, "it begins anew, and says so"
