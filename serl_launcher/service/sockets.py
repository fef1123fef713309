"""Makes the private folder (mode 0700) of a learner's sockets, where nobody else can put anything.

It lies below XDG_RUNTIME_DIR, or below the system's temporary folder, where others may make any name before us. So it
gets a new name, and is opened before it is believed: as a folder and no link, with our user as its owner. Its lock is
that of the open folder. Nothing is written into what was there before. Beside the socket `server` lie the file
`run_dir`, which names the run's folder, the files `<process>.begun` (supervisor.py), and what the processes of a run
make as temporary files: all goes with the folder.
"""

import errno
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import zmq
from omegaconf import OmegaConf
from serl_client.connection import tcp
from serl_client.errors import ConfigError

from serl_launcher.config import saved

PREFIX, SERVER = "retake_", "server"  # the folder's name, which mkdtemp completes; the server's socket in it
RUN_DIR = "run_dir"
EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # {host that means all addresses of a machine: its loopback}
PLACE_BYTES = zmq.IPC_PATH_MAX_LEN - len(f"/{PREFIX}12345678/{SERVER}")  # the longest path that a socket leaves


@contextmanager
def socket_folder() -> Iterator[Path]:
    """Make the folder and hold its lock; remove it at the end. Removes the folders of killed learners, too.

    A place where this fails, such as one whose path is too long for a socket, gives way to the next one. Raises
    ConfigError if none is left.
    """
    refused = []
    with ExitStack() as stack:
        for place in _places():
            _forget_dead(place)
            try:
                folder = stack.enter_context(_made(place))
                break
            except OSError as error:
                refused.append(f"{place} ({error.strerror})")
        else:
            raise ConfigError(
                f"there is no place for the learner's sockets: tried {', '.join(refused)}. Set TMPDIR to a folder of "
                f"your own whose path has at most {PLACE_BYTES} bytes"
            )
        yield folder


def other_runs(own: Path) -> Iterator[Path]:
    """Yield the run folders of our user's other learners that live on this machine. own: our folder of sockets."""
    return (run_dir for folder, run_dir in learners() if folder != own)


def learners() -> Iterator[tuple[Path, Path]]:
    """Yield (folder of sockets, run folder) of each learner of our user that lives on this machine."""
    for folder in (folder for place in _places() for folder in place.glob(f"{PREFIX}*")):
        with suppress(OSError), _private(folder) as descriptor:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                yield folder, Path((folder / RUN_DIR).read_text())


def address_here(run_dir: Path) -> str:
    """Return the address at which our user's learner of this run folder, here, needs no key; empty: none lives."""
    at = next((folder for folder, its in learners() if its == run_dir.resolve()), None)
    return f"ipc://{at / SERVER}" if at else ""


def address_of(run_dir: Path | None, ip: str | None, port: int | None, key: Path | None) -> str:
    """Return the address of a learner: as it is said here, else the one on this machine that needs no key, else as its
    run was last started, else the default one."""
    if run_dir and not (ip or port or key) and (here := address_here(run_dir)):
        return here
    config = saved(run_dir) if run_dir else OmegaConf.create()
    host = str(config.get("host", "127.0.0.1"))
    return tcp(ip or EVERYWHERE.get(host, host), port or config.get("port", 5588))


def _places() -> list[Path]:
    """Return the folders to try, the best first. The first one counts only if nobody else may write there."""
    own = Path(os.environ.get("XDG_RUNTIME_DIR", ""))
    places = [own] if own.is_absolute() and _is_private(own, 0o022) else []
    with suppress(FileNotFoundError):  # there is none that can be written
        places.append(Path(tempfile.gettempdir()))
    return list(dict.fromkeys([*places, Path("/tmp")]))


def _is_private(path: Path | int, forbidden: int) -> bool:
    """Return whether this folder is our user's, with none of the forbidden permissions."""
    try:
        found = os.stat(path)
    except OSError:
        return False
    return found.st_uid == os.geteuid() and not found.st_mode & forbidden


@contextmanager
def _made(place: Path) -> Iterator[Path]:
    """Make a folder in this place, lock it, and remove it at the end. Raises OSError if that does not work there."""
    if len(os.fsencode(place)) > PLACE_BYTES:
        raise OSError(errno.ENAMETOOLONG, f"its path has more than {PLACE_BYTES} bytes")
    if (mode := os.stat(place).st_mode) & 0o022 and not mode & stat.S_ISVTX:
        raise OSError(errno.EPERM, "others can rename what is in it")
    with tempfile.TemporaryDirectory(prefix=PREFIX, dir=place) as folder, _private(Path(folder)) as descriptor:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield Path(folder)


@contextmanager
def _private(folder: Path) -> Iterator[int]:
    """Open a folder, and prove that nobody else can write there. Raises OSError if it is a link, or not ours alone."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if not _is_private(descriptor, 0o077):
            raise PermissionError(errno.EPERM, "a folder there is not private to you")
        yield descriptor
    finally:
        os.close(descriptor)


def _forget_dead(place: Path) -> None:
    """Remove the folders of our learners that were killed. Nobody holds their lock, as a living launcher does."""
    with suppress(OSError):
        for folder in place.glob(f"{PREFIX}*"):
            with suppress(OSError), _private(folder) as descriptor:
                if os.listdir(folder):  # else it is new, and about to be locked
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)
