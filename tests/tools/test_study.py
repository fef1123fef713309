"""Studies: their cells, what they make of them, and one that really runs."""

import json
import math
import re
import subprocess
import sys

import pytest

from tests.shared.models import CONFIG
from tools.studies.runs import T_95, Cells, mean_of

ROOT = CONFIG.parent


def study(*words):
    command = [sys.executable, str(ROOT / "tools/study.py"), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout


def test_a_study_goes_on_at_its_first_missing_cell_and_another_setting_is_another_cell(tmp_path):
    file, made = tmp_path / "new" / "cells.jsonl", []

    def measure():
        made.append(len(made))
        return {"successes": made[-1]}

    keys = [{"seed": seed, "updates": updates} for seed in (0, 1) for updates in (10, 20)]
    first = [Cells(file).get(key, measure) for key in keys[:3]]
    cells = Cells(file)
    assert [cells.get(key, measure) for key in keys[:3]] == first
    assert cells.get(keys[3], measure)["successes"] == 3
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert lines == cells.all
    assert all(line["commit"] for line in lines)


def test_an_interval_is_over_draws_and_says_nothing_of_a_single_one():
    center, low, high = mean_of([0.2, 0.4, 0.6])
    half = 4.303 * 0.2 / math.sqrt(3)
    assert (center, low, high) == pytest.approx((0.4, 0.4 - half, 0.4 + half))
    assert math.isnan(mean_of([0.5])[1])
    assert sorted(T_95, reverse=True) == list(T_95)


def test_the_table_of_hiors_is_what_its_cells_say(tmp_path):
    printed = study("hiors", "--out", tmp_path)
    assert (tmp_path / "curves.png").stat().st_size > 10_000
    page = (ROOT / "docs/hiors.md").read_text()
    for line in printed.splitlines()[2:8]:
        counts = re.findall(r"\d+(?: / \d+){4}", line)
        assert " | ".join(counts) in page
        shares = re.findall(r"-?\d+ (?:%|points)", line)
        assert all(share in page for share in shares)


@pytest.mark.slow
def test_a_study_of_heads_runs_the_product_and_keeps_what_it_found(tmp_path):
    words = ["heads", "--tasks", "wall", "--heads", "regression", "--seeds", 0, "--demonstrations", 2, "--updates", 3]
    words += ["--out", tmp_path / "runs", "--results", tmp_path / "cells.jsonl"]
    table = study(*words, "--network", "mlp", "--", "policy.horizon=4").splitlines()[-3:]
    (cell,) = (json.loads(line) for line in (tmp_path / "cells.jsonl").read_text().splitlines())
    assert (cell["head"], cell["updates"], cell["words"]) == ("regression", 3, ["policy.horizon=4"])
    assert table[-1].startswith(f"| regression | {cell['successes']} |")
    assert study(*words, "--", "policy.horizon=4").splitlines() == table, "nothing is measured twice"
