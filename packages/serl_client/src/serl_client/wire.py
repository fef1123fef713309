"""Serialises named arrays to bytes and back, with limits on sizes: a msgpack header, then each array's bytes.

Every limit is checked before memory is allocated, and no input can run code. There are two forms. A *message* is
multipart: one frame for the header and one for each array, so that no payload is copied; or one frame for all arrays,
as in a record. An *encoded record* is one run of bytes with a sequence number and a checksum. The outbox stores it, the
wire carries many of them in one frame, and the server checks it, all in the same form:

    magic 4s | header length u32 | body length u64 | seq u64 | xxh3_64 of the body, seeded with seq, u64 | body
    body = msgpack header, then each array, each padded with zeros to 8 bytes
"""

import itertools
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import msgpack
import numpy as np
import xxhash

from serl_client.errors import MessageError
from serl_client.names import MAX_NAME
from serl_client.spec import DTYPES, MAX_DIMENSIONS, Array

Buffer = bytes | memoryview

MAX_FRAMES = 256
COPY_BELOW = 128 << 10  # measured: a frame below it is cheaper to copy than to hand over
JOIN_BELOW = 1 << 20  # bytes; measured: copying them takes as long as two frames
MAX_HEADER = 1 << 20
MAX_ARRAY = 64 << 20  # also the socket's MAXMSGSIZE
MAX_MESSAGE = MAX_ARRAY + MAX_HEADER
MAX_RECORDS = 10_000  # in one Push
MAX_PARTS = 10_000  # lists and mappings in a header: an empty one takes 1 byte there, and 72 bytes of memory
MAX_LENGTH = 100_000  # of a list in a header; a mapping has at most MAX_PARTS entries

NAMES = {np.dtype(name): name for name in DTYPES}  # dtype.name takes longer than all the rest
ITEMSIZE = {name: dtype.itemsize for dtype, name in NAMES.items()}
PREFIX = struct.Struct("<4sIQQQ")
MAGIC = b"RTK1"


def pack(header: Mapping[str, Any], arrays: Mapping[str, Array]) -> list[Buffer]:
    """Return the frames of one message: the header, with each array's name, dtype and shape, then each array's memory.

    Raises MessageError for an array whose dtype is not in DTYPES.
    """
    layout: list[tuple[str, str, tuple[int, ...]]] = []
    frames: list[Buffer] = [b""]
    for name, array in arrays.items():
        array = np.asarray(array, order="C")
        dtype = NAMES.get(array.dtype)
        if dtype is None:
            raise MessageError(f"array {name!r} has the dtype {array.dtype}; use one of {', '.join(DTYPES)}")
        layout.append((name, dtype, array.shape))
        frames.append(array.data.cast("B") if array.size else b"")
    head: Any = msgpack.packb((header, layout))
    frames[0] = head
    return frames


def joined(frames: list[Buffer]) -> list[Buffer]:
    """Return the message with all arrays in one frame, each padded with zeros to 8 bytes, if they are small.

    For up to JOIN_BELOW bytes a copy costs less than the system calls and thread wake-ups of further frames.
    """
    if len(frames) <= 2 or sum(map(len, frames)) > JOIN_BELOW:
        return frames
    parts = [part for frame in frames[1:] for part in (frame, bytes(-len(frame) % 8))]
    return [frames[0], b"".join(parts)]


def gathered(parts: Iterable[Buffer]) -> list[Buffer]:
    """Return the same bytes in at most MAX_FRAMES - 1 buffers. Parts of at least COPY_BELOW bytes are not copied."""
    found: list[Buffer] = []
    for is_large, run in itertools.groupby(filter(len, parts), lambda part: len(part) >= COPY_BELOW):
        neighbours = list(run)
        found += neighbours if is_large else [b"".join(neighbours)]
    return found if len(found) < MAX_FRAMES else [b"".join(found)]


