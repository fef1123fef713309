"""A policy that answers from elsewhere, in the loop of an actor."""

from dataclasses import replace

import pytest
from serl_client.controller import RemotePolicy
from serl_client.runner import SILENCE, ActorStatus

from tests.shared.actors import STATE, Chunks, CountingEnv, FakeClient, run


@pytest.fixture
def client(spec):
    return FakeClient(spec)


def test_a_memory_that_begins_anew_in_mid_episode_is_counted_and_one_that_was_lost_is_told(spec, client, caplog):
    class Forgetful(Chunks):
        """Remembers earlier steps, until row 9."""

        def ask(self, observation, *, step, reset, **question):
            super().ask(observation, step=step, reset=reset, **question)
            self.answer = replace(self.answer, reset=reset or step == 9)

    status = ActorStatus()
    run(CountingEnv(spec, human=(4, 5, 6)), client, RemotePolicy(Forgetful(), deadline=0.0), status=status)
    assert status.carry_resets == 2 * 2, "after the takeover, and at row 9; not where an episode begins"
    told = [record.getMessage() for record in caplog.records if "remembered is lost" in record.getMessage()]
    assert [text.partition(":")[0][-13:] for text in told] == ["000000, row 9", "000001, row 9"]


def test_a_simulated_robot_waits_for_its_action(spec, client):
    env = CountingEnv(spec)
    run(env, client, RemotePolicy(Chunks(delay=3), deadline=0.0), episodes=1)
    assert all(action is not None for action in env.actions)


def test_an_evaluation_whose_weights_nobody_has_any_more_ends_with_the_next_directive(spec):
    client = FakeClient(spec, "evaluate", weights=5)
    client.script = {"wait 3": lambda: client.direct("collect", number=2)}
    run(CountingEnv(spec), client, RemotePolicy(Chunks(version=4), deadline=0.0))
    assert [episode.stamp.directive for episode in client.episodes] == [2, 2]


def test_a_real_robot_holds_until_its_action_comes(spec, client):
    class Uneven(Chunks):
        def ask(self, observation, *, step, **question):
            self.delay = step % 4 // 2
            super().ask(observation, step=step, **question)

    env = CountingEnv(spec, clock="real")
    run(env, client, RemotePolicy(Uneven(length=2), deadline=0.0), episodes=1)
    assert [row for row, action in enumerate(env.actions) if action is None] == [2, 6, 10]
    assert len(client.episodes[0]) == 13


@pytest.mark.parametrize("returns", [12, "wait 30"], ids=["at once", "while it waits"])
def test_a_real_robot_whose_policy_is_silent_ends_the_episode_and_stays_until_there_is_an_answer(
    spec, client, monkeypatch, returns, caplog
):
    monkeypatch.setattr("serl_client.controller.REPEAT", 0.0)
    source, env, status, resets = Chunks(), CountingEnv(spec, length=60, clock="real"), ActorStatus(), []

    def answer():
        resets.append(len(env.seeds))
        source.delay = 0

    client.script = {1: lambda: setattr(source, "delay", 10**9), returns: answer}
    run(env, client, RemotePolicy(source, deadline=0.0), status=status)
    first, second = client.episodes
    assert (len(first), first.truncated, len(second), second.terminated) == (6 + SILENCE * spec.fps + 1, True, 60, True)
    assert second.observation[STATE][0, 0] == 0
    assert resets == [1], "nothing moves it home before that"
    assert ("no action came" in caplog.text, status.warning) == (True, ""), "it has gone with its cause"
