"""What a recorder takes no part of: rows that are not finite, and extras that the Spec lacks."""

import dataclasses

import numpy as np
import pytest
from serl_client.episode import Stamp
from serl_client.recorder import Recorder
from serl_client.runner import ActorStatus

from tests.shared.actors import STATE, CountingEnv, FakeClient, run


@pytest.fixture
def client(spec):
    return FakeClient(spec)


class FailingSensor(CountingEnv):
    """Its state is not finite at the row `bad` of each episode but the last one."""

    def __init__(self, spec, bad, episodes, value):
        super().__init__(spec)
        self.bad, self.left, self.value = bad, episodes, value

    def reset(self, seed, **options):
        self.left -= 1
        return super().reset(seed, **options)

    def observe(self):
        observation = super().observe()
        if self.row == self.bad and self.left > 0:
            observation[STATE][3] = self.value
        return observation


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_row_that_is_not_finite_cuts_the_episode_off_before_it(spec, client, value):
    status = ActorStatus()
    reports = run(FailingSensor(spec, 7, 2, value), client, status=status)
    cut, whole = client.episodes
    assert (len(cut), cut.truncated, cut.terminated, len(whole), whole.terminated) == (6, True, False, 13, True)
    assert cut.observation[STATE][:, 0].tolist() == list(range(7)), "the last good observation is the final one"
    assert [report["steps"] for report in reports] == [6, 13]
    assert status.warning == f"observation.state is not finite; {cut.episode} is cut off before row 6"


def test_an_episode_whose_first_observation_is_not_finite_never_begins(spec, client):
    env, status = FailingSensor(spec, 0, 3, np.nan), ActorStatus()
    run(env, client, episodes=1, status=status)
    assert ([len(each) for each in client.episodes], len(env.seeds)) == ([13], 3)
    assert "is not finite after the reset" in status.warning


@pytest.mark.parametrize("bad", [{"reward": np.nan}, {"executed": np.full(2, np.inf, np.float32)}], ids=["r", "a"])
def test_a_reward_or_an_action_that_is_not_finite_cuts_the_episode_off_before_it(spec, client, bad):
    class Env(CountingEnv):
        def step(self, action):
            step = super().step(action)
            return dataclasses.replace(step, **bad) if self.row == 3 and len(self.seeds) == 1 else step

    run(Env(spec), client)
    assert [(len(each), each.truncated) for each in client.episodes] == [(2, True), (13, False)]


def test_extras_that_the_spec_lacks_are_told_once_for_each_episode(client, spec, caplog):
    env = CountingEnv(spec)
    observation, recorder = env.reset(0), Recorder(client, "e", "test")
    row = {"chunk_start": True, "chunk_delay": 0, "gap": False}
    for _ in range(3):
        step = env.step(np.zeros(2, np.float32))
        recorder.add(Stamp(1, "collect", 0), observation, 0.0, step, {"behaviour_mean": np.zeros(2)}, **row)
        observation = step.observation
    assert caplog.messages == ["e: extras behaviour_mean are not stored: the Spec lacks them"]
