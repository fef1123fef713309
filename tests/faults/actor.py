"""An actor of a chaos round: it pushes episodes whose every row names its origin, and notes each before it does."""

import hashlib
import struct
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from serl_client import Feature, Segment, Spec, Stamp, TrainerClient
from serl_client.episode import Outcome, Record
from serl_client.errors import TrainerError

from .truth import Truth, fingerprint

STEPS = 6  # of a segment, at most
SEGMENTS = 6  # of an episode, at most
DRAIN_S = 3600.0  # who plays us has less patience
BACKLOG = 100  # records that may wait for their acknowledgement, so that a round ends soon
IMAGE = (24, 24, 3)
SPEC = Spec(
    {
        "observation.state": Feature((5,), "int64", low=np.full(5, -(2**53)), high=np.full(5, 2**53)),
        "observation.images.eye": Feature(IMAGE, "uint8"),
    },
    Feature((2,), low=-np.ones(2), high=np.ones(2)), fps=100.0 * STEPS,
)  # fmt: skip


@dataclass(frozen=True)
class Part:
    """What an actor is told: `number` and `life` name it in its rows; `truth` is its file of notes, and when the file
    `stop` exists it ends its episode and drains. `skew`: seconds that its clock is ahead; `pace_s`: from one segment to
    the next. `hangs`: see driven.py."""

    name: str
    number: int
    life: int
    seed: int
    address: str
    key: Path | None
    outbox: Path
    truth: Path
    stop: Path
    weights: Path | None
    skew: float
    paced: bool
    pace_s: float
    hangs: Path


def play(part: Part) -> None:
    """Push what `_Work` makes until it is time to stop."""

    def work(client: "NotingClient", truth: Truth) -> None:
        work = _Work(part, client, truth)
        while not part.stop.exists():
            work.turn()
        work.end()

    played(part, SPEC, work)


def played(part: Part, spec: Spec, work: Callable[["NotingClient", Truth], None]) -> None:
    """Do this work, then drain. Exits with 3 when the learner has sent it away for good."""
    truth = Truth(part.truth)
    client = NotingClient(
        part.address, truth, part.life, actor=part.name, spec=spec, outbox=part.outbox, paced=part.paced,
        weights_folder=part.weights, key=part.key,
    )  # fmt: skip
    with client:
        try:
            work(client, truth)
            drained = client.drain(DRAIN_S)
        except TrainerError as error:
            truth.note(sent_away=str(error))
            sys.exit(3)
        truth.note(drained=drained, pushed=client.pushed, longest_ms=round(client.longest * 1e3, 3))


class NotingClient(TrainerClient):
    """Notes its session, each record before it is pushed, and what is acknowledged in the moment in which the outbox
    hears of it. `longest`: seconds that a push took."""

    def __init__(self, address: str, truth: Truth, life: int, **options: Any) -> None:
        super().__init__(address, **options)
        self.pushed, self.longest, self._truth = 0, 0.0, truth
        truth.note(actor=self.actor, life=life, session=self.session)
        acknowledge = self._outbox.acknowledge

        def noted(session: str, expected: int) -> None:
            truth.note(acked=[session, expected])
            acknowledge(session, expected)

        self._outbox.acknowledge = noted

    def push(self, record: Record) -> None:
        self._truth.note(seq=self.pushed, **facts_of(record))
        self.pushed += 1
        began = time.monotonic()
        super().push(record)
        self.longest = max(self.longest, time.monotonic() - began)


