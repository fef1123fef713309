"""One run of the plan hiors in its real processes, as a person lives it: takeovers in mid-chunk, hand-backs, verdicts
that come late or are corrected, a discard; then an evaluation elsewhere. Store, views and shards are asked each time.

What is compared with them is the actor's own log, the operator's verdicts, and the policy's chunks computed anew from
the published weights.
"""

import json
import re
import shutil
from collections import Counter
from dataclasses import dataclass
from itertools import groupby, pairwise

import numpy as np
import pytest
import torch
from serl_client import messages as m
from serl_client.controller import decision_seed
from serl_client.spec import Spec

from serl_launcher.acting.host import PolicyHost, Question
from serl_launcher.config import composed
from serl_launcher.datasets import shards
from serl_launcher.datasets.names import MANIFEST
from serl_launcher.replay.mixture import STRIDE, ReplayMixture
from serl_launcher.replay.views import EpisodeInfo
from serl_launcher.store.index import Index
from serl_launcher.store.layout import CHUNK_START, INTERVENED, Layout
from serl_launcher.training.build import build
from serl_launcher.training.plan_reader import plan_of
from serl_launcher.types import Window
from tests.shared.common import CONFIG, STATE
from tests.shared.programs import Programs
from tests.shared.tools import called

pytestmark = [
    pytest.mark.slow, pytest.mark.skipif(bool(shards.missing()), reason="needs the extra `data`"),
]  # fmt: skip

PATIENCE = 120.0
SOON = 30.0  # seconds within which a verdict has reached everything
VIEWS = ("success", "corrected")
HORIZON, SHARD, EVALUATED = 8, 8, 20
WORDS = [
    "task=fake", "task.env.max_steps=100", "task.env.takeover_after=3", "task.env.handback_after=2", "deadline_s=10",
    f"n_action_steps={HORIZON}",  # rows, the whole chunk
    "plan=hiors", "utd=6", "batch_size=64", "algo=rejection", "policy=flow", "policy.hidden=[64,64]", "policy.steps=4",
    f"policy.horizon={HORIZON}", "checkpoint_s=1", "export.sources=all", f"export.episodes={SHARD}",
    "+plan.sources.wrong={of:[demo],keep:[failed]}",
    "+plan.sources.corrected={of:[online],keep:[successful],rows:intervened}",
    'plan.phases.demonstrate.until=["demo.episodes >= 42"]', 'plan.phases.clone.until=["updates >= 20"]',
    'plan.phases.baseline.until=["episodes >= 2"]',
    'plan.phases.practise.until=["env_steps >= 500 and episodes >= 16"]',  # two shards, whatever the clone can do
    'plan.phases.practise.start_when="online.episodes >= 2"',
    "plan.phases.practise.publish.every_updates=100000",  # the clone acts in all of it
    "~plan.phases.evaluate",
    '+plan.phases.judge={actors:{mode:idle},updates:[update],data:{wrong:1.0},until:["updates >= 3",operator],'
    "on_end:[checkpoint,publish]}",  # the trainer waits in it until a demonstration is called a failure
    f'+plan.phases.evaluate={{actors:{{mode:evaluate}},until:["episodes >= {EVALUATED}"]}}',
    "+plan.phases.rest={actors:{mode:idle},until:[operator]}",
]  # fmt: skip


