"""The actor's loop: what it records, when it ends an episode, and whom it obeys."""

import gc
import os
import signal
from contextlib import nullcontext
from math import ceil

import numpy as np
import pytest
from serl_client import Outcome
from serl_client.controller import RandomPolicy, RemotePolicy
from serl_client.errors import Refused, RobotFault
from serl_client.runner import ROOM_PATIENCE
from serl_client.starts import evaluation_seed, is_demonstrated, training_seed
from serl_client.status import ActorStatus

from tests.shared.actors import STATE, Asked, Chunks, CountingEnv, FakeClient, Keys, WaitingClient, run


@pytest.fixture
def env(spec):
    return CountingEnv(spec)


@pytest.fixture
def client(spec):
    return FakeClient(spec)


def test_the_collector_leaves_aside_what_was_there_before_the_loop_and_only_during_it(env, client):
    frozen = []
    client.script[1] = lambda: frozen.append(gc.get_freeze_count())
    run(env, client)
    assert frozen[0] > 1000
    assert gc.get_freeze_count() == 0


# -- what is recorded


@pytest.mark.parametrize(("length", "sizes"), [(13, [5, 5, 3]), (10, [5, 5])])
def test_segments_tile_each_episode_exactly(client, spec, length, sizes):
    env = CountingEnv(spec, length)
    reports = run(env, client)
    assert [len(segment) for segment in client.segments] == sizes * 2
    assert [segment.ends for segment in client.segments] == [*[False] * (len(sizes) - 1), True] * 2
    for segment in client.segments:
        segment.check(spec)
    actions = iter(env.actions)
    for episode in client.episodes:
        assert (episode.start, len(episode), episode.terminated, episode.task) == (0, length, True, "count")
        assert episode.observation[STATE][:, 0].tolist() == list(range(length + 1)), "the last one is the final one"
        assert episode.reward.tolist() == list(range(1, length + 1))
        assert np.array_equal(episode.action, [next(actions) for _ in range(length)])
        assert (np.diff(episode.time) >= 0).all()
        assert episode.chunk_start.all()
    assert [(report["steps"], report["reward"]) for report in reports] == [(length, length * (length + 1) / 2)] * 2
    assert client.outcomes == [Outcome(episode.episode, True) for episode in client.episodes]
    assert client.episodes[1].episode == "robot-01234567-000001"


def test_a_simulated_robot_is_recorded_at_its_own_pace_over_all_episodes(env, client, spec):
    run(env, client, episodes=3)
    times = np.concatenate([np.append(episode.time, np.nan) for episode in client.episodes])[:-1]
    inside = np.diff(times)[~np.isnan(np.diff(times))]
    np.testing.assert_allclose(inside, 1 / spec.fps, rtol=1e-6)
    assert (np.diff(times[~np.isnan(times)]) > 0).all(), "the next episode is later"


def test_without_a_known_success_there_is_no_outcome(env, client):
    env.success = None
    assert [report["success"] for report in run(env, client)] == [None, None]
    assert client.outcomes == []


def test_arrays_that_were_pushed_are_not_written_again(env, client, monkeypatch):
    copies, push = [], client.push

    def push_and_copy(record):
        push(record)
        if not isinstance(record, Outcome):
            copies.append(record.observation[STATE].copy())

    monkeypatch.setattr(client, "push", push_and_copy)
    run(env, client)
    assert all(np.array_equal(s.observation[STATE], copy) for s, copy in zip(client.segments, copies, strict=True))


def test_a_segment_is_cut_where_the_weights_change(env, client, spec):
    class Changing(RandomPolicy):
        """New weights every four rows."""

        def act(self, observation, *, step, **rest):
            self.version = step // 4
            return super().act(observation, step=step, **rest)

    run(env, client, Changing(spec, 0), episodes=1)
    found = [(s.start, len(s), s.stamp.weights_version) for s in client.segments]
    assert found == [(0, 4, 0), (4, 4, 1), (8, 4, 2), (12, 1, 3)]


def test_evaluation_starts_are_distinct_the_same_again_and_never_trained_on(spec):
    evaluated, again, trained, demonstrated = (CountingEnv(spec, has_operator=True) for _ in range(4))
    run(evaluated, FakeClient(spec, "evaluate"), episodes=20)
    run(again, FakeClient(spec, "evaluate", number=7), episodes=20)
    run(trained, FakeClient(spec), episodes=50)
    run(demonstrated, FakeClient(spec, "teleop"), episodes=20)
    assert evaluated.seeds == [evaluation_seed(3, k) for k in range(20)] == again.seeds
    assert len(set(trained.seeds)) == 50
    assert max(trained.seeds) < 1_000_000_000 <= min(evaluated.seeds)
    assert [is_demonstrated(seed) for seed in (*demonstrated.seeds, *trained.seeds, *evaluated.seeds)] == [
        *[True] * 20, *[False] * 70
    ]  # fmt: skip
    assert trained.seeds == [training_seed(0, FakeClient.session, number) for number in range(50)]
    assert training_seed(1, FakeClient.session, 0) != training_seed(0, FakeClient.session, 0)
    assert len({evaluation_seed(ordinal, k) for ordinal in range(3) for k in range(5)}) == 15


