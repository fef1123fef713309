"""The actors of a soak, who come and go in processes of their own."""

import gc
import os
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from serl_client import Feature, Segment, Spec
from serl_client.client import TrainerClient
from serl_client.errors import TrainerError

from tests.benches.served import STATE, Latencies
from tests.shared.data import blank_segment

from .tables import tables

SPEC = Spec({STATE: Feature((256,), "uint8")}, Feature((2,), low=-np.ones(2), high=np.ones(2)), fps=10.0)
ROWS, RECORDS = 5, 8  # of a record, and of an episode
PAUSE = 1.0  # seconds between two lives, at most
MISERY = 0.2  # seconds until an actor that was refused tries again


@dataclass(frozen=True)
class Part:
    """What a process of actors is told: each of the `names` lives for about `life` seconds at a time, and pushes a
    record every `period` seconds; the first one follows the weights."""

    pipe: Any
    address: str
    folder: Path
    names: Sequence[str]
    life: float
    period: float


class Actor:
    """One name, and its lives one after the other; its outbox is the same in all."""

    def __init__(self, part: Part, name: str) -> None:
        self.name, self.lives, self.errors = name, 0, []
        self.client: TrainerClient | None = None
        self._part, self._folder = part, part.folder / name
        self._random = random.Random(f"{name} {os.getpid()}")
        self._episodes, self._segments = 0, list[Segment]()
        self._late: Latencies | None = None
        self._next = time.monotonic() + self._random.random()
        self._ends = 0.0

    def turn(self, now: float) -> None:
        """Come, push a record or leave, if it is time for that."""
        if now < self._next:
            return
        if self.client is None:
            self._come(now)
        elif now > self._ends:
            self.leave(now)
        else:
            self._next += self._part.period
            try:
                self._push()
            except TrainerError as error:
                self.errors.append(f"{self.name}: {error}")
                self.leave(now)

    def _come(self, now: float) -> None:
        weights = self._folder / "weights" if self.name == self._part.names[0] else None
        self.client = TrainerClient(
            self._part.address, actor=self.name, spec=SPEC, outbox=self._folder / "outbox", weights_folder=weights
        )
        self.client.__enter__()
        self._late, self._segments = Latencies(self.client), []
        self._ends = now + self._part.life * self._random.uniform(0.5, 1.5)
        self.lives += 1

    def leave(self, now: float) -> None:
        """End this life, in the middle of an episode or not."""
        if self.client is not None:
            self.client.close()
        self.client = None
        self._next = now + self._random.uniform(MISERY, PAUSE)

    def _push(self) -> None:
        client, late = self.client, self._late
        assert client is not None
        assert late is not None
        client.check()
        if not (client.has_room and client.state.directive["number"]):
            return
        if not self._segments:
            self._episodes += 1
            name, starts = f"{self.name}-{client.session[:12]}-{self._episodes}", range(0, RECORDS * ROWS, ROWS)
            stamp: dict[str, Any] = {"directive": client.state.directive["number"]}
            self._segments = [
                blank_segment(SPEC, name, start, ROWS, ends="truncated" * (start == starts[-1]), **stamp)
                for start in reversed(starts)
            ]
        late.push(self._segments.pop())

    def taken(self) -> list[float]:
        """Seconds of the acknowledgements that came since this was asked last."""
        if self._late is None:
            return []
        taken, self._late.seconds = self._late.seconds, []
        return taken


def play(part: Part) -> None:
    """Some actors, until they are killed; whatever is said through the pipe is answered with what they found."""
    actors = [Actor(part, name) for name in part.names]
    while True:
        now = time.monotonic()
        for actor in actors:
            actor.turn(now)
        time.sleep(0.005)
        if part.pipe.poll() and part.pipe.recv():
            part.pipe.send(_told(actors))


def _told(actors: Sequence[Actor]) -> dict[str, Any]:
    sizes: dict[str, int] = {}
    for actor in actors:
        if actor.client is not None:
            for name, size in tables(actor.client, "client").items():
                sizes[name] = sizes.get(name, 0) + size
    errors = [actor.errors.pop() for actor in actors if actor.errors]
    late = [seconds for actor in actors for seconds in actor.taken()]
    lives = sum(actor.lives for actor in actors)
    return {"tables": sizes, "objects": len(gc.get_objects()), "late": late, "lives": lives, "errors": errors}
