"""What a recorder refuses: rows with numbers that cannot be, and extras that the Spec lacks."""

import dataclasses

import numpy as np
import pytest
from serl_client import Feature, Stamp
from serl_client.controller import RemotePolicy
from serl_client.env import Step
from serl_client.errors import ConfigError
from serl_client.recorder import Recorder
from serl_client.runner import ActorStatus

from tests.shared.actors import STATE, Chunks, CountingEnv, FakeClient, run


@pytest.fixture
def client(spec):
    return FakeClient(spec)


def state(value):
    return {"observation": {STATE: np.array([0, 0, 0, value, 0, 0, 0, 0], np.float32)}}


@pytest.mark.parametrize(
    ("said", "bad"),
    [
        (f"{STATE} (j3) is nan rad, which is not finite", state(np.nan)),
        (f"{STATE} (j3) is 50.5 rad, beyond its limit of 50 rad", state(50.5)),
        ("reward is -2e+06, beyond its limit of -1e+06", {"reward": -2e6}),
        ("action [0] is inf, which is not finite", {"executed": np.full(2, np.inf, np.float32)}),
    ],
)
def test_a_row_that_cannot_be_cuts_the_episode_off_before_it_and_names_the_sensor(spec, said, bad, caplog):
    told = Feature((8,), names=[f"j{i}" for i in range(8)], units="rad", low=-50, high=50)
    client = FakeClient(spec := dataclasses.replace(spec, observation={STATE: told}))

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
    assert caplog.messages == [f"{said}; {cut.episode} is cut off before row 6"]
    assert status.warning == "", "the next one went well"


@pytest.mark.parametrize("value", [np.nan, 2e6])
def test_an_episode_whose_first_observation_cannot_be_never_begins(spec, client, value, caplog):
    class Env(CountingEnv):
        def observe(self):
            return state(value)["observation"] if len(self.seeds) < 3 else super().observe()

    env, status = Env(spec), ActorStatus()
    run(env, client, episodes=1, status=status)
    assert (client.lengths, len(env.seeds)) == ([13], 3)
    assert f"{STATE} [3] is {value:g}, " in caplog.text
    assert "after the reset; robot-01234567-000001 does not begin" in caplog.text


def test_a_clock_that_goes_backwards_is_kept_and_marked_as_a_gap(client):
    recorder, seen, times = Recorder(client, "e0", "reach"), {STATE: np.zeros(8, np.float32)}, [5.0, 5.1, 3.0, 3.1]
    step, marks = Step(seen, 0.0, np.zeros(2, np.float32), False, False, False, None), []
    for time in times:
        options = dict(chunk_start=True, chunk_delay=0, gap=False)
        assert not recorder.add(Stamp(1, "practise", 1), seen, time, step, {}, **options)
        marks.append(recorder.gap)
    recorder.end(terminated=True)
    (segment,) = client.segments
    assert (segment.time.tolist(), segment.gap.tolist(), marks) == (times, [False, False, True, False], marks)


@pytest.mark.parametrize("rows", range(4, 8))
def test_an_episode_that_is_cut_off_says_its_end_and_its_final_observation_after_however_many_rows(spec, client, rows):
    env = CountingEnv(spec)
    step = env.step
    env.step = lambda action: (env.row == rows - 1 and client.direct("stop", number=2, boundary="now")) or step(action)
    run(env, client)
    (episode,) = client.episodes
    assert (len(episode), episode.truncated, len(episode.observation[STATE])) == (rows, True, rows + 1)


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
