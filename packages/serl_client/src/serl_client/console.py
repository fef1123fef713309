"""The live console of either side: one block of lines that is redrawn in place, and warnings above it.

Without a terminal (a log file, a pane that is piped) it prints one line every ten seconds instead.
"""

import logging
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import TextIO

PLAIN_S = 10.0


class Console(logging.Handler):
    """Shows `name  value` lines under a title. As a logging handler it keeps the last warning in the block."""

    def __init__(self, title: str, stream: TextIO | None = None) -> None:
        super().__init__(logging.INFO)
        self._title, self._stream = title, stream or sys.stderr
        self._live = self._stream.isatty()
        self._rows: dict[str, str] = {}
        self._drawn = 0  # lines of the block on the screen
        self._plain_at = 0.0
        self._warning = "none"

    def show(self, rows: Mapping[str, str]) -> None:
        """Replace the block by these lines."""
        self._rows = dict(rows)
        if self._live:
            self._erase()
            self._draw()
        elif time.monotonic() >= self._plain_at:
            self._plain_at = time.monotonic() + PLAIN_S
            self._write(f"[{self._title}] " + " | ".join(f"{name}: {value}" for name, value in rows.items()) + "\n")

    def emit(self, record: logging.LogRecord) -> None:
        """Print a log record above the block."""
        text = self.format(record)
        if record.levelno >= logging.WARNING:
            self._warning = f"{time.strftime('%H:%M:%S')} {record.getMessage().splitlines()[0]}"
        self._erase()
        self._write(f"[{self._title}] {text}\n")
        if self._live and self._rows:
            self._draw()

    def _draw(self) -> None:
        width = shutil.get_terminal_size().columns - 1
        lines = [f"-- {self._title} ".ljust(min(width, 72), "-")]
        lines += [f"{name:>13}  {value}" for name, value in {**self._rows, "last warning": self._warning}.items()]
        self._drawn = len(lines)
        self._write("".join(f"{line[:width]}\n" for line in lines))

    def _erase(self) -> None:
        if self._drawn:
            self._write(f"\x1b[{self._drawn}F\x1b[J")
            self._drawn = 0

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


class Watch:
    """Shows `rows()` on a console every second, from a thread of its own: a slow terminal delays nobody."""

    def __init__(self, shown: Console, rows: Callable[[], Mapping[str, str]]) -> None:
        self._shown, self._rows = shown, rows
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="console", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(1.0):
            self._shown.show(self._rows())


def console(title: str) -> Console:
    """The process's console, which from now on also shows its log."""
    made = Console(title)
    made.setFormatter(logging.Formatter("%(message)s"))
    root = logging.getLogger()
    root.setLevel(logging.INFO)
    root.addHandler(made)
    return made
