"""How fast an actor that was cut off delivers what it has kept, while another one goes on live.

Both push rows of 50 KB at 30 Hz. The one that was away has minutes of them in its outbox when the learner comes back:
said is how much faster than real time they arrive (contract: at least 5 times), and what the living one got through.
"""

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from serl_client.client import TrainerClient

from .paired import Figure, machine, quantiles, said
from .served import PROCESSES, Rows, Served, spec_of
from .swarm import HZ, ROW, run_clients

LENGTH = 15  # rows of a record: half a second


def main(words: Sequence[str], prog: str) -> None:
    parser = argparse.ArgumentParser(prog, description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="that the actor was cut off (10)")
    parser.add_argument("--folder", type=Path, help="on the disk that is measured (the system's for temporary files)")
    parser.add_argument("--json", action="store_true", help="print one object")
    options = parser.parse_args(words)
    before = machine()
    with tempfile.TemporaryDirectory(prefix="bench-", dir=options.folder) as folder:
        figures = drain(Path(folder), options.minutes * 60)
    said("drain", before, figures, as_json=options.json)


def drain(folder: Path, seconds: float) -> list[Figure]:
    rows = Rows(spec_of(ROW, fps=HZ), length=LENGTH)
    records = int(seconds * HZ) // LENGTH
    with (
        Served(folder / "run", capacity=4 * records * LENGTH) as served,
        TrainerClient(served.address, actor="away", spec=rows.spec, outbox=folder / "away") as away,
    ):
        served.direct(away)
        served.kill()
        for segment in rows.episode(records, away.directive["number"]):
            while not away.has_room:
                time.sleep(0.001)
            away.push(segment)
        size = away.pending[1]
        served.start()
        ours, theirs = PROCESSES.Pipe()
        words = (served.address, folder, [0], seconds / 10, LENGTH, 1, theirs)
        living = PROCESSES.Process(target=run_clients, args=words)
        living.start()
        while not away.connected:
            time.sleep(0.001)
        begin = time.monotonic()
        ours.recv()
        ours.send(time.monotonic())
        while away.pending[0]:
            time.sleep(0.001)
            away.check()
        took = time.monotonic() - begin
        live = ours.recv()
        living.join()
    rate, (_, p99) = live["rates"][0], quantiles(live["late"])
    return [
        Figure(f"{seconds:.0f} s of records ({size / 1e6:.0f} MB) arrive in", took, "s"),
        Figure("  that is, times real time", seconds / took, "x", goal=">= 5"),
        Figure("rate of the living actor", rate, "Hz", f"what was asked ({HZ:g})", rate / HZ, ">= 0.9"),
        Figure("its acknowledgement p99", p99 * 1e3, "ms"),
    ]
