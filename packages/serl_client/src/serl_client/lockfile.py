"""Locks a folder for one owner, by its lock file and never another file: others may write in a shared folder.

A program that owns a folder locks this file and writes its process into it. Behind a link, or a second name of the same
file, may lie any file of ours.
"""

import errno
import fcntl
import os
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO

from serl_client.errors import ConfigError

LOOKS = 5  # at a lock that is taken, before it counts as taken
FLAGS = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK  # the last, because a pipe would block
STRANGE = {errno.ELOOP: "it is a link", errno.EISDIR: "it is a folder", errno.ENXIO: "it is a socket",
           errno.EACCES: "it belongs to somebody else"}  # fmt: skip


def open_lock(folder: Path) -> IO[str]:
    """Open `lock` in a folder to read and to append; make it if it is not there.

    Raises ConfigError if it is no plain file, has other names or is not ours to write; OSError if the disk fails.
    Nothing is changed then.
    """
    path = folder / "lock"
    try:
        descriptor = os.open(path, FLAGS, 0o640)
    except OSError as error:
        if error.errno not in STRANGE:
            raise
        raise _refusal(path, STRANGE[error.errno]) from None
    found = os.fstat(descriptor)
    if stat.S_ISREG(found.st_mode) and found.st_nlink <= 1:
        return os.fdopen(descriptor, "r+")
    os.close(descriptor)
    raise _refusal(path, "it has other names" if stat.S_ISREG(found.st_mode) else "it is no file")


def lock_folder(folder: Path, taken: Callable[[str], str]) -> IO[str]:
    """Lock a folder, and return its open lock file: the folder is ours until it is closed. Its content stays.

    taken: makes the error's text from the number of the process that has the folder. The file may be a colleague's who
    ran there before. Raises ConfigError as `open_lock` does, and if another process has the folder.
    """
    file = open_lock(folder)
    for look in range(LOOKS):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except BlockingIOError:  # by an owner, or for a moment by `holder`
            time.sleep(0.01 * (look < LOOKS - 1))
    with file:
        raise ConfigError(taken(file.read().strip() or "unknown"))


def holder(folder: Path) -> str:
    """Return the number of the process that has a folder locked, which may be `unknown`; empty where none has."""
    with suppress(OSError), open(folder / "lock") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return file.read().strip() or "unknown"
    return ""


def sign(lock: IO[str]) -> None:
    """Write our process into a lock that we hold, for whoever finds it taken."""
    with suppress(OSError):  # a full disk
        lock.truncate(0)
        os.write(lock.fileno(), str(os.getpid()).encode())


def _refusal(path: Path, why: str) -> ConfigError:
    return ConfigError(
        f"{path} cannot be used as a lock: it must be a plain file that you may write, but {why}. Remove it if no "
        "other program uses that folder, or choose another folder"
    )
