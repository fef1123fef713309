"""The page of a full run: what the benches printed with --json, one file each, as tables."""

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .paired import lines, option

TITLE = """# Speed of the data path, beside other systems and the limits of the machine

Each system and its baseline alternate within one run. A ratio is the median of the rounds' ratios.
`.venv/bin/python tools/bench.py NAME --help` says how to repeat a measurement.
"""
OPTIONS = {
    "results": option([Path()], "what one printed with --json"),
    "--out": option(Path("docs/benchmarks.md"), "(docs/benchmarks.md)"),
}


def measure(_: Path, options: argparse.Namespace) -> str:
    """Write the page; what to say of it."""
    sections = ("\n".join(lines(printed(path))) for path in options.results)
    options.out.write_text("\n\n".join([TITLE.rstrip(), *sections]) + "\n")
    return f"wrote {options.out}"


def printed(path: Path) -> Mapping[str, Any]:
    try:
        result = json.loads(path.read_text().splitlines()[-1])
        return {name: result[name] for name in ("bench", "machine", "figures")}
    except (OSError, IndexError, ValueError, KeyError, TypeError):
        sys.exit(f"{path} is not what a bench with figures has printed with --json")
