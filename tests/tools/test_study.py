"""Studies: their cells, what they make of them, and one that really runs."""

import json
import math
import re

import pytest

from serl_launcher.config import composed
from serl_launcher.training.plan_reader import plan_of
from tests.shared.common import ROOT
from tests.shared.here import start
from tests.shared.models import CONFIG
from tests.shared.tools import called
from tools.compare import trials
from tools.studies import (
    control,
    heads,
    improve,
    memory,
    offline,
    pick_cube,
    planning,
    planning_arm,
    runs,
    world_models,
)
from tools.studies.runs import T_95, Cells, mean_of, one_draw

EVALUATED = 4  # episodes of an evaluation here


def study(*words):
    status, said = called("study", *words)
    assert status == 0, said
    return said


@pytest.fixture
def brief(monkeypatch, one_thread, same_loggers):
    """Evaluations are short, and runs have no processes: those of the study of heads have."""

    def run(folder, *words, task="sim_arm", actor=()):
        start(folder, [f"task={task}", "log=false", *words, *actor])
        (folder / "server").unlink()  # its socket cannot be copied

    monkeypatch.setattr(memory, "run", run)
    for module in (runs, improve, offline):
        monkeypatch.setattr(module, "run", run)
        monkeypatch.setattr(module, "EVALUATED", EVALUATED)
        monkeypatch.setattr(module, "EVALUATE", runs.EVALUATE.replace("50", str(EVALUATED)))


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


LEFT = [
    "--task", "dobot_pnp", "--side", "left", "--actor", "task.env.space=ee_delta.right", "--draws", 3, "--band", 0, 1,
    "--demonstrations", 3, "--clone", 1000, "--updates", 4000, "--results", ROOT / "docs/studies/dobot_left.jsonl",
    "--ways", "cloning alone", "hi-ors", "human rows only", "human successes", "--", "policy.head.steps=4",
    "batch_size=64",
]  # fmt: skip


@pytest.mark.parametrize(("words", "ways"), [([], 6), (LEFT, 4)])
def test_the_tables_of_hiors_are_what_their_cells_say(words, ways, tmp_path):
    printed = study("hiors", "--out", tmp_path, *words)
    assert (tmp_path / "curves.png").stat().st_size > 10_000
    page = (ROOT / "docs/hiors.md").read_text()
    for line in printed.splitlines()[2 : 2 + ways]:
        counts = re.findall(r"\d+(?: / \d+)+", line)
        assert len(counts) == 5
        assert " | ".join(counts) in page
        shares = re.findall(r"-?\d+ (?:%|points)", line)
        assert all(share in page for share in shares)


@pytest.mark.parametrize(
    ("page", "studies"),
    [
        ("learning", [control, pick_cube]), ("planning", [planning, planning_arm]),
        ("world-models", [memory, world_models]),
    ],
)  # fmt: skip
def test_a_page_has_every_line_of_its_studies_tables(page, studies):
    text, lines = (ROOT / f"docs/{page}.md").read_text(), []
    for study in studies:
        cells = Cells(ROOT / f"docs/studies/{study.__name__.rpartition('.')[2]}.jsonl").all
        lines += study.table(cells, *([study.AT] if page == "learning" else [])) if cells else []
    assert [line for line in lines if line not in text] == []


@pytest.mark.parametrize(
    ("words", "steps", "episodes"),
    [
        (["task=dmc", *control.words("cartpole-balance", 3, (1, 2.5))], ["900", "1400"], 10),
        (["task=metaworld", *control.words("door-close-v3", 3, (1, 2.5))], ["900", "1400"], 10),
        (["task=pick_cube", *pick_cube.words(3, (1, 2.5))], ["1000", "1500"], 30),
    ],
)
def test_a_studys_words_are_a_plan_that_practises_and_evaluates_in_turn(words, steps, episodes):
    phases = plan_of(composed(CONFIG, ["learner=true", *words])).phases
    parts = [name for name in phases if name != "demonstrate"]
    assert parts == ["practise_1", "evaluate_1", "practise_2", "evaluate_2"]
    assert [phases[name].until for name in parts[::2]] == [(f"env_steps >= {each}",) for each in steps]
    assert [phases[name].episodes for name in parts[1::2]] == [episodes] * 2


