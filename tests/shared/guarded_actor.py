"""An actor with a guarded arm that fails at one of its rows, as a program: LOG ROW kill|stop

It says when that is. One that was stopped and goes on says what it is told then, row by row.
"""

import os
import signal
import sys
import time
from types import SimpleNamespace

import numpy as np
from serl_client.errors import RobotFault

from tests.shared.arms import FPS, guarded
from tests.shared.robots import build

SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


def say(what: object) -> None:
    sys.stdout.write(f"{what}\n")
    sys.stdout.flush()


def main(log: str, row: str, how: str) -> None:
    robot = guarded(SimpleNamespace(path=log))
    robot.recover()
    with build(robot, fps=FPS, clock="real") as env:
        for number in range(int(row) + 3):
            if number == int(row):
                say(time.monotonic())
                os.kill(os.getpid(), SIGNALS[how])
            try:
                env.step(np.array([0.1, -0.1], np.float32) * (number + 1))
            except RobotFault as fault:
                say(f"{fault.kind}: {fault}")


if __name__ == "__main__":
    main(*sys.argv[1:])
