"""Sealed episodes become LeRobot datasets while the run goes on: equal to the store, whole whenever the export is
killed, replaced when somebody judges anew; and an archived source lets nothing go before it is exported."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from omegaconf import OmegaConf
from serl_client import Feature, Outcome, Segment, Spec, Stamp
from serl_client import messages as m
from serl_client.client import TrainerClient
from serl_client.connection import Connection
from serl_client.errors import ConfigError, TrainerError

from serl_launcher.datasets import episodes, export, exporter, shards
from serl_launcher.datasets.export import export_run
from serl_launcher.datasets.exporter import Exporter
from serl_launcher.datasets.names import MANIFEST
from serl_launcher.datasets.reader import Dataset
from serl_launcher.replay.views import EpisodeInfo
from serl_launcher.store.errors import Full
from serl_launcher.store.index import Index
from serl_launcher.store.layout import published
from serl_launcher.store.server import Server
from serl_launcher.store.store import Store
from serl_launcher.training.plan import Plan, Source
from tests.shared.common import free_port

STATE, CAMERA = "observation.state", "observation.images.cam_high"
PROPOSED = {"policy_action": Feature((2,))}

needs_lerobot = pytest.mark.skipif(bool(shards.missing()), reason="needs the extra `data`")


@pytest.fixture
def seen():
    """A Spec with a camera and an extra column."""
    observation = {STATE: Feature((4,)), CAMERA: Feature((64, 64, 3), "uint8")}
    return Spec(observation, Feature((2,), low=-1, high=1), fps=10.0, extras=PROPOSED)


@pytest.fixture
def blind():
    return Spec({STATE: Feature((4,))}, Feature((2,), low=-1, high=1), fps=10.0, extras=PROPOSED)


def segment(spec, episode, start=0, steps=6, ends="terminated", phase="practise", directive=1, weights=3):
    """Numbers that no other episode has; the images are of one colour each, which a codec keeps nearly."""
    generator = np.random.default_rng([*episode.encode(), start])
    action, proposed = generator.random((2, steps, 2), np.float32)
    reward, (intervened, decision) = generator.random(steps, np.float32), generator.random((2, steps)) < 0.5
    time, rows = 1e9 + generator.random(steps), steps + bool(ends)
    observation = {STATE: generator.random((rows, 4), np.float32)}
    if CAMERA in spec.observation:
        colour = (30 * np.arange(start, start + rows) % 250).astype(np.uint8)
        observation[CAMERA] = np.broadcast_to(colour[:, None, None, None], (rows, 64, 64, 3)).copy()
    return Segment(
        episode, start, "reach", Stamp(directive, phase, weights), observation, action, reward, intervened, decision,
        time, terminated=ends == "terminated", truncated=ends == "truncated", extras={"policy_action": proposed},
    )  # fmt: skip


class Run:
    """A store that somebody writes into, and an exporter beside it, without the processes around them."""

    def __init__(self, folder, spec, capacity=400, archived=(), count=2):
        self.folder, self.spec, self.capacity, self.count, self.seq = folder, spec, capacity, count, 0
        self.store = Store.create(folder / "store", spec, {"online": capacity, "demo": 400}, archived)
        self.store.direct({"into": "online", "phase": "practise"})
        self.store.direct({"into": "demo", "phase": "demonstrate"})
        self.store.hello("arm", "outbox", "A", [])
        self.revision, self.exporter = 0, self.started()

    def started(self, sources=("online", "demo"), sinks=()):
        self.revision = 0
        capacities = {"online": self.capacity, "demo": 400}
        return Exporter(self.folder, self.store.run, self.spec, capacities, sources, self.count, sinks)

    def add(self, *records):
        for record in records:
            self.store.stage("A", self.seq, record)
            self.seq += 1
        self.store.commit()

    def episodes(self, *names, **how):
        self.add(*(segment(self.spec, name, **how) for name in names))

    def hear(self):
        self.revision, rows = self.store.index.catalog(self.revision, 1000)
        self.exporter.take(rows)

    def work(self, rest=False):
        """All that is due; returns how many things were."""
        self.hear()
        done = 0
        while self.exporter.work(rest=rest):
            done += 1
        return done

    def shards(self, source="online"):
        return sorted(p.name for p in (self.folder / "datasets" / source).iterdir())

    def opened(self, name, source="online"):
        return opened(self.folder / "datasets" / source / name)

    def manifest(self, name, source="online"):
        return json.loads((self.folder / "datasets" / source / name / MANIFEST).read_text())


class Silent:
    """The link to a server that has nothing new to tell."""

    def receive(self):
        return None

    def call(self, message, timeout):
        return m.Synced(0, [], [], [], False)


def opened(folder):
    """What LeRobot reads: (its dataset, {column: [frames, ...]} without images)."""
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    dataset = LeRobotDataset("local/shard", root=folder)
    table = dataset.hf_dataset.with_format("arrow")[:].to_pydict()
    return dataset, {name: np.array(values) for name, values in table.items() if name not in dataset.meta.camera_keys}


@pytest.fixture(autouse=True)
def quiet(tmp_path, monkeypatch):
    """LeRobot asks nobody, and keeps its copies out of the user's home."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    if not shards.missing():
        import datasets

        shards._lerobot()
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))


