"""What pushing records and asking for actions costs a control loop (3 cameras of 224x224, state of 14).

It is measured while the learner is alive, slow, stopped or dead, and while the outbox is full. Beside each loop runs
the same loop without the calls, in a process of its own; the column `ratio` is that of the two (contract: at most 1.5).

With --faults it is the whole actor that runs: the runner drives the fake robot and its three cameras on the real clock
and asks another process for every action, while its learner is killed, stopped, cut off and out of disk in turn; beside
it the same runner drives the same robot, and its client is one that does nothing. A tick is late when it lasted more
than 1.1 of its time; the ratio is that of the shares of late ticks, because an actor that hears of no action for some
seconds ends its episode and waits. Of a call, `own` is its wall time without that in which its thread could run and no
processor was free (Linux counts it, schedstat): that belongs to the machine, and both loops have it. A late tick stands
in our calls if their own time is half of what was too much. Out of disk: whatever the server writes to a file fails
(RLIMIT_FSIZE).
"""

import argparse
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from serl_client import messages as m

from tests.faults.proxy import Proxy
from tests.shared.common import free_port

from .loops import BODY, Call, Learner, Loop, Tick, Timed, actor, plain, ticks
from .paired import option
from .served import SPEC, Child

STATES = ("alive", "slow", "stopped", "dead", "full")
FAULTS = ("killed", "stopped", "cut off", "no disk")
START = 5.0  # seconds before the first fault
CYCLE = 15.0  # seconds from one fault to the next
SHARE = 2 / 3  # of which it lasts
LATE, VERY_LATE = 1.1, 1.5  # of a tick's time; very late as the actor's console counts
GOAL = 1.5  # late ticks with the client, of those without
OPTIONS = {
    "--seconds": option(20.0, "per state, with --faults for all of it (20)"),
    "--hz": option(30.0, "of the loop (30)"),
    "--faults": option(False, "the whole actor, while its learner fails in turn"),
    "--json": option(False, "print one list of objects, or with --faults one object"),
}


def measure(folder: Path, options: argparse.Namespace) -> Any:
    if options.faults:
        return faults(folder, options.seconds, options.hz)
    return [control(folder / state, state, options.seconds, options.hz) for state in STATES]


def lines(result: Any) -> Iterator[str]:
    """What a person reads."""
    return fault_lines(result) if isinstance(result, dict) else iter([HEADER, *(ROW.format(**each) for each in result)])


HEADER = (
    "learner   CPU us per call, median     wall us p99.9          tick late ms p99.9            late ticks\n"
    "             push    ask  answer       push    ask  answer    with  without  ratio     with  without   of"
)
ROW = (
    "{state:9} {push_cpu:7.1f} {ask_cpu:6.1f} {answer_cpu:7.1f}    {push_wall:7.0f} {ask_wall:6.0f} {answer_wall:7.0f}"
    "  {late_ms:6.2f}  {plain_late_ms:7.2f}  {ratio:5.2f}   {late_ticks:6}  {plain_late_ticks:7} {ticks:4}"
)


# -- the loop alone
def control(folder: Path, state: str, seconds: float, hz: float) -> dict[str, Any]:
    """One line: the loop with the calls while the learner is in `state`, and the same loop without them."""
    capacity = (1 if state == "full" else 2000) << 20
    with Learner(folder) as learner, Child(plain, seconds, hz) as beside, ExitStack() as exits:
        client = Timed(learner.address, actor="bench", spec=SPEC, outbox=folder / "outbox", capacity=capacity)
        exits.enter_context(client)
        learner.direct(client)
        learner.enter(state)
        beside.tell("begin")
        beside.heard()
        late = ticks(Loop(client).tick, seconds, hz)
        plain_late = beside.heard(seconds + 60.0)
    times = {name: np.array([(cpu, wall) for _, wall, cpu, _ in kept] or [(0, 0)]).T / 1e3
             for name, kept in client.calls.items()}  # fmt: skip
    return {
        "state": state, **{f"{name}_cpu": float(np.median(cpu)) for name, (cpu, _) in times.items()},
        **{f"{name}_wall": float(np.quantile(wall, 0.999)) for name, (_, wall) in times.items()},
        "late_ms": milliseconds(late), "plain_late_ms": milliseconds(plain_late),
        "ratio": milliseconds(late) / milliseconds(plain_late), "ticks": len(late),
        "late_ticks": sum(x > 0.1 / hz for x in late), "plain_late_ticks": sum(x > 0.1 / hz for x in plain_late),
    }  # fmt: skip


def milliseconds(late: list[float]) -> float:
    return float(np.quantile(late, 0.999)) * 1e3


def faults(folder: Path, seconds: float, hz: float) -> dict[str, Any]:
    """The figures of a run of `seconds`."""
    inference = free_port()
    with (
        Proxy("127.0.0.1", inference) as answers,
        Learner(folder, f"tcp://127.0.0.1:{inference}", f"tcp://127.0.0.1:{answers.port}", size=2) as learner,
        Proxy("127.0.0.1", int(learner.address.rpartition(":")[2])) as records,
        Child(actor, f"tcp://127.0.0.1:{records.port}", folder, hz) as ours,
        Child(actor, "", folder, hz) as beside,
    ):
        ours.heard()
        learner.ask(m.Direct(BODY, None))
        until = time.monotonic() + seconds
        beside.tell(until)
        time.sleep(min(START, seconds / 4))
        times = [*troubles(learner, (records, answers), until)]
        learner.ask(m.Direct({"phase": "bench", "mode": "stop", "boundary": "now"}, None))
        ticked, calls, left = ours.heard()
        ticked_plain, _, _ = beside.heard()
    return {"hz": hz, "seconds": seconds, "undelivered": left, **compared(ticked, ticked_plain, times, hz), "calls": {
        name: call_figures(kept, times[0][1], until) for name, kept in calls.items()
    }, "in_a_call": in_a_call(ticked, calls, times[0][1], until, hz)}  # fmt: skip


