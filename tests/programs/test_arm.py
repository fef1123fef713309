"""An actor with a real arm, as its owner starts it: what it says at the start, and that it moves after their key."""

import os
import shutil
from contextlib import closing
from functools import partial

import pytest
from omegaconf import OmegaConf

from robot_infra.teleop.keyboard import Keyboard
from serl_launcher.config import composed
from tests.shared import here
from tests.shared.arms import DRIVER, FPS, HOME, LIMITS, Log
from tests.shared.common import CONFIG


@pytest.fixture
def terminal():
    """The end that a person types into, and the end that the program reads."""
    person, program = os.openpty()
    yield person, program
    os.close(person)
    os.close(program)


@pytest.mark.usefixtures("same_loggers")
def test_an_arm_of_a_yaml_says_its_limits_and_goes_home_after_the_key_of_its_owner(
    serve, terminal, tmp_path, monkeypatch, capfd
):
    (person, program), server = terminal, serve()
    monkeypatch.setattr(here.TRAIN, "Keyboard", partial(Keyboard, program))
    folder = shutil.copytree(CONFIG, tmp_path / "config")
    with closing(Log(tmp_path)) as log:
        env = {
            "_target_": "robot_infra.robots.arm.make", "_partial_": True, "driver": DRIVER, "address": log.path,
            "options": {"log": log.path}, "task": "fold", "fps": FPS, "max_steps": 9, "limits": LIMITS, "home": HOME,
        }  # fmt: skip
        task = {"name": "my_robot", "has_operator": False, "env": env}
        OmegaConf.save(OmegaConf.create(task), folder / "task/my_robot.yaml")
        words = ["actor=true", "task=my_robot", f"port={server.port}", f"run_dir={tmp_path}/actor", "name=arm"]
        with here.thread(partial(here.TRAIN.act, composed(folder, words))) as errors:
            server.direct()
            while not log.of("recover"):  # a key that is pressed before the question is no answer
                log.wait(0.2)
                os.write(person, b"r")
            ready = log.of("recover")[0].time
            assert not [said for said in log.of("write") if said.time < ready]
            log.until(lambda calls: calls[-1].call == "write" and calls[-1].what == [HOME["shoulder"], HOME["elbow"]])
            server.direct({"phase": "end", "mode": "stop", "into": None, "boundary": "now"})
        assert errors == []
        assert log.until(lambda calls: calls[-1].call) == "close"
    said = capfd.readouterr().err
    assert "shoulder: -57.3° to 57.3°" in said
    assert "ready: the arm was connected anew: a person in the actor's terminal says when it may move" in said
