"""Builds task dobot_pnp with robot=sim: two guarded arms, driven over TCP in real time, with simulated controllers.

The guard's process starts sim/dobot_cell.py, and drives what is there as it would drive real arms.
"""

import json
import os
import select
import subprocess
import sys
from contextlib import ExitStack, suppress
from typing import Any

import numpy as np
from serl_client.env import Observation
from serl_client.errors import RobotFault
from serl_client.spec import Array

from robot_infra.cameras import gl
from robot_infra.drivers.bimanual import BimanualArm
from robot_infra.drivers.dobot import DobotArm
from robot_infra.env import RobotEnv
from robot_infra.safety import check_clock
from robot_infra.sim.dobot_cell import FINGERS, PLACES, VERSION
from robot_infra.tasks.dobot_sim import FPS, DobotScene, guarded, make_task

SERVO_HZ = 50.0  # set points per second; Dobot advises 33 for real arms
STARTING, ANSWER = 60.0, 1.0  # seconds


class CellLink:
    """Starts a cell, which this module runs, and asks it; `addresses` are those of its controllers.

    size: bytes of an answer, which is the scene's pose.
    """

    def __init__(self, program: str, side: str, size: int) -> None:
        command = [sys.executable, "-m", program, side]
        theirs, self._in = os.pipe()
        self._out, answers = os.pipe()
        self._process = subprocess.Popen(command, stdin=theirs, stdout=answers)
        self._size, self._due = size, 0  # answers to come: more than one after a question that got none in time
        os.close(theirs)
        os.close(answers)
        try:
            self.addresses: list[str] = json.loads(self._answer(STARTING))
        except BaseException:
            self.close()
            raise

    def ask(self, line: str) -> Array:
        """Return the scene's pose. Raises RobotFault if the cell has ended, or hangs."""
        with suppress(OSError):  # it has ended, which the missing answer tells
            os.write(self._in, f"{line}\n".encode())
        self._due += 1
        pose = b""
        while self._due:
            pose = self._answer(ANSWER, self._size)
            self._due -= 1
        return np.frombuffer(pose)

    def close(self) -> None:
        """End it."""
        os.close(self._in)
        try:
            self._process.wait(ANSWER)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._out)

    def _answer(self, patience: float, most: int = 1 << 16) -> bytes:
        data = os.read(self._out, most) if select.select([self._out], [], [], patience)[0] else b""
        if not data:
            raise RobotFault("the simulated controllers have ended, or hang: start the actor again", "link")
        return data


class DobotCell(DobotScene):
    """Drives both simulated arms over TCP as real ones, their grippers without a protocol; see DobotScene.

    **Assumed:** real controllers are as sim/dobot_controller.py says, and real grippers answer at once. It cannot show
    a gripper's own bus, or its faults.
    """

    program = "robot_infra.sim.dobot_cell"

    def __init__(self, address: str, *, hz: float, side: str, **options: Any) -> None:
        super().__init__(address, hz=hz, **options)
        with ExitStack() as stack:
            stack.callback(super().close)
            self._cell = CellLink(self.program, side, self._scene.pose.nbytes)
            stack.callback(self._cell.close)
            driver, options = f"{DobotArm.__module__}.DobotArm", {"version": VERSION, "t": 1 / hz}
            left, right = ({"driver": driver, "address": at, "options": options} for at in self._cell.addresses)
            self._arms = BimanualArm(address, left=left, right=right)
            stack.callback(self._arms.close)
            self._scene.show(self._cell.ask("look"))
            self._begin()
            self._opened = stack.pop_all()

    def read(self) -> Array:
        return np.insert(self._arms.read(), PLACES, self._scene.positions[FINGERS])

    def write(self, positions: Array) -> None:
        self._arms.write(np.delete(positions, FINGERS))
        left, right = positions[FINGERS]
        self._scene.show(self._cell.ask(f"grip {left} {right}"))

    def sense(self) -> Observation:
        self._scene.show(self._cell.ask("look"))
        return super().sense()

    def recover(self) -> None:
        self._arms.recover()

    def enable(self) -> Array:
        return np.insert(self._arms.enable(), PLACES, np.nan)

    def scene(self, seed: int) -> None:
        self._scene.show(self._cell.ask(f"reset {seed}"))
        self._begin()  # it has ended all connections, so that nothing older is obeyed

    def close(self) -> None:
        self._opened.close()

    def _begin(self) -> None:
        self.recover()
        self.enable()


def make(
    *, clock: str, fps: float = FPS, cameras: bool | str = False, image_size: int = 128, object_in_state: bool = True,
    side: str = "both", **task: Any,
) -> RobotEnv:  # fmt: skip
    """Make the task as an Env, as dobot_sim.make does. Raises ConfigError for a clock that is not real, too."""
    check_clock(clock)
    backend = gl.choose_backend(cameras, "" if object_in_state else "object")
    robot = guarded(
        DobotCell, fps=fps, servo_hz=SERVO_HZ, process=True, object_in_state=object_in_state, side=side,
        backend=backend, image_size=image_size,
    )  # fmt: skip
    return make_task(robot, clock=clock, fps=fps, **task)
