"""The simulated servos: what lerobot's own SO-101 finds, moves and misses on them, and packets by hand."""

import json
import os
import select
import signal
import subprocess
import sys
from contextlib import closing, contextmanager
from types import SimpleNamespace

import pytest

from robot_infra.sim.feetech import ENDS, FeetechBus
from tests.shared.common import ROOT, until

pytestmark = pytest.mark.slow  # lerobot's import of torch takes seconds
MISSING = "the extra `robots` is not installed: . examples/install.sh --extra robots"
PING, READ, WRITE, SYNC_READ, EVERYONE = 1, 2, 3, 0x82, 0xFE
TORQUE, GOAL, PRESENT = 40, 42, 56


@pytest.fixture
def bus(clock):
    """Six servos that turn as the test's clock passes."""
    with FeetechBus(speed=30_000) as made:
        yield made


@pytest.fixture(scope="module")
def so101(patient_drivers):
    """lerobot's own classes of an SO-101."""
    pytest.importorskip("lerobot", reason=MISSING)
    from lerobot.motors import MotorCalibration
    from lerobot.robots.so_follower import SO101Follower, SO101FollowerConfig
    from lerobot.teleoperators.so_leader import SO101Leader, SO101LeaderConfig

    return SimpleNamespace(
        follower=lambda **options: SO101Follower(SO101FollowerConfig(**options)),
        leader=lambda **options: SO101Leader(SO101LeaderConfig(**options)),
        calibration=lambda found: {name: MotorCalibration(**each) for name, each in found.items()},
    )


@pytest.fixture
def connected(so101, bus, tmp_path):
    """connected(kind, **options): a follower or a leader of lerobot on the bus, inside `with`."""

    @contextmanager
    def connected(kind="follower", **options):
        (tmp_path / "me.json").write_text(json.dumps(bus.calibration()))
        options = {"port": bus.path, "id": "me", "calibration_dir": tmp_path, "use_degrees": False, **options}
        device = getattr(so101, kind)(**options)
        device.connect(calibrate=False)
        try:
            yield device
        finally:
            if device.is_connected:
                device.disconnect()

    return connected


@pytest.fixture
def port(bus):
    """The serial port, opened by hand."""
    descriptor = os.open(bus.path, os.O_RDWR | os.O_NOCTTY)
    yield descriptor
    os.close(descriptor)


def packet(number, *given):
    body = bytes([number, len(given) + 1, *given])
    return b"\xff\xff" + body + bytes([~sum(body) & 0xFF])


def said(port, data, size):
    """Send `data`, and return the answers, which have `size` bytes in all."""
    os.write(port, data)
    found = b""
    while len(found) < size and select.select([port], [], [], 30.0)[0]:
        found += os.read(port, 4096)
    return found


def is_there(port, number=1):
    return said(port, packet(number, PING), 6) == packet(number, 0)


# -- lerobot's own classes


def test_a_torque_that_comes_on_moves_nothing_unless_there_is_a_new_goal(connected, bus, clock):
    with connected() as robot:
        robot.send_action({"shoulder_pan.pos": 50.0})
        until(lambda: bus.servos[1].goals)
        clock.advance(1)
        assert bus.positions[1] == bus.servos[1].goals[-1][1]
        robot.bus.disable_torque()
        bus.place({1: 1000})
        robot.bus.enable_torque()
        clock.advance(1)
        assert bus.positions[1] == 1000
        robot.bus.disable_torque()
        robot.bus.write("Goal_Position", "shoulder_pan", 1500, normalize=False)
        clock.advance(1)
        assert bus.positions[1] == 1000
        robot.bus.enable_torque()
        clock.advance(1)
        assert bus.positions[1] == 1500


def test_a_hand_that_meets_torque_is_turned_back_at_the_servos_speed(connected, bus, clock):
    with connected() as robot:
        goal = bus.positions[1]
        clock.advance(0.1)  # time in which it might have moved is not saved up
        bus.place({1: goal - 1000})
        clock.advance(0.01)
        assert bus.positions[1] == pytest.approx(goal - 700)
        clock.advance(0.1)
        assert bus.positions[1] == goal
        assert robot.bus.sync_read("Present_Position", ["shoulder_pan"], normalize=False) == {"shoulder_pan": goal}


def test_a_calibration_that_lerobot_writes_moves_the_positions_by_its_offset(connected, so101, bus, clock):
    written = bus.calibration()
    written["shoulder_pan"] |= {"homing_offset": -300, "range_min": 500, "range_max": 3500}
    with connected("leader") as leader:
        leader.bus.write_calibration(so101.calibration(written))
        assert leader.is_calibrated
        assert bus.calibration() == written
        bus.place({1: 1000, 2: 1200})
        assert leader.bus.sync_read("Present_Position", ["shoulder_pan"], normalize=False) == {"shoulder_pan": 1300}
        assert leader.bus.set_half_turn_homings("shoulder_lift") == {"shoulder_lift": 1200 - 2047}
        assert leader.bus.read("Present_Position", "shoulder_lift", normalize=False) == 2047
        leader.bus.write("Goal_Position", "shoulder_pan", 1800, normalize=False)
        leader.bus.enable_torque("shoulder_pan")
        clock.advance(1)
        assert bus.positions[1] == 1500


