"""Stands in for a websocket, where a browser refuses that of a host whose certificate it was told to trust.

The browser opens an EventSource, whose first event names the stream, and POSTs what it says with that name. A POST
carries it in a header, so no request of the page has a body.
"""

import asyncio
import base64
import json
import secrets
from collections.abc import AsyncIterator
from contextlib import suppress
from http import HTTPStatus
from urllib.parse import unquote

from websockets.asyncio.server import ServerConnection
from websockets.datastructures import Headers
from websockets.exceptions import ConnectionClosedError
from websockets.http11 import Request

from serl_launcher.page.door import HEADERS

WAITING = 64  # messages of a stream that are not read yet
CLOSE_S = 1.0  # seconds that a browser may take for its last event
NAME, SAID = "X-Stream", "X-Say"  # headers of a POST: the stream's name; the message, percent-encoded
BEGIN = Headers({**HEADERS, "Content-Type": "text/event-stream; charset=utf-8", "Connection": "close"})


class Stream:
    """A conversation with a browser, as the page has one by a websocket."""

    def __init__(self, connection: ServerConnection) -> None:
        self.name, self.id, self._connection = secrets.token_urlsafe(32), connection.id, connection
        self.transport, self.remote_address = connection.transport, connection.remote_address
        self._said: asyncio.Queue[str] = asyncio.Queue(WAITING)
        self.transport.write(b"HTTP/1.1 200 OK\r\n" + BEGIN.serialize())
        self._tell({"stream": self.name})

    async def __aiter__(self) -> AsyncIterator[str]:
        while True:
            yield await self.recv()

    async def recv(self) -> str:
        """Return what the browser says next. Raises ConnectionClosed once it has gone."""
        said, gone = asyncio.ensure_future(self._said.get()), self._connection.connection_lost_waiter
        try:
            await asyncio.wait((said, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            said.cancel()
        if gone.done():
            raise ConnectionClosedError(None, None)
        return said.result()

    async def send(self, message: str | bytes) -> None:
        """Tell the browser; returns when it takes it. Raises ConnectionClosed if it has gone."""
        self._tell({"text": message} if isinstance(message, str) else {"bytes": base64.b64encode(message).decode()})
        with suppress(OSError):
            await self._connection.drain()
        if self._connection.connection_lost_waiter.done():
            raise ConnectionClosedError(None, None)

    async def close(self, code: int, reason: str) -> None:
        """Say why it ends, and end it, within CLOSE_S."""
        self._tell({"code": code, "reason": reason})
        self.transport.close()
        self._connection.loop.call_later(CLOSE_S, self.transport.abort)

    def hear(self, request: Request, longest: int) -> HTTPStatus:
        """Take a message out of a POST; returns what to answer."""
        text = unquote("".join(request.headers.get_all(SAID)))
        if len(text) > longest:
            return HTTPStatus.REQUEST_ENTITY_TOO_LARGE
        try:
            self._said.put_nowait(text)
        except asyncio.QueueFull:
            return HTTPStatus.TOO_MANY_REQUESTS
        return HTTPStatus.OK

    def _tell(self, event: dict[str, object]) -> None:
        self.transport.write(b"data: " + json.dumps(event).encode() + b"\n\n")
