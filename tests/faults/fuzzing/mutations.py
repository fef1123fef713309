"""Valid messages and records of every kind, and the ways in which they are spoiled; the same for the same chance."""

import struct
from collections.abc import Sequence
from random import Random
from typing import Any

import msgpack
import numpy as np
import xxhash
from serl_client import Feature, Outcome, Segment, Spec, wire
from serl_client import messages as m
from serl_client.episode import LostRecord, QueuedRecord

from tests.shared.data import blank_segment

STATE, IMAGE = "observation.state", "observation.images.top"
SPEC = Spec(
    {STATE: Feature((4,), names=("a", "b", "c", "d")), IMAGE: Feature((6, 8, 3), "uint8")},
    Feature((2,), low=-np.ones(2), high=np.ones(2)), fps=10.0, extras={"policy_action": Feature((2,))},
)  # fmt: skip
EPOCH = "e" * 32

_DEEP: Any = None
for _ in range(300):
    _DEEP = [_DEEP]

NASTY: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 7, 2**31, 2**53, 2**63 - 1, 2**63, 2**64 - 1, -(2**63), 0.5, float("nan"),
    float("inf"), -float("inf"), 1e308, "", "x", "\0", "a\nb", "..", "../../etc/passwd", "/etc/passwd", "é",
    "\u202e\U0001f916",
    "x" * 201, "x" * 70_000, b"", b"\xff\xfe", bytes(300), [], {}, [[]], [None], {"": None},
    {"a": {"b": [1, 2.0, "c"]}},
    [0] * 1000, ["e", 1], [["e", 1]], [["e", 2**64 - 1]], [["e", "1"]], [2, 2], [1, 1], ["a", "b", "c"],
    msgpack.ExtType(4, b"code"), msgpack.Timestamp(1, 2), _DEEP, "object", "O", "float128", "__class__", "os.system",
    "<f4", "V8", "float64", "uint8",
)  # fmt: skip
SHAPES: tuple[Any, ...] = (
    [], [0], [-1], [2**26 + 1], [2**63], [2**32, 2**32], [0, 2**26, 2**26], [1] * 9, [True], ["3"], [None], [1.0], 3,
    "12", None, {}, [[1]], [2**26], [1, 1],
)  # fmt: skip
BOMBS: tuple[bytes, ...] = (
    b"\x91" * 2000, b"\x81\xa1a" * 600, b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff",
    b"\xdb\xff\xff\xff\xff", b"\xdd\x00\x01\x86\x9f" + b"\x80" * 99_999,
    b"\x92\xdd\x00\x01\x86\x9f" + b"\xa2\xc4\x80" * 99_999 + b"\x90", b"\xc9\xff\xff\xff\xff\x01", b"\xc1",
    b"\xdd\x00\x00\x00\x0a" + (b"\xdd\x00\x01\x86\x9f" + b"\x90" * 99_999) * 10,
)  # fmt: skip


def segment(start: int = 0, steps: int = 2, *, episode: str = "e0", directive: int = 1, ends: bool = False) -> Segment:
    """One that fits SPEC."""
    return blank_segment(SPEC, episode, start, steps, directive=directive, ends="terminated" * ends)


def encoded(seq: int, record: QueuedRecord) -> bytes:
    return b"".join(bytes(part) for part in m.encode_record(seq, record))


RECORDS = (
    encoded(0, segment()), encoded(1, segment(2, 1, ends=True)), encoded(2, Outcome("e0", True, judged_by="operator")),
    encoded(0, Outcome("e1", None)),
    encoded(3, LostRecord("the disk has damaged it")),
)  # fmt: skip


def _messages() -> list[m.Message]:
    data = np.arange(40, dtype=np.uint8)
    observation = {name: array[0] for name, array in segment().observation.items()}
    notice = {"directive": {"number": 1, "mode": "collect"}, "weights": {}, "step_limit": 3, "degraded": ""}
    directive = {"mode": "collect", "into": "online", "phase": "practise"}
    return [
        m.Hello(m.PROTOCOL, "actor", "arm", EPOCH, "o" * 32, "", SPEC.to_dict(), [["f" * 32, 3]], True),
        m.Hello(m.PROTOCOL, "viewer", "screen"), m.StateUpdate(**notice),
        m.Welcome("r", 1, 1 << 24, [[EPOCH, 0]], None, "", notice),
        m.Push(EPOCH, {"records": np.frombuffer(b"".join(RECORDS), np.uint8)}), m.Ack(EPOCH, 3, True, None),
        m.InferenceRequest(3, 5, True, False, "reach", observation), m.InferenceResponse(3, 1,
        {"action": np.zeros((4, 2), np.float32)}),
        m.Heartbeat({"late": 0.1, "phase": "reach"}), m.Bye(), m.WeightsRequest("a" * 64, 1),
        m.WeightsChunk("a" * 64, 1, "b" * 32, {"data": data}), m.Direct(directive, None), m.StepLimit(1, None),
        m.Publish("a" * 64, 3, 4), m.Over("no memory"), m.SetAside("e0", "why"),
        m.Archived([1, 2]), m.Sync(0, 0), m.Synced(1, [[1] * 19], [[1, "next", ""]], ["arm"], False),
        m.Command("goto", "practise"), m.Command("ready", "1", actor="arm"), m.Status({"run": "r"}), m.Done(1),
        m.Drive("arm", "screen", 2, 1, "take over", {"x": -0.5}, 1),
        m.DriverUpdate("screen", "screen", "", 1, 2, {"observation.images.front": np.zeros((2, 3, 3), np.uint8)}),
        m.Failed("Refused", "no"),
    ]  # fmt: skip


