"""The plans of the repository, what the command line makes of them, and tools/plan.py."""

import re
import shutil
from pathlib import Path

import pytest
from serl_client.errors import ConfigError

from serl_launcher.config import composed, groups
from serl_launcher.replay.verdicts import VerdictRewards
from serl_launcher.training.plan import Pace, Plan
from serl_launcher.training.plan_reader import plan_of
from serl_launcher.training.plan_state import PlanState
from tests.shared.common import CONFIG, ROOT
from tests.shared.examples import run_example
from tests.shared.tools import called

from .plans import practise


def read(*words, has_operator="true"):
    return plan_of(composed(CONFIG, ["task=fake", f"task.has_operator={has_operator}", *words]))


def test_the_example_of_the_plan_runs(capsys):
    given = {"Path": Path, "composed": composed, "plan_of": plan_of}
    found = run_example(Plan, given, folder=('"config"', f'"{CONFIG}"'))
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [*found["plan"].phases]


@pytest.mark.slow
@pytest.mark.parametrize("name", groups(CONFIG)["plan"])
def test_a_plan_needs_an_operator_or_not_and_its_evaluations_are_as_long_as_the_config_says(name):
    words = [f"plan={name}", "baseline_episodes=3", "eval_episodes=7", "eval_steps=2000"]
    for phase in (phase for phase in read(*words).phases.values() if phase.actors.mode == "evaluate"):
        episodes = 3 if phase.name == "baseline" else 7
        assert phase.until == (f"episodes >= {episodes}", "env_steps >= 2000")
        assert phase.episodes == episodes
    without = ("dreamer", "evaluate", "from_scratch", "judge", "quickstart", "residual", "reward_classifier", "sft")
    if name not in (*without, "tdmpc2", "world_models"):
        with pytest.raises(ConfigError, match="operator"):
            read(*words, has_operator="false")
    else:
        assert read(*words, has_operator="false").phases


def test_the_quickstart_measures_before_and_after_and_needs_lasting_success():
    plan = read()
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


def test_the_command_line_edits_a_phase():
    plan = read("plan.phases.practise.until=[operator]", "utd=4")
    assert plan.phases["practise"].until == ("operator",)
    assert plan.phases["practise"].pace == Pace(4.0, 64)


@pytest.mark.slow
def test_the_tool_shows_the_timeline_of_a_plan_or_a_file():
    status, said = called("plan", "show", "quickstart", "max_env_steps=123")
    order = [said.index(text) for text in ("1. demonstrate", "2. baseline", "3. practise", "4. evaluate")]
    assert (status, order) == (0, sorted(order))
    assert "env_steps >= 123" in said
    status, said = called("plan", "show", "quickstart", "phase=practise", "task.has_operator=false")
    for text in ("1. practise", "100% online", "note: practise trains without demo"):
        assert text in said
    file = CONFIG / "plan/evaluate.yaml"
    status, said = called("plan", "show", file, "plan.phases.evaluate.until=[episodes >= 7]")
    assert (status, "episodes >= 7" in said) == (0, True)
    status, said = called("plan", "show", "from_scratch", "random_steps=77")
    assert (status, "collect random actions into online" in said, "env_steps >= 77" in said) == (0, True, True)


@pytest.mark.slow
def test_the_plan_on_the_page_of_commands_is_shown_with_its_rounds_and_the_evaluation_within_one(tmp_path):
    """As a file of the page's name in config/plan."""
    (text,) = re.findall(
        r"```yaml\n# config/plan/(rounds\.yaml.*?)```", (ROOT / "docs/reference/commands.md").read_text(), re.DOTALL
    )
    folder = Path(shutil.copytree(CONFIG, tmp_path / "config"))
    (folder / "plan/rounds.yaml").write_text(f"# {text}")
    plan = plan_of(composed(folder, ["task=fake", "learner=true", f"run_dir={tmp_path}", "plan=rounds"]))
    names = [f"{name}#{time}" for time in (1, 2, 3) for name in ("practise", "evaluate")]
    assert list(plan.phases) == ["demonstrate", "baseline", *names]
    within = ["+plan.phases.practise.evaluate={every_env_steps: 1000, until: ['episodes >= 20'], by: judge}"]
    repeat = ["+plan.repeat={phases: [practise, evaluate], times: 3, until: ['success[50] >= 0.95']}"]
    status, said = called("plan", "show", "quickstart", *within, *repeat, "plan.phases.practise.until=[operator]")
    order = [said.index(text) for text in (
        "2. baseline", "3. practise#1 to #3", "evaluate every 1,000 env_steps until episodes >= 20, by judge alone",
        "4. evaluate#1 to #3", "repeat   practise, evaluate: 3 times, until success[50] >= 0.95",
    )]  # fmt: skip
    assert (status, order) == (0, sorted(order))


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("show quikstart", "did you mean 'quickstart'?"),
        ("show none.yaml", "no such file"),
        ("show quickstart plan.phases.practis.until=[operator]", "has no key 'practis'; did you mean 'practise'?"),
        ("show quickstart phase=practis", "did you mean 'practise'?"),
        ("show quickstart max_env_steps=${nothing}", "nothing"),
        ("check quickstart algo=sft policy=flow updates=[update_critic]", "no update of the algorithm is called"),
        ("check quickstart algo._target_=serl_launcher.algorithms.nothing.No", "serl_launcher"),
    ],
)
def test_the_tool_says_what_is_wrong_in_one_sentence(words, sentence):
    status, said = called("plan", *words.split())
    assert (status, said.count("\n")) == (1, 1)
    assert sentence in said


@pytest.mark.slow
def test_a_task_gives_its_own_rewards_to_verdicts_and_a_word_of_the_command_line_comes_before_it(tmp_path):
    folder = Path(shutil.copytree(CONFIG, tmp_path / "config"))
    mine = "defaults: [fake]\nname: mine\nverdict: {success: 10.0}\n"
    (folder / "task" / "mine.yaml").write_text(mine)
    for words, expected in (
        (["task=fake"], VerdictRewards(1.0, 0.0)), (["task=mine"], VerdictRewards(10.0, 0.0)),
        (["task=mine", "task.verdict.failure=-1"], VerdictRewards(10.0, -1.0)),
        (["task=mine", "task.verdict.success=3", "~task.verdict.failure"], VerdictRewards(3.0, 0.0)),
    ):  # fmt: skip
        assert plan_of(composed(folder, ["learner=true", f"run_dir={tmp_path}", *words])).verdict == expected
