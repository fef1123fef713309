"""Two arms as one: their entries, cameras, tools and faults, and that a fault of one holds both."""

import json

import numpy as np
import pytest
from serl_client import ConfigError, Feature
from serl_client.errors import RobotFault

from robot_infra.drivers.arm import Arm
from robot_infra.drivers.bimanual import BimanualArm
from robot_infra.guard.robot import GuardedRobot
from tests.shared.arms import DRIVER, FPS, HOME, LIMITS, Log, move_on, points

SIDES = ("left", "right")
BIMANUAL = "robot_infra.drivers.bimanual.BimanualArm"
UP = np.array([0.1, -0.1, 0.1, -0.1], np.float32)
BOX = {"x": [-1, 0.25], "y": [-1, 1], "z": [-1, 1], "speed": 9.0}


class Seeing(Arm):
    """One slide and a gripper, with a camera, a tool at its slide's position, and what else its options name."""

    entries = {"slide": "m", "gripper": "m"}  # noqa: RUF012

    def __init__(self, address, *, camera, has_state=False, has_leader=False, has_tool=True, leads=False):
        self.at, self._has_tool, self.leads, self.led = np.zeros(2), has_tool, leads, np.zeros(2)
        self._values = {f"observation.images.{camera}": np.full((2, 2, 3), len(camera), np.uint8)}
        if has_state:
            self._values["observation.state"] = np.array([1, 2, 3], np.float32)
        if has_leader:
            self._values["leader"] = np.array([4, 5], np.float32)
        self.observation = {name: Feature(value.shape, value.dtype.name) for name, value in self._values.items()}

    def read(self):
        return self.at

    def write(self, positions):
        self.at = positions

    def tool(self, positions):
        return np.array([positions[0], 0, 0]) if self._has_tool else None

    def sense(self):
        return dict(self._values)

    def read_leader(self):
        return self.led

    enable_leader = read_leader

    def lead(self, positions):
        self.led = positions


def seeing(**options):
    return {side: {"driver": f"{__name__}.Seeing", "address": f"{__name__}-{side}",
                   "options": {"camera": f"cam_{side}_wrist", **options.get(side, {})}} for side in SIDES}  # fmt: skip


@pytest.fixture
def logs(tmp_path, closes):
    made = {}
    for side in SIDES:
        (tmp_path / side).mkdir()
        made[side] = closes(Log(tmp_path / side))
    return made


@pytest.fixture
def pair(logs, closes):
    """pair(left=options, right=options) -> both logged arms behind one guard, ready to move."""

    def make(**options):
        arms = {
            side: {"driver": DRIVER, "address": log.path, "options": {"log": log.path, **options.get(side, {})}}
            for side, log in logs.items()
        }
        both = [(f"{side}_{name}", name) for side in SIDES for name in LIMITS]
        robot = closes(GuardedRobot(
            BIMANUAL, address=json.dumps([log.path for log in logs.values()])[:40], fps=FPS, options=arms,
            limits={name: LIMITS[of] for name, of in both}, home={name: HOME[of] for name, of in both},
        ))  # fmt: skip
        robot.recover()
        return robot

    return make


def test_both_arms_move_as_one_with_names_of_their_own(pair, logs):
    robot = pair()
    assert robot.action.names == ("left_shoulder", "left_elbow", "right_shoulder", "right_elbow")
    np.testing.assert_allclose(robot.command(np.array([0.1, -0.1, -0.1, 0.1], np.float32)), [0.1, -0.1, -0.1, 0.1])
    for side, end in (("left", (0.1, -0.1)), ("right", (-0.1, 0.1))):
        logs[side].until(lambda calls, end=end: points(calls)[-1] == pytest.approx(end))


