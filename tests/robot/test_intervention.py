"""A human takes over in mid-episode: who drives which row, what is recorded of it, and how the policy goes on."""

import logging
import os
import re
from pathlib import Path

import numpy as np
import pytest
from hydra.utils import instantiate
from omegaconf import OmegaConf
from serl_client import Feature, Outcome
from serl_client.controller import RandomPolicy, RemotePolicy
from serl_client.episode import join
from serl_client.errors import ConfigError
from serl_client.messages import decode_records, encode_record
from serl_client.network import Answer
from serl_client.runner import ActorStatus, run_actor

from robot_infra.env import RobotEnv
from robot_infra.interfaces import Verdict
from robot_infra.robots import fake
from robot_infra.robots.fake import FakeRobot
from robot_infra.safety import SafeRobot
from robot_infra.teleop import keyboard as keyboard_module
from robot_infra.teleop.keyboard import Keyboard, KeyboardTeleop, chosen
from robot_infra.teleop.scripted import Rescuer
from serl_launcher.store.layout import CHUNK_START, INTERVENED, Layout
from serl_launcher.store.store import Store

TASKS = Path(__file__).parents[2] / "config" / "task"
RIGHT, LEFT = np.array([1, 0], np.float32), np.array([-1, 0], np.float32)


class Hand:
    """An operator who touches the device in some rows of each episode."""

    space = "ee_delta"

    def __init__(self, rows=()):
        self.rows, self.row, self.reads, self.demonstrates = rows, -1, 0, []

    def reset(self, seed, *, demonstrate=True):
        self.row = -1
        self.demonstrates.append(demonstrate)

    def read(self):
        self.row += 1
        self.reads += 1
        return LEFT if self.row in self.rows else None

    def close(self):
        pass


class FakeClient:
    """A client whose learner takes everything and directs one mode."""

    actor, session, ordinal = "robot", "0123456789abcdef", 0
    report, has_room, fault, step_limit, pending = {}, True, "", None, (0, 0)

    def __init__(self, spec, mode="collect", **directive):
        self.spec, self.records = spec, []
        self.directive = {"number": 1, "phase": "practise", "mode": mode, "explore": True, "weights": None, **directive}

    def stop(self, report=None):
        self.directive = {**self.directive, "number": 99, "mode": "stop"}

    def push(self, record):
        self.records.append(record)

    def wait(self, timeout):
        pass

    def drain(self, timeout):
        return True

    @property
    def outcomes(self):
        return [record for record in self.records if isinstance(record, Outcome)]

    @property
    def episodes(self):
        segments = [record for record in self.records if not isinstance(record, Outcome)]
        ids = dict.fromkeys(segment.episode for segment in segments)
        return [join([segment for segment in segments if segment.episode == id]) for id in ids]


class Keys:
    """An operator: {look: what was pressed before it}; there is a look after each reset and after each row."""

    def __init__(self, presses):
        self.presses, self.looks = presses, -1

    def poll(self):
        self.looks += 1
        return self.presses.get(self.looks, [])


def build(robot=None, **changes):
    judge = lambda observation: Verdict(0.0, False, False)  # noqa: E731
    arguments = {"judge": judge, "task": "test", "fps": 10, "max_steps": 1000, "clock": "simulated"}
    return RobotEnv(robot or FakeRobot(), **(arguments | changes))


class Chunks:
    """Answers at once with `length` actions; action [i] of the chunk asked for in row s is (s + i) / 100."""

    def __init__(self, length=8):
        self.length, self.questions, self.answer = length, [], None

    def ask(self, observation, *, step, seed, previous_action, reset, explore, task):
        previous = None if previous_action is None else previous_action.tolist()
        self.questions.append((step, reset, previous))
        action = (step + np.arange(self.length, dtype=np.float32))[:, None] / 100 + np.zeros(2, np.float32)
        self.answer = Answer(step, 1, action, {"noise": np.full(2, step + 1, np.float32)})

    def wait_answer(self, step, timeout):
        answer, self.answer = self.answer, None
        return answer

    def forget(self):
        self.answer = None


