"""Bringing a LeRobot dataset into a store: once, in whole episodes, also when the importer is killed."""

import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from serl_client.client import TrainerClient
from serl_client.episode import Outcome
from serl_client.errors import ConfigError
from serl_client.spec import Feature, Spec

from serl_launcher.datasets.importer import import_datasets
from serl_launcher.datasets.reader import Dataset
from serl_launcher.replay.views import EpisodeInfo
from serl_launcher.store.index import Index
from serl_launcher.store.store import DATASET, Store
from serl_launcher.training.plan import Plan, Source
from tests.shared import oracle
from tests.shared.clients import connected
from tests.shared.common import STATE, TRAIN, free_port, until
from tests.shared.servers import ServerThread

pytest.importorskip("lerobot", reason="the extra `data` is not installed: uv sync --inexact --extra data")


@contextlib.contextmanager
def serving_in(run_dir, capacities):
    """A server of a run folder in a thread, which may be started again."""
    serving = ServerThread(run_dir, capacities)
    serving.capacities = capacities
    yield serving
    serving.close()


def bring(serving, dataset, *, waits=False, source="demo"):
    plan = Plan({source: Source(serving.capacities[source], dataset=str(dataset.folder))}, {}, {})
    import_datasets(plan, serving.run_dir, local=serving.local, waits=waits)


def catalog(run_dir):
    index = Index(run_dir / "store/index.sqlite")
    found = [EpisodeInfo(*row) for row in index.catalog(0, 10_000)[1]]
    index.close()
    return sorted(found)


def assert_there_once(run_dir, dataset):
    """Every episode of the dataset is in the store as a whole, once; what else there is, is discarded."""
    kept = [episode for episode in catalog(run_dir) if not episode.discard]
    assert [episode.steps for episode in kept] == dataset.lengths
    assert all(episode.closed and episode.source == "demo" for episode in kept)
    found = oracle.whole(run_dir / "store").steps
    for episode, theirs in zip(kept, dataset, strict=True):
        assert [step.index for step in found[episode.number]] == list(range(episode.steps))
        assert np.array_equal([step.origin for step in found[episode.number]], theirs.column(STATE))


def test_a_dataset_makes_the_store_where_no_actor_will(tmp_path, low):
    with serving_in(tmp_path / "run", {"demo": 1000}) as serving:
        bring(serving, low)
        assert_there_once(serving.run_dir, low)
        before = catalog(serving.run_dir)
        bring(serving, low)
        assert catalog(serving.run_dir) == before


def test_its_outcomes_come_with_it(tmp_path, flagged):
    with serving_in(tmp_path / "run", {"demo": 1000}) as serving:
        bring(serving, flagged)
        there = catalog(serving.run_dir)
    assert [(episode.success, episode.terminated, episode.final) for episode in there] == [(1, 1, 1), (0, 1, 1)]


def test_its_directive_is_no_actors(tmp_path, low):
    with serving_in(tmp_path / "run", {"demo": 1000}) as serving:
        bring(serving, low)
        with TrainerClient(
            serving.address, actor="arm", spec=low.spec(), outbox=tmp_path / "outbox", capacity=1 << 20
        ) as client:  # fmt: skip
            assert connected(client).directive["mode"] == "idle"


def test_the_store_goes_on_with_the_directive_before_it(tmp_path, low):
    store = Store.create(tmp_path / "store", low.spec(), {"demo": 1000})
    first = store.direct({"mode": "collect", "into": "demo"})
    other = store.direct({"mode": DATASET, "into": "demo"})
    assert (first, other, store.directive) == (1, 2, 1)
    assert store.direct({"mode": DATASET, "into": "demo"}) == 2
    assert store.direct({"mode": "collect", "into": "demo"}) == 1
    assert store.direct({"mode": "idle"}) == store.directive == 3
    store.close()


def test_it_waits_for_the_first_actor_and_takes_its_spec(tmp_path, low):
    bounds = Feature((2,), low=-3, high=3)
    spec = Spec(low.spec().observation, bounds, fps=10)
    with serving_in(tmp_path / "run", {"demo": 1000}) as serving:
        importer = threading.Thread(target=bring, args=(serving, low), kwargs={"waits": True})
        importer.start()
        importer.join(0.5)
        assert importer.is_alive()
        assert serving.server.store is None
        with TrainerClient(serving.address, actor="arm", spec=spec, outbox=tmp_path / "outbox", capacity=1 << 20):
            importer.join(30)
        assert not importer.is_alive()
        assert serving.server.store.spec == spec
        assert_there_once(serving.run_dir, low)


