"""Acting with published weights, over a socket and in the actor's own process: the same, for each actor by itself."""

import contextlib
import logging
import socket
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
import zmq
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from serl_client import ConfigError
from serl_client import messages as m
from serl_client.client import TrainerClient
from serl_client.controller import RemotePolicy, decision_seed
from serl_client.link import Link
from torch import nn

from serl_launcher.algorithms.base import Algorithm
from serl_launcher.service import weights
from serl_launcher.service.inference import InferenceServer, LocalSource, PolicyHost, Question
from serl_launcher.service.server import Server
from serl_launcher.types import Decision

CONFIG = Path(__file__).parents[1] / "config"
STATE = "observation.state"
PATIENCE = 20.0


# -- algorithms


def rlpd(spec, seed=0):
    """The shipped RLPD with weights that `seed` names."""
    torch.manual_seed(seed)
    with initialize_config_dir(str(CONFIG), version_base="1.3"):
        config = compose(overrides=["+algo=rlpd", "+policy=gaussian"])
    return instantiate(config.algo)(spec)


class Memory(nn.Module):
    noise_shape = (1, 2)

    def __init__(self, scale):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(float(scale)))


class Counting(Algorithm):
    """A recurrent toy: the action is [scale * decisions since the episode began, sum of the states' first numbers].

    A call waits for `gate`, which is open unless it was cleared: meanwhile the next batch gathers in the socket.
    """

    def __init__(self, scale=1.0):
        super().__init__()
        self.memory = Memory(scale)
        self.batches = []  # how many observations each call had
        self.gate = threading.Event()
        self.gate.set()

    @property
    def acting(self):
        return self.memory

    def update(self, batch):
        raise NotImplementedError

    @torch.no_grad()
    def act(self, observation, previous_action, carry, *, noise, explore):
        seen = observation[STATE][:, 0]
        self.batches.append(len(seen))
        self.gate.wait(PATIENCE)
        carry = carry or {"count": torch.zeros(len(seen)), "more": (torch.zeros(len(seen)),)}
        carry = {"count": carry["count"] + 1, "more": (carry["more"][0] + seen,)}
        action = torch.stack([self.memory.scale * carry["count"], carry["more"][0]], 1)
        return Decision(action.unsqueeze(1), {"previous": previous_action}), carry


# -- who asks


def observed(generator):
    return {STATE: generator.standard_normal(8).astype(np.float32)}


def ask(step=0, *, seed=0, reset=False, explore=False, key=0.0, **arrays):
    return m.Ask(step, seed, reset, explore, {STATE: np.full(8, key, np.float32), **arrays})


def until(condition):
    deadline = time.monotonic() + PATIENCE
    while not (value := condition()):
        assert time.monotonic() < deadline, "this never happened"
        time.sleep(0.005)
    return value


def receive(link):
    """The next Act."""
    deadline = time.monotonic() + PATIENCE
    while True:
        message = link.receive()
        if isinstance(message, m.Act):
            return message
        assert time.monotonic() < deadline, "no answer came"
        link.wait(0.01)


def reconnect(link):
    """Notice that the other side has gone, and open a new connection."""
    until(lambda: link.receive() is None and not link.is_open)
    until(lambda: link.receive() is None and link.is_open)


@contextlib.contextmanager
def gathering(inference, helper):
    """What is sent within lies in the socket at the end, and makes one batch: `helper` keeps the server busy."""
    algorithm = inference.server.host.algorithm
    algorithm.gate.clear()
    made = len(algorithm.batches)
    helper.send(ask(reset=True))
    until(lambda: len(algorithm.batches) > made)
    yield
    time.sleep(0.1)
    algorithm.gate.set()
    receive(helper)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Inference:
    """An InferenceServer in a thread: it has its socket at once and answers from `start` on."""

    def __init__(self, folder, algorithm, spec, port=None):
        self.folder, self.notice = folder, {}
        self.address = f"tcp://127.0.0.1:{port or free_port()}"
        self.server = InferenceServer(PolicyHost(algorithm, spec, "cpu"), folder, self.address)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self.server.run, args=(lambda: self.notice, self._ended.is_set))

    def start(self):
        self._thread.start()
        return self

    def publish(self, version, algorithm):
        """Make the algorithm's acting part the newest weights; returns their sha256 and size."""
        sha256, size = weights.write(self.folder, safetensors.torch.save(algorithm.acting.state_dict()))
        self.notice = {"version": version, "sha256": sha256}
        return sha256, size

    def stop(self):
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join()
        self.server.close()


