"""A LeRobot dataset that others made is a source of a run: whole, once, or refused in one sentence."""

import contextlib
import json
import os
import re
import shutil
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
from serl_client.episode import Outcome, Stamp, join
from serl_client.errors import ConfigError
from serl_client.spec import Feature, Spec

pytest.importorskip("lerobot", reason="the extra `data` is not installed: uv sync --inexact --extra data")

from serl_launcher.datasets.importer import import_datasets
from serl_launcher.datasets.reader import Dataset
from serl_launcher.replay.views import EpisodeInfo
from serl_launcher.store.index import Index
from serl_launcher.store.layout import Layout
from serl_launcher.store.server import Server
from serl_launcher.store.store import DATASET, Store
from serl_launcher.training.plan import Plan, Source
from tests.shared.common import free_port

ROOT = Path(__file__).resolve().parents[2]
STATE, CAMERA = "observation.state", "observation.images.front"
MAKE = """
import json, os, sys
from pathlib import Path
os.environ["HF_HUB_OFFLINE"] = "1"
import numpy as np
from lerobot.datasets.lerobot_dataset import LeRobotDataset

STATE, CAMERA = "observation.state", "observation.images.front"

def make(root, lengths, camera=None, flags=False, names=None):
    features = {
        STATE: {"dtype": "float32", "shape": (4,), "names": names},
        "action": {"dtype": "float32", "shape": (2,), "names": None},
    }
    if camera:
        features[CAMERA] = {"dtype": camera, "shape": (64, 64, 3), "names": ["height", "width", "channels"]}
    if flags:
        features["next.reward"] = {"dtype": "float32", "shape": (1,), "names": None}
        features |= {f"next.{name}": {"dtype": "bool", "shape": (1,), "names": None} for name in ("done", "success")}
    data = LeRobotDataset.create("a/b", fps=10, features=features, root=root, use_videos=True)
    rng = np.random.default_rng(0)
    for episode, length in enumerate(lengths):
        for step in range(length):
            state = np.array([episode, step, rng.normal(), rng.normal()], np.float32)
            frame = {STATE: state, "action": np.clip(state[2:], -1, 1), "task": f"task {episode % 2}"}
            if camera:
                frame[CAMERA] = np.zeros((64, 64, 3), np.uint8)
                frame[CAMERA][:, :, episode % 3], frame[CAMERA][: step + 1, :, 1] = 8 * step % 250, 200
            if flags:
                last = step == length - 1
                frame["next.reward"] = np.array([float(last)], np.float32)
                frame["next.done"], frame["next.success"] = np.array([last]), np.array([last and episode % 2 == 0])
            data.add_frame(frame)
        data.save_episode()
    data.finalize()

def read(root):  # as lerobot reads it
    data = LeRobotDataset("a/b", root=root)
    rows = [data[i] for i in range(len(data))]
    names = (STATE, CAMERA, "action", "timestamp")
    np.savez(f"{root}.npz", **{name: np.stack([row[name].numpy() for row in rows]) for name in names})

folder = Path(sys.argv[1])
for name, options in json.loads(sys.argv[2]).items():
    make(folder / name, **options)
    if "camera" in options:
        try:
            read(folder / name)
        except (RuntimeError, ImportError) as error:
            print(name, error)
"""
KINDS = {
    "low": {"lengths": [12, 1, 30, 7]},
    "long": {"lengths": [97] * 60},
    "named": {"lengths": [3], "names": ["a", "b", "c", "d"]},
    "flagged": {"lengths": [5, 9], "flags": True},
    "video": {"lengths": [11, 20], "camera": "video"},
    "image": {"lengths": [11, 20], "camera": "image"},
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """{name: Dataset}, by LeRobot's own writer, in a process of its own: it takes long to import, and warns."""
    folder = tmp_path_factory.mktemp("datasets")
    command = [sys.executable, "-W", "ignore", "-c", MAKE, folder, json.dumps(KINDS)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return {name: Dataset(folder / name) for name in KINDS}


@pytest.fixture(scope="module")
def low(made):
    return made["low"]


@pytest.fixture(scope="module")
def flagged(made):
    return made["flagged"]


@pytest.fixture(scope="module", params=["video", "image"])
def seen(request, made):
    return made[request.param]


def episodes(dataset, spec=None):
    spec, stamp = spec or dataset.spec(), Stamp(1, DATASET, 0)
    return [join(list(episode.segments(spec, f"e{i}", stamp))) for i, episode in enumerate(dataset)]


# -- reading


def test_the_rows_are_those_that_lerobot_reads(seen):
    """Both decode the same video, so they agree to the last bit or nearly: colours are converted by two programs."""
    file = seen.folder.with_suffix(".npz")
    if not file.exists():
        pytest.skip("lerobot decodes no video here: its torchcodec needs ffmpeg's libraries (apt-get install ffmpeg)")
    theirs, mine = np.load(file), episodes(seen)
    assert np.array_equal(theirs[STATE], np.concatenate([e.observation[STATE] for e in mine]))
    assert np.array_equal(theirs["action"], np.concatenate([e.action for e in mine]))
    assert np.allclose(theirs["timestamp"], np.concatenate([e.time for e in mine]))
    images = np.concatenate([e.observation[CAMERA] for e in mine])
    assert images.dtype == np.uint8
    assert images.shape == (31, 64, 64, 3)
    assert np.abs(theirs[CAMERA].transpose(0, 2, 3, 1) * 255 - images).max() <= 2


def test_what_a_dataset_does_not_say_is_not_made_up(low):
    whole = episodes(low)
    assert [len(episode) for episode in whole] == low.lengths == [12, 1, 30, 7]
    for episode in whole:
        assert not episode.ends
        assert len(episode.observation[STATE]) == len(episode)
        assert not episode.reward.any()
        assert not episode.intervened.any()
    assert [episode.success for episode in low] == [None] * 4
    assert [episode.task for episode in low] == ["task 0", "task 1", "task 0", "task 1"]


def test_an_end_that_a_dataset_names_is_kept(flagged):
    whole = episodes(flagged)
    assert [episode.terminated for episode in whole] == [True, True]
    assert [episode.success for episode in flagged] == [True, False]
    for episode in whole:
        assert episode.reward[-1] == episode.reward.sum() == 1
        final = episode.observation[STATE][-1]
        assert np.array_equal(final, episode.observation[STATE][-2])


def test_the_spec_is_the_datasets_with_bounds_around_its_actions(low, seen):
    spec = seen.spec()
    assert (spec.fps, spec.observation[CAMERA].shape, spec.observation[CAMERA].dtype) == (10, (64, 64, 3), "uint8")
    action = np.concatenate([episode.column("action") for episode in low])
    low_bound, high = low.spec().action.low, low.spec().action.high
    assert (low_bound < action.min(0)).all()
    assert (high > action.max(0)).all()
    assert (high - low_bound <= 1.2 * np.ptp(action, 0)).all()


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (Spec({STATE: Feature((4,))}, Feature((2,), low=-1, high=1), fps=20), "its rate is 10 fps, the run's 20"),
        (Spec({STATE: Feature((5,))}, Feature((2,), low=-1, high=1), fps=10), r"its observation.state is \[4\]"),
        (Spec({STATE: Feature((4,)), CAMERA: Feature((8, 8, 3), "uint8")}, Feature((2,), low=-1, high=1), fps=10),
         "it has no observation.images.front"),
    ],
)  # fmt: skip
def test_what_differs_from_the_run_is_named(low, spec, said):
    assert re.search(said, low.misfit(spec))
    assert low.misfit(low.spec()) == ""


