#!/usr/bin/env python
"""Proves what takes long, part by part, and keeps a table of what was last run when, and on which commit.

tools/nightly.py                     each part that has not passed on this commit yet; stopped, it goes on there
tools/nightly.py --minutes 15 --draw as many parts as fit in, drawn by the commit's hash (CI)
tools/nightly.py --only chaos        the parts whose names begin so
tools/nightly.py --table             runs nothing

tests     tests that are marked nightly, file by file: whole models and matrices, tasks that are learned, real time;
          10,000 spoiled files and messages, of which hypothesis keeps the smallest that does harm
chaos     200 rounds of each of three seeds (tools/chaos.py); quickstart: a whole run under kills
fuzz      200,000 cases (tools/fuzz.py)
power     a power cut after every call of a recorded run (tests/faults/power.py)
soak      hours in minutes (tools/soak.py)
pages     every command of README and docs, each run to its end (tools/readme.py)
mutants   100 small faults of the product (tools/mutants.py); the survivors are in its log
pythons   lerobot's newest version on Python 3.12 and 3.13 (tests/pythons.sh)
holes     known holes of the pinned versions (uv audit), where the database can be reached

Seeds follow from the commit. Results go to runs/nightly.jsonl, what a part says to runs/nightly/NAME.log.
"""

import argparse
import json
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tools.processes import ended, start

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "runs/nightly.jsonl"
PATIENCE = 6  # times the minutes of a part: what takes longer hangs
NO_ANSWER = "error sending request"  # of uv audit: no database could be asked
LONG = {"tests/robot/test_rude_sensors.py": 20}  # minutes of a file of tests, where they are not 3
CHANGED = "+"  # ends the name of a commit from which files differ


@dataclass(frozen=True, slots=True)
class Part:
    name: str
    command: str
    minutes: int  # that it takes on two idle cores, about


def parts(seed: int) -> list[Part]:
    """All parts. `seed` begins the seeds of those that draw at random."""
    python = ".venv/bin/python"
    marked = [file for file in sorted(ROOT.glob("tests/**/test_*.py")) if "mark.nightly" in file.read_text()]
    tests = [str(file.relative_to(ROOT)) for file in marked]
    chaos = [(one, first) for one in range(3) for first in range(0, 200, 20)]
    return [
        *(Part(f"tests {file}", f"{python} -m pytest -n 2 --dist worksteal -m nightly {file}", LONG.get(file, 3))
          for file in tests),
        *(Part(f"chaos {one + 1}: rounds from {first}",
               f"{python} tools/chaos.py --seed {seed + one} --first {first} --rounds 20", 3) for one, first in chaos),
        *(Part(f"fuzz {n + 1}", f"{python} tools/fuzz.py --seed {seed + n} --cases 50000", 1) for n in range(4)),
        *(Part(f"mutants {n + 1}", f"{python} tools/mutants.py --jobs 2 --count 10 --seed {seed + n}", 4)
          for n in range(10)),
        Part("pages", f"{python} tools/readme.py", 40),  # in one piece: pages go on with runs of those before them
        Part("power", f"{python} -m tests.faults.power --all --seed {seed}", 60),
        Part("quickstart", f"{python} tools/chaos.py --quickstart --seed {seed} export.sources=all", 15),
        Part("soak", f"{python} tools/soak.py --minutes 10", 11),
        *(Part(f"pythons {version}", f"tests/pythons.sh {version}", 12) for version in ("3.12", "3.13")),
        Part("holes", "PATH=$PWD/.uv/bin:$PATH uv audit --preview-features audit-command", 1),
    ]  # fmt: skip


def state() -> str:
    """The commit; CHANGED follows where files differ from it."""
    told = [
        subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
        for words in (("rev-parse", "HEAD"), ("status", "--porcelain"))
    ]
    return told[0] + (CHANGED if told[1] else "")


def run(part: Part, commit: str) -> dict[str, Any]:
    """Run it to its end; returns what became of it, which RESULTS gets, too."""
    log = RESULTS.with_suffix("") / f"{re.sub(r'[^a-z0-9]+', '-', part.name.lower())}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    with log.open("w") as out:
        status = ended(start(["bash", "-c", part.command], out, cwd=ROOT), 60 * PATIENCE * part.minutes)
    said = log.read_text(errors="replace")
    result = "passed" if status == 0 else "hangs" if status is None else "FAILED"
    row = {
        "part": part.name, "commit": commit, "when": datetime.now(UTC).isoformat(timespec="minutes"),
        "result": "not asked" if part.name == "holes" and NO_ANSWER in said else result,
        "seconds": round(time.monotonic() - began), "said": "".join(said.strip().splitlines()[-1:])[:200],
        "log": str(log.relative_to(ROOT)),
    }  # fmt: skip
    with RESULTS.open("a") as file:
        print(json.dumps(row), file=file)
    return row


def newest() -> dict[str, dict[str, Any]]:
    """{part: what its last run came to}."""
    rows = map(json.loads, RESULTS.read_text().splitlines() if RESULTS.exists() else ())
    return {row["part"]: row for row in rows}


def due(chosen: Sequence[Part], commit: str, minutes: float, draw: bool) -> Iterator[Part]:
    """Those that have not passed on this commit, each if it still fits in; with `draw` in an order that it draws."""
    known, end = newest(), time.monotonic() + 60 * minutes
    done = {name for name, row in known.items() if (row["commit"], row["result"]) == (commit, "passed")}
    wanted = [part for part in chosen if part.name not in done or commit.endswith(CHANGED)]
    if draw:
        random.Random(commit).shuffle(wanted)
    for part in wanted:
        if time.monotonic() + max(60 * part.minutes, known.get(part.name, {}).get("seconds", 0)) <= end:
            yield part


def table(chosen: Sequence[Part], commit: str) -> Iterator[str]:
    """A line for each part that was ever run, and one for all others."""
    known = newest()
    for part in chosen:
        if row := known.get(part.name):
            at = row["commit"][:9] + (CHANGED if row["commit"].endswith(CHANGED) else "")
            yield f"{row['result']:9} {row['when'][:16]} {at:10} {row['seconds']:6} s  {part.name}: {row['said'][:70]}"
    rows = [known[part.name] for part in chosen if part.name in known]
    passed = [row for row in rows if (row["commit"], row["result"]) == (commit, "passed")]
    never = [part.name for part in chosen if part.name not in known]
    yield f"{len(passed)} of {len(chosen)} have passed on {commit[:9]}; never run here: {', '.join(never) or 'none'}"


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin nothing that would take longer")
    parser.add_argument("--draw", action="store_true", help="in an order that the commit draws")
    parser.add_argument("--only", default="", metavar="NAME", help="the parts whose names begin so")
    parser.add_argument("--table", action="store_true", help="run nothing")
    options = parser.parse_args(words)
    commit = state()
    chosen = [part for part in parts(int(commit[:6], 16)) if part.name.startswith(options.only)]
    if not chosen:
        parser.error(f"no part begins with {options.only!r}")
    failed = 0
    for part in [] if options.table else due(chosen, commit, options.minutes, options.draw):
        print(f"{part.name}: about {part.minutes} min: {part.command}", flush=True)
        row = run(part, commit)
        print(f"    {row['result']} in {row['seconds']} s: {row['said']}", flush=True)
        if row["result"] in ("FAILED", "hangs"):
            failed += 1
            print(*(ROOT / row["log"]).read_text(errors="replace").splitlines()[-60:], sep="\n    ", flush=True)
    print(*table(chosen, commit), sep="\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
