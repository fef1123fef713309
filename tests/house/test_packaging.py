"""What an installation needs, as far as it can be seen without the network."""

import re
import subprocess
import sys
import tomllib

import pytest
from omegaconf import OmegaConf
from serl_client.errors import ConfigError

from serl_launcher.config import composed
from serl_launcher.launcher import NEEDED
from tests.shared.common import CONFIG, ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CLIENT = tomllib.loads((ROOT / "packages/serl_client/pyproject.toml").read_text())["project"]
MODULES = {"pyzmq": "zmq", "hydra-core": "hydra", "serl-client": "serl_client"}  # where the name to import is another
BASE = (
    "serl_client.runner", "robot_infra.env", "robot_infra.tasks.fake", "robot_infra.teleop.keyboard",
    "serl_launcher.config", "serl_launcher.launcher", "serl_launcher.supervisor", "serl_launcher.service.link",
    "serl_launcher.service.server", "serl_launcher.store.store", "serl_launcher.training.plan_reader",
    "serl_launcher.datasets.export", "serl_launcher.datasets.importer", "serl_launcher.report.page",
)  # fmt: skip
HEAVY = ("torch", "torchvision", "lerobot", "mujoco", "gymnasium", "transformers", "matplotlib", "wandb")

# Imports every module of a package while nothing else can be imported but the standard library, what is allowed, and
# what that itself imports.
IMPORT_ALONE = """
import importlib, importlib.abc, pkgutil, sys
package, allowed = sys.argv[1], {*sys.argv[1:], *sys.stdlib_module_names}
class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        asking = sys._getframe(1)
        while asking.f_globals["__name__"].startswith("importlib"):
            asking = asking.f_back
        mine = asking.f_globals["__name__"].partition(".")[0] in (package, "__main__")
        if mine and name.partition(".")[0] not in allowed:
            raise ModuleNotFoundError(f"{asking.f_globals['__name__']} imports {name}")
sys.meta_path.insert(0, Refuse())
for found in pkgutil.walk_packages(importlib.import_module(package).__path__, package + "."):
    importlib.import_module(found.name)
for name in set(sys.modules) & set(sys.argv[2:]):
    print(name)
"""


def names(requirements):
    return [re.match(r"[\w-]+", requirement)[0] for requirement in requirements]


def modules(requirements):
    return {MODULES.get(name, name) for name in names(requirements)}


def test_the_client_imports_its_four_dependencies_and_nothing_else():
    allowed = modules(CLIENT["dependencies"])
    assert allowed == {"numpy", "msgpack", "zmq", "xxhash"}
    command = [sys.executable, "-c", IMPORT_ALONE, "serl_client", *allowed]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) == allowed, "a dependency that nothing imports"


def test_a_base_install_lists_nothing_heavy():
    assert not {*HEAVY} & {*names(PROJECT["dependencies"]), *names(CLIENT["dependencies"])}


@pytest.mark.parametrize("package", ["", "packages/serl_client"])
def test_each_package_names_its_licence_and_brings_the_text(package):
    metadata = tomllib.loads((ROOT / package / "pyproject.toml").read_text())["project"]
    assert metadata["license"] == "Apache-2.0"
    (name,) = metadata["license-files"]
    text = (ROOT / package / name).read_text()
    assert "Apache License" in text
    assert "Copyright 2026 the Retake authors" in text


def test_the_repository_holds_no_empty_file_and_nothing_that_runs_leave_behind():
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("no git here")
    files = [ROOT / name for name in listed.stdout.split("\0") if name]
    empty = {file.name for file in files if file.exists() and not file.stat().st_size}
    assert empty <= {"__init__.py"}
    assert not [file for file in files if file.suffix in (".log", ".rrd", ".mp4", ".sqlite")]


def test_what_the_learner_looks_for_is_in_its_extra():
    assert set(NEEDED) <= set(names(PROJECT["optional-dependencies"]["learner"]))


