#!/usr/bin/env python
"""Feeds spoiled messages, records, Specs, weights, feedback of arms and files to what reads them.

It attacks a real server, too. Nothing may crash, raise what it does not declare, grow, lose a thread, or write where it
must not. A case follows from --seed, its kind and its number: what fails is kept in --failures with them, and
--only KIND --first N --cases 1 runs it again. The last line is JSON; the exit status is 1 if anything was wrong.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # before packages that bring a `tests` of their own
from tests.faults.fuzzing import campaign


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=1_000_000, help="in all (1,000,000: some minutes)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=[*campaign.KINDS, "live"], help="all cases of this kind")
    parser.add_argument("--first", type=int, default=0, help="the number of the first case of each kind")
    parser.add_argument("--failures", type=Path, default=Path("fuzz-failures"), help="a folder for cases that failed")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fuzz-") as scratch:
        results = {}
        for kind, count in campaign.shares(options.cases, options.only).items():
            result = campaign.apart(kind, count, options.first, options.seed, Path(scratch) / kind)
            said = ", ".join(f"{name} {number:,}" for name, number in result["outcomes"].most_common())
            print(f"{kind:12} {count:9,} in {result['seconds']:6.1f} s: {said}", flush=True)
            print(*(f"    not written: {form}: {ends}\n" for form, ends in result["unwritten"].items()), sep="", end="")
            print(*(f"{line}\n" for line in campaign.keep(options.failures, kind, options.seed, result["failures"])),
                  sep="", end="")  # fmt: skip
            results[kind] = result
    summary, grew = campaign.verdict(results, options.seed)
    print(*(f"{kind} has grown\n" for kind in grew), sep="", end="")
    print(json.dumps(summary))
    sys.exit(bool(summary["crashes"] or summary["files"] or summary["threads_lost"] or grew))


if __name__ == "__main__":
    main()