@pytest.mark.parametrize(("place", "share"), [(0, 2), (1, 2), (2, 1)])
def test_several_environments_do_each_a_part_of_an_evaluation_so_that_short_episodes_are_not_favoured(
    env, spec, place, share
):
    client = FakeClient(spec, "evaluate", episodes=5)
    client.script = {"wait 20": lambda: client.direct("evaluate", number=2, episodes=5)}
    client.script["wait 40"] = lambda: client.direct("collect", number=3, episodes=None)
    run(env, client, episodes=2 * share + 3, share=lambda: (place, 3))
    assert env.seeds[: 2 * share] == 2 * [evaluation_seed(3, k) for k in range(share)]
    assert max(env.seeds[2 * share :]) < evaluation_seed(0, 0)


@pytest.mark.parametrize("policy", ["random", "brownian"])
def test_a_phase_of_chance_asks_nobody_and_the_next_phase_asks_the_policy_again(env, client, spec, policy):
    source = Chunks()
    client.direct("collect", policy=policy, explore=False)
    client.script = {4: lambda: client.direct("collect", number=2)}  # the first episode's three segments and outcome
    run(env, client, RemotePolicy(source, deadline=0.0))
    drawn = client.episodes[0]
    assert (source.questions[0], len(source.questions)) == ((0, True), 13)
    assert len(np.unique(drawn.action)) == 26
    assert np.abs(drawn.action).max() <= 1
    assert drawn.chunk_start.all()
    assert not drawn.intervened.any()
    assert [segment.stamp.weights_version for segment in client.segments] == [0, 0, 0, 1, 1, 1]


def test_a_robot_on_a_real_clock_idles_in_a_phase_of_random_actions(spec):
    env, client, status = CountingEnv(spec, clock="real"), FakeClient(spec, policy="brownian"), ActorStatus()
    client.script = {"wait 3": lambda: client.direct("stop", number=2)}
    run(env, client, status=status)
    assert (env.homes, env.actions, client.records) == (0, [], [])
    assert (
        status.warning == "phase practise asks for random actions on a real clock, which this robot cannot do: it idles"
    )


# -- the operator


@pytest.mark.parametrize(
    ("key", "ends", "outcome"),
    [
        ("success", (True, False), {"success": True}),
        ("failure", (True, False), {"success": False}),
        ("discard", (False, True), {"success": None, "discard": True}),
    ],
)
@pytest.mark.parametrize("row", [3, 4])  # in a segment, and with its last row
def test_a_key_ends_the_episode_with_the_operators_outcome(env, client, key, ends, outcome, row):
    reports = run(env, client, operator=Keys({row + 1: [key]}))  # one look before the first row
    first, second = client.episodes
    assert (len(first), first.terminated, first.truncated, len(second)) == (row + 1, *ends, 13)
    assert first.observation[STATE][:, 0].tolist() == list(range(row + 2))
    assert client.outcomes[0] == Outcome(first.episode, judged_by="operator", **outcome)
    assert (reports[0]["success"], reports[0]["discard"]) == (outcome["success"], key == "discard")


@pytest.mark.parametrize(("look", "silent"), [(14, ()), (18, range(14, 20))], ids=["at once", "before the first row"])
def test_a_key_between_two_episodes_corrects_the_one_before(env, client, spec, look, silent):
    """14 is the look after the second reset; with a silent policy the next ones come before its first row, too."""
    policy = Asked(spec)
    policy.silent = silent
    run(env, client, policy, operator=Keys({look: ["failure"]}))
    first, second = (episode.episode for episode in client.episodes)
    corrected = Outcome(first, False, judged_by="operator")
    assert client.outcomes == [Outcome(first, True), corrected, Outcome(second, True)]
    assert client.lengths == [13, 13]
    assert policy.begun == [first, second], "a question that waits for its answer is not asked anew"


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_verdict_that_finds_no_row_to_go_with_is_recorded_all_the_same(spec, client, interrupted):
    client.state.step_limit, keys = (
        5,
        Keys({8: ["failure"]}),
    )  # it waits for permission; all its rows are pushed by then

    def end():
        if interrupted:
            raise KeyboardInterrupt
        client.direct("stop", number=99, boundary="now")

    client.script["wait 8"] = end
    with pytest.raises(KeyboardInterrupt) if interrupted else nullcontext():
        run(CountingEnv(spec, length=100), client, operator=keys)
    assert [(len(segment), segment.ends) for segment in client.segments] == [(5, False)]
    assert client.outcomes == [Outcome(client.segments[0].episode, False, judged_by="operator")]


