"""Any gymnasium task as an Env: what its spaces become, what is refused, and how an episode ends."""

import sys
from functools import partial

import numpy as np
import pytest
from serl_client import Feature
from serl_client.errors import ConfigError, RetakeError, RobotFault

from robot_infra.interfaces import Hand
from robot_infra.tasks import gym as gym_module
from robot_infra.tasks.gym import GymEnv
from robot_infra.teleop.hands import Hands
from tests.robot.gym_task import ACTION, IMAGE, VECTOR, FatalError, Task, gymnasium, spaces
from tests.shared.robots import Scripted, check_rows, from_yaml


@pytest.fixture(scope="module", autouse=True)
def registered():
    gymnasium.register("Task-v0", Task)
    yield
    del gymnasium.registry["Task-v0"]


def env_of(**options):
    return GymEnv("Task-v0", options=options)


@pytest.fixture
def env():
    made = env_of()
    made.reset(0)
    return made


def three(env):
    """The steps of an episode."""
    env.reset(0)
    return [env.step(None) for _ in range(3)]


@pytest.mark.parametrize(
    ("space", "names"),
    [
        (VECTOR, {"observation.state": (6,)}),
        (IMAGE, {"observation.images.camera": IMAGE.shape}),
        (spaces.Dict(cam=IMAGE, joints=VECTOR), {"observation.images.cam": IMAGE.shape, "observation.joints": (6,)}),
        (
            spaces.Dict(left=spaces.Dict(rgb=IMAGE, top=IMAGE), right=spaces.Dict(rgb=IMAGE)),
            {f"observation.images.{name}": IMAGE.shape for name in ("left_rgb", "top", "right_rgb")},
        ),
        (
            spaces.Dict(pixels=spaces.Dict(front=IMAGE), agent=spaces.Dict(arm=VECTOR)),
            {"observation.images.front": IMAGE.shape, "observation.agent.arm": (6,)},
        ),
    ],
)
def test_a_vector_becomes_the_state_flattened_a_dict_keeps_its_names_and_images_stay_images(space, names):
    env = env_of(observation=space)
    check_rows(env, env.reset(0), env.step(None).observation)
    assert {name: feature.shape for name, feature in env.spec.observation.items()} == names
    assert all((feature.dtype == "uint8") == ("image" in name) for name, feature in env.spec.observation.items())
    assert env.spec.fps == 20


def test_choices_and_flags_of_an_observation_are_vectors():
    seen = spaces.Dict(goal=spaces.Discrete(3, start=1), tools=spaces.MultiDiscrete([2, 3]), on=spaces.MultiBinary(2))
    env = env_of(observation=seen)
    env._env.unwrapped.seen = lambda call: {"goal": 2, "tools": np.array([1, 2]), "on": np.array([0, 1], np.int8)}
    found = {name: array.tolist() for name, array in env.reset(0).items()}
    assert found == {
        "observation.goal": [0, 1, 0], "observation.tools": [0, 1, 0, 0, 1], "observation.on": [0, 1],
    }  # fmt: skip
    check_rows(env, env.step(None).observation)


def test_an_observation_is_the_callers_own():
    env = env_of(observation=spaces.Box(-9, 9, (3,), np.float32))
    first = env.reset(0)["observation.state"]
    kept = first.copy()
    env.step(None)
    np.testing.assert_array_equal(first, kept)


def test_an_action_is_clipped_and_arrives_in_the_tasks_own_shape(env):
    step = env.step(np.array([-5, 2], np.float32))
    np.testing.assert_array_equal(step.executed, np.array([-2, 2], np.float32))
    taken = env._env.unwrapped.action
    assert (taken.shape, taken.dtype) == ((1, 2), np.float64)
    assert (step.reward, step.intervened) == (0.5, False)
    np.testing.assert_array_equal(env.step(None).executed, [0, 1])  # no action: the one nearest to zero


