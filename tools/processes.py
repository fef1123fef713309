"""Starts commands in process groups of their own, of which nothing is left in the end, whoever ends it."""

import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from typing import Any


def start(words: Sequence[str], log: Any, **more: Any) -> subprocess.Popen[Any]:
    """Start a command that hears nothing, writes what it says to the file `log`, and dies with whoever started it."""
    if setpriv := shutil.which("setpriv"):
        words = [setpriv, "--pdeathsig", "KILL", *words]
    return subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, **more)


def ended(process: subprocess.Popen[Any], limit: float) -> int | None:
    """Wait, then kill what its group still has. Returns its status; None if it took more than `limit` seconds."""
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        return None
    finally:
        kill(process)


def kill(process: subprocess.Popen[Any]) -> None:
    """End it and what it has started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
