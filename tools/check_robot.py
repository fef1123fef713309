#!/usr/bin/env python
"""Tries whether a robot does what Retake needs of one: a line for each check.

tools/check_robot.py task=NAME [name=value ...]            a simulation is tried; a real arm is only looked at
tools/check_robot.py task=NAME --move                      each joint takes a tiny step; then it goes home and holds
tools/check_robot.py task=NAME --limits [--seconds 60]     move the arm by hand: prints limits and home for its yaml

A person's devices and, on the real clock, each camera are watched for --seconds: move each device meanwhile.
With --limits nothing is sent to the arm: switch its motors off or its hand guiding on, move each joint to both of its
ends, and leave the arm where episodes start. It reads `driver`, `address` and `options` of the task's env.
"""

import argparse
import json
import logging
import select
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import DictConfig, OmegaConf
from serl_client.errors import ConfigError, RetakeError

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from robot_infra.drivers.owner import open_arm
from robot_infra.guard.guard import read
from robot_infra.guard.limits import USUAL, template
from serl_launcher.config import composed, factory
from tools.checks import arm as driver
from tools.checks.common import CONFIG, Finding
from tools.checks.conformance import tried

PAUSE = 0.02  # seconds between two readings
MOVED = 0.2  # of the usual jump: an entry that moved less by hand was not moved


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="+", help="task=... and other words of a run")
    parser.add_argument("--move", action="store_true", help="a real arm may move: keep its emergency stop at hand")
    parser.add_argument("--limits", action="store_true", help="measure ranges while somebody moves the arm by hand")
    parser.add_argument("--seconds", type=float, default=3.0, help="to measure the rate, or the ranges, for (3)")
    parser.add_argument("--json", action="store_true", help="print one object, too, as the last line")
    options = parser.parse_intermixed_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        config = composed(CONFIG, ["actor=true", *options.words])
        result = limits(config, options.seconds) if options.limits else checks(config, options.move, options.seconds)
    except RetakeError as error:
        sys.exit(f"error: {error}")
    if options.json:
        print(json.dumps({"task": config.task.name, **result}))
    sys.exit(1 if result.get("failed") else 0)


def checks(config: DictConfig, move: bool, seconds: float) -> dict[str, Any]:
    """Try the robot of this config; print a line for each check."""
    found = []
    for name, finding in findings(config, move, seconds):
        found.append({"check": name, "state": finding.state, "text": finding.text})
        advice = f". {finding.advice[0].upper()}{finding.advice[1:]}" if finding.advice else ""
        print(f"{finding.state:4} {name}: {finding.text}{advice}", flush=True)
    return {"failed": sum(one["state"] == "FAIL" for one in found), "checks": found}


def findings(config: DictConfig, move: bool, seconds: float) -> Iterator[tuple[str, Finding]]:
    """(name, what it found) of each check: of the driver, if the task names one, and of the whole robot."""
    env: Any = OmegaConf.to_container(config.task.env, resolve=True)
    if "driver" not in env:
        yield from tried(factory(config, "task.env")(), move=move, seconds=seconds)
        return
    failed = False
    for name, finding in driver.tried(env, move=move, seconds=seconds):
        failed |= finding.state == "FAIL"
        yield name, finding
    if failed:
        return
    with tempfile.TemporaryDirectory() as folder:
        config, path = config.copy(), f"{folder}/calls"
        for name, word in driver.watched(env, path).items():
            OmegaConf.update(config, f"task.env.{name}", word, merge=False, force_add=True)  # a yaml may say no options
        made = factory(config, "task.env")()
        yield from tried(made, move=move, seconds=seconds, most=driver.steadiness(env, path))


def limits(config: DictConfig, seconds: float) -> dict[str, Any]:
    """Measure until so many seconds have passed, or somebody presses Enter; print the yaml."""
    env: Any = OmegaConf.to_container(config.task.env, resolve=True)
    if "driver" not in env or "address" not in env:
        raise ConfigError(f"task={config.task.name} names no driver and address; it needs both: docs/guides/robots.md")
    print(f"move each joint to both of its ends, then leave the arm where episodes start: {seconds:g} s, or Enter")
    with tempfile.TemporaryDirectory() as folder, open_arm(**driver.watched(env, f"{folder}/calls")) as arm:
        measured, tools, end = [], [], time.monotonic() + seconds
        while not measured or (time.monotonic() < end and not _entered()):
            measured.append(read(arm))
            tools.append(arm.tool(measured[-1]))
            time.sleep(PAUSE)
        has_tool = tools[0] is not None
        entries, ranges, own = arm.entries, dict(zip(arm.entries, _ends(measured), strict=True)), arm.ranges
        box = _ends(np.reshape(tools, (len(tools), -1))) if has_tool else ()
        for name, (low, high) in list(ranges.items()):
            if high - low < MOVED * USUAL[entries[name]][1]:
                del ranges[name]
                print(f"WARN {name} never moved: its range is missing" + " here, the arm knows it" * (name in own))
        ends: list[Any] = [ranges.get(name, own.get(name, ("LOW", "HIGH"))) for name in entries]
        line = template(entries, ends, box, has_tool=has_tool, tools=arm.tools)
    pose = ", ".join(f"{name}: {position:.4g}" for name, position in zip(entries, measured[-1], strict=True))
    print(f"  {line}\n  home: {{{pose}}}")
    return {"readings": len(measured), "ranges": ranges}


def _ends(positions: Any) -> list[list[float]]:
    """Return [least, largest] of each entry of these positions, [N, J]."""
    return np.stack([np.min(positions, axis=0), np.max(positions, axis=0)], axis=1).round(4).tolist()


def _entered() -> bool:
    """Return whether somebody has pressed Enter in this terminal."""
    return sys.stdin.isatty() and bool(select.select([sys.stdin], [], [], 0)[0])


if __name__ == "__main__":
    main()
