"""The client against a learner on loopback that dies, stalls, loses and refuses: what becomes of records."""

import dataclasses
import socket
import threading
import time

import numpy as np
import pytest
from serl_client import messages as m
from serl_client.controller import RemotePolicy
from serl_client.episode import LostRecord, Outcome, Segment
from serl_client.errors import Refused, TrainerError
from serl_client.runner import run_actor
from serl_client.send_queue import SendQueue

from tests.shared.actors import CountingEnv
from tests.shared.clients import connected, push_all
from tests.shared.common import PATIENCE, until


@pytest.fixture
def segments(make_segment):
    """segments(count) -> so many of one episode, of 4 steps each."""
    return lambda count, **options: [make_segment(start=4 * number, **options) for number in range(count)]


def is_whole(learner, client, count):
    """Whether all arrive, once and in order."""
    drained = client.drain(PATIENCE)
    mine = [seq for session, seq, _ in learner.records if session == client.session]
    return drained and mine == list(range(count))


def arrived(learner):
    return [(session, seq) for session, seq, _ in learner.records]


def test_what_is_pushed_arrives_once_and_in_order(learner, connect, segments):
    client = connect()
    push_all(client, [*segments(300), Outcome("e0", True)])
    assert client.drain(PATIENCE)
    assert arrived(learner) == [(client.session, seq) for seq in range(301)]
    assert [record.start for _, _, record in learner.records[:-1]] == list(range(0, 1200, 4))
    assert (learner.records[-1][2], client.pending) == (Outcome("e0", True), (0, 0))


@pytest.mark.parametrize(("stall", "lost", "count"), [(1e9, 2, 20), (0.2, 1, 1)], ids=["a gap is seen", "in time"])
def test_what_the_learner_lost_is_sent_again(learner, client, segments, monkeypatch, stall, lost, count):
    monkeypatch.setattr("serl_client.send_queue.STALL", stall)
    learner.lost_pushes = lost
    for segment in segments(count):
        push_all(client, [segment])
        time.sleep(0.002)
    assert is_whole(learner, client, count)


def test_a_learner_that_dies_and_returns_gets_the_rest_and_nothing_twice(learner, client, segments):
    for round_ in range(4):
        push_all(client, segments(10, episode=f"e{round_}"))
        if round_ % 2 == 0:
            until(lambda: learner.records)
            learner.stop()
            until(lambda: not client.connected)
        else:
            learner.start()
    assert is_whole(learner, client, 40)
    hellos = [hello.run for hello in learner.hear(m.Hello)]
    assert len(hellos) >= 3
    assert hellos == ["", *["run-a"] * (len(hellos) - 1)]


def test_an_actor_without_a_learner_leaves_its_records_to_the_next_start(learner, connect, segments):
    learner.stop()
    first = connect()
    push_all(first, segments(3))
    first.close()
    second = connect()
    push_all(second, segments(1, episode="e1"))
    assert second.pending[0] == 4
    learner.start()
    assert second.drain(PATIENCE)
    assert arrived(learner) == [*((first.session, seq) for seq in range(3)), (second.session, 0)]
    assert learner.hear(m.Hello)[-1].earlier == [[first.session, 2]]


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
    assert arrived(learner) == [(client.session, 0), (again.session, 0)]


def test_a_learner_that_has_lost_what_it_acknowledged_is_not_sent_the_rest(learner, connect, segments, monkeypatch):
    monkeypatch.setattr("serl_client.outbox.FILE_BYTES", 1)
    client, (first, second) = connect(), segments(2)
    push_all(client, [first])
    assert client.drain(PATIENCE)
    learner.acknowledges = False
    push_all(client, [second])
    until(lambda: len(learner.records) == 2)
    learner.stop()
    learner.expected.clear()
    learner.start()
    with pytest.raises(Refused, match="lost data"):
        client.wait_answer(0, PATIENCE)
    assert client.pending[0] == 1


def test_no_more_than_the_window_is_on_its_way(learner, connect, segments):
    learner.window, learner.acknowledges = 4000, False
    client = connect()
    push_all(client, segments(100))
    until(lambda: learner.pushed_bytes > 2000)
    for _ in range(3):  # a command is sent after all that may be: what minds no window comes before it
        heard = len(learner.hear(m.Command))
        client.command("next")
        until(lambda before=heard: len(learner.hear(m.Command)) > before)
    assert learner.pushed_bytes <= 4000
    learner.acknowledges = True
    learner.say(learner.ack(client.session))
    assert is_whole(learner, client, 100)


def test_a_record_that_is_larger_than_the_window_goes_alone(learner, connect, segments):
    learner.window = 100
    client = connect()
    push_all(client, segments(2))
    assert is_whole(learner, client, 2)


def test_a_full_outbox_shows_as_no_room_and_what_ends_the_episode_is_still_taken(learner, connect, make_segment):
    """hi-ors E8: a queue of 100 lost 900 of 1000 transitions without a word."""
    learner.stop()
    client, starts = connect(capacity=3000), iter(range(0, 10**6, 4))
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
    assert is_whole(learner, client, taken)
    assert client.has_room