@needs_lerobot
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
            assert set(table["weights"].tolist()) == {3}
            for step in (0, 5):
                image = (dataset[step][CAMERA].numpy() * 255).round().astype(int)
                assert np.abs(image - 30 * step).max() <= 12, "the frame of another step"
    assert run.shards() == ["000001-000002", "000003-000004"]
    manifest = run.manifest("000001-000002")
    assert [e["id"] for e in manifest["episodes"]] == ["e0", "e1"]
    assert (manifest["run"], manifest["version"]) == (run.store.run, 1)
    assert Spec.from_dict(manifest["spec"]) == seen
    assert manifest["images"]["lossy"] == (manifest["images"]["stored_as"] == "video")


@needs_lerobot
def test_episodes_of_two_actors_and_of_two_phases_are_kept_apart(tmp_path, blind):
    run = Run(tmp_path, blind)
    run.store.hello("other", "outbox2", "B", [])
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


@needs_lerobot
def test_an_outcome_after_the_export_makes_the_next_version_at_once(tmp_path, blind, caplog):
    run = Run(tmp_path, blind)
    run.episodes("e0", "e1")
    run.add(Outcome("e0", True), Outcome("e1", True))
    run.work()
    before, _ = run.opened("000001-000002")
    run.add(Outcome("e1", False, judged_by="operator"))
    run.work()
    _, table = run.opened("000001-000002")
    assert table["outcome"].reshape(2, 6)[:, 0].tolist() == [1, 0]
    assert len(before.hf_dataset.with_format("arrow")[:]) == 12, "who has the old one open keeps it"
    assert run.manifest("000001-000002")["version"] == 2
    assert run.manifest("000001-000002")["episodes"][1]["judged_by"] == "operator"
    run.add(Outcome("e0", True, discard=True, judged_by="operator"))
    run.work()
    dataset, table = run.opened("000001-000002")
    assert (dataset.num_episodes, set(table["outcome"].tolist())) == (1, {0})
    os.rename(dataset.root, tmp_path / "away")
    run.add(Outcome("e1", True, judged_by="operator"))
    run.work()
    assert "what was judged anew stays as it was" in caplog.text
    os.rename(tmp_path / "away", dataset.root)
    run.add(Outcome("e1", False, judged_by="operator"))
    run.work()
    assert [e["id"] for e in run.manifest("000001-000002")["left_out"]] == ["e0"]
    run.exporter = run.started()
    assert run.work() == 0, "another life finds nothing to do"
    run.add(Outcome("e1", None, discard=True, judged_by="operator"))
    run.work()
    assert run.shards() == [], "LeRobot knows no dataset without episodes"
    run.add(Outcome("e0", True, judged_by="operator"), Outcome("e1", True, judged_by="operator"))
    run.work()
    assert run.opened("000001-000002")[0].num_episodes == 2


@needs_lerobot
def test_a_relabel_reaches_an_episode_that_the_store_holds_no_more(tmp_path, seen):
    run = Run(tmp_path, seen, capacity=100, archived=["online"], count=2)
    run.episodes("e0", "e1", steps=10)
    run.work()
    run.store.archive(run.exporter.settled)
    for i in range(2, 16):
        run.episodes(f"e{i}", steps=10)
        run.work()
        run.store.archive(run.exporter.settled)
    assert run.store.sources["online"].tail > 20
    run.add(Outcome("e0", True, judged_by="operator"), Outcome("e1", None, discard=True, judged_by="operator"))
    run.work()
    dataset, table = run.opened("000001-000002")
    assert np.array_equal(table["action"].astype(np.float32), segment(seen, "e0", steps=10).action)
    assert set(table["outcome"].tolist()) == {1}
    assert np.abs((dataset[5][CAMERA].numpy() * 255) - 150).max() <= 20
    assert run.manifest("000001-000002")["images"]["encodings"] in (0, 2)


