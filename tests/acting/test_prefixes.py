"""Questions that say what is left of the old chunk: in one batch with others, in a recording, and wrong ones."""

import numpy as np
import pytest
import torch
from serl_client import messages as m
from serl_client.errors import MessageError

from serl_launcher.acting.host import MOST, PolicyHost, Question
from serl_launcher.acting.local import LocalSource
from tests.shared.common import until
from tests.shared.inference import algorithm_of, rlpd

from .gpu import FLOW, FakeGpu, actions
from .toy import ask, observed

HORIZON = 8  # of policy=flow
TRAINED, GUIDED = (*FLOW, "policy.max_delay=3"), FLOW


def rows(count, value=0.5):
    return np.linspace(-value, value, 2 * count, dtype=np.float32).reshape(count, 2)


def question(actor, committed=0, left=0, seed=0):
    """With the prefix rows(left) if anything is committed."""
    arrays = {"prefix": rows(left)} if committed else {}
    plain = ask(3, seed=seed, reset=True, explore=True, key=0.1, **arrays)
    return Question(actor, m.InferenceRequest(3, seed, True, True, "", plain.arrays, committed))


MIXED = [(b"a", 0, 0), (b"b", 1, 4), (b"c", 3, 8), (b"d", 5, 5), (b"e", 0, 0)]


