"""Episodes that cannot be exported hide nothing, block nobody and lose no row; an export by hand tries them again."""

import errno
import shutil
from contextlib import nullcontext

import numpy as np
import pytest
from pyarrow import parquet
from serl_client import Outcome, console
from serl_client.errors import ConfigError

from serl_launcher.datasets import export, exporter, shards
from serl_launcher.datasets.export import export_run

from .exporting import CAMERA, Run, Silent, exported, needs_lerobot, segment

pytestmark = [pytest.mark.usefixtures("quiet"), pytest.mark.slow, needs_lerobot]


def test_an_episode_that_no_shard_takes_is_kept_beside_them_and_the_rest_goes_on(tmp_path, blind, monkeypatch):
    """Here its shard reads back otherwise. Its archived source empties all the same, in this life and in the next."""
    run = Run(tmp_path, blind, capacity=100, archived=["online"], count=4)
    write = shards.write

    def swapped(*how):
        made = write(*how)
        for info, columns in made:
            columns["intervened"] = columns["intervened"] ^ (info.id == "e2")
        return made

    monkeypatch.setattr(shards, "write", swapped)
    run.episodes("e0", "e1", "e2", "e3")
    run.work()
    assert run.shards() == ["000001-000002", "000004-000004"]
    assert run.shards("left_out") == ["000003"]
    [entry] = run.manifest("000003", "left_out")["left_out"]
    assert entry["id"] == "e2"
    assert "column intervened of e2 differs from the store" in entry["why"]
    kept = np.load(tmp_path / "datasets/left_out/000003/action.npy")
    assert np.array_equal(kept, segment(blind, "e2").action)
    told = (tmp_path / "errors.log").read_text()
    assert "export: episode e2 is in no dataset" in told
    assert "Traceback" in told
    assert run.exporter.settled == [1, 2, 3, 4]
    run.exporter = run.started()
    assert run.work() == 0
    assert run.exporter.settled == [1, 2, 3, 4]
    assert run.judge("e2", True) == 0
    run.store.close()
    assert [path.name for path in export_run(tmp_path, 4)] == ["000001-000002", "000004-000004"]


def failing(error):
    def fail(*_):
        raise error

    return fail


@pytest.mark.parametrize("error", [ImportError("no lerobot"), MemoryError(), OSError(5, "Input/output error")])
def test_what_is_the_machines_fault_leaves_no_episode_out(tmp_path, blind, monkeypatch, error):
    run = Run(tmp_path, blind)
    run.episodes("e0", "e1")
    with monkeypatch.context() as patch:
        patch.setattr(shards, "write", failing(error))
        with pytest.raises(type(error)):
            run.work()
    run.work()
    assert run.exporter.settled == [1, 2]
    assert not (tmp_path / "datasets/left_out").exists()


def test_what_fails_with_every_episode_loses_none_of_their_rows_and_hides_no_other_trouble(
    tmp_path, seen, monkeypatch, caplog
):
    monkeypatch.setattr(exporter, "log", console.throttled(f"{exporter.__name__}.{tmp_path}"))
    monkeypatch.setattr(console, "QUIET_S", 1e9)
    run = Run(tmp_path, seen)
    monkeypatch.setattr(shards, "write", failing(ValueError("no codec")))
    run.episodes(*(f"e{i}" for i in range(7)))
    run.work(rest=True)
    assert run.shards("left_out") == [f"{number:06d}" for number in range(1, 8)]
    images = np.load(tmp_path / f"datasets/left_out/000002/{CAMERA}.npy")
    assert np.array_equal(images, segment(seen, "e1").observation[CAMERA])
    assert caplog.text.count("is in no dataset") == console.LINES, "of many few are said, and each is written"
    assert (tmp_path / "errors.log").read_text().count("is in no dataset") == 7
    run.exporter = run.started(sinks=[failing(ValueError("no screen"))])
    run.work()
    assert caplog.text.count("is not recorded: ValueError: no screen") == console.LINES


