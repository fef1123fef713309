"""Action spaces: there and back, the box, singular poses, frames, grippers, and which teleop may drive which robot."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serl_client import ConfigError
from serl_client.spec import Feature

from robot_infra.interfaces import Reading, Verdict
from robot_infra.judges import TogglePenalty
from robot_infra.kinematics import NOVA2, Chain, at, twist
from robot_infra.spaces import WITHIN, EeDelta, Gripper, JointDelta, Limb, SpacedRobot, understood
from tests.shared.robots import Hand, build, point

JOINTS = tuple(f"joint{number}" for number in range(1, 7))
POSITIONS = Feature(
    (7,), names=(*JOINTS, "gripper"), low=np.array([*[-3.1] * 6, 0]), high=np.array([*[3.1] * 6, 0.045])
)
GRIPPER = Gripper(open=0.045, closed=0.0)
BOX = np.array([[0.2, -0.2, 0.05], [0.45, 0.2, 0.4]])
CHAIN = Chain(NOVA2, tool=at(z=0.11))
START = np.array([0.34236, -0.03855, -2.01873, 0.48649, 1.5708, -1.22843, 0.045])  # fingers down
MOST, STROKE = 0.15, 0.03
SHARES = st.floats(-1, 1)


def ee_delta(**changes):
    limb = Limb(JOINTS, CHAIN, BOX, ("gripper", GRIPPER))
    return EeDelta(POSITIONS, {"": limb}, **{"stroke": STROKE, "most": MOST, **changes})


def delta():
    return JointDelta(POSITIONS, MOST, {"gripper": GRIPPER})


class Arm:
    """A robot of POSITIONS that takes each target as far as `reach` allows."""

    space, is_home, is_simulated = "joint_position", True, True
    observation, action = {"observation.state": Feature((7,))}, POSITIONS

    def __init__(self, reach=np.inf):
        self.at, self.reach, self.refused = START.astype(np.float32), reach, 0

    def home(self, seed):
        self.at = START.astype(np.float32)

    def hold_action(self):
        return self.at

    def command(self, action):
        self.refused += not np.isfinite(action).all()
        if np.isfinite(action).all():
            self.at = np.clip(action, self.at - self.reach, self.at + self.reach).astype(np.float32)
        return self.at

    def observe(self):
        return Reading({"observation.state": self.at.copy()}, 0.0)

    def stop(self):
        pass

    close = stop


def spaced(space, reach=np.inf):
    return SpacedRobot(
        Arm(reach), {"joint_delta": delta(), "ee_delta": ee_delta(turn=0.2)}, space, {"gripper": GRIPPER}
    )


@pytest.mark.parametrize("space", [delta(), ee_delta(), ee_delta(turn=0.1), ee_delta(turn=0.1, is_relative=True)])
@settings(max_examples=20)
@given(data=st.data())
def test_an_action_becomes_a_target_and_the_target_the_same_action(space, data):
    space.begin(START)
    small = [0.3 * data.draw(SHARES) for _ in space.action.names[:-1]]
    action = np.array([*small, data.draw(st.sampled_from([-1.0, 1.0]))])
    np.testing.assert_allclose(space.actual(space.target(action, START), START), action, atol=1e-3)


@settings(max_examples=15)
@given(st.lists(st.tuples(SHARES, SHARES, SHARES), min_size=1, max_size=4), st.integers(0, 2**32), st.booleans())
def test_from_any_pose_no_joint_jumps_and_the_tool_leaves_no_box_that_it_was_in(ways, seed, is_singular):
    """Each way is kept for some steps, so that the arm comes to the ends of its reach, and to its box."""
    positions = START.copy()
    if is_singular:
        positions[:6] = np.random.default_rng(seed).uniform(-3, 3, 6)
        positions[[2, 4]] = 0
    space = ee_delta()
    space.begin(positions)
    for way in ways * 4:
        before, positions = positions, space.target(np.array([*way, 0]), positions)
        assert np.abs(positions - before)[:6].max() <= MOST + 1e-9
        assert outside(positions) <= outside(before) + 1e-5
        assert (POSITIONS.low <= positions).all()
        assert (positions <= POSITIONS.high).all()


def outside(positions):
    point = CHAIN.pose(positions[:6])[:3, 3]
    return float(np.linalg.norm(np.maximum(BOX[0] - point, 0) + np.maximum(point - BOX[1], 0)))


def test_a_tool_at_the_face_of_its_box_slides_along_it_and_keeps_its_orientation():
    space, positions = ee_delta(), START
    space.begin(START)
    for _ in range(12):
        positions = space.target(np.array([0, 0.5, -1, 0.0]), positions)
    start, end = CHAIN.pose(START[:6]), CHAIN.pose(positions[:6])
    assert end[2, 3] == pytest.approx(BOX[0, 2] + WITHIN, abs=1e-5)
    assert end[1, 3] - start[1, 3] == pytest.approx(12 * 0.5 * STROKE, abs=0.01)
    np.testing.assert_allclose(twist(start, end)[3:], 0, atol=1e-4)


def test_relative_actions_are_along_the_axes_of_the_tool_at_the_start():
    pose = CHAIN.pose(START[:6])
    space = ee_delta(is_relative=True)
    space.begin(START)
    for axis in range(3):
        target = space.target(np.append(0.3 * np.eye(3)[axis], 0), START)
        np.testing.assert_allclose(
            CHAIN.pose(target[:6])[:3, 3] - pose[:3, 3], 0.3 * STROKE * pose[:3, axis], atol=1e-5
        )


def test_a_gripper_that_is_on_its_way_goes_on_and_where_it_rests_between_its_ends_it_stays():
    gripper = Gripper(open=100.0, closed=0.0)
    assert [gripper.actual(*pair) for pair in ((60, 66), (66, 60), (0, 0), (99.5, 99.5))] == [1, -1, 1, -1]
    assert gripper.target(gripper.actual(60, 60), 60) == 60


@given(st.lists(st.floats(-0.49, 0.49), max_size=20), st.sampled_from([-1.0, 1.0]))
def test_what_wavers_around_nothing_leaves_a_gripper_as_it_is(shares, wish):
    arm = spaced("joint_delta")
    toggles = 0
    for share in [wish, *shares]:
        executed = arm.command(np.array([*[0] * 6, share], np.float32))
        toggles += arm.toggled
        assert executed[6] == wish
    assert toggles == (wish == 1), "it was open"


@pytest.mark.parametrize("space", ["joint_position", "joint_delta", "ee_delta"])
def test_each_toggle_costs_and_nothing_else_does(space):
    arm, still = spaced(space), [0] * (6 if space != "joint_position" else 0)
    judge = TogglePenalty(lambda observation: Verdict(1.0, False, None), lambda: arm.toggled, 0.25)
    ends = {1: 0.0, -1: 0.045} if space == "joint_position" else {1: 1.0, -1: -1.0}
    rewards = []
    for wish in (1, 1, -1, -1, 1):
        action = np.array([*(still or START[:6]), ends[wish]], np.float32)
        arm.command(action)
        rewards.append(judge({}).reward)
    assert rewards == [0.75, 1.0, 0.75, 1.0, 0.75]


@pytest.mark.parametrize("space", ["joint_position", "joint_delta", "ee_delta"])
def test_executed_is_what_the_robot_took_and_what_is_not_finite_holds(space):
    arm = spaced(space, reach=0.05)
    before = arm.positions
    action = np.array([*(before[:6] + 0.5 if space == "joint_position" else [1.0] * 6), 0.0], np.float32)
    executed = arm.command(action)
    moved = arm.positions
    assert 0 < np.abs(moved - before).max() <= 0.05 + 1e-6
    np.testing.assert_allclose(executed, arm.spaces[space].actual(moved, before), atol=1e-6)
    held = arm.command(np.full(7, np.nan, np.float32))
    np.testing.assert_array_equal(arm.positions, moved)
    np.testing.assert_allclose(held, arm.hold_action())
    assert arm.robot.refused == 1


class Speaks(Hand):
    """A device that gives the same action of a space in each row."""

    def __init__(self, space, action):
        super().__init__()
        self.space, self.action = space, np.array(action, np.float32)

    def read(self, hold):
        return self.action


@pytest.mark.parametrize("space", ["joint_position", "joint_delta", "ee_delta"])
@pytest.mark.parametrize("spoken", ["joint_position", "joint_delta", "ee_delta"])
def test_a_teleop_moves_the_robot_the_same_way_in_each_space(space, spoken):
    arm = spaced(spoken)
    action = np.array([*(START[:6] + 0.02 if spoken == "joint_position" else [0.1] * 6), 0.0], np.float32)
    arm.command(action)
    expected = arm.positions
    robot = spaced(space)
    with build(robot, teleop=Speaks(spoken, action)) as env:
        env.reset(0, teleop=True)
        step = env.step(None)
    env.spec.action.check("action", step.executed)
    np.testing.assert_allclose(robot.positions, expected, atol=1e-4)


def test_a_device_that_says_more_than_its_space_allows_moves_the_robot_as_far_as_that():
    device = understood(Speaks("joint_delta", [9.0] * 3 + [-9.0] * 3 + [0.0]), spaced("joint_position"))
    moved = device.read(START)[:6] - START[:6]
    np.testing.assert_allclose(moved, [MOST] * 3 + [-MOST] * 3, atol=1e-6)


@pytest.mark.parametrize(("robot", "spoken", "said"), [
    (point(), "joint_position", "gives joint_position actions, the robot takes ee_delta: choose another"),
    (spaced("joint_delta"), "polar", "polar actions, the robot takes joint_position, joint_delta, ee_delta: choose"),
    (SpacedRobot(Arm(), {"ee_delta": ee_delta()}, "ee_delta"), "joint_position", "the robot takes ee_delta: choose"),
], ids=["a robot of one space", "an unknown space", "a tool that does not turn"])  # fmt: skip
def test_a_teleop_that_cannot_be_converted_is_refused_at_the_start(robot, spoken, said):
    with pytest.raises(ConfigError, match=said):
        build(robot, teleop=Speaks(spoken, [0]))