def troubles(learner: Learner, proxies: Sequence[Proxy], until: float) -> Iterator[tuple[str, float, float]]:
    """(what, from, to) of each fault and of the time after it, as they happen, each fault at least once."""
    begin = time.monotonic()
    cycle = min(CYCLE, (until - begin) / len(FAULTS))
    for number in range(max(len(FAULTS), int((until - begin) / cycle))):
        fault = FAULTS[number % len(FAULTS)]
        now = time.monotonic()
        learner.enter(fault, proxies)
        time.sleep(SHARE * cycle)
        yield fault, now, time.monotonic()
        now = time.monotonic()
        learner.leave(fault, proxies)
        time.sleep(max(0.0, begin + (number + 1) * cycle - time.monotonic()))
        yield "well", now, time.monotonic()


def compared(ticks: list[Tick], plain: list[Tick], times: list[tuple[str, float, float]], hz: float) -> dict[str, Any]:
    """Both loops beside each other, as a whole and by what was wrong at that time."""
    begin, end = times[0][1], times[-1][2]
    spans = {"all": [(begin, end)]} | {
        state: [(since, until) for name, since, until in times if name == state] for state in ("well", *FAULTS)
    }
    states = {
        state: {"with": tick_figures(ticks, within, hz), "without": tick_figures(plain, within, hz)}
        for state, within in spans.items()
    }
    ours, plain_loop = states["all"]["with"], states["all"]["without"]
    ratio = ours["late"] / ours["ticks"] * plain_loop["ticks"] / max(1, plain_loop["late"])
    return {"states": states, "ratio": ratio, "goal": GOAL, "holds": ratio <= GOAL}


def tick_figures(ticks: list[Tick], spans: list[tuple[float, float]], hz: float) -> dict[str, Any]:
    lasted = [period for end, period in ticks if any(since <= end < until for since, until in spans)]
    return {
        "ticks": len(lasted), "late": sum(period > LATE / hz for period in lasted),
        "very_late": sum(period > VERY_LATE / hz for period in lasted),
        "p999_ms": float(np.quantile(lasted or [0.0], 0.999)) * 1e3, "max_ms": max(lasted, default=0.0) * 1e3,
    }  # fmt: skip


def call_figures(kept: list[Call], since: float, until: float) -> dict[str, float]:
    """Microseconds per call."""
    found = [times for began, *times in kept if since <= began < until]
    columns = dict(zip(("wall", "cpu", "own"), np.array(found or [(0, 0, 0)]).T / 1e3, strict=True))
    figures = {"count": float(len(found))}
    for name, column in columns.items():
        figures |= {f"{name}_p50": float(np.median(column)), f"{name}_p999": float(np.quantile(column, 0.999))}
        figures[f"{name}_max"] = float(column.max())
    return figures


def in_a_call(
    ticks: list[Tick], calls: Mapping[str, list[Call]], since: float, until: float, hz: float
) -> list[dict[str, float]]:
    """The late ticks that stand in our calls, with the own milliseconds of each call in them."""
    late = [(end, lasted) for end, lasted in ticks if since <= end < until and lasted > LATE / hz]
    found = []
    for end, lasted in late:
        spent = {
            name: sum(own for began, _, _, own in kept if end - lasted <= began < end) / 1e6
            for name, kept in calls.items()
        }
        if sum(spent.values()) > (lasted - 1 / hz) * 1e3 / 2:
            found.append({"lasted": lasted * 1e3, **spent})
    return found


def fault_lines(result: Mapping[str, Any]) -> Iterator[str]:
    yield f"{'learner':9} {'ticks':>13}     {'late':>11}     {'>1.5':>9}     {'p99.9 ms':>13}     {'max ms':>13}"
    yield " " * 9 + " with   without" * 5
    for state, both in result["states"].items():
        cells = ("ticks", "late", "very_late", "p999_ms", "max_ms")
        yield f"{state:9}" + "".join(f"{both['with'][c]:6.0f}  {both['without'][c]:6.0f} " for c in cells)
    verdict = "holds" if result["holds"] else "does not hold"
    yield f"share of late ticks with / without the client: {result['ratio']:.2f} (goal <= {result['goal']}: {verdict})"
    yield f"late ticks that stand in push, ask or answer: {len(result['in_a_call'])}"
    yield "us per call       count    CPU: p50  p99.9    max    own: p50  p99.9    max   wall: p50  p99.9    max"
    for name, call in result["calls"].items():
        cells = "".join(
            f"   {call[f'{time}_p50']:9.0f} {call[f'{time}_p999']:6.0f} {call[f'{time}_max']:6.0f}"
            for time in ("cpu", "own", "wall")
        )
        yield f"{name:12} {call['count']:10.0f}{cells}"
    yield f"records that were not delivered at the end: {result['undelivered']}"