@needs_lerobot
@pytest.mark.parametrize(
    ("field", "value"), [("steps", 4), ("terminated", False), ("truncated", True), ("final", False)]
)
def test_a_shard_is_remade_when_it_does_not_hold_what_the_store_does(tmp_path, blind, field, value):
    """As after a run whose episodes could go on once they were in a shard."""
    run = Run(tmp_path, blind)
    run.episodes("e0", "e1")
    run.work()
    manifest = run.manifest("000001-000002")
    manifest["episodes"][0][field] = value
    (tmp_path / "datasets/online/000001-000002" / MANIFEST).write_text(json.dumps(manifest))
    run.exporter = run.started()
    run.hear()
    assert run.exporter.settled == [2], "what is in no shard as a whole stays in the store"
    assert run.work() == 1
    assert run.exporter.settled == [1, 2]
    assert run.manifest("000001-000002")["version"] == 2
    assert run.manifest("000001-000002")["episodes"][0][field] != value
    run.exporter = run.started()
    assert run.work() == 0


@needs_lerobot
def test_steps_that_a_shard_lacked_are_exported_although_somebody_took_it_away(tmp_path, blind):
    run = Run(tmp_path, blind)
    run.episodes("e0", "e1")
    run.work()
    path = tmp_path / "datasets/online/000001-000002"
    manifest = run.manifest(path.name)
    manifest["episodes"][0]["steps"] = 4
    (path / MANIFEST).write_text(json.dumps(manifest))
    run.exporter = run.started()
    os.rename(path, tmp_path / "away")
    run.work(rest=True)
    assert [entry["steps"] for entry in run.manifest("000001-000001")["episodes"]] == [6]


@needs_lerobot
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


@needs_lerobot
def test_an_episodes_images_are_never_in_memory_at_once(tmp_path, seen, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("all images of an episode were asked for")

    monkeypatch.setattr(episodes.StoredImages, "__array__", refuse)
    run, shown = Run(tmp_path, seen), []
    run.exporter = run.started(sinks=[lambda info, rows, spec: shown.extend(rows()[CAMERA])])
    run.episodes("e0", "e1")
    run.work()
    assert [image.shape for image in shown] == [(64, 64, 3)] * 14
    assert run.opened("000001-000002")[0].num_frames == 12


@needs_lerobot
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


@needs_lerobot
def test_the_export_keeps_of_a_long_history_what_the_store_holds_and_corrects_the_rest(tmp_path, blind):
    run = Run(tmp_path, blind, capacity=100)
    for i in range(40):
        run.episodes(f"e{i}", steps=10)
        run.work()
        assert len(run.exporter.episodes) <= 10 + run.exporter.remaining
    run.exporter = run.started()
    run.hear()
    alive = {number for number in range(1, 41) if 10 * (number - 1) >= run.store.sources["online"].tail}
    assert set(run.exporter.episodes) == alive
    assert set(run.exporter.settled) <= alive
    run.add(Outcome("e0", True, judged_by="operator"))
    assert run.work() == 1
    entries = run.manifest("000001-000002")["episodes"]
    assert [(e["id"], e["steps"], e["success"]) for e in entries] == [("e0", 10, True), ("e1", 10, None)]
    assert set(run.exporter.episodes) == alive, "what was corrected is forgotten again"


@needs_lerobot
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
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        f"export: 1 episodes go into datasets; Ctrl-C is safe, `tools/data.py export {tmp_path}` goes on where it was",
        "export: episode 1 of 1 is written", "export: episode 2 of 2 is written",
    ]  # fmt: skip


@needs_lerobot
def test_a_sink_gets_every_sealed_episode_with_its_final_observation(tmp_path, blind):
    run, got = Run(tmp_path, blind), []
    run.exporter = run.started(sources=["demo"], sinks=[lambda info, rows, spec: got.append((info.id, rows(), spec))])
    run.episodes("e0", steps=5)
    run.add(segment(blind, "e1", ends=""))
    run.work()
    [(id, rows, spec)] = got
    assert (id, spec) == ("e0", blind)
    assert (rows[STATE].shape, rows["action"].shape, rows["terminated"].tolist()) == ((6, 4), (5, 2), [0, 0, 0, 0, 1])


