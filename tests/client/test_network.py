"""The network thread: directives, commands, and questions to a policy that answers from elsewhere."""

import dataclasses

import numpy as np
import pytest
from serl_client import messages as m
from serl_client import wire
from serl_client.errors import TrainerError

from tests.shared.clients import connected
from tests.shared.common import PATIENCE, STATE, until


def test_messages_that_are_none_are_logged_and_dropped(learner, client, make_segment, caplog):
    learner.say([b"nonsense"])
    learner.say([*m.encode(m.Done()), b"too many"])
    learner.say(m.StateUpdate({"number": "five"}, {}))
    learner.say(m.Ack("e", "7"))
    learner.say(m.Status({}))
    learner.say(wire.pack({"type": "Hello", "protocol": [9, 9]}, {}))
    until(lambda: caplog.text.count("is not understood") >= 6)
    client.push(make_segment())
    assert client.drain(PATIENCE)


def test_the_end_of_the_network_thread_is_seen_by_the_next_call(client, monkeypatch, caplog):
    monkeypatch.setattr(client._send_queue, "move_to_outbox", lambda: 1 / 0)
    with pytest.raises(TrainerError, match="ZeroDivisionError"):
        client.wait_answer(0, PATIENCE)
    assert "Traceback" in caplog.text


def test_directives_permissions_and_ordinal_are_followed(learner, connect):
    learner.notice = dataclasses.replace(learner.notice, step_limit=5)
    client = connect(paced=True)
    assert (client.state.step_limit, client.state.directive["mode"]) == (0, "idle")
    until(lambda: client.state.step_limit == 5)
    assert client.state.ordinal == 3
    learner.tell(directive={"number": 4, "phase": "evaluate", "mode": "evaluate"}, step_limit=None)
    until(lambda: client.state.directive["number"] == 4)
    assert client.state.step_limit is None
    learner.tell(directive={"number": 2, "phase": "old", "mode": "stop"}, degraded="disk")
    until(lambda: client.state.degraded == "disk")
    assert client.state.directive["phase"] == "evaluate"


def test_heartbeats_carry_the_report_and_commands_are_acknowledged(learner, connect, caplog):
    caplog.set_level("INFO")
    client = connect()
    client.report({"mode": "collect"})
    client.command("goto", "evaluate")
    until(lambda: learner.hear(m.Heartbeat))
    assert learner.hear(m.Heartbeat)[-1].report == {"mode": "collect", "outbox": 0}
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
    client = connected(connect(weights_folder=tmp_path / "weights"))
    learner.tell(weights={"version": 1, "sha256": "a" * 64, "size": 10})
    client.command("next")
    until(lambda: given and learner.hear(m.WeightsRequest))
    learner.say(m.Failed("ServerFailed", "something else", request=77))
    learner.say(m.Failed("ServerFailed", "a message that nobody could read"))
    learner.say(m.Done(5, request=78))
    until(lambda: "nobody could read" in caplog.text)
    assert (client.over, client._network.weights._pull is None) == ("next", False)
    learner.say(m.Done(7, given[0].request))
    until(lambda: "next as number 7" in caplog.text)
    client.command("hold")
    until(lambda: len(given) == 2)
    assert [command.name for command in given] == ["next", "hold"]


def test_why_there_is_no_action_is_known_until_there_is_one_or_nobody_answers(learner, connect):
    answer = learner._inferencerequest
    learner._inferencerequest = lambda identity, ask: m.Failed(
        "ServerFailed", "the policy server is away", False, ask.request
    )
    client = connected(connect())
    ask = {"seed": 0, "previous_action": None, "reset": True, "explore": False, "task": "", "committed": 0}
    client.ask({STATE: np.zeros(3, np.float32)}, step=0, prefix=None, **ask)
    until(lambda: client.no_action == "the policy server is away")
    learner._inferencerequest = answer
    client.ask({STATE: np.zeros(3, np.float32)}, step=0, prefix=None, **ask)
    until(lambda: client.no_action == "")
    assert client.wait_answer(0, PATIENCE)


def test_weights_wait_a_little_when_their_request_failed(learner, connect, tmp_path):
    learner._weightsrequest = lambda identity, request: m.Failed("Refused", "they are gone", request=request.request)
    client = connected(connect(weights_folder=tmp_path / "weights"))
    learner.tell(weights={"version": 1, "sha256": "a" * 64, "size": 10})
    until(lambda: client._network.weights._resume > 0)
    assert len(learner.hear(m.WeightsRequest)) == 1


