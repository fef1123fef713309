#!/usr/bin/env python
"""Measurements that print what they compare with; each has more to say: tools/bench.py control --help

control      what pushing records and asking for actions costs a control loop
pi0-infer    how fast PI0 answers, beside what the machine allows and beside other ways to run it
pi0-train    how fast PI0 is trained, beside what the machine allows
"""

import argparse
import importlib
import sys

BENCHES = {"control": "control", "pi0-infer": "pi0_infer", "pi0-train": "pi0_train"}  # their files in benches/


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=BENCHES)
    what = parser.parse_args(sys.argv[1:2]).what
    importlib.import_module(f"benches.{BENCHES[what]}").main(sys.argv[2:], f"{parser.prog} {what}")


if __name__ == "__main__":
    main()
