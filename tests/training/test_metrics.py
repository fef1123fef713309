"""Metrics are also in wandb or TensorBoard, and nothing that happens to it reaches the training."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from serl_client.errors import ConfigError
from serl_client.status import ActorStatus
from serl_client.ticks import Ticks

from serl_launcher.replay.views import EpisodeInfo
from serl_launcher.store.store import Store
from serl_launcher.training import metrics
from serl_launcher.training.machine import MACHINES, Control, control_of, machines_of
from serl_launcher.training.metrics import MetricsLog, mirrored
from tests.shared.common import until

TRAINING = """
import sys, time
from pathlib import Path
from serl_launcher.training.metrics import MetricsLog, mirrored
path = Path(sys.argv[1])
with mirrored(path, "auto"):
    log = MetricsLog(path)
    for number in range(5):
        log.write("update", {"updates": number, "loss": 0.5, "phase": "practise"})
    print("written", flush=True)
    time.sleep(60)
"""


def test_of_the_machines_it_notes_what_is_told_and_nothing_of_what_is_not(tmp_path):
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights/1f.safetensors").touch()
    clients = [
        {"role": "actor", "rate": 9.5, "late": 2, "outbox": 3_000_000}, {"role": "learner", "rate": 1, "late": 100},
        {"role": "actor", "rate": 0.0, "late": 1, "outbox": 500_000},
        {"role": "actor", "rate": "x", "late": float("nan"), "outbox": None},
    ]  # fmt: skip
    told = machines_of(tmp_path, clients, {"sha256": "1f"})
    assert (told["rate"], told["late"], told["outbox"]) == (9.5, 3, 3.5)
    assert told["age"] >= 0
    assert told.keys() == MACHINES.keys()
    assert machines_of(tmp_path, [], {}).keys() == {"free"}


def test_the_control_rate_is_that_of_the_newest_steps_by_their_own_times(spec, tmp_path, make_segment):
    store = Store.create(tmp_path, spec, {"online": 100})
    store.direct({"into": "online", "phase": "practise"})
    store.lives.hello("arm", "outbox", "A", [])
    store.stage("A", 0, replace(make_segment("e", steps=5), time=np.array([0, 0.1, 0.2, 0.6, 1.0])))
    store.commit()
    (newest,) = (EpisodeInfo(*row) for row in store.index.catalog(0, 10)[1])
    assert control_of(tmp_path, spec, store.sources, newest) == Control(rate=pytest.approx(4), fps=10, late=0.5)
    store.close()


def test_the_rate_that_a_console_shows_follows_the_newest_periods_slowly(spec):
    status = ActorStatus()
    ticks = Ticks(SimpleNamespace(spec=spec, clock="real"), status)
    for sent in (0.0, 0.1, 0.2):
        ticks.count(sent)
    assert (status.rate, status.late) == (pytest.approx(10), 0)
    ticks.count(0.4)
    assert (status.rate, status.late) == (pytest.approx(1 / 0.105), 1)


@pytest.fixture(autouse=True)
def wandb_may_run(monkeypatch):
    monkeypatch.delenv("WANDB_MODE", raising=False)


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # nobody answers there
    return tmp_path / "run" / "metrics.jsonl"


@pytest.fixture
def wandb():
    if not metrics._is_installed("wandb"):
        pytest.skip("wandb is not installed (extra wandb)")


def sent(path, package="wandb"):
    state = path.parent / package / "sent.json"
    return json.loads(state.read_text()) if state.exists() else {"id": None, "bytes": 0, "records": 0}


def content(path):
    """The bytes of every offline run of this folder."""
    return b"".join(file.read_bytes() for file in sorted(path.parent.glob("wandb/offline-run-*/*.wandb")))


@pytest.mark.slow
def test_a_run_and_its_resumption_are_one_offline_run_without_account_or_network(path, wandb, monkeypatch):
    monkeypatch.setattr(metrics, "FINISH_S", 60.0)
    log = MetricsLog(path)
    with mirrored(path, "auto"):
        log.write("update", {"updates": 0, "first": 0.25, "phase": "practise"})
        until(lambda: sent(path)["records"] == 1)
        log.write("episode", {"updates": 1, "return": 1.0, "success": None})
    first = sent(path)
    assert (first["records"], first["bytes"]) == (2, path.stat().st_size)
    log.write("update", {"updates": 5, "between": 1.0})  # nobody looks
    with mirrored(path, "auto"):
        until(lambda: sent(path)["records"] == 3)
        log.write("update", {"updates": 9, "last": 1.0})
    assert sent(path) == {"id": first["id"], "records": 4, "bytes": path.stat().st_size}
    runs = [run.name for run in path.parent.glob("wandb/offline-run-*")]
    assert {name.rsplit("-", 1)[1] for name in runs} == {first["id"]}
    names = (b"update/first", b"episode/return", b"update/between", b"update/last", b"episode/success")
    assert [name in content(path) for name in names] == [True] * 4 + [False]


@pytest.mark.slow
def test_a_training_that_is_killed_leaves_a_whole_mirror_and_no_process(path, wandb):
    training = subprocess.Popen([sys.executable, "-c", TRAINING, path], stdout=subprocess.PIPE)
    assert training.stdout.readline() == b"written\n"
    children = children_of(training.pid)
    training.kill()
    training.wait()
    training.stdout.close()
    assert children
    until(lambda: sent(path)["records"] == 5)
    until(lambda: not any(os.path.exists(f"/proc/{child}") for child in children))
    assert b"update/loss" in content(path)


@pytest.fixture
def new_children():
    """A function: the children of this process that it had not when the test began."""
    before = set(children_of(os.getpid()))
    return lambda: [child for child in children_of(os.getpid()) if child not in before]


def children_of(pid):
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return file.read().split()


@pytest.mark.slow
def test_a_mirror_that_dies_or_cannot_begin_is_one_sentence_and_training_goes_on(path, wandb, capfd, new_children):
    with mirrored(path, "wandb"):
        log = MetricsLog(path)
        until(lambda: (path.parent / "wandb/sent.json").exists())
        (child,) = new_children()
        os.kill(int(child), signal.SIGKILL)
        log.write("update", {"updates": 1})
    (path.parent / "wandb/sent.json").write_text("torn")
    with mirrored(path, "wandb"):
        until(lambda: (path.parent / "wandb/mirror.log").exists())
        log.write("update", {"updates": 2})
        time.sleep(0.2)
    said = capfd.readouterr().err.strip().splitlines()
    assert len(said) == 1
    assert said[0].startswith("wandb has stopped, training goes on: ")
    assert len(list(metrics.read(path))) == 2


@pytest.mark.slow
def test_tensorboard_shows_all_numbers_over_the_updates_also_after_a_restart(path, monkeypatch):
    accumulated = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator", reason="no tensorboard")
    monkeypatch.setattr(metrics, "FINISH_S", 60.0)
    for records, updates in ((1, 3), (2, 8)):
        with mirrored(path, "tensorboard"):
            MetricsLog(path).write("update", {"updates": updates, "loss": updates / 2, "phase": "p", "bad": None})
        assert sent(path, "tensorboard")["records"] == records  # though the run was over before the mirror had begun
    shown = accumulated.EventAccumulator(str(path.parent / "tensorboard")).Reload()
    assert {"update/loss", "update/updates"} <= set(shown.Tags()["scalars"])
    assert not {"update/phase", "update/bad"} & set(shown.Tags()["scalars"])
    assert [(event.step, event.value) for event in shown.Scalars("update/loss")] == [(3, 1.5), (8, 4.0)]


@pytest.mark.parametrize("mode", ["dryrun", None, True])
def test_another_mode_is_refused_and_false_starts_nothing(path, mode, new_children):
    with pytest.raises(ConfigError, match="say log=auto, wandb, wandb-online, tensorboard or false"):
        mirrored(path, mode).__enter__()
    with mirrored(path, False):
        assert not new_children()
    assert not path.parent.exists()


@pytest.mark.slow
def test_online_without_an_account_or_a_network_ends_the_mirror_alone(path, wandb, capfd):
    with mirrored(path, "wandb-online"):
        log = MetricsLog(path)
        log.write("update", {"updates": 1})
        until(lambda: "training goes on" in capfd.readouterr().err)


def test_a_metrics_file_that_was_begun_anew_is_sent_from_its_start(path):
    MetricsLog(path).write("update", {"updates": 1})
    assert [record["updates"] for record, _ in metrics._news(path, 10_000)] == [1]
    assert list(metrics._news(path, path.stat().st_size)) == []


def test_of_a_file_of_any_size_a_bounded_part_is_read_up_to_its_last_record(path, monkeypatch):
    log = MetricsLog(path)
    for updates in range(1, 2001):
        log.write("update", {"updates": updates, "critic_loss": 0.5})
    assert [record["updates"] for record in metrics.sample(path)] == [*range(1, 2001)]
    monkeypatch.setattr(metrics, "BLOCKS", 10)
    monkeypatch.setattr(metrics, "BLOCK", 512)
    found = [record["updates"] for record in metrics.sample(path)]
    assert found == sorted(set(found))
    assert (len(found) < 100, found[0] < 10, found[-1]) == (True, True, 2000)
    assert not [*metrics.sample(path.with_name("none"))]
