"""The statistics of a source or view, of each column and of what is measured of its windows."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from serl_client import Outcome

from serl_launcher.replay import statistics as measuring
from serl_launcher.replay.statistics import statistics
from serl_launcher.types import Window
from tests.shared.common import STATE

RELATIVE = {"moves": (Window({STATE: (0,), "action": (0, 1, 2, 3, 4)}), lambda batch: moves(batch))}


def moves(batch):
    """What each valid action of a window is beside the state at its first step, [n, 2]."""
    return (batch.action - batch.observation[STATE][:, :, :2])[batch.valid]


def test_statistics_are_of_each_column_of_what_a_view_holds(push, sources, make_segment):
    for seq, (key, won) in enumerate(((1, True), (5, True), (9, False))):
        push("A", make_segment(f"e{seq}", key, 0, 3, ends="terminated"), Outcome(f"e{seq}", won))
    found = statistics(sources(), "success")
    assert {name: column[STATE].tolist() for name, column in found.items()} == {
        "mean": [3, 1] * 4, "std": pytest.approx([2, (2 / 3) ** 0.5] * 4), "low": [1, 0] * 4, "high": [5, 2] * 4,
        "q01": pytest.approx([1, 0] * 4), "q99": pytest.approx([5, 2] * 4),
    }  # fmt: skip
    assert found["low"]["action"].tolist() == found["high"]["action"].tolist() == [0.5, 0.5]


@pytest.mark.parametrize("block", [measuring.BLOCK, 3])
def test_what_is_measured_is_of_every_window_and_of_its_steps_in_the_episode(
    block, push, sources, make_segment, monkeypatch
):
    monkeypatch.setattr(measuring, "BLOCK", block)
    random, expected = np.random.default_rng(0), []
    for name, steps, won in (("a", 12, True), ("lost", 9, False), ("short", 2, True)):
        state, action = random.normal(size=(steps + 1, 8)), random.normal(size=(steps, 2))
        segment = replace(
            make_segment(name, 0, 0, steps, ends="terminated"),
            observation={STATE: state.astype(np.float32)}, action=action.astype(np.float32),
        )  # fmt: skip
        push("A", segment, Outcome(name, won))
        expected += [action[t : t + 5] - state[t, :2] for t in range(steps) if won]
    rows = np.concatenate(expected).astype(np.float32)
    assert len(rows) == 12 * 5 - 10 + 3
    found = {kind: each["moves"] for kind, each in statistics(sources(), "success", RELATIVE).items()}
    for kind, of in (
        ("mean", np.mean), ("std", np.std), ("low", np.min), ("high", np.max),
        ("q01", lambda each, axis: np.quantile(each, 0.01, axis)),
        ("q99", lambda each, axis: np.quantile(each, 0.99, axis)),
    ):  # fmt: skip
        np.testing.assert_allclose(found[kind], of(rows, axis=0), rtol=1e-5, atol=1e-6)


def test_of_a_large_source_every_so_manieth_window_is_measured(whole, sources, monkeypatch):
    monkeypatch.setattr(measuring, "WINDOWS", 15)
    whole([1, 2, 3, 4])
    seen = []
    statistics(sources(), "online", {"moves": (RELATIVE["moves"][0], lambda batch: seen.append(batch) or moves(batch))})
    begins = torch.cat([batch.observation[STATE][:, 0, 1] for batch in seen])
    assert begins.tolist() == [0, 3, 6, 9, 2, 5, 8, 1, 4, 7, 0, 3, 6, 9]
