"""Whoever reads docs/guides/operations.md, "I want to ...", says its words: each row of the table is done as it stands.

Numbers of steps and episodes are made smaller, and folders are those of the test.
"""

import json
import re
import shutil
import subprocess
import sys

import pytest
from serl_client.errors import Refused

from tests.shared import oracle
from tests.shared.common import ROOT
from tests.shared.here import start
from tests.shared.tools import typed

from .test_plan_runs import PRACTICE

PAGE = (ROOT / "docs/guides/operations.md").read_text()
TABLE = PAGE.partition("## I want to\n")[2].partition("\n### ")[0]
ROWS = dict(re.findall(r"^\| ([^|]+) \| `([^|]+)` \| [^|]+ \|$", TABLE, re.MULTILINE))  # what one wants: what one says
SMALLER = {"30000": "250", "5000": "120", "20000": "180", "eval_episodes=100": "eval_episodes=3"}
ELSEWHERE = {  # rows that another test does: where
    "more rounds of what is repeated": (
        "tests/programs/test_run.py",
        "+plan.repeat={phases: [practise, evaluate], times: 3}",
    ),
    "to begin with a dataset": ("docs/guides/operations.md", ROWS["to begin with a dataset"].partition(" ")[2]),
    "a newer version": ("tests/programs/test_old_run.py", "old_run.tar.xz"),
}
AS_PROGRAMS = {"more actors", "another number of GPUs", "to stop for lunch", "to throw a bad episode away",
               "another name for the robot"}  # fmt: skip
FIRST = [*PRACTICE, "max_env_steps=150", "batch_size=16"]


def words_of(wish, run, other=None):
    """The words of a row, with this run for the page's, and the folder `other` for any other one."""
    said = ROWS[wish]
    for large, small in SMALLER.items():
        said = said.replace(large, small)
    return re.sub(r"\bruns/(?!sim_arm)\w+", str(other), said.replace("runs/sim_arm", str(run))).split()


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A run that is over."""
    folder = tmp_path_factory.mktemp("done")
    start(folder, FIRST)
    return folder


@pytest.fixture
def run(done, tmp_path):
    return shutil.copytree(done, tmp_path / "run", ignore=shutil.ignore_patterns("server*"))


def summary_of(folder):
    return json.loads((folder / "summary.json").read_text())


CHANGED = {  # what the summary says of it
    "another learning rate": "algo.learning_rate: 0.0001, 0.001",
    "other batches": "batch_size: 64, 16",
    "more or fewer updates per step": "'updates_per_step': 2",
    "to train longer": "env_steps >= 250",
    "to train less": "",
    "another evaluation": "",
}
MADE_ANEW = {"another discount, another algorithm": 150, "a smaller disk": 180}  # capacity of its replay buffer


@pytest.mark.slow
@pytest.mark.parametrize("wish", CHANGED)
def test_what_may_change_is_changed_by_the_same_command_with_these_words(run, wish):
    before, is_rest = summary_of(run), wish in ("to train less", "another evaluation")
    start(run, [*FIRST, *words_of(wish, run), *words_of("to train longer", run) * (not is_rest)])
    after = summary_of(run)
    assert all(CHANGED[wish] in change["what"] for change in after["changes"])
    assert len(after["changes"]) == (after["env_steps"] > before["env_steps"]) == (not is_rest)
    assert (run / "evaluation.json").exists() == (wish == "another evaluation")


@pytest.mark.slow
@pytest.mark.parametrize("wish", MADE_ANEW)
def test_what_changes_the_meaning_of_what_is_there_begins_a_run_with_its_weights(run, tmp_path, wish):
    *words, folder = words_of(wish, run, tmp_path / "other")
    start(tmp_path / "other", [*FIRST, *words])
    assert folder == f"run_dir={tmp_path / 'other'}"
    assert oracle.whole(tmp_path / "other/store").sources["online"]["capacity"] == MADE_ANEW[wish]
    assert summary_of(tmp_path / "other")["updates"] > 0


@pytest.mark.slow
def test_what_the_weights_have_no_place_for_is_refused_and_begins_anew_elsewhere(run, tmp_path):
    *words, _ = words_of("other cameras, other sizes of networks", run, tmp_path / "other")
    with pytest.raises(Refused, match=r"policy.hidden: \[64, 64\], \[16, 16\].* begin anew with another run_dir"):
        start(run, [*FIRST, *words])
    start(tmp_path / "other", [*FIRST, *words])
    assert summary_of(tmp_path / "other")["updates"] > 0


@pytest.mark.slow
def test_a_folder_is_moved_and_goes_on(run, tmp_path):
    words = words_of("to move or copy the folder", run, tmp_path / "elsewhere")
    run.rename(tmp_path / "elsewhere")
    start(tmp_path / "elsewhere", [*FIRST, *words_of("to train longer", run)])
    assert words == [f"run_dir={tmp_path / 'elsewhere'}"]
    assert summary_of(tmp_path / "elsewhere")["env_steps"] >= 250


@pytest.mark.nightly
def test_actors_come_the_robot_is_renamed_a_bad_episode_goes_ranks_change_and_lunch_is_had(programs):
    words = [*FIRST, "max_env_steps=100000", "plan.phases.practise.until=[operator]"]
    learner, first = (programs.start(side, *words) for side in ("learner", "actor"))
    others = [programs.start("actor", *words, words_of("more actors", "")[1].replace("second", name)) for name in "ab"]
    programs.until(lambda: len(sessions(programs)) == 3)
    before = programs.practised(100)
    bad = next(iter(before.episodes))
    status, said = typed(*tool(programs, "to throw a bad episode away", bad))
    assert status == 0, said
    subprocess.run([sys.executable, *stop_words(programs)], check=True, cwd=ROOT)
    assert programs.status(learner) == 0
    first.terminate()
    programs.status(first)
    learner = programs.start("learner", *words, *words_of("another number of GPUs", ""))
    renamed = programs.start("actor", *words, *words_of("another name for the robot", ""))
    programs.until(lambda: "left_arm" in sessions(programs))
    programs.practised(before.practised + 50)
    programs.order("next")
    assert [programs.status(process) for process in (learner, renamed, *others)] == [0] * 4
    assert oracle.whole(programs.run_dir / "store").episodes[bad]["discard"]
    assert "\nranks: 2\n" in (programs.run_dir / "config.yaml").read_text()


def sessions(programs):
    """The actors that have brought steps."""
    return {name.rsplit("-", 2)[0] for name in programs.facts().episodes}


def tool(programs, wish, episode):
    """(name of the tool, its words) of a row."""
    python, name, *words = words_of(wish, programs.run_dir)
    assert (python, name) == (".venv/bin/python", "tools/label.py")
    return "label", *[word.replace("EPISODE", episode) for word in words]


def stop_words(programs):
    python, *words = words_of("to stop for lunch", programs.run_dir)
    assert python == ".venv/bin/python"
    return words


def test_every_row_is_done_by_a_test():
    here = {*CHANGED, *MADE_ANEW, *AS_PROGRAMS, "other cameras, other sizes of networks", "to move or copy the folder"}
    assert len(ROWS) >= 16
    assert ROWS.keys() == here | ELSEWHERE.keys()
    for file, text in ELSEWHERE.values():
        assert text in (ROOT / file).read_text()