@dataclass(frozen=True)
class Stored:
    """An episode as the store holds it."""

    info: EpisodeInfo
    steps: np.ndarray  # [T] step records
    state: np.ndarray  # [T, 6]

    @property
    def human(self):
        return self.steps["flags"] & INTERVENED > 0

    @property
    def chunk_start(self):
        return self.steps["flags"] & CHUNK_START > 0

    @property
    def action(self):
        return self.steps["action"]

    @property
    def proposed(self):
        return self.steps["extras.policy_action"]

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

    def __init__(self, folder):
        super().__init__(folder)
        self.config = composed(CONFIG, ["learner=true", f"run_dir={self.run_dir}", *WORDS])
        self.processes = {}

    def begin(self, learner, actor):
        """Start both sides, with these words."""
        for side, words in (("learner", learner), ("actor", actor)):
            self.processes[side] = self.start(side, *words)

    def reaches(self, phase, seconds=PATIENCE):
        self.until(lambda: re.search(rf"directive \d+: {phase} ", self.said()), seconds)

    def ends(self):
        """The exit statuses of programs that end by themselves."""
        return {side: self.status(process, PATIENCE) for side, process in self.processes.items()}

    # -- what the operator does
    def label(self, episode, verdict):
        done = called("label", "--run-dir", self.run_dir, "--port", self.ports[0], episode, verdict)
        assert done == (0, f"{episode}: {verdict}\n")

    # -- what there is
    def index(self, ask):
        index = Index(self.run_dir / "store/index.sqlite")
        try:
            return ask(index)
        finally:
            index.close()

    @property
    def spec(self):
        return Spec.from_dict(self.index(lambda index: index.meta("spec")))

    def catalog(self):
        return [EpisodeInfo(*row) for row in self.index(lambda index: index.catalog(0, -1)[1])]

    def episodes(self, source=None, phase=None):
        """The episodes of a source or phase, by number; asserts that every step is there, once, and in order."""
        there, infos = self.index(lambda index: index.sources()), self.catalog()
        found = []
        for name, place in there.items():
            layout, folder = Layout(self.spec, place.capacity), self.run_dir / "store" / name
            assert place.tail == 0
            steps, state = layout.steps(folder)[: place.head], layout.observations(folder)[STATE]
            assert np.array_equal(steps["number"], np.arange(place.head))
            members = [info for info in infos if info.source == name]
            assert Counter(steps["episode"].tolist()) == {info.number: info.steps for info in members}
            for info in members:
                mine = steps[steps["episode"] == info.number]
                assert np.array_equal(mine["index"], np.arange(info.steps))
                found.append(Stored(info, np.array(mine), np.array(state[mine["row"]])))
        found.sort(key=lambda episode: episode.info.number)
        return [e for e in found if source in (None, e.info.source) and phase in (None, e.info.phase)]

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


def assert_shards_hold_what_the_store_holds(run):
    """Opened with LeRobot's own reader."""
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    stored = {episode.info.id: episode for episode in run.episodes()}
    for shard, manifest in run.manifests().items():
        dataset = LeRobotDataset("local/shard", root=shard)
        members = [stored[entry["id"]] for entry in manifest["episodes"]]
        assert [int(e["length"]) for e in dataset.meta.episodes] == [e.info.steps for e in members]
        assert len(dataset) == sum(e.info.steps for e in members)
        table = dataset.hf_dataset.with_format("arrow")[:].to_pydict()
        for name, column in {
            STATE: "state", "action": "action", "policy_action": "proposed", "intervened": "human",
            "chunk_start": "chunk_start",
        }.items():  # fmt: skip
            expected = np.concatenate([getattr(e, column) for e in members])
            assert np.array_equal(np.array(table[name]).reshape(expected.shape), expected), (shard, name)
        outcome = [-1 if e.info.success is None else int(bool(e.info.success)) for e in members for _ in e.steps]
        assert np.array(table["outcome"]).reshape(-1).tolist() == outcome
        ends = [i + 1 == e.info.steps and bool(e.info.success) for e in members for i in range(e.info.steps)]
        assert np.array(table["next.success"]).reshape(-1).tolist() == ends


@pytest.fixture(scope="module", autouse=True)
def quiet(tmp_path_factory):
    """LeRobot asks nobody, and keeps its copies out of the user's home."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        shards._lerobot()
        import datasets

        patch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("cache")))
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        yield
        torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run after its practice: it waits for the operator, who has judged nothing yet."""
    made = Run(tmp_path_factory.mktemp("hiors"))
    try:
        made.begin(WORDS, WORDS)
        made.reaches("judge")
        shutil.copytree(made.run_dir / "weights", made.run_dir.with_name("weights"))  # the run keeps the two newest
        made.until(made.all_whole_shards, PATIENCE)
        yield made
    finally:
        made.end()


def test_the_store_says_of_each_row_who_moved_it_as_the_actors_log_does(run):
    told = re.findall(r"(\S+), row (\d+): the operator (takes over|hands back)", run.said())
    practised = run.episodes(phase="practise")
    kept = []
    for episode in practised:
        for begin, end in episode.takeovers:
            kept.append((episode.info.id, str(begin), "takes over"))
            kept += [(episode.info.id, str(end), "hands back")] * (end < episode.info.steps)
        assert episode.human.sum() == episode.info.intervened
        assert not episode.human.all()
    assert sorted(told) == sorted(kept)
    assert not any(e.chunk_start[e.human].any() for e in practised)
    assert sum(begin > 0 for episode in practised for begin, _ in episode.takeovers) >= 10
    assert any(episode.info.success for episode in practised)
    for episode in run.episodes(source="demo"):
        assert episode.human.all()
        assert not episode.chunk_start.any()
        assert episode.info.success
    for episode in run.episodes(source="eval"):
        assert not episode.human.any()
        assert np.array_equal(np.flatnonzero(episode.chunk_start), np.arange(0, episode.info.steps, HORIZON))