@pytest.mark.slow
def test_a_study_of_heads_runs_the_product_and_keeps_what_it_found(tmp_path, monkeypatch):
    for module in (runs, heads):
        monkeypatch.setattr(module, "EVALUATED", EVALUATED)
    words = ["heads", "--tasks", "wall", "--heads", "regression", "--seeds", 0, "--demonstrations", 2, "--updates", 3]
    words += ["--out", tmp_path / "runs", "--results", tmp_path / "cells.jsonl"]
    table = study(*words, "--network", "mlp", "--", "policy.horizon=4").splitlines()[-3:]
    (cell,) = (json.loads(line) for line in (tmp_path / "cells.jsonl").read_text().splitlines())
    assert (cell["head"], cell["updates"], cell["words"]) == ("regression", 3, ["policy.horizon=4"])
    assert table[-1].startswith(f"| regression | {cell['successes']} |")
    assert study(*words, "--", "policy.horizon=4").splitlines() == table, "nothing is measured twice"


@pytest.mark.slow
@pytest.mark.usefixtures("brief")
@pytest.mark.parametrize(
    ("name", "ways", "numbers", "found"),
    [
        ("improve", ["recap"], ["--clone", 3, "--updates", 25], ["successes", "env_steps", "draw"]),
        ("offline", ["recap"], ["--episodes", 2, "--updates", 6], ["given_successes", "rank_correlation", "draw"]),
    ],
)
def test_a_study_of_what_improves_a_clone_runs_the_product(name, ways, numbers, found, tmp_path):
    words = [name, "--seeds", 5, "--demonstrations", 2, "--ways", *ways, *numbers]
    table = study(*words, "--out", tmp_path / "runs", "--results", tmp_path / "cells.jsonl")
    cells = [json.loads(line) for line in (tmp_path / "cells.jsonl").read_text().splitlines()]
    assert [cell["way"] for cell in cells] == ways
    assert all(cell[each] is not None for cell in cells for each in found)
    assert all(f"| {way} |" in table for way in ways)


@pytest.mark.slow
@pytest.mark.usefixtures("brief")
def test_the_study_of_memory_evaluates_the_same_weights_with_and_without_it(tmp_path):
    words = ["memory", "--seeds", 5, "--random", 80, "--steps", 110, "--starts", EVALUATED]
    words += ["--out", tmp_path / "runs", "--results", tmp_path / "cells.jsonl"]
    table = study(*words, "--", "algo.deter=16", "algo.units=8", "algo.length=4", "algo.imagined=2").splitlines()[-3:]
    (cell,) = (json.loads(line) for line in (tmp_path / "cells.jsonl").read_text().splitlines())
    assert [f"| {cell[name]} |" in line for name, line in zip(memory.TITLES, table, strict=True)] == [True] * 3
    kept, reset = (tmp_path / f"runs/seed-5/{name}" for name in ("dreamer", "reset"))
    assert trials(kept).keys() == trials(reset).keys()
    assert {file.name for file in (kept / "weights").iterdir()} == {file.name for file in (reset / "weights").iterdir()}


def test_cells_that_began_with_different_data_are_not_compared():
    cells = [
        {"seed": seed, "way": way, "draw": draw} for seed, way, draw in ((0, "a", "x"), (0, "b", "x"), (1, "a", "y"))
    ]
    one_draw(cells)
    with pytest.raises(ValueError, match=r"seed 1 began with different data.*'b': 'x'"):
        one_draw([*cells, {"seed": 1, "way": "b", "draw": "x"}])
