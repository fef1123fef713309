"""A leader arm that follows: its set points, what is a touch, and that taking over makes no jump."""

import numpy as np
import pytest
from serl_client import Feature
from serl_client.errors import RobotFault

from robot_infra.drivers.arm import LEADER, Arm
from robot_infra.guard.lead import FOLLOWS, LIMP, TOUCH, TOUCH_TICKS, TOUCHED
from robot_infra.guard.robot import GuardedRobot
from robot_infra.interfaces import Hand
from robot_infra.teleop.hands import Hands
from robot_infra.teleop.leader import Leader
from tests.shared.arms import HOME, JOINTS, LIMITS
from tests.shared.robots import Scripted

FPS, TICKS = 20.0, 5  # steps per second, and set points in each
SPEED = np.array([limit["speed"] for limit in LIMITS.values()])
TRACKING = np.array([limit["tracking"] for limit in LIMITS.values()])
AWAY = np.array([-0.8, -1.5])  # where the leader lies at first
TOGGLE = Hand(words=["toggle"])
A_BIT = 1e-6


class LedArm(Arm):
    """Two joints, and a leader like them. `hand`: where a hand holds the leader, [J]; None: nobody does.

    `told`: what the leader got, each "on", "off" or a set point. `broken`: its method that fails. is_stuck: the arm
    itself stays where it is.
    """

    entries = dict.fromkeys(JOINTS, "rad")
    is_simulated = leads = True
    observation = {LEADER: Feature((2,))}  # noqa: RUF012

    def __init__(self, address):
        self.at, self.led, self.goal, self.hand = np.zeros(2), AWAY, None, None
        self.told, self.broken, self.is_stuck = [], "", False

    def read(self):
        return self._tried("read", self.at)

    def write(self, positions):
        self.at = self.at if self.is_stuck else positions

    def sense(self):
        return {LEADER: self.read_leader().astype(np.float32)}

    def read_leader(self):
        self.led = next(at for at in (self.hand, self.goal, self.led) if at is not None)
        return self._tried("read_leader", self.led)

    def enable_leader(self):
        self.told.append("on")
        self.goal = self.read_leader()
        return self._tried("enable_leader", self.goal)

    def lead(self, positions):
        self._tried("lead", positions)
        self.told.append("off" if positions is None else tuple(positions))
        self.goal = None if positions is None else positions.copy()
        if positions is not None:
            positions[:] = 9  # a driver may write into what it gets

    def points(self):
        """The leader's set points since its motors came on for the last time."""
        return np.array([each for each in self.told[-self.told[::-1].index("on") :] if each != "off"])

    def _tried(self, method, value):
        if method == self.broken:
            raise RobotFault("its cable is out", "bus")
        return value


class Limp(LedArm):
    leads = False


@pytest.fixture
def make(closes):
    def make(kind=LedArm):
        robot = closes(GuardedRobot(
            f"{__name__}.{kind.__name__}", address=f"{__name__}", fps=FPS, limits=LIMITS, home=HOME, process=False,
        ))  # fmt: skip
        return robot, robot.guard.arm

    return make


def go(robot, steps, target=(0.0, 0.0)):
    for _ in range(steps):
        robot.command(np.array(target, np.float32))
        robot.observe()


# -- the guard


@pytest.mark.parametrize("lies", [AWAY, [-1.4, 0.9]], ids=["within its range", "out of range"])
def test_it_is_led_from_where_it_lies_no_faster_than_the_follower_may_move(make, lies):
    robot, arm = make()
    arm.led = np.array(lies)
    go(robot, 2)
    assert (arm.told, robot.leader) == ([], LIMP), "nobody has asked for it"
    robot.lead(follows=True)
    go(robot, 60, target=(0.5, -0.5))
    way = np.vstack([lies, arm.points()])
    assert (np.abs(np.diff(way, axis=0)) <= SPEED / (FPS * TICKS) + A_BIT).all()
    np.testing.assert_allclose(arm.led, arm.at)
    np.testing.assert_allclose(arm.led, [0.5, -0.5])
    assert robot.leader == FOLLOWS
    robot.lead(follows=False)
    go(robot, 2)
    assert (arm.told[-1], arm.told.count("off"), robot.leader) == ("off", 1, LIMP)


