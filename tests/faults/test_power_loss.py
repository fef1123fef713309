"""Power cuts: whatever was promised is there when only what was synced survives, and no sync is there for show."""

import errno
import random
import signal
import subprocess
import sys

import pytest

from tests.faults import power, shim

# Without this sync some cut breaks a promise.
NEEDED = (
    ". (made run)", "run (made store)", "run (made weights)", "run/store (made late)",
    *(f"run/store/{source} (made published)" for source in ("demo", "online", "late")),
    *(f"run/store/{source}/{file} (made)" for source in ("demo", "online", "late") for file in ("rows", "steps")),
    *(f"run/store/{source}/published (made)" for source in ("demo", "online", "late")),
    *(f"run/store/{source}/{file}" for source in ("demo", "online") for file in ("rows", "steps")),
    "run/store/index.making", "run/store/index.sqlite-wal", "run/store/index.sqlite",
    "run/store (made index.sqlite-shm)", "run/weights/*.checksums.part",
    "run/weights/*.safetensors.part", "run/weights (named *.safetensors)",
)  # fmt: skip
# Another one that follows before anything is promised does the same: that of SQLite for its log, in the same folder ...
COVERED = ("run/store (made online)", "run/store (named index.sqlite)")
# ... or the file counts only when it has got its last name.
NOT_YET = (
    "run/store/index.making-journal", "run/store (made index.making-journal)", "run/store/index.making-wal",
    "run/store (made index.making-shm)",
)  # fmt: skip

