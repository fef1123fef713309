"""A store that somebody writes into, an exporter beside it, and shards as LeRobot opens them."""

import json

import numpy as np
import pytest
from serl_client import Feature, Outcome, Segment, Stamp
from serl_client import messages as m

from serl_launcher.datasets import shards
from serl_launcher.datasets.exporter import Exporter
from serl_launcher.datasets.importer import import_datasets
from serl_launcher.datasets.names import MANIFEST
from serl_launcher.replay.views import EpisodeInfo
from serl_launcher.store.index import Index
from serl_launcher.store.store import Store
from serl_launcher.training.plan import Plan, PlanSource
from tests.shared.common import STATE

CAMERA = "observation.images.cam_high"
PROPOSED = {"policy_action": Feature((2,))}
needs_lerobot = pytest.mark.skipif(bool(shards.missing()), reason="needs the extra `data`")


def writes_shards(test):
    """LeRobot takes seconds."""
    return pytest.mark.slow(needs_lerobot(test))


def segment(spec, episode, start=0, steps=6, ends="terminated", phase="practise", directive=1, weights=3):
    """Numbers that no other episode has; the images are of one colour each, which a codec keeps nearly."""
    generator = np.random.default_rng([*episode.encode(), start])
    action, proposed = generator.random((2, steps, 2), np.float32)
    reward, (intervened, decision) = generator.random(steps, np.float32), generator.random((2, steps)) < 0.5
    time, rows = 1e9 + start + np.sort(generator.random(steps)), steps + bool(ends)
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

    def __init__(self, folder, spec, capacity=400, archived=(), count=2, datasets=None):
        self.folder, self.spec, self.capacity, self.count, self.seq = folder, spec, capacity, count, 0
        self.datasets = datasets  # that were imported, {source: place}
        self.store = Store.create(folder / "store", spec, {"online": capacity, "demo": 400}, archived)
        self.store.direct({"into": "online", "phase": "practise"})
        self.store.direct({"into": "demo", "phase": "demonstrate"})
        for version in "abc":
            self.store.publish_weights(version * 64, 1, 0)
        self.store.lives.hello("arm", "outbox", "A", [])
        self.store.commit()
        self.revision, self.exporter = 0, self.started()

    def started(self, sources=("online", "demo"), sinks=()):
        self.revision = 0
        capacities = {"online": self.capacity, "demo": 400}
        return Exporter(
            self.folder, self.store.run, self.spec, capacities, sources, self.count, sinks, datasets=self.datasets
        )

    def add(self, *records):
        for record in records:
            self.store.stage("A", self.seq, record)
            self.seq += 1
        self.store.commit()

    def episodes(self, *names, **how):
        self.add(*(segment(self.spec, name, **how) for name in names))

    def hear(self):
        self.revision, rows = self.store.index.catalog(self.revision, 1000)
        self.exporter.update(rows)

    def work(self, rest=False):
        """All that is due; returns how many things were."""
        self.hear()
        done = 0
        while self.exporter.work(rest=rest):
            done += 1
        return done

    def judge(self, name, success, **more):
        """What an operator says of an episode, and then all that is due."""
        self.add(Outcome(name, success, judged_by="operator", **more))
        return self.work()

    def shards(self, source="online"):
        return sorted(p.name for p in (self.folder / "datasets" / source).iterdir())

    def opened(self, name, source="online"):
        return opened(self.folder / "datasets" / source / name)

    def manifest(self, name, source="online"):
        return json.loads((self.folder / "datasets" / source / name / MANIFEST).read_text())

    def forge(self, name, **entry):
        """Let the manifest of a shard say something else of its first episode."""
        manifest = self.manifest(name)
        manifest["episodes"][0] |= entry
        (self.folder / "datasets/online" / name / MANIFEST).write_text(json.dumps(manifest))


def exported(folder, spec):
    """A Run with one shard of two episodes, 000001-000002."""
    run = Run(folder, spec)
    run.episodes("e0", "e1")
    run.work()
    return run


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


def bring(server, dataset, *, waits=False, **words):
    """Import a dataset, given by its place, into the source `demo` of a server. words: of that source."""
    plan = Plan({"demo": PlanSource(server.capacity, dataset=str(dataset), **words)}, {}, {})
    import_datasets(plan, server.run_dir, local=server.local, waits=waits)


def catalog(run_dir):
    """The episodes of a run, by number."""
    index = Index(run_dir / "store/index.sqlite")
    found = [EpisodeInfo(*row) for row in index.catalog(0, 10_000)[1]]
    index.close()
    return sorted(found)
