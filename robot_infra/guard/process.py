"""Runs the process of a guard: it serves its actor over a socket, and holds the arm when that has gone."""

import logging
import select
import signal
import socket
from contextlib import suppress

from serl_client import clock
from serl_client.errors import RetakeError

from robot_infra.drivers.owner import open_arm
from robot_infra.guard.channel import Ended, Request, Start, receive, send
from robot_infra.guard.guard import Guard

log = logging.getLogger(__name__)

LINGER = 1.0  # seconds that the arm is held after its actor has gone, until the guard ends


def main(descriptor: int) -> int:
    """Guard the arm that the actor names over the socket with this descriptor; return the exit status."""
    logging.basicConfig(format="[guard] %(message)s")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the actor's: it says hold and close
    link = socket.socket(fileno=descriptor)
    start, _ = receive(link)
    if not isinstance(start, Start):
        return 1
    try:
        with open_arm(start.driver, start.address, start.options) as arm:
            guard = Guard(arm, start)
            send(link, guard.started, *([guard.shared.descriptor] if guard.shared else []))
            text = GuardLoop(link, guard, 1 / start.servo_hz).run()
        ended = Ended(text)
    except RetakeError as error:
        ended = Ended(str(error))
    except Exception as error:
        log.exception("the guard of %s failed", start.address)
        ended = Ended(f"it failed: {type(error).__name__}: {error}")
    with suppress(OSError):
        send(link, ended)
    return 0


class GuardLoop:
    """Sends a set point in each tick, and answers the actor between two of them."""

    def __init__(self, link: socket.socket, guard: Guard, tick: float) -> None:
        self._link, self._guard, self._tick = link, guard, tick
        self._ends: str | None = None  # why
        self._cut_at: float | None = None

    def run(self) -> str:
        """Serve until the actor has gone, or somebody ends this process; return why it ends."""
        signal.signal(signal.SIGTERM, self._terminated)
        due = clock.monotonic()
        try:
            while self._ends is None:
                self._listen(max(0.0, due - clock.monotonic()))  # also when it is late: a sign of life may wait there
                if clock.monotonic() < due:
                    continue
                self._guard.servo()
                if self._cut_at is not None and clock.monotonic() > self._cut_at + LINGER:
                    self._ends = "its actor has gone"
                due, now = due + self._tick, clock.monotonic()
                due = due if due > now else now + self._tick  # no short ticks to catch up
        finally:
            self._guard.leave()
        return self._ends

    def _listen(self, seconds: float) -> None:
        if self._cut_at is not None:
            clock.sleep(seconds)
            return
        if not select.select([self._link], [], [], seconds)[0]:
            return
        request, _ = receive(self._link)
        if not isinstance(request, Request):
            self._cut_at = clock.monotonic()
            self._guard.hold()
            return
        self._guard.hear(request)
        if request.kind == "close":
            self._ends = "its actor has closed it"
        with suppress(OSError):  # the actor has just gone: the next look says so
            send(self._link, self._guard.reply(request))

    def _terminated(self, *_: object) -> None:
        self._ends = "it was ended by SIGTERM"
