"""The store keeps what it acknowledged: killed at every write, on failing disks, and with files that are damaged."""

import errno
import os
import shutil
import signal
import sqlite3
from contextlib import closing

import pytest
from serl_client import ConfigError, Outcome

from serl_launcher.store import files, index
from serl_launcher.store.store import Store
from tests.shared.data import make_episode, make_segment, tiny_spec

from .made import contents, fill, founded

WAYS = (Store, lambda folder: Store.create(folder, tiny_spec(), {"online": 400}))  # to open a store


def failing(error):
    def fail(*_):
        raise error

    return fail


# -- a store that is made, grows, or is another one


def test_another_spec_is_refused_with_both_values_and_a_source_keeps_its_capacity(tmp_path):
    founded(tmp_path).close()
    with pytest.raises(ConfigError, match=r"fps: 10\.0, 30\.0"):
        Store.create(tmp_path / "store", tiny_spec(fps=30.0), {"online": 400})
    kept = Store.create(tmp_path / "store", tiny_spec(), {"online": 500, "demo": 50})
    assert {name: source.capacity for name, source in kept.sources.items()} == {"online": 400, "demo": 50}


def test_a_write_of_which_the_disk_takes_a_part_goes_on_where_it_stopped(tmp_path, monkeypatch):
    written = []
    for name, most in (("whole", 10**9), ("partly", 7)):
        made = founded(tmp_path / name)
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwritev", lambda fd, parts, at, most=most: os.pwrite(fd, b"".join(parts)[:most], at))
            fill(made, 3)
        made.close()
        written.append([(tmp_path / name / "store/online" / file).read_bytes() for file in ("rows", "steps")])
    assert written[0] == written[1]
    assert any(written[0][0])


def test_a_source_may_be_added_to_a_store(tmp_path):
    made = founded(tmp_path)
    fill(made, 1)
    made.close()
    grown = Store.create(tmp_path / "store", tiny_spec(), {"demo": 50})
    assert set(grown.sources) == {"online", "demo"}
    assert grown.sources["online"].head == 10


def test_a_store_that_does_not_fit_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(ConfigError, match=r"online .*, and 67.1 MB have to stay free .* free on the disk"):
        Store.create(tmp_path / "store", tiny_spec(), {"online": 10**12})
    assert not (tmp_path / "store" / "index.sqlite").exists()


def test_a_store_whose_making_was_interrupted_is_made_anew(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", failing(OSError(errno.ENOSPC, "No space left on device")))
        with pytest.raises(OSError, match="No space"):
            Store.create(tmp_path / "store", tiny_spec(), {"online": 400})
    assert (tmp_path / "store/online/rows").exists()
    founded(tmp_path).close()
    assert Store(tmp_path / "store").sources["online"].capacity == 400


@pytest.mark.parametrize("grows", [False, True])
def test_what_an_interrupted_making_has_left_takes_no_room_from_the_next(tmp_path, monkeypatch, grows):
    folder, seen = tmp_path / "store", []
    if grows:
        founded(tmp_path).close()
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", failing(OSError(errno.EIO, "killed here")))
        with pytest.raises(OSError, match="killed here"):
            Store.create(folder, tiny_spec(), {"online": 400, "demo": 50} if grows else {"old": 50})
    free = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: seen.append(sorted(folder.glob("*/rows"))) or free)
    Store.create(folder, tiny_spec(), {"online": 400, "demo": 50}).close()
    assert seen == [[folder / "online/rows"] * grows]


def test_numbers_never_go_back(tmp_path):
    made = founded(tmp_path)
    first = made.publish_weights("a" * 64, 10, 5)
    assert made.direct({"into": "online", "phase": "other"}) == 2
    made.close()
    opened = Store(tmp_path / "store")
    assert opened.publish_weights("b" * 64, 10, 3) == first + 1
    assert opened.direct({"into": "online", "phase": "other"}) == 2  # unchanged: the same number
    assert opened.direct({"into": None, "phase": "third"}) == 3


