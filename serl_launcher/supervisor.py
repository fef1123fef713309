"""Restarts processes of a run that crash, and says when to give up. The processes die with their parent.

A signal stops a run: the trainer keeps a checkpoint, and all end. A second signal ends them at once. The trainer keeps
one, too, before inference, which is given up, ends the run.
"""

import ctypes
import logging
import math
import os
import resource
import signal
import subprocess
import sys
import time
from collections import defaultdict, deque
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

log = logging.getLogger(__name__)

RESTARTS, WITHIN_S = 3, 60.0  # a process is started again at most so often within so many seconds
FAILURES, FAILING_S = 10, 3600.0  # inference may fail so often within so many seconds, as on a GPU that is broken
# SIGHUP: the terminal is closed. SIGUSR1: what clusters send before their time is over.
STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
END = signal.SIGUSR2  # ends a child. Those that a system sends to all processes of a job do not: the launcher decides
AGAIN_AFTER_S = 1.0  # since the first signal, until another one counts: a script that is stopped passes on what we have
AUTOGROUP_TRIES = 20  # 3 s
KILLED = (-signal.SIGKILL, -signal.SIGTERM)  # exit statuses of a process that others have ended
REFUSED = 2  # exit status of a process that said in one sentence why it cannot run: another start does not help
SERVER_BYTES = 40 << 30  # of the server at most: each of 512 connections may announce a frame of 64 MiB
LEARNING = ("trainer", "inference")  # they start when the importer, where there is one, has ended
BESIDE = ("export", "page")  # a run goes on without them, whatever they refuse
RANKED = ("RANK", "WORLD_SIZE", "LOCAL_RANK")  # a rank's own launcher sets them; a cluster's values must not reach us
GIVING_UP = (
    "%s ended %s: giving up, the log above says why. Nothing that was stored is lost: mend that, and give the "
    "same command again"
)
GOING_ON = "%s ended %s: the run goes on, the log above says why. %s"
WITHOUT = {  # process that a run can live without: what becomes of its work
    "importer": "What is not imported yet comes with the next start of the same command",
    "export": "`tools/data.py export` writes what is in no dataset yet",
    "page": "`tools/page.py` shows the run meanwhile",
}
UNFINISHED = "episodes that are in no dataset yet: the same command goes on with them, or `tools/data.py export %s`"
WAITED_FOR = "It is started again every minute. Actors whose source is full wait for it, and say so"
KEPT_S = 600.0  # seconds that the trainer has for a checkpoint before inference, which is given up, ends the run
AGAIN_S = 60.0  # seconds between two starts of an export process that an archived source waits for


