"""A policy that lerobot knows is trained further here, and goes back to lerobot (docs/guides/lerobot.md)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hydra.utils import instantiate
from serl_client import Feature, Spec

from robot_infra.sim.feetech import ENDS, FeetechBus
from serl_launcher.training import memory
from serl_launcher.training.metrics import read
from tests.shared.common import STATE
from tests.shared.here import start
from tests.shared.lerobot_policies import ACT, ACT_WORD, Theirs
from tests.shared.models import config_of
from tests.shared.plugins import publish
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


JOINTS = [
    f"{name}.pos" for name in ("shoulder_pan", "shoulder_lift", "elbow_flex", "wrist_flex", "wrist_roll", "gripper")
]
POSE = (15.0, -20.0, 30.0, -10.0, 5.0, 40.0)  # degrees, and per cent of the gripper
ROLLOUT = Path(sys.executable).with_name("lerobot-rollout")


@pytest.mark.skipif(not ROLLOUT.exists(), reason="lerobot 0.6 on Python 3.12")
def test_lerobot_rollout_drives_an_so101_by_what_was_exported(tmp_path):
    named = {"names": tuple(JOINTS), "low": -100.0, "high": 100.0}
    image = Feature((48, 64, 3), "uint8")
    spec = Spec(
        {STATE: Feature((6,), names=tuple(JOINTS)), "observation.images.top": image}, Feature((6,), **named), 20
    )
    policy = instantiate(config_of("+policy=lerobot").policy)(spec, type="act", options=ACT)
    pose, one = torch.tensor(POSE), torch.full((6,), 1e-2)
    kinds = {"mean": pose, "std": one, "low": pose - one, "high": pose + one, "q01": pose - one, "q99": pose + one}
    policy.statistics.set_statistics({kind: {STATE: value, "action": value} for kind, value in kinds.items()})
    policy.save(tmp_path / "act")
    site = str(publish(tmp_path / "site"))
    with FeetechBus(obeys_old_goals=True) as arm:
        (tmp_path / "arm.json").write_text(json.dumps(arm.calibration()))
        command = [
            ROLLOUT, f"--policy.path={tmp_path / 'act'}", "--robot.type=so101_follower", f"--robot.port={arm.path}",
            "--robot.id=arm", f"--robot.calibration_dir={tmp_path}", "--device=cpu", "--fps=20", "--duration=4",
            "--robot.cameras={top: {type: x_camera, width: 64, height: 48, fps: 60}}", "--task=pick",
            "--play_sounds=false", "--return_to_initial_position=false",
        ]  # fmt: skip
        offline = {**os.environ, "PYTHONPATH": site, "HF_HUB_OFFLINE": "1", "HF_LEROBOT_HOME": str(tmp_path / "home")}
        done = subprocess.run(command, env=offline, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr[-3000:]
        goals = [servo.goals[-1][1] for servo in arm.servos.values()]
    turned = [(low + high) / 2 + angle * 4095 / 360 for (low, high), angle in zip(ENDS, POSE, strict=True)]
    low, high = ENDS[-1]
    expected = [*turned[:-1], low + (high - low) * POSE[-1] / 100]
    assert goals == pytest.approx(expected, abs=2), "in steps: the pose that all of its actions were near"
