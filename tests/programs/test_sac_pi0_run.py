"""The plan sac_pi0 in its real processes, on the point in the plane: every phase runs, and values are checked."""

import json

import pytest
import safetensors.torch
import torch

from tests.shared.programs import Programs

EPISODES = {"demonstrate": 6, "baseline": 4, "evaluate": 6}
WORDS = [
    "plan=sac_pi0", "policy.steps=3", "policy.hidden=[64,64]", "algo.hidden=[64,64]", "batch_size=64", "checkpoint_s=2",
    'plan.phases.demonstrate.until=["demo.episodes >= 6"]', 'plan.phases.clone.until=["updates >= 150"]',
    'plan.phases.baseline.until=["episodes >= 4"]', 'plan.phases.warm_up.start_when="online.episodes >= 3"',
    'plan.phases.warm_up.until=["updates >= 100"]', 'plan.phases.practise.until=["updates >= 300"]',
    'plan.phases.evaluate.until=["episodes >= 6"]',
]  # fmt: skip


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """(the folder of a run whose learner and actor have ended with 0, the lines of its metrics)."""
    programs = Programs(tmp_path_factory.mktemp("sac_pi0"))
    try:
        programs.complete(["task=fake", *WORDS], ["task=fake"])
    finally:
        programs.end()
    run_dir = programs.run_dir
    return run_dir, [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_every_phase_has_its_episodes_and_its_own_updates(finished):
    run_dir, lines = finished
    ended = [line["phase"] for line in lines if line["kind"] == "episode"]
    assert all(ended.count(phase) >= count for phase, count in EPISODES.items())
    assert ended.count("warm_up") >= 3
    updates = [line for line in lines if line["kind"] == "update"]
    cloned, practised = ([line for line in updates if name in line] for name in ("loss", "policy_loss"))
    assert cloned
    assert all(line["updates"] <= 150 for line in cloned)
    assert all(line["updates"] > 250 for line in practised)
    assert {"critic_loss", "value", "distill", "value_of_policy", "value_error", "value_bias"} <= practised[-1].keys()
    assert not {"entropy", "temperature"} & practised[-1].keys()
    assert json.loads((run_dir / "summary.json").read_text())["updates"] == 550


@pytest.mark.slow
def test_evaluations_say_how_far_values_are_from_the_returns_that_followed(finished):
    _, lines = finished
    found = {line["phase"]: line for line in lines if line["kind"] == "evaluation"}
    assert found.keys() == {"baseline", "evaluate"}
    for line in found.values():
        assert 0 <= abs(line["value_bias"]) <= line["value_error"] < 2


@pytest.mark.slow
def test_what_is_published_is_the_policy_and_what_is_kept_the_rest_too(finished):
    run_dir, _ = finished
    summary = json.loads((run_dir / "summary.json").read_text())
    published = safetensors.torch.load_file(run_dir / "weights" / f"{summary['eval']['weights_sha256']}.safetensors")
    assert {name.partition(".")[0] for name in published} == {"encoder", "network", "scale"}
    newest = max((run_dir / "checkpoints").glob("[0-9]*"), key=lambda path: int(path.name))
    (file,) = [path for path in newest.iterdir() if path.suffix not in (".json", ".yaml")]
    kept = torch.load(file, weights_only=True)["algorithm"]
    assert torch.equal(kept["policy.network.0.weight"], published["network.0.weight"])
    assert not torch.equal(kept["policy.network.0.weight"], kept["reference.network.0.weight"])