def test_a_command_whose_answer_a_cut_has_taken_is_not_given_twice(learner, connect, caplog):
    given = []
    learner._command = lambda identity, command: given.append(command.name)
    client = connected(connect())
    client.command("next")
    until(lambda: given)
    learner.stop()
    learner.start()
    until(lambda: "the link broke before the learner answered to next" in caplog.text)
    client.command("hold")
    until(lambda: "hold" in given)
    assert given == ["next", "hold"]


def test_a_command_names_the_directive_that_it_is_about_and_one_that_a_cut_has_taken_undoes_no_other(learner, connect):
    given = []
    learner._command = lambda identity, command: given.append((command.name, command.directive))
    client = connected(connect())
    client.command("hold")
    until(lambda: given)
    learner.stop()
    until(lambda: not client.connected)
    client.command("next")
    learner.start()
    until(lambda: len(given) == 2)
    assert (given, client.over) == ([("hold", 0), ("next", 1)], "next")


def test_before_the_first_directive_next_is_about_nothing_and_stop_about_the_run(learner, connect, caplog):
    learner.stop()
    client = connect()
    client.command("next")
    client.command("stop")
    learner.start()
    until(lambda: client.state.directive["number"] and learner.hear(m.Command))
    assert [command.name for command in learner.hear(m.Command)] == ["stop"]
    assert (client.over, "`next` is dropped" in caplog.text) == ("stop", True)


# -- questions


@pytest.fixture
def silent(learner, monkeypatch):
    """A learner that leaves questions alone, so that a test answers; a newer question goes out soon after."""
    monkeypatch.setattr("serl_client.network.PATIENCE", 0.01)
    learner.answers = False
    return learner


def ask(client, step, reset=False):
    observation = {STATE: np.full(8, step, np.float32)}
    question = {"previous_action": np.zeros(2, np.float32), "reset": reset, "explore": True, "task": "fold"}
    client.ask(observation, step=step, seed=step, **question)


def asked(learner, *steps):
    """Wait until exactly these questions have come."""
    until(lambda: len(learner.hear(m.InferenceRequest)) >= len(steps))
    assert [question.step for question in learner.hear(m.InferenceRequest)] == list(steps)


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


def test_answers_that_come_too_late_or_to_no_question_are_dropped(silent, connect):
    client = connect()
    ask(client, 3)
    asked(silent, 3)
    ask(client, 4)
    asked(silent, 3, 4)
    silent.say(silent.act(3))
    assert client.wait_answer(4, 0.3) is None
    silent.say(silent.act(4))
    assert client.wait_answer(4, PATIENCE).step == 4
    silent.say(silent.act(4))  # nobody asked for it again
    assert client.wait_answer(0, 0.3) is None
    ask(client, 5)
    asked(silent, 3, 4, 5)
    silent.say(silent.act(9))  # nobody has asked for it at all
    until(lambda: not client._network._asked)
    assert client.wait_answer(0, 0.3) is None


def test_an_answer_belongs_to_the_question_of_its_row_and_its_episode(silent, connect):
    client = connect()
    ask(client, 0)
    asked(silent, 0)
    late = silent.act(0, version=1)
    client.forget()
    ask(client, 0, reset=True)
    asked(silent, 0, 0)
    silent.say(late)
    assert client.wait_answer(0, 0.3) is None
    silent.say(silent.act(0, version=2))
    assert client.wait_answer(0, PATIENCE).version == 2
    for count in (3, 4):
        client.forget()
        ask(client, 0)
        asked(silent, *[0] * count)
    silent.say(silent.act(0, version=4))  # the one before it, which is forgotten, is never answered
    assert client.wait_answer(0, PATIENCE).version == 4


def test_one_question_is_on_its_way_at_a_time_and_a_newer_one_replaces_the_one_that_waits(silent, client, monkeypatch):
    monkeypatch.setattr("serl_client.network.PATIENCE", 60.0)
    ask(client, 0)
    asked(silent, 0)
    ask(client, 1)
    client.command("next")  # it is sent after all questions that may be
    until(lambda: silent.hear(m.Command))
    ask(client, 2)
    silent.say(silent.act(0))
    assert client.wait_answer(0, PATIENCE).step == 0
    until(lambda: silent.hear(m.InferenceRequest)[-1].step == 2)
    asked(silent, 0, 2)


def test_actions_that_are_not_finite_or_of_another_shape_never_reach_the_robot(silent, connect, caplog):
    client = connect()
    ask(client, 0)
    asked(silent, 0)
    for action in (np.full((1, 2), np.nan, np.float32), np.zeros((1, 3), np.float32), np.zeros(2, np.float32)):
        silent.say(m.InferenceResponse(0, 1, {"action": action}))
    until(lambda: caplog.text.count("is not understood: MessageError") == 3)
    assert client.answer() is None
    silent.say(silent.act(0))
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
