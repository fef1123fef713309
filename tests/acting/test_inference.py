"""Acting with published weights, over a socket and in the actor's own process: the same, for each actor by itself."""

import time

import numpy as np
import pytest
import torch
from serl_client.controller import RemotePolicy, decision_seed

from serl_launcher.acting import host as module
from serl_launcher.acting.host import PolicyHost, Question
from serl_launcher.acting.local import LocalSource
from serl_launcher.acting.server import RECENT_S
from tests.shared.common import PATIENCE, STATE, until
from tests.shared.inference import rlpd

from .toy import Counting, ask, gathering, observed, receive, reconnect

# -- one policy, wherever it acts


def test_the_inference_process_and_the_actors_own_process_act_alike_bit_by_bit(connect, inference, spec):
    over_there = inference(rlpd(spec, seed=1)).start()
    _, join, publish = connect(over_there)
    one, other = join("one"), join("other")
    publish(1, rlpd(spec, seed=2))
    local_host = PolicyHost(rlpd(spec, seed=3), spec, "cpu")
    remote = RemotePolicy(one, deadline=PATIENCE)
    local = RemotePolicy(LocalSource(other, local_host), deadline=PATIENCE)
    until(lambda: other.weights(0))
    generator, seen = np.random.default_rng(0), []
    for explore in (False, True):
        for controller in (remote, local):
            controller.begin("episode", {"explore": explore, "weights": 1}, "reach")
        previous = None
        for step in range(30):
            arguments = dict(step=step, previous_action=previous, reset=step == 0)
            observation = observed(generator)
            previous = remote.act(observation, **arguments)
            assert np.array_equal(previous, local.act(observation, **arguments))
            assert (remote.version, local.version) == (1, 1)
            seen.append(previous)
    assert len(np.unique(seen, axis=0)) == 60


def test_questions_that_wait_together_are_answered_together_and_of_each_actor_the_latest(inference, link):
    over_there = inference(Counting()).acting()
    askers = [link(over_there.address) for _ in range(19)]
    with gathering(over_there, 2 * 19):
        for i, asker in enumerate(askers):
            for step in (100 + i, i):
                asker.send(ask(step, key=step, reset=True))
    for i, asker in enumerate(askers):
        answer = receive(asker)
        assert (answer.step, answer.version) == (i, 1)
        assert answer.arrays["action"].tolist() == [[1.0, float(i)]]
    assert over_there.server.report()["replaced"] == 19
    assert over_there.server.host.algorithm.batches == [19]


def test_eight_actors_at_a_slow_policy_get_their_answers_in_turn(inference, link, monkeypatch):
    """Every actor asks again before it is answered, and no batch holds them all."""
    monkeypatch.setattr(module, "MOST", 3)
    over_there = inference(Counting(seconds=0.02)).acting()
    askers, answered = [link(over_there.address) for _ in range(8)], [[] for _ in range(8)]
    for step in range(1, 10_000):
        if min(map(len, answered)) >= 10:
            break
        for number, asker in enumerate(askers):
            asker.send(ask(step, key=10_000 * number + step, reset=True))
            while (answer := asker.receive()) is not None:
                assert answer.arrays["action"].tolist() == [[1.0, 10_000 * number + answer.step]]
                answered[number].append(answer.step)
        time.sleep(0.005)
    counts = [len(steps) for steps in answered]
    assert all(steps == sorted(set(steps)) for steps in answered)
    assert 10 <= min(counts) <= max(counts) <= 2 * min(counts)
    assert over_there.server.report()["replaced"] > 0


def test_a_batch_waits_for_those_who_asked_lately_and_for_nobody_else(inference, link, clock):
    over_there = inference(Counting(), window=10 * PATIENCE).acting()
    one, other = link(over_there.address), link(over_there.address)
    for step in range(3):
        one.send(ask(step, reset=True))
        assert receive(one).step == step, "one actor waits for nobody"
    other.send(ask(0, reset=True))
    other.wait(0.2)
    assert other.receive() is None
    one.send(ask(3, reset=True))
    assert (receive(one).step, receive(other).step) == (3, 0)
    assert over_there.server.host.algorithm.batches == [1, 1, 1, 2]
    clock.advance(RECENT_S + 0.1)
    other.send(ask(1, reset=True))
    assert receive(other).step == 1, "the one has been silent for too long"


def test_a_batch_waits_no_longer_than_its_window(inference, link):
    over_there = inference(Counting(), window=0.05).acting()
    one, other = link(over_there.address), link(over_there.address)
    for step in range(5):
        for asker in (one, other):  # who is expected, and asks only after the other was answered
            asker.send(ask(step, reset=True))
            assert receive(asker).step == step
    assert over_there.server.host.algorithm.batches == [1] * 10


