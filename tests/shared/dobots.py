"""Simulated Dobot controllers for tests, and guarded arms on them.

As a program: an actor that moves two guarded arms until it is killed; LEFT RIGHT, the addresses
"""

import random
import sys
import time

import numpy as np

from robot_infra.guard.robot import GuardedRobot
from robot_infra.sim.dobot_controller import DobotController

DRIVER = "robot_infra.drivers.dobot.DobotArm"
FPS = 10.0
START = np.deg2rad([0, 20, -60, 0, 90, 0])  # where a simulated arm is at first
BOTH = np.tile(START, 2).astype(np.float32)
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


def guarded(left, right):
    """A GuardedRobot over the drivers of two simulated arms: of a V3 controller at `left`, of a V4 one at `right`."""
    arms = {
        side: {"driver": DRIVER, "address": host, "options": {"version": version}}
        for side, host, version in (("left", left, "V3"), ("right", right, "V4"))
    }
    limits = {f"{side}_{name}": limit for side in arms for name, limit in LIMITS.items()}
    home = {f"{side}_{name}": at for side in arms for name, at in HOME.items()}
    return GuardedRobot(
        "robot_infra.drivers.bimanual.BimanualArm", address=f"{left} and {right}", fps=FPS, limits=limits, home=home,
        servo_hz=33, options=arms,
    )  # fmt: skip


def main(left, right):
    robot = guarded(left, right)
    robot.recover()
    while True:
        for way in (0.3, -0.3):
            for _ in range(20):
                robot.command(BOTH + way)
                time.sleep(1 / FPS)


if __name__ == "__main__":
    main(*sys.argv[1:])
