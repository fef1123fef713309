"""tools/compare.py: what two evaluations of the same starts say about two policies."""

import json
import math

import pytest

from serl_launcher.training import report
from tests.shared.tools import called, typed


def run(folder, outcomes, *, file="summary.json", starts=0, judged=True):
    """A run whose evaluation had these outcomes, at starts from that one on; written as a learner writes it."""
    folder.mkdir(exist_ok=True)
    trials = [(f"{starts + i:016x}", bool(won) if judged else None, float(won)) for i, won in enumerate(outcomes)]
    evaluation = {
        "episodes": len(trials), "distinct_starts": len(trials), "returns": [total for *_, total in trials],
        "successes": sum(outcomes) if judged else None, "trials": trials,
    }  # fmt: skip
    report.write(
        folder / file, env_steps=1, episodes=1, assisted=0, updates=1, wall_s=1.0, evaluations=[evaluation],
        weights_sha256="", curve=[],
    )  # fmt: skip
    return folder


def test_two_policies_are_compared_start_by_start(tmp_path):
    one = run(tmp_path / "one", [1] * 30 + [0] * 20)
    two = run(tmp_path / "two", [1] * 28 + [0] * 2 + [1] * 10 + [0] * 10)
    status, text = typed("compare", one, two)
    assert status == 0
    assert "50 and 50 starts, 50 of them shared" in text
    assert "successes: 30 and 38 of 50" in text
    p = 2 * sum(math.comb(12, k) for k in range(3)) / 2**12
    assert f"only the first: 2, only the second: 10; McNemar: p = {p:.3f}" in text
    found = json.loads(called("compare", one, two, one, "--json")[1])
    more, less = 11 / 52, 3 / 52
    half = 1.959964 * math.sqrt((more + less - (more - less) ** 2) / 52)
    assert found[0]["interval"] == pytest.approx([more - less - half, more - less + half])
    assert found[0]["difference"] == pytest.approx(0.16)
    assert (found[1]["difference"], found[1]["p"], found[1]["gained"]) == (0, 1, 0), "a run is no better than itself"
    lines = (one / "summary.json").read_text().splitlines()
    assert len(lines) < 80, "a trial is one line"


def test_only_shared_starts_count_and_the_newest_evaluation_does(tmp_path):
    one, two = run(tmp_path / "one", [0] * 10), run(tmp_path / "two", [1] * 10, starts=6)
    run(one, [1] * 10, file="evaluation.json")
    text = called("compare", one, two)[1]
    assert "10 and 10 starts, 4 of them shared" in text
    assert "successes: 4 and 4 of 4" in text
    assert "successes: 0 and 4 of 4" in called("compare", one / "summary.json", two)[1]


def test_returns_are_compared_where_nobody_judges(tmp_path):
    one, two = run(tmp_path / "one", [0, 1, 0], judged=False), run(tmp_path / "two", [1, 1, 1], judged=False)
    text = called("compare", one, two)[1]
    assert "difference of returns: +0.667" in text
    assert "successes" not in text


def test_what_cannot_be_compared_is_said(tmp_path):
    one = run(tmp_path / "one", [1, 0])
    for other, told in (
        (run(tmp_path / "two", [1], starts=5), "share no start: compare runs of the same simulation"),
        (tmp_path / "none", "none has no evaluation: run `plan=evaluate run_dir="),
        (run(tmp_path / "old", []), "does not tell its starts"),
    ):
        status, text = called("compare", one, other)
        assert status == 1
        assert told in text
    assert called("compare", one)[0] == 2
