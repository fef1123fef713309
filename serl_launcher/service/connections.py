"""Watches the TCP connections of a public socket: who holds a place, and how much each brings that nobody has read.

libzmq reads whatever comes, and knows no limit for all frames of a message together. So the kernel is asked how many
bytes a connection has brought, and what was taken out of the socket is subtracted.
"""

import socket
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import zmq
from serl_client import clock, wire
from serl_client.connection import has_come
from serl_client.errors import ServerFailed
from zmq.utils.monitor import parse_monitor_message

from serl_launcher.service.places import Places

CONNECTIONS = 256  # of guests at once, and of strangers
WINDOW, FLEET = 16 << 20, 16  # bytes on the way of an actor; actors of one key that may all be late at once
GUEST_BYTES = wire.MAX_MESSAGE + WINDOW  # unread, of a key: its largest message, and a window of each connection
STRANGER_BYTES = 4 << 20  # unread, of all connections of an address that are no guests: a Hello has at most 1 MiB
LOOK_S = 0.1  # between two looks at what has come
FRAME_BYTES = 128  # more than a frame has on the wire beside its data; heartbeats are counted by nothing else
RECEIVED = slice(128, 136)  # tcpi_bytes_received of struct tcp_info
EVENTS = (
    zmq.EVENT_ACCEPTED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)


class Connections:
    """The TCP connections of one ROUTER, by their descriptors.

    refuse(reason, text): counts what is refused. has_keys: only whoever has a key finishes the handshake.
    """

    def __init__(self, router: zmq.Socket, refuse: Callable[[str, str], None], *, has_keys: bool) -> None:
        self.monitor = router.get_monitor_socket(EVENTS)
        self.places = Places(CONNECTIONS)
        self._refuse, self._has_keys = refuse, has_keys
        self._taken: dict[int, int] = {}  # bytes of each connection that were taken out of the socket
        self.names: dict[int, bytes] = {}  # the routing id of each connection that has sent something
        self.has_lost = False  # a connection has ended since this was made false
        self._looked = 0.0

    def turn(self) -> None:
        """Look at who has come and gone, and cut who is too many or brings too much; never waits."""
        while has_come(self.monitor):
            event = parse_monitor_message(self.monitor.recv_multipart())
            self._happened(event["event"], event["value"])
        if clock.monotonic() > self._looked + LOOK_S:
            self._looked = clock.monotonic()
            self._look()

    def heard(self, identity: zmq.Frame, frames: Sequence[wire.Buffer]) -> None:
        """Count a message that was taken out of the socket."""
        if (descriptor := _descriptor(identity)) in self._taken:
            self._taken[descriptor] += sum(map(len, frames)) + FRAME_BYTES * len(frames)
            self.names[descriptor] = identity.bytes

    def welcome(self, identity: zmq.Frame, key: str) -> None:
        """Make the sender of a Hello a guest, of this key ("": there are none). Raises ServerFailed without a place."""
        self.turn()  # whoever has gone meanwhile gets no place
        descriptor = _descriptor(identity)
        if (address := self.places.strangers.get(descriptor)) is None:
            return
        loser = self.places.welcome(descriptor, key or address)
        if loser == descriptor:
            raise ServerFailed(f"the learner has {self.places.most} clients already: wait until one has left")
        if loser is not None:
            self._cut(loser, "too many connections", f"there are {self.places.most} clients already")

    def _happened(self, event: int, value: int) -> None:
        if event == zmq.EVENT_ACCEPTED:
            self._taken[value] = 0
            if (loser := self.places.knock(value, _address(value))) is not None:
                self._cut(loser, "too many connections", f"{self.places.most} others have not said Hello either")
        elif event == zmq.EVENT_DISCONNECTED:
            self.places.leave(value)
            self._taken.pop(value, None)
            self.names.pop(value, None)
            self.has_lost = True
        elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL and value == zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC:
            self._refuse("wrong server key", "a client knows the learner by another key")
        elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL and value != zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
            self._refuse("bad handshake", f"a client broke the protocol ({value:#x})")
        else:  # a client without a key goes as soon as it sees that one is wanted
            self._refuse("no key" if self._has_keys else "bad handshake", "a client's handshake was not finished")

    def _look(self) -> None:
        """Cut the connection that has brought most, where a guest's key or a stranger's address brings too much."""
        unread: dict[tuple[str, int], dict[int, int]] = defaultdict(dict)
        for descriptor, key in self.places.guests.items():
            account = key if self._has_keys else f"{key} ({descriptor})"
            unread[account, GUEST_BYTES][descriptor] = self._unread(descriptor)
        for descriptor, address in self.places.strangers.items():
            unread[address, STRANGER_BYTES][descriptor] = self._unread(descriptor)
        for (group, most), amounts in unread.items():
            windows = min(len(amounts), FLEET) - 1 if most == GUEST_BYTES else 0
            if sum(amounts.values()) > most + windows * WINDOW:
                worst = max(amounts, key=amounts.__getitem__)
                self._cut(worst, "too much unread", f"{amounts[worst] >> 20} MiB of {group}")

    def _unread(self, descriptor: int) -> int:
        came = 0
        with suppress(OSError), _borrowed(descriptor) as accepted:
            info = accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, RECEIVED.stop)
            came = int.from_bytes(info[RECEIVED], sys.byteorder)
        self._taken[descriptor] = min(came, self._taken[descriptor])
        return came - self._taken[descriptor]

    def _cut(self, descriptor: int, reason: str, text: str) -> None:
        """Shut a connection down that libzmq has accepted: it knows no limit of its own."""
        self._refuse(reason, text)
        self.places.leave(descriptor)
        with suppress(OSError), _borrowed(descriptor) as accepted:
            accepted.shutdown(socket.SHUT_RDWR)


@contextmanager
def _borrowed(descriptor: int) -> Iterator[socket.socket]:
    """Use libzmq's socket. Raises OSError if this is none any more."""
    accepted = socket.socket(fileno=descriptor)
    try:
        yield accepted
    finally:
        accepted.detach()


def _address(descriptor: int) -> str:
    with suppress(OSError), _borrowed(descriptor) as accepted:
        return str([*accepted.getpeername(), ""][0])  # that of a socket of this machine alone is empty
    return ""


def _descriptor(identity: zmq.Frame) -> int:
    """Return the descriptor on which the message came that began with this frame; -1 where libzmq does not know it."""
    try:
        return int(identity.get(zmq.SRCFD))
    except zmq.ZMQError:
        return -1