def test_another_robots_dataset_is_refused_and_nothing_is_written(tmp_path, low):
    other = Spec({STATE: Feature((7,))}, Feature((2,), low=-1, high=1), fps=10)
    Store.create(tmp_path / "run/store", other, {"demo": 1000}).close()
    with (
        serving_in(tmp_path / "run", {"demo": 1000}) as serving,
        pytest.raises(ConfigError, match=r"not of this run's robot: its observation.state is \[4\], the run's \[7\]"),
    ):
        bring(serving, low)
    assert not catalog(tmp_path / "run")


def test_a_source_that_is_too_small_is_refused_with_the_figures(tmp_path, low):
    said = r"capacity is 70 steps.*has 50; its longest episode has 30.*at least 80"
    with serving_in(tmp_path / "run", {"demo": 70}) as serving, pytest.raises(ConfigError, match=said):
        bring(serving, low)
    assert not (tmp_path / "run/store").exists()


def test_a_long_episode_that_the_store_keeps_in_parts_is_there_once(tmp_path, low):
    with serving_in(tmp_path / "run", {"demo": 80}) as serving:
        for _ in range(2):
            bring(serving, low)
            there = catalog(serving.run_dir)
            assert sum(episode.steps for episode in there) == sum(low.lengths)
            assert not any(episode.discard for episode in there)
    assert any(episode.id.endswith(".part2") for episode in there)


# -- killed


IMPORT = """
import sys
from pathlib import Path
from serl_launcher.datasets.importer import import_datasets
from serl_launcher.training.plan import Plan, Source

folder, run_dir, local = sys.argv[1:]
plan = Plan({"demo": Source(20_000, dataset=folder)}, {}, {})
import_datasets(plan, Path(run_dir), local=local, waits=False)
"""


@pytest.mark.slow
def test_after_kill_9_of_the_importer_nothing_is_doubled(tmp_path, made):
    dataset, half = made["long"], False
    with serving_in(tmp_path / "run", {"demo": 20_000}) as serving:
        command = [sys.executable, "-c", IMPORT, dataset.folder, serving.run_dir, serving.local]
        for share in (0.2, 0.5, 0.8):
            process = subprocess.Popen(command)
            while process.poll() is None and steps(serving.run_dir) < share * 97 * 60:
                time.sleep(0.005)
            process.send_signal(signal.SIGKILL)
            process.wait()
            half |= any(not episode.closed for episode in catalog(serving.run_dir))
        assert subprocess.run(command).returncode == 0
        assert half, "no kill has hit an episode"
        there = catalog(serving.run_dir)
        assert [e.steps for e in there if not e.discard] == dataset.lengths
        assert len({e.id.partition("~")[0] for e in there}) == len(dataset.lengths)
        assert all(e.closed and not e.final for e in there)
        assert subprocess.run(command).returncode == 0
        assert catalog(serving.run_dir) == there


def steps(run_dir):
    path = run_dir / "store/index.sqlite"
    if not path.exists():
        return 0
    with closing(sqlite3.connect(path, timeout=10)) as index:
        return index.execute("SELECT sum(steps) FROM episodes").fetchone()[0] or 0


def test_a_relabelled_episode_is_not_brought_again(tmp_path, flagged):
    with serving_in(tmp_path / "run", {"demo": 1000}) as serving:
        bring(serving, flagged)
        first = catalog(serving.run_dir)[0].id
        with TrainerClient(
            serving.address, actor="person", spec=flagged.spec(), outbox=tmp_path / "outbox", capacity=1 << 20
        ) as client:  # fmt: skip
            client.push(Outcome(first, False, discard=True, judged_by="operator"))
            assert client.drain(30)
        bring(serving, flagged)
        there = catalog(serving.run_dir)
    assert [(episode.id == first, episode.discard) for episode in there] == [(True, 1), (False, 0)]


# -- a whole run


