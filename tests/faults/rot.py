"""Bytes of a stopped server's files that turn over, and how they are turned back; and bits of a dead actor's outbox."""

import re
from pathlib import Path
from random import Random

import numpy as np

from tests.shared import oracle
from tests.shared.tools import typed

from .checker import RECORD

NEWEST = 10  # records of an outbox, which the learner has hardly got
MOST = 3  # steps of which something turns over


class Rot:
    """Turns a bit of some live steps over, in their record or in a row that they point to; `numbers` are theirs."""

    def __init__(self, run_dir: Path, source: str, random: Random) -> None:
        store = run_dir / "store"
        with oracle.opened(store) as index:
            spec, words = oracle.spec_of(index), "SELECT tail, head, capacity FROM sources WHERE name = ?"
            tail, head, capacity = index.execute(words, (source,)).fetchone()
        self._run_dir = run_dir
        self._turned: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []  # a place, what was there, what is there now
        steps = np.memmap(store / source / "steps", oracle.kind(spec), "r+")
        rows = oracle.rows(store / source / "rows", spec, oracle.slots(capacity), "r+")
        self.numbers = set(random.sample(range(tail, head), min(MOST, head - tail)))
        for number in sorted(self.numbers):
            record = steps[number % capacity : number % capacity + 1]
            row = int(record["row"][0]) % oracle.slots(capacity)
            places = [record, *(column[row : row + 1] for column in rows.values())]
            self._turn(random.choice(places).view("u1").reshape(-1), random)

    def _turn(self, place: np.ndarray, random: Random) -> None:
        before = place.copy()
        place[random.randrange(len(place))] ^= 1 << random.randrange(8)
        self._turned.append((place, before, place.copy()))

    def unseen(self) -> list[str]:
        """What `tools/store.py verify` says wrongly of it."""
        status, said = typed("store", "verify", self._run_dir)
        found = {int(number) for number in re.findall(r"step (\d+): damaged", said)}
        if found == self.numbers and status == bool(found):
            return []
        return [f"bits of steps {sorted(self.numbers)} turned over, and verify says {found or said}"]

    def mend(self) -> None:
        """Turn back what nobody has overwritten."""
        for place, before, after in self._turned:
            if np.array_equal(place, after):
                place[:] = before


def spoil(outbox: Path, random: Random) -> list[tuple[str, int]]:
    """Turn a bit of one record over in an outbox whose actor is dead; [(session, seq)] of it, if there was one.

    It is not the last one of its session, of which nobody could say whether it was ever whole.
    """
    places: list[tuple[tuple[str, int], Path, int, int]] = []
    for file in sorted(outbox.glob("*.records")):
        _, session, first = file.stem.split("-")
        data, begin, due = file.read_bytes(), 0, int(first)
        while len(data) >= begin + RECORD.size:
            _, _, length, seq, _ = RECORD.unpack_from(data, begin)
            end = begin + RECORD.size + length
            if seq != due or end > len(data):
                break  # what lay in a file that is used again
            places.append(((session, seq), file, begin, end))
            begin, due = end, seq + 1
    newest = dict(record for record, *_ in places)
    places = [place for place in places if place[0][1] < newest[place[0][0]]]
    if not places:
        return []
    record, file, begin, end = random.choice(places[-NEWEST:])
    data, at = bytearray(file.read_bytes()), random.randrange(begin, end)
    data[at] ^= 1 << random.randrange(8)
    file.write_bytes(data)
    return [record]
