#!/usr/bin/env python
"""Measures how fast something is, beside what it is compared with (benchmarks). More: tools/bench.py control --help

control      what pushing records and asking for actions costs a control loop
wire         how long one observation and its answer take, beside a plain TCP exchange and the peers
ingest       how fast records come in over the wire, and until they are durable
replay       how fast pairs of observations are drawn, beside a copy of the same bytes and lerobot's buffer
update       how long an update of SAC and of RLPD takes, beside a minimal loop; how long publishing holds it up
frozen       how long an update from cameras takes through a frozen backbone, beside one from states
weights      how fast weights reach several receivers
pi0          how fast PI0 answers and is trained, beside what the machine allows
beside       what the acknowledgements of actors wait for, beside an attacker who has a valid key or a crowd of browsers

Each prints its section of docs/evidence/benchmarks.md.
"""

import argparse
import importlib
import json
import sys
import tempfile
from pathlib import Path

from omegaconf.errors import OmegaConfBaseException
from serl_client.errors import RetakeError

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # before packages that bring a `tests` of their own
from tests.benches import paired

# each a file in tests/benches
BENCHES = ("control", "wire", "ingest", "replay", "update", "frozen", "weights", "pi0", "beside")


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("what", choices=BENCHES)
    what = parser.parse_args(sys.argv[1:2]).what
    bench = importlib.import_module(f"tests.benches.{what}")
    parser = argparse.ArgumentParser(f"{parser.prog} {what}", description=bench.__doc__, formatter_class=raw)
    for name, more in bench.OPTIONS.items():
        parser.add_argument(name, **more)
    parser.add_argument("--json", action="store_true", help="print one object")
    parser.add_argument("--folder", type=Path, help="on the disk that is measured (the system's for temporary files)")
    options = parser.parse_args(sys.argv[2:])
    try:
        with tempfile.TemporaryDirectory(prefix="bench-", dir=options.folder) as folder:
            result = paired.result(what, bench.measure(Path(folder), options))
    except (RetakeError, OmegaConfBaseException) as error:
        sys.exit(f"error: {error}")
    print(json.dumps(result) if options.json else "\n".join(paired.lines(result)))


if __name__ == "__main__":
    main()
