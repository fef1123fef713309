"""RobotEnv over the fake robot: its rate, its ways out, who drives, and what the safety wrapper lets through."""

import numpy as np
import pytest
from serl_client.errors import ConfigError, RobotFault

from robot_infra.guard.robot import GuardedRobot
from robot_infra.interfaces import Verdict
from robot_infra.judges import Function, lifted
from robot_infra.tasks.fake import make
from robot_infra.teleop.scripted import Scripted
from tests.shared.robots import LEFT, RIGHT, FakeCamera, Hand, TimedRobot, build, play, point

# -- time


def test_a_real_clock_keeps_its_rate_however_long_the_work_takes(clock):
    env = build(point(latency=0.03), clock="real")
    env.reset(0)
    start = clock.now
    for step in range(50):
        clock.now += 0.01 * (step % 5)  # the policy thinks
        env.step(RIGHT)
    assert clock.now - start == pytest.approx(5.0)


@pytest.mark.parametrize("fps", [10, 30, 50])
def test_each_action_has_time_to_act_and_the_robot_is_not_hurried_after_a_late_one(clock, fps):
    """Whatever the policy, a pause or the way home took, in periods; commands take a part of a period too."""
    robot, random, period = point(TimedRobot, fps, latency=0.3 / fps), np.random.default_rng(fps), 1 / fps
    env = build(robot, clock="real", fps=fps)
    for episode in range(20):
        robot.sent, robot.looked = [], []
        env.reset(episode)
        thoughts = random.choice([0, 0, 0, 0.3, 0.5, 0.7, 3, 40], 30) * period
        for thought in thoughts:
            clock.now += thought
            env.step(RIGHT)
        acted, spaced = (np.array(robot.looked[1:]) - robot.sent) / period, np.diff(robot.sent) / period
        assert (acted >= 0.5 - 1e-6).all()
        assert (acted <= 1 + 1e-6).all()
        assert (spaced >= 0.5 - 1e-6).all()
        assert (spaced[thoughts[1:] <= period / 2] <= 1.5 + 1e-6).all()


def test_a_simulated_clock_waits_for_nothing(clock):
    env = build()
    env.reset(0)
    env.step(RIGHT)
    assert clock.now == 100.0


# -- who drives, and how an episode ends


class Failing(Function):
    """Fails in its third step, or at the beginning of an episode, once."""

    def __init__(self, in_reset):
        super().__init__(lambda observation: Verdict(0.0, False, None))
        self.calls, self.in_reset = 0, in_reset

    def reset(self):
        self.calls += 1
        if self.in_reset and self.calls == 1:
            raise KeyError("cup")

    def __call__(self, observation):
        self.calls += 1
        if not self.in_reset and self.calls == 4:
            raise KeyError("cup")
        return super().__call__(observation)


@pytest.mark.parametrize(("in_reset", "steps"), [(True, 0), (False, 2)])
def test_a_judge_that_fails_ends_that_episode_by_name_and_not_the_next(in_reset, steps):
    env, said = build(judge=Failing(in_reset), max_steps=5), "the judge Failing failed: KeyError: 'cup'"
    assert [step.stale for step in play(env, 0, RIGHT)][: steps + 1] == [""] * steps + [said]
    assert [step.stale for step in play(env, 1, RIGHT)] == [""] * 5


def test_a_judge_that_fails_again_and_again_is_for_a_person():
    class Broken(Failing):
        def __call__(self, observation):
            raise KeyError("cup")

    env = build(judge=Broken(in_reset=False), max_steps=5)
    for seed in (0, 1):
        env.reset(seed)
        assert env.step(RIGHT).stale
    env.reset(2)
    with pytest.raises(RobotFault, match="the judge Broken failed"):
        env.step(RIGHT)


def test_a_time_limit_truncates_and_only_then_is_failure_certain():
    env = build(max_steps=3)
    steps = play(env, 0, RIGHT)
    assert [step.truncated for step in steps] == [False, False, True]
    assert [step.success for step in steps] == [None, None, False]
    assert not any(step.terminated for step in steps)
    env.reset(1)
    assert not env.step(RIGHT).truncated


def test_an_episode_that_ends_in_its_last_step_is_terminated_not_truncated():
    (step,) = play(build(max_steps=1, judge=Function(lambda observation: Verdict(1.0, True, True))), 0, RIGHT)
    assert (step.terminated, step.truncated, step.success, step.reward) == (True, False, True, 1.0)


@pytest.mark.parametrize(
    ("teleop", "driven"), [(Scripted(lambda: LEFT, noise=0.0), LEFT), (Hand(), [0, 0])], ids=["on", "hands off"]
)
def test_in_a_teleop_episode_the_operator_drives_and_the_policy_in_the_next_one(teleop, driven):
    env = build(teleop=teleop)
    assert env.has_operator
    for options, executed in (({"teleop": True}, driven), ({}, RIGHT)):
        env.reset(0, **options)
        step = env.step(RIGHT)
        np.testing.assert_array_equal(step.executed, executed)
        assert step.intervened == bool(options)


