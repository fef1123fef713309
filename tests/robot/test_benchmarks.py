"""The tasks of examples: dmc with a suite made here; dmc, metaworld and robomimic with the real ones where there."""

import json
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from serl_client.errors import ConfigError

from robot_infra.tasks.gym import GymEnv
from tests.shared.common import ROOT
from tests.shared.tools import told_by_example

pytest.importorskip("gymnasium", reason="the extra `sim` is not installed")


class Suite:
    """A task of 5 simulator steps. Its observation counts them from a random start; its n-th reward is n / 10."""

    control_timestep = staticmethod(lambda: 0.01)

    def __init__(self, discount):
        self.task, self._discount = SimpleNamespace(random=np.random.RandomState()), discount

    def observation_spec(self):
        return {"height": SimpleNamespace(shape=()), "pose": SimpleNamespace(shape=(2, 1))}

    def action_spec(self):
        return SimpleNamespace(shape=(2,), minimum=-np.ones(2), maximum=2 * np.ones(2))

    def reset(self):
        self._done, self._start = 0, self.task.random.uniform()
        return self._step(None)

    def step(self, action):
        assert (action == [2, -1]).all()
        self._done += 1
        return self._step(self._done / 10)

    def _step(self, reward):
        is_last, pose = self._done == 5, np.full((2, 1), self._done)
        observation = {"height": np.float64(self._start), "pose": pose}
        discount = self._discount if is_last else 1.0
        return SimpleNamespace(observation=observation, reward=reward, discount=discount, last=lambda: is_last)

    def close(self):
        pass


@pytest.fixture
def dmc(monkeypatch):
    """dmc(discount of the last step) -> the task of the suite made here, with action repeat 2."""

    def made(discount=1.0, task="counter-up"):
        suite = ModuleType("dm_control.suite")
        suite.ALL_TASKS, suite.load = [("counter", "up")], lambda domain, task: Suite(discount)
        monkeypatch.setitem(sys.modules, "dm_control", ModuleType("dm_control"))
        monkeypatch.setitem(sys.modules, "dm_control.suite", suite)
        monkeypatch.syspath_prepend(ROOT / "examples/dmc")
        monkeypatch.setenv("MUJOCO_GL", "disabled")
        return GymEnv("dmc_actor:Retake/DMC-v0", options={"task": task, "repeat": 2})

    return made


@pytest.mark.parametrize(("discount", "ends"), [(1.0, (False, True)), (0.0, (True, False))])
def test_a_step_of_dmc_sums_rewards_of_simulator_steps_and_a_time_limit_is_no_end_of_the_task(dmc, discount, ends):
    with dmc(discount) as env:
        assert env.spec.fps == 50
        starts = [float(env.reset(seed)["observation.height"][0]) for seed in (1, 2, 1)]
        assert starts[0] == starts[2] != starts[1]
        steps = [env.step(np.array([9.0, -9.0])) for _ in range(3)]  # clipped to the bounds
    assert [step.reward for step in steps] == pytest.approx([0.1 + 0.2, 0.3 + 0.4, 0.5])
    assert [float(step.observation["observation.pose"][1]) for step in steps] == [2, 4, 5]
    assert [(step.terminated, step.truncated) for step in steps] == [(False, False), (False, False), ends]


def test_a_task_that_the_suite_does_not_have_is_refused_with_those_that_it_has(dmc):
    with pytest.raises(ConfigError, match=r"task\.env_id=counter-down is no task .*counter-up"):
        dmc(task="counter-down")


SCRIPT = """
import json
import sys
import numpy as np
from robot_infra.tasks.gym import GymEnv

def episode(env, seed):
    first = [array.tolist() for array in env.reset(seed).values()]
    steps = [env.step(np.zeros(env.spec.action.shape))]
    while not (steps[-1].terminated or steps[-1].truncated):
        steps.append(env.step(np.zeros(env.spec.action.shape)))
    return {"first": first, "steps": len(steps), "rewards": [step.reward for step in steps],
            "truncated": steps[-1].truncated, "success": steps[-1].success}

with GymEnv(sys.argv[1], options=json.loads(sys.argv[2])) as env:
    print(json.dumps([episode(env, seed) for seed in (5, 5, 6)]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("example", "env_id", "options", "steps", "most", "success"),
    [
        ("dmc", "dmc_actor:Retake/DMC-v0", {"task": "cartpole-balance"}, 500, 2, None),
        ("metaworld", "metaworld_actor:Retake/MetaWorld-v0", {"task": "window-open-v3", "steps": 100}, 100, 20, False),
    ],
)
def test_a_real_suites_episode_follows_from_its_seed(example, env_id, options, steps, most, success):
    first, again, other = told_by_example(example, SCRIPT, env_id, json.dumps({**options, "repeat": 2}))
    assert first == again
    assert first["first"] != other["first"]
    assert (first["steps"], first["truncated"], first["success"]) == (steps, True, success)
    assert all(0 <= reward <= most for reward in first["rewards"])


ROBOMIMIC = """
import json
import sys
from robosuite_actor.expert import make

def observed(scene, cameras, seed, steps):
    with make(scene=scene, fps=20, max_steps=300, noise=0.2, takeover_after=20, handback_after=10, cameras=cameras,
              image_size=32, clock="simulated") as env:
        first, step, count = env.reset(seed, teleop=True), None, 0
        while count < steps and not (step and (step.terminated or step.truncated)):
            step, count = env.step(None), count + 1
        state = {name: array.tolist() for name, array in step.observation.items() if "images" not in name}
        image = step.observation.get("observation.images.agentview")
        rows = image[:, :, 0].astype(int).sum(1).tolist() if cameras else []
        return {"first": first["observation.robot0_eef_pos"].tolist(), "last": state, "success": step.success,
                "rows": rows}

print(json.dumps([observed(*case) for case in json.loads(sys.argv[1])]))
"""


@pytest.mark.slow
def test_the_expert_solves_both_tasks_and_a_seed_is_an_episode():
    cases = [("Lift", False, 5, 300), ("Lift", False, 5, 300), ("Lift", False, 6, 300), ("Can", False, 5, 300)]
    cases.append(("Lift", True, 5, 3))
    first, again, other, can, seen = told_by_example("robomimic", ROBOMIMIC, json.dumps(cases))
    assert all(found["success"] for found in (first, again, other, can))
    assert first == again
    assert first["first"] != other["first"]
    assert len(can["last"]["observation.object"]) == 14
    assert "observation.object" not in seen["last"]
    assert min(seen["rows"][16:]) > max(seen["rows"][:3]), "the bright table is below, the wall above"