@pytest.mark.parametrize(("share", "is_touch"), [(0.9, False), (1.1, True)])
@pytest.mark.parametrize("entry", [0, 1])
def test_a_push_farther_than_the_threshold_is_a_touch_after_some_ticks(make, entry, share, is_touch):
    robot, arm = make()
    robot.lead(follows=True)
    go(robot, 40)
    before = len(arm.told)
    arm.hand = share * TOUCH * TRACKING * np.eye(2)[entry]
    go(robot, 20)
    assert robot.leader == (TOUCHED if is_touch else FOLLOWS)
    if is_touch:
        assert arm.told[before + TOUCH_TICKS - 1 :] == ["off"], "limp, and it gets nothing more"
        robot.lead(follows=True)
        arm.hand = None
        robot.guard._guard.servo()
        arm.hand = np.array([0.9, 0.0])
        robot.guard._guard.servo()
        robot.observe()
        assert robot.leader == FOLLOWS, "the ticks are counted anew"


def test_wrong_readings_that_do_not_last_are_no_touch(make):
    robot, arm = make()
    robot.lead(follows=True)
    go(robot, 40)
    guard = robot.guard._guard
    for _ in range(10):
        for hand in [np.array([0.9, 0.0])] * (TOUCH_TICKS - 1) + [None]:
            arm.hand = hand
            guard.servo()
        robot.observe()
        assert robot.leader == FOLLOWS
    np.testing.assert_array_equal(arm.goal, [0, 0])


def test_while_the_arm_has_a_fault_its_leader_stays_where_it_is_and_then_begins_anew(make):
    robot, arm = make()
    robot.lead(follows=True)
    go(robot, 10)
    arm.is_stuck = True
    with pytest.raises(RobotFault, match="does not follow"):
        go(robot, 50, target=(1.0, 0.0))
    before, goal = len(arm.told), arm.goal
    for _ in range(20):
        robot.guard._guard.servo()
    assert len(arm.told) == before, "it holds, and gets nothing"
    arm.is_stuck, arm.at, arm.goal = False, robot.guard.latest.target, goal + 0.01
    robot.recover()
    go(robot, 1, target=robot.guard.latest.target)
    assert arm.told[before] == "on"
    assert (np.abs(arm.told[before + 1] - goal - 0.01) <= SPEED / (FPS * TICKS) + A_BIT).all()


def test_while_its_robot_holds_it_goes_no_farther_and_a_touch_counts_as_ever(make):
    robot, arm = make()
    robot.lead(follows=True)
    go(robot, 3)
    stood = arm.goal
    robot.stop()
    for _ in range(20):
        robot.guard._guard.servo()
    np.testing.assert_array_equal(arm.goal, stood)
    assert np.abs(arm.goal - arm.at).max() > 0.1, "it was on its way"
    robot.lead(follows=True)  # a toggle in a pause
    for _ in range(20):
        robot.guard._guard.servo()
    np.testing.assert_array_equal(arm.goal, stood)
    robot.hold_leader(False)
    for _ in range(300):
        robot.guard._guard.servo()
    np.testing.assert_allclose(arm.goal, arm.at)
    robot.lead(follows=True)  # a question begins, and the robot holds
    robot.stop()
    robot.guard._guard.servo()
    arm.hand = 1.1 * TOUCH * TRACKING
    for _ in range(TOUCH_TICKS):
        robot.guard._guard.servo()
    robot.observe()
    assert robot.leader == TOUCHED


def test_a_hand_over_in_a_fault_lets_it_go_limp(make):
    robot, arm = make()
    robot.lead(follows=True)
    go(robot, 10)
    robot.guard._guard._motion.fail("tracking", "it hit something")
    robot.lead(follows=False)
    robot.guard._guard.servo()
    assert arm.told[-1] == "off"


@pytest.mark.parametrize("method", ["read_leader", "enable_leader", "lead"])
def test_a_leader_that_fails_is_a_fault_that_names_it(make, method):
    robot, arm = make()
    arm.broken = method
    robot.lead(follows=True)
    with pytest.raises(RobotFault, match="leader arm: its cable is out") as fault:
        go(robot, 2)
    assert fault.value.kind == "bus"
    before = len(arm.told)
    arm.broken = ""
    for _ in range(5):
        robot.guard._guard.servo()
    assert len(arm.told) == before
    robot.recover()
    go(robot, 40)
    assert arm.told[before] == "on", "its motors may have been off"
    np.testing.assert_allclose(arm.led, [0, 0])


def test_positions_that_are_none_are_a_fault_and_no_set_point(make):
    robot, arm = make()
    arm.led = np.array([np.nan, 0])
    robot.lead(follows=True)
    with pytest.raises(RobotFault, match="leader arm: its positions are"):
        go(robot, 2)
    assert arm.told == ["on"]


def test_one_whose_driver_cannot_lead_it_is_never_told_anything(make):
    robot, arm = make(Limp)
    robot.lead(follows=True)
    go(robot, 5)
    robot.lead(follows=False)
    go(robot, 5)
    assert (arm.told, robot.leader) == ([], LIMP)


