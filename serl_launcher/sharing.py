"""Keeps the files of a run its user's own, or lets one group read them (`share=GROUP`)."""

import grp
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any

from serl_client.errors import ConfigError

PRIVATE, SHARED = 0o700, 0o2750  # modes of a run's folder; what is made in a SHARED one belongs to its group, too


def keep_private(share: Any) -> None:
    """Let what this process and its children make from now on be its user's own; share: the group may read it."""
    os.umask(0o027 if share else 0o077)


def is_shared(run_dir: Path) -> bool:
    """Return whether a group may read this run's folder."""
    return run_dir.exists() and run_dir.stat().st_mode & SHARED == SHARED


def group_of(share: str | None) -> int | None:
    """Return the number of this group; None: nobody shares. Raises ConfigError for a group that is not there."""
    try:
        return None if share is None else grp.getgrnam(str(share)).gr_gid
    except KeyError:
        raise ConfigError(f"share={share}: there is no such group on this machine; `id -nG` lists yours") from None


def check_user(run_dir: Path) -> None:
    """Raise ConfigError for a run of another user: each would make files there that the other one may not read."""
    with suppress(FileNotFoundError):
        if (user := (run_dir / "config.yaml").stat().st_uid) != os.geteuid():
            raise ConfigError(f"{run_dir} is a run of user {user}, who alone resumes it: begin another run_dir")


def take_over(run_dir: Path, share: str | None) -> None:
    """Give a run's folder, which may be older, the mode of a new one, and all in it to the group that shares it.

    A folder of another user, or that holds something else than a run, stays as it is. Raises ConfigError if this user
    may not give files to that group.
    """
    found, group, holds = run_dir.stat(), group_of(share), set(os.listdir(run_dir))
    is_ours = found.st_uid == os.geteuid() and ("config.yaml" in holds or holds <= {"lock", "actors"})
    if not is_ours or found.st_mode & stat.S_ISVTX:
        return
    if group is None:
        run_dir.chmod(PRIVATE)
    elif (found.st_gid, stat.S_IMODE(found.st_mode)) != (group, SHARED):
        for folder, _, names in os.walk(run_dir, topdown=False):  # the run's folder last: so a kill is made good
            for path in (*(Path(folder, name) for name in names), Path(folder)):
                _give(path, group)


def _give(path: Path, group: int) -> None:
    """Let a group read a file or folder of ours as we may. Links, also hard ones, and what has gone are passed over."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return
    try:
        found = os.fstat(descriptor)
        is_folder = stat.S_ISDIR(found.st_mode)
        if found.st_uid == os.geteuid() and (is_folder or (stat.S_ISREG(found.st_mode) and found.st_nlink == 1)):
            os.fchown(descriptor, -1, group)
            os.fchmod(descriptor, SHARED if is_folder else found.st_mode & 0o700 | (found.st_mode & 0o500) >> 3)
    except PermissionError:
        raise ConfigError(f"share: you may not give {path} to that group; `id -nG` lists yours") from None
    finally:
        os.close(descriptor)
