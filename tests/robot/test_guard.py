"""The guard of an arm as a process: who may own the arm, and what it does when somebody is killed, stopped or cut off.

The arm's driver writes every call into a pipe, which the tests read.
"""

import os
import random
import signal
import socket
import subprocess
import sys
import time
from itertools import pairwise

import numpy as np
import pytest
from serl_client.controller import RandomPolicy
from serl_client.errors import ConfigError, RobotFault
from serl_client.signals import interrupted_by_signals
from serl_client.spec import Feature
from serl_client.status import ActorStatus
from serl_client.way_home import BEGIN

from robot_infra.drivers.owner import owned
from robot_infra.guard import link
from robot_infra.guard.channel import Shared
from robot_infra.guard.robot import GuardedRobot
from robot_infra.interfaces import Hand
from robot_infra.tasks.simulated import Simulated
from robot_infra.teleop.hands import Hands
from tests.shared.actors import FakeClient, Keys, run
from tests.shared.arms import DRIVER, FPS, HOME, LIMITS, Log, guarded, move_on, points
from tests.shared.robots import Scripted, build, from_yaml, play

UP = np.array([0.1, -0.1], np.float32)
TICKS = 20  # of one period: 100 / FPS


@pytest.fixture
def log(tmp_path, closes):
    return closes(Log(tmp_path))


@pytest.fixture
def make(log, closes):
    """make(**changes) -> a guarded arm, which is closed at the end."""
    return lambda **changes: closes(guarded(log, **changes))


@pytest.fixture
def arm(make):
    """A guarded arm that somebody has said ready for."""
    robot = make()
    robot.recover()
    return robot


def changes(points):
    return sum(a != b for a, b in pairwise(points))


def moved(arm, log, rows):
    """Make the arm follow so many targets, as a control loop does; it is still on its way to the last one."""
    for row in range(rows):
        arm.command(UP * (row + 1))
        log.more(TICKS if row < rows - 1 else 5)


# -- who may move the arm


def test_nothing_moves_before_somebody_has_said_ready(make, log):
    robot = make()
    assert robot.action.units == robot.features["observation.state"].units == ("rad", "rad")
    assert robot.observe().values["observation.state"].tolist() == [0, 0]
    for move in (lambda: robot.home(0), lambda: robot.command(UP)):
        with pytest.raises(RobotFault, match="a person"):
            move()
    robot.recover()
    assert [said.call for said in log.read()[:2]] == ["made", "recover"], "nothing was sent before"
    assert set(points(log.more(10))) == {(0, 0)}
    robot.command(UP)
    log.until(lambda calls: points(calls)[-1] == pytest.approx((0.1, -0.1)))
    robot.close()
    assert log.until(lambda calls: calls[-1].call) == "close"


@pytest.mark.slow
def test_an_arm_has_one_owner_by_whatever_name_and_is_free_when_its_guard_was_killed(make, arm, log, tmp_path):
    (tmp_path / "by-id").symlink_to(log.path)
    process = arm.guard.process
    with pytest.raises(ConfigError, match=rf"is in use by process {process}: stop"):
        make(address=str(tmp_path / "by-id"))
    assert len(log.of("made")) == 1, "the driver was not even made"
    os.kill(process, signal.SIGKILL)
    with pytest.raises(RobotFault):
        arm.observe()
    with owned(str(tmp_path / "by-id")):
        pass


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"limits": None}, r"no limits for shoulder, elbow.*write in the task's yaml.*range: \[LOW, HIGH\]"),
        ({"options": {"hertz": 3}}, "task.env.options: give the driver .* what it takes: .*hertz"),
        ({"options": {"log": "/nowhere"}}, "FileNotFoundError"),
    ],
    ids=["no limits", "a wrong option", "a driver that fails"],
)
def test_what_a_guard_cannot_guard_is_one_sentence(make, changes, said):
    with pytest.raises(ConfigError, match=said):
        make(**changes)


