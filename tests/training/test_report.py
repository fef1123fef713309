"""The report says how sure it is, counts an assisted success as a failure, and copes with a run that did little."""

import json
from functools import partial
from types import SimpleNamespace

import pytest

from serl_launcher.replay.views import EpisodeInfo
from serl_launcher.training import report
from serl_launcher.training.counters import RunCounters
from serl_launcher.training.person_time import PersonTime
from serl_launcher.training.plan_reader import load_plan
from serl_launcher.training.trainer import summarise

from .life import Life, found, phase, plan_of

NOTHING = {"env_steps": 0, "episodes": 0, "assisted": 0, "updates": 0, "wall_s": 0.0, "weights_sha256": ""}


def evaluation(successes, episodes):
    returns = [float(i < (successes or 0)) for i in range(episodes)]
    return {"episodes": episodes, "distinct_starts": episodes, "successes": successes, "returns": returns}


DURING = [
    evaluation(3, 10) | {"phase": "practise.evaluate", "updates": 1000, "weights_sha256": "a"},
    evaluation(6, 10) | {"phase": "evaluate#1", "updates": 2000, "weights_sha256": "b"},
]


def episodes(count, success=True):
    one = {"success": success, "phase": "practise"}
    return [one | {"env_steps": 10 * i, "return": float(i), "intervened": i % 2 == 0} for i in range(1, count + 1)]


