"""A page in a thread of this process, and browsers that speak to it over real sockets."""

import asyncio
import json
import socket
import threading
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace

import pytest
from websockets.sync.client import connect

from serl_launcher.page.server import Page
from tests.shared.common import PATIENCE, free_port


@contextmanager
def serving(run_dir, local):
    """A Page that listens, with its `port`."""
    page, port = Page(run_dir, local), free_port()
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
    options = {"origin": f"http://{host}" if origin == "" else origin, "open_timeout": PATIENCE, "compression": None}
    link = socket.create_connection(("127.0.0.1", served.port))
    with connect(f"ws://{host}/socket", sock=link, **options) as made:
        yield made


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

        def browse(page=served, *, role="operator", token=None, host=""):
            link = stack.enter_context(knocking(page, host=host))
            return Browser(link, page.page.tokens.make(role) if token is None else token)

        yield browse
