"""One run of the plan hiors in its real processes, as a person lives it: takeovers in mid-chunk, hand-backs, verdicts
that come late or are corrected, a discard; the export is killed on the way. Store, views and shards are asked each
time.

What is compared with them is the actor's own log and the operator's verdicts.
"""

import json
import re

import numpy as np
import pytest

from serl_launcher.datasets import shards
from serl_launcher.replay.verdicts import VerdictRewards
from tests.programs.hiors import EVALUATED, HORIZON, SHARD, WORDS, Run

pytestmark = [
    pytest.mark.slow, pytest.mark.skipif(bool(shards.missing()), reason="needs the extra `data`"),
]  # fmt: skip

VIEWS = ("success", "corrected")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run after its practice: it waits for the operator, who has judged nothing yet."""
    with Run(tmp_path_factory.mktemp("hiors")) as made:
        made.learner, made.actor = (made.start(side, *WORDS) for side in ("learner", "actor"))
        made.until(lambda: (made.run_dir / "datasets/lock").exists() and "export" in made.alive())
        made.kill("export")
        made.reaches("hold")
        made.until(made.all_whole_shards)
        yield made


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


def test_views_hold_what_the_store_holds_and_shards_are_there_while_the_run_goes_on(run):
    assert_views(run)
    assert run.drawn("corrected")
    assert run.learner.poll() is None
    assert {manifest["version"] for manifest in run.manifests().values()} == {1}
    assert {path.parent.name for path in run.manifests()} >= {"demo", "online"}


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


def test_late_verdicts_arrive_in_store_views_and_shards_within_seconds(run):
    first, *_, last = [e.info.id for e in run.episodes(source="demo")]  # exported, and not exported yet
    before, drawn = run.exported(), {view: run.drawn(view) for view in VIEWS}
    won = [e.info.id for e in run.episodes(source="online") if e.info.success and e.info.id in before]
    thrown, doubted, restored = won[0], won[1], won[-1]
    assert first in before
    assert last not in before

    run.order("next")
    run.reaches("judge")
    run.label(last, "failure")
    run.reaches("evaluate")  # the trainer found what to train on in the view of failed demonstrations
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
    ))  # fmt: skip
    run.until(run.all_whole_shards)
    after = run.exported()
    assert {e: shard for e, (shard, _) in after.items() if e in before} == {
        e: shard for e, (shard, _) in before.items() if e != thrown
    }  # fmt: skip
    touched = {before[e][0] for e in (thrown, first, doubted, restored)}
    for shard, made in run.manifests().items():
        assert (made["version"] > 1) == (shard in touched)
        assert [e["id"] for e in made["left_out"]] == [thrown] * (shard == before[thrown][0])


def test_at_the_end_everything_is_there_once_although_the_export_was_killed(run):
    if "rest idle" not in run.said():
        for phase in ("judge", "rest"):
            run.order("next")
            run.reaches(phase)
    run.order("next")
    assert [run.status(process) for process in (run.learner, run.actor)] == [0, 0]
    run.finish_export("--episodes", SHARD)
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
    assert not list(run.run_dir.glob(f"datasets/*/*{shards.PART}"))
    assert not list(run.run_dir.glob("actors/*/outbox/*.records"))
    summary = json.loads((run.run_dir / "summary.json").read_text())
    practised = [e for e in stored if e.info.phase == "practise" and e.info.final]
    assert summary["assisted"] == sum(e.human.any() for e in practised)
    assert summary["env_steps"] == sum(e.info.steps for e in stored if e.info.source != "eval")
    assert summary["eval"]["episodes"] == summary["eval"]["distinct_starts"] == EVALUATED
    recorded = list((run.run_dir / "recordings").glob("*.rrd"))
    assert len(recorded) == sum(e.info.source == "eval" for e in stored)
