"""A learner and its actors as an operator starts them: the programs, their processes, and what their run holds."""

import json
import os
import resource
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from serl_client import messages as m
from serl_client.connection import Connection

from .common import PATIENCE, TRAIN, free_port, until
from .tools import typed

CPU_S = 150.0  # that a run's programs may spend on what a test waits for: many times what it takes
GONE_S = 20.0  # that a program may take from its last sign to its status
CAP_S = 500.0  # seconds in which even idle programs bring it about; pytest waits a little longer
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Facts:
    """What a run has on its disk at one moment."""

    episodes: dict  # id: steps
    practised: int  # steps
    directives: list  # [(number, what)]
    weights: list  # [(version, sha256, update)]
    checkpointed: int  # updates

    @property
    def phases(self):
        """Those that have begun."""
        return {json.loads(body)["phase"] for _, body in self.directives}


def without_nohup():
    """What runs the tests may ignore a terminal that is closed; no person's shell does."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


class Programs:
    """The learner and the actors of one run; every process of theirs has the run's folder on its command line.

    As a context it ends all of them, however the test ends.
    """

    def __init__(self, folder, environment=None):
        self.run_dir, self.log = folder / "run", folder / "log"
        self.environment = environment  # of its processes; None: that of this one
        self.ports = free_port(), free_port()
        self._started = []

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.end()

    def start(self, side, *words, stdin=subprocess.DEVNULL):
        """`side` is learner or actor; in a process group of its own, like a job of a shell."""
        port, inference_port = self.ports
        command = [
            sys.executable, TRAIN, f"{side}=true", f"run_dir={self.run_dir}", f"port={port}",
            f"inference_port={inference_port}", *words,
        ]  # fmt: skip
        with open(self.log, "a") as log:
            process = subprocess.Popen(
                command, stdin=stdin, stdout=log, stderr=log, cwd=self.log.parent, start_new_session=True,
                env=self.environment, preexec_fn=without_nohup,
            )  # fmt: skip
        self._started.append(process)
        return process

    def alive(self):
        """{name: process id}: launcher, server, trainer, inference, actor."""
        found = {}
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = path.read_bytes().decode(errors="replace").split("\0")
            except OSError:
                continue
            if any(str(self.run_dir) in word for word in words):
                child = words[words.index("-m") + 2] if "-m" in words else ""
                found["actor" if "actor=true" in words else child or "launcher"] = int(path.parent.name)
        return found

    def order(self, command):
        """Say it to the plan, as an operator does."""
        with Connection(f"tcp://127.0.0.1:{self.ports[0]}", m.Hello(m.PROTOCOL, "viewer", "operator")) as link:
            link.call(m.Command(command), PATIENCE)

    def kill(self, *names):
        alive = self.alive()
        for name in names:
            os.kill(alive[name], signal.SIGKILL)

    def until(self, condition, cpu_s=CPU_S):
        """Wait for what the programs bring about; a slow machine does not fail it.

        It has failed when they are all gone, when they have spent so much CPU time meanwhile, or after CAP_S.
        """
        spent, looked = self._spent(), time.monotonic()
        there = looked  # when one of them was last seen

        def met():
            nonlocal looked, there
            if value := condition():
                return value
            if (now := time.monotonic()) > looked + 1.0:
                looked, there = now, now if self.alive() else there
                assert self._spent() < spent + cpu_s, why()
                assert now < there + GONE_S, why()
            return None

        def why():
            return f"this never happened:\n{self.said()[-4000:]}"

        return until(met, CAP_S, why=why)

    def _spent(self):
        """CPU seconds of the run's processes, and of whatever this process has started and waited for."""
        ended, ticks = resource.getrusage(resource.RUSAGE_CHILDREN), 0
        for number in self.alive().values():
            with suppress(OSError):
                fields = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
                ticks += sum(map(int, fields[11:15]))  # its own, and of its children that have ended
        return ended.ru_utime + ended.ru_stime + ticks / TICKS

    def said(self):
        return self.log.read_text() if self.log.exists() else ""

    def status(self, process, cpu_s=CPU_S):
        """The exit status of a program that ends by itself."""
        return self.until(lambda: [process.poll()] if process.poll() is not None else None, cpu_s)[0]

    def end_well(self, *processes):
        """These programs, and all of the run with them, end by themselves, and nothing went wrong in any."""
        assert [self.status(process) for process in processes] == [0] * len(processes), self.said()[-4000:]
        assert not {word for word in ("Traceback", "errors.log") if word in self.said()}

    def finish_export(self, *words):
        """Do as the run has said if it ended on a busy machine before all was in datasets."""
        if f"tools/data.py export {self.run_dir}" in self.said():
            status, said = typed("data", "export", self.run_dir, *words)
            assert status == 0, said

    def complete(self, learner, actor):
        """Let a learner and an actor with these words come to their end, which is a good one."""
        self.end_well(self.start("actor", *actor), self.start("learner", *learner))

    def facts(self):
        return facts(self.run_dir)

    def practised(self, steps):
        """Wait until so many steps of practice are stored, and some updates since then are in a checkpoint."""
        self.until(lambda: self.facts().practised >= steps)
        before = self.facts().checkpointed
        self.until(lambda: self.facts().checkpointed > before)
        return self.facts()

    def end(self):
        """Kill whatever of this run is left."""
        for process in self._started:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for number in self.alive().values():  # they have groups of their own
            with suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        self.until(lambda: not self.alive())


def facts(run_dir):
    path = run_dir / "store/index.sqlite"
    if not path.exists():
        return Facts({}, 0, [], [], 0)
    manifests = sorted((run_dir / "checkpoints").glob("[0-9]*/manifest.json"))  # first: weights go on
    updates = json.loads(manifests[-1].read_text())["updates"] if manifests else 0
    with closing(sqlite3.connect(path, timeout=10)) as index:
        rows = index.execute("SELECT id, steps, phase FROM episodes").fetchall()
        directives = index.execute("SELECT number, body FROM directives ORDER BY number").fetchall()
        weights = index.execute("SELECT version, sha256, update_ FROM weights ORDER BY version").fetchall()
    episodes = {name: steps for name, steps, _ in rows}
    practised = sum(steps for _, steps, phase in rows if phase.partition("#")[0] == "practise")
    return Facts(episodes, practised, directives, weights, updates)
