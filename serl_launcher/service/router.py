"""Makes the ROUTER sockets of the server and the inference process, and bounds what waits there for who does not read.

libzmq counts the messages that wait for a client, and knows no limit for their bytes. So the bytes of large ones are
counted from when they are sent until libzmq has handed them on to the kernel.
"""

import logging
from collections import deque
from collections.abc import Callable

import zmq
from serl_client import messages as m
from serl_client import wire
from serl_client.errors import ConfigError

from serl_launcher.service.connections import FLEET

log = logging.getLogger(__name__)

LARGE = 4 << 10  # bytes of a message that is counted; they lie in its last frame, which is sent without a copy
UNREAD_BYTES = 6 << 20  # of large messages, for one connection: four parts of weights, a status and a Welcome
QUEUED = 64  # messages for one connection


class _Unread:
    """The large messages that wait for one connection. account: its key; without keys its routing id."""

    def __init__(self, account: str | bytes) -> None:
        self.account, self.bytes = account, 0
        self._sent: deque[tuple[zmq.MessageTracker, int]] = deque()

    def add(self, tracker: zmq.MessageTracker, size: int) -> None:
        self._sent.append((tracker, size))
        self.bytes += size

    def waits(self) -> bool:
        """Forget what the kernel has got by now; return whether there is anything else."""
        while self._sent and self._sent[0][0].done:
            self.bytes -= self._sent.popleft()[1]
        return bool(self._sent)


class Router(zmq.Socket[bytes]):
    """A ROUTER that never waits for a client."""

    _unread: dict[bytes, _Unread]  # of each connection for which something waits

    def tell(self, identity: bytes, message: m.Message, key: str = "") -> bool:
        """Send a message; a client whose queue is full misses it (acks and notices come again).

        key: whose connection it is. Returns False where the message is large, and was not sent because as much waits
        already as may: UNREAD_BYTES for each connection of this key, at most FLEET times; without a key for this one.
        """
        frames, account = wire.joined(m.encode(message)), key or identity
        if (size := sum(map(len, frames))) >= LARGE and not self._has_room(identity, account, size):
            return False
        try:
            tracker = self.send_multipart([identity, *frames], zmq.NOBLOCK, copy=False, track=True)
        except zmq.ZMQError as error:
            log.debug("not sent: %s", error)
            return True
        if size >= LARGE and tracker is not None:
            self._unread.setdefault(identity, _Unread(account)).add(tracker, size)
        return True

    def _has_room(self, identity: bytes, account: str | bytes, size: int) -> bool:
        self._unread = {other: each for other, each in self._unread.items() if each.waits()}
        mine = {other: each.bytes for other, each in self._unread.items() if each.account == account}
        return sum(mine.values()) + size <= UNREAD_BYTES * min(len({identity, *mine}), FLEET)


def cannot_listen(address: str, why: str, option: str) -> str:
    """Return what a person is told of an address that cannot be listened on. `why`: the system's words, which have
    several causes each."""
    return (
        f"cannot listen on {address.removeprefix('tcp://')} ({why}): `ss -ltnp` shows which program has a port, and "
        f"`ip addr` which addresses this machine has. Stop that program, or choose another {option}=... or host"
    )


def bound(
    context: zmq.Context, address: str, *, prepare: Callable[[zmq.Socket], None] = lambda _: None, option: str = "port"
) -> Router:
    """A ROUTER that listens on `address`, made ready by `prepare`. When it cannot, ends the context with all its
    sockets, and raises ConfigError; `option` is the one that chooses another address.

    Nobody sends ZeroMQ's heartbeats: libzmq 4.3.5 aborts the process when one falls due, or is to be answered, on a
    connection that broke while its queue was full. A strange client may, so the queue is never full, either:
    connections.py counts what waits there, in bytes.
    """
    socket = context.socket(zmq.ROUTER, socket_class=Router)
    socket._unread, socket.copy_threshold = {}, LARGE
    for setting, value in (
        (zmq.LINGER, 0), (zmq.IPV6, "[" in address), (zmq.MAXMSGSIZE, wire.MAX_ARRAY), (zmq.ROUTER_MANDATORY, 0),
        (zmq.SNDHWM, QUEUED), (zmq.RCVHWM, 0), (zmq.TCP_KEEPALIVE, 1), (zmq.TCP_KEEPALIVE_IDLE, 10),
        (zmq.TCP_KEEPALIVE_INTVL, 5), (zmq.TCP_KEEPALIVE_CNT, 3), (zmq.BACKLOG, 1024),
    ):  # fmt: skip
        socket.setsockopt(setting, value)
    prepare(socket)
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        context.destroy(linger=0)
        raise ConfigError(cannot_listen(address, str(error.strerror), option)) from None
    return socket
