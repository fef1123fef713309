"""The client against a learner on loopback that dies, stalls, loses and refuses."""

import dataclasses
import hashlib
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import zmq
from serl_client import messages as m
from serl_client import weights as weights_module
from serl_client import wire
from serl_client.client import TrainerClient
from serl_client.connection import Connection
from serl_client.controller import RemotePolicy
from serl_client.env import Step
from serl_client.episode import LostRecord, Outcome, Segment
from serl_client.errors import Disconnected, Refused, ServerFailed, Timeout, TrainerError
from serl_client.outbox import Outbox
from serl_client.runner import run_actor
from serl_client.send_queue import SendQueue

from tests.shared.common import until
from tests.shared.fake_learner import FakeLearner

STATE = "observation.state"
PATIENCE = 20.0


@pytest.fixture
def learner():
    learner = FakeLearner()
    yield learner
    learner.stop()


@pytest.fixture
def connect(spec, tmp_path, learner):
    """Opens clients of the learner; they are closed at the end."""
    clients = []

    def open_client(address=None, **options):
        options = {"actor": "robot", "spec": spec, "outbox": tmp_path / "outbox", **options}
        clients.append(TrainerClient(address or learner.address, **options).__enter__())
        return clients[-1]

    yield open_client
    for client in clients:
        client.close()


def is_whole(learner, client, count):
    """Whether all arrived, once and in order."""
    mine = [seq for session, seq, _ in learner.records if session == client.session]
    return mine == list(range(count))


# ---- records


def test_what_is_pushed_arrives_once_and_in_order(learner, connect, make_segment):
    client = connect()
    for start in range(0, 1200, 4):
        until(lambda: client.has_room)
        client.push(make_segment(start=start))
    client.push(Outcome("e0", True))
    assert client.drain(PATIENCE)
    assert is_whole(learner, client, 301)
    assert [record.start for _, _, record in learner.records[:-1]] == list(range(0, 1200, 4))
    assert learner.records[-1][2] == Outcome("e0", True)
    assert client.pending == (0, 0)


def test_what_the_learner_lost_is_sent_again(learner, connect, make_segment, monkeypatch):
    monkeypatch.setattr("serl_client.send_queue.STALL", 1e9)
    client = connect()
    until(lambda: client.connected)
    learner.lost_pushes = 2
    for start in range(0, 80, 4):
        until(lambda: client.has_room)
        client.push(make_segment(start=start))
        time.sleep(0.002)
    assert client.drain(PATIENCE)
    assert is_whole(learner, client, 20)


def test_what_stays_without_an_answer_is_sent_again_in_time(learner, connect, make_segment, monkeypatch):
    monkeypatch.setattr("serl_client.send_queue.STALL", 0.2)
    client = connect()
    until(lambda: client.connected)
    learner.lost_pushes = 1
    client.push(make_segment())
    assert client.drain(PATIENCE)
    assert is_whole(learner, client, 1)


def test_a_learner_that_dies_and_returns_gets_the_rest_and_nothing_twice(learner, connect, make_segment):
    client = connect()
    for round_ in range(4):
        for start in range(0, 40, 4):
            until(lambda: client.has_room)
            client.push(make_segment(episode=f"e{round_}", start=start))
        if round_ % 2 == 0:
            until(lambda: learner.records)
            learner.stop()
            until(lambda: not client.connected)
        else:
            learner.start()
    assert client.drain(PATIENCE)
    assert is_whole(learner, client, 40)
    hellos = [hello.run for hello in learner.hear(m.Hello)]
    assert len(hellos) >= 3
    assert hellos == ["", *["run-a"] * (len(hellos) - 1)]


