"""Defines the messages between an actor and the guard of its arm: a local socket and shared memory."""

import math
import mmap
import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

import msgpack
import numpy as np
from serl_client.env import Observation
from serl_client.errors import RobotFault
from serl_client.spec import Array, Feature

MOST = 192 << 10  # bytes of a message
HEAD = 64  # bytes before the arrays: the sequence number, and what aligns them


@dataclass(frozen=True, slots=True)
class Start:
    """Says which arm the guard is to make, and how it may move."""

    driver: str
    address: str
    options: dict[str, Any]
    limits: dict[str, Any]
    home: dict[str, Any]
    fps: float
    servo_hz: float
    home_speed: float
    waypoints: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Started:
    """Describes the arm. The file descriptor of the shared memory comes with it, if `observation` has anything.

    leads: its leader arm can be led.
    """

    entries: dict[str, str]
    low: list[float]
    high: list[float]
    observation: dict[str, dict[str, Any]]
    limits: list[str]
    leads: bool


@dataclass(frozen=True, slots=True)
class Request:
    """Asks for something: target, hold, home, return_home (through the waypoints), state, observe, recover, close, or
    that the leader arm shall follow or let_go, or, while the arm holds, stay or come. `sent`: time.monotonic().
    """

    kind: str
    number: int
    sent: float
    positions: list[float]
    seed: int


@dataclass(frozen=True, slots=True)
class Reply:
    """Answers the request of this number. `sequence` is that of the shared memory, 0 if nothing was written.

    time: when `measured` was, seconds of time.monotonic(), which all processes of a machine share. target: the newest
    accepted one. executed: what the arm itself made of it; empty: it takes it as it is.
    leader: what the leader arm does (guard/lead.py).
    """

    number: int
    measured: list[float]
    time: float
    target: list[float]
    executed: list[float]
    is_home: bool
    fault: tuple[str, str] | None
    limited: int
    refused: int
    sequence: int
    leader: str


@dataclass(frozen=True, slots=True)
class Ended:
    """Says why the guard ends, or has not begun."""

    text: str


Message = Start | Started | Request | Reply | Ended
KINDS = {kind.__name__: kind for kind in (Start, Started, Request, Reply, Ended)}


def send(link: socket.socket, message: Message, *descriptors: int) -> None:
    """Send a message, with file descriptors. Raises OSError if nobody is there any more."""
    socket.send_fds(link, [msgpack.packb([type(message).__name__, asdict(message)]) or b""], descriptors)


def receive(link: socket.socket) -> tuple[Message | None, list[int]]:
    """Return the next message, None at the end, and the file descriptors that came with it."""
    data, descriptors = b"", list[int]()
    for _ in range(2):  # ECONNRESET tells once that the other side ended with a question of ours unread: its last
        with suppress(ConnectionError):  # word comes behind that
            data, descriptors, _, _ = socket.recv_fds(link, MOST, 1)
            break
    if not data:
        return None, []
    name, fields = msgpack.unpackb(data)
    return KINDS[name](**fields), descriptors


class Shared:
    """Holds arrays in memory that two processes share. One writes, one reads; the sequence number is odd meanwhile."""

    def __init__(self, features: Mapping[str, Feature], descriptor: int | None = None) -> None:
        """Map the memory behind a file descriptor; None: make it."""
        sizes = [-(-feature.nbytes // HEAD) * HEAD for feature in features.values()]
        self.descriptor = os.memfd_create("retake-guard") if descriptor is None else descriptor
        if descriptor is None:
            os.ftruncate(self.descriptor, HEAD + sum(sizes))
        memory = mmap.mmap(self.descriptor, HEAD + sum(sizes))
        self._sequence = np.frombuffer(memory, np.uint64, 1)
        self._arrays: dict[str, Array] = {}
        at = HEAD
        for (name, feature), size in zip(features.items(), sizes, strict=True):
            array = np.frombuffer(memory, feature.dtype, math.prod(feature.shape), at)
            self._arrays[name] = array.reshape(feature.shape)
            at += size

    def write(self, arrays: Observation) -> int:
        """Write all arrays; return the sequence number."""
        self._sequence += np.uint64(1)
        for name, array in self._arrays.items():
            array[...] = arrays[name]
        self._sequence += np.uint64(1)
        return int(self._sequence[0])

    def read(self, sequence: int) -> Observation:
        """Return copies of the arrays with this number. Raises RobotFault if others were written meanwhile."""
        copies = {name: array.copy() for name, array in self._arrays.items()}
        if int(self._sequence[0]) != sequence:
            raise RobotFault("what the arm observed was overwritten while it was read", "guard")
        return copies
