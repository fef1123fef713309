#!/usr/bin/env python
"""Breaks and kills a learner and its actors in every way (chaos test), and lets an independent checker say what was
lost. In chaos.py --rounds 60 --seed 1, a round is drawn from the seed and its number: --first 12 --rounds 1 plays it
anew. With --quickstart it is the whole quickstart that is played, in the processes and with the settings that a user
has, of which one at random, or all, are killed -9 after each recovery; its summary is compared with a count of our own.

The last line is JSON; the exit status is 1 when anything was lost, doubled, reordered or else wrong.
"""

import argparse
import json
import logging
import shutil
import statistics
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from serl_client.errors import ConfigError

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # before packages that bring a `tests` of their own
from tests.faults import checker
from tests.faults.rounds import Chaos
from tests.faults.whole import KILLED, Whole


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--first", type=int, default=0, metavar="K", help="the number of the first round")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", metavar="NAME", default="", help="the nemeses whose names begin so")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="gets what a bad round left, or a single one")
    parser.add_argument("--quickstart", action="store_true", help="a whole run, whose processes are killed")
    parser.add_argument("--gap", type=float, nargs=2, default=(5.0, 15.0), metavar="S",
                        help="from a recovery of the quickstart to the next kill (5 15)")  # fmt: skip
    parser.add_argument("--minutes", type=float, default=30.0, help="for so long, then it goes on to its end (30)")
    parser.add_argument("words", nargs="*", metavar="name=value", help="settings of the quickstart, for both sides")
    options = parser.parse_args()
    logging.getLogger("serl_client").setLevel(logging.ERROR)  # of the peers in this process, which are kept out
    if options.quickstart:
        with tempfile.TemporaryDirectory(prefix="chaos") as folder:
            sys.exit(_quickstart(Path(folder), options))
    total, rounds = checker.Report(), range(options.first, options.first + options.rounds)
    with tempfile.TemporaryDirectory(prefix="chaos") as folder:
        try:
            chaos = Chaos(Path(folder), options.seed, options.only)
        except ConfigError as error:
            sys.exit(str(error))
        print(*(f"{line}\n" for line in chaos.absent), sep="", end="")
        for number in rounds:
            report, line = chaos.play(number, options.keep, always=options.rounds == 1)
            print(line, *(f"    {violation}" for violation in report.violations), sep="\n", flush=True)
            for name, value in asdict(report).items():
                setattr(total, name, getattr(total, name) + value)
    print(json.dumps({"first": options.first, "rounds": options.rounds, "seed": options.seed, **asdict(total)}))
    sys.exit(1 if total.violations else 0)


def _quickstart(folder: Path, options: argparse.Namespace) -> int:
    run, end = Whole(folder, options.seed, options.gap, options.words), time.monotonic() + options.minutes * 60
    found = run.play(iter(lambda: run.random.choice(KILLED) if time.monotonic() < end else "", ""))
    print(*(f"    {violation}\n" for violation in run.violations), sep="", end="")
    if options.keep and run.violations:
        shutil.copytree(folder, options.keep / f"quickstart-{options.seed}", dirs_exist_ok=True)
    took = [round(seconds, 1) for seconds in sorted(run.took_s)]
    print(json.dumps({
        "seed": options.seed, "kills": len(took), "start_s": round(run.start_s, 1), "took_s": took,
        "median_s": took and statistics.median(took), "summary": found and found.summary, "violations": run.violations,
    }))  # fmt: skip
    return bool(run.violations)


if __name__ == "__main__":
    main()
