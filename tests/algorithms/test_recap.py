"""RECAP: returns, advantages, which rows have the condition, and what the policy does under it."""

from dataclasses import replace

import pytest
import torch

from serl_launcher.algorithms.recap import POSITIVE
from serl_launcher.networks import seeded_noise
from tests.shared.models import STATE, act, algorithm_of, batch, robot

pytestmark = pytest.mark.usefixtures("one_thread")

SPEC = robot(states=2, cameras=())
SMALL = ("policy.network.hidden=[32,32]", "critic.hidden=[32,32]", "policy.horizon=1", "policy.head.steps=3")


def build(*words, seed=0):
    return algorithm_of(SPEC, "algo=recap", *SMALL, *words, seed=seed)


def rows(algorithm, update, size=8, *, remaining=20, success=True, **columns):
    window = algorithm.windows[update]
    drawn = batch(SPEC, size, window=window, **columns)
    known = {"episode.remaining": torch.as_tensor(remaining), "episode.success": torch.as_tensor(success)}
    extras = {name: value.expand(size)[:, None] for name, value in known.items() if name in window.offsets}
    return replace(drawn, extras=extras)


def valued(algorithm, monkeypatch):
    """Let the value of a state be its first number, so that a test can set it."""
    monkeypatch.setattr(algorithm, "values", lambda observation: observation[STATE][:, 0, 0])


def test_the_return_counts_the_steps_that_remain_and_a_failure_within_minus_one_and_zero():
    algorithm = build("algo.failure=-300")
    algorithm.worst.fill_(-360)
    remaining = torch.tensor([0, 30, 60, 200, 0, 30, 60, 200])
    success = torch.tensor([True] * 4 + [False] * 4)
    found = algorithm.returns(rows(algorithm, "update_value", remaining=remaining, success=success))
    expected = [0, -30 / 360, -60 / 360, -200 / 360, -300 / 360, -330 / 360, -1, -1]
    torch.testing.assert_close(found, torch.tensor(expected))


def test_the_advantage_looks_ten_steps_ahead_or_to_the_end_of_the_episode(monkeypatch):
    algorithm = build("algo.failure=-300")
    algorithm.worst.fill_(-360)
    valued(algorithm, monkeypatch)
    length, remaining = torch.tensor([10, 10, 4, 4, 4]), torch.tensor([40, 10, 3, 3, 40])  # the last one: a gap
    success = torch.tensor([True, True, True, False, True])
    drawn = rows(algorithm, "update_advantage", 5, remaining=remaining, success=success, length=length)
    begin, ahead = drawn.observation[STATE][:, 0, 0], drawn.next_observation[STATE][:, 0, 0]
    found = algorithm.update_advantage(drawn)[1]["advantage"]
    expected = [-10 / 360 + ahead[0], -10 / 360 + ahead[1], -3 / 360, -303 / 360, -4 / 360 + ahead[4]]
    torch.testing.assert_close(found, torch.stack([torch.as_tensor(each) for each in expected]) - begin)


def test_the_threshold_is_that_above_which_the_share_of_rows_lies(monkeypatch):
    algorithm = build("algo.share=0.3")
    valued(algorithm, monkeypatch)
    drawn = rows(algorithm, "update_advantage", 1000)
    advantage = algorithm.update_advantage(drawn)[1]["advantage"]
    assert (advantage > algorithm.threshold).float().mean() == pytest.approx(0.3, abs=0.01)
    again = build("algo.share=0.3", seed=1)
    again.load_state_dict(algorithm.state_dict())
    assert again.threshold == algorithm.threshold


def test_good_rows_and_those_of_a_person_have_the_condition_but_for_a_dropped_part(monkeypatch):
    algorithm = build("algo.dropped=0.25")
    algorithm.threshold.fill_(0.5)
    told = []
    monkeypatch.setattr(algorithm.policy, "prepared", lambda seen, task: told.extend(task) or seen)
    monkeypatch.setattr(algorithm.policy, "condition", lambda seen: torch.zeros(800, 1, 3))
    drawn = rows(algorithm, "update_policy", 800)
    kind = torch.arange(800) % 3  # bad, good, bad and a person's
    advantage = (kind == 1).float()[:, None]
    drawn = replace(drawn, extras={"derived.advantage": advantage}, intervened=(kind == 2)[:, None])
    metrics = algorithm.update_policy(drawn)
    is_told = torch.tensor([word == POSITIVE for word in told])
    assert not is_told[kind == 0].any()
    for each in (1, 2):
        assert is_told[kind == each].float().mean() == pytest.approx(0.75, abs=0.08)
    assert metrics["positive"] == pytest.approx(2 / 3, abs=0.01)


