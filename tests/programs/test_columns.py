"""Columns that an algorithm adds to the rows of a run."""

import numpy as np
import pytest

from serl_launcher.algorithms.sft import SFT
from serl_launcher.datasets.episodes import opened
from serl_launcher.types import Decision
from tests.shared.here import start

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread", "same_loggers")]

RUN = [
    "task=fake", "plan=hiors", "policy=flow", "policy.network.hidden=[32,32]", "policy.head.steps=2", "batch_size=16",
    "policy.history=2", 'plan.phases.demonstrate.until=["demo.episodes >= 2"]', "~plan.phases.baseline",
    'plan.phases.clone.until=["updates >= 10"]', 'plan.phases.practise.start_when="online.episodes >= 1"',
    'plan.phases.practise.until=["episodes >= 2"]', 'plan.phases.evaluate.until=["episodes >= 1"]', "log=false",
]  # fmt: skip


class Noting(SFT):
    """Also says the first action of each chunk, and how far the arm has moved between what it sees."""

    def act(self, observation, *rest, **options):
        decision, carry = super().act(observation, *rest, **options)
        state = observation["observation.state"]
        assert state.shape[1] == 2
        return Decision(decision.action, {"first": decision.action[:, 0], "moved": state[:, 1] - state[:, 0]}), carry


def test_what_an_algorithm_decides_besides_actions_lies_in_the_rows_on_which_it_acted(tmp_path):
    extras = ["+extras.first=action", "+extras.moved={shape: [6]}"]
    start(tmp_path, [*RUN, "algo._target_=tests.programs.test_columns.Noting", *extras])
    spec, readers, episodes = opened(tmp_path)
    assert spec.extras["first"].shape == spec.action.shape
    policys = 0
    for episode in episodes:
        rows = readers[episode.source].rows(episode)
        begins, theirs = np.flatnonzero(rows["chunk_start"]), rows["intervened"]
        assert not rows["first"][theirs].any(), "a person decides nothing"
        np.testing.assert_allclose(rows["first"][begins], rows["action"][begins], atol=1e-6)
        for row in begins[begins > 0]:
            moved = rows["observation.state"][row] - rows["observation.state"][row - 1]
            np.testing.assert_allclose(rows["moved"][row], moved, atol=1e-6)
        policys += len(begins)
    assert policys > 5
