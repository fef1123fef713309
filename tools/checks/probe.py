"""Moves each joint of an arm by a tiny step through its guard, and names what is wrong with its driver.

The step grows, from a part so small that degrees for radians lead no further than the whole step does.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from serl_client import clock
from serl_client.errors import RobotFault
from serl_client.spec import Array

from robot_infra.guard.limits import Limits

from .common import Finding
from .driver import LEASH, probe_sizes, read_calls

PARTS = (1 / 96, 1 / 8, 1.0)  # of the step
FINE = 1 / 1024  # the first part where the unit is metres, as millimetres are a thousand times as many
LOOK = 0.02  # seconds between two looks
SETTLING = 0.4  # seconds after a target was reached, until the arm stands
LAST = 5  # looks, whose mean is where it stands
ALMOST = 0.1  # of a step: it ended there
TRIES = 10  # targets, at most, until the limits let it come to where it should
CLEAR = 6.0  # times the noise: less is no motion
LEAST = 0.004  # of a step: the same
EXCESS = 0.1  # of a step: an entry that moved so much more than told is wrong already
GOOD = (0.7, 1.4)  # moved for told
FAR = 0.5  # moved for told: less is no motion of another joint, but shaking
UNITS = {**dict.fromkeys(("rad", "deg", "%"), (57.3, "degrees", "radians")), "m": (1000.0, "millimetres", "metres")}
WRONG_UNIT = "its unit is wrong"
NEAR = 1.5  # a factor that is as near to that of a unit is the unit
LATE = 0.25  # seconds


@dataclass(frozen=True, slots=True)
class Answer:
    """What the arm did when entry `i` was told to move by `told`: all entries moved by `moved`, [J].

    sizes, noise: whole steps, and what the readings differ while it stands, [J]. lag: seconds until it followed.
    is_stuck: all readings of the entry were the same, while those of others differ.
    """

    i: int
    told: float
    moved: Array
    sizes: Array
    noise: Array
    lag: float = 0.0
    is_stuck: bool = False

    @property
    def is_clear(self) -> Array:
        """Return whether each entry has moved, [J]."""
        return np.abs(self.moved) > np.maximum(CLEAR * self.noise, LEAST * self.sizes)

    def other(self, limits: Limits) -> int | None:
        """Return the entry that moved in its place, if one did."""
        units = np.array([*limits.entries.values()])
        most = np.where(units == units[self.i], abs(self.told), abs(self.told) / self.sizes[self.i] * self.sizes)
        parts = np.abs(self.moved) / most * self.is_clear  # moved for told
        own, parts[self.i] = parts[self.i], 0.0
        j = int(np.argmax(parts))
        return j if parts[j] > FAR and parts[j] > 2 * own else None

    def is_enough(self, limits: Limits) -> bool:
        """Return whether something is so wrong that a larger step is not needed."""
        parts, told = np.abs(self.moved) / self.sizes * self.is_clear, abs(self.told) / self.sizes[self.i]
        if (j := self.other(limits)) is not None:
            return bool(parts[j] > EXCESS)
        factor = self.moved[self.i] / self.told
        return bool(parts[self.i] - told * (factor > 0) > EXCESS and not 0 < factor < GOOD[1])


def verdict(answer: Answer, limits: Limits) -> Finding:
    """What an entry's answer to its step says of the driver."""
    i = answer.i
    name, unit = [*limits.entries.items()][i]
    if (j := answer.other(limits)) is not None:
        text = f"{name} was told to move, and {[*limits.entries][j]} moved: the order of entries is wrong"
        return Finding("FAIL", text, "read() and write() need the order of `entries`")
    if not answer.is_clear[i]:
        return _still(answer, limits)
    factor = float(answer.moved[i] / answer.told)
    size = abs(factor)
    text = f"{name} moved by {answer.moved[i]:.2g} {unit} when it was told {answer.told:.2g}"
    way = ", and the other way: its sign is wrong" if factor < 0 else ""
    if unit in UNITS:
        ratio, small, large = UNITS[unit]
        for many, sent, meant in ((ratio, small, large), (1 / ratio, large, small)):
            if 1 / NEAR < size / many < NEAR:
                cause = f"write() sends {sent} where {meant} are meant"
                cause += f", or read() returns {sent} (the driver says {unit})" * (many > 1)
                return Finding("FAIL", f"{text}, {size:.3g} times as much: {WRONG_UNIT}, {cause}{way}")
    if factor < 0:
        return Finding("FAIL", f"{text}: it moved the other way, so its sign is wrong",
                       "turn the sign in write(), or in read()")  # fmt: skip
    if not GOOD[0] < factor < GOOD[1]:
        state = "WARN" if FAR < factor < GOOD[0] else "FAIL"
        return Finding(state, f"{text}, {factor:.2g} times as much: its scale is wrong, in write() or in read()",
                       "if both are right, friction, gravity or a weak gain keeps it away")  # fmt: skip
    text += f", {answer.lag * 1e3:.0f} ms later"
    return Finding("WARN" if answer.lag > LATE else "ok", text, "what makes it late?" if answer.lag > LATE else "")


