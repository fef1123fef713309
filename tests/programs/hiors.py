"""A run of the plan hiors as an operator directs it, and all that its store, views and shards hold."""

import re
from collections import Counter
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from operator import attrgetter

import numpy as np
from serl_client.spec import Spec

from serl_launcher.config import composed
from serl_launcher.datasets import shards
from serl_launcher.datasets.names import MANIFEST
from serl_launcher.replay.mixture import STRIDE, ReplayMixture
from serl_launcher.replay.views import EpisodeInfo
from serl_launcher.store.index import Index
from serl_launcher.store.layout import CHUNK_START, INTERVENED
from serl_launcher.training.plan_reader import plan_of
from serl_launcher.types import Window
from tests.shared import oracle
from tests.shared.common import CONFIG, STATE
from tests.shared.programs import Programs
from tests.shared.tools import called

HORIZON, SHARD, EVALUATED = 8, 4, 6
WORDS = [
    "task=fake", "task.env.max_steps=100", "task.env.takeover_after=3", "task.env.handback_after=2", "deadline_s=10",
    f"n_action_steps={HORIZON}",  # rows, the whole chunk
    "plan=hiors", "utd=1", "batch_size=64", "algo=rejection", "policy=flow", "policy.network.hidden=[64,64]",
    "policy.head.steps=4",
    f"policy.horizon={HORIZON}", "checkpoint_s=1", "export.sources=all", f"export.episodes={SHARD}",
    "plan.sources.online.archive=lerobot", "record=eval",
    "+plan.sources.wrong={of:[demo],keep:[failed]}",
    "+plan.sources.corrected={of:[online],keep:[successful],start_steps:intervened}",
    'plan.phases.demonstrate.until=["demo.episodes >= 10"]', 'plan.phases.clone.until=["updates >= 20"]',
    'plan.phases.baseline.until=["episodes >= 2"]',
    'plan.phases.practise.until=["env_steps >= 500 and episodes >= 12"]',  # three shards, whatever the clone can do
    'plan.phases.practise.start_when="online.episodes >= 2"',
    "plan.phases.practise.publish.every_updates=100000",  # the clone acts in all of it
    "~plan.phases.evaluate",
    "+plan.phases.hold={actors:{mode:idle},until:[operator]}",
    '+plan.phases.judge={actors:{mode:idle},updates:[update],data:{wrong:1.0},until:["updates >= 3",operator],'
    "on_end:[checkpoint,publish]}",  # it waits in there, a minute at most, until a demonstration is called a failure
    f'+plan.phases.evaluate={{actors:{{mode:evaluate}},until:["episodes >= {EVALUATED}"]}}',
    "+plan.phases.rest={actors:{mode:idle},until:[operator]}",
]  # fmt: skip


@dataclass(frozen=True)
class Stored:
    """An episode as the store holds it."""

    info: EpisodeInfo
    steps: np.ndarray  # [T] step records
    state: np.ndarray  # [T, 6]

    human = property(lambda self: self.steps["flags"] & INTERVENED > 0)
    chunk_start = property(lambda self: self.steps["flags"] & CHUNK_START > 0)
    action = property(lambda self: self.steps["action"])
    proposed = property(lambda self: self.steps["policy_action"])

    @property
    def keys(self):
        """[(source, number of a step), ...]"""
        return [(self.info.source, number) for number in self.steps["number"].tolist()]

    @property
    def takeovers(self):
        """[(first row of the operator, first row after that), ...]."""
        found, row = [], 0
        for is_human, members in groupby(self.human):
            count = len(list(members))
            found += [(row, row + count)] * bool(is_human)
            row += count
        return found


class Run(Programs):
    """The folder of a run, its learner and its actor."""

    @cached_property
    def config(self):
        return composed(CONFIG, ["learner=true", f"run_dir={self.run_dir}", *WORDS])

    def reaches(self, phase):
        self.until(lambda: re.search(rf"the actors are told: {phase}\b", self.said()))

    def label(self, episode, verdict):
        done = called("label", "--run-dir", self.run_dir, "--port", self.ports[0], episode, verdict)
        assert done == (0, f"{episode}: {verdict}\n")

    # -- what there is
    def index(self):
        return closing(Index(self.run_dir / "store/index.sqlite"))

    @property
    def spec(self):
        with self.index() as index:
            return Spec.from_dict(index.meta("spec"))

    def catalog(self):
        with self.index() as index:
            return [EpisodeInfo(*row) for row in index.catalog(0, -1)[1]]

    def episodes(self, source=None, phase=None):
        """The episodes of a source or phase, by number; asserts that every step is there, once, and in order."""
        found, stored = oracle.whole(self.run_dir / "store"), []
        assert not any(place["tail"] for place in found.sources.values())
        assert sum(place["head"] for place in found.sources.values()) == sum(map(len, found.steps.values()))
        for info in sorted(self.catalog(), key=attrgetter("number")):
            steps = found.steps[info.number]
            assert [step.index for step in steps] == list(range(info.steps))
            records, states = (np.array([getattr(step, name) for step in steps]) for name in ("record", "origin"))
            stored.append(Stored(info, records, states.astype(np.float32)))
        return [e for e in stored if source in (None, e.info.source) and phase in (None, e.info.phase)]

    def drawn(self, view, count=20_000):
        """{(source, step number): (executed action, policy_action, whether it was the operator's)} of all that a
        trainer draws from a view of the plan."""
        plan = plan_of(self.config).only(self.config.phase)
        sources = ReplayMixture(self.run_dir / "store", self.spec, plan.capacities, plan.views, seed=0)
        sources.update(self.catalog())
        batch = sources.sample(count, Window({STATE: (0,), "action": (0,), "policy_action": (0,)}), {view: 1.0})
        assert batch is not None
        names = list(sources.buffers)
        keys = [(names[step // STRIDE], step % STRIDE) for step in batch.step_id.tolist()]
        columns = (batch.action[:, 0], batch.extras["policy_action"][:, 0], batch.intervened[:, 0])
        rows = zip(*(column.numpy() for column in columns), strict=True)
        found = {key: tuple(row) for key, row in zip(keys, rows, strict=True)}
        assert len(found) == sources.size(view)[0]
        return found

    def manifests(self):
        """{shard: what its manifest says}; one that is replaced meanwhile is there in its old or its new version."""
        folders = [path.parent for path in self.run_dir.glob(f"datasets/*/[0-9]*/{MANIFEST}")]
        return {path: shards.read_manifest(path) for path in sorted(folders) if path.suffix != shards.PART}

    def exported(self):
        """{episode: (its shard, the manifest's entry)}; asserts that each is in one shard, once."""
        entries = [(e["id"], (shard, e)) for shard, made in self.manifests().items() for e in made["episodes"]]
        assert len(dict(entries)) == len(entries)
        return dict(entries)

    def all_whole_shards(self):
        """Whether all that fills a shard is in one."""
        there, closed = self.exported(), [info for info in self.catalog() if info.closed and not info.discard]
        waiting = Counter(info.source for info in closed if info.id not in there)
        return all(count < SHARD for count in waiting.values())
