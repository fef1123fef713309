"""A run whose rewards come from a person alone: the actor sends their words, and the trainer learns from them."""

import json

import pytest

from serl_launcher.datasets.episodes import opened
from serl_launcher.replay.mixture import ReplayMixture
from serl_launcher.store.index import Index
from serl_launcher.training.plan_reader import plan_of
from serl_launcher.types import Window
from tests.shared import oracle
from tests.shared.common import STATE
from tests.shared.here import start

pytestmark = pytest.mark.usefixtures("one_thread", "same_loggers")

WORDS = [
    "task=fake", "task.env.verdict_by=operator", "task.env.max_steps=30", "task.verdict.success=2.0",
    "critic.hidden=[16,16]", "policy.hidden=[16,16]", "batch_size=16", "log=false", "~plan.phases.baseline",
    'plan.phases.demonstrate.until=["demo.episodes >= 3"]', 'plan.phases.practise.start_when="online.steps >= 60"',
    'plan.phases.practise.until=["env_steps >= 100"]', 'plan.phases.evaluate.until=["episodes >= 2"]',
]  # fmt: skip


@pytest.mark.slow
def test_rlpd_learns_from_the_verdicts_of_a_person_where_no_judge_gives_a_reward(tmp_path):
    config = start(tmp_path, WORDS)
    found = oracle.whole(tmp_path / "store")
    records = [step.record for steps in found.steps.values() for step in steps]
    assert not any(float(record["reward"]) for record in records), "what is stored is what the judge said: nothing"
    assert {row["judged_by"] for row in found.outcomes} == {"operator"}
    spec, readers, infos = opened(tmp_path)
    shown = {info.id: (readers[info.source].rows(info), info) for info in infos if info.success is not None}
    assert {bool(info.success) for _, info in shown.values()} == {True, False}, "demonstrations succeed, practice fails"
    for rows, info in shown.values():
        assert rows["reward"].tolist() == [0.0] * (info.steps - 1) + [2.0 if info.success else 0.0]
        assert rows["terminated"].tolist() == [False] * (info.steps - 1) + [True]
        assert not rows["truncated"].any()
    late = [row for row in found.episodes.values() if row["truncated"] and row["success"] == 0]
    assert late, "failure is said between two episodes"
    plan = plan_of(config)
    sources = ReplayMixture(tmp_path / "store", spec, plan.capacities, {}, seed=0, verdict=plan.verdict)
    index = Index(tmp_path / "store" / "index.sqlite")
    sources.update(index.catalog(0, 1000)[1])
    index.close()
    window = Window({STATE: (0,), "action": (0,), "next_observation": (1,)})
    batch = sources.sample(300, window, {"online": 0.5, "demo": 0.5})
    assert set(batch.reward[batch.terminated].tolist()) == {0.0, 2.0}
    assert set(batch.reward[~batch.terminated].tolist()) == {0.0}
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    returns = {line["return"] for line in lines if line["kind"] == "episode" and line["phase"] == "demonstrate"}
    assert returns == {2.0}