@pytest.fixture
def inference(tmp_path, spec):
    """inference(algorithm) -> an Inference that is not started yet."""
    with contextlib.ExitStack() as stack:

        def make(algorithm, **options):
            made = Inference(tmp_path / "weights", algorithm, spec, **options)
            stack.callback(made.stop)
            return made

        yield make


@pytest.fixture
def link():
    """link(address) -> an actor's connection to an inference process."""
    with contextlib.ExitStack() as stack:

        def make(address):
            made = stack.enter_context(Link(address, m.Hello(m.PROTOCOL, "actor", "arm")))
            made.receive()  # opens it
            return made

        yield make


@pytest.fixture
def connect(tmp_path, spec):
    """connect(inference) -> connect(name) -> a TrainerClient of a real server that names this inference process, and
    whose weights are the inference process's."""
    with contextlib.ExitStack() as stack:

        def serve(inference):
            local, public = f"ipc://{tmp_path}/server", f"tcp://127.0.0.1:{free_port()}"
            server = Server(tmp_path, {"online": 1000}, public=public, local=local, inference=inference.address)
            thread = threading.Thread(target=server.run)
            thread.start()
            stack.callback(server.close)
            stack.callback(thread.join)
            stack.callback(server.stop)
            trainer = stack.enter_context(Link(local, m.Hello(m.PROTOCOL, "learner", "trainer")))

            def client(name):
                folder = tmp_path / name
                made = TrainerClient(public, actor=name, spec=spec, outbox=folder, weights_folder=folder / "weights")
                stack.enter_context(made)
                until(lambda: made.connected)
                return made

            def publish(version, algorithm):
                assert trainer.call(m.Publish(*inference.publish(version, algorithm), 0), PATIENCE).value == version

            return client, publish

        yield serve


# -- one policy, wherever it acts


def test_the_inference_process_and_the_actors_own_process_act_alike_bit_by_bit(connect, inference, spec):
    over_there = inference(rlpd(spec, seed=1)).start()
    connect_client, publish = connect(over_there)
    one, other = connect_client("one"), connect_client("other")
    publish(1, rlpd(spec, seed=2))
    local_host = PolicyHost(rlpd(spec, seed=3), spec, "cpu")
    remote, local = (
        RemotePolicy(one, deadline=PATIENCE),
        RemotePolicy(LocalSource(other, local_host), deadline=PATIENCE),
    )
    until(lambda: other.weights(0))
    generator, seen = np.random.default_rng(0), []
    for explore in (False, True):
        for controller in (remote, local):
            controller.begin("episode", {"explore": explore, "weights": 1})
        previous = None
        for step in range(30):
            arguments = dict(step=step, previous_action=previous, reset=step == 0)
            observation = observed(generator)
            previous = remote.act(observation, **arguments)
            assert np.array_equal(previous, local.act(observation, **arguments))
            assert (remote.version, local.version) == (1, 1)
            seen.append(previous)
    assert len(np.unique(seen, axis=0)) == 60


def test_a_batch_of_many_actors_changes_no_answer(spec):
    """Not bit by bit: a matrix product sums in another order for another batch. Actions lie within -1..1."""
    host, generator = PolicyHost(rlpd(spec), spec, "cpu"), np.random.default_rng(0)
    questions = [
        Question(b"%d" % i, m.Ask(i, i, i % 3 == 0, i % 2 == 0, observed(generator))) for i in range(64)
    ]  # fmt: skip
    together = host.answer(questions)
    alone = [host.answer([question])[0] for question in questions]
    for i, (one, other) in enumerate(zip(together, alone, strict=True)):
        assert one.step == other.step == i
        np.testing.assert_allclose(one.arrays["action"], other.arrays["action"], rtol=0, atol=2e-6)


