"""The actor's loop: what it records, when it ends an episode, and whom it obeys."""

import dataclasses
import gc
import os
import signal
import threading
import time
from contextlib import nullcontext

import numpy as np
import pytest
from serl_client import Outcome
from serl_client import runner as module
from serl_client.controller import RandomPolicy, RemotePolicy, decision_seed
from serl_client.env import Step
from serl_client.episode import Stamp, join
from serl_client.errors import Refused
from serl_client.network import Answer
from serl_client.recorder import Recorder
from serl_client.runner import ActorStatus, evaluation_seed, run_actor, training_seed

STATE = "observation.state"


class TinyEnv:
    """Episodes of `length` steps whose observation counts the steps; `human` rows are driven by somebody else."""

    task = "count"

    def __init__(self, spec, length=13, *, clock="simulated", has_operator=False, human=()):
        self.spec, self.length, self.clock, self.has_operator, self.human = spec, length, clock, has_operator, human
        self.seeds, self.teleops, self.actions, self.stops = [], [], [], 0
        self.fails_at = None
        self.success = True

    def reset(self, seed, *, teleop=False, intervene=False):
        self.row = 0
        self.intervene = intervene
        self.seeds.append(seed)
        self.teleops.append(teleop)
        return self._observe()

    def step(self, action):
        if self.row == self.fails_at:
            raise OSError("the robot is gone")
        self.actions.append(action)
        human = self.row in self.human
        executed = np.full(2, 0.5 if human or action is None else action, np.float32)
        self.row += 1
        ended = self.row == self.length
        success = self.success if ended else None
        return Step(self._observe(), float(self.row), executed, human or self.teleops[-1], ended, False, success)

    def stop(self):
        self.stops += 1

    def _observe(self):
        return {STATE: np.full(8, self.row, np.float32)}


class FakeClient:
    """A client whose learner has endless room; `script` holds functions that run after so many pushed records."""

    actor, session, ordinal = "robot", "0123456789abcdef", 3

    def __init__(self, spec, mode="collect", **directive):
        self.spec = spec
        self.records, self.commands, self.script = [], [], {}
        self.report, self.has_room, self.fault, self.error = {}, True, "", None
        self.step_limit = None
        self.drained = True
        self.waited = 0
        self.pending = 0, 0
        self.direct(mode, **directive)

    def direct(self, mode, number=1, **directive):
        self.directive = {
            "number": number, "phase": "practise", "mode": mode, "into": "online", "explore": True,
            "episodes": None, "weights": None, "boundary": "episode", **directive,
        }  # fmt: skip

    def push(self, record):
        self.records.append(record)
        self.script.pop(len(self.records), lambda: None)()
        if self.error:
            raise self.error

    def wait(self, timeout):
        self.waited += 1
        if self.error:
            raise self.error
        self.script.pop(f"wait {self.waited}", lambda: None)()
        assert self.waited < 10_000, "it waits for ever"

    def command(self, name, argument=""):
        self.commands.append(name)

    def drain(self, timeout):
        return self.drained

    @property
    def segments(self):
        return [record for record in self.records if not isinstance(record, Outcome)]

    @property
    def outcomes(self):
        return [record for record in self.records if isinstance(record, Outcome)]

    @property
    def episodes(self):
        """The segments of each episode, joined."""
        ids = dict.fromkeys(segment.episode for segment in self.segments)
        return [join([segment for segment in self.segments if segment.episode == id]) for id in ids]


class Keys:
    """An operator: {row of the run: what is pressed there}."""

    def __init__(self, presses):
        self.presses, self.polled = presses, -1

    def poll(self):
        self.polled += 1
        return self.presses.get(self.polled, [])


def run(env, client, controller=None, *, episodes=2, **options):
    """Run until so many episodes were reported, then stop; their reports."""
    reports = []

    def on_episode(report):
        reports.append(report)
        if len(reports) == episodes:
            client.direct("stop", number=99)

    controller = controller or RandomPolicy(env.spec, 0)
    run_actor(env, controller, client, seed=options.pop("seed", 0), on_episode=on_episode, **options)
    return reports


