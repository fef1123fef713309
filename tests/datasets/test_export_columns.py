"""What is exported: by the config, of every kind of feature, with and without what LeRobot needs."""

import importlib.util
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from omegaconf import OmegaConf
from serl_client import Feature, Spec
from serl_client.errors import ConfigError

from serl_launcher.datasets import episodes, export, shards
from serl_launcher.datasets.reader import Dataset
from serl_launcher.datasets.units import Conversion, conversions
from serl_launcher.training.plan import Change, Plan, PlanSource
from tests.shared.common import STATE

from .exporting import CAMERA, Run, exported, needs_lerobot, segment, writes_shards

pytestmark = pytest.mark.usefixtures("quiet")


@writes_shards
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
def test_a_sink_gets_every_closed_episode_with_its_final_observation(tmp_path, blind):
    run, got = Run(tmp_path, blind), []
    run.exporter = run.started(sources=["demo"], sinks=[lambda info, rows, spec: got.append((info.id, rows(), spec))])
    run.episodes("e0", steps=5)
    run.add(segment(blind, "e1", ends=""))
    run.work()
    [(id, rows, spec)] = got
    assert (id, spec) == ("e0", blind)
    assert (rows[STATE].shape, rows["action"].shape, rows["terminated"].tolist()) == ((6, 4), (5, 2), [0, 0, 0, 0, 1])


@writes_shards
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), ConfigError("no rerun"), ValueError("bad")])
def test_what_cannot_be_recorded_is_exported_and_the_next_episode_is_recorded(tmp_path, blind, caplog, error):
    def failing(info, rows, spec):
        calls.append(info.id)
        raise error

    run, calls = Run(tmp_path, blind), []
    run.exporter = run.started(sinks=[failing])
    run.episodes("e0", "e1")
    run.work()
    assert calls == ["e0", "e1"]
    assert str(error) in caplog.text
    assert "export: episode e1 is not recorded" in (tmp_path / "errors.log").read_text()
    assert run.shards() == ["000001-000002"]


@writes_shards
def test_every_kind_of_feature_comes_back_from_a_shard(tmp_path):
    """What LeRobot has no column for gets another name or shape there."""
    spec = Spec(
        {STATE: Feature((), "float64"), "observation.images.depth": Feature((8, 8, 1), "uint8"),
         "observation.touch": Feature((2,), "bool"), "observation.half": Feature((1,), "float16", units="m")},
        Feature((2,), low=-1, high=1, units=("deg", "percent")), fps=10.0,
        extras={"age.images": Feature(()), "timestamp": Feature((2,), "int8")},
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
    unsaid = Feature((2,), low=-1, high=1)
    plan = Plan({"demo": PlanSource(100)}, {}, {})
    for same in (spec, replace(spec, action=unsaid)):
        assert not conversions(plan, {"demo": dataset}, same)["demo"].factors
    with pytest.raises(ConfigError, match=r"is in \['deg', 'percent'\], the run's in \['rad', 'rad'\]"):
        conversions(plan, {"demo": dataset}, replace(spec, action=replace(unsaid, units="rad")))
    for before, episode in zip(records, dataset, strict=True):
        [after] = episode.segments(spec, before.episode, before.stamp)
        after.check(spec)
        assert after.task == before.task
        for name in spec.observation:
            assert np.array_equal(after.observation[name][:-1], before.observation[name][:-1])
        for name in spec.extras:
            assert np.array_equal(after.extras[name], before.extras[name])


def config(sources="archived", episodes=10, record="none"):
    words = {"export": {"sources": sources, "episodes": episodes}, "record": record, "live": None}
    return OmegaConf.create(words)


def test_without_lerobot_an_archive_is_refused_and_everything_else_goes_on(monkeypatch, caplog):
    monkeypatch.setattr(shards, "missing", lambda: ["lerobot"])
    kept = Plan({"online": PlanSource(100, "lerobot"), "demo": PlanSource(100)}, {}, {})
    free = Plan({"online": PlanSource(100)}, {}, {})
    with pytest.raises(ConfigError, match=r"online needs lerobot: run .*--extra data.*sources.online.archive=none"):
        export.wanted(config(), kept)
    assert export.wanted(config(), free) == []
    assert not caplog.text
    assert export.wanted(config("all"), free) == []
    assert caplog.text.count("export: ") == 1


def test_what_is_recorded_and_what_is_exported_is_what_the_config_says(monkeypatch):
    assert not export.recorded(config())
    assert export.recorded(config(record="eval"))
    with pytest.raises(ConfigError, match="record=some: say eval, all, none"):
        export.recorded(config(record="some"))
    monkeypatch.setattr(shards, "missing", list)
    plan = Plan({"online": PlanSource(100, "lerobot"), "demo": PlanSource(100)}, {}, {})
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


@writes_shards
def test_where_torchcodec_finds_no_ffmpeg_images_are_stored_as_they_are(tmp_path, seen, monkeypatch, caplog):
    (tmp_path / "lacks/torchcodec").mkdir(parents=True)
    (tmp_path / "lacks/torchcodec/__init__.py").write_text("raise RuntimeError('Could not load libtorchcodec')\n")
    monkeypatch.syspath_prepend(tmp_path / "lacks")
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchcodec"]:
        monkeypatch.delitem(sys.modules, name)
    run = exported(tmp_path, seen)
    if importlib.util.find_spec("lerobot.datasets.pyav_utils"):  # from 0.6 on lerobot reads videos without torchcodec
        assert run.opened("000001-000002")[0].meta.video_keys == [CAMERA]
        return
    assert caplog.text.count("apt-get install ffmpeg") == 1
    assert "no video can be written and read here" in caplog.text
    dataset, _ = run.opened("000001-000002")
    assert dataset.meta.video_keys == []
    assert np.abs(dataset[5][CAMERA].numpy() * 255 - 150).max() < 1e-3
    assert run.manifest("000001-000002")["images"] == {
        "stored_as": "image", "codec": None, "lossy": False, "encodings": 0
    }  # fmt: skip


@writes_shards
def test_lerobots_viewer_saves_a_shard_and_the_thread_that_encoded_its_video_keeps_its_priority(tmp_path, seen):
    exported(tmp_path, seen)
    assert os.sched_getscheduler(0) == os.SCHED_OTHER, "SVT-AV1 takes real-time priority where it runs as root"
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


def test_episodes_that_were_changed_otherwise_are_others():
    assert len({Conversion({}, Change(fps=fps)).mark for fps in (None, 10.0, 20.0)}) == 3
