"""Serves robots that speak openpi's policy-server protocol (websockets), in the same batches as our own actors.

Its sockets live on a thread of their own. openpi.py reads and writes the bytes; docs/guides/openpi.md is for its users.
"""

import asyncio
import http
import itertools
import logging
import secrets
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf
from serl_client import clock
from serl_client import messages as m
from serl_client.connection import tcp
from serl_client.console import throttled
from serl_client.controller import decision_seed
from serl_client.errors import ConfigError, MessageError
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed, ConnectionClosedError
from websockets.frames import CloseCode
from websockets.http11 import Request, Response

from serl_launcher.acting import openpi
from serl_launcher.acting.host import Answer, PolicyHost, Question
from serl_launcher.error_log import ERRORS, first_line, write_traceback
from serl_launcher.service.access import REMEDIES, AllowList, RefusalCount, check_address
from serl_launcher.service.peers import GRANTS
from serl_launcher.service.places import Places

log = throttled(__name__)

CONNECTIONS = 64  # at once, and fewer if their requests would take more than BYTES
BYTES = 1 << 30  # of all requests on their way
COPIES = 3  # of one request: that one as a message and as arrays, and the next one
SEND_S = 20.0  # until a client that does not read its answer is cut: while it waits, websockets sends it no ping
FRAMES = 1000  # of one connection within a second; pings count, as each of them is answered
ENDED = CloseCode.INTERNAL_ERROR, "the sentence before this frame says why"  # as openpi's server closes
BROKEN = CloseCode.MESSAGE_TOO_BIG, CloseCode.PROTOCOL_ERROR, CloseCode.INVALID_DATA  # with which websockets closes


