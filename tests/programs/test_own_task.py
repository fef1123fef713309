"""The pages about an own task and an own algorithm, as a reader follows them; and environments that raise."""

import importlib
import json
import re
import shutil

import pytest
from serl_client.errors import ConfigError

from serl_launcher.algorithms.base import Algorithm
from serl_launcher.algorithms.chunk_actor_critic import first_step
from serl_launcher.config import OTHERS, composed, factory
from serl_launcher.types import Window
from tests.programs.pages import page, runs, write
from tests.shared.common import CONFIG, ROOT
from tests.shared.examples import run_example
from tests.shared.models import batch, robot
from tests.shared.programs import Programs
from tools.readme_words import SHORT

pytestmark = pytest.mark.program
PAGE, ALGORITHM = page("own_task"), page("own_algorithm")
MADE_SHORT = [*SHORT, "log=false"]
FEW = [
    "plan.phases.demonstrate.until=['demo.episodes >= 2']", "plan.phases.clone.until=['updates >= 20']",
    "plan.phases.practise.start_when='online.episodes >= 1'",
]  # fmt: skip
RUDE = '''
import os, sys
from pathlib import Path
import gymnasium
from my_task import Reach

FOLDER = Path(__file__).parent


class Rude(Reach):
    """The first environment raises in each seventh step. The second does once, and then once in its constructor."""

    place, made = None, 0

    def __init__(self):
        if Rude.place is None:
            try:
                os.close(os.open(FOLDER / "first", os.O_CREAT | os.O_EXCL))
                Rude.place = "first"
            except FileExistsError:
                Rude.place = "second"
        Rude.made += 1
        if (Rude.place, Rude.made) == ("second", 2):
            raise OSError("the constructor has no device")
        self.steps = 0

    def step(self, action):
        self.steps += 1
        if self.steps == 7 and (Rude.place == "first" or Rude.made == 1):
            raise ValueError("the gripper\\nis gone")
        with open(FOLDER / f"{Rude.place}.steps", "a") as log:
            log.write(".")
        return super().step(action)


gymnasium.register("Rude-v0", Rude, max_episode_steps=30)
'''


@pytest.fixture
def programs(tmp_path):
    """Programs of a reader who has written the pages' files into a folder of their own."""
    environment = write(tmp_path, PAGE, ALGORITHM)
    (tmp_path / "rude.py").write_text(RUDE)
    with Programs(tmp_path, environment=environment) as made:
        yield made


@pytest.mark.slow
def test_the_page_is_enough_for_a_task_of_ones_own(programs):
    practice, evaluation, _ = ([*words, *MADE_SHORT] for words in runs(PAGE))
    programs.complete(practice, practice)
    said = " ".join(programs.said().split())
    assert "not stored, because nothing of this run reads it: observation.images.camera, 3 kB a step; say " in said
    assert "the policy sees goal, position" in said
    assert (programs.run_dir / "summary.json").exists()
    programs.complete(evaluation, evaluation)
    assert (programs.run_dir / "evaluation.json").exists()


@pytest.mark.slow
def test_the_page_is_enough_for_a_script_that_demonstrates_and_takes_over(programs, tmp_path):
    words = [*runs(PAGE)[2], *MADE_SHORT, *FEW]
    programs.complete(words, words)
    assert json.loads((programs.run_dir / "summary.json").read_text())["assisted"] >= 2
    shutil.copytree(CONFIG, folder := tmp_path / "config")
    (own,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs/tutorials/own_task.md").read_text(), re.DOTALL)
    (folder / "task/my_task.yaml").write_text(own)
    said = composed(CONFIG, ["actor=true", *(word for word in words if word.startswith("task"))]).task
    assert {**composed(folder, ["actor=true", "task=my_task"]).task, "name": said.name} == said


@pytest.mark.slow
def test_the_page_is_enough_for_an_algorithm_of_ones_own(programs, tmp_path, monkeypatch):
    practice, again = ([*words, *MADE_SHORT] for words in runs(ALGORITHM))
    programs.complete([*practice, *FEW], practice)
    lines = map(json.loads, (programs.run_dir / "metrics.jsonl").read_text().splitlines())
    assert any(0 < line["weight"] < 1 for line in lines if "weight" in line)
    programs.complete([*again, *FEW], again)
    assert "my_algorithm.Sooner" in (programs.run_dir / "config.yaml").read_text()

    shutil.copytree(CONFIG, folder := tmp_path / "config")
    yamls = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs/tutorials/own_algorithm.md").read_text(), re.DOTALL)
    for name, text in zip(("my_algorithm", "my_cloning"), yamls, strict=True):
        (folder / f"algo/{name}.yaml").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    cloning = run_example(Algorithm, {"Algorithm": Algorithm, "Window": Window})["Cloning"]
    monkeypatch.setattr(importlib.import_module("my_algorithm"), "Cloning", cloning, raising=False)

    spec = robot(cameras=())

    def made(word):
        config = composed(folder, ["learner=true", "plan=hiors", word, f"run_dir={tmp_path / 'other'}"])
        return factory(config, "algo", spec)(spec)

    assert made("algo=my_algorithm").discount == 0.98
    algorithm = made("algo=my_cloning")
    rows = batch(spec, window=algorithm.windows["update"])
    seen = first_step(rows.observation)
    assert algorithm.update(rows)["loss"] > 0
    assert algorithm.policy.sample(seen).shape == (1, *rows.action.shape)
    assert algorithm.policy.rsample(seen, seed=rows.seed)[0].requires_grad


@pytest.mark.parametrize(("word", "ours"), OTHERS.items())
def test_words_of_other_projects_that_the_page_names_are_refused_with_ours(word, ours, tmp_path):
    assert f"`{word}`" in (ROOT / "docs/tutorials/own_task.md").read_text()
    for said in (f"{word}=1", f"+{word}=1"):
        with pytest.raises(ConfigError, match=re.escape(f"{said}: the config has no key ") + ".*" + re.escape(ours)):
            composed(CONFIG, ["learner=true", f"run_dir={tmp_path}", said])


@pytest.mark.slow
def test_what_environments_recorded_before_they_raised_is_delivered_and_the_run_goes_on_without_the_hopeless(programs):
    words = [*runs(PAGE)[0], *MADE_SHORT, "task.env_id=rude:Rude-v0"]
    actor, learner = programs.start("actor", *words, "envs=2", "name=rude"), programs.start("learner", *words)
    assert [programs.status(learner), programs.status(actor)] == [0, 0], programs.said()[-4000:]
    said = programs.said()
    (place,) = re.findall(r"environment (\d) ended with status 1; 1 go on", said)
    (last,) = re.findall(r"error: (.*This was fault 3.*)", said)
    assert last.startswith("the environment rude:Rude-v0 failed in step(): ValueError: the gripper is gone. This was")
    assert re.search(r"in make\(\): OSError: the constructor has no device\..* It goes on with another episode", said)
    stored = {"first": 0, "second": 0}
    for episode, steps in programs.facts().episodes.items():
        stored["first" if episode.startswith(f"rude/{place}-") else "second"] += steps
    assert stored == {name: len((programs.log.parent / f"{name}.steps").read_text()) for name in stored}
    assert stored["first"] == 18
