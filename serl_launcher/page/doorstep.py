"""Listens for browsers, and bounds what they may hold: sockets, before TLS and HTTP; frames within a second."""

import asyncio
import logging
import socket
from contextlib import suppress
from typing import Any

from serl_client import clock
from serl_client.connection import tcp
from serl_client.errors import ConfigError
from websockets.asyncio.server import ServerConnection

from serl_launcher.page.ports import check_port
from serl_launcher.service.access import RefusalCount
from serl_launcher.service.places import Places
from serl_launcher.service.router import cannot_listen

CONNECTIONS = 64  # of those that are let in; as many of others
REQUEST_S = 5.0  # seconds that TLS may take, and then a request
UNREAD_S = 60.0  # seconds after which a browser that takes nothing of what is sent is cut; a slow one takes something
FRAMES = 1000  # of one connection within a second; pings count, as each of them is answered
OPTIONS = (  # of each socket: the kernel ends it if the other side takes nothing any more, or is gone
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(UNREAD_S * 1000)), (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, round(UNREAD_S)), (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
)  # fmt: skip


class Doorstep(socket.socket):
    """A listening socket. A stranger who is one too many is cut, or the oldest one of the address that has most."""

    def __init__(self, host: str, port: int, refusals: RefusalCount) -> None:
        """Raises ConfigError if it cannot listen there, or if no browser would come."""
        check_port(port)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            made = socket.create_server((host.strip("[]"), port), family=family)
        except (OSError, OverflowError) as error:
            why = str(getattr(error, "strerror", None) or error)
            raise ConfigError(cannot_listen(tcp(host, port), why, "page")) from None
        super().__init__(fileno=made.detach())
        self._refusals, self._places = refusals, Places(CONNECTIONS)
        self._sockets: dict[Any, socket.socket] = {}  # {peer: its socket}

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept a connection, as asyncio's server asks for it."""
        made, peer = super().accept()
        for option in OPTIONS:
            made.setsockopt(*option)
        for gone in [each for each in self._places.strangers if self._sockets[each].fileno() < 0]:
            self.leave(gone)
        self._sockets[peer] = made
        self._cut(self._places.knock(peer, peer[0]), f"more than {CONNECTIONS} sockets have said no token yet")
        return made, peer

    def welcome(self, peer: Any, name: str) -> bool:
        """Let a stranger in as `name`; False: there is no place. It keeps its place until it leaves."""
        loser = self._places.welcome(peer, name)
        if loser != peer:
            self._cut(loser, f"{CONNECTIONS} pages are open")
        return loser != peer

    def leave(self, peer: Any) -> None:
        self._places.leave(peer)
        self._sockets.pop(peer, None)

    def shut(self) -> None:
        """End all connections at once: an orderly end would wait for whoever does not read."""
        for each in self._sockets.values():
            _end(each)

    def _cut(self, peer: Any, why: str) -> None:
        if peer is not None:
            self._refusals.add("too many connections", f"a browser: {why}")
            _end(self._sockets.pop(peer))


def _end(connected: socket.socket) -> None:
    """Let both sides read its end; whoever has it as a transport closes it then."""
    with suppress(OSError):  # its other side has gone
        connected.shutdown(socket.SHUT_RDWR)


class Caller(ServerConnection):
    """One connection of a browser, which is cut when it costs too much."""

    def __init__(self, refusals: RefusalCount, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._refusals, self._second, self._frames = refusals, 0.0, 0
        self._has_spoken = False  # browsers open connections ahead, and may never use them

    async def handshake(self, *arguments: Any, **options: Any) -> None:
        """Wait for a request, for REQUEST_S; then it may be answered for as long as that takes."""
        over = [self.request_rcvd, self.connection_lost_waiter]
        await asyncio.wait(over, timeout=REQUEST_S, return_when=asyncio.FIRST_COMPLETED)
        if self.request is not None:
            await super().handshake(*arguments, **options)
        elif self._has_spoken:
            self.cut("no request", "what came was no request")
        else:
            self.transport.abort()

    def data_received(self, data: bytes) -> None:
        self._has_spoken = True
        super().data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if isinstance(exc, TimeoutError):  # by TCP_USER_TIMEOUT
            self._refusals.add("does not read", f"a browser: it has taken nothing for {UNREAD_S:.0f} s")
        super().connection_lost(exc)

    def process_event(self, event: Any) -> None:
        now = clock.monotonic()
        if now > self._second + 1.0:
            self._second, self._frames = now, 0
        self._frames += 1
        if self._frames == FRAMES:
            self.cut("too fast", f"more than {FRAMES} frames within a second")
        super().process_event(event)

    def cut(self, reason: str, text: str) -> None:
        self._refusals.add(reason, f"a browser: {text}")
        self.transport.abort()


SILENT = logging.Logger("page", logging.CRITICAL + 1)  # else what a stranger sends would fill the log
