"""Simulated Dobot controllers for tests, and what limits an arm on them."""

import random

import numpy as np

from robot_infra.sim.dobot_controller import DobotController

START = np.deg2rad([0, 20, -60, 0, 90, 0])  # where a simulated arm is at first
LIMITS = {
    f"joint{i + 1}": {"range": [at - 0.6, at + 0.6], "speed": 0.5, "jump": 0.1, "tracking": 0.2}
    for i, at in enumerate(START.tolist())
}
HOME = {f"joint{i + 1}": at for i, at in enumerate(START.tolist())}


def address():
    """An address of this machine that no other test has: Dobot's ports are always the same."""
    return ".".join(["127", *(str(random.SystemRandom().randrange(2, 255)) for _ in range(3))])


def controller(version, **changes):
    return DobotController(address(), version, **changes)