@needs_lerobot
@pytest.mark.parametrize(
    ("error", "asked"), [(OSError(28, "No space left on device"), 2), (ValueError("no such codec"), 1)]
)
def test_what_cannot_be_recorded_is_exported(tmp_path, blind, caplog, error, asked):
    def failing(info, rows, spec):
        calls.append(info.id)
        raise error

    run, calls = Run(tmp_path, blind), []
    run.exporter = run.started(sinks=[failing])
    run.episodes("e0", "e1")
    run.work()
    assert len(calls) == asked
    assert str(error) in caplog.text
    assert run.shards() == ["000001-000002"]


def test_what_may_leave_the_store_is_told_once(tmp_path, blind):
    run = Run(tmp_path, blind)
    run.episodes("e0", "e1")
    run.add(Outcome("e0", None, discard=True))
    run.hear()
    assert run.exporter.settled == [1]
    run.exporter.told()
    run.add(Outcome("e1", None, discard=True))
    run.hear()
    assert run.exporter.settled == [2]


@needs_lerobot
def test_every_kind_of_feature_comes_back_from_a_shard(tmp_path):
    """What LeRobot has no column for gets another name or shape there."""
    spec = Spec(
        {STATE: Feature((), "float64"), "observation.images.depth": Feature((8, 8, 1), "uint8"),
         "observation.touch": Feature((2,), "bool"), "observation.half": Feature((1,), "float16")},
        Feature((2,), low=-1, high=1), fps=10.0, extras={"age.images": Feature(()), "timestamp": Feature((2,), "int8")},
    )  # fmt: skip
    generator, records = np.random.default_rng(0), []
    for i, steps in enumerate((4, 3)):
        observation, extras = (
            {name: (3 * generator.random((rows, *f.shape))).astype(f.dtype) for name, f in features.items()}
            for features, rows in ((spec.observation, steps + 1), (spec.extras, steps))
        )
        plain = segment(spec, f"e{i}", steps=steps)
        records.append(replace(plain, observation=observation, extras=extras, task='""'[:i]))
    run = Run(tmp_path, spec)
    run.add(*records)
    run.work()
    dataset = Dataset(tmp_path / "datasets/online/000001-000002")
    assert dataset.misfit(spec) == ""
    for before, episode in zip(records, dataset, strict=True):
        [after] = episode.segments(spec, before.episode, before.stamp)
        after.check(spec)
        assert after.task == before.task
        for name in spec.observation:
            assert np.array_equal(after.observation[name][:-1], before.observation[name][:-1])
        for name in spec.extras:
            assert np.array_equal(after.extras[name], before.extras[name])


@needs_lerobot
def test_shards_of_another_run_are_not_touched(tmp_path, blind):
    run = Run(tmp_path, blind)
    run.episodes("e0", "e1")
    run.work()
    with pytest.raises(ConfigError, match="not of this one: move"):
        Exporter(tmp_path, "f" * 32, blind, {"online": 400}, ["online"], 2)


@needs_lerobot
def test_a_shard_that_differs_from_the_store_is_never_put_in_place(tmp_path, blind, monkeypatch, caplog):
    run = Run(tmp_path, blind)
    write = shards.write

    def swapped(part, spec, codec, episodes):
        made = write(part, spec, codec, episodes)
        made[0][1]["intervened"] = ~made[0][1]["intervened"]
        return made

    monkeypatch.setattr(shards, "write", swapped)
    run.episodes("e0", "e1")
    with pytest.raises(shards.Mismatch, match="intervened of e0"):
        run.work()
    monkeypatch.setattr(export, "RETRY_S", 0.0)
    assert export._Client(Silent()).step(run.exporter, rest=False), "the process goes on, and so does the run"
    assert "it is tried again" in caplog.text
    run.exporter = run.started()
    assert run.shards() == []


@needs_lerobot
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
    tool = [sys.executable, Path(__file__).resolve().parents[2] / "tools/data.py", "export", tmp_path]
    said = subprocess.run(tool, capture_output=True, text=True)
    assert said.stdout.split() == [str(path) for path in made], said.stderr
    with pytest.raises(ConfigError, match="has no source onlin"):
        export_run(tmp_path, 2, ["onlin"])
    with export._alone(tmp_path / "datasets"), pytest.raises(ConfigError, match="another process is writing"):
        export_run(tmp_path, 2)


# -- crashes


