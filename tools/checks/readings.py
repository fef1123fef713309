"""What is wrong with a driver that is only looked at: units, ranges, slow calls, noise, numbers that are none."""

import math
from collections.abc import Iterator, Sequence

import numpy as np
from serl_client.spec import Array

from robot_infra.guard.limits import Limits

from .common import Finding
from .driver import Calls

SLOW = (0.5, 2.0)  # of the time of a set point: a call that takes as long is a warning, or fails
TURN = 2 * math.pi
LOOKS_LIKE = {  # unit: what its values may be instead, their factor, and the largest sensible value in the unit
    "rad": (("degrees", math.pi / 180), TURN), "deg": (("radians", 180 / math.pi), math.inf),
    "m": (("millimetres", 1e-3), 3.0), "%": (("radians", 180 / math.pi), math.inf),
}  # fmt: skip
JUMPS = 0.02  # of an entry's range, between two readings of an arm that stands
WIDE = 30.0  # degrees or percent: all entries of such ranges would hardly be within pi of zero


def judged(calls: Calls, limits: Limits, tick: float) -> Iterator[tuple[str, Finding]]:
    """(name, finding) of what `read` has told. tick: seconds of a set point."""
    readings = calls.readings
    finite = readings[np.isfinite(readings).all(axis=1)]
    for i, name in enumerate(limits.entries):
        if bad := int((~np.isfinite(readings[:, i])).sum()):
            text = f"{name} was no finite number in {bad} of {len(readings)} readings"
            yield "reading", Finding("FAIL", text, "read() should raise RobotFault where a sensor or its bus failed")
    if len(finite):
        middle = np.median(finite, axis=0)
        for i in range(len(middle)):
            yield "position", placed(limits, i, middle[i])
        yield from unlikely(limits, middle)
        yield from noisy(limits, finite)
    yield from slow(calls, "read", tick)


def placed(limits: Limits, i: int, at: float) -> Finding:
    """Where entry `i` is, against its range, and what its unit may be instead."""
    (name, unit), low, high = [*limits.entries.items()][i], limits.low[i], limits.high[i]
    text = f"{name}: {at:.4g} {unit}".rstrip()
    if low - limits.tracking[i] <= at <= high + limits.tracking[i]:
        edge = "" if low <= at <= high else ", just outside of it: no set point is sent until it is moved inside"
        return Finding("WARN" if edge else "ok", f"{text}, range {low:.4g} to {high:.4g}{edge}")
    text += f" is outside of its range {low:.4g} to {high:.4g}"
    advice = "move it inside by hand; if it is, the unit, the zero or the range in the yaml is wrong"
    if unit in LOOKS_LIKE:
        (other, factor), most = LOOKS_LIKE[unit]
        if low <= at * factor <= high or (most < abs(at) and abs(at * factor) <= most):
            return Finding("FAIL", f"{text}; these look like {other}: the driver says {unit}", "convert them in read()")
        if abs(at) > most * 180 / math.pi:
            return Finding("FAIL", f"{text}; these look like counts of an encoder: the driver says {unit}", advice)
    return Finding("FAIL", text, advice)


def unlikely(limits: Limits, at: Array) -> Iterator[tuple[str, Finding]]:
    """Small values within ranges that are wide: they may be radians all the same."""
    wide = [i for i, unit in enumerate(limits.entries.values())
            if unit in ("deg", "%") and limits.high[i] - limits.low[i] > WIDE]  # fmt: skip
    if len(wide) > 2 and (np.abs(at[wide]) <= TURN / 2).all() and (at[wide] != 0).any():
        units = "degrees" if [*limits.entries.values()][wide[0]] == "deg" else "percent"
        text = f"all of {len(wide)} entries in {units} are within {TURN / 2:.1f} of zero: they may be radians"
        yield "position", Finding("WARN", text, "move one by hand, and look whether it changes as it should")


def noisy(limits: Limits, readings: Array) -> Iterator[tuple[str, Finding]]:
    """Entries that jump while the arm stands, and those that never change while others do."""
    jumps = np.abs(np.diff(readings, axis=0)).max(axis=0, initial=0.0)
    still = np.ptp(readings, axis=0) == 0
    for i, (name, unit) in enumerate(limits.entries.items()):
        if jumps[i] > JUMPS * (limits.high[i] - limits.low[i]):
            state = "FAIL" if jumps[i] > limits.tracking[i] else "WARN"
            text = f"{name} jumps by up to {jumps[i]:.3g} {unit} from one reading to the next"
            yield "reading", Finding(state, text, "does it stand? look at its cable, and at how read() joins its bytes")
    if still.any() and not still.all():
        names = ", ".join(name for name, is_still in zip(limits.entries, still, strict=True) if is_still)
        text = f"{names}: each of {len(readings)} readings is the same to the last bit, and others vary"
        yield "reading", Finding("WARN", text, "move it by hand: if its number stays, its sensor is stuck, or not read")


def slow(calls: Calls, name: str, tick: float) -> Iterator[tuple[str, Finding]]:
    """How long a method takes, against the time of a set point."""
    took: Sequence[float] | Array = calls.took(name)
    if not len(took):
        return
    middle = float(np.median(took))
    text = f"{name}() takes {middle * 1e3:.3g} ms, at worst {max(took) * 1e3:.3g}"
    text += f"; {tick * 1e3:.3g} ms are between set points"
    state = "FAIL" if middle > SLOW[1] * tick else "WARN" if middle > SLOW[0] * tick else "ok"
    cures = {
        "read": "return the newest positions that a thread of the driver has got, or lower servo_hz and fps",
        "write": "send, and do not wait for an answer; or lower servo_hz and fps",
    }
    yield f"{name}()", Finding(state, text, cures[name] if state != "ok" else "")
