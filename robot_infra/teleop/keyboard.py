"""Makes a terminal's keys an Operator and a Teleop, without X or an extra package, over SSH too."""

import os
import re
import select
import termios
import time
import tty
from collections import deque
from typing import Self

import numpy as np
from serl_client.errors import ConfigError
from serl_client.spec import Array, Feature

from robot_infra.interfaces import Teleop

KEYS = {"p": "pause", "r": "ready", "n": "next", "s": "success", "f": "failure", "d": "discard", "q": "stop"}
LEGEND = "p pause/resume   r ready   n next phase   s success   f failure   d discard   q stop"
TOGGLE = "t"
MOTIONS = {
    "i": ("x", 1), "k": ("x", -1), "j": ("y", 1), "l": ("y", -1), "u": ("z", 1), "o": ("z", -1),
    "g": ("gripper", 1), "h": ("gripper", -1),
}  # fmt: skip
ARROWS = {b"A": "i", b"B": "k", b"C": "l", b"D": "j"}  # up, down, right, left
MOTION_LEGEND = "t take over/hand back   i k or arrows x   j l y   u o z   g grip   h release"
# What arrows and function keys send. Its letters are no keys.
ESCAPES = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*([@-~])|O([@-~]))")
UNFINISHED = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*|O)?\Z")  # the next reading brings its rest

HELD = 0.15  # seconds that a motion key counts as held: several periods of a terminal's key repeat
STALE = 1.0  # seconds between two readings; after more, motion keys are dropped: they were pressed in a pause
SPEED = 0.5  # of the robot's bounds, while a motion key is held
BACKLOG = 256  # motion keys that wait to be read


class Keyboard:
    """Reads single keys; a context manager that restores the terminal.

    Without a terminal (a pipe, a service, a job in the background) there are no events, and no error. Ctrl-C works as
    usual. A signal that ends the process without an exception leaves the terminal changed: `stty sane` restores it.
    """

    def __init__(self, descriptor: int = 0) -> None:
        self._descriptor = descriptor
        self._before = termios.tcgetattr(descriptor) if _in_front(descriptor) else None
        self._rest = b""
        self._events: deque[str] = deque()
        self._motions: deque[str] = deque(maxlen=BACKLOG)
        if self._before is not None:
            tty.setcbreak(descriptor, termios.TCSANOW)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def has_terminal(self) -> bool:
        return self._before is not None

    def poll(self) -> list[str]:
        """Return the events since the last poll, oldest first; unknown keys give none. Never blocks."""
        self._read()
        return _emptied(self._events)

    def motions(self) -> list[str]:
        """Return the keys of MOTIONS, and TOGGLE, since the last call, oldest first. Never blocks."""
        self._read()
        return _emptied(self._motions)

    def close(self) -> None:
        """Give the terminal back; may be called twice."""
        if self._before is not None and _in_front(self._descriptor):
            termios.tcsetattr(self._descriptor, termios.TCSANOW, self._before)
        self._before = None

    def _read(self) -> None:
        if self._before is None or not _in_front(self._descriptor):
            return
        if not select.select([self._descriptor], [], [], 0)[0]:
            return
        typed = self._rest + os.read(self._descriptor, 1024)
        unfinished = UNFINISHED.search(typed)
        self._rest = unfinished.group() if unfinished else b""
        typed = ESCAPES.sub(_arrow, typed[: len(typed) - len(self._rest)])
        for key in typed.decode(errors="ignore").lower():
            if key in KEYS:
                self._events.append(KEYS[key])
            elif key in MOTIONS or key == TOGGLE:
                self._motions.append(key)


class KeyboardTeleop:
    """Moves a robot by a terminal's keys: those of x, y, z and gripper that its ee_delta action has.

    A motion key takes over, and moves the robot while it is held. A gripper key acts until the other one is pressed.
    With no key held the robot holds still. TOGGLE takes over without a motion, or hands back. Of the keys that were
    pressed while nobody read (a pause, the way home) only TOGGLE counts. Raises ConfigError for an action with other
    entries.
    """

    space = "ee_delta"

    def __init__(self, keyboard: Keyboard, action: Feature) -> None:
        known = {name for name, _ in MOTIONS.values()}
        if not action.names or not known.issuperset(action.names):
            entries = ", ".join(action.names) or f"{action.shape[0]} entries without names"
            raise ConfigError(f"a keyboard moves x, y, z and gripper; this robot takes {entries}: use another operator")
        self._keyboard, self._action = keyboard, action
        self._drives = False
        self._pressed: dict[str, tuple[int, float]] = {}  # entry: (direction, until when)
        self._read_at = 0.0

    def reset(self, seed: int, *, demonstrate: bool = True) -> None:
        self._keyboard.motions()  # drop them: they were meant for the episode before
        self._drives, self._pressed, self._read_at = demonstrate, {}, time.monotonic()

    def read(self) -> Array | None:
        now = time.monotonic()
        is_stale, self._read_at = now - self._read_at > STALE, now
        for key in self._keyboard.motions():
            if key == TOGGLE or not is_stale:
                self._press(key, now)
        if not self._drives:
            return None
        assert self._action.low is not None
        assert self._action.high is not None
        action = np.zeros(self._action.shape, self._action.dtype)
        for name, (direction, until) in self._pressed.items():
            if now < until:
                entry = self._action.names.index(name)
                bound = (self._action.high if direction > 0 else self._action.low)[entry]
                action[entry] = bound if name == "gripper" else SPEED * bound
        return action

    def close(self) -> None:
        pass

    def _press(self, key: str, now: float) -> None:
        if key == TOGGLE:
            self._drives, self._pressed = not self._drives, {}
            return
        name, direction = MOTIONS[key]
        self._drives = True
        if name in self._action.names:
            self._pressed[name] = direction, float("inf") if name == "gripper" else now + HELD


def chosen(operator: str, scripted: Teleop, action: Feature, *, clock: str) -> tuple[Teleop, Keyboard | None]:
    """Return the teleop of a robot, and the terminal that it opens, if any.

    operator: `scripted`: the given program; `keyboard`: a person, who needs the real `clock` of the env.
    Raises ConfigError for another operator, and for a keyboard without a terminal or on the simulated clock.
    """
    if operator == "scripted":
        return scripted, None
    if operator != "keyboard":
        raise ConfigError(f"task.env.operator={operator} is unknown; use scripted or keyboard")
    if clock != "real":
        raise ConfigError("task.env.operator=keyboard needs task.env.clock=real: simulated time outruns a person")
    keyboard = Keyboard()
    if not keyboard.has_terminal:
        raise ConfigError("task.env.operator=keyboard needs a terminal: start the actor in one (over SSH: ssh -t)")
    try:
        return KeyboardTeleop(keyboard, action), keyboard
    except ConfigError:
        keyboard.close()
        raise


def _arrow(escape: re.Match[bytes]) -> bytes:
    return ARROWS.get(escape[1] or escape[2], "").encode()


def _emptied(keys: deque[str]) -> list[str]:
    taken = list(keys)
    keys.clear()
    return taken


def _in_front(descriptor: int) -> bool:
    """Return whether this is our terminal. That of another job would stop this process with a signal."""
    if not os.isatty(descriptor):
        return False
    try:
        return os.tcgetpgrp(descriptor) == os.getpgrp()
    except OSError:  # a terminal, but not our controlling one
        return True
