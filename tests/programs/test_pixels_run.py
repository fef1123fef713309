"""The plan hiors with images, in its real processes: twenty episodes of the arm that no state shows the block to."""

import hashlib
import json
import runpy
import sys

import numpy as np
import pytest
import safetensors.torch
from serl_client.spec import Spec

from robot_infra.cameras import gl
from serl_launcher.replay.views import EpisodeInfo
from serl_launcher.store.index import Index
from serl_launcher.store.layout import Layout
from tests.shared.common import TOOLS
from tests.shared.programs import Programs

CAMERAS, SIZE = ("cam_high", "cam_wrist"), 32
EPISODES = {"demonstrate": 8, "baseline": 2, "practise": 4, "evaluate": 3, "check": 3}
TASK = ["task=sim_arm_pixels", f"task.image_size={SIZE}"]
WORDS = [
    "plan=hiors", "algo=rejection_pixels", "policy=flow_pixels", "policy.encoder.channels=[8,8,16]",
    "policy.hidden=[64,64]", "policy.steps=4", "batch_size=32", "algo.augment.shift=1",
    "plan.sources.demo.capacity=2000", "plan.sources.online.capacity=2000",
    "+plan.sources.check={capacity: 500}",  # demonstrations that nothing trains on
    f'+plan.phases.check={{actors:{{mode:teleop,into:check}},until:["check.episodes >= {EPISODES["check"]}"]}}',
    'plan.phases.clone.until=["updates >= 60"]', 'plan.phases.practise.start_when="online.episodes >= 1"',
    f'plan.phases.demonstrate.until=["demo.episodes >= {EPISODES["demonstrate"]}"]',
    *(f'plan.phases.{name}.until=["episodes >= {EPISODES[name]}"]' for name in ("baseline", "practise", "evaluate")),
]  # fmt: skip


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a run whose learner and actor have ended with 0."""
    if not gl.backend():
        pytest.skip("this machine can draw no camera images")
    programs = Programs(tmp_path_factory.mktemp("pixels"))
    try:
        programs.complete([*TASK, *WORDS], TASK)
    finally:
        programs.end()
    return programs.run_dir


@pytest.fixture(scope="module")
def stored(finished):
    """(Spec, its sources by name, all episodes, the sha256 of every version of the weights)."""
    index = Index(finished / "store/index.sqlite")
    spec, sources = Spec.from_dict(index.meta("spec")), index.sources()
    episodes = [EpisodeInfo(*row) for row in index.catalog(0, 100)[1]]
    names = {weights["version"]: weights["sha256"] for weights in index.weights(1000)}
    index.close()
    return spec, sources, episodes, names


@pytest.mark.slow
def test_every_phase_has_its_episodes_and_the_human_helped(stored):
    _, _, episodes, _ = stored
    ended = [episode.phase for episode in episodes if episode.closed and episode.final]
    assert all(ended.count(phase) >= count for phase, count in EPISODES.items())
    assert any(episode.intervened for episode in episodes if episode.phase == "practise")
    assert not any(episode.intervened for episode in episodes if episode.source == "eval")


@pytest.mark.slow
def test_every_row_has_both_images_and_their_ages_and_no_state_shows_the_block(finished, stored):
    spec, sources, _, _ = stored
    assert not any(name.startswith(("block", "way")) for name in spec.observation["observation.state"].names)
    for source in sources.values():
        layout, folder = Layout(spec, source.capacity), finished / "store" / source.name
        steps, observations = layout.steps(folder)[: source.head], layout.observations(folder)
        assert len(steps)
        for camera in CAMERAS:
            images = observations[f"observation.images.{camera}"][: source.row_head]
            assert images.shape[1:] == (SIZE, SIZE, 3)
            assert (images.reshape(len(images), -1).std(1) > 5).all()  # none is black
            ages = steps[f"extras.age.{camera}"]
            assert ((ages >= 0) & (ages < 5)).all()
            assert ages.any()


@pytest.mark.slow
def test_the_evaluation_ran_the_weights_that_were_trained_last(finished, stored):
    spec, sources, episodes, names = stored
    summary = json.loads((finished / "summary.json").read_text())
    assert summary["before"]["episodes"] == EPISODES["baseline"]
    assert summary["eval"]["episodes"] == summary["eval"]["distinct_starts"] == EPISODES["evaluate"]
    steps = Layout(spec, sources["eval"].capacity).steps(finished / "store/eval")[: sources["eval"].head]
    acted = {}
    for phase in ("baseline", "evaluate"):
        numbers = [episode.number for episode in episodes if episode.phase == phase]
        (acted[phase],) = np.unique(steps["weights"][np.isin(steps["episode"], numbers)])
    assert (
        names[acted["evaluate"]] == summary["eval"]["weights_sha256"] == names[max(names)] != names[acted["baseline"]]
    )
    file = finished / "weights" / f"{names[acted['evaluate']]}.safetensors"
    assert hashlib.sha256(file.read_bytes()).hexdigest() == file.stem
    assert sum(name.endswith("layers.0.weight") for name in safetensors.torch.load_file(file)) == len(CAMERAS)


@pytest.mark.slow
def test_the_run_can_be_asked_what_its_policy_looks_at(finished, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["inputs.py", "--run-dir", str(finished), "--source", "check"])
    runpy.run_path(str(TOOLS / "inputs.py"), run_name="__main__")
    said = capsys.readouterr().out
    assert f"{EPISODES['check']} successful episodes of check" in said
    assert "all cameras shuffled" in said
