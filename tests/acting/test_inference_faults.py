"""The inference process as a process, and what one actor does wrong to the others."""

import threading

import msgpack
import numpy as np
import pytest
import zmq
from serl_client import messages as m
from serl_client.controller import RemotePolicy
from websockets.sync.client import connect as websocket

from serl_launcher.acting import carries as module
from serl_launcher.acting.host import PolicyHost, Question
from serl_launcher.acting.local import LocalSource
from serl_launcher.supervisor import END
from tests.service.foreign_client import Client
from tests.shared.common import PATIENCE, STATE, until
from tests.shared.inference import algorithm_of, rlpd

from .toy import POISON, Counting, Poisoned, ask, gathering, receive


def reported(server):
    """What the inference process told the server last."""
    return next((client for client in server.report()["clients"] if client["actor"] == "inference"), {})


@pytest.mark.slow
def test_a_busy_process_takes_new_weights_reports_and_ends_when_it_is_told_to(connect, process, link, spec):
    server, join, publish = connect(process)
    join("arm")
    publish(1, rlpd(spec, seed=1))
    until(lambda: reported(server).get("version") == 1)
    asker = link(process.address)

    def answered():
        asker.send(ask(reset=True))
        return receive(asker).version

    assert answered() == 1
    publish(2, rlpd(spec, seed=2))
    until(lambda: answered() == 2)
    report = until(lambda: r if answered() and (r := reported(server))["version"] == 2 else None)
    assert (report["batch"], report["p50_ms"] >= 200) == (1.0, True)
    with websocket(f"ws://127.0.0.1:{process.bridge}", compression=None) as theirs:  # an openpi client (bridge.port)
        assert "robot/state" in msgpack.unpackb(theirs.recv(PATIENCE))["observation"]
        theirs.send(msgpack.packb({}))
        assert "lacks 'robot/state'" in theirs.recv(PATIENCE)
    told = {"openpi connections": 0, "openpi refused": 1, "openpi refusals bad message": 1}
    until(lambda: told.items() <= reported(server).items())
    asker.send(ask(reset=True))
    asker.wait(0.05)
    process.child.send_signal(END)
    assert process.child.wait(PATIENCE) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("process", "words"),
    [("algo=rlpd", ["+algo=rlpd", "+policy=gaussian"]), ("algo=dreamer_tiny", ["+algo=dreamer_tiny"])],
    indirect=["process"],
)
def test_kill_9_in_mid_episode_costs_the_memory_alone_and_a_policy_that_fails_says_where(
    connect, process, words, link, spec
):
    _, join, publish = connect(process)
    client = join("arm")
    publish(1, algorithm_of(spec, *words))
    controller = RemotePolicy(client, deadline=5.0)  # a busy machine may answer late
    controller.begin("episode", {"explore": False, "weights": None}, "reach")
    for step in range(6):
        if step == 3:
            process.stop()  # SIGKILL
            process.begin()
        row = {"step": step, "previous_action": None, "reset": step == 0}
        until(lambda row=row: controller.act({STATE: np.zeros(8, np.float32)}, **row) is not None, 3 * PATIENCE)
        assert controller.carry_resets == (step >= 3)
    asker = link(process.address)
    (process.folder.parent / "fail").touch()
    asker.send(ask(reset=True))
    assert process.child.wait(PATIENCE) != 0
    said = process.child.stderr.read()
    assert "in slow" in said
    assert "RuntimeError: the policy is broken" in said


def test_an_actor_never_waits_longer_than_its_deadline_for_weights_that_do_not_come(connect, inference, spec):
    """The directive names weights 2; what is here is 1. The runner must be able to hear of another directive."""
    _, join, publish = connect(inference(Counting()).start())
    client = join("arm")
    publish(1, Counting())
    until(lambda: client.weights(0))
    algorithm = Counting()
    controller = RemotePolicy(LocalSource(client, PolicyHost(algorithm, spec, "cpu")), deadline=0.1)
    controller.begin("episode", {"explore": False, "weights": 2}, "reach")
    acted = []

    def act():
        acted.append(controller.act({STATE: np.zeros(8, np.float32)}, step=0, previous_action=None, reset=True))

    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert acted == [None]
    assert len(algorithm.batches) == 1, "a question is answered once"
    publish(2, Counting(scale=2))
    until(lambda: client.weights(1))
    assert until(lambda: act() or acted[-1] is not None)
    assert controller.version == 2


# -- what one actor does wrong

GOOD = np.zeros(8, np.float32)