@pytest.mark.slow
@pytest.mark.parametrize(("failing", "other"), [SIDES, SIDES[::-1]])
@pytest.mark.parametrize("wall", ["collision", "stuck"])
def test_a_fault_of_one_arm_holds_the_other_until_ready(pair, logs, failing, other, wall):
    robot = pair(**{failing: {"walls": [wall]}})
    said = f"{failing} arm: there is a wall" if wall == "collision" else f"{failing}_shoulder does not follow"
    with pytest.raises(RobotFault, match=said) as fault:
        move_on(robot, logs[other], UP)
    assert fault.value.kind == ("collision" if wall == "collision" else "tracking")
    seen = len(logs[other].read())
    with pytest.raises(RobotFault):
        robot.command(UP)
    with pytest.raises(RobotFault):
        robot.observe()
    after = points(logs[other].read()[seen:])
    assert len(set(after)) <= 1, "it gets no set point, or always the same one"
    robot.recover()
    still = points(logs[other].more(5))
    assert max(np.ptp(still, axis=0)) == 0
    robot.command(robot.hold_action() + np.array([-0.05, 0.05] * 2, np.float32))
    logs[other].until(lambda calls: points(calls)[-1] != pytest.approx(still[-1]))


def test_cameras_are_merged_and_states_and_leaders_are_joined():
    arm = BimanualArm("pair", **seeing(left={"has_state": True, "has_leader": True}, right={"has_leader": True}))
    arm.write(np.arange(4.0))
    np.testing.assert_array_equal(arm.read(), [0, 1, 2, 3])
    found = arm.sense()
    assert found.keys() == arm.observation.keys()
    for name, feature in arm.observation.items():
        feature.check(name, found[name])
    assert {name for name in found if "images" in name} == {f"observation.images.cam_{side}_wrist" for side in SIDES}
    assert found["observation.state"].tolist() == [1, 2, 3, 2, 3]
    assert found["leader"].tolist() == [4, 5, 4, 5]
    assert arm.tool(np.arange(4.0)).tolist() == [[0, 0, 0], [2, 0, 0]]
    arm.close()
    BimanualArm("pair", **seeing()).close()  # both are free again


def test_both_leaders_are_led_as_one():
    arm = BimanualArm("pair", **seeing(left={"leads": True}, right={"leads": True}))
    assert arm.leads
    assert arm.enable_leader().tolist() == [0, 0, 0, 0]
    arm.lead(np.arange(4.0))
    assert arm.read_leader().tolist() == [0, 1, 2, 3]
    arm.lead(None)
    assert [each.led for each in arm._arms.values()] == [None, None]
    arm.close()


@pytest.mark.parametrize(("words", "said"), [
    (seeing(left={"camera": "top"}, right={"camera": "top"}), "both arms observe observation.images.top"),
    (seeing(left={"has_leader": True}), "one arm has a leader arm and the other has none"),
    (seeing(left={"leads": True}), "the leader of one arm follows and the other one does not"),
    ({**seeing(), "right": {"driver": DRIVER}}, "options.right: say driver and address"),
    ({"left": seeing()["left"], "right": seeing()["left"]}, "in use"),
], ids=["a camera twice", "one leader", "one that follows", "no address", "the same arm twice"])  # fmt: skip
def test_what_is_no_pair_is_refused_and_leaves_both_arms_free(words, said):
    with pytest.raises(ConfigError, match=said):
        BimanualArm("pair", **words)
    BimanualArm("pair", **seeing()).close()


def guarded(**options):
    limit = {"range": [-1, 1], "speed": 9.0, "jump": 1.0, "tracking": 1.0}
    entries = [f"{side}_{name}" for side in SIDES for name in Seeing.entries]
    return GuardedRobot(
        BIMANUAL, address="pair", fps=FPS, options=seeing(**options), home=dict.fromkeys(entries, 0),
        limits={**dict.fromkeys(entries, limit), "left_tool": BOX, "right_tool": {**BOX, "x": [-0.5, 1]}},
    )  # fmt: skip


def test_each_tool_has_a_box_of_its_own_in_the_guard():
    robot = guarded()
    robot.recover()
    np.testing.assert_allclose(robot.command(np.array([0.2, 0, 0.5, 0], np.float32)), [0.2, 0, 0.5, 0])
    accepted = robot.command(np.array([0.4, 0, 0.5, 0], np.float32))
    assert 0.2 <= accepted[0] <= 0.25 + 1e-6
    accepted = robot.command(np.array([0.2, 0, -0.9, 0], np.float32))
    assert -0.5 - 1e-6 <= accepted[2] < 0.3
    robot.close()


def test_a_tool_that_nothing_would_limit_is_refused():
    with pytest.raises(ConfigError, match="one arm knows where its tool is"):
        guarded(right={"has_tool": False})
