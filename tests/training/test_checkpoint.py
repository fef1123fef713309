"""A checkpoint is there whole or not at all, and only a run of its own kind loads it."""

import errno
import json
import logging
import os
import pickle
import re
import shutil
from dataclasses import replace

import pytest
import torch
from serl_client import ConfigError, Feature

from serl_launcher.config import composed
from serl_launcher.store.files import LEFT_FREE, write_synced
from serl_launcher.training.checkpoint import SHARE, Checkpoints, Schedule
from serl_launcher.training.metrics import MetricsLog, read
from serl_launcher.training.resuming import free_settings, kept_settings
from tests.shared.common import CONFIG as CONFIGS

CONFIG = {"algo": {"discount": 0.97, "hidden": (128, 128)}}


@pytest.fixture
def checkpoints(tmp_path, spec):
    return Checkpoints(tmp_path / "checkpoints", spec=spec, config=CONFIG)


def state(value):
    return {"weights": {"w": torch.full((3,), float(value))}, "generator": {"state": 2**127 + value}, "names": ["a"]}


def keep(checkpoints, updates, state, pinned=""):
    return checkpoints.stage(updates, state, pinned=pinned)()


def test_the_newest_comes_back_as_it_was(checkpoints):
    (checkpoints.folder / ".aside").mkdir(parents=True)  # of a first save that was killed
    assert checkpoints.load() is None
    for value in range(3):
        keep(checkpoints, updates=7, state=state(value))
    loaded = checkpoints.load()
    assert torch.equal(loaded["weights"].pop("w"), torch.full((3,), 2.0))
    assert loaded == {"weights": {}, "generator": {"state": 2**127 + 2}, "names": ["a"]}


def test_the_last_few_are_kept_and_the_newest_with_which_each_phase_ended(tmp_path, spec):
    checkpoints = Checkpoints(tmp_path, spec=spec, config=CONFIG, keep=2)
    for value, phase in enumerate(["", "reach", "reach", "lift", "", "", ""]):
        keep(checkpoints, updates=value, state=state(value), pinned=phase)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["000003", "000004", "000006", "000007"]


def test_the_newest_is_that_of_the_largest_number(checkpoints):
    keep(checkpoints, updates=1, state=state(1)).rename(checkpoints.folder / "999999")
    for value in (2, 3):
        keep(checkpoints, updates=value, state=state(value))
    assert sorted(path.name for path in checkpoints.folder.iterdir()) == ["1000000", "1000001", "999999"]
    assert checkpoints.load()["weights"]["w"][0] == 3


def test_an_old_one_that_cannot_be_deleted_is_named_and_ends_nothing(checkpoints, monkeypatch, caplog):
    checkpoints.keep = 1
    old = keep(checkpoints, updates=1, state=state(1))

    def busy(path, ignore_errors=False):
        if not ignore_errors:
            raise OSError(errno.EBUSY, "Device or resource busy")

    monkeypatch.setattr(shutil, "rmtree", busy)
    keep(checkpoints, updates=2, state=state(2))
    assert re.search(f"{old} is not needed and cannot be deleted .*delete it by hand", caplog.text)
    assert checkpoints.load()["weights"]["w"][0] == 2


def test_what_would_fill_the_disk_is_not_written_and_what_does_leaves_no_part(tmp_path, monkeypatch):
    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    file, free = tmp_path / "file", shutil.disk_usage(tmp_path)._replace(free=LEFT_FREE + 4)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free)
    with pytest.raises(OSError, match="no room for 5 bytes"):
        write_synced(file, b"12345")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_synced(file, b"1234")
    assert not file.exists()


def test_what_is_written_is_what_was_there_when_it_was_staged(checkpoints):
    weights = {"w": torch.zeros(3), "half": torch.ones((), dtype=torch.bfloat16), "none": torch.zeros(0, 2)}
    weights |= {"flags": torch.tensor([True, False, True]), "columns": torch.arange(6).view(2, 3).T}
    expected = {name: tensor.clone() for name, tensor in weights.items()}
    for _ in range(2):  # the memory is used again
        write = checkpoints.stage(
            1, {"weights": weights, "again": {"w": weights["w"]}, "counts": [1, (2, weights["w"])]}
        )
        weights["w"] += 1
        write()
        loaded = checkpoints.load()
        assert all(torch.equal(loaded["weights"][name], expected[name]) for name in weights)
        assert torch.equal(loaded["counts"][1][1], expected["w"])
        assert (checkpoints.folder / "000001/tensors.safetensors").stat().st_size < 600  # what is shared is kept once
        expected["w"] += 1


