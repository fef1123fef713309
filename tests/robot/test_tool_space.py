"""The tool of an arm of joints: where it is by its URDF, and an SO-101 that is driven by it."""

import json
import re
import time
from contextlib import suppress

import numpy as np
import pytest
from hydra.utils import instantiate
from omegaconf import OmegaConf
from serl_client.errors import ConfigError, RobotFault
from serl_client.spec import Feature

from robot_infra import spaces
from robot_infra.drivers import urdf
from robot_infra.drivers.urdf import Kinematics, read_chain
from robot_infra.guard.limits import Limiter, read_limits, squares_outside
from robot_infra.guard.motion import Motion
from robot_infra.kinematics import twist
from robot_infra.sim.feetech import FeetechBus
from robot_infra.spaces import EeDelta, Limb
from robot_infra.tasks import arm
from serl_launcher.config import composed
from tests.shared.common import PATIENCE, until
from tools.checks.common import CONFIG

SO101 = {"urdf": "so101", "frame": "gripper_frame_link"}
JOINTS = ("shoulder_pan", "shoulder_lift", "elbow_flex", "wrist_flex", "wrist_roll")
UNITS = {**{f"{name}.pos": "deg" for name in JOINTS}, "gripper.pos": "percent"}
HOME = np.array([0.0, -10, 20, 80, 0, 100])
MIDDLE = np.array([0.22, 0.0, 0.09])  # of what is drawn, metres
BOX = np.array([[0.12, -0.15, 0.02], [0.32, 0.15, 0.22]])
CROOKED = """<robot name="crooked"><link name="a"/><link name="b"/><link name="c"/><link name="d"/>
<joint name="one" type="continuous"><origin xyz="0.1 -0.2 0.3" rpy="0.3 -0.8 1.1"/><parent link="a"/><child link="b"/>
<axis xyz="0 -1 0"/></joint>
<joint name="still" type="fixed"><origin xyz="0 0.1 0" rpy="0 0 2"/><parent link="b"/><child link="c"/></joint>
<joint name="two" type="revolute"><origin xyz="0 0 0.4"/><parent link="c"/><child link="d"/>
<axis xyz="0.6 0 0.8"/><limit lower="-3" upper="3"/></joint>
<joint name="jaw" type="prismatic"><parent link="c"/><child link="e"/></joint></robot>"""


def of_mujoco(text, frame):
    """Another reader of URDF: joints [J] -> the pose of a link."""
    mujoco = pytest.importorskip("mujoco", reason="the extra `sim` is not installed")
    mass = '<inertial><mass value="1"/><inertia ixx="1" iyy="1" izz="1" ixy="0" ixz="0" iyz="0"/></inertial>'
    kept = '<mujoco><compiler fusestatic="false"/></mujoco>'
    text = re.sub(r'<link name="(\w+)"/>', rf'<link name="\1">{mass}</link>', text).replace(
        "</robot>", f"{kept}</robot>"
    )
    model = mujoco.MjModel.from_xml_string(text)
    data = mujoco.MjData(model)

    def pose(joints):
        data.qpos[:] = joints
        mujoco.mj_forward(model, data)
        made = np.eye(4)
        made[:3, :3], made[:3, 3] = data.body(frame).xmat.reshape(3, 3), data.body(frame).xpos
        return made

    return pose


@pytest.mark.parametrize("name", ["so101", "crooked"])
def test_the_tool_is_where_another_reader_of_the_urdf_has_it(name, tmp_path):
    path, frame = (urdf.OURS / "so101.urdf", "gripper_frame_link") if name == "so101" else (tmp_path / "c.urdf", "d")
    if name == "crooked":
        path.write_text(CROOKED.replace(CROOKED[CROOKED.index('<joint name="jaw"') : CROOKED.index("</robot>")], ""))
    theirs, random = of_mujoco(path.read_text(), frame), np.random.default_rng(0)
    names, chain = read_chain(str(path), frame)
    assert names == ([*JOINTS] if name == "so101" else ["one", "two"])
    for joints in random.uniform(-3, 3, (100, len(names))):
        assert np.abs(twist(chain.pose(joints), theirs(joints))).max() < 1e-6


def test_positions_are_in_degrees_and_those_of_no_joint_do_not_count():
    known = Kinematics(SO101, UNITS)
    assert known.entries == tuple(f"{name}.pos" for name in JOINTS)
    np.testing.assert_allclose(known.tool(np.array([0, 0, 0, 0, 0, 50.0])), [0.3914, 0, 0.2265], atol=1e-4)
    left = known.tool(np.array([-90, 0, 0, 0, 0, 50.0]))
    np.testing.assert_allclose(left, [0.0388, 0.3526, 0.2265], atol=1e-3)


