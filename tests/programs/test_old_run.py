"""A run of a former version goes on: its outbox, store, checkpoints, weights and datasets, and the names in its config.

old_run.tar.xz was made at commit 6b741b9 with the words below: learner and actor were killed in practice, the actor
later, so that its outbox holds a record; then tools/data.py had made datasets of it. Nothing in it was changed since.
"""

import importlib
import shutil
import tarfile
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from serl_launcher.config import MOVED, renamed, saved
from tests.shared.programs import Programs
from tests.shared.tools import typed

from .test_run import assert_goes_on

RUN = Path(__file__).parent / "old_run.tar.xz"
WORDS = [
    "task=fake", "utd=1", "critic.hidden=[16,16]", "policy.hidden=[16,16]", "checkpoint_s=0.5", "name=vm",
    'plan.phases.demonstrate.until=["demo.episodes >= 3"]', 'plan.phases.baseline.until=["episodes >= 2"]',
    'plan.phases.practise.until=["env_steps >= 15000", operator]', 'plan.phases.evaluate.until=["episodes >= 2"]',
    "plan.sources.demo.capacity=300", "plan.sources.online.capacity=600", "plan.sources.eval.capacity=300",
]  # fmt: skip


@pytest.fixture
def old(tmp_path):
    with tarfile.open(RUN) as kept:
        kept.extractall(tmp_path, filter="data")
    with Programs(tmp_path) as programs:
        yield programs


@pytest.mark.slow
def test_it_goes_on_and_takes_what_its_actor_still_has(old):
    before = old.facts()
    outbox = old.run_dir / "actors/vm/outbox"
    (left,) = outbox.glob("*.records")
    old.start("learner", *WORDS), old.start("actor", *WORDS)
    assert_goes_on(before, old.practised(before.practised + 100))
    assert not left.exists()


@pytest.mark.slow
def test_its_store_and_datasets_are_whole_and_none_is_made_twice(old):
    status, said = typed("store", "verify", old.run_dir)
    assert status == 0, said
    assert "13 episodes, 480 steps" in typed("data", "check", old.run_dir)[1]
    made = sorted(path for path in (old.run_dir / "datasets").glob("*/*") if path.is_dir())
    status, said = typed("data", "export", old.run_dir)
    assert status == 0, said
    assert sorted(path for path in (old.run_dir / "datasets").glob("*/*") if path.is_dir()) == made
    shutil.rmtree(made[0])
    assert typed("data", "export", old.run_dir)[0] == 0
    assert made[0].is_dir()


def test_former_names_are_found_wherever_they_stand(tmp_path):
    for name in MOVED:
        with pytest.raises(ImportError):
            importlib.import_module(name)
        importlib.import_module(MOVED[name])
    before = {"a": ["robot_infra.robots.fake.make", 1], "b": {"c": "serl_launcher.utils.optim.Optimizer"}}
    after = {"a": ["robot_infra.tasks.fake.make", 1], "b": {"c": "serl_launcher.optim.optimizer.Optimizer"}}
    assert renamed(before) == after
    assert renamed("robot_infra.robots.my_own.make") == "robot_infra.robots.my_own.make"
    OmegaConf.save(before, tmp_path / "config.yaml")
    assert saved(tmp_path) == after
