"""A run whose judge was trained or calibrated on another run's episodes, and answers from a third one."""

import re
from contextlib import closing

import pytest

from robot_infra.teleop.verdicts import ScriptedVerdicts
from serl_launcher.datasets.episodes import open_run
from serl_launcher.datasets.export import export_run
from serl_launcher.store.index import Index
from serl_launcher.training.metrics import read
from tests.shared.common import PATIENCE, free_port, until
from tests.shared.here import answering, order, start
from tests.shared.programs import facts
from tests.shared.tools import called, typed

pytestmark = [pytest.mark.nightly, pytest.mark.usefixtures("one_thread", "same_loggers")]

GIVEN = [  # practice makes no updates: how far it comes depends on the machine, and so would what the classifier sees
    "task=fake", "plan=quickstart", "log=false", "critic.hidden=[16,16]", "policy.hidden=[16,16]", "batch_size=16",
    'plan.phases.demonstrate.until=["demo.episodes >= 60"]', "~plan.phases.baseline", "~plan.phases.evaluate",
    'plan.phases.practise.start_when="online.steps >= 100000"', 'plan.phases.practise.until=["online.episodes >= 40"]',
    "task.env.max_steps=30", "task.stages=2",
]  # fmt: skip
THRESHOLDS = {"judged": 0.2, "strict": 0.999999}
FAKE = ["task=fake", "log=false"]
COLLECT = ["plan=collect", 'plan.phases.demonstrate.until=["demo.episodes >= 10"]']


def judged(run_dir, address, threshold):
    """The rewards of ten demonstrations by the classifier's judgement."""
    judge = [f"task.judge.address={address}", f"task.judge.threshold={threshold}", "task.judge.stage_reward=0.25"]
    start(run_dir, [*FAKE, *COLLECT, *judge])
    return [line["return"] for line in read(run_dir / "metrics.jsonl") if line["kind"] == "episode"][:10]


@pytest.fixture
def datasets(tmp_path):
    """Words for a learner that is given the practice of a run, and its demonstrations."""
    start(tmp_path / "given", GIVEN)
    given, more = (export_run(tmp_path / "given", 1000, [source])[0] for source in ("online", "demo"))
    return [f"plan.sources.given.dataset={given}", f"plan.sources.more.dataset={more}"]


def test_a_classifier_learns_from_one_runs_episodes_and_judges_anothers(datasets, tmp_path):
    words = [*FAKE, "plan=reward_classifier", "task.stages=2", f"inference_port={free_port()}", *datasets]
    words += ['plan.phases.learn.until=["updates >= 800"]', 'plan.phases.calibrate.until=["updates >= 200"]']

    def judges(config, local, port):
        with answering(config, local):
            until(lambda: "serve" in facts(tmp_path / "reward").phases, 10 * PATIENCE)
            address = f"127.0.0.1:{config.inference_port}"
            found.extend(judged(tmp_path / name, address, threshold) for name, threshold in THRESHOLDS.items())
            order(port, "next")

    found = []
    start(tmp_path / "reward", words, acts=False, beside=judges)
    returns, strict = found
    assert {0.0, 0.25, 1.25} >= {*returns}, "a first stage, and success"
    assert returns.count(1.25) >= 8
    assert max(strict) < 1, "nobody else gives success"
    status, said = typed("reward", tmp_path / "reward", "--threshold", "0.2")
    assert (status, said.strip()) == (0, str(tmp_path / "reward/reward.html"))
    page = (tmp_path / "reward/reward.html").read_text()
    assert "failures called success" in page
    ((seen, there),) = re.findall(r"recall of stage 1<td>(\d+) of (\d+)", page)
    assert int(seen) > int(there) / 2 > 0
    sentence = f"error: no judge in {tmp_path}: give the run_dir of plan=reward_classifier or plan=judge\n"
    assert called("reward", tmp_path) == (1, sentence)


def test_a_reward_model_of_somebody_else_judges_what_comes_and_what_is_stored(datasets, tmp_path, monkeypatch):
    judge, other = tmp_path / "judge", tmp_path / "other"
    words = [*FAKE, "plan=judge", "task.stages=2", f"inference_port={free_port()}", *datasets]
    words += ["algo.model._target_=tests.shared.reward_models.Near", "algo.positive=2"]
    words += ['plan.phases.calibrate.until=["updates >= 60"]']

    def judges(config, local, port):
        with answering(config, local):
            until(lambda: "serve" in facts(judge).phases, 10 * PATIENCE)
            found.extend(judged(tmp_path / "judged", f"127.0.0.1:{config.inference_port}", 0.5))
            order(port, "next")

    found = []
    start(judge, words, acts=False, beside=judges)
    assert found.count(1.0) >= 8
    status, said = called("reward", judge, "--threshold", "0.5")
    assert (status, said.strip()) == (0, str(judge / "reward.html"))
    ((wrong, there),) = re.findall(r"failures called success<td>(\d+) of (\d+)", (judge / "reward.html").read_text())
    assert int(wrong) <= int(there) / 4

    def labels(config, local, port):
        until(lambda: "serve" in facts(other).phases, 10 * PATIENCE)
        status, blind = called("reward", judge, "--label", other, "--threshold", "0.9999999", "--port", str(port))
        assert (status, "sees 0 of" in blind) == (1, True), "it would call all of them failures"
        said = [called("reward", judge, "--label", other, "--threshold", "0.5", "--port", str(port)) for _ in range(2)]
        order(port, "next")
        assert [status for status, _ in said] == [0, 0], said
        assert re.match(r"\d+ successes and 0 failures are said", said[0][1])
        assert said[1][1].startswith("0 successes and 0 failures"), "each is judged once"

    monkeypatch.setattr(ScriptedVerdicts, "poll", lambda self: [])  # nobody has said anything
    ends = "+plan.phases.serve={actors: {mode: idle}, until: [operator]}"
    start(other, [*FAKE, *COLLECT, "task.env.verdict_by=operator", ends], beside=labels)
    with closing(Index(other / "store/index.sqlite")) as index:
        known = index.latest(100)
    assert sum((each.judged_by, each.success) == ("reward model", True) for each in known) >= 8
    _, _, infos = open_run(other)
    assert {(each.last_reward, each.terminated) for each in infos if each.judged_by} == {(1.0, True)}
