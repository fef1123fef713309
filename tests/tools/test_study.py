"""Studies: their cells, what they make of them, and some that really run."""

import json
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest

from serl_launcher.config import composed
from serl_launcher.training.plan_reader import plan_of
from tests.shared.common import ROOT
from tests.shared.here import start
from tests.shared.models import CONFIG
from tests.shared.tools import called
from tools.compare import trials
from tools.studies import act, curves, effort, improve, runs, served, tasks
from tools.studies.cells import Cells, age, one_draw, what_counts
from tools.study import STUDIES

PAGES = {
    "evidence/learning": ["control", "pick_cube", "frozen"], "evidence/planning": ["planning", "planning_arm"],
    "guides/verdicts": ["verdicts"], "evidence/world-models": ["memory", "world_models"],
    "evidence/improve": ["improve", "offline"], "guides/rewards": ["reward"], "guides/openpi": ["served"],
    "evidence/effort": ["effort --task stick-pull"],
}  # fmt: skip
NUMBERS = {
    "evidence/hiors": ["hiors", "dobot_pnp", "dobot_left"], "evidence/heads": ["heads"], "guides/robomimic": ["lift"],
}  # fmt: skip


def study(*words):
    status, said = called("study", *words)
    assert status == 0, said
    return said


def finished(name, out):
    """The report of a study's finished cells, those of all ways if they are one table."""
    name, *words = name.split()
    ways = list(STUDIES[name].ways)[bool(STUDIES[name].goes_on) :] if name not in ("hiors", "reward") else []
    return study(name, *words, "--finished", "--out", out, *(["--ways", *ways] if len(ways) > 1 else []))


@pytest.fixture
def here(monkeypatch, one_thread, same_loggers):
    """Runs have no processes; those of the study of heads have."""

    def run(folder, *words, task="sim_arm", actor=(), example=""):
        start(folder, [f"task={task}", "log=false", *words, *actor])
        (folder / "server").unlink(missing_ok=True)  # its socket cannot be copied

    monkeypatch.setattr(runs, "run", run)


def test_a_study_goes_on_at_its_first_missing_cell_and_another_setting_is_another_cell(tmp_path):
    file, made = tmp_path / "new" / "cells.jsonl", []

    def measure():
        made.append(len(made))
        return {"successes": made[-1]}

    keys = [{"seed": seed, "updates": updates} for seed in (0, 1) for updates in (10, 20)]
    first = [Cells(file, {}).get(key, measure) for key in keys[:3]]
    cells = Cells(file, {"starts": 50})
    assert [cells.get(key, measure) for key in keys[:3]] == first
    assert cells.get({**keys[0], "starts": 50}, measure) == first[0], "what it does not name is as usual"
    assert cells.get(keys[3], measure)["successes"] == 3
    assert cells.get({**keys[0], "starts": 10}, measure)["successes"] == 4
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert lines == cells.all
    assert all(line["commit"] and line["date"] for line in lines)
    assert len({line["digest"] for line in lines}) == 5


@pytest.mark.parametrize("page", PAGES)
def test_a_page_has_every_line_of_its_studies_reports(page, tmp_path):
    text = (ROOT / f"docs/{page}.md").read_text()
    lines = [line for name in PAGES[page] for line in finished(name, tmp_path).splitlines()]
    lines = [line for line in lines if page != "evidence/improve" or line.startswith("|")]
    assert len(lines) > 3
    assert [line for line in lines if line not in text] == []


@pytest.mark.parametrize("page", NUMBERS)
def test_a_page_has_every_number_of_its_studies_tables(page, tmp_path):
    text = (ROOT / f"docs/{page}.md").read_text()
    for name in NUMBERS[page]:
        table = [line for line in finished(name, tmp_path).splitlines()[2:] if line.startswith("|")]
        assert len(table) > 1
        for line in table:
            counts, shares = re.findall(r"\d+(?: / \d+)+", line), re.findall(r"-?\d+ (?:%|points)[^|]*(?= \|)", line)
            assert counts
            assert shares
            assert " | ".join(counts) in text
            assert all(share in text for share in shares)
        (age,) = [line for line in finished(name, tmp_path).splitlines() if line.startswith("Measured ")]
        assert age in text
    if page == "evidence/hiors":
        assert (tmp_path / "curves.png").stat().st_size > 10_000


def test_each_cell_says_when_and_by_what_code_it_was_measured_or_that_this_is_lost():
    """The report says so, too, and the pages have each line of it."""
    files = sorted((ROOT / "docs/evidence/studies").glob("*.jsonl"))
    cells = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    assert len(cells) > 100
    assert all(len(cell["date"]) == 10 and ("digest" in cell or cell["history"] == "lost") for cell in cells)
    assert age([{"date": "2026-11-02"}]) == "Measured 2026-11-02."
    assert age([{"date": "2026-11-02", "history": "lost"}, {"date": "2026-10-30"}]) == (
        "Measured 2026-10-30 to 2026-11-02. History lost: nobody can look up the code that measured 1 of 2 cells."
    )