@pytest.mark.parametrize("words", [TRAINED, GUIDED], ids=["trained", "guided"])
def test_a_batch_mixes_questions_with_and_without_an_old_chunk(spec, words):
    host = PolicyHost(algorithm_of(spec, *words), spec, "cpu")
    questions = [question(*each, seed=number) for number, each in enumerate(MIXED)]
    together = host.answer(questions)
    for asked, answer in zip(questions, together, strict=True):
        action, committed = answer.arrays["action"], asked.ask.committed
        assert action.shape == (HORIZON, 2)
        if committed:
            assert np.array_equal(action[:committed], asked.ask.arrays["prefix"][:committed]), "bit by bit"
        np.testing.assert_allclose(action, host.answer([asked])[0].arrays["action"], rtol=0, atol=2e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("words", [TRAINED, GUIDED], ids=["trained", "guided"])
def test_a_gpu_goes_on_from_an_old_chunk_as_a_cpu_does(spec, words):
    host, plain = (PolicyHost(algorithm_of(spec, *words, seed=1), spec, device) for device in ("cuda", "cpu"))
    while sizes := host.unrecorded:
        host.warm_up(sizes[0])
    questions = [question(*each, seed=number) for number, each in enumerate(MIXED)]
    for _ in range(2):
        np.testing.assert_allclose(actions(host, questions), actions(plain, questions), atol=1e-3)


def test_guided_chunks_for_which_memory_is_lacking_cost_the_others_nothing(spec, monkeypatch, caplog):
    """First two at once are too many, then one is: from then on chunks begin anew."""
    host, plain = (PolicyHost(algorithm_of(spec, *GUIDED, seed=1), spec, "cpu") for _ in range(2))
    questions = [question(*each, seed=number) for number, each in enumerate(MIXED)]
    expected, decide, most = actions(plain, questions), host._decide, 1

    def lacking(rows, *rest):
        if len([row for row in rows if "prefix" in row.ask.arrays]) > most:
            raise torch.OutOfMemoryError
        return decide(rows, *rest)

    monkeypatch.setattr(host, "_decide", lacking)
    np.testing.assert_allclose(actions(host, questions), expected, rtol=0, atol=2e-5)
    most = 0
    anew = actions(plain, [question(actor, seed=number) for number, (actor, *_) in enumerate(MIXED)])
    for _ in range(2):
        np.testing.assert_allclose(actions(host, questions), anew, rtol=0, atol=2e-5)
    assert host.most == MOST
    assert [record.args[-1] for record in caplog.records] == [1, 0]


def test_a_delay_beyond_what_the_policy_has_learned_is_told_once(spec, caplog):
    host = PolicyHost(algorithm_of(spec, *TRAINED), spec, "cpu")
    learned = host.acting.max_delay
    for committed in (learned, learned + 1, learned + 2):
        host.answer([question(b"a", committed, 8)])
    assert [record.args[0] for record in caplog.records] == [learned + 1]


def test_a_recording_takes_every_delay(spec, on):
    """Its shapes do not change, so nothing is recorded for a prefix."""
    plain, gpu = PolicyHost(algorithm_of(spec, *TRAINED, seed=1), spec, "cpu"), FakeGpu()
    host = on(gpu, "policy.max_delay=3")
    host.warm_up(4)
    questions = [question(*each, seed=number) for number, each in enumerate(MIXED[:4])]
    np.testing.assert_allclose(actions(host, questions), actions(plain, questions), rtol=0, atol=2e-5)
    assert [count for count, _ in gpu.made] == [4]


WRONG = {
    "longer than a chunk": (rows(9), 1, r"prefix should be float32 \[1 to 8, 2\], not float32 \[9, 2\]"),
    "another action": (np.zeros((3, 3), np.float32), 1, r"not float32 \[3, 3\]"),
    "another type": (np.zeros((3, 2)), 1, r"not float64 \[3, 2\]"),
    "another rank": (np.zeros(2, np.float32), 1, r"not float32 \[2\]"),
    "not finite": (rows(3) * np.float32("nan"), 1, r"prefix \[0\] is nan, which is not finite"),
    "beyond reason": (rows(3) * np.float32(3e38), 1, r"prefix \[0\] is .*, beyond its limit of -201"),
    "no rows": (rows(0), 1, "committed should be 1 to 0"),
    "more committed than left": (rows(3), 4, "committed should be 1 to 3, the rows of the prefix, not 4"),
    "nothing committed": (rows(3), 0, "committed should be 1 to 3"),
    "less than nothing": (rows(3), -1, "committed should be 1 to 3"),
    "committed without rows": (None, 2, "a question without a prefix has committed=0, not 2"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_prefix_is_refused_in_one_sentence(spec, wrong):
    prefix, committed, complaint = WRONG[wrong]
    host = PolicyHost(algorithm_of(spec, *TRAINED), spec, "cpu")
    arrays = ask(**({} if prefix is None else {"prefix": prefix})).arrays
    with pytest.raises(MessageError, match=complaint):
        host.check(m.InferenceRequest(3, 0, True, True, "", arrays, committed))


@pytest.mark.parametrize("words", [TRAINED, GUIDED], ids=["trained", "guided"])
def test_an_old_chunk_is_continued_alike_over_there_and_in_the_actors_own_process(connect, inference, spec, words):
    over_there = inference(algorithm_of(spec, *words, seed=1)).start()
    _, join, publish = connect(over_there)
    one, other = join("one"), join("other")
    publish(1, algorithm_of(spec, *words, seed=2))
    local = LocalSource(other, PolicyHost(algorithm_of(spec, *words, seed=3), spec, "cpu"))
    until(lambda: other.weights(0))
    answers = []
    for source in (one, local):
        source.ask(
            observed(np.random.default_rng(0)), step=4, seed=7, previous_action=None, reset=True, explore=True,
            task="reach", prefix=rows(6), committed=2,
        )  # fmt: skip
        answers.append(until(lambda source=source: source.wait_answer(4, 1.0)))
    local.close()
    assert np.array_equal(answers[0].action[:2], rows(6)[:2])
    assert np.array_equal(answers[0].action, answers[1].action)


def test_a_policy_that_cannot_continue_a_chunk_says_what_to_do(spec):
    host = PolicyHost(rlpd(spec), spec, "cpu")
    with pytest.raises(MessageError, match="GaussianPolicy cannot continue a chunk: start the actor with chunks=async"):
        host.check(question(b"a", 1, 1).ask)
