"""A whole quickstart under kill -9: the commands that a user types, with default settings, whose processes are killed
at random again and again; what ends is started again as a user would, until the run is over.

A kill is over when a step is durable that was made after all of the killed were running again: one more than there
were, with those that lay in the outbox. What is read while it runs are files alone.
"""

import os
import signal
import sqlite3
import statistics
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random

import numpy as np

from tests.shared.programs import Programs

from . import checker, counted

SIDES = {"launcher": "learner", "actor": "actor"}  # the process that a user starts: what it is called on a command line
KILLED = ("launcher", "server", "trainer", "inference", "actor", "all")
LOOK_S = 0.05
RECORD = 5  # steps of a record of the quickstart, at most
END_S = 60.0  # that the actor may take after its learner
SLOWER = 2.0  # than an undisturbed start is what the median kill may cost


class Whole:
    """One run in `folder`, whose processes are killed `gap` (from, to) seconds after each recovery; `words` are added
    to both commands."""

    def __init__(self, folder: Path, seed: int, gap: Sequence[float], words: Sequence[str]) -> None:
        self._programs, self._words, self.violations = Programs(folder), words, list[str]()
        self.run_dir = self._programs.run_dir
        self.start_s, self.took_s, self.kills = 0.0, list[float](), 0  # of the undisturbed start; of each kill
        self._gap, self._random = gap, Random(f"{seed}/whole")
        self._mine: dict[str, subprocess.Popen] = {}
        self._started: dict[str, float] = {}
        self._told = False  # an actor has heard that the run is over: the next one may come too late
        self._kind: np.dtype | None = None
        self._struck: list[tuple[float, str, dict[str, int]]] = []  # kills without a durable step since
        self._wanted: int | None = None  # steps that are durable when the last kill is over; None: not all run yet
        self._steps: dict[str, dict[int, int]] = {}  # source -> {number: checksum} of what was durable at a kill
        self._written: dict[str, int] = {}

    def play(self, seconds: float) -> counted.Counted | None:
        """Run it to its end; None when that did not come within `seconds`."""
        self._began = time.monotonic()
        try:
            if not self._plays(self._began + seconds):
                self.violations.append(f"the run did not end in {seconds / 60:.0f} minutes")
                return None
        finally:
            self._programs.end()
        found = counted.Counted(self.run_dir, self.violations)
        found.check(self._steps, self._written)
        self._check_times()
        return found

    def _plays(self, deadline: float) -> bool:
        """Whether the run has ended; kills fall due after each recovery."""
        due = None
        while time.monotonic() < deadline:
            time.sleep(LOOK_S)
            if self._restart():
                return True
            if self._recovered() and due is None:
                due = time.monotonic() + self._random.uniform(*self._gap)
            if due is not None and time.monotonic() >= due and (there := self._processes()):
                self._kill(there)
                due = None
        return False

    # -- what a user does
    def _restart(self) -> bool:
        """Start what has ended; True when the run is over."""
        for name in SIDES:
            status = self._mine[name].poll() if name in self._mine else -1
            if status is None:
                continue
            if name == "launcher" and status == 0:
                return self._is_over()
            if name == "actor" and status == 0 and self._started["actor"] > self._started["launcher"]:
                continue  # it was told that the run is over; a learner that begins again may want it once more
            if name in self._mine and status and not self._struck:
                self.violations.append(f"the {name} ended with {status}, and nobody had killed anything: see the log")
            self._told |= name == "actor" and status == 0
            self._start(name)
        return False

    def _is_over(self) -> bool:
        try:
            status = self._mine["actor"].wait(END_S)
        except subprocess.TimeoutExpired:
            status = None
        if status and not self._struck:
            self.violations.append(f"the run was over, and the actor ended with {status}")
        if status is None and not self._told:
            self.violations.append(f"the run was over, and the actor did not end in {END_S:.0f} s")
        return True

    def _start(self, name: str) -> None:
        self._started[name] = time.monotonic()
        self._mine[name] = self._programs.start(SIDES[name], *self._words)

    # -- what is seen of it
    def _processes(self) -> dict[str, int]:
        """{name: pid} of the five, when all run; else nothing."""
        found = self._programs.alive()
        return found if set(KILLED[:-1]) <= set(found) else {}

    def _recovered(self) -> bool:
        """Whether a step is durable that was made after the last kill, with all processes running."""
        there, now = self._processes(), time.monotonic()
        if not there or any(there.get(name) == pid for _, _, killed in self._struck for name, pid in killed.items()):
            self._wanted = None
            return False
        heads = self._heads()
        if self._wanted is None:
            self._wanted = heads + RECORD * self._pending() + 1
        if heads < self._wanted:
            return False
        for at, name, _ in self._struck:
            self.took_s.append(now - at)
            print(f"{at - self._began:7.1f} s: killed {name}; {now - at:5.1f} s to the next durable step", flush=True)
        self._struck.clear()
        self.start_s = self.start_s or now - self._began
        return True

    def _heads(self) -> int:
        """How many steps have ever been durable."""
        words = [np.fromfile(path, "<u8") for path in self.run_dir.glob("store/*/published")]
        return sum(int(each[1]) for each in words if len(each) == 2)

    def _pending(self) -> int:
        """How many records lie in an outbox and not in the store."""
        try:
            there = counted.expected(self.run_dir / "store")
        except sqlite3.Error:
            return 0  # there is no store yet
        return sum(max(0, end - there.get(session, 0)) for session, end in self._outboxes().items())

    def _outboxes(self) -> dict[str, int]:
        """{session: end} of the records on the actor's disk."""
        try:
            found = [checker.spooled(outbox) for outbox in self.run_dir.glob("actors/*/outbox")]
        except FileNotFoundError:
            return {}  # one has just been acknowledged
        return {session: end for each in found for session, end in each.items()}

    def _durable(self) -> dict[str, np.ndarray]:
        """The steps that each source publishes now."""
        try:
            self._kind = self._kind or counted.layout(self.run_dir / "store")
            return {
                path.parent.name: counted.published(path.parent, self._kind)
                for path in self.run_dir.glob("store/*/published")
            }
        except (OSError, ValueError, sqlite3.Error):
            return {}  # it is being made

    # -- what falls on it
    def _kill(self, there: dict[str, int]) -> None:
        name = self._random.choice(KILLED)
        for source, steps in self._durable().items():
            self._steps.setdefault(source, {}).update(
                zip(steps["number"].tolist(), steps["checksum"].tolist(), strict=True)
            )
        killed = {one: pid for one, pid in there.items() if name in (one, "all")}
        self.kills += 1
        self._struck.append((time.monotonic(), name, killed))
        self._wanted = None
        for pid in killed.values():
            os.kill(pid, signal.SIGKILL)
        if "actor" in killed:
            self._mine["actor"].wait()
            self._written |= self._outboxes()

    def _check_times(self) -> None:
        if self.took_s and (median := statistics.median(self.took_s)) > SLOWER * self.start_s:
            self.violations.append(f"the median kill cost {median:.1f} s, an undisturbed start {self.start_s:.1f} s")
