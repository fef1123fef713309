"""Keeps a ZeroMQ connection to one address; after a break it connects again, with a Hello first."""

import dataclasses
import errno
import ipaddress
import logging
import socket
from collections import deque
from typing import TypeVar
from urllib.parse import urlsplit

import zmq
from zmq.utils.monitor import parse_monitor_message

import serl_client.clock as clock
import serl_client.messages as m
import serl_client.wire as wire
from serl_client.closing import Closing
from serl_client.errors import KINDS, Disconnected, MessageError, Refused, Timeout, TrainerError, VersionMismatch
from serl_client.keys import Key

log = logging.getLogger(__name__)
Answer = TypeVar("Answer")

RETRY = 0.25  # seconds between two attempts to connect
SILENCE = 10.0  # seconds until a connection is closed on which no message comes
# libzmq 4.3.5 aborts the process whose own heartbeat falls due on a connection that broke while its queue was full, so
# there are none: the kernel finds out that a machine is gone, and silence tells that a program is.
OPTIONS = {
    zmq.LINGER: 0,
    zmq.RECONNECT_IVL: 10**9,  # ms, so never: libzmq would send no Hello; -1 would drop messages that are not read yet
    zmq.CONNECT_TIMEOUT: 3000,
    zmq.HANDSHAKE_IVL: 3000,
    zmq.TCP_KEEPALIVE: 1,
    zmq.TCP_KEEPALIVE_IDLE: 1,
    zmq.TCP_KEEPALIVE_INTVL: 1,
    zmq.TCP_KEEPALIVE_CNT: 3,
    zmq.TCP_MAXRT: 3000,
    zmq.MAXMSGSIZE: wire.MAX_ARRAY,
}
BREAKS = (
    zmq.EVENT_CLOSED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
ANSWERS: dict[type, type[m.Message]] = {
    m.Status: m.Status, m.Sync: m.Synced, m.WeightsRequest: m.WeightsChunk, m.Direct: m.Done, m.Publish: m.Done,
    m.Archived: m.Done, m.SetAside: m.Done, m.Over: m.Done, m.Command: m.Done,
}  # fmt: skip


class Connection(Closing):
    """Keeps one connection, for one thread. `receive`, called now and then, connects again after a break.

    address: of the other side, tcp://host:port (see `tcp`) or ipc://path.
    greeting: the Hello of the next connection.
    key: encrypts, and proves that the other side is the one that the key names; None: neither.

    `welcome` is the answer to Hello on this connection, `notice` the latest StateUpdate on any. `heard` is the
    time.monotonic() of the last message.
    """

    def __init__(self, address: str, greeting: m.Hello, key: Key | None = None) -> None:
        self.address, self.greeting, self.key = address, greeting, key
        self.notice = m.StateUpdate({}, {})
        self.welcome: m.Welcome | None = None
        self.heard = 0.0
        self._socket: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None
        self._opened = 0.0
        self._hint = ""  # why the handshake may have failed
        self._barred = False  # the other side refused our key
        self._requests = 0  # the latest number of a request
        self._backlog: deque[m.Message] = deque()  # what came while `call` waited for something else

    @property
    def is_open(self) -> bool:
        """Return whether there is a connection, or an attempt at one."""
        return self._socket is not None

    @property
    def connected(self) -> bool:
        """Return whether the other side has answered our Hello."""
        return self.welcome is not None

    @property
    def polled(self) -> list[tuple[zmq.Socket[bytes], int]]:
        return [(socket, zmq.POLLIN) for socket in (self._socket, self._monitor) if socket is not None]

    def send(self, message: m.Message) -> bool:
        """Queue a message; its arrays must not change afterwards. Return False if it was dropped: no connection."""
        if self._socket is None:
            return False
        try:
            self._socket.send_multipart(wire.joined(m.encode(message)), zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return False
        return True

    def receive(self) -> m.Message | None:
        """Return the next message, or None; never wait. Raises Refused when the other side refuses our key."""
        if self._barred:
            raise self._refused()
        if self._socket is None and clock.monotonic() > self._opened + RETRY:
            self._open()
        return self._backlog.popleft() if self._backlog else self._next()

    def wait(self, seconds: float) -> None:
        """Wait until something has come, at most `seconds`."""
        if self._socket is None:
            clock.sleep(min(seconds, RETRY))
        elif not self._backlog:
            zmq.zmq_poll(self.polled, int(seconds * 1000))

    def hello(self, timeout: float) -> m.Welcome:
        """Say Hello (again) and return the answer. Raises like `call`."""
        if self._socket is None:
            self._open()
        else:
            self.send(self.greeting)
        return self._answer(m.Welcome, clock.monotonic() + timeout)

    def call(self, message: m.Message, timeout: float) -> m.Message:
        """Send one request and return its answer; other messages are kept for `receive`. Connects where necessary.

        timeout: seconds.

        Raises the error that a Failed names, Refused for our key, Timeout or Disconnected. After the latter two the
        next call makes a new connection, so that a late answer is not taken for that to another request.
        """
        deadline = clock.monotonic() + timeout
        if self.welcome is None:
            self.hello(timeout)
        request = 0
        if isinstance(message, m.NUMBERED):
            self._requests = request = self._requests + 1
            message = dataclasses.replace(message, request=request)
        self.send(message)
        return self._answer(ANSWERS[type(message)], deadline, request)

    def close(self, linger: int = 0) -> None:
        """Close the connection; sent messages have another `linger` ms to leave."""
        if self._socket is not None and self._monitor is not None:
            self._socket.disable_monitor()
            self._monitor.close(0)
            self._socket.close(linger)
        self._socket = self._monitor = self.welcome = None
        self._backlog.clear()

    def rest(self, seconds: float) -> None:
        """Close the connection; `receive` makes a new one after `seconds`."""
        self.close()
        self._opened, self._barred = clock.monotonic() + seconds - RETRY, False

    def _open(self) -> None:
        address = resolved(self.address)
        socket = zmq.Context.instance().socket(zmq.DEALER)
        for option, value in OPTIONS.items():
            socket.set(option, value)
        socket.set(zmq.IPV6, "[" in address)  # for a name it would find no IPv4 address where there are both
        if self.key is not None:
            socket.curve_publickey, socket.curve_secretkey = self.key.public.encode(), self.key.secret.encode()
            socket.curve_serverkey = self.key.server.encode()
        socket.copy_threshold = wire.COPY_BELOW
        self._socket, self._monitor = socket, socket.get_monitor_socket(BREAKS)
        self._opened, self._barred = clock.monotonic(), False
        try:
            socket.connect(address)
        except zmq.ZMQError as error:
            self.close()
            if error.errno != errno.EINVAL:
                raise
            raise Refused(f"{self.address} is no address: say ip=10.0.0.5, or a name, and a port below 65536") from None
        self.send(self.greeting)

    def _answer(self, kind: type[Answer], deadline: float, request: int = 0) -> Answer:
        while True:
            message = self._next()
            if isinstance(message, kind) and (not isinstance(message, m.Done) or message.request == request):
                return message
            if isinstance(message, m.Failed) and message.request in (0, request):
                raise failure(message)
            if message is None:
                self._await(deadline)
            elif not isinstance(message, m.StateUpdate):
                self._backlog.append(message)

    def _await(self, deadline: float) -> None:
        left = deadline - clock.monotonic()
        if self._barred:
            raise self._refused()
        if self._socket is None:
            raise Disconnected(
                f"nobody answers at {self.address}: start the learner, or say its ip= and port=.{self._hint}"
            )
        if left <= 0:
            self.close()
            raise Timeout(
                f"{self.address} did not answer in time: look at the learner's screen, whether it is stopped or busy"
            )
        zmq.zmq_poll(self.polled, int(left * 1000) + 1)

    def _next(self) -> m.Message | None:
        while self._socket is not None and self._monitor is not None:
            is_mute = self.heard < self._opened < clock.monotonic() - SILENCE
            is_over = is_mute or has_come(self._monitor)  # asked before reading, so that the last messages are read
            if not (frames := received(self._socket)):
                if is_over:
                    self._end()
                break
            try:
                return self._kept(m.decode([frame.buffer for frame in frames]))
            except (MessageError, VersionMismatch, TypeError) as error:
                log.warning("a message from %s is not understood: %s", self.address, error)
        return None

    def _end(self) -> None:
        """Close a broken connection, and remember how its handshake failed."""
        assert self._monitor is not None
        event = parse_monitor_message(self._monitor.recv_multipart())["event"] if self._monitor.poll(0) else 0
        before, self._hint = self._hint, ""
        if event in (zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL):
            reason = "has another server key than ours, or none" if self.key else "wants a key"
            self._hint = (
                f" It broke off the handshake: it is no learner (compare ip= and port=), is being stopped, or {reason}"
            )
        if self._hint not in ("", before):
            log.warning("no connection to %s.%s", self.address, self._hint)
        self._barred = event == zmq.EVENT_HANDSHAKE_FAILED_AUTH
        self.close()

    def _refused(self) -> Refused:
        name = self.key.name if self.key else "none"
        return Refused(f"{self.address} does not let the key {name} in: tools/keys.py list on the learner says why")

    def _kept(self, message: m.Message) -> m.Message:
        if isinstance(message, m.Welcome):
            self.notice, self.welcome = m.StateUpdate(**message.state), message
        elif isinstance(message, m.StateUpdate):
            self.notice = message
        elif isinstance(message, m.Failed) and (message.kind == "Disconnected" or self.heard < self._opened):
            self.close()  # the server does not know this session: the next connection says Hello
        self.heard = clock.monotonic()
        return message


def tcp(host: str, port: object) -> str:
    """Return the address of a TCP port. A literal IPv6 address gets the brackets that it needs."""
    return f"tcp://[{host.strip('[]')}]:{port}" if host.count(":") > 1 else f"tcp://{host}:{port}"


def inference_at(said: str, learner: str, port: int | None) -> str:
    """Return the address that answers questions: the learner's own words, `said`, or this port of its host.

    learner: the address by which it is reached from here, whose host stands for a `*`.
    """
    if said and (port or urlsplit(said).hostname == "*"):
        return tcp(urlsplit(learner).hostname or "", port or urlsplit(said).port)
    return said


def resolved(address: str) -> str:
    """Return the address with the IPv6 address of a name that has no other; any other address as it is."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    if "[" in address or not address.startswith("tcp://"):
        return address
    try:
        found = {family: at[0] for family, _, _, _, at in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except (OSError, UnicodeError):  # no name, or an unknown one: who connects hears of it
        return address
    return tcp(str(found[socket.AF_INET6]), port) if found.keys() == {socket.AF_INET6} else address


def is_local(address: str) -> bool:
    """Return whether only this machine reaches this address: ipc://path, or tcp:// with a host of loopback."""
    host = address.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    try:
        return address.startswith("ipc://") or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def has_come(socket: zmq.Socket[bytes]) -> bool:
    """Return whether a message waits. This costs a fifth of catching zmq.Again."""
    return bool(zmq.zmq_poll([(socket, zmq.POLLIN)], 0))


def received(socket: zmq.Socket[bytes]) -> list[zmq.Frame]:
    """Return the frames of the next message; none if there is no message.

    Frames beyond wire.MAX_FRAMES + 2 are dropped, so that a million frames do not become a million objects.
    """
    if not has_come(socket):
        return []
    frames = [socket.recv(zmq.NOBLOCK, copy=False)]
    frame = frames[0]
    while frame.more:
        frame = socket.recv(zmq.NOBLOCK, copy=False)
        if len(frames) < wire.MAX_FRAMES + 2:
            frames.append(frame)
    return frames


def failure(message: m.Failed) -> TrainerError:
    """Return the error that a Failed names."""
    return KINDS.get(message.kind, TrainerError)(message.text)
