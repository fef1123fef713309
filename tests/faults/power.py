"""Power cuts: rebuilds a run's folder as one would leave it after any call of a recorded run, and opens it.

    python -m tests.faults.power            at every sync, and after a few calls with un-synced writes kept or torn
    python -m tests.faults.power --all      after every call; every single sync left out in turn

A write counts only if a later sync of that file lies before the cut; a name that was made, changed or removed only if
its folder was synced afterwards (ext4 keeps more). What was written and not synced is gone, or, at random, in part
there: torn at 512 or 4096 bytes, later writes without earlier ones; names in the order in which they were changed, and
of a new name in place of an old one both gone, as on a disk without a journal. `published` is mapped and never synced;
SQLite's -shm is mapped, and filled with noise.
"""

import argparse
import copy
import json
import logging
import os
import random
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from serl_client import Segment

from serl_launcher.store import weights
from serl_launcher.store.store import Store

from . import played
from .shim import ALLOCATE, CREATE, FOLDER, MARK, RENAME, SYNC, TRUNCATE, UNLINK, WRITE, Call, build, calls, environment


class _File:
    def __init__(self) -> None:
        self.content = bytearray()
        self.pending: list[Call] = []

    def sync(self) -> None:
        for call in self.pending:
            _change(self.content, call)
        self.pending = []

    def cut(self, chance: random.Random | None) -> bytes:
        """What a power cut leaves; without `chance` only what was synced."""
        if chance is None or not self.pending:
            return bytes(self.content)
        content, sector = bytearray(self.content), chance.choice((512, 4096))
        for call in self.pending:
            if call.kind != WRITE:
                if chance.random() < 0.5:
                    _change(content, call)
                continue
            for begin, end in _sectors(call.offset, call.offset + len(call.data), sector):
                if chance.random() < 0.5:
                    part = call.data[begin - call.offset : end - call.offset]
                    _change(content, Call(WRITE, call.path, begin, part))
        return bytes(content)


class _Folder:
    def __init__(self) -> None:
        self.now: dict[str, _File | _Folder] = {}
        self.changes: list[tuple[str, dict[str, _File | _Folder]]] = [("", {})]  # since the last sync: what, and after

    def change(self, what: str, name: str, node: "_File | _Folder | None") -> None:
        if node is None:
            del self.now[name]
        else:
            self.now[name] = node
        self.changes.append((f"{what} {_plain(name)}", dict(self.now)))

    def sync(self) -> None:
        self.changes = [("", dict(self.now))]

    def cut(self, chance: random.Random | None) -> "dict[str, _File | _Folder]":
        return (chance.choice(self.changes) if chance else self.changes[0])[1]


class Disk:
    """What of the calls so far would survive a power cut."""

    def __init__(self, root: Path) -> None:
        self._root, self._top = root, _Folder()

    def apply(self, call: Call) -> None:
        """One call, as it was recorded."""
        folder, name = self._find(call.path)
        if call.kind in (CREATE, FOLDER):
            folder.change("made", name, _File() if call.kind == CREATE else _Folder())
        elif call.kind == UNLINK and name in folder.now:
            folder.change("removed", name, None)
        elif call.kind == RENAME:
            target, new = self._find(os.fsdecode(call.data))
            node = folder.now[name]
            folder.change("renamed", name, None)
            target.change("named", new, node)
        elif call.kind == SYNC and (node := self._node(call)):
            node.sync()
        elif call.kind in (WRITE, TRUNCATE, ALLOCATE) and isinstance(node := self._node(call), _File):
            node.pending.append(call)

    def site(self, sync: Call) -> str:
        """Which of the program's syncs this is: the file, or the folder and what was last changed in it."""
        node = self._node(sync)
        name = _plain(os.path.relpath(sync.path, self._root))
        if isinstance(node, _Folder):
            return f"{name} ({node.changes[-1][0]})"
        is_made = node is not None and any(call.kind == ALLOCATE for call in node.pending)
        return f"{name} (made)" if is_made else name

    def cut(self, folder: Path, chance: random.Random | None) -> None:
        """Write what is left into an empty folder."""
        _write_out(folder, self._top.cut(chance), chance)

    def _find(self, path: str) -> tuple[_Folder, str]:
        folder, (*parts, name) = self._top, Path(path).relative_to(self._root).parts or ("",)
        for part in parts:
            folder = folder.now[part]
            assert isinstance(folder, _Folder)
        return folder, name

    def _node(self, call: Call) -> _File | _Folder | None:
        folder, name = self._find(call.path)
        return folder.now.get(name) if name else folder


