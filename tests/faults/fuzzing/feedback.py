"""Feedback of a Dobot controller as a bad network would bring it: split, merged, torn, added to."""

from pathlib import Path
from random import Random
from typing import Any

from robot_infra.drivers.dobot_protocol import HEAD, SIZE, SIZE_BYTES, TEST_BYTES, Feedback

PACKETS = 10  # of a case
NOISE = Random(0).randbytes(SIZE)
BODY = SIZE_BYTES + NOISE[2:48] + TEST_BYTES + NOISE[56:]


def make(chance: Random, number: int) -> Any:
    """[segment, segment, ..., the time stamps of the packets that came whole]"""
    parts, whole = [], []
    for stamp in range(1, PACKETS + 1):
        data = BODY[:32] + stamp.to_bytes(8, "little") + BODY[40:]
        if chance.random() < 0.5:
            parts.append(_spoiled(chance, data))
        else:
            parts.append(data)
            whole.append(stamp)
    stream = b"".join(parts)
    cuts = sorted(chance.randrange(len(stream) + 1) for _ in range(chance.randrange(2 * PACKETS)))
    return [*(stream[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(stream)], strict=True)), whole]


def _spoiled(chance: Random, data: bytes) -> bytes:
    """What became of a packet on its way; it never is whole."""
    at, size = chance.randrange(SIZE), chance.choice((1, 7, HEAD, 700))
    way = chance.randrange(5)
    if way == 0:
        return data[:at]  # its end is lost
    if way == 1:
        return data[at + 1 :]  # its beginning
    if way == 2:
        return data[: at // 2] + data[at // 2 + size :]  # something in its midst
    if way == 3:
        return data[:at] + data[:size] + data[at:]  # a part of a packet is added
    at = chance.choice((0, 1, *range(48, 56)))  # its length or its test value is another one
    return data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :]


def run(case: Any, scratch: Path) -> str:
    *segments, whole = case
    parser, found = Feedback(), []
    for segment in segments:
        found += [int(packet["time_stamp"]) for packet in parser.feed(segment)]
        assert len(parser._rest) < SIZE + HEAD
    assert [stamp for stamp in found if stamp in whole] == whole, f"{whole} came, and {found} were found"
    return "found"
