"""Watches a driver inside its guard: each call is timed and noted, and what is wrong with it becomes one sentence."""

import faulthandler
import json
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import numpy as np
from serl_client import clock
from serl_client.env import Observation
from serl_client.errors import RetakeError, RobotFault
from serl_client.spec import Array, Feature

from robot_infra.drivers.arm import Arm
from robot_infra.drivers.owner import open_arm
from robot_infra.guard.limits import Limits, are_positions, read_limits

SHARE = 0.03  # of an entry's range: its probe, at most
SPEEDING = 0.2  # seconds at its speed limit: the same
HANGS = {"__init__": 35.0, "recover": 30.0, "enable": 30.0, "close": 10.0}  # seconds; twice, while modules come
GRACE = 5.0  # seconds more, if the constructor hears no signal
HANG = 0.4  # seconds: the same of each other method, as a guard that answers nothing for a second counts as dead
LONGEST = 120  # characters of what a driver returned
LEASH = "leash"  # RobotFault.kind of an arm that moved further than it was told


def entry_limits(entries: Mapping[str, str], ranges: Mapping[str, Any], written: Mapping[str, Any] | None) -> Limits:
    """Return the limits of the entries alone, without those of a tool. Raises ConfigError for what is missing."""
    mine = {name: limit for name, limit in (written or {}).items() if name in entries}
    return read_limits(entries, mine, has_tool=False, ranges=ranges)


def probe_sizes(limits: Limits) -> Array:
    """Return how far the probe moves each entry, [J]: less than its jump, and a few per cent of its range."""
    return np.min([SHARE * (limits.high - limits.low), limits.jump / 2, limits.speed * SPEEDING], axis=0)


def explained(error: BaseException) -> str:
    """Say an error, and the first line outside of this folder that led to it, so that no traceback is needed."""
    here = Path(__file__).parent
    frames = [each for each in traceback.extract_tb(error.__traceback__) if Path(each.filename).parent != here]
    where = f" ({Path(frames[0].filename).name}, line {frames[0].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{where}"