def _change(content: bytearray, call: Call) -> None:
    size = call.offset + len(call.data)
    if call.kind == TRUNCATE:
        del content[call.offset :]
    content.extend(bytes(max(0, size - len(content))))
    if call.kind == WRITE:
        content[call.offset : size] = call.data


def _sectors(begin: int, end: int, size: int) -> Iterator[tuple[int, int]]:
    while begin < end:
        stop = min(end, begin - begin % size + size)
        yield begin, stop
        begin = stop


def _plain(name: str) -> str:
    return re.sub(r"[0-9a-f]{64}(\.\d+)?", "*", name)


def _write_out(folder: Path, entries: "dict[str, _File | _Folder]", chance: random.Random | None) -> None:
    for name, node in entries.items():
        if isinstance(node, _Folder):
            (folder / name).mkdir()
            _write_out(folder / name, node.cut(chance), chance)
            continue
        content = node.cut(chance)
        if name.endswith("-shm") and chance:
            content = chance.randbytes(len(content))
        (folder / name).write_bytes(content)


# -- one cut
def after(disk: Disk, promises: played.Promises, folder: Path, chance: random.Random | None = None) -> list[str]:
    """What is wrong when the power is cut now: the store is opened and read, it goes on, and is read again."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    disk.cut(folder, chance)
    run_dir = folder / "run"
    try:
        run_dir.mkdir(exist_ok=True)
        store = Store.create(run_dir / "store", played.SPEC, played.CAPACITIES, played.ARCHIVED)
        try:
            if found := played.broken(run_dir, promises):
                return found
            grown = _go_on(run_dir, store, promises)
        finally:
            store.close()
        return played.broken(run_dir, grown)
    except Exception as error:  # whatever it is: the store did not open, or does not take what comes
        return [f"the store does not go on: {error!r}"]


def _go_on(run_dir: Path, store: Store, promises: played.Promises) -> played.Promises:
    """Give new numbers and take the next records of every actor, and of a new one. Returns what is promised then."""
    grown = copy.deepcopy(promises)
    grown.run = grown.run or store.run
    sha256, size = weights.write(run_dir / "weights", b"newer")
    body = {**played.BODIES[1], "explore": True}
    grown.given("directive", store.direct(body), body)
    grown.given("weights", store.publish_weights(sha256, size, 0), sha256)
    store.lives.hello("c", "outbox-c", "c0", [])
    for session in [session for session, state in store.sessions.items() if not state.closed]:
        begin = max(store.expected(session), grown.expected.get(session, 0))  # what was acknowledged comes no more
        for seq in range(begin, begin + 6):
            record = played.record(session, seq)
            if isinstance(record, Segment) and record.stamp.directive not in store.directives:
                break  # nobody can have made it yet
            store.stage(session, seq, record)
        store.commit()
        grown.expected[session] = store.expected(session)
    return grown


# -- all cuts
@contextmanager
def recorded() -> Iterator[tuple[list[Call], Path]]:
    """The calls of one run, and an empty folder in memory for what is rebuilt; both below the folder `run` of it."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as name:
        root, trace = Path(name).resolve() / "root", Path(name) / "trace"
        root.mkdir()
        subprocess.run(
            [sys.executable, "-m", f"{__package__}.played", root], check=True, timeout=60,
            cwd=Path(__file__).parents[2], env=environment(build(Path(name)), trace=trace, root=root),
        )  # fmt: skip
        yield list(calls(trace)), root