class _Barred(MessageError):
    """A client that is not let in, or not any more, or that no answer is for. `reason`: under which it is counted."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


class Bridge:
    """Serves openpi's protocol from `start` on, until `close`.

    ask: takes a Question to where the actors' questions wait; may be called on any thread. Its `deliver` is to be
    called with the answer. `host` is only asked whether a request fits.
    """

    def __init__(
        self, host: PolicyHost, address: tuple[str, int], keys: Mapping[str, str], allowed: Path | None,
        ask: Callable[[Question], None], run_dir: Path,
    ) -> None:  # fmt: skip
        """Raises ConfigError for an address that needs keys, or for `keys` (bridge.keys) that do not fit the robot.

        allowed: the folder of tools/keys.py, of which each client needs an Api-Key; None: everybody is let in.
        run_dir: the run's folder, for the traceback of what ends the bridge.
        """
        check_address(tcp(*address), allowed, "bridge.host")
        if host.acting.history > 1:
            raise ConfigError(
                f"bridge.port={address[1]}: the policy looks at {host.acting.history} observations, and an openpi "
                "client sends one: train with policy.history=1, or say bridge.port=null"
            )
        self.form, self.refusals = openpi.Form(host.spec, keys), RefusalCount()
        self.most = max(1, min(CONNECTIONS, BYTES // (COPIES * self.form.limit)))
        self.places = Places(self.most)  # of the connections that are open, before and after their handshake
        self._host, self._address, self._ask, self._run_dir = host, address, ask, run_dir
        self._allowed = AllowList(allowed) if allowed else None
        self._numbers = itertools.count(1)
        self._welcome = openpi.pack({
            "server": "retake", "observation": self.form.describe(), "fps": host.spec.fps,
            "action": {"shape": [*host.spec.action.shape], "names": [*host.spec.action.names]},
        })  # fmt: skip
        self._loop = asyncio.new_event_loop()
        self._stopped = asyncio.Event()
        self._unanswered: set[asyncio.Future[Answer]] = set()
        self._trouble = ""  # why it serves nobody
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Listen, once there are weights: before that a client of openpi waits by itself. May be called again.

        Where it cannot listen on its address, it says so once, and the next call tries again.
        """
        if self._thread is not None:
            return
        try:
            family = socket.AF_INET6 if ":" in self._address[0] else socket.AF_INET
            listening = socket.create_server(self._address, family=family)
        except (OSError, OverflowError) as error:
            if not self._trouble:
                host, port = self._address
                self._trouble = f"it cannot listen on {host}:{port} ({getattr(error, 'strerror', None) or error})"
                log.error("the bridge serves nobody: %s; it tries again. Or choose another bridge.port=", self._trouble)
            return
        self._trouble = ""
        self._thread = threading.Thread(target=self._run, args=(listening,), name="bridge", daemon=True)
        self._thread.start()

    def report(self) -> dict[str, Any]:
        """Return the report for the heartbeat, with why it serves nobody, if so."""
        waits = "it listens once there are weights" if self._thread is None else ""
        trouble = {"trouble": self._trouble or waits} if self._trouble or waits else {}
        return {"openpi": {"connections": len(self.places.guests), **trouble, **self.refusals.report}}

    def close(self) -> None:
        """Close all connections, and end the thread. May be called twice."""
        if self._loop.is_closed():
            return
        if self._thread is not None:
            self._loop.call_soon_threadsafe(self._stopped.set)
            self._thread.join()
        self._loop.close()

    # -- the thread
    def _run(self, listening: socket.socket) -> None:
        try:
            self._loop.run_until_complete(self._listen(listening))
        except Exception as error:  # our own actors are still answered
            listening.close()
            write_traceback(self._run_dir, "bridge", error)
            self._trouble = first_line(error)
            log.error("the bridge has ended: %s (where: %s)", self._trouble, self._run_dir / ERRORS)

    async def _listen(self, listening: socket.socket) -> None:
        silent = logging.Logger("bridge", logging.CRITICAL + 1)  # it would write a traceback for each broken handshake
        made = cast("type[ServerConnection]", partial(_Connection, self))
        async with serve(
            self._serve, sock=listening, process_request=self._knock, compression=None, max_size=self.form.limit,
            max_queue=0, server_header=None, logger=silent, create_connection=made, close_timeout=1.0,
        ):  # fmt: skip
            await self._stopped.wait()
            for connection in self.places:  # an orderly end would wait for whoever does not read
                connection.transport.abort()
            for answered in self._unanswered:  # nobody will
                if not answered.done():
                    answered.set_exception(ConnectionClosedError(None, None))

    def _knock(self, connection: ServerConnection, request: Request) -> Response | None:
        """Answer what is no websocket, and whoever is not let in; None: it is let in."""
        if request.path == "/healthz":
            return connection.respond(http.HTTPStatus.OK, "OK\n")
        if request.headers.get_all("Origin"):  # every page that a browser shows could connect to loopback
            return self._refuse(connection, http.HTTPStatus.FORBIDDEN, "a browser", "browsers are not let in")
        try:
            name = self._admit(request)
        except _Barred as error:
            return self._refuse(connection, http.HTTPStatus.UNAUTHORIZED, error.reason, str(error))
        if (loser := self.places.welcome(connection, name or address_of(connection))) is None:
            return None
        text = f"there are {self.most} connections already"
        if loser is connection:
            return self._refuse(connection, http.HTTPStatus.SERVICE_UNAVAILABLE, "too many connections", text)
        loser.cut("too many connections", text)
        return None

    def _refuse(self, connection: ServerConnection, status: http.HTTPStatus, reason: str, text: str) -> Response:
        self.refusals.add(reason, f"an openpi client: {text}")
        return connection.respond(status, f"{text}\n")

    def _admit(self, request: Request) -> str:
        """Return the name of the request's Api-Key, "" without keys. Raise _Barred unless that is an actor's or an
        operator's, now."""
        if self._allowed is None:
            return ""
        said = request.headers.get_all("Authorization")
        if len(said) != 1 or not said[0].startswith("Api-Key "):
            raise _Barred("no key", "this learner wants an Api-Key: tools/keys.py api NAME on the learner prints it")
        owner = self._allowed.bearer(said[0].removeprefix("Api-Key ").strip())
        if owner.role in REMEDIES:
            raise _Barred(
                f"{owner.role} key", f"the Api-Key of {owner.name or 'nobody'} is {owner.role}: {REMEDIES[owner.role]}"
            )
        if m.InferenceRequest not in GRANTS[owner.role]:
            raise _Barred("role", f"the key {owner.name} has the role {owner.role}, which may not ask for actions")
        return owner.name

    async def _serve(self, connection: ServerConnection) -> None:
        """Answer one client until it goes or makes a mistake, of which it is told."""
        try:
            await self._converse(connection)
        except ConnectionClosed as closed:
            if closed.sent is not None and closed.sent.code in BROKEN:
                self.refusals.add("bad message", f"an openpi client: {closed.sent.reason}")
        except MessageError as error:
            reason = error.reason if isinstance(error, _Barred) else "bad message"
            self.refusals.add(reason, f"an openpi client: {error}")
            with suppress(ConnectionClosed), self._reading(connection):
                await connection.send(str(error))
                await connection.close(*ENDED)
        except Exception:
            log.exception("the bridge failed for one client, whose connection is cut")
            connection.transport.abort()

    async def _converse(self, connection: ServerConnection) -> None:
        """Answer one request after the other. Raises MessageError for one that is refused."""
        number, actor, previous = next(self._numbers), secrets.token_bytes(16), {}
        with self._reading(connection):
            await connection.send(self._welcome)
        for count in itertools.count():
            data, begun = await connection.recv(), clock.monotonic()
            assert connection.request is not None
            owner = self._admit(connection.request)
            observation, task = self.form.read(data)
            seed = decision_seed(f"openpi/{number}", count)
            ask = m.InferenceRequest(count, seed, count == 0, False, task, observation)
            self._host.check(ask)
            asked = clock.monotonic()
            answer = await self._answer(Question(actor, ask, asked, owner))
            if isinstance(answer, m.Failed):
                raise _Barred("not finite", answer.text)
            timing = {"infer_ms": (clock.monotonic() - asked) * 1e3, **previous}
            with self._reading(connection):
                await connection.send(openpi.pack({"actions": answer.arrays["action"], "server_timing": timing}))
            previous = {"prev_total_ms": (clock.monotonic() - begun) * 1e3}

    @contextmanager
    def _reading(self, connection: ServerConnection) -> Iterator[None]:
        """Cut the client if what is sent within takes SEND_S: it does not read."""
        assert isinstance(connection, _Connection)
        late = self._loop.call_later(SEND_S, connection.cut, "does not read", f"an answer waited for {SEND_S:.0f} s")
        try:
            yield
        finally:
            late.cancel()

    async def _answer(self, question: Question) -> Answer:
        if self._stopped.is_set():
            raise ConnectionClosedError(None, None)
        answered: asyncio.Future[Answer] = self._loop.create_future()
        self._unanswered.add(answered)
        answered.add_done_callback(self._unanswered.discard)

        def deliver(answer: Answer) -> None:
            with suppress(RuntimeError):  # the bridge is closed
                self._loop.call_soon_threadsafe(lambda: answered.done() or answered.set_result(answer))

        self._ask(replace(question, deliver=deliver))
        return await answered


class _Connection(ServerConnection):
    """One connection, which is cut when it costs too much."""

    def __init__(self, bridge: Bridge, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._bridge, self._second, self._frames = bridge, 0.0, 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if (loser := self._bridge.places.knock(self, address_of(self))) is not None:
            loser.cut("too many connections", f"more than {self._bridge.most} sockets are open without a handshake")

    def connection_lost(self, exc: Exception | None) -> None:
        self._bridge.places.leave(self)
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
        self._bridge.refusals.add(reason, f"an openpi client: {text}")
        self.transport.abort()


def address_of(connection: ServerConnection) -> str:
    return str((connection.remote_address or ("",))[0])


def bridge_of(config: DictConfig, host: PolicyHost, ask: Callable[[Question], None], run_dir: Path) -> Bridge | None:
    """Return the bridge that `config.bridge` describes; None if it has no port. Raises what Bridge raises."""
    if config.bridge.port is None:
        return None
    keys: Any = OmegaConf.to_container(config.bridge)
    address = config.bridge.host, config.bridge.port
    return Bridge(host, address, keys["keys"] or {}, Path(config["keys"]) if config["keys"] else None, ask, run_dir)