def actor(env, *, controller=None, episodes=1, mode="collect", **directive):
    """Run until so many episodes have ended; (client, their reports, status)."""
    client, reports, status = FakeClient(env.spec, mode, **{"intervene": True, **directive}), [], ActorStatus()

    def on_episode(report):
        reports.append(report)
        if len(reports) == episodes:
            client.stop()

    run_actor(env, controller or RandomPolicy(env.spec, 0), client, seed=0, on_episode=on_episode, status=status)
    return client, reports, status


def test_the_policy_drives_until_the_device_is_touched_and_after_it_is_let_go():
    env = build(teleop=Hand(rows=(1, 2)))
    env.reset(0, intervene=True)
    steps = [env.step(RIGHT) for _ in range(4)]
    assert [step.intervened for step in steps] == [False, True, True, False]
    assert [step.executed.tolist() for step in steps] == [[1, 0], [-1, 0], [-1, 0], [1, 0]]


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
    source = Chunks(length=8)
    env = build(SafeRobot(FakeRobot()), teleop=Hand(rows=(3, 4, 5)), max_steps=12)
    client, (report,), status = actor(env, controller=RemotePolicy(source, deadline=0.0))
    (episode,) = client.episodes
    human = [row in (3, 4, 5) for row in range(12)]
    assert episode.intervened.tolist() == human
    assert episode.chunk_start.tolist() == [row in (0, 7) for row in range(12)]
    assert source.questions == [(0, True, None), (7, True, [0, 0])]  # row 6: the hand has let go, the robot holds
    expected = [0, 0.01, 0.02, -1, -1, -1, 0, 0.07, 0.08, 0.09, 0.10, 0.11]
    np.testing.assert_allclose(episode.action[:, 0], expected, atol=1e-6)
    proposed = episode.extras["policy_action"]
    assert proposed.dtype == np.float32
    np.testing.assert_allclose(proposed[:, 0], [*expected[:3], 0.03, *expected[4:]], atol=1e-6)  # what was dropped
    assert (status.takeovers, status.assisted, status.unassisted) == (1, "0/1", "0/0")
    assert report["intervened"] == 3 / 12
    said = [message for message in caplog.messages if "operator" in message]
    assert said == [
        f"{episode.episode}, row 3: the operator takes over",
        f"{episode.episode}, row 6: the operator hands back after 3 rows",
    ]


def test_a_takeover_and_both_actions_reach_the_store(tmp_path):
    env = build(teleop=Hand(rows=(3, 4)), max_steps=8)
    client, _, _ = actor(env, controller=RemotePolicy(Chunks(length=4), deadline=0.0))
    store = Store.create(tmp_path / "store", env.spec, {"online": 200})
    store.direct({"into": "online", "phase": "practise"})
    store.hello(client.actor, "outbox", client.session, [])
    for seq, record in enumerate(client.records):
        store.stage(client.session, seq, decode_records(b"".join(encode_record(seq, record)))[0][1])
    store.commit()
    rows = Layout(env.spec, 200).steps(store.folder / "online")[:8]
    (episode,) = client.episodes
    assert (rows["flags"] & INTERVENED > 0).tolist() == [row in (3, 4) for row in range(8)]
    assert (rows["flags"] & CHUNK_START > 0).tolist() == [row in (0, 6) for row in range(8)]
    np.testing.assert_array_equal(rows["action"], episode.action)
    np.testing.assert_array_equal(rows["extras.policy_action"], episode.extras["policy_action"])
    assert (rows["action"] != rows["extras.policy_action"]).any(axis=1).tolist() == [row == 3 for row in range(8)]
    store.close()


