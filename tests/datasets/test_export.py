"""Sealed episodes become LeRobot datasets while the run goes on: equal to the store, whole whenever the export is
killed, replaced when somebody judges anew; and an archived source lets nothing go before it is exported."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from serl_client import Outcome, Spec
from serl_client.errors import ConfigError

from serl_launcher.datasets import episodes, export, exporter, shards, single
from serl_launcher.datasets.export import export_run
from serl_launcher.datasets.exporter import Exporter
from serl_launcher.datasets.names import MANIFEST
from serl_launcher.store.layout import published
from tests.shared.common import STATE, TOOLS

from .exporting import CAMERA, Run, exported, needs_lerobot, opened, segment

pytestmark = [pytest.mark.usefixtures("quiet"), pytest.mark.slow, needs_lerobot]


def test_lerobot_opens_every_shard_while_the_run_goes_on_and_its_numbers_are_the_stores(tmp_path, seen):
    run = Run(tmp_path, seen)
    names = ["e0", "e1", "e2", "e3"]
    for i, name in enumerate(names):
        run.add(segment(seen, name, steps=4, ends=""), segment(seen, name, start=4, steps=3 + i))
        run.add(Outcome(name, i % 2 == 0))
        run.work()
        for j, shard in enumerate(run.shards() if i else []):
            dataset, table = run.opened(shard)
            members = [[segment(seen, n, steps=4, ends=""), segment(seen, n, start=4, steps=3 + k)]
                       for k, n in enumerate(names) if k // 2 == j]  # fmt: skip
            parts = [part for member in members for part in member]
            assert (dataset.num_episodes, dataset.num_frames) == (2, sum(map(len, parts)))
            for column, name_ in (("action", "action"), ("next.reward", "reward"), ("intervened", "intervened"),
                                  ("chunk_start", "chunk_start"), ("time", "time")):  # fmt: skip
                expected = np.concatenate([getattr(part, name_) for part in parts])
                assert np.array_equal(table[column].reshape(expected.shape), expected)
            state = np.concatenate([part.observation[STATE][: len(part)] for part in parts])
            assert np.array_equal(table[STATE].astype(np.float32), state)
            proposed = np.concatenate([part.extras["policy_action"] for part in parts])
            assert np.array_equal(table["policy_action"].astype(np.float32), proposed)
            assert table["next.terminated"].sum() == table["next.done"].sum() == 2
            assert table["next.success"].sum() == 1
            assert set(table["outcome"].tolist()) == {0, 1}
            assert set(table["weights_version"].tolist()) == {3}
            for step in (0, 5):
                image = (dataset[step][CAMERA].numpy() * 255).round().astype(int)
                assert np.abs(image - 30 * step).max() <= 12, "the frame of another step"
    assert run.shards() == ["000001-000002", "000003-000004"]
    manifest = run.manifest("000001-000002")
    assert [e["id"] for e in manifest["episodes"]] == ["e0", "e1"]
    assert (manifest["run"], manifest["version"]) == (run.store.run, 1)
    assert Spec.from_dict(manifest["spec"]) == seen
    assert manifest["images"]["lossy"] == (manifest["images"]["stored_as"] == "video")
    assert not list(tmp_path.rglob("images")), "what was encoded is kept once"


def test_one_episode_is_taken_along_as_a_shard_or_a_video_unless_it_goes_on_or_has_left(tmp_path, seen, blind):
    run = Run(tmp_path / "run", seen)
    run.episodes("e0", "e1")
    run.add(segment(seen, "e2", ends=""), Outcome("e1", True))
    single.make(run.folder, "e1", tmp_path / "one.zip")
    shutil.unpack_archive(tmp_path / "one.zip", tmp_path / "one")
    dataset, table = opened(tmp_path / "one")
    assert dataset.num_episodes == 1
    assert np.array_equal(table["action"].astype(np.float32), segment(seen, "e1").action)
    assert json.loads((tmp_path / "one" / MANIFEST).read_text())["episodes"][0]["success"] is True
    single.make(run.folder, "e1", tmp_path / "one.mp4")
    assert shards._frames(tmp_path / "one.mp4") == 7
    for name in ("e2", "e9", ""):
        with pytest.raises(ConfigError, match="is no episode that has ended"):
            single.make(run.folder, name, tmp_path / "two.zip")
    full = Run(tmp_path / "full", blind, capacity=20)
    full.episodes(*(f"e{i}" for i in range(6)))
    for name, out, why in (("e0", "two.zip", "has left the store"), ("e5", "two.mp4", "has no camera")):
        with pytest.raises(ConfigError, match=why):
            single.make(full.folder, name, tmp_path / out)
    assert not [*tmp_path.glob("two*")]


def test_episodes_of_two_actors_and_of_two_phases_are_kept_apart(tmp_path, blind):
    run = Run(tmp_path, blind)
    run.store.lives.hello("other", "outbox2", "B", [])
    for i in range(3):  # their segments lie between each other
        run.store.stage("A", i, segment(blind, "a", start=4 * i, steps=4, ends="truncated" if i == 2 else ""))
        run.store.stage("B", i, segment(blind, "b", start=3 * i, steps=3, ends="", phase="demonstrate", directive=2))
    run.store.commit()
    run.store.close_session("B")  # that actor died: its episode is cut, and has no final observation
    run.store.commit()
    run.work(rest=True)
    _, online = run.opened("000001-000001")
    _, demo = run.opened("000002-000002", "demo")
    assert (len(online["action"]), len(demo["action"])) == (12, 9)
    for table, name, count, size in ((online, "a", 3, 4), (demo, "b", 3, 3)):
        expected = np.concatenate([segment(blind, name, start=size * i, steps=size).action for i in range(count)])
        assert np.array_equal(table["action"].astype(np.float32), expected)
        assert np.flatnonzero(table["next.truncated"]).tolist() == [len(expected) - 1]
        assert set(table["outcome"].tolist()) == {-1}
    phases = run.manifest("000002-000002", "demo")["phases"]
    assert [phases[online["phase"][0]], phases[demo["phase"][0]]] == ["practise", "demonstrate"]


def test_what_a_shard_holds_stays_there_until_an_operator_discards_it(tmp_path, blind):
    """The learner, which sets an episode aside, may be wrong, and the store may have lost it meanwhile."""
    run = exported(tmp_path, blind)
    run.store.set_aside("e0", "an update with it has no finite gradient")
    run.work()
    run.judge("e1", True)
    dataset, table = run.opened("000001-000002")
    assert (dataset.num_episodes, set(table["outcome"][6:].tolist())) == (2, {1})
    run.store.lives.hello("operator", "outbox2", "B", [])  # from elsewhere, as one who has looked at it
    run.store.stage("B", 0, Outcome("e0", None, discard=True, judged_by="operator"))
    run.store.commit()
    run.work()
    assert run.opened("000001-000002")[0].num_episodes == 1


def test_an_episode_with_a_time_that_cannot_be_is_exported_once_an_operator_has_taken_it_back(tmp_path, blind):
    run = Run(tmp_path, blind)
    times = {"e0": np.array([0, 1e308, 2, -1e308, 4, 5]), "e1": np.array([5, 6, 1, 2, 3, 4.0])}  # e1: only backwards
    run.add(*(replace(segment(blind, name), time=time) for name, time in times.items()))
    run.store.lives.hello("operator", "outbox2", "B", [])
    run.store.stage("B", 0, Outcome("e0", True, judged_by="operator"))
    run.store.commit()
    run.work()
    _, table = run.opened("000001-000002")
    counted = np.arange(6) / blind.fps
    assert np.array_equal(table["time"].reshape(2, 6), [counted, times["e1"]])
    assert np.allclose(table["timestamp"].reshape(2, 6), counted)
    assert np.flatnonzero(table["gap"]).tolist() == [2, 3, 8]


def test_an_outcome_after_the_export_makes_the_next_version_at_once(tmp_path, blind, caplog):
    run = Run(tmp_path, blind)
    run.episodes("e0", "e1", ends="truncated")
    run.add(Outcome("e0", True), Outcome("e1", True))
    run.work()
    before, table = run.opened("000001-000002")
    assert (table["next.terminated"].sum(), np.flatnonzero(table["next.truncated"]).tolist()) == (0, [5, 11])
    run.judge("e1", False)
    _, table = run.opened("000001-000002")
    assert table["outcome"].reshape(2, 6)[:, 0].tolist() == [1, 0]
    rewards = np.stack([segment(blind, name, ends="truncated").reward for name in ("e0", "e1")])
    rewards[1, -1] = 0.0  # the operator's, and terminal
    assert np.array_equal(table["next.reward"].reshape(2, 6), rewards)
    ends = [np.flatnonzero(table[f"next.{end}"]).tolist() for end in ("done", "terminated", "truncated")]
    assert ends == [[5, 11], [11], [5]]
    assert len(before.hf_dataset.with_format("arrow")[:]) == 12, "who has the old one open keeps it"
    assert run.manifest("000001-000002")["version"] == 2
    assert run.manifest("000001-000002")["episodes"][1]["judged_by"] == "operator"
    run.judge("e0", True, discard=True)
    dataset, table = run.opened("000001-000002")
    assert (dataset.num_episodes, set(table["outcome"].tolist())) == (1, {0})
    os.rename(dataset.root, tmp_path / "away")
    run.judge("e1", True)
    assert "000001-000002 stays as it was" in caplog.text
    os.rename(tmp_path / "away", dataset.root)
    run.judge("e1", False)
    assert [e["id"] for e in run.manifest("000001-000002")["left_out"]] == ["e0"]
    run.exporter = run.started()
    assert run.work() == 0, "another life finds nothing to do"
    run.judge("e1", None, discard=True)
    assert run.shards() == [], "LeRobot knows no dataset without episodes"
    run.add(Outcome("e0", True, judged_by="operator"), Outcome("e1", True, judged_by="operator"))
    run.work()
    assert run.opened("000001-000002")[0].num_episodes == 2


def test_a_relabel_reaches_an_episode_that_the_store_holds_no_more(tmp_path, seen):
    run = Run(tmp_path, seen, capacity=100, archived=["online"], count=2)
    run.episodes("e0", "e1", steps=10)
    run.work()
    run.store.add_archived(run.exporter.settled)
    for i in range(2, 16):
        run.episodes(f"e{i}", steps=10)
        run.work()
        run.store.add_archived(run.exporter.settled)
    assert run.store.sources["online"].tail > 20
    run.add(Outcome("e0", True, judged_by="operator"), Outcome("e1", None, discard=True, judged_by="operator"))
    run.work()
    dataset, table = run.opened("000001-000002")
    assert np.array_equal(table["action"].astype(np.float32), segment(seen, "e0", steps=10).action)
    assert set(table["outcome"].tolist()) == {1}
    stored = segment(seen, "e0", steps=10).reward
    assert np.array_equal(table["next.reward"].reshape(-1), [*stored[:-1], np.float32(1.0)])
    assert np.abs((dataset[5][CAMERA].numpy() * 255) - 150).max() <= 20
    assert run.manifest("000001-000002")["images"]["encodings"] in (0, 1), "its video was copied"
    run.judge("e0", None)
    assert np.array_equal(run.opened("000001-000002")[1]["next.reward"].reshape(-1), stored), "the word is taken back"


@pytest.mark.parametrize(
    ("field", "value"), [("steps", 4), ("terminated", False), ("truncated", True), ("final", False)]
)
def test_a_shard_is_remade_when_it_does_not_hold_what_the_store_does(tmp_path, blind, field, value):
    """As after a run whose episodes could go on once they were in a shard."""
    run = exported(tmp_path, blind)
    run.forge("000001-000002", **{field: value})
    run.exporter = run.started()
    run.hear()
    assert run.exporter.settled == [2], "what is in no shard as a whole stays in the store"
    assert run.work() == 1
    assert run.exporter.settled == [1, 2]
    assert run.manifest("000001-000002")["version"] == 2
    assert run.manifest("000001-000002")["episodes"][0][field] != value
    run.exporter = run.started()
    assert run.work() == 0


def test_steps_that_a_shard_lacked_are_exported_although_somebody_took_it_away(tmp_path, blind):
    run = exported(tmp_path, blind)
    run.forge("000001-000002", steps=4)
    run.exporter = run.started()
    os.rename(tmp_path / "datasets/online/000001-000002", tmp_path / "away")
    run.work(rest=True)
    assert [entry["steps"] for entry in run.manifest("000001-000001")["episodes"]] == [6]


def test_a_folder_that_is_not_ours_is_left_alone_and_blocks_nothing(tmp_path, blind, caplog):
    """As lerobot-dataset-viz leaves one that was asked for a shard which is not there."""
    run = Run(tmp_path, blind)
    for name in ("000001-000002", "notes"):
        (tmp_path / "datasets/online" / name / "meta").mkdir(parents=True)
        (tmp_path / "datasets/online" / name / "meta/mine").write_text("mine")
    run.exporter = run.started()
    assert "notes has no retake.json: it is not ours and is left alone" in caplog.text
    run.episodes("e0", "e1")
    run.work()
    assert run.shards() == ["000001-000002", "000001-000002~", "notes"]
    assert [entry["id"] for entry in run.manifest("000001-000002~")["episodes"]] == ["e0", "e1"]
    for name in ("000001-000002", "notes"):
        assert (tmp_path / "datasets/online" / name / "meta/mine").read_text() == "mine"
    run.store.close()
    assert [path.name for path in export_run(tmp_path, 10)] == ["000001-000002~"]


def test_an_episode_that_leaves_the_store_while_its_images_are_read_is_taken_from_its_shard(
    tmp_path, seen, monkeypatch
):
    run, read, reads = Run(tmp_path, seen, capacity=100), episodes.StoredImages.__getitem__, []
    run.episodes("e0", "e1", steps=10)
    run.work()
    run.add(Outcome("e0", True, judged_by="operator"))

    def overtaken(images, index):
        found = read(images, index)
        if not isinstance(index, slice):
            reads.append(index)
            if len(reads) == 5:
                run.episodes(*(f"later{i}" for i in range(11)), steps=10)
                found = read(images, index)
        return found

    monkeypatch.setattr(episodes.StoredImages, "__getitem__", overtaken)
    run.exporter.count = 100  # the later ones wait
    run.work()
    assert reads == [0, 1, 2, 3, 4], "it was begun again, and not from the store"
    manifest = run.manifest("000001-000002")
    assert [(e["id"], e["steps"], e["success"]) for e in manifest["episodes"]] == [("e0", 10, True), ("e1", 10, None)]
    assert manifest["version"] == 2
    _, table = run.opened("000001-000002")
    assert np.array_equal(table["action"][:10].astype(np.float32), segment(seen, "e0", steps=10).action)


def test_the_export_keeps_of_a_long_history_what_the_store_holds_and_corrects_the_rest(tmp_path, blind):
    run = Run(tmp_path, blind, capacity=100)
    for i in range(24):
        run.episodes(f"e{i}", steps=10)
        run.work()
        assert len(run.exporter.episodes) <= 10 + run.exporter.remaining
    run.exporter = run.started()
    run.hear()
    alive = {number for number in range(1, 25) if 10 * (number - 1) >= run.store.sources["online"].tail}
    assert set(run.exporter.episodes) == alive
    assert set(run.exporter.settled) <= alive
    assert run.judge("e0", True) == 1
    entries = run.manifest("000001-000002")["episodes"]
    assert [(e["id"], e["steps"], e["success"]) for e in entries] == [("e0", 10, True), ("e1", 10, None)]
    assert set(run.exporter.episodes) == alive, "what was corrected is forgotten again"


def test_the_end_of_a_run_says_how_far_the_export_is_and_how_to_go_on(tmp_path, blind, caplog, monkeypatch):
    monkeypatch.setattr(exporter, "TELL_S", 0.0)
    caplog.set_level("INFO", "serl_launcher.datasets")
    run = Run(tmp_path, blind)
    run.episodes("e0", "e1", "e2", "e3", "e4")
    run.work()
    assert "written" not in caplog.text, "nobody waits for it yet"
    run.work(rest=True)
    run.episodes("e5")
    run.work(rest=True)
    said = [record.getMessage() for record in caplog.records if record.name == exporter.__name__]
    assert said == [
        f"export: 1 episodes go into datasets; Ctrl-C is safe, `tools/data.py export {tmp_path}` goes on where it was",
        "export: episode 1 of 1 is written", "export: episode 2 of 2 is written",
    ]  # fmt: skip


def test_shards_of_another_run_are_not_touched(tmp_path, blind):
    exported(tmp_path, blind)
    with pytest.raises(ConfigError, match="not of this one: move"):
        Exporter(tmp_path, "f" * 32, blind, {"online": 400}, ["online"], 2)


def test_a_stopped_run_is_exported_by_hand(tmp_path, blind):
    run = Run(tmp_path, blind)
    run.episodes("e0", "e1", "e2")
    run.episodes("d0", phase="demonstrate", directive=2)
    run.store.close()
    published(tmp_path / "store/online", writable=True)[1] = 0  # as after a crash between commit and publish
    made = export_run(tmp_path, 2)
    assert [str(path.relative_to(tmp_path / "datasets")) for path in made] == [
        "demo/000004-000004", "online/000001-000002", "online/000003-000003"
    ]  # fmt: skip
    assert export_run(tmp_path, 2) == made
    tool = [sys.executable, TOOLS / "data.py", "export", tmp_path]
    said = subprocess.run(tool, capture_output=True, text=True)
    assert said.stdout.split() == [str(path) for path in made], said.stderr
    with pytest.raises(ConfigError, match="has no source onlin"):
        export_run(tmp_path, 2, ["onlin"])
    with export._alone(tmp_path / "datasets"), pytest.raises(ConfigError, match="another process is writing"):
        export_run(tmp_path, 2)