def test_a_segment_that_does_not_fit_the_spec_ends_the_client_visibly(learner, client, segments):
    first, second = segments(2)
    push_all(client, [first])
    assert client.drain(PATIENCE)
    with pytest.raises(TrainerError, match="action should be"):  # noqa: PT012 - by the first call that comes after it
        client.push(dataclasses.replace(second, action=np.zeros((4, 3), np.float32)))
        client.wait_answer(0, PATIENCE)
    until(lambda: len(learner.records) == 2)
    assert [type(record) for *_, record in learner.records] == [Segment, LostRecord]


@pytest.mark.parametrize("outcome", [Outcome("e0", np.True_), Outcome("e0", None, np.False_), Outcome("e0", 1)])
def test_an_outcome_of_another_kind_of_bool_is_refused_where_it_is_pushed(learner, client, outcome):
    with pytest.raises(TypeError, match="bool"):
        client.push(outcome)
    client.push(Outcome("e0", False))
    assert is_whole(learner, client, 1)


# -- the queue by itself


@pytest.fixture
def queue(opened, spec):
    """Sends the session "now", and has its first three outcomes; of "before" its outbox holds five."""
    for session, count in (("before", 5), ("now", 3)):
        outbox = opened()
        made = SendQueue(outbox, session, spec)
        fill(made, count)
        if session == "before":
            outbox.close()
    made.resume([["before", 0], ["now", 0]], 1 << 20)
    return made


def fill(queue, count):
    for number in range(count):
        queue.put(Outcome(f"e{number}", True))
        queue.move_to_outbox()


def sent(queue):
    """[(session, seq), ...] of what is sent now."""
    pushes = list(queue.pushes())
    return [(push.session, seq) for push in pushes for seq, _ in m.decode_records(push.arrays["records"].data)]


def test_an_acknowledgement_that_overtakes_a_second_sending_is_taken(queue):
    assert sent(queue) == [("before", seq) for seq in range(5)]
    queue.acknowledge(m.Ack("before", 1, resend=True))
    queue.acknowledge(m.Ack("before", 2))  # to the first sending
    assert sent(queue) == [("before", seq) for seq in (2, 3, 4)]
    queue.acknowledge(m.Ack("before", 4))
    assert sent(queue) == []


def test_an_acknowledgement_of_an_earlier_session_moves_nothing_of_the_current_one(queue):
    assert len(sent(queue)) == 5
    queue.acknowledge(m.Ack("before", 5))
    assert sent(queue) == [("now", seq) for seq in range(3)]
    queue.acknowledge(m.Ack("before", 5))  # the answer to a second sending
    fill(queue, 4)
    assert sent(queue) == [("now", seq) for seq in range(3, 7)]
    queue.acknowledge(m.Ack("before", 5, resend=True))
    assert sent(queue) == []


# -- with an actor


class Walk(CountingEnv):
    """Counts how far it runs ahead of its permission."""

    client, ahead = None, 0

    def step(self, action):
        allowed = self.client.step_limit
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
def test_nothing_blocks_when_the_learner_is(stopped, connect, segments):
    with socket.create_server(("127.0.0.1", 0)) as mute:  # takes connections, and says nothing
        client = connect(f"tcp://127.0.0.1:{mute.getsockname()[1] if stopped else 1}")
        longest = 0.0
        for segment in segments(100):
            until(lambda: client.has_room)
            began = time.monotonic()
            client.push(segment)
            client.ask({}, step=0, seed=0, previous_action=None, reset=True, explore=False, task="")
            assert client.answer() is None
            longest = max(longest, time.monotonic() - began)
        assert longest < 0.5
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
        client.ask({}, step=0, seed=0, previous_action=None, reset=True, explore=False, task="")
    time.sleep(0.5)
    assert len(learner.hear(m.Hello)) == hellos
    assert (client.pending[0], len(learner.records)) == (2, 1)


def test_a_refusal_of_one_message_does_not_end_the_connection(learner, client, segments):
    learner.say(m.Failed("ServerFailed", "once"))
    push_all(client, segments(1))
    assert client.drain(PATIENCE)


def test_a_learner_that_cannot_welcome_yet_is_asked_again(learner, connect, segments):
    learner.refusal = m.Failed("ServerFailed", "the disk fails")
    client = connect()
    push_all(client, segments(1))
    until(lambda: len(learner.hear(m.Hello)) > 2)
    learner.refusal = None
    assert client.drain(PATIENCE)


def test_a_learner_that_has_forgotten_us_gets_a_hello_again(learner, connect, segments):
    client = connected(connect())
    learner.say(m.Failed("Disconnected", "say Hello first"))
    until(lambda: [hello.session for hello in learner.hear(m.Hello)].count(client.session) >= 3)  # and inference
    push_all(client, segments(1))
    assert client.drain(PATIENCE)
