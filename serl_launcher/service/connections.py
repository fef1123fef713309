"""Watches the TCP connections of a public socket: who holds a place, and how much waits unread on either side.

libzmq reads whatever comes, and takes whatever is sent, and knows no limit in bytes. So the kernel is asked how many
bytes a connection has brought, and what was taken out of the socket is subtracted; and how many the other side has
got, which is subtracted from what was sent there.

The kernel uses a descriptor again as soon as its connection has ended, while messages of that one may still wait in the
socket. So each message also carries how many connections had been accepted when its own was let in (ZAP, access.py):
it is of the connection that has the descriptor now if that one was among them.
"""

import ctypes
import math
import socket
import struct
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import zmq
from serl_client import clock, wire
from serl_client.connection import has_come
from serl_client.errors import ServerFailed

from serl_launcher.service.places import Places

CONNECTIONS = 256  # of guests at once, and of strangers
WINDOW = 16 << 20  # bytes on the way of an actor
LEAST_WINDOW = 64 << 10  # a larger record goes alone
GUEST_BYTES = 5 * WINDOW // 2  # unread, of a key; more where the run's records are so large that one would not fit
STRANGER_BYTES = 4 << 20  # unread, of all connections of an address that are no guests: a Hello has at most 1 MiB
UNHEARD_BYTES = 6 << 20  # sent and not received, for a connection: four parts of weights, a status and a Welcome
SENT = 4  # times that, for all connections of a key: six actors that pull weights at once; others ask again
TRIM_BYTES = 32 << 20  # that came and went, after which libc gives back what it keeps of their memory
LOOK_S = 0.02  # between two looks at what has come, at least; and LOOKS times as long as the last one took
LOOKS = 50
FRAME_BYTES = 128  # more than a frame has on the wire beside its data; heartbeats are counted by nothing else
ACKED, RECEIVED = slice(120, 128), slice(128, 136)  # tcpi_bytes_acked and tcpi_bytes_received of struct tcp_info
EVENT = struct.Struct("=Hi")  # of the monitor: what happened, and its value
ADMITTED = "Admitted"  # the property of a message that says when its connection was let in
LIBC = ctypes.CDLL(None)
MAY_TRIM = hasattr(LIBC, "malloc_trim") and "torch" not in sys.modules  # beside torch it takes 15 ms and more
if MAY_TRIM:
    LIBC.mallopt(-3, 1 << 20)  # M_MMAP_THRESHOLD: what is larger goes back to the system as soon as it is freed
EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL


def window(actors: int) -> int:
    """Return how many bytes the last of so many actors of a key may have on their way, for as long as it is connected:
    half as many as the one before it, so that 100 of them bring no more together than may be unread."""
    return max(WINDOW >> max(actors - 1, 0), LEAST_WINDOW)


@dataclass(slots=True)
class _Held:
    """What is known of the connection that has a descriptor: that it is the `number`-th that was accepted, how many
    bytes it had brought at the last look, how many of them were taken out of the socket, how many were sent to it, how
    many of those it had got at the last look, and its routing id, once it has sent something."""

    number: int
    came: int = 0
    taken: int = 0
    sent: int = 0
    got: int = 0
    identity: bytes | None = None