def test_a_wrong_action_is_an_error(env):
    with pytest.raises(ValueError, match="finite"):
        env.step(np.array([np.nan, 2], np.float32))
    with pytest.raises(ValueError, match="action"):
        env.step(np.ones(1, np.float32))


@pytest.mark.parametrize(
    ("end", "expected"),
    [((True, False), (True, False)), ((False, True), (False, True)), ((True, True), (True, False))],
)
def test_an_episode_is_terminated_or_truncated_never_both(end, expected):
    steps = three(env_of(end=end))
    assert not any(step.terminated or step.truncated for step in steps[:2])
    assert (steps[2].terminated, steps[2].truncated) == expected


@pytest.mark.parametrize(
    ("info", "expected"),
    [
        ({"success": 1.0}, True),
        ({"is_success": False}, False),
        ({"success": np.bool_(False)}, False),
        ({"succeed": True}, True),  # gym_hil's word
        ({"succeed": np.bool_(False)}, False),
        ({"success": None, "is_success": True}, True),
        ({"succeed": False, "next.success": True}, True),  # gym_hil's person says so, its task did not see it
        ({}, None),
    ],
)
def test_success_is_what_the_task_says_in_its_last_row(info, expected):
    assert [step.success for step in three(env_of(info=info))] == [None, None, expected]


def test_the_keys_of_success_are_words_of_the_task():
    changes = {"env_id": "Task-v0", "env": {"success": ["goal_reached"]}}
    with from_yaml("gym", changes, options={"info": {"goal_reached": True, "success": False}}) as env:
        assert three(env)[-1].success is True


def test_a_row_that_a_person_drove_with_a_device_of_the_task_is_theirs_with_their_action():
    info = {"is_intervention": True, "action_intervention": np.array([9.0, 1.5])}
    env = env_of(info=info)
    env.reset(0)
    step = env.step(np.array([-1, 3], np.float32))
    assert step.intervened
    np.testing.assert_array_equal(step.executed, np.array([2, 1.5], np.float32))
    info["is_intervention"] = np.bool_(False)
    step = env.step(np.array([-1, 3], np.float32))
    assert not step.intervened
    np.testing.assert_array_equal(step.executed, [-1, 3])
    info |= {"is_intervention": True, "action_intervention": np.zeros(7)}
    with pytest.raises(RobotFault, match=r"failed in step\(\): ValueError: action_intervention"):
        env.step(None)


@pytest.mark.parametrize(
    "error", [FatalError("an OpenGL platform\nlibrary"), OSError(19, "No such device"), RuntimeError()]
)
@pytest.mark.parametrize("call", ["make", "reset", "step"])
def test_whatever_a_task_raises_is_one_sentence_with_its_traceback_in_the_log(call, error, caplog):
    with (  # noqa: PT012 - which of the three raises is the parameter
        pytest.raises(RetakeError) as failure,
        env_of(fails={call: error}) as env,
    ):
        env.reset(0)
        env.step(None)
    sentence = str(failure.value)
    assert f"Task-v0 failed in {call}(): {type(error).__name__}" in sentence
    assert "\n" not in sentence
    assert ("MUJOCO_GL=egl" in sentence) is ("OpenGL" in str(error))
    assert any(record.exc_info and call in record.getMessage() for record in caplog.records)
    assert isinstance(failure.value, ConfigError if call == "make" else RobotFault)


def test_a_task_that_fails_when_it_is_closed_hides_nothing(env, caplog):
    env._env.close = lambda: 1 / 0
    env.close()
    assert "close" in caplog.text


def test_a_seed_names_a_start():
    env = GymEnv("Pendulum-v1")
    starts = [env.reset(seed)["observation.state"] for seed in range(5)]
    assert len({start.tobytes() for start in starts}) == 5
    np.testing.assert_array_equal(env.reset(3)["observation.state"], starts[3])