_ENCODED = [m.encode(message) for message in _messages()]
_JOINED = [wire.joined(frames) for frames in _ENCODED if len(frames) > 2]
CORPUS: list[list[bytes]] = [[bytes(frame) for frame in frames] for frames in _ENCODED + _JOINED]


def spoiled_bytes(chance: Random, data: bytes) -> bytes:
    """Bits, bytes, lengths: what a bad cable or a bad peer does."""
    if not data:
        return chance.randbytes(chance.randrange(20))
    at, way = chance.randrange(len(data)), chance.randrange(8)
    if way == 0:
        return data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :]
    if way == 1:
        return data[:at]
    if way == 2:
        return data[:at] + chance.randbytes(chance.choice((1, 2, 4, 8, 100))) + data[at:]
    if way == 3:
        return data[:at] + data[at + chance.choice((1, 2, 4, 8)) :]
    if way == 4:  # a number where one may stand
        lie = struct.pack(chance.choice((">I", "<Q", ">Q", "<I")), chance.choice((0, 1, 255, 1 << 20, (1 << 32) - 1)))
        return data[:at] + lie + data[at + len(lie) :]
    if way == 5:
        return data[:at] + data[chance.randrange(len(data)) :]
    if way == 6:
        return data * chance.choice((2, 3))
    return data[:at] + chance.choice((b"\xc0", b"\xff", b"\xdd", b"\xcb\x7f\xf8\0\0\0\0\0\0")) + data[at + 1 :]


def spoiled_tree(chance: Random, tree: Any, depth: int = 0) -> Any:
    """The same plain data with another value, key or length somewhere."""
    if not isinstance(tree, (dict, list)) or not tree or chance.random() < 0.15 * depth:
        return chance.choice(NASTY)
    if isinstance(tree, dict):
        key = chance.choice(list(tree))
        way = chance.randrange(12)
        if way == 0:
            return {name: value for name, value in tree.items() if name != key}
        if way == 1:
            return {
                **tree,
                chance.choice(("", "extra", "by", "arrays", "observation", "__init__", "é" * 300)): tree[key],
            }
        return {**tree, key: spoiled_tree(chance, tree[key], depth + 1)}
    at, way = chance.randrange(len(tree)), chance.randrange(12)
    if way == 0:
        return tree[:at] + tree[at + 1 :]
    if way == 1:
        return tree + [tree[at]] * chance.choice((1, 2, 300))
    return [*tree[:at], spoiled_tree(chance, tree[at], depth + 1), *tree[at + 1 :]]


def spoiled_header(chance: Random, head: bytes) -> bytes:
    """A header that is msgpack still, and says something else."""
    header, layout = msgpack.unpackb(head)
    way = chance.randrange(4)
    if way == 0 and layout:
        entry = chance.randrange(len(layout))
        layout[entry][2] = chance.choice(SHAPES)
    elif way == 1:
        layout = spoiled_tree(chance, layout)
    else:
        for _ in range(chance.choice((1, 1, 1, 2, 4))):
            header = spoiled_tree(chance, header)
    packed: Any = msgpack.packb([header, layout])
    return packed


def spoiled_frames(chance: Random, frames: Sequence[bytes]) -> list[bytes]:
    """The frames of one message, spoiled in one way."""
    spoiled, way = list(frames), chance.randrange(10)
    at = chance.randrange(len(spoiled))
    if way < 4:
        spoiled[0] = spoiled_header(chance, spoiled[0])
    elif way < 7:
        spoiled[at] = spoiled_bytes(chance, spoiled[at])
    elif way == 7:
        spoiled[at:at] = chance.choice(CORPUS)[: chance.choice((1, 2, 9))] * chance.choice((1, 1, 300))
    elif way == 8:
        del spoiled[at]
    else:
        spoiled[0] = chance.choice(BOMBS) if chance.random() < 0.02 else spoiled_bytes(chance, spoiled[0][:90])
    return spoiled


def with_checksum(chance: Random, record: bytes) -> bytes:
    """A record whose header was spoiled, or whose arrays were, and whose checksum fits."""
    _, length, _, seq, _ = wire.PREFIX.unpack_from(record)
    head, memory = record[wire.PREFIX.size :][:length], record[wire.PREFIX.size + length + -length % 8 :]
    if chance.random() < 0.7:
        head = spoiled_header(chance, head)
    else:
        memory = spoiled_bytes(chance, memory)
    return seal_again(chance.choice((seq, seq, seq, 0, 2**64 - 1)), head, memory)


def seal_again(seq: int, head: bytes, memory: bytes) -> bytes:
    body = head + bytes(-len(head) % 8) + memory
    return wire.PREFIX.pack(wire.MAGIC, len(head), len(body), seq, xxhash.xxh3_64_intdigest(body, seed=seq)) + body