def cell(starts, **said):
    return SimpleNamespace(seed=3, at=(1, 3), starts=starts, **said)


@pytest.mark.parametrize(
    ("words", "steps", "episodes"),
    [
        (["task=dmc", *curves.control_words(cell(10, task="cartpole-balance"))], ["900", "1900"], 10),
        (["task=metaworld", *curves.control_words(cell(10, task="door-close-v3"))], ["900", "1900"], 10),
        (["task=pick_cube", *curves.cube_words(cell(30))], ["1000", "2000"], 30),
    ],
)
def test_a_studys_words_are_a_plan_that_practises_and_evaluates_in_turn(words, steps, episodes):
    phases = plan_of(composed(CONFIG, ["learner=true", *words])).phases
    parts = [name for name in phases if name != "demonstrate"]
    assert parts == ["practise_1", "evaluate_1", "practise_2", "evaluate_2"]
    assert [phases[name].until for name in parts[::2]] == [(f"env_steps >= {each}",) for each in steps]
    assert [phases[name].episodes for name in parts[1::2]] == [episodes] * 2


@pytest.mark.parametrize("shown", ["demo", "good"])
@pytest.mark.parametrize(
    ("way", "parts", "updates"),
    [
        (improve.CONTROL, ["practise_1"], [100]), ("rejection", ["practise_1"], [100]),
        ("qc", ["practise_1", "practise_2"], [20, 80]),
    ],
)  # fmt: skip
def test_a_study_of_what_improves_a_clone_evaluates_before_practice_and_after_each_fifth_of_it(
    way, parts, updates, shown
):
    words = ["learner=true", "task=sim_arm", *improve.WAYS[way], *improve.phases(way, 100, 4, shown)]
    words += [tasks.GOOD, *improve.CLONE_GOOD] if shown == "good" else []
    phases = plan_of(composed(CONFIG, words)).phases
    assert list(phases)[:2] == ["clone", "evaluate_0"]
    assert [name for name in phases if name.startswith("practise")] == parts
    assert [phases[name].until for name in parts] == [(f"updates >= {count}",) for count in updates]
    within = phases[parts[-1]].evaluate
    assert (within.every, within.unit, within.phase.episodes, phases["evaluate_1"].episodes) == (20, "updates", 4, 4)
    (cloned,), (practised,) = phases["clone"].updates, phases[parts[-1]].updates[:1]
    assert set(cloned.data) == {shown}
    assert shown in practised.data


def measured(folder, *words, small=()):
    """What a study prints, and its cells; small: words of its learners."""
    words += ("--starts", 4, "--out", folder / "out", "--results", folder / "cells.jsonl")
    said = [line for line in study(*words, "--", *small).splitlines() if not line.startswith("Measured ")]
    return said, [json.loads(line) for line in (folder / "cells.jsonl").read_text().splitlines()]


@pytest.mark.nightly
def test_a_study_of_heads_runs_the_product_and_keeps_what_it_found(tmp_path):
    words = ["heads", "--ways", "wall/regression", "--seeds", 0, "--demonstrations", 2, "--updates", 3]
    said, (cell,) = measured(tmp_path, *words, small=["policy.horizon=4"])
    assert (cell["head"], cell["updates"], cell["words"]) == ("regression", 3, ["policy.horizon=4"])
    assert said[-1].startswith(f"| wall/regression | {cell['successes']} |")
    assert measured(tmp_path, *words, small=["policy.horizon=4"]) == (said[-3:], [cell]), "nothing is measured twice"


nightly, slow = pytest.mark.nightly, pytest.mark.slow


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("name", "ways", "numbers", "found"),
    [
        pytest.param("improve", ["recap"], "--cloned 3 --updates 25", ["env_steps", "draw"], marks=nightly),
        pytest.param(
            "improve", ["rejection"], "--cloned 3 --updates 25 --task assembly", ["env_steps", "draw"], marks=nightly
        ),
        pytest.param("offline", ["recap"], "--episodes 2 --updates 6", ["rank_correlation", "draw"], marks=slow),
        pytest.param(
            "dobot_left", ["cloning alone", "human successes"],
            "--cloned 4 --updates 8 --task sim_arm --actor task.env.space=ee_delta", ["env_steps"], marks=nightly,
        ),
        pytest.param(
            "served", ["server alone", "residual"], "--cloned 3 --updates 25", ["env_steps", "draw"], marks=nightly
        ),
    ],
)  # fmt: skip
def test_a_study_of_what_improves_a_clone_runs_the_product(name, ways, numbers, found, tmp_path, monkeypatch):
    monkeypatch.setitem(served.STUDIES, "served", replace(STUDIES["served"], goes_on=bool))  # whatever its clone does
    monkeypatch.setitem(tasks.TASKS, "assembly", ("", []))  # the real one has a Python of its own
    words = [name, "--seeds", 5, "--demonstrations", 2, "--ways", *ways, *numbers.split()]
    small = ["plan.phases.warm_up.until=['updates >= 20']"] if name == "served" else []
    said, cells = measured(tmp_path, *words, small=small)
    cells = [cell for cell in cells if cell["way"] != "clone"]
    assert [cell["way"] for cell in cells] == ways
    assert all(cell[each] is not None for cell in cells for each in ["successes", *found])
    assert all(any(line.startswith(f"| {way} |") for line in said) for way in ways)