def test_what_runs_on_a_robot_pc_or_serves_data_starts_without_any_extra():
    """What examples/train.py imports, and the simplest task, as a base install has them."""
    extras = {*HEAVY, "cv2", *(name for listed in PROJECT["optional-dependencies"].values() for name in names(listed))}
    code = f"import sys\nfor name in {sorted(extras)}: sys.modules[name] = None\nimport {', '.join(BASE)}\n" + (
        "env = robot_infra.tasks.fake.make(max_steps=5, noise=0.1, clock='simulated')\n"
        "env.reset(0, teleop=True), env.step(None)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_run_remembers_the_parts_that_it_reads_and_refuses_words_about_others(tmp_path):
    words = ["learner=true", f"run_dir={tmp_path}"]
    begun = composed(CONFIG, [*words, "policy=chunk", "algo=sft", "head=mip", "head.t_star=0.8"])
    OmegaConf.save(begun, tmp_path / "config.yaml")
    assert composed(CONFIG, [*words, "plan=evaluate"]).policy.head == begun.policy.head
    assert composed(CONFIG, [*words, "head=regression"]).policy.head._target_.endswith("Regression")
    for said, told in (
        ("policy=gaussian head=mip", "head=mip: .*policy=gaussian does not read head: say .*policy=chunk"),
        ("policy=flow head.steps=3", "head.steps=3: .*policy=flow does not.*: say policy.head.steps=3 or policy=chunk"),
        ("policy=chunk policy.head.steps=3", "policy.head is head: say head.steps=3"),
        ("algo=sft critic=c51", "critic=c51: algo=sft .*does not read critic: say algo=.*algo=rlpd"),
        ("algo.critic.lowest=1.0", "algo.critic is critic: say critic.lowest=1.0"),
    ):
        with pytest.raises(ConfigError, match=told):
            composed(CONFIG, ["learner=true", *said.split()])


@pytest.mark.slow
def test_a_plan_chooses_its_algorithm_and_that_its_policy_and_a_word_still_wins_and_the_same_words_go_on(tmp_path):
    assert composed(CONFIG, ["task=fake"]).run_dir == "runs/fake"
    new = ["learner=true", f"run_dir={tmp_path}/new", "plan=hiors"]
    assert composed(CONFIG, new).remembered == ["algo=rejection", "policy=flow"]
    assert composed(CONFIG, [*new, "algo=sft"]).remembered == ["algo=sft", "policy=flow"]
    assert composed(CONFIG, ["algo=rejection"]).remembered == ["algo=rejection", "policy=flow"]
    assert composed(CONFIG, ["algo=sft", "policy=gaussian"]).remembered == ["algo=sft", "policy=gaussian"]
    words = ["learner=true", f"run_dir={tmp_path}", "plan=hiors", "algo=rejection_pixels"]
    begun = composed(CONFIG, words)
    assert begun.remembered == ["algo=rejection_pixels", "policy=flow_pixels"]
    OmegaConf.save(begun, tmp_path / "config.yaml")
    assert composed(CONFIG, words).remembered == begun.remembered
    assert composed(CONFIG, [*words[:2], "plan=evaluate"]).remembered == begun.remembered
    with pytest.raises(ConfigError, match=r"made for algo=rejection, .* was begun with algo=rejection_pixels"):
        composed(CONFIG, words[:3])


@pytest.mark.slow
def test_a_run_folder_remembers_what_policy_and_algorithm_it_was_begun_with(tmp_path):
    words = ["learner=true", f"run_dir={tmp_path}"]
    begun = composed(CONFIG, [*words, "plan=sft", "policy.horizon=6", "seed=4"])
    OmegaConf.save(begun, tmp_path / "config.yaml")
    again = composed(CONFIG, [*words, "plan=evaluate", "policy.horizon=12"])
    assert (again.policy.horizon, again.policy.head.steps) == (12, begun.policy.head.steps)
    assert (again.algo.idle_filter, again.seed) == (begun.algo.idle_filter, 0)
    OmegaConf.save(again, tmp_path / "config.yaml")
    assert composed(CONFIG, words).policy.horizon == 6, "an evaluation changes nothing for later"
    OmegaConf.save(composed(CONFIG, [*words, "policy.horizon=12"]), tmp_path / "config.yaml")
    assert composed(CONFIG, words).policy.horizon == 12
    assert composed(CONFIG, [*words, "plan=hiors"]).policy.horizon == 12
    assert composed(CONFIG, [*words, "policy=gaussian", "algo=sac"]).algo.discount == 0.99  # what is said holds
    assert composed(CONFIG, [*words[:1], f"run_dir={tmp_path}/other"]).algo._target_.endswith("SAC")