def test_a_clone_learns_demonstrations_under_the_condition_whoever_recorded_them():
    algorithm = build("algo.dropped=0")
    drawn = rows(algorithm, "update_clone")
    metrics = algorithm.update_clone(replace(drawn, intervened=torch.zeros_like(drawn.intervened)))
    assert metrics["positive"] == 1


def test_the_worst_return_so_far_counts_as_minus_one_and_keeps_its_scale_in_a_checkpoint():
    algorithm = build("algo.failure=-300")
    for update, success, remaining, worst in (
        ("update_value", True, 40, -300), ("update_advantage", False, 60, -360), ("update_value", True, 500, -500),
        ("update_value", True, 80, -500),
    ):  # fmt: skip
        before = algorithm.threshold * algorithm.worst
        drawn = rows(algorithm, update, remaining=remaining, success=success)
        getattr(algorithm, update)(drawn)
        assert algorithm.worst == worst
        assert algorithm.returns(drawn).min() == pytest.approx((-remaining - 300 * (not success)) / -worst)
        if update == "update_value":
            torch.testing.assert_close(algorithm.threshold * algorithm.worst, before)
    again = build("algo.failure=-300", seed=1)
    again.load_state_dict(algorithm.state_dict())
    assert again.worst == -500


@pytest.mark.parametrize("head", ["mip_coin_flip", "mean_flow"])
def test_leaving_the_condition_out_and_the_heads_loss_draw_other_numbers(monkeypatch, head):
    algorithm = algorithm_of(SPEC, "algo=recap", "policy=chunk", f"head={head}")
    made, used = seeded_noise._drawn, []
    monkeypatch.setattr(seeded_noise, "_drawn", lambda *asked: used.append(asked[2]) or made(*asked))
    algorithm.update_clone(rows(algorithm, "update_clone"))
    assert len(used) == len({*used}) >= 3


def test_the_condition_is_a_word_for_a_policy_that_reads_words():
    algorithm = build()
    assert algorithm.conditioned.words(["push"]) == [POSITIVE]
    algorithm.policy.tasks = ()  # as PI0's
    assert algorithm.conditioned.words(["push"]) == [f"push. {POSITIVE}"]
    assert algorithm.conditioned.without(["push"]) == ["push"]
    assert not algorithm.conditioned.tasks  # a robot may ask for any


@pytest.mark.slow
def test_under_the_condition_the_policy_does_what_was_good_and_beyond_it_more_so():
    """Half of the rows go left and are good, half go right; without the condition it is either."""
    algorithm = build("algo.dropped=0.1", "algo.optimizer.learning_rate=0.005")
    algorithm.threshold.fill_(0.5)
    sign = 1 - 2.0 * (torch.arange(64) % 2)
    for step in range(150):
        drawn = rows(algorithm, "update_policy", 64, seed=step)
        noisy = 1.0 * sign[:, None, None] + 0.1 * torch.randn(64, 1, 2)
        extras = {"derived.advantage": (sign > 0).float()[:, None]}
        algorithm.update_policy(replace(drawn, action=noisy, extras=extras))
    seen = {STATE: torch.randn(200, 2)}
    noise = torch.randn(200, *algorithm.acting.noise_shape)
    good = act(algorithm, seen, noise)
    plain = algorithm.policy.sample(seen, task=[""] * 200, noise=noise[None])[0]
    assert (good > 0).float().mean() > 0.9
    assert (plain > 0).float().mean() < 0.5  # mostly bad rows, and the dropped ones
    algorithm.conditioned.task_weight = 1.5
    assert (act(algorithm, seen, noise) > 0).float().mean() >= (good > 0).float().mean() - 0.02


def test_the_value_learns_returns_that_the_state_tells():
    algorithm = build("algo.value_optimizer.learning_rate=0.005")
    for step in range(150):
        drawn = rows(algorithm, "update_value", 64, seed=step)
        remaining = (60 * drawn.observation[STATE][:, 0, 0].sigmoid()).long()[:, None]
        success = drawn.observation[STATE][:, 0, 1:] > 0
        drawn = replace(drawn, extras={"episode.remaining": remaining, "episode.success": success})
        metrics = algorithm.update_value(drawn)
    assert metrics["value_distance"] < 0.15  # a constant is 0.42 away