@pytest.mark.parametrize("name", ["state.pt", "tensors.safetensors"])
@pytest.mark.parametrize("damage", ["flip", "truncate", "no file", "no manifest", "half a manifest"])
def test_a_broken_checkpoint_is_skipped_with_a_warning(checkpoints, caplog, damage, name):
    keep(checkpoints, updates=1, state=state(1))
    broken = keep(checkpoints, updates=2, state=state(2))
    file = broken / ("manifest.json" if "manifest" in damage else name)
    data = file.read_bytes()
    if damage.startswith("no "):
        file.unlink()
    elif damage == "flip":
        file.write_bytes(bytes([*data[:-9], data[-9] ^ 1, *data[-8:]]))
    else:
        file.write_bytes(data[: len(data) // 2])
    with caplog.at_level(logging.WARNING):
        loaded = checkpoints.load()
    assert loaded["weights"]["w"][0] == 1
    assert str(broken) in caplog.text
    assert keep(checkpoints, updates=2, state=state(3)).name == "000003"
    assert checkpoints.load()["weights"]["w"][0] == 3


@pytest.mark.parametrize(("call", "points"), [("fsync", 5), ("rename", 1)])
def test_a_save_that_fails_at_any_point_leaves_a_whole_one(checkpoints, monkeypatch, call, points):
    keep(checkpoints, updates=1, state=state(1))
    original = getattr(os, call)
    for point in range(points):
        left = iter([True] * point)

        def fail(*arguments, left=left):
            if not next(left, False):
                raise OSError("no space left")
            return original(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(os, call, fail)
            with pytest.raises(OSError, match="no space"):
                keep(checkpoints, updates=2, state=state(2))
        named = call == "fsync" and point == 4  # only the sync of the folder above was missing
        assert checkpoints.load()["weights"]["w"][0] == 1 + named
    keep(checkpoints, updates=2, state=state(3))
    assert checkpoints.load()["weights"]["w"][0] == 3
    assert sorted(path.name for path in checkpoints.folder.iterdir())[-1] == ("000003" if call == "fsync" else "000002")


def test_a_state_that_is_not_plain_data_is_not_executed(checkpoints):
    keep(checkpoints, updates=1, state={"surprise": print})
    with pytest.raises(pickle.UnpicklingError):
        checkpoints.load()


def test_another_algorithm_robot_or_version_is_refused_and_both_values_are_named(checkpoints, spec):
    manifest = keep(checkpoints, updates=1, state=state(1)) / "manifest.json"
    other = replace(spec, observation={"observation.state": Feature((9,))})
    for told, config, text in (
        (spec, {"algo": {"discount": 0.99, "hidden": (128, 128)}}, r"algorithm.*algo\.discount: 0\.99, 0\.97"),
        (other, CONFIG, r"Spec.*observation\.observation\.state\.shape: \[9\], \[8\]"),
    ):
        with pytest.raises(ConfigError, match=text):
            Checkpoints(checkpoints.folder, spec=told, config=config).load()
    whole = json.loads(manifest.read_text())
    for spoiled, text in (({"config": {"algo": ".."}}, r"algorithm.*algo: "), ({"format": 3}, "another version")):
        manifest.write_text(json.dumps(whole | spoiled))
        with pytest.raises(ConfigError, match=text):
            checkpoints.load()


@pytest.mark.slow
def test_options_that_a_class_declares_may_change_on_a_trained_run_and_no_others(tmp_path, spec):
    """Rates, batches, the sampler's steps; also where the checkpoint was made before they were declared."""

    def checkpoints(*words):
        config = composed(CONFIGS, ["learner=true", "plan=hiors", *words])
        return Checkpoints(tmp_path, spec=spec, config=kept_settings(config), changeable=free_settings(config))

    keep(checkpoints(), updates=1, state=state(1))
    again = checkpoints("policy.head.steps=1", "algo.optimizer.learning_rate=1e-5", "batch_size=9")
    assert again.load()
    changed = again.changed
    assert (
        re.sub(", [^;]*", "", changed)
        == "algo.optimizer.learning_rate: 1e-05; algo.policy.head.steps: 1; batch_size: 9"
    )
    with pytest.raises(ConfigError, match=r"checkpoint's: algo\.policy\.horizon: 4, 8\. Ask"):
        checkpoints("policy.head.steps=1", "policy.horizon=4").load()


def test_a_checkpoint_from_before_an_option_was_there_is_taken(tmp_path, spec):
    policy = {"algo": {"policy": {"width": 32}}}
    keep(Checkpoints(tmp_path, spec=spec, config=policy), updates=1, state=state(1))
    now = {"algo": {"policy": {"width": 32, "resize": "auto", "relative": []}}, "batch_size": 8}
    assert Checkpoints(tmp_path, spec=spec, config=now).load()
    now["algo"]["policy"]["relative"] = ["wrist"]
    with pytest.raises(ConfigError, match=r"checkpoint's: algo\.policy\.relative: \['wrist'\], nothing\. Ask"):
        Checkpoints(tmp_path, spec=spec, config=now).load()


def test_metrics_are_continued_and_a_torn_line_costs_only_itself(tmp_path):
    path = tmp_path / "run" / "metrics.jsonl"
    metrics = MetricsLog(path)
    metrics.write("update", {"loss": 0.5, "bad": float("nan")})
    metrics.once("episode", "e0", {"return": 1.0})
    with open(path, "a") as file:
        file.write('{"kind": "upd')
    metrics = MetricsLog(path)
    metrics.once("episode", "e0", {"return": 1.0})
    metrics.once("episode", "e1", {"return": 2.0})
    metrics.write("update", {"updates": 7})
    again = MetricsLog(path)
    for updates in (6, 7, 8):
        again.write("update", {"updates": updates})
    update, *episodes, seventh, eighth = read(path)
    assert [record["updates"] for record in (seventh, eighth)] == [7, 8]
    assert [(record["kind"], record["id"]) for record in episodes] == [("episode", "e0"), ("episode", "e1")]
    assert (update["kind"], update["loss"], update["bad"], update["time"] > 1.6e9) == ("update", 0.5, None, True)


def due_at(schedule, cost, until):
    """When checkpoints are made that take `cost` seconds each, by a clock of tenths."""
    times = []
    for tenth in range(10 * until):
        if schedule.due(tenth / 10):
            schedule.saved(tenth / 10 + cost, cost)
            times.append(tenth / 10)
    return times


def test_checkpoints_come_soon_after_a_start_then_ever_more_seldom_and_take_a_share_of_the_time_however_large():
    assert due_at(Schedule(30.0, 0.0), 0.0, 130) == [1.0, 3.0, 7.0, 15.0, 31.0, 61.0, 91.0, 121.0]
    assert due_at(Schedule(0.0, 0.0), 0.0, 1) == [tenth / 10 for tenth in range(10)]
    times = due_at(Schedule(30.0, 0.0), 20.0, 2000)
    assert times[0] == 1.0
    assert len(times) * 20.0 <= 2000 * SHARE + 20.0
    assert due_at(Schedule(30.0, 0.0, cost=20.0), 20.0, 250) == [200.0]  # known from the start before


def test_the_last_whole_checkpoint_stays_until_there_is_another_and_without_one_no_run_begins_anew(checkpoints):
    """Those that were found broken are not counted among the newest few."""
    paths = [keep(checkpoints, updates=value, state=state(value)) for value in range(3)]
    for path in paths[1:]:
        (path / "state.pt").write_bytes(b"")
    again = Checkpoints(checkpoints.folder, spec=checkpoints.spec, config=CONFIG, keep=2)
    assert again.load()["weights"]["w"][0] == 0
    newest = keep(again, updates=9, state=state(9))
    assert sorted(path.name for path in again.folder.iterdir()) == [paths[0].name, newest.name]
    (newest / "state.pt").write_bytes(b"")
    assert again.load()["weights"]["w"][0] == 0
    (paths[0] / "state.pt").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"no checkpoint in .*checkpoints is whole .*: bring one back .* or delete"):
        again.load()