WRONG = {
    "another shape": {STATE: np.zeros(9, np.float32)},
    "another type": {STATE: np.zeros(8, np.float64)},
    "another rank": {STATE: np.zeros((1, 8), np.float32)},
    "nothing": {},
    "another name": {"observation.other": GOOD},
    "another action": {STATE: GOOD, "previous_action": np.zeros(3, np.float32)},
    "not a number": {STATE: GOOD * np.float32("nan")},
    "beyond its limit": {STATE: GOOD + np.float32(2e6)},
    "an action that is not finite": {STATE: GOOD, "previous_action": np.full(2, np.inf, np.float32)},
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_observation_of_one_actor_costs_the_others_nothing(inference, link, wrong):
    """While a batch gathers: the others are answered, and remember one decision more, not two."""
    over_there = inference(Counting()).acting()
    one, other, bad = [link(over_there.address) for _ in range(3)]
    for count in (1, 2, 3):
        with gathering(over_there, 2):
            one.send(ask(count, reset=count == 1))
            until(lambda: over_there.server._waiting)
            bad.send(m.InferenceRequest(count, 0, False, False, "", WRONG[wrong], request=count))
            assert until(bad.receive).request == count
            other.send(ask(count, reset=count == 1))
        for asker in (one, other):
            answer = receive(asker)
            assert (answer.step, answer.request, answer.arrays["action"][0, 0]) == (count, count, count)
    bad.send(ask(9, reset=True))
    assert receive(bad).step == 9


def test_who_would_get_a_number_that_is_not_finite_is_told_so_and_begins_anew_and_others_get_theirs(inference, link):
    over_there = inference(Poisoned()).acting()
    good, bad = [link(over_there.address) for _ in range(2)]
    for count, key in enumerate((1, POISON, 1)):
        with gathering(over_there, 2):
            good.send(ask(count, reset=count == 0, key=1))
            bad.send(ask(count, reset=count == 0, key=key))
        assert receive(good).arrays["action"].tolist() == [[count + 1, count + 1]]
        if key == POISON:
            failed = until(bad.receive)
            assert (failed.kind, failed.final, failed.request) == ("ServerFailed", False, 1)
            assert failed.text == "step 1: action of the policy (weights 1) is not finite: ask anew"
        else:
            answer = receive(bad)
            assert (answer.arrays["action"].tolist(), answer.reset) == ([[1, 1]], True)
    until(lambda: over_there.server.report()["refusals"] == {"not finite": 1})


def test_of_connections_that_come_and_go_the_last_ones_are_remembered(spec, monkeypatch):
    monkeypatch.setattr(module, "REMEMBERED", 3)
    host = PolicyHost(Counting(), spec, "cpu")
    for number in (0, 1, 2, 0, 3, 4):
        host.answer([Question(b"%d" % number, ask(1))])
    answers = [host.answer([Question(b"%d" % number, ask(2))])[0] for number in (0, 4, 1)]
    assert [answer.arrays["action"][0, 0] for answer in answers] == [3, 2, 1]
    assert [answer.reset for answer in answers] == [False, False, True]


def test_a_new_connection_takes_nothing_from_those_that_ask_beside_it(spec, monkeypatch):
    monkeypatch.setattr(module, "REMEMBERED", 2)
    host = PolicyHost(Counting(), spec, "cpu")
    host.answer([Question(b"%d" % number, ask(1)) for number in (0, 1)])
    answers = host.answer([Question(b"%d" % number, ask(2)) for number in (2, 0)])
    assert [answer.arrays["action"][0, 0] for answer in answers] == [1, 2]


def test_a_key_that_opens_ever_new_connections_makes_the_policy_forget_its_own_alone(spec, monkeypatch):
    monkeypatch.setattr(module, "REMEMBERED", 3)
    host = PolicyHost(Counting(), spec, "cpu")
    for number in range(9):
        host.answer([Question(b"%d" % number, ask(1), owner="left" if number < 1 else "right")])
    again = [host.answer([Question(b"%d" % n, ask(2), owner="left" if n < 1 else "right")])[0] for n in (0, 8, 1)]
    assert [answer.reset for answer in again] == [False, False, True]


def test_bytes_that_are_no_question_cost_nobody_anything(inference, link):
    over_there = inference(Counting()).acting()
    with zmq.Context.instance().socket(zmq.DEALER) as peer:
        peer.linger = 0
        peer.connect(over_there.address)
        for junk in ([b"hello"], [b""], [b"\x93\x01\x02\x03"] * 3, m.encode(m.Bye()), m.encode(ask())[:1]):
            peer.send_multipart(junk)
        peer.send_multipart(m.encode(ask(3, reset=True)))
        answers = []
        while not answers or isinstance(answers[-1], m.Failed):
            assert peer.poll(PATIENCE * 1000)
            answers.append(m.decode(peer.recv_multipart()))
        assert (len(answers), answers[-1].step) == (6, 3)
    asker = link(over_there.address)
    asker.send(ask(4, reset=True))
    assert receive(asker).step == 4


def test_an_actor_that_leaves_before_its_answer_costs_the_others_nothing(inference, link):
    over_there = inference(Counting()).acting()
    leaver, asker = [link(over_there.address) for _ in range(2)]
    over_there.server._is_gathered = lambda now: False
    leaver.send(ask(1, reset=True))
    until(lambda: over_there.server._waiting)
    leaver.close()
    until(lambda: not over_there.server._waiting, why="what it asked was not forgotten")
    del over_there.server._is_gathered
    asker.send(ask(1, reset=True))
    assert receive(asker).step == 1


@pytest.mark.parametrize("history", [1, 2])
def test_a_client_written_from_the_page_alone_asks_and_is_answered(inference, spec, history):
    algorithm = Counting()
    algorithm.memory.history = history
    over_there = inference(algorithm).acting()
    stranger = Client("tcp://127.0.0.1:1", "stranger", spec.to_dict())
    stranger.inference, stranger.history = over_there.address, history
    seen = {STATE: ("float32", (8,), np.full(8, 3, np.float32).tobytes())}
    answered = [stranger.ask(step, seen, reset=step == 0) for step in (0, 1)]
    assert [(version, reset) for version, reset, _ in answered] == [(1, True), (1, False)]
    assert answered[0][2]["action"] == ("float32", (1, 2), np.array([1, 3], np.float32).tobytes())
    stranger.asking.socket.close()