def test_a_decision_that_a_takeover_drops_was_none_and_leaves_no_extras_behind():
    env = build(teleop=Hand(rows=(2,)), max_steps=6)
    env.spec.extras["noise"] = Feature((2,))
    client, _, _ = actor(env, controller=RemotePolicy(Chunks(length=2), deadline=0.0))
    (episode,) = client.episodes
    assert episode.chunk_start.tolist() == [True, False, False, False, True, False]
    assert episode.extras["noise"][:, 0].tolist() == [1, 1, 0, 0, 5, 5]


def test_the_last_episode_of_a_takeover_does_not_reach_into_the_next_one():
    source = Chunks()
    env = build(teleop=Hand(rows=(4,)), max_steps=5)
    client, _, status = actor(env, controller=RemotePolicy(source, deadline=0.0), episodes=2)
    assert [question[:2] for question in source.questions] == [(0, True), (0, True)]
    assert [episode.intervened.tolist() for episode in client.episodes] == [[False] * 4 + [True]] * 2
    assert status.takeovers == 2


def test_a_human_who_drives_while_the_policy_is_silent_is_shown_and_not_cut_off(monkeypatch):
    monkeypatch.setattr("serl_client.runner.SILENCE", 0.3)
    drivers = []

    class Mute(RandomPolicy):
        def act(self, observation, *, step, previous_action, reset):
            return None if step else super().act(observation, step=0, previous_action=None, reset=reset)

    class Watched(Hand):
        def read(self):
            drivers.append(status.driver)
            return super().read()

    env = build(teleop=Watched(rows=range(2, 15)), max_steps=15, clock="real", fps=500)
    status = ActorStatus()
    client = FakeClient(env.spec, intervene=True)
    run_actor(env, Mute(env.spec, 0), client, seed=0, on_episode=client.stop, status=status)
    assert len(client.episodes[0]) == 15
    assert drivers[1:] == ["HELD", "HELD", *["HUMAN"] * 12]


def test_what_a_policy_proposes_beyond_reason_is_not_recorded():
    env = build(SafeRobot(FakeRobot()), teleop=Hand())
    env.reset(0, intervene=True)
    assert env.step(np.array([3, 0], np.float32)).extras["policy_action"].tolist() == [3, 0]
    assert env.step(np.array([np.nan, 0], np.float32)).extras["policy_action"].tolist() == [0, 0]
    assert env.step(None).extras["policy_action"].tolist() == [0, 0]


def test_success_with_and_without_help_is_counted_apart_and_follows_late_verdicts():
    class EverySecondEpisode(Hand):
        def read(self):
            return LEFT if len(self.demonstrates) % 2 else None

    env = build(teleop=EverySecondEpisode())
    client, status, counts = FakeClient(env.spec, intervene=True), ActorStatus(), []

    def on_episode(report):
        counts.append((status.unassisted, status.assisted))
        if len(counts) == 5:
            client.stop()

    # Three looks an episode: after the reset, where a verdict corrects the one before, and after two rows.
    presses = {2: "success", 5: "success", 6: "failure", 8: "discard", 11: "success", 12: "discard", 14: "failure"}
    keys = Keys({look: [key] for look, key in presses.items()})
    run_actor(env, RandomPolicy(env.spec, 0), client, seed=0, operator=keys, on_episode=on_episode, status=status)
    assert counts == [("0/0", "1/1"), ("1/1", "1/1"), ("0/1", "1/1"), ("1/2", "1/1"), ("0/1", "1/2")]
    assert status.takeovers == 3


# ---- the scripted operator


def frozen(env, seed, **reset):
    """An episode of a policy that never moves; its steps."""
    env.reset(seed, **reset)
    steps = [env.step(np.zeros(env.spec.action.shape, np.float32))]
    while not (steps[-1].terminated or steps[-1].truncated):
        steps.append(env.step(np.zeros(env.spec.action.shape, np.float32)))
    return steps


