"""How long one client's acknowledgements take while another one, who was let in, floods the server: with outcomes in
few large messages, with Hellos, and with Hellos that name many earlier lives; and whether NaN gets in.

The honest client pushes one small record, waits for its Ack, rests for 20 ms, and so on. Its times under each attack
stand beside those that it has alone, before and after."""

import argparse
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from serl_client import Outcome, Segment, Spec
from serl_client import messages as m
from serl_client.connection import Connection

from tests.faults.fuzzing.hostile import memory

from .paired import COMMON, Figure, option
from .served import BODY, STATE, Child, Rows, Served, spec_of

REST = 0.02  # seconds
AT_ONCE = 10_000  # records in a message of the flood
LIVES = 9_000  # in one Hello


OPTIONS = {
    "--records": option(200_000, "of the flood (200000)"),
    "--hellos": option(10_000, "of the storm, 2,000 within a second (10000)"),
    "--seconds": option(5.0, "that the honest client is alone (5)"),
    "--most": option(60.0, "seconds that one attack lasts at most (60)"),
    **COMMON,
}


def measure(folder: Path, options: argparse.Namespace) -> Iterator[Figure]:
    return hostile(folder, options.records, options.hellos, options.seconds, options.most)


def hostile(folder: Path, records: int, hellos: int, seconds: float, most: float) -> Iterator[Figure]:
    rows = Rows(spec_of(64), length=4)
    for name, attack, amount in (
        (f"{records:,} outcomes", flood, records),
        (f"{hellos:,} Hellos", storm, hellos),
        (f"20 Hellos that name {LIVES:,} lives each", many_lives, 20),
    ):
        with Served(folder / attack.__name__, 100_000) as served, connected(served, greeting("honest")) as link:
            honest = Honest(link, iter(rows.episode(20_000, served.ask(m.Direct(BODY, None)).value)))
            end = time.monotonic() + seconds
            alone = honest.times(lambda end=end: time.monotonic() > end)
            resident = memory(served.pid)
            with Child(attack, served.address, amount, most) as attacker:
                under = honest.times(lambda other=attacker: not other.is_alive)
            grown = memory(served.pid) - resident
        yield Figure(f"ack under {name}", median(under) * 1e3, "ms", "alone", median(under) / median(alone), "<= 1.1")
        yield Figure("  the worst", max(under) * 1e3, "ms", "alone", max(under) / max(alone))
        yield Figure("  what the server grew by", grown / 1e6, "MB")
    yield Figure("records with NaN that were stored", nans(folder / "nan", rows), "of 3", goal="<= 0")


def connected(served: Served, hello: m.Hello) -> Connection:
    """A link that speaks for an actor, welcomed by a server that may still be starting."""
    served.ask(m.Status())
    link = Connection(served.address, hello)
    link.hello(20.0)
    return link


def greeting(name: str, earlier: Sequence[Sequence[object]] = ()) -> m.Hello:
    return m.Hello(m.PROTOCOL, "actor", name, os.urandom(16).hex(), name, "", spec_of(64).to_dict(), earlier)


def push(link: Connection, begin: int, records: Sequence[Segment | Outcome]) -> None:
    data = b"".join(bytes(part) for seq, record in enumerate(records, begin) for part in m.encode_record(seq, record))
    link.send(m.Push(link.greeting.session, {"records": np.frombuffer(data, np.uint8)}))


@dataclass
class Honest:
    """Pushes record after record, and measures the time to each Ack."""

    link: Connection
    segments: Iterator[Segment]
    seq: int = 0

    def times(self, is_over: Callable[[], bool]) -> list[float]:
        found: list[float] = []
        while not (found and is_over()):
            begin, segment = time.perf_counter(), next(self.segments)
            push(self.link, self.seq, [segment])
            while not (isinstance(message := self.link.receive(), m.Ack) and message.expected > self.seq):
                if isinstance(message, m.Welcome):  # it was forgotten, or its link broke
                    push(self.link, self.seq, [segment])
                elif isinstance(message, m.Failed) and message.final:
                    raise RuntimeError(f"the honest client was refused: {message.text}")
                self.link.wait(0.2)
            self.seq += 1
            found.append(time.perf_counter() - begin)
            time.sleep(REST)
        return found


# -- attacks: each in a process of its own, for at most `most` seconds
def flood(_: Any, address: str, amount: int, most: float) -> None:
    end = time.monotonic() + most
    with Connection(address, greeting("flood")) as link:
        link.hello(20.0)
        for begin in range(0, amount, AT_ONCE):
            push(link, begin, [Outcome(f"e{i}", True) for i in range(AT_ONCE)])
        expected = 0
        while expected < amount and time.monotonic() < end:
            link.wait(0.2)
            message = link.receive()
            expected = message.expected if isinstance(message, m.Ack) else expected


def storm(_: Any, address: str, amount: int, most: float) -> None:
    with Connection(address, greeting("storm")) as link:
        link.hello(20.0)
        begin = time.monotonic()
        for i in range(amount):
            link.send(replace(link.greeting, session=os.urandom(16).hex()))
            time.sleep(max(0.0, begin + i / 2000 - time.monotonic()))
        time.sleep(2.0)


def many_lives(_: Any, address: str, amount: int, most: float) -> None:
    with Connection(address, greeting("lives")) as link:
        link.hello(20.0)
        for _ in range(amount):
            link.send(greeting("lives", [[os.urandom(16).hex(), 5] for _ in range(LIVES)]))
            time.sleep(0.1)
        link.send(m.Heartbeat({}))
        time.sleep(10.0)


def nans(folder: Path, rows: Rows) -> int:
    """How many of three records with NaN or infinity in an observation are in the store afterwards."""
    spec = Spec({STATE: replace(rows.spec.observation[STATE], dtype="float32")}, rows.spec.action, rows.spec.fps)
    ours, stored = Rows(spec, length=4), 0
    with Served(folder, capacity=10_000) as served:
        for value in (np.nan, np.inf, -np.inf):
            with connected(served, replace(greeting(f"nan{value}"), spec=spec.to_dict())) as link:
                (segment,) = ours.episode(1, served.ask(m.Direct(BODY, None)).value, prefix=f"nan{value}")
                state = segment.observation[STATE].copy()
                state[1, 1] = value
                push(link, 0, [replace(segment, observation={STATE: state})])
                while not isinstance(message := link.receive(), m.Ack | m.Failed):
                    link.wait(0.2)
                stored += isinstance(message, m.Ack)
    return stored
