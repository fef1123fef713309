"""Stages of a task: who tells them, and the column of the rows that keeps them."""

from types import SimpleNamespace

import numpy as np
import pytest
from serl_client.errors import ConfigError

from robot_infra.stages import stages_of
from tests.shared.actors import Keys
from tests.shared.robots import build, from_yaml, play


def test_what_a_person_told_last_is_the_stage_until_the_episode_ends_and_the_last_key_is_success():
    told = ["stage 9", "stage 1", "pause", "stage 2", "stage 0", "stage 3"]
    with build(max_steps=20) as env:
        keys = stages_of(env, Keys({look: [event] for look, event in enumerate(told)}), 3)
        env.reset(0)
        heard, rows = [], []
        for _ in told:
            heard += keys.poll()
            rows.append(int(env.step(np.zeros(2, np.float32)).extras["stage"]))
        assert rows == [0, 1, 1, 2, 0, 0]
        assert heard == ["pause", "success"], "the learner hears of no stage"
        keys.told = 2
        env.reset(1)
        assert env.step(None).extras["stage"] == 0
        assert keys.legend({"keys": "s success"})["stages"].startswith("1 to 2 reached   3 success")


@pytest.mark.parametrize(("task", "count"), [("fake", 2), ("sim_arm", 2), ("fake", 3)])
def test_a_simulated_judge_tells_the_stage_before_success_which_is_the_last_and_a_person_overrules_it(task, count):
    pytest.importorskip("mujoco" if task == "sim_arm" else "numpy")
    with from_yaml(task) as env:
        keys = stages_of(env, Keys({}), count)
        stages = [int(step.extras["stage"]) for step in play(env, 1, teleop=True)]
        assert stages[0] == 0
        assert stages[-2:] == [1, count]
        env.reset(1, teleop=True)
        keys.told = 0
        while not (step := env.step(None)).terminated:
            pass
        assert step.extras["stage"] == 0


def test_without_stages_the_rows_have_no_column_and_what_cannot_be_is_refused():
    with build() as env:
        assert stages_of(env, Keys({0: ["stage 1"]}), 1).poll() == []
        assert "stage" not in env.spec.extras
        for stages in (0, 10):
            with pytest.raises(ConfigError, match=rf"task.stages={stages}: say 1 \(success alone\) to 9"):
                stages_of(env, Keys({}), stages)
    with pytest.raises(ConfigError, match="the env of this task is a SimpleNamespace, whose rows have none: say 1"):
        stages_of(SimpleNamespace(), Keys({}), 2)
