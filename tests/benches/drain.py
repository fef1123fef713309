"""How fast an actor that was cut off delivers what it has kept, while another one goes on live.

Both push rows of 50 KB at 30 Hz. The one that was away has minutes of them in its outbox when the learner comes back:
said is how much faster than real time they arrive (contract: at least 5 times), and what the living one got through.
"""

import argparse
import time
from collections.abc import Iterator
from pathlib import Path

from serl_client.client import TrainerClient

from .paired import COMMON, Figure, option, quantiles
from .served import Child, Rows, Served, spec_of
from .swarm import HZ, ROW, run_clients

LENGTH = 15  # rows of a record: half a second
OPTIONS = {"--minutes": option(10.0, "that the actor was cut off (10)"), **COMMON}


def measure(folder: Path, options: argparse.Namespace) -> Iterator[Figure]:
    return drain(folder, options.minutes * 60)


def drain(folder: Path, seconds: float) -> Iterator[Figure]:
    rows = Rows(spec_of(ROW, fps=HZ), length=LENGTH)
    records = int(seconds * HZ) // LENGTH
    with (
        Served(folder / "run", capacity=4 * records * LENGTH) as served,
        TrainerClient(served.address, actor="away", spec=rows.spec, outbox=folder / "away") as away,
    ):
        served.collect(away)
        served.kill()
        for segment in rows.episode(records, away.state.directive["number"]):
            while not away.has_room:
                time.sleep(0.001)
            away.push(segment)
        size = away.pending[1]
        served.start()
        with Child(run_clients, served.address, folder, [0], seconds / 10, LENGTH, 1) as living:
            while not away.connected:
                time.sleep(0.001)
            begin = time.monotonic()
            living.heard()
            living.tell(time.monotonic())
            while away.pending[0]:
                time.sleep(0.001)
                away.check()
            took = time.monotonic() - begin
            live = living.heard(seconds / 10 + 60.0)
    rate, (_, p99) = live["rates"][0], quantiles(live["late"])
    yield Figure(f"{seconds:.0f} s of records ({size / 1e6:.0f} MB) arrive in", took, "s")
    yield Figure("  that is, times real time", seconds / took, "x", goal=">= 5")
    yield Figure("rate of the living actor", rate, "Hz", f"what was asked ({HZ:g})", rate / HZ, ">= 0.9")
    yield Figure("its acknowledgement p99", p99 * 1e3, "ms")
