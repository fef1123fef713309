"""Who owns an arm, and the devices beside it."""

import fcntl
import os
from pathlib import Path

import pytest
from serl_client.errors import ConfigError

from robot_infra.drivers import owner
from robot_infra.drivers.arm import Arm
from tests.shared.common import until


@pytest.fixture
def device(monkeypatch):
    """A terminal, which is a character device as a robot's port is."""
    monkeypatch.setattr(owner, "PATIENCE", 0.0)
    return os.ttyname(os.openpty()[1])


def test_a_device_is_locked_for_others_and_its_driver_may_open_it_again_and_again(device):
    with owner.owned(device):
        for _ in range(2):
            with open(device, "r+b", buffering=0) as other, pytest.raises(BlockingIOError):
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with pytest.raises(ConfigError, match=f"in use by process {os.getpid()}: stop"), owner.owned(device):
            pass
    with owner.owned(device):
        pass


def test_a_device_that_was_unplugged_is_closed_so_that_it_comes_back_under_its_name(monkeypatch):
    master, slave = os.openpty()
    device = os.ttyname(slave)
    with owner.owned(device):
        os.close(slave)
        os.close(master)
        until(lambda: device not in {os.path.realpath(each) for each in Path("/proc/self/fd").iterdir()})


def test_two_grippers_on_one_bus_have_one_owner(monkeypatch, tmp_path):
    made = []

    class Pair(Arm):
        def __init__(self, address, **options):
            made.append(address)

        def close(self):
            pass

    monkeypatch.setattr(owner.pkgutil, "resolve_name", lambda name: Pair)
    gripper = {"gripper": {"port": str(tmp_path / "bus")}}
    with owner.open_arm("x.Pair", "left", gripper), owner.open_arm("x.Pair", "right", gripper):
        pass
    assert made == ["left", "right"]
    assert not owner._ours


def test_a_device_that_a_program_of_another_make_has_locked_is_left_alone(device):
    with open(device, "r+b", buffering=0) as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match=f"the arm at {device} is in use by a program"), owner.owned(device):
            pass


def test_leader_gripper_and_a_port_that_overrides_the_address_are_owned_too_and_each_arm_of_a_pair_by_itself():
    single = {"robot": {"type": "so101", "port": "/dev/a"}, "leader": {"port": "/dev/b"}, "gripper": {"port": "/dev/c"}}
    assert list(owner._ports({**single, "port": 29999})) == ["/dev/a", "/dev/b", "/dev/c"]
    assert list(owner._ports({"robot": {"left_arm_port": "/dev/d", "id": "x"}})) == ["/dev/d"]
    assert list(owner._ports({"left": {"driver": "x.Y", "address": "l", "options": single}})) == []
