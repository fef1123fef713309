"""Acting with published weights, over a socket and in the actor's own process: the same, for each actor by itself."""

import contextlib
import copy
import itertools
import logging
import subprocess
import sys
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
from omegaconf import OmegaConf
from serl_client import ConfigError
from serl_client import messages as m
from serl_client.client import TrainerClient
from serl_client.connection import Connection
from serl_client.controller import RemotePolicy, decision_seed
from torch import nn

from serl_launcher.acting import host as host_module
from serl_launcher.acting import server as module
from serl_launcher.acting.host import LocalSource, PolicyHost, Question
from serl_launcher.acting.server import InferenceServer
from serl_launcher.algorithms.base import Algorithm
from serl_launcher.config import composed
from serl_launcher.policies.base import Policy
from serl_launcher.store import weights
from serl_launcher.store.server import Server
from serl_launcher.types import Decision
from tests.shared.common import free_port

CONFIG = Path(__file__).parents[2] / "config"
STATE = "observation.state"
PATIENCE = 20.0


# -- algorithms


def shipped(spec, *words, seed=0):
    """An algorithm of ours with weights that `seed` names."""
    torch.manual_seed(seed)
    with initialize_config_dir(str(CONFIG), version_base="1.3"):
        config = compose(overrides=list(words))
    return instantiate(config.algo)(spec)


def rlpd(spec, seed=0):
    return shipped(spec, "+algo=rlpd", "+policy=gaussian", seed=seed)


class Memory(Policy):
    noise_shape = (1, 2)

    def __init__(self, scale, sizes):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(float(scale)))
        self.rest = nn.ParameterList([torch.zeros(size) for size in sizes])
        self.register_buffer("mean", torch.tensor(1 / 3))

    def forward(self, batch):
        raise NotImplementedError

    def sample(self, observation, *, task=(), n=1, noise=None):
        raise NotImplementedError


class Counting(Algorithm):
    """A recurrent toy: the action is [scale * decisions since the episode began, sum of the states' first numbers].

    A call waits for `gate`, which is open unless it was cleared: meanwhile the next batch gathers. `sizes` are those of
    weights that nothing reads; `seconds` is how long a call takes.
    """

    def __init__(self, scale=1.0, sizes=(), precision=torch.float32, seconds=0.0):
        super().__init__()
        self.memory = Memory(scale, sizes)
        self.memory.precision = precision
        self.seconds = seconds
        self.batches = []  # how many observations each call had
        self.tasks = []  # of each call
        self.gate = threading.Event()
        self.gate.set()

    @property
    def acting(self):
        return self.memory

    def update(self, batch):
        raise NotImplementedError

    @torch.no_grad()
    def act(self, observation, previous_action, carry, *, task, noise, explore):
        seen = observation[STATE][:, 0]
        self.batches.append(len(seen))
        self.tasks.append(task)
        self.gate.wait(PATIENCE)
        time.sleep(self.seconds)
        carry = carry or {"count": torch.zeros(len(seen)), "more": (torch.zeros(len(seen)),)}
        carry = {"count": carry["count"] + 1, "more": (carry["more"][0] + seen,)}
        action = torch.stack([self.memory.scale * carry["count"], carry["more"][0]], 1)
        return Decision(action.unsqueeze(1), {"previous": previous_action}), carry


# -- who asks


def observed(generator):
    return {STATE: generator.standard_normal(8).astype(np.float32)}


def ask(step=0, *, seed=0, reset=False, explore=False, task="", key=0.0, **arrays):
    return m.InferenceRequest(step, seed, reset, explore, task, {STATE: np.full(8, key, np.float32), **arrays})


def until(condition):
    deadline = time.monotonic() + PATIENCE
    while not (value := condition()):
        assert time.monotonic() < deadline, "this never happened"
        time.sleep(0.005)
    return value


def receive(link):
    """The next InferenceResponse."""
    deadline = time.monotonic() + PATIENCE
    while True:
        message = link.receive()
        if isinstance(message, m.InferenceResponse):
            return message
        assert time.monotonic() < deadline, "no answer came"
        link.wait(0.01)


