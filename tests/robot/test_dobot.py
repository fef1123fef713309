"""Dobot arms on simulated controllers of both versions: what the driver sends, and what it does when anything fails.

A simulated controller is a thread of the test, with real sockets at an address of its own.
"""

import socket
import time
from contextlib import suppress

import numpy as np
import pytest
from serl_client.errors import ConfigError, RobotFault

from robot_infra.drivers import dobot_protocol as p
from robot_infra.drivers.dobot import DobotArm
from robot_infra.drivers.gripper import FeetechGripper
from robot_infra.sim.dobot_controller import DobotController, Faults
from robot_infra.sim.dobot_machine import Machine
from robot_infra.sim.feetech import FeetechBus
from tests.shared.arms import say_ready
from tests.shared.common import PATIENCE, until
from tests.shared.dobots import START, address, controller

both = pytest.mark.parametrize("version", p.VERSIONS)
STEP = np.full(6, 0.01)  # radians, in a thirtieth of a second


@pytest.fixture
def make(exits, closes):
    """make(version, **changes of the controller) -> (controller, its driver)"""

    def make(version, options=None, **changes):
        served = exits.enter_context(controller(version, **{"power_s": 0.1, **changes}))
        return served, closes(DobotArm(served.address, version=version, **(options or {})))

    return make


@pytest.fixture
def ready(make):
    """ready(version, ...) -> the same, once somebody has said ready"""

    def ready(version, **changes):
        served, arm = make(version, **changes)
        say_ready(arm)
        return served, arm

    return ready


def stream(arm, step, count=400):
    """Write set points as a guard does, each a step further, and read."""
    at = arm.read()
    for _ in range(count):
        at = at + step
        arm.write(at)
        time.sleep(0.03)
        arm.read()
    return at


def faulty(arm, step=STEP):
    """The fault that comes while it is driven."""
    with pytest.raises(RobotFault) as fault:
        stream(arm, step)
    return fault.value


def sent(served):
    with served.lock:
        return [text for _, text in served.machine.heard]


def is_still(served):
    with served.lock:
        return not served.machine.speed.any()


# -- what it sends


@both
def test_nothing_is_sent_before_somebody_says_ready_and_the_first_set_point_is_the_measured_one(make, version):
    served, arm = make(version)
    for _ in range(3):
        arm.write(arm.read() + 0.1)
    time.sleep(0.05)
    assert sent(served) == []
    np.testing.assert_allclose(arm.read(), START, atol=1e-6)
    say_ready(arm)
    until(lambda: served.machine.targets)
    assert [text.partition("(")[0] for text in sent(served)] == ["EnableRobot", "ServoJ"]
    np.testing.assert_allclose(served.machine.targets[0][1], np.rad2deg(START), atol=1e-4)


@both
def test_it_follows_set_points_within_what_is_measured(ready, version):
    served, arm = ready(version)
    end = stream(arm, STEP, 20)
    until(lambda: np.allclose(arm.read(), end, atol=1e-4))
    np.testing.assert_allclose(served.machine.q, np.rad2deg(end), atol=1e-2)
    assert f"t=0.03,{p.VERSIONS[version].ahead}=50,gain=500" in sent(served)[-1]
    arm.close()
    arm.close()
    assert served.machine.is_enabled, "the motors stay on"


@both
def test_segments_that_are_split_merged_late_or_lost_change_nothing(ready, version, caplog):
    _, arm = ready(version, faults=Faults(split=0.5, merge=0.3, drop=0.2, jitter=0.006))
    end = stream(arm, STEP, 20)
    until(lambda: np.allclose(arm.read(), end, atol=1e-4))
    assert not caplog.records


@both
def test_an_arm_without_power_gets_it_and_one_with_an_alarm_can_be_looked_at(make, version):
    served, arm = make(version)
    with served.lock:
        served.machine.is_powered = False
        served.machine.alarm(33922, joint=2)
    np.testing.assert_allclose(arm.read(), START, atol=1e-6)
    say_ready(arm)
    done = [text for text in sent(served) if "ServoJ" not in text]
    assert done == ["GetErrorID()", "ClearError()", "PowerOn()", "EnableRobot()"]
    stream(arm, STEP, 3)


