"""What pushing records and asking for actions costs a control loop (3 cameras of 224x224, state of 14).

It is measured while the learner is alive, slow, stopped or dead, and while the outbox is full. Beside each loop runs
the same loop without the calls, in a process of its own; the column `ratio` is that of the two (contract: at most 1.5).
With --faults it is the whole actor that runs (runner, fake robot, client), beside the same one without a client, while
its learner is killed, stopped, cut off and out of disk in turn.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from serl_client import Feature, Segment, Spec, Stamp
from serl_client.client import TrainerClient

from .control_faults import faults, lines
from .learner_states import Learner
from .served import PROCESSES

CAMERAS = [f"observation.images.cam_{i}" for i in range(3)]
SPEC = Spec(
    {**{name: Feature((224, 224, 3), "uint8") for name in CAMERAS}, "observation.state": Feature((14,))},
    Feature((14,), low=-np.ones(14), high=np.ones(14)),
    fps=30.0,
)
ROWS = 8  # per segment
STATES = ("alive", "slow", "stopped", "dead", "full")


def main(words: Sequence[str], prog: str) -> None:
    parser = argparse.ArgumentParser(prog, description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="per state, with --faults for all of it (20)")
    parser.add_argument("--hz", type=float, default=30.0, help="of the loop (30)")
    parser.add_argument("--faults", action="store_true", help="the whole actor, while its learner fails in turn")
    parser.add_argument("--json", action="store_true", help="print one list of objects, or with --faults one object")
    options = parser.parse_args(words)
    if options.faults:
        result = faults(options.seconds, options.hz)
        print(json.dumps(result) if options.json else "\n".join(lines(result)))
        return
    results = [control(state, options.seconds, options.hz) for state in STATES]
    print(json.dumps(results) if options.json else "\n".join([HEADER, *(ROW.format(**r) for r in results)]))


HEADER = (
    "learner   CPU us per call, median     wall us p99.9          tick late ms p99.9            late ticks\n"
    "             push    ask  answer       push    ask  answer    with  without  ratio     with  without   of"
)
ROW = (
    "{state:9} {push_cpu:7.1f} {ask_cpu:6.1f} {answer_cpu:7.1f}    {push_wall:7.0f} {ask_wall:6.0f} {answer_wall:7.0f}"
    "  {late_ms:6.2f}  {plain_late_ms:7.2f}  {ratio:5.2f}   {late_ticks:6}  {plain_late_ticks:7} {ticks:4}"
)


def control(state: str, seconds: float, hz: float) -> dict[str, Any]:
    """One line: the loop with the calls while the learner is in `state`, and the same loop without them."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder, Learner(Path(folder)) as learner:
        capacity = (1 if state == "full" else 2000) << 20
        with TrainerClient(
            learner.address, actor="bench", spec=SPEC, outbox=Path(folder) / "outbox", capacity=capacity
        ) as client:
            learner.direct(client)
            learner.enter(state)
            loop = Calls(client)
            queue: Any = PROCESSES.Queue()
            beside = PROCESSES.Process(target=plain, args=(queue, seconds, hz))
            beside.start()
            queue.get()  # it has started
            late = ticks(loop.tick, seconds, hz)
            plain_late = queue.get()
            beside.join()
    return {
        "state": state, **loop.figures(), "late_ms": milliseconds(late), "plain_late_ms": milliseconds(plain_late),
        "ratio": milliseconds(late) / milliseconds(plain_late), "ticks": len(late),
        "late_ticks": sum(x > 0.1 / hz for x in late), "plain_late_ticks": sum(x > 0.1 / hz for x in plain_late),
    }  # fmt: skip


def milliseconds(late: list[float]) -> float:
    return float(np.quantile(late, 0.999)) * 1e3


def ticks(tick: Callable[[int], None], seconds: float, hz: float) -> list[float]:
    """Run `tick` at a rate by deadline; how late each one ended, counted from when it should have begun."""
    late, begin = [], time.monotonic()
    for i in range(int(seconds * hz)):
        due = begin + i / hz
        time.sleep(max(0.0, due - time.monotonic()))
        tick(i)
        late.append(time.monotonic() - due)
    return late


def frames(generator: np.random.Generator) -> dict[str, Any]:
    """What the cameras would give: fresh arrays in every row."""
    pixels = {name: generator.integers(0, 256, (224, 224, 3), np.uint8) for name in CAMERAS}
    return {**pixels, "observation.state": generator.standard_normal(14).astype(np.float32)}


def plain(queue: Any, seconds: float, hz: float) -> None:
    """The loop without the calls."""
    generator, rows = np.random.default_rng(1), []
    queue.put("started")

    def tick(_: int) -> None:
        rows.append(frames(generator))
        if len(rows) == ROWS:
            stacked(rows)
            rows.clear()

    queue.put(ticks(tick, seconds, hz))


def stacked(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


class Calls:
    """The calls that a runner makes, with their times in ns."""

    def __init__(self, client: TrainerClient) -> None:
        self._client, self._generator = client, np.random.default_rng(0)
        self._rows: list[dict[str, Any]] = []
        self._episode = 0
        self._times: dict[str, list[tuple[int, int]]] = {"push": [], "ask": [], "answer": []}

    def tick(self, i: int) -> None:
        row = frames(self._generator)
        action = np.zeros(14, np.float32)
        self._timed("answer", self._client.answer)
        self._timed("ask", lambda: self._client.ask(
            row, step=i, seed=i, previous_action=action, reset=False, explore=True, task="bench"
        ))  # fmt: skip
        self._rows.append(row)
        if len(self._rows) == ROWS:
            if self._client.has_room:
                segment = self._segment()
                self._timed("push", lambda: self._client.push(segment))
            self._rows = []

    def _segment(self) -> Segment:
        self._episode += 1
        flags, zeros = np.zeros(ROWS - 1, bool), np.zeros(ROWS - 1, np.float32)
        return Segment(
            f"bench-{self._episode}", 0, "bench", Stamp(self._client.directive["number"], "bench", 1),
            stacked(self._rows), np.zeros((ROWS - 1, 14), np.float32), zeros, flags, flags, zeros.astype(np.float64),
            truncated=True,
        )  # fmt: skip

    def _timed(self, name: str, call: Callable[[], Any]) -> None:
        wall, cpu = time.perf_counter_ns(), time.thread_time_ns()
        call()
        self._times[name].append((time.thread_time_ns() - cpu, time.perf_counter_ns() - wall))

    def figures(self) -> dict[str, float]:
        figures = {}
        for name, times in self._times.items():
            cpu, wall = np.array(times or [(0, 0)]).T / 1e3
            figures |= {f"{name}_cpu": float(np.median(cpu)), f"{name}_wall": float(np.quantile(wall, 0.999))}
        return figures
