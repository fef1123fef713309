"""A person's devices: what their reports say, and what becomes of one that is gone."""

import os
import struct

import pytest
from serl_client.errors import ConfigError, RobotFault

from robot_infra.interfaces import Hand
from robot_infra.teleop.gamepad import Gamepad
from robot_infra.teleop.hands import Hands
from robot_infra.teleop.spacemouse import SpaceMouse
from tests.robot.test_hands import AXES, HOLD, at_policy
from tests.shared.robots import Scripted


class Wire:
    """A device file: what a test writes is one report for each reading, as from the kernel."""

    def __init__(self):
        self.read_end, self.write_end = os.pipe2(os.O_DIRECT)  # each write is a packet of its own
        self.path = f"/proc/self/fd/{self.read_end}"

    def send(self, *reports):
        for report in reports:
            os.write(self.write_end, report)

    def unplug(self):
        os.close(self.write_end)
        self.write_end = None

    def close(self):
        os.close(self.read_end)
        if self.write_end is not None:
            self.unplug()


@pytest.fixture
def wire(closes):
    return closes(Wire())


def joystick(*events):
    """Events of Linux's joystick interface: (type, number, value)."""
    return b"".join(struct.pack("<IhBB", 1000 + i, value, *event) for i, (*event, value) in enumerate(events))


BUTTON, AXIS, INITIAL = 1, 2, 0x80


@pytest.fixture
def pad(wire, closes):
    return closes(Gamepad(wire.path))


@pytest.fixture
def mouse(wire, closes):
    return closes(SpaceMouse(wire.path))


PUSHED = joystick((AXIS, 1, -32767), (AXIS, 0, 16384), (BUTTON, 0, 1), (BUTTON, 0, 0), (BUTTON, 5, 1))
OPENED = joystick((BUTTON | INITIAL, 0, 1), (AXIS | INITIAL, 5, 0), (AXIS | INITIAL, 2, 0))
UP = joystick((AXIS, 4, -32767))


@pytest.mark.parametrize(
    "reads",
    [
        [(PUSHED, {"x": 1.0, "y": -0.5}, ["success", "toggle"]), (joystick((AXIS, 1, 200), (AXIS, 0, 0)), {}, [])],
        [(UP[:3], {}, []), (UP[3:], {"z": 1.0}, [])],
        [(OPENED, {}, [])],
    ],
    ids=["sticks move and buttons speak", "two pieces are one event", "what it tells when it is opened is no press"],
)
def test_what_a_gamepads_events_say(wire, pad, reads):
    for data, motion, words in reads:
        wire.send(data)
        hand = pad.read()
        assert hand.motion == pytest.approx(motion, abs=1e-3)
        assert (hand.words, hand.gripper) == (words, 0)


def test_a_trigger_has_hysteresis_and_both_of_them_say_nothing(wire, pad):
    said = []
    for pulled in (0.5, 0.61, 0.45, 0.39, 0.5, 0.7):
        wire.send(joystick((AXIS, 5, round((2 * pulled - 1) * 32767))))
        said.append(pad.read().gripper)
    assert said == [0, 1, 1, 0, 0, 1]
    wire.send(joystick((AXIS, 2, 32767)))
    assert pad.read().gripper == 0
    wire.send(joystick((AXIS, 5, -32767)))
    assert pad.read().gripper == -1


def report(number, *values):
    return struct.pack(f"<B{len(values)}h", number, *values)


@pytest.mark.parametrize(
    "reports",
    [[report(1, 70, -350, 35), report(2, 0, 175, -350)], [report(1, 70, -350, 35, 0, 175, -350)]],
    ids=["split", "combined"],
)
def test_both_layouts_of_a_spacemouse_say_the_same(wire, mouse, reports):
    wire.send(*reports)
    assert mouse.read().motion == pytest.approx({"x": 1.0, "y": -0.2, "z": -0.1, "roll": -0.5, "yaw": 1.0})
    wire.send(report(1, 0, 0, 0, 0, 0, 0) if len(reports) == 1 else report(1, 0, 0, 0))
    left = {"roll": -0.5, "yaw": 1.0} if len(reports) == 2 else {}
    assert mouse.read().motion == left