def test_the_collector_leaves_aside_what_was_there_before_the_loop_and_only_during_it(spec):
    env, client = TinyEnv(spec), FakeClient(spec)
    frozen = []
    client.script[1] = lambda: frozen.append(gc.get_freeze_count())
    run(env, client)
    assert frozen[0] > 1000
    assert gc.get_freeze_count() == 0


def test_segments_tile_each_episode_exactly(spec):
    env, client = TinyEnv(spec), FakeClient(spec)
    reports = run(env, client)
    assert [len(segment) for segment in client.segments] == [5, 5, 3] * 2
    assert [segment.ends for segment in client.segments] == [False, False, True] * 2
    for segment in client.segments:
        segment.check(spec)
    actions = iter(env.actions)
    for episode in client.episodes:
        assert (episode.start, len(episode), episode.terminated, episode.task) == (0, 13, True, "count")
        assert episode.observation[STATE][:, 0].tolist() == list(range(14))  # the last one is the final observation
        assert episode.reward.tolist() == list(range(1, 14))
        assert np.array_equal(episode.action, [next(actions) for _ in range(13)])
        assert (np.diff(episode.time) >= 0).all()
        assert episode.chunk_start.all()
    assert [report["steps"] for report in reports] == [13, 13]
    assert [report["reward"] for report in reports] == [91.0, 91.0]
    assert client.outcomes == [Outcome(episode.episode, True) for episode in client.episodes]
    assert client.episodes[1].episode == "robot-01234567-000001"


def test_a_simulated_robot_is_recorded_at_its_own_pace_over_all_episodes(spec):
    env, client = TinyEnv(spec), FakeClient(spec)
    run(env, client, episodes=3)
    times = np.concatenate([np.append(episode.time, np.nan) for episode in client.episodes])[:-1]
    inside = np.diff(times)[~np.isnan(np.diff(times))]
    np.testing.assert_allclose(inside, 1 / spec.fps, rtol=1e-6)
    assert (np.diff(times[~np.isnan(times)]) > 0).all(), "the next episode is later"


def test_an_episode_of_exactly_some_segments_ends_with_its_last_one(spec):
    client = FakeClient(spec)
    run(TinyEnv(spec, length=10), client, episodes=1)
    assert [(len(segment), segment.terminated) for segment in client.segments] == [(5, False), (5, True)]


def test_without_a_known_success_there_is_no_outcome(spec):
    env, client = TinyEnv(spec), FakeClient(spec)
    env.success = None
    assert [report["success"] for report in run(env, client)] == [None, None]
    assert client.outcomes == []


def test_arrays_that_were_pushed_are_not_written_again(spec):
    env, client = TinyEnv(spec), FakeClient(spec)
    copies = []
    push = client.push

    def push_and_copy(record):
        push(record)
        if not isinstance(record, Outcome):
            copies.append(record.observation[STATE].copy())

    client.push = push_and_copy
    run(env, client)
    assert all(np.array_equal(s.observation[STATE], copy) for s, copy in zip(client.segments, copies, strict=True))


class Changing(RandomPolicy):
    """New weights every four rows."""

    def act(self, observation, *, step, previous_action, reset):
        self.version = step // 4
        return super().act(observation, step=step, previous_action=previous_action, reset=reset)


def test_a_segment_is_cut_where_the_weights_change(spec):
    client = FakeClient(spec)
    run(TinyEnv(spec), client, Changing(spec, 0), episodes=1)
    assert [(s.start, len(s), s.stamp.weights) for s in client.segments] == [
        (0, 4, 0),
        (4, 4, 1),
        (8, 4, 2),
        (12, 1, 3),
    ]


def test_evaluation_starts_are_distinct_the_same_again_and_never_trained_on(spec):
    evaluated, again, trained = TinyEnv(spec), TinyEnv(spec), TinyEnv(spec)
    run(evaluated, FakeClient(spec, "evaluate"), episodes=20)
    run(again, FakeClient(spec, "evaluate", number=7), episodes=20)
    run(trained, FakeClient(spec, "collect"), episodes=50)
    assert evaluated.seeds == [evaluation_seed(3, k) for k in range(20)] == again.seeds
    assert len(set(trained.seeds)) == 50
    assert max(trained.seeds) < 1_000_000_000 <= min(evaluated.seeds)
    assert trained.seeds == [training_seed(0, FakeClient.session, number) for number in range(50)]
    assert training_seed(1, FakeClient.session, 0) != training_seed(0, FakeClient.session, 0)
    assert len({evaluation_seed(ordinal, k) for ordinal in range(3) for k in range(5)}) == 15


