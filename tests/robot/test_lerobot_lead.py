"""An SO-101 whose leader arm follows, both on simulated servos: torque, set points, a hand."""

import json
from contextlib import closing, contextmanager

import numpy as np
import pytest
from serl_client import clock
from serl_client.errors import ConfigError, RobotFault

from robot_infra.drivers.lerobot import LerobotArm
from robot_infra.guard.lead import FOLLOWS, LIMP, TOUCH, TOUCHED
from robot_infra.guard.robot import GuardedRobot
from robot_infra.interfaces import Hand
from robot_infra.sim.feetech import ENDS, FeetechBus
from robot_infra.teleop.hands import Hands
from robot_infra.teleop.leader import Leader
from serl_launcher.config import composed
from tests.shared.arms import say_ready
from tests.shared.common import until
from tests.shared.plugins import publish
from tests.shared.robots import Scripted
from tools.checks.common import CONFIG

pytest.importorskip("lerobot", reason="the extra `robots` is not installed: . examples/install.sh --extra robots")
pytest.importorskip("scservo_sdk", reason="the extra `robots` is not installed: . examples/install.sh --extra robots")
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("patient_drivers")]  # its import of torch takes seconds

FPS, HZ = 10.0, 50.0
MOST = 100 / HZ + 0.2  # of a set point, percent, and what a goal is rounded by
WAY = ENDS[0][1] - ENDS[0][0]  # steps of the shoulder's range, which are 200 percent
TOGGLE = Hand(words=["toggle"])


@pytest.fixture
def buses(tmp_path, clock):
    """Follower and leader, whose servos obey whatever goal they remember, and turn as the test's clock passes."""
    with FeetechBus(obeys_old_goals=True) as follower, FeetechBus(obeys_old_goals=True) as leader:
        (tmp_path / "me.json").write_text(json.dumps(follower.calibration()))
        yield follower, leader


def torques(bus):
    return [servo.has_torque for servo in bus.servos.values()]


def test_its_motors_come_on_where_they_stand_obey_set_points_and_go_limp(buses, tmp_path, clock):
    follower, leader = buses
    me = {"id": "me", "calibration_dir": str(tmp_path), "use_degrees": False}
    robot, other = {"type": "so101_follower", **me}, {"type": "so101_leader", "port": leader.path, **me}
    arm = LerobotArm(follower.path, robot=robot, leader=other, leader_follows=True)
    leader.place({1: 1000, 3: 2500})
    stood = leader.positions
    say_ready(arm)
    assert arm.leads
    assert not any(torques(leader)), "nobody has asked it to follow"
    for _ in range(2):
        np.testing.assert_allclose(held := arm.enable_leader(), arm.read_leader(), atol=0.1)
    assert all(torques(leader))
    assert {number: servo.goals[0][1] for number, servo in leader.servos.items()} == pytest.approx(stood, abs=1)
    arm.lead(held + np.array([10.0, 0, 0, 0, 0, 0]))
    until(lambda: len(leader.servos[1].goals) == 2)
    clock.advance(1)
    assert arm.read_leader()[0] == pytest.approx(held[0] + 10, abs=0.2)
    np.testing.assert_allclose(arm.sense()["leader"], arm.read_leader(), atol=0.1)
    arm.lead(None)
    assert not any(torques(leader))
    leader.place({2: ENDS[1][0] - 100})
    with pytest.raises(RobotFault, match="shoulder_lift is at step 800, and its calibration says 900 to 3200"):
        arm.enable_leader()
    assert not any(torques(leader))
    arm.close()
    assert all(torques(follower))


def test_a_leader_whose_motors_nobody_can_switch_on_safely_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_LEROBOT_HOME", str(tmp_path))
    monkeypatch.syspath_prepend(publish(tmp_path / "site"))
    for leader in (None, {"type": "x_leader"}):
        with pytest.raises(ConfigError, match=r"options.leader_follows: there is no leader arm whose motors lerobot"):
            LerobotArm("", robot={"type": "x_robot"}, leader=leader, leader_follows=True)


class Ticked(LerobotArm):
    """An arm whose guard runs in this process, and for which time passes with each reading: one tick of its guard."""

    is_simulated = True

    def read(self):
        clock.sleep(1 / HZ)
        return super().read()


class Person:
    """Somebody with a hand at the leader's shoulder, which is at step `at`; None: it has let go."""

    def __init__(self, bus):
        self._bus, self.at = bus, None

    def hold(self):
        if self.at is not None:
            self._bus.place({1: self.at})


@contextmanager
def practice(buses, folder, *words):
    """(robot, hands, toggles): somebody has said ready to an SO-101 with a leader arm, and an episode begins."""
    follower, leader = buses
    words = [
        "actor=true", "task=so101", "task.env.cameras=null", "task.id=me", "task.leader_id=me",
        f"task.port={follower.path}", f"task.leader_port={leader.path}", f"task.calibration_dir={folder}", *words,
    ]  # fmt: skip
    task = composed(CONFIG, words).task.env
    robot = GuardedRobot(
        f"{__name__}.Ticked", address=task.address, fps=FPS, servo_hz=HZ, limits=task.limits, home=task.home,
        options=task.options, process=False,
    )  # fmt: skip
    with closing(robot):
        robot.recover()
        hands = Hands([Leader(robot), toggles := Scripted()], robot.action, robot.space)
        hands.reset(0, demonstrate=False)
        robot.observe()
        yield robot, hands, toggles


