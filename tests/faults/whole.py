"""A whole quickstart under kill -9: the commands that a user types, with default settings, whose processes are killed
again and again; what ends is started again as a user would, until the run is over.

A kill is over when a step is durable that was made after all of the killed were running again: one more than there
were, with those that lay in the outbox. What is read while it runs are files alone.
"""

import os
import signal
import sqlite3
import subprocess
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from random import Random

import numpy as np

from tests.shared.programs import Programs

from . import checker, counted

CHECKPOINT = "trainer, and damage its newest checkpoint"
SIDES = {"launcher": "learner", "actor": "actor"}  # the process that a user starts: what it is called on a command line
NEEDED = ("launcher", "server", "trainer", "inference", "actor")
KILLED = (*NEEDED, "export", "all", CHECKPOINT)  # those of these that there are
RECORD = 5  # steps of a record of the quickstart, at most
CPU_S = 600.0  # that it may cost until a step is durable


class Whole:
    """One run in `folder`, whose processes are killed `gap` (from, to) seconds after each recovery; `words` are added
    to both commands. `took_s` are the seconds that each kill cost, `start_s` those of the start."""

    def __init__(self, folder: Path, seed: int, gap: Sequence[float], words: Sequence[str]) -> None:
        self._programs, self._words, self.violations = Programs(folder), words, list[str]()
        self.run_dir, self.random = self._programs.run_dir, Random(f"{seed}/whole")
        self.start_s, self.took_s = 0.0, list[float]()
        self._gap, self._is_over = gap, False
        self._mine: dict[str, subprocess.Popen] = {}
        self._started: dict[str, float] = {}
        self._told = False  # an actor has heard that the run is over: the next one may come too late
        self._kind: np.dtype | None = None
        self._killed: dict[str, int] = {}  # {name: pid} without a durable step since
        self._wanted: int | None = None  # steps that are durable when the last kill is over; None: not all run yet
        self._steps: dict[str, dict[int, int]] = {}  # source -> {number: checksum} of what was durable at a kill
        self._written: dict[str, int] = {}
        self._damaged: list[Path] = []  # checkpoints that nobody may load

    def play(self, names: Iterable[str]) -> counted.Counted | None:
        """Kill the processes of these names, one after the other, and let it go on to its end; None when it hangs."""
        with self._programs:
            try:
                self._wait_until_back("started")
                for name in names:
                    self._go_on(time.monotonic() + self.random.uniform(*self._gap))
                    if self._is_over:
                        break
                    self._kill(name)
                    self._wait_until_back(f"killed {name}")
                self._go_on(float("inf"))
                self._programs.finish_export()
            except AssertionError as error:
                self.violations.append(str(error))
                return None
        found = counted.Counted(self.run_dir, self.violations)
        found.check(self._steps, self._written)
        taken = [path for path in self._damaged if f"{path} is broken" not in self._programs.said()]
        self.violations += [f"{path} was damaged, and taken" for path in taken]
        return found

    def _go_on(self, due: float) -> None:
        """Until then, or until the run is over; again and again a step is durable."""
        while not self._is_over and time.monotonic() < due:
            heads = self._heads()
            self._programs.until(
                lambda heads=heads: self._restarts() or self._heads() > heads or time.monotonic() >= due, CPU_S
            )

    def _wait_until_back(self, what: str) -> None:
        began = time.monotonic()
        self._programs.until(lambda: self._restarts() or self._recovered(), CPU_S)
        self._killed, took = {}, time.monotonic() - began
        if self.start_s:
            self.took_s.append(took)
        self.start_s = self.start_s or took
        print(f"{what}; {took:5.1f} s to the next durable step", flush=True)

    # -- what a user does
    def _restarts(self) -> bool:
        """Start what has ended; True when the run is over."""
        for name in SIDES:
            status = self._mine[name].poll() if name in self._mine else -1
            if self._is_over or status is None:
                continue
            if name == "launcher" and status == 0:
                self._is_over = True
                self._end_of_actor()
            elif name == "actor" and status == 0 and self._started["actor"] > self._started["launcher"]:
                continue  # it was told that the run is over; a learner that begins again may want it once more
            else:
                if name in self._mine and status and not self._killed:
                    self.violations.append(f"the {name} ended with {status}, and nobody had killed anything")
                self._told |= name == "actor" and status == 0
                self._started[name] = time.monotonic()
                self._mine[name] = self._programs.start(SIDES[name], *self._words)
        return self._is_over

    def _end_of_actor(self) -> None:
        """The run is over: its actor is told so, unless one was before."""
        if not self._told and (status := self._programs.status(self._mine["actor"])) and not self._killed:
            self.violations.append(f"the run was over, and the actor ended with {status}")

    # -- what is seen of it
    def _recovered(self) -> bool:
        """Whether a step is durable that was made after the last kill, with all processes running."""
        there = self._programs.alive()
        if not set(NEEDED) <= set(there) or self._killed.items() & there.items():
            self._wanted = None
            return False
        heads = self._heads()
        if self._wanted is None:
            self._wanted = heads + RECORD * self._pending() + 1
        return heads >= self._wanted

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
    def _kill(self, name: str) -> None:
        for source, steps in self._durable().items():
            self._steps.setdefault(source, {}).update(
                zip(steps["number"].tolist(), steps["checksum"].tolist(), strict=True)
            )
        there = self._programs.alive()
        names = {"all": set(there), CHECKPOINT: {"trainer"}}.get(name, {name})
        self._killed = {one: pid for one, pid in there.items() if one in names}
        self._wanted = None
        for pid in self._killed.values():
            os.kill(pid, signal.SIGKILL)
        if name == CHECKPOINT:
            self._damage_checkpoint()
        if "actor" in self._killed:
            self._mine["actor"].wait()
            self._written |= self._outboxes()

    def _damage_checkpoint(self) -> None:
        """Turn a bit of the newest one over, if there is another: its trainer is dead, and the next one takes that."""
        self._programs.until(lambda: self._killed.items().isdisjoint(self._programs.alive().items()), CPU_S)
        whole = sorted(set(self.run_dir.glob("checkpoints/[0-9]*")) - set(self._damaged))
        if len(whole) > 1:
            file = whole[-1] / self.random.choice(("state.pt", "tensors.safetensors"))
            data = bytearray(file.read_bytes())
            data[self.random.randrange(len(data))] ^= 1 << self.random.randrange(8)
            file.write_bytes(data)
            self._damaged.append(whole[-1])
