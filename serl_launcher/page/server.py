"""Runs the page's process: a web server. A browser asks, and is answered; nobody looks, nothing is done.

What is read runs on a thread of its own, and so does each order, but those of one kind go one after the other: no order
waits for what a browser looks at, no word to a robot for a label, or for another robot, and a pause for nothing. The
process has the lowest priority: server, trainer and actors never wait for it.
"""

import asyncio
import http
import json
import logging
import signal
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, cast
from weakref import WeakValueDictionary

from omegaconf import DictConfig
from serl_client import clock
from serl_client.console import log_as, throttled
from serl_client.errors import ConfigError, MessageError, RetakeError
from serl_client.names import MAX_NAME, is_name
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.frames import CloseCode
from websockets.http11 import Request, Response

from serl_launcher.error_log import first_line
from serl_launcher.page import door, downloads, orders
from serl_launcher.page.certificate import wanted
from serl_launcher.page.doorstep import REQUEST_S, SILENT, UNREAD_S, Caller, Doorstep
from serl_launcher.page.drivers import Drivers
from serl_launcher.page.folder import RunFolder
from serl_launcher.page.links import links
from serl_launcher.page.stream import CLOSE_S, NAME, Stream
from serl_launcher.service.peers import KeyOwner
from serl_launcher.supervisor import END, give_way

log = throttled(__name__)

TOKEN_S = 5.0  # seconds that a new connection may take to say its token
REVOKED_S = 1.0  # seconds after which a page that asks nothing ends with its token, too
LONGEST = 4096  # bytes of a question
AT_ONCE = "drive", "preview"  # questions that are answered from memory
READS = 256  # other questions of one connection that are not answered yet
ORDERS = 16  # of one connection that are not carried out yet: labels; as many words beside them, and as many pauses
GUEST = 6  # hexadecimal digits of a connection's random number, which name whoever drives by it
OVER = "this link is over: a new one stands on the learner's screen"
BROKEN = CloseCode.MESSAGE_TOO_BIG, CloseCode.PROTOCOL_ERROR, CloseCode.INVALID_DATA  # with which websockets closes


