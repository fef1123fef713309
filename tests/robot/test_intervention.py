"""A human takes over in mid-episode: who drives which row, what is recorded of it, and how the policy goes on."""

import itertools
import logging
import re

import numpy as np
import pytest
from serl_client import Feature
from serl_client.controller import RandomPolicy, RemotePolicy
from serl_client.errors import ConfigError
from serl_client.runner import ActorStatus

from robot_infra.tasks import fake
from robot_infra.teleop.scripted import Rescuer
from tests.shared.actors import Chunks, FakeClient, Keys, run
from tests.shared.robots import LEFT, Hand, build, from_yaml, play


def actor(env, controller=None, *, episodes=1, mode="collect", intervene=True, **options):
    """Run until so many episodes have ended; (client, their reports, status)."""
    client, status = FakeClient(env.spec, mode, intervene=intervene), ActorStatus()
    return client, run(env, client, controller, episodes=episodes, status=status, **options), status


def rows(flags):
    return np.flatnonzero(flags).tolist()


def remote(source):
    return RemotePolicy(source, deadline=0.0)


def test_where_the_plan_does_not_say_intervene_the_device_is_not_even_read():
    hand = Hand(rows=range(99))
    env = build(teleop=hand, max_steps=5)
    actor(env, intervene=False)
    actor(env, mode="evaluate")
    client, _, status = actor(env, episodes=2, mode="evaluate", intervene=False)
    assert (hand.reads, hand.demonstrates, status.takeovers) == (0, [], 0)
    assert not any(episode.intervened.any() for episode in client.episodes)
    assert actor(env)[2].takeovers == 1


def test_a_robot_that_nobody_operates_does_what_it_can():
    env = build(max_steps=3)
    client, _, status = actor(env)
    assert (len(client.episodes[0]), status.takeovers, dict(env.spec.extras)) == (3, 0, {})


def test_a_takeover_in_mid_chunk_drops_the_rest_and_the_hand_back_asks_anew(caplog):
    caplog.set_level(logging.INFO)
    source = Chunks(length=8, scale=0.1)
    env = build(teleop=Hand(rows=(3, 4, 5)), max_steps=12)
    client, (report,), status = actor(env, remote(source))
    (episode,) = client.episodes
    assert (rows(episode.intervened), rows(episode.chunk_start)) == ([3, 4, 5], [0, 6])
    assert source.questions == [(0, True), (6, True)]  # row 6: the hand has let go, and the policy acts at once
    assert source.previous == [None, [-1, 0]]
    expected = [0, 1e-3, 2e-3, -1, -1, -1, 0.6, 0.601, 0.602, 0.603, 0.604, 0.605]
    np.testing.assert_allclose(episode.action[:, 0], expected, atol=1e-6)
    proposed = episode.extras["policy_action"]
    assert proposed.dtype == np.float32
    np.testing.assert_allclose(proposed[:, 0], [*expected[:3], 3e-3, *expected[4:]], atol=1e-6)  # what was dropped
    assert (status.takeovers, status.assisted, status.unassisted) == (1, "0/1", "0/0")
    assert report["intervened"] == 3 / 12
    said = [re.search(r"row (\d+): the operator (takes over|hands back)", message) for message in caplog.messages]
    assert [match.groups() for match in said if match] == [("3", "takes over"), ("6", "hands back")]


def test_a_decision_that_a_takeover_drops_was_none_and_leaves_no_extras_behind():
    env = build(teleop=Hand(rows=(2,)), max_steps=6)
    env.spec.extras["noise"] = Feature((2,))
    client, _, _ = actor(env, remote(Chunks(length=2, decides=["noise"])))
    (episode,) = client.episodes
    assert rows(episode.chunk_start) == [0, 3, 5]
    assert episode.extras["noise"][:, 0].tolist() == [1, 1, 0, 4, 4, 6]


def test_the_last_episode_of_a_takeover_does_not_reach_into_the_next_one():
    source = Chunks(length=8)
    client, _, status = actor(build(teleop=Hand(rows=(4,)), max_steps=5), remote(source), episodes=2)
    assert source.questions == [(0, True), (0, True)]
    assert ([rows(episode.intervened) for episode in client.episodes], status.takeovers) == ([[4], [4]], 2)


def test_a_human_who_drives_while_the_policy_is_silent_is_shown_and_not_cut_off(clock):
    drivers, status = [], ActorStatus()

    class Mute(RandomPolicy):
        def act(self, observation, *, step, **rest):
            return None if step else super().act(observation, step=0, **rest)

    class Watched(Hand):
        def read(self, hold):
            drivers.append(status.driver)
            return super().read(hold)

    env = build(teleop=Watched(rows=range(2, 100)), max_steps=100, clock="real")
    client = FakeClient(env.spec, intervene=True)
    run(env, client, Mute(env.spec, 0), episodes=1, status=status)
    assert len(client.episodes[0]) == 100, "no action came for 10 s"
    assert drivers[1:] == ["WAITING", "WAITING", *["HUMAN"] * 97]


@pytest.mark.usefixtures("clock")
def test_a_human_can_drive_before_the_first_row_of_a_silent_policy():
    env = build(teleop=Hand(rows=range(4, 99)), max_steps=5, clock="real")
    client, _, status = actor(env, remote(Chunks(delay=99)))
    assert rows(client.episodes[0].intervened) == [0, 1, 2, 3, 4]
    assert client.episodes[0].gap.tolist() == [True, False, False, False, False]
    assert (env.teleop.reads, client.waited, status.takeovers) == (9, 4, 1)  # each wait looks anew, each row once


