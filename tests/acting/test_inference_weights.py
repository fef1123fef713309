"""New weights: swapped between two batches, read while the old ones act, refused when they do not fit."""

import copy
import itertools
import logging
import re
import threading

import numpy as np
import pytest
import torch
from serl_client import ConfigError
from serl_client.controller import RemotePolicy

from serl_launcher.acting.host import Loader, PolicyHost, Question
from serl_launcher.acting.local import LocalSource
from tests.shared.common import PATIENCE, STATE, until
from tests.shared.inference import published, rlpd

from .toy import Counting, ask, receive


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


def test_weights_are_swapped_between_two_batches_and_every_answer_names_its_version(inference, link):
    """A swap within a batch, or within a decision, would give an action that is not its version's."""
    over_there, last = inference(Counting()).start(), 40
    over_there.publish(1, Counting())

    askers, versions, published = [link(over_there.address) for _ in range(4)], [0], 1
    while versions[-1] < last:
        if over_there.server.host.version == published < last:
            published += 1
            over_there.publish(published, Counting(scale=published))
        for asker in askers:
            asker.send(ask(reset=True))
        answers = [receive(asker) for asker in askers]
        assert all(answer.arrays["action"][0, 0] == answer.version for answer in answers)
        versions += sorted(answer.version for answer in answers)
    assert versions == sorted(versions)
    assert len(set(versions)) > 3


def test_before_the_first_weights_nothing_is_answered_and_then_what_was_asked_last_is(inference, link):
    over_there = inference(Counting()).start()
    asker = link(over_there.address)
    for step in (0, 1):
        asker.send(ask(step, reset=True))
    until(lambda: over_there.server.report()["replaced"])
    assert asker.receive() is None
    over_there.publish(7, Counting())
    answer = receive(asker)
    assert (answer.step, answer.version) == (1, 7)


def test_weights_of_another_policy_are_refused_in_one_sentence(tmp_path, spec):
    with pytest.raises(ConfigError, match=r"not of this algorithm and policy .*start the actor with the learner's"):
        PolicyHost(rlpd(spec), spec, "cpu").load(1, published(tmp_path, Counting()))


def test_weights_that_are_not_finite_are_left_aside_in_one_sentence(tmp_path, spec):
    learner = rlpd(spec)
    host = PolicyHost(copy.deepcopy(learner), spec, "cpu")
    next(learner.acting.parameters()).data[0] = float("inf")
    with pytest.raises(ConfigError, match=r"is not finite in .*weight: nothing to do, the current ones"):
        host.load(1, published(tmp_path, learner))
    assert host.version == 0


OTHER = r"rest\.0 is \(4,\) in \w+\.safetensors and \(3,\) here"


@pytest.mark.parametrize(("size", "says"), [(None, "weights 2 are gone"), (4, OTHER)])
def test_weights_that_are_gone_or_of_another_policy_leave_what_acts_as_it_is(inference, link, caplog, size, says):
    """Not even the part of them that would fit is taken."""
    over_there = inference(Counting(2, sizes=(3,))).acting()
    asker = link(over_there.address)
    caplog.set_level(logging.INFO)

    def acted():
        asker.send(ask(reset=True))
        answer = receive(asker)
        return answer.version, answer.arrays["action"][0, 0]

    assert acted() == (1, 2)
    if size is None:
        over_there.notice = {"version": 2, "sha256": "f" * 64}
    else:
        over_there.publish(2, Counting(5, sizes=(size,)))
    until(lambda: re.search(says, caplog.text))
    assert acted() == (1, 2)
    over_there.publish(3, Counting(7, sizes=(3,)))
    until(lambda: over_there.server.host.version == 3)
    assert acted() == (3, 7)


def test_a_file_that_was_gone_or_damaged_is_read_once_it_is_written_anew(tmp_path, spec):
    host = PolicyHost(Counting(), spec, "cpu")
    loader, file = Loader(host), published(tmp_path, Counting())
    whole = file.read_bytes()
    file.unlink()
    loader.begin(7, file)
    assert loader.pop(PATIENCE) is None
    file.write_bytes(b"")
    loader.begin(7, file)
    with pytest.raises(ConfigError, match="is damaged"):
        loader.pop(PATIENCE)
    loader.begin(7, file)
    assert loader.pop() is None, "it is as it was"
    file.write_bytes(whole)
    loader.begin(7, file)
    assert loader.pop(PATIENCE)
    loader.close()


def test_the_old_weights_act_while_newer_ones_are_read_and_the_newest_follow(inference, link):
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
    _, join, publish = connect(inference(Counting()))
    client = join("arm")
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


def test_an_actor_that_acts_by_itself_leaves_weights_of_another_policy_aside(connect, inference, spec, caplog):
    """They may be of an earlier plan, and the learner's own are still to come."""
    _, join, publish = connect(inference(Counting()))
    client = join("arm")
    controller = RemotePolicy(LocalSource(client, PolicyHost(Counting(sizes=(3,)), spec, "cpu")), deadline=0.1)
    controller.begin("episode", {"explore": False, "weights": None}, "reach")

    def act():
        return controller.act({STATE: np.zeros(8, np.float32)}, step=0, previous_action=None, reset=True)

    publish(1, Counting(sizes=(4,)))
    until(lambda: act() is None and re.search(OTHER, caplog.text))
    publish(2, Counting(sizes=(3,)))
    until(lambda: act() is not None)
    assert controller.version == 2


def test_new_weights_go_where_the_old_ones_are(tmp_path, spec):
    """What was compiled, or captured in a graph, reads them there."""
    host, newer = PolicyHost(rlpd(spec, seed=1), spec, "cpu"), PolicyHost(rlpd(spec, seed=2), spec, "cpu")
    places = [value.data_ptr() for value in host.acting.state_dict().values()]
    host.load(2, published(tmp_path, newer.algorithm))
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
    host.load(1, published(tmp_path, Counting(scale=1 / 3)))
    assert (host.acting.scale.dtype, host.acting.mean.dtype) == (torch.bfloat16, torch.float32)
    assert float(host.acting.mean) == float(torch.tensor(1 / 3))
    assert float(host.acting.scale) == float(torch.tensor(1 / 3).bfloat16())
