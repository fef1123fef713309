"""Meta-World's tasks as one gymnasium task, Retake/MetaWorld-v0: tasks.py."""

import gymnasium

gymnasium.register("Retake/MetaWorld-v0", entry_point="metaworld_actor.tasks:Task")