ALIKE = spaces.Dict({"a": spaces.Dict(b=VECTOR), "a.b": VECTOR})
CHANNELS_FIRST = spaces.Box(0, 255, (3, 40, 60), np.uint8)
NOBODY_DRIVES = r"takes 3 choices, which nobody can drive: say task\.env\.operator=none"
UNBOUNDED = spaces.Box(-np.inf, np.inf, (2,))


@pytest.mark.parametrize(
    ("options", "words", "sentence"),
    [
        ({"action": spaces.Box(0, 5, (2,), np.int64)}, {}, "int64"),
        ({"action": UNBOUNDED}, {}, r"without bounds: say how large they are, as in task\.env\.scale=1\.0"),
        ({"action": UNBOUNDED}, {"scale": [1.0, 2.0, 3.0]}, r"takes 2 numbers: give task\.env\.scale one, or as many"),
        ({"action": UNBOUNDED}, {"scale": -1.0}, r"task\.env\.scale=-1\.0 makes no range of actions"),
        ({"observation": CHANNELS_FIRST}, {}, "channel"),
        ({"fps": None}, {"clock": "real"}, r"does not say its rate: say task\.env\.fps="),
        ({"observation": spaces.Tuple((VECTOR, VECTOR))}, {}, "a Tuple"),
        ({"action": spaces.Dict(arm=ACTION)}, {}, "actions of Dict; only a Box of floats fits, or Discrete"),
        ({"observation": ALIKE}, {}, "a.b and a.b of the task would both be observation.a.b"),
        ({"action": spaces.Discrete(1)}, {}, "N >= 2"),
        ({"action": spaces.MultiBinary(3)}, {"operator": "keyboard", "clock": "real"}, NOBODY_DRIVES),
        ({"action": spaces.Discrete(3)}, {"operator": "keyboard", "clock": "real"}, NOBODY_DRIVES),
        ({"misspelt": 1}, {}, "misspelt"),
        ({}, {"names": ["x"]}, "takes actions of 2 entries"),
        ({}, {"hold": [0.0]}, "takes actions of 2 entries"),
    ],
)
def test_a_task_that_does_not_fit_is_refused_in_one_sentence(options, words, sentence):
    with pytest.raises(ConfigError, match=sentence) as error:
        GymEnv("Task-v0", options=options, **words)
    assert "\n" not in str(error.value)


def test_a_task_whose_package_is_missing_says_which_extra_has_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "minigrid", None)
    with pytest.raises(
        ConfigError, match=r"cannot make minigrid:Some-v0: .*run `. examples/install.sh --extra minigrid`"
    ):
        GymEnv("minigrid:Some-v0")


def test_wrappers_make_the_spaces_of_a_task_fit():
    space = spaces.Dict({"grid": VECTOR, "goal": spaces.Discrete(4)})
    wrap = partial(gymnasium.wrappers.FilterObservation, filter_keys=["grid"])
    env = GymEnv("Task-v0", options={"observation": space}, wrap=wrap)
    assert env.reset(0)["observation.grid"].shape == (6,)


def test_a_choice_is_one_hot_its_largest_entry_is_taken_and_that_is_what_was_executed():
    env = env_of(action=spaces.Discrete(3, start=-1))
    assert env.spec.action.one_hot
    assert env.spec.action.shape == (3,)
    env.reset(0)
    for asked, executed, taken in (([0, 0, 1], [0, 0, 1], 1), ([0.2, 0.9, 0.5], [0, 1, 0], 0), (None, [1, 0, 0], -1)):
        step = env.step(None if asked is None else np.array(asked, np.float32))
        assert step.executed.tolist() == executed
        assert env._env.unwrapped.action == taken
        assert isinstance(env._env.unwrapped.action, np.integer)
    held = GymEnv("Task-v0", options={"action": spaces.Discrete(3)}, hold=[0, 0, 1])
    held.reset(0)
    assert held.step(None).executed.tolist() == [0, 0, 1]


