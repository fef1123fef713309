"""Recordings on a GPU, as far as a CPU can show it: each is tried, they have an order, memory may be lacking."""

import numpy as np
import pytest
import torch

from serl_launcher.acting import server as servers
from serl_launcher.acting.device import Cpu
from serl_launcher.acting.graphs import Graphs
from serl_launcher.acting.host import PolicyHost, Question
from tests.shared.common import until
from tests.shared.inference import algorithm_of

from .gpu import FLOW, FakeGpu, actions, many
from .toy import Counting, ask, receive


def doubled(inputs, noise):
    return 2 * noise + inputs["state"]


def given(rows, value):
    return {"state": torch.full((rows, 3), float(value))}, torch.full((1, rows, 3), float(value))


def test_an_empty_recording_that_would_repeat_one_answer_for_ever_is_found_and_said(caplog):
    graphs = Graphs(doubled, FakeGpu(empty=True))
    answers = [graphs(*given(1, value)) for value in (1, 2)]
    assert [float(answer[0, 0, 0]) for answer in answers] == [3, 6]
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("CUDA graphs are off: two inputs replayed for 1 rows are off by ")


def test_an_answer_that_is_no_number_or_that_never_changes_proves_no_recording(caplog):
    for function in (lambda inputs, noise: noise * torch.nan, lambda inputs, noise: torch.zeros_like(noise)):
        graphs = Graphs(function, FakeGpu())
        graphs(*given(1, 1))
        assert not graphs.is_on
    assert len(caplog.records) == 2


def test_a_recording_that_fails_turns_recordings_off_once_and_the_function_answers(caplog):
    graphs = Graphs(doubled, FakeGpu(fails=RuntimeError("operation not permitted\nwhen a stream is captured")))
    for rows in (1, 2):
        assert torch.equal(graphs(*given(rows, 1)), torch.full((1, rows, 3), 3.0))
    (said,) = [record.getMessage() for record in caplog.records]
    assert "a recording failed (operation not permitted)" in said


def test_memory_that_is_lacking_in_a_recording_is_seen_behind_the_error_of_its_end():
    hidden = RuntimeError("capture was invalidated")
    hidden.__context__ = torch.OutOfMemoryError("no memory")
    graphs = Graphs(doubled, FakeGpu(fails=hidden))
    with pytest.raises(torch.OutOfMemoryError):
        graphs(*given(1, 1))
    assert graphs.is_on


def test_an_answer_stays_when_another_recording_of_its_pool_is_replayed():
    graphs = Graphs(doubled, FakeGpu())
    first = graphs(*given(4, 1))
    graphs(*given(2, 5))
    assert torch.equal(first, torch.full((1, 4, 3), 3.0))


def test_one_row_is_recorded_first_and_apart_and_then_the_largest_first_in_one_pool(on):
    host = on(gpu := FakeGpu())
    while sizes := host.unrecorded:
        host.warm_up(sizes[0])
    rows, pools = zip(*gpu.made, strict=True)
    assert rows == (1, 64, 32, 16, 8, 4, 2)
    assert len(set(pools[1:])) == 1
    assert pools[0] not in pools[1:]


def test_a_policy_that_explores_with_more_noise_has_both_recordings_of_a_size_in_one_pool(on):
    host = on(gpu := FakeGpu(), "policy.head.noise_level=0.1", "policy.head.steps=3")
    for size in (1, 8):
        host.warm_up(size)
    assert [rows for rows, _ in gpu.made] in ([1, 8], [1, 1, 8, 8])
    assert len({pool for rows, pool in gpu.made if rows == 8}) == 1


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 13])
def test_batches_that_are_padded_or_cut_answer_as_others_do(on, count):
    host, plain = on(FakeGpu()), on(Cpu(torch.device("cpu")))
    for size in (1, 8, 4):
        host.warm_up(size)
    np.testing.assert_allclose(actions(host, many(count)), actions(plain, many(count)), atol=2e-6)
    assert host.is_short == (count in (2, 13)), "2 and 16 are not recorded"


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
def test_padding_a_batch_to_a_power_of_two_changes_no_answer_and_no_memory(spec, count):
    host, plain = PolicyHost(Counting(), spec, "cpu"), PolicyHost(Counting(), spec, "cpu")
    host.is_static = True
    for size in (1, 2, 4, 8):
        host.warm_up(size)
    assert host.algorithm.batches == [1, 1, 2, 2, 4, 4, 8, 8], "one that explores, and one that does not"
    host.algorithm.batches.clear()
    for turn in range(3):
        questions = [Question(b"%d" % i, ask(i, key=i + turn, reset=turn == 0)) for i in range(count)]
        for padded, expected in zip(host.answer(questions), plain.answer(questions), strict=True):
            assert padded.step == expected.step
            assert np.array_equal(padded.arrays["action"], expected.arrays["action"])
        host.warm_up(8)  # amid a life
    assert host.algorithm.batches == [{1: 1, 2: 2, 3: 4, 5: 8, 8: 8}[count], 8, 8] * 3
    assert plain.algorithm.batches == [count] * 3


