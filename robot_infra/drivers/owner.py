"""Loads the driver of an arm by its name in the yaml, and locks the arm to one owner: a second program is refused."""

import hashlib
import os
import pkgutil
import socket
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, cast

from serl_client import clock
from serl_client.errors import ConfigError

from robot_infra.drivers.arm import Arm

PATIENCE = 2.0  # seconds: a guard whose actor has gone holds for one more second


@contextmanager
def open_arm(driver: str, address: str, options: Mapping[str, Any]) -> Iterator[Arm]:
    """Own the arm at this address, make its driver, and close it at the end.

    driver: the full name of a class, package.module.Class. Raises ConfigError if there is no such class, if it takes
    other options, or if the arm has an owner; RobotFault if the arm does not answer.
    """
    try:
        kind = pkgutil.resolve_name(driver)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"there is no driver {driver!r}: {error}; give the full name of a class") from None
    if not (isinstance(kind, type) and issubclass(kind, Arm)):
        raise ConfigError(f"the driver {driver} is no class derived from robot_infra.drivers.arm.Arm")
    make = cast(Callable[..., Arm], kind)
    with owned(address):
        try:
            arm = make(address=address, **options)
        except TypeError as error:
            raise ConfigError(f"the driver {driver} does not take these options: {error}") from error
        try:
            yield arm
        finally:
            arm.close()


@contextmanager
def owned(address: str) -> Iterator[None]:
    """Own the arm at this address: a device, a host or a serial number. Two names of one device are the same.

    The kernel frees the arm when its owner dies: this is a name of Linux's abstract sockets, and no file. Raises
    ConfigError, which names the owner's process, if the arm has one.
    """
    place = os.path.realpath(address) if os.path.exists(address) else address.strip().lower()
    name = f"\0retake-arm-{hashlib.blake2b(place.encode(), digest_size=16).hexdigest()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as claim:
        deadline = clock.monotonic() + PATIENCE
        while not _claimed(claim, name):
            if clock.monotonic() > deadline:
                raise ConfigError(
                    f"the arm at {address} is in use by {_owner(name)}: stop its actor, or give another address"
                )
            clock.sleep(0.05)
        yield


def _claimed(claim: socket.socket, name: str) -> bool:
    try:
        claim.bind(name)
    except OSError:
        return False
    claim.listen(128)
    return True


def _owner(name: str) -> str:
    """Return who owns this name."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe, suppress(OSError):
        probe.setblocking(False)
        probe.connect(name)
        process, *_ = struct.unpack("3i", probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        return f"process {process}"
    return "another process"
