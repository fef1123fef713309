"""Simulates the controller of a Dobot arm on the network (TCP, V3 or V4): an arm without an arm.

Its ports are Dobot's own, so each arm needs an address of its own: all of 127.x.y.z are this machine.
"""

import argparse
import math
import random
import select
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from serl_client.closing import Closing

from robot_infra.drivers import dobot_protocol as p
from robot_infra.pace import run_first
from robot_infra.sim.dobot_machine import Machine

STALL = 0.02  # seconds: for longer its own clock stands still, when this process gets no time
LONGEST_COMMAND = 4096  # bytes; a client that sends more without an end is cut off
MOST_WAITING = 1 << 16  # bytes that wait for a client; of one that does not read more are lost
LATER = 0.004  # seconds between the two parts of what is split


@dataclass(frozen=True, slots=True)
class Faults:
    """Says how the network spoils what the controller sends: shares from 0 to 1 of its packets and replies.

    split: go in two segments. merge: wait for what comes next. drop: of feedback packets, lose some bytes. jitter:
    seconds by which feedback may be late.
    """

    split: float = 0.0
    merge: float = 0.0
    drop: float = 0.0
    jitter: float = 0.0


class Client:
    """Holds one connection: what came, and what is to be sent when."""

    def __init__(self, link: socket.socket) -> None:
        link.setblocking(False)
        self.link, self.kept, self.came = link, b"", b""  # what waits for the cable, and for the end of a command
        self.is_over = False
        self._late: deque[tuple[float, bytes]] = deque()
        self._out = b""

    def post(self, data: bytes, due: float) -> None:
        """Send at `due`, and after all that was posted before."""
        if len(self._out) + sum(len(each) for _, each in self._late) < MOST_WAITING:
            self._late.append((max(due, self._late[-1][0]) if self._late else due, data))

    def send(self, now: float) -> None:
        """Send what is due. Raises OSError if the client has gone."""
        while self._late and self._late[0][0] <= now:
            self._out += self._late.popleft()[1]
        with suppress(BlockingIOError):
            self._out = self._out[self.link.send(self._out) :] if self._out else b""


