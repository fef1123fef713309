"""How soon a learner that was killed takes new records: the real program, with many steps stored, is killed (its other
processes die with it) and started again, while an actor goes on; the time from that start to the acknowledgement of the
first record that was pushed after it."""

import argparse
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import numpy as np
from serl_client import Feature, Spec
from serl_client.client import TrainerClient
from serl_client.errors import ConfigError

from serl_launcher.replay.buffer import ReplayBuffer
from serl_launcher.store.layout import Layout
from tests.shared.common import free_port

from .paired import COMMON, Figure, option
from .served import STATE, Rows, deliver

TRAIN = Path(__file__).parents[2] / "examples/train.py"
SPEC = Spec({STATE: Feature((250,))}, Feature((7,), low=-np.ones(7), high=np.ones(7)), fps=300.0)


OPTIONS = {
    "--steps": option(100_000, "that are stored, of 1 KB (100000)"),
    "--rounds": option(3, "kills (3)"),
    **COMMON,
}


def measure(folder: Path, options: argparse.Namespace) -> Iterator[Figure]:
    return restart(folder, options.steps, options.rounds)


def restart(folder: Path, steps: int, count: int) -> Iterator[Figure]:
    rows, ports, capacity = Rows(SPEC), (free_port(), free_port()), steps + 20_000
    words = [
        sys.executable, TRAIN, "learner=true", "task=fake", "plan=collect", "log=false", f"run_dir={folder / 'run'}",
        f"port={ports[0]}", f"inference_port={ports[1]}", f"plan.sources.demo.capacity={capacity}",
        'plan.phases.demonstrate.until=["demo.episodes >= 1000000", operator]',
    ]  # fmt: skip
    address, took, learners = f"tcp://127.0.0.1:{ports[0]}", [], list[subprocess.Popen[bytes]]()
    with (
        TrainerClient(address, actor="bench", spec=rows.spec, outbox=folder / "outbox") as client,
        open(folder / "log", "w") as log,
    ):

        def start() -> None:
            learners.append(subprocess.Popen(words, stdout=log, stderr=log, stdin=subprocess.DEVNULL))

        def kill() -> None:
            learners[-1].kill()
            learners[-1].wait()

        start()
        try:
            while not client.state.directive["number"]:
                client.wait(0.1)
                if learners[-1].poll() is not None:
                    raise ConfigError(f"the learner has ended: {(folder / 'log').read_text()}")
            number = client.state.directive["number"]
            deliver(client, rows.episode(steps // rows.length + 1, number))
            for segment in rows.episode(count, number):
                kill()
                begin = time.monotonic()
                start()
                deliver(client, [segment])
                took.append(time.monotonic() - begin)
        finally:
            kill()
    begin = time.monotonic()
    buffer = ReplayBuffer(folder / "run/store/demo", Layout(rows.spec, capacity))
    buffer.refresh()
    read, held = time.monotonic() - begin, buffer.head - buffer.tail
    title = f"start to first acknowledgement, {held:,} steps stored"
    yield Figure(title, max(took), "s", goal="<= 5")
    yield Figure("  the median", median(took), "s")
    yield Figure("  of it, a trainer's reading of these steps", read, "s")
