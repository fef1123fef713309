"""A run whose judge is a classifier that was trained on another run's episodes, with all programs as users start."""

import json
import re

import pytest

from serl_launcher.datasets.export import export_run
from tests.shared.here import start
from tests.shared.programs import Programs
from tests.shared.tools import typed

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread", "same_loggers")]

GIVEN = [  # practice makes no updates: how far it comes depends on the machine, and so would what the classifier sees
    "task=fake", "plan=quickstart", "log=false", "critic.hidden=[16,16]", "policy.hidden=[16,16]", "batch_size=16",
    'plan.phases.demonstrate.until=["demo.episodes >= 40"]', "~plan.phases.baseline", "~plan.phases.evaluate",
    'plan.phases.practise.start_when="online.steps >= 100000"', 'plan.phases.practise.until=["online.episodes >= 40"]',
    "task.env.max_steps=30", "task.stages=2",
]  # fmt: skip
FAKE = ["task=fake", "log=false"]
COLLECT = ["plan=collect", 'plan.phases.demonstrate.until=["demo.episodes >= 10"]']


def judged(folder, address, threshold):
    """The rewards of ten demonstrations by the classifier's judgement."""
    folder.mkdir()
    with Programs(folder) as run:
        judge = [f"task.judge.address={address}", f"task.judge.threshold={threshold}", "task.judge.stage_reward=0.25"]
        run.complete([*FAKE, *COLLECT], [*FAKE, *judge])
    lines = [json.loads(line) for line in (run.run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line["return"] for line in lines if line["kind"] == "episode"][:10]


def test_a_classifier_learns_from_one_runs_episodes_and_judges_anothers(tmp_path):
    start(tmp_path / "given", GIVEN)
    given, more = (export_run(tmp_path / "given", 1000, [source])[0] for source in ("online", "demo"))
    (tmp_path / "reward").mkdir()
    with Programs(tmp_path / "reward") as reward:
        data = [f"plan.sources.given.dataset={given}", f"plan.sources.more.dataset={more}"]
        learner = reward.start("learner", *FAKE, "plan=reward_classifier", "task.stages=2", *data)
        reward.until(lambda: "serve idle" in reward.said(), 120)
        address = f"127.0.0.1:{reward.ports[1]}"
        returns = judged(tmp_path / "judged", address, 0.2)
        assert {0.0, 0.25, 1.25} >= {*returns}, "a first stage, and success"
        assert returns.count(1.25) >= 8
        assert max(judged(tmp_path / "strict", address, 0.999999)) < 1, "nobody else gives success"
        reward.order("next")
        assert reward.status(learner) == 0
    status, said = typed("reward", reward.run_dir, "--threshold", "0.2")
    assert (status, said.strip()) == (0, str(reward.run_dir / "reward.html"))
    page = (reward.run_dir / "reward.html").read_text()
    assert "failures called success" in page
    assert (found := re.search(r"recall of stage 1<td>(\d+) of (\d+)", page))
    assert int(found[1]) > int(found[2]) / 2 > 0
    status, said = typed("reward", tmp_path)
    assert (status, said.strip()) == (
        1,
        f"error: no classifier in {tmp_path}: give the run_dir of plan=reward_classifier",
    )