@pytest.mark.parametrize(("changes", "units", "said"), [
    ({"frame": None}, UNITS, r"kinematics.frame: say it, as in `kinematics: {urdf: so101"),
    ({"base": "world"}, UNITS, "say urdf, frame and joints, not base"),
    ({"urdf": "so100"}, UNITS, "urdf=so100: .*give a URDF's path, or one of so101"),
    ({"frame": "gripper"}, UNITS, "frame=gripper: so101 has shoulder_link, .*gripper_frame_link"),
    ({"joints": {"gripper.pos": "wrist"}}, {"gripper.pos": "deg"}, "as in `joints: {gripper.pos: shoulder_pan"),
    ({"joints": {"shoulder_lift.pos": "elbow_flex"}}, UNITS, "the joints shoulder_lift of the URDF move its gripper"),
    ({"joints": ["elbow_flex"]}, UNITS, "say {entry of the arm: its joint in the URDF}, not"),
    ({}, dict.fromkeys(UNITS, "percent"), "shoulder_pan.pos is in percent.*use_degrees=true"),
])  # fmt: skip
def test_what_is_missing_or_does_not_fit_is_named_with_its_cure(changes, units, said):
    with pytest.raises(ConfigError, match=said):
        Kinematics({**SO101, **changes}, units)


@pytest.mark.parametrize(("change", "said"), [
    (("", ""), "the joint jaw is prismatic; only joints that turn"),
    (('type="prismatic"><parent link="c"/>', 'type="fixed"><parent link="e"/>'), "e is its own parent"),
    (('type="prismatic"><parent link="c"/>', 'type="fixed">'), "the joint jaw has no parent"),
    (('type="prismatic"', 'type="revolute"><axis xyz="0 0 0"/>'), "xyz='0 0 0' should be three numbers"),
    (('type="prismatic"', 'type="fixed"><origin xyz="1 2"/>'), "xyz='1 2' should be three numbers"),
    (("</robot>", ""), "no element found"),
])  # fmt: skip
def test_a_urdf_that_cannot_be_used_is_refused(change, said, tmp_path):
    path = tmp_path / "arm.urdf"
    path.write_text(CROOKED.replace(*change))
    with pytest.raises(ConfigError, match=said):
        read_chain(str(path), "e")


@pytest.mark.slow
@pytest.mark.parametrize("axes", ["xy", "xz", "yz"])
def test_five_joints_draw_a_square_of_ten_centimetres_and_keep_their_box(axes):
    """Where an arm of five joints cannot keep its tool's turn, the way counts."""
    known = Kinematics(SO101, UNITS)
    low, high = np.array([*[-95.0] * 5, 0]), np.array([*[95.0] * 5, 100])
    positions = Feature((6,), names=(*UNITS,), low=low, high=high)
    limb = Limb(known.entries, known.chain, BOX, None, known.scale)
    space = EeDelta(positions, {"": limb}, stroke=0.01, most=0.1)
    at, off, start = HOME, 0.0, None
    space.begin(at)
    for corner in corners(axes):
        for _ in range(60):
            at = space.target(np.clip((corner - known.tool(at)) / 0.01, -1, 1), at)
            if start is not None:
                off = max(off, beside(known.tool(at), start, corner))
        np.testing.assert_allclose(known.tool(at), corner, atol=1e-4)
        start = corner
    assert off < 0.002
    for _ in range(50):
        at = space.target(np.ones(3), at)
    assert (known.tool(at) <= BOX[1] + 1e-5).all()


@pytest.fixture
def guarded():
    """guarded() -> (the space of an SO-101's tool, its guard's motion, step(action)); the arm follows at once."""
    env = composed(CONFIG, ["actor=true", "task=so101_tool", "task.port=none"]).task.env
    limits = OmegaConf.to_container(env.limits)
    known, fps = Kinematics(SO101, UNITS), env.fps
    entries = {name: {"percent": "%"}.get(unit, unit) for name, unit in UNITS.items()}
    ranges = {name: [0, 100] if unit == "%" else [-95, 95] for name, unit in entries.items()}
    limits = read_limits(entries, limits, has_tool=True, ranges=ranges)
    limb = Limb(known.entries, known.chain, limits.box[0], None, known.scale)
    most = float((np.minimum(limits.jump, limits.speed / fps)[:5] * known.scale).min())
    space = EeDelta(
        Feature((6,), names=(*UNITS,), low=limits.low, high=limits.high), {"": limb}, stroke=0.01, most=most
    )
    motion = Motion(Limiter(limits, known.tool), HOME, tick=0.5 / fps, period=1 / fps, home_speed=0.25, measured=HOME,
                    is_ready=True)  # fmt: skip
    space.begin(HOME)

    def step(*action):
        before = motion.target
        motion.track(space.target(np.array(action, float), before))
        for _ in range(2):
            point = motion.advance()
            motion.accepted(point, None)
            motion.observe(point)
            assert not squares_outside(known.tool(point), limits.box[0])
        return known.tool(point) - known.tool(before)

    return motion, step