def test_an_acknowledgement_that_overtakes_a_second_sending_is_taken(tmp_path, spec):
    outbox = Outbox(tmp_path / "outbox", 1 << 20)
    stream = SendQueue(outbox, "session", spec)
    for number in range(3):
        stream.put(Outcome(f"e{number}", True))
    stream.move_to_outbox()
    stream.resume([["session", 0]], 1 << 20)
    assert len(list(stream.pushes())) == 1
    stream.acknowledge(m.Ack("session", 1, resend=True))
    stream.acknowledge(m.Ack("session", 2))  # to the first sending
    (push,) = stream.pushes()
    assert [seq for seq, _ in m.decode_records(push.arrays["records"].data)] == [2]
    stream.acknowledge(m.Ack("session", 3))
    assert list(stream.pushes()) == []
    outbox.close()


def test_an_actor_without_a_learner_leaves_its_records_to_the_next_start(learner, connect, make_segment):
    learner.stop()
    first = connect()
    for start in (0, 4, 8):
        first.push(make_segment(start=start))
    first.close()
    second = connect()
    second.push(make_segment(episode="e1"))
    assert second.pending[0] == 4
    learner.start()
    assert second.drain(PATIENCE)
    assert [(session, seq) for session, seq, _ in learner.records] == [
        *((first.session, seq) for seq in range(3)), (second.session, 0),
    ]  # fmt: skip
    assert learner.hear(m.Hello)[-1].earlier == [[first.session, 2]]


