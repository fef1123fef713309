"""Reward and success from the person alone: the scene's judge is silent, and a script presses the keys."""

import pytest
from serl_client import ConfigError

from tests.shared.robots import from_yaml


def heard(env, seed, action=None, **reset):
    """What is said before the first step of an episode, during it, and in three polls after its end."""
    env.reset(seed, **reset)
    before, during = env.operator.poll(), []
    while True:
        step = env.step(action)
        assert (step.reward, step.terminated, step.success) == (0.0, False, None)
        during += env.operator.poll()
        if during or step.truncated:
            return before, during, [word for _ in range(3) for word in env.operator.poll()]


@pytest.mark.parametrize("task", ["fake", "sim_arm"])
def test_success_is_said_once_when_the_task_is_done_and_failure_once_after_the_time_ran_out(task):
    pytest.importorskip("mujoco" if task == "sim_arm" else "numpy")
    with from_yaml(task, verdict_by="operator") as env:
        still = env.robot.hold_action()
        assert heard(env, 1, teleop=True) == ([], ["success"], [])
        assert heard(env, 2, still) == ([], [], ["failure"])
        assert heard(env, 3, teleop=True) == ([], ["success"], [])
        env.reset(4)
        while not env.step(still).truncated:
            env.operator.poll()
        env.operator.poll()
        env.reset(5)  # the next episode begins at once
        assert env.operator.poll() == ["failure"], "the verdict is about the one before"
        assert heard(env, 5, teleop=True) == ([], ["success"], [])


def test_another_word_for_who_judges_is_refused_with_both():
    with pytest.raises(ConfigError, match=r"task.env.verdict_by=person is unknown; use judge or operator"):
        from_yaml("fake", verdict_by="person")