def test_questions_that_wait_together_are_answered_together_each_to_its_actor(inference, link, spec):
    over_there = inference(Counting()).start()
    over_there.publish(1, Counting())
    helper, *askers = [link(over_there.address) for _ in range(20)]
    with gathering(over_there, helper):
        for i, asker in enumerate(askers):
            asker.send(ask(i, key=i, reset=True))
    for i, asker in enumerate(askers):
        answer = receive(asker)
        assert (answer.step, answer.version) == (i, 1)
        assert answer.arrays["action"].tolist() == [[1.0, float(i)]]
    assert over_there.server.host.algorithm.batches == [1, 19]


def test_of_two_questions_of_one_actor_the_later_one_is_answered(inference, link, spec):
    over_there = inference(Counting()).start()
    over_there.publish(1, Counting())
    helper, asker = link(over_there.address), link(over_there.address)
    with gathering(over_there, helper):
        for step in range(5):
            asker.send(ask(step, key=step, reset=True))
    answer = receive(asker)
    assert (answer.step, answer.arrays["action"].tolist()) == (4, [[1.0, 4.0]])


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


# -- memory


def test_each_actor_has_a_carry_of_its_own_and_a_reset_begins_it_anew(inference, link, spec):
    over_there = inference(Counting()).start()
    over_there.publish(1, Counting())
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


def test_a_carry_that_a_restart_lost_begins_anew(inference, link, spec):
    before = inference(Counting()).start()
    before.publish(1, Counting())
    asker = link(before.address)
    for step in range(3):
        asker.send(ask(step, key=2, reset=step == 0))
        answer = receive(asker)
    assert answer.arrays["action"].tolist() == [[3.0, 6.0]]
    before.stop()
    after = inference(Counting(), port=int(before.address.rsplit(":", 1)[1])).start()
    after.publish(1, Counting())
    reconnect(asker)
    asker.send(ask(3, key=2))
    answer = receive(asker)
    assert answer.arrays["action"].tolist() == [[1.0, 2.0]]


def test_what_the_robot_did_reaches_the_policy_and_before_its_first_action_that_is_nothing(spec):
    host, did = PolicyHost(Counting(), spec, "cpu"), np.array([0.25, -1.0], np.float32)
    first, later = host.answer([Question(b"a", ask()), Question(b"b", ask(previous_action=did))])
    assert first.arrays["previous"].tolist() == [0.0, 0.0]
    assert later.arrays["previous"].tolist() == [0.25, -1.0]


# -- weights


def test_weights_are_swapped_between_two_batches_and_every_answer_names_its_version(inference, link, spec):
    """A swap within a batch, or within a decision, would give an action that is not its version's."""
    over_there, last = inference(Counting()).start(), 40
    over_there.publish(1, Counting())

    def train():
        for version in range(2, last + 1):
            over_there.publish(version, Counting(scale=version))
            time.sleep(0.002)

    trainer = threading.Thread(target=train)
    trainer.start()
    askers, versions = [link(over_there.address) for _ in range(4)], [0]
    deadline = time.monotonic() + PATIENCE
    while versions[-1] < last and time.monotonic() < deadline:
        for asker in askers:
            asker.send(ask(reset=True))
        answers = [receive(asker) for asker in askers]
        assert all(answer.arrays["action"][0, 0] == answer.version for answer in answers)
        versions += sorted(answer.version for answer in answers)
    trainer.join()
    assert versions == sorted(versions)
    assert versions[-1] == last
    assert len(set(versions)) > 3


def test_before_the_first_weights_nothing_is_answered_and_then_the_next_question_is(inference, link, spec):
    over_there = inference(Counting()).start()
    asker = link(over_there.address)
    asker.send(ask(0))
    asker.wait(0.3)
    assert asker.receive() is None
    over_there.publish(7, Counting())
    asker.send(ask(1, reset=True))
    answer = receive(asker)
    assert (answer.step, answer.version) == (1, 7)