class Supervisor:
    """The parent of one run's processes.

    run_dir: where each process finds config.yaml. first: the processes to start at once.
    local: the ipc address at which the server listens; empty where there is no server (a node beyond the first).
    archives: whether episodes stay in the store until they are exported, so that the export process is never left out.
    export_s: seconds that the export process takes at most for the last episodes, once it is told to end.
    """

    def __init__(
        self, run_dir: Path, local: str, first: Sequence[str], *, archives: bool = False, export_s: float = 0.0
    ) -> None:
        self._run_dir, self._local, self._first = run_dir, local, first
        self._archives, self._export_s = archives, export_s
        self._restarts: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=RESTARTS))
        self._failures: deque[float] = deque(maxlen=FAILURES)  # when inference failed by itself
        self._vain: defaultdict[str, int] = defaultdict(int)  # starts in succession that came to nothing
        self._children: dict[str, subprocess.Popen] = {}
        self._spared: set[str] = set()  # that the run goes on without
        self._start_at: dict[str, float] = {}  # when a process that ends again and again is started again
        self._signals, self._signalled_at = 0, 0.0

    def run(self) -> int:
        """Start the processes, and return the exit status of the run when it is over."""
        for number in STOPS:
            if signal.getsignal(number) != signal.SIG_IGN:  # `nohup` ignores SIGHUP
                signal.signal(number, self._signal)
        try:
            for name in self._first:
                self._start(name)
            while (status := self._look()) is None:
                time.sleep(0.05)
            if status == 0 and not self._signals:
                self._finish_export()
            elif "export" in self._children:
                log.info(UNFINISHED, self._run_dir)
            return status
        finally:
            self._end()

    def _signal(self, *_: object) -> None:
        if not self._signals:
            self._signalled_at = time.monotonic()
        if not self._signals or time.monotonic() > self._signalled_at + AGAIN_AFTER_S:
            self._signals += 1

    def _start(self, name: str) -> None:
        command = [sys.executable, "-m", "serl_launcher.launcher", name, str(self._run_dir), self._local]
        if self._local:
            begun_file(name, self._local).unlink(missing_ok=True)
        here = {key: value for key, value in os.environ.items() if key not in RANKED}
        here["TMPDIR"] = str(begun_file(name, self._local).parent if self._local else self._run_dir)  # goes with us
        self._children[name] = subprocess.Popen(
            command, preexec_fn=partial(_begin, name), stdin=subprocess.DEVNULL, env=here
        )

    def _look(self) -> int | None:
        """Start again what has ended and may be; return the exit status if the run is over."""
        if self._signals:
            return self._keep_checkpoint()
        for name, child in list(self._children.items()):
            if (status := child.poll()) is not None and (over := self._ended(name, status)) is not None:
                if name == "inference":
                    self._keep_checkpoint(KEPT_S)
                return over
        return None

    def _ended(self, name: str, status: int) -> int | None:
        """Go on after a process has ended; return the exit status if the run is over with it."""
        if name == "importer" and status == 0:
            self._leave_out(name)
        elif name == "trainer" or (status == REFUSED and name not in BESIDE):
            return 1 if status else 0
        elif name in self._start_at:
            if time.monotonic() >= self._start_at[name]:
                del self._start_at[name]
                self._start(name)
        elif how := self._hopeless(name, status):
            if name not in WITHOUT:
                log.error(GIVING_UP, name, how)
                return 1
            self._go_on_without(name, how)
        else:
            self._restarts[name].append(time.monotonic())
            log.warning("%s ended with status %d: starting it again", name, status)
            self._start(name)
        return None

    def _go_on_without(self, name: str, how: str) -> None:
        """Go on without a process. The export that an archived source waits for is started again, later."""
        is_needed = name == "export" and self._archives
        if name not in self._spared:
            log.error(GOING_ON, name, how, WAITED_FOR if is_needed else WITHOUT[name])
        self._spared.add(name)
        if is_needed:
            self._start_at[name] = time.monotonic() + AGAIN_S
        else:
            self._leave_out(name)

    def _leave_out(self, name: str) -> None:
        """Forget a process that has done its work, or whose work is left undone."""
        del self._children[name]
        for other in LEARNING if name == "importer" else ():
            self._start(other)

    def _hopeless(self, name: str, status: int) -> str:
        """Count this end of a process. Return how often it has ended if another start is in vain, else nothing."""
        now, recent = time.monotonic(), self._restarts[name]
        if status == REFUSED or name in self._spared:
            return "and refuses to start"
        self._vain[name] = 0 if begun_file(name, self._local).exists() else self._vain[name] + 1
        if name == "inference" and status not in KILLED:
            self._failures.append(now)
        if len(recent) == RESTARTS and now - recent[0] < WITHIN_S:
            return f"{RESTARTS + 1} times within a minute"
        if self._vain[name] > RESTARTS:
            return f"{RESTARTS + 1} times before it could do anything"
        if name == "inference" and len(self._failures) == FAILURES and now - self._failures[0] < FAILING_S:
            return f"{FAILURES} times within an hour, and nobody killed it"
        return ""

    def _keep_checkpoint(self, seconds: float = math.inf) -> int:
        """Let a trainer that has begun keep a checkpoint and end, unless another signal comes; return the exit status:
        0 if nothing is lost. The ranks of a node beyond the first end with those of the first.
        seconds: how long it may take, where nobody may be there to send the other signal."""
        asked, names = self._signals, ["trainer", *["server"] * bool(self._local)]
        needed = [self._children.get(name) for name in names]
        if not self._local:
            log.info("stopping: the ranks here end with node 0; another signal, such as Ctrl-C, ends them at once")
        elif begun_file("trainer", self._local).exists():
            log.info("stopping: the trainer keeps a checkpoint first; another signal, such as Ctrl-C, ends all at once")
            stop_file(self._local).touch()
        else:
            return 0
        until = time.monotonic() + seconds
        while self._signals == asked and all(child is not None and child.poll() is None for child in needed):
            if time.monotonic() > until:
                log.error("the trainer has not ended within %g s, as if it hung: it is ended as it is", seconds)
                return 1
            time.sleep(0.05)
        return int(self._signals != asked or any(child is None or child.poll() for child in needed))

    def _finish_export(self) -> None:
        """Let the export process write the last episodes into shards, for a while."""
        child = self._children.get("export")
        if child is None:
            return
        if child.poll() is None:
            log.info("the run is over; the last episodes are brought into datasets")
            child.send_signal(END)
        deadline = time.monotonic() + self._export_s + 30.0  # it stops by itself, after the shard that it is at
        while child.poll() is None and time.monotonic() < deadline and not self._signals:
            time.sleep(0.05)
        if child.poll() != 0:
            log.warning("not all episodes are in shards: `tools/data.py export %s` does the rest", self._run_dir)

    def _end(self) -> None:
        """Stop the processes, the server last: the others may still have something to tell it."""
        if (child := self._children.get("export")) is not None:
            child.kill()  # whenever it dies, there are only whole shards
            child.wait()
        for name in ("page", *LEARNING, "importer", "server"):
            child = self._children.get(name)
            if child is not None and child.poll() is None:
                child.send_signal(END)
                try:
                    child.wait(10)
                except subprocess.TimeoutExpired:
                    child.kill()


