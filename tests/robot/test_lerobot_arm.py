"""Devices of lerobot as a driver behind the guard: what it makes of them, and what it refuses."""

import importlib
import json
import pkgutil
import re
import sys
import time
from contextlib import contextmanager, nullcontext, suppress

import numpy as np
import pytest
from hydra.utils import instantiate
from omegaconf import OmegaConf
from serl_client.errors import ConfigError, RobotFault

from robot_infra.cameras import lerobot as cameras
from robot_infra.drivers.lerobot import LerobotArm
from robot_infra.guard.robot import GuardedRobot
from robot_infra.sim.feetech import ENDS, MIN_AT, FeetechBus
from serl_launcher.config import composed
from tests.shared.arms import say_ready
from tests.shared.common import ROOT, until
from tests.shared.plugins import publish
from tests.shared.tools import called
from tools.checks.arm import watched
from tools.checks.common import CONFIG

pytest.importorskip("lerobot", reason="the extra `robots` is not installed: . examples/install.sh --extra robots")
pytest.importorskip("scservo_sdk", reason="the extra `robots` is not installed: . examples/install.sh --extra robots")
NO_KEYS = "pynput" if sys.version_info >= (3, 12) else "keyboard gives no positions of joints.*drive the tool by keys"
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("patient_drivers")]  # its import of torch takes seconds


@pytest.fixture
def bus():
    """Servos that obey whatever goal they remember, which lies at an end of each one's way."""
    with FeetechBus(speed=30_000, obeys_old_goals=True) as made:
        yield made


@pytest.fixture
def so101(bus, tmp_path, closes):
    """so101(the leader's port, **options of the follower) -> the driver of an SO-101 on simulated servos."""
    (tmp_path / "me.json").write_text(json.dumps(bus.calibration()))

    def make(leader=None, **options):
        me = {"id": "me", "calibration_dir": str(tmp_path), "use_degrees": False}
        robot = {"type": "so101_follower", **me, **options}
        leader = leader and {"type": "so101_leader", "port": leader, **me}
        return closes(LerobotArm(bus.path, robot=robot, leader=leader))

    return make