@pytest.mark.parametrize(
    ("successes", "count", "low", "high"),
    [(0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (15, 50, 0.1910, 0.4375), (0, 0, 0.0, 1.0)],
)
def test_intervals_are_wilsons(successes, count, low, high):
    assert report.wilson(successes, count) == pytest.approx((low, high), abs=1e-4)


def test_a_run_leaves_a_summary_a_picture_and_a_table(tmp_path, capsys):
    summary = report.write(
        tmp_path / "summary.json", env_steps=5000, episodes=25, assisted=12, updates=9000, wall_s=90.04,
        weights_sha256="abc", evaluations=[evaluation(1, 30), *DURING, evaluation(49, 50)], curve=episodes(25),
    )  # fmt: skip
    report.show(summary, evaluated=True)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["success_before"] == pytest.approx(1 / 30)
    after = summary["eval"]
    told = {"success": 0.98, "episodes": 50, "distinct_starts": 50, "weights_sha256": "abc"}
    assert {name: after[name] for name in told} == told
    assert after["wilson95"] == pytest.approx([0.895, 0.996], abs=1e-3)
    assert after["return_mean"] == pytest.approx(0.98)
    assert summary["before"]["distinct_starts"] == 30
    assert [
        (result["phase"], result["updates"], result["success"], result["weights_sha256"])
        for result in summary["during"]
    ] == [("practise.evaluate", 1000, 0.3, "a"), ("evaluate#1", 2000, 0.6, "b")]
    assert (summary["env_steps"], summary["wall_s"], summary["assisted"]) == (5000, 90.0, 12)
    assert (tmp_path / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    shown = capsys.readouterr().out
    rows = ["before training", "1,000 updates", "3 of 10", "2,000 updates", "6 of 10", "49 of 50"]
    assert sorted(rows, key=" ".join(shown.split()).find) == rows
    assert "90% to 100%" in shown
    assert sorted(path.name for path in tmp_path.iterdir()) == ["learning_curve.png", "summary.json"]


def test_a_task_without_success_is_told_by_its_returns_and_a_run_that_did_nothing_has_a_summary_too(tmp_path, capsys):
    write = partial(report.write, tmp_path / "summary.json", **NOTHING)
    assert write(evaluations=[], curve=[])["eval"] is None
    assert not (tmp_path / "learning_curve.png").exists()
    assert write(evaluations=[evaluation(None, 0)], curve=[])["eval"]["return_mean"] is None
    within = write(evaluations=DURING, curve=[])
    assert (within["before"], len(within["during"]), within["eval"]) == (None, 2, None), (
        "it was trained before the first"
    )
    summary = write(evaluations=[evaluation(None, 4)], curve=episodes(3, success=None))
    assert summary["success_before"] is None
    assert (summary["eval"]["success"], summary["eval"]["return_mean"]) == (None, 0.0)
    report.show(summary, evaluated=True)
    shown = capsys.readouterr().out
    assert ("after training" in shown, "before training" in shown) == (True, False)


def test_what_was_measured_is_not_lost_to_a_plan_that_measures_nothing_and_the_counts_are_the_newest(tmp_path, capsys):
    path = tmp_path / "summary.json"
    first = {**NOTHING, "weights_sha256": "old"}
    report.write(path, **first, evaluations=[evaluation(0, 10), evaluation(9, 10)], curve=[])
    later = {**NOTHING, "updates": 2000, "weights_sha256": "new"}
    report.show(report.write(path, **later, evaluations=[], curve=[]), evaluated=False)
    summary = json.loads(path.read_text())
    assert (summary["eval"]["success"], summary["eval"]["weights_sha256"]) == (0.9, "old")
    assert summary["before"]["success"] == summary["success_before"] == 0.0
    assert (summary["updates"], summary["weights_sha256"]) == (2000, "new")
    shown = capsys.readouterr().out
    assert "2,000 updates" in shown
    assert "after training" not in shown, "not by this plan"


@pytest.mark.parametrize("torn", ["", "{", "[1]"])
def test_a_summary_that_was_torn_does_not_end_a_run(tmp_path, torn):
    (tmp_path / "summary.json").write_text(torn)
    assert report.write(tmp_path / "summary.json", **NOTHING, evaluations=[], curve=[])["eval"] is None
    assert report.read(tmp_path / "summary.json")["updates"] == 0


@pytest.mark.slow
def test_an_assisted_success_is_drawn_as_a_failure():
    alone = [{**episode, "intervened": False} for episode in episodes(8)]
    failed = [{**episode, "success": episode["success"] and not episode["intervened"]} for episode in episodes(8)]
    assert report.picture(episodes(8)) == report.picture([{**e, "intervened": False} for e in failed])
    assert report.picture(episodes(8)) != report.picture(alone)


DEMONSTRATE = {"demonstrate": {"actors": {"mode": "teleop", "into": "demo"}, "until": "demo.episodes >= 20"}}
CLONE = {"clone": {"actors": {"mode": "idle"}, "updates": ["update"], "data": {"demo": 1.0}, "until": "updates >= 20"}}
EVALUATE = {"evaluate": {"actors": {"mode": "evaluate"}, "until": "episodes >= 50"}}


def ended(run_dir, phases, *, updates, sha256, evaluated=None, of=None):
    """Summarise a run with 20 demonstrations, 3 of which a script shared with the policy.

    evaluated: successes of 50. of: sha256 of the weights that acted then; None: of the newest.
    """
    plan = load_plan({"sources": {"demo": {"capacity": 100}}, "phases": phases}, methods=None, has_operator=True)
    told = {field: 0 for field in EpisodeInfo._fields} | {"source": "demo", "final": True, "closed": True, "steps": 10}
    told = [told | {"number": n, "phase": "demonstrate", "intervened": 4 if n < 3 else 10} for n in range(20)]
    counters = RunCounters(SimpleNamespace(buffers={}, views={}))
    counters.update(EpisodeInfo(**episode) for episode in told)
    acted = {"weights_sha256": of or sha256}
    evaluations = {"evaluate": evaluation(evaluated, 50) | acted} if evaluated is not None else {}
    summarise(SimpleNamespace(
        counters=counters, evaluations=evaluations, wall_s=1.0, publisher=SimpleNamespace(version={"sha256": sha256}),
        state=SimpleNamespace(plan=plan, updates=updates, dropped=2.6), changes=[{"updates": 5, "what": "batch_size"}],
        person_time=lambda: PersonTime().told(counters, 10),
    ), run_dir)  # fmt: skip
    return report.read(run_dir / "summary.json")


def test_every_plan_that_ends_tells_the_run_as_it_is_now(tmp_path):
    """In one folder: demonstrations, then a clone, then more of it, and twice a look at what came out."""
    first = ended(tmp_path, DEMONSTRATE, updates=0, sha256="a")
    assert (first["env_steps"], first["episodes"], first["assisted"], first["eval"]) == (200, 20, 3, None)
    assert (first["person"]["demonstrations_min"], first["person"]["takeovers_min"]) == (0.28, 0.02), "170 and 12 steps"
    second = ended(tmp_path, CLONE | EVALUATE, updates=2000, sha256="b", evaluated=47)
    assert (second["updates"], second["eval"]["success"], second["eval"]["weights_sha256"]) == (2000, 0.94, "b")
    assert (second["env_steps"], second["episodes"], second["updates_dropped"]) == (200, 20, 3)
    assert second["changes"] == [{"updates": 5, "what": "batch_size"}]
    assert not (tmp_path / "evaluation.json").exists()
    again = ended(tmp_path, EVALUATE, updates=2000, sha256="b", evaluated=40)
    assert again == second, "another look at the same weights has a file of its own"
    assert report.read(tmp_path / "evaluation.json")["eval"]["success"] == 0.8
    more = ended(tmp_path, CLONE, updates=4000, sha256="c")
    assert (more["updates"], more["weights_sha256"], more["eval"]["weights_sha256"]) == (4000, "c", "b")
    assert ended(tmp_path, EVALUATE, updates=4000, sha256="c", evaluated=50)["eval"]["weights_sha256"] == "c"


def test_the_result_of_a_run_that_goes_on_and_is_stopped_is_none_from_before_training(tmp_path):
    summary = ended(tmp_path, CLONE | EVALUATE, updates=4000, sha256="c", evaluated=47, of="b")
    assert (summary["before"], summary["eval"], [each["success"] for each in summary["during"]]) == (None, None, [0.94])
    baseline = ended(tmp_path, EVALUATE | CLONE, updates=4000, sha256="c", evaluated=1, of="b")
    assert baseline["before"]["success"] == 0.02


def test_what_was_evaluated_before_training_stays_when_it_is_evaluated_again(tmp_path, spec):
    evaluate = phase(updates=(), mode="evaluate", into="eval", until="episodes >= 1")
    plan = plan_of(baseline=evaluate, practise=phase(until="updates >= 9"), final=evaluate)
    learner = Life(found(tmp_path / "run", spec), None, spec, plan).learner
    learner.ranks.published()
    learner.publisher.version = {"version": 1, "sha256": ""}
    for learner.state.updates, name in ((0, "baseline"), (5, "final"), (7, "baseline"), (9, "final")):
        learner._evaluated(plan.phases[name], [1])
    results = {name: result["updates"] for name, result in learner.evaluations.items()}
    assert results == {"baseline": 0, "baseline@7": 7, "final": 9}