def test_goals_are_remembered_in_order_however_they_were_written(connected, bus, clock):
    with connected() as robot:
        for value in (10.0, 20.0):
            robot.send_action({"elbow_flex.pos": value, "gripper.pos": 0.0})
            until(lambda value=value: len(bus.servos[6].goals) == value / 10)
            clock.advance(1)
        robot.bus.write("Goal_Position", "elbow_flex", -10, normalize=False)
        low, high = ENDS[2]
        goals = [int((100 + value) / 200 * (high - low) + low) for value in (10, 20)]
        assert [*bus.servos[3].goals] == [(clock.now - 2 + i, goal) for i, goal in enumerate([*goals, -10])]
        assert [goal for _, goal in bus.servos[6].goals] == [ENDS[5][0]] * 2
        clock.advance(1)
        assert bus.positions[3] == low, "never beyond its limit"


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGINT])
def test_two_arms_rehearse_on_the_command_line_until_it_is_told_to_end(so101, tmp_path, ending):
    (tmp_path / "leader").symlink_to("/dev/nowhere")  # of one that was killed
    command = [sys.executable, "-m", "robot_infra.sim.feetech", tmp_path, "--leader-waves"]
    program = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        line = program.stdout.readline()
        assert str(tmp_path / "follower") in line
        assert "Ctrl-C ends them" in line
        options = {"calibration_dir": tmp_path, "use_degrees": False}
        leader = so101.leader(port=str(tmp_path / "leader"), id="leader", **options)
        follower = so101.follower(port=str(tmp_path / "follower"), id="follower", **options)
        for device in (leader, follower):
            device.connect(calibrate=False)
            assert device.is_calibrated
        first = leader.get_action()
        until(lambda: abs(leader.get_action()["shoulder_pan.pos"] - first["shoulder_pan.pos"]) > 5)
        led = follower.send_action(leader.get_action())["elbow_flex.pos"]
        until(lambda: follower.get_observation()["elbow_flex.pos"] == pytest.approx(led, abs=0.2))
        for device in (leader, follower):
            device.disconnect()
        program.send_signal(ending)
        assert program.wait(60) == 0
        assert sorted(path.name for path in tmp_path.iterdir()) == ["follower.json", "leader.json"]
    finally:
        program.kill()
        program.wait()
        program.stdout.close()


# -- packets by hand


def test_each_servo_that_is_asked_answers_a_sync_read_with_a_packet_of_its_own(port, bus):
    bus.place({2: 1000, 4: 2000})
    answers = packet(4, 0, *(2000).to_bytes(2, "little")) + packet(2, 0, *(1000).to_bytes(2, "little"))
    assert said(port, packet(EVERYONE, SYNC_READ, PRESENT, 2, 4, 9, 2), len(answers)) == answers


def test_all_servos_answer_a_ping_of_everyone_and_nobody_answers_for_another(port):
    everyone = b"".join(packet(number, 0) for number in range(1, 7))
    assert said(port, packet(EVERYONE, PING), len(everyone)) == everyone
    assert said(port, packet(9, PING) + packet(1, PING), 6) == packet(1, 0)


def test_noise_and_malformed_packets_end_nothing(port):
    noise = (
        b"abc", b"\xff", b"\xff\xff\xff", b"\xff\xff\x01\x00\xfe", b"\xff\xff\x01\x02\x01\x00", packet(1, WRITE),
        packet(1, READ, GOAL), packet(1, WRITE, 200, 1, 2), packet(EVERYONE, 0x83), packet(EVERYONE, 0x83, GOAL, 2, 1),
        packet(EVERYONE, SYNC_READ), packet(1, 99),
    )  # fmt: skip
    for each in noise:
        os.write(port, each)
        until(lambda: packet(2, 0) in said(port, packet(2, PING), 6), every=0.01)


def test_a_client_may_leave_answers_unread_and_come_back(port, bus):
    for _ in range(300):
        os.write(port, packet(EVERYONE, SYNC_READ, 0, 64, *range(1, 7)))
    assert bus.positions[1] == 2047, "it is not stuck"
    again = os.open(bus.path, os.O_RDWR | os.O_NOCTTY)
    with closing(os.fdopen(again, "rb+", buffering=0)):
        until(lambda: not (select.select([again], [], [], 0.05)[0] and os.read(again, 65536)))
        assert is_there(again)