def unpack(frames: Sequence[Buffer]) -> tuple[dict[str, Any], dict[str, Array]]:
    """Return (header, arrays) of one message; the arrays are views of the frames. Raises MessageError."""
    if not 1 <= len(frames) <= MAX_FRAMES or sum(map(len, frames)) > MAX_MESSAGE:
        raise MessageError(f"a message has 1 to {MAX_FRAMES} frames and at most {MAX_MESSAGE >> 20} MiB")
    header, layout = _header(frames[0])
    if len(frames) == 2 and len(layout) > 1:
        return header, _slices(_Reader(frames[1:]), layout)
    if len(layout) != len(frames) - 1:
        raise MessageError(f"the header names {len(layout)} arrays, {len(frames) - 1} came")
    arrays = {}
    for (name, dtype, shape, nbytes), frame in zip(layout, frames[1:], strict=True):
        if len(frame) != nbytes:
            raise MessageError(f"array {name!r} should have {nbytes} bytes, not {len(frame)}")
        arrays[name] = np.ndarray(shape, dtype, frame)
    if len(arrays) < len(layout):
        raise MessageError("a header names each array once")
    return header, arrays


def encode_record(seq: int, header: Mapping[str, Any], arrays: Mapping[str, Array]) -> list[Buffer]:
    """Return an encoded record as buffers to write one after the other; the arrays are not copied."""
    head, *memory = pack(header, arrays)
    body: list[Buffer] = []
    for part in (head, *memory):
        body.append(part)
        if len(part) % 8:
            body.append(bytes(-len(part) % 8))
    checksum = xxhash.xxh3_64(seed=seq)
    for part in body:
        checksum.update(part)
    prefix = PREFIX.pack(MAGIC, len(head), sum(len(part) for part in body), seq, checksum.intdigest())
    return [prefix, *body]


def record_length(data: Buffer) -> int:
    """Return the length in bytes of the record at the start of `data`. Raises MessageError if no whole one is there."""
    reader = _Reader([data])
    _, body_length, _, _ = _prefix(reader.take(PREFIX.size))
    reader.views(body_length)
    return PREFIX.size + body_length


def _prefix(data: Buffer) -> tuple[int, int, int, int]:
    """Return (header length, body length, seq, checksum)."""
    magic, header_length, body_length, seq, checksum = PREFIX.unpack(data)
    if magic != MAGIC or header_length > MAX_HEADER or body_length > MAX_MESSAGE:
        raise MessageError("these bytes are no record")
    return header_length, body_length, seq, checksum


def decode_records(*data: Buffer) -> Iterator[tuple[int, dict[str, Any], dict[str, Array]]]:
    """Yield (seq, header, arrays) of each record in `data`, which is one run of bytes in any number of buffers.

    The arrays are views where they lie in one buffer, and copies where they do not. Raises MessageError.
    """
    reader = _Reader(data)
    for _ in range(MAX_RECORDS):
        if not reader.left:
            return
        header_length, body_length, seq, checksum = _prefix(reader.take(PREFIX.size))
        body = reader.views(body_length)
        found = xxhash.xxh3_64(seed=seq)
        for view in body:
            found.update(view)
        if found.intdigest() != checksum:
            raise MessageError(f"record {seq} was damaged on its way: its checksum does not fit")
        arrays = _Reader(body)
        header, layout = _header(arrays.take(header_length))
        yield seq, header, _slices(arrays, layout)
    if reader.left:
        raise MessageError(f"at most {MAX_RECORDS} records come together")