def test_pause_holds_the_robot_between_two_steps_and_begins_anew_after_it(env, client, spec, running_clock):
    stopped, policy = [], Asked(spec)
    client.script = {"wait 2": lambda: stopped.append(env.stops)}
    run(env, client, policy, episodes=1, operator=Keys({4: ["pause"], 8: ["pause"]}, running_clock))
    assert (stopped, client.waited >= 4, client.lengths) == ([1], True, [13])
    assert policy.asked == [(step, step in (0, 4)) for step in range(13)]


def test_stop_and_next_are_the_plans_to_decide(env, client):
    run(env, client, operator=Keys({3: ["next"], 5: ["stop"]}))
    assert (client.commands, len(client.episodes)) == (["next", "stop"], 2)


# -- room and pace


def test_out_of_room_the_episode_is_cut_off_and_the_actor_goes_on_when_there_is_room(env, spec, clock):
    client, status, seen = WaitingClient(spec, clock), ActorStatus(), []

    def full():
        client.has_room, client.fault = False, "the outbox is full"

    def relieved():
        seen.append((status.driver, env.stops, len(client.segments), "outbox is full" in status.warning))
        client.has_room = True

    client.script = {1: full, f"wait {ceil(ROOM_PATIENCE / 0.002) + 20}": relieved}
    run(env, client, status=status)
    first, second = client.episodes
    assert (len(first), first.truncated, first.terminated) == (6, True, False)
    assert (len(second), second.terminated) == (13, True)
    assert seen == [("IDLE", 1, 2, True)]
    assert status.warning == "", "its cause is gone"
    assert client.outcomes == [Outcome(second.episode, True)]


def test_a_simulated_robot_gives_the_outbox_a_moment_to_catch_up(env, client):
    has = lambda room: lambda: setattr(client, "has_room", room)  # noqa: E731
    client.script = {1: has(False), "wait 3": has(True)}
    run(env, client, episodes=1)
    assert (client.lengths, client.waited) == ([13], 3)


def test_a_paced_actor_makes_the_steps_it_may_and_pushes_them_before_it_waits(env, client):
    client.state.step_limit, pushed = 3, []

    def allow_more():
        pushed.append((len(env.actions), sum(len(segment) for segment in client.segments)))
        client.state.step_limit += 4

    client.script = {f"wait {n}": allow_more for n in range(1, 20)}
    run(env, client)
    assert pushed == [(n, n) for n in range(3, 26, 4)]
    assert client.lengths == [13, 13]


def test_a_real_clock_is_never_paced(spec, client):
    client.state.step_limit = 0
    run(CountingEnv(spec, clock="real"), client)
    assert client.lengths == [13, 13]


# -- how it ends


def test_an_environment_that_fails_leaves_a_truncated_episode_and_a_stopped_robot(env, client):
    env.fails_at = 7
    env.clock = "real"
    with pytest.raises(RobotFault, match="OSError: the robot is gone"):
        run(env, client)
    (episode,) = client.episodes
    assert (len(episode), episode.truncated, client.outcomes) == (7, True, [])
    assert episode.observation[STATE][:, 0].tolist() == list(range(8))
    assert env.stops >= 1


@pytest.fixture
def hangup():
    """SIGHUP ends this process, also where nohup has started it."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("hangup")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_a_truncated_episode_and_a_stopped_robot(env, client, number):
    client.script = {1: lambda: os.kill(os.getpid(), number)}
    before = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGHUP)]
    with pytest.raises(KeyboardInterrupt):
        run(env, client)
    assert [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGHUP)] == before
    assert env.stops >= 1
    (episode,) = client.episodes
    rows = len(episode)
    assert rows in (5, 6)
    assert episode.truncated == (rows == 6)
    assert len(episode.observation[STATE]) == rows + episode.truncated


def test_a_refusal_ends_the_actor_with_the_robot_stopped(env, client):
    client.script = {2: lambda: setattr(client, "error", Refused("another run"))}
    with pytest.raises(Refused, match="another run"):
        run(env, client)
    assert env.stops >= 1


@pytest.mark.parametrize("interrupted", [False, True])
def test_what_could_not_be_delivered_is_told(env, client, interrupted):
    status = ActorStatus()
    client.drained, client.pending = False, (5, 3 << 20)
    client.script = {2: lambda: signal.raise_signal(signal.SIGINT)} if interrupted else {}
    with pytest.raises(KeyboardInterrupt) if interrupted else nullcontext():
        run(env, client, episodes=1, status=status)
    assert "5 records (3 MiB) stay in the outbox" in status.warning