def die_after(calls):
    """Kill this process at that call of what makes a shard durable, or of LeRobot's own steps."""
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    left = [calls]

    def wrap(function):
        def wrapped(*arguments, **options):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **options)

        return wrapped

    for owner, name in ((os, "rename"), (os, "fsync"), (shutil, "rmtree"), (shards, "_exchange"),
                        (LeRobotDataset, "save_episode"), (LeRobotDataset, "finalize")):  # fmt: skip
        setattr(owner, name, wrap(getattr(owner, name)))


@needs_lerobot
@pytest.mark.parametrize("exchange", [True, False])
def test_kill_at_every_step_leaves_only_whole_shards_and_a_repeat_doubles_nothing(
    tmp_path, blind, monkeypatch, exchange
):
    """Some lives write new shards, the later ones replace them, with and without a file system that exchanges."""
    if not exchange:
        monkeypatch.setattr(shards, "_exchange", lambda part, target: False)
    run = Run(tmp_path, blind)
    run.episodes("e0", "e1", "e2", "e3")
    lives, at, relabelled = 0, 1, False
    while True:
        child = os.fork()
        if child == 0:
            die_after(at)
            run.exporter = run.started()
            run.work()
            os._exit(0)
        _, status = os.waitpid(child, 0)
        lives, at = lives + 1, at % 45 + (4 if exchange else 7)
        for shard in [n for n in run.shards() if not n.endswith(shards.PART)] if lives > 1 else []:
            dataset, table = run.opened(shard)
            assert (dataset.num_episodes, len(table["action"])) == (2, 12)
            assert shards.read_manifest(dataset.root)["run"] == run.store.run
        if os.waitstatus_to_exitcode(status) == 0:
            if relabelled:
                break
            relabelled = True
            run.add(Outcome("e0", True, judged_by="operator"), Outcome("e2", True, judged_by="operator"))
            at = 1
    assert lives > 8
    assert run.shards() == ["000001-000002", "000003-000004"]
    outcomes = [run.opened(shard)[1]["outcome"].reshape(2, 6)[:, 0].tolist() for shard in run.shards()]
    assert outcomes == [[1, -1], [1, -1]]


# -- the archive


def test_an_archived_source_lets_nothing_go_before_it_is_exported(tmp_path, blind):
    run = Run(tmp_path, blind, capacity=100, archived=["online"])
    for i in range(10):
        run.episodes(f"e{i}", steps=10)
    with pytest.raises(Full, match=r"source online is full, and its episode e0 waits for its export"):
        run.episodes("e10", steps=10)
    assert (run.seq, run.store.sources["online"].tail) == (10, 0)
    run.episodes("d0", phase="demonstrate", directive=2)  # another source takes what comes
    run.store.archive([1, 2])
    run.store.close()
    run.store = Store(tmp_path / "store", ["online"])  # it is durable
    for i in range(10, 12):
        run.episodes(f"e{i}", steps=10)
    with pytest.raises(Full, match="e2 waits"):
        run.episodes("e12", steps=10)
    run.store.archive(range(1, 100))
    for i in range(12, 30):
        run.episodes(f"e{i}", steps=10)
        run.store.archive(range(1, 200))
    assert run.store.sources["online"].tail > 100


def test_an_open_episode_that_a_full_source_waits_for_is_cut_and_nothing_of_it_leaves_unexported(tmp_path, blind):
    run = Run(tmp_path, blind, capacity=100, archived=["online"])
    run.store.hello("other", "outbox2", "B", [])
    run.store.stage("B", 0, segment(blind, "long", steps=10, ends=""))
    run.episodes(*(f"e{i}" for i in range(9)), steps=10)
    with pytest.raises(Full, match="its episode long waits for its export"):
        run.episodes("e9", steps=10)
    run.store.commit()
    assert run.store.index.episode("long").closed
    rest = segment(blind, "long", start=10, steps=10)
    with pytest.raises(Full, match="its episode long waits for its export"):
        run.store.stage("B", 1, rest)
    run.store.archive([run.store.index.episode("long").number])
    run.store.stage("B", 1, rest)
    run.store.commit()
    assert [(e.id, e.steps, e.final) for e in run.store.index.parts("long")] == [("long", 10, 0), ("long.part2", 10, 1)]
    with pytest.raises(Full, match="its episode e0 waits for its export"):
        run.episodes("e9", steps=10)


