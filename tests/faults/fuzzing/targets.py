"""What is fuzzed inside one process: `make(chance, number)` gives a case, plain data; `run(case)` what became of it."""

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import msgpack
import numpy as np
import safetensors.numpy
from serl_client import Segment, wire
from serl_client import messages as m
from serl_client.errors import ConfigError, MessageError, Refused, VersionMismatch
from serl_client.limits import Limits
from serl_client.spec import Spec
from serl_client.weights import WeightsFolder, part_checksum

from serl_launcher.acting.openpi import Form, pack
from serl_launcher.service.access import OPEN
from serl_launcher.service.peers import check_hello

from . import feedback
from .mutations import (
    BOMBS,
    CORPUS,
    IMAGE,
    RECORDS,
    SPEC,
    STATE,
    spoiled_bytes,
    spoiled_frames,
    spoiled_tree,
    with_checksum,
)


@dataclass(frozen=True)
class Target:
    """`share` of all cases; `declared`: what a run may raise; `writes`: whether it may write, in its scratch folder."""

    share: float
    make: Callable[[Random, int], Any]
    run: Callable[[Any, Path], str]
    declared: tuple[type[BaseException], ...] = (MessageError,)
    writes: bool = False


# -- wire and messages
def _frames(chance: Random, number: int) -> list[bytes]:
    return spoiled_frames(chance, chance.choice(CORPUS))


def _flipped(chance: Random, number: int) -> list[bytes]:
    """Every bit of every message, one after the other, and then again with a second one."""
    frames = list(CORPUS[number % len(CORPUS)])
    bit, rounds = number // len(CORPUS), 0
    while bit >= 8 * sum(map(len, frames)):
        bit, rounds = bit - 8 * sum(map(len, frames)), 1
    for which in (bit, *([chance.randrange(8 * len(frames[0]))] * rounds)):
        for i, frame in enumerate(frames):
            if which < 8 * len(frame):
                at = which // 8
                frames[i] = frame[:at] + bytes([frame[at] ^ 1 << which % 8]) + frame[at + 1 :]
                break
            which -= 8 * len(frame)
    return frames


def _decode(frames: list[bytes], scratch: Path) -> str:
    message = m.decode(frames)
    if isinstance(message, m.Push):
        list(m.records(*message.parts))
    m.encode(message)  # what was taken can be sent on: a report goes to whoever asks for the status
    return "taken"


def _unpack(frames: list[bytes], scratch: Path) -> str:
    _, arrays = wire.unpack(frames)
    layout: Any = msgpack.unpackb(frames[0], strict_map_key=False)[1]
    assert [list(array.shape) for array in arrays.values()] == [shape for _, _, shape in layout]
    assert sum(array.nbytes for array in arrays.values()) <= sum(map(len, frames[1:]))
    return "taken"


def _bomb(chance: Random, number: int) -> list[bytes]:
    bomb = BOMBS[number % len(BOMBS)]
    return [bomb if chance.random() < 0.5 else spoiled_bytes(chance, bomb), *([b"x"] * chance.randrange(3))]


def _record(chance: Random, number: int) -> bytes:
    parts = [chance.choice(RECORDS) for _ in range(chance.choice((1, 1, 2, 4)))]
    at = chance.randrange(len(parts))
    parts[at] = with_checksum(chance, parts[at]) if chance.random() < 0.6 else spoiled_bytes(chance, parts[at])
    return b"".join(parts)


def _unseal(data: bytes, scratch: Path) -> str:
    for _, record in m.records(data):
        if isinstance(record, Segment):
            try:
                record.check(SPEC)
            except ValueError:
                return "of no Spec"
    return "taken"


# -- what a Hello says
def _spec(chance: Random, number: int) -> Any:
    tree: Any = SPEC.to_dict()
    for _ in range(chance.choice((1, 1, 2, 3))):
        tree = spoiled_tree(chance, tree)
    return tree


def _from_dict(tree: Any, scratch: Path) -> str:
    spec = Spec.from_dict(tree)
    json.dumps(spec.to_dict())
    assert Spec.from_dict(spec.to_dict()).difference(SPEC) == spec.difference(SPEC) or spec.difference(spec)
    return "taken"