def started(run_dir, dataset, *words):
    """The learner's program on a dataset alone: one phase of imitation, which no actor takes part in."""
    ports = free_port(), free_port()
    words = [
        "learner=true", "task=fake", "algo=sft", "plan=sft", "phase=clone", f"run_dir={run_dir}", f"port={ports[0]}",
        f"inference_port={ports[1]}", f"plan.sources.demo.dataset={dataset.folder}", "batch_size=16",
        'plan.phases.clone.until=["updates >= 20"]', "policy.hidden=[32,32]", *words,
    ]  # fmt: skip
    return subprocess.Popen(
        [sys.executable, TRAIN, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def importer(run_dir):
    """The process id of a run's importer, if it lives."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = path.read_text(errors="replace").split("\0")
            if "importer" in words and str(run_dir) in words:
                return int(path.parent.name)
    return None


@pytest.mark.slow
def test_a_policy_of_what_cameras_see_is_trained_on_a_dataset(tmp_path, made):
    process = started(tmp_path / "run", made["video"], "policy=flow_pixels", "plan.sources.demo.capacity=1000")
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 0, said
    assert "20 updates" in said
    assert "Traceback" not in said
    assert_there_once(tmp_path / "run", made["video"])


@pytest.mark.slow
def test_a_killed_importer_is_started_again_and_the_policy_is_trained(tmp_path, made):
    run_dir = tmp_path / "run"
    process = started(run_dir, made["long"], "policy=flow", "plan.sources.demo.capacity=7000")
    until(lambda: steps(run_dir) > 500 or process.poll() is not None, every=0.01)
    os.kill(importer(run_dir), signal.SIGKILL)
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 0, said
    assert "importer ended with status -9: starting it again" in said
    assert "20 updates" in said
    assert_there_once(run_dir, made["long"])
    assert list((run_dir / "checkpoints").glob("[0-9]*/manifest.json"))


def test_a_dataset_that_is_not_there_ends_the_program_with_a_sentence(tmp_path):
    words = ["learner=true", "task=fake", "plan=sft", f"run_dir={tmp_path / 'run'}"]
    words += [f"plan.sources.demo.dataset={tmp_path / 'nowhere'}"]
    done = subprocess.run([sys.executable, TRAIN, *words], capture_output=True, text=True)
    assert done.returncode == 1
    assert "nowhere holds no LeRobot dataset" in done.stderr
    assert not (tmp_path / "run").exists()


# -- our own shards


EXPORT = """
import sys, warnings
from pathlib import Path
warnings.simplefilter("ignore")
from serl_launcher.datasets.export import export_run
print(*export_run(Path(sys.argv[1]), 10, ["online"]), sep="\\n")
"""


@pytest.mark.slow
def test_what_a_run_exported_is_the_same_in_another_run(tmp_path, spec, make_segment):
    """Spec, steps, rewards, ends and outcomes; but the final observation of an episode that was truncated is not."""
    store = Store.create(tmp_path / "first/store", spec, {"online": 1000})
    store.hello("arm", "outbox", "session", [])
    store.direct({"mode": "collect", "phase": "practise", "into": "online"})
    records = [
        make_segment("a", key=1, steps=8, ends="terminated"), Outcome("a", True),
        make_segment("b", key=2, steps=5, ends="truncated"), Outcome("b", False),
        make_segment("c", key=3, steps=7, ends="terminated"),
    ]  # fmt: skip
    for seq, record in enumerate(records):
        store.stage("session", seq, record)
    store.commit()
    store.close()
    done = subprocess.run([sys.executable, "-c", EXPORT, tmp_path / "first"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    shard = Dataset(Path(done.stdout.splitlines()[-1]))
    assert shard.spec() == spec
    with serving_in(tmp_path / "second", {"demo": 1000}) as serving:
        bring(serving, shard)
        assert_there_once(serving.run_dir, shard)
        there = catalog(serving.run_dir)
    found = [(e.steps, e.success, e.terminated, e.truncated, e.final, e.reward, e.task) for e in there]
    assert found == [(8, 1, 1, 0, 1, 28, "reach"), (5, 0, 0, 1, 0, 10, "reach"), (7, None, 1, 0, 1, 21, "reach")]
