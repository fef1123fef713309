"""World Models from the first drifting step to the evaluation: who acted in which episode, and what was told of it."""

import json

import numpy as np
import pytest
from safetensors.torch import load_file

from serl_launcher.datasets.episodes import opened
from tests.shared.here import start

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread", "same_loggers")]

POPULATION, ROLLOUTS, UPDATES = 4, 2, 20
RUN = [
    "task=puck", "task.env.max_steps=12", "plan=world_models", "algo=world_models_tiny", "algo.widths=[4,4,4]",
    "algo.codes=3", "algo.hidden=4", "algo.episode_steps=12", f"algo.population={POPULATION}",
    f"algo.rollouts={ROLLOUTS}", "batch_size=8", "random_steps=60", "max_env_steps=1000", "log=false",
    'plan.phases.see.until=["updates >= 3"]', 'plan.phases.predict.until=["updates >= 3"]',
    f'plan.phases.evolve.until=["updates >= {UPDATES}"]', 'plan.phases.evaluate.until=["episodes >= 2"]',
]  # fmt: skip


def kept(run_dir):
    """What the newest checkpoint has of the evolution."""
    newest = max((run_dir / "checkpoints").glob("[0-9]*"), key=lambda path: int(path.name))
    tensors = load_file(newest / "tensors.safetensors")
    return {
        name: tensors[f"algorithm.{name}"] for name in ("evolution.generation", "returns", "told", "evolution.mean")
    }


def expected(episodes, count):
    """What the first `count` of (candidate's generation, its index, return) tell: (generation, returns)."""
    generation, told = 1, [[] for _ in range(POPULATION)]
    for of, index, value in episodes[:count]:
        if of == generation and len(told[index]) < ROLLOUTS:
            told[index].append(value)
        if all(len(each) == ROLLOUTS for each in told):
            generation, told = generation + 1, [[] for _ in range(POPULATION)]
    return generation, told


def test_each_return_is_told_of_the_candidate_that_acted_and_no_episode_twice(tmp_path):
    start(tmp_path, RUN)
    _, readers, episodes = opened(tmp_path)
    played = []
    for episode in episodes:
        rows = readers[episode.source].rows(episode)
        told, drifts = rows["candidate"], episode.source != "online"
        np.testing.assert_array_equal(told[:, 2], np.arange(len(told)) * (not drifts))
        assert (told[:, :2] == told[0, :2]).all()
        assert drifts == (told[0, 0] == 0)
        if not drifts:
            assert len(told) == 12
            played.append((*told[0, :2].tolist(), float(rows["reward"].sum())))
    assert len(played) >= UPDATES
    assert max(of for of, *_ in played) >= 2
    state = kept(tmp_path)
    generation, told = expected(played, UPDATES)
    assert state["evolution.generation"] == generation >= 2
    np.testing.assert_allclose([value for each in told for value in each],
                               state["returns"][state["told"] >= 0], rtol=1e-5)  # fmt: skip
    assert [len(each) for each in told] == (state["told"] >= 0).sum(1).tolist()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    shown = [line["generation"] for line in lines if "generation" in line]
    assert shown[-1] == generation

    start(tmp_path, [*RUN, "phase=evolve", "plan.phases.evolve.until=[seen]"], acts=False)
    generation, told = expected(played, len(played))
    again = kept(tmp_path)
    assert again["evolution.generation"] == generation, "the new phase saw all episodes again"
    assert [len(each) for each in told] == (again["told"] >= 0).sum(1).tolist()