@pytest.fixture
def plugins(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_LEROBOT_HOME", str(tmp_path))
    monkeypatch.syspath_prepend(publish(tmp_path / "site"))


def x(leader=None, **options):
    return LerobotArm("", robot={"type": "x_robot", **options}, leader=leader)


# -- an SO-101


def test_the_ends_of_its_motors_are_known_from_their_norm_mode_or_their_calibration(so101):
    arm = so101()
    assert arm.entries == dict.fromkeys(arm.entries, "%")
    assert arm.ranges == {name: [-100.0, 100.0] if "gripper" not in name else [0.0, 100.0] for name in arm.entries}
    arm.close()
    arm = so101(use_degrees=True)
    low, high = ENDS[0]
    assert arm.entries["shoulder_pan.pos"] == "deg"
    assert arm.ranges["shoulder_pan.pos"][1] == pytest.approx((high - low) / 2 * 360 / 4095)


def test_it_moves_to_its_set_points_and_keeps_its_torque_when_it_is_closed(so101, bus):
    arm = so101()
    say_ready(arm)
    arm.write(np.array([50, 0, 0, 0, 0, 30.0]))
    until(lambda: np.allclose(arm.read(), [50, 0, 0, 0, 0, 30], atol=0.2))
    arm.close()
    arm.close()
    assert [(servo.has_torque, servo.releases) for servo in bus.servos.values()] == [(True, 0)] * 6
    again = so101(disable_torque_on_disconnect=True)
    say_ready(again)
    again.close()
    told = [(servo.has_torque, servo.releases) for servo in bus.servos.values()]
    assert told == [(False, 2)] * 6, "its owner said so; lerobot also does for a moment, to configure its motors"


def test_an_answer_that_comes_too_late_is_not_taken_for_that_of_the_next_question(so101, bus):
    arm = so101()
    before = arm.read()
    bus.servos[1].move()
    with bus._lock:
        bus._answer(1, (100).to_bytes(2, "little"))  # an old position of the first servo: nobody waits for it
    until(lambda: bus_has_input(arm))
    np.testing.assert_array_equal(arm.read(), before)


def bus_has_input(arm):
    return arm._robot.bus.port_handler.ser.in_waiting > 0


@pytest.mark.parametrize("fault", ["to_drop", "to_damage"])
def test_two_lost_or_damaged_readings_are_repeated_and_the_third_is_a_fault(so101, bus, fault):
    arm = so101()
    before = arm.read()
    setattr(bus, fault, 2)
    np.testing.assert_array_equal(arm.read(), before)
    bus.is_plugged = False
    with pytest.raises(RobotFault, match="the bus does not answer: ConnectionError: Failed to sync read") as fault:
        arm.read()
    assert fault.value.kind == "bus"


@contextmanager
def stands(bus):
    """Meanwhile no shaft moves, but for what a reading is rounded by."""
    before = bus.positions
    yield before
    time.sleep(0.1)
    assert bus.positions == pytest.approx(before, abs=1)


@pytest.mark.parametrize("torque", [0, 1])
def test_who_only_looks_leaves_torque_and_goals_as_they_are(so101, bus, torque):
    with FeetechBus(obeys_old_goals=True) as other:
        for each in (bus, other):
            for servo in each.servos.values():
                servo.set(42, round(servo.at))  # else it would not stand
                servo.write(40, bytes([torque]))
        with stands(bus), stands(other):
            arm = so101(other.path, disable_torque_on_disconnect=True)
            arm.read()
            arm.sense()
            arm.recover()
            arm.close()
        for servo in (*bus.servos.values(), *other.servos.values()):
            assert (servo.has_torque, servo.releases, len(servo.goals)) == (bool(torque), 0, 0)


class LossyBus(FeetechBus):
    """One answer in forty is lost, as on a long cable; to configure an arm takes more."""

    answers = 0

    def _answer(self, number, data):
        self.answers += 1
        if self.answers % 40:
            super()._answer(number, data)


def test_an_arm_whose_answers_get_lost_connects_and_switches_its_torque_on(so101):
    with LossyBus() as bus, FeetechBus() as other:
        arm = so101(other.path, port=bus.path)
        say_ready(arm)
        assert all(servo.has_torque for servo in bus.servos.values())
        arm.close()


def test_torque_comes_on_where_each_servo_stands_and_this_is_told(so101, bus):
    with FeetechBus(obeys_old_goals=True) as other:
        arm = so101(other.path)
        bus.place({1: 1000, 3: 2500})
        with stands(bus) as at, stands(other):
            for _ in range(2):
                np.testing.assert_allclose(say_ready(arm), arm.read(), atol=0.1)
        assert {number: servo.goals[0][1] for number, servo in bus.servos.items()} == pytest.approx(at, abs=1)
        assert all(servo.has_torque for servo in bus.servos.values())
        assert not any(servo.has_torque for servo in other.servos.values()), "a hand leads it"


def test_a_servo_out_of_its_range_is_named_and_no_torque_comes_on(so101, bus):
    arm = so101()
    bus.place({3: ENDS[2][0] - 100})  # lerobot reads it as its end
    with (
        stands(bus),
        pytest.raises(RobotFault, match="elbow_flex is at step 800, and its calibration says 900 to 3100"),
    ):
        say_ready(arm)
    assert not any(servo.has_torque for servo in bus.servos.values())
    bus.place({3: ENDS[2][0] - 10})  # at a mechanical end
    say_ready(arm)
    assert all(servo.has_torque for servo in bus.servos.values())


def test_a_servo_that_has_lost_its_torque_is_held_where_it_stands_and_no_other_one_falls(so101, bus):
    """The answer to its switch is lost, too, so that lerobot asks again."""
    arm = so101()
    say_ready(arm)
    for number in (2, 4):
        bus.servos[number].memory[40] = 0  # an overload
    bus.place({2: 1200})
    with stands(bus):
        bus.to_drop = 1
        assert say_ready(arm)[1] == pytest.approx((1200 - 900) / 2300 * 200 - 100, abs=0.1)
    bus.servos[2].memory[40] = 0
    bus.place({2: 700})
    arm = so101()
    with stands(bus), pytest.raises(RobotFault, match="shoulder_lift is at step 700"):
        say_ready(arm)
    assert [servo.has_torque for servo in bus.servos.values()] == [True, False, True, True, True, True]


WORDS = (
    "task=so101", "~task.env.cameras.front", "~task.env.cameras.wrist", "~task.env.options.leader",
    "task.env.operator=none", "task.has_operator=false", "task.id=me",
)  # fmt: skip


def said_ready(robot):
    """Whether the robot takes it."""
    with suppress(RobotFault):
        robot.recover()
        return True
    return False


def test_neither_the_check_nor_an_actors_start_nor_a_fault_moves_an_arm_before_ready(bus, tmp_path):
    (tmp_path / "me.json").write_text(json.dumps(bus.calibration()))
    words = [*WORDS, f"task.port={bus.path}", f"task.calibration_dir={tmp_path}"]
    with stands(bus):
        status, said = called("check_robot", *words, "--seconds", "0.2")
        assert "ok   observe" in said, (status, said)
    task = composed(CONFIG, ["actor=true", *words]).task.env
    with stands(bus):
        robot = GuardedRobot(
            task.driver, address=task.address, fps=task.fps, limits=task.limits, home=task.home, options=task.options
        )
        for _ in range(10):
            robot.observe()
            time.sleep(0.02)
    try:
        with stands(bus):
            until(lambda: said_ready(robot))
        robot.command(np.array([10, 0, 0, 0, 0, 50], np.float32))
        until(lambda: len(bus.servos[1].goals) > 5)
        bus.is_plugged = False
        with pytest.raises(RobotFault, match="the bus does not answer"):
            until(lambda: not robot.observe())
        for servo in bus.servos.values():  # somebody has cut the power, moved the arm, and put the power back
            servo.memory[40] = 0
        bus.place({1: 1000})
        bus.is_plugged = True
        with stands(bus):
            time.sleep(0.2)
        with stands(bus):  # an answer that came late on a busy machine may be taken for another: ready is said again
            until(lambda: said_ready(robot), why="it takes no ready")
        assert all(servo.has_torque for servo in bus.servos.values())
    finally:
        robot.close()


@pytest.mark.usefixtures("patient_guards")
def test_the_check_of_an_arm_with_a_tool_says_where_its_probe_may_begin(bus, tmp_path):
    (tmp_path / "me.json").write_text(json.dumps(bus.calibration()))
    alone = [word for word in WORDS if "leader" not in word]
    words = [*alone, "task=so101_tool", f"task.port={bus.path}", f"task.calibration_dir={tmp_path}"]
    said = called("check_robot", *words, "--move")[1]
    assert "the limits allow no step here: move the arm by hand, away from its ends, and its tool into" in said
    config = composed(CONFIG, ["actor=true", *words])
    (path := tmp_path / "calls").touch()
    for name, word in watched(OmegaConf.to_container(config.task.env, resolve=True), str(path)).items():
        OmegaConf.update(config, f"task.env.{name}", word, merge=False)
    with stands(bus), instantiate(config.task.env)() as env:  # as the check of the whole robot makes it
        assert env.spec.action.names == ("x", "y", "z", "gripper")
        assert len(env.robot.hold_action()) == 4
        env.robot.observe()


def test_arm_and_leader_whose_ports_vanished_come_back_with_them(so101, bus, tmp_path):
    ports = {side: tmp_path / side for side in ("follower", "leader")}
    with FeetechBus(speed=30_000) as one, FeetechBus(speed=30_000) as other:
        for port, at in zip(ports.values(), (one, other), strict=True):
            port.symlink_to(at.path)
        arm = so101(str(ports["leader"]), port=str(ports["follower"]))
        before = arm.read()
    with pytest.raises(RobotFault, match="the bus does not answer"):
        arm.recover()
    with FeetechBus(speed=30_000) as one, FeetechBus(speed=30_000) as other:
        for port, at in zip(ports.values(), (one, other), strict=True):
            port.unlink()
            port.symlink_to(at.path)
        say_ready(arm)
        np.testing.assert_allclose(arm.read(), before, atol=0.2)
        assert len(arm.sense()["leader"]) == len(before)
        arm.close()


def test_ports_that_changed_their_names_are_a_fault_until_they_are_as_before(so101, tmp_path):
    port = tmp_path / "port"
    with FeetechBus(speed=30_000) as before:
        port.symlink_to(before.path)
        arm = so101(port=str(port))
    with FeetechBus(speed=30_000) as own, FeetechBus(speed=30_000) as other:
        other.servos[1].set(MIN_AT, ENDS[1][0] + 100)
        for at, is_own in ((other, False), (other, False), (own, True)):
            port.unlink()
            port.symlink_to(at.path)
            with nullcontext() if is_own else pytest.raises(RobotFault, match="is not the one of its calibration"):
                arm.recover()


def test_a_leader_in_another_unit_than_its_robot_is_refused(so101):
    with FeetechBus(speed=30_000) as leader, pytest.raises(ConfigError, match="is in % there, and in deg of the robot"):
        so101(leader.path, use_degrees=True)


def test_one_that_is_not_calibrated_is_refused_with_the_command_to_run(bus, tmp_path):
    robot = {"type": "so101_follower", "id": "new", "calibration_dir": str(tmp_path)}
    command = f"lerobot-calibrate --robot.type=so101_follower --robot.port={bus.path} --robot.id=new"
    with pytest.raises(ConfigError, match=f"not calibrated.*{command}"):
        LerobotArm(bus.path, robot=robot)


def test_a_port_where_nobody_answers_is_a_fault(tmp_path):
    with pytest.raises(RobotFault, match="does not answer"):
        LerobotArm("/dev/nowhere", robot={"type": "so101_follower", "id": "me", "calibration_dir": str(tmp_path)})


# -- plugins


@pytest.mark.usefixtures("plugins")
def test_a_plugins_numbers_images_and_leader_are_observed():
    arm = x(leader={"type": "x_leader"})
    assert (dict(arm.entries), dict(arm.ranges)) == ({"base.pos": "", "hand.pos": ""}, {})
    assert {name: feature.shape for name, feature in arm.observation.items()} == {
        "observation.images.eye": (4, 6, 3), "observation.state": (3,), "leader": (2,),
    }  # fmt: skip
    arm.read()
    seen = arm.sense()
    for name, feature in arm.observation.items():
        feature.check(name, seen[name])
    assert seen["leader"].tolist() in ([20, 20], [23, 23])
    assert seen["observation.state"].tolist() == [0, 0, 0.5]
    arm.close()


@pytest.mark.usefixtures("plugins")
def test_what_a_robot_made_of_an_action_is_told():
    arm = x(most=10.0)
    assert arm.write(np.array([5.0, 30.0])).tolist() == [5, 10]


@pytest.mark.usefixtures("plugins")
@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: LerobotArm("", robot={"type": "nobodys"}), "robot.type=nobodys is unknown.*use one of .*so101_fol"),
        (lambda: x(volts=3), r"lerobot's x_robot does not take this.*use .*serial"),
        (lambda: x(serial="new"), "x_robot is not calibrated.*lerobot-calibrate --robot.type=x_robot"),
        (lambda: x(cameras={"eye": {}}), "name them under `cameras`"),
        (lambda: x(leader={"type": "keyboard"}), NO_KEYS),
        (lambda: x(leader={"type": "gamepad"}), "gamepad gives no positions of joints"),
        (lambda: x(leader={"type": "x_leader", "names": "a.pos"}), "x_leader gives a.pos, and x_robot takes base.pos"),
        (lambda: cameras.open_camera("top", {"type": "nobodys"}), r"cameras.top.type=nobodys is unknown"),
        (lambda: cameras.open_camera("top", {"type": "x_camera", "crop": [0, 0, 999, 9]}), "top gives no image.*crop"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_one_sentence(make, said):
    with pytest.raises(ConfigError, match=said) as error:
        make()
    assert "\n" not in str(error.value)


def test_a_cameras_size_and_rate_may_be_its_own():
    words = [f"task.env.cameras.front.{word}=null" for word in ("width", "height", "fps")]
    options = composed(CONFIG, ["actor=true", "task=so101", *words]).task.env.cameras.front
    config = cameras.camera_config("front", {name: options[name] for name in options if name not in cameras.OURS})
    assert (config.width, config.height, config.fps) == (None, None, None)


@pytest.mark.usefixtures("plugins")
def test_a_camera_of_a_plugin_gives_images_with_their_times():
    camera = cameras.open_camera("top", {"type": "x_camera", "width": 32, "height": 24, "size": [12, 16]})
    first = camera.latest()
    later = until(lambda: now if (now := camera.latest()).time > first.time else None)
    camera.close()
    assert camera.feature.shape == (12, 16, 3)
    assert later.time <= time.monotonic()
    assert later.changed == later.time


def test_the_page_on_lerobot_says_of_every_device_how_far_it_was_tried():
    packages = {"robots": "RobotConfig", "teleoperators": "TeleoperatorConfig", "cameras": "CameraConfig"}
    page, known = (ROOT / "docs/guides/lerobot.md").read_text().partition("### Every device")[2], set()
    for package, registry in packages.items():
        module = importlib.import_module(f"lerobot.{package}")
        for place in pkgutil.iter_modules(module.__path__, f"{module.__name__}."):
            with suppress(ImportError):  # one that needs a package which is not here
                importlib.import_module(place.name)
        known |= {kind for kind in getattr(module, registry).get_known_choices() if not kind.startswith("x_")}
    assert len(known) > 30
    assert known - set(re.findall(r"`(\w+)`", page)) == set()
