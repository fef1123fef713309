"""Lets Meta-World's own script of a task be its operator: it demonstrates, and helps a policy that is stuck."""

import importlib
from typing import Any

from robot_infra.teleop.scripted import Mover

MARGIN = 0.02  # of the task's reward, 0 to 10, by which a step makes progress


class Expert(Mover):
    """Drives a Task (tasks.py) with the script, which sees what a policy sees and remembers nothing: so it goes on from
    wherever the policy has come to. The reward tells how much of the task is left.

    task: of gymnasium. options: of Mover.
    """

    def __init__(self, task: Any, **options: Any) -> None:
        scene = task.unwrapped
        scripts: Any = importlib.import_module("metaworld.policies")
        script = scripts.ENV_POLICY_MAP[scene.name]()
        super().__init__(lambda: script.get_action(scene.seen), lambda: -scene.reward, margin=MARGIN, **options)
