"""A pause of a real robot: what is said in it holds, and nobody acts on what was seen before it."""

import numpy as np
import pytest
from serl_client.controller import RandomPolicy

from tests.shared.actors import STATE, CountingEnv, FakeClient, Keys, run


@pytest.fixture
def client(spec):
    return FakeClient(spec)


@pytest.mark.parametrize("verdict", ["success", "failure", "discard"])
@pytest.mark.parametrize("rows", [4, 5])
def test_a_verdict_in_a_pause_ends_the_episode_after_however_many_rows(spec, client, rows, verdict):
    keys, ended = Keys({rows: ["pause"], rows + 3: [verdict]}), []
    client.script["wait 8"] = lambda: ended.extend(segment.ends for segment in client.segments)
    client.script["wait 9"] = lambda: client.direct("stop", number=99, boundary="now")
    run(CountingEnv(spec, length=100, clock="real"), client, operator=keys)
    assert ended[-1:] == [True]


@pytest.mark.parametrize("row", [0, 3])
def test_after_a_pause_a_policy_sees_the_scene_as_it_is_then(spec, client, row, running_clock):
    scene, seen = [0], []

    class Scene(CountingEnv):
        def observe(self):
            return {STATE: np.full_like(super().observe()[STATE], scene[0])}

    class Policy(RandomPolicy):
        def act(self, observation, **how):
            seen.append((observation[STATE].flat[0], scene[0]))
            return super().act(observation, **how)

    client.script["wait 2"] = lambda: scene.append(scene.pop() + 100)  # somebody moves the block
    env = Scene(spec, clock="real")
    run(env, client, Policy(spec, 0), episodes=1, operator=Keys({row: ["pause"], row + 4: ["pause"]}, running_clock))
    assert all(shown == there for shown, there in seen), seen
    assert {there for _, there in seen} == ({100} if row == 0 else {0, 100})
    assert env.actions[row] is None, "it holds, and looks again"