class WatchedArm(Arm):
    """Passes each call on to the driver of a task, and notes it in the file `path`, which `read_calls` reads.

    driver, at, options: driver, address and options of the task's yaml; `address` is another name, which this owns.
    leash: the task's limits. Once an entry was measured further off all set points since `enable` than its probe, no
    more set points are sent. None: there is no leash.
    """

    def __init__(
        self, address: str, *, driver: str, at: str, options: Mapping[str, Any], path: str,
        leash: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self._path = path
        self._stack = ExitStack()
        self._arm = arm = self._called("__init__", lambda: self._stack.enter_context(open_arm(driver, at, options)))
        if not isinstance(getattr(arm, "entries", None), Mapping):
            raise RobotFault(f"{driver} has no `entries`: say {{name: unit}} of its positions", "driver")
        if wrong := [name for name, feature in arm.observation.items() if not isinstance(feature, Feature)]:
            raise RobotFault(f"{driver}: {wrong[0]} of its `observation` is no Feature", "driver")
        self.entries, self.ranges, self.observation, self.tools = arm.entries, arm.ranges, arm.observation, arm.tools
        self.is_simulated = arm.is_simulated
        self._leash = None if leash is None else probe_sizes(entry_limits(arm.entries, arm.ranges, leash))
        self._ends: list[Array] = []  # the least and the largest set points since `enable`
        ranges = {name: [float(end) for end in ends] for name, ends in arm.ranges.items()}
        self._note(made={"entries": dict(arm.entries), "ranges": ranges})

    def read(self) -> Array:
        measured = self._called("read", self._arm.read, self._positions)
        if self._leash is not None and self._ends:
            off = np.maximum(self._ends[0] - measured, measured - self._ends[1]) / self._leash
            if (off > 1).any():
                name = [*self.entries][int(np.argmax(off))]
                raise RobotFault(f"{name} moved further than it was told: no more set points are sent", LEASH)
        return measured

    def write(self, positions: Array) -> Array | None:
        made = self._called("write", lambda: self._arm.write(positions), self._made, given=positions.tolist())
        ends = [*self._ends, positions]
        self._ends = [np.min(ends, axis=0), np.max(ends, axis=0)]
        return made

    def recover(self) -> None:
        self._ends = []
        self._called("recover", self._arm.recover)

    def enable(self) -> Array | None:
        return self._called("enable", self._arm.enable, lambda held: None if held is None else self._positions(held))

    def close(self) -> None:
        self._called("close", self._stack.close)

    def tool(self, positions: Array) -> Array | None:
        return self._called("tool", lambda: self._arm.tool(positions), self._tools)

    def sense(self) -> Observation:
        return self._called("sense", self._arm.sense, self._observed)

    def scene(self, seed: int) -> None:
        self._called("scene", lambda: self._arm.scene(seed))

    def _called(
        self, name: str, call: Callable[[], Any], checked: Callable[[Any], Any] = lambda answer: answer, **noted: Any
    ) -> Any:
        """Return what a method of the driver returns. Raises RobotFault that names it, for whatever is wrong."""
        begin = clock.monotonic()
        self._note(call=name, begin=begin, **noted)
        try:
            with _ended_after(HANGS.get(name, HANG), name):
                answer = call()
            took = clock.monotonic() - begin
        except RetakeError as error:
            self._note(error=str(error))
            raise
        except NotImplementedError:
            self._fail(f"{name}() is not written: docs/guides/robots.md, robot_infra/drivers/arm.py say what it does")
        except Exception as error:  # a driver may raise anything
            cure = "mend that line; or if the arm failed, raise RobotFault there"
            self._fail(f"{name}() raised {explained(error)}: {cure}")
        try:
            answer = checked(answer)
        except Exception as error:
            said = repr(answer)
            self._fail(f"{name}() returned {said[:LONGEST]}{'...' * (len(said) > LONGEST)}: {error}")
        self._note(took=took, answer=answer.tolist() if isinstance(answer, np.ndarray) else None)
        return answer

    def _fail(self, text: str) -> NoReturn:
        self._note(error=text)
        raise RobotFault(text, "driver") from None

    def _note(self, **what: Any) -> None:
        with open(self._path, "a") as file:
            file.write(json.dumps(what) + "\n")

    # -- what each method may return

    def _positions(self, answer: Any) -> Array:
        wanted = f"return {len(self.entries)} numbers, one for each of {', '.join(self.entries)}"
        try:
            positions = np.array(answer, float)
        except (TypeError, ValueError):
            raise ValueError(wanted) from None
        if positions.shape != (len(self.entries),):
            raise ValueError(wanted)
        return positions

    def _made(self, answer: Any) -> Array | None:
        made = None if answer is None else np.array(answer, float)
        if made is not None and not are_positions(made, len(self.entries)):
            raise ValueError("return None, or the positions, one for each entry, that the controller made of it")
        return made

    def _tools(self, answer: Any) -> Array | None:
        if answer is None:
            return None
        where = np.array(answer, float)
        if where.size != 3 * len(self.tools):
            raise ValueError(f"return 3 numbers, metres, for each of {', '.join(self.tools)}, or None")
        return where

    def _observed(self, answer: Any) -> Observation:
        for name, feature in self.observation.items():
            if name not in answer:
                raise ValueError(f"{name} is missing, which `observation` names")
            feature.check(name, answer[name])
        return answer


@contextmanager
def _ended_after(seconds: float, name: str) -> Iterator[None]:
    """Raise RobotFault inside a call that takes longer, and in all those seconds has imported nothing.

    A constructor that hangs outside of Python, where nothing is raised, ends this process, and says its line: so far
    nothing is held.
    """
    begin, known = clock.monotonic(), len(sys.modules)

    def late(signum: int, frame: FrameType | None) -> None:
        nonlocal known
        took, before, known = clock.monotonic() - begin, known, len(sys.modules)
        if took >= seconds and known == before:
            raise RobotFault(f"{name}() has not returned for {took:.2g} s: it hangs; give what it waits for a timeout")
        watch()

    def watch(periods: int = 1) -> None:
        if name == "__init__":
            faulthandler.dump_traceback_later(periods * seconds + GRACE, exit=True, file=2)

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds, seconds)
    watch(2)  # one large module may come in all of the first period, and no signal is heard meanwhile
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        faulthandler.cancel_dump_traceback_later()


@dataclass(slots=True)
class Call:
    """One call of the driver. given: a set point. took: seconds. error: a sentence. Neither: it has not returned."""

    name: str
    begin: float
    given: list[float] | None = None
    took: float | None = None
    answer: list[float] | None = None
    error: str = ""


@dataclass(frozen=True, slots=True)
class Calls:
    """All calls of a driver until now. entries, ranges: as of an Arm; none before it was made."""

    entries: Mapping[str, str]
    ranges: Mapping[str, Any]
    calls: list[Call]

    def took(self, name: str) -> Array:
        """Return the seconds that each call of this method took."""
        return np.array([call.took for call in self.calls if call.name == name and call.took is not None])

    @property
    def readings(self) -> Array:
        """Return all that `read` returned, [N, J]."""
        found = [call.answer for call in self.calls if call.name == "read" and call.answer]
        return np.array(found, float).reshape(len(found), len(self.entries))


def read_calls(path: str | Path) -> Calls:
    """Read what a WatchedArm has noted."""
    calls: list[Call] = []
    made: dict[str, Any] = {"entries": {}, "ranges": {}}
    for line in Path(path).read_text().split("\n")[:-1]:  # the last one is still being written, or empty
        said = json.loads(line)
        if "call" in said:
            calls.append(Call(said["call"], said["begin"], said.get("given")))
        elif "made" in said:
            made = said["made"]
        else:
            for name, value in said.items():
                setattr(calls[-1], name, value)
    return Calls(made["entries"], made["ranges"], calls)