def test_an_episode_that_never_ends_waits_for_the_export_of_its_parts(tmp_path, blind):
    run = Run(tmp_path, blind, capacity=100, archived=["online"])
    for start in range(0, 100, 10):
        run.add(segment(blind, "endless", start=start, steps=10, ends=""))
    with pytest.raises(Full, match="its episode endless waits"):
        run.add(segment(blind, "endless", start=100, steps=10, ends=""))
    run.store.commit()
    parts = run.store.index.parts("endless")
    assert [(part.part_start, part.steps, part.closed) for part in parts] == [
        (start, 20, start < 80) for start in range(0, 100, 20)
    ]  # fmt: skip
    run.store.archive(part.number for part in parts[:-1])
    for start in range(100, 180, 10):
        run.add(segment(blind, "endless", start=start, steps=10, ends=""))
    with pytest.raises(Full, match=r"its episode endless\.part5 waits"):
        run.add(segment(blind, "endless", start=180, steps=10, ends=""))


@needs_lerobot
def test_what_comes_of_an_archived_episode_after_an_operator_closed_it_leaves_in_a_shard_of_its_own(tmp_path, blind):
    """A dead link, a label, the export of 4 steps, the link is back: 36 more must not leave unexported."""
    run = Run(tmp_path, blind, capacity=100, archived=["online"], count=1)
    run.add(segment(blind, "e0", steps=4, ends=""))
    run.store.hello("desk", "outbox2", "B", [])
    run.store.stage("B", 0, Outcome("e0", True, judged_by="operator"))
    run.store.commit()
    run.work(rest=True)
    run.store.archive(run.exporter.settled)
    for start in (4, 16, 28):
        run.add(segment(blind, "e0", start=start, steps=12, ends="terminated" if start == 28 else ""))
    for i in range(1, 7):
        run.episodes(f"e{i}", steps=10)
    with pytest.raises(Full, match=r"its episode e0\.part2 waits for its export"):
        run.episodes("e7", steps=10)
    run.work(rest=True)
    run.store.archive(run.exporter.settled)
    entries = [
        entry for name in run.shards()
        for entry in shards.read_manifest(tmp_path / "datasets/online" / name)["episodes"]
        if entry["id"].startswith("e0")
    ]  # fmt: skip
    assert sum(entry["steps"] for entry in entries) == 40
    assert {entry["success"] for entry in entries} == {True}


def test_an_episode_that_the_next_one_cuts_is_sealed_although_that_one_has_to_wait(tmp_path, blind):
    """As the importer sends them: nothing says that they end."""
    run = Run(tmp_path, blind, capacity=120, archived=["online"])
    run.episodes("e0", "e1", steps=40)
    for start in (0, 15):
        run.add(segment(blind, "e2", start=start, steps=15, ends=""))
    with pytest.raises(Full, match="e0 waits for its export"):
        run.episodes("e3", steps=20, ends="")
    run.store.commit()
    run.hear()
    assert run.exporter.remaining == 3
    run.store.archive([1])
    run.episodes("e3", steps=20, ends="")


def test_whatever_waits_for_the_export_is_due_there(tmp_path, blind):
    run = Run(tmp_path, blind, capacity=100, archived=["online"], count=10)
    run.episodes("e0", steps=20)
    run.hear()
    assert not run.exporter._due("online", [1], False)
    run.episodes("e1", steps=50)
    with pytest.raises(Full):
        run.episodes("e2", steps=40)
    run.hear()
    assert run.exporter._due("online", [1, 2], False) == [1, 2]


def wait_until(condition, timeout=60.0):
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


PROCESS = """
import sys
from pathlib import Path
from omegaconf import OmegaConf
from serl_launcher.datasets.export import export
from serl_launcher.store.server import serve
from serl_launcher.training.plan import Actors, Phase, Plan, Source
phases = {"practise": Phase("practise", Actors("collect", "online"), ("operator",))}
plan = Plan({"online": Source(120, "lerobot")}, {}, phases)
run_dir, local, public = Path(sys.argv[2]), sys.argv[3], sys.argv[4]
if sys.argv[1] == "server":
    serve(run_dir, plan.capacities, public=public, local=local, inference=public, archived=plan.archived)
else:
    words = {"export": {"sources": "archived", "episodes": 4}, "record": "none", "live": None}
    export(OmegaConf.create(words), run_dir, local, plan)
"""