def test_evaluation_begins_its_list_anew_with_each_directive(spec):
    env, client = TinyEnv(spec), FakeClient(spec, "evaluate")
    client.script = {4 * 3: lambda: client.direct("evaluate", number=2)}  # three segments and an outcome each
    run(env, client, episodes=5)
    assert env.seeds == [evaluation_seed(3, k) for k in (0, 1, 2, 0, 1)]


@pytest.mark.parametrize(
    ("key", "ends", "outcome"),
    [
        ("success", (True, False), {"success": True}),
        ("failure", (True, False), {"success": False}),
        ("discard", (False, True), {"success": None, "discard": True}),
    ],
)
@pytest.mark.parametrize("row", [3, 4])  # in a segment, and with its last row
def test_a_key_ends_the_episode_with_the_operators_outcome(spec, key, ends, outcome, row):
    client = FakeClient(spec)
    reports = run(TinyEnv(spec), client, operator=Keys({row + 1: [key]}))  # one look before the first row
    first, second = client.episodes
    assert len(first) == row + 1
    assert (first.terminated, first.truncated) == ends
    assert first.observation[STATE][:, 0].tolist() == list(range(row + 2))
    assert client.outcomes[0] == Outcome(first.episode, judged_by="operator", **outcome)
    assert len(second) == 13
    assert (reports[0]["success"], reports[0]["discard"]) == (outcome["success"], key == "discard")


def test_a_key_between_two_episodes_corrects_the_one_before(spec):
    client = FakeClient(spec)
    run(TinyEnv(spec), client, operator=Keys({14: ["failure"]}))  # the look after the second reset
    first, second = (episode.episode for episode in client.episodes)
    assert client.outcomes == [
        Outcome(first, True), Outcome(first, False, judged_by="operator"), Outcome(second, True)
    ]  # fmt: skip
    assert [len(episode) for episode in client.episodes] == [13, 13]


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_verdict_that_finds_no_row_to_go_with_is_recorded_all_the_same(spec, interrupted):
    env, client = TinyEnv(spec, length=100), FakeClient(spec)
    keys = Keys({5: ["pause"], 8: ["failure"]})  # all five rows are pushed by then

    def end():
        if interrupted:
            raise KeyboardInterrupt
        client.direct("stop", number=99, boundary="now")

    client.script["wait 8"] = end
    with pytest.raises(KeyboardInterrupt) if interrupted else nullcontext():
        run(env, client, operator=keys)
    assert [len(segment) for segment in client.segments] == [5]
    assert client.outcomes == [Outcome(client.segments[0].episode, False, judged_by="operator")]


def test_a_verdict_before_the_first_row_is_about_the_episode_before(spec):
    class Silent(RandomPolicy):
        def act(self, observation, *, step, **rest):
            asked.append(step)
            return None if 13 < len(asked) < 20 else super().act(observation, step=step, **rest)

    asked, client, keys = [], FakeClient(spec), Keys({18: ["failure"]})
    run(TinyEnv(spec), client, Silent(spec, 0), operator=keys)
    first, second = client.episodes
    assert len(second) == 13
    assert client.outcomes == [
        Outcome(first.episode, True), Outcome(first.episode, False, judged_by="operator"), Outcome(second.episode, True)
    ]  # fmt: skip


def test_pause_holds_the_robot_between_two_steps_and_begins_anew_after_it(spec):
    env, client, asked = TinyEnv(spec), FakeClient(spec), []

    class Asked(RandomPolicy):
        def act(self, observation, *, step, previous_action, reset):
            asked.append((step, reset))
            return super().act(observation, step=step, previous_action=previous_action, reset=reset)

    stopped = []
    keys = Keys({4: ["pause"], 8: ["pause"]})
    client.script = {"wait 2": lambda: stopped.append(env.stops)}
    run(env, client, Asked(spec, 0), episodes=1, operator=keys)
    assert stopped == [1]
    assert client.waited >= 4
    assert asked == [(step, step in (0, 4)) for step in range(13)]
    assert len(client.episodes[0]) == 13


