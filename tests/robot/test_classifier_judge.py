"""The judge that a classifier is: what it makes of probabilities, and of a learner that is late, gone or hostile."""

import numpy as np
import pytest
from serl_client import messages as m
from serl_client.errors import ConfigError, Disconnected, Refused
from serl_client.reach import Lookout
from serl_client.spec import Feature, Spec

from robot_infra import classifier_judge as module
from robot_infra.classifier_judge import ClassifierJudge, Verdicts, judge_by
from tests.shared.common import STATE
from tests.shared.robots import build

SCORED = {"reached": Feature((1,))}


class Link:
    """A connection to a learner that answers each question with the next of `scores`; None: not at all."""

    address, key = "tcp://127.0.0.1:1", None

    def __init__(self, spec, clock, scores=()):
        self.clock = clock
        self.spec, self.scores, self.asked, self.answers, self.error = spec, list(scores), [], [], None

    def hello(self, timeout):
        return m.Welcome("run", 0, 0, [], self.spec and self.spec.to_dict(), "", {})

    def send(self, message):
        self.asked.append(message)
        if (score := self.scores.pop(0) if self.scores else None) is not None:
            self.answer(message.step, score)
        return True

    def answer(self, step, score):
        self.answers.append(m.InferenceResponse(step, 1, {"reached": np.full(1, score, np.float32)}))

    def receive(self):
        if self.error:
            raise self.error
        return self.answers.pop(0) if self.answers else None

    def wait(self, seconds):
        self.clock.sleep(seconds)

    def close(self):
        self.spec = None


@pytest.fixture
def spec():
    env = build()
    yield Spec(env.spec.observation, env.spec.action, 10.0, SCORED)
    env.close()


def task():
    return "lift the block"


@pytest.fixture
def judge(spec, clock):
    def judge(*scores, waits=False, rows=2, stale_s=5.0):
        link = Link(spec, clock, scores)
        made = ClassifierJudge(link, spec, Verdicts(threshold=0.5, rows=rows, stale_s=stale_s), waits=waits, task=task)
        return made, link

    return judge


SEEN = {STATE: np.zeros(6, np.float32)}


def test_a_model_that_remembers_begins_anew_with_each_episode_until_it_has_heard_of_it(judge, clock):
    made, link = judge(0.1, 0.1, None, 0.1, 0.1, 0.1, stale_s=0.5)
    for _ in range(2):
        made(SEEN)
    made.reset()
    for _ in range(4):  # the first question of the second episode is lost
        made(SEEN)
        clock.advance(0.6)
    assert [ask.reset for ask in link.asked] == [True, False, True, True, False, False]
    assert {ask.task for ask in link.asked} == {task()}


@pytest.mark.parametrize(
    ("scores", "end"),
    [((0.9, 0.9), 1), ((0.9, 0.1, 0.9, 0.9), 3), ((0.9, 0.1, 0.9), None), ((0.5, 0.5), 1), ((float("nan"),) * 3, None)],
)
def test_success_is_two_rows_in_succession_and_one_that_shows_none_begins_anew(scores, end):
    verdicts = Verdicts(threshold=0.5, rows=2, stale_s=0.5)
    found = []
    for row, score in enumerate(scores):
        verdicts.hear(np.array([score]), row * 0.1)
        found.append(verdicts.at(row * 0.1 + 0.05))
    assert [each.success for each in found] == [row == end for row in range(len(scores))]
    assert all((each.reward, each.terminated) == (float(each.success), each.success) for each in found)


def test_each_stage_is_rewarded_once_and_success_brings_those_that_were_passed_over():
    verdicts = Verdicts(threshold=0.5, rows=1, stale_s=0.5, stage_reward=0.25)
    shown = ((0, 0, 0, 0), (1, 0, 0, 0), (0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0), (1, 1, 1, 1))
    found = []
    for row, scores in enumerate(shown):
        verdicts.hear(np.array(scores), row * 0.1)
        found.append(verdicts.at(row * 0.1))
    assert [each.stage for each in found] == [0, 1, 0, 1, 2, 4]
    assert [each.reward for each in found] == [0, 0.25, 0, 0, 0.25, 1.25]
    assert [each.terminated for each in found] == [False] * 5 + [True]
    verdicts.reset()
    verdicts.hear(np.ones(4), 1.0)
    assert verdicts.at(1.0).reward == 1.75, "of each episode anew"


def test_what_is_stale_says_nothing_and_begins_anew():
    verdicts = Verdicts(threshold=0.5, rows=2, stale_s=0.5)
    assert verdicts.at(0.0).success is None
    verdicts.hear(np.full(1, 0.9), 0.0)
    assert verdicts.at(0.2).success is False
    verdicts.hear(np.full(1, 0.9), 0.1)
    assert verdicts.at(0.7).success is None
    verdicts.hear(np.full(1, 0.9), 0.7)
    assert verdicts.at(0.8).success is False, "the first one of a new succession"
    verdicts.hear(np.full(1, 0.9), 0.8)
    assert verdicts.at(0.9).success is True
    verdicts.reset()
    assert verdicts.at(0.9).success is None


@pytest.mark.parametrize("words", [{"threshold": 1.0}, {"rows": 0}, {"stale_s": 0}, {"stage_reward": -1.0}])
def test_numbers_out_of_range_are_refused(words):
    with pytest.raises(ConfigError, match="say a threshold between 0 and 1"):
        Verdicts(**({"threshold": 0.5, "rows": 1, "stale_s": 1.0} | words))