@pytest.mark.parametrize("evicted", [False, True])
def test_an_export_by_hand_tries_again_what_was_left_out(tmp_path, seen, monkeypatch, evicted):
    """From the store, else from the rows that were kept. One that fails again stays, and a killed one doubles none."""
    run, left_out = Run(tmp_path, seen, capacity=100), tmp_path / "datasets/left_out"
    run.episodes("e0", "e1")
    with monkeypatch.context() as patch:
        patch.setattr(shards, "write", failing(ValueError("no codec")))
        run.work()
        before = {path: path.is_file() and path.read_bytes() for path in left_out.rglob("*")}
        run.add(Outcome("e1", True, judged_by="operator"))
        run.episodes(*(f"f{i}" for i in range(11 * evicted)), steps=10)
        assert (run.store.sources["online"].tail > 12) == evicted
        run.store.close()
        assert export_run(tmp_path, 20, ["demo"]) == []
        export_run(tmp_path, 20)
        assert before.items() <= {path: path.is_file() and path.read_bytes() for path in left_out.rglob("*")}.items()
    shutil.copytree(left_out, tmp_path / "before_a_kill")
    first, *_ = made = export_run(tmp_path, 20)
    entries = run.manifest(first.name)["episodes"]
    assert [(e["id"], e["success"]) for e in entries[:2]] == [("e0", None), ("e1", True)]
    _, table = run.opened(first.name)
    for begin, name in ((0, "e0"), (6, "e1")):
        expected = segment(seen, name)
        assert np.array_equal(table["action"][begin : begin + 6].astype(np.float32), expected.action)
        assert np.array_equal(table["time"][begin : begin + 6], expected.time)
    assert table["outcome"][:12].tolist() == [-1] * 6 + [1] * 6
    assert not list(left_out.iterdir())
    shutil.copytree(tmp_path / "before_a_kill", left_out, dirs_exist_ok=True)
    assert export_run(tmp_path, 1) == made
    assert not list(left_out.iterdir())


def test_a_full_disk_is_no_episodes_fault_and_said_once(tmp_path, blind, monkeypatch, caplog):
    full = [True]

    def write(*arguments):
        if full:
            raise OSError(28, "No space left on device")
        return made(*arguments)

    run, made = Run(tmp_path, blind), shards.write
    monkeypatch.setattr(shards, "write", write)
    monkeypatch.setattr(export, "RETRY_S", 0.0)
    run.episodes("e0", "e1")
    run.hear()
    client = export._Client(Silent())
    for _ in range(3):
        assert client.step(run.exporter, rest=False)
    assert caplog.text.count("No space left on device; it is tried again") == 1
    assert run.exporter.settled == []
    full.clear()
    run.work()
    assert run.shards() == ["000001-000002"]


def test_a_shard_that_cannot_be_made_again_stays_as_it_was(tmp_path, blind, monkeypatch, caplog):
    run = exported(tmp_path, blind)
    monkeypatch.setattr(shards, "write", lambda *_: 1 / 0)
    assert run.judge("e0", True) == 1
    assert "000001-000002 stays as it was: ZeroDivisionError" in caplog.text
    assert run.manifest("000001-000002")["version"] == 1
    assert run.exporter.settled == [1, 2]


@pytest.mark.parametrize(("number", "is_tried_again"), [(errno.EIO, True), (errno.EBUSY, True), (errno.ENOENT, False)])
def test_a_late_verdict_removes_nothing_of_a_shard_that_cannot_be_read(
    tmp_path, blind, monkeypatch, number, is_tried_again
):
    """Its steps have left the store. A fault of the machine passes; any other waits for the next start."""
    run = Run(tmp_path, blind, capacity=100)
    run.episodes("e0", "e1")
    run.work()
    run.episodes(*(f"f{i}" for i in range(11)), steps=10)
    assert run.store.sources["online"].tail > 12
    run.work()
    shard = tmp_path / "datasets/online/000001-000002"
    before = {path: path.is_file() and path.read_bytes() for path in shard.rglob("*")}
    with monkeypatch.context() as patch:
        patch.setattr(parquet, "read_schema", failing(OSError(number, "unreadable")))
        with pytest.raises(ConfigError, match="unreadable") if is_tried_again else nullcontext():
            run.judge("e0", True)
    assert {path: path.is_file() and path.read_bytes() for path in shard.rglob("*")} == before
    run.exporter = run.exporter if is_tried_again else run.started()
    run.work()
    assert [entry["success"] for entry in run.manifest(shard.name)["episodes"]] == [True, None]
