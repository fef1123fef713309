"""Which directives an actor obeys, and where it ends an episode for them."""

import pytest
from serl_client.status import ActorStatus

from tests.shared.actors import Asked, CountingEnv, FakeClient, WaitingClient, run


@pytest.mark.parametrize(
    ("limit", "event", "boundary", "segments"),
    [
        (None, 1, "episode", [(5, False), (5, False), (3, True)]),
        (None, 2, "now", [(5, False), (5, False), (1, True)]),
        (7, "wait 3", "episode", [(5, False), (2, False)]),
    ],
    ids=["between two episodes", "now", "while it waits for permission"],
)
def test_a_stop_is_obeyed_at_its_boundary_or_where_the_actor_would_wait_for_ever(
    spec, limit, event, boundary, segments
):
    client = FakeClient(spec)
    client.state.step_limit = limit
    client.script = {event: lambda: client.direct("stop", number=2, boundary=boundary)}
    run(CountingEnv(spec), client)
    assert [(len(segment), segment.ends) for segment in client.segments] == segments


@pytest.mark.parametrize(
    ("mode", "limit", "lifted", "silent", "length"),
    [
        ("collect", 7, True, (), 7),
        ("collect", 7, False, (), 7),
        ("collect", None, True, (8, 9, 10), 13),
        ("collect", None, True, range(8, 10_000), 7),
        ("evaluate", None, True, (8, 9, 10), 7),
    ],
    ids=["at a limit that is gone", "at a limit that stays", "a slow answer", "no answer", "under evaluation"],
)
def test_under_idle_an_episode_that_waits_for_an_answer_goes_on_and_one_at_its_limit_ends(
    clock, spec, mode, limit, lifted, silent, length
):
    client, policy = WaitingClient(spec, clock, mode), Asked(spec)
    client.state.step_limit, policy.silent = limit, silent

    def idle():
        client.state.step_limit = None if lifted else limit
        client.direct("idle", number=2)

    client.script = {"wait 2": idle, "wait 300": lambda: client.direct("stop", number=3)}
    run(CountingEnv(spec), client, controller=policy)
    assert client.lengths == [length]


def test_the_number_of_an_episode_that_was_called_off_before_its_first_row_goes_to_the_next_one(clock, spec):
    client, policy = WaitingClient(spec, clock, "collect"), Asked(spec)
    policy.silent = range(14, 17)  # the first three questions of the second episode
    client.script = {
        "wait 2": lambda: client.direct("idle", number=2),
        "wait 4": lambda: client.direct("collect", number=3),
    }
    run(CountingEnv(spec), client, controller=policy, episodes=3)
    assert [episode.episode.rpartition("-")[2] for episode in client.episodes] == ["000000", "000001", "000002"]
    assert len(policy.begun) == 4
    assert client.reported["episodes"] == 3


def test_idle_stops_the_robot_and_the_stamp_tells_the_directive(spec):
    env, client = CountingEnv(spec), FakeClient(spec)
    client.script = {
        4: lambda: client.direct("idle", number=2),
        "wait 2": lambda: client.direct("collect", number=3, phase="again"),
    }
    run(env, client)
    stamps = [(episode.stamp.directive, episode.stamp.phase) for episode in client.episodes]
    assert stamps == [(1, "practise"), (3, "again")]
    assert env.stops == 2  # once for idle, once at the end
    assert (client.reported["steps"], client.reported["episodes"], client.reported["mode"]) == (26, 2, "stop")


def test_teleop_needs_an_operator(spec):
    env, client, status, because = CountingEnv(spec), FakeClient(spec, "teleop"), ActorStatus(), []
    client.state.directive["because"] = "it has no operator"
    client.script = {"wait 2": lambda: (because.append(status.because), client.direct("stop", number=2))}
    run(env, client, status=status)
    assert (client.records, "teleop" in status.warning) == ([], True)
    assert (because, status.because) == (["it has no operator"], "")
    env, client = CountingEnv(spec, has_operator=True), FakeClient(spec, "teleop")
    run(env, client)
    assert (env.teleops, set(env.actions)) == ([True, True], {None})
    assert client.episodes[0].intervened.all()
    assert not client.episodes[0].chunk_start.any()
