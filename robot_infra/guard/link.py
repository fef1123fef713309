"""Starts the guard process from the actor, talks to it with timeouts, and says how it ended."""

import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress

from serl_client import clock
from serl_client.env import Observation
from serl_client.errors import ConfigError, RobotFault
from serl_client.spec import Feature

from robot_infra.guard.channel import Ended, Reply, Request, Shared, Start, Started, receive, send

log = logging.getLogger(__name__)

STARTING = 180.0  # seconds until a new guard has to answer: it imports the driver (lerobot: a minute), and connects
ANSWER = 1.0  # seconds until a guard counts as dead
SLOW = 60.0  # the same for what may take a driver long: clearing a fault, setting up a scene, closing
ENDING = 3.0  # seconds until a guard that was told to end is killed


class GuardLink:
    """Asks one guard at a time. After a failure nothing is asked until `begin` has started another one.

    `latest` is the newest reply, `process` the guard's id (0: there is none).
    """

    def __init__(self, start: Start) -> None:
        self._start = start
        self._number, self._broken = 0, "has not begun"
        self._socket: socket.socket | None = None
        self._guard: subprocess.Popen[bytes] | None = None
        self._shared: Shared | None = None
        self.latest: Reply

    @property
    def process(self) -> int:
        return self._guard.pid if self._guard else 0

    @property
    def is_open(self) -> bool:
        """Return whether a guard can be asked."""
        return self._socket is not None

    def begin(self) -> Started:
        """Start a guard; return what it says of the arm.

        Raises ConfigError with what the guard says if it cannot guard the arm.
        """
        self.end("was replaced")
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "robot_infra.guard", str(theirs.fileno())]
        path = os.pathsep.join([folder or os.getcwd() for folder in sys.path])
        environment = {**os.environ, "PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1"}  # threads only cost it time
        with theirs:  # in a session of its own Ctrl-C does not reach it: this actor says hold and close
            self._guard = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], env=environment, start_new_session=True
            )
        self._socket.settimeout(STARTING)
        message, descriptors, hangs = None, list[int](), ""
        try:
            send(self._socket, self._start)
            message, descriptors = receive(self._socket)
        except TimeoutError:
            hangs = f"has not begun for {STARTING:g} s: its driver hangs (tools/check_robot.py says in which method)"
        except OSError:
            pass
        if isinstance(message, Started):
            features = {name: Feature(**feature) for name, feature in message.observation.items()}
            self._shared = Shared(features, descriptors[0]) if descriptors else None
            for line in message.limits:
                log.info("limits of %s: %s", self._start.address, line)
            self.call("state")
            return message
        failed = f"the guard of {self._start.address} {hangs or self._fate()}"
        said = message.text if isinstance(message, Ended) else failed
        self.end("has not begun")
        raise ConfigError(said)

    def call(self, kind: str, positions: Sequence[float] = (), *, seed: int = 0, patience: float = ANSWER) -> Reply:
        """Ask, and return the reply, which may tell of a fault of the arm. Raises RobotFault if no guard answers."""
        if self._socket is None:
            raise self._dead(self._broken)
        self._number += 1
        deadline = clock.monotonic() + patience
        try:
            send(self._socket, Request(kind, self._number, clock.monotonic(), list(positions), seed))
            while True:
                self._socket.settimeout(max(deadline - clock.monotonic(), 1e-3))
                answer, _ = receive(self._socket)
                if not isinstance(answer, Reply):
                    raise self._dead(f"says: {answer.text}" if isinstance(answer, Ended) else self._fate())
                if answer.number == self._number:
                    self.latest = answer
                    return answer
        except TimeoutError:
            raise self._dead(f"has not answered for {patience:g} s: it was stopped, or its driver hangs") from None
        except OSError:
            raise self._dead(self._last_words()) from None

    def seen(self) -> Observation:
        """Return what the arm observed at the newest reply, besides its positions. Raises RobotFault if it is gone."""
        return self._shared.read(self.latest.sequence) if self._shared else {}

    def end(self, why: str) -> None:
        """Cut the connection, and wait for the guard's end; one that is stopped or hangs is killed."""
        self._cut(why)
        if self._guard is not None:
            try:
                self._guard.wait(ENDING)
            except subprocess.TimeoutExpired:
                self._guard.kill()
                self._guard.wait()
            self._guard = None

    def _cut(self, why: str) -> None:
        """Close the socket: a guard that lives then holds, and never hears of this actor again."""
        self._broken = why
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _dead(self, what: str) -> RobotFault:
        self._cut(what)
        return RobotFault(f"the guard of {self._start.address} {what}; the arm gets no targets", "guard")

    def _last_words(self) -> str:
        """Return what the guard has said before its end, if it could."""
        assert self._socket is not None
        with suppress(OSError):
            self._socket.settimeout(ANSWER)
            while (message := receive(self._socket)[0]) is not None:
                if isinstance(message, Ended):
                    return f"says: {message.text}"
        return self._fate()

    def _fate(self) -> str:
        """Return how the guard's process has ended."""
        assert self._guard is not None
        try:
            status = self._guard.wait(ANSWER)
        except subprocess.TimeoutExpired:
            return "cannot be reached any more: its connection was cut"
        return f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
