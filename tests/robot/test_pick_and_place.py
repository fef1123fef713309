"""The task dobot_pnp: the scene's kinematics, starts and cameras, and its scripted operator in each action space."""

import numpy as np
import pytest
from serl_client import ConfigError

from robot_infra.cameras import gl
from robot_infra.kinematics import twist
from robot_infra.sim.dobot_pnp import AREA, CHAINS, HOME, INSIDE, Scene
from robot_infra.tasks.dobot_sim import BOXES, DobotScene, guarded
from serl_launcher.config import composed, factory
from tests.shared.common import CONFIG
from tests.shared.robots import check_rows, play

mujoco = pytest.importorskip("mujoco")


def env_of(*words):
    """The env of task=dobot_pnp with these words, as an actor makes it."""
    return factory(composed(CONFIG, ["task=dobot_pnp", *words]), "task.env")()


def test_the_scenes_kinematics_are_those_of_the_table():
    scene, random = Scene(), np.random.default_rng(0)
    for _ in range(20):
        joints = random.uniform(-3, 3, 14)
        scene._data.qpos[scene._at] = joints
        mujoco.mj_forward(scene._model, scene._data)
        for side, at in (("left", 0), ("right", 7)):
            site, pose = scene._data.site(f"{side}_tool"), np.eye(4)
            pose[:3, :3], pose[:3, 3] = site.xmat.reshape(3, 3), site.xpos
            np.testing.assert_allclose(CHAINS[side].pose(joints[at : at + 6]), pose, atol=1e-9)
            assert np.abs(twist(CHAINS[side].pose(HOME[at : at + 6]), pose)).max() > 0.1


def test_fifty_seeds_are_fifty_starts_and_a_seed_names_one_whatever_came_before():
    robot = guarded(DobotScene, fps=10, servo_hz=10, process=False)
    starts = [robot.home(seed) or robot.observe().values["observation.state"] for seed in range(50)]
    assert len({start.tobytes() for start in starts}) == 50
    robot.command(np.zeros(14, np.float32))
    robot.home(7)
    np.testing.assert_array_equal(robot.observe().values["observation.state"], starts[7])
    assert robot.steps == 0


def test_a_side_mirrors_the_starts_of_the_other_half():
    starts = {}
    for side in ("both", "left", "right"):
        scene = Scene(side)
        starts[side] = np.stack([scene.reset(seed) or scene.object[:2].copy() for seed in range(20)])
    middle = AREA[:, 1].mean()
    assert (starts["left"][:, 1] >= middle).all()
    np.testing.assert_allclose(starts["left"] + starts["right"], [2, 0] * starts["both"] + [0, 2 * middle])
    np.testing.assert_array_equal(np.sort([starts["both"], starts["left"]], 0)[1], starts["left"])


def test_the_reach_of_one_arm_mirrors_that_of_the_other():
    np.testing.assert_array_equal(BOXES["right"], np.sort(BOXES["left"] * [1, -1, 1], axis=0))


def test_the_arms_stay_where_they_are_told_and_follow_no_faster_than_they_may():
    robot = guarded(DobotScene, fps=10, servo_hz=10, process=False)
    robot.home(0)
    for _ in range(10):
        robot.command(robot.hold_action())
    np.testing.assert_allclose(robot.guard.arm.read(), HOME, rtol=1e-3, atol=2e-3)
    sent = robot.command(robot.action.high)
    np.testing.assert_allclose(sent[:6] - HOME[:6], 0.15, atol=1e-6)


def test_an_object_is_in_the_box_only_if_it_lies_there():
    scene = Scene()
    for away, expected in ((0.0, True), (0.9, True), (1.1, False)):
        for axis in range(2):
            scene.object[:] = scene.box + INSIDE * np.eye(3)[axis] * away + [0, 0, 0.02]
            assert scene.succeeded is expected
    scene.object[:] = [*scene.box[:2], 0.1]
    assert not scene.succeeded


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [range(8), pytest.param(range(8, 50), marks=pytest.mark.nightly)], ids=str)
def test_the_scripted_operator_puts_the_object_into_the_box(seeds):
    with env_of() as env:
        episodes = [play(env, seed, teleop=True) for seed in seeds]
    assert sum(bool(steps[-1].success) for steps in episodes) >= 0.95 * len(seeds) - 1
    left = np.stack([step.observation["observation.state"][:6] for steps in episodes for step in steps])
    np.testing.assert_allclose(left, np.tile(HOME[:6], (len(left), 1)), atol=5e-3, err_msg="the other arm rests")


@pytest.mark.slow
@pytest.mark.parametrize("space", ["joint_position", "joint_delta", "ee_delta", "ee_delta.right"])
def test_what_the_operator_does_is_stored_in_the_space_and_leads_through_the_same_episode_again(space):
    with env_of(f"task.env.space={space}", "task.env.noise=0.1") as env:
        steps = play(env, 3, teleop=True)
        check_rows(env, env.reset(3), *[step.observation for step in steps])
        again = [env.step(step.executed) for step in steps]
    for step in again:
        env.spec.action.check("action", step.executed)
        assert (np.abs(step.executed - np.clip(step.executed, env.spec.action.low, env.spec.action.high)) == 0).all()
    assert again[-1].success
    np.testing.assert_allclose(
        again[-1].observation["observation.state"], steps[-1].observation["observation.state"], rtol=1e-3, atol=2e-3
    )


@pytest.mark.parametrize(("words", "said"), [
    (["task.env.space=polar"], "takes joint_position, joint_delta, ee_delta, ee_delta.left, ee_delta.right"),
    (["task.env.space=ee_delta.left"], "gives ee_delta.right actions, the robot takes ee_delta.left: choose another"),
    (["task.object_in_state=false"], "nothing would show the object"),
    (["task.env.fps=1000"], "task.env.fps=1000"),
    (["task.env.side=up"], "task.env.side=up: say one of both, left, right"),
])  # fmt: skip
def test_what_cannot_be_is_one_sentence(words, said):
    with pytest.raises(ConfigError, match=said):
        env_of(*words)


@pytest.mark.slow
def test_its_three_cameras_see_the_arms_move():
    if not gl.backend():
        pytest.skip("needs OpenGL: apt-get install libegl1 libosmesa6")
    with env_of("task.cameras=true", "task.image_size=32", "task.object_in_state=false", "task.env.max_steps=5") as env:
        first, last = env.reset(0), play(env, 0, teleop=True)[-1].observation
        check_rows(env, first, last)
        for name in ("cam_high", "cam_left_wrist", "cam_right_wrist"):
            image = first[f"observation.images.{name}"]
            assert image.max() > image.min() + 50
            assert (last[f"observation.images.{name}"] != image).any() or name == "cam_left_wrist", "that arm rests"


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ["task=sim_arm"], ["task=sim_arm", "task.env.space=joint_position"], ["task=dobot_pnp", "robot=sim_direct"],
        ["task=fake"], ["task=wall"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_a_simulated_arm_that_is_driven_anywhere_meets_no_fault(words):
    """It presses against the table, the wall and itself, which would be a fault of a real arm."""
    env, random = factory(composed(CONFIG, words), "task.env")(), np.random.default_rng(0)
    action = env.spec.action
    for seed in range(8):
        env.reset(seed)
        for step in range(60):
            if step % 15 == 0:
                wanted = random.uniform(action.low, action.high) if random.random() < 0.7 else action.high
            env.step(wanted.astype(action.dtype))
    env.close()
