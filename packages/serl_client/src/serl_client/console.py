"""Draws the live console of actor or learner in the terminal: lines redrawn in place, with the log above.

Without a terminal (a log file, a pipe) it prints one line of changes every ten seconds. Lines of the log begin with
their title and time: `[arm] 2026-11-22 08:40:01 text`. On a terminal the date is left out. Values and lines are
cleaned, because a terminal obeys an escape sequence that a client may have put into its name.
"""

import logging
import math
import os
import shutil
import sys
import textwrap
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, TextIO

import serl_client.clock as clock
from serl_client.names import cleaned

PLAIN_S = 10.0  # seconds between two lines without a terminal
PLAIN_WIDTH = 200  # characters of such a line; values that do not fit are left out
WARNING_S = 60.0  # that a warning stays in the block; what lasts longer is a state, which a line shows
BANNER_S = 0.04  # seconds until a change of the banner is shown: less than one step of most robots
QUIET_S, LINES = 10.0, 5  # within so many seconds a throttled log says at most so many lines of one kind
BACKLOG = 1000  # lines of the log that wait for a slow terminal; beyond it the oldest are dropped
# Each line clears the rest of its own: clearing a screen from its first line on puts it into the scrollback of tmux.
LINE_END = "\x1b[K\n"
# Text and ground of each banner: SGR codes of ECMA-48.
COLOURS = {"POLICY": "30;42", "HUMAN": "30;43", "WAITING": "97;41", "PAUSED": "97;44", "IDLE": "97;100"}


class Console(logging.Handler):
    """Shows a banner, and `name  value` lines under a title.

    As a logging handler it keeps the last warning in the block for WARNING_S, unless the record `is_shown` by another
    line. While a LiveDisplay draws it, logging does not wait for the terminal. A terminal that is gone is no error.
    """

    def __init__(self, title: str, stream: TextIO | None = None, *, plain: bool = False) -> None:
        super().__init__(logging.INFO)
        self._title, self._stream = title, stream or sys.stderr
        self._live = self._stream.isatty() and not plain
        self._rows: dict[str, str] = {}
        self._banner = ""
        self._drawn = 0  # lines of the block on the screen
        self._plain_at = 0.0
        self._plain: dict[str, str] = {}  # rows as they were last printed without a terminal
        self._warning, self._warned = "", 0.0  # the last one, and when it came
        self._lines: deque[str] = deque(maxlen=BACKLOG)  # of the log, to be printed
        self.is_watched = False

    def show(self, rows: Mapping[str, str], banner: str = "") -> None:
        """Replace the block by these lines, under a coloured banner of one word (see COLOURS)."""
        self._rows, self._banner = {name: cleaned(value) for name, value in rows.items()}, banner
        if self._live:
            self._return()
            self._draw()
        elif clock.monotonic() >= self._plain_at:
            self._plain_at = clock.monotonic() + PLAIN_S
            self._write(self._line(banner))

    def _line(self, banner: str) -> str:
        """Return one line of the banner and the changed values that fit; empty if nothing has changed."""
        begin = f"[{self._title}] {time.strftime(stamp(self._stream))}" + f" {banner}" * bool(banner)
        line = begin
        for name, value in self._rows.items():
            part = f" | {name}: {value}"
            if self._plain.get(name) != value and len(line) + len(part) <= PLAIN_WIDTH:
                line += part
                self._plain[name] = value
        return f"{line}\n" * (line != begin)

    def emit(self, record: logging.LogRecord) -> None:
        """Print a log record above the block; while a LiveDisplay draws, only queue it."""
        text = self.format(record)
        if record.levelno >= logging.WARNING and not getattr(record, "is_shown", False):
            self._warning = f"{time.strftime('%H:%M:%S')} {cleaned(record.getMessage())}"
            self._warned = clock.monotonic()
        self._lines.append(f"[{self._title}] {text}\n")
        if not self.is_watched:
            self.flush()

    def flush(self) -> None:
        if not self._lines:
            return
        self._return()
        while self._lines:
            text = self._lines.popleft()
            self._write(text.replace("\n", LINE_END) if self._live else text)
        if self._live and self._rows:
            self._draw()

    def _draw(self) -> None:
        columns, height = self._size()
        width = columns - 1
        is_new = self._warning and clock.monotonic() < self._warned + WARNING_S
        rows = {"last warning": self._warning, **self._rows} if is_new else self._rows
        lines = [f"-- {self._title} ".ljust(min(width, 72), "-")[:width]]
        for name, value in rows.items():
            lines += textwrap.wrap(f"{name:>13}  {value}", width, subsequent_indent=" " * 15 * (width > 30)) or [""]
        if self._banner:
            colour = COLOURS.get(self._banner, "7")
            words = (line[:width].ljust(min(width, 72)) for line in ("", f"   {self._banner}", ""))
            lines[:0] = [f"\x1b[1;{colour}m{line}\x1b[0m" for line in words]
        lines = lines[: max(1, height - 2)]
        self._drawn = len(lines)
        self._write("".join(line + LINE_END for line in lines) + "\x1b[J")

    def _size(self) -> os.terminal_size:
        """Return the columns and lines of the terminal that is drawn on, whatever the environment says of another.

        A terminal that nobody gave a size (of `script`, of a container) says 0 of both.
        """
        with suppress(OSError, ValueError):
            if min(size := os.get_terminal_size(self._stream.fileno())) > 1:
                return size
        return shutil.get_terminal_size()

    def _return(self) -> None:
        """Go back to the block's first line, to write over it."""
        if self._drawn:
            self._write(f"\x1b[{self._drawn}F")
            self._drawn = 0

    def _write(self, text: str) -> None:
        with suppress(OSError):
            self._stream.write(text)
            self._stream.flush()


