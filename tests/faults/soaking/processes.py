"""The processes of a soak: the server, which tells how large its tables are, and the actors, who come and go."""

import gc
import os
import random
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from serl_client import Feature, Segment, Spec
from serl_client.client import TrainerClient
from serl_client.episode import COLUMNS
from serl_client.errors import TrainerError

from serl_launcher.store.server import Server
from tests.benches.served import STATE, Latencies, Rows

OURS = ("serl_client.", "serl_launcher.")
DEPTH, LOOKED_INTO = 6, 200  # how far `tables` follows our own objects, and how many of one table
SPEC = Spec({STATE: Feature((256,), "uint8")}, Feature((2,), low=-np.ones(2), high=np.ones(2)), fps=10.0)
ROWS, RECORDS = 5, 8  # of a record, and of an episode
PAUSE = 1.0  # seconds between two lives, at most
MISERY = 0.2  # seconds until an actor that was refused tries again


def tables(root: object, name: str) -> dict[str, int]:
    """{path: entries} of every list, dict, set and deque that belongs to one of our objects; tables of objects of one
    kind are added up."""
    found: dict[str, int] = {}
    seen, front = set(), [(name, root)]
    for _ in range(DEPTH):
        front = [(path, part) for path, part in front if id(part) not in seen and not seen.add(id(part))]
        front = [entry for path, part in front for entry in _parts(path, part, found)]
    return found


def _parts(path: str, thing: object, found: dict[str, int]) -> Iterator[tuple[str, object]]:
    """Our own objects that a thing holds; the sizes of its tables go into `found`."""
    slots = [slot for kind in type(thing).__mro__ for slot in getattr(kind, "__slots__", ())]
    attributes = dict(getattr(thing, "__dict__", {})) | {slot: getattr(thing, slot, None) for slot in slots}
    for attribute, value in attributes.items():
        place = f"{path}.{attribute}"
        if isinstance(value, dict | list | set | deque):
            found[place] = found.get(place, 0) + len(value)
            held = [*value.values()] if isinstance(value, dict) else [*value]
            yield from ((place, item) for item in held[:LOOKED_INTO] if _is_ours(item))
        elif _is_ours(value):
            yield place, value


def _is_ours(thing: object) -> bool:
    """A message is none: its tables are what it says."""
    module = type(thing).__module__
    return module.startswith(OURS) and module != "serl_client.messages"


def run_server(pipe: Any, run_dir: Path, capacity: int, public: str, local: str, inference: str) -> None:
    """The server, until SIGTERM; whatever is said through the pipe is answered with the sizes of its tables."""
    server = Server(
        run_dir, {"online": capacity}, public=public, local=local, inference=inference, archived=["online"]
    )  # fmt: skip
    signal.signal(signal.SIGTERM, lambda *_: server.stop())

    def tell() -> None:
        while pipe.recv():
            pipe.send({"tables": tables(server, "server"), "objects": len(gc.get_objects())})

    threading.Thread(target=tell, daemon=True).start()
    try:
        server.run()
    finally:
        server.close()


class Actor:
    """One name, and its lives one after the other, each of about `life` seconds; its outbox is the same in all.

    It pushes a record every `period` seconds, and with `pulls` follows the weights.
    """

    def __init__(
        self, address: str, folder: Path, name: str, life: float, period: float, *, pulls: bool
    ) -> None:  # fmt: skip
        self.name, self.lives, self.errors = name, 0, []
        self.client: TrainerClient | None = None
        self._address, self._folder, self._pulls = address, folder / name, pulls
        self._life, self._period = life, period
        self._random = random.Random(f"{name} {os.getpid()}")
        self._rows = Rows(SPEC, length=ROWS, pool=1 << 16)
        self._segments: list[Segment] = []
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
            self._next += self._period
            try:
                self._push()
            except TrainerError as error:
                self.errors.append(f"{self.name}: {error}")
                self.leave(now)

    def _come(self, now: float) -> None:
        weights = self._folder / "weights" if self._pulls else None
        self.client = TrainerClient(
            self._address, actor=self.name, spec=SPEC, outbox=self._folder / "outbox", weights_folder=weights
        )
        self.client.__enter__()
        self._late, self._segments = Latencies(self.client), []
        self._ends = now + self._life * self._random.uniform(0.5, 1.5)
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
        if not (client.has_room and client.directive["number"]):
            return
        if not self._segments:
            prefix = f"{self.name}-{client.session[:12]}"
            *segments, last = self._rows.episode(RECORDS, client.directive["number"], prefix=prefix)
            self._segments = [*segments, _ended(last)][::-1]
        late.push(self._segments.pop())

    def taken(self) -> list[float]:
        """Seconds of the acknowledgements that came since this was asked last."""
        if self._late is None:
            return []
        taken, self._late.seconds = self._late.seconds, []
        return taken


def _ended(segment: Segment) -> Segment:
    """The same rows, the last of which is the final observation."""
    columns = {name: getattr(segment, name)[:-1] for name in ("action", *COLUMNS)}
    return replace(segment, **columns, truncated=True)


def run_actors(pipe: Any, address: str, folder: Path, names: Sequence[str], life: float, period: float) -> None:
    """Some actors, until the pipe says so by False; True is answered with what they found."""
    actors = [Actor(address, folder, name, life, period, pulls=name == names[0]) for name in names]
    said = True
    while said:
        now = time.monotonic()
        for actor in actors:
            actor.turn(now)
        time.sleep(0.005)
        if pipe.poll() and (said := pipe.recv()):
            pipe.send(_told(actors))
    for actor in actors:
        actor.leave(time.monotonic())


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