def test_nothing_that_a_start_or_a_record_asks_of_the_index_reads_all_past_episodes(tmp_path, monkeypatch):
    asked, connect = set(), sqlite3.connect

    def traced(*arguments, **options):
        database = connect(*arguments, **options)
        database.set_trace_callback(asked.add)
        return database

    founded(tmp_path, online=100).close()
    monkeypatch.setattr(sqlite3, "connect", traced)
    made = Store.resume(tmp_path / "store", {"online": 100}, ["online"])
    made.lives.hello("arm", "outbox", "A", [])
    fill(made, 5)
    made.stage("A", 10, make_segment("open"))
    made.episodes.cut("A")
    made.stage("A", 11, make_segment("open", start=4, ends="terminated"))
    made.stage("A", 12, Outcome("open", True))
    made.add_archived([1, 2, 3, 4, 5])
    fill(made, 4, seq=13)
    made.index.catalog(0, 10)
    made.close()
    questions = [sql for sql in asked if sql.startswith("SELECT") and "FROM episodes" in sql]
    assert len(questions) > 10
    with closing(connect(tmp_path / "store/index.sqlite")) as database:
        for sql in questions:
            for *_, step in database.execute(f"EXPLAIN QUERY PLAN {sql}"):
                assert not step.startswith("SCAN episodes") or "episodes_open" in step, (sql, step)


# -- damage


@pytest.mark.parametrize("left", [("index.sqlite-wal",), ("online/rows",), ("online/steps", "online/published")])
def test_a_store_without_its_index_is_refused_and_nothing_of_it_is_overwritten(tmp_path, left):
    made = founded(tmp_path)
    fill(made, 1)
    made.close()
    folder = tmp_path / "store"
    (folder / "index.sqlite-wal").touch()
    files_ = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    for path in files_:
        if str(path.relative_to(folder)) not in left:
            path.unlink()
    for opening in WAYS:
        with pytest.raises(ConfigError, match=r"holds .*, but no index\.sqlite, .*Nothing was changed"):
            opening(folder)
    assert {name: (folder / name).read_bytes() for name in left} == {name: files_[folder / name] for name in left}


@pytest.mark.parametrize("name", ["rows", "steps", "published"])
@pytest.mark.parametrize("change", [None, -1, 1], ids=["missing", "shorter", "longer"])
def test_a_store_whose_file_is_missing_or_of_another_size_is_refused_in_one_sentence(tmp_path, name, change):
    founded(tmp_path).close()
    path = tmp_path / "store/online" / name
    size = None if change is None else path.stat().st_size + change
    path.unlink() if size is None else os.truncate(path, size)
    for opening in WAYS:
        with pytest.raises(ConfigError, match=rf"online/{name} should have .* bytes, not {size}: it was damaged"):
            opening(tmp_path / "store")
    assert (path.stat().st_size if path.exists() else None) == size


def test_a_page_of_the_index_that_is_damaged_is_found_before_anything_relies_on_it(tmp_path):
    made = founded(tmp_path)
    fill(made, 3)
    made.close()
    path = tmp_path / "store/index.sqlite"
    with closing(sqlite3.connect(path)) as database:
        (page,) = database.execute("SELECT rootpage FROM sqlite_master WHERE name = 'episodes_by_first'").fetchone()
        (size,) = database.execute("PRAGMA page_size").fetchone()
    with path.open("r+b") as file:
        file.seek((page - 1) * size + 8)  # where its cells are said to begin
        file.write(b"\xff" * 8)
    with pytest.raises(ConfigError, match=r"index\.sqlite is damaged"):
        Store(tmp_path / "store")


# -- crashes


def run_and_die(folder, produced, killer, pipe):
    """The server's part in a child: goes on from the watermark, acknowledges through the pipe, dies by the killer."""
    for name in ("pwritev", "fdatasync"):
        setattr(os, name, killer.wrap(getattr(os, name)))
    index.Index.commit = killer.wrap(index.Index.commit)
    index.Index.put = killer.wrap(index.Index.put)
    files.SourceFiles.publish = killer.wrap(files.SourceFiles.publish)
    made = Store(folder / "store")
    for seq in range(made.expected("A"), len(produced)):
        made.stage("A", seq, produced[seq])
        if seq % 2 or seq == len(produced) - 1:
            made.commit()
            os.write(pipe, f"{made.expected('A')}\n".encode())