def test_stop_and_next_are_the_plans_to_decide(spec):
    client = FakeClient(spec)
    run(TinyEnv(spec), client, operator=Keys({3: ["next"], 5: ["stop"]}))
    assert client.commands == ["next", "stop"]
    assert len(client.episodes) == 2


def test_out_of_room_the_episode_is_cut_off_and_the_actor_goes_on_when_there_is_room(spec, monkeypatch):
    monkeypatch.setattr(module, "ROOM_PATIENCE", 0.01)
    env, client, status = TinyEnv(spec), FakeClient(spec), ActorStatus()
    seen = []

    def full():
        client.has_room, client.fault = False, "the outbox is full"

    def relieved():
        seen.append((status.driver, env.stops, len(client.segments)))
        client.has_room = True

    client.script = {1: full}
    threading.Timer(0.3, relieved).start()
    monkeypatch.setattr(client, "wait", lambda timeout: time.sleep(0.002))
    run(env, client, status=status)
    first, second = client.episodes
    assert (len(first), first.truncated, first.terminated) == (6, True, False)
    assert seen == [("IDLE", 1, 2)]
    assert (len(second), second.terminated) == (13, True)
    assert "outbox is full" in status.warning
    assert client.outcomes == [Outcome(second.episode, True)]


def test_a_simulated_robot_gives_the_outbox_a_moment_to_catch_up(spec):
    client = FakeClient(spec)
    client.script = {1: lambda: setattr(client, "has_room", False), "wait 3": lambda: setattr(client, "has_room", True)}
    run(TinyEnv(spec), client, episodes=1)
    assert [len(episode) for episode in client.episodes] == [13]


def test_a_paced_actor_makes_the_steps_it_may_and_pushes_them_before_it_waits(spec):
    env, client = TinyEnv(spec), FakeClient(spec)
    client.step_limit = 3
    pushed = []

    def allow_more():
        pushed.append((len(env.actions), sum(len(segment) for segment in client.segments)))
        client.step_limit += 4

    client.script = {f"wait {n}": allow_more for n in range(1, 20)}
    run(env, client)
    assert pushed == [(n, n) for n in range(3, 26, 4)]
    assert [len(episode) for episode in client.episodes] == [13, 13]


def test_a_real_clock_is_never_paced(spec):
    client = FakeClient(spec)
    client.step_limit = 0
    run(TinyEnv(spec, clock="real"), client)
    assert [len(episode) for episode in client.episodes] == [13, 13]


def test_an_actor_that_waits_for_permission_obeys_a_stop(spec):
    client = FakeClient(spec)
    client.step_limit = 7
    client.script = {"wait 3": lambda: client.direct("stop", number=2)}
    run(TinyEnv(spec), client)
    assert [(len(segment), segment.ends) for segment in client.segments] == [(5, False), (2, False)]


def test_a_directive_is_applied_between_two_episodes_unless_it_says_now(spec):
    client = FakeClient(spec)
    client.script = {1: lambda: client.direct("stop", number=2)}
    run(TinyEnv(spec), client)
    assert [(len(episode), episode.terminated) for episode in client.episodes] == [(13, True)]
    client = FakeClient(spec)
    client.script = {2: lambda: client.direct("stop", number=2, boundary="now")}
    run(TinyEnv(spec), client)
    assert [len(segment) for segment in client.segments] == [5, 5]


def test_idle_stops_the_robot_and_the_stamp_tells_the_directive(spec):
    env, client, status = TinyEnv(spec), FakeClient(spec), ActorStatus()
    client.script = {
        4: lambda: client.direct("idle", number=2),
        "wait 2": lambda: client.direct("collect", number=3, phase="again"),
    }
    run(env, client, status=status)
    first, second = client.episodes
    assert (first.stamp.directive, first.stamp.phase) == (1, "practise")
    assert (second.stamp.directive, second.stamp.phase) == (3, "again")
    assert env.stops == 2  # once for idle, once at the end
    assert (client.report["steps"], client.report["episodes"], client.report["mode"]) == (26, 2, "stop")


