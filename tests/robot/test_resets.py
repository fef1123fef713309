"""Resets without a person: waypoints, and two tasks of which each begins where the other ends."""

from types import SimpleNamespace

import numpy as np
import pytest
from serl_client.errors import ConfigError, RobotFault
from serl_client.status import ActorStatus

from robot_infra.resets import KeptScene, resets_of
from robot_infra.tasks.gym import GymEnv
from robot_infra.tasks.sim_arm import GOALS, REACH, SIDE
from robot_infra.tasks.sim_arm import Scene as Scenery
from robot_infra.turns import TASK, Turns
from tests.shared.actors import CountingEnv, FakeClient, Keys, run
from tests.shared.robots import build, from_yaml

pytest.importorskip("mujoco")
LEFT, RIGHT = "put the block on the left", "put the block on the right"


def arm(goal, **options):
    """The simulated arm, behind `guarded`; its driver was sent the set points `writes`, and set up the `scenes`."""
    env = from_yaml("sim_arm", goal=goal, **options)
    env.guarded = getattr(env.robot, "robot", env.robot)
    driver = env.guarded.guard.arm
    env.writes, env.scenes, write, scene = [], [], driver.write, driver.scene
    driver.write = lambda positions: env.writes.append(positions) or write(positions)
    driver.scene = lambda seed: env.scenes.append(seed) or scene(seed)
    return env


def practise(env, reset, episodes, *, patience=None, mode="teleop", controller=None, **options):
    """Let the script demonstrate; return where the block lay at each start [n, 3], the client, and the status."""
    client, status, starts, begin = FakeClient(env.spec, mode), ActorStatus(), [], env.reset

    def noting(seed, **options):
        observation = begin(seed, **options)
        starts.append(env.guarded.seen["scene"][3:6])
        return observation

    env.reset = noting
    resets = resets_of(env, reset, patience)
    run(env, client, controller, episodes=episodes, reset=reset, resets=resets, status=status, **options)
    return np.array(starts), client, status


def within_limits(env):
    """No set point of a simulated arm was further from the one before than its limits allow."""
    limits, points = env.guarded.guard._guard._motion._limits, np.array(env.writes)
    return (np.abs(np.diff(points, axis=0)) <= limits.speed / env.spec.fps + 1e-9).all()


def test_two_tasks_are_each_the_others_start():
    env = arm("sides")
    starts, client, status = practise(env, "other_task", 6)
    assert [episode.task for episode in client.episodes] == [LEFT, RIGHT] * 3
    assert [episode.observation[TASK][0].tolist() for episode in client.episodes] == [[1, 0], [0, 1]] * 3
    assert [outcome.success for outcome in client.outcomes] == [True] * 6
    assert (np.sign(starts[:, 1]) == [-1, 1] * 3).all()
    assert (np.abs(starts[1:, 1]) > SIDE - 0.02).all()
    assert (starts[:, 2] < 0.03).all(), "it lies on the table, and nobody holds it"
    assert (len(env.scenes), status.hand_resets, status.reset_s) == (1, 0, 0)
    assert within_limits(env)


def test_a_task_that_fails_is_tried_again():
    """By random actions, high above the block."""
    env = arm("sides", max_steps=3)
    starts, client, status = practise(env, "other_task", 3, mode="collect")
    assert [episode.task for episode in client.episodes] == [LEFT] * 3
    np.testing.assert_allclose(starts, np.tile(starts[0], (3, 1)), atol=0.03)
    assert (len(env.scenes), status.hand_resets) == (1, 0)


def test_waypoints_lay_the_block_down_elsewhere_and_let_go():
    env = arm("pick")
    starts, client, status = practise(env, "waypoints", 5)
    assert [outcome.success for outcome in client.outcomes] == [True] * 5
    writes = np.array(env.writes)
    let_go = writes[(np.abs(writes[:, 2] - 0.03) < 1e-9) & (writes[:, 3] > 0.044)]
    places = [let_go[i, :2] for i in sorted(np.unique(let_go[:, 0], return_index=True)[1])]
    np.testing.assert_allclose(starts[1:, :2], places, atol=0.02)
    assert np.linalg.norm(np.diff(places, axis=0), axis=1).min() > 0.01, "drawn anew each time"
    assert (len(env.scenes), status.hand_resets) == (1, 0)
    assert within_limits(env)


