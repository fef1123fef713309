"""Reads a gamepad for teleoperation (Linux's /dev/input/js*): sticks, dead zone, and buttons for verdicts.

Source: the kernel's Documentation/input/joydev/joystick-api.rst; axes and buttons are those of its driver xpad.
"""

import struct
from collections.abc import Mapping
from pathlib import Path

from serl_client.errors import ConfigError

from robot_infra.interfaces import Hand
from robot_infra.teleop.raw import RawDevice

EVENT = struct.Struct("<IhBB")  # milliseconds, value, type, number
BUTTON, AXIS, INITIAL = 1, 2, 0x80
FULL = 32767
DEAD = 0.15  # deflection of a stick that counts as rest
STICKS = {0: ("y", -1), 1: ("x", -1), 3: ("yaw", -1), 4: ("z", -1)}  # axis: entry, direction of a positive value
TRIGGERS = {5: 1, 2: -1}  # axis: what it does with the gripper; right closes, left opens
PULLED, RELEASED = 0.6, 0.4  # of a trigger's way: hysteresis, so that a trembling finger gives one command
WORDS = {  # A, B, X, Y, left and right shoulder, back, start
    0: "success", 1: "failure", 2: "discard", 3: "next", 4: "ready", 5: "toggle", 6: "stop", 7: "pause",
}  # fmt: skip
LEGEND = "A success  B failure  X discard  Y next phase  LB ready  RB take over/hand back  start pause  back stop"


class Gamepad(RawDevice):
    """Reads a gamepad: left stick x and y, right stick z and yaw, right trigger closes, left one opens.

    path: of its joystick device; `auto`: the first one. Raises ConfigError if there is none.
    """

    moves, asks = frozenset(("x", "y", "z", "yaw", "gripper")), True
    legend: Mapping[str, str] = {"gamepad": LEGEND}

    def __init__(self, path: str = "auto") -> None:
        path = _found() if path == "auto" else path
        super().__init__(path, EVENT.size * 64, "connect one, or say task.devices.gamepad=/dev/...")
        self._sticks: dict[str, float] = {}
        self._triggers: dict[int, bool] = {}  # whether each one is pulled
        self._rest = b""  # of a record that has not come whole

    def read(self) -> Hand:
        words: list[str] = []
        for data in self.records():
            self._rest += data
            whole = len(self._rest) - len(self._rest) % EVENT.size
            for _, value, kind, number in EVENT.iter_unpack(self._rest[:whole]):
                self._hear(kind, number, value, words)
            self._rest = self._rest[whole:]
        motion = {name: share for name, share in self._sticks.items() if abs(share) > DEAD}
        pulled = [sign for axis, sign in TRIGGERS.items() if self._triggers.get(axis)]
        return Hand(motion, pulled[0] if len(pulled) == 1 else 0, words=words)

    def rest(self) -> None:
        self._sticks, self._triggers, self._rest = {}, {}, b""

    def _hear(self, kind: int, number: int, value: int, words: list[str]) -> None:
        is_new, kind = not kind & INITIAL, kind & ~INITIAL
        if kind == BUTTON and is_new and value and number in WORDS:
            words.append(WORDS[number])
        elif kind == AXIS and number in STICKS:
            name, sign = STICKS[number]
            self._sticks[name] = sign * max(-1.0, min(1.0, value / FULL))
        elif kind == AXIS and number in TRIGGERS and is_new:  # at first xpad tells 0 of a trigger at rest, not -FULL
            share, was = (value / FULL + 1) / 2, self._triggers.get(number, False)
            self._triggers[number] = share > (RELEASED if was else PULLED)


def _found() -> str:
    found = sorted(Path("/dev/input").glob("js*")) if Path("/dev/input").is_dir() else []
    if not found:
        raise ConfigError("there is no gamepad (/dev/input/js*): connect one, or say task.devices.gamepad=/dev/...")
    return str(found[0])
