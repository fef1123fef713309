#!/usr/bin/env python
"""Lets many actors come and go, by kill -9 too, at a real server with a tiny store (soak test, hours in minutes). The
store evicts all the time, with an archive and new weights now and then. What does not stay as it is is said.

tools/soak.py [--minutes M] [--actors N]

Each line is a series with its first quarter, its last quarter and its slope per hour (two standard errors). The last
line is JSON; exit status 1 when memory, files, threads or CPU time leave their bounds (tests/faults/soak.py), or when
anything was lost, doubled or else wrong. The first half of the actors stays and is measured, the others come and go.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # before packages that bring a `tests` of their own
from tests.faults.soak import Soak, verdict


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="(10)")
    parser.add_argument("--actors", type=int, default=24, help="each a process (24)")
    options = parser.parse_args()
    if options.minutes < 0.05 or options.actors < 2:
        parser.error("at least 0.05 minutes, and 2 actors: one is measured, one is killed")
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        with Soak(Path(folder), options.actors, 60 * options.minutes) as soak:
            soak.run()
            soak.end()
        result, lines = verdict(soak)
    print("\n".join(lines))
    print(json.dumps(result))
    sys.exit(0 if result["holds"] else 1)


if __name__ == "__main__":
    main()