def test_how_answers_go_is_reported(inference, link):
    over_there = inference(Counting(seconds=0.01)).start()
    assert over_there.server.report() == {"version": 0, "replaced": 0}
    over_there.publish(1, Counting())
    askers = [link(over_there.address) for _ in range(4)]
    for count in (1, 4):
        with gathering(over_there, count):
            for asker in askers[:count]:
                asker.send(ask(reset=True))
        for asker in askers[:count]:
            receive(asker)
    report = until(lambda: r if "batch" in (r := over_there.server.report()) and r["batch"] == 2.5 else None)
    assert report["version"] == 1
    assert 10 < report["p50_ms"] <= report["p99_ms"] < PATIENCE * 1000


@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1, decision_seed("episode", 7)])
def test_the_noise_of_a_decision_comes_from_its_seed_alone(spec, seed):
    host = PolicyHost(rlpd(spec), spec, "cpu")

    def act(actor=b"a", step=0, seed=seed, others=0, host=host, explore=True):
        more = [Question(b"x%d" % i, ask(i, seed=i, reset=True, explore=True, key=i)) for i in range(others)]
        answers = host.answer([*more, Question(actor, ask(step, seed=seed, reset=True, explore=explore, key=0.5))])
        return answers[-1].arrays["action"]

    expected = act()
    assert np.array_equal(act(b"another", step=9), expected)
    torch.manual_seed(5)
    assert np.array_equal(act(), expected), "torch's own generator has no part in it"
    np.testing.assert_allclose(act(others=5), expected, rtol=0, atol=2e-6)
    assert np.array_equal(act(host=PolicyHost(rlpd(spec), spec, "cpu")), expected)
    assert not np.allclose(act(seed=seed ^ 2), expected)
    assert np.array_equal(act(explore=False), act(seed=seed ^ 2, explore=False))


def test_the_task_reaches_the_policy_from_here_and_from_there(connect, inference, spec):
    over_there = inference(Counting()).start()
    _, join, publish = connect(over_there)
    one, other = join("one"), join("other")
    local_host = PolicyHost(Counting(), spec, "cpu")
    publish(1, Counting())
    until(lambda: other.weights(0))
    for source, host in (one, over_there.server.host), (LocalSource(other, local_host), local_host):
        controller = RemotePolicy(source, deadline=PATIENCE)
        for task in ("fold the towel", "plie la serviette: \N{OK HAND SIGN}"):
            controller.begin("episode", {"explore": True, "weights": 1}, task)
            controller.act({STATE: np.zeros(8, np.float32)}, step=0, previous_action=None, reset=True)
            assert host.algorithm.tasks[-1] == (task,)


def test_each_question_of_a_batch_has_its_own_task(spec):
    host = PolicyHost(Counting(), spec, "cpu")
    host.answer([Question(name.encode(), ask(reset=True, task=name)) for name in "abc"])
    assert host.algorithm.tasks == [("a", "b", "c")]


# -- memory


def test_each_actor_has_a_carry_of_its_own_and_a_reset_begins_it_anew(inference, link):
    over_there = inference(Counting()).acting()
    links = {name: link(over_there.address) for name in "abc"}
    counts, sums, generator = dict.fromkeys("abc", 0), dict.fromkeys("abc", 0.0), np.random.default_rng(0)
    for step in range(60):
        askers = [name for name in "abc" if generator.random() < 0.7]
        resets = {name: counts[name] == 0 or generator.random() < 0.1 for name in askers}
        for name in askers:
            links[name].send(ask(step, key=ord(name), reset=resets[name]))
        for name in askers:
            counts[name] = 1 if resets[name] else counts[name] + 1
            sums[name] = ord(name) + (0.0 if resets[name] else sums[name])
            assert receive(links[name]).arrays["action"].tolist() == [[counts[name], sums[name]]]
    assert max(counts.values()) > 3


def test_a_carry_that_a_restart_lost_begins_anew(inference, link):
    before = inference(Counting()).acting()
    asker = link(before.address)
    for step in range(3):
        asker.send(ask(step, key=2, reset=step == 0))
        answer = receive(asker)
        assert answer.reset == (step == 0)
    assert answer.arrays["action"].tolist() == [[3.0, 6.0]]
    before.stop()
    after = inference(Counting(), port=int(before.address.rsplit(":", 1)[1])).start()
    after.publish(1, Counting())
    reconnect(asker)
    asker.send(ask(3, key=2))
    answer = receive(asker)
    assert (answer.arrays["action"].tolist(), answer.reset) == ([[1.0, 2.0]], True)


def test_what_the_robot_did_reaches_the_policy_and_before_its_first_action_that_is_nothing(spec):
    host, did = PolicyHost(Counting(), spec, "cpu"), np.array([0.25, -1.0], np.float32)
    first, later = host.answer([Question(b"a", ask()), Question(b"b", ask(previous_action=did))])
    assert first.arrays["previous"].tolist() == [0.0, 0.0]
    assert later.arrays["previous"].tolist() == [0.25, -1.0]
