"""Many clients at once: each pushes rows of 50 KB at 30 Hz, one record a row, to one real server.

What is said: rows per second of each client that were acknowledged, the slowest beside the fastest; how late
acknowledgements came; and what server and clients cost in CPU and memory.
"""

import argparse
import resource
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from serl_client.client import TrainerClient

from .paired import Figure, cpu_seconds, machine, quantiles, said
from .served import PROCESSES, Latencies, Rows, Served, spec_of

ROW, HZ = 50_000, 30.0
EPISODE = 300  # rows
CAPACITY = 40_000  # steps


def main(words: Sequence[str], prog: str) -> None:
    parser = argparse.ArgumentParser(prog, description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="(60)")
    parser.add_argument("--clients", type=int, default=64, help="(64)")
    parser.add_argument("--processes", type=int, default=4, help="that the clients are in (4)")
    parser.add_argument("--rows", type=int, default=1, help="in one record (1; an actor of 30 Hz takes 15)")
    parser.add_argument("--folder", type=Path, help="on the disk that is measured (the system's for temporary files)")
    parser.add_argument("--json", action="store_true", help="print one object")
    options = parser.parse_args(words)
    before = machine()
    with tempfile.TemporaryDirectory(prefix="bench-", dir=options.folder) as folder:
        figures = swarm(Path(folder), options.clients, options.processes, options.seconds, options.rows)
    said("swarm", before, figures, as_json=options.json)


def swarm(folder: Path, clients: int, processes: int, seconds: float, length: int) -> list[Figure]:
    with Served(folder / "run", CAPACITY) as served:
        with TrainerClient(served.address, actor="first", spec=spec_of(ROW, fps=HZ), outbox=folder / "first") as first:
            served.direct(first)
        pipes, started = [], []
        for part in np.array_split(np.arange(clients), processes):
            ours, theirs = PROCESSES.Pipe()
            words = (served.address, folder, part.tolist(), seconds, length, clients, theirs)
            started.append(PROCESSES.Process(target=run_clients, args=words))
            started[-1].start()
            pipes.append(ours)
        for pipe in pipes:
            pipe.recv()
        cpu, begin = cpu_seconds(served.pid), time.monotonic() + 1.0
        for pipe in pipes:
            pipe.send(begin)
        found = [pipe.recv() for pipe in pipes]
        cpu = cpu_seconds(served.pid) - cpu
        memory = resident(served.pid)
        for process in started:
            process.join()
    rates = np.concatenate([part["rates"] for part in found])
    p50, p99 = quantiles(np.concatenate([part["late"] for part in found]))
    slowest, asked = float(rates.min()), f"what was asked ({HZ:g})"
    return [
        Figure("rate of a client, the slowest", slowest, "Hz", "the fastest", slowest / float(rates.max()), ">= 0.9"),
        Figure("rate of a client, the slowest", slowest, "Hz", asked, slowest / HZ, ">= 0.9"),
        Figure("acknowledgement p50", p50 * 1e3, "ms"),
        Figure("acknowledgement p99", p99 * 1e3, "ms", goal="<= 50"),
        Figure("CPU of the server", cpu / seconds, "cores"),
        Figure("CPU of the clients", sum(part["cpu"] for part in found) / seconds, "cores"),
        Figure("memory of the server", memory / 1e6, "MB"),
        Figure("memory of a process of clients", max(part["memory"] for part in found) / 1e6, "MB"),
    ]  # fmt: skip


def run_clients(
    address: str, folder: Path, numbers: list[int], seconds: float, length: int, clients: int, pipe: Any
) -> None:  # fmt: skip
    """Some of the clients, in one process: their ticks are spread over the period."""
    spec = spec_of(ROW, fps=HZ)
    with ExitStack() as stack:
        own = [
            stack.enter_context(TrainerClient(address, actor=f"actor-{i}", spec=spec, outbox=folder / f"outbox-{i}"))
            for i in numbers
        ]
        while not all(client.directive["number"] for client in own):
            own[0].wait(0.05)
        rows, late = Rows(spec, length=length, pool=8 << 20), [Latencies(client) for client in own]
        episodes: list[list[Any]] = [[] for _ in own]
        pipe.send("ready")
        begin, period = pipe.recv(), length / HZ
        cpu = time.process_time()
        for tick in range(round(seconds / period)):
            for i, number in enumerate(numbers):
                time.sleep(max(0.0, begin + (tick + number / clients) * period - time.monotonic()))
                if not episodes[i]:
                    directive = own[i].directive["number"]
                    episodes[i] = rows.episode(EPISODE // length, directive, prefix=f"actor-{number}")[::-1]
                if own[i].has_room:
                    late[i].push(episodes[i].pop())
        time.sleep(max(0.0, begin + seconds - time.monotonic()))
        taken = [len(each.seconds) for each in late]
        cpu = time.process_time() - cpu
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    seconds_late = [second for each in late for second in each.seconds]
    pipe.send({
        "rates": [count * length / seconds for count in taken], "late": seconds_late, "cpu": cpu, "memory": memory,
    })  # fmt: skip


def resident(process: int) -> int:
    """The most memory that a process ever had, in bytes."""
    return int(Path(f"/proc/{process}/status").read_text().partition("VmHWM:")[2].split()[0]) * 1024
