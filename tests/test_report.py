"""The report says how sure it is, counts an assisted success as a failure, and copes with a run that did little."""

import json

import pytest
from rich.console import Console

from serl_launcher.utils import report

NOTHING = {"env_steps": 0, "episodes": 0, "updates": 0, "wall_s": 0.0, "weights_sha256": ""}


def evaluation(successes, episodes):
    returns = [float(i < (successes or 0)) for i in range(episodes)]
    return {"episodes": episodes, "distinct_starts": episodes, "successes": successes, "returns": returns}


def episodes(count, success=True):
    return [
        {"env_steps": 10 * i, "success": success, "return": float(i), "intervened": i % 2 == 0, "phase": "practise"}
        for i in range(1, count + 1)
    ]


def text(summary):
    console = Console(width=120)
    with console.capture() as capture:
        console.print(report.table(summary))
    return capture.get()


@pytest.mark.parametrize(
    ("successes", "count", "low", "high"),
    [(0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (15, 50, 0.1910, 0.4375), (0, 0, 0.0, 1.0)],
)
def test_intervals_are_wilsons(successes, count, low, high):
    assert report.wilson(successes, count) == pytest.approx((low, high), abs=1e-4)


def test_a_run_leaves_a_summary_a_picture_and_a_table(tmp_path, capsys):
    report.write(
        tmp_path / "summary.json", env_steps=5000, episodes=25, updates=9000, wall_s=90.04, weights_sha256="abc",
        evaluations=[evaluation(1, 30), evaluation(49, 50)], curve=episodes(25),
    )  # fmt: skip
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["success_before"] == pytest.approx(1 / 30)
    after = summary["eval"]
    assert (after["success"], after["episodes"], after["distinct_starts"], after["weights_sha256"]) == (
        0.98,
        50,
        50,
        "abc",
    )
    assert after["wilson95"] == pytest.approx([0.895, 0.996], abs=1e-3)
    assert after["return_mean"] == pytest.approx(0.98)
    assert summary["before"]["distinct_starts"] == 30
    assert (summary["env_steps"], summary["wall_s"], summary["assisted"]) == (5000, 90.0, 12)
    assert (tmp_path / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    shown = capsys.readouterr().out
    assert "49 of 50" in shown
    assert "90% to 100%" in shown
    assert sorted(path.name for path in tmp_path.iterdir()) == ["learning_curve.png", "summary.json"]


def test_a_task_without_success_is_told_by_its_returns(tmp_path):
    summary = report.write(
        tmp_path / "summary.json", **NOTHING, evaluations=[evaluation(None, 4)], curve=episodes(3, success=None)
    )
    assert summary["success_before"] is None
    assert (summary["eval"]["success"], summary["eval"]["return_mean"]) == (None, 0.0)
    assert "after training" in text(summary)
    assert "before training" not in text(summary)


def test_a_run_that_did_nothing_has_a_summary_too(tmp_path):
    summary = report.write(tmp_path / "summary.json", **NOTHING, evaluations=[], curve=[])
    assert summary["eval"] is None
    assert not (tmp_path / "learning_curve.png").exists()
    assert (
        report.write(tmp_path / "summary.json", **NOTHING, evaluations=[evaluation(None, 0)], curve=[])["eval"][
            "return_mean"
        ]
        is None
    )


def test_what_was_measured_is_not_lost_to_a_plan_that_measures_nothing(tmp_path):
    path = tmp_path / "summary.json"
    report.write(path, **NOTHING, evaluations=[evaluation(9, 10)], curve=[])
    report.write(path, **NOTHING, evaluations=[], curve=[])
    assert json.loads(path.read_text())["eval"]["success"] == 0.9


def test_an_assisted_success_is_drawn_as_a_failure():
    alone = [{**episode, "intervened": False} for episode in episodes(8)]
    failed = [{**episode, "success": episode["success"] and not episode["intervened"]} for episode in episodes(8)]
    assert report.picture(episodes(8)) == report.picture([{**e, "intervened": False} for e in failed])
    assert report.picture(episodes(8)) != report.picture(alone)
