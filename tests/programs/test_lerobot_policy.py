"""A policy that lerobot knows is trained further here, and goes back to lerobot (docs/lerobot.md)."""

import pytest
import safetensors.torch
import torch

from serl_launcher.training import memory
from serl_launcher.training.metrics import read
from tests.shared.here import start
from tests.shared.lerobot_policies import ACT_WORD, Theirs
from tests.shared.tools import called

pytest.importorskip("lerobot", reason="the extra `data` is not installed: . examples/install.sh --extra data")
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread", "same_loggers")]

HIORS = [
    "task=fake", "policy.rename={observation.state: observation.environment_state}", "policy.cameras=[]", "plan=hiors",
    "algo=rejection_lerobot", "log=false", "batch_size=4",
    'plan.phases.demonstrate.until=["demo.episodes >= 2"]', 'plan.phases.baseline.until=["episodes >= 1"]',
    'plan.phases.practise.until=["updates >= 6"]', 'plan.phases.evaluate.until=["episodes >= 1"]',
]  # fmt: skip


def exported(run, folder):
    status, said = called("policy", "export", run, folder)
    assert status == 0, said
    Theirs(folder)
    return safetensors.torch.load_file(folder / "model.safetensors")


def test_a_folder_of_lerobot_is_trained_further_by_the_words_of_the_page_and_goes_back(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "SMALL", 0)  # a real one is larger, and its memory is counted in another way
    start(tmp_path / "first", [*HIORS, ACT_WORD, 'plan.phases.clone.until=["updates >= 3"]', "~plan.phases.practise"])
    before = exported(tmp_path / "first", tmp_path / "pretrained_model")
    start(tmp_path / "better", [*HIORS, "~plan.phases.clone", f"policy.path={tmp_path / 'pretrained_model'}"])
    after = exported(tmp_path / "better", tmp_path / "better_act")
    assert [line["phase"] for line in read(tmp_path / "better/metrics.jsonl") if line["kind"] == "evaluation"]
    assert before.keys() == after.keys()
    assert any(not torch.equal(before[name], after[name]) for name in before)
    one, other = (Theirs(tmp_path / name).pre.steps for name in ("pretrained_model", "better_act"))
    for step, there in zip(one, other, strict=True):
        torch.testing.assert_close(getattr(step, "_tensor_stats", {}), getattr(there, "_tensor_stats", {}))