def _begin(name: str) -> None:
    """Run in a child before exec: the child is killed when its parent dies, and leaves Ctrl-C to the parent."""
    killed_with_parent()
    if name in BESIDE:  # see give_way
        os.setsid()
    else:
        os.setpgid(0, 0)
    for number in (signal.SIGUSR1, signal.SIGTERM):  # a cluster and systemd send these to all processes of a job
        signal.signal(number, signal.SIG_IGN)
    if name == "server":  # torch and CUDA map more memory than they use, so a limit would end the other processes
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        most = SERVER_BYTES if hard == resource.RLIM_INFINITY else min(SERVER_BYTES, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (most, hard))


def give_way(nice: int) -> None:
    """Take less of the CPU than others, also than those of other sessions, such as an actor in another terminal.

    Linux shares the CPU among sessions before it looks at nice values (man 7 sched: autogroup). So the session gets the
    value, too, where this process has one of its own.
    """
    os.nice(nice)
    if os.getsid(0) != os.getpid():
        return
    with suppress(OSError):  # a kernel without autogroups, or a system that keeps them from us
        for _ in range(AUTOGROUP_TRIES):  # the kernel takes one such value in 0.1 s from all users but root
            with suppress(BlockingIOError):
                Path("/proc/self/autogroup").write_text(str(nice))
                return
            time.sleep(0.15)


def killed_with_parent() -> None:
    """Ask the kernel to kill this process when the thread that started it ends, as when its parent is killed."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def begun_file(name: str, local: str) -> Path:
    """Return the file that says that this process has come as far as its work: it lies beside the server's socket."""
    return Path(local.removeprefix("ipc://")).with_name(f"{name}.begun")


def stop_file(local: str) -> Path:
    """Return the file that asks the trainer to keep a checkpoint and to end, in the same folder."""
    return begun_file("trainer", local).with_name("stop")
