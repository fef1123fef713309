"""A page in a thread of this process, and browsers that speak to it over real sockets."""

import asyncio
import base64
import http.client
import json
import select
import socket
import ssl
import threading
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from urllib.parse import quote

import pytest
from websockets.exceptions import ConnectionClosedError
from websockets.frames import Close
from websockets.sync.client import connect

from serl_launcher.page.server import Page
from tests.shared.common import PATIENCE, free_port


@contextmanager
def serving(run_dir, local, **door):
    """A Page that listens, with its `port`; `door`: as it takes it."""
    page, port = Page(run_dir, local, **door), free_port()
    loop, ready, over = asyncio.new_event_loop(), threading.Event(), asyncio.Event()

    async def serve():
        async with page.served(port):
            ready.set()
            await over.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    try:
        assert ready.wait(PATIENCE)
        yield SimpleNamespace(page=page, port=port)
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join(PATIENCE)
        page.close()
        loop.close()


@contextmanager
def knocking(served, *, host="", origin=""):
    """A websocket of a browser that shows this host, and a page of this origin; "": the page's own ones."""
    host = host or f"localhost:{served.port}"
    tls = {"ssl": trusting(served.keys)} if getattr(served, "keys", None) else {}
    own, scheme = ("https", "wss") if tls else ("http", "ws")
    options = {"origin": f"{own}://{host}" if origin == "" else origin, "open_timeout": PATIENCE, "compression": None}
    link = socket.create_connection(("127.0.0.1", served.port))
    with connect(f"{scheme}://{host}/socket", sock=link, **options, **tls) as made:
        yield made


def trusting(keys):
    """What a browser has that was told to trust the certificate of this folder of keys, whatever it calls the host."""
    made = ssl.create_default_context(cafile=keys / "page.pem")
    made.check_hostname, made.sslsocket_class = False, InTurn
    return made


class InTurn(ssl.SSLSocket):
    """A TLS connection for two threads, one at a time.

    The client of websockets reads in one and writes in another, and Python before 3.14 lets both into OpenSSL, which
    takes one: of 2,400 requests one was never sent, as the server's session tickets came meanwhile.
    """

    def __new__(cls, **words):
        made = super().__new__(cls, **words)
        made.turn = threading.Lock()
        return made

    def recv(self, *words):
        while True:
            with self.turn:
                patience = self.gettimeout()
                self.settimeout(0)
                try:
                    return super().recv(*words)
                except ssl.SSLWantReadError:
                    pass
                finally:
                    self.settimeout(patience)
            if not select.select([self], [], [], patience)[0]:
                raise TimeoutError

    def sendall(self, *words):
        with self.turn:
            super().sendall(*words)


class Browser:
    """A page that is open in a browser: it says its token, then asks."""

    def __init__(self, link, token):
        self.socket, self.number = link, 0
        self.socket.send(json.dumps({"token": token}))

    def welcome(self):
        return json.loads(self.socket.recv(PATIENCE))

    def ask(self, kind, **more):
        """The answer: plain data, or the bytes of an image. Fails with what the page says is wrong."""
        self.number += 1
        self.socket.send(json.dumps({"id": self.number, "ask": kind, **more}))
        told = self.socket.recv(PATIENCE)
        if isinstance(told, bytes):
            assert int.from_bytes(told[:4], "big") == self.number
            return told[4:]
        told = json.loads(told)
        assert told["id"] == self.number
        return told.get("answer", f"error: {told.get('error')}")


@pytest.fixture
def served(serve, tmp_path):
    """The page of a run whose server runs; `server` is that one."""
    server = serve()
    with serving(server.run_dir, server.local) as made:
        made.server = server
        yield made


@pytest.fixture
def browse(served):
    """browse(**options) -> a Browser of the page `served`; it is closed at the end."""
    with ExitStack() as stack:

        def browse(page=served, *, role="operator", token=None, host="", way=knocking):
            link = stack.enter_context(way(page, host=host))
            return Browser(link, page.page.tokens.make(role) if token is None else token)

        yield browse


class Streaming:
    """What a browser has in place of a websocket: events that come, and POSTs."""

    def __init__(self, served, host="", **headers):
        self.served, self.host = served, host or f"localhost:{served.port}"
        answer = self.request("GET", "/stream", **(headers or {"Sec-Fetch-Site": "same-origin"}))
        assert (answer.status, answer.headers["Content-Type"]) == (200, "text/event-stream; charset=utf-8"), (
            answer.read()
        )
        self.events = answer
        self.name = self.event()["stream"]

    def request(self, method, path, **headers):
        link = http.client.HTTPConnection("127.0.0.1", self.served.port, timeout=PATIENCE)
        link.request(method, path, headers={"Host": self.host, **headers})
        return link.getresponse()

    def event(self):
        line, end = self.events.readline(), self.events.readline()
        if not line:
            raise ConnectionClosedError(None, None)
        assert (line[:6], end) == (b"data: ", b"\n")
        return json.loads(line[6:])

    def send(self, text, **headers):
        """Say it; the status of the answer."""
        headers = {"Origin": f"http://{self.host}", "X-Stream": self.name, "X-Say": quote(text), **headers}
        return self.request("POST", "/say", **headers).status

    def recv(self, _=None):
        event = self.event()
        if "code" in event:
            raise ConnectionClosedError(Close(event["code"], event["reason"]), None)
        return event["text"] if "text" in event else base64.b64decode(event["bytes"])


@contextmanager
def streaming(served, *, host=""):
    """As `knocking`, of a browser that refuses the websocket."""
    made = Streaming(served, host)
    try:
        yield made
    finally:
        made.events.close()
