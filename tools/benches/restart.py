"""How soon a learner that was killed takes new records: the real program, with many steps stored, is killed (its other
processes die with it) and started again, while an actor goes on; the time from that start to the acknowledgement of the
first record that was pushed after it."""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import numpy as np
from serl_client import Feature, Spec
from serl_client.client import TrainerClient

from serl_launcher.data.layout import Layout
from serl_launcher.data.replay import ReplayBuffer
from tools.faults.proxy import free_port

from .paired import Figure, machine, said
from .served import STATE, Rows, deliver

TRAIN = Path(__file__).parents[2] / "examples/train.py"
SPEC = Spec({STATE: Feature((250,))}, Feature((7,), low=-np.ones(7), high=np.ones(7)), fps=300.0)


def main(words: Sequence[str], prog: str) -> None:
    parser = argparse.ArgumentParser(prog, description=__doc__)
    parser.add_argument("--steps", type=int, default=100_000, help="that are stored, of 1 KB (100000)")
    parser.add_argument("--rounds", type=int, default=3, help="kills (3)")
    parser.add_argument("--folder", type=Path, help="of the run (the system's for temporary files)")
    parser.add_argument("--json", action="store_true", help="print one object")
    options = parser.parse_args(words)
    before = machine()
    with tempfile.TemporaryDirectory(prefix="bench-", dir=options.folder) as folder:
        figures = restart(Path(folder), options.steps, options.rounds)
    said("restart", before, figures, as_json=options.json)


def restart(folder: Path, steps: int, count: int) -> list[Figure]:
    rows, ports, capacity = Rows(SPEC), (free_port(), free_port()), steps + 20_000
    words = [
        sys.executable, TRAIN, "learner=true", "task=fake", "plan=collect", "wandb=false", f"run_dir={folder / 'run'}",
        f"port={ports[0]}", f"inference_port={ports[1]}", f"plan.sources.demo.capacity={capacity}",
        'plan.phases.demonstrate.until=["demo.episodes >= 1000000", operator]',
    ]  # fmt: skip
    address, took = f"tcp://127.0.0.1:{ports[0]}", []
    with (
        TrainerClient(address, actor="bench", spec=rows.spec, outbox=folder / "outbox") as client,
        open(folder / "log", "w") as log,
    ):
        learner = subprocess.Popen(words, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        try:
            while not client.directive["number"]:
                client.wait(0.1)
                if learner.poll() is not None:
                    raise RuntimeError(f"the learner has ended: {(folder / 'log').read_text()}")
            number = client.directive["number"]
            deliver(client, rows.episode(steps // rows.length + 1, number))
            for segment in rows.episode(count, number):
                learner.kill()
                learner.wait()
                begin = time.monotonic()
                learner = subprocess.Popen(words, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
                deliver(client, [segment])
                took.append(time.monotonic() - begin)
        finally:
            learner.kill()
            learner.wait()
    begin = time.monotonic()
    buffer = ReplayBuffer(folder / "run/store/demo", Layout(rows.spec, capacity))
    buffer.refresh()
    read = time.monotonic() - begin
    return [
        Figure(f"start to first acknowledgement, {buffer.head:,} steps stored", max(took), "s", goal="<= 5"),
        Figure("  the median", median(took), "s"),
        Figure("  of it, a trainer's reading of these steps", read, "s"),
    ]