class _Work:
    def __init__(self, part: Part, client: NotingClient, truth: Truth) -> None:
        self._part, self._client, self._truth = part, client, truth
        self._random = Random(f"{part.seed}/{part.number}/{part.life}")
        self._episode, self._step, self._left, self._episodes, self._made = "", 0, 0, 0, 0
        self._directive, self._version, self._next = {}, 0, time.monotonic()
        self._began = time.time() + part.skew

    def turn(self) -> None:
        """One segment, if one may be made now."""
        self._next = max(self._next + self._part.pace_s, time.monotonic() - 5 * self._part.pace_s)
        while (left := self._next - time.monotonic()) > 0:
            self._client.wait(left)
        self._take_weights()
        directive, steps = self._client.state.directive, self._random.randint(1, STEPS)
        allowed = self._client.state.step_limit
        has_room = self._client.has_room and self._client.pending[0] < BACKLOG
        may_go_on = has_room and (allowed is None or self._made + steps <= allowed)
        if self._episode and (directive["number"] != self._directive["number"] or not may_go_on):
            self.end()
        if directive["mode"] != "collect" or not may_go_on:
            return
        if not self._episode:
            self._directive = directive
            self._episode = f"{self._part.seed}-{self._part.outbox.name}-{self._part.life}-{self._episodes}"
            self._step, self._left = 0, self._random.randint(1, SEGMENTS)
            self._episodes += 1
        self._left -= 1
        self._segment(steps, "" if self._left else self._random.choice(("terminated", "truncated")))
        if not self._left:
            self._ended()

    def end(self) -> None:
        """Truncate the open episode."""
        if self._episode:
            self._segment(1, "truncated")
            self._ended()

    def _ended(self) -> None:
        episode, self._episode = self._episode, ""
        if self._random.random() < 0.5:
            self._client.push(Outcome(episode, self._random.random() < 0.5))
        if self._random.random() < 0.2:
            self._client.push(Outcome(episode, None, discard=True, judged_by="operator"))

    def _segment(self, steps: int, ends: str) -> None:
        part, rows = self._part, steps + bool(ends)
        origin = [[part.seed, part.number, part.life, self._client.pushed, row] for row in range(rows)]
        state = np.array(origin, np.int64)
        images = [np.frombuffer(hashlib.shake_128(row.tobytes()).digest(24 * 24 * 3), np.uint8) for row in state]
        segment = Segment(
            self._episode, self._step, "chaos", Stamp(self._directive["number"], "collect", self._version),
            {"observation.state": state, "observation.images.eye": np.stack(images).reshape(rows, *IMAGE)},
            np.array([[self._random.uniform(-1, 1) for _ in range(2)] for _ in range(steps)], np.float32),
            np.arange(self._step, self._step + steps, dtype=np.float32), np.arange(steps) % 3 == 0,
            np.arange(steps) % 2 == 0, self._began + (self._made + np.arange(steps)) / SPEC.fps,
            terminated=ends == "terminated", truncated=ends == "truncated",
        )  # fmt: skip
        self._step += steps
        self._made += steps
        self._client.push(segment)

    def _take_weights(self) -> None:
        if newer := self._client.weights(self._version) if self._part.weights else None:
            self._version, path = newer
            self._truth.note(weights=[self._version, hashlib.sha256(path.read_bytes()).hexdigest()])


def facts_of(record: Record) -> dict[str, Any]:
    """What the checker has to know of a record."""
    if isinstance(record, Outcome):
        return {"episode": record.episode, "outcome": [record.success, record.discard, record.judged_by]}
    ends = "terminated" * record.terminated or "truncated" * record.truncated
    steps = [_fingerprint(record, i) for i in range(len(record))]
    return {"episode": record.episode, "start": record.start, "steps": steps, "ends": ends}


def _fingerprint(segment: Segment, i: int) -> str:
    """That of step `i` of a segment."""
    last = segment.ends and i == len(segment) - 1
    seen = [array[j] for j in range(i, i + 1 + last) for _, array in sorted(segment.observation.items())]
    flags = 4 * bool(segment.intervened[i]) + 8 * bool(segment.chunk_start[i]) + 16 * bool(segment.gap[i])
    try:
        return fingerprint(
            seen, segment.action[i], reward=float(segment.reward[i]), time=float(segment.time[i]),
            weights=segment.stamp.weights_version, directive=segment.stamp.directive, index=segment.start + i,
            flags=flags + last * (1 * segment.terminated + 2 * segment.truncated),
        )  # fmt: skip
    except (ArithmeticError, struct.error):
        return "of a number that a step has no room for"
