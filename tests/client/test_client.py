"""The client against a learner on loopback that stalls, loses and refuses: what becomes of records."""

import dataclasses
import socket
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from serl_client import TrainerClient
from serl_client import messages as m
from serl_client.controller import RemotePolicy
from serl_client.episode import LostRecord, Outcome, Segment
from serl_client.errors import Refused, Replaced, TrainerError
from serl_client.outbox import Outbox
from serl_client.runner import run_actor
from serl_client.send_queue import STALL

from tests.shared.actors import CountingEnv
from tests.shared.clients import push_all
from tests.shared.common import PATIENCE, STATE, until
from tests.shared.examples import run_example

QUESTION = {"step": 0, "seed": 0, "previous_action": None, "reset": True, "explore": False, "task": ""}


@pytest.fixture
def segments(make_segment):
    """segments(count) -> so many of one episode, of 4 steps each."""
    return lambda count, **options: [make_segment(start=4 * number, **options) for number in range(count)]


def test_the_example_of_the_client_runs(learner, spec, make_segment, tmp_path):
    given = {"spec": spec, "segment": make_segment(), "observation": {}, "action": np.zeros(2, np.float32)}
    given |= {"TrainerClient": TrainerClient, "Path": tmp_path.joinpath}
    patience = ("(10.0)", f"({PATIENCE})")
    run_example(TrainerClient, given, address=("tcp://10.0.0.5:5555", learner.address), patience=patience)
    assert [record.episode for _, _, record in learner.records] == [given["segment"].episode]
    assert [question.step for question in learner.hear(m.InferenceRequest)] == [4]


@pytest.mark.parametrize(("stalls", "lost", "count"), [(False, 2, 20), (True, 1, 1)], ids=["a gap is seen", "in time"])
def test_what_the_learner_lost_is_sent_again(clock, learner, client, segments, stalls, lost, count):
    learner.lost_pushes = lost
    for segment in segments(count):
        before = learner.pushed_bytes
        client.push(segment)
        until(lambda before=before: learner.pushed_bytes > before)
    clock.advance(stalls * 2 * STALL)
    until(lambda: client.pending == (0, 0))
    assert [seq for _, seq, _ in learner.records] == list(range(count))


def test_it_is_connected_only_when_all_that_the_welcome_says_is_in_place(learner, connect, monkeypatch):
    bound, goes_on, bind = threading.Event(), threading.Event(), Outbox.bind
    monkeypatch.setattr(Outbox, "bind", lambda *how: (bound.set(), goes_on.wait(PATIENCE), bind(*how)))  # a slow disk
    client = connect()
    assert bound.wait(PATIENCE)
    assert not client.connected
    goes_on.set()
    until(lambda: client.connected)
    assert (client.state.directive["number"], client.inference) == (1, learner.address)


@pytest.mark.parametrize(("least", "damaged"), [(1 << 20, 0), (0, 1)], ids=["sent from its file", "sent from memory"])
def test_an_array_that_its_caller_changes_after_the_push_is_stored_as_it_was_written(
    learner, client, make_segment, monkeypatch, least, damaged
):
    """What lies in memory fits the checksum no more, so the learner refuses it, and it comes from the outbox's file."""
    monkeypatch.setattr("serl_client.recent.LEAST_BYTES", least)
    learner.stop()
    until(lambda: not client.connected)
    segment = make_segment()
    client.push(segment)
    until(lambda: client._outbox.pending[0])
    segment.observation[STATE][:] = 7
    learner.start()
    assert client.drain(PATIENCE)
    ((*_, stored),) = learner.records
    assert np.array_equal(stored.observation[STATE], make_segment().observation[STATE])
    assert learner.damaged == damaged


def test_another_run_is_refused_and_nothing_is_deleted(learner, connect, client, segments):
    learner.acknowledges = False
    push_all(client, segments(1))
    until(lambda: learner.records)
    client.close()
    learner.run = "run-b"
    again = connect()
    with pytest.raises(Refused, match=r"run-a.*run-b.*nothing was deleted"):
        again.wait_answer(0, PATIENCE)
    with pytest.raises(Refused):
        push_all(again, segments(1, episode="e1"))
    again.close()
    assert len(learner.records) == 1
    learner.run, learner.acknowledges = "run-a", True
    assert connect().drain(PATIENCE)
    assert [each[:2] for each in learner.records] == [(client.session, 0), (again.session, 0)]


def test_a_segment_that_does_not_fit_the_spec_ends_the_client_visibly(learner, client, segments):
    first, second = segments(2)
    push_all(client, [first])
    assert client.drain(PATIENCE)
    with pytest.raises(TrainerError, match="action should be"):  # noqa: PT012 - by the first call that comes after it
        client.push(dataclasses.replace(second, action=np.zeros((4, 3), np.float32)))
        client.wait_answer(0, PATIENCE)
    until(lambda: len(learner.records) == 2)
    assert [type(record) for *_, record in learner.records] == [Segment, LostRecord]


