"""Keeps large records that were just appended to the outbox in memory, to send them without reading the disk."""

import itertools
from collections.abc import Sequence

import serl_client.wire as wire

LEAST_BYTES = wire.COPY_BELOW  # of a record: joining the parts of a smaller one costs as much as reading its file
KEPT_BYTES = 16 << 20  # of records in memory: as much as the server lets be on its way


class RecentRecords:
    """Keeps the encoded records of one session as they were written, until they are taken. Arrays are not copied."""

    def __init__(self) -> None:
        self._records: dict[int, tuple[int, Sequence[wire.Buffer]]] = {}  # seq -> (bytes, record)
        self._bytes = 0

    def add(self, seq: int, size: int, record: Sequence[wire.Buffer]) -> None:
        """Keep a record of `size` bytes, if it is large and there is room for it."""
        if size >= LEAST_BYTES and self._bytes + size <= KEPT_BYTES:
            self._records[seq] = size, record
            self._bytes += size

    def take(self, seq: int, end: int) -> list[wire.Buffer]:
        """Forget every record below `end`. Return the buffers of those from `seq` on; none if one is missing."""
        below = list(itertools.takewhile(lambda each: each < end, self._records))
        taken = {each: self._records.pop(each) for each in below}
        self._bytes -= sum(size for size, _ in taken.values())
        if not all(each in taken for each in range(seq, end)):
            return []
        return wire.gathered(part for each in range(seq, end) for part in taken[each][1])
