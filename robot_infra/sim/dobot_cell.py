"""Simulates the table of task dobot_pnp in real time: two Dobot controllers on the network, and their scene.

It is a process of its own, for the driver in tasks/dobot_cell.py, and ends when its standard input does: with whoever
has started it, however that ends. It answers each line with the scene's pose: `look`, `grip LEFT RIGHT` (set points of
the grippers, percent) and `reset SEED`. Its argument is the side of the scene's object.
"""

import errno
import json
import math
import os
import random
import select
import signal
import sys
import time
from contextlib import ExitStack

import numpy as np
from serl_client.closing import Closing

from robot_infra.sim.dobot_controller import STALL, DobotController
from robot_infra.sim.dobot_pnp import HOME, PHYSICS, SIDES, Scene

VERSION = "V3"
FINGERS = [6, 13]  # the grippers' entries among all 14
PLACES = [6, 12]  # where they belong among the 12 joints, for np.insert
PERIOD = 2 * PHYSICS  # seconds between two looks at the controllers


class Cell(Closing):
    """Lets the scene follow the controllers of both arms; a context manager. `grip` [2]: set points of the grippers."""

    def __init__(self, side: str = "both") -> None:
        self.scene = Scene(side)
        with ExitStack() as stack:
            self._arms = [stack.enter_context(_controller()) for _ in SIDES]
            self._opened = stack.pop_all()
        self.reset(0)

    def close(self) -> None:
        self._opened.close()

    @property
    def addresses(self) -> list[str]:
        """Return the address of each controller, left first."""
        return [arm.address for arm in self._arms]

    def reset(self, seed: int) -> None:
        """Put both arms home, and the object where `seed` says. Connections end: no older set point is obeyed."""
        self.scene.reset(seed)
        self.grip = HOME[FINGERS]
        for arm, home in zip(self._arms, np.split(HOME, 2), strict=True):
            with arm.lock:
                arm.cut()
                arm.machine.stand(np.rad2deg(home[:-1]))

    def advance(self, seconds: float) -> None:
        """Let the scene go on towards where the controllers have their joints, and the grippers their set points."""
        joints = [np.deg2rad(arm.machine.q) for arm in self._arms]
        self.scene.step(np.insert(np.concatenate(joints), PLACES, self.grip), seconds)


def _controller() -> DobotController:
    """Return a controller at an address of this machine that nobody uses."""
    while True:
        address = f"127.{random.randint(1, 254)}.{random.randint(0, 255)}.{random.randint(1, 254)}"
        try:
            return DobotController(address, VERSION)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise


def run(side: str) -> None:
    """Run it until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the actor's: it closes the arm
    with Cell(side) as cell:
        _say(json.dumps(cell.addresses).encode() + b"\n")
        before, owed = time.monotonic(), 0.0
        while True:
            if select.select([sys.stdin], [], [], max(0.0, before + PERIOD - time.monotonic()))[0]:
                lines = os.read(sys.stdin.fileno(), 4096)  # whole ones: they are short, and a pipe does not cut those
                if not lines:
                    return
                for word, *values in map(bytes.split, lines.splitlines()):
                    if word == b"reset":
                        cell.reset(int(values[0]))
                    elif word == b"grip":
                        cell.grip = np.array(values, float)
                    _say(cell.scene.pose.tobytes())
            now = time.monotonic()
            if now >= before + PERIOD:
                owed, before = owed + min(now - before, STALL), now
                steps = math.floor(owed / PHYSICS)
                cell.advance(steps * PHYSICS)
                owed -= steps * PHYSICS


def _say(data: bytes) -> None:
    os.write(sys.stdout.fileno(), data)


if __name__ == "__main__":
    run(sys.argv[1])
