"""robosuite's tasks, in the Python environment of examples/robomimic: skipped where nobody has installed it."""

import json

import pytest

from tests.shared.tools import told_by_example

SCRIPT = """
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
    first, again, other, can, seen = told_by_example("robomimic", SCRIPT, json.dumps(cases))
    assert all(found["success"] for found in (first, again, other, can))
    assert first == again
    assert first["first"] != other["first"]
    assert len(can["last"]["observation.object"]) == 14
    assert "observation.object" not in seen["last"]
    assert min(seen["rows"][16:]) > max(seen["rows"][:3]), "the bright table is below, the wall above"
