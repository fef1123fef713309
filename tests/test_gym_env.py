"""Any gymnasium task as an Env: what its spaces become, what is refused, and how an episode ends."""

import sys
from pathlib import Path

import numpy as np
import pytest
from hydra.utils import instantiate
from omegaconf import OmegaConf
from serl_client.errors import ConfigError

from robot_infra.robots.gym import GymEnv

gymnasium = pytest.importorskip("gymnasium")
spaces = gymnasium.spaces
TASKS = Path(__file__).parents[1] / "config" / "task"
VECTOR = spaces.Box(-np.inf, np.inf, (2, 3), np.float64)
IMAGE = spaces.Box(0, 255, (4, 6, 3), np.uint8)
ACTION = spaces.Box(np.array([[-2.0, 1.0]]), np.array([[2.0, 3.0]]), dtype=np.float64)


class Task(gymnasium.Env):
    """Ends after its third step in the way it is told; keeps the action it got."""

    def __init__(self, observation=VECTOR, action=ACTION, end=(True, False), info=None, fps=20):
        self.observation_space, self.action_space = observation, action
        self.metadata = {"render_fps": fps} if fps else {}
        self.end, self.info = end, info or {}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        self.observation_space.seed(seed)
        return self.observation_space.sample(), {}

    def step(self, action):
        self.action = action
        self.steps += 1
        terminated, truncated = self.end if self.steps == 3 else (False, False)
        return self.observation_space.sample(), 0.5, terminated, truncated, self.info


@pytest.fixture(scope="module", autouse=True)
def registered():
    gymnasium.register("Task-v0", Task)
    yield
    del gymnasium.registry["Task-v0"]


def env_of(**options):
    return GymEnv("Task-v0", options=options)


def test_a_vector_becomes_the_state_flattened():
    env = env_of()
    observation = env.reset(0)
    assert list(observation) == list(env.spec.observation) == ["observation.state"]
    env.spec.observation["observation.state"].check("observation.state", observation["observation.state"])
    assert observation["observation.state"].shape == (6,)
    assert env.spec.fps == 20


def test_a_dict_keeps_its_names_and_images_stay_images():
    env = env_of(observation=spaces.Dict(cam_high=IMAGE, joints=VECTOR))
    for observation in (env.reset(0), env.step(None).observation):
        assert sorted(observation) == ["observation.images.cam_high", "observation.joints"]
        for name, feature in env.spec.observation.items():
            feature.check(name, observation[name])
    assert env.spec.observation["observation.images.cam_high"].dtype == "uint8"
    assert list(env_of(observation=IMAGE).spec.observation) == ["observation.images.camera"]


def test_an_observation_is_the_callers_own():
    raw = np.zeros(3, np.float32)

    class Reuses(Task):
        def step(self, action):
            raw[:] += 1
            return raw, 0.0, False, False, {}

    gymnasium.register("Reuses-v0", Reuses)
    env = GymEnv("Reuses-v0", options={"observation": spaces.Box(-9, 9, (3,), np.float32)})
    env.reset(0)
    first = env.step(None).observation["observation.state"]
    env.step(None)
    np.testing.assert_array_equal(first, [1, 1, 1])
    del gymnasium.registry["Reuses-v0"]


def test_an_action_is_clipped_and_arrives_in_the_tasks_own_shape():
    env = env_of()
    env.reset(0)
    step = env.step(np.array([-5, 2], np.float32))
    np.testing.assert_array_equal(step.executed, np.array([-2, 2], np.float32))
    taken = env._env.unwrapped.action
    assert (taken.shape, taken.dtype) == ((1, 2), np.float64)
    assert step.reward == 0.5
    assert not step.intervened


def test_no_action_is_the_one_nearest_to_zero():
    env = env_of()
    env.reset(0)
    np.testing.assert_array_equal(env.step(None).executed, [0, 1])


def test_a_wrong_action_is_an_error():
    env = env_of()
    env.reset(0)
    with pytest.raises(ValueError, match="finite"):
        env.step(np.array([np.nan, 2], np.float32))
    with pytest.raises(ValueError, match="action"):
        env.step(np.ones(1, np.float32))


@pytest.mark.parametrize(
    ("end", "expected"),
    [((True, False), (True, False)), ((False, True), (False, True)), ((True, True), (True, False))],
)
def test_an_episode_is_terminated_or_truncated_never_both(end, expected):
    env = env_of(end=end)
    env.reset(0)
    steps = [env.step(None) for _ in range(3)]
    assert not any(step.terminated or step.truncated for step in steps[:2])
    assert (steps[2].terminated, steps[2].truncated) == expected


@pytest.mark.parametrize(
    ("info", "expected"),
    [({"success": 1.0}, True), ({"is_success": False}, False), ({"success": np.bool_(False)}, False), ({}, None)],
)
def test_success_is_what_the_task_says_in_its_last_row(info, expected):
    env = env_of(info=info)
    env.reset(0)
    steps = [env.step(None) for _ in range(3)]
    assert [step.success for step in steps] == [None, None, expected]


def test_a_seed_names_a_start():
    env = GymEnv("Pendulum-v1")
    starts = [env.reset(seed)["observation.state"] for seed in range(5)]
    assert len({start.tobytes() for start in starts}) == 5
    np.testing.assert_array_equal(env.reset(3)["observation.state"], starts[3])


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"action": spaces.Discrete(2)}, "a Discrete"),
        ({"action": spaces.Box(0, 5, (2,), np.int64)}, "int64"),
        ({"action": spaces.Box(-np.inf, np.inf, (2,))}, "finite"),
        ({"observation": spaces.Discrete(4)}, "a Discrete"),
        ({"observation": spaces.Dict(inner=spaces.Dict(state=VECTOR))}, "a Dict space"),
        ({"observation": spaces.Box(0, 255, (3, 40, 60), np.uint8)}, "channel"),
        ({"fps": None}, "give fps"),
        ({"observation": spaces.Tuple((VECTOR, VECTOR))}, "a Tuple"),
        ({"action": spaces.Dict(arm=ACTION)}, "a Dict space"),
        ({"misspelt": 1}, "misspelt"),
    ],
)
def test_a_task_that_does_not_fit_is_refused_in_one_sentence(options, sentence):
    with pytest.raises(ConfigError, match=sentence) as error:
        env_of(**options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("env_id", ["NoSuchTask-v0", "no_such_package:Task-v0"])
def test_an_unknown_task_is_refused(env_id):
    with pytest.raises(ConfigError, match=env_id):
        GymEnv(env_id)


def test_a_rate_that_is_given_wins():
    assert GymEnv("Task-v0", fps=5).spec.fps == 5


def test_nobody_can_demonstrate():
    env = env_of()
    assert not env.has_operator
    with pytest.raises(ConfigError, match="no teleop"):
        env.reset(0, teleop=True)


def test_a_missing_gymnasium_is_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(ConfigError, match="gymnasium is missing: run `uv sync"):
        GymEnv("Pendulum-v1")


def test_the_task_yaml_makes_an_env():
    config = OmegaConf.create({"task": OmegaConf.load(TASKS / "gym.yaml")})
    config.task.env_id = "Pendulum-v1"
    with instantiate(config.task.env)() as env:
        assert config.task.name == env.task == "Pendulum-v1"
        assert env.has_operator is config.task.has_operator
        env.reset(0)
        assert env.step(None).observation["observation.state"].shape == (3,)
