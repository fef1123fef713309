"""A policy with `history` is asked with the observations that a training window of the same step would show it."""

import numpy as np
import pytest
from serl_client.controller import RandomPolicy
from serl_client.frames import Frames

from serl_launcher.replay.buffer import ReplayBuffer
from serl_launcher.replay.windows import batch_arrays
from serl_launcher.store.layout import Layout
from serl_launcher.types import Window
from tests.shared.actors import FakeClient, Keys, run
from tests.shared.common import STATE
from tests.shared.robots import Hand, build
from tests.store.made import founded


class Asked(RandomPolicy):
    """Notes what it is asked with, by step."""

    def act(self, observation, *, step, **rest):
        self.seen[step] = observation[STATE]
        return super().act(observation, step=step, **rest)


def in_training(folder, client, history):
    """What windows of an episode with so many observations show, by step."""
    spec, (episode,) = client.spec, client.episodes
    store = founded(folder, spec=spec, online=100)
    store.stage("A", 0, episode)
    store.commit()
    buffer, numbers = ReplayBuffer(store.folder / "online", Layout(spec, 100)), np.arange(len(episode))
    buffer.refresh()
    window = Window({STATE: tuple(range(1 - history, 1)), "action": (0,)})
    arrays = batch_arrays(buffer.layout, len(episode), window)
    into = {name: np.empty(shape, dtype) for name, (shape, dtype) in arrays.items()}
    assert buffer.gather(buffer.windows(numbers, window), window, into)
    store.close()
    return into[STATE]


@pytest.mark.parametrize("history", [2, 3])
def test_a_policy_is_asked_with_what_a_window_of_that_step_shows(tmp_path, history, clock):
    """Rows 2 and 3 are a person's, who moves while the policy is asked; row 6 holds after a pause."""
    env = build(max_steps=10, clock="real", teleop=Hand(rows=(2, 3)))
    client, policy = FakeClient(env.spec, intervene=True), Asked(env.spec, 0)
    client.history, policy.seen = history, {}
    run(env, client, policy, episodes=1, operator=Keys({6: ["pause"], 8: ["pause"]}, clock))
    (episode,) = client.episodes
    assert (episode.intervened.nonzero()[0].tolist(), episode.gap.nonzero()[0].tolist()) == ([2, 3], [6])
    assert sorted(policy.seen) == [0, 1, 2, 4, 5, 7, 8, 9]
    trained = in_training(tmp_path / "store", client, history)
    for step, seen in policy.seen.items():
        assert np.array_equal(seen, trained[step]), step
    assert not np.array_equal(trained[5][0], trained[5][-1]), "the arm moves"


def test_one_observation_is_what_the_environment_gave():
    first, second = {STATE: np.zeros(8)}, {STATE: np.ones(8)}
    frames = Frames(first, 1)
    frames.add(second, gap=False)
    assert frames.newest(1) is second
