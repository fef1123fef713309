"""The embedded arm: its seeds, its kinematics, its judge's task and its scripted operator."""

import itertools

import numpy as np
import pytest
from serl_client import ConfigError
from serl_client.starts import Starts

from robot_infra.tasks.sim_arm import CENTRE, NAMES, SCALE, WORKSPACE, SimArm, guarded, make
from tests.shared.robots import check_rows, play

pytest.importorskip("mujoco")


def metres(observation):
    """The state with its scale taken off, {name: value}."""
    return dict(zip(NAMES, observation["observation.state"] / SCALE + CENTRE, strict=True))


def point(state, name):
    return np.array([state[f"{name}.{axis}"] for axis in "xyz"])


JOINT_SPACES = ("joint_position", "joint_delta")


@pytest.fixture
def env():
    return make(max_steps=60, noise=0.0, clock="simulated")


@pytest.fixture
def arms():
    """The arm at ten starts."""
    arm = SimArm("arm", hz=10)
    return (arm.scene(seed) or arm for seed in range(10))


@pytest.mark.slow
def test_an_arm_has_the_same_starts_whoever_guards_it(arms):
    robot, found = guarded(guard=True), []
    for seed in range(10):
        robot.home(seed)
        robot.observe()
        found.append(robot.seen["scene"])
    robot.close()
    np.testing.assert_allclose(found, [arm.sense()["scene"] for arm in arms], atol=2e-3)  # it sags while it holds


def test_the_spec_and_the_rows_agree(env):
    feature = env.spec.observation["observation.state"]
    assert len(feature.names) == feature.shape[0] == 15
    observation, step = env.reset(0), env.step(np.zeros(4, np.float32))
    check_rows(env, observation, step.observation)
    env.spec.action.check("action", step.executed)


def test_a_seed_names_a_start_whatever_came_before_and_whatever_numpy_does():
    env = make(max_steps=60, noise=0.2, clock="simulated")
    first = [step.observation["observation.state"] for step in play(env, 5, teleop=True)]
    play(env, 6, teleop=True)
    np.random.seed(0)
    again = [step.observation["observation.state"] for step in play(env, 5, teleop=True)]
    np.testing.assert_array_equal(np.stack(first), np.stack(again))


def test_fifty_seeds_are_fifty_starts_with_the_block_in_reach():
    arm = SimArm("arm", hz=10)
    blocks = []
    for seed in range(50):
        arm.scene(seed)
        blocks.append(point(metres(arm.sense()), "block"))
    assert len({block.tobytes() for block in blocks}) == 50
    assert (np.stack(blocks)[:, :2] >= WORKSPACE[0, :2]).all()
    assert (np.stack(blocks)[:, :2] <= WORKSPACE[1, :2]).all()


@pytest.mark.parametrize(("side", "signs"), [("left", {1}), ("right", {-1}), ("both", {1, -1})])
def test_the_block_lies_on_the_side_that_was_asked_for_and_nothing_else_of_a_start_changes(side, signs):
    arm, whole = SimArm("arm", hz=10, side=side), SimArm("arm", hz=10)
    found = set()
    for seed in range(12):
        arm.scene(seed)
        whole.scene(seed)
        seen, other = (each.sense()["scene"] for each in (arm, whole))
        found.add(np.sign(seen[4]))
        np.testing.assert_allclose(np.abs(seen[3:6]), np.abs(other[3:6]))
        np.testing.assert_allclose(seen[:3], other[:3])
    assert found == signs


def test_what_is_demonstrated_lies_in_a_corner_and_what_is_practised_and_evaluated_lies_as_without_that_word():
    arm, whole, starts = SimArm("arm", hz=10, demonstrated="corner"), SimArm("arm", hz=10), Starts(0, "session")
    for mode, number in itertools.product(("teleop", "collect", "evaluate"), range(12)):
        seed = starts.seed({"mode": mode, "number": 1}, 0, number)
        arm.scene(seed)
        whole.scene(seed)
        (x, y, _), elsewhere = arm.sense()["scene"][3:6], whole.sense()["scene"][3:6]
        if mode == "teleop":
            assert 0.44 <= x <= 0.48
            assert 0.08 <= y <= 0.12
        else:
            assert (x, y) == tuple(elsewhere[:2])


@pytest.mark.parametrize("name", ["side", "demonstrated"])
def test_another_side_is_refused(name):
    with pytest.raises(ConfigError, match=rf"task\.env\.{name}=middle: say one of both, left, right, corner"):
        SimArm("arm", hz=10, **{name: "middle"})


def test_the_kinematics_bring_the_tool_to_its_target(arms):
    for arm in arms:
        state = metres(arm.sense())
        np.testing.assert_allclose(point(state, "tool"), point(state, "target"), atol=1e-4)


def test_the_fingers_point_down_and_close_along_the_blocks_sides(arms):
    for arm in arms:
        hand = arm._data.body("hand").xmat.reshape(3, 3)  # columns: its axes
        np.testing.assert_allclose(np.abs(hand), np.eye(3), atol=1e-3)
        assert hand[2, 2] < 0


@pytest.mark.parametrize("axis", range(3))
def test_an_action_moves_the_tool_along_its_axis(env, axis):
    start = point(metres(env.reset(0)), "tool")
    for _ in range(2):
        env.step(np.eye(4, dtype=np.float32)[axis])
    moved = point(metres(env.step(None).observation), "tool") - start
    assert moved[axis] == pytest.approx(0.06, abs=0.01)
    assert np.abs(np.delete(moved, axis)).max() < 0.01


def test_no_action_holds_the_arm_where_it_is(env):
    start = point(metres(env.reset(0)), "tool")
    for _ in range(20):
        step = env.step(None)
    np.testing.assert_allclose(point(metres(step.observation), "tool"), start, atol=0.005)


def test_a_full_push_down_stays_above_the_table(env):
    env.reset(0)
    for _ in range(20):
        step = env.step(np.array([0, 0, -1, -1], np.float32))
    assert metres(step.observation)["tool.z"] > 0.02


@pytest.mark.parametrize(
    ("space", "noise"),
    [("ee_delta", 0.0), ("ee_delta", 0.3), *[pytest.param(s, 0.0, marks=pytest.mark.slow) for s in JOINT_SPACES]],
)
def test_the_scripted_operator_picks_up_the_block(space, noise):
    env = make(max_steps=60, noise=noise, clock="simulated", space=space)
    last = [play(env, seed, teleop=True)[-1] for seed in range(50)]
    assert sum(bool(step.success) for step in last) >= 48
    for step in last:
        state = metres(step.observation)
        assert (state["block.z"] > 0.12) == step.terminated == (step.reward == 1)


def test_a_cost_takes_what_is_left_from_each_reward():
    env = make(max_steps=60, noise=0.0, clock="simulated", cost=2.0)
    for step in play(env, 3, teleop=True):
        state = metres(step.observation)
        left = np.linalg.norm(point(state, "block") - point(state, "tool")) + max(0.0, 0.12 - state["block.z"])
        assert step.reward == pytest.approx(bool(step.success) - 2 * left, abs=1e-3)
