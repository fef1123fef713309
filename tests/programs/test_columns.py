"""Columns that an algorithm adds: to the rows of a run, and of stored steps, through both programs."""

import json

import numpy as np
import pytest
from serl_client import Feature

from serl_launcher.algorithms.sft import SFT
from serl_launcher.datasets.episodes import opened
from serl_launcher.types import Decision, Window
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


class Encoding(SFT):
    """Encodes each demonstration's steps once, then learns from what is encoded alone."""

    derived = {"code": Feature((2,))}  # noqa: RUF012

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        one = {"observation.state": (0,), "action": (0,)}
        self.windows["update_codes"] = Window(one)
        self.windows["update"] = Window({**self.windows["update"].offsets, "derived.code": self._steps})
        self.counted = 0

    @property
    def _steps(self):
        return self.windows["update"].offsets["action"]

    def update_codes(self, batch):
        count = batch.weight.sum()
        return {"encoded": count}, {"code": batch.observation["observation.state"][:, 0, :2]}

    def update(self, batch):
        state = batch.observation["observation.state"][:, -1, :2]
        assert (batch.extras["derived.code"][:, 0] == state).all() or not state.any()
        return super().update(batch)


def test_an_update_encodes_each_step_once_and_others_learn_from_the_codes(tmp_path):
    """The phase of the encoding ends when it has seen all; the next start finds the codes in the checkpoint."""
    encode = "{actors: {mode: idle}, updates: [{update_codes: {order: once, data: {demo: 1.0}}}], until: [seen]}"
    learn = "{actors: {mode: idle}, updates: [update], data: {demo: 1.0}, until: ['updates >= 5']}"
    words = ["task=fake", "plan=sft", "~plan.phases.clone", "~plan.phases.evaluate", "log=false", "batch_size=16"]
    words += ["policy=flow", "policy.network.hidden=[32,32]", "algo._target_=tests.programs.test_columns.Encoding"]
    demonstrate = "{actors: {mode: teleop, into: demo}, until: ['demo.episodes >= 3']}"
    start(tmp_path, [*words, f"+plan.phases.demonstrate={demonstrate}"])
    start(tmp_path, [*words, f"+plan.phases.encode={encode}", f"+plan.phases.learn={learn}"], acts=False)
    _, _, episodes = opened(tmp_path)
    steps = sum(episode.steps for episode in episodes)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert json.loads((tmp_path / "summary.json").read_text())["updates"] == -(-steps // 16) + 5
    assert any(line.get("encoded") == 16 - -steps % 16 for line in lines), "the last batch had what was left"
    start(tmp_path, [*words, f"+plan.phases.learn={learn}"], acts=False)
    assert json.loads((tmp_path / "summary.json").read_text())["updates"] == -(-steps // 16) + 10