def test_a_guard_that_does_not_begin_has_a_driver_that_hangs(make, monkeypatch):
    monkeypatch.setattr(link, "STARTING", 0.01)
    with pytest.raises(ConfigError, match=r"has not begun for 0\.01 s: its driver hangs \(tools/check_robot.py says"):
        make()


@pytest.mark.parametrize("words", [{"space": "ee_delta"}, {"stroke": 0.1}, {"fps": 200}, {"home_speed": 0}], ids=str)
def test_words_that_do_not_fit_each_other_are_refused_before_there_is_a_process(words):
    with pytest.raises(ConfigError, match=next(iter(words))):
        GuardedRobot(DRIVER, **{"address": "a", "fps": FPS, "limits": LIMITS, "home": HOME, **words})


def test_a_robot_without_a_guard_is_refused_unless_it_is_a_simulation():
    class Bare(Simulated):
        is_simulated = False

    for clock in ("real", "simulated"):
        with pytest.raises(ConfigError, match="Bare has no guard"):
            build(Bare(), clock=clock)
    with pytest.raises(ConfigError, match="clock=real"):
        from_yaml("fake", guard=True)


# -- what it lets through


def test_an_action_is_answered_by_what_the_guard_accepted(make, log):
    robot = make(space="joint_delta", stroke=[0.5, 0.1])
    robot.recover()
    np.testing.assert_allclose(robot.command(np.array([1, 1], np.float32)), [0.4, 1], rtol=1e-6)  # the jump: 0.2
    np.testing.assert_array_equal(robot.hold_action(), [0, 0])
    log.until(lambda calls: points(calls)[-1] == pytest.approx((0.2, 0.1)))
    np.testing.assert_allclose(robot.command(np.array([np.nan, 1], np.float32)), [0, 0], atol=1e-6)
    np.testing.assert_allclose(robot.command(np.array([0, -np.inf], np.float32)), [0, 0], atol=1e-6)
    assert robot.counts == {"limited": 1, "refused": 2}
    with pytest.raises(ValueError, match="action"):
        robot.command(np.zeros(3, np.float32))
    log.until(lambda calls: np.allclose(calls[-1].at, [0.2, 0.1], atol=1e-3))
    np.testing.assert_allclose(robot.observe().values["observation.state"], [0.2, 0.1], atol=1e-2)
    robot.close()
    robot.close()


def test_targets_are_those_of_the_action_space_and_a_stop_comes_twice(arm, log):
    assert (arm.action.low.tolist(), arm.action.names) == ([-1, -2], ("shoulder", "elbow"))
    for way in (UP, -UP) * 10:  # until it is stopped on its way: on a busy machine it may have arrived before
        before = arm.hold_action()
        np.testing.assert_allclose(arm.command(way), way)
        np.testing.assert_allclose(arm.hold_action(), way)
        log.more(5)
        arm.stop()
        arm.stop()
        still = arm.hold_action()
        if not np.allclose(still, way, atol=1e-3):
            break
    low, high = np.sort([before, way], axis=0)
    assert ((low < still) & (still < high)).all()
    later = np.array(points(log.more(40)))
    np.testing.assert_allclose(later, np.broadcast_to(still, later.shape), atol=1e-6)


class Straight(RandomPolicy):
    """Turns the shoulder as far as it may."""

    def act(self, observation, **row):
        return np.array([1, 0], np.float32)