def _still(answer: Answer, limits: Limits) -> Finding:
    """What it means that nothing was measured of a step."""
    i = answer.i
    name, unit = [*limits.entries.items()][i]
    text = f"{name} was told to move by {answer.told:.2g} {unit}, and nothing was measured"
    if answer.is_stuck:
        return Finding("FAIL", f"{text}: its sensor is stuck, as each reading of it is the same to the last bit",
                       "look at what read() takes for it, then at its cable")  # fmt: skip
    may_rest = limits.tracking[i] >= limits.high[i] - limits.low[i]  # a gripper that holds something
    return Finding("WARN" if may_rest else "FAIL", f"{text}: write() does not reach it, or its motor is off",
                   "does write() send it? does enable() switch it on?")  # fmt: skip


def _ended(name: str, fault: RobotFault) -> Finding:
    """What it means that another fault ended the step of an entry."""
    busy = "if this machine is busy, close other programs, and check again"
    return Finding("FAIL", f"{name}: {fault}", busy if fault.kind == "guard" else "")


class Probe:
    """Tells each joint of an arm that stands to make one tiny step, and to come back.

    robot: a GuardedRobot whose actions are positions. path: of the calls of its driver until now, while it stood.
    """

    def __init__(self, robot: Any, limits: Limits, path: str) -> None:
        self._robot, self._limits, self._path, self._sizes = robot, limits, path, probe_sizes(limits)
        readings = read_calls(path).readings
        readings = readings[np.isfinite(readings).all(axis=1)]
        self._noise, self._stood = np.std(readings, axis=0), np.median(readings, axis=0)
        self._first, self._never = readings[-1], np.ptp(readings, axis=0) == 0  # entries whose readings never differed
        self._has_noise = not self._never.all()
        self._seen: list[tuple[float, Array]] = []  # time and positions [J], since the newest step began

    def run(self) -> Iterator[tuple[str, Finding]]:
        """(name, what it found) of the whole arm and of each joint; then the arm is told to hold."""
        try:
            self._robot.recover()
            self._wait(3 * SETTLING)
        except RobotFault as fault:
            yield "ready", self._thrown() if fault.kind == LEASH else Finding("FAIL", str(fault))
            return
        self._noise = np.maximum(self._noise, np.std([at for _, at in self._seen[-4 * LAST :]], axis=0))
        moved = np.abs(self._stands - self._stood)
        i = int(np.argmax(moved / self._sizes))
        name, unit = [*self._limits.entries.items()][i]
        yield "ready", Finding("ok", f"it holds where it stands; {name} moved most, by {moved[i]:.2g} {unit}")
        answers = []
        for i, name in enumerate(self._limits.entries):
            try:
                answers.append(self._patiently_asked(i))
            except RobotFault as fault:
                yield "probe", self._cut(i, fault) if fault.kind == LEASH else _ended(name, fault)
                return
            yield "probe", (found := verdict(answers[-1], self._limits))
            if WRONG_UNIT in found.text:  # so may that of the next one be, and each step is a risk
                return
        if not any(answer.is_clear.any() for answer in answers):
            advice = "does write() send anything? does enable() switch the motors on? does read() ask the arm anew?"
            text = "no joint moved at all: write() does nothing, or all motors are off"
            yield "write()", Finding("FAIL", text, advice)
        self._robot.stop()

    def _patiently_asked(self, i: int) -> Answer:
        """Ask once more if a busy machine kept the guard waiting for a sign of life."""
        try:
            return self._asked(i)
        except RobotFault as fault:
            if fault.kind != "guard" or not self._robot.guard.is_open:
                raise
        self._robot.recover()
        self._wait(SETTLING)
        return self._asked(i)

    def _asked(self, i: int) -> Answer:
        """Return how entry `i` answers to the smallest step that says enough, after it has come back."""
        base, start = np.array(self._robot.guard.latest.target), self._stands
        way = 1.0 if base[i] < (self._limits.low[i] + self._limits.high[i]) / 2 else -1.0
        fine = (FINE,) if [*self._limits.entries.values()][i] == "m" else ()
        for part in (*fine, *PARTS):
            before = self._stands
            self._told = way * part * self._sizes[i]
            lag = self._lead(base + self._told * (np.arange(len(base)) == i), before, i)
            told = float(self._robot.guard.latest.target[i] - base[i])
            if not told:
                advice = "move the arm by hand, away from its ends, and its tool into its box, if it has one"
                raise RobotFault(f"the limits allow no step here: {advice}", "limit")
            is_stuck = bool(self._never[i] and self._has_noise)
            answer = Answer(i, told, self._stands - start, self._sizes, self._noise, lag, is_stuck)
            if part == PARTS[-1] or answer.is_enough(self._limits):
                self._lead(base, start, i)
                return answer
        raise AssertionError("the last part is enough")

    def _lead(self, wanted: Array, before: Array, i: int) -> float:
        """Tell the arm to go there, [J], and wait until it stands; return the seconds that entry `i` was late."""
        robot, period = self._robot, 1 / self._robot.fps
        self._seen = []
        begin, near = clock.monotonic(), ALMOST * abs(wanted[i] - robot.guard.latest.target[i])
        count, is_there = 0, False
        while count < TRIES and not is_there:
            robot.command(np.clip(wanted, robot.action.low, robot.action.high).astype(robot.action.dtype))
            self._wait(period + 2 * LOOK)
            robot.stop()  # so that the guard does not miss us while a busy machine keeps us waiting
            count, is_there = count + 1, abs(robot.guard.latest.target[i] - wanted[i]) <= near
        self._wait(SETTLING)
        way = np.array([at[i] - before[i] for _, at in self._seen])
        passed = np.abs(way) > np.abs(self._stands[i] - before[i]) / 2
        return max(0.0, self._seen[int(np.argmax(passed))][0] - begin - count * period / 2)

    def _wait(self, seconds: float) -> None:
        """Look at the arm for a while. Raises RobotFault if it holds because of one."""
        end = clock.monotonic() + seconds
        while clock.monotonic() < end:
            clock.sleep(LOOK)
            self._robot.observe()
            latest = self._robot.guard.latest
            self._seen.append((latest.time, np.array(latest.measured)))
            self._never &= self._seen[-1][1] == self._first

    @property
    def _stands(self) -> Array:
        """Return where the arm stands, [J]."""
        return np.mean([at for _, at in self._seen[-LAST:]], axis=0)

    def _cut(self, i: int, fault: RobotFault) -> Finding:
        """What it means that an entry moved further than it was told, so that no more set points were sent."""
        moved = np.abs(read_calls(self._path).readings[-1] - self._stood) / self._sizes
        name, other = [*self._limits.entries][i], [*self._limits.entries][int(np.argmax(moved))]
        cause = "its unit, scale or sign is wrong" if other == name else "the order of entries or its unit is wrong"
        text = f"{name} was told to move by {self._told:.2g}, and {fault}; {cause}, in write() or read()"
        return Finding("FAIL", text, "press the emergency stop if it still moves")

    def _thrown(self) -> Finding:
        """What it means that the arm moved when its motors were to hold it where it stands."""
        calls, stood = read_calls(self._path), self._stood
        at, point = calls.readings[-1], [call.given for call in calls.calls if call.given][-1]
        names, units = [*self._limits.entries], [*self._limits.entries.values()]
        moved = np.flatnonzero(np.abs(at - stood) > np.maximum(CLEAR * self._noise, self._sizes / 5))
        away = [(at[i] > point[i]) == (point[i] > 0) for i in moved]
        if all(away):
            cause = "a unit that is too large (degrees for radians), or a scale"
        else:
            cause = "another sign, or a unit or scale that is too small"
        if len(moved) > 1 and not all(away):
            cause += f"; or {' and '.join(names[i] for i in moved)} are in another order"
        shown = ", ".join(f"{names[i]} went from {stood[i]:.3g} to {at[i]:.3g} {units[i]}" for i in moved)
        text = f"told to hold where it stands, {shown}; no more set points are sent. What write() sends is not what " \
            f"read() returns: {cause}"  # fmt: skip
        return Finding("FAIL", text, "press the emergency stop if it still moves; try again with its joints near zero")
