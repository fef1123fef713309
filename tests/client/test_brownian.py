"""Actions that drift by chance: how far, within which bounds, and alike for one seed and episode."""

import numpy as np
from serl_client import Feature, Spec
from serl_client.controller import BrownianPolicy


def test_a_brownian_action_drifts_by_one_unit_a_second_within_its_bounds_and_anew_in_each_episode():
    spec = Spec({"observation.state": Feature((1,))}, Feature((2,), low=[0, -4], high=[1, 4]), fps=25.0)

    def actions(seed, episode, count=2000):
        controller = BrownianPolicy(spec, seed)
        controller.begin(episode, {}, "")
        return np.array([controller.act({}, step=i, previous_action=None, reset=False) for i in range(count)])

    drawn = actions(0, "a")
    np.testing.assert_array_equal(drawn[:40], actions(0, "a", 40))
    assert not np.array_equal(drawn[:40], actions(0, "b", 40))
    assert not np.array_equal(drawn[:40], actions(1, "a", 40))
    assert drawn.dtype == np.float32
    assert (drawn >= [0, -4]).all()
    assert (drawn <= [1, 4]).all()
    moved = np.diff(drawn, axis=0)[((drawn > [0, -4]) & (drawn < [1, 4])).all(1)[1:]]
    np.testing.assert_allclose(moved.std(0), np.array([0.5, 4]) / 5, rtol=0.15)  # a step is a 25th of a second
