"""Reads a terminal's keyboard, over SSH too: which key says pause, ready, success, failure, or drives.

What is pasted, or comes faster than a person types, only ever pauses the robot: see Keyboard._hear.
"""

import logging
import math
import os
import re
import select
import termios
import tty
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from typing import Self

from serl_client import clock

from robot_infra.interfaces import Hand

log = logging.getLogger(__name__)

PAUSE, STOP = "p", "q"
KEYS = {"p": "pause", "r": "ready", "n": "next", "s": "success", "f": "failure", "d": "discard", "q": "stop"}
LEGEND = "p pause/resume   r ready   n next phase   s success   f failure   d discard   q twice stop"
TOGGLE = "t"
DIGITS = "0123456789"
STAGED = "stage "  # and a digit: that key was pressed (robot_infra/stages.py)
MOTIONS = {
    "i": ("x", 1), "k": ("x", -1), "j": ("y", 1), "l": ("y", -1), "u": ("z", 1), "o": ("z", -1),
    "g": ("gripper", 1), "h": ("gripper", -1),
}  # fmt: skip
ARROWS = {b"A": "i", b"B": "k", b"C": "l", b"D": "j"}  # up, down, right, left
MOTION_LEGEND = "t take over/hand back   i k or arrows x   j l y   u o z   g grip   h release"
# What arrows and function keys send. Its letters are no keys.
ESCAPES = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*([@-~])|O([@-~]))")
UNFINISHED = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*|O)?\Z")  # the next reading brings its rest
# Bracketed paste, as of xterm: once it is switched on, the terminal puts these marks around what is pasted.
PASTE_ON, PASTE_OFF, PASTE, NO_KEY = b"\x1b[?2004h", b"\x1b[?2004l", b"\x1b[200~", b" "
PASTED = re.compile(rb"\x1b\[200~.*?(?:(\x1b\[201~)|\Z)", re.DOTALL)
PASTE_S = 2.0  # seconds after which a paste is over, so that a mark that is lost leaves nobody unheard
ESCAPE, ESCAPE_S = b"\x1b", 0.25  # the key Escape alone, if nothing has come after it in so many seconds

QUIET = 0.5  # seconds in which nobody types two different keys; what does is a burst
AGAIN = 2.0  # seconds within which STOP is to be said again
HELD = 0.15  # seconds that a motion key counts as held: several periods of a terminal's key repeat
STALE = 1.0  # seconds between two readings; after more, motion keys are dropped: they were pressed in a pause
BACKLOG = 256  # motion keys that wait to be read


