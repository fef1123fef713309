#!/usr/bin/env python
"""Measurements that print what they compare with; each has more to say: tools/bench.py control --help

control      what pushing records and asking for actions costs a control loop
wire         how long one observation and its answer take, beside a plain TCP exchange and the peers
ingest       how fast records come in over the wire, and until they are durable
replay       how fast pairs of observations are drawn, beside a copy of the same bytes and lerobot's buffer
durable      how fast groups become durable, beside plain writes and syncs; how late acknowledgements come
swarm        many clients at once: their rates, how late acknowledgements come, and what it costs
drain        how fast an actor that was cut off delivers what it kept, beside one that goes on
restart      how soon a learner that was killed takes new records
hostile      what one client can do to the others' acknowledgements: floods, Hellos, NaN
weights      how fast weights reach several receivers
pi0-infer    how fast PI0 answers, beside what the machine allows and beside other ways to run it
pi0-train    how fast PI0 is trained, beside what the machine allows
page         the page of a full run, docs/benchmarks.md, from what the others printed with --json
"""

import argparse
import importlib
import sys

BENCHES = (  # each is a file of its name in benches/
    "control", "wire", "ingest", "replay", "durable", "swarm", "drain", "restart", "hostile", "weights", "pi0-infer",
    "pi0-train", "page",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=BENCHES)
    what = parser.parse_args(sys.argv[1:2]).what
    importlib.import_module(f"tests.benches.{what.replace('-', '_')}").main(sys.argv[2:], f"{parser.prog} {what}")


if __name__ == "__main__":
    main()
