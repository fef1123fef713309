#!/usr/bin/env python
"""Writes the report of a run as one HTML file; with several runs, the first is compared with each other one.

tools/report.py RUN [RUN ...] [--out FILE]

Nothing needs to run, and the run may still go on. The file needs no network and no script. Evaluations are compared
start by start (tools/compare.py says how), on the starts that both runs were evaluated on.
"""

import argparse
from pathlib import Path

from serl_launcher.error_log import in_one_sentence
from serl_launcher.report.page import write


@in_one_sentence()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="the folder of a run")
    parser.add_argument("--out", type=Path, help="the file to write (report.html in the first run's folder)")
    options = parser.parse_args()
    first, *others = options.runs
    print(write(first, others, options.out))


if __name__ == "__main__":
    main()
