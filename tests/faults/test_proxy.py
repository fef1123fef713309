"""The proxy between an actor and its learner holds up, cuts and slows as it is told."""

import socket
import socketserver
import threading
from contextlib import suppress

import pytest

from tests.faults.proxy import Proxy


class Echo(socketserver.BaseRequestHandler):
    def handle(self):
        with suppress(OSError):
            while data := self.request.recv(65536):
                self.request.sendall(data)


@pytest.fixture
def echo():
    """The port of a server that says everything back."""
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Echo) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever).start()
        yield server.server_address[1]
        server.shutdown()


def heard(end, seconds=0.2):
    end.settimeout(seconds)
    try:
        return end.recv(100)
    except TimeoutError:
        return None


def test_the_proxy_holds_up_either_direction_and_goes_on_where_it_was(echo):
    with Proxy("127.0.0.1", echo) as proxy, socket.create_connection(("127.0.0.1", proxy.port)) as end:
        for mode, options in (("half_open", {}), ("one_way", {"direction": "up"}), ("one_way", {"direction": "down"})):
            end.sendall(b"before")
            assert heard(end, 5.0) == b"before"
            proxy.set(mode, **options)
            end.sendall(b"while")
            assert heard(end) is None
            proxy.set("pass")
            assert heard(end, 5.0) == b"while"
