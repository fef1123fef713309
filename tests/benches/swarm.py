"""Many clients at once: each pushes rows of 50 KB at 30 Hz, one record a row, to one real server.

What is said: rows per second of each client that were acknowledged, the slowest beside the fastest; how late
acknowledgements came; and what server and clients cost in CPU and memory.
"""

import argparse
import resource
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from serl_client.client import TrainerClient

from .paired import COMMON, Figure, cpu_seconds, option, quantiles
from .served import Group, Latencies, Rows, Served, spec_of

ROW, HZ = 50_000, 30.0
EPISODE = 300  # rows
CAPACITY = 40_000  # steps
OPTIONS = {
    "--seconds": option(60.0, "(60)"),
    "--clients": option(64, "(64)"),
    "--processes": option(4, "that the clients are in (4)"),
    "--rows": option(1, "in one record (1; an actor of 30 Hz takes 15)"),
    **COMMON,
}


def measure(folder: Path, options: argparse.Namespace) -> Iterator[Figure]:
    return swarm(folder, options.clients, options.processes, options.seconds, options.rows)


def swarm(folder: Path, clients: int, processes: int, seconds: float, length: int) -> Iterator[Figure]:
    with Served(folder / "run", CAPACITY) as served:
        with TrainerClient(served.address, actor="first", spec=spec_of(ROW, fps=HZ), outbox=folder / "first") as first:
            served.collect(first)
        parts = np.array_split(np.arange(clients), processes)
        words = [(served.address, folder, part.tolist(), seconds, length, clients) for part in parts]
        with Group(run_clients, words) as group:
            group.heard()
            cpu = -cpu_seconds(served.pid)
            group.tell(time.monotonic() + 1.0)
            found = group.heard(seconds + 60.0)
        cpu += cpu_seconds(served.pid)
        memory = resident(served.pid)
    rates = np.concatenate([part["rates"] for part in found])
    p50, p99 = quantiles(np.concatenate([part["late"] for part in found]))
    slowest, asked = float(rates.min()), f"what was asked ({HZ:g})"
    yield Figure("rate of a client, the slowest", slowest, "Hz", "the fastest", slowest / float(rates.max()), ">= 0.9")
    yield Figure("rate of a client, the slowest", slowest, "Hz", asked, slowest / HZ, ">= 0.9")
    yield Figure("acknowledgement p50", p50 * 1e3, "ms")
    yield Figure("acknowledgement p99", p99 * 1e3, "ms", goal="<= 50")
    yield Figure("CPU of the server", cpu / seconds, "cores")
    yield Figure("CPU of the clients", sum(part["cpu"] for part in found) / seconds, "cores")
    yield Figure("memory of the server", memory / 1e6, "MB")
    yield Figure("memory of a process of clients", max(part["memory"] for part in found) / 1e6, "MB")


def run_clients(
    pipe: Any, address: str, folder: Path, numbers: list[int], seconds: float, length: int, clients: int
) -> None:  # fmt: skip
    """Some of the clients, in one process: their ticks are spread over the period."""
    spec = spec_of(ROW, fps=HZ)
    with ExitStack() as stack:
        own = [
            stack.enter_context(TrainerClient(address, actor=f"actor-{i}", spec=spec, outbox=folder / f"outbox-{i}"))
            for i in numbers
        ]
        while not all(client.state.directive["number"] for client in own):
            own[0].wait(0.05)
        rows, late = Rows(spec, length=length, pool=8 << 20), [Latencies(client) for client in own]
        episodes: list[list[Any]] = [[] for _ in own]
        pipe.send("ready")
        begin, period = pipe.recv(), length / HZ
        cpu = -time.process_time()
        for tick in range(round(seconds / period)):
            for i, number in enumerate(numbers):
                time.sleep(max(0.0, begin + (tick + number / clients) * period - time.monotonic()))
                if not episodes[i]:
                    directive = own[i].state.directive["number"]
                    episodes[i] = rows.episode(EPISODE // length, directive, prefix=f"actor-{number}")[::-1]
                if own[i].has_room:
                    late[i].push(episodes[i].pop())
        time.sleep(max(0.0, begin + seconds - time.monotonic()))
        rates = [len(each.seconds) * length / seconds for each in late]
        cpu += time.process_time()
    pipe.send({
        "rates": rates, "late": [second for each in late for second in each.seconds], "cpu": cpu,
        "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    })  # fmt: skip


def resident(process: int) -> int:
    """The most memory that a process ever had, in bytes."""
    return int(Path(f"/proc/{process}/status").read_text().partition("VmHWM:")[2].split()[0]) * 1024
