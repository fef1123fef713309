"""Limits how far and fast each joint of a real arm may move, and its tool: range, speed, jump, tracking."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from serl_client.errors import ConfigError, RobotFault
from serl_client.spec import Array

from robot_infra.drivers.arm import UNITS

KEYS = ("range", "speed", "jump", "tracking")  # of an entry
TOOL, AXES = "tool", ("x", "y", "z")
SHOWN = {
    "rad": (180 / math.pi, "°"), "m": (1000.0, " mm"), "deg": (1.0, "°"), "%": (1.0, " %"), "": (1.0, ""),
}  # fmt: skip  # unit: factor and unit for a person
USUAL = {  # speed, jump, tracking to begin with
    "rad": (0.5, 0.1, 0.2), "m": (0.1, 0.02, 0.03), "deg": (60.0, 10.0, 20.0), "%": (60.0, 10.0, 20.0),
    "": (0.5, 0.1, 0.2),
}  # fmt: skip
LARGEST = 1e30  # of what can be a position: in float32, as which it is recorded, it is still finite
HALVES = 6  # of a step, until the largest part is found that keeps the tool within its limits


def squares_outside(points: Array, box: Array) -> Array:
    """Return the square of how far each point [..., 3] lies outside of its box [..., 2, 3], metres; 0 inside."""
    distance = np.maximum(box[..., 0, :] - points, 0) + np.maximum(points - box[..., 1, :], 0)
    return (distance * distance).sum(-1)


def largest_part(start: Array, end: Array, is_allowed: Callable[[Array], bool]) -> Array:
    """Return the positions [J] farthest from `start` on the way to `end` that `is_allowed` accepts; else `start`."""
    if is_allowed(end):
        return end
    good, bad = 0.0, 1.0
    for _ in range(HALVES):
        middle = (good + bad) / 2
        good, bad = (middle, bad) if is_allowed(start + middle * (end - start)) else (good, middle)
    return start + good * (end - start) if good else start


def are_positions(measured: Array, count: int) -> bool:
    """Return whether these are `count` finite positions."""
    return measured.shape == (count,) and bool((np.abs(measured) < LARGEST).all())


@dataclass(frozen=True, slots=True, eq=False)
class Limits:
    """Holds the limits of each entry, [J] in its unit, and of each of the K tools, if the arm knows where they are.

    low, high: of targets. speed: per second. jump: between two targets. tracking: between set point and measurement.
    tools: their names. box: [K, 2, 3] metres, low and high of each. tool_speed: [K] metres per second.
    """

    entries: Mapping[str, str]
    low: Array
    high: Array
    speed: Array
    jump: Array
    tracking: Array
    tools: Sequence[str] = ()
    box: Array | None = None
    tool_speed: Array = field(default_factory=lambda: np.empty(0))

    def shown(self, i: int, *positions: Array) -> str:
        """Say where entry `i` was measured, at each of these positions [J]."""
        return f"{[*self.entries][i]} is measured at {' and '.join(self._value(i, each) for each in positions)}"

    def outside(self, i: int, measured: Array) -> str:
        """Say that entry `i` of these positions [J] is not in its range."""
        return f"{self.shown(i, measured)}, and its range is {self._value(i, self.low)} to {self._value(i, self.high)}"

    def _value(self, i: int, positions: Array) -> str:
        """Return entry `i` of these positions [J], in its unit for a person."""
        factor, suffix = SHOWN[[*self.entries.values()][i]]
        return f"{positions[i] * factor:.4g}{suffix}"

    def described(self) -> list[str]:
        """Return a line for each entry and for the tool, in degrees or millimetres."""
        lines = []
        for i, name in enumerate(self.entries):
            limits = self.low, self.high, self.speed, self.jump, self.tracking
            low, high, speed, jump, tracking = (self._value(i, each) for each in limits)
            lines.append(f"{name}: {low} to {high}, {speed}/s, {jump} from target to target, {tracking} off its way")
        if self.box is not None:
            for name, (low, high), speed in zip(self.tools, 1000 * self.box, 1000 * self.tool_speed, strict=True):
                box = ", ".join(f"{axis} {low[i]:.4g} to {high[i]:.4g} mm" for i, axis in enumerate(AXES))
                lines.append(f"{name}: {box}, {speed:.4g} mm/s")
        return lines


def read_limits(
    entries: Mapping[str, str], written: Mapping[str, Any] | None, *, has_tool: bool,
    ranges: Mapping[str, Sequence[float]] | None = None, tools: Sequence[str] = (TOOL,),
) -> Limits:  # fmt: skip
    """Return the limits that a task's yaml writes for an arm with these entries ({name: unit}).

    has_tool: the arm knows where its `tools` are; then they have limits, too. ranges: those that the arm knows itself,
    {entry: [low, high]}; the yaml need not repeat them. Raises ConfigError for whatever is missing or no limit, with
    the yaml to write: nothing is unlimited.
    """
    if not entries or set(entries.values()) - set(UNITS) or entries.keys() & set(tools):
        raise ConfigError(
            f"an arm's entries should be {{name: unit}}, with {', '.join(map(repr, UNITS))} as units, not "
            f"{dict(entries)}"
        )
    ranges = ranges or {}
    tools = tools if has_tool else ()
    wanted = [*entries, *tools]
    written = {str(name): limit for name, limit in (written or {}).items()}
    if missing := [name for name in wanted if name not in written]:
        raise ConfigError(
            f"no limits for {', '.join(missing)}, so nothing may move: write in the task's yaml, under env, "
            f"`{template(entries, has_tool=has_tool, own=ranges, tools=tools)}`; tools/check_robot.py task=... "
            "--limits measures the ranges"
        )
    if unknown := [name for name in written if name not in wanted]:
        raise ConfigError(f"limits: this arm has no {', '.join(unknown)}; use its own names, {', '.join(wanted)}")
    rows = [_entry(name, written[name], ranges.get(name)) for name in entries]
    low, high, speed, jump, tracking = np.array(rows, float).T
    if not has_tool:
        return Limits(dict(entries), low, high, speed, jump, tracking)
    read = {name: _checked(name, written[name], (*AXES, "speed")) for name in tools}
    box = np.array([[_pair(f"{name}.{axis}", tool[axis]) for axis in AXES] for name, tool in read.items()]).mT
    tool_speed = np.array([_positive(f"{name}.speed", tool["speed"]) for name, tool in read.items()])
    return Limits(dict(entries), low, high, speed, jump, tracking, tuple(tools), box, tool_speed)


def template(
    entries: Mapping[str, str], ranges: Sequence[Sequence[float]] = (), box: Sequence[Sequence[float]] = (), *,
    has_tool: bool, own: Mapping[str, Sequence[float]] | None = None, tools: Sequence[str] = (TOOL,),
) -> str:  # fmt: skip
    """Return the limits to write, in one line of yaml.

    ranges, box: [low, high] of each entry, and of each axis of each tool. own: those that the arm knows itself.
    Numbers that are not given are left to the owner.
    """
    parts = []
    for i, (name, unit) in enumerate(entries.items()):
        low, high = ranges[i] if ranges else [f"{end:.4g}" for end in (own or {}).get(name, ())] or ("LOW", "HIGH")
        speed, jump, tracking = USUAL[unit]
        parts.append(f"{name}: {{range: [{low}, {high}], speed: {speed}, jump: {jump}, tracking: {tracking}}}")
    for i, name in enumerate(tools if has_tool else ()):
        ends = box[3 * i : 3 * i + 3] or [("LOW", "HIGH")] * 3
        bounds = [f"{axis}: [{low}, {high}]" for axis, (low, high) in zip(AXES, ends, strict=True)]
        parts.append(f"{name}: {{{', '.join(bounds)}, speed: 0.25}}")
    return f"limits: {{{', '.join(parts)}}}"


def read_home(limits: Limits, written: Mapping[str, Any] | None) -> Array:
    """Return the positions [J] where episodes start. Raises ConfigError unless each entry has one within its range."""
    names = [*limits.entries]
    if not isinstance(written, Mapping) or set(map(str, written)) != set(names):
        pose = ", ".join(
            f"{name}: {middle:.4g}" for name, middle in zip(names, (limits.low + limits.high) / 2, strict=True)
        )
        raise ConfigError(f"home: say where episodes start, as in `home: {{{pose}}}`, not {written}")
    home = np.array([_number(f"home.{name}", written[name]) for name in names])
    if ((home < limits.low) | (home > limits.high)).any():
        raise ConfigError(f"home: {dict(written)} should lie within the ranges of limits")
    return home


def read_waypoints(limits: Limits, written: Mapping[str, Any]) -> Array:
    """Return the ends [n, 2, J] between which the n poses of `written`, {name: {entry: position or [low, high]}}, are
    drawn; NaN: that entry stays as it is. Raises ConfigError for an unknown entry, or one outside of its range."""
    names, ends = [*limits.entries], np.full((len(written), 2, len(limits.entries)), np.nan)
    for pose, (title, said) in zip(ends, written.items(), strict=True):
        if not isinstance(said, Mapping) or not said or set(map(str, said)) - set(names):
            raise ConfigError(
                f"waypoints.{title}: say where entries of the arm go, as in `{{{names[0]}: "
                f"{(limits.low + limits.high)[0] / 2:.4g}}}`, not {said}; it has {', '.join(names)}"
            )
        for entry, position in said.items():
            place = f"waypoints.{title}.{entry}"
            is_drawn = isinstance(position, Sequence) and not isinstance(position, str)
            pose[:, names.index(str(entry))] = _pair(place, position) if is_drawn else _number(place, position)
        if ((pose < limits.low) | (pose > limits.high)).any():
            raise ConfigError(f"waypoints.{title}: {dict(said)} should lie within the ranges of limits")
    return ends


def _entry(name: str, written: Any, own_range: Sequence[float] | None) -> tuple[float, ...]:
    if own_range is not None and isinstance(written, Mapping):
        written = {"range": list(own_range), **written}
    limit = _checked(name, written, KEYS)
    return (*_pair(f"{name}.range", limit["range"]), *(_positive(f"{name}.{key}", limit[key]) for key in KEYS[1:]))


def _checked(name: str, written: Any, keys: Sequence[str]) -> Mapping[str, Any]:
    if not isinstance(written, Mapping) or set(written) != set(keys):
        raise ConfigError(f"limits.{name}: should have {', '.join(keys)}, and nothing else; not {written}")
    return written


def _pair(name: str, written: Any) -> tuple[float, float]:
    if not isinstance(written, Sequence) or len(written) != 2:
        raise ConfigError(f"limits.{name}: should be [low, high], not {written}")
    low, high = (_number(name, each) for each in written)
    if not low < high:
        raise ConfigError(f"limits.{name}: {low:g} should lie below {high:g}")
    return low, high


def _positive(name: str, written: Any) -> float:
    if (number := _number(name, written)) <= 0:
        raise ConfigError(f"limits.{name}: should be above 0, not {written}")
    return number


def _number(name: str, written: Any) -> float:
    if isinstance(written, bool) or not isinstance(written, int | float) or not math.isfinite(written):
        raise ConfigError(f"limits.{name}: should be a finite number, not {written}")
    return float(written)


class Limiter:
    """Shortens steps until they keep the limits.

    tool: where the tools are at positions [J], as [3] or [K, 3] metres; it is called only if the limits have a box.
    """

    def __init__(self, limits: Limits, tool: Callable[[Array], Array | None]) -> None:
        self.limits, self._tool = limits, tool

    def begin(self, stands: Array, seconds: float) -> Array:
        """Return the first set point [J] for an arm that stands, or is held, at these positions [J].

        seconds: an entry may lie outside of its range as far as it may move in this time; it begins at the range's end.
        Raises RobotFault, which names the first entry that lies further outside.
        """
        limits = self.limits
        start = np.clip(stands, limits.low, limits.high)
        outside = ~(np.abs(stands - start) <= limits.speed * seconds)  # also true of what is not finite
        if outside.any():
            raise RobotFault(
                f"{limits.outside(int(np.argmax(outside)), stands)}, so no set point is sent. Switch the motors off, "
                "move the arm into its range by hand, then say ready. If it is within already, the driver's unit is "
                "wrong, or its calibration, or limits.range of the task's yaml", "range",
            )  # fmt: skip
        return start

    def step(self, start: Array, wanted: Array, seconds: float, most: Array | float = math.inf) -> Array:
        """Return the positions [J] on the way from `start` to `wanted`, both [J], that may be reached in `seconds`.

        start: within the ranges, as all that comes from here is. most: what an entry may change besides, [J]. From
        outside of a tool's box every step leads back or rests.
        """
        limits = self.limits
        reach = np.minimum(limits.speed * seconds, most)
        allowed = np.clip(np.clip(wanted, limits.low, limits.high), start - reach, start + reach)
        if limits.box is None or (allowed == start).all():
            return allowed
        return largest_part(start, allowed, lambda end: self._keeps(start, end, seconds))

    def _keeps(self, start: Array, end: Array, seconds: float) -> bool:
        """Return whether this step keeps each tool's speed, and its box as well as the step's start does."""
        box = self.limits.box
        here, there = (np.array(self._tool(each), float, ndmin=2) for each in (start, end))
        if box is None or here.shape != box[:, 0].shape or not (np.isfinite(here).all() and np.isfinite(there).all()):
            return False
        step = there - here
        if ((step * step).sum(-1) > (self.limits.tool_speed * seconds) ** 2).any():
            return False
        return bool((squares_outside(there, box) <= squares_outside(here, box)).all())