@pytest.mark.slow
def test_kill_at_every_write_sync_commit_and_publish_loses_and_doubles_nothing(tmp_path, killer_at):
    """Each child dies one call later than the one before, some while old episodes are evicted."""
    founded(tmp_path, online=60).close()
    produced = [record for i in range(14) for record in make_episode(f"e{i}", i, steps=12)]
    at, lives, acknowledged = 1, 0, 0
    while acknowledged < len(produced):
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            run_and_die(tmp_path, produced, killer_at(at), writing)
            os._exit(0)
        os.close(writing)
        _, status = os.waitpid(child, 0)
        with os.fdopen(reading) as told_by_child:
            told = [int(line) for line in told_by_child.read().split()]
        acknowledged = max([acknowledged, *told])
        check_prefix(tmp_path, acknowledged, produced)
        lives, at = lives + 1, at % 24 + 1
    assert lives > 20
    assert os.waitstatus_to_exitcode(status) in (0, -signal.SIGKILL)


def check_prefix(folder, acknowledged, produced):
    """The store holds a prefix of what was produced, not less than what was acknowledged, minus what was evicted."""
    with closing(Store(folder / "store")) as opened:
        durable, tail, head = opened.expected("A"), opened.sources["online"].tail, opened.sources["online"].head
        outcomes = sum(len(opened.index.outcomes(f"e{i}")) for i in range(len(produced)))
    assert durable >= acknowledged
    assert outcomes == sum(isinstance(record, Outcome) for record in produced[:durable])
    steps = [
        (seq // 3, i) for seq, record in enumerate(produced[:durable]) if not isinstance(record, Outcome)
        for i in range(record.start, record.start + len(record))
    ]  # fmt: skip
    assert head == len(steps)
    assert [(int(key), i) for _, i, key in contents(folder)] == steps[tail:]


# -- failing disks


def test_a_commit_of_the_index_that_fails_undoes_the_whole_group(tmp_path, monkeypatch):
    made = founded(tmp_path)
    made.stage("A", 0, make_segment("e0", ends="terminated"))
    made.stage("A", 1, Outcome("e0", True))
    with monkeypatch.context() as patch:
        patch.setattr(made.index, "commit", failing(sqlite3.OperationalError("database or disk is full")))
        with pytest.raises(sqlite3.OperationalError):
            made.commit()
    made.close()
    with closing(Store(tmp_path / "store")) as opened:
        assert (opened.expected("A"), opened.index.outcomes("e0")) == (0, [])
    assert contents(tmp_path) == []


def test_whatever_ends_a_commit_counts_as_a_failure_of_the_disk(tmp_path, monkeypatch):
    """A caller that went on would write what was staged a second time."""
    made = founded(tmp_path)
    made.stage("A", 0, make_segment("e0"))
    monkeypatch.setattr(os, "fdatasync", failing(MemoryError()))
    made.lives.hello("arm", "box", "C", [])
    with pytest.raises(OSError, match="could not be written: MemoryError"):
        made.commit()
    made.close()


@pytest.mark.parametrize("call", ["pwritev", "fdatasync"])
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
def test_after_a_failed_write_or_sync_nothing_unacknowledged_is_there(tmp_path, monkeypatch, call, error):
    made = founded(tmp_path)
    made.stage("A", 0, make_segment("e0"))
    made.commit()
    made.stage("A", 1, make_segment("e0", start=4))
    with monkeypatch.context() as patch:
        patch.setattr(os, call, failing(OSError(error, os.strerror(error))))
        with pytest.raises(OSError, match=os.strerror(error)):
            made.commit()
    made.close()
    opened = Store(tmp_path / "store")
    assert opened.expected("A") == 1
    assert opened.stage("A", 1, make_segment("e0", start=4, ends="terminated"))
    opened.commit()
    assert [i for _, i, _ in contents(tmp_path)] == list(range(8))


def test_probing_writes_the_log_into_the_database_anew(tmp_path):
    """A commit whose sync failed may be found again in the log: before it counts, it is written and synced again."""
    made = founded(tmp_path)
    fill(made, 1)
    log = tmp_path / "store" / "index.sqlite-wal"
    assert log.stat().st_size > 0
    made.probe()
    assert log.stat().st_size == 0
    made.close()
    assert len(contents(tmp_path)) == 10