@pytest.mark.parametrize(
    ("space", "asked", "executed", "taken", "told"),
    [
        (spaces.MultiDiscrete([2, 3]), [0.2, 0.1, 0, 0.4, 0.9], [1, 0, 0, 0, 1], [0, 2], "in groups of 2, 3;"),
        (spaces.MultiDiscrete([[2], [2]], start=[[5], [-1]]), [0, 1, 1, 0], [0, 1, 1, 0], [[6], [-1]], "of each"),
        (spaces.MultiBinary(3), [0.6, 0.2, 1], [1, 0, 1], [1, 0, 1], "takes MultiBinary(3): the policy gives 3"),
        (spaces.MultiBinary([1, 2]), [0, 0.9], [0, 1], [[0, 1]], "each above 1/2 counts as 1"),
    ],
)
def test_choices_are_one_hot_groups_or_flags_for_any_algorithm_of_numbers_and_are_told(
    caplog, space, asked, executed, taken, told
):
    with caplog.at_level("INFO"):
        env = env_of(action=space)
    assert told in caplog.text
    assert (env.spec.action.low.tolist(), env.spec.action.high.tolist()) == ([0] * len(asked), [1] * len(asked))
    env.reset(0)
    assert env.step(np.array(asked, np.float32)).executed.tolist() == executed
    assert env._env.unwrapped.action.tolist() == taken
    assert env._env.unwrapped.action.dtype == space.dtype


@pytest.mark.parametrize(
    ("low", "high", "scale", "bounds"),
    [
        ([-np.inf] * 2, [np.inf] * 2, 3.0, ([-3, -3], [3, 3])),
        ([-np.inf, 0], [1, np.inf], [4.0, 2.0], ([-4, 0], [1, 2])),
        ([-1, -1], [1, 1], 3.0, ([-1, -1], [1, 1])),
    ],
)
def test_an_action_without_bounds_has_those_of_its_scale(low, high, scale, bounds):
    env = GymEnv("Task-v0", options={"action": spaces.Box(np.array(low), np.array(high), dtype=float)}, scale=scale)
    assert (env.spec.action.low.tolist(), env.spec.action.high.tolist()) == bounds


def test_a_rate_that_is_given_wins_and_a_simulated_task_needs_none():
    assert GymEnv("Task-v0", fps=5).spec.fps == 5
    assert env_of(fps=None).spec.fps == 30


def test_a_task_that_has_raised_is_made_again_with_its_script(monkeypatch):
    env = GymEnv("Task-v0", operator="scripted", script=lambda task: Scripted(task))
    first, closed = env._env, []
    monkeypatch.setattr(first, "close", lambda: closed.append(first) or 1 / 0)
    env.recover()
    assert (closed, env._env is first) == ([first], False)
    assert env._intervention._teleop.hands == [env._env]
    env.reset(0)
    monkeypatch.setattr(Task, "seen", lambda self, call: 1 / 0)
    with pytest.raises(RobotFault, match=r"Task-v0 failed in make\(\): ZeroDivisionError: division by zero"):
        env.recover()


def test_a_real_task_that_cannot_be_closed_is_not_made_again_beside_it(monkeypatch):
    env = GymEnv("Task-v0", clock="real", fps=30)
    first = env._env
    with monkeypatch.context() as patch:
        patch.setattr(first, "close", lambda: 1 / 0)
        with pytest.raises(
            RobotFault, match=r"failed in close\(\): ZeroDivisionError.*It may still have its robot: press r"
        ):
            env.recover()
        assert env._env is first
    env.recover()
    assert env._env is not first


def test_what_a_task_returns_by_mistake_is_its_failure_too(monkeypatch):
    env = env_of()
    env.reset(0)
    for reward, info in ((None, {}), (0.0, None)):
        monkeypatch.setattr(
            Task, "step", lambda self, action, it=(reward, info): (self.raw, it[0], False, False, it[1])
        )
        with pytest.raises(RobotFault, match=r"Task-v0 failed in step\(\): "):
            env.step(None)