def reconnect(link):
    """Notice that the other side has gone, and open a new connection."""
    until(lambda: link.receive() is None and not link.is_open)
    until(lambda: link.receive() is None and link.is_open)


@contextlib.contextmanager
def gathering(inference, helper):
    """What is sent within makes one batch: `helper` keeps the policy busy meanwhile."""
    algorithm = inference.server.host.algorithm
    algorithm.gate.clear()
    made = len(algorithm.batches)
    helper.send(ask(reset=True))
    until(lambda: len(algorithm.batches) > made)
    yield
    time.sleep(0.1)
    algorithm.gate.set()
    receive(helper)


class Inference:
    """An InferenceServer in a thread: it has its socket at once and answers from `start` on."""

    def __init__(self, folder, algorithm, spec, *, port=None, window=0.005, host=PolicyHost):
        self.folder, self.notice = folder, {}
        self.address = f"tcp://127.0.0.1:{port or free_port()}"
        self.server = InferenceServer(host(algorithm, spec, "cpu"), folder, self.address, window=window)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self.server.run, args=(self._newest, self._ended.is_set))

    def _newest(self):
        return self.notice

    def start(self):
        self._thread.start()
        return self

    def publish(self, version, algorithm):
        """Make the algorithm's acting part the newest weights; returns their sha256 and size."""
        sha256, size = weights.write(self.folder, safetensors.torch.save(algorithm.acting.published()))
        self.notice = {"version": version, "sha256": sha256}
        return sha256, size

    def stop(self):
        """May be called twice."""
        if self._ended.is_set():
            return
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join()
        self.server.close()


class SlowDisk(PolicyHost):
    """Reads weights only while `gate` is open."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.files, self.gate = [], threading.Event()
        self.gate.set()

    def read(self, file):
        self.files.append(file)
        self.gate.wait(PATIENCE)
        return super().read(file)


INFER = """
import sys, time
from pathlib import Path
from omegaconf import OmegaConf
from serl_launcher.algorithms.sac import SAC
from serl_launcher.acting.server import infer
run_dir, local = Path(sys.argv[1]), sys.argv[2]
act = SAC.act
def slow(*arguments, **options):
    if (run_dir / "fail").exists():
        raise RuntimeError("the policy is broken")
    time.sleep(0.2)
    return act(*arguments, **options)
SAC.act = slow
infer(OmegaConf.load(run_dir / "config.yaml"), run_dir, local)
"""


class Process(Inference):
    """The inference process of a run, with a policy that takes 200 ms and fails where the run has a file `fail`."""

    def __init__(self, run_dir):
        port = free_port()
        self.folder, self.local, self.address = (
            run_dir / "weights",
            f"ipc://{run_dir}/server",
            f"tcp://127.0.0.1:{port}",
        )
        OmegaConf.save(composed(CONFIG, ["algo=rlpd", f"inference_port={port}"]), run_dir / "config.yaml")
        command = [sys.executable, "-c", INFER, run_dir, self.local]
        self.child = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)

    def report(self):
        """What it told the server last."""
        with Connection(self.local, m.Hello(m.PROTOCOL, "learner", "test")) as link:
            clients = link.call(m.Status(), PATIENCE).report["clients"]
        return next((client for client in clients if client["actor"] == "inference"), {})

    def stop(self):
        self.child.kill()
        self.child.communicate()


@pytest.fixture
def process(tmp_path):
    made = Process(tmp_path)
    yield made
    made.stop()


@pytest.fixture
def inference(tmp_path, spec):
    """inference(algorithm) -> an Inference that is not started yet."""
    with contextlib.ExitStack() as stack:

        def make(algorithm, **options):
            made = Inference(tmp_path / "weights", algorithm, spec, **options)
            stack.callback(made.stop)
            return made

        yield make


class Asker(Connection):
    """A connection whose Welcome is nothing that is received."""

    def receive(self):
        message = super().receive()
        return self.receive() if isinstance(message, m.Welcome) else message


@pytest.fixture
def link():
    """link(address) -> an actor's connection to an inference process."""
    with contextlib.ExitStack() as stack:

        def make(address):
            made = stack.enter_context(Asker(address, m.Hello(m.PROTOCOL, "actor", "arm")))
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
            trainer = stack.enter_context(Connection(local, m.Hello(m.PROTOCOL, "learner", "trainer")))

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