class _Reader:
    """Reads buffers as one run of bytes. `left` is how many are not read. Raises MessageError beyond the end."""

    __slots__ = ("_at", "_next", "_view", "left")

    def __init__(self, buffers: Sequence[Buffer]) -> None:
        views = [memoryview(buffer).cast("B") for buffer in buffers]
        self.left = sum(map(len, views))
        self._next = iter(views)
        self._view, self._at = next(self._next, memoryview(b"")), 0  # what is read now, and how much of it was

    def views(self, length: int) -> list[memoryview]:
        """Return the next `length` bytes as they lie."""
        if length > self.left:
            raise MessageError("a record was cut off")
        self.left -= length
        found = []
        while length:
            while self._at == len(self._view):
                self._view, self._at = next(self._next), 0
            view = self._view[self._at : self._at + length]
            self._at += len(view)
            length -= len(view)
            found.append(view)
        return found

    def take(self, length: int) -> Buffer:
        """Return the next `length` bytes in one buffer: a view, or a copy if they lie in several. Skip padding."""
        begin, padded = self._at, length + -length % 8
        if begin + padded <= len(self._view):
            self._at += padded
            self.left -= padded
            return self._view[begin : begin + length]
        views = self.views(length)
        self.views(padded - length)
        return views[0] if len(views) == 1 else b"".join(views)


def _slices(reader: _Reader, layout: list[tuple[str, str, tuple[int, ...], int]]) -> dict[str, Array]:
    arrays = {}
    for name, dtype, shape, nbytes in layout:
        if nbytes > reader.left:
            raise MessageError(f"array {name!r} is longer than its record")
        arrays[name] = np.ndarray(shape, dtype, reader.take(nbytes))
    if reader.left:
        raise MessageError("a record is longer than its arrays")
    if len(arrays) < len(layout):
        raise MessageError("a header names each array once")
    return arrays


def _header(frame: Buffer) -> tuple[dict[str, Any], list[tuple[str, str, tuple[int, ...], int]]]:
    if len(frame) > MAX_HEADER:
        raise MessageError(f"a header has at most {MAX_HEADER} bytes")
    try:
        if len(frame) <= MAX_PARTS:
            header, layout = msgpack.unpackb(frame, ext_hook=_no_extension)
        else:
            one = _Counter().one
            header, layout = msgpack.unpackb(
                frame, max_map_len=MAX_PARTS, max_array_len=MAX_LENGTH, ext_hook=_no_extension,
                object_hook=one, list_hook=one,
            )  # fmt: skip
        if len(layout) >= MAX_FRAMES:
            raise ValueError(f"{len(layout)} arrays")
        parsed = [_described(name, dtype, *_listed(shape)) for name, dtype, shape in layout]
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise MessageError(f"this is no header: {error}") from None
    if type(header) is not dict:
        raise MessageError("a header is a mapping")
    return header, parsed


class _Counter:
    """Counts the lists and mappings of a header; raises ValueError beyond MAX_PARTS."""

    def __init__(self) -> None:
        self.count = 0

    def one(self, part: Any) -> Any:
        self.count += 1
        if self.count > MAX_PARTS:
            raise ValueError(f"more than {MAX_PARTS} lists and mappings")
        return part


def _no_extension(code: int, data: bytes) -> None:
    raise ValueError("an extension type")


def _listed(shape: Any) -> list[Any]:
    if type(shape) is not list:
        raise ValueError("a shape is a list")
    return shape


@lru_cache(256, typed=True)  # one actor's arrays are the same in each message; True and 1.0 are not 1
def _described(name: str, dtype: str, *shape: int) -> tuple[str, str, tuple[int, ...], int]:
    if type(name) is not str or len(name) > MAX_NAME or len(shape) > MAX_DIMENSIONS:
        raise ValueError(
            f"an array has a name of at most {MAX_NAME} characters and at most {MAX_DIMENSIONS} dimensions"
        )
    least = nbytes = ITEMSIZE.get(dtype, 0)  # `least`: an empty dimension does not excuse the others
    for size in shape:
        if type(size) is not int or not 0 <= size <= MAX_ARRAY:
            raise ValueError(f"array {name!r} has the shape {shape}")
        nbytes *= size
        least *= size or 1
    if not 0 < least <= MAX_ARRAY:
        raise ValueError(f"array {name!r} is {dtype!r} {shape}; of {', '.join(DTYPES)} at most {MAX_ARRAY} bytes come")
    return name, dtype, shape, nbytes