# -- the person


def practised(robot, *devices, takeover="touch", demonstrate=False):
    """A person at the leader and these devices, in an episode."""
    hands = Hands([Leader(robot), *devices], robot.action, robot.space, takeover=takeover)
    hands.reset(0, demonstrate=demonstrate)
    robot.observe()
    return hands


def policys(robot, hands, steps, way):
    """Let the policy move the arm to and fro by `way`, until somebody takes over; return their first action."""
    for i in range(robot.steps, robot.steps + steps):
        target = np.array(robot.guard.latest.target)
        wanted = hands.read(target.astype(np.float32))
        if wanted is not None:
            return wanted
        robot.command((target + way * np.cos(i / 10)).astype(np.float32))
        robot.observe()
    return None


MOST = np.minimum(SPEED / FPS, [limit["jump"] for limit in LIMITS.values()])  # what one step moves


@pytest.mark.parametrize("seed", range(20))
def test_who_touches_it_takes_over_without_a_jump(make, seed):
    """A hand holds it still, or pulls it, while the policy moves on as it will."""
    random, (robot, arm) = np.random.default_rng(seed), make()
    hands, way = practised(robot), random.uniform(-1, 1, 2) * MOST
    assert policys(robot, hands, 60, way) is None
    np.testing.assert_allclose(arm.led, arm.at, atol=MOST.max())
    pull, begun = random.uniform(-0.02, 0.02, 2) * (seed % 2), arm.led
    wanted, ticks = None, 0
    while wanted is None and ticks < 500:
        arm.hand, ticks = begun + pull * ticks, ticks + 1
        wanted = policys(robot, hands, 1, way)
    assert robot.leader == LIMP, "a person drives it now"
    apart = np.abs(wanted - robot.guard.latest.target)
    assert (apart <= TOUCH * TRACKING + 2 * MOST).all()
    assert arm.told[-1] == "off"
    told = len(arm.told)
    for at in np.linspace(arm.led, [0.3, 0.1], 30):
        arm.hand = at
        robot.command(hands.read(robot.hold_action()))
        robot.observe()
    np.testing.assert_allclose(arm.at, arm.hand, atol=0.05)
    assert len(arm.told) == told, "a hand alone moves it"


def test_a_toggle_takes_it_over_and_hands_it_back_from_where_it_is(make):
    robot, arm = make()
    hands = practised(robot, Scripted(*[Hand()] * 100, TOGGLE, *[Hand()] * 9, TOGGLE))
    first = policys(robot, hands, 200, np.array([0.02, -0.02]))
    np.testing.assert_allclose(first, robot.guard.latest.target, atol=0.02)
    for step in range(9):
        robot.command(hands.read(robot.hold_action()))
        robot.observe()
        arm.hand = arm.led - 0.01 * (step + 1)
    assert arm.goal is None
    stood, arm.hand = arm.led, None
    assert policys(robot, hands, 20, np.array([0.02, -0.02])) is None
    assert (np.abs(np.diff(np.vstack([stood, arm.points()]), axis=0)) <= SPEED / (FPS * TICKS) + A_BIT).all()
    assert robot.leader == FOLLOWS


def test_a_demonstration_begins_at_a_touch_and_not_because_the_leader_is_led(make):
    robot, arm = make()
    hands = practised(robot, demonstrate=True)
    assert policys(robot, hands, 60, np.zeros(2)) is None
    assert hands.poll() == []
    wanted, arm.hand = None, arm.led
    while wanted is None and arm.hand[0] < 1:
        arm.hand = arm.hand + np.array([0.01, 0])  # so slowly that from one reading to the next it is at rest
        wanted = policys(robot, hands, 1, np.zeros(2))
    np.testing.assert_allclose(wanted, arm.hand, atol=0.011)
    assert hands.poll() == ["moved"]


def test_where_only_a_toggle_takes_over_a_touch_makes_it_limp_and_the_policy_drives_on(make, caplog):
    robot, arm = make()
    hands = practised(robot, Scripted(*[Hand()] * 60, TOGGLE, Hand(), TOGGLE), takeover="toggle")
    assert policys(robot, hands, 40, np.zeros(2)) is None
    arm.hand = arm.led + np.array([0.3, 0])
    assert policys(robot, hands, 20, np.zeros(2)) is None
    assert robot.leader == TOUCHED
    assert [said.getMessage() for said in caplog.records] == ["leader arm: somebody has touched it, so it goes limp"]
    assert policys(robot, hands, 1, np.zeros(2)) is not None
    arm.hand = None
    for _ in range(5):
        policys(robot, hands, 1, np.zeros(2))
    assert robot.leader == FOLLOWS