def moments(
    trace: Sequence[Call], root: Path, left_out: Collection[int] = ()
) -> Iterator[tuple[int, Disk, played.Promises]]:  # fmt: skip
    """The disk and the promises before each call of a trace, and at its end, as if some calls had not been made."""
    disk, promises = Disk(root), played.Promises()
    for number, call in enumerate(trace):
        yield number, disk, promises
        if call.kind == MARK:
            said = json.loads(call.data)
            promises.add(said)
            if "mapped" in said:  # nobody syncs it, and the kernel may have written any of its states
                disk.apply(Call(WRITE, said["mapped"], 0, struct.pack("<QQ", *said["words"])))
        elif number not in left_out:
            disk.apply(call)
    yield len(trace), disk, promises


def strict(
    trace: Sequence[Call], root: Path, left_out: Collection[int] = (), every: int = 1
) -> Iterator[tuple[int, str]]:  # fmt: skip
    """(number of the call, complaint) for a cut before every sync, from the first one left out on, and at the end:
    between two of them nothing that is durable changes, and the promises only grow. Or before each so many-th sync."""
    first, syncs = min(left_out, default=0), 0
    for number, disk, promises in moments(trace, root, left_out):
        syncs += number < len(trace) and trace[number].kind == SYNC and number >= first
        if number == len(trace) or (trace[number].kind == SYNC and number >= first and syncs % every == 0):
            for complaint in after(disk, promises, root):
                yield number, complaint


def kept_in_part(trace: Sequence[Call], root: Path, numbers: dict[int, int]) -> Iterator[tuple[int, str]]:
    """The same for cuts before these calls, each with a seed that says what of the un-synced changes is left."""
    for number, disk, promises in moments(trace, root):
        if number in numbers:
            for complaint in after(disk, promises, root, random.Random(numbers[number])):
                yield number, complaint


def sites(trace: Sequence[Call], root: Path) -> dict[str, list[int]]:
    """The numbers of the syncs of a trace by their site."""
    found: dict[str, list[int]] = {}
    for number, disk, _ in moments(trace, root):
        if number < len(trace) and trace[number].kind == SYNC:
            found.setdefault(disk.site(trace[number]), []).append(number)
    return found


def without(trace: Sequence[Call], root: Path, syncs: Collection[int]) -> tuple[int, str] | None:
    """The first (number, complaint) of a cut when these syncs, by their numbers, had not been made."""
    last = max(syncs)
    later = (n for n, call in enumerate(trace) if n > last and (call.kind, call.path) == (SYNC, trace[last].path))
    return next(strict(trace[: next(later, len(trace))], root, syncs), None)  # from there on all is as it was


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="every call, and every sync by itself: minutes")
    parser.add_argument("--seed", type=int, default=0, help="of what is left of un-synced changes")
    options = parser.parse_args()
    logging.getLogger("serl_launcher").setLevel(logging.ERROR)  # each cut loses a record again, as it has to
    with recorded() as (trace, root):
        found, count = list(strict(trace, root)), sum(call.kind == SYNC for call in trace)
        print(f"{len(trace)} calls; {count + 1} cuts that keep only what was synced: {len(found)} broken")
        chosen = range(len(trace)) if options.all else random.Random(options.seed).sample(range(len(trace)), 200)
        torn = list(kept_in_part(trace, root, {number: options.seed + number for number in chosen}))
        print(f"{len(chosen)} cuts that keep some of the rest: {len(torn)} broken")
        for number, complaint in [*found, *torn][:20]:
            print(f"  before call {number}: {complaint}")
        for site, numbers in sites(trace, root).items():
            said = without(trace, root, numbers)
            print(f"without {site}: {f'call {said[0]}: {said[1]}' if said else 'NOTHING IS BROKEN'}")
            if options.all:
                alone = [without(trace, root, [number]) for number in numbers]
                print(f"    left out one by one, {sum(map(bool, alone))} of {len(alone)} break something")
    sys.exit(1 if found or torn else 0)


if __name__ == "__main__":
    main()