WALK = [(1, 0, 0)] * 30, [(0, 1, 0)] * 12, [(1, -1, 0)] * 24, [(0, 0, -1)] * 12, [(1, 1, -1)] * 12, [(-0.3, 0, 0)] * 5


def test_a_tool_slides_along_the_faces_and_edges_of_its_box_as_it_is_told(guarded):
    motion, step = guarded
    for part in WALK:
        for action in part:
            way = step(*action)
            np.testing.assert_allclose(motion.point, motion.target, atol=1e-9)
            assert motion.executed is None
        along = [axis for axis in range(3) if abs(way[axis]) > 1e-4]
        told = {(1, 0, 0): [], (0, 0, -1): [], (-0.3, 0, 0): [0]}.get(action, [1])
        assert along == told, (action, way)


def test_no_target_runs_away_from_an_arm_that_cannot_follow_and_the_rows_say_where_it_stands(guarded, monkeypatch):
    monkeypatch.setattr(spaces, "WITHIN", 0.0)  # targets on a face itself: the joints' way between two leaves the box
    motion, step = guarded
    blocked = 0
    for action in (action for part in WALK for action in part):
        step(*action)
        np.testing.assert_allclose(motion.point, motion.target, atol=1e-9)
        if motion.executed is not None:
            blocked += 1
            assert (motion.executed == motion.point).all()
    assert blocked > 10
    assert motion.limited >= blocked


@pytest.mark.parametrize(
    "said",
    ["gripper.pos", {"entry": "gripper.pos", "open": "wide", "closed": 0}, {"entry": "gripper.pos", "open": 1},
     {"entry": "hand", "open": 1, "closed": 0}, {"entry": "gripper.pos", "open": 1, "closed": 1}],
)  # fmt: skip
def test_a_gripper_that_is_none_is_refused_with_its_cure(said):
    with pytest.raises(ConfigError, match=r"say entry, open and closed, as in `{entry: gripper.pos, open: 100"):
        arm._gripper(said, UNITS)


def beside(point, start, end):
    """How far a point lies beside the line from start to end, metres."""
    way = (end - start) / np.linalg.norm(end - start)
    return np.linalg.norm(np.cross(point - start, way))


def corners(axes):
    """The corners of a square of 10 cm, from the middle of a side to there again."""
    for one, other in ((1, 0), (1, 1), (-1, 1), (-1, -1), (1, -1), (1, 0)):
        yield MIDDLE + 0.05 * (one * np.eye(3)["xyz".index(axes[0])] + other * np.eye(3)["xyz".index(axes[1])])


def patiently(robot, do):
    """Do it once it succeeds: where a busy machine has missed an answer of the bus, ready is said again."""
    for _ in range(20):
        try:
            return do()
        except RobotFault:
            with suppress(RobotFault):
                robot.recover()
    return do()


@pytest.mark.slow
@pytest.mark.usefixtures("patient_drivers")
def test_an_so101_draws_a_square_by_its_tool_through_the_guard(tmp_path):
    """As its yaml says it, on simulated servos in real time. Where the shafts are counts."""
    pytest.importorskip(
        "scservo_sdk", reason="the extra `robots` is not installed: . examples/install.sh --extra robots"
    )
    with FeetechBus() as bus:
        (tmp_path / "follower.json").write_text(json.dumps(bus.calibration()))
        words = [f"task.port={bus.path}", f"task.calibration_dir={tmp_path}", "task.env.cameras=null"]
        config = composed(CONFIG, ["actor=true", "task=so101_tool", *words, "task.env.operator=none"])
        env = instantiate(config.task.env)()
        known = Kinematics(SO101, UNITS)
        with env:
            robot = env.robot
            patiently(robot, lambda: (robot.home(0), until(lambda: robot.is_home, 60)))
            assert env.spec.action.names == ("x", "y", "z", "gripper")
            off, start = 0.0, None
            for corner in corners("yz"):
                deadline = time.monotonic() + PATIENCE
                while np.abs(way := corner - known.tool(robot.positions)).max() > 1e-3:
                    assert time.monotonic() < deadline, way
                    action = np.array([*np.clip(way / 0.01, -0.5, 0.5), -1], np.float32)
                    patiently(robot, lambda: robot.command(action))  # noqa: B023
                    time.sleep(1 / env.spec.fps)
                    patiently(robot, robot.observe)
                    at = known.tool(robot.robot.seen["observation.state"])
                    assert (at > BOX[0]).all()
                    assert (at < BOX[1]).all()
                    off = max(off, 0.0 if start is None else beside(at, start, corner))
                start = corner
            assert off < 0.005