@pytest.fixture
def start(tmp_path):
    """start(name) -> the process `server` or `export`, on sockets of this test."""
    processes = []

    def start(name):
        addresses = [f"ipc://{tmp_path}/local", f"ipc://{tmp_path}/public"]
        made = subprocess.Popen([sys.executable, "-c", PROCESS, name, str(tmp_path / "run"), *addresses])
        processes.append(made)
        return made

    yield start
    for process in processes:
        process.kill()
        process.wait()


def called(link, message):
    deadline = time.monotonic() + 30
    while True:
        try:
            return link.call(message, 2.0)
        except TrainerError:
            assert time.monotonic() < deadline
            time.sleep(0.05)


@needs_lerobot
def test_actors_keep_what_a_full_archived_source_does_not_take_until_the_export_catches_up(tmp_path, blind, start):
    """Real processes: the export comes late and is killed; nothing is lost, doubled or out of order."""
    (tmp_path / "run").mkdir()
    start("server")
    link = Connection(f"ipc://{tmp_path}/local", m.Hello(m.PROTOCOL, "learner", "trainer"))
    with TrainerClient(f"ipc://{tmp_path}/public", actor="arm", spec=blind, outbox=tmp_path / "outbox") as client, link:
        wait_until(lambda: client.connected)
        called(link, m.Direct({"phase": "practise", "mode": "collect", "into": "online"}, None))
        names = [f"e{i}" for i in range(30)]
        for name in names:
            client.push(segment(blind, name, steps=10))
            time.sleep(0.01)
        wait_until(lambda: "source online is full" in client.degraded)
        assert client.pending[0] > 0
        [why] = called(link, m.Status()).report["full"]
        assert why == "source online is full, and its episode e0 waits for its export"
        first = start("export")
        wait_until(lambda: called(link, m.Status()).report["sources"]["online"]["head"] > 100)
        first.kill()
        last = start("export")
        wait_until(lambda: client.pending[0] == 0)
        wait_until(lambda: client.degraded == "")
        last.send_signal(signal.SIGTERM)
        assert last.wait(60) == 0
        rows = [EpisodeInfo(*row) for row in called(link, m.Sync(0, 0)).episodes]
    assert [info.id for info in sorted(rows, key=lambda info: info.first)] == names
    tables = [(path, opened(path)[1]) for path in sorted((tmp_path / "run/datasets/online").iterdir())]
    ids = [entry["id"] for path, _ in tables for entry in shards.read_manifest(path)["episodes"]]
    assert sorted(ids, key=names.index) == names
    for path, table in tables:
        members = [entry["id"] for entry in shards.read_manifest(path)["episodes"]]
        expected = np.concatenate([segment(blind, name, steps=10).action for name in members])
        assert np.array_equal(table["action"].astype(np.float32), expected)


def test_only_the_learner_may_say_what_is_archived(tmp_path):
    server = Server(
        tmp_path, {"online": 100}, public=f"ipc://{tmp_path}/p", local=f"ipc://{tmp_path}/l", inference="", archived=()
    )
    from serl_launcher.store.peers import ROLES

    server.close()
    assert [role for role, kinds in ROLES.items() if m.Archived in kinds] == ["learner"]


# -- what is missing


def config(sources="archived", episodes=10):
    return OmegaConf.create({"export": {"sources": sources, "episodes": episodes}, "record": "none", "live": None})


def test_what_is_recorded_is_what_the_config_says():
    said = config()
    assert not export.recorded(said)
    said.record = "eval"
    assert export.recorded(said)
    said.record = "some"
    with pytest.raises(ConfigError, match="record=some: say eval, all, none"):
        export.recorded(said)


def test_without_lerobot_an_archive_is_refused_and_everything_else_goes_on(monkeypatch, caplog):
    monkeypatch.setattr(shards, "missing", lambda: ["lerobot"])
    kept = Plan({"online": Source(100, "lerobot"), "demo": Source(100)}, {}, {})
    free = Plan({"online": Source(100)}, {}, {})
    with pytest.raises(ConfigError, match=r"online needs lerobot: run .*--extra data.*sources.online.archive=none"):
        export.wanted(config(), kept)
    assert export.wanted(config(), free) == []
    assert not caplog.text
    assert export.wanted(config("all"), free) == []
    assert caplog.text.count("export: ") == 1


def test_what_is_exported_is_what_the_config_says(monkeypatch):
    monkeypatch.setattr(shards, "missing", list)
    plan = Plan({"online": Source(100, "lerobot"), "demo": Source(100)}, {}, {})
    assert export.wanted(config(), plan) == ["online"]
    assert export.wanted(config("all"), plan) == ["online", "demo"]
    with pytest.raises(ConfigError, match="say archived or all"):
        export.wanted(config("some"), plan)
    with pytest.raises(ConfigError, match="at least one episode"):
        export.wanted(config(episodes=0), plan)


