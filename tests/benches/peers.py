"""Other ways to ask a policy over a network, each a server process and a client, for tools/bench.py wire --peers.

Every server takes the observation apart into arrays, looks at each, and answers the same chunk at once. The packages
that they need are the group `bench` and the extra `data`.
"""

import asyncio
import io
import itertools
import logging
import os
import pickle
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np
import zmq
from serl_client.spec import Array

from tests.shared.common import free_port

from .served import Child, joined, observation, receive

CHUNK = np.zeros((50, 14), np.float32)
ASKED = observation()
Call = Callable[[], Any]


def seen(arrays: Mapping[str, Array]) -> None:
    """Raises ValueError for another observation than was sent."""
    if {name: array.shape for name, array in arrays.items()} != {name: each.shape for name, each in ASKED.items()}:
        raise ValueError(f"this is another observation: {list(arrays)}")
    if any(int(array.reshape(-1).view(np.uint8)[-1]) < 0 for array in arrays.values()):
        raise ValueError("bytes are not negative")


@dataclass(frozen=True, slots=True)
class Peer:
    """`serve(port, ready)` runs in a process of its own until that is killed; `connect(port)` gives the call."""

    name: str
    serve: Callable[[int, Callable[[], None]], None]
    connect: Callable[[int], AbstractContextManager[Call]]

    @contextmanager
    def running(self) -> Iterator[tuple[Call, int]]:
        """(call, id of the server's process). Raises ConfigError when the server does not start."""
        port = free_port()
        with Child(run, self.serve, port) as server:
            server.heard()
            with self.connect(port) as call:
                yield call, server.pid


def run(pipe: Any, serve: Callable[[int, Callable[[], None]], None], port: int) -> None:
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        os.chdir(folder)  # lerobot makes a folder for logs where it is imported
        serve(port, lambda: pipe.send("ready"))


# -- raw TCP: the ceiling
def serve_raw(port: int, ready: Callable[[], None]) -> None:
    question = memoryview(bytearray(sum(array.nbytes for array in ASKED.values())))
    with socket.create_server(("127.0.0.1", port)) as listening:
        ready()
        connection, _ = listening.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with connection, suppress(EOFError):
        while True:
            receive(connection, question)
            connection.sendall(CHUNK.data)


@contextmanager
def connect_raw(port: int) -> Iterator[Call]:
    question = np.concatenate([array.reshape(-1).view(np.uint8) for array in ASKED.values()])
    answer = memoryview(bytearray(CHUNK.nbytes))
    with joined(port) as connection:
        yield lambda: (connection.sendall(question.data), receive(connection, answer))


# -- pickle and lz4 over a request and its reply of ZeroMQ, as agentlace does it
def squeezed(message: Any) -> bytes:
    import lz4.frame

    return lz4.frame.compress(pickle.dumps(message))


def released(data: bytes) -> Any:
    import lz4.frame

    return pickle.loads(lz4.frame.decompress(data))


def serve_pickle(port: int, ready: Callable[[], None]) -> None:
    replier = zmq.Context.instance().socket(zmq.REP)
    replier.bind(f"tcp://127.0.0.1:{port}")
    ready()
    while True:
        seen(released(replier.recv()))
        replier.send(squeezed({"action": CHUNK}))


@contextmanager
def connect_pickle(port: int) -> Iterator[Call]:
    with zmq.Context.instance().socket(zmq.REQ) as asker:
        asker.connect(f"tcp://127.0.0.1:{port}")
        yield lambda: (asker.send(squeezed(ASKED)), released(asker.recv()))


# -- openpi: msgpack with the bytes of arrays in it, over a websocket (openpi_client's msgpack_numpy and its server)
def packed(message: Mapping[str, Any]) -> bytes:
    def plain(array: Array) -> dict[bytes, Any]:
        return {b"__ndarray__": True, b"data": array.tobytes(), b"dtype": array.dtype.str, b"shape": array.shape}

    return msgpack.Packer(default=plain).pack(message)


def unpacked(data: bytes | str) -> Any:
    def array(found: Mapping[Any, Any]) -> Any:
        if b"__ndarray__" not in found:
            return found
        return np.ndarray(buffer=found[b"data"], dtype=np.dtype(found[b"dtype"]), shape=found[b"shape"])

    return msgpack.unpackb(data, object_hook=array)


def serve_websocket(port: int, ready: Callable[[], None]) -> None:
    from websockets.asyncio.server import ServerConnection, serve
    from websockets.exceptions import ConnectionClosed

    async def handle(connection: ServerConnection) -> None:
        await connection.send(packed({}))  # what it says of itself
        with suppress(ConnectionClosed):
            while True:
                seen(unpacked(await connection.recv()))
                await connection.send(packed({"actions": CHUNK, "server_timing": {"infer_ms": 0.0}}))

    async def serving() -> None:
        async with serve(handle, "127.0.0.1", port, compression=None, max_size=None) as server:
            ready()
            await server.serve_forever()

    asyncio.run(serving())


@contextmanager
def connect_websocket(port: int) -> Iterator[Call]:
    from websockets.sync.client import connect

    with connect(f"ws://127.0.0.1:{port}", compression=None, max_size=None) as connection:
        unpacked(connection.recv())
        yield lambda: (connection.send(packed(ASKED)), unpacked(connection.recv()))


# -- lerobot: its own asynchronous inference, two calls for each chunk
def serve_lerobot(port: int, ready: Callable[[], None]) -> None:
    import grpc
    import torch
    from lerobot.async_inference.configs import PolicyServerConfig
    from lerobot.async_inference.policy_server import PolicyServer
    from lerobot.transport import services_pb2_grpc as services

    chunk = torch.from_numpy(CHUNK)

    class Server(PolicyServer):
        def _predict_action_chunk(self, observation_t: Any) -> list[Any]:
            seen(observation_t.get_observation())
            return self._time_action_chunk(observation_t.get_timestamp(), list(chunk), observation_t.get_timestep())

    logging.disable()  # as fast as it can be
    server = grpc.server(futures.ThreadPoolExecutor(4))
    services.add_AsyncInferenceServicer_to_server(Server(PolicyServerConfig(inference_latency=0.0)), server)
    server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    ready()
    server.wait_for_termination()


@contextmanager
def connect_lerobot(port: int) -> Iterator[Call]:
    import grpc
    from lerobot.async_inference.helpers import TimedObservation
    from lerobot.transport import services_pb2
    from lerobot.transport import services_pb2_grpc as services
    from lerobot.transport.utils import grpc_channel_options, send_bytes_in_chunks

    messages: Any = services_pb2  # its classes are made when it is imported
    steps = itertools.count(1)
    with grpc.insecure_channel(f"127.0.0.1:{port}", grpc_channel_options(initial_backoff="0.0333s")) as channel:
        stub = services.AsyncInferenceStub(channel)
        stub.Ready(messages.Empty())

        def call() -> Any:
            timed = TimedObservation(timestamp=time.time(), timestep=next(steps), observation=ASKED, must_go=True)
            data = pickle.dumps(timed)
            stub.SendObservations(send_bytes_in_chunks(data, messages.Observation, silent=True))
            return pickle.load(io.BytesIO(stub.GetActions(messages.Empty()).data))

        yield call


RAW = Peer("raw TCP", serve_raw, connect_raw)
PEERS = [
    Peer("lz4(pickle) over ZeroMQ", serve_pickle, connect_pickle),
    Peer("websocket (openpi)", serve_websocket, connect_websocket),
    Peer("lerobot, two calls", serve_lerobot, connect_lerobot),
]
