"""The stand-in trainer of a chaos round: no torch; it directs, allows, publishes and archives, as the real ones do."""

import os
import time
from dataclasses import dataclass
from pathlib import Path

from serl_client import messages as m
from serl_client.connection import Connection
from serl_client.errors import TrainerError

from serl_launcher.store import weights
from serl_launcher.store.schema import EpisodeInfo

from .truth import Truth

TURN_S = 0.05
PATIENCE_S = 2.0
SOURCE = "main"
PACE = 1000  # steps/s that paced actors are allowed in all
COLUMNS = {name: EpisodeInfo._fields.index(name) for name in ("number", "closed")}


@dataclass(frozen=True)
class Part:
    """What it is told: `weights_bytes` is the size of a version, 0: it publishes none; an exporter sleeps while the
    file `asleep` exists; paced actors may make PACE steps in each second since `began`."""

    address: str
    run_dir: Path
    truth: Path
    stop: Path
    asleep: Path
    life: int
    weights_bytes: int
    archives: bool
    paced: bool
    began: float
    publishes: int = 6  # turns from one version to the next


def play(part: Part) -> None:
    """Work until it is time to stop; a learner that is away is tried again."""
    truth, turn = Truth(part.truth), 0
    greeting = m.Hello(m.PROTOCOL, "learner", "trainer")
    with Connection(part.address, greeting) as link:
        work = _Work(part, link, truth)
        while not part.stop.exists():
            time.sleep(TURN_S)
            try:
                turn += 1
                work.turn(turn)
            except (TrainerError, OSError) as error:
                truth.note(waits=str(error))


class _Work:
    def __init__(self, part: Part, link: Connection, truth: Truth) -> None:
        self._part, self._link, self._truth = part, link, truth
        self._directive, self._revision = 0, 0
        self._closed: set[int] = set()
        self._versions = 0

    def turn(self, turn: int) -> None:
        while self._link.receive() is not None:
            pass
        if not self._directive:
            self._direct()
        allowed = int(PACE * (time.monotonic() - self._part.began))
        self._link.send(m.StepLimit(self._directive, allowed if self._part.paced else None))
        if self._part.weights_bytes and (turn % self._part.publishes == 1 or not self._versions):
            self._publish()
        if self._part.archives:
            self._archive()

    def _direct(self) -> None:
        body = {
            "mode": "collect", "phase": "collect", "into": SOURCE, "paced": self._part.paced, "life": self._part.life,
        }  # fmt: skip
        self._directive = self._done(m.Direct(body, None))
        self._truth.note(directive=self._directive, body=body)

    def _publish(self) -> None:
        sha256, size = weights.write(self._part.run_dir / "weights", os.urandom(self._part.weights_bytes))
        version = self._done(m.Publish(sha256, size, self._versions))
        self._versions += 1
        self._truth.note(published=[version, sha256])

    def _done(self, message: m.Message) -> int:
        """Has it done, and returns the number that it was given."""
        done = self._link.call(message, PATIENCE_S)
        assert isinstance(done, m.Done)
        return done.value

    def _archive(self) -> None:
        """All that is closed; what was said and not answered is said again."""
        synced = self._link.call(m.Sync(self._revision, 0), PATIENCE_S)
        assert isinstance(synced, m.Synced)
        self._revision = synced.revision
        self._closed |= {row[COLUMNS["number"]] for row in synced.episodes if row[COLUMNS["closed"]]}
        if self._closed and not self._part.asleep.exists():
            numbers = sorted(self._closed)
            self._truth.note(archiving=numbers)
            self._done(m.Archived(numbers))
            self._truth.note(archived=numbers)
            self._closed.clear()