class Walk(CountingEnv):
    """Counts how far it runs ahead of its permission."""

    client, ahead = None, 0

    def step(self, action):
        allowed = self.client.state.step_limit
        self.ahead += allowed is not None and len(self.actions) >= allowed
        return super().step(action)


def test_a_paced_actor_neither_runs_ahead_nor_waits_for_ever(learner, connect, spec):
    learner.steps_per_ack = 3
    collect = {"number": 2, "phase": "practise", "mode": "collect", "explore": True, "weights": None}
    learner.notice = dataclasses.replace(learner.notice, directive=collect)
    env, client = Walk(spec, length=10), connect(paced=True)
    env.client = client
    arguments = (env, RemotePolicy(client, deadline=1.0), client)
    actor = threading.Thread(target=run_actor, args=arguments, kwargs={"seed": 0})
    actor.start()
    until(lambda: len(env.actions) > 100)
    learner.steps_per_ack = None
    learner.tell(directive={"number": 3, "phase": "", "mode": "stop", "boundary": "now"})
    actor.join(PATIENCE)
    assert not actor.is_alive()
    assert (env.ahead, client.pending) == (0, (0, 0))
    lengths = [len(record) for _, _, record in learner.records if not isinstance(record, Outcome)]
    assert (sum(lengths), max(lengths) <= 3) == (len(env.actions), True)


@pytest.mark.parametrize("stopped", [False, True], ids=["dead", "stopped"])
def test_nothing_blocks_when_the_learner_is(stopped, join, segments):
    with socket.create_server(("127.0.0.1", 0)) as mute:  # takes connections, and says nothing
        port = mute.getsockname()[1] if stopped else 1
        client, took = join(SimpleNamespace(address=f"tcp://127.0.0.1:{port}"), told=False), []
        for segment in segments(100):
            until(lambda: client.has_room)
            began = time.monotonic()
            client.push(segment)
            client.ask({}, **QUESTION)
            assert client.answer() is None
            took.append(time.monotonic() - began)
        assert np.median(took) < 0.5, "not the longest: the machine may be busy"
        assert (client.pending[0], client.connected) == (100, False)
        client.close()


def test_a_refusal_for_good_is_raised_by_the_next_call_and_ends_the_sending(learner, client, segments):
    learner.acknowledges = False
    first, second = segments(2)
    client.push(first)
    until(lambda: learner.records)
    learner.say(m.Failed("Refused", "another client of this name", final=True))
    with pytest.raises(Refused, match="another client"):
        client.wait_answer(0, PATIENCE)
    hellos = len(learner.hear(m.Hello))
    with pytest.raises(Refused):
        client.push(second)
    with pytest.raises(Refused):
        client.ask({}, **QUESTION)
    time.sleep(0.5)
    assert len(learner.hear(m.Hello)) == hellos
    assert (client.pending[0], len(learner.records)) == (2, 1)


@pytest.mark.parametrize(
    ("refusal", "said"),
    [
        (None, "run-b"),
        (m.Failed("Refused", "this run is of another robot", final=True), "another robot"),
        (m.Failed("VersionMismatch", "protocol 99", final=True), "protocol 99"),
    ],
)
def test_an_actor_that_had_a_directive_waits_through_learners_that_are_not_its_own(
    learner, client, connect, segments, refusal, said
):
    """A stranger that is refused is told, and ends."""
    learner.stop()
    until(lambda: not client.connected)
    learner.run, learner.refusal = "run-b", refusal
    learner.start()
    until(lambda: said in client.refusal)
    push_all(client, segments(1))
    if refusal:
        with pytest.raises(TrainerError, match=said):
            connect(outbox="stranger").wait_answer(0, PATIENCE)
    learner.run, learner.refusal = "run-a", None
    assert client.drain(PATIENCE)
    assert (client.refusal, len(learner.records)) == ("", 1)


def test_an_actor_that_is_told_that_its_learner_ends_waits_and_one_whose_name_another_has_ends(learner, client):
    learner.say(m.Failed("Ended", "the learner has ended: no memory", final=True))
    until(lambda: client.refusal)
    until(lambda: not client.refusal)
    learner.say(m.Failed("Replaced", "another client named robot has connected", final=True))
    with pytest.raises(Replaced, match="another client"):
        client.wait_answer(0, PATIENCE)


def test_a_refusal_of_one_message_does_not_end_the_connection_and_who_forgot_us_gets_a_hello_again(
    learner, client, segments
):
    learner.say(m.Failed("ServerFailed", "once"))
    push_all(client, segments(1))
    assert client.drain(PATIENCE)
    learner.say(m.Failed("Disconnected", "say Hello first"))
    until(lambda: [hello.session for hello in learner.hear(m.Hello)].count(client.session) >= 3)  # and inference
    push_all(client, segments(1, episode="e1"))
    assert client.drain(PATIENCE)


def test_a_learner_that_cannot_welcome_yet_is_asked_again(learner, connect, segments):
    learner.refusal = m.Failed("ServerFailed", "the disk fails")
    client = connect()
    push_all(client, segments(1))
    until(lambda: len(learner.hear(m.Hello)) > 2)
    learner.refusal = None
    assert client.drain(PATIENCE)
