"""Paths of the repository, waiting for a condition, and ports: what nearly every test file needs."""

import logging
import os
import random
import socket
import time
from contextlib import contextmanager, suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CONFIG, TOOLS, TASKS, TRAIN = ROOT / "config", ROOT / "tools", ROOT / "config/task", ROOT / "examples/train.py"
STATE = "observation.state"
SCALE = float(os.environ.get("RETAKE_PATIENCE", "1"))  # every limit on waiting is multiplied by it; raise it when slow
PATIENCE = 60.0 * SCALE  # seconds
PORTS = range(10_081, 32_000)  # outgoing connections take theirs from 32768 on; a browser opens all from 10081 on
WORKERS = 16  # of xdist; each has a range of ports of its own
_given: set[int] = set()


def until(condition, seconds=60.0, *, every=0.02, why="this never happened"):
    """Wait until `condition()` is true and return its value; fail with `why` (or what it returns) after `seconds`.

    It looks more and more seldom, at last once in `every` seconds, because each look takes time of what is waited for.
    """
    begin = time.monotonic()
    while not (value := condition()):
        waited = time.monotonic() - begin
        assert waited < seconds * SCALE, why() if callable(why) else why
        time.sleep(min(max(0.002, waited / 10), every))
    return value


def own_ports() -> list[str]:
    """Return the words that give a learner ports on which nobody else listens, such as a user's own learner."""
    return [f"{name}={free_port()}" for name in ("port", "inference_port")]


def free_port() -> int:
    """Return a port of loopback that is free, was not returned before, and belongs to this xdist worker alone."""
    ports = PORTS
    if worker := os.environ.get("PYTEST_XDIST_WORKER", ""):
        share, number = len(PORTS) // WORKERS, int(worker.removeprefix("gw")) % WORKERS
        ports = PORTS[number * share : (number + 1) * share]
    while True:
        with socket.socket() as probe, suppress(OSError):
            port = random.SystemRandom().choice(ports)
            probe.bind(("127.0.0.1", port))
            if port not in _given:
                _given.add(port)
                return port


@contextmanager
def same_log():
    """Take back what the programs change of the root logger, for fixtures of a module, too."""
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    try:
        yield
    finally:
        root.handlers[:], root.level = before, level
