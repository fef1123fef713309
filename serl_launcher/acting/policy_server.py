"""Asks a policy server of openpi's protocol (websockets) for chunks of actions, which algo=residual improves.

It is the other side of bridge.py. The facts of the protocol are in openpi.py: the server sends its metadata first, then
answers each map of observations with a map that holds `actions`, or with a text that says what went wrong.
"""

import logging
import socket
import struct
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from serl_client import clock
from serl_client.errors import ConfigError, MessageError
from serl_client.keys import private_text
from serl_client.spec import Array, Spec
from websockets.exceptions import InvalidStatus, InvalidURI, WebSocketException
from websockets.sync.client import ClientConnection, connect
from websockets.uri import parse_uri

from serl_launcher.acting import openpi
from serl_launcher.acting.served_policy import SAID, ServedPolicy

ANSWER = "answer of a policy server"
CLOSE_S = 0.1  # for a server to close in order
FAILURES = OSError, WebSocketException, MessageError, AssertionError  # websockets asserts where a handshake breaks off
SILENT = logging.Logger("policy server", logging.CRITICAL + 1)  # it would write a traceback for what is told anyway


class PolicyServer(ServedPolicy):
    """A server of openpi's protocol. After a failure the connection is opened anew.

    url: `ws://HOST:PORT`. api_key: the file that holds the Api-Key which it wants; None: it wants none. options: of
    ServedPolicy, which says what it raises.
    """

    failures, changeable, reserved = FAILURES, (*ServedPolicy.changeable, "api_key"), (openpi.PROMPT,)

    def __init__(self, spec: Spec, *, url: str, api_key: str | None, **options: Any) -> None:
        try:
            parse_uri(url)
        except (InvalidURI, ValueError):
            raise ConfigError(f"policy.url={url}: say the address of a policy server, ws://HOST:PORT") from None
        super().__init__(spec, url=url, **options)
        self._headers = {"Authorization": f"Api-Key {_read_api_key(api_key)}"} if api_key else None
        self._held = ExitStack()
        self._connection: ClientConnection | None = None

    def _infer(self, observation: Mapping[str, Array], task: str, deadline: float) -> object:
        connection = self._connection or self._opened(deadline)
        connection.send(openpi.pack({**observation, openpi.PROMPT: task}))
        answer = connection.recv(max(0.0, deadline - clock.monotonic()))
        if isinstance(answer, str):
            lines = answer.strip().splitlines() or [""]
            raise MessageError(f"it says: {lines[-1][:SAID]}")  # of openpi's server, the last line of a traceback
        return openpi.unpack(answer, ANSWER).get("actions")

    def _opened(self, deadline: float) -> ClientConnection:
        """Connect, and read the server's metadata, which has no fixed keys."""
        left = max(0.001, deadline - clock.monotonic())
        try:
            opening = connect(
                self._url, open_timeout=left, close_timeout=CLOSE_S, compression=None, max_size=openpi.LEAST_LIMIT,
                proxy=None, additional_headers=self._headers, logger=SILENT,
            )  # fmt: skip
        except InvalidStatus as refused:
            said = bytes(refused.response.body or b"").decode(errors="replace")[:SAID]
            raise MessageError(f"{refused} {said}".strip()) from None
        connection = self._connection = self._held.enter_context(opening)
        limit = struct.pack("ll", int(self._timeout_s), int(self._timeout_s % 1 * 1e6))
        connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)  # of a server that does not read
        openpi.unpack(connection.recv(max(0.0, deadline - clock.monotonic())), ANSWER)
        return connection

    def _drop(self, error: BaseException) -> None:
        """Close the connection: an answer that comes late is none to the next question."""
        self._connection = None
        with suppress(*FAILURES):
            self._held.close()


def _read_api_key(file: str) -> str:
    """Raises ConfigError."""
    try:
        text = private_text(Path(file), "policy.api_key names the file with the Api-Key of the policy server").strip()
    except ValueError:
        text = ""
    if not (text and text.isascii() and text.isprintable()):
        raise ConfigError(f"policy.api_key={file}: this file should hold an Api-Key alone, in one line")
    return text