def test_weights_that_are_gone_already_leave_the_ones_that_act(inference, link, spec, caplog):
    over_there = inference(Counting()).start()
    over_there.publish(1, Counting())
    asker = link(over_there.address)
    asker.send(ask(reset=True))
    assert receive(asker).version == 1
    with caplog.at_level(logging.WARNING):
        over_there.notice = {"version": 2, "sha256": "f" * 64}
        asker.send(ask(reset=True))
        assert receive(asker).version == 1
    assert "weights 2 are gone" in caplog.text
    over_there.publish(3, Counting(scale=3))
    until(lambda: over_there.server.host.version == 3)
    asker.send(ask(reset=True))
    assert receive(asker).arrays["action"][0, 0] == 3


def test_weights_of_another_policy_are_refused_in_one_sentence(tmp_path, spec):
    other = weights.write(tmp_path, safetensors.torch.save(Counting().acting.state_dict()))[0]
    with pytest.raises(ConfigError, match=r"not of this algorithm and policy .*start the actor with the learner's"):
        PolicyHost(rlpd(spec), spec, "cpu").load(1, weights.path(tmp_path, other))


def test_an_actor_never_waits_longer_than_its_deadline_for_weights_that_do_not_come(connect, inference, spec):
    """The directive names weights 2; what is here is 1. The runner must be able to hear of another directive."""
    connect_client, publish = connect(inference(Counting()).start())
    client = connect_client("arm")
    publish(1, Counting())
    until(lambda: client.weights(0))
    algorithm = Counting()
    controller = RemotePolicy(LocalSource(client, PolicyHost(algorithm, spec, "cpu")), deadline=0.1)
    controller.begin("episode", {"explore": False, "weights": 2})
    acted = []

    def act():
        acted.append(controller.act({STATE: np.zeros(8, np.float32)}, step=0, previous_action=None, reset=True))

    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    thread.join(3.0)
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
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_observation_of_one_actor_costs_the_others_nothing(inference, link, spec, wrong):
    """In one batch with it: the others are answered, and remember one decision more, not two."""
    over_there = inference(Counting()).start()
    over_there.publish(1, Counting())
    helper, one, other, bad = [link(over_there.address) for _ in range(4)]
    for count in (1, 2, 3):
        with gathering(over_there, helper):
            for asker in (one, other):
                asker.send(ask(count, reset=count == 1))
            time.sleep(0.05)  # so that they are asked about first
            bad.send(m.Ask(count, 0, False, False, WRONG[wrong]))
        for asker in (one, other):
            answer = receive(asker)
            assert (answer.step, answer.arrays["action"][0, 0]) == (count, count)
    assert bad.receive() is None
    bad.send(ask(9, reset=True))
    assert receive(bad).step == 9


def test_bytes_that_are_no_question_cost_nobody_anything(inference, link, spec):
    over_there = inference(Counting()).start()
    over_there.publish(1, Counting())
    with zmq.Context.instance().socket(zmq.DEALER) as peer:
        peer.linger = 0
        peer.connect(over_there.address)
        for junk in ([b"hello"], [b""], [b"\x93\x01\x02\x03"] * 3, m.encode(m.Bye()), m.encode(ask())[:1]):
            peer.send_multipart(junk)
        peer.send_multipart(m.encode(ask(3, reset=True)))
        assert peer.poll(PATIENCE * 1000)
        assert m.decode(peer.recv_multipart()).step == 3
    asker = link(over_there.address)
    asker.send(ask(4, reset=True))
    assert receive(asker).step == 4


def test_an_actor_that_leaves_before_its_answer_costs_the_others_nothing(inference, link, spec):
    over_there = inference(Counting()).start()
    over_there.publish(1, Counting())
    helper, leaver, asker = [link(over_there.address) for _ in range(3)]
    with gathering(over_there, helper):
        for client in (leaver, asker):
            client.send(ask(1, reset=True))
        time.sleep(0.05)
        leaver.close()
    assert receive(asker).step == 1