@pytest.mark.parametrize(
    ("bits", "grips", "toggles"),
    [((1, 1, 1, 0), [0, 0, 1, 0], 0), ((2, 2, 2, 2, 0), [0, 0, -1, -1, 0], 0), ((1, 0, 0), [0, 1, 0], 0),
     ((1, 3, 2, 2, 2, 0), [0] * 6, 1), ((2, 3, 1, 1, 1, 0), [0] * 6, 1), ((3, 2, 3, 0), [0] * 4, 1),
     ((3, 0, 2, 2, 2, 0), [0, 0, 0, 0, -1, 0], 1)],
)  # fmt: skip
def test_a_spacemouses_buttons_grip_and_both_toggle_also_where_one_finger_is_sooner(
    wire, mouse, clock, bits, grips, toggles
):
    said, words = [], []
    for each in bits:  # 20 readings a second
        wire.send(bytes([3, each, 0]))
        hand = mouse.read()
        said.append(hand.gripper)
        words += hand.words
        clock.sleep(0.05)
    assert (said, words) == (grips, ["toggle"] * toggles)


def test_a_tap_that_comes_within_one_reading_is_heard(wire, mouse):
    wire.send(bytes([3, 1, 0]), bytes([3, 0, 0]))
    assert [mouse.read().gripper for _ in range(2)] == [1, 0]


@pytest.mark.parametrize("data", [b"\x01", b"\x02\x00\x01", b"\x17" * 20, b"\x03"], ids=["1", "2", "unknown", "3"])
def test_a_report_that_is_cut_or_unknown_moves_nothing(wire, mouse, data):
    wire.send(data)
    hand = mouse.read()
    assert (dict(hand.motion), hand.gripper, hand.words) == ({}, 0, [])


@pytest.mark.parametrize("device", [Gamepad, SpaceMouse])
def test_a_device_that_is_not_there_is_one_sentence(device, tmp_path):
    with pytest.raises(ConfigError, match="cannot open"):
        device(str(tmp_path / "none"))


def test_a_device_that_is_gone_is_a_fault_until_it_is_back(wire, pad):
    hands = at_policy(pad)
    assert hands.read(HOLD) is None
    wire.unplug()
    assert hands.poll() == [], "between two steps it is no fault: nobody drives"
    with pytest.raises(RobotFault, match="is gone"):
        hands.read(HOLD)
    again = Wire()
    pad.path = again.path
    again.send(joystick((AXIS, 1, -32767)))
    assert hands.read(HOLD).tolist() == [0.5, 0, 0, 0]
    again.close()


@pytest.mark.parametrize(
    ("device", "push"), [("pad", joystick((AXIS, 1, -32767), (AXIS, 5, 32767))), ("mouse", report(1, 0, -350, 0))]
)
def test_what_was_deflected_when_a_device_went_moves_nothing_once_it_is_back(wire, request, device, push):
    device = request.getfixturevalue(device)
    hands = at_policy(device)
    wire.send(push)
    assert hands.read(HOLD)[0] == 0.5
    wire.unplug()
    with pytest.raises(RobotFault, match="is gone"):
        hands.read(HOLD)
    again = Wire()
    device.path = again.path
    hands.poll()
    hands.reset(0, demonstrate=True)
    assert (hands.poll(), hands.read(HOLD)) == ([], None), "a device at rest tells nothing of it"
    again.close()


def test_beside_a_device_that_is_gone_the_others_are_heard(wire, pad):
    hands = Hands([pad, Scripted(Hand(), Hand(words=["pause"]))], AXES, "ee_delta")
    assert hands.poll() == []
    wire.unplug()
    assert hands.poll() == ["pause"]
    with pytest.raises(RobotFault, match="is gone"):
        hands.read(HOLD)
