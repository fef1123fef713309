"""Work that speaks to nobody: what a busy neighbour costs by its core alone."""

import time


def compute() -> None:
    """Compute until the process is killed; each second is a line."""
    while True:
        end = time.monotonic() + 1
        while time.monotonic() < end:
            pass
        print(0, flush=True)