def test_other_names_are_another_robot(made):
    theirs = Feature((4,), names=("a", "c", "b", "d"))
    assert "holds a, b, c, d, the run's a, c, b, d" in made["named"].misfit(
        Spec({STATE: theirs}, Feature((2,), low=-1, high=1), fps=10)
    )


def test_a_folder_without_a_whole_dataset_is_refused(tmp_path, low):
    with pytest.raises(ConfigError, match="holds no LeRobot dataset"):
        Dataset(tmp_path)
    half = shutil.copytree(low.folder, tmp_path / "half")
    shutil.rmtree(half / "meta/episodes")
    with pytest.raises(ConfigError, match="never finished"):
        Dataset(half)
    old = shutil.copytree(low.folder, tmp_path / "old")
    info = old / "meta/info.json"
    info.write_text(info.read_text().replace('"v3.0"', '"v2.1"'))
    with pytest.raises(ConfigError, match=r"format v2\.1, v3\.0 is read here"):
        Dataset(old)
    info.write_text('{"codebase_version": "v3.0"}')
    with pytest.raises(ConfigError, match=r"info.json is not LeRobot's .*fps"):
        Dataset(old)
    cut = shutil.copytree(low.folder, tmp_path / "cut")
    (cut / "data/chunk-000/file-000.parquet").write_bytes(b"PAR1")
    with pytest.raises(ConfigError, match="cannot be read"):
        Dataset(cut).episode(0)


