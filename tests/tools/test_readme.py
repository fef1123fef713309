"""The tool that gives the commands of README and docs: what it finds there, and that it tells of one that is wrong."""

import re
import shlex
from pathlib import Path

import pytest

from tests.shared.common import CONFIG
from tools import readme

PAGE = """
# A page
```bash
./start.sh seed=1   # a comment
tools/x.py --a \\
    --b
number=$(echo 3)
.venv/bin/python -c "$number"
```
| want | command |
|---|---|
| this | `./start.sh task=fake`, `seed=1` |

Say `. examples/install.sh --extra data` and `kill`.

## A file: `config/task/mine.yaml`
```yaml
name: mine
```
"""


@pytest.fixture
def page(tmp_path):
    """page(text) -> a page with it."""

    def page(text, name="PAGE.md"):
        (tmp_path / name).write_text(text)
        return tmp_path / name

    return page


def test_commands_are_lines_of_bash_and_code_that_begins_with_a_program(page):
    found = readme.read(page(PAGE))
    assert [command.text for command in found] == [
        "./start.sh seed=1", "tools/x.py --a --b", 'number=$(echo 3); .venv/bin/python -c "$number"',
        "./start.sh task=fake", ". examples/install.sh --extra data", "name: mine\n",
    ]  # fmt: skip
    assert found[-1].file == "config/task/mine.yaml"
    assert [command.line for command in found] == [4, 6, 8, 12, 14, 17]


def test_a_page_says_itself_how_a_command_is_made_short(page):
    block = "<!-- short: --rounds 1 -->\n```bash\ntools/x.py --rounds 20\n```\n```bash\ntools/x.py --rounds 20\n```\n"
    line = "Say `./start.sh a=1 b=2` <!-- short: a=3 \"c=['x > 4']\" -->, or `./start.sh a=1`."
    reader = readme.Reader(Path(), 7000, clean=True)
    given = [reader.shortened(command.text, command.short) for command in readme.read(page(block + line))]
    assert given[:2] == [f".venv/bin/python tools/x.py --rounds 20{short}" for short in (" --rounds 1", "")]
    said = [*readme.SHORT, "port=7000", "inference_port=7001"]
    assert shlex.split(given[2]) == ["./start.sh", "b=2", "a=3", "c=['x > 4']", *said]
    assert shlex.split(given[3]) == ["./start.sh", "a=1", *said]


@pytest.mark.slow
def test_a_row_that_is_made_wrong_on_purpose_is_reported(page, capsys):
    row = ".venv/bin/python tools/plan.py show quick{} task=fake"
    right, wrong = (page(f"| `{row.format(end)}` |\n", name) for end, name in (("start", "r.md"), ("strat", "w.md")))
    assert readme.main(["--page", str(right), "--page", str(wrong)]) == 1
    said = capsys.readouterr().out
    assert f"FAILED   w.md:1  {row.format('strat')}" in said
    assert "did you mean 'quickstart'" in said
    assert "FAILED   r.md" not in said
    assert "2 commands, 1 failed" in said


@pytest.mark.slow
def test_the_first_commands_are_those_that_are_given(page, capsys):
    text = "```bash\n./test.sh\n.venv/bin/python -V\n.venv/bin/python -c 0\n.venv/bin/python -c wrong\n```\n"
    assert readme.main(["--page", str(page(text)), "--first", "2"]) == 0
    assert "2 commands, 0 failed" in capsys.readouterr().out


@pytest.mark.slow
def test_what_a_page_has_not_named_yet_cannot_be_imported(page, capsys):
    tries = '.venv/bin/python -c "import av"'
    pytest.importorskip("av")
    text = f"```bash\n{tries}\n. examples/install.sh --extra data\n{tries}\n```\n"
    assert readme.main(["--page", str(page(text))]) == 1
    said = capsys.readouterr().out
    assert f"FAILED   PAGE.md:2  {tries}" in said
    assert "3 commands, 1 failed" in said


def test_an_exception_that_fits_no_command_is_an_error(monkeypatch, capsys):
    assert readme.main(["--list"]) == 0
    monkeypatch.setitem(readme.NOT_RUN, r"\./gone\.sh", "was there once")
    assert readme.main(["--list"]) == 1
    assert r"the exception '\\./gone\\.sh' fits no command: remove it" in capsys.readouterr().out


def test_every_condition_that_a_copys_plans_meet_early_is_one_of_a_plan(tmp_path):
    plans = "".join(path.read_text() for path in (CONFIG / "plan").glob("*.yaml"))
    assert [condition for condition in readme.EARLY if not re.search(condition, plans)] == []
    copy = readme.copied(tmp_path, clean=True) / "config/plan"
    early = "".join(path.read_text() for path in copy.glob("*.yaml"))
    assert {int(updates) for updates in re.findall(r"updates >= (\d+)", early)} == {40}


def test_each_side_gets_the_other_one():
    reader = readme.Reader(Path(), 7000, clean=True)
    learner = "examples/experiments/sim_arm/run_learner.sh keys=keys run_dir=runs/a 'plan.x=[1, 2]' port=7000"
    assert reader.partner(learner, "learner").split()[1:] == ["run_dir=runs/a", "port=7000", "key=keys/left.key"]
    actor = reader.partner("examples/experiments/sim_arm/run_actor.sh name=second task=fake", "actor")
    assert actor.startswith("examples/experiments/sim_arm/run_learner.sh task=fake max_env_steps=")