def runs(flags):
    """The lengths of the runs of equal flags, [(flag, length), ...]."""
    found = []
    for flag in flags:
        found = [*found[:-1], (flag, found[-1][1] + 1)] if found and found[-1][0] == flag else [*found, (flag, 1)]
    return found


def test_the_scripted_operator_takes_over_where_the_policy_is_stuck_and_hands_back_when_it_goes_on():
    env = fake.make(max_steps=60, noise=0.0, clock="simulated", takeover_after=6, handback_after=3)
    far = next(seed for seed in range(99) if np.linalg.norm(env.reset(seed)["observation.state"][4:]) > 1)
    steps = frozen(env, far, intervene=True)
    lengths = runs([step.intervened for step in steps])
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
        config = OmegaConf.create({"task": OmegaConf.load(TASKS / f"{name}.yaml")})
        with instantiate(config.task.env)(takeover_after=3, handback_after=2) as env:
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


def test_help_on_the_arm_brings_a_policy_that_does_nothing_to_success():
    pytest.importorskip("mujoco")
    from robot_infra.robots import sim_arm

    env = sim_arm.make(max_steps=60, noise=0.2, clock="simulated")
    episodes = [frozen(env, seed, intervene=True) for seed in range(10)]
    assert sum(bool(steps[-1].success) for steps in episodes) >= 9
    assert 0.2 < np.mean([step.intervened for steps in episodes for step in steps]) < 0.8
    again = frozen(env, 9, intervene=True)
    assert [step.executed.tolist() for step in again] == [step.executed.tolist() for step in episodes[9]]


def test_a_rescuer_that_demonstrates_drives_every_row():
    rescuer = Rescuer(lambda: np.zeros(2), lambda: 1.0, noise=0.3, margin=0.1, takeover_after=2, handback_after=2)
    rescuer.reset(3, demonstrate=True)
    drawn = [rescuer.read() for _ in range(9)]
    assert not any(action is None for action in drawn)
    rescuer.reset(3, demonstrate=False)
    helped = [rescuer.read() for _ in range(9)]
    assert [action is None for action in helped] == [True] * 2 + [False] * 7
    np.testing.assert_array_equal(helped[2:], drawn[:7])


# ---- a person at the terminal


@pytest.fixture
def terminal():
    person, program = os.openpty()
    yield person, program
    os.close(person)
    os.close(program)


@pytest.fixture
def at_keys(terminal, monkeypatch):
    """(press(bytes), teleop, pass_time(seconds)) of a robot with x, y, z and gripper."""
    clock = type("Clock", (), {"now": 100.0, "monotonic": lambda self: self.now})()
    monkeypatch.setattr(keyboard_module, "time", clock)
    action = Feature((4,), names=("x", "y", "z", "gripper"), low=np.array(-1), high=np.array(1))
    with Keyboard(terminal[1]) as keyboard:
        teleop = KeyboardTeleop(keyboard, action)
        teleop.reset(0, demonstrate=False)

        def pass_time(seconds):
            clock.now += seconds

        yield (lambda typed: os.write(terminal[0], typed)), teleop, pass_time


def test_what_was_pressed_while_nobody_read_moves_nothing(at_keys):
    press, teleop, pass_time = at_keys
    teleop.reset(0, demonstrate=False)
    press(b"ig")
    pass_time(5)  # on its way home
    assert teleop.read() is None
    press(b"i")
    assert teleop.read().tolist() == [0.5, 0, 0, 0]
    press(b"ktt")
    pass_time(5)  # a pause, in which the toggle counts
    assert teleop.read().tolist() == [0, 0, 0, 0]


def test_a_motion_key_takes_over_moves_for_a_moment_and_then_the_robot_holds(at_keys):
    press, teleop, pass_time = at_keys
    assert teleop.read() is None
    press(b"i")
    assert teleop.read().tolist() == [0.5, 0, 0, 0]
    pass_time(0.1)
    press(b"l")
    assert teleop.read().tolist() == [0.5, -0.5, 0, 0]
    pass_time(0.1)
    assert teleop.read().tolist() == [0, -0.5, 0, 0]
    pass_time(0.1)
    assert teleop.read().tolist() == [0, 0, 0, 0]
    for _ in range(9):  # a held key comes again and again
        press(b"\x1b[B")
        assert teleop.read().tolist() == [-0.5, 0, 0, 0]
        pass_time(0.033)


