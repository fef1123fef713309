#!/usr/bin/env python
"""Checks a machine before a run, and says for each failure what to do; nothing moves unless --move is given.

tools/doctor.py learner [words of the run, as examples/train.py takes them]
tools/doctor.py actor ip=ADDRESS [words of the run]

One line for each check: ok, WARN (the run goes on, less well) or FAIL (it does not), and in the next line what to do.
"""

import argparse
import json
import logging
import sys

try:
    from tools.checks.sides import CHECKS, examined
except ModuleNotFoundError as missing:
    sys.exit(
        f"FAIL packages: {missing.name} is not installed for this Python\n"
        "     run `. examples/install.sh` here, then .venv/bin/python tools/doctor.py ..."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("side", choices=CHECKS)
    parser.add_argument("words", nargs="*", help="of the run: task=... plan=... name=value")
    parser.add_argument("--seconds", type=float, default=3.0, help="to watch cameras and control for (3)")
    parser.add_argument("--move", action="store_true", help="a real robot may go home and is commanded to hold there")
    parser.add_argument("--json", action="store_true", help="print one object")
    options = parser.parse_intermixed_args()
    logging.basicConfig(level=logging.ERROR)
    found = []
    for name, finding in examined(options.side, options.words, options.move, options.seconds):
        found.append({"check": name, "state": finding.state, "text": finding.text, "advice": finding.advice})
        if not options.json:
            print(f"{finding.state:4} {name}: {finding.text}", *[finding.advice] * bool(finding.advice), sep="\n     ")
    failed = sum(one["state"] == "FAIL" for one in found)
    if options.json:
        print(json.dumps({"side": options.side, "failed": failed, "checks": found}))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