def test_after_a_pause_the_robot_looks_again_before_the_policy_acts_on_what_it_saw_before(clock):
    env = build(max_steps=6, clock="real")
    asked = []

    class Asked(RandomPolicy):
        def act(self, observation, *, step, reset, **rest):
            asked.append((step, reset))
            return super().act(observation, step=step, reset=reset, **rest)

    client, _, _ = actor(env, Asked(env.spec, 0), operator=Keys({3: ["pause"], 5: ["pause"]}, clock))
    (episode,) = client.episodes
    assert asked == [(0, True), (1, False), (2, False), (4, True), (5, False)]
    assert (rows(episode.gap), episode.action[3].tolist()) == ([3], [0, 0])


def test_what_a_policy_proposes_beyond_reason_is_not_recorded():
    env = build(teleop=Hand())
    env.reset(0, intervene=True)
    assert env.step(np.array([3, 0], np.float32)).extras["policy_action"].tolist() == [3, 0]
    assert env.step(np.array([np.nan, 0], np.float32)).extras["policy_action"].tolist() == [0, 0]
    assert env.step(None).extras["policy_action"].tolist() == [0, 0]


def test_success_with_and_without_help_is_counted_apart_and_follows_late_verdicts():
    class EverySecondEpisode(Hand):
        def read(self, _hold):
            return LEFT if len(self.demonstrates) % 2 else None

    env = build(teleop=EverySecondEpisode())
    client, status, counts = FakeClient(env.spec, intervene=True), ActorStatus(), []

    def on_episode(report):
        counts.append((status.unassisted, status.assisted))
        if len(counts) == 5:
            client.direct("stop", number=99)

    # Three looks an episode: after the reset, where a verdict corrects the one before, and after two rows.
    presses = {2: "success", 5: "success", 6: "failure", 8: "discard", 11: "success", 12: "discard", 14: "failure"}
    keys = Keys({look: [key] for look, key in presses.items()})
    run(env, client, operator=keys, on_episode=on_episode, status=status)
    assert counts == [("0/0", "1/1"), ("1/1", "1/1"), ("0/1", "1/1"), ("1/2", "1/1"), ("0/1", "1/2")]
    assert status.takeovers == 3


# ---- the scripted operator


def frozen(env, seed, **reset):
    """The steps of an episode of a policy that never moves."""
    return play(env, seed, np.zeros(env.spec.action.shape, np.float32), **reset)


def test_the_scripted_operator_takes_over_where_the_policy_is_stuck_and_hands_back_when_it_goes_on():
    env = fake.make(max_steps=60, noise=0.0, clock="simulated", takeover_after=6, handback_after=3)
    far = next(seed for seed in range(99) if np.linalg.norm(env.reset(seed)["observation.state"][4:]) > 1)
    steps = frozen(env, far, intervene=True)
    lengths = [(flag, len(list(run))) for flag, run in itertools.groupby(step.intervened for step in steps)]
    assert lengths[0] == (False, 6)
    assert all(length == 3 for human, length in lengths[1:-1] if human)
    assert len([human for human, _ in lengths if human]) >= 2
    assert steps[-1].success
    assert not any(step.intervened for step in frozen(env, far))


def test_a_policy_that_gets_on_is_left_alone():
    env = fake.make(max_steps=60, noise=0.2, clock="simulated", takeover_after=4)
    for seed in range(10):
        step, state = None, env.reset(seed, intervene=True)["observation.state"]
        while step is None or not (step.terminated or step.truncated):
            step = env.step(np.clip(state[4:] * 3, -1, 1))
            state = step.observation["observation.state"]
            assert not step.intervened
        assert step.success


def test_the_takeover_and_handback_steps_of_the_yaml_are_the_operators():
    for name in ("fake", "sim_arm"):
        pytest.importorskip("mujoco") if name == "sim_arm" else None
        with from_yaml(name, takeover_after=3, handback_after=2) as env:
            env.reset(0, intervene=True)
            still = np.zeros(env.spec.action.shape, np.float32)
            assert [env.step(still).intervened for _ in range(5)] == [False] * 3 + [True] * 2
            assert list(env.spec.extras) == ["policy_action"]
            assert env.spec.extras["policy_action"].shape == still.shape


@pytest.mark.parametrize(
    "options", [{"takeover_after": 0, "handback_after": 3}, {"takeover_after": 3, "handback_after": 0}]
)
def test_an_operator_that_takes_over_or_hands_back_after_no_step_is_refused(options):
    with pytest.raises(ConfigError, match="at least 1 step"):
        fake.make(max_steps=9, noise=0.0, clock="simulated", **options)


def test_a_rescuer_that_demonstrates_drives_every_row():
    rescuer = Rescuer(lambda: np.zeros(2), lambda: 1.0, noise=0.3, margin=0.1, takeover_after=2, handback_after=2)
    rescuer.reset(3, demonstrate=True)
    drawn = [rescuer.read(None) for _ in range(9)]
    assert not any(action is None for action in drawn)
    rescuer.reset(3, demonstrate=False)
    helped = [rescuer.read(None) for _ in range(9)]
    assert [action is None for action in helped] == [True] * 2 + [False] * 7
    np.testing.assert_array_equal(helped[2:], drawn[:7])