class DobotController(Closing):
    """Serves a simulated arm at an address of this machine; a context manager.

    version: V3 or V4. clock: gives seconds, which its time follows; None: real time, which stands still while this
    process gets none. power_s: seconds from PowerOn until there is power. faults: see there; `faults` may be changed.

    is_plugged: set it to False to pull the network cable. Nothing comes through then, nobody is told, and the arm goes
    on. As with TCP, what is sent meanwhile comes once it is plugged again, unless its sender has reset the connection.

    **Assumed:** each port takes one client, and when a link dies the arm goes on to its last set point. It cannot show
    a real network's delays, other firmware, or a second program in the controller itself.

    `machine` is the arm; use it inside `with controller.lock`. Raises OSError if the ports are in use.
    """

    def __init__(
        self, address: str = "127.0.0.1", version: str = "V3", *, clock: Callable[[], float] | None = None,
        power_s: float = 10.0, faults: Faults | None = None,
    ) -> None:  # fmt: skip
        self.address, self.faults, self.lock = address, faults or Faults(), threading.RLock()
        self.machine = Machine(p.VERSIONS[version], power_s=power_s)
        self._clock, self._stall = clock or time.monotonic, math.inf if clock else STALL
        self._before, self._owed = self._clock(), 0.0  # seconds that have passed, and are still to be simulated
        self._random = random.Random(version)
        self.is_plugged, self._is_closed = True, False
        self._clients: dict[int, Client] = {}
        ports = sorted({p.DASHBOARD, self.machine.version.motion, p.FEEDBACK})
        self._listeners: dict[int, socket.socket] = {}
        try:
            for port in ports:
                self._listeners[port] = socket.create_server((address, port))
        except OSError:
            self._close()
            raise
        self._thread = threading.Thread(target=self._serve, name=f"dobot {address}", daemon=True)
        self._thread.start()

    def cut(self) -> None:
        """Close all connections, as a controller does that starts again. The arm goes on."""
        with self.lock:
            for port in list(self._clients):
                self._drop(port)

    def close(self) -> None:
        """End it; may be called twice."""
        if not self._is_closed:
            self._is_closed = True
            self._thread.join()
            self._close()

    def _close(self) -> None:
        for port in list(self._clients):
            self._drop(port)
        for listener in self._listeners.values():
            listener.close()

    # -- its thread

    def _serve(self) -> None:
        run_first()
        while not self._is_closed:
            sockets = [*self._listeners.values(), *(client.link for client in self._clients.values())]
            with suppress(OSError, ValueError):  # another thread has just cut them
                select.select(sockets if self.is_plugged else [], [], [], p.PERIOD / 2)
            with self.lock:
                for port, client in list(self._clients.items()):
                    self._receive(port, client)
                self._advance()
                if self.is_plugged:
                    self._accept()
                    self._send()

    def _receive(self, port: int, client: Client) -> None:
        """Take what came; without a cable keep it, until that is plugged, or its sender has reset the connection."""
        try:
            data = client.link.recv(1 << 16)
            client.is_over = client.is_over or not data
            client.kept += data
        except BlockingIOError:
            pass
        except ConnectionError:
            client.is_over, client.kept = True, b""
        if self.is_plugged:
            kept, client.kept = client.kept, b""
            if not self._obey_whole(port, client, kept) or client.is_over:
                self._drop(port)

    def _accept(self) -> None:
        for port, listener in self._listeners.items():
            if select.select([listener], [], [], 0)[0]:
                link = listener.accept()[0]
                if port in self._clients:
                    link.close()
                else:
                    self._clients[port] = Client(link)

    def _obey_whole(self, port: int, client: Client, data: bytes) -> bool:
        """Obey each whole command; return whether the rest may still become one."""
        *commands, client.came = (client.came + data).split(b")")
        for command in commands if port != p.FEEDBACK else ():
            reply = self.machine.obey(f"{command.decode('ascii', 'replace')})".strip(), port)
            if reply is not None:
                self._post(client, reply.encode(), self.machine.time)
        return len(client.came) <= LONGEST_COMMAND

    def _advance(self) -> None:
        """Let its time follow the clock, in steps of a feedback period."""
        now = self._clock()
        self._owed, self._before = self._owed + min(now - self._before, self._stall), now
        while self._owed >= p.PERIOD:
            self._owed -= p.PERIOD
            self.machine.advance(p.PERIOD)
            if (client := self._clients.get(p.FEEDBACK)) and self.is_plugged:
                packet, faults = self.machine.packet(), self.faults
                if self._random.random() < faults.drop:
                    cut = sorted(self._random.sample(range(p.SIZE), 2))
                    packet = packet[: cut[0]] + packet[cut[1] :]
                self._post(client, packet, self.machine.time + faults.jitter * self._random.random())

    def _post(self, client: Client, data: bytes, due: float) -> None:
        """Let the network have what is sent, with its faults."""
        if self._random.random() < self.faults.merge:
            due += p.PERIOD
        if self._random.random() < self.faults.split:
            cut = self._random.randrange(len(data))
            client.post(data[:cut], due)
            data, due = data[cut:], due + LATER
        client.post(data, due)

    def _send(self) -> None:
        for port, client in list(self._clients.items()):
            try:
                client.send(self.machine.time)
            except OSError:
                self._drop(port)

    def _drop(self, port: int) -> None:
        self._clients.pop(port).link.close()


def main() -> None:
    parser = argparse.ArgumentParser(description="A Dobot arm to rehearse with, without one.")
    parser.add_argument("--address", default="127.0.0.1", help="one of 127.x.y.z, another one for each arm")
    parser.add_argument("--version", choices=[*p.VERSIONS], default="V3", help="of the protocol")
    options = parser.parse_args()
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    with DobotController(options.address, options.version):
        sys.stdout.write(f"a {options.version} controller at {options.address}. Ctrl-C ends it\n")
        sys.stdout.flush()
        ended.wait()


if __name__ == "__main__":
    main()