class Connections:
    """The TCP connections of one ROUTER, by their descriptors.

    refuse(reason, text, times): counts what is refused. has_keys: only whoever has a key finishes the handshake.
    """

    def __init__(self, router: zmq.Socket, refuse: Callable[..., None], *, has_keys: bool) -> None:
        self.monitor = router.get_monitor_socket(EVENTS)
        self.places = Places(CONNECTIONS)
        self._refuse, self._has_keys = refuse, has_keys
        self._held: dict[int, _Held] = {}
        self._descriptors: dict[bytes, int] = {}  # of those who have sent something
        self._accepted = 0  # connections since this began
        self._gone: dict[int, None] = {}  # descriptors whose connections have ended, which was not handled yet
        self._new: dict[int, int] = {}  # {descriptor: number} of those that were accepted since, and not handled either
        self._broken = 0  # how the connection that ends next has broken the protocol in its handshake
        self._failed = Counter[tuple[int, str]]()  # {(how, who): times} of handshakes that broke it, to be told
        self._dropped: dict[bytes, None] = {}  # routing ids of guests that were cut: the rest of theirs is not heard
        self._cuts: dict[str, str] = {}  # {key, or address: why a connection of that guest was cut}, until it is told
        self.has_lost = False  # a connection has ended since this was made false
        self._look_due, self._passed = 0.0, 0  # bytes since the memory was given back
        self.queued: Callable[[], Mapping[str, int]] = dict  # {key: bytes} that were taken out of the socket and wait
        self.largest = 0  # bytes of a record that a guest may have to send alone

    def turn(self, end: float = math.inf) -> None:
        """Look at who has come and gone, about until the time `end`, and cut who is too many or brings too much; never
        waits. Whoever has gone before anybody looked costs next to nothing."""
        self._receive()
        for descriptor in [*self._gone, *self._new]:
            self._settle(descriptor)
            if clock.monotonic() > end:
                break
        while self._failed:
            (broken, client), times = self._failed.popitem()
            self._judge(broken, client, times)
        if clock.monotonic() > self._look_due:
            begin = time.thread_time()  # which passes in no process that is stopped
            self._look()
            self._look_due = clock.monotonic() + max(LOOK_S, LOOKS * (time.thread_time() - begin))
            if self._passed > TRIM_BYTES and MAY_TRIM:
                self._passed = 0
                LIBC.malloc_trim(0)

    @property
    def living(self) -> set[bytes]:
        """The routing ids of the connections that have sent something."""
        return set(self._descriptors)

    def admitted(self) -> dict[str, bytes]:
        """Return the properties of all messages of a connection that is let in now: its handshake ends after this."""
        self._receive()
        return {ADMITTED: b"%d" % self._accepted}

    def heard(self, identity: zmq.Frame, frames: Sequence[wire.Buffer]) -> None:
        """Count a message that was taken out of the socket."""
        if (held := self._held.get(descriptor := self._descriptor(identity))) is not None:
            size = sum(map(len, frames))
            held.taken += size + FRAME_BYTES * len(frames)
            self._passed += size
            held.identity = identity.bytes
            self._descriptors[held.identity] = descriptor

    def is_dropped(self, identity: bytes) -> bool:
        """Whether this was a guest's connection that was cut: what it had brought need not be kept."""
        return identity in self._dropped

    def has_room(self, identity: bytes, size: int) -> bool:
        """Whether so many bytes may be sent to the connection beside what all those of its key have not received:
        UNHEARD_BYTES for each, at most SENT times."""
        if (descriptor := self._descriptors.get(identity)) is None:
            return True
        key = self.places.guests.get(descriptor) if self._has_keys else None
        mine = [each for each, owner in self.places.guests.items() if owner == key] if key else [descriptor]
        most = UNHEARD_BYTES * min(len(mine), SENT) - size
        if sum(self._held[each].sent - self._held[each].got for each in mine) > most:
            return sum(held.sent - held.got for held in map(self._ask, mine)) <= most
        return True

    def sent(self, identity: bytes, size: int) -> None:
        """Count bytes that were sent to a connection."""
        if (held := self._held.get(self._descriptors.get(identity, -1))) is not None:
            held.sent += size
            self._passed += size

    def welcome(self, identity: zmq.Frame, key: str) -> str:
        """Make the sender of a Hello a guest, of this key ("": there are none). Return why a connection of that key was
        cut, if nobody was told yet. Raises ServerFailed without a place."""
        self.turn()  # whoever has gone meanwhile gets no place
        descriptor = self._descriptor(identity)
        if (address := self.places.strangers.get(descriptor)) is None:
            return ""
        loser = self.places.welcome(descriptor, key or address)
        if loser == descriptor:
            raise ServerFailed(f"the learner has {self.places.most} clients already: wait until one has left")
        if loser is not None:
            self._cut(loser, "too many connections", f"there are {self.places.most} clients already")
        return self._cuts.pop(key or address, "")

    def _receive(self) -> None:
        while has_come(self.monitor):
            event, value = EVENT.unpack(self.monitor.recv_multipart()[0])
            if event == zmq.EVENT_ACCEPTED:
                self._accepted += 1
                self._new[value] = self._accepted
            elif event == zmq.EVENT_DISCONNECTED:
                self._ended(value)
            else:
                self._broken = value  # the next connection that ends is the one

    def _ended(self, descriptor: int) -> None:
        if self._broken:
            address = self.places.strangers.get(descriptor)  # none, if nobody has looked at it yet
            self._failed[self._broken, f"a client at {address}" if address else "a client"] += 1
            self._broken = 0
        if self._new.pop(descriptor, None) is None:
            self._gone[descriptor] = None

    def _settle(self, descriptor: int) -> None:
        """Handle what has happened to the connection of a descriptor: its end, then the beginning of another."""
        if descriptor in self._gone:
            del self._gone[descriptor]
            self.places.leave(descriptor)
            if (held := self._held.pop(descriptor, None)) is not None and held.identity is not None:
                self._descriptors.pop(held.identity, None)
            self.has_lost = True
        if (number := self._new.pop(descriptor, None)) is not None:
            self._held[descriptor] = _Held(number)
            if (loser := self.places.knock(descriptor, _address(descriptor))) is not None:
                self._cut(loser, "too many connections", f"{self.places.most} others have not said Hello either")

    def _judge(self, broken: int, client: str, times: int) -> None:
        """Count a client whose handshake broke the protocol in this way.

        Who leaves within the handshake is refused nothing: it may have looked who is here, as our own actors and tools
        do. A client without a key may go so, too, as soon as it sees that one is wanted; its next try is told.
        """
        if broken == zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC:
            self._refuse("wrong server key", f"{client} knows the learner by another key", times)
        elif broken == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH and self._has_keys:
            self._refuse("no key", f"{client} has no key: make one with tools/keys.py, and say key= there", times)
        elif broken == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
            self._refuse("bad handshake", f"{client} has a key, and this learner has none", times)
        else:
            self._refuse("bad handshake", f"{client} broke the protocol ({broken:#x})", times)

    def _look(self) -> None:
        """Cut those that have brought most, where a guest's key or a stranger's address brings too much, until the rest
        has brought half of what it may: many bring much more while one after the other is cut."""
        unread: dict[tuple[str, int], dict[int, int]] = defaultdict(dict)
        of_guest = max(GUEST_BYTES, self.largest + wire.MAX_HEADER + WINDOW)
        for descriptor, key in self.places.guests.items():
            account = key if self._has_keys else f"{key} ({descriptor})"
            unread[account, of_guest][descriptor] = self._unread(descriptor)
        for descriptor, address in self.places.strangers.items():
            unread[address, STRANGER_BYTES][descriptor] = self._unread(descriptor)
        queued = self.queued()
        for (group, most), amounts in unread.items():
            left = sum(amounts.values()) + queued.get(group, 0)
            if left > most:
                for worst in sorted(amounts, key=amounts.__getitem__, reverse=True):
                    self._cut(worst, "too much unread", f"more than {most >> 20} MiB of {group}")
                    left -= amounts[worst]
                    if left <= most / 2:
                        break

    def _unread(self, descriptor: int) -> int:
        """Return how many bytes a connection has brought that were not taken out of the socket."""
        held = self._ask(descriptor)
        return held.came - held.taken

    def _ask(self, descriptor: int) -> _Held:
        """Ask the kernel what has come and gone. What goes over the wire is a little more than its frames."""
        held, got, came = self._held[descriptor], 0, 0
        with suppress(OSError), _borrowed(descriptor) as accepted:
            info = accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, RECEIVED.stop)
            got, came = (int.from_bytes(info[part], sys.byteorder) for part in (ACKED, RECEIVED))
        held.got, held.came = got, came
        held.taken, held.sent = min(held.came, held.taken), max(held.got, held.sent)
        return held

    def cut(self, identity: zmq.Frame, reason: str, text: str) -> None:
        """Shut the connection down on which the message came that began with this frame."""
        self._cut(self._descriptor(identity), reason, text)

    def cut_all(self, key: str, reason: str, text: str) -> None:
        """Shut all connections of a key down."""
        for descriptor in [descriptor for descriptor, owner in self.places.guests.items() if owner == key]:
            self._cut(descriptor, reason, text)

    def _cut(self, descriptor: int, reason: str, text: str) -> None:
        """Shut a connection down that libzmq has accepted: it knows no limit of its own."""
        self._refuse(reason, text)
        if key := self.places.guests.get(descriptor):
            if (held := self._held.get(descriptor)) is not None and held.identity is not None:
                self._dropped[held.identity] = None
                while len(self._dropped) > CONNECTIONS:
                    del self._dropped[next(iter(self._dropped))]
            self._cuts[key] = f"the connection before was cut, {reason}: {text}; give each robot a key of its own"
        self.places.leave(descriptor)
        self._passed += TRIM_BYTES if key else STRANGER_BYTES  # perhaps, or more
        with suppress(OSError), _borrowed(descriptor) as accepted:
            self._receive()  # its end is said before the descriptor is another's
            if descriptor not in self._gone:
                accepted.shutdown(socket.SHUT_RDWR)

    def _descriptor(self, identity: zmq.Frame) -> int:
        """Return the descriptor of the connection on which the message came that began with this frame; -1 where
        libzmq does not know it, or that connection has ended."""
        try:
            descriptor, admitted = int(identity.get(zmq.SRCFD)), int(identity.get(ADMITTED))
        except zmq.ZMQError:
            return -1
        self._settle(descriptor)
        held = self._held.get(descriptor)
        return descriptor if held is not None and held.number <= admitted else -1


@contextmanager
def _borrowed(descriptor: int) -> Iterator[socket.socket]:
    """Hold the socket that libzmq has at this descriptor now. Raises OSError if this is none any more."""
    with socket.fromfd(descriptor, socket.AF_INET, socket.SOCK_STREAM) as accepted:
        yield accepted


def _address(descriptor: int) -> str:
    with suppress(OSError), _borrowed(descriptor) as accepted:
        return str([*accepted.getpeername(), ""][0])  # that of a socket of this machine alone is empty
    return ""
