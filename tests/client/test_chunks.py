"""How an actor goes from one chunk to the next: when it asks, what it does meanwhile, and what it never does: wait
while actions remain."""

from itertools import pairwise

import numpy as np
import pytest
from serl_client import ConfigError
from serl_client.chunks import RECENT, RULES, AsyncChunks, chunk_policy, deadline_of
from serl_client.controller import decision_seed

from tests.shared.actors import Chunks, CountingEnv, FakeClient, run

NEVER = 10**9


class Patient(Chunks):
    """Chunks that remember how long they were waited for."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.waits = []

    def ask(self, observation, *, prefix=None, committed=0, **question):
        assert committed == 0 if prefix is None else 1 <= committed <= len(prefix), "this would be refused"
        super().ask(observation, prefix=prefix, committed=committed, **question)

    def wait_answer(self, step, timeout):
        self.waits.append(timeout)
        return super().wait_answer(step, timeout)


class Delayed(Patient):
    """Chunks whose answers come `delay` steps after their question; `now` is the step."""

    def ask(self, observation, *, step, **question):
        super().ask(observation, step=step, **question)
        self.patience, self._comes = 0, self.now + self.delay

    def wait_answer(self, step, timeout):
        self.waits.append(timeout)
        return super().wait_answer(step, timeout) if self.now >= self._comes else None


def policy(source, rule="async", *, deadline=0.05, n_action_steps=4):
    made = RULES[rule](source, deadline=deadline, n_action_steps=n_action_steps)
    made.begin("e0", {"explore": True, "weights": None}, "count")
    return made


def act(controller, step):
    action = controller.act({}, step=step, previous_action=None, reset=step == 0)
    return None if action is None else round(float(action[0]), 2)


def steady(rule, delay, *, length=8, n_action_steps=4, steps=60):
    """A policy whose every answer but the first comes `delay` steps late: (the source, [(action, chunk_start)])."""
    source = Delayed(length)
    controller, rows = policy(source, rule, n_action_steps=n_action_steps), []
    for step in range(steps):
        source.now = step
        rows.append((act(controller, step), controller.chunk_start, controller.chunk_delay))
        source.delay = delay
    return source, controller, rows


def test_a_policy_of_single_actions_is_asked_for_every_row():
    source = Chunks(decides=["noise"])
    remote = policy(source, "wait", n_action_steps=None)
    assert [act(remote, step) for step in range(4)] == [0, 1, 2, 3]
    assert source.questions == [(0, True), (1, False), (2, False), (3, False)]
    assert (remote.version, remote.chunk_start, remote.extras["noise"].tolist()) == (1, True, [4, 4])
    assert source.seed == decision_seed("e0", 3) < 2**63


def test_a_chunk_is_given_out_row_by_row_and_decision_marks_its_first():
    source = Chunks(length=3)
    remote = policy(source, "wait", n_action_steps=None)
    rows = [(act(remote, step), remote.chunk_start) for step in range(6)]
    assert rows == [(0, True), (0.01, False), (0.02, False), (3, True), (3.01, False), (3.02, False)]
    assert [step for step, _ in source.questions] == [0, 3]


def test_the_rows_that_have_passed_are_skipped_in_a_late_chunk():
    source = Chunks(length=5, delay=2)
    remote = policy(source, "wait", n_action_steps=None)
    assert [act(remote, step) for step in range(5)] == [None, None, 0.02, 0.03, 0.04]
    assert remote.chunk_start is False
    assert source.questions == [(0, True)]


def test_a_chunk_that_is_too_late_as_a_whole_is_asked_for_again():
    source = Chunks(length=1, delay=1)
    remote = policy(source, "wait", n_action_steps=None)
    assert act(remote, 0) is None
    source.delay = 0
    assert act(remote, 1) == 1
    assert source.questions == [(0, True), (1, True)]  # the reset stays until there is an action


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("length", "n_action_steps"), [(1, 4), (8, 4), (8, 8), (8, None), (50, 3)])
def test_without_a_delay_every_rule_gives_the_actions_of_waiting(rule, length, n_action_steps):
    source, _, rows = steady(rule, 0, length=length, n_action_steps=n_action_steps)
    waited, _, expected = steady("wait", 0, length=length, n_action_steps=n_action_steps)
    assert rows == expected
    assert source.questions == waited.questions


@pytest.mark.parametrize("rule", sorted(RULES.keys() - {"wait"}))
@pytest.mark.parametrize("delay", [1, 2, 3, 4])
def test_the_next_chunk_is_asked_for_so_early_that_it_is_there_at_the_border(rule, delay):
    source, controller, rows = steady(rule, delay)
    assert controller.lead == delay
    assert None not in [action for action, *_ in rows]
    starts = [step for step, (_, starts, _) in enumerate(rows) if starts]
    assert {late for _, starts, late in rows if starts} == {0, delay}
    assert {b - a for a, b in pairwise(starts[2:])} == {4}, "each acts for n_action_steps"
    assert [step + delay for step, _ in source.questions[2:]][: len(starts) - 2] == starts[2:]


@pytest.mark.parametrize("rule", sorted(RULES.keys() - {"wait"}))
def test_while_actions_remain_no_rule_but_wait_waits_even_if_no_answer_ever_comes(rule):
    source = Patient(6)
    controller = policy(source, rule, n_action_steps=2)
    assert act(controller, 0) == 0
    source.delay, source.waits = NEVER, []
    assert [act(controller, step) for step in range(1, 6)] == [0.01, 0.02, 0.03, 0.04, 0.05]
    assert source.waits
    assert max(source.waits) <= 0
    assert act(controller, 6) is None
    assert source.waits[-1] > 0, "where no action is left the deadline holds"


def test_with_rtc_the_committed_actions_of_the_old_chunk_act_even_if_the_answer_comes_early():
    source, controller, rows = steady("rtc", 3, steps=16)
    assert (source.questions[-1][0], controller.lead, source.committed) == (12, 3, 3)
    assert source.prefix[:, 0].round(2).tolist() == pytest.approx([8.04, 8.05, 8.06, 8.07]), "what is left of step 8's"
    assert rows[-1] == (12.03, True, 3)
    source.delay, late = 0, []
    for step in (16, 17, 18, 19):  # the answer to 16 is there at once, and acts from 19 on
        source.now = step
        late.append((act(controller, step), controller.chunk_start, controller.chunk_delay))
    assert late == [(12.04, False, 0), (12.05, False, 0), (12.06, False, 0), (16.03, True, 3)]
    assert source.questions[-1][0] == 16


@pytest.mark.parametrize("rule", sorted(RULES.keys() - {"wait"}))
def test_after_an_answer_that_outlasts_its_chunk_the_next_ones_are_taken_again(rule):
    source = Delayed(8)
    controller = policy(source, rule)
    held = []
    for step in range(60):
        source.now, source.delay = step, 12 if 20 <= step < 24 else 2 if step else 0
        held.append(act(controller, step) is None)
    assert any(held)
    assert not any(held[40:])


def test_waiting_waits_at_the_border_only():
    source = Patient(6)
    controller = policy(source, "wait", n_action_steps=2)
    act(controller, 0)
    source.delay, source.waits = 2, []
    assert [act(controller, step) for step in (1, 2, 3)] == [0.01, 0.02, 0.03]
    assert (len(source.waits), source.waits[0] > 0, source.waits[1] <= 0) == (2, True, True)
    assert (act(controller, 4), controller.chunk_start) == (2.02, True)


@pytest.mark.parametrize("rule", RULES)
def test_a_lost_question_is_asked_again_while_the_old_chunk_goes_on(rule, monkeypatch):
    monkeypatch.setattr("serl_client.controller.REPEAT", 0.0)
    source = Chunks(20)
    controller = policy(source, rule)
    act(controller, 0)
    source.delay = NEVER
    assert [act(controller, step) for step in range(1, 8)] == [step / 100 for step in range(1, 8)]
    source.delay = 0
    assert act(controller, 8) == 8
    assert [step for step, _ in source.questions] == [0, 4, 5, 6, 7, 8]


def test_the_lead_is_the_95th_percentile_of_recent_delays_and_leaves_enough_of_a_chunk():
    controller = policy(Chunks(50), n_action_steps=4)
    act(controller, 0)
    assert controller.lead == 0, "nothing is known yet"
    controller._delays.extend([1] * 37 + [2, 9, 9])
    assert (len(controller._delays), controller.lead) == (RECENT, 2), "one question in 20 may be later"
    controller._delays.extend([9])
    assert controller.lead == 9
    controller._delays.extend([60] * RECENT)
    assert controller.lead == 46
    short = AsyncChunks(Chunks(4), deadline=0, n_action_steps=4)
    short._delays.append(3)
    assert short.lead == 0


@pytest.mark.parametrize("rule", RULES)
def test_a_takeover_drops_chunk_and_question_under_every_rule(spec, rule):
    source, env, client = Chunks(20), CountingEnv(spec, human=(6, 7)), FakeClient(spec)
    run(env, client, RULES[rule](source, deadline=0.0, n_action_steps=3), episodes=1)
    (episode,) = client.episodes
    assert source.questions == [(0, True), (3, False), (6, False), (8, True), (11, False)]
    assert source.task == env.task == episode.task
    assert np.flatnonzero(episode.intervened).tolist() == [6, 7]
    assert np.flatnonzero(episode.chunk_start).tolist() == [0, 3, 8, 11]
    assert [row for row, action in enumerate(env.actions) if action is None] == [7]


@pytest.mark.parametrize("rule", RULES)
def test_under_every_rule_only_the_weights_that_must_act_do(rule):
    source = Chunks(8, version=4)
    controller = RULES[rule](source, deadline=0.0, n_action_steps=4)
    controller.begin("e0", {"explore": False, "weights": 5}, "count")
    assert act(controller, 0) is None
    source.version, controller._asked_at = 5, -1e9  # as if time had passed
    assert [act(controller, 0), controller.version, source.explore] == [0, 5, False]
    source.version = 6
    assert [act(controller, step) for step in range(1, 8)] == [step / 100 for step in range(1, 8)]
    assert controller.version == 5


def test_a_simulated_robot_waits_under_every_word_because_its_time_stands_still():
    for name in RULES:
        for clock, rule in (("simulated", "wait"), ("real", name)):
            made = chunk_policy(Chunks(), chunks=name, deadline=0.05, n_action_steps=4, clock=clock)
            assert type(made) is RULES[rule]


def test_a_deadline_is_a_share_of_a_step_unless_somebody_says_seconds_that_fit():
    assert deadline_of("auto", 50, "real") == 0.01
    assert deadline_of(0.02, 50, "real") == 0.02
    assert deadline_of(10, 50, "simulated") == 10
    with pytest.raises(ConfigError, match=r"deadline_s=0.08 is longer than one step .*\(0.0333 s at 30 Hz\).*=auto"):
        deadline_of(0.08, 30, "real")
    for wrong in ("soon", -1, float("nan"), True, None):
        with pytest.raises(ConfigError, match="say auto, or seconds"):
            deadline_of(wrong, 30, "real")