@pytest.mark.nightly
@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("name", "ways", "numbers"),
    [
        ("frozen", ["trained convolutions", "a frozen backbone"], "--at 1"),
        ("act", [act.THEIRS, act.OURS], "--demonstrations 2 --updates 3"),
        ("act_more", [act.MORE, act.HIORS], "--demonstrations 2 --updates 3 --practice 12"),
    ],
)  # fmt: skip
def test_a_study_with_cameras_runs_the_product(name, ways, numbers, tmp_path):
    small = ["batch_size=4"] if name == "frozen" else []
    said, cells = measured(tmp_path, name, "--seeds", 5, "--ways", *ways, *numbers.split(), small=small)
    assert [line.split(" | ")[0] for line in said[-len(ways) :]] == [f"| {way}" for way in ways]
    assert len({cell["draw"] for cell in cells}) == 1


@pytest.mark.nightly
@pytest.mark.usefixtures("here")
def test_the_study_of_effort_gives_each_way_as_many_human_rows_and_updates(tmp_path, monkeypatch):
    monkeypatch.setitem(tasks.TASKS, "so101", ("", ["task=sim_arm"]))  # the real one has a Python of its own
    monkeypatch.setitem(effort.STUDIES, "effort", replace(STUDIES["effort"], goes_on=bool))  # whatever its clone does
    monkeypatch.setitem(STUDIES, "effort", effort.STUDIES["effort"])
    words = ["effort", "--seeds", 5, "--demonstrations", 2, "--cloned", 3, "--rows", 20, 60, "--updates", 150]
    said, (clone, *cells) = measured(tmp_path, *words)
    assert (clone["way"], len(clone["successes"])) == (effort.CLONE, 1)
    assert [cell["way"] for cell in cells] == list(effort.WAYS)
    assert len({cell["draw"] for cell in cells}) == 1
    (folder,) = (tmp_path / "out").iterdir()
    for cell in cells:
        assert (len(cell["successes"]), cell["all_updates"]) == (2, 3 + 2 * 150)
        wanted = {effort.LONGER: (), effort.FRESH: (60,)}.get(cell["way"], (20, 60))
        assert all(rows - 20 < found < rows + 100 for rows, found in zip(wanted, cell["human_rows"], strict=True))
        shown = cell["way"] in (effort.LONGER, effort.MORE, effort.FRESH)
        assert (cell["env_steps"] == cell["driven_by_the_operator"]) == shown
        made, begun = (folder / each.replace(" ", "-") for each in (cell["way"], effort.CLONE))
        assert trials(made).keys() == trials(begun).keys(), "all have the same starts"
    assert all(any(line.startswith(f"| {way} |") for line in said) for way in effort.WAYS)


@pytest.mark.nightly
@pytest.mark.usefixtures("here")
def test_the_study_of_memory_evaluates_the_same_weights_with_and_without_it(tmp_path):
    words = ["memory", "--seeds", 5, "--random", 80, "--steps", 110]
    small = ["algo.deter=16", "algo.units=8", "algo.length=4", "algo.imagined=2"]
    said, (cell,) = measured(tmp_path, *words, small=small)
    for (name, title), line in zip(STUDIES["memory"].parts.items(), said[-3:], strict=True):
        assert line.startswith(f"| {title} | {cell[name]} |")
    (folder,) = (tmp_path / "out").iterdir()
    kept, reset = (folder / name for name in ("dreamer", "reset"))
    assert trials(kept).keys() == trials(reset).keys()
    assert {file.name for file in (kept / "weights").iterdir()} == {file.name for file in (reset / "weights").iterdir()}


def test_cells_that_began_with_different_data_are_not_compared():
    rows = {"a": [{"seed": 0, "draw": "x"}, {"seed": 1, "draw": "y"}], "b": [{"seed": 0, "draw": "x"}]}
    one_draw(0, rows)
    one_draw(1, rows)
    rows["b"].append({"seed": 1, "draw": "x"})
    with pytest.raises(ValueError, match=r"seed 1 began with different data.*'b': 'x'"):
        one_draw(1, rows)


@pytest.mark.parametrize(("kind", "told", "same", "other"), [
    ("py", '"""A."""\ndef f():\n    """B."""\n    return 1', "# c\ndef f():\n    return 1", "def f():\n    return 2"),
    ("yaml", "lr: 1 # of Adam", "# how fast\nlr: 1", "lr: 2"),
])  # fmt: skip
def test_a_digest_of_code_counts_what_a_machine_reads(tmp_path, kind, told, same, other):
    def counts(text):
        (file := tmp_path / f"x.{kind}").write_text(text)
        return what_counts(file)

    assert counts(told) == counts(same) != counts(other)