def test_on_the_real_clock_a_verdict_is_on_the_answer_that_has_come(judge):
    made, link = judge(0.9, 0.9, 0.9)
    assert [made(SEEN).success for _ in range(3)] == [None, False, True]
    assert [ask.step for ask in link.asked] == [1, 2, 3]
    assert link.asked[0].arrays.keys() == {STATE}
    made.close()
    assert link.spec is None


def test_it_never_waits_and_asks_one_question_at_a_time_and_anew_where_no_answer_came(judge, clock):
    made, link = judge(stale_s=0.2)
    for asked in (1, 1, 2, 2, 3):
        before = clock.now
        assert made(SEEN).success is None
        assert (len(link.asked), clock.now) == (asked, before)
        clock.advance(0.15)
    link.answer(1, 0.9)
    assert made(SEEN).success is None, "that was of a question that it gave up"


def test_on_the_simulated_clock_each_verdict_is_on_the_observation_at_hand(judge):
    made, _ = judge(0.1, 0.9, 0.9, waits=True)
    assert [made(SEEN).success for _ in range(3)] == [False, False, True]


def test_an_answer_of_the_episode_before_counts_for_nothing(judge):
    made, link = judge(rows=1)
    made(SEEN)
    made.reset()
    link.answer(1, 0.9)
    assert made(SEEN).success is None
    link.answer(2, 0.9)
    assert made(SEEN).success is True


@pytest.mark.parametrize("error", [Disconnected("gone"), Refused("no")])
def test_a_learner_that_is_gone_leaves_the_word_to_the_operator_and_may_come_back(judge, error, caplog):
    made, link = judge(0.9, 0.9, rows=1)
    made(SEEN)
    link.error = error
    assert made(SEEN).success is None
    made(SEEN)
    assert caplog.text.count("says nothing of use") == 1, "not at each step"
    link.error = None
    assert made(SEEN).success is True


@pytest.mark.parametrize("waits", [False, True])
def test_a_learner_that_answers_nothing_or_too_late_is_told_in_short_episodes_too_until_it_comes_back(
    judge, caplog, clock, waits
):
    made, link = judge(rows=1, stale_s=0.5, waits=waits)
    lookout = Lookout("the judge", lambda: made.unanswered.seconds, made.why_silent)
    for outage in (1, 2):
        for _ in range(4):
            made.reset()
            for _ in range(3):
                assert made(SEEN).success is None
                clock.advance(0.6)
        lookout.watch()
        assert caplog.text.count(": nobody listens at 127.0.0.1:1 (") == outage
        assert "answer after more than task.judge.stale_s=0.5 s is too late" in caplog.text
        assert str(lookout).startswith("AWAY")
        link.scores = [0.9] * 2
        assert True in [made(SEEN).success for _ in range(2)]
        lookout.watch()
        assert str(lookout) == "connected"


def test_a_classifier_of_other_floats_is_asked_with_its_own(spec, clock):
    theirs = Spec({STATE: Feature((6,), "float64")}, spec.action, 10.0, SCORED)
    link = Link(theirs, clock, [0.9])
    made = ClassifierJudge(link, spec, Verdicts(threshold=0.5, rows=1, stale_s=1.0), waits=True, task=task)
    assert made(SEEN).success is True
    assert link.asked[0].arrays[STATE].dtype == np.float64


def test_a_refusal_ends_the_waiting_on_the_simulated_clock(judge, clock):
    made, link = judge(waits=True)
    link.send = lambda message: link.answers.append(m.Failed("Refused", "not you")) is None
    begin = clock.now
    assert [made(SEEN).success for _ in range(3)] == [None] * 3
    assert clock.now - begin < module.PATIENCE_S


def test_hostile_answers_are_none(judge, caplog, clock):
    made, link = judge(rows=1, stale_s=0.01)
    for answer in (
        m.InferenceResponse(1, 1, {}), m.InferenceResponse(2, 1, {"reached": np.ones(3, np.float32)}),
        m.InferenceResponse(10**9, 1, {"reached": np.ones(1)}), m.Failed("Refused", "not you"), m.Bye(),
    ):  # fmt: skip
        made(SEEN)
        link.answers.append(answer)
        assert made(SEEN).success is None
        clock.advance(0.02)
    assert "not you" in caplog.text


def test_a_learner_without_a_classifier_or_with_one_for_another_robot_is_refused(spec, clock):
    strange, numbers = (Spec({STATE: f}, spec.action, 10.0, SCORED) for f in (Feature((9,)), Feature((6,), "int64")))
    for theirs, said in (
        (None, "127.0.0.1:1: "), (Spec(spec.observation, spec.action, 10.0), "no judge answers there"),
        (strange, r"the classifier sees observation.state float32 \[9\], and this robot observation.state float32 \[6"),
        (numbers, r"the classifier sees observation.state int64 \[6\]"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=said):
            ClassifierJudge(
                Link(theirs, clock), spec, Verdicts(threshold=0.5, rows=1, stale_s=1.0), waits=False, task=task
            )


def test_where_nobody_answers_or_the_env_judges_itself_the_actor_says_so():
    options = {"address": "127.0.0.1:9", "key": None, "threshold": 0.5, "rows": 2, "stale_s": 0.5, "stage_reward": 0.0}
    with build() as env, pytest.raises(ConfigError, match=r"task.judge.address=127.0.0.1:9: nobody listens at"):
        judge_by(options, env, name="arm")
    with pytest.raises(ConfigError, match="the env of this task is a object, which judges itself"):
        judge_by(options, object(), name="arm")
