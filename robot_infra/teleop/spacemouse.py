"""Reads a SpaceMouse of 3Dconnexion for teleoperation (/dev/hidraw*): scale, dead zone, axes and buttons.

A report begins with its number: 1 has three numbers of the translation, and in newer devices three more of the
rotation; 2 has the rotation where 1 has not; 3 has a bit for each button. Numbers are int16, little-endian, -350 to
350: x to the right, y towards the person, z down, rotations about the same axes.
"""

import math
import struct
from collections.abc import Mapping
from pathlib import Path

from serl_client import clock
from serl_client.errors import ConfigError

from robot_infra.interfaces import Hand
from robot_infra.teleop.raw import RawDevice

VENDORS = ("0000256F", "0000046D")  # 3Dconnexion, and Logitech for its older devices
NAME = "HID_NAME=3Dconnexion"
FULL = 350
DEAD = 0.08  # deflection that counts as rest
MOVED, TURNED, BUTTONS = 1, 2, 3
ENTRIES = (("y", -1), ("x", -1), ("z", -1))  # of the translation's three numbers: entry, direction
TURNS = (("pitch", -1), ("roll", -1), ("yaw", -1))  # of the rotation's
LEFT, RIGHT = 1, 2  # buttons: close, open; both at once: toggle
GRIPPER = {LEFT: 1, RIGHT: -1}
CHORD = 0.08  # seconds that two fingers may take to press both: so long a button alone says nothing
LEGEND = "left button close  right button open  both take over/hand back"


class SpaceMouse(RawDevice):
    """Reads a SpaceMouse: six axes, two buttons for the gripper, both of which together toggle.

    path: of its hidraw device; `auto`: the first one of 3Dconnexion. Raises ConfigError if there is none.
    """

    moves, asks = frozenset(("x", "y", "z", "roll", "pitch", "yaw", "gripper")), False
    legend: Mapping[str, str] = {"spacemouse": LEGEND}

    def __init__(self, path: str = "auto") -> None:
        advice = 'a udev rule must let you read it: KERNEL=="hidraw*", ATTRS{idVendor}=="256f", MODE="0666"'
        super().__init__(_found() if path == "auto" else path, 64, advice)
        self.rest()

    def rest(self) -> None:
        self._shares: dict[str, float] = {}
        self._buttons, self._pressed = 0, -math.inf  # pressed: when the first of them was
        self._is_chord = False  # both were down: neither works the gripper until both are up

    def read(self) -> Hand:
        words: list[str] = []
        tapped = 0  # a button that was let go before it counted as alone
        for report in self.records():
            number, body = report[0], report[1:]
            if number == MOVED and len(body) >= 6:
                self._set(ENTRIES, body[:6])
                if len(body) >= 12:
                    self._set(TURNS, body[6:12])
            elif number == TURNED and len(body) >= 6:
                self._set(TURNS, body[:6])
            elif number == BUTTONS and body:
                before, self._buttons = self._buttons, body[0] & (LEFT | RIGHT)
                if self._buttons == LEFT | RIGHT and not self._is_chord:
                    words.append("toggle")
                    self._is_chord = True
                elif not self._buttons:
                    tapped, self._is_chord = 0 if self._is_alone else before * (not self._is_chord), False
                elif not before:
                    self._pressed = clock.monotonic()
        motion = {name: share for name, share in self._shares.items() if abs(share) > DEAD}
        return Hand(motion, GRIPPER.get(self._buttons if self._is_alone else tapped, 0), words=words)

    @property
    def _is_alone(self) -> bool:
        """Whether a button is pressed for so long that the other one will not join it."""
        return not self._is_chord and clock.monotonic() > self._pressed + CHORD

    def _set(self, entries: tuple[tuple[str, int], ...], body: bytes) -> None:
        for (name, sign), value in zip(entries, struct.unpack("<3h", body), strict=True):
            self._shares[name] = sign * max(-1.0, min(1.0, value / FULL))


def _found() -> str:
    for device in sorted(Path("/sys/class/hidraw").glob("hidraw*")) if Path("/sys/class/hidraw").is_dir() else []:
        said = (device / "device/uevent").read_text()
        if NAME in said and any(vendor in said for vendor in VENDORS):
            return f"/dev/{device.name}"
    raise ConfigError("there is no SpaceMouse (/dev/hidraw*): connect one, or say task.devices.spacemouse=/dev/...")