# -- faults


FAULTS = {  # what happens, what the fault says, its kind, and what a person does then
    "collision": (lambda m: m.alarm(p.COLLIDED), "alarm 117: a collision: free the arm", "collision", None),
    "estop": (Machine.press, "alarm 116: the emergency stop was pressed", "estop", Machine.release),
    "servo": (lambda m: m.alarm(33922, 3), "33922 of joint 3: its motor is stalled", "alarm", None),
    "disabled": (Machine.disable, "is disabled, so it obeys no set points", "mode", None),
    "paused": (Machine.pause, "is paused, so it obeys no set points", "mode", None),
    "screen": (lambda m: setattr(m, "is_tcp", False), "is not in TCP mode: choose", "refused",
               lambda m: setattr(m, "is_tcp", True)),
}  # fmt: skip


@both
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_told_nothing_is_sent_after_it_and_recovery_moves_nothing(ready, version, name):
    happen, said, kind, mend = FAULTS[name]
    served, arm = ready(version)
    stream(arm, STEP, 3)
    with served.lock:
        happen(served.machine)
    fault = faulty(arm)
    assert said in str(fault)
    assert fault.kind == kind
    before = len([text for text in sent(served) if "ServoJ" in text])
    arm.write(START)
    if name == "estop":
        with pytest.raises(RobotFault, match="release it"):
            say_ready(arm)
    time.sleep(0.02)
    assert len([text for text in sent(served) if "ServoJ" in text]) == before
    until(lambda: is_still(served))
    with served.lock:
        (mend or (lambda machine: None))(served.machine)
        at = served.machine.q
    say_ready(arm)
    until(lambda: len(served.machine.targets) and "ServoJ" in sent(served)[-1])
    np.testing.assert_allclose(served.machine.q, at, atol=1e-4)
    stream(arm, STEP, 3)


@both
@pytest.mark.parametrize(
    "lose", [DobotController.cut, lambda served: setattr(served, "is_plugged", False)], ids=["cut", "unplugged"]
)
def test_a_lost_link_leaves_the_arm_at_its_last_set_point_and_connecting_again_never_moves_it(ready, version, lose):
    served, arm = ready(version)
    stream(arm, STEP, 5)
    lose(served)
    fault = faulty(arm)
    assert fault.kind == "link"
    assert "is lost" in str(fault)
    with pytest.raises(RobotFault, match="is lost"):
        arm.read()
    served.is_plugged = True
    until(lambda: is_still(served))
    with served.lock:
        count, at = len(served.machine.heard), served.machine.q
        np.testing.assert_allclose(at, served.machine.targets[-1][1], atol=1e-3)
    say_ready(arm)
    came = until(lambda: sent(served)[count:])
    assert {text.partition("(")[0] for text in came} == {"ServoJ"}, "it is enabled still"
    np.testing.assert_allclose(served.machine.targets[-1][1], at, atol=1e-3)
    np.testing.assert_allclose(served.machine.q, at, atol=1e-3)
    stream(arm, STEP, 3)


@both
def test_a_set_point_that_is_too_far_is_an_alarm_that_names_its_joint(ready, version):
    served, arm = ready(version)
    fault = faulty(arm, np.array([0, 0, 0, 0.5, 0, 0]))
    assert "alarm 51: joint 4 was too fast: lower its speed limit" in str(fault)
    np.testing.assert_allclose(served.machine.q, np.rad2deg(START), atol=1e-4)


@both
@pytest.mark.usefixtures("clock")  # only its naps make time pass
def test_a_second_client_is_told_that_there_is_one(make, version):
    served, arm = make(version)
    with pytest.raises(RobotFault, match="whether another program is connected"):
        DobotArm(served.address, version=version)
    arm.read()
    arm.close()
    DobotArm(served.address, version=version).close()


