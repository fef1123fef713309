"""An actor that moves two guarded Dobot arms until it is killed, as a program: LEFT RIGHT, the addresses"""

import sys
import time

from tests.shared.dobots import BOTH, FPS, guarded


def main(left: str, right: str) -> None:
    robot = guarded(left, right)
    robot.recover()
    while True:
        for way in (0.3, -0.3):
            for _ in range(20):
                robot.command(BOTH + way)
                time.sleep(1 / FPS)


if __name__ == "__main__":
    main(*sys.argv[1:])
