"""The protocol of Dobot's controllers as bytes: replies and feedback in whatever pieces, and what errors say."""

import struct
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serl_client.errors import RobotFault

from robot_infra.drivers import dobot_protocol as p
from tests.faults.fuzzing import feedback

NAMES = ("ClearError", "EnableRobot", "GetErrorID", "ServoJ")
VALUES = ("", "5", "[[117],[],[],[],[],[],[]]", "1.5,-2,3,4,5,6")


def cut(data, chance):
    """The bytes in pieces, some of them empty."""
    cuts = sorted(chance.randrange(len(data) + 1) for _ in range(chance.randrange(12)))
    return [data[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(data)], strict=True)]


# -- replies


@settings(max_examples=60)
@given(st.lists(st.tuples(st.sampled_from(NAMES), st.sampled_from(VALUES), st.sampled_from((0, -1, p.NOT_TCP)))),
       st.randoms(use_true_random=False))  # fmt: skip
def test_each_reply_finds_its_command_however_it_is_cut_and_what_nobody_asked_is_left_out(said, chance):
    replies, text = p.Replies(), ""
    for name, values, error in said:
        replies.ask(f"{name}(1,t=2)".encode())
        if chance.random() < 0.3:
            text += chance.choice(("0,{},MovJ(1,2);", ";", "garbage\xff;", "99999999999,{},ClearError();"))
        reply = f"{error},{{{values}}},{name.upper()}(1.0,t=2);"
        text += "Control Mode Is Not Tcp" + chance.choice(("", "\t", ";")) if error == p.NOT_TCP else reply
    found = [reply for piece in cut(text.encode("latin-1"), chance) for reply in replies.feed(piece)]
    assert found == [p.Reply(name, error, "" if error == p.NOT_TCP else values) for name, values, error in said]


def test_a_reply_may_come_before_one_that_was_asked_earlier_and_one_too_many_is_logged(caplog):
    replies = p.Replies()
    replies.ask(b"PowerOn()")
    replies.ask(b"RobotMode()")
    assert replies.feed(b"0,{5},RobotMode();0,{},ServoJ(1,2,3,4,5,6);") == [p.Reply("RobotMode", 0, "5")]
    assert "answers no command (1 times): '0,{},ServoJ" in caplog.text
    assert replies.feed(b"0,{},PowerOn();" + 1000 * b"0,{},ServoJ();") == [p.Reply("PowerOn", 0)]
    assert (replies.unexpected, len(caplog.records)) == (1001, 10)


def test_a_controller_that_never_ends_a_reply_or_never_replies_is_a_fault_before_it_fills_the_memory():
    with pytest.raises(RobotFault, match="no Dobot controller"):
        p.Replies().feed(b"0,{" * p.LONGEST_REPLY)
    replies = p.Replies()
    for _ in range(p.MOST_ASKED):
        replies.ask(b"ServoJ()")
    with pytest.raises(RobotFault, match="has not answered 128 commands"):
        replies.ask(b"ServoJ()")


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [(-3, "estop", "ServoJ: the emergency stop is pressed: release"), (p.NOT_TCP, "refused", "choose TCP/IP as"),
     (-30004, "refused", "argument 4 has another type"), (-60007, "refused", "argument 7 is out of range"),
     (-12345, "refused", "error -12345: look it up")],
)  # fmt: skip
def test_an_error_number_says_what_to_do(error, kind, said):
    fault = p.refusal(p.Reply("ServoJ", error))
    assert said in str(fault)
    assert fault.kind == kind


@pytest.mark.parametrize(
    ("values", "kind", "said"),
    [("[[117,9],[],[],[],[],[],[]]", "collision", "alarm 117: a collision: free the arm.*alarm 9: look it up"),
     ("[[],[],[33922],[],[],[],[]]", "alarm", "alarm 33922 of joint 2: its motor is stalled"),
     ("[[],[],[],[],[],[],[]]", "alarm", "an alarm without a number"), ("[" * 5000, "alarm", "without a number")],
)  # fmt: skip
def test_alarms_say_which_joint_and_what_to_do(values, kind, said):
    fault = p.alarm_fault(p.alarms(values))
    assert fault.kind == kind
    with pytest.raises(RobotFault, match=said):
        raise fault


# -- commands and feedback


@pytest.mark.parametrize(
    ("version", "said"),
    [("V3", b"ServoJ(90.00000,-180.00000,0.00000,57.29578,0.00000,-0.05730,t=0.03,lookahead_time=50,gain=500)"),
     ("V4", b"ServoJ(90.00000,-180.00000,0.00000,57.29578,0.00000,-0.05730,t=0.03,aheadtime=50,gain=500)")],
)  # fmt: skip
def test_a_set_point_in_radians_is_in_degrees_on_the_wire(version, said):
    joints = np.array([np.pi / 2, -np.pi, 0, 1, 0, -0.001])
    assert p.servo(p.VERSIONS[version], joints, 0.03, 50, 500) == said


def test_a_packet_has_its_fields_where_the_document_has_them():
    data = bytearray(p.SIZE)
    for at, form, value in ((0, "<H", 1440), (24, "<Q", 9), (48, "<Q", 0x0123456789ABCDEF), (1029, "B", 1)):
        struct.pack_into(form, data, at, value)
    struct.pack_into("<6d", data, 432, *range(0, 180, 30))
    (packet,) = p.Feedback().feed(bytes(data))
    assert (packet["robot_mode"], packet["error_status"]) == (9, 1)
    np.testing.assert_allclose(p.angles(packet), np.arange(6) * np.pi / 6)
    assert p.PACKET.itemsize == 1440


def test_ports_and_modes_which_the_simulation_has_from_here_are_those_of_the_document():
    assert (p.DASHBOARD, p.FEEDBACK, p.V3.motion, p.V4.motion) == (29999, 30004, 30003, 29999)
    modes = (p.POWERLESS, p.DISABLED, p.IDLE, p.DRAG, p.RUNNING, p.ERROR, p.PAUSE, p.COLLISION)
    assert modes == (3, 4, 5, 6, 7, 9, 10, 11)


@settings(max_examples=60)
@given(st.integers(0, 10**9))
def test_every_packet_that_came_whole_is_found_whatever_came_between(number):
    feedback.run(feedback.make(Random(number), number), Path())


def test_a_stream_without_a_packet_is_not_kept():
    parser = p.Feedback()
    for noise in (b"\0" * 100_000, (p.TEST_BYTES + b"12345678") * 10_000, p.SIZE_BYTES * 50_000):
        assert parser.feed(noise) == []
        assert len(parser._rest) < p.SIZE + p.HEAD