def test_a_takeover_drops_the_rest_of_a_chunk_and_the_policy_begins_anew_after_the_hand_back(run):
    """Every row of the policy is that row of the chunk which the weights that acted give at its last decision."""
    versions = {entry["version"]: entry["sha256"] for entry in run.index(lambda index: index.weights(10))}
    host = PolicyHost(build(run.config, run.spec), run.spec, "cpu")
    dropped = anew = 0
    for episode in run.episodes(phase="practise"):
        (version,) = set(episode.steps["weights"].tolist())
        host.load(version, run.run_dir.with_name("weights") / f"{versions[version]}.safetensors")
        takeovers = [(-1, -1), *episode.takeovers, (episode.info.steps, episode.info.steps)]
        rest, rest_from = np.zeros((0, 2)), 0  # what the takeover left of a chunk, and for which row it was
        for (_, let_go), (end, _) in pairwise(takeovers):
            begin = let_go + 1  # in the row before, the hand has let go and nobody was asked: the robot holds
            if 0 <= let_go < end:
                assert not episode.chunk_start[let_go]
                assert not episode.action[let_go].any()
            decisions = list(range(begin, end, HORIZON))
            assert np.flatnonzero(episode.chunk_start[let_go + 1 : end]).tolist() == [row - begin for row in decisions]
            planned = np.concatenate([np.zeros((0, 2)), *(chunk(host, episode, row) for row in decisions)])
            assert_close(episode.action[begin:end], planned[: max(0, end - begin)])
            if begin < end and begin - rest_from < len(rest):
                anew += np.abs(episode.action[begin] - rest[begin - rest_from]).max() > 1e-3
            rest, rest_from = planned[max(0, end - begin) :], end
            if len(rest) and end < episode.info.steps:
                assert_close(episode.proposed[end], rest[0])
                dropped += 1
    assert dropped >= 10, "takeovers in mid-chunk"
    assert anew >= 3, "hand-backs where the chunk before the takeover still had rows"


def chunk(host, episode, row):
    """The actions [H, A] that the policy gives for a row."""
    ask = m.InferenceRequest(row, decision_seed(episode.info.id, row), True, True, "", {STATE: episode.state[row]})
    return host.answer([Question(b"", ask)])[0].arrays["action"]


def assert_close(one, other):
    np.testing.assert_allclose(one, other, atol=1e-5)


def test_the_views_hold_what_worked_and_what_the_operator_moved(run):
    assert_views(run)
    assert run.drawn("corrected")


def assert_views(run):
    """The plan's views hold the rows of the successful episodes, and of those the operator's, as the store has them."""
    stored = run.episodes()
    won = [
        e for e in stored
        if e.info.source in ("demo", "online") and e.info.success and not e.info.discard and e.info.steps >= 3
    ]  # fmt: skip
    everything = {key: row for e in won for key, *row in zip(e.keys, e.action, e.proposed, e.human, strict=True)}
    corrections = {key: row for key, row in everything.items() if key[0] == "online" and row[2]}
    for view, expected in zip(VIEWS, (everything, corrections), strict=True):
        drawn = run.drawn(view)
        assert drawn.keys() == expected.keys()
        for key, row in drawn.items():
            assert all(np.array_equal(one, other) for one, other in zip(row, expected[key], strict=True))


def test_the_shards_are_the_store_while_the_run_goes_on(run):
    assert run.processes["learner"].poll() is None
    assert {manifest["version"] for manifest in run.manifests().values()} == {1}
    assert {path.parent.name for path in run.manifests()} >= {"demo", "online"}
    assert_shards_hold_what_the_store_holds(run)


