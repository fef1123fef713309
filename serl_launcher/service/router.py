"""Makes the ROUTER sockets of the server and the inference process, and bounds what waits there for who does not read.

libzmq counts the messages that wait for a client, and knows no limit for their bytes: connections.py does.
"""

import logging
from collections.abc import Callable

import zmq
from serl_client import messages as m
from serl_client import wire
from serl_client.errors import ConfigError

from serl_launcher.service.connections import Connections

log = logging.getLogger(__name__)

LARGE = 1 << 10  # bytes of a message that is not sent to whom too much waits for
COPY_BELOW = 4 << 10  # bytes of a frame that is copied
QUEUED = 64  # messages for one connection


class Router(zmq.Socket[bytes]):
    """A ROUTER that never waits for a client. connections: of a public address; None: of one for our own processes."""

    connections: Connections | None

    def tell(self, identity: bytes, message: m.Message) -> bool:
        """Send a message; a client whose queue is full misses it (acks and notices come again).

        Returns False where the message is large, and was not sent because as much waits already as may.
        """
        frames, watch = wire.joined(m.encode(message)), self.connections
        size = sum(map(len, frames))
        if watch is not None and size >= LARGE and not watch.has_room(identity, size):
            return False
        try:
            self.send_multipart([identity, *frames], zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            log.debug("not sent: %s", error)
            return True
        if watch is not None:
            watch.sent(identity, size)
        return True


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
    socket.connections, socket.copy_threshold = None, COPY_BELOW
    for setting, value in (
        (zmq.LINGER, 0), (zmq.IPV6, "[" in address), (zmq.MAXMSGSIZE, wire.MAX_ARRAY), (zmq.ROUTER_MANDATORY, 1),
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