class LiveDisplay:
    """Shows `rows()` on a console every second, and a new `banner()` and the log at once.

    It draws in a thread of its own, so that a slow terminal delays no control step.
    """

    def __init__(
        self, shown: Console, rows: Callable[[], Mapping[str, str]], banner: Callable[[], str] = lambda: ""
    ) -> None:  # fmt: skip
        self._shown, self._rows, self._banner = shown, rows, banner
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="console", daemon=True)

    def __enter__(self) -> None:
        self._shown.is_watched = True
        self._thread.start()

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        self._thread.join()
        self._shown.is_watched = False
        self._shown.flush()

    def _run(self) -> None:
        shown, due = "", clock.monotonic() + 1.0
        while not self._ended.wait(BANNER_S):
            self._shown.flush()
            banner = self._banner()
            if banner != shown or clock.monotonic() >= due:
                self._shown.show(self._rows(), banner)
                shown, due = banner, clock.monotonic() + 1.0


class CleanFormatter(logging.Formatter):
    """Formats a message as one line, and its traceback as several, without control characters."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return cleaned(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:
        return cleaned(super().formatException(ei), "\n")


class _Throttle(logging.Filter):
    """Lets LINES different lines of one kind through within QUIET_S; the next one says how many it left out.

    A kind is all that has one format, so clients cannot make up kinds.
    """

    def __init__(self) -> None:
        super().__init__()
        self._kinds: dict[str, tuple[float, set[str], int]] = {}  # when it began, what was said, how much left out

    def filter(self, record: logging.LogRecord) -> bool:
        kind, text, now = record.msg, record.getMessage(), clock.monotonic()
        begun, said, left_out = self._kinds.get(kind, (-math.inf, set(), 0))
        if now >= begun + QUIET_S:
            record.msg, record.args = text + f" ({left_out} more like it before)" * bool(left_out), None
            begun, said, left_out = now, set(), 0
        is_said = len(said) < LINES and text not in said
        self._kinds[kind] = begun, said | {text} if is_said else said, left_out + (not is_said)
        return is_said


def throttled(name: str) -> logging.Logger:
    """Return the log of a module that tells what clients, or a full disk, make it tell again and again."""
    log = logging.getLogger(name)
    log.addFilter(_Throttle())
    return log


def console(title: str, *, plain: bool = False) -> Console:
    """Make the process's console and send its log there. plain: lines alone, since others share the terminal."""
    made = Console(title, plain=plain)
    made.setFormatter(CleanFormatter("%(asctime)s %(message)s", stamp(sys.stderr)))
    root = logging.getLogger()
    root.setLevel(logging.INFO)
    root.addHandler(made)
    return made


def log_as(title: str, level: int = logging.INFO) -> None:
    """Send the log of a process without a console to stderr; each line begins with this title and the time."""
    handler = logging.StreamHandler()
    handler.setFormatter(CleanFormatter(f"[{title}] %(asctime)s %(message)s", stamp(sys.stderr)))
    logging.basicConfig(level=level, handlers=[handler])


def stamp(stream: TextIO) -> str:
    """Return the time format for a stream: with the date in a file, which is read on another day."""
    return "%H:%M:%S" if stream.isatty() else "%Y-%m-%d %H:%M:%S"
