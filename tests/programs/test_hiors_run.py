"""One run of the plan hiors in its real processes, as a person lives it: takeovers in mid-chunk, hand-backs, verdicts
that come late or are corrected, a discard; the export is killed on the way. Store, views and shards are asked each
time.

What is compared with them is the actor's own log, the operator's verdicts, and the policy's chunks computed anew from
the published weights.
"""

import json
import re
import shutil
from itertools import pairwise

import numpy as np
import pytest
import torch
from serl_client import messages as m
from serl_client.controller import decision_seed

from serl_launcher.acting.host import PolicyHost, Question
from serl_launcher.datasets import shards
from serl_launcher.replay.verdicts import VerdictRewards
from serl_launcher.training.build import build
from tests.programs.hiors import (
    EVALUATED,
    HORIZON,
    PATIENCE,
    SOON,
    WORDS,
    Run,
    assert_shards_hold_what_the_store_holds,
)
from tests.shared.common import STATE

pytestmark = [
    pytest.mark.slow, pytest.mark.skipif(bool(shards.missing()), reason="needs the extra `data`"),
]  # fmt: skip

VIEWS = ("success", "corrected")


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
        made.until(lambda: (made.run_dir / "datasets/lock").exists() and "export" in made.alive())
        made.kill("export")
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
    with run.index() as index:
        files = {entry["version"]: f"{entry['sha256']}.safetensors" for entry in index.weights(100)}
    weights = run.run_dir.with_name("weights")
    host = PolicyHost(build(run.config, run.spec), run.spec, "cpu")
    dropped = anew = 0
    for episode in run.episodes(phase="practise"):
        versions = episode.steps["weights"].tolist()  # new ones may be published in mid-episode
        takeovers = [(-1, -1), *episode.takeovers, (episode.info.steps, episode.info.steps)]
        rest, rest_from = np.zeros((0, 2)), 0  # what the takeover left of a chunk, and for which row it was
        for (_, let_go), (end, _) in pairwise(takeovers):
            begin = max(let_go, 0)
            decisions = list(range(begin, end, HORIZON))
            assert np.flatnonzero(episode.chunk_start[begin:end]).tolist() == [row - begin for row in decisions]
            planned = [np.zeros((0, 2))]
            for row in decisions:
                host.load(versions[row], weights / files[versions[row]])
                planned.append(chunk(host, episode, row))
            planned = np.concatenate(planned)
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


def test_at_the_end_everything_is_there_once_although_the_export_was_killed(run):
    if "rest idle" not in run.said():
        run.order("next")
        run.reaches("rest")
    run.order("next")
    assert run.ends() == {"learner": 0, "actor": 0}
    assert "export ended with status -9: starting it again" in run.said()
    assert not [line for line in run.said().splitlines() if "Traceback" in line or "errors.log" in line]
    stored = run.episodes()
    names = [e.info.id for e in stored]
    assert sorted(int(name.rpartition("-")[2]) for name in names) == list(range(len(names)))
    assert all(e.info.closed for e in stored)
    exported = run.exported()
    assert exported.keys() == {e.info.id for e in stored if not e.info.discard}
    for info in run.catalog():
        if info.id in exported:
            assert shards.mark(exported[info.id][1]) == shards.mark_now(VerdictRewards().applied(info))
    assert_shards_hold_what_the_store_holds(run)
    assert not list(run.run_dir.glob(f"datasets/*/*{shards.PART}"))
    assert not list(run.run_dir.glob("actors/*/outbox/*.records"))
    summary = json.loads((run.run_dir / "summary.json").read_text())
    practised = [e for e in stored if e.info.phase == "practise" and e.info.final]
    assert summary["assisted"] == sum(e.human.any() for e in practised)
    assert summary["env_steps"] == sum(e.info.steps for e in stored if e.info.source != "eval")
    assert summary["eval"]["episodes"] == summary["eval"]["distinct_starts"] == EVALUATED
    recorded = list((run.run_dir / "recordings").glob("*.rrd"))
    assert len(recorded) == sum(e.info.source == "eval" for e in stored)
