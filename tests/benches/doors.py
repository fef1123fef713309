"""How long honest clients wait to be let in while silent sockets of another address take all the places that they can.

The sockets come to the door of a run's server, and open websockets at the bridge for openpi's clients, and say nothing
more. Between them clients come, one after the other: what is measured is each one's time until it was welcomed.
"""

import argparse
import resource
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

from websockets.sync.client import connect

from tests.shared.common import STATE, free_port

from .paired import Figure, option, seconds
from .served import PATIENCE_S, SPEC, Served

OTHER = "127.0.0.2"
OPTIONS = {
    "--silent": option(1000, "sockets at the server (1000)"),
    "--idle": option(128, "websockets at the bridge (128)"),
    "--clients": option(20, "that come meanwhile (20)"),
}
HANDSHAKE = (
    b"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
)


def measure(folder: Path, options: argparse.Namespace) -> Iterator[Figure]:
    from serl_launcher.acting.bridge import Bridge  # with torch

    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with Served(folder / "run", 100) as served:
        served.report()  # it listens
        yield from welcomes(
            f"server, {options.silent} silent sockets", served.port, b"", options.silent, options.clients,
            partial(_hello, served),
        )  # fmt: skip
    host: Any = SimpleNamespace(spec=SPEC, acting=SimpleNamespace(history=1))
    port = free_port()
    with closing(
        Bridge(host, ("127.0.0.1", port), {"observation/state": STATE}, None, lambda _: None, folder)
    ) as bridge:
        bridge.start()
        yield from welcomes(
            f"bridge, {options.idle} idle websockets", port, HANDSHAKE, options.idle, options.clients,
            partial(_greeted, port),
        )  # fmt: skip


def welcomes(
    name: str, port: int, said: bytes, strangers: int, clients: int, come: Callable[[], object]
) -> Iterator[Figure]:
    """How long `come` takes for each client, before which its share of the strangers connect, and say this."""
    with ExitStack() as held:
        lasted = []
        for number in range(clients):
            for _ in range(number * strangers // clients, (number + 1) * strangers // clients):
                stranger = held.enter_context(socket.create_connection(("127.0.0.1", port), PATIENCE_S, (OTHER, 0)))
                stranger.sendall(said)
            lasted.append(seconds(come))
    yield Figure(f"{name}: slowest welcome of {clients}", max(lasted), "s", goal="<= 5")
    yield Figure(f"{name}: median welcome", median(lasted), "s")


def _hello(served: Served) -> None:
    with served.link("viewer", "eye") as link:
        link.hello(PATIENCE_S)


def _greeted(port: int) -> None:
    with connect(f"ws://127.0.0.1:{port}", compression=None) as opened:
        opened.recv(PATIENCE_S)
