#!/usr/bin/env python
"""Compares the evaluations of runs on the starts that they share: is one policy better, or was it luck?

tools/compare.py RUN RUN [RUN ...]       each one with the first; RUN: a run folder, its summary.json or evaluation.json

Each start is tried by both policies, so only those count that one policy masters and the other does not. The interval
(95 %) of the difference is that of Bonett and Price 2012, p is the exact one of McNemar's test. Returns are compared by
the mean of their differences. With several runs, expect one of twenty comparisons to show a difference by chance.
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from serl_launcher.error_log import in_one_sentence
from serl_launcher.report.comparison import compared, trials


@in_one_sentence()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    parser.add_argument("--json", action="store_true", help="print one object")
    options = parser.parse_args()
    if len(options.runs) < 2:
        parser.error("give two runs or more")
    first, *others = [(path, trials(path)) for path in options.runs]
    found = [{"runs": [str(first[0]), str(path)], **compared(first, (path, tried))} for path, tried in others]
    print(json.dumps(found) if options.json else "\n\n".join(map(said, found)))


def said(found: Mapping[str, Any]) -> str:
    (one, two), (first, second) = found["runs"], found["starts"]
    lines = [f"{one} and then {two}", f"  {first} and {second} starts, {found['shared']} of them shared"]
    if "p" in found:
        before, after = found["successes"]
        low, high = found["interval"]
        lines += [f"  successes: {before} and {after} of {found['shared']}"]
        lines += [
            f"  only the first: {found['lost']}, only the second: {found['gained']}; McNemar: p = {found['p']:.3f}"
        ]
        lines += [f"  difference: {found['difference']:+.0%} (95 % interval {low:+.0%} to {high:+.0%})"]
    mean, low, high = found["return_difference"]
    return "\n".join([*lines, f"  difference of returns: {mean:+.3g} (95 % interval {low:+.3g} to {high:+.3g})"])


if __name__ == "__main__":
    main()