def test_a_batch_of_many_actors_changes_no_answer(spec):
    """Not bit by bit: a matrix product sums in another order for another batch. Actions lie within -1..1."""
    host, generator = PolicyHost(rlpd(spec), spec, "cpu"), np.random.default_rng(0)
    questions = [
        Question(b"%d" % i, m.InferenceRequest(i, i, i % 3 == 0, i % 2 == 0, "",
        observed(generator))) for i in range(64)
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


def test_of_an_actors_questions_that_came_while_the_policy_was_busy_the_latest_is_answered(inference, link):
    over_there = inference(Counting()).start()
    over_there.publish(1, Counting())
    helper, asker = link(over_there.address), link(over_there.address)
    with gathering(over_there, helper):
        for step in range(5):
            asker.send(ask(step, key=step, reset=True))
    answer = receive(asker)
    assert over_there.server.report()["replaced"] == 4
    assert (answer.step, answer.arrays["action"].tolist()) == (4, [[1.0, 4.0]])
    assert over_there.server.host.algorithm.batches == [1, 1]


def test_eight_actors_at_a_slow_policy_get_their_answers_in_turn(inference, link, monkeypatch):
    """Every actor asks again before it is answered, and no batch holds them all."""
    monkeypatch.setattr(module, "MOST", 3)
    over_there = inference(Counting(seconds=0.02)).start()
    over_there.publish(1, Counting())
    askers, answered = [link(over_there.address) for _ in range(8)], [[] for _ in range(8)]
    step, end = 0, time.monotonic() + 2.0
    while time.monotonic() < end:
        step += 1
        for number, asker in enumerate(askers):
            asker.send(ask(step, key=10_000 * number + step, reset=True))
            while (answer := asker.receive()) is not None:
                assert answer.arrays["action"].tolist() == [[1.0, 10_000 * number + answer.step]]
                answered[number].append(answer.step)
        time.sleep(0.005)
    counts = [len(steps) for steps in answered]
    assert all(steps == sorted(set(steps)) for steps in answered)
    assert min(counts) >= 2
    assert max(counts) <= 2 * min(counts)
    assert over_there.server.report()["replaced"] > 0


def test_a_batch_waits_for_those_who_asked_lately_and_for_nobody_else(inference, link, spec):
    over_there = inference(Counting(), window=10 * PATIENCE).start()
    over_there.publish(1, Counting())
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
    other.send(ask(1, reset=True))
    assert receive(other).step == 1, "the one has been silent for too long"


def test_a_batch_waits_no_longer_than_its_window(inference, link, spec):
    over_there = inference(Counting(), window=0.05).start()
    over_there.publish(1, Counting())
    one, other = link(over_there.address), link(over_there.address)
    for step in range(5):
        for asker in (one, other):  # who is expected, and asks only after the other was answered
            asker.send(ask(step, reset=True))
            assert receive(asker).step == step
    assert over_there.server.host.algorithm.batches == [1] * 10


def test_how_answers_go_is_reported(inference, link, spec):
    over_there = inference(Counting(seconds=0.01)).start()
    assert over_there.server.report() == {"version": 0, "replaced": 0}
    over_there.publish(1, Counting())
    helper, *askers = [link(over_there.address) for _ in range(5)]
    with gathering(over_there, helper):
        for asker in askers:
            asker.send(ask(reset=True))
    for asker in askers:
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


def test_the_task_reaches_the_policy_from_here_and_from_there(connect, inference, link, spec):
    over_there = inference(Counting()).start()
    connect_client, publish = connect(over_there)
    one, other = connect_client("one"), connect_client("other")
    local_host = PolicyHost(Counting(), spec, "cpu")
    publish(1, Counting())
    until(lambda: other.weights(0))
    for source, algorithm in (
        (one, over_there.server.host.algorithm),
        (LocalSource(other, local_host), local_host.algorithm),
    ):
        controller = RemotePolicy(source, deadline=PATIENCE)
        for task in ("fold the towel", "plie la serviette: \N{OK HAND SIGN}"):
            controller.begin("episode", {"explore": True, "weights": 1}, task)
            controller.act({STATE: np.zeros(8, np.float32)}, step=0, previous_action=None, reset=True)
            assert algorithm.tasks[-1] == (task,)


def test_each_question_of_a_batch_has_its_own_task(spec):
    host = PolicyHost(Counting(), spec, "cpu")
    host.answer([Question(name.encode(), ask(reset=True, task=name)) for name in "abc"])
    assert host.algorithm.tasks == [("a", "b", "c")]


# -- on a GPU, as far as it can be told without one


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
def test_padding_a_batch_to_a_power_of_two_changes_no_answer(spec, count):
    host, plain = PolicyHost(Counting(), spec, "cpu"), PolicyHost(Counting(), spec, "cpu")
    host.is_static = True
    for turn in range(3):
        questions = [Question(b"%d" % i, ask(i, key=i + turn, reset=turn == 0)) for i in range(count)]
        for padded, expected in zip(host.answer(questions), plain.answer(questions), strict=True):
            assert padded.step == expected.step
            assert np.array_equal(padded.arrays["action"], expected.arrays["action"])
    assert host.algorithm.batches == [{1: 1, 2: 2, 3: 4, 5: 8, 8: 8}[count]] * 3
    assert plain.algorithm.batches == [count] * 3


def test_warming_up_runs_every_shape_and_leaves_nothing_behind(spec):
    host = PolicyHost(Counting(), spec, "cpu")
    host.warm_up(8)
    assert host.algorithm.batches == [], "on a CPU there is nothing to make"
    host.is_static = True
    host.warm_up(8)
    assert host.algorithm.batches == [1, 1, 2, 2, 4, 4, 8, 8], "one that explores, and one that does not"
    assert host.answer([Question(b"", ask())])[0].arrays["action"][0, 0] == 1


def test_a_layer_that_is_compiled_is_compiled_once_for_all_layers_tasks_and_batches(spec):
    """What a GPU will do, with a compiler that writes no code."""
    host = PolicyHost(shipped(spec, "+algo=sft", "+policy=pi0_tiny"), spec, "cpu")

    def actions(task, count):
        questions = [Question(b"%d" % i, ask(seed=i, reset=True, explore=True, task=task, key=i)) for i in range(count)]
        return [answer.arrays["action"] for answer in host.answer(questions)]

    sizes = (1, 2, 4, 8)
    expected = {size: actions("push the block", size) for size in sizes}
    host.acting._attend = torch.compile(host.acting._attend, fullgraph=True, backend="eager")
    for size in sizes[:3]:
        actions("reach", size)
    with torch.compiler.set_stance("fail_on_recompile"):
        for size in sizes:
            np.testing.assert_allclose(actions("push the block", size), expected[size], atol=1e-6)


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


def test_before_the_first_weights_nothing_is_answered_and_then_what_was_asked_last_is(inference, link, spec):
    over_there = inference(Counting()).start()
    asker = link(over_there.address)
    for step in (0, 1):
        asker.send(ask(step, reset=True))
    asker.wait(0.3)
    assert asker.receive() is None
    over_there.publish(7, Counting())
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
        until(lambda: "weights 2 are gone" in caplog.text)
        asker.send(ask(reset=True))
        assert receive(asker).version == 1
    over_there.publish(3, Counting(scale=3))
    until(lambda: over_there.server.host.version == 3)
    asker.send(ask(reset=True))
    assert receive(asker).arrays["action"][0, 0] == 3


def test_weights_of_another_policy_are_refused_in_one_sentence(tmp_path, spec):
    other = weights.write(tmp_path, safetensors.torch.save(Counting().acting.published()))[0]
    with pytest.raises(ConfigError, match=r"not of this algorithm and policy .*start the actor with the learner's"):
        PolicyHost(rlpd(spec), spec, "cpu").load(1, weights.path(tmp_path, other))


def test_weights_that_are_not_finite_are_left_aside_in_one_sentence(tmp_path, spec):
    learner = rlpd(spec)
    host = PolicyHost(copy.deepcopy(learner), spec, "cpu")
    next(learner.acting.parameters()).data[0] = float("inf")
    bad = weights.write(tmp_path, safetensors.torch.save(learner.acting.published()))[0]
    with pytest.raises(ConfigError, match=r"are not finite in .*weight: the next ones will do"):
        host.load(1, weights.path(tmp_path, bad))
    assert host.version == 0


def test_weights_of_another_policy_leave_what_acts_as_it_is(inference, link, spec, caplog):
    """Not even the part of them that would fit is taken."""
    over_there = inference(Counting(sizes=(3,))).start()
    over_there.publish(1, Counting(2, sizes=(3,)))
    asker = link(over_there.address)
    asker.send(ask(reset=True))
    assert receive(asker).arrays["action"][0, 0] == 2
    with caplog.at_level(logging.INFO):
        over_there.publish(2, Counting(5, sizes=(4,)))
        until(lambda: "rest.0 is (4,) there and (3,) here" in caplog.text)
    asker.send(ask(reset=True))
    answer = receive(asker)
    assert (answer.version, answer.arrays["action"][0, 0]) == (1, 2)
    over_there.publish(3, Counting(7, sizes=(3,)))
    until(lambda: over_there.server.host.version == 3)
    asker.send(ask(reset=True))
    assert receive(asker).arrays["action"][0, 0] == 7


def test_the_old_weights_act_while_newer_ones_are_read_and_the_newest_follow(inference, link, spec):
    over_there = inference(Counting(), host=SlowDisk).start()
    host, asker = over_there.server.host, link(over_there.address)
    over_there.publish(1, Counting())
    until(lambda: host.version == 1)
    host.gate.clear()
    for version in (2, 3, 4):
        over_there.publish(version, Counting(scale=version))
        until(lambda: len(host.files) == 2)
        for step in range(10):
            asker.send(ask(step, reset=True))
            answer = receive(asker)
            assert (answer.step, answer.version, answer.arrays["action"][0, 0]) == (step, 1, 1)
    host.gate.set()
    until(lambda: host.version == 4)
    assert len(host.files) == 3, "the third had been outdated before it could be read"


def test_an_actor_that_acts_by_itself_goes_on_while_newer_weights_are_read(connect, inference, spec):
    connect_client, publish = connect(inference(Counting()))
    client = connect_client("arm")
    publish(1, Counting())
    until(lambda: client.weights(0))
    host = SlowDisk(Counting(), spec, "cpu")
    controller = RemotePolicy(LocalSource(client, host), deadline=PATIENCE)
    controller.begin("episode", {"explore": False, "weights": None}, "reach")

    def version(step):
        controller.act({STATE: np.zeros(8, np.float32)}, step=step, previous_action=None, reset=step == 0)
        assert controller.chunk_start
        return controller.version

    assert version(0) == 1
    host.gate.clear()
    publish(2, Counting())
    until(lambda: client.weights(1))
    assert [version(step) for step in range(1, 20)] == [1] * 19
    host.gate.set()
    steps = itertools.count(20)
    until(lambda: version(next(steps)) == 2)


def test_new_weights_go_where_the_old_ones_are(tmp_path, spec):
    """What was compiled, or captured in a graph, reads them there."""
    host, newer = PolicyHost(rlpd(spec, seed=1), spec, "cpu"), PolicyHost(rlpd(spec, seed=2), spec, "cpu")
    places = [value.data_ptr() for value in host.acting.state_dict().values()]
    sha256, _ = weights.write(tmp_path, safetensors.torch.save(newer.acting.published()))
    host.load(2, weights.path(tmp_path, sha256))
    assert [value.data_ptr() for value in host.acting.state_dict().values()] == places
    question = Question(b"", ask(seed=3, reset=True, explore=True, key=0.5))
    actions = [each.answer([question])[0].arrays["action"] for each in (host, newer)]
    assert np.array_equal(*actions)


def test_a_host_holds_what_acts_and_nothing_else(spec):
    host = PolicyHost(rlpd(spec), spec, "cpu")
    assert [name for name, _ in host.algorithm.named_children()] == ["policy"]
    assert not any(weight.requires_grad for weight in host.algorithm.parameters())


def test_weights_are_held_in_the_policys_precision_and_its_statistics_as_they_are(tmp_path, spec):
    host = PolicyHost(Counting(precision=torch.bfloat16), spec, "cpu")
    sha256, _ = weights.write(tmp_path, safetensors.torch.save(Counting(scale=1 / 3).acting.published()))
    host.load(1, weights.path(tmp_path, sha256))
    assert (host.acting.scale.dtype, host.acting.mean.dtype) == (torch.bfloat16, torch.float32)
    assert float(host.acting.mean) == float(torch.tensor(1 / 3))
    assert float(host.acting.scale) == float(torch.tensor(1 / 3).bfloat16())


def test_a_busy_process_takes_new_weights_reports_and_ends_when_it_is_told_to(connect, process, link, spec):
    connect_client, publish = connect(process)
    connect_client("arm")
    publish(1, rlpd(spec, seed=1))
    until(lambda: process.report().get("version") == 1)
    asker = link(process.address)

    def answered():
        asker.send(ask(reset=True))
        return receive(asker).version

    assert answered() == 1
    publish(2, rlpd(spec, seed=2))
    until(lambda: answered() == 2)
    report = until(lambda: r if answered() and (r := process.report())["version"] == 2 else None)
    assert (report["batch"], report["p50_ms"] >= 200) == (1.0, True)
    asker.send(ask(reset=True))
    asker.wait(0.05)
    process.child.terminate()
    assert process.child.wait(PATIENCE) == 0


def test_a_policy_that_fails_ends_its_process_and_says_where(connect, process, link, spec):
    connect_client, publish = connect(process)
    connect_client("arm")
    publish(1, rlpd(spec))
    until(lambda: process.report().get("version") == 1)
    asker = link(process.address)
    asker.send(ask(reset=True))
    receive(asker)
    (process.folder.parent / "fail").touch()
    asker.send(ask(reset=True))
    assert process.child.wait(PATIENCE) != 0
    said = process.child.stderr.read()
    assert "in slow" in said
    assert "RuntimeError: the policy is broken" in said


def test_an_actor_never_waits_longer_than_its_deadline_for_weights_that_do_not_come(connect, inference, spec):
    """The directive names weights 2; what is here is 1. The runner must be able to hear of another directive."""
    connect_client, publish = connect(inference(Counting()).start())
    client = connect_client("arm")
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
            bad.send(m.InferenceRequest(count, 0, False, False, "", WRONG[wrong]))
        for asker in (one, other):
            answer = receive(asker)
            assert (answer.step, answer.arrays["action"][0, 0]) == (count, count)
        until(lambda: isinstance(bad.receive(), m.Failed))
    bad.send(ask(9, reset=True))
    assert receive(bad).step == 9


def test_of_connections_that_come_and_go_the_last_ones_are_remembered(spec, monkeypatch):
    monkeypatch.setattr(host_module, "REMEMBERED", 3)
    host = PolicyHost(Counting(), spec, "cpu")
    for number in (0, 1, 2, 0, 3, 4):
        host.answer([Question(b"%d" % number, ask(1))])
    counts = [host.answer([Question(b"%d" % number, ask(2))])[0].arrays["action"][0, 0] for number in (0, 4, 1)]
    assert counts == [3, 2, 1]


def test_bytes_that_are_no_question_cost_nobody_anything(inference, link, spec):
    over_there = inference(Counting()).start()
    over_there.publish(1, Counting())
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
