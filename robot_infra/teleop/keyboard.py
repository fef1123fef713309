"""The keys of a terminal as an Operator: no X, no extra package, the same over SSH."""

import os
import re
import select
import termios
import tty
from typing import Self

KEYS = {"p": "pause", "n": "next", "s": "success", "f": "failure", "d": "discard", "q": "stop"}
LEGEND = "p pause/resume   n next phase   s success   f failure   d discard   q stop"
ESCAPES = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|O[@-~])")  # what arrows and function keys send; it holds letters


class Keyboard:
    """Reads single keys; a context manager that gives the terminal back as it was.

    Without a terminal (a pipe, a service, a job in the background) there are no events, and no error. Ctrl-C works as
    ever. A signal that ends the process without unwinding (SIGTERM, unless the program turns it into an exception)
    leaves the terminal as it is: `stty sane` mends it.
    """

    def __init__(self, descriptor: int = 0) -> None:
        self._descriptor = descriptor
        self._before = termios.tcgetattr(descriptor) if _in_front(descriptor) else None
        if self._before is not None:
            tty.setcbreak(descriptor, termios.TCSANOW)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def poll(self) -> list[str]:
        """The events since the last poll, oldest first; unknown keys give none. Never blocks."""
        if self._before is None or not _in_front(self._descriptor):
            return []
        if not select.select([self._descriptor], [], [], 0)[0]:
            return []
        keys = ESCAPES.sub(b"", os.read(self._descriptor, 1024)).decode(errors="ignore").lower()
        return [KEYS[key] for key in keys if key in KEYS]

    def close(self) -> None:
        """Give the terminal back; may be called twice."""
        if self._before is not None and _in_front(self._descriptor):
            termios.tcsetattr(self._descriptor, termios.TCSANOW, self._before)
        self._before = None


def _in_front(descriptor: int) -> bool:
    """Whether this is a terminal that we may touch: one that belongs to another job would stop us with a signal."""
    if not os.isatty(descriptor):
        return False
    try:
        return os.tcgetpgrp(descriptor) == os.getpgrp()
    except OSError:  # a terminal, but not the one that controls us
        return True