def test_on_a_cpu_there_is_nothing_to_record(spec):
    host = PolicyHost(Counting(), spec, "cpu")
    host.warm_up(8)
    assert (host.algorithm.batches, host.unrecorded) == ([], [])


# -- memory that is lacking


def test_a_size_for_which_memory_is_lacking_lowers_the_largest_batch_and_the_rest_is_recorded(on, caplog):
    host = on(gpu := FakeGpu(room=10))
    while sizes := host.unrecorded:
        host.warm_up(sizes[0])
    assert host.most == 8
    assert [rows for rows, _ in gpu.made] == [1, 8, 4, 2]
    assert "at most 8 requests in a batch from now on" in caplog.text
    plain = on(Cpu(torch.device("cpu")))
    np.testing.assert_allclose(actions(host, many(20)), actions(plain, many(20)), atol=2e-6)


def test_without_memory_for_one_row_warming_up_fails(on):
    with pytest.raises(torch.OutOfMemoryError):
        on(FakeGpu(room=0)).warm_up(1)


class Narrow(Counting):
    """Has memory for so many rows at once."""

    def __init__(self, room):
        super().__init__()
        self.room = room

    def act(self, observation, *arguments, **options):
        if any(len(value) > self.room for value in observation.values()):
            raise torch.OutOfMemoryError
        return super().act(observation, *arguments, **options)


@pytest.mark.parametrize("is_static", [False, True])
def test_a_batch_for_which_memory_is_lacking_is_answered_in_halves_and_each_actor_is_remembered_once(spec, is_static):
    host = PolicyHost(Narrow(3), spec, "cpu")
    host.is_static = is_static
    host._ready = {1, 2, 4, 8, 16}
    for count in (1, 2, 3):
        answers = host.answer([Question(b"%d" % i, ask(i, key=i, reset=count == 1)) for i in range(11)])
        assert [answer.step for answer in answers] == list(range(11))
        assert [answer.arrays["action"].tolist() for answer in answers] == [[[count, count * i]] for i in range(11)]
    assert host.most == 2
    assert max(host.algorithm.batches) == 2


def test_one_row_for_which_memory_is_lacking_is_an_error(spec):
    with pytest.raises(torch.OutOfMemoryError):
        PolicyHost(Narrow(0), spec, "cpu").answer(many(4))


# -- when sizes are recorded


def test_every_size_is_recorded_before_the_first_weights_come(inference, on, spec, link):
    on(gpu := FakeGpu(room=10))
    over_there = inference(algorithm_of(spec, *FLOW)).start()
    until(lambda: not over_there.server.host.unrecorded and over_there.server._job is None)
    assert [rows for rows, _ in gpu.made] == [1, 8, 4, 2]
    over_there.publish(1, algorithm_of(spec, *FLOW))
    asker = link(over_there.address)
    asker.send(ask(4, reset=True))
    assert receive(asker).step == 4


def test_while_actors_ask_no_size_is_recorded_unless_batches_are_cut_for_long(inference, on, spec):
    on(FakeGpu())
    server = inference(algorithm_of(spec, *FLOW)).server
    server.host.version, came = 1, 1000.0
    server._put(Question(b"a", ask(), came))
    assert not server._may_record(came + servers.IDLE_S + 1), "one waits"
    server._waiting.clear()
    assert not server._may_record(came + servers.IDLE_S - 1)
    assert server._may_record(came + servers.IDLE_S + 1)
    server.host.is_short, server._recorded = True, came
    assert not server._may_record(came + 1)
    server._put(Question(b"a", ask(), came + servers.RECORD_S))
    assert server._may_record(came + servers.RECORD_S + 1)


def test_of_new_weights_there_is_one_copy_beside_those_that_act(inference):
    """A GPU has room for that one: no file is read until the last one's weights are swapped in."""
    server = inference(Counting()).server
    begun = []
    server._loader.begin = lambda version, file: begun.append(version)
    server._loaded = (1, {})
    server._load({"version": 2, "sha256": "0" * 64})
    assert begun == []
    server._loaded = None
    server._load({"version": 2, "sha256": "0" * 64})
    assert begun == [2]