def go(robot, hands, way, until):
    """Make control steps until a condition holds, in which the policy turns the shoulder by `way` percent."""
    rows = []
    for _ in range(200):
        target = np.array(robot.guard.latest.target)
        wanted = hands.read(target.astype(np.float32))
        if until(wanted):
            return wanted, np.array(rows)
        action = np.array(target, np.float32) if wanted is None else wanted
        action[0] += way if wanted is None else 0
        robot.command(action)
        rows.append(robot.guard.latest.target[0] - target[0])
        robot.observe()
    pytest.fail("never")


def steps_of(bus, begin=0):
    """The largest step between two goals of the shoulder since the one of this number, percent."""
    return np.abs(np.diff([goal for _, goal in bus.servos[1].goals][begin:])).max() / WAY * 200


def test_it_follows_is_taken_by_a_touch_without_a_jump_and_follows_again_after_the_toggle(buses, tmp_path, clock):
    follower, leader = buses
    person = Person(leader)
    clock.passed = person.hold
    leader.place({1: ENDS[0][0] + 300, 2: ENDS[1][1] - 300})
    with practice(buses, tmp_path, "task.env.options.leader_follows=true") as (robot, hands, toggles):
        go(robot, hands, 1, lambda _: leader.positions[1] == pytest.approx(follower.positions[1], abs=60))
        assert all(torques(leader))
        assert steps_of(leader) <= MOST
        assert robot.leader == FOLLOWS

        person.at = leader.positions[1]
        wanted, _ = go(robot, hands, 2, lambda wanted: wanted is not None)
        assert abs(wanted[0] - robot.guard.latest.target[0]) <= TOUCH * 30 + 100 / FPS
        go(robot, hands, 0, lambda _: not any(torques(leader)))
        assert robot.leader == LIMP
        person.at -= 400
        _, rows = go(robot, hands, 0, lambda _: follower.positions[1] == pytest.approx(person.at, abs=10))
        assert np.abs(rows).max() <= 100 / FPS + 1e-3, "the limits hold for a person, too"

        stood, before, person.at = leader.positions, len(leader.servos[1].goals), None
        toggles.hands.append(TOGGLE)
        go(robot, hands, 0, lambda wanted: wanted is None)
        go(robot, hands, 1, lambda _: len(leader.servos[1].goals) > before + 30)
        assert leader.servos[1].goals[before][1] == pytest.approx(stood[1], abs=1), "from where it is"
        assert steps_of(leader, before) <= MOST

        clock.advance(1)  # nobody serves it any more, as if the guard had died
        stood = leader.positions
        clock.advance(1)
        assert (all(torques(leader)), leader.positions) == (True, stood), "its motors hold it"
    assert (any(torques(leader)), all(torques(follower))) == (False, True), "the actor has ended"


def test_before_a_demonstration_it_follows_until_a_touch_and_stays_limp_in_that_hand(buses, tmp_path, clock):
    follower, leader = buses
    person = Person(leader)
    clock.passed = person.hold
    leader.place({1: ENDS[0][0] + 300})
    with practice(buses, tmp_path, "task.env.options.leader_follows=true") as (robot, hands, toggles):
        toggles.hands.append(TOGGLE)  # the demonstration before was driven
        go(robot, hands, 0, lambda wanted: wanted is not None)
        hands.poll()
        hands.forget()
        go(robot, hands, 0, lambda _: leader.positions[1] == pytest.approx(follower.positions[1], abs=60))
        person.at = leader.positions[1] + 600
        while "moved" not in hands.poll():
            robot.command(robot.hold_action())
            robot.observe()
        assert robot.leader == TOUCHED
        go(robot, hands, 0, lambda _: not any(torques(leader)))
        goals = len(leader.servos[1].goals)
        hands.reset(0, demonstrate=True)
        person.at -= 200
        go(robot, hands, 0, lambda wanted: wanted is not None)
        assert len(leader.servos[1].goals) == goals, "its motors do not come on in the hand"


def test_unless_it_is_told_to_follow_its_torque_never_comes_on(buses, tmp_path):
    follower, leader = buses
    with practice(buses, tmp_path) as (robot, hands, toggles):
        for count in (50, 100):
            go(robot, hands, 1, lambda _, count=count: len(follower.servos[1].goals) > count)
            toggles.hands.append(TOGGLE)
    assert [len(servo.goals) for servo in leader.servos.values()] == [0] * 6
    assert [(servo.has_torque, servo.releases) for servo in leader.servos.values()] == [(False, 0)] * 6


def test_a_wrist_with_another_zero_on_the_leader_comes_no_faster_and_no_farther_than_its_limits(buses, tmp_path, clock):
    """Calibrations assume that it turns freely, each from a zero of its own; a part stops it (lerobot's issue 3193)."""
    follower, leader = buses
    leader.place({5: 2047 + 1900})  # 167 degrees
    measured = "+task.env.limits={wrist_roll.pos:{range:[-150,150]}}"  # by tools/check_robot.py --limits
    with practice(buses, tmp_path, measured) as (robot, hands, toggles):
        toggles.hands.append(TOGGLE)
        go(robot, hands, 0, lambda _: follower.positions[5] > 2047 + 1690)
        goals = np.array([goal for _, goal in follower.servos[5].goals])
    assert goals.max() == pytest.approx(2047 + 150 * 4095 / 360, abs=2)
    assert np.abs(np.diff(goals)).max() <= 150 / HZ * 4095 / 360 + 1
