"""What the documents name is there."""

import re
import shlex
import shutil
import signal
import subprocess
import sys
from functools import cache

import numpy as np
import pytest
import yaml
from omegaconf import OmegaConf
from serl_client.errors import ConfigError, RobotFault

from robot_infra.resets import resets_of
from serl_launcher.config import composed, factory
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
ITS_OWN = {"task=my_robot", "task=my_dobot"}  # docs/guides/robots.md brings the yaml itself


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


def test_the_robot_of_the_page_on_robots_moves_within_its_limits_after_somebody_has_said_ready(tmp_path, monkeypatch):
    """The page's code and yaml together, as a reader would copy them."""
    text = (ROOT / "docs/guides/robots.md").read_text()
    (code,), (task, *_) = (re.findall(rf"```{kind}\n(.*?)```", text, re.DOTALL) for kind in ("python", "yaml"))
    assert len(code.splitlines()) <= 30
    (tmp_path / "my_robot.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    config = {"task": yaml.safe_load(task.replace("robot_infra.drivers.my_robot", "my_robot"))}
    config["task"]["env"]["address"] = str(tmp_path / "arm")
    with factory(OmegaConf.create(config), "task.env")() as env:
        with pytest.raises(RobotFault, match="a person"):
            env.reset(0)
        env.recover()
        env.home(0)
        env.stop()
        executed = env.step(np.full(3, 9.0, np.float32)).executed
        np.testing.assert_allclose(executed, [0.15, -0.35, 0.03], atol=0.02)  # a step at most, not what was asked for
        assert env.step(None).success is None


@pytest.mark.slow
def test_the_driver_and_the_yaml_of_that_page_pass_the_check_as_they_stand(tmp_path, monkeypatch):
    text = (ROOT / "docs/guides/robots.md").read_text()
    (code,), (task, *_) = (re.findall(rf"```{kind}\n(.*?)```", text, re.DOTALL) for kind in ("python", "yaml"))
    (tmp_path / "my_robot.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))  # of the guard
    folder = shutil.copytree(CONFIG, tmp_path / "config")
    (folder / "task/my_robot.yaml").write_text(task.replace("robot_infra.drivers.my_robot", "my_robot"))
    config = composed(folder, ["actor=true", "task=my_robot", f"task.env.address={tmp_path / 'arm'}"])
    found = check_robot.checks(config, False, 0.5)["checks"]
    assert {one["check"] for one in found} >= {"position", "read()", "close"}
    assert [one for one in found if one["state"] == "FAIL" and one["check"] != "rate"] == []  # of a busy machine


@pytest.mark.slow
def test_the_two_tasks_and_waypoints_of_that_page_bring_its_robot_home(tmp_path, monkeypatch):
    text = (ROOT / "docs/guides/robots.md").read_text()
    (code,), (task, *others) = (re.findall(rf"```{kind}\n(.*?)```", text, re.DOTALL) for kind in ("python", "yaml"))
    (tmp_path / "my_robot.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    config = {"task": yaml.safe_load(task.replace("robot_infra.drivers.my_robot", "my_robot"))}
    (said,) = (yaml.safe_load(other) for other in others if "waypoints" in other)
    config["task"]["env"] |= said | {"address": str(tmp_path / "arm"), "home_speed": 1.0}
    with factory(OmegaConf.create(config), "task.env")() as env:
        env.recover()
        resets = resets_of(env, "other_task", 10)
        assert "nobody has said" in resets.trouble
        resets.set_up()
        resets.ended(True)
        assert env.task == said["task"][1]
        env.home(0)
        seen = [env.robot.observe().values["observation.state"]]
        while not env.is_home:
            seen.append(env.robot.observe().values["observation.state"])
        assert resets.trouble == ""
    shoulder, elbow, _ = np.array(seen).T
    assert elbow.min() == pytest.approx(-0.8)
    assert (shoulder[-1], elbow[-1]) == pytest.approx((0, -0.5))


@pytest.mark.slow
def test_the_dobot_arm_of_that_page_is_checked_as_a_reader_would_against_a_simulated_controller(tmp_path, capfd):
    """Its own command in a process, and its yaml in a copy of config/."""
    _, task, *_ = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs/guides/robots.md").read_text(), re.DOTALL)
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