def test_records_of_a_killed_actor_arrive_up_to_the_last_one_that_was_spooled(learner, connect, tmp_path, spec):
    learner.stop()
    code = f"""
import sys, time
import numpy as np
from pathlib import Path
from serl_client import Outcome, Spec, TrainerClient
spec = Spec.from_dict({spec.to_dict()!r})
with TrainerClient({learner.address!r}, actor="robot", spec=spec, outbox=Path({str(tmp_path / "outbox")!r})) as client:
    for number in range(10**6):
        client.push(Outcome(f"e{{number}}", None))
        if number == 100:
            print(client.session, flush=True)
        while not client.has_room:
            time.sleep(0.001)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        session = process.stdout.readline().strip()
        process.kill()
    learner.start()
    client = connect()
    assert client.drain(PATIENCE)
    assert [seq for there, seq, _ in learner.records if there == session] == list(range(len(learner.records)))
    assert [record.episode for _, _, record in learner.records] == [f"e{i}" for i in range(len(learner.records))]
    assert len(learner.records) >= 80


def test_another_run_is_refused_and_nothing_is_deleted(learner, connect, make_segment, tmp_path):
    client = connect()
    until(lambda: client.connected)
    learner.acknowledges = False
    client.push(make_segment())
    until(lambda: learner.records)
    client.close()
    learner.run = "run-b"
    again = connect()
    with pytest.raises(Refused, match=r"run-a.*run-b.*nothing was deleted"):
        again.wait_answer(0, PATIENCE)
    with pytest.raises(Refused):
        again.push(make_segment(episode="e1"))
    again.close()
    assert len(learner.records) == 1
    learner.run, learner.acknowledges = "run-a", True
    third = connect()
    assert third.drain(PATIENCE)
    assert [(session, seq) for session, seq, _ in learner.records] == [(client.session, 0), (again.session, 0)]


def test_a_learner_that_has_lost_what_it_acknowledged_is_not_sent_the_rest(learner, connect, make_segment, monkeypatch):
    monkeypatch.setattr("serl_client.outbox.FILE_BYTES", 1)
    client = connect()
    client.push(make_segment())
    assert client.drain(PATIENCE)
    learner.acknowledges = False
    client.push(make_segment(start=4))
    until(lambda: len(learner.records) == 2)
    learner.stop()
    learner.expected.clear()
    learner.start()
    with pytest.raises(Refused, match="lost data"):
        client.wait_answer(0, PATIENCE)
    assert client.pending[0] == 1


def test_no_more_than_the_window_is_on_its_way(learner, connect, make_segment):
    learner.window, learner.acknowledges = 4000, False
    client = connect()
    for start in range(0, 400, 4):
        until(lambda: client.has_room)
        client.push(make_segment(start=start))
    until(lambda: learner.pushed_bytes > 2000)
    time.sleep(0.3)  # in which one that minds no window would send more
    assert learner.pushed_bytes <= 4000
    learner.acknowledges = True
    learner.say(learner.ack(client.session))
    assert client.drain(PATIENCE)
    assert is_whole(learner, client, 100)


def test_a_record_that_is_larger_than_the_window_goes_alone(learner, connect, make_segment):
    learner.window = 100
    client = connect()
    client.push(make_segment())
    client.push(make_segment(start=4))
    assert client.drain(PATIENCE)
    assert is_whole(learner, client, 2)


def test_a_full_outbox_shows_as_no_room_and_what_ends_the_episode_is_still_taken(learner, connect, make_segment):
    """hi-ors E8: a queue of 100 lost 900 of 1000 transitions without a word."""
    learner.stop()
    client = connect(capacity=3000)
    starts = iter(range(0, 10**6, 4))
    while client.has_room:
        client.push(make_segment(start=next(starts)))
        time.sleep(0.002)
    client.push(make_segment(start=next(starts), ends="truncated"))
    client.push(Outcome("e0", None, discard=True))
    until(lambda: "full" in client.fault)

    def push_on():
        for start in starts:
            client.push(make_segment(episode="e1", start=start))

    with pytest.raises(TrainerError, match=r"queue .* full"):
        push_on()
    taken = client.pending[0]
    learner.start()
    assert client.drain(PATIENCE)
    assert client.has_room
    assert is_whole(learner, client, taken)


def test_a_segment_that_does_not_fit_the_spec_ends_the_client_visibly(learner, connect, make_segment):
    client = connect()
    client.push(make_segment())
    assert client.drain(PATIENCE)
    client.push(dataclasses.replace(make_segment(start=4), action=np.zeros((4, 3), np.float32)))
    with pytest.raises(TrainerError, match="action should be"):
        client.wait_answer(0, PATIENCE)
    until(lambda: len(learner.records) == 2)
    assert [type(record) for *_, record in learner.records] == [Segment, LostRecord]


# ---- the connection


@pytest.mark.parametrize("stopped", [False, True], ids=["dead", "stopped"])
def test_nothing_blocks_when_the_learner_is(stopped, connect, make_segment):
    with socket.create_server(("127.0.0.1", 0)) as mute:  # takes connections, and says nothing
        client = connect(f"tcp://127.0.0.1:{mute.getsockname()[1] if stopped else 1}")
        longest = 0.0
        for start in range(0, 400, 4):
            until(lambda: client.has_room)
            began = time.monotonic()
            client.push(make_segment(start=start))
            ask(client, start)
            assert client.answer() is None
            longest = max(longest, time.monotonic() - began)
        assert longest < 0.5
        assert client.pending[0] == 100
        assert not client.connected
        client.close()


def test_a_refusal_for_good_is_raised_by_the_next_call_and_ends_the_sending(learner, connect, make_segment):
    client = connect()
    until(lambda: client.connected)
    learner.acknowledges = False
    client.push(make_segment())
    until(lambda: learner.records)
    learner.say(m.Failed("Refused", "another client of this name", final=True))
    with pytest.raises(Refused, match="another client"):
        client.wait_answer(0, PATIENCE)
    hellos = len(learner.hear(m.Hello))
    with pytest.raises(Refused):
        client.push(make_segment(start=4))
    with pytest.raises(Refused):
        client.ask({}, step=0, seed=0, previous_action=None, reset=True, explore=False, task="")
    time.sleep(0.5)
    assert len(learner.hear(m.Hello)) == hellos
    assert (client.pending[0], len(learner.records)) == (2, 1)


def test_a_refusal_of_one_message_does_not_end_the_connection(learner, connect, make_segment):
    client = connect()
    until(lambda: client.connected)
    learner.say(m.Failed("ServerFailed", "once"))
    client.push(make_segment())
    assert client.drain(PATIENCE)


def test_a_learner_that_cannot_welcome_yet_is_asked_again(learner, connect, make_segment):
    learner.refusal = m.Failed("ServerFailed", "the disk fails")
    client = connect()
    client.push(make_segment())
    until(lambda: len(learner.hear(m.Hello)) > 2)
    learner.refusal = None
    assert client.drain(PATIENCE)


def test_a_learner_that_has_forgotten_us_gets_a_hello_again(learner, connect, make_segment):
    client = connect()
    until(lambda: client.connected)
    learner.say(m.Failed("Disconnected", "say Hello first"))
    until(
        lambda: len([hello for hello in learner.hear(m.Hello) if hello.session == client.session]) >= 3
    )  # and inference
    client.push(make_segment())
    assert client.drain(PATIENCE)


def test_messages_that_are_none_are_counted_and_dropped(learner, connect, make_segment):
    client = connect()
    until(lambda: client.connected)
    learner.say([b"nonsense"])
    learner.say([*m.encode(m.Done()), b"too many"])
    learner.say(m.StateUpdate({"number": "five"}, {}))
    learner.say(m.Ack("e", "7"))
    learner.say(m.Status({}))
    learner.say(wire.pack({"type": "Hello", "protocol": [9, 9]}, {}))
    until(lambda: client._network.server.malformed >= 6)
    client.push(make_segment())
    assert client.drain(PATIENCE)


def test_the_end_of_the_network_thread_is_seen_by_the_next_call(connect, monkeypatch, caplog):
    client = connect()
    until(lambda: client.connected)
    monkeypatch.setattr(client._send_queue, "move_to_outbox", lambda: 1 / 0)
    with pytest.raises(TrainerError, match="ZeroDivisionError"):
        client.wait_answer(0, PATIENCE)
    assert "Traceback" in caplog.text


def test_directives_permissions_and_ordinal_are_followed(learner, connect):
    learner.notice = dataclasses.replace(learner.notice, step_limit=5)
    client = connect(paced=True)
    assert (client.step_limit, client.directive["mode"]) == (0, "idle")
    until(lambda: client.step_limit == 5)
    assert client.ordinal == 3
    learner.tell(directive={"number": 4, "phase": "evaluate", "mode": "evaluate"}, step_limit=None)
    until(lambda: client.directive["number"] == 4)
    assert client.step_limit is None
    learner.tell(directive={"number": 2, "phase": "old", "mode": "stop"}, degraded="disk")
    until(lambda: client.degraded == "disk")
    assert client.directive["phase"] == "evaluate"
    assert client.last_seen < PATIENCE


def test_heartbeats_carry_the_report_and_commands_are_acknowledged(learner, connect, caplog):
    caplog.set_level("INFO")
    client = connect()
    client.report = {"mode": "collect"}
    client.command("goto", "evaluate")
    until(lambda: learner.hear(m.Heartbeat))
    assert learner.hear(m.Heartbeat)[-1].report == {"mode": "collect"}
    until(lambda: "goto as number 7" in caplog.text)
    assert [(command.name, command.argument) for command in learner.hear(m.Command)] == [("goto", "evaluate")]
    client.close()
    until(lambda: learner.hear(m.Bye))


def test_a_failure_of_another_message_leaves_the_operators_command_and_the_weights_alone(
    learner, connect, tmp_path, caplog
):
    caplog.set_level("INFO")
    given = []
    learner._command = lambda identity, command: given.append(command)
    learner._weightsrequest = lambda identity, request: None
    client = connect(weights_folder=tmp_path / "weights")
    until(lambda: client.connected)
    learner.tell(weights={"version": 1, "sha256": "a" * 64, "size": 10})
    client.command("next")
    until(lambda: given and learner.hear(m.WeightsRequest))
    learner.say(m.Failed("ServerFailed", "something else", request=77))
    learner.say(m.Failed("ServerFailed", "a message that nobody could read"))
    learner.say(m.Done(5, request=78))
    until(lambda: "nobody could read" in caplog.text)
    assert (client._network.commands[0].name, client._network.weights._pull is None) == ("next", False)
    learner.say(m.Done(7, given[0].request))
    until(lambda: "next as number 7" in caplog.text)
    assert not client._network.commands


def test_weights_wait_a_little_when_their_request_failed(learner, connect, tmp_path):
    learner._weightsrequest = lambda identity, request: m.Failed("Refused", "they are gone", request=request.request)
    client = connect(weights_folder=tmp_path / "weights")
    until(lambda: client.connected)
    learner.tell(weights={"version": 1, "sha256": "a" * 64, "size": 10})
    until(lambda: client._network.weights._resume > 0)
    assert len(learner.hear(m.WeightsRequest)) == 1


def test_a_command_whose_answer_a_cut_has_taken_is_not_given_twice(learner, connect, caplog):
    given = []
    learner._command = lambda identity, command: given.append(command.name)
    client = connect()
    until(lambda: client.connected)
    client.command("next")
    until(lambda: given)
    learner.stop()
    learner.start()
    until(lambda: "the link broke before the learner answered to next" in caplog.text)
    client.command("hold")
    until(lambda: "hold" in given)
    assert given == ["next", "hold"]


# ---- questions


def ask(client, step, reset=False):
    observation = {STATE: np.full(8, step, np.float32)}
    question = {"previous_action": np.zeros(2, np.float32), "reset": reset, "explore": True, "task": "fold"}
    client.ask(observation, step=step, seed=step, **question)


def test_an_answer_comes_once_with_the_row_that_it_was_asked_for(learner, connect):
    client = connect()
    for step in range(50):
        ask(client, step)
        answer = client.wait_answer(step, PATIENCE)
        assert (answer.step, answer.version, answer.action.shape) == (step, 1, (1, 2))
        assert np.allclose(answer.action, step / 1000)
        assert client.answer() is None
    question = learner.hear(m.InferenceRequest)[7]
    assert (question.step, question.seed, question.explore, question.task) == (7, 7, True, "fold")
    assert set(question.arrays) == {STATE, "previous_action"}


def test_answers_that_come_too_late_are_dropped(learner, connect, monkeypatch):
    monkeypatch.setattr("serl_client.network.PATIENCE", 0.01)
    learner.answers = False
    client = connect()
    ask(client, 3)
    until(lambda: learner.hear(m.InferenceRequest))
    ask(client, 4)
    until(lambda: len(learner.hear(m.InferenceRequest)) == 2)
    learner.say(learner.act(3))
    assert client.wait_answer(4, 0.3) is None
    learner.say(learner.act(4))
    assert client.wait_answer(4, PATIENCE).step == 4
    learner.say(learner.act(4))  # nobody asked for it again
    learner.say(learner.act(9))
    assert client.wait_answer(0, 0.3) is None


def test_an_answer_to_a_question_of_the_episode_before_is_dropped(learner, connect, monkeypatch):
    monkeypatch.setattr("serl_client.network.PATIENCE", 0.01)
    learner.answers = False
    client = connect()
    ask(client, 0)
    until(lambda: learner.hear(m.InferenceRequest))
    client.forget()
    ask(client, 0, reset=True)
    until(lambda: len(learner.hear(m.InferenceRequest)) == 2)
    learner.say(learner.act(0, version=1))
    assert client.wait_answer(0, 0.3) is None
    learner.say(learner.act(0, version=2))
    assert client.wait_answer(0, PATIENCE).version == 2


def test_a_newer_question_replaces_one_that_still_waits(learner, connect):
    learner.answers = False
    client = connect()
    ask(client, 0)
    until(lambda: learner.hear(m.InferenceRequest))
    for step in range(1, 20):
        ask(client, step)
    learner.say(learner.act(0))
    assert client.wait_answer(0, PATIENCE).step == 0
    until(lambda: len(learner.hear(m.InferenceRequest)) == 2)
    assert [question.step for question in learner.hear(m.InferenceRequest)] == [0, 19]


def test_actions_that_are_not_finite_or_of_another_shape_never_reach_the_robot(learner, connect):
    learner.answers = False
    client = connect()
    ask(client, 0)
    until(lambda: learner.hear(m.InferenceRequest))
    for action in (np.full((1, 2), np.nan, np.float32), np.zeros((1, 3), np.float32), np.zeros(2, np.float32)):
        learner.say(m.InferenceResponse(0, 1, {"action": action}))
    assert client.wait_answer(0, 0.3) is None
    learner.say(learner.act(0))
    assert client.wait_answer(0, PATIENCE) is not None


def test_questions_are_answered_again_after_the_learner_returned(learner, connect):
    client = connect()
    ask(client, 0)
    assert client.wait_answer(0, PATIENCE)
    learner.stop()
    ask(client, 1)
    assert client.wait_answer(1, 0.1) is None
    learner.start()

    def answered():
        ask(client, 2)
        return client.wait_answer(2, 0.1)

    assert until(answered).step == 2


def test_a_policy_asks_again_until_the_weights_that_must_act_are_loaded(learner, connect, monkeypatch):
    monkeypatch.setattr("serl_client.controller.REPEAT", 0.05)
    policy = RemotePolicy(connect(), deadline=0.2)
    policy.begin("e0", {"explore": False, "weights": 2}, "reach")
    observation = {STATE: np.zeros(8, np.float32)}

    def act():
        return policy.act(observation, step=0, previous_action=None, reset=True)

    assert act() is None
    until(lambda: act() is not None or len(learner.hear(m.InferenceRequest)) > 2)
    assert policy.version == 0
    learner.act = lambda step: FakeLearner.act(step, version=2)
    until(lambda: act() is not None)
    assert (policy.version, policy.chunk_start) == (2, True)


# ---- weights


def offer(learner, version, content):
    sha256 = hashlib.sha256(content).hexdigest()
    learner.files[sha256] = content
    learner.tell(weights={"version": version, "sha256": sha256, "size": len(content)})
    return sha256


@pytest.fixture
def small_parts(monkeypatch):
    monkeypatch.setattr(weights_module, "PART_BYTES", 1000)
    monkeypatch.setattr(weights_module, "PAUSE", 0.1)


def random_bytes(seed, size=20_500):
    return np.random.default_rng(seed).bytes(size)


@pytest.mark.usefixtures("small_parts")
def test_weights_are_pulled_and_a_pull_that_was_cut_goes_on_where_it_was(learner, connect, tmp_path):
    learner.parts = 8
    client = connect(weights_folder=tmp_path / "weights")
    sha256 = offer(learner, 5, random_bytes(0))
    until(lambda: not learner._thread.is_alive())
    assert client.weights(0) is None
    learner.parts = 1 << 30
    before = len(learner.hear(m.WeightsRequest))
    learner.start()
    version, path = until(lambda: client.weights(0))
    assert (version, path.name, path.read_bytes()) == (5, f"{sha256}.safetensors", random_bytes(0))
    assert client.weights(5) is None
    assert min(request.offset for request in learner.hear(m.WeightsRequest)[before:]) >= 4000
    assert {request.offset for request in learner.hear(m.WeightsRequest)} == set(range(0, 20_500, 1000))


@pytest.mark.usefixtures("small_parts")
def test_a_pull_goes_on_after_a_restart_of_the_actor(learner, connect, tmp_path):
    learner.parts = 8
    client = connect(weights_folder=tmp_path / "weights")
    offer(learner, 5, random_bytes(0))
    until(lambda: not learner._thread.is_alive())
    client.close()
    learner.parts = 1 << 30
    before = len(learner.hear(m.WeightsRequest))
    learner.start()
    again = connect(weights_folder=tmp_path / "weights")
    assert until(lambda: again.weights(0))[1].read_bytes() == random_bytes(0)
    assert min(request.offset for request in learner.hear(m.WeightsRequest)[before:]) >= 4000


@pytest.mark.usefixtures("small_parts")
def test_a_pull_is_finished_before_the_newest_weights_are_taken_and_two_files_are_kept(learner, connect, tmp_path):
    folder = tmp_path / "weights"
    client = connect(weights_folder=folder)
    until(lambda: client.connected)
    learner.parts = 6
    first = offer(learner, 1, random_bytes(1))
    until(lambda: not learner._thread.is_alive())
    learner.files[first], kept = random_bytes(1), learner.files
    newest = [hashlib.sha256(random_bytes(version)).hexdigest() for version in (2, 3)]
    kept |= dict(zip(newest, (random_bytes(2), random_bytes(3)), strict=True))
    learner.notice = dataclasses.replace(
        learner.notice, weights={"version": 3, "sha256": newest[1], "size": len(random_bytes(3))}
    )
    learner.parts = 1 << 30
    learner.start()
    assert until(lambda: client.weights(2))[0] == 3
    asked = [request.sha256 for request in learner.hear(m.WeightsRequest)]
    assert asked == sorted(asked, key=[first, newest[1]].index)
    assert newest[0] not in asked
    assert {path.stem for path in folder.iterdir()} == {first, newest[1]}
    fourth = offer(learner, 4, random_bytes(4))
    until(lambda: client.weights(3))
    assert {path.name for path in folder.iterdir()} == {f"{newest[1]}.safetensors", f"{fourth}.safetensors"}


@pytest.mark.usefixtures("small_parts")
def test_damaged_weights_are_never_given_out(learner, connect, tmp_path):
    client = connect(weights_folder=tmp_path / "weights")
    until(lambda: client.connected)
    sha256 = hashlib.sha256(random_bytes(0)).hexdigest()
    learner.files[sha256] = bytes(20_500)
    learner.tell(weights={"version": 1, "sha256": sha256, "size": 20_500})
    until(lambda: len(learner.hear(m.WeightsRequest)) > 30)  # it begins anew
    assert client.weights(0) is None
    learner.files[sha256] = random_bytes(0)
    assert until(lambda: client.weights(0))[1].read_bytes() == random_bytes(0)


@pytest.mark.parametrize("sha256", ["../../evil", "A" * 64, "a" * 63, 7])
def test_weights_are_named_by_their_hash_alone(learner, connect, tmp_path, sha256):
    client = connect(weights_folder=tmp_path / "weights")
    until(lambda: client.connected)
    learner.tell(weights={"version": 1, "sha256": sha256, "size": 10})
    until(lambda: client._network.server.malformed)
    assert learner.hear(m.WeightsRequest) == []
    assert list((tmp_path / "weights").iterdir()) == []


# ---- a link by itself


def learner_link(learner, address=None):
    return Connection(address or learner.address, m.Hello(m.PROTOCOL, "learner", "trainer"))


def test_a_call_returns_its_answer_and_keeps_what_else_came(learner):
    with learner_link(learner) as link:
        assert link.hello(PATIENCE).run == "run-a"
        link.send(m.Command("next"))
        until(lambda: learner.hear(m.Command))
        learner.tell(step_limit=9)
        assert link.call(m.Status(), PATIENCE).report == {"fine": True}
        assert until(link.receive) == m.Done(7)
        until(lambda: link.receive() is None and link.notice.step_limit == 9)


def test_a_call_takes_no_answer_to_another_message(learner):
    def answer(identity, command):
        learner.say(m.Failed("Refused", "of an StepLimit", request=99))
        learner.say(m.Done(1, request=98))
        learner.say(m.Done(7, request=command.request))

    learner._command = answer
    with learner_link(learner) as link:
        assert link.call(m.Command("next"), PATIENCE).value == 7
        assert until(link.receive).text == "of an StepLimit"


def test_a_call_raises_what_failed_and_goes_on_after_a_restart(learner):
    with learner_link(learner) as link:
        assert link.call(m.Status(), PATIENCE)
        learner._status = lambda identity, status: m.Failed("ServerFailed", "no store")
        with pytest.raises(ServerFailed, match="no store"):
            link.call(m.Status(), PATIENCE)
        learner._status = lambda identity, status: None
        with pytest.raises(Timeout):
            link.call(m.Status(), 0.1)
        del learner._status
        learner.stop()
        with pytest.raises(Disconnected):
            link.call(m.Status(), PATIENCE)
        learner.start()
        assert link.call(m.Status(), PATIENCE).report == {"fine": True}


def test_a_link_that_is_only_listened_to_connects_again(learner):
    with learner_link(learner) as link:
        until(lambda: link.receive() is None and link.connected)
        learner.stop()
        until(lambda: link.receive() is None and not link.connected)
        assert not link.send(m.Status())
        learner.start()
        until(lambda: link.receive() is None and link.connected)


# ---- all of it


class Walk:
    """A simulated environment of episodes of 10 steps, which counts how far it runs ahead of its permission."""

    task, clock, has_operator = "walk", "simulated", False

    def __init__(self, spec):
        self.spec, self.client, self.ahead, self.steps = spec, None, 0, 0

    def observe(self):
        return {STATE: np.full(8, self.row, np.float32)}

    def reset(self, seed, *, teleop=False, intervene=False):
        self.row = 0
        return self.observe()

    def step(self, action):
        allowed = self.client.step_limit
        self.ahead += allowed is not None and self.steps >= allowed
        self.row, self.steps = self.row + 1, self.steps + 1
        ended = self.row == 10
        return Step(self.observe(), 0.0, action, False, ended, False, True if ended else None)

    def stop(self):
        pass


def test_a_paced_actor_neither_runs_ahead_nor_waits_for_ever(learner, connect, spec):
    learner.steps_per_ack = 3
    collect = {"number": 2, "phase": "practise", "mode": "collect", "explore": True, "weights": None}
    learner.notice = dataclasses.replace(learner.notice, directive=collect)
    env, client = Walk(spec), connect(paced=True)
    env.client = client
    actor = threading.Thread(
        target=run_actor, args=(env, RemotePolicy(client, deadline=1.0), client), kwargs={"seed": 0}
    )
    actor.start()
    until(lambda: env.steps > 100)
    learner.steps_per_ack = None
    learner.tell(directive={"number": 3, "phase": "", "mode": "stop", "boundary": "now"})
    actor.join(PATIENCE)
    assert not actor.is_alive()
    assert env.ahead == 0
    assert client.pending == (0, 0)
    segments = [record for _, _, record in learner.records if not isinstance(record, Outcome)]
    assert sum(len(segment) for segment in segments) == env.steps
    assert all(len(segment) <= 3 for segment in segments)


def test_the_last_words_of_a_learner_that_ends_are_read(spec, monkeypatch):
    """It says why it ends and closes, all between our look at the socket and our look at the connection."""
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    greeting = m.Hello(m.PROTOCOL, "actor", "arm", "e" * 32, "o" * 32, "", spec.to_dict(), [], True, False)
    with Connection(f"tcp://127.0.0.1:{port}", greeting) as link:
        assert link.receive() is None
        identity, *_ = router.recv_multipart()

        def nothing_yet(_):
            monkeypatch.undo()
            router.send_multipart([identity, *m.encode(m.Failed("Refused", "no room", True))])
            context.destroy(linger=2000)
            assert link._monitor.poll(5000)
            return []

        monkeypatch.setattr("serl_client.connection.received", nothing_yet)
        link.receive()
        until(lambda: (message := link.receive()) is None or message.text == "no room", 1)
        assert link.heard
