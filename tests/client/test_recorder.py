"""What a recorder refuses: rows that are not finite, and extras that the Spec lacks."""

import dataclasses

import numpy as np
import pytest
from serl_client import Feature
from serl_client.controller import RemotePolicy
from serl_client.errors import ConfigError
from serl_client.runner import ActorStatus

from tests.shared.actors import STATE, Chunks, CountingEnv, FakeClient, run


@pytest.fixture
def client(spec):
    return FakeClient(spec)


def state(value):
    return {"observation": {STATE: np.array([0, 0, 0, value, 0, 0, 0, 0], np.float32)}}


@pytest.mark.parametrize(
    ("column", "bad"),
    [
        (STATE, state(np.nan)), (STATE, state(np.inf)), ("reward", {"reward": np.nan}),
        ("action", {"executed": np.full(2, np.inf, np.float32)}),
    ],
)  # fmt: skip
def test_a_row_that_is_not_finite_cuts_the_episode_off_before_it(spec, client, column, bad):
    class Env(CountingEnv):
        def step(self, action):
            step = super().step(action)
            return dataclasses.replace(step, **bad) if self.row == 7 and len(self.seeds) == 1 else step

    status = ActorStatus()
    reports = run(Env(spec), client, status=status)
    cut, whole = client.episodes
    assert (len(cut), cut.truncated, cut.terminated, len(whole), whole.terminated) == (6, True, False, 13, True)
    assert cut.observation[STATE][:, 0].tolist() == list(range(7)), "the last good observation is the final one"
    assert [report["steps"] for report in reports] == [6, 13]
    assert status.warning == f"{column} is not finite; {cut.episode} is cut off before row 6"


def test_an_episode_whose_first_observation_is_not_finite_never_begins(spec, client):
    class Env(CountingEnv):
        def observe(self):
            return state(np.nan)["observation"] if len(self.seeds) < 3 else super().observe()

    env, status = Env(spec), ActorStatus()
    run(env, client, episodes=1, status=status)
    assert (client.lengths, len(env.seeds)) == ([13], 3)
    assert "is not finite after the reset" in status.warning


@pytest.mark.parametrize("shape", [None, 3])
def test_extras_that_the_spec_lacks_end_the_actor_and_the_rows_before_them_are_kept(client, spec, shape):
    client.spec = dataclasses.replace(spec, extras={"behaviour_mean": Feature((shape,))} if shape else {})

    class Late(RemotePolicy):
        """An algorithm that begins to decide more, at its second chunk, than its yaml says."""

        def _change(self, answer, step):
            super()._change(answer, step)
            self.extras = {"behaviour_mean": np.zeros(2)} if step else {}

    with pytest.raises(ConfigError, match=r"no columns behaviour_mean of that shape: .* `extras` of its yaml"):
        run(CountingEnv(spec), client, Late(Chunks(length=4), deadline=1.0))
    assert [(len(each), each.truncated) for each in client.episodes] == [(4, True)]