@pytest.mark.parametrize("space", ["ee_delta", "joint_delta"])
def test_the_way_home_keeps_the_scene_in_any_space(space):
    env = arm("sides", space=space, waypoints={"open": {"gripper": 0.045}})
    starts, client, _ = practise(env, "other_task", 2)
    assert ([outcome.success for outcome in client.outcomes], len(env.scenes)) == ([True] * 2, 1)
    assert starts[1, 1] > SIDE - 0.02


class Taught:
    """A policy that does whichever task it is told, as the script does, but for the `fails` first ways back. `at`: the
    task of each step."""

    version, carry_resets, chunk_start, chunk_delay = 1, 0, True, 0

    def __init__(self, env, fails=0):
        self.env, self.fails, self.extras, self.at, self.arm = env, fails, {}, [], Scenery(env.guarded)

    def begin(self, episode, directive, task):
        self.at.append(task)
        self.fails -= episode.endswith("-back")

    def act(self, observation, *, step, previous_action, reset):
        turn = self.env.turns.now
        is_lame = turn and self.fails >= 0
        return (np.array([0, 0, 1, 0]) if is_lame else GOALS["sides"][turn].intent(self.arm)).astype(np.float32)


@pytest.mark.parametrize("mode", ["collect", "evaluate"])
def test_the_policy_brings_the_scene_back_by_its_other_task_and_nothing_of_that_is_recorded(mode):
    env = arm("sides")
    policy = Taught(env)
    starts, client, status = practise(env, "policy", 3, patience=2, mode=mode, controller=policy)
    assert policy.at == [LEFT, RIGHT, LEFT, RIGHT, LEFT]
    assert [episode.task for episode in client.episodes] == [LEFT] * 3
    assert [outcome.success for outcome in client.outcomes] == [True] * 3
    assert (np.sign(starts[:, 1]) == [-1, 1, -1, 1, -1]).all()
    assert (len(env.scenes), status.hand_resets, status.reset_s, status.episodes) == (1, 0, 0, 3)
    assert status.steps == sum(client.lengths), "which the learner allows by what it has received"
    assert within_limits(env)


def test_a_way_back_that_fails_is_tried_again_until_the_patience_ends():
    env = arm("sides", max_steps=60)
    policy = Taught(env, fails=3)
    _, client, status = practise(env, "policy", 3, patience=2, mode="collect", controller=policy)
    assert policy.at == [LEFT, RIGHT, RIGHT, LEFT, RIGHT, RIGHT, LEFT], "two fail, and another scene is set up"
    assert [episode.task for episode in client.episodes] == [LEFT] * 3
    assert (len(env.scenes), status.hand_resets) == (2, 1)


def test_what_a_person_drives_on_the_way_back_is_minutes_of_a_reset(spec):
    env, scene = CountingEnv(spec, length=10, human=(2, 3, 4)), Scene(needs=9)
    scene.returns = True
    scene.ended = lambda success: setattr(scene, "returns", False)
    status, client = ActorStatus(), FakeClient(spec, intervene=True)
    run(env, client, episodes=1, reset="policy", resets=scene, status=status)
    assert (status.reset_s, client.lengths, status.steps) == (pytest.approx(3 / spec.fps), [10], 10)


# -- a scene that needs a hand


def throw(env, after):
    """Let the block lie out of reach once so many episodes have begun."""
    begin, driver = env.robot.return_home, env.guarded.guard.arm
    calls = iter(range(100))

    def home(seed):
        if next(calls) == after:
            driver._data.qpos[7:9] = 0.4, 0.45
        begin(seed)

    env.robot.return_home = home


def test_a_simulation_sets_up_itself_what_nobody_can_reach_and_counts_it():
    env = arm("sides")
    throw(env, after=0)
    starts, client, status = practise(env, "other_task", 3)
    assert [episode.task for episode in client.episodes] == [LEFT, LEFT, RIGHT], (
        "a new scene begins with the first task"
    )
    assert (len(env.scenes), status.hand_resets) == (2, 1)
    assert (starts[:, :2] >= REACH[0]).all()
    assert (starts[:, :2] <= REACH[1]).all()