@pytest.mark.parametrize(
    ("options", "said"),
    [({"version": "V5"}, "use V3 or V4"), ({"t": 0.01}, r"options.t=0.01: V3 takes 0.02 to 3600"),
     ({"gain": 10}, "gain=10: V3 takes 200 to 1000"), ({"gripper": {"port": "", "steps": (9, 3)}}, "from 0 to 4095")],
)  # fmt: skip
def test_options_that_cannot_be_are_refused_before_anything_is_connected(options, said):
    with pytest.raises(ConfigError, match=said):
        DobotArm("127.0.0.1", **options)


@pytest.mark.usefixtures("clock")
def test_an_address_where_nobody_is_says_so():
    host = address()
    with pytest.raises(RobotFault, match=f"{host} does not answer: .*is it switched on"):
        DobotArm(host)


@pytest.mark.slow  # lerobot's import of torch takes seconds
def test_a_gripper_on_a_bus_of_its_own_is_one_more_entry_and_its_fault_stops_the_arm(make):
    pytest.importorskip(
        "scservo_sdk", reason="the extra `robots` is not installed: . examples/install.sh --extra robots"
    )
    with FeetechBus(ids=(1, 2, 3, 4, 5, 21)) as bus:
        served, arm = make("V3", {"gripper": {"port": bus.path, "id": 21}})
        assert (list(arm.entries)[-1], arm.entries["gripper"], arm.ranges) == ("gripper", "%", {"gripper": [0, 100]})
        before = arm.read()
        arm.write(before + 0.01)
        assert not bus.servos[21].goals
        say_ready(arm)
        assert until(lambda: bus.servos[21].goals)[-1][1] == pytest.approx(bus.positions[21], abs=1)
        arm.write(np.append(before[:6], 50))
        until(lambda: abs(arm.read()[6] - 50) < 0.2)
        assert bus.servos[21].goals[-1][1] == pytest.approx((2048 + 3055) / 2, abs=1)
        bus.is_plugged = False
        with pytest.raises(RobotFault, match="the bus does not answer"):
            arm.read()
        time.sleep(0.05)
        count = len(sent(served))
        arm.write(before)
        bus.is_plugged = True
        arm.read()
        assert len(sent(served)) == count
        say_ready(arm)
        arm.close()
        assert bus.servos[21].has_torque


@pytest.mark.slow  # lerobot's import of torch takes seconds
def test_a_gripper_whose_port_vanished_is_a_fault_and_comes_back_with_it(tmp_path):
    pytest.importorskip(
        "scservo_sdk", reason="the extra `robots` is not installed: . examples/install.sh --extra robots"
    )
    port, options = tmp_path / "port", {"ids": (1, 2, 3, 4, 5, 21)}
    with FeetechBus(**options) as bus:
        port.symlink_to(bus.path)
        gripper = FeetechGripper(str(port))
    for call in (gripper.read, lambda: gripper.write(50), gripper.recover):
        with pytest.raises(RobotFault, match=f"the gripper at {port}: .*; look at its cable and power"):
            call()
    with FeetechBus(**options) as bus:
        port.unlink()
        port.symlink_to(bus.path)
        say_ready(gripper)
        assert bus.servos[21].has_torque
        gripper.write(50)
        until(lambda: abs(gripper.read() - 50) < 0.2)
        gripper.close()


# -- the simulated controller


@both
def test_what_is_no_command_or_never_ends_leaves_it_as_it_was(version):
    with controller(version) as served:
        client = socket.create_connection((served.address, p.DASHBOARD), PATIENCE)
        with client, suppress(ConnectionResetError):
            client.sendall(b"\xff\x00))(;(" + b"ServoJ(" + b"1," * 500 + b")" + b"(" * 5000)
            while client.recv(4096):
                pass  # until it is cut off
        DobotArm(served.address, version=version).close()
