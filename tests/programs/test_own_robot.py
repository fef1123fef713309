"""The page about a robot of one's own, as a reader follows it: the check, a run, and what the guard lets the arm do."""

import logging
import re
import shutil

import numpy as np
import pytest
import yaml
from omegaconf import OmegaConf
from serl_client.errors import RobotFault

from robot_infra.drivers.arm import LEADER
from robot_infra.resets import resets_of
from serl_launcher.config import composed, factory
from tests.programs.pages import page, runs, write
from tests.programs.people import FAULT, TINY, Person
from tests.shared import programs
from tests.shared.common import CONFIG, ROOT, STATE, TRAIN
from tools import check_robot

pytestmark = pytest.mark.program
PAGE = page("own_robot")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of Retake's with the files of the page, which this process and its guards find."""
    shutil.copytree(CONFIG, tmp_path / "config")
    (tmp_path / "examples").mkdir()
    shutil.copy(TRAIN, tmp_path / "examples")
    monkeypatch.setenv("PYTHONPATH", write(tmp_path, PAGE)["PYTHONPATH"])
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def config_of(folder):
    """The actor's config of the page's yaml, without a person; the arm of each test has an address of its own."""
    own = [f"task.env.address={folder / 'arm'}", "task.env.operator=none"]
    return composed(folder / "config", ["actor=true", "task=my_arm", *own])


@pytest.mark.slow
def test_the_check_shows_what_the_page_says(folder, caplog):
    with caplog.at_level(logging.INFO):
        found = check_robot.checks(config_of(folder), True, 1.0)["checks"]
    assert {one["check"] for one in found if one["state"] == "FAIL"} <= {"rate"}  # which a busy machine may miss
    lines = [*caplog.messages, *(f"{one['state']:4} {one['check']}: {one['text']}" for one in found)]
    (screen,) = re.findall(r"```console\n(.*?)```", (ROOT / "docs/tutorials/own_robot.md").read_text(), re.DOTALL)
    shown = screen.replace("/dev/ttyACM0", str(folder / "arm")).splitlines()
    timed = re.compile(r"[\d.]+(?= ms)|(?<=worst )[\d.]+")
    assert not {timed.sub("", line) for line in shown} - {timed.sub("", line) for line in lines}


@pytest.mark.slow
def test_a_person_demonstrates_and_takes_over_on_the_arm_of_the_page(folder, monkeypatch):
    monkeypatch.setattr(programs, "TRAIN", folder / "examples/train.py")
    learner, actor = runs(PAGE)
    assert learner == [*actor, "plan=hiors"]
    assert learner[-1] in TINY
    with Person(folder) as person:
        person.practised([*actor, f"task.env.address={folder / 'arm'}"], has_programs=True)
        assert FAULT in person.said()  # before the first r


def test_the_leader_of_the_page_drives_an_arm_of_joints(folder):
    (led,) = re.findall(
        r"```python\n(from serl_client.*?)```", (ROOT / "docs/tutorials/own_robot.md").read_text(), re.DOTALL
    )
    with open(folder / "my_arm.py", "a") as arm, open(folder / "my_port.py", "a") as port:
        arm.write(led)
        port.write("\n    def leader_positions(self):\n        return [0.25, 0.0, 0.15, 0.0]\n")
    own = ["task=my_arm", "task.env.driver=my_arm.MyLedArm", f"task.env.address={folder / 'arm'}", "~task.env.stroke"]
    words = ["actor=true", *own, "task.env.space=joint_position", "task.env.operator=leader"]
    config = composed(folder / "config", words)
    with factory(config, "task.env")() as env:
        env.recover()
        env.reset(0)
        assert env.robot.seen[LEADER].tolist() == pytest.approx([0.25, 0.0, 0.15, 0.0])


def test_the_arm_of_the_page_moves_within_its_limits_after_somebody_has_said_ready(folder):
    with factory(config_of(folder), "task.env")() as env:
        with pytest.raises(RobotFault, match="a person"):
            env.reset(0)
        env.recover()
        before = env.robot.observe().values[STATE]
        assert env.step(np.full(4, 9.0, np.float32)).executed.max() <= 1
        for _ in range(3):
            last = env.step(None)
        np.testing.assert_allclose(last.observation[STATE] - before, [0.01, 0.01, 0.01, 10], atol=1e-3)
        assert last.success is None


@pytest.mark.slow
def test_the_two_tasks_and_waypoints_of_the_page_on_robots_bring_that_arm_home(folder):
    text = (ROOT / "docs/guides/robots.md").read_text()
    (said,) = (yaml.safe_load(each) for each in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL) if "rise:" in each)
    config = config_of(folder)
    OmegaConf.set_struct(config, False)
    config.task.env.update(said | {"home_speed": 1.0})
    with factory(config, "task.env")() as env:
        env.recover()
        resets = resets_of(env, "other_task", 10)
        assert "nobody has said" in resets.trouble
        resets.set_up()
        resets.ended(True)
        assert env.task == said["task"][1]
        env.home(0)
        seen = [env.robot.observe().values[STATE]]
        while not env.is_home:
            seen.append(env.robot.observe().values[STATE])
        assert resets.trouble == ""
    assert np.array(seen)[:, 2].min() == pytest.approx(said["waypoints"]["lower"]["z"], abs=1e-3)
    assert seen[-1] == pytest.approx([*config.task.env.home.values()], abs=1e-3)
