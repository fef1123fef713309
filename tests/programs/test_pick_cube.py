"""gym-hil's cube, picked up by a person at the keys: demonstrations and practice with takeovers, by words alone. And
by its script."""

import json
import os
import subprocess
import sys
import time

import pytest

from tests.programs.people import Person
from tests.shared.common import CONFIG, ROOT

pytest.importorskip("gym_hil", reason="the extra `hil` is not installed: . examples/install.sh --extra hil")
pytestmark = pytest.mark.nightly

WORDS = ["task=pick_cube", "task.env.fps=20", "task.env.options.random_block_position=false", "deadline_s=0.04"]
HOLDS = 0.05  # seconds between two repeats of a held key


class Keys(Person):
    """Picks up the cube, which lies below the hand: down, close, up, as often as it takes; the task says success."""

    def drive(self, phase):
        while self.count(phase, "NOT closed"):
            for key, times in ((b"o", 14), (b"g", 10), (b"u", 40)):
                for _ in range(times):
                    if self.count(phase, "NOT closed"):
                        self.press(key)
                        time.sleep(HOLDS)

    def succeed(self):
        """The task has said it."""


def test_gym_hils_cube_is_demonstrated_with_and_practised_with_and_says_itself_what_was_a_success(tmp_path):
    with Keys(tmp_path, {"MUJOCO_GL": os.environ.get("MUJOCO_GL", "egl")}) as person:
        person.practised(WORDS)
    judged = [info for info in person.catalog() if info.success is not None]
    assert {info.judged_by for info in judged} == {"judge"}
    assert any(info.source == "demo" and info.success for info in judged)
    practised = [info for info in judged if info.source == "online"]
    assert sum(info.success and info.terminated for info in practised) >= 2
    assert any(info.success and info.intervened for info in practised), "on a busy machine the policy may need no help"


SCRIPT = """
import json
import sys
from pathlib import Path
from serl_launcher.config import composed, factory

def episode(env, seed, **who):
    first, steps = env.reset(seed, **who)["observation.environment_state"].tolist(), []
    while not steps or not (steps[-1].terminated or steps[-1].truncated):
        steps.append(env.step([0, 0, 0, 1]))
    theirs = [step.intervened for step in steps]
    return {"first": first, "success": steps[-1].success, "theirs": theirs, "steps": len(steps)}

words = ["actor=true", "task=pick_cube", "task.env.operator=scripted", "task.env.clock=simulated"]
with factory(composed(Path(sys.argv[1]), words), "task.env")() as env:
    episodes = [episode(env, seed, teleop=True) for seed in (0, 1, 2, 0)]
    print(json.dumps([*episodes, episode(env, 3, intervene=True), episode(env, 4)]))
"""


def test_the_script_demonstrates_takes_over_from_a_policy_that_stands_still_and_else_leaves_it_alone():
    environment = {**os.environ, "MUJOCO_GL": os.environ.get("MUJOCO_GL", "egl")}
    command = [sys.executable, "-c", SCRIPT, str(CONFIG)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr
    *demonstrated, helped, left = json.loads(done.stdout.splitlines()[-1])
    assert all(each["success"] and all(each["theirs"]) for each in demonstrated)
    assert len({json.dumps(each["first"]) for each in demonstrated}) == 3, "a seed is a start"
    assert demonstrated[0] == demonstrated[3]
    assert (helped["success"], helped["theirs"][0], any(helped["theirs"])) == (True, False, True)
    assert (left["success"], any(left["theirs"]), left["steps"]) == (False, False, 100)
