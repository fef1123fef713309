"""The corridor: only the first observation tells the goal, and nothing else does later."""

import numpy as np
import pytest

from robot_infra.tasks.corridor import END, START, make
from tests.shared.common import STATE
from tests.shared.robots import play


@pytest.fixture
def env():
    return make(max_steps=20, clock="simulated")


def episode(env, seed, action):
    """The first observation of an episode, and its steps with this action."""
    return env.reset(seed)[STATE], play(env, seed, np.array([action], np.float32))


def test_the_goal_shows_in_the_first_observation_alone_and_the_first_action_moves_nothing(env):
    goals = set()
    for seed in range(20):
        begun, steps = episode(env, seed, 1.0)
        goals.add(float(begun[1]))
        assert abs(begun[0]) <= START
        assert [step.observation[STATE][1] for step in steps] == [0.0] * len(steps)
        assert steps[0].observation[STATE][0] == begun[0]
        assert steps[0].executed.tolist() == [0.0]
        assert steps[1].observation[STATE][0] > begun[0]
    assert goals == {-1.0, 1.0}


def test_both_ends_end_the_episode_and_one_of_them_is_the_goal(env):
    for seed in range(6):
        for action in (-1.0, 1.0):
            begun, steps = episode(env, seed, action)
            x, is_right = steps[-1].observation[STATE][0], action == begun[1]
            assert steps[-1].terminated
            assert x * action >= END
            assert steps[-1].success == is_right
            assert steps[-1].reward == pytest.approx(is_right - 0.5 * abs(begun[1] * END - x), abs=1e-5)
    _, steps = episode(env, 0, 0.0)
    assert (len(steps), steps[-1].truncated, steps[-1].success) == (20, True, False)


def test_who_forgets_finds_the_goal_in_half_of_the_episodes(env):
    found = [episode(env, seed, 1.0)[1][-1].success for seed in range(200)]
    assert 0.4 < np.mean(found) < 0.6