def test_late_verdicts_arrive_in_store_views_and_shards_within_seconds(run):
    first, *_, last = [e.info.id for e in run.episodes(source="demo")]  # exported, and not exported yet
    before, drawn = run.exported(), {view: run.drawn(view) for view in VIEWS}
    won = [e.info.id for e in run.episodes(source="online") if e.info.success and e.info.id in before]
    thrown, doubted, restored = won[0], won[1], won[-1]
    assert first in before
    assert last not in before

    run.label(last, "failure")
    run.reaches("evaluate", SOON)  # the trainer found what to train on in the view of failed demonstrations
    run.reaches("rest")
    for episode, verdict in (
        (thrown, "discard"), (first, "failure"), (doubted, "failure"), (restored, "failure"), (restored, "success"),
    ):  # fmt: skip
        run.label(episode, verdict)

    verdicts = {last: False, first: False, doubted: False, restored: True, thrown: None}
    infos = {info.id: info for info in run.catalog()}
    for episode, success in verdicts.items():
        judged = infos[episode].success, infos[episode].discard, infos[episode].judged_by
        assert judged == (success, episode == thrown, "operator")
    assert_views(run)
    gone = {key for e in run.episodes() if e.info.id in {last, first, doubted, thrown} for key in e.keys}
    for view in VIEWS:
        assert run.drawn(view).keys() == drawn[view].keys() - gone
        assert drawn[view].keys() & gone

    run.until(lambda: thrown not in (now := run.exported()) and all(
        now[e][1]["success"] == verdicts[e] and now[e][1]["judged_by"] == "operator" for e in (first, doubted, restored)
    ), SOON)  # fmt: skip
    run.until(run.all_whole_shards)
    after = run.exported()
    assert {e: shard for e, (shard, _) in after.items() if e in before} == {
        e: shard for e, (shard, _) in before.items() if e != thrown
    }  # fmt: skip
    touched = {before[e][0] for e in (thrown, first, doubted, restored)}
    for shard, made in run.manifests().items():
        assert (made["version"] > 1) == (shard in touched)
        assert [e["id"] for e in made["left_out"]] == [thrown] * (shard == before[thrown][0])
    assert_shards_hold_what_the_store_holds(run)


@pytest.fixture(scope="module")
def finished(run):
    """(The run after the operator has let it end, the exit statuses.)"""
    if "rest idle" not in run.said():
        run.order("next")
        run.reaches("rest")
    run.order("next")
    return run, run.ends()


def test_at_the_end_everything_is_there_once(finished):
    run, statuses = finished
    assert statuses == {"learner": 0, "actor": 0}
    assert not [line for line in run.said().splitlines() if "Traceback" in line or "errors.log" in line]
    stored = run.episodes()
    names = [e.info.id for e in stored]
    assert sorted(int(name.rpartition("-")[2]) for name in names) == list(range(len(names)))
    assert all(e.info.closed for e in stored)
    exported = run.exported()
    assert exported.keys() == {e.info.id for e in stored if not e.info.discard}
    for info in run.catalog():
        if info.id in exported:
            assert shards.mark(exported[info.id][1]) == shards.mark_now(info)
    assert_shards_hold_what_the_store_holds(run)
    assert not list(run.run_dir.glob(f"datasets/*/*{shards.PART}"))
    assert not list(run.run_dir.glob("actors/*/outbox/*.records"))
    summary = json.loads((run.run_dir / "summary.json").read_text())
    practised = [e for e in stored if e.info.phase == "practise" and e.info.final]
    assert summary["assisted"] == sum(e.human.any() for e in practised)
    assert summary["env_steps"] == sum(e.info.steps for e in stored if e.info.source != "eval")
    assert summary["eval"]["episodes"] == summary["eval"]["distinct_starts"] == EVALUATED


def test_an_evaluation_elsewhere_runs_the_same_weights_and_finds_the_same_number(finished, tmp_path):
    """The folder is copied to another machine, but for what its actors kept; where it was is not there any more."""
    here, _ = finished
    there, moved = Run(tmp_path), here.run_dir.with_name("moved")
    shutil.copytree(here.run_dir, there.run_dir, ignore=shutil.ignore_patterns("actors"))
    here.run_dir.rename(moved)
    try:
        there.begin(
            ["plan=evaluate", f'plan.phases.evaluate.until=["episodes >= {EVALUATED}"]'],
            ["task=fake", "task.env.max_steps=100"],
        )
        assert there.ends() == {"learner": 0, "actor": 0}, there.said()
    finally:
        there.end()
        moved.rename(here.run_dir)
    summary, evaluation = (
        json.loads((there.run_dir / name).read_text())["eval"] for name in ("summary.json", "evaluation.json")
    )
    assert evaluation["weights_sha256"] == summary["weights_sha256"]
    assert evaluation["episodes"] == evaluation["distinct_starts"] == EVALUATED
    known = {e.info.id for e in here.episodes()}
    new = [e for e in there.episodes(source="eval") if e.info.id not in known]
    assert sum(bool(e.info.success) for e in new[:EVALUATED]) == evaluation["success"] * EVALUATED
    published = {entry["version"]: entry["sha256"] for entry in there.index(lambda index: index.weights(100))}
    versions = {version for e in new for version in e.steps["weights"].tolist()}
    assert {published[version] for version in versions} == {summary["weights_sha256"]}
    starts = {e.state[0].tobytes() for e in new}
    assert not starts & {e.state[0].tobytes() for e in here.episodes()}, "on starts that nothing has seen"
