"""Two tasks that set each other up, practised by the real programs on the simulated arm, without a hand."""

import json
from itertools import pairwise

import numpy as np
import pytest

from robot_infra.tasks.sim_arm import NAMES, SCALE
from serl_launcher.datasets.episodes import open_run
from serl_launcher.training.metrics import read

pytest.importorskip("mujoco")
LEFT, RIGHT = "put the block on the left", "put the block on the right"
PAIR = ["task=sim_arm", "task.env.goal=sides", "reset=other_task", "log=false", "~plan.phases.baseline"]
SHORT = [
    "critic.hidden=[16,16]", "policy.hidden=[16,16]", 'plan.phases.demonstrate.until=["demo.episodes >= 5"]',
    'plan.phases.evaluate.until=["episodes >= 1"]',
]  # fmt: skip
BLOCK = [NAMES.index(f"block.{axis}") for axis in "xyz"]


@pytest.mark.parametrize(
    ("episodes", "words"),
    [
        pytest.param(4, SHORT, marks=pytest.mark.slow, id="a few"),
        pytest.param(200, [], marks=[pytest.mark.nightly, pytest.mark.timeout(3600)], id="200"),
    ],
)
def test_a_forward_and_a_backward_task_practise_without_a_hand(programs, episodes, words):
    words = [*PAIR, *words, f'plan.phases.practise.until=["episodes >= {episodes}"]']
    for side in [programs.start(side, *words) for side in ("actor", "learner")]:
        assert side.wait(15 * episodes + 300) == 0, programs.said()[-4000:]
    _, readers, found = open_run(programs.run_dir)
    found = sorted((episode for episode in found if episode.final), key=lambda episode: episode.number)
    assert sum(episode.phase == "practise" for episode in found) >= episodes
    assert [episode.task for episode in found[:5]] == [LEFT, RIGHT, LEFT, RIGHT, LEFT], "the script succeeds"
    for before, after in pairwise(found):
        assert (before.task == after.task) == (not before.success), "a success is the other task's turn"
        ended, begun = (readers[each.source].rows(each)["observation.state"] for each in (before, after))
        moved = (ended[-1] - begun[0])[BLOCK[:2]] / SCALE[BLOCK[:2]]
        assert np.abs(moved).max() < 0.12, "the scene was left as it was, but for one step and the way home"
    person = json.loads((programs.run_dir / "summary.json").read_text())["person"]
    steps = sum(episode.steps for episode in found if episode.source == "demo")
    assert person == {
        "demonstrations_min": pytest.approx(steps / 600, abs=0.01), "takeovers_min": 0, "resets_min": 0,
        "waiting_min": 0, "hand_resets": 0,
    }  # fmt: skip
    told = list(read(programs.run_dir / "metrics.jsonl"))
    assert [line["phase"] for line in told if line["kind"] == "person"] == ["demonstrate", "practise", "evaluate"]
    assert {line["task"] for line in told if line["kind"] == "episode"} == {LEFT, RIGHT}