@pytest.mark.slow
def test_each_fault_of_the_arm_cuts_an_episode_off_is_told_and_after_ready_the_run_goes_on(make, log):
    """The driver says the first; the second is an arm that is stuck."""
    limits = {name: {**limit, "tracking": 0.05} for name, limit in LIMITS.items()}
    robot = make(options={"walls": ["collision", "stuck"]}, limits=limits, home={"shoulder": 0.02, "elbow": 0.0})
    status, keys, said = ActorStatus(), Keys({}), []
    status.warn = said.append
    keys.poll = lambda: ["ready"] * (status.driver == "FAULT")
    with build(robot, fps=FPS, clock="real", max_steps=4) as env:
        client = FakeClient(env.spec, intervene=False)
        client.wait = log.wait
        reports = run(env, client, Straight(env.spec, 0), episodes=3, operator=keys, status=status)
    assert [text.partition(":")[0] for text in said] == ["ready", "collision", "tracking"]
    assert [report["steps"] < 4 for report in reports] == [True, True, False]
    assert len(log.of("recover")) == 3


class Hesitant(Scripted):
    """Says ready after a fault, and moves the shoulder two seconds after they were waited for."""

    def __init__(self, status):
        super().__init__(moves=frozenset(HOME))
        self.status, self.waited = status, []

    def read(self):
        if self.status.driver == BEGIN:
            self.waited.append(time.monotonic())
        begins = self.waited and time.monotonic() > self.waited[0] + 2.0
        return Hand({"shoulder": 1.0} if begins else {}, words=["ready"] * (self.status.driver == "FAULT"))


@pytest.mark.slow
def test_an_arm_at_its_start_waits_for_the_first_motion_of_a_demonstration_and_does_not_miss_its_actor(make, log):
    robot, status = make(space="joint_delta", stroke=0.02), ActorStatus()
    hands = Hands([device := Hesitant(status)], robot.action, robot.space)
    with build(robot, teleop=hands, fps=FPS, clock="real", max_steps=5) as env:
        client = FakeClient(env.spec, "teleop")
        client.wait = log.wait
        run(env, client, episodes=1, operator=hands, status=status)
    (episode,) = client.episodes
    assert (len(episode), episode.gap.any(), [said.discard for said in client.outcomes]) == (5, False, [False])
    assert episode.action[:, 0].max() == pytest.approx(0.5)
    assert len(log.of("recover")) == 1, "nothing was a fault meanwhile"
    assert device.waited[-1] - device.waited[0] > 1.9


# -- processes that are killed, stopped, cut off


def check_stands(calls, target=None):
    """After the first calls the set point has stood still: a target that came before is not even reached."""
    seen = points(calls)
    assert changes(seen) <= 2
    assert changes(seen[2:]) == 0
    assert target is None or pytest.approx(target) not in seen


WAYS = {
    "kill": r"was killed by SIGKILL", "stop": "has not answered for 1 s", "term": "says: it was ended by SIGTERM",
    "bug": "says: it failed: KeyError", "cut": "its connection was cut|says: its actor has gone",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_an_arm_whose_guard_fails_stands_still_until_ready_and_its_actor_says_why(make, log, way):
    rows = random.Random(way).randrange(2, 6)
    bug = {"bug": TICKS * rows} if way == "bug" else {}
    robot = make(options=bug)
    robot.recover()
    process = robot.guard.process
    if way != "bug":
        moved(robot, log, rows)
    before = len(log.read())
    if way == "cut":
        robot.guard._socket.shutdown(socket.SHUT_RDWR)
    elif way != "bug":
        os.kill(process, {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "term": signal.SIGTERM}[way])
    with pytest.raises(RobotFault, match=WAYS[way]) as fault:
        move_on(robot, log, UP)
    assert fault.value.kind == "guard"
    if way == "stop":
        os.kill(process, signal.SIGCONT)
    robot.stop()
    with pytest.raises(RobotFault, match=WAYS[way]):
        robot.command(UP)
    assert not robot.guard.is_open, "nobody connects again on their own"
    if way != "kill":
        log.until(lambda calls: calls[-1].call == "close")
    if way == "bug":
        before = [i for i, said in enumerate(log.calls) if said.call == "write"][TICKS * rows - 1]
    check_stands(log.read()[before:], target=None if way == "bug" else UP * rows)


@pytest.mark.slow
def test_after_the_word_of_a_person_another_guard_holds_the_arm_where_it_is_and_then_moves(make, log):
    robot = make()
    robot.recover()
    for number in (1, 2):
        moved(robot, log, 1)
        process = robot.guard.process
        os.kill(process, signal.SIGKILL if number == 1 else signal.SIGSTOP)
        with pytest.raises(RobotFault):
            move_on(robot, log, UP)
        robot.recover()
        made = log.until(
            lambda calls, number=number: [i for i, said in enumerate(calls) if said.call == "made"][number:]
        )
        log.more(10)
        assert set(points(log.calls[made[0] :])) == {(0, 0)}
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)  # one that was stopped would own the arm for ever
        robot.command(UP)
        log.until(lambda calls: points(calls)[-1] == pytest.approx((0.1, -0.1)))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["kill", "stop"])