class Keyboard:
    """Reads single keys; a context manager that restores the terminal.

    Without a terminal (a pipe, a service, a job in the background) there are no events, and no error. Ctrl-C works as
    usual. A signal that ends the process without an exception leaves the terminal changed: `reset` restores it.
    """

    demonstrates = False

    def __init__(self, descriptor: int = 0) -> None:
        self._descriptor = descriptor
        self._before = termios.tcgetattr(descriptor) if _in_front(descriptor) else None
        self._rest = b""
        self._events: deque[str] = deque()
        self._motions: deque[str] = deque(maxlen=BACKLOG)
        self._heard: dict[str, float] = {}  # key: when it was read; of the last QUIET seconds
        self._asked = self._begun = -math.inf  # when STOP was read alone, when what waits for its rest began
        if self._before is not None:
            tty.setcbreak(descriptor, termios.TCSANOW)
            self._tell(PASTE_ON)

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

    def forget(self, *, hands_back: bool = True) -> None:
        """Forget motion keys that were pressed before now: they were meant for what came before."""
        self._read()
        self._motions.clear()

    def close(self) -> None:
        """Give the terminal back; may be called twice."""
        if self._before is not None and _in_front(self._descriptor):
            termios.tcsetattr(self._descriptor, termios.TCSANOW, self._before)
            self._tell(PASTE_OFF)
        self._before = None

    def _tell(self, code: bytes) -> None:
        with suppress(OSError):  # it may be open for reading alone
            os.write(self._descriptor, code)

    def _read(self) -> None:
        if self._before is None or not _in_front(self._descriptor):
            return
        if not select.select([self._descriptor], [], [], 0)[0]:
            return
        now, is_pasting = clock.monotonic(), self._rest.startswith(PASTE)
        if now > self._begun + (PASTE_S if is_pasting else ESCAPE_S) and (is_pasting or self._rest == ESCAPE):
            self._rest, is_pasting = b"", False
        self._begun = self._begun if is_pasting else now
        typed = self._rest + os.read(self._descriptor, 4096)
        pastes, typed = list(PASTED.finditer(typed)), PASTED.sub(NO_KEY, typed)
        if pastes and not pastes[-1][1]:  # its end is still to come, or a part of it
            self._rest = PASTE + pastes[-1][0][len(PASTE) :][1 - len(PASTE) :]
        else:
            unfinished = UNFINISHED.search(typed)
            self._rest = unfinished.group() if unfinished else b""
            typed = typed[: len(typed) - len(self._rest)]
        self._hear(ESCAPES.sub(_arrow, typed).decode(errors="ignore").lower(), now)

    def _hear(self, typed: str, now: float) -> None:
        """Make events of the keys that were read at once. Only here is decided what is a burst, and what it may do.

        A burst is two different keys within QUIET: PAUSE and STOP hold the robot in it, and no other key counts. Keys
        of MOTIONS, which repeat while they are held, and TOGGLE make no burst.
        """
        keys = dict.fromkeys(key for key in typed if key not in MOTIONS and key != TOGGLE)
        self._heard = {key: at for key, at in self._heard.items() if now < at + QUIET} | dict.fromkeys(keys, now)
        is_quiet = len(self._heard) <= 1
        if is_quiet:
            self._motions += [key for key in typed if key in MOTIONS or key == TOGGLE]
        for key in keys:
            if key == PAUSE:
                self._events.append("pause" if is_quiet and typed.count(key) == 1 else "halt")
            elif key == STOP:
                is_second = is_quiet and now <= self._asked + AGAIN
                self._events.append("stop" if is_second else "halt")
                self._asked = now if is_quiet and not is_second else -math.inf
                if is_quiet and not is_second:
                    log.warning("the robot holds: %s again within %.0f s ends the run; %s resumes", STOP, AGAIN, PAUSE)
            elif is_quiet and key in KEYS:
                self._events.append(KEYS[key])
            elif is_quiet and key in DIGITS:
                self._events.append(STAGED + key)


class KeyboardDevice:
    """Makes the keys of a terminal a Device: events, and motions of x, y, z and gripper.

    drives: its motion keys move the robot; else only TOGGLE and the events count.

    A motion key takes over, and moves the robot while it is held. TOGGLE takes over without a motion, or hands back. Of
    the keys that were pressed while nobody read (a pause, the way home) only TOGGLE counts.
    """

    asks = True

    def __init__(self, keyboard: Keyboard, *, drives: bool = True) -> None:
        self._keyboard, self._drives = keyboard, drives
        self.moves = frozenset(name for name, _ in MOTIONS.values() if drives)
        motions = {"motion keys": MOTION_LEGEND} if drives else {"takeover": f"{TOGGLE} take over/hand back"}
        self.legend: Mapping[str, str] = {"keys": LEGEND, **motions}
        self._pressed: dict[str, tuple[int, float]] = {}  # entry: (direction, until when)
        self._read_at = 0.0

    def read(self) -> Hand:
        now = clock.monotonic()
        is_stale, self._read_at = now - self._read_at > STALE, now
        words, gripper = self._keyboard.poll(), 0
        for key in self._keyboard.motions():
            if key == TOGGLE:
                words.append("toggle")
                self._pressed = {}
            elif self._drives and not is_stale:
                name, direction = MOTIONS[key]
                words.append("take over")
                self._pressed[name] = direction, now + HELD
                gripper = direction if name == "gripper" else gripper
        held = {name: float(sign) for name, (sign, until) in self._pressed.items() if now < until and name != "gripper"}
        return Hand(held, gripper, words=words)

    def forget(self, *, hands_back: bool) -> None:
        self._keyboard.forget()
        self._pressed, self._read_at = {}, clock.monotonic()

    def hand_over(self, *, to_person: bool) -> None:
        """Do nothing: it does not move by itself."""

    def close(self) -> None:
        self._keyboard.close()


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
