"""Writes and parses the TCP protocol of Dobot's six-axis controllers, V3 and V4. It has no socket and no clock.

Source: Dobot's TCP/IP protocol documents for six axes (V3 of 2024-01-05, V4.5.1 of 2024-08-15) and the alarm tables of
its Python SDKs. On the wire are degrees and millimetres; here are radians.
"""

import logging
import re
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from serl_client.errors import RobotFault
from serl_client.spec import Array

log = logging.getLogger(__name__)

JOINTS = 6
DASHBOARD, FEEDBACK = 29999, 30004  # ports
PERIOD = 0.008  # seconds between two feedback packets
AHEAD, GAIN = (20.0, 100.0), (200.0, 1000.0)  # ranges of ServoJ's options
LONGEST = 3600.0  # seconds, of ServoJ's t

# -- feedback packets

SIZE, TEST = 1440, 0x0123456789ABCDEF
TEST_AT = 48
TEST_BYTES, SIZE_BYTES = TEST.to_bytes(8, "little"), SIZE.to_bytes(2, "little")
HEAD = TEST_AT + len(TEST_BYTES)  # bytes that show where a packet begins
FIELDS: Mapping[str, tuple[int, str]] = {  # name: (offset, format), of what is read here or simulated
    "len": (0, "<u2"), "robot_mode": (24, "<u8"), "time_stamp": (32, "<u8"), "test_value": (TEST_AT, "<u8"),
    "q_target": (192, "6<f8"), "q_actual": (432, "6<f8"), "qd_actual": (480, "6<f8"), "enable_status": (1026, "u1"),
    "running_status": (1028, "u1"), "error_status": (1029, "u1"),
}  # fmt: skip
OFFSETS, FORMATS = zip(*FIELDS.values(), strict=True)
PACKET = np.dtype({"names": [*FIELDS], "formats": FORMATS, "offsets": OFFSETS, "itemsize": SIZE})

# -- the versions


@dataclass(frozen=True)
class Version:
    """Says what differs between two versions of the protocol.

    motion: port of servo commands. servo_replies: whether these are answered. ahead: ServoJ's name of the look-ahead.
    shortest: least t of ServoJ, seconds. stop: ends every motion and what is queued. tells_why: a refusal says whether
    an alarm, the emergency stop, the power or a script is its reason.
    """

    name: str
    motion: int
    servo_replies: bool
    ahead: str
    shortest: float
    stop: str
    tells_why: bool


V3 = Version(
    "V3", motion=30003, servo_replies=False, ahead="lookahead_time", shortest=0.02, stop="ResetRobot()",
    tells_why=False,
)  # fmt: skip
V4 = Version(
    "V4", motion=DASHBOARD, servo_replies=True, ahead="aheadtime", shortest=0.004, stop="Stop()", tells_why=True
)
VERSIONS = {each.name: each for each in (V3, V4)}

# -- robot modes: `robot_mode` of the feedback, and the reply of RobotMode

POWERLESS, DISABLED, IDLE, DRAG, RUNNING, ERROR, PAUSE, COLLISION = 3, 4, 5, 6, 7, 9, 10, 11
SERVO = (IDLE, RUNNING)  # modes in which set points are obeyed
ALARMED = (ERROR, COLLISION)
MODES = {
    1: "starts", 2: "has its brakes open", POWERLESS: "has no power", DISABLED: "is disabled", IDLE: "is enabled",
    DRAG: "is being dragged by hand", RUNNING: "runs", 8: "is jogged from its own screen", ERROR: "has an alarm",
    PAUSE: "is paused", COLLISION: "has met something",
}  # fmt: skip

# -- errors

NOT_TCP = -1_000_000  # ours: this reply has no number
WRONG_MODE = re.compile(rb"control mode is not tcp", re.IGNORECASE)
ERRORS = {  # of a reply: what to do
    -1: "it failed; the controller's own screen may say why",
    -2: "the controller has an alarm: look at the arm, then say ready",
    -3: "the emergency stop is pressed: release it where it was pressed, then say ready",
    -4: "the arm has no power: switch it on, then say ready",
    -5: "a script runs in the controller, or is paused: end it in DobotStudio Pro",
    -10000: "this controller does not know it: try the other version of the protocol, V3 or V4",
    -20000: "this controller wants another number of arguments: its firmware may be too old (V3: at least 3.5.5)",
    NOT_TCP: "the controller is not in TCP mode: choose TCP/IP as control mode in DobotStudio Pro, then say ready",
}
ARGUMENTS = {3: "has another type", 4: "is out of range", 5: "has another type", 6: "is out of range"}
COLLIDED, STOPPED, OVERSPEED = 117, 116, 48  # alarms; overspeed: of the first joint
KINDS = {COLLIDED: "collision", -2: "collision", STOPPED: "estop"}  # of RobotFault
ALARMS = {
    -2: "a collision: free the arm, then say ready",  # V3 lists it so
    COLLIDED: "a collision: free the arm, then say ready",
    STOPPED: "the emergency stop was pressed: release it, then say ready",
    **{OVERSPEED + i: f"joint {i + 1} was too fast: lower its speed limit, or raise t" for i in range(JOINTS)},
    33920: "its output was too fast: lower the speed limit, or raise t",
    33921: "its speed is not the one that it was told: look whether something holds it",
    33922: "its motor is stalled: look whether something holds it",
}