def test_what_does_not_fit_is_refused_before_anything_moves():
    teleop = Hand()
    teleop.space = "joint_position"
    with pytest.raises(ConfigError, match="joint_position"):
        build(teleop=teleop)
    with pytest.raises(ConfigError, match="explode"):
        point(faults={"explode": 1})
    env = build()
    assert not env.has_operator
    with pytest.raises(ConfigError, match="no teleop"):
        env.reset(0, teleop=True)


@pytest.mark.parametrize("stop_fails", [False, True])
def test_every_way_out_stops_the_robot_and_gives_each_device_back(stop_fails):
    class Stubborn(GuardedRobot):
        stopped = False

        def stop(self):
            super().stop()
            self.stopped = True
            if stop_fails:
                raise RobotFault("stop failed")

    robot, camera, teleop = point(Stubborn), FakeCamera(), Hand()

    def run():
        with build(robot, cameras={"cam": camera}, teleop=teleop) as env:
            env.reset(0)
            raise KeyboardInterrupt

    with pytest.raises(RobotFault if stop_fails else KeyboardInterrupt):
        run()
    assert (robot.stopped, robot.guard.is_open, camera.closed, teleop.closed) == (True, False, True, True)


# -- what the guard lets through


def test_a_command_outside_the_bounds_is_clipped_and_the_clipped_one_reported():
    env = build()
    env.reset(0)
    np.testing.assert_array_equal(env.step(np.array([3.0, -0.5])).executed, np.array([1, -0.5], np.float32))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_command_that_is_not_finite_holds(value):
    robot = point()
    before = robot.guard.arm.position
    np.testing.assert_array_equal(robot.command(np.array([0.5, value], np.float32)), [0, 0])
    np.testing.assert_allclose(robot.guard.arm.position, before)


def test_an_action_of_another_shape_is_an_error_not_a_broadcast():
    with pytest.raises(ValueError, match="action"):
        point().command(np.ones(1))


@pytest.mark.parametrize(
    ("faults", "said"), [({"raise": 2}, "told to fail"), ({"nan": 2}, r"observation\.state")], ids=["robot", "sensor"]
)
def test_a_fault_stops_the_robot_before_a_policy_sees_it_and_is_told(faults, said):
    robot = point(faults=faults)
    env = build(robot)
    env.reset(0)
    env.step(RIGHT)
    with pytest.raises(RobotFault, match=said):
        env.step(RIGHT)
    before = robot.guard.arm.position
    for ask in (robot.observe, lambda: robot.command(RIGHT)):
        with pytest.raises(RobotFault, match=said):
            ask()
    np.testing.assert_array_equal(robot.guard.arm.position, before)
    robot.recover()
    assert robot.command(RIGHT)[0] > 0


def test_a_frozen_robot_takes_commands_and_stays():
    env = build(point(faults={"freeze": 2}))
    start = env.reset(0)["observation.state"]
    moved, frozen = (env.step(RIGHT).observation["observation.state"] for _ in range(2))
    assert moved[0] > start[0]
    np.testing.assert_array_equal(frozen, moved)


# -- starts, the scripted operator, the task


def test_a_start_is_named_by_its_seed():
    env = build()
    starts = [env.reset(seed)["observation.state"] for seed in range(20)]
    assert len({start.tobytes() for start in starts}) == 20
    np.testing.assert_array_equal(env.reset(7)["observation.state"], starts[7])


@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_the_scripted_operator_reaches_the_goal(noise):
    env = make(max_steps=50, noise=noise, clock="simulated")
    assert sum(bool(play(env, seed, teleop=True)[-1].success) for seed in range(50)) >= 48


def test_a_cost_takes_the_way_to_the_goal_from_each_reward():
    plain, costly = (
        play(make(max_steps=50, noise=0.0, clock="simulated", cost=cost), 3, teleop=True) for cost in (0.0, 2.0)
    )
    ways = [float(np.linalg.norm(step.observation["observation.state"][4:])) for step in plain]
    assert plain[-1].success
    np.testing.assert_allclose([step.reward for step in costly], [*(-2.0 * way for way in ways[:-1]), 1 - 2 * ways[-1]])


def test_demonstrations_repeat_with_their_seed_and_differ_between_seeds():
    teleop = Scripted(lambda: np.zeros(2), noise=0.3)

    def noise(seed):
        teleop.reset(seed)
        return np.stack([teleop.read(np.zeros(2, np.float32)) for _ in range(5)])

    np.testing.assert_array_equal(noise(3), noise(3))
    assert (noise(3) != noise(4)).all()


def test_a_block_counts_as_lifted_only_while_it_is_held():
    tool = np.array([0.4, 0.0, 0.2])
    assert lifted(tool, tool - [0, 0, 0.01])
    assert not lifted(tool, tool - [0, 0, -0.1])  # thrown
    assert not lifted(tool - [0, 0, 0.15], tool - [0, 0, 0.15])  # not high enough
