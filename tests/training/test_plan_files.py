"""The plans of the repository, what the command line makes of them, and tools/plan.py."""

import importlib.util
import shutil
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.errors import ConfigCompositionException
from omegaconf import OmegaConf
from serl_client.errors import ConfigError

from serl_launcher.training.plan import Pace, Plan
from serl_launcher.training.plan_reader import load_plan
from serl_launcher.training.plan_state import PlanState
from tests.shared.common import ROOT

from .plans import load, practise

# -- the files
BASE = """
defaults: [algo: any, policy: any, plan: quickstart, _self_]
utd: 2
updates: [update_critic, update]
max_env_steps: 20000
baseline_episodes: 30
eval_episodes: 50
eval_steps: 10000
phase: null
learner: false
run_dir: runs/test
remembered: []
task: {has_operator: true}
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A config folder with the plans as they are and a stand-in for the rest; its algorithm has `update` alone."""
    shutil.copytree(ROOT / "config" / "plan", tmp_path / "plan")
    (tmp_path / "base.yaml").write_text(BASE)
    for path in ("algo/any.yaml", "algo/rejection.yaml", "algo/sac_pi0.yaml", "policy/any.yaml", "policy/flow.yaml"):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text("_target_: collections.OrderedDict")
    return tmp_path


def composed(config: Path, *overrides: str) -> Plan:
    with initialize_config_dir(str(config), version_base=None):
        return load(OmegaConf.to_container(compose("base", list(overrides)).plan, resolve=True))


@pytest.mark.parametrize("name", [path.stem for path in (ROOT / "config" / "plan").glob("*.yaml")])
def test_every_plan_of_the_repository_loads(config, name):
    with initialize_config_dir(str(config), version_base=None):
        mapping = OmegaConf.to_container(compose("base", [f"plan={name}"]).plan, resolve=True)
    assert load_plan(mapping, methods=None, has_operator=True).phases
    if name in ("collect", "hiors", "sac_pi0"):
        with pytest.raises(ConfigError, match="operator"):
            load_plan(mapping, methods=None, has_operator=False)
    else:
        assert load_plan(mapping, methods=None, has_operator=False).phases


def test_the_quickstart_measures_before_and_after_and_needs_lasting_success(config):
    plan = composed(config)
    assert list(plan.phases) == ["demonstrate", "baseline", "practise", "evaluate"]
    assert (plan.phases["baseline"].episodes, plan.phases["evaluate"].episodes) == (30, 50)
    state = PlanState(plan.only("practise"))
    peak = ((False, False),) * 5 + ((True, False),) * 95  # the last 95 in a row, and yet 95 % of 100
    lasting = (*peak[1:], (True, False))
    for steps, recent in ((7000, peak), (5999, lasting)):
        state.advance(practise(steps, episodes=100, recent=recent))
        assert state.phase is not None
    state.advance(practise(6000, episodes=101, recent=lasting))
    assert state.phase is None


@pytest.mark.parametrize("name", [path.stem for path in (ROOT / "config" / "plan").glob("*.yaml")])
def test_evaluations_are_as_long_as_the_words_of_the_config_say(config, name):
    words = [f"plan={name}", "baseline_episodes=3", "eval_episodes=7", "eval_steps=2000"]
    with initialize_config_dir(str(config), version_base=None):
        mapping = OmegaConf.to_container(compose("base", words).plan, resolve=True)
    plan = load_plan(mapping, methods=None, has_operator=True)
    for phase in (phase for phase in plan.phases.values() if phase.actors.mode == "evaluate"):
        episodes = 3 if phase.name == "baseline" else 7
        assert phase.until == (f"episodes >= {episodes}", "env_steps >= 2000")
        assert phase.episodes == episodes


def test_the_command_line_edits_a_phase_and_hydra_refuses_a_misspelt_one(config):
    plan = composed(config, "plan.phases.practise.until=[operator]", "utd=4")
    assert plan.phases["practise"].until == ("operator",)
    assert plan.phases["practise"].pace == Pace(4.0, 64)
    with pytest.raises(ConfigCompositionException, match="practis"):
        composed(config, "plan.phases.practis.until=[operator]")


@pytest.fixture
def tool(config, monkeypatch, capsys):
    """tools/plan.py on that folder: arguments -> (exit status, output, error)."""
    spec = importlib.util.spec_from_file_location("plan_tool", ROOT / "tools" / "plan.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "CONFIG", config)

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["plan.py", *arguments])
        return module.main(), *capsys.readouterr()

    return run


def test_the_tool_shows_the_timeline(tool):
    status, output, error = tool("show", "quickstart", "max_env_steps=123")
    assert (status, error) == (0, "")
    order = [output.index(text) for text in ("1. demonstrate", "2. baseline", "3. practise", "4. evaluate")]
    assert order == sorted(order)
    assert "env_steps >= 123" in output
    status, output, _ = tool("show", "quickstart", "phase=practise", "task.has_operator=false")
    assert "1. practise" in output
    assert "100% online" in output
    assert "note: practise trains without demo" in output


def test_the_tool_takes_a_file(tool, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text((ROOT / "config" / "plan" / "evaluate.yaml").read_text())
    status, output, _ = tool("show", str(path), "plan.phases.evaluate.until=[episodes >= 7]")
    assert status == 0
    assert "episodes >= 7" in output


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("show", "quikstart"), "did you mean 'quickstart'?"),
        (("show", "none.yaml"), "no such file"),
        (("show", "quickstart", "plan.phases.practis.until=[operator]"), "plan.phases.practis.until"),
        (("show", "quickstart", "phase=practis"), "did you mean 'practise'?"),
        (("show", "quickstart", "max_env_steps=${nothing}"), "nothing"),
        (("check", "quickstart"), "no update of the algorithm is called 'update_critic'; did you mean 'update'?"),
        (("check", "quickstart", "algo._target_=serl_launcher.algorithms.nothing.No"), "serl_launcher"),
    ],
)
def test_the_tool_says_what_is_wrong_in_one_sentence(tool, arguments, sentence):
    status, output, error = tool(*arguments)
    assert (status, output) == (1, "")
    assert sentence in error
    assert error.count("\n") == 1