def refusal(reply: "Reply") -> RobotFault:
    """Return the fault that a reply with an error is; a person reads it."""
    if (text := ERRORS.get(reply.error)) is None and (kind := ARGUMENTS.get(-reply.error // 10_000)):
        text = f"argument {-reply.error % 10_000} {kind}: the controller's firmware may expect another one"
    text = text or f"error {reply.error}: look it up in the protocol document of the controller"
    return RobotFault(f"{reply.name or 'the arm'}: {text}", "estop" if reply.error == -3 else "refused")


def alarms(values: str) -> list[tuple[int, int]]:
    """Return (joint, alarm) of each alarm in a reply of GetErrorID; joint 0: of the controller itself."""
    lists = re.findall(r"\[([^\[\]]*)\]", values)[: JOINTS + 1]
    return [(joint, int(each)) for joint, text in enumerate(lists) for each in re.findall(r"-?\d{1,9}", text)]


def alarm_fault(found: Sequence[tuple[int, int]]) -> RobotFault:
    """Return the fault that these alarms are; a person reads it."""
    texts = []
    for joint, number in found:
        text = ALARMS.get(number, "look it up in the list of alarms in DobotStudio Pro, then say ready")
        texts.append(f"alarm {number}{f' of joint {joint}' if joint else ''}: {text}")
    kinds = [KINDS[number] for _, number in found if number in KINDS]
    return RobotFault(
        "; ".join(texts) or "an alarm without a number: look at the arm's own screen", [*kinds, "alarm"][0]
    )


# -- commands


def servo(version: Version, joints: Array, t: float, ahead: float, gain: float) -> bytes:
    """Return ServoJ to these joint angles [6], radians. t: seconds until they are reached."""
    angles = ",".join(f"{angle:.5f}" for angle in np.rad2deg(joints))
    return f"ServoJ({angles},t={t:g},{version.ahead}={ahead:g},gain={gain:g})".encode()


def angles(packet: Any) -> Array:
    """Return the measured joint angles [6] of a feedback packet, radians."""
    return np.deg2rad(packet["q_actual"])


def targets(packet: Any) -> Array:
    """Return the joint angles [6] to which the controller moves, or at which it holds, radians."""
    return np.deg2rad(packet["q_target"])


@dataclass(frozen=True, slots=True)
class Reply:
    """Answers the command of this name. error: 0, or a key of ERRORS. values: the text between its braces."""

    name: str
    error: int
    values: str = ""


REPLY = re.compile(r"\s*(-?\d{1,9})\s*,\s*\{(.*?)\}\s*,\s*(\w{1,64})\s*\(.*\)\s*", re.DOTALL)
LONGEST_REPLY = 8192  # bytes
MOST_ASKED = 128  # commands without a reply: at 33 Hz the controller has said nothing for 4 s


class Replies:
    """Takes what one port says, in whatever pieces, and finds the command that each reply answers.

    That is the oldest one of its name. A reply that answers none is logged (V3 answers no ServoJ) and left out.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._asked: deque[str] = deque()
        self.unexpected = 0

    def ask(self, command: bytes) -> None:
        """Note that a command is sent now. Raises RobotFault if too many have not been answered."""
        if len(self._asked) >= MOST_ASKED:
            raise RobotFault(f"the controller has not answered {MOST_ASKED} commands: look at its network", "link")
        self._asked.append(command.partition(b"(")[0].decode())

    def feed(self, data: bytes) -> list[Reply]:
        """Take received bytes; return the replies that are complete. Raises RobotFault if one has no end."""
        found: list[Reply] = []
        *whole, rest = (self._rest + data).split(b";")
        for part in whole:
            text = self._refused(part, found)
            found += self._matched(text.decode("ascii", "replace"))
        rest = self._refused(rest, found)
        if len(rest) > LONGEST_REPLY:
            raise RobotFault(f"{len(rest)} bytes without the end of a reply: this is no Dobot controller", "link")
        self._rest = rest
        return found

    def _refused(self, text: bytes, found: list[Reply]) -> bytes:
        """Add a Reply for each message of a wrong mode, which ends without a semicolon; return the rest."""
        *refusals, rest = WRONG_MODE.split(text)
        found += [Reply(self._asked.popleft() if self._asked else "", NOT_TCP) for _ in refusals]
        return rest

    def _matched(self, text: str) -> list[Reply]:
        said = REPLY.fullmatch(text)
        name = next((each for each in self._asked if said and each.lower() == said[3].lower()), None)
        if said and name:
            self._asked.remove(name)
            return [Reply(name, int(said[1]), said[2])]
        if text.strip():
            self.unexpected += 1
            if self.unexpected & (self.unexpected - 1) == 0:  # the first, the second, the fourth ...
                log.warning("the controller says what answers no command (%d times): %.100r", self.unexpected, text)
        return []


class Feedback:
    """Takes what the feedback port says, in whatever pieces, and gives whole packets.

    A packet begins where its length and its test value stand. Whatever was lost, added or changed, the next packet that
    came whole is found: one that another begins in is given up, and the last bytes of each are looked at twice.
    The protocol has no checksum: what was changed within a packet is not seen.
    """

    def __init__(self) -> None:
        self._rest = b""  # less than a packet

    def feed(self, data: bytes) -> list[Any]:
        """Take received bytes; return the packets that are complete, oldest first."""
        rest, found = self._rest + data, []
        begin = _head(rest, 0)
        while begin is not None:
            end, follower = begin + SIZE, _head(rest, begin + 1)
            if follower is not None and follower < end:
                begin = follower
            elif len(rest) < end:
                break
            else:
                found.append(np.frombuffer(rest[begin:end], PACKET)[0])
                begin = _head(rest, end)
        self._rest = rest[max(0, len(rest) - HEAD + 1) if begin is None else begin :]
        return found


def _head(data: bytes, start: int) -> int | None:
    """Return where the first packet at or after `start` begins; None: nowhere yet."""
    while (at := data.find(TEST_BYTES, start + TEST_AT)) >= 0:
        start = at - TEST_AT
        if data.startswith(SIZE_BYTES, start):
            return start
        start += 1
    return None
