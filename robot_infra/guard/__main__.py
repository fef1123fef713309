"""Starts the guard process of one arm, as its actor does: `python -m robot_infra.guard DESCRIPTOR`."""

import sys

from robot_infra.guard.process import main

if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