def test_a_key_toggles_the_takeover_and_the_gripper_keeps_what_it_was_told(at_keys):
    press, teleop, pass_time = at_keys
    press(b"t")
    assert teleop.read().tolist() == [0, 0, 0, 0]
    press(b"gu")
    assert teleop.read().tolist() == [0, 0, 0.5, 1]
    pass_time(9)
    assert teleop.read().tolist() == [0, 0, 0, 1]
    press(b"h")
    assert teleop.read().tolist() == [0, 0, 0, -1]
    press(b"t")
    assert teleop.read() is None
    press(b"o")
    assert teleop.read().tolist() == [0, 0, -0.5, 0]
    teleop.reset(1, demonstrate=False)
    assert teleop.read() is None
    press(b"i")
    teleop.reset(1, demonstrate=True)  # a demonstration begins at rest
    assert teleop.read().tolist() == [0, 0, 0, 0]


def test_a_person_at_the_terminal_takes_over_judges_and_hands_back(terminal):
    """The whole way: one terminal, keys for the robot and keys for the verdict."""
    person, program = terminal
    with Keyboard(program) as keys:
        robot = FakeRobot()
        env = build(robot, teleop=KeyboardTeleop(keys, robot.action), max_steps=12)
        script = {3: b"it", 4: b"t", 5: b"j", 7: b"t", 9: b"s"}

        step, rows = env.step, []

        def typing(action):
            os.write(person, script.get(len(rows), b""))
            rows.append(action)
            return step(action)

        env.step = typing
        client, status = FakeClient(env.spec, intervene=True), ActorStatus()
        controller = RandomPolicy(env.spec, 0)
        run_actor(env, controller, client, seed=0, operator=keys, on_episode=client.stop, status=status)
    (episode,) = client.episodes
    assert episode.intervened.tolist() == [row in (4, 5, 6) for row in range(10)]  # row 3: taken and given back
    assert client.outcomes == [Outcome(episode.episode, True, judged_by="operator")]
    assert (status.takeovers, status.assisted) == (1, "1/1")


@pytest.mark.parametrize(
    ("word", "clock", "match"),
    [
        ("gamepad", "real", "gamepad is unknown; use scripted or keyboard"),
        ("keyboard", "simulated", "needs task.env.clock=real"),
        ("keyboard", "real", "needs a terminal"),
    ],
)
def test_an_operator_that_cannot_be_is_refused_in_one_sentence(word, clock, match, monkeypatch):
    monkeypatch.setattr(keyboard_module, "_in_front", lambda descriptor: False)
    with pytest.raises(ConfigError, match=match):
        fake.make(max_steps=9, noise=0.0, clock=clock, operator=word)


def test_a_keyboard_refuses_a_robot_whose_action_it_cannot_give(terminal, monkeypatch):
    monkeypatch.setattr(keyboard_module, "Keyboard", lambda: Keyboard(terminal[1]))
    bounds = {"low": np.array(-1), "high": np.array(1)}
    for action, named in (
        (Feature((2,), names=("x", "wrist"), **bounds), "x, wrist"),
        (Feature((6,), **bounds), "6 entries without names"),
    ):
        with pytest.raises(ConfigError, match=re.escape(named)):
            chosen("keyboard", Hand(), action, clock="real")
    teleop, keys = chosen("keyboard", Hand(), FakeRobot.action, clock="real")
    assert isinstance(teleop, KeyboardTeleop)
    assert keys.has_terminal
    env = build(teleop=teleop, operator=keys)
    env.close()
    assert not keys.has_terminal
