"""Writes the tracebacks of unforeseen errors into the file errors.log of a run's folder."""

import time
import traceback
from contextlib import suppress
from pathlib import Path

ERRORS = "errors.log"
MOST = 64 << 20  # bytes of the file, because a source of errors may never end


def write_traceback(run_dir: Path, what: str, error: BaseException) -> None:
    """Append the traceback of an error to the file. what: the process or the thing that failed."""
    with suppress(OSError), open(run_dir / ERRORS, "a") as file:
        if file.tell() < MOST:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {what}\n{''.join(traceback.format_exception(error))}\n")


def first_line(error: BaseException) -> str:
    """Return the name of an error and the first line of its text."""
    return f"{type(error).__name__}: {(str(error).splitlines() or ['no reason given'])[0]}"