# -- into a store


class Serving:
    """A server of a run folder in a thread, which may be started again."""

    def __init__(self, run_dir, capacities):
        self.run_dir, self.capacities = run_dir, capacities
        self.local, self.public = f"ipc://{run_dir}/local", f"ipc://{run_dir}/public"

    def __enter__(self):
        self.run_dir.mkdir(exist_ok=True)
        self.server = Server(
            self.run_dir, self.capacities, public=self.public, local=self.local, inference="tcp://127.0.0.1:1"
        )
        self.thread = threading.Thread(target=self.server.run)
        self.thread.start()
        return self

    def __exit__(self, *exception):
        self.server.stop()
        self.thread.join()
        self.server.close()


def bring(serving, dataset, *, waits=False, source="demo"):
    plan = Plan({source: Source(serving.capacities[source], dataset=str(dataset.folder))}, {}, {})
    import_datasets(plan, serving.run_dir, local=serving.local, waits=waits)


def catalog(run_dir):
    index = Index(run_dir / "store/index.sqlite")
    found = [EpisodeInfo(*row) for row in index.catalog(0, 10_000)[1]]
    index.close()
    return sorted(found)


def stored(run_dir, capacity, spec):
    """{episode number: [(index, state), ...]}"""
    layout = Layout(spec, capacity)
    index = Index(run_dir / "store/index.sqlite")
    source = index.sources()["demo"]
    index.close()
    steps = layout.steps(run_dir / "store/demo")[source.tail : source.head]
    rows = layout.observations(run_dir / "store/demo")[STATE]
    found = {}
    for step in steps:
        found.setdefault(int(step["episode"]), []).append((int(step["index"]), rows[step["row"] % layout.rows].copy()))
    return found


def assert_there_once(run_dir, dataset, capacity=1000):
    """Every episode of the dataset is in the store as a whole, once; what else there is, is discarded."""
    kept = [episode for episode in catalog(run_dir) if not episode.discard]
    assert [episode.steps for episode in kept] == dataset.lengths
    assert all(episode.closed and episode.source == "demo" for episode in kept)
    index = Index(run_dir / "store/index.sqlite")
    spec = Spec.from_dict(index.meta("spec"))
    index.close()
    found = stored(run_dir, capacity, spec)
    for episode, theirs in zip(kept, dataset, strict=True):
        numbers, states = zip(*found[episode.number], strict=True)
        assert numbers == tuple(range(episode.steps))
        assert np.array_equal(np.stack(states), theirs.column(STATE))


def test_a_dataset_makes_the_store_where_no_actor_will(tmp_path, low):
    with Serving(tmp_path / "run", {"demo": 1000}) as serving:
        bring(serving, low)
        assert_there_once(serving.run_dir, low)
        before = catalog(serving.run_dir)
        bring(serving, low)
        assert catalog(serving.run_dir) == before


def test_its_outcomes_come_with_it(tmp_path, flagged):
    with Serving(tmp_path / "run", {"demo": 1000}) as serving:
        bring(serving, flagged)
        there = catalog(serving.run_dir)
    assert [(episode.success, episode.terminated, episode.final) for episode in there] == [(1, 1, 1), (0, 1, 1)]


