"""The DeepMind Control Suite as one gymnasium task, Retake/DMC-v0: suite.py."""

import gymnasium

gymnasium.register("Retake/DMC-v0", entry_point="dmc_actor.suite:Suite")