class Page:
    """Serves the page of one run. local: the learner's own address; empty: no learner runs."""

    def __init__(
        self, run_dir: Path, local: str, *,
        host: str = "127.0.0.1", keys: Path | None = None, certificate: Path | None = None,
    ) -> None:  # fmt: skip
        """host, keys, certificate: as certificate.opened takes them, and raises."""
        self.tokens = door.Tokens(run_dir / "page.tokens")
        self.door = door.Door(self.tokens, host, keys, certificate)
        self._run_dir, self._local = run_dir, local
        self._folder, self._drivers = RunFolder(run_dir, local), Drivers(local)
        self._folder.refusals = self.door.refusals.counts
        self._reader, self._clerks = ThreadPoolExecutor(1, "reader"), ThreadPoolExecutor(ORDERS, "orders")
        self._turns = WeakValueDictionary[tuple[str, bool], asyncio.Lock]()  # of a robot, of the plan, of labels
        self._guests: dict[ServerConnection | Stream, str] = {}  # their tokens, which were good
        self._streams: dict[str, Stream] = {}  # by their names
        self._doorstep: Doorstep  # while it serves
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
                sys.stdout.write(links(self.door, port))
                sys.stdout.flush()
                with suppress(TimeoutError):
                    await asyncio.wait_for(stopped.wait(), door.LIFE_S)
        self.close()

    def close(self) -> None:
        """Let go of server and store, after what is being done."""
        self._drivers.close()
        self._reader.submit(self._folder.close)
        for pool in (self._reader, self._clerks):
            pool.shutdown()

    @asynccontextmanager
    async def served(self, port: int) -> AsyncIterator[None]:
        """Serve within this context. Raises ConfigError for a port in use."""
        self._doorstep = Doorstep(self.door.host, port, self.door.refusals)
        made = cast("type[ServerConnection]", partial(Caller, self.door.refusals))
        certificate = self.door.certificate
        tls: dict[str, Any] = {"ssl": certificate.context, "ssl_handshake_timeout": REQUEST_S} if certificate else {}
        async with serve(
            self._serve, sock=self._doorstep, process_request=self._knock, compression=None, max_size=LONGEST,
            max_queue=4, open_timeout=None, ping_timeout=UNREAD_S, close_timeout=CLOSE_S, server_header=None,
            logger=SILENT, create_connection=made, **tls,
        ):  # fmt: skip
            watch = asyncio.create_task(self._end_revoked())
            try:
                yield
            finally:
                watch.cancel()
                self._doorstep.shut()

    async def _knock(self, connection: ServerConnection, request: Request) -> Response | None:
        """Answer a request; None: it becomes a websocket."""
        if (answer := self.door.knock(connection, request)) is not None:
            return answer
        if request.path == door.SAY:
            stream = self._streams.get("".join(request.headers.get_all(NAME)))
            status = stream.hear(request, LONGEST) if stream else http.HTTPStatus.NOT_FOUND
            return door.answered(status, status.phrase.encode())
        if request.path == door.STREAM:
            stream = Stream(connection)
            self._streams[stream.name] = stream
            try:
                await self._serve(stream)
            finally:
                del self._streams[stream.name]
            await connection.wait_closed()
        return None

    async def _serve(self, connection: ServerConnection | Stream) -> None:
        given, read = set[asyncio.Task[None]](), set[asyncio.Task[None]]()  # orders and questions that are not done yet
        in_turn = asyncio.Lock()  # of what is read
        try:
            async with self._ending(connection):
                token = await self._admit(connection)
                async for text in connection:
                    if (owner := self.door.owner(token)) is None:
                        raise self.door.refusal(OVER)
                    ask = _read(text)
                    if ask.get("ask") in AT_ONCE:
                        await self._reply(connection, ask, owner)
                        continue
                    if ask.get("ask") != "order":
                        what, waiting, most, doing = "questions", read, READS, partial(self._reply_in_turn, in_turn)
                    else:  # a word has room beside labels, and a pause beside both
                        most = ORDERS * (1 if orders.is_label(ask) else 3 if ask.get("order") == orders.PAUSE else 2)
                        what, waiting, doing = "orders", given, self._reply_to
                    if len(waiting) >= most:
                        full = f"{len(waiting)} {what} wait: say it again once they are done"
                        await connection.send(json.dumps({"id": ask.get("id"), "error": full}))
                    else:
                        waiting.add(task := asyncio.create_task(doing(connection, ask, owner)))
                        task.add_done_callback(waiting.discard)
        finally:
            self._drivers.leave(connection.id.hex[:GUEST])
            if given | read:
                await asyncio.wait(given | read)
            self._doorstep.leave(connection.remote_address)
            if self._guests.pop(connection, None) and not self._guests:
                self._reader.submit(self._folder.close)

    @asynccontextmanager
    async def _ending(self, connection: ServerConnection | Stream) -> AsyncIterator[None]:
        """End a connection that says what is no question, or may not be let in; count that. It may also end itself."""
        try:
            yield
        except MessageError as error:
            self.door.refusals.add(getattr(error, "reason", "bad message"), f"a browser: {error}")
            with suppress(ConnectionClosed):
                await connection.close(getattr(error, "code", CloseCode.POLICY_VIOLATION), _short(str(error)))
        except ConnectionClosed as closed:
            if closed.sent is not None and closed.sent.code in BROKEN:
                self.door.refusals.add("bad message", f"a browser: {closed.sent.reason}")

    async def _reply(self, connection: ServerConnection | Stream, ask: Mapping[str, Any], owner: KeyOwner) -> None:
        await connection.send(await self._answer(ask, owner, connection))

    async def _reply_to(self, connection: ServerConnection | Stream, ask: Mapping[str, Any], owner: KeyOwner) -> None:
        """As `_reply`, in a task of its own: beside whatever else this browser asks."""
        async with self._ending(connection):
            await self._reply(connection, ask, owner)

    async def _reply_in_turn(
        self, turn: asyncio.Lock, connection: ServerConnection | Stream, ask: Mapping[str, Any], owner: KeyOwner
    ) -> None:
        """As `_reply_to`, one after the other, and to nobody who has left."""
        async with turn:
            if not connection.transport.is_closing():
                await self._reply_to(connection, ask, owner)

    async def _admit(self, connection: ServerConnection | Stream) -> str:
        """Return the token that the first message says. Raises MessageError for one that is not good."""
        try:
            async with asyncio.timeout(TOKEN_S):
                token = _text(_read(await connection.recv()), "token")
        except TimeoutError:
            raise door.NotLetIn("no token came") from None
        if (owner := self.door.owner(token)) is None:
            raise self.door.refusal("this link is not good, or over: take the newest one from the learner's screen")
        if not self._doorstep.welcome(connection.remote_address, owner.name):
            raise door.NotLetIn("too many pages are open: close one", "too many connections")
        self._guests[connection] = token
        await connection.send(json.dumps({"role": owner.role, "run": self._run_dir.name}))
        return token

    async def _end_revoked(self) -> None:
        """End the pages whose token is over, also of those who ask nothing."""
        while True:
            await asyncio.sleep(REVOKED_S)
            over = [page for page, token in self._guests.items() if self.door.owner(token) is None]
            for page in over:  # also of one that reads nothing
                asyncio.get_running_loop().call_later(CLOSE_S, page.transport.abort)
            why = self.door.refusal(OVER)
            ends = (page.close(why.code, str(why)) for page in over)
            await asyncio.gather(*ends, return_exceptions=True)

    async def _answer(
        self, ask: Mapping[str, Any], owner: KeyOwner, connection: ServerConnection | Stream
    ) -> str | bytes:
        """Return the answer to one question: JSON, or the number of the question, 4 bytes, and a JPEG."""
        number, kind = ask.get("id"), _text(ask, "ask")
        if not isinstance(number, int) or not 0 <= number < 1 << 31:
            raise MessageError("each question has a number")
        try:
            answer = await self._answer_to(kind, ask, owner, connection)
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

    async def _answer_to(
        self, kind: str, ask: Mapping[str, Any], owner: KeyOwner, connection: ServerConnection | Stream
    ) -> Any:
        guest = connection.id.hex[:GUEST]
        if kind == "order":
            return await self._order(ask, owner, self._guests[connection])
        if kind == "download":
            self._check_operator(owner.role)
            return await downloads.made(self._run_dir, _text(ask, "episode"), _text(ask, "format"))
        if kind == "drive":
            self._check_operator(owner.role)
            return self._drivers.drive(guest, owner.name, ask)
        if kind == "preview":
            return self._drivers.image(guest, _text(ask, "camera"))
        if kind in self._answers:
            return await self._read(lambda: self._answers[kind](ask))
        raise MessageError(f"nothing answers {kind[:40]!r}")

    async def _order(self, ask: Mapping[str, Any], owner: KeyOwner, token: str) -> str:
        """Carry out an order, unless its token has ended while it waited for others, and log whose it was. Raises what
        says why it was not, or may not have been."""
        said, (order, about, actor) = clock.monotonic(), (_text(ask, name) for name in ("order", "about", "actor"))
        self._check_operator(owner.role)
        is_label = orders.is_label(ask)
        turn = nullcontext() if order == orders.PAUSE else self._turns.setdefault((actor, is_label), asyncio.Lock())
        carry_out = partial(orders.carry_out, self._run_dir, self._local, order, about, actor, said=said)
        try:
            async with turn:
                if is_label:
                    await self._read(lambda: self._folder.check_over(about))
                if self.door.owner(token) is None:
                    raise self.door.refusal(OVER)
                done = await asyncio.get_running_loop().run_in_executor(self._clerks, carry_out)
        except RetakeError as error:
            log.info("%s: %s is not done, or lost: %s", owner.name, order, error)
            raise
        log.info("%s: %s", owner.name, done)
        return done

    def _check_operator(self, role: str) -> None:
        if role != "operator":
            self.door.refusals.add("role", "a link, or a key, that is to look only")
            raise ConfigError("this link is to look only: take an operator's one from the learner's screen")

    async def _read(self, what: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._reader, what)


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
    if not is_name(value := ask.get(name, "")):
        raise MessageError(f"{name} is a text of at most {MAX_NAME} characters that are shown")
    return value


def _short(reason: str) -> str:
    """Return as much as the frame has room for that ends a websocket."""
    return reason.encode(errors="replace")[:120].decode(errors="ignore")


def main(config: DictConfig, run_dir: Path, local: str, begun: Callable[[], None]) -> None:
    """Run the page's process until END; `begun` is called once it listens."""
    log_as("page", logging.INFO)
    give_way(19)
    page = Page(run_dir, local, **wanted(config))
    asyncio.run(page.run(config.page, END, begun))
