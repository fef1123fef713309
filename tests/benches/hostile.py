"""How long one client's acknowledgements take while another one, who was let in, floods the server: with outcomes in
few large messages, with Hellos, and with Hellos that name many earlier lives.

The honest client pushes one small record, waits for its Ack, rests for 20 ms, and so on. Its times under each attack
stand beside those that it has alone."""

import argparse
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from serl_client import Outcome, Segment
from serl_client import messages as m

from tests.faults.fuzzing.hostile import memory
from tests.shared.clients import RawActor

from .paired import COMMON, Figure, option
from .served import BODY, Child, Rows, Served, spec_of

REST = 0.02  # seconds
AGAIN = 1.0  # seconds without an Ack until a record is sent again
AT_ONCE = 10_000  # records in a message of the flood
LIVES = 9_000  # in one Hello
SPEC = spec_of(64)
OPTIONS = {
    "--records": option(200_000, "of the flood (200000)"),
    "--hellos": option(10_000, "of the storm, 2,000 within a second (10000)"),
    "--seconds": option(5.0, "that the honest client is alone (5)"),
    "--most": option(60.0, "seconds that one attack lasts at most (60)"),
    **COMMON,
}


def measure(folder: Path, options: argparse.Namespace) -> Iterator[Figure]:
    rows = Rows(SPEC, length=4)
    for name, attack, amount in (
        (f"{options.records:,} outcomes", flood, options.records),
        (f"{options.hellos:,} Hellos", storm, options.hellos),
        (f"20 Hellos that name {LIVES:,} lives each", many_lives, 20),
    ):
        with Served(folder / attack.__name__, 100_000) as served, actor(served.address, "honest") as honest:
            segments = iter(rows.episode(20_000, served.direct(BODY)))
            end = time.monotonic() + options.seconds
            alone = times(honest, segments, lambda end=end: time.monotonic() > end)
            resident = memory(served.pid)
            with Child(attack, served.address, amount, options.most) as attacker:
                under = times(honest, segments, lambda other=attacker: not other.is_alive)
            grown = memory(served.pid) - resident
        yield Figure(f"ack under {name}", median(under) * 1e3, "ms", "alone", median(under) / median(alone), "<= 1.1")
        yield Figure("  the worst", max(under) * 1e3, "ms", "alone", max(under) / max(alone))
        yield Figure("  what the server grew by", grown / 1e6, "MB")


def actor(address: str, name: str) -> RawActor:
    """One that is let in."""
    made = RawActor(address, SPEC, name, session=os.urandom(16).hex(), outbox=name)
    made.welcome()
    return made


def times(honest: RawActor, segments: Iterator[Segment], is_over: Callable[[], bool]) -> list[float]:
    """Push record after record; the seconds to each Ack."""
    found: list[float] = []
    while not (found and is_over()):
        seq, segment, begin = honest.expected, next(segments), time.perf_counter()
        honest.push(seq, segment)
        again = begin + AGAIN
        while honest.hear() <= seq:
            if refusals := [failed.text for failed in honest.failed if failed.final]:
                raise RuntimeError(f"the honest client was refused: {refusals[0]}")
            honest.link.wait(0.2)
            if time.perf_counter() > again:  # it was forgotten, or its link broke
                honest.push(seq, segment)
                again += AGAIN
        found.append(time.perf_counter() - begin)
        time.sleep(REST)
    return found


# -- attacks: each in a process of its own, for at most `most` seconds
def flood(_: Any, address: str, amount: int, most: float) -> None:
    end = time.monotonic() + most
    with actor(address, "flood") as mine:
        for begin in range(0, amount, AT_ONCE):
            mine.push(begin, *(Outcome(f"e{i}", True) for i in range(AT_ONCE)))
        while mine.hear() < amount and time.monotonic() < end:
            mine.link.wait(0.2)


def storm(_: Any, address: str, amount: int, most: float) -> None:
    with actor(address, "storm") as mine:
        begin = time.monotonic()
        for i in range(amount):
            mine.link.send(replace(mine.link.greeting, session=os.urandom(16).hex()))
            time.sleep(max(0.0, begin + i / 2000 - time.monotonic()))
        time.sleep(2.0)


def many_lives(_: Any, address: str, amount: int, most: float) -> None:
    with actor(address, "lives") as mine:
        for _ in range(amount):
            lives = [[os.urandom(16).hex(), 5] for _ in range(LIVES)]
            mine.link.send(replace(mine.link.greeting, session=os.urandom(16).hex(), earlier=lives))
            time.sleep(0.1)
        mine.link.send(m.Heartbeat({}))
        time.sleep(min(10.0, most))
