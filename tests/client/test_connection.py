"""A connection by itself: calls and their answers, and a learner that dies and returns."""

import subprocess
import sys

import pytest
import zmq
from serl_client import messages as m
from serl_client.connection import Connection
from serl_client.errors import Disconnected, Refused, ServerFailed, Timeout

from tests.shared.common import PATIENCE, until


@pytest.fixture
def link(learner):
    with Connection(learner.address, m.Hello(m.PROTOCOL, "learner", "trainer")) as link:
        yield link


def test_a_call_returns_its_answer_and_keeps_what_else_came(learner, link):
    assert link.hello(PATIENCE).run == "run-a"
    link.send(m.Command("next"))
    until(lambda: learner.hear(m.Command))
    learner.tell(step_limit=9)
    assert link.call(m.Status(), PATIENCE).report == {"fine": True}
    assert until(link.receive) == m.Done(7)
    until(lambda: link.receive() is None and link.notice.step_limit == 9)


def test_a_call_takes_no_answer_to_another_message(learner, link):
    def answer(identity, command):
        learner.say(m.Failed("Refused", "of an StepLimit", request=99))
        learner.say(m.Done(1, request=98))
        learner.say(m.Done(7, request=command.request))

    learner._command = answer
    assert link.call(m.Command("next"), PATIENCE).value == 7
    assert until(link.receive).text == "of an StepLimit"


def test_a_call_raises_what_failed_and_goes_on_after_a_restart(learner, link):
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


def test_a_link_that_is_only_listened_to_connects_again(learner, link):
    until(lambda: link.receive() is None and link.connected)
    learner.stop()
    until(lambda: link.receive() is None and not link.connected)
    assert not link.send(m.Status())
    learner.start()
    until(lambda: link.receive() is None and link.connected)


def test_a_refused_key_is_shown_again_after_a_rest(learner, link):
    link._barred = True  # as after a handshake that failed by its key
    with pytest.raises(Refused, match="does not let the key none in"):
        link.receive()
    link.rest(0.0)
    until(lambda: link.receive() is None and link.connected)


def test_a_full_connection_that_breaks_does_not_abort_the_process():
    """As libzmq 4.3.5 does when a heartbeat falls due on it."""
    code = """
import time, zmq
from serl_client import connection, messages
context = zmq.Context()
learner = context.socket(zmq.ROUTER)
port = learner.bind_to_random_port("tcp://127.0.0.1")
connection.OPTIONS[zmq.RCVHWM] = 1
link = connection.Connection(f"tcp://127.0.0.1:{port}", messages.Hello(messages.PROTOCOL, "viewer", "me"))
link.receive()
identity = learner.recv_multipart()[0]
for _ in range(900):
    learner.send_multipart([identity, bytes(10_000)])
time.sleep(0.5)
context.destroy(linger=0)
time.sleep(3.5)
link.close()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE)


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
            assert link._monitor.poll(PATIENCE * 1000)
            return []

        monkeypatch.setattr("serl_client.connection.received", nothing_yet)
        link.receive()
        until(lambda: (message := link.receive()) is None or message.text == "no room")
        assert link.heard