def _hello(chance: Random, number: int) -> Any:
    header = {"type": "Hello", **{name: getattr(_HELLO, name) for name in m.FIELDS[m.Hello]}}
    for _ in range(chance.choice((1, 1, 2))):
        header = spoiled_tree(chance, header)
    return msgpack.packb([header, []])


_HELLO = m.decode(CORPUS[0])


def _greet(head: bytes, scratch: Path) -> str:
    hello = m.decode([head])
    if not isinstance(hello, m.Hello):
        return "no Hello"
    check_hello(hello, OPEN, run="r")
    Spec.from_dict(hello.spec or {})
    return "taken"


# -- weights
FILE = safetensors.numpy.save({"a.weight": np.ones((4, 3), np.float32), "a.bias": np.zeros(3, np.float32)})


def _weights(chance: Random, number: int) -> Any:
    """An offer, and the parts that come; some of them other ones than were asked for."""
    offer: Any = {"version": number, "sha256": hashlib.sha256(FILE).hexdigest(), "size": len(FILE)}
    if chance.random() < 0.5:
        offer = spoiled_tree(chance, offer)
    data, part = chance.choice((FILE, spoiled_bytes(chance, FILE))), chance.choice((0, 0, 0, 7, -1, 2**63))
    return [offer, data, part, chance.random() < 0.5]


def _pull(case: Any, scratch: Path) -> str:
    offer, data, part, verify = case
    folder = scratch / "weights"
    shutil.rmtree(folder, ignore_errors=True)
    weights = WeightsFolder(folder, verify=verify)
    try:
        if not isinstance(offer, dict):
            return "no offer"
        weights.offer(offer)
        for request in list(weights.requests()):
            checksum = part_checksum(FILE, request.sha256, len(FILE), request.part)
            weights.add(m.WeightsChunk(request.sha256, part, checksum, {"data": np.frombuffer(data, np.uint8)}))
            list(weights.requests())
        if weights.newest is None:
            return "not whole"
        assert hashlib.sha256(weights.newest[1].read_bytes()).hexdigest() == offer["sha256"]
    finally:
        weights.close()
    return "taken"


# -- the bridge
FORM = Form(SPEC, {"observation/image": IMAGE})
REQUEST: Any = msgpack.unpackb(pack({
    STATE: np.zeros(4), "observation/image": np.zeros((6, 8, 3), np.uint8), "prompt": "fold",
}))  # fmt: skip


def _request(chance: Random, number: int) -> Any:
    tree = REQUEST
    for _ in range(chance.choice((1, 1, 2, 3))):
        tree = spoiled_tree(chance, tree)
    data: Any = msgpack.packb(tree)
    return spoiled_bytes(chance, data) if chance.random() < 0.3 else data


def _asked(data: bytes, scratch: Path) -> str:
    observation, task = FORM.read(data)
    assert isinstance(task, str)
    assert observation.keys() == SPEC.observation.keys()
    for name, feature in SPEC.observation.items():
        feature.check(name, observation[name])
    return "refused" if Limits(SPEC).broken(observation) else "taken"  # by PolicyHost.check, of which this is a part


HELLO_ERRORS = (MessageError, ConfigError, Refused, VersionMismatch, ValueError, TypeError)  # the last two: `protocol`
TARGETS: dict[str, Target] = {
    "flips": Target(0.17, _flipped, _decode, (MessageError, VersionMismatch)),
    "messages": Target(0.28, _frames, _decode, (MessageError, VersionMismatch)),
    "wire": Target(0.12, _frames, _unpack),
    "records": Target(0.27, _record, _unseal),
    "bombs": Target(0.002, _bomb, _unpack),
    "spec": Target(0.07, _spec, _from_dict, (ConfigError,)),
    "hello": Target(0.05, _hello, _greet, HELLO_ERRORS),
    "weights": Target(0.01, _weights, _pull, (MessageError, KeyError, TypeError, OSError), writes=True),
    "openpi": Target(0.02, _request, _asked),
    "feedback": Target(0.01, feedback.make, feedback.run),  # ten packets each
}
