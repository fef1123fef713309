"""What the documents name is there."""

import re
import shlex
import shutil
import signal
import subprocess
import sys
from functools import cache

import pytest
from serl_client.errors import ConfigError

from serl_launcher.config import composed
from serl_launcher.training.plan_reader import plan_of
from tests.shared.common import CONFIG, ROOT
from tests.shared.dobots import address
from tools import check_robot, readme

DOCUMENTS = readme.pages(ROOT)


def test_every_test_that_the_table_of_faults_names_exists():
    rows = [line for line in (ROOT / "docs/evidence/faults.md").read_text().splitlines() if line.startswith("| ")][1:]
    there = {
        name for file in (ROOT / "tests").rglob("*.py") for name in re.findall(r"def (test_\w+)", file.read_text())
    }
    for row in rows:
        named = re.findall(r"`(test_\w+)`", row)
        assert named, row
        assert not set(named) - there


@cache
def anchors(page):
    """What a link into a page may name behind its #: GitHub's form of each heading."""
    headings = re.findall(r"^#+ (.*)", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", [*DOCUMENTS, *sorted(ROOT.glob("C*.md"))], ids=lambda path: path.name)
def test_every_tool_page_and_heading_that_a_document_names_exists(document):
    text = document.read_text()
    files = {ROOT / name for name in re.findall(r"\b(?:tools|tests|examples)/[\w/]+\.(?:py|sh)\b", text)}
    files |= {document.parent / name for name in re.findall(r'<img src="([^"]+)"', text)}
    links = {(document.parent / path if path else document, anchor)
             for path, anchor in re.findall(r"\]\(((?!http)[^)#]*)#?([^)]*)\)", text)}  # fmt: skip
    files |= {path for path, _ in links}
    assert not [path for path in files if not path.exists()]
    assert not [link for link in links if link[1] and link[1] not in anchors(link[0])]


RUN = re.compile(r"(?:[A-Z]+=\S+ )*(?:\./start\.sh|\S+/run_(?:learner|actor)\w*\.sh)( .*)?")
ITS_OWN = {"task=my_arm", "task=my_dobot"}  # their pages bring the yaml


@pytest.mark.slow
@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_each_run_of_a_page_has_a_plan_that_holds(document, tmp_path):
    wrong = []
    for run in filter(None, (RUN.fullmatch(command.text) for command in readme.read(document))):
        words = shlex.split(run[1] or "")
        try:
            if not ITS_OWN & {*words}:
                plan_of(composed(CONFIG, ["learner=true", "task=sim_arm", *words, f"run_dir={tmp_path}"]))
        except ConfigError as error:
            wrong.append(f"{run[0]}: {error}")
    assert wrong == []


@pytest.mark.slow
def test_the_dobot_arm_of_the_page_on_robots_is_checked_against_a_simulated_controller(tmp_path, capfd):
    """Its own command in a process, and its yaml in a copy of config/."""
    task, *_ = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs/guides/robots.md").read_text(), re.DOTALL)
    folder = shutil.copytree(CONFIG, tmp_path / "config")
    (folder / "task/my_dobot.yaml").write_text(task)
    host = address()
    words = [sys.executable, "-m", "robot_infra.sim.dobot_controller", "--address", host, "--version", "V4"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=ROOT) as program:
        assert program.stdout.readline() == f"a V4 controller at {host}. Ctrl-C ends it\n"
        said = ["task=my_dobot", f"task.address={host}", "task.env.options.version=V4", "task.env.home_speed=1.0"]
        config = composed(folder, ["actor=true", *said])
        result = check_robot.checks(config, True, 1.0)
        program.send_signal(signal.SIGINT)
        assert program.wait(10) == 0
    failed = {one["check"] for one in result["checks"] if one["state"] == "FAIL"}
    assert failed <= {"rate"}, capfd.readouterr().out  # which a busy machine may miss


def test_the_first_page_is_short_and_every_other_one_is_two_clicks_from_it():
    first, pages = (ROOT / "README.md").read_text(), ROOT / "docs"
    assert len(first.split()) <= 700
    assert "(docs/index.md)" in first
    named = re.findall(r"\]\(([\w/-]+\.md)\)", (pages / "index.md").read_text())
    assert {*named} == {str(path.relative_to(pages)) for path in pages.rglob("*.md") if path.parent != pages}
