"""Actions by chance alone: within their bounds, alike for one seed and episode, and how far they drift."""

from dataclasses import replace

import numpy as np
import pytest
from serl_client import Feature, Spec
from serl_client.controller import BrownianPolicy, RandomPolicy

SPEC = Spec({"observation.state": Feature((1,))}, Feature((2,), low=[0, -4], high=[1, 4]), fps=25.0)


def actions(policy, seed, episode, count, spec=SPEC):
    controller = policy(spec, seed)
    controller.begin(episode, {}, "")
    return np.array([controller.act({}, step=i, previous_action=None, reset=False) for i in range(count)])


@pytest.mark.parametrize("policy", [RandomPolicy, BrownianPolicy])
def test_chance_is_within_its_bounds_and_the_same_for_the_same_seed_and_episode(policy):
    drawn = actions(policy, 0, "a", 500)
    np.testing.assert_array_equal(drawn[:40], actions(policy, 0, "a", 40))
    assert not np.array_equal(drawn[:40], actions(policy, 0, "b", 40))
    assert not np.array_equal(drawn[:40], actions(policy, 1, "a", 40))
    assert drawn.dtype == np.float32
    assert (drawn >= [0, -4]).all()
    assert (drawn <= [1, 4]).all()


def test_a_brownian_action_drifts_by_one_unit_a_second():
    drawn = actions(BrownianPolicy, 0, "a", 2000)
    moved = np.diff(drawn, axis=0)[((drawn > [0, -4]) & (drawn < [1, 4])).all(1)[1:]]
    np.testing.assert_allclose(moved.std(0), np.array([0.5, 4]) / 5, rtol=0.15)  # a step is a 25th of a second


def test_a_brownian_action_drifts_around_the_neutral_one():
    drawn = actions(BrownianPolicy, 0, "a", 5000, replace(SPEC, action=replace(SPEC.action, neutral=[0, 3])))
    assert (drawn >= [0, -4]).all()
    assert (drawn <= [1, 4]).all()
    at_rest = (drawn[:, 0] == 0).mean()
    assert 0.3 < at_rest < 0.7, "a low bound is neutral: half of the drift is there"
    assert 0.3 < (drawn[:, 1] > 3).mean() < 0.7, "as much above the neutral value as below"
    moved = np.diff(drawn[:, 1])[(drawn[:-1, 1] < 2) & (drawn[1:, 1] < 2) & (drawn[1:, 1] > -4)]
    np.testing.assert_allclose(moved.std(), 7 / 5, rtol=0.15)  # 7 from the neutral value to the bound
