#!/usr/bin/env python
"""Repeats the studies of docs/: what was compared, by seed, with its control.

study.py NAME [--seeds ...] [--ways ...] [--finished] [-- WORDS]     `study.py NAME --help` explains a study

Every run is the product itself: a learner and an actor on loopback. Each finished cell is a line in --results, with its
seed, commit, a digest of the code and figures. The same command goes on with the first one that is missing, then prints
the table. Words at the end go to every learner.
"""

import argparse
import inspect
from pathlib import Path

from tools.studies import act, clones, curves, effort, hiors, improve, models, reward, served
from tools.studies.cells import Study, lines
from tools.studies.runs import ROOT

CELLS = ROOT / "docs/evidence/studies"

MODULES = (act, clones, curves, effort, hiors, improve, models, reward, served)
STUDIES: dict[str, Study] = {name: study for module in MODULES for name, study in module.STUDIES.items()}


def main() -> None:
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    commands = parser.add_subparsers(dest="study", required=True, metavar="NAME")
    for name, study in sorted(STUDIES.items()):
        about = inspect.getdoc(study.measure) or ""
        first = about.splitlines()[0].replace("%", "%%")  # argparse formats it
        command = commands.add_parser(name, description=about, formatter_class=plain, help=first)
        command.add_argument("--seeds", type=int, nargs="+", default=list(study.seeds))
        ways = list(study.ways)
        if len(ways) > 1:
            command.add_argument("--ways", nargs="+", choices=ways, default=ways[: study.usual], metavar="WAY")
        else:
            command.set_defaults(ways=ways)
        for setting, value in study.settings.items():
            kind, count = (type((value or [""])[0]), "+") if isinstance(value, list) else (type(value), None)
            option = f"--{setting.replace('_', '-')}"
            command.add_argument(option, type=kind, nargs=count, default=value, metavar="VALUE", help=f"({value})")
        command.add_argument("--finished", action="store_true", help="measure nothing: the table of what is finished")
        command.add_argument("--out", type=Path, default=Path(f"runs/{name}"), help=f"folder of the runs (runs/{name})")
        command.add_argument("--results", type=Path, default=CELLS / f"{name}.jsonl", help="finished cells")
        command.add_argument("words", nargs="*", help="words for every learner, after --")
    options = parser.parse_args()
    options.out = options.out.resolve()
    for line in lines(STUDIES[options.study], options):
        print(line)


if __name__ == "__main__":
    main()
