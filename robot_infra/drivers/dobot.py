"""Drives a Dobot arm of six joints over TCP, by servo set points alone, with controllers of the protocols V3 and V4."""

import errno
import select
import socket
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
from serl_client import clock
from serl_client.errors import ConfigError, RobotFault
from serl_client.spec import Array

from robot_infra.drivers import dobot_protocol as p
from robot_infra.drivers.arm import Arm

CONNECTING = 3.0  # seconds; a controller may take a moment to notice that its last client has gone
SILENT = 0.5  # seconds without a packet, of which 62 should have come, until the link counts as dead
ASKING = 0.3  # seconds for the alarm's number, once the arm stands
RECOVERING = 25.0  # seconds in all; to switch the power on takes ten of them
STEP = 5.0  # seconds for each other step of it
NAP = 0.002  # seconds between two looks while it waits
FORGET = struct.pack("ii", 1, 0)  # what is still on its way when a link is closed never arrives: it would move the arm
MOST_READS = 16  # of 64 KiB, for one reading


class DobotArm(Arm):
    """Makes a Dobot arm an Arm: joint1 to joint6, radians, and a gripper, percent, if there is one.

    address: host of its controller, which must be in TCP mode. version: V3 or V4, of its protocol. t: seconds from one
    set point to the next, the inverse of the task's `servo_hz`. ahead, gain: of ServoJ (20 to 100, 200 to 1000).
    gripper: {port, id, steps} of a FeetechGripper; None: there is none.

    Nothing is sent before `enable`, and nothing after a fault. `recover` connects anew, so that neither an old command
    nor an old position is on its way. Raises ConfigError for options that cannot be, RobotFault if nobody answers.
    """

    def __init__(
        self, address: str, *, version: str = "V3", t: float = 0.03, ahead: float = 50, gain: float = 500,
        gripper: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        if version not in p.VERSIONS:
            raise ConfigError(f"task.env.options.version={version}: use {' or '.join(p.VERSIONS)}")
        self._host, self._version, self._servo = address, p.VERSIONS[version], (t, ahead, gain)
        ranges = {"t": (self._version.shortest, p.LONGEST), "ahead": p.AHEAD, "gain": p.GAIN}
        for (name, (low, high)), value in zip(ranges.items(), self._servo, strict=True):
            if not low <= value <= high:
                raise ConfigError(f"task.env.options.{name}={value}: {version} takes {low:g} to {high:g}")
        self.entries = {f"joint{i + 1}": "rad" for i in range(p.JOINTS)}
        self._ports: dict[int, socket.socket] = {}
        self._is_ready, self._gripper = False, None
        if gripper is not None:
            from robot_infra.drivers.gripper import NAME, FeetechGripper

            self._gripper = FeetechGripper(**gripper)
            self.entries, self.ranges = {**self.entries, NAME: "%"}, {NAME: [0.0, 100.0]}
        try:
            self._connect()
        except BaseException:
            self.close()
            raise

    def read(self) -> Array:
        with self._failing():
            self._poll()
            if clock.monotonic() > self._heard + SILENT:
                raise self._lost(f"it has told nothing for {SILENT:g} s")
            if self._is_ready:
                self._check()
            joints = p.angles(self._packet)
            return np.append(joints, self._gripper.read()) if self._gripper else joints

    def write(self, positions: Array) -> None:
        if self._is_ready:
            with self._failing():
                self._set(positions[: p.JOINTS])
                if self._gripper:
                    self._gripper.write(float(positions[-1]))

    def recover(self) -> None:
        """Connect anew, then clear alarms, and switch the power on; the brakes stay as they are."""
        self._connect()
        until = clock.monotonic() + RECOVERING
        steps: tuple[tuple[Callable[[], bool], str, float], ...] = (  # (what is in the way, what ends it, seconds)
            (lambda: self._is_alarmed, "ClearError()", STEP),
            (lambda: self._mode == p.PAUSE, self._version.stop, STEP),
            (lambda: self._mode == p.POWERLESS, "PowerOn()", RECOVERING),
        )
        for is_so, command, seconds in steps:
            self._end(is_so, command, min(until, clock.monotonic() + seconds))
        if self._gripper:
            self._gripper.recover()

    def enable(self) -> Array:
        """Switch the motors on; they hold the arm at the controller's own target."""
        self._end(lambda: self._mode not in p.SERVO, "EnableRobot()", clock.monotonic() + STEP)
        held = p.targets(self._packet)
        if self._gripper:
            held = np.append(held, self._gripper.enable())
        self._is_ready = True
        return held

    def close(self) -> None:
        self._is_ready = False
        self._hang_up()
        if self._gripper:
            self._gripper.close()

    # -- what it does

    def _end(self, is_so: Callable[[], bool], command: str, until: float) -> None:
        """If `is_so` holds, send the command that ends it, and wait until it has, until `until` at most."""
        if is_so():
            fault = p.alarm_fault(self._alarms(until)) if self._is_alarmed else None
            self._ask(command, until, fault)
            self._wait(lambda: not is_so(), until, fault)

    @property
    def _mode(self) -> int:
        return int(self._packet["robot_mode"])

    @property
    def _is_alarmed(self) -> bool:
        return self._mode in p.ALARMED or bool(self._packet["error_status"])

    def _set(self, joints: Array) -> None:
        """Send a set point [6], radians."""
        self._send(self._version.motion, p.servo(self._version, joints, *self._servo))

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Send nothing more after a fault, until `recover`."""
        try:
            yield
        except RobotFault:
            self._is_ready = False
            raise

    def _check(self) -> None:
        """Raise RobotFault unless the arm obeys set points."""
        until = clock.monotonic() + ASKING
        if self._refused:
            before = self._packet
            self._wait(lambda: self._packet is not before, until)  # it says why
        if self._is_alarmed:
            raise p.alarm_fault(self._alarms(until))
        if self._mode not in p.SERVO:
            raise self._unable()
        if self._refused:
            raise p.refusal(self._refused)

    def _unable(self) -> RobotFault:
        mode = p.MODES.get(self._mode, f"is in mode {self._mode}")
        return RobotFault(f"the arm at {self._host} {mode}, so it obeys no set points: look at its own screen", "mode")

    def _alarms(self, until: float) -> list[tuple[int, int]]:
        """Ask which alarms there are; none if nobody tells."""
        with suppress(RobotFault):
            return p.alarms(self._ask("GetErrorID()", until))
        return []

    # -- the connection

    def _connect(self) -> None:
        """Open all ports and wait for a packet. Raises RobotFault if there is no arm, or somebody else has it."""
        self._is_ready = False
        self._hang_up()
        until = clock.monotonic() + CONNECTING
        while True:
            self._replies = {port: p.Replies() for port in (p.DASHBOARD, self._version.motion)}
            self._feedback = p.Feedback()
            self._packet: Any = None
            self._answers: list[p.Reply] = []
            self._refused: p.Reply | None = None  # the first set point that the controller did not take
            try:
                for port in (*self._replies, p.FEEDBACK):
                    link = socket.create_connection((self._host, port), timeout=CONNECTING)
                    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, FORGET)
                    link.setblocking(False)
                    self._ports[port] = link
                self._wait(lambda: self._packet is not None, until)
                return
            except OSError as error:
                self._hang_up()
                if clock.monotonic() > until or error.errno in (errno.ENETUNREACH, errno.EHOSTUNREACH):
                    raise RobotFault(f"{self._host} does not answer: {error}; is it switched on?", "link") from None
            except RobotFault:
                self._hang_up()
                if clock.monotonic() > until:
                    raise
            clock.sleep(10 * NAP)

    def _hang_up(self) -> None:
        for link in self._ports.values():
            link.close()
        self._ports.clear()

    def _lost(self, why: str) -> RobotFault:
        self._hang_up()
        return RobotFault(
            f"the connection to {self._host} is lost: {why}. Look at the cable, and whether another program is "
            "connected: the controller takes one client", "link",
        )  # fmt: skip

    def _poll(self) -> None:
        """Take all that has come. Raises RobotFault if the connection is lost, or not in TCP mode."""
        if not self._ports:
            raise self._lost("it was closed")
        for packet in self._feedback.feed(self._receive(p.FEEDBACK)):
            self._packet, self._heard = packet, clock.monotonic()
        for port, replies in self._replies.items():
            for reply in replies.feed(self._receive(port)):
                if reply.error == p.NOT_TCP:
                    raise p.refusal(reply)
                if reply.name != "ServoJ":
                    self._answers.append(reply)
                elif reply.error:
                    self._refused = self._refused or reply

    def _receive(self, port: int) -> bytes:
        """Return what has come, without waiting."""
        parts: list[bytes] = []
        for _ in range(MOST_READS):
            try:
                parts.append(self._ports[port].recv(1 << 16))
            except BlockingIOError:
                break
            except OSError as error:
                raise self._lost(str(error)) from None
            if not parts[-1]:
                raise self._lost("the controller has closed it")
        return b"".join(parts)

    def _send(self, port: int, command: bytes) -> None:
        """Send a command, without waiting. Raises RobotFault if it does not go out whole."""
        if not self._ports:
            raise self._lost("it was closed")
        if port != self._version.motion or self._version.servo_replies:
            self._replies[port].ask(command)
        try:
            sent = self._ports[port].send(command)
        except OSError as error:
            raise self._lost(str(error)) from None
        if sent < len(command):
            raise self._lost("it is jammed")

    def _ask(self, command: str, until: float, fault: RobotFault | None = None) -> str:
        """Return the values of the reply. Raises this fault, or another one, if the controller refuses."""
        self._answers.clear()
        self._send(p.DASHBOARD, command.encode())
        self._wait(lambda: bool(self._answers), until)
        reply = self._answers[-1]
        if reply.error:
            raise fault or p.refusal(reply)
        return reply.values

    def _wait(self, condition: Callable[[], bool], until: float, fault: RobotFault | None = None) -> None:
        """Poll until the condition holds. Raises this fault, or another one, at `until`, seconds of monotonic()."""
        self._poll()
        while not condition():
            if clock.monotonic() > until:
                raise fault or (self._lost("it tells nothing") if self._packet is None else self._unable())
            select.select(list(self._ports.values()), [], [], NAP)
            self._poll()
