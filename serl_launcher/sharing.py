"""Keeps the files of a run its user's own, or lets one group read them (`share=GROUP`)."""

import grp
import os
import stat
from contextlib import suppress
from pathlib import Path

from serl_client.errors import ConfigError

PRIVATE, SHARED = 0o700, 0o2750  # modes of a run's folder; what is made in a SHARED one belongs to its group, too
NO_GROUP = 2**32 - 1  # the number that means none


def keep_private(shares: bool) -> None:
    """Let what this process and its children make from now on be its user's own; shares: its group may read it."""
    os.umask(0o027 if shares else 0o077)


def is_shared(run_dir: Path) -> bool:
    """Return whether a group may read this run's folder."""
    return run_dir.exists() and run_dir.stat().st_mode & SHARED == SHARED


def group_of(share: str | int | None) -> int | None:
    """Return the number of this group, which may be said by it; None: nobody shares.

    Raises ConfigError for a name that no group on this machine has, and for what no group's number can be.
    """
    if share is None:
        return None
    with suppress(KeyError):
        return grp.getgrnam(str(share)).gr_gid
    if str(share).isdecimal() and int(share) < NO_GROUP:
        return int(share)
    raise ConfigError(f"share={share}: there is no such group on this machine; `id` lists yours")


def check_user(run_dir: Path) -> None:
    """Raise ConfigError for a run of another user: each would make files there that the other one may not read."""
    with suppress(FileNotFoundError):
        if (user := (run_dir / "config.yaml").stat().st_uid) != os.geteuid():
            raise ConfigError(f"{run_dir} is a run of user {user}, who alone resumes it: begin another run_dir")


def denied(error: PermissionError) -> str:
    """Return whose the file is that we may not use, and who can change that."""
    place = Path(str(error.filename)).absolute()
    for path in (place, *place.parents) if isinstance(error.filename, str) else ():
        with suppress(OSError):  # it is in a folder that we may not enter, or not there yet
            if (user := path.stat().st_uid) == os.geteuid():
                break
            return (
                f"you may not use {place}: {path} is of user {user}, who alone may change it, and can let a group "
                "read a run (share=GROUP, docs/guides/security.md)"
            )
    return str(error)


def take_over(run_dir: Path, share: str | int | None, *, is_learner: bool) -> None:
    """Give a run's folder, which may be older, the mode of a new one, and all in it to the group that shares it.

    Where a learner has run, it alone does so. A folder of another user, or that holds something else than a run, stays
    as it is. Raises ConfigError if this user may not give files to that group, or if they lie among other things.
    """
    found, group, holds = run_dir.stat(), group_of(share), set(os.listdir(run_dir))
    has_run = "config.yaml" in holds
    others = set() if has_run else holds - {"lock", "actors"}
    if others and group is not None:
        raise ConfigError(f"share={share}: {run_dir} holds {min(others)}, which is of no run: choose another run_dir")
    is_foreign = found.st_uid != os.geteuid() or found.st_mode & stat.S_ISVTX
    if others or is_foreign or (has_run and not is_learner):
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
        raise ConfigError(f"share: you may not give {path} to that group; `id` lists yours") from None
    finally:
        os.close(descriptor)
