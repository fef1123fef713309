"""Loads the driver of an arm by its name in the yaml, and locks the arm to one owner: a second program is refused."""

import fcntl
import hashlib
import logging
import os
import pkgutil
import select
import socket
import stat
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, cast

from serl_client import clock
from serl_client.errors import ConfigError

from robot_infra.drivers.arm import Arm
from robot_infra.drivers.urdf import Kinematics

log = logging.getLogger(__name__)

_ours: set[str] = set()  # ports that arms of this process own
PATIENCE = 2.0  # seconds: a guard whose actor has gone holds for one more second


@contextmanager
def open_arm(driver: str, address: str, options: Mapping[str, Any]) -> Iterator[Arm]:
    """Own the arm at this address and each `port` of its options, make its driver, and close it at the end.

    driver: the full name of a class, package.module.Class. options: its own, and `kinematics` (urdf.py), by which an
    arm of joints knows where its tool is. Raises ConfigError if there is no such class, if it takes
    other options, or if the arm has an owner; RobotFault if the arm does not answer.
    """
    try:
        kind = pkgutil.resolve_name(driver)
    except (ImportError, AttributeError, ValueError) as error:
        where = "give the full name of a class, whose folder PYTHONPATH names if it is not Retake's"
        raise ConfigError(f"the driver {driver!r} cannot be imported: {error}; {where}") from None
    if not (isinstance(kind, type) and issubclass(kind, Arm)):
        raise ConfigError(f"the driver {driver} is no class of robot_infra.drivers.arm.Arm (docs/guides/robots.md)")
    make = cast(Callable[..., Arm], kind)
    own = {name: value for name, value in options.items() if name != "kinematics"}
    ports = {os.path.realpath(port) for port in _ports(options)} - _ours  # two grippers may be on one bus
    with owned(address, *ports), ExitStack() as stack:
        _ours.update(ports)
        stack.callback(_ours.difference_update, ports)
        try:
            arm = make(address=address, **own)
        except TypeError as error:
            raise ConfigError(f"task.env.options: give the driver {driver} what it takes: {error}") from error
        stack.callback(arm.close)
        if kinematics := options.get("kinematics"):
            arm.tool = Kinematics(kinematics, arm.entries).tool
        yield arm


def _ports(options: Mapping[str, Any]) -> Iterator[str]:
    """Yield the ports of further devices (a leader arm, a gripper); an arm with a driver of its own owns its own."""
    for name, value in options.items():
        if isinstance(value, Mapping) and "driver" not in value:
            yield from _ports(value)
        elif name.endswith("port") and isinstance(value, str):
            yield value


@contextmanager
def owned(*addresses: str) -> Iterator[None]:
    """Own what is at these addresses: devices, hosts or serial numbers. Two names of one device are the same.

    The kernel frees them when their owner dies: a device by its lock (flock), anything by a name of Linux's abstract
    sockets. Any user may take such a name, so another user's is no reason to leave a device alone that we have locked.
    Raises ConfigError, which names the owner's process and user, if one of them has an owner.
    """
    places = {os.path.realpath(each) if os.path.exists(each) else each.strip().lower(): each for each in addresses}
    with ExitStack() as stack:
        for place, address in places.items():
            _own(place, address, stack)
        yield


def _own(place: str, address: str, stack: ExitStack) -> None:
    name = f"\0retake-arm-{hashlib.blake2b(place.encode(), digest_size=16).hexdigest()}"
    claim, device = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)), _device(place)
    deadline = clock.monotonic() + PATIENCE
    while not ((is_locked := _locked(device)) and _claimed(claim, name)):
        if clock.monotonic() > deadline:
            owner, is_ours = _owner(name)
            if device is None or is_ours or not is_locked:
                if device is not None:
                    os.close(device)
                raise ConfigError(f"the arm at {address} is in use by {owner}: stop its actor, or give another address")
            log.warning("the arm at %s: %s has taken its name, but not its device, so we go on", address, owner)
            break
        clock.sleep(0.05)
    if device is not None:
        _watch(device, stack)


def _watch(device: int, stack: ExitStack) -> None:
    """Close a device of ours at the end, or once it is unplugged: while it is open, it would get another name."""
    ended, poll = os.eventfd(0), select.poll()
    poll.register(device, 0)
    poll.register(ended, select.POLLIN)
    watch = threading.Thread(target=lambda: (poll.poll(), os.close(device)), name="unplugged?", daemon=True)
    watch.start()
    stack.callback(os.close, ended)
    stack.callback(watch.join)
    stack.callback(os.eventfd_write, ended, 1)


def _device(place: str) -> int | None:
    """Open a character device beside its driver; None if it is none, or may not be opened: then the driver says why."""
    with suppress(OSError):
        if stat.S_ISCHR(os.stat(place).st_mode):
            return os.open(place, os.O_RDWR | os.O_NOCTTY | os.O_NONBLOCK)
    return None


def _locked(device: int | None) -> bool:
    try:
        if device is not None:
            fcntl.flock(device, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _claimed(claim: socket.socket, name: str) -> bool:
    try:
        claim.bind(name)
    except OSError:
        return False
    claim.listen(128)
    return True


def _owner(name: str) -> tuple[str, bool]:
    """Return who owns this name, and whether that is a program of our user."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe, suppress(OSError):
        probe.setblocking(False)
        probe.connect(name)
        process, user, _ = struct.unpack("3i", probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        is_ours = user == os.geteuid()
        return f"process {process}" + ("" if is_ours else f" of another user, {user}"), is_ours
    return "a program that hides its number, and may be another user's", False
