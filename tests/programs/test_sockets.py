"""Folders in which other users may make what they like: where a learner's sockets lie, and the locks of its folders.

Traps are made by another user where the tests may do that (root), else by ourselves: no check below trusts an owner
alone.
"""

import errno
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import zmq
from serl_client.errors import ConfigError
from serl_client.lockfile import open_lock, sign
from serl_client.outbox import Outbox

from serl_launcher import launcher
from serl_launcher.datasets import export
from serl_launcher.service import sockets

NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root makes what belongs to another user")
LEARNER = (
    "import signal\nfrom serl_launcher.service.sockets import socket_folder\nwith socket_folder() as folder:\n"
    " (folder / 'temporary').write_text('of a process')\n print(folder, flush=True)\n signal.pause()"
)


@pytest.fixture
def place(monkeypatch):
    """The system's temporary folder, with the path of a short name; there is no XDG_RUNTIME_DIR."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o1777)
        monkeypatch.setattr(tempfile, "tempdir", folder)
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
        yield Path(folder)


def anothers(*paths):
    if os.geteuid() == 0:
        for path in paths:
            os.chown(path, NOBODY, NOBODY, follow_symlinks=False)


def dead_socket(path):
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
    return path


def linked_folder(name, precious):
    dead_socket(precious.parent / "server")
    shutil.copy(precious, precious.parent / "lock")
    name.symlink_to(precious.parent)
    anothers(name)


def folder_with_lock(mode, plant):
    def trap(name, precious):
        name.mkdir()
        name.chmod(mode)
        plant(lock := name / "lock", precious)
        anothers(name, dead_socket(name / "server"), *[lock] * lock.is_symlink())

    return trap


TRAPS = [
    pytest.param(linked_folder, id="linked folder"),
    pytest.param(folder_with_lock(0o777, Path.symlink_to), id="open folder"),
    pytest.param(folder_with_lock(0o755, Path.hardlink_to), id="hard link"),
    pytest.param(folder_with_lock(0o700, Path.symlink_to), id="as our own, but for its owner", marks=as_root),
]


def seen(folder):
    """{path: everything of it that a learner might change}"""
    found = {path: path.lstat() for path in sorted(folder.rglob("*"))}
    regular = {path: path.read_bytes() for path in found if path.is_file() and not path.is_symlink()}
    return {path: (at.st_mode, at.st_uid, at.st_nlink, regular.get(path)) for path, at in found.items()}


@pytest.mark.parametrize("trap", TRAPS)
@pytest.mark.parametrize("name", ["retake_trapped0", "retake-trapped0"], ids=["ours", "of versions before"])
def test_another_users_trap_leaves_the_learners_files_as_they_were_and_the_learner_starts(place, trap, name):
    precious = place / "home" / "thesis"
    precious.parent.mkdir()
    precious.write_text("three years")
    trap(place / name, precious)
    before = seen(place)
    with sockets.socket_folder() as folder:
        found = folder.lstat()
        assert (found.st_uid, found.st_mode & 0o777) == (os.geteuid(), 0o700)
        assert {path: it for path, it in seen(place).items() if path != folder} == before
    assert seen(place) == before


def test_the_sockets_of_a_killed_learner_are_cleared_away_and_those_of_a_living_or_new_one_are_not(place):
    with subprocess.Popen([sys.executable, "-c", LEARNER], stdout=subprocess.PIPE, text=True) as learner:
        dead = Path(learner.stdout.readline().strip())
        try:
            with sockets.socket_folder() as living:
                assert dead.parent == place
                dead_socket(living / "server")  # it was killed, and comes again
                new = Path(tempfile.mkdtemp(prefix=sockets.PREFIX))  # not locked yet
                with sockets.socket_folder():
                    assert [folder.exists() for folder in (dead, living, new)] == [True, True, True]
                learner.send_signal(signal.SIGKILL)
                learner.wait()
                with sockets.socket_folder():
                    assert [folder.exists() for folder in (dead, living, new)] == [False, True, True]
        finally:
            learner.kill()
    assert list(place.iterdir()) == [new]


@pytest.mark.parametrize(
    ("mode", "owner", "is_used"),
    [(0o700, None, True), (0o755, None, True), (0o777, None, False), (0o770, None, False),
     pytest.param(0o700, NOBODY, False, marks=as_root)],
)  # fmt: skip
def test_the_users_runtime_folder_is_used_where_nobody_else_may_write(place, monkeypatch, mode, owner, is_used):
    runtime = place / "user"
    runtime.mkdir()
    runtime.chmod(mode)
    if owner:
        os.chown(runtime, owner, owner)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    with sockets.socket_folder() as folder:
        assert folder.parent == (runtime if is_used else place)
    monkeypatch.chdir(place)
    monkeypatch.setenv("XDG_RUNTIME_DIR", "user")  # a path that means another folder elsewhere
    with sockets.socket_folder() as folder:
        assert folder.parent == place


@pytest.mark.parametrize("bytes_over", [0, 1], ids=["the longest path", "one byte more"])
def test_a_path_that_is_too_long_for_a_socket_gives_way_by_itself(place, monkeypatch, bytes_over):
    long = place / ("x" * (sockets.PLACE_BYTES - len(os.fsencode(place)) - 1 + bytes_over))
    long.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(long))
    with sockets.socket_folder() as folder, zmq.Context() as context:
        assert folder.parent == (place if bytes_over else long)
        with context.socket(zmq.REP) as server, context.socket(zmq.REQ) as client:
            server.bind(f"ipc://{folder / sockets.SERVER}")
            client.connect(f"ipc://{folder / sockets.SERVER}")
            client.send(b"are you there")
            assert server.recv() == b"are you there"
            assert (folder / sockets.SERVER).is_socket()
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with sockets.socket_folder() as folder:
        assert folder.parent == (Path("/tmp") if bytes_over else long)


def test_without_any_place_for_sockets_one_sentence_says_what_was_tried_and_what_to_do(place, monkeypatch):
    long, gone = place / ("x" * 99), place / "gone"
    monkeypatch.setattr(sockets, "_places", lambda: [long, gone, place])

    def flock(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(sockets.fcntl, "flock", flock)
    with pytest.raises(ConfigError) as said, sockets.socket_folder():
        pass
    assert f"{long} (its path has more than {sockets.PLACE_BYTES} bytes), {gone} (No such file" in str(said.value)
    assert f"{place} (No locks available). Set TMPDIR to a folder of your own" in str(said.value)
    assert not list(place.iterdir())


# -- locks


def own_outbox(folder):
    Outbox(folder, 1 << 20)


def own_datasets(folder):
    with export._alone(folder):
        pass


@pytest.mark.parametrize("lock", [launcher._lock, own_outbox, own_datasets], ids=lambda lock: lock.__name__)
@pytest.mark.parametrize(
    ("plant", "why"),
    [(Path.symlink_to, "it is a link"), (Path.hardlink_to, "it has other names"),
     (lambda path, _: path.mkdir(), "it is a folder"), (lambda path, _: os.mkfifo(path), "it is no file")],
)  # fmt: skip
def test_a_lock_that_is_another_file_is_refused_and_nothing_is_written_there(tmp_path, lock, plant, why):
    precious = tmp_path / "thesis"
    precious.write_text("three years")
    (tmp_path / "run").mkdir()
    plant(tmp_path / "run" / "lock", precious)
    with pytest.raises(ConfigError, match=f"run/lock cannot be used as a lock: .*{why}. Remove it"):
        lock(tmp_path / "run")
    assert precious.read_text() == "three years"
    (tmp_path / "run" / "lock").unlink() if why != "it is a folder" else (tmp_path / "run" / "lock").rmdir()
    (tmp_path / "run" / "lock").symlink_to(tmp_path / "not there")
    with pytest.raises(ConfigError, match="it is a link"):
        lock(tmp_path / "run")
    assert not (tmp_path / "not there").exists()


def test_a_colleagues_lock_that_may_be_written_serves_as_our_own(tmp_path):
    (tmp_path / "lock").write_text("4711")
    (tmp_path / "lock").chmod(0o666)
    anothers(tmp_path / "lock")
    with launcher._lock(tmp_path) as lock:
        assert (tmp_path / "lock").read_text() == "4711", "the start may still be refused"
        sign(lock)
        with pytest.raises(ConfigError, match=f"with process {os.getpid()}: stop it"):
            launcher._lock(tmp_path)
    assert (tmp_path / "lock").read_text() == str(os.getpid())


def test_a_lock_that_a_colleague_keeps_is_refused_in_one_sentence(tmp_path, monkeypatch):
    def opened(*_):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("serl_client.lockfile.os.open", opened)  # root may open anything
    with pytest.raises(ConfigError, match="it belongs to somebody else"):
        open_lock(tmp_path)
