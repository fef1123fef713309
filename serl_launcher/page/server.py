"""Runs the page's process: a web server on loopback. A browser asks, and is answered; nobody looks, nothing is done.

What is read and what is ordered runs on two threads of its own, so that neither waits for the other, and the process
has the lowest priority: server, trainer and actors never wait for it.
"""

import asyncio
import http
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from serl_client.console import log_as, throttled
from serl_client.errors import ConfigError, MessageError, RetakeError
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.frames import CloseCode
from websockets.http11 import Request, Response

from serl_launcher.error_log import first_line
from serl_launcher.page import door, downloads, orders
from serl_launcher.page.drivers import Drivers
from serl_launcher.page.folder import RunFolder
from serl_launcher.supervisor import END

log = throttled(__name__)

CONNECTIONS = 64  # pages that are open at once, with those that have not said their token
TOKEN_S = 5.0  # seconds that a new connection may take to say its token
LONGEST = 4096  # bytes of a question
GUEST = 8  # hexadecimal digits of a connection's random number, which name whoever drives by it


class Page:
    """Serves the page of one run. local: the learner's own address; empty: no learner runs."""

    def __init__(self, run_dir: Path, local: str) -> None:
        self.tokens = door.Tokens(run_dir / "page.tokens")
        self._run_dir, self._local = run_dir, local
        self._folder, self._drivers = RunFolder(run_dir, local), Drivers(local)
        self._reader, self._clerk = (ThreadPoolExecutor(1, name) for name in ("reader", "orders"))
        self._guests: set[ServerConnection] = set()  # whose token is good
        self._open = 0
        self._answers: dict[str, Callable[[Mapping[str, Any]], Any]] = {
            "state": lambda _: self._folder.state(), "curves": lambda _: self._folder.curves(),
            "episodes": lambda ask: self._folder.episodes(*(_text(ask, name) for name in ("which", "source", "actor"))),
            "image": lambda ask: self._folder.image(_text(ask, "episode"), _text(ask, "camera")),
        }  # fmt: skip

    async def run(self, port: int, end: int, begun: Callable[[], None] = lambda: None) -> None:
        """Serve until the signal `end` or Ctrl-C; print new links each LIFE_S. Raises ConfigError for a port in use."""
        stopped = asyncio.Event()
        for number in (end, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stopped.set)
        async with self.served(port):
            begun()
            while not stopped.is_set():
                self._print_links(port)
                with suppress(TimeoutError):
                    await asyncio.wait_for(stopped.wait(), door.LIFE_S)
        self.close()

    def close(self) -> None:
        """Let go of server and store, after what is being done."""
        self._drivers.close()
        self._reader.submit(self._folder.close)
        for pool in (self._reader, self._clerk):
            pool.shutdown()

    def served(self, port: int) -> Any:
        """Return the web server as an asynchronous context. Raises ConfigError in it for a port in use."""
        silent = logging.Logger("page", logging.CRITICAL + 1)  # else what a stranger sends would fill the log
        return _Listening(serve(
            self._serve, door.HOST, port, process_request=self._knock, compression=None, max_size=LONGEST, max_queue=4,
            open_timeout=TOKEN_S, close_timeout=1.0, server_header=None, logger=silent,
        ), port)  # fmt: skip

    def _print_links(self, port: int) -> None:
        """Print the links, and only here: whoever has one gives orders, or looks, for LIFE_S."""
        hours = round(door.LIFE_S / 3600)
        for role, what in (("operator", "the page of this run, for an operator"), ("viewer", "to look only")):
            sys.stdout.write(f"{what}, for {hours} h: http://localhost:{port}/#{self.tokens.make(role)}\n")
        sys.stdout.write(f"from another machine: ssh -L {port}:localhost:{port} HOST there, then the same link\n")
        sys.stdout.flush()

    def _knock(self, connection: ServerConnection, request: Request) -> Response | None:
        answer = door.knock(connection, request)
        if answer is None and self._open >= CONNECTIONS:
            return door.answered(http.HTTPStatus.SERVICE_UNAVAILABLE, b"too many pages are open")
        return answer

    async def _serve(self, connection: ServerConnection) -> None:
        self._open += 1
        try:
            token = await self._admit(connection)
            async for text in connection:
                if (role := self.tokens.role(token)) is None:
                    raise MessageError("this link is over: a new one stands on the learner's screen")
                await connection.send(await self._answer(_read(text), role, connection.id.hex[:GUEST]))
        except MessageError as error:
            with suppress(ConnectionClosed):
                await connection.close(CloseCode.POLICY_VIOLATION, str(error))
        except ConnectionClosed:
            pass
        finally:
            self._open -= 1
            self._guests.discard(connection)
            self._drivers.leave(connection.id.hex[:GUEST])
            if not self._guests:
                self._reader.submit(self._folder.close)

    async def _admit(self, connection: ServerConnection) -> str:
        """Return the token that the first message says. Raises MessageError for one that is not good."""
        try:
            async with asyncio.timeout(TOKEN_S):
                token = _text(_read(await connection.recv()), "token")
        except TimeoutError:
            raise MessageError("no token came") from None
        if (role := self.tokens.role(token)) is None:
            raise MessageError("this link is not good, or over: take the newest one from the learner's screen")
        self._guests.add(connection)
        await connection.send(json.dumps({"role": role, "run": self._run_dir.name}))
        return token

    async def _answer(self, ask: Mapping[str, Any], role: str, guest: str) -> str | bytes:
        """Return the answer to one question: JSON, or the number of the question, 4 bytes, and a JPEG."""
        number, kind = ask.get("id"), _text(ask, "ask")
        if not isinstance(number, int) or not 0 <= number < 1 << 31:
            raise MessageError("each question has a number")
        try:
            if kind == "order":
                answer: Any = await self._order(ask, role)
            elif kind == "download":
                self._check_operator(role)
                answer = await downloads.made(self._run_dir, _text(ask, "episode"), _text(ask, "format"))
            elif kind == "drive":
                self._check_operator(role)
                answer = self._drivers.drive(guest, ask)
            elif kind == "preview":
                answer = self._drivers.image(guest, _text(ask, "camera"))
            elif kind in self._answers:
                answer = await self._read(lambda: self._answers[kind](ask))
            else:
                raise MessageError(f"nothing answers {kind[:40]!r}")
            if isinstance(answer, bytes):
                return number.to_bytes(4, "big") + answer
            return json.dumps({"id": number, "answer": answer}, allow_nan=False)
        except RetakeError as error:
            if isinstance(error, MessageError):
                raise
            return json.dumps({"id": number, "error": str(error)})
        except Exception as error:
            log.exception("the page cannot answer %s", kind)
            return json.dumps({"id": number, "error": f"the page cannot tell: {first_line(error)}"})

    async def _order(self, ask: Mapping[str, Any], role: str) -> str:
        """Carry out an order. Raises what says why it was not, or may not have been."""
        order, about, actor = (_text(ask, name) for name in ("order", "about", "actor"))
        self._check_operator(role)
        if order in orders.VERDICTS and not actor and not await self._read(lambda: self._folder.has(about)):
            raise ConfigError(f"there is no episode {about[:80]!r} in this run")
        loop = asyncio.get_running_loop()
        carry_out = partial(orders.carry_out, self._run_dir, self._local, order, about, actor)
        done = await loop.run_in_executor(self._clerk, carry_out)
        log.info("the page says: %s", done)
        return done

    def _check_operator(self, role: str) -> None:
        if role != "operator":
            raise ConfigError("this link is to look only: an operator's one stands on the learner's screen, too")

    async def _read(self, what: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._reader, what)


class _Listening:
    """The web server as a context that says in a sentence why it cannot listen."""

    def __init__(self, server: Any, port: int) -> None:
        self._server, self._port = server, port

    async def __aenter__(self) -> Any:
        try:
            return await self._server.__aenter__()
        except (OSError, OverflowError) as error:
            why = getattr(error, "strerror", None) or error
            raise ConfigError(f"page={self._port}: it cannot listen there ({why}): choose another port") from None

    async def __aexit__(self, *error: object) -> None:
        await self._server.__aexit__(*error)


def _read(text: str | bytes) -> Mapping[str, Any]:
    """Return a message's JSON object. Raises MessageError for anything else."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise MessageError("a message is a JSON object")
    return found


def _text(ask: Mapping[str, Any], name: str) -> str:
    if not isinstance(value := ask.get(name, ""), str):
        raise MessageError(f"{name} is a text")
    return value


def main(config: DictConfig, run_dir: Path, local: str, begun: Callable[[], None]) -> None:
    """Run the page's process until END; `begun` is called once it listens."""
    log_as("page", logging.INFO)
    os.nice(19)
    asyncio.run(Page(run_dir, local).run(config.page, END, begun))
