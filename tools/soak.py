#!/usr/bin/env python
"""Hours in minutes: many actors come and go, cleanly and by kill -9, at a real server whose store is so small that it
evicts all the time, with an archive and new weights now and then. What does not stay as it is is said.

tools/soak.py [--minutes M] [--actors N] [--processes P]

Each line is a series with its first quarter, its last quarter and its slope per hour (two standard errors). The last
line is JSON; exit status 1 when memory, files, threads or latency leave their bounds (soaking/drift.py), or when an
actor was refused. Of the actors' processes the second half is killed now and then, so only the first half is measured.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # before packages that bring a `tests` of their own
from tests.faults.soaking.soak import Soak, lines, verdict


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="(10)")
    parser.add_argument("--actors", type=int, default=64, help="(64)")
    parser.add_argument("--processes", type=int, default=4, help="that the actors are in (4)")
    options = parser.parse_args()
    if options.minutes < 0.05 or options.processes < 2:
        parser.error("at least 0.05 minutes, and 2 processes: one is measured, one is killed")
    with (
        tempfile.TemporaryDirectory(prefix="soak-") as folder,
        Soak(Path(folder), options.actors, options.processes, 60 * options.minutes) as soak,
    ):
        soak.run()
        result, drifts = verdict(soak)
    print("\n".join(lines(drifts)))
    print(json.dumps(result))
    sys.exit(0 if result["holds"] else 1)


if __name__ == "__main__":
    main()