def test_the_export_loads_no_torch_before_there_is_something_to_write():
    code = (
        "import sys, serl_launcher.datasets.export; sys.exit(sorted({'torch', 'lerobot', 'av'} & {*sys.modules}) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@needs_lerobot
def test_without_an_encoder_or_decoder_images_are_stored_as_they_are(tmp_path, seen, monkeypatch, caplog):
    monkeypatch.setattr(shards, "_unfit", lambda codec, spec, feature: "no such codec")
    run = Run(tmp_path, seen)
    run.episodes("e0", "e1")
    run.work()
    assert "apt-get install ffmpeg" in caplog.text
    dataset, _ = run.opened("000001-000002")
    assert dataset.meta.video_keys == []
    assert np.abs(dataset[5][CAMERA].numpy() * 255 - 150).max() < 1e-3
    assert run.manifest("000001-000002")["images"] == {
        "stored_as": "image", "codec": None, "lossy": False, "encodings": 0
    }  # fmt: skip


@needs_lerobot
@pytest.mark.slow
def test_lerobots_viewer_saves_a_shard(tmp_path, seen):
    run = Run(tmp_path, seen)
    run.episodes("e0", "e1")
    run.work()
    shard = tmp_path / "datasets/online/000001-000002"
    viewer = Path(sys.executable).with_name("lerobot-dataset-viz")
    done = subprocess.run(
        [viewer, "--repo-id", "local/shard", "--root", shard, "--episode-index", "1", "--save", "1", "--output-dir",
         tmp_path / "seen", "--num-workers", "0"],
        capture_output=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    [recording] = (tmp_path / "seen").iterdir()
    assert recording.stat().st_size > 10_000


@needs_lerobot
@pytest.mark.slow
def test_a_run_ends_with_all_of_its_archived_episodes_in_datasets_although_the_export_was_killed(tmp_path):
    """The real programs: the export is killed in mid-run, started again by the launcher, and finishes at the end."""
    ports = [f"port={free_port()}", f"inference_port={free_port()}"]
    words = [
        *ports, f"run_dir={tmp_path}/run", "task=fake", "utd=1", "algo.hidden=[32,32]", "policy.hidden=[32,32]",
        "+plan.sources.online.archive=lerobot", "export.episodes=4", "record=eval",
        'plan.phases.demonstrate.until=["demo.episodes >= 5"]', 'plan.phases.baseline.until=["episodes >= 2"]',
        'plan.phases.practise.until=["env_steps >= 600", operator]', 'plan.phases.evaluate.until=["episodes >= 3"]',
    ]  # fmt: skip
    program = [sys.executable, Path(__file__).resolve().parents[2] / "examples/train.py"]
    learner = subprocess.Popen([*program, "learner=true", *words], stdin=subprocess.DEVNULL)
    actor = subprocess.Popen([*program, "actor=true", *words], stdin=subprocess.DEVNULL)
    try:
        wait_until(lambda: (tmp_path / "run/datasets/lock").exists())
        [pid] = [
            int(path.parent.name) for path in Path("/proc").glob("[0-9]*/cmdline")
            if {b"export", bytes(tmp_path / "run")} <= set(_words(path))
        ]  # fmt: skip
        os.kill(pid, signal.SIGKILL)
        assert learner.wait(240) == 0
        assert actor.wait(30) == 0
    finally:
        for process in (learner, actor):
            process.kill()
            process.wait()
    index = Index(tmp_path / "run/store/index.sqlite")
    rows = [EpisodeInfo(*row) for row in index.catalog(0, -1)[1]]
    index.close()
    folders = [path.parent for path in tmp_path.glob(f"run/datasets/*/*/{MANIFEST}")]
    exported = [entry["id"] for folder in folders for entry in shards.read_manifest(folder)["episodes"]]
    assert sorted(exported) == sorted(info.id for info in rows if info.source == "online")
    assert sum(len(opened(folder)[0]) for folder in folders) == sum(i.steps for i in rows if i.source == "online")
    assert len(list((tmp_path / "run/recordings").glob("*.rrd"))) == sum(info.source == "eval" for info in rows)


def _words(path):
    try:
        return path.read_bytes().split(b"\0")
    except OSError:
        return []