def test_teleop_needs_an_operator(spec):
    client = FakeClient(spec, "teleop")
    client.script = {"wait 2": lambda: client.direct("stop", number=2)}
    status = ActorStatus()
    run(TinyEnv(spec), client, status=status)
    assert client.records == []
    assert "teleop" in status.warning
    env, client = TinyEnv(spec, has_operator=True), FakeClient(spec, "teleop")
    run(env, client)
    assert env.teleops == [True, True]
    assert set(env.actions) == {None}
    assert client.episodes[0].intervened.all()
    assert not client.episodes[0].chunk_start.any()


def test_an_environment_that_fails_leaves_a_truncated_episode_and_a_stopped_robot(spec):
    env, client = TinyEnv(spec), FakeClient(spec)
    env.fails_at = 7
    with pytest.raises(OSError, match="the robot is gone"):
        run(env, client)
    (episode,) = client.episodes
    assert (len(episode), episode.truncated) == (7, True)
    assert episode.observation[STATE][:, 0].tolist() == list(range(8))
    assert client.outcomes == []
    assert env.stops >= 1


@pytest.fixture
def hangup():
    """SIGHUP ends this process, also where nohup has started it."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("hangup")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_a_truncated_episode_and_a_stopped_robot(spec, number):
    env, client = TinyEnv(spec), FakeClient(spec)
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


def test_a_refusal_ends_the_actor_with_the_robot_stopped(spec):
    env, client = TinyEnv(spec), FakeClient(spec)
    client.script = {2: lambda: setattr(client, "error", Refused("another run"))}
    with pytest.raises(Refused, match="another run"):
        run(env, client)
    assert env.stops >= 1


def test_what_could_not_be_delivered_is_told(spec):
    client, status = FakeClient(spec), ActorStatus()
    client.drained, client.pending = False, (5, 3 << 20)
    run(TinyEnv(spec), client, episodes=1, status=status)
    assert "5 records (3 MiB) stay in the outbox" in status.warning


# ---- a policy that answers from elsewhere


class Source:
    """Answers with `length` actions, after `delay` looks in vain; action [i] of step s is s + i/100."""

    def __init__(self, length=1, delay=0, version=1):
        self.length, self.delay, self.version = length, delay, version
        self.questions, self.answer, self.patience = [], None, 0

    def ask(self, observation, *, step, seed, previous_action, reset, explore, task):
        self.questions.append((step, reset))
        self.seed, self.previous_action, self.explore, self.task = seed, previous_action, explore, task
        action = step + np.arange(self.length, dtype=np.float32)[:, None] / 100 + np.zeros(2, np.float32)
        self.answer, self.patience = Answer(step, self.version, action, {"mean": action[0]}), self.delay

    def wait_answer(self, step, timeout):
        if self.answer is None or self.patience:
            self.patience = max(0, self.patience - 1)
            return None
        answer, self.answer = self.answer, None
        return answer

    def forget(self):
        self.answer = None


def policy(source, **options):
    policy = RemotePolicy(source, deadline=0.0, **options)
    policy.begin("e0", {"explore": True, "weights": None}, "count")
    return policy


def act(policy, step, reset=False):
    action = policy.act({}, step=step, previous_action=None, reset=reset or step == 0)
    return None if action is None else round(float(action[0]), 2)


def test_a_policy_of_single_actions_is_asked_for_every_row():
    source = Source()
    remote = policy(source)
    assert [act(remote, step) for step in range(4)] == [0, 1, 2, 3]
    assert source.questions == [(0, True), (1, False), (2, False), (3, False)]
    assert (remote.version, remote.chunk_start, remote.extras["mean"].tolist()) == (1, True, [3, 3])
    assert source.seed == decision_seed("e0", 3) < 2**63


def test_a_chunk_is_given_out_row_by_row_and_decision_marks_its_first():
    source = Source(length=3)
    remote = policy(source)
    rows = [(act(remote, step), remote.chunk_start) for step in range(6)]
    assert rows == [(0, True), (0.01, False), (0.02, False), (3, True), (3.01, False), (3.02, False)]
    assert [step for step, _ in source.questions] == [0, 3]


def test_the_rows_that_have_passed_are_skipped_in_a_late_chunk():
    source = Source(length=5, delay=2)
    remote = policy(source)
    assert [act(remote, step) for step in range(5)] == [None, None, 0.02, 0.03, 0.04]
    assert remote.chunk_start is False
    assert source.questions == [(0, True)]


def test_the_old_chunk_goes_on_until_the_next_one_is_here():
    source = Source(length=6)
    remote = policy(source, n_action_steps=2)
    assert [act(remote, 0), act(remote, 1)] == [0, 0.01]
    source.delay = 2
    assert [act(remote, step) for step in (2, 3, 4)] == [0.02, 0.03, 2.02]
    assert remote.chunk_start is True


def test_a_chunk_that_is_too_late_as_a_whole_is_asked_for_again():
    source = Source(length=1, delay=1)
    remote = policy(source)
    assert act(remote, 0) is None
    source.delay = 0
    assert act(remote, 1) == 1
    assert source.questions == [(0, True), (1, True)]  # the reset stays until there is an action


def test_a_lost_question_is_repeated(monkeypatch):
    monkeypatch.setattr("serl_client.controller.REPEAT", 0.0)
    source = Source(delay=10**9)
    remote = policy(source)
    assert [act(remote, step) for step in range(3)] == [None] * 3
    assert len(source.questions) == 3


def test_only_the_weights_that_must_act_do():
    source = Source(version=4)
    remote = RemotePolicy(source, deadline=0.0)
    remote.begin("e0", {"explore": False, "weights": 5}, "count")
    assert act(remote, 0) is None
    source.version = 5
    remote._asked_at = -1e9  # as if time had passed
    assert act(remote, 0) == 0
    assert (remote.version, source.explore) == (5, False)


def test_a_takeover_drops_the_chunk_and_the_hand_back_asks_anew(spec):
    source = Source(length=20)
    env, client = TinyEnv(spec, human=(4, 5, 6)), FakeClient(spec)
    env.spec = spec
    run(env, client, RemotePolicy(source, deadline=0.0), episodes=1)
    (episode,) = client.episodes
    assert source.questions == [(0, True), (8, True)]
    assert source.task == env.task == episode.task
    assert episode.intervened.tolist() == [row in (4, 5, 6) for row in range(13)]
    assert episode.chunk_start.tolist() == [row in (0, 8) for row in range(13)]
    assert [row for row, action in enumerate(env.actions) if action is None] == [5, 6, 7]


def test_a_simulated_robot_waits_for_its_action_and_a_real_one_holds(spec):
    client = FakeClient(spec)
    env = TinyEnv(spec)
    run(env, client, RemotePolicy(Source(delay=3), deadline=0.0), episodes=1)
    assert all(action is not None for action in env.actions)
    env, client, source = TinyEnv(spec, clock="real"), FakeClient(spec), Source(length=2)
    source.ask_late = source.ask

    def ask(observation, *, step, **question):
        source.delay = step % 4 // 2
        source.ask_late(observation, step=step, **question)

    source.ask = ask
    run(env, client, RemotePolicy(source, deadline=0.0), episodes=1)
    assert env.actions[0] is not None
    assert [row for row, action in enumerate(env.actions) if action is None] == [2, 6, 10]
    assert len(client.episodes[0]) == 13


def test_a_real_robot_whose_policy_is_silent_gives_the_episode_up(spec, monkeypatch):
    monkeypatch.setattr(module, "SILENCE", 0.3)
    source, status = Source(), ActorStatus()
    env, client = TinyEnv(spec, clock="real"), FakeClient(spec)
    client.script = {1: lambda: setattr(source, "delay", 10**9), 2: lambda: setattr(source, "delay", 0)}
    run(env, client, RemotePolicy(source, deadline=0.0), status=status)
    first, second = client.episodes
    assert (len(first), first.truncated) == (9, True)
    assert (len(second), second.terminated) == (13, True)
    assert "no action came" in status.warning


def test_after_a_silence_a_real_robot_stays_where_it_is_until_the_policy_answers(spec, monkeypatch):
    monkeypatch.setattr(module, "SILENCE", 0.3)
    monkeypatch.setattr("serl_client.controller.REPEAT", 0.0)
    source, homes = Source(), []
    env, client = TinyEnv(spec, clock="real"), FakeClient(spec)

    def answer():
        homes.append(len(env.seeds))
        source.delay = 0

    client.script = {1: lambda: setattr(source, "delay", 10**9), "wait 30": answer}
    run(env, client, RemotePolicy(source, deadline=0.0))
    assert homes == [1]
    assert [len(episode) for episode in client.episodes] == [9, 13]
    assert client.episodes[1].observation[STATE][0, 0] == 0


def test_chance_is_the_same_for_the_same_seed_and_episode(spec):
    def actions(seed, episode):
        controller = RandomPolicy(spec, seed)
        controller.begin(episode, {}, "count")
        return [controller.act({}, step=step, previous_action=None, reset=False) for step in range(20)]

    assert np.array_equal(actions(0, "a"), actions(0, "a"))
    assert not np.array_equal(actions(0, "a"), actions(0, "b"))
    assert not np.array_equal(actions(0, "a"), actions(1, "a"))
    assert np.abs(actions(0, "a")).max() <= 1
    assert actions(0, "a")[0].dtype == np.float32


class FailingSensor(TinyEnv):
    """Its state is not finite at the rows `bad` of each episode but the last one."""

    def __init__(self, spec, bad, episodes, value):
        super().__init__(spec)
        self.bad, self.left, self.value = bad, episodes, value

    def reset(self, seed, **options):
        self.left -= 1
        return super().reset(seed, **options)

    def _observe(self):
        observation = super()._observe()
        if self.row in self.bad and self.left > 0:
            observation[STATE][3] = self.value
        return observation


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_row_that_is_not_finite_cuts_the_episode_off_before_it(spec, value):
    env, client, status = FailingSensor(spec, {7}, 2, value), FakeClient(spec), ActorStatus()
    reports = run(env, client, episodes=2, status=status)
    cut, whole = client.episodes
    assert (len(cut), cut.truncated, cut.terminated, len(whole), whole.terminated) == (6, True, False, 13, True)
    assert cut.observation[STATE][:, 0].tolist() == list(range(7)), "the last good observation is the final one"
    assert [report["steps"] for report in reports] == [6, 13]
    assert status.warning == f"observation.state is not finite; {cut.episode} is cut off before row 6"


def test_an_episode_whose_first_observation_is_not_finite_never_begins(spec):
    env, client, status = FailingSensor(spec, {0}, 3, np.nan), FakeClient(spec), ActorStatus()
    run(env, client, episodes=1, status=status)
    (whole,) = client.episodes
    assert (len(whole), len(env.seeds)) == (13, 3)
    assert "is not finite after the reset" in status.warning


@pytest.mark.parametrize("column", ["reward", "executed"])
def test_a_reward_or_an_action_that_is_not_finite_cuts_the_episode_off_before_it(spec, column):
    class Env(TinyEnv):
        def step(self, action):
            step = super().step(action)
            bad = {"reward": np.nan, "executed": np.full(2, np.inf, np.float32)}[column]
            return dataclasses.replace(step, **{column: bad}) if self.row == 3 and len(self.seeds) == 1 else step

    env, client = Env(spec), FakeClient(spec)
    run(env, client, episodes=2)
    assert [(len(each), each.truncated) for each in client.episodes] == [(2, True), (13, False)]


def test_extras_that_the_spec_lacks_are_told_once_for_each_episode(spec, caplog):
    env = TinyEnv(spec)
    observation, recorder = env.reset(0), Recorder(FakeClient(spec), "e", "test")
    for _ in range(3):
        step = env.step(np.zeros(2, np.float32))
        recorder.add(
            Stamp(1, "collect", 0),
            observation,
            0.0,
            step,
            {"behaviour_mean": np.zeros(2)},
            chunk_start=True,
            chunk_delay=0,
            gap=False,
        )
        observation = step.observation
    assert [record.getMessage() for record in caplog.records] == [
        "e: extras behaviour_mean are not stored: the Spec lacks them"
    ]
