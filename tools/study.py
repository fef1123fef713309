#!/usr/bin/env python
"""Repeats the studies of docs/: what was compared, by seed, with its control.

study.py control     SAC on the DeepMind Control Suite and Meta-World, beside published figures (docs/learning.md)
study.py hiors       which part of Hi-ORS does the work (docs/hiors.md)
study.py heads       which head learns what: the arm, and a wall with two gaps (docs/policies.md)
study.py improve     what improves a clone: critics that choose, climb, steer or edit (docs/policies.md)
study.py memory      whether Dreamer remembers what was shown once (docs/world-models.md)
study.py offline     what a dataset of successes and failures teaches (docs/policies.md)
study.py lift        two heads on robosuite's Lift (docs/robomimic.md)
study.py pick_cube   RLPD picks up gym-hil's cube after 20 demonstrations (docs/learning.md)
study.py planning    whether planning in a learned model acts better than its prior (docs/planning.md)
study.py planning_arm  TD-MPC2 with takeovers on an arm at its own pace (docs/planning.md)
study.py reward      whether a trained classifier sees success, from pictures alone (docs/rewards.md)
study.py verdicts    RLPD on an operator's verdicts alone (docs/verdicts.md)
study.py world_models  World Models with and without memory, on a puck seen in pictures (docs/world-models.md)

Every run is the product itself: a learner and an actor on loopback. Each finished cell is a line in --results, with its
seed, commit and figures. The same command goes on with the first one that is missing, then prints the table.
"""

import argparse
from pathlib import Path

from tools.studies import (
    control,
    heads,
    hiors,
    improve,
    lift,
    memory,
    offline,
    pick_cube,
    planning,
    planning_arm,
    reward,
    verdicts,
    world_models,
)
from tools.studies.runs import ROOT, Cells

MODULES = (
    control, heads, hiors, improve, lift, memory, offline, pick_cube, planning, planning_arm, reward, verdicts,
    world_models,
)  # fmt: skip
STUDIES = {module.__name__.rpartition(".")[2]: module for module in MODULES}


def main() -> None:
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    commands = parser.add_subparsers(dest="study", required=True)
    for name, module in STUDIES.items():
        command = commands.add_parser(name, description=module.__doc__, formatter_class=plain)
        module.arguments(command)
        command.add_argument("--out", type=Path, default=Path(f"runs/{name}"), help=f"folder of the runs (runs/{name})")
        command.add_argument("--results", type=Path, default=ROOT / f"docs/studies/{name}.jsonl", help="finished cells")
        command.add_argument("words", nargs="*", help="words for every learner, after --")
    options = parser.parse_args()
    options.out = options.out.resolve()
    for line in STUDIES[options.study].study(Cells(options.results), options):
        print(line)


if __name__ == "__main__":
    main()
