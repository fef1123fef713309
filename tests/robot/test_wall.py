"""The wall: good demonstrations differ, and their mean is a crash."""

from functools import partial

import numpy as np
import pytest
from serl_client import ConfigError

from robot_infra.tasks.wall import WallArm, make
from tests.shared.robots import RIGHT, play

made = partial(make, max_steps=40, noise=0.2, clock="simulated")


@pytest.mark.parametrize("gaps", [1, 2, 4])
def test_every_demonstration_passes_and_they_take_all_gaps_alike(gaps):
    env = made(gaps=gaps)
    episodes = [play(env, seed, teleop=True) for seed in range(60)]
    assert all(steps[-1].success and steps[-1].reward == 1 for steps in episodes)
    ways = np.array([np.mean([step.executed[1] for step in steps[:5]]) for steps in episodes])
    assert (ways > 0.2).mean() == pytest.approx(0.5 if gaps > 1 else 0, abs=0.2)
    assert abs(ways.mean()) < 0.2, "the mean of the demonstrations goes straight on"


def test_the_mean_of_two_gaps_is_wall_which_ends_the_episode_as_a_failure():
    steps = play(made(gaps=2), 0, RIGHT)
    assert steps[-1].terminated
    assert steps[-1].success is False
    assert sum(step.reward for step in steps) == 0
    assert steps[-1].observation["observation.state"][0] == 0, "nobody passes through the wall"
    passed = play(made(gaps=3), 0, RIGHT)
    assert passed[-1].observation["observation.state"][0] > 0, "the middle one of three lies on the way"


def test_a_wall_without_a_gap_is_refused():
    with pytest.raises(ConfigError, match=r"task\.env\.gaps=0: a wall needs at least 1 gap"):
        WallArm("wall", gaps=0, hz=10)