def test_its_directive_is_no_actors(tmp_path, low):
    with Serving(tmp_path / "run", {"demo": 1000}) as serving:
        bring(serving, low)
        with TrainerClient(
            serving.public, actor="arm", spec=low.spec(), outbox=tmp_path / "outbox", capacity=1 << 20
        ) as client:  # fmt: skip
            while not client.connected:
                client.wait(0.01)
            assert client.directive["mode"] == "idle"


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
    with Serving(tmp_path / "run", {"demo": 1000}) as serving:
        importer = threading.Thread(target=bring, args=(serving, low), kwargs={"waits": True})
        importer.start()
        importer.join(0.5)
        assert importer.is_alive()
        assert serving.server.store is None
        with TrainerClient(serving.public, actor="arm", spec=spec, outbox=tmp_path / "outbox", capacity=1 << 20):
            importer.join(30)
        assert not importer.is_alive()
        assert serving.server.store.spec == spec
        assert_there_once(serving.run_dir, low)


def test_another_robots_dataset_is_refused_and_nothing_is_written(tmp_path, low):
    other = Spec({STATE: Feature((7,))}, Feature((2,), low=-1, high=1), fps=10)
    Store.create(tmp_path / "run/store", other, {"demo": 1000}).close()
    with (
        Serving(tmp_path / "run", {"demo": 1000}) as serving,
        pytest.raises(ConfigError, match=r"not of this run's robot: its observation.state is \[4\], the run's \[7\]"),
    ):
        bring(serving, low)
    assert not catalog(tmp_path / "run")


def test_a_source_that_is_too_small_is_refused_with_the_figures(tmp_path, low):
    said = r"capacity is 70 steps.*has 50; its longest episode has 30.*at least 80"
    with Serving(tmp_path / "run", {"demo": 70}) as serving, pytest.raises(ConfigError, match=said):
        bring(serving, low)
    assert not (tmp_path / "run/store").exists()


def test_a_long_episode_that_the_store_keeps_in_parts_is_there_once(tmp_path, low):
    with Serving(tmp_path / "run", {"demo": 80}) as serving:
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
    with Serving(tmp_path / "run", {"demo": 20_000}) as serving:
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
    with Serving(tmp_path / "run", {"demo": 1000}) as serving:
        bring(serving, flagged)
        first = catalog(serving.run_dir)[0].id
        with TrainerClient(
            serving.public, actor="person", spec=flagged.spec(), outbox=tmp_path / "outbox", capacity=1 << 20
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
        [sys.executable, ROOT / "examples/train.py", *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
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
    while steps(run_dir) <= 500:
        assert process.poll() is None
        time.sleep(0.01)
    os.kill(importer(run_dir), signal.SIGKILL)
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 0, said
    assert "importer ended with status -9: starting it again" in said
    assert "20 updates" in said
    assert_there_once(run_dir, made["long"], capacity=7000)
    assert list((run_dir / "checkpoints").glob("[0-9]*/manifest.json"))


def test_a_dataset_that_is_not_there_ends_the_program_with_a_sentence(tmp_path):
    words = ["learner=true", "task=fake", "plan=sft", f"run_dir={tmp_path / 'run'}"]
    words += [f"plan.sources.demo.dataset={tmp_path / 'nowhere'}"]
    done = subprocess.run([sys.executable, ROOT / "examples/train.py", *words], capture_output=True, text=True)
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
    with Serving(tmp_path / "second", {"demo": 1000}) as serving:
        bring(serving, shard)
        assert_there_once(serving.run_dir, shard)
        there = catalog(serving.run_dir)
    found = [(e.steps, e.success, e.terminated, e.truncated, e.final, e.reward, e.task) for e in there]
    assert found == [(8, 1, 1, 0, 1, 28, "reach"), (5, 0, 0, 1, 0, 10, "reach"), (7, None, 1, 0, 1, 21, "reach")]