def test_nobody_can_demonstrate(env):
    assert not env.has_operator
    with pytest.raises(ConfigError, match="no teleop"):
        env.reset(0, teleop=True)


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("state", {"observation.state"}),
        ("environment_state_agent_pos", {"observation.agent_pos", "observation.environment_state"}),
        ("pixels_agent_pos", {"observation.agent_pos", "observation.images.pixels"}),
    ],
)
def test_push_t_is_such_a_task(kind, names, monkeypatch):
    pytest.importorskip("gym_pusht", reason="gym-pusht is not installed: docs/reference/commands.md")
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    with GymEnv("gym_pusht:gym_pusht/PushT-v0", options={"obs_type": kind, "max_episode_steps": 3}) as env:
        first, again = env.reset(3), env.reset(3)
        assert first.keys() == names
        assert all(np.array_equal(first[name], again[name]) for name in names)
        steps = [env.step(env.spec.action.high / 2) for _ in range(3)]
        assert [step.truncated for step in steps] == [False, False, True]
        assert [step.success for step in steps] == [None, None, False]


def test_what_a_person_says_at_the_tasks_own_device_is_an_event_and_their_action_has_either_key():
    info = {"is_intervention": True, "teleop_action": np.array([1.0, 1.5]), "rerecord_episode": True}
    env = env_of(info=info)
    env.reset(0)
    step = env.step(np.array([0, 2], np.float32))
    assert (step.intervened, step.executed.tolist()) == (True, [1.0, 1.5])
    assert (env.operator.poll(), env.operator.poll()) == (["discard"], [])
    info["rerecord_episode"] = False
    env.step(np.array([0, 2], np.float32))
    assert env.operator.poll() == []


def test_the_neutral_action_is_said_in_the_spec_and_is_what_holds_unless_that_is_said_too():
    env = GymEnv("Task-v0", neutral=[-1, 3])
    assert env.spec.action.neutral.tolist() == [-1, 3]
    env.reset(0)
    assert env.step(None).executed.tolist() == [-1, 3]
    env = GymEnv("Task-v0", neutral=[-1, 3], hold=[0, 2])
    env.reset(0)
    assert env.step(None).executed.tolist() == [0, 2]
    assert "neutral" not in GymEnv("Task-v0").spec.to_dict()["action"]
    with pytest.raises(ConfigError, match="within the bounds"):
        GymEnv("Task-v0", neutral=[0, 0])
    with pytest.raises(ConfigError, match="actions of 2 entries"):
        GymEnv("Task-v0", neutral=[0])


def test_a_person_drives_a_task_whose_entries_have_names_and_what_it_holds_is_said_too(monkeypatch):
    device = Scripted(Hand(words=["toggle"]), Hand({"x": -1.0}), moves=frozenset(("x", "gripper")))
    monkeypatch.setattr(gym_module, "make_devices", lambda *_, **__: (hands, hands))
    action = spaces.Box(np.array([-2.0, 0.0]), np.array([2.0, 2.0]), dtype=np.float64)
    hands = Hands([device], Feature((2,), names=("x", "gripper"), low=action.low, high=action.high), "ee_delta")
    env = GymEnv("Task-v0", options={"action": action}, names=["x", "gripper"], hold=[0, 1])
    assert env.has_operator
    assert [name for name in env.spec.extras] == ["policy_action"]
    env.reset(0, intervene=True)
    proposed = np.array([2, 0], np.float32)
    steps = [env.step(proposed) for _ in range(2)]
    assert [(step.intervened, step.executed.tolist()) for step in steps] == [(True, [0, 1]), (True, [-1, 1])]
    assert all(step.extras["policy_action"].tolist() == [2, 0] for step in steps)
    env.reset(1, teleop=True)
    assert env.step(None).executed.tolist() == [0, 1], "nobody moves: it holds"
    env.close()
    assert device.closed
