"""Says errors: unforeseen ones in the file errors.log of a run's folder, those of a tool's user in one sentence."""

import sqlite3
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from serl_client.errors import RetakeError

from serl_launcher.sharing import denied

ERRORS = "errors.log"
MOST = 64 << 20  # bytes of the file from which on it takes no more of single items, because these may never end


def write_traceback(run_dir: Path, what: str, error: BaseException, *, is_item: bool = False) -> None:
    """Append the traceback of an error to the file. what: the process or the thing that failed.

    is_item: one of many has failed, such as an episode, and its process goes on.
    """
    with suppress(OSError), open(run_dir / ERRORS, "a") as file:
        if not is_item or file.tell() < MOST:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {what}\n{''.join(traceback.format_exception(error))}\n")


@contextmanager
def in_one_sentence() -> Iterator[None]:
    """End a program with one sentence, and the status 1, if its user or the machine is at fault. Also a decorator."""
    try:
        yield
    except PermissionError as error:
        sys.exit(f"error: {denied(error)}")
    except (RetakeError, OSError, sqlite3.Error) as error:
        sys.exit(f"error: {error}")


def first_line(error: BaseException) -> str:
    """Return the name of an error and the first line of its text."""
    return f"{type(error).__name__}: {(str(error).splitlines() or ['no reason given'])[0]}"
