"""task=dobot_pnp with robot=sim: guard, driver and TCP in real time; and robot=dobot_xtrainer without its arms."""

import os
import signal
import subprocess
from pathlib import Path

import pytest
from serl_client.errors import ConfigError, RobotFault

from robot_infra.cameras import gl
from robot_infra.sim.dobot_pnp import AREA, Scene
from robot_infra.tasks import dobot_cell
from serl_launcher.config import composed, factory
from tests.robot.test_pick_and_place import env_of
from tests.shared.common import CONFIG, PATIENCE, until
from tests.shared.robots import check_rows, play

pytest.importorskip("mujoco")


def cells(guard):
    """The processes that a guard has started."""
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(guard)], capture_output=True, text=True).stdout
    return [int(each) for each in found.split()]


@pytest.mark.slow
def test_an_episode_over_tcp_succeeds_its_cameras_see_it_and_nothing_outlives_a_guard_that_was_killed():
    words = ["task.env.noise=0.1", "task.env.side=left", "task.cameras=auto", "task.image_size=32"]
    with env_of("robot=sim", *words) as env:
        episodes = [play(env, seed, teleop=True) for seed in range(3)]
        assert sum(bool(steps[-1].success) for steps in episodes) >= 2
        first, last = episodes[0][0].observation, episodes[0][-1].observation
        check_rows(env, first, last)
        at = list(env.spec.observation["observation.state"].names).index("object.y")
        assert all(steps[0].observation["observation.state"][at] > AREA[:, 1].mean() - 0.01 for steps in episodes)
        images = [name for name in first if "images" in name]
        assert len(images) == (3 if gl.backend() else 0)
        for name in images:
            assert first[name].max() > first[name].min() + 50
            assert (last[name] != first[name]).any() or "left_wrist" in name, "that arm rests"
        guard = env.robot.robot.guard.process
        (cell,) = cells(guard)
        os.kill(guard, signal.SIGKILL)
        until(lambda: not Path(f"/proc/{cell}").exists())


@pytest.mark.slow
def test_a_cell_that_was_late_answers_the_next_question_and_not_the_one_before(monkeypatch):
    scene = Scene("left")
    link = dobot_cell.CellLink("robot_infra.sim.dobot_cell", "left", scene.pose.nbytes)
    try:
        os.kill(link._process.pid, signal.SIGSTOP)
        monkeypatch.setattr(dobot_cell, "ANSWER", 0.3)
        for line in ("look", "grip 1 2"):
            with pytest.raises(RobotFault, match="have ended, or hang"):
                link.ask(line)
        os.kill(link._process.pid, signal.SIGCONT)
        monkeypatch.setattr(dobot_cell, "ANSWER", PATIENCE)
        scene.reset(1)
        assert link.ask("reset 1").tolist() == scene.pose.tolist()
    finally:
        link.close()


def test_a_simulated_clock_is_refused():
    with pytest.raises(ConfigError, match="clock"):
        env_of("robot=sim", "task.env.clock=simulated")


@pytest.mark.slow
def test_an_x_trainer_that_does_not_answer_is_told():
    words = [f"task.env.options.{side}.{word}" for side in ("left", "right")
             for word in ("address=127.77.0.1", "options.gripper=null")]  # fmt: skip
    with pytest.raises(ConfigError, match=r"127\.77\.0\.1 does not answer.*is it switched on"):
        factory(composed(CONFIG, ["task=dobot_pnp", "robot=dobot_xtrainer", *words]), "task.env")()
