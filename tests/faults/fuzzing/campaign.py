"""All kinds of cases, each in a process of its own: what became of them, what failed, grew, and was written."""

import ctypes
import gc
import json
import logging
import multiprocessing
import os
import resource
import signal
import sys
import threading
import time
import traceback
import tracemalloc
from collections import Counter
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa

from . import hostile, live
from .files import FILES, WRITTEN, formed
from .targets import TARGETS, Target

KINDS = {**TARGETS, **FILES}
LIVE = 0.02  # share of the messages to the real server
GROWTH = 24 << 20  # bytes that a process may have grown after its first tenth
PER_BYTE = 40  # what one byte of a message may become in memory, for a moment,
AT_LEAST = 2 << 20  # and this much in any case
PEAK = 256 << 20  # and that any case may need for a moment
ROOM = 4 << 30  # that the process can have
LONGEST_S = 60  # that a case may take: a longer one ends the process
WATCHED = 100  # of so many cases one is looked at for what it allocates
TRIES = 20  # after so many a form of a file must have been written once
KEPT = 20  # failures of a kind that are written down
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def shares(cases: int, only: str | None) -> dict[str, int]:
    """How many cases each kind gets."""
    if only:
        return {only: cases}
    counts = {kind: max(20, round(cases * target.share)) for kind, target in KINDS.items()}
    counts["live"] = max(100, round(cases * LIVE))
    counts["messages"] += max(0, cases - sum(counts.values()))
    return counts


def apart(kind: str, count: int, first: int, seed: int, scratch: Path) -> dict[str, Any]:
    """The result of one kind, from a process of its own: a signal that ends it is a failure, too."""
    begin = time.monotonic()
    scratch.mkdir(parents=True)
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(
        target=_child, args=(sender, kind, count, first, seed, scratch)
    )
    process.start()
    sender.close()
    try:
        result = receiver.recv()
    except EOFError:
        result = {"outcomes": Counter(), "failures": [], "growth": 0, "threads_lost": 0, "files": [], "unwritten": {}}
    process.join()
    if process.exitcode:
        result["failures"].append({"number": -1, "why": f"the process ended with {process.exitcode}"})
    return {**result, "crashes": len(result["failures"]), "seconds": time.monotonic() - begin}


def _child(sender: Connection, kind: str, count: int, first: int, seed: int, scratch: Path) -> None:
    logging.disable(logging.WARNING)  # of what is refused; errors are shown
    if kind == "live":
        result = live.attack(count, seed, scratch)
        result |= {"failures": [{"number": -1, "why": text} for text in result["failures"]], "unwritten": {}}
    else:
        resource.setrlimit(resource.RLIMIT_DATA, (ROOM, ROOM))
        result = fuzz(kind, count, first, seed, scratch)
        signal.alarm(0)
    sender.send(result)


def fuzz(kind: str, count: int, first: int, seed: int, scratch: Path) -> dict[str, Any]:
    """`count` cases of one kind in this process: {outcomes, failures, growth, threads_lost, files, unwritten}; the last
    is {form: {error: how often it was the end of a file of this form, before that was written}}."""
    target = KINDS[kind]
    target.make(Random(0), 0)  # what is whole is made once
    formed.clear()
    files = _watch(scratch if target.writes else None)
    outcomes: Counter[str] = Counter()
    failures: list[dict[str, Any]] = []
    threads, resident, peak = threading.active_count(), 0, _peak() + PEAK
    for number in range(first, first + count):
        case = target.make(Random(f"{seed}/{kind}/{number}"), number)
        signal.alarm(LONGEST_S)
        try:
            outcomes[_once(target, case, scratch, is_watched=number % WATCHED == 0 and isinstance(case, list))] += 1
        except target.declared as error:
            outcomes[type(error).__name__] += 1
        except Exception:
            outcomes["FAILED"] += 1
            failures.append({"number": number, "why": traceback.format_exc(limit=-6), "case": repr(case)[:100_000]})
        if (now := _peak()) > peak:
            failures.append({"number": number, "why": f"it took {now - peak + PEAK:,} bytes of memory"})
            peak = now + PEAK
        if number == first + count // 10:
            resident = _held()
    failures += [
        {"number": -1, "why": f"no file of the form {form} was ever tried: {dict(ends)}"}
        for form, ends in formed.items() if sum(ends.values()) >= TRIES and not ends[WRITTEN]
    ]  # fmt: skip
    unwritten = {form: dict(ends - Counter({WRITTEN: ends[WRITTEN]})) for form, ends in formed.items()}
    growth = max(0, _held() - resident)
    lost = threading.active_count() - threads
    return {
        "outcomes": outcomes, "failures": failures, "growth": growth, "threads_lost": abs(lost), "files": files,
        "unwritten": {form: ends for form, ends in unwritten.items() if ends},
    }  # fmt: skip


def _peak() -> int:
    """The most bytes of memory that this process has ever held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def _held() -> int:
    """Bytes of memory that this process cannot give back: what lies free in its allocator goes first."""
    gc.collect()
    pa.default_memory_pool().release_unused()
    ctypes.CDLL(None).malloc_trim(0)
    return hostile.memory(os.getpid())


def _once(target: Target, case: Any, scratch: Path, *, is_watched: bool) -> str:
    if not is_watched:
        return target.run(case, scratch)
    size = sum(len(part) for part in case if isinstance(part, bytes))
    tracemalloc.start()
    try:
        return target.run(case, scratch)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        if peak > PER_BYTE * size + AT_LEAST:
            raise AssertionError(f"{size} bytes became {peak} in memory")


def _watch(scratch: Path | None) -> list[str]:
    """A list that fills with what this process opens for writing outside `scratch`, from now on."""
    found: list[str] = []

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(arguments[2], int) and arguments[2] & WRITES:
            path = os.fsdecode(arguments[0]) if not isinstance(arguments[0], int) else str(scratch)
            if scratch is None or not os.path.realpath(path).startswith(str(scratch.resolve())):
                found.append(path)

    sys.dont_write_bytecode = True  # of a package that a case is the first to import
    sys.addaudithook(watch)
    return found


def keep(folder: Path, kind: str, seed: int, failures: list[dict[str, Any]]) -> Iterator[str]:
    """Write failures down; a line for each."""
    for failure in failures[:KEPT]:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{kind}-{seed}-{failure['number']}.json"
        path.write_text(json.dumps({"kind": kind, "seed": seed, **failure}, indent=1))
        yield f"FAILED {path}: {failure['why'].strip().splitlines()[-1]}"


def verdict(results: Mapping[str, Mapping[str, Any]], seed: int) -> tuple[dict[str, Any], list[str]]:
    """(what the last line says, the kinds that have grown)."""
    cases = sum(sum(result["outcomes"].values()) for kind, result in results.items() if kind != "live")
    summary = {
        "cases": cases + (results["live"]["outcomes"]["messages"] if "live" in results else 0), "seed": seed,
        "crashes": sum(result["crashes"] for result in results.values()),
        "growth_mb": round(max(result["growth"] for result in results.values()) / 1e6, 1),
        "files": [path for result in results.values() for path in result["files"]],
        "threads_lost": sum(result["threads_lost"] for result in results.values()),
        "seconds": round(sum(result["seconds"] for result in results.values()), 1),
    }  # fmt: skip
    return summary, [kind for kind, result in results.items() if result["growth"] > GROWTH * (1 + (kind == "live"))]
