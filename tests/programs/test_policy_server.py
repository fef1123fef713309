"""A clone behind the bridge of its own run is improved by another run, which asks it as any policy server."""

import socket
from contextlib import suppress

import numpy as np
import pytest
from safetensors.numpy import load_file

from serl_launcher.config import composed
from serl_launcher.datasets.episodes import open_run
from serl_launcher.training.report import read
from tests.shared.common import CONFIG, free_port, until
from tests.shared.here import answering, serving, start

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread", "same_loggers")]

TASK = ["task=fake", "log=false", "batch_size=32", "checkpoint_s=600"]
CLONE = ["policy=flow", "policy.head.steps=3", "policy.network.hidden=[32,32]", *TASK]
COLLECT = ["plan=collect", 'plan.phases.demonstrate.until=["demo.episodes >= 3"]']
SFT = ["plan=sft", 'plan.phases.clone.until=["updates >= 60"]', 'plan.phases.evaluate.until=["episodes >= 1"]']
COLUMNS = ["base_action", "has_base"]
RESIDUAL = [
    *TASK, "plan=residual", "n_action_steps=3", "critic.hidden=[32,32]", "algo.hidden=[32,32]",
    'plan.phases.baseline.until=["episodes >= 2"]', 'plan.phases.collect.until=["episodes >= 2"]',
    'plan.phases.warm_up.until=["updates >= 20"]', 'plan.phases.practise.until=["updates >= 200"]',
    'plan.phases.evaluate.until=["episodes >= 2"]',
]  # fmt: skip


def listens(port):
    with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False


def test_a_clone_behind_a_bridge_acts_alone_and_then_with_edits_and_its_actions_lie_in_the_rows(tmp_path):
    clone, better, port = tmp_path / "clone", tmp_path / "better", free_port()
    for plan in (COLLECT, SFT):
        start(clone, [*CLONE, *plan])
    words = ["plan=evaluate", f"bridge.port={port}", f"inference_port={free_port()}", *CLONE]
    served = composed(CONFIG, ["learner=true", f"run_dir={clone}", *words])
    with serving(served) as (local, _), answering(served, local):
        until(lambda: listens(port))
        start(better, [*RESIDUAL, f"policy.url=ws://127.0.0.1:{port}"])
    _, readers, episodes = open_run(better)
    every = [readers[episode.source].rows(episode) for episode in episodes]
    rows = {name: np.concatenate([each[name] for each in every]) for name in (*COLUMNS, "action", "weights_version")}
    assert rows["has_base"].all()
    assert len(np.unique(rows["base_action"], axis=0)) > len(rows["action"]) // 2
    moved, is_first = np.abs(rows["action"] - rows["base_action"]).max(1), rows["weights_version"] == 1
    assert {episode.phase for episode in episodes} >= {"baseline", "collect", "evaluate"}
    np.testing.assert_allclose(moved[is_first], 0, atol=1e-6, err_msg="until the first update of the edits")
    assert (moved[~is_first] > 0.01).any()
    assert (moved <= 0.3 + 1e-6).all(), "within algo.reach"
    assert read(better / "summary.json")["updates"] >= 200
    for file in (better / "weights").glob("*.safetensors"):
        assert {name.partition(".")[0] for name in load_file(file)} == {"critic", "editor", "has_edits"}
