"""Checks the driver that a task names, as its guard sees it: first by looking, then by tiny steps."""

import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from serl_client import clock
from serl_client.errors import RetakeError, RobotFault
from serl_client.spec import Array

from robot_infra.guard.robot import GuardedRobot

from .common import Finding
from .driver import WatchedArm, entry_limits, read_calls
from .probe import Probe
from .readings import judged, slow

WORDS = ("fps", "limits", "home", "servo_hz", "home_speed")  # of a task's env, which its guard takes
PACE = 5.0  # targets per second, at most: its guard holds after three periods of silence, as on a busy machine
LOOK = 0.02  # seconds between two looks
FEWEST = 10  # looks
STEADY = 0.05  # of its range: an arm that holds stays within


def tried(env: Mapping[str, Any], *, move: bool, seconds: float) -> Iterator[tuple[str, Finding]]:
    """(name, what it found) of each check of the driver that this task's env names; then the arm is given back.

    move: once nothing is wrong so far, each joint makes a tiny step. seconds: of looking.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/calls"
        Path(path).touch()
        words = {name: env[name] for name in WORDS if name in env}
        words["fps"] = min(env["fps"], PACE)
        try:
            robot = GuardedRobot(**watched(env, path, env.get("limits") or {}), **words)
        except RetakeError as error:
            yield "open", Finding("FAIL", str(error), _hanging(path))
            return
        try:
            for name, finding in examined(robot, path, env, move=move, seconds=seconds):
                hangs = finding.state == "FAIL" and not robot.guard.is_open and _hanging(path)
                yield name, Finding("FAIL", hangs) if hangs else finding
        finally:
            robot.close()
        if failed := [call.error for call in read_calls(path).calls if call.name == "close" and call.error]:
            yield "close()", Finding("FAIL", failed[0])


def watched(env: Mapping[str, Any], path: str, leash: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return driver, address and options of the same arm under watch; WatchedArm says what path and leash are."""
    at, own = str(env["address"]), env.get("options") or {}
    options = {"driver": env["driver"], "at": at, "options": own, "path": path, "leash": leash}
    options |= {name: own[name] for name in ("kinematics",) if name in own}  # who makes the env asks for them, too
    return {"driver": f"{WatchedArm.__module__}.WatchedArm", "address": f"{at} (watched)", "options": options}


def steadiness(env: Mapping[str, Any], path: str) -> Array:
    """Return by how much each position [J] of this arm may change while it holds."""
    calls = read_calls(path)
    limits = entry_limits(calls.entries, calls.ranges, env.get("limits"))
    return STEADY * (limits.high - limits.low)


def examined(
    robot: Any, path: str, env: Mapping[str, Any], *, move: bool, seconds: float
) -> Iterator[tuple[str, Finding]]:
    """Look at an open arm for a while, and probe it."""
    calls = read_calls(path)
    limits = entry_limits(calls.entries, calls.ranges, env.get("limits"))
    tick, failed = 1 / env.get("servo_hz", 100.0), False
    end, looks = clock.monotonic() + seconds, 0
    while clock.monotonic() < end or looks < FEWEST:
        try:
            robot.observe()
        except RobotFault as fault:
            yield "driver", Finding("FAIL", str(fault))
            return
        clock.sleep(LOOK)
        looks += 1
    for name, finding in judged(read_calls(path), limits, tick):
        failed |= finding.state == "FAIL"
        yield name, finding
    if move and not failed:
        yield from Probe(robot, limits, path).run()
        yield from slow(read_calls(path), "write", tick)


def _hanging(path: str) -> str:
    """Say which method of the driver has not returned, if one has not."""
    calls = read_calls(path).calls
    if not calls or calls[-1].took is not None or calls[-1].error:
        return ""
    return f"{calls[-1].name}() has not returned, so the guard answers nothing: give what it waits for a timeout"