def test_an_arm_whose_actor_is_killed_or_stopped_stands_still(log, how):
    row = random.Random(how).randrange(2, 6)
    words = [sys.executable, "-m", "tests.shared.guarded_actor", log.path, str(row), how]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as actor:
        try:
            at = float(actor.stdout.readline())
            if how == "kill":
                log.until(lambda calls: calls[-1].call == "close")
                check_stands([said for said in log.calls if said.time > at])
                return
            log.until(lambda calls: len([said for said in calls if said.time > at]) > 5 * TICKS)
            still = points(log.calls)[-1]
            assert still == pytest.approx(UP * row), "the last target, and none after it"
            os.kill(actor.pid, signal.SIGCONT)
            told = [actor.stdout.readline() for _ in range(3)]
            assert all(line.startswith("guard: no sign of life from the actor for") for line in told)
            log.until(lambda calls: calls[-1].call == "close")
            seen = points(log.calls)
            np.testing.assert_allclose(
                seen[seen.index(still) :], np.tile(still, (len(seen) - seen.index(still), 1)), atol=1e-6
            )
        finally:
            actor.kill()


@pytest.mark.parametrize("way", ["exception", "SIGTERM"])
def test_an_actor_that_ends_says_hold_and_gives_the_arm_back(make, log, way):
    def act():
        with interrupted_by_signals(), build(make(), fps=FPS, clock="real") as env:
            env.recover()
            moved(env.robot, log, random.Random(way).randrange(1, 4))
            rows.append(len(log.read()))
            if way == "SIGTERM":
                os.kill(os.getpid(), signal.SIGTERM)
            raise OSError("the program fails")

    rows = []
    with pytest.raises(KeyboardInterrupt if way == "SIGTERM" else OSError):
        act()
    assert log.until(lambda calls: calls[-1].call) == "close"
    check_stands(log.calls[rows[0] :])


# -- what else the arm tells


def test_what_was_overwritten_while_it_was_read_is_a_fault_and_never_a_mixture():
    features = {"observation.images.top": Feature((4, 5, 3), "uint8"), "scene": Feature((2,), "float64")}
    written = Shared(features)
    seen = Shared(features, os.dup(written.descriptor))
    arrays = {"observation.images.top": np.full((4, 5, 3), 7, np.uint8), "scene": np.array([0.25, -1])}
    sequence = written.write(arrays)
    for name, array in seen.read(sequence).items():
        np.testing.assert_array_equal(array, arrays[name])
    written.write(arrays)
    with pytest.raises(RobotFault, match="overwritten"):
        seen.read(sequence)


@pytest.mark.slow
def test_a_simulation_behind_a_guard_is_the_same_task():
    with from_yaml("fake") as plain, from_yaml("fake", clock="real", guard=True, noise=0.0, fps=20.0) as env:
        assert env.spec.observation.keys() == plain.spec.observation.keys()
        env.spec.action.check("action", env.robot.hold_action())
        steps = play(env, 3, teleop=True)
        assert (steps[-1].success, steps[-1].reward) == (True, 1.0)
        assert env.robot.counts["refused"] == 0