def test_failures_in_succession_are_a_reason_too_where_a_patience_is_said():
    env = arm("sides", max_steps=3)
    _, _, status = practise(env, "other_task", 5, patience=2, mode="collect")
    assert (len(env.scenes), status.hand_resets) == (3, 2)


def test_a_verdict_after_the_end_changes_whose_turn_it_is_and_what_has_failed():
    env = SimpleNamespace(turns=Turns((LEFT, RIGHT)), keeps_scene=False, trouble="", clock="real")
    scene = KeptScene(env, patience=2)
    assert "nobody has said since this start" in scene.trouble
    scene.set_up()
    for ended, corrected, text in ((None, True, RIGHT), (True, False, RIGHT), (None, None, RIGHT)):
        assert not scene.trouble
        scene.ended(ended)
        scene.corrected(corrected)
        assert env.turns.text == text
    assert scene.trouble.startswith("2 episodes")


class Scene:
    """A Resets whose scene needs a hand once `needs` episodes have ended."""

    returns = False

    def __init__(self, needs):
        self.needs, self.heard, self.set_ups = needs, [], 0

    @property
    def trouble(self):
        return "the cup lies on the floor" if len(self.heard) >= self.needs and not self.set_ups else ""

    def ended(self, success):
        self.heard.append(success)

    def corrected(self, success):
        self.heard[-1] = success

    def set_up(self):
        self.set_ups += 1


def test_on_a_real_clock_a_person_is_asked_and_their_minutes_are_counted(clock):
    env, scene, status, seen = build(max_steps=5, clock="real"), Scene(needs=1), ActorStatus(), []
    client = FakeClient(env.spec)
    client.wait = lambda timeout: (clock.advance(timeout), seen.append((status.driver, status.warning)))
    keys = Keys({})
    keys.poll = lambda: ["ready"] * (clock.now > 400)
    run(env, client, episodes=2, operator=keys, reset="other_task", resets=scene, status=status)
    (asked,) = {warning for driver, warning in seen if driver == "RESET"}
    assert asked == "the cup lies on the floor. Set up the scene for the first task, then press r"
    assert (scene.heard, scene.set_ups, status.hand_resets, status.waiting_s) == ([False, False], 1, 1, 0)
    assert status.reset_s == pytest.approx(400 - 101, abs=2)


def test_what_a_person_says_on_the_way_home_reaches_what_brings_the_scene_back():
    env, scene = build(max_steps=5, clock="real"), Scene(needs=1)
    client, keys = FakeClient(env.spec), Keys({})
    keys.poll = lambda: ["success"] * (scene.heard == [False]) + ["ready"] * (scene.heard == [True])
    run(env, client, episodes=2, operator=keys, reset="other_task", resets=scene)
    assert (scene.heard[0], scene.set_ups) == (True, 1)


def test_where_nobody_can_be_asked_the_actor_ends_with_the_reason(clock):
    env = build(max_steps=5, clock="real")
    with pytest.raises(RobotFault, match="the cup lies on the floor"):
        run(env, FakeClient(env.spec), reset="waypoints", resets=Scene(needs=1))


# -- words


@pytest.mark.parametrize(
    ("reset", "env", "patience", "said"),
    [
        ("auto", lambda: arm("sides"), None, "2 tasks"),
        ("waypoints", lambda: arm("sides"), None, "2 tasks"),
        ("policy", lambda: arm("pick"), 3, "1 tasks"),
        ("policy", lambda: arm("sides"), None, "reset_patience=3"),
        ("other_task", lambda: arm("pick"), None, "1 tasks"),
        ("other_task", lambda: GymEnv("Pendulum-v1"), None, "no tasks"),
        ("waypoints", lambda: GymEnv("Pendulum-v1"), None, "no arm"),
        ("waypoints", lambda: from_yaml("puck"), None, "no arm"),
        ("waypoints", lambda: arm("pick", space="joint_delta"), None, r"task\.env\.waypoints"),
        ("waypoints", lambda: arm("pick"), 0, "reset_patience=0"),
    ],
)
def test_what_cannot_be_is_said_before_the_robot_moves(reset, env, patience, said):
    with pytest.raises(ConfigError, match=said):
        resets_of(env(), reset, patience)
    assert resets_of(arm("pick"), "auto", None) is None


def test_a_goal_that_there_is_not_is_said():
    with pytest.raises(ConfigError, match="did you mean 'sides'"):
        arm("side")
