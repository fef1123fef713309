"""Two plans whose content is looked at: sac_pi0, and hiors with images. All runs in threads of this process."""

import json

import pytest

from robot_infra.cameras import gl
from tests.shared import oracle
from tests.shared.common import STATE
from tests.shared.here import start
from tests.shared.tools import called

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread", "same_loggers")]

SAC_PI0 = [
    "task=fake", "plan=sac_pi0", "policy.head.steps=3", "policy.network.hidden=[64,64]", "critic.hidden=[64,64]",
    "batch_size=32",
    'plan.phases.demonstrate.until=["demo.episodes >= 6"]', 'plan.phases.clone.until=["updates >= 15"]',
    'plan.phases.baseline.until=["episodes >= 4"]', 'plan.phases.warm_up.start_when="online.episodes >= 3"',
    'plan.phases.warm_up.until=["updates >= 20"]', 'plan.phases.practise.until=["updates >= 40"]',
    'plan.phases.evaluate.until=["episodes >= 6"]', "log=false",
]  # fmt: skip
CAMERAS, SIZE = ("cam_high", "cam_wrist"), 32
PIXELS = [
    "task=sim_arm_pixels", f"task.image_size={SIZE}", "plan=hiors", "algo=rejection_pixels", "policy=flow_pixels",
    "policy.encoder.channels=[8,8,16]", "policy.network.hidden=[64,64]", "policy.head.steps=4", "batch_size=32",
    "algo.augment.shift=1", "plan.sources.demo.capacity=2000", "plan.sources.online.capacity=2000", "log=false",
    "+plan.sources.check={capacity: 500}",  # demonstrations that nothing trains on
    '+plan.phases.check={actors:{mode:teleop,into:check},until:["check.episodes >= 3"]}', "~plan.phases.baseline",
    'plan.phases.clone.until=["updates >= 60"]', 'plan.phases.practise.start_when="online.episodes >= 1"',
    'plan.phases.demonstrate.until=["demo.episodes >= 4"]', 'plan.phases.practise.until=["episodes >= 2"]',
    'plan.phases.evaluate.until=["episodes >= 1"]',
]  # fmt: skip


def test_sac_pi0_updates_what_each_phase_says_and_says_how_far_values_are_from_the_returns(tmp_path):
    start(tmp_path, SAC_PI0)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    ended = [line["phase"] for line in lines if line["kind"] == "episode"]
    least = {"demonstrate": 6, "baseline": 4, "warm_up": 3, "evaluate": 6}
    assert all(ended.count(phase) >= count for phase, count in least.items())
    updates = [line for line in lines if line["kind"] == "update"]
    cloned, practised = ([line for line in updates if name in line] for name in ("loss", "policy_loss"))
    assert cloned
    assert all(line["updates"] <= 15 for line in cloned)
    assert all(line["updates"] > 35 for line in practised)
    assert {"critic_loss", "value", "distill", "value_of_policy", "value_error", "value_bias"} <= practised[-1].keys()
    assert not {"entropy", "temperature"} & practised[-1].keys()
    found = {line["phase"]: line for line in lines if line["kind"] == "evaluation"}
    assert found.keys() == {"baseline", "evaluate"}
    assert all(0 <= abs(line["value_bias"]) <= line["value_error"] < 2 for line in found.values())
    assert json.loads((tmp_path / "summary.json").read_text())["updates"] == 75


@pytest.mark.skipif(not gl.backend(), reason="this machine can draw no camera images")
def test_every_row_has_both_images_and_their_ages_and_the_run_can_be_asked_what_its_policy_looks_at(tmp_path):
    start(tmp_path, PIXELS)
    found = oracle.whole(tmp_path / "store")
    names = found.spec["observation"][STATE]["names"]
    assert not any(name.startswith(("block", "way")) for name in names)
    for name, source in found.sources.items():
        columns = oracle.rows(tmp_path / "store" / name / "rows", found.spec, oracle.slots(source["capacity"]))
        steps = [step.record for number in found.steps for step in found.steps[number]]
        for camera in CAMERAS:
            images = columns[f"observation.images.{camera}"][: source["row_head"]]
            assert images.shape[1:] == (SIZE, SIZE, 3)
            assert (images.reshape(len(images), -1).std(1) > 5).all()  # none is black
            ages = [float(record[f"age.{camera}"]) for record in steps]
            assert -5 < min(ages) < max(ages) <= 0, "each is drawn just after its state was read"
    status, said = called("inputs", "--run-dir", tmp_path, "--source", "check")
    assert status == 0
    assert "successful episodes of check" in said
    assert "all cameras shuffled" in said
