"""The simulated arm of a Dobot controller: what its commands answer, its states, and how its joints follow."""

import pytest

from robot_infra.drivers import dobot_protocol as p
from robot_infra.sim.dobot_machine import ENABLING, Machine

both = pytest.mark.parametrize("version", p.VERSIONS)


@pytest.mark.parametrize(
    ("command", "port", "v3", "v4"),
    [("movej(1)", 29999, "-10000,{},movej(1);", "-10000,{},movej(1);"),
     ("GETERRORID( )", 29999, "0,{[[],[],[],[],[],[],[]]},GETERRORID();", "0,{[[],[],[],[],[],[],[]]},GETERRORID();"),
     ("EnableRobot(a)", 29999, "-50001,{},EnableRobot(a);", "-50001,{},EnableRobot(a);"),
     ("EnableRobot(1,2,3,4,5,6)", 29999, "-20000,{},EnableRobot(1,2,3,4,5,6);", "-20000,{},EnableRobot(1,2,3,4,5,6);"),
     ("Stop()", 29999, "-10000,{},Stop();", "0,{},Stop();"),
     ("ServoJ(1,2,3,4,5,6)", 29999, "-10000,{},ServoJ(1,2,3,4,5,6);", "-1,{},ServoJ(1,2,3,4,5,6);"),
     ("ServoJ(1,2,x,4,5,6)", 30003, None, "-10000,{},ServoJ(1,2,x,4,5,6);"),
     ("ServoJ(1,2,nan,4,5,6)", 29999, "-10000,{},ServoJ(1,2,nan,4,5,6);", "-30003,{},ServoJ(1,2,nan,4,5,6);"),
     ("ServoJ(1,2,3,4,5,6,gain=9)", 29999, "-10000,{},ServoJ(1,2,3,4,5,6,gain=9);",
      "-60007,{},ServoJ(1,2,3,4,5,6,gain=9);")],
)  # fmt: skip
def test_commands_are_answered_as_the_document_says(command, port, v3, v4):
    assert [Machine(version, power_s=10).obey(command, port) for version in (p.V3, p.V4)] == [v3, v4]


def passed(machine, seconds):
    for _ in range(round(seconds / p.PERIOD)):
        machine.advance(p.PERIOD)


@both
def test_power_alarm_and_enabling_follow_each_other_in_its_own_time(version):
    machine = Machine(p.VERSIONS[version], power_s=10)
    ask = lambda command: machine.obey(command, p.DASHBOARD)  # noqa: E731
    machine.press()
    assert ask("EnableRobot()")[:2] == "-1" if version == "V3" else "-3"
    assert ask("ClearError()").startswith("-")
    machine.release()
    assert (ask("ClearError()"), machine.mode) == ("0,{},ClearError();", p.POWERLESS)
    assert ask("PowerOn()") == "0,{},PowerOn();"
    passed(machine, 9.9)
    assert machine.mode == p.POWERLESS
    passed(machine, 0.2)
    assert machine.mode == p.DISABLED
    ask("EnableRobot(0.5)")
    passed(machine, ENABLING + 0.01)
    assert machine.mode == p.IDLE


def test_joints_lag_behind_their_set_points_less_with_a_higher_gain_and_never_beyond_their_speed():
    lags = []
    for gain in (200, 1000):
        machine = Machine(p.V4, power_s=10)
        machine.obey("EnableRobot()", p.DASHBOARD)
        passed(machine, 0.3)
        for i in range(30):
            machine.obey(f"ServoJ({6 * i},20,-60,0,90,0,t=0.03,gain={gain})", p.DASHBOARD)
            passed(machine, 0.032)
        lags.append(6 * 29 - machine.q[0])
        assert max(speed for _, speed in machine.speeds) <= 150 + 1e-9
        passed(machine, 1.0)
        assert (machine.q[0], machine.speeds[-1][1]) == (6 * 29, 0)
    assert lags[0] > lags[1] > 0