CALLS = """
import ctypes, os, sqlite3, sys
from pathlib import Path
root = Path(sys.argv[1])
(root / "folder").mkdir()
fd = os.open(root / "folder" / "a", os.O_RDWR | os.O_CREAT, 0o600)
os.posix_fallocate(fd, 0, 100)
os.pwritev(fd, [b"one", b"two"], 10)
os.pwrite(fd, b"x", 3)
os.fdatasync(fd)
os.writev(fd, [b"q", b"rs"])
os.ftruncate(fd, 12)
os.fsync(fd)
(root / "folder" / "a").rename(root / "b")
(root / "b").replace(root / "c")
os.fsync(os.open(root, os.O_RDONLY))
(root / "c").write_text("again")
(root / "c").unlink()
ctypes.CDLL(None).retake_mark(b"here", 4)
db = sqlite3.connect(root / "db", isolation_level=None)
db.execute("PRAGMA journal_mode = WAL"), db.execute("PRAGMA synchronous = FULL")
db.execute("CREATE TABLE t (x)")
ctypes.CDLL(None).retake_mark(b"made", 4)
db.execute("INSERT INTO t VALUES (1)")
ctypes.CDLL(None).retake_mark(b"done", 4)
"""
WRITES = """
import os, sys
fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT | os.O_APPEND)
for _ in range(5):
    try:
        print(os.writev(fd, [b"a" * 10, b"b" * 10]), flush=True)
    except OSError as error:
        print(-error.errno, flush=True)
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return shim.build(tmp_path_factory.mktemp("shim"))


@pytest.fixture(scope="module")
def recorded():
    """(trace, folder, {site: numbers of its syncs}) of one run of a server."""
    with power.recorded() as (trace, root):
        yield trace, root, power.sites(trace, root)


def test_every_call_that_changes_a_file_is_seen_in_order_those_of_sqlite_too(library, tmp_path):
    root = tmp_path / "root"
    root.mkdir()
    environment = shim.environment(library, trace=tmp_path / "trace", root=root)
    subprocess.run([sys.executable, "-c", CALLS, root], env=environment, check=True, timeout=60)
    found = [
        (call.kind, str(call.path).removeprefix(f"{root}/"), call.offset, call.data)
        for call in shim.calls(tmp_path / "trace")
    ]
    marks = [number for number, call in enumerate(found) if call[0] == shim.MARK]
    assert found[: marks[0]] == [
        (shim.FOLDER, "folder", 0, b""),
        (shim.CREATE, "folder/a", 0, b""),
        (shim.ALLOCATE, "folder/a", 100, b""),
        (shim.WRITE, "folder/a", 10, b"onetwo"),
        (shim.WRITE, "folder/a", 3, b"x"),
        (shim.SYNC, "folder/a", 0, b""),
        (shim.WRITE, "folder/a", 0, b"qrs"),
        (shim.TRUNCATE, "folder/a", 12, b""),
        (shim.SYNC, "folder/a", 0, b""),
        (shim.RENAME, "folder/a", 0, str(root / "b").encode()),
        (shim.RENAME, "b", 0, str(root / "c").encode()),
        (shim.SYNC, str(root), 0, b""),
        (shim.TRUNCATE, "c", 0, b""),
        (shim.WRITE, "c", 0, b"again"),
        (shim.UNLINK, "c", 0, b""),
    ]
    commit = [(kind, path) for kind, path, _, _ in found[marks[1] + 1 : marks[2]]]
    assert commit == [*[(shim.WRITE, "db-wal")] * 2, (shim.SYNC, "db-wal")]


@pytest.mark.parametrize(
    ("arm", "said", "size"),
    [
        (lambda c: c.fail(shim.WRITE, errno.EIO, after=2, path="file"), [20, 20, -errno.EIO, 20, 20], 80),
        (
            lambda c: c.fail(shim.WRITE, errno.ENOSPC, after=1, sticky=True, short=True, path="file"),
            [20, 10, *[-errno.ENOSPC] * 3], 30,
        ),
        (lambda c: c.kill(shim.WRITE, after=3, short=True, path="file"), [20, 20, 20], 70),
        (lambda c: c.fail(shim.SYNC, errno.EIO, sticky=True), [20] * 5, 100),
        (lambda c: c.fail(shim.WRITE, errno.EIO, sticky=True, path="other"), [20] * 5, 100),
    ],
)  # fmt: skip
def test_a_call_fails_is_done_by_half_or_is_the_last_one_as_it_was_armed(library, tmp_path, arm, said, size):
    control, path = shim.Control(tmp_path / "control"), tmp_path / "file"
    arm(control)
    words = [sys.executable, "-c", WRITES, path]
    done = subprocess.run(words, env=shim.environment(library, control), capture_output=True, text=True, timeout=60)
    assert [int(line) for line in done.stdout.split()] == said
    assert path.stat().st_size == size
    assert done.returncode == (-signal.SIGKILL if len(said) < 5 else 0)
    assert control.struck == (size != 100)


def test_every_cut_that_keeps_only_what_was_synced_keeps_every_promise(recorded):
    trace, root, _ = recorded
    assert list(power.strict(trace, root)) == []


@pytest.mark.slow
def test_cuts_that_keep_some_of_the_rest_torn_and_out_of_order_keep_every_promise(recorded):
    trace, root, _ = recorded
    numbers = random.Random(3).sample(range(len(trace)), 100)
    assert list(power.kept_in_part(trace, root, {number: number for number in numbers})) == []


def test_every_sync_of_the_run_is_known(recorded):
    assert sorted(recorded[2]) == sorted((*NEEDED, *COVERED, *NOT_YET))


@pytest.mark.parametrize("site", NEEDED)
def test_without_one_of_its_syncs_a_cut_breaks_a_promise(recorded, site):
    trace, root, sites = recorded
    assert power.without(trace, root, sites[site]) is not None


@pytest.mark.slow
def test_without_the_sync_of_one_commit_what_it_acknowledged_is_gone_or_what_it_evicted_is_overwritten(recorded):
    trace, root, sites = recorded
    alone = [power.without(trace, root, [number]) for number in sites["run/store/index.sqlite-wal"][::2]]
    said = [complaint for _, complaint in filter(None, alone)]
    assert sum("were acknowledged" in complaint for complaint in said) >= 5
    assert sum(complaint.startswith("online: step") for complaint in said) >= 2


def test_without_both_syncs_of_a_name_a_cut_breaks_a_promise(recorded):
    """Each of the two alone does for a name; without all of the folder's it is lost."""
    trace, root, sites = recorded
    of_folder = [numbers for site, numbers in sites.items() if site.startswith("run/store (")]
    assert power.without(trace, root, [number for numbers in of_folder for number in numbers]) is not None
