"""The tool that gives the commands of README and docs tells of one that is wrong, and of an exception that is none."""

import re

import pytest

from tests.shared.common import CONFIG
from tools import readme


@pytest.fixture
def page(tmp_path):
    """page(text) -> a page with it."""

    def page(text, name="PAGE.md"):
        (tmp_path / name).write_text(text)
        return tmp_path / name

    return page


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
