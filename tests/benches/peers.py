"""Other ways to ask a policy over a network, each a server process and a client, for tools/bench.py wire --peers.

Every server takes the observation apart into arrays, looks at each, and answers the same chunk at once. The packages
that they need are the group `bench` and the extra `data`; agentlace is read from a folder of its public source.
"""

import asyncio
import importlib
import io
import itertools
import logging
import os
import pickle
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgpack
import numpy as np
import zmq
from serl_client.spec import Array

from tests.shared.common import free_port

from .served import Child, joined, observation, receive

CHUNK = np.zeros((50, 14), np.float32)
ROOM = 64 << 20  # bytes of the largest message of gRPC
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


# -- ZeroMQ with pickle
def serve_pickle(port: int, ready: Callable[[], None]) -> None:
    replier = zmq.Context.instance().socket(zmq.REP)
    replier.bind(f"tcp://127.0.0.1:{port}")
    ready()
    while True:
        seen(pickle.loads(replier.recv()))
        replier.send(pickle.dumps({"action": CHUNK}, 5))


@contextmanager
def connect_pickle(port: int) -> Iterator[Call]:
    with zmq.Context.instance().socket(zmq.REQ) as asker:
        asker.connect(f"tcp://127.0.0.1:{port}")
        yield lambda: (asker.send(pickle.dumps(ASKED, 5)), pickle.loads(asker.recv()))


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
        before = 0.0
        with suppress(ConnectionClosed):
            while True:
                begin = time.monotonic()
                seen(unpacked(await connection.recv()))
                timing = {"infer_ms": 0.0, "prev_total_ms": before * 1e3}
                await connection.send(packed({"actions": CHUNK, "server_timing": timing}))
                before = time.monotonic() - begin

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


# -- gRPC, unary, protobuf
def protobuf() -> tuple[Any, Any]:
    """The classes of the messages Observation (repeated Tensor tensors) and Tensor (name, dtype, shape, data)."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    kind = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="bench.proto", package="bench", syntax="proto3")
    tensor, question = file.message_type.add(name="Tensor"), file.message_type.add(name="Observation")
    one, many = kind.LABEL_OPTIONAL, kind.LABEL_REPEATED
    tensor.field.add(name="name", number=1, label=one, type=kind.TYPE_STRING)
    tensor.field.add(name="dtype", number=2, label=one, type=kind.TYPE_STRING)
    tensor.field.add(name="shape", number=3, label=many, type=kind.TYPE_INT64)
    tensor.field.add(name="data", number=4, label=one, type=kind.TYPE_BYTES)
    question.field.add(name="tensors", number=1, label=many, type=kind.TYPE_MESSAGE, type_name=".bench.Tensor")
    classes = message_factory.GetMessages([file], pool=descriptor_pool.DescriptorPool())
    return classes["bench.Observation"], classes["bench.Tensor"]


def to_tensor(tensor: Any, name: str, array: Array) -> Any:
    return tensor(name=name, dtype=array.dtype.str, shape=array.shape, data=array.tobytes())


def from_tensor(tensor: Any) -> Array:
    return np.frombuffer(tensor.data, tensor.dtype).reshape(tuple(tensor.shape))


OPTIONS = [("grpc.max_receive_message_length", ROOM), ("grpc.max_send_message_length", ROOM)]


def serve_protobuf(port: int, ready: Callable[[], None]) -> None:
    import grpc

    question, tensor = protobuf()

    def answer(request: Any, _: Any) -> Any:
        seen({each.name: from_tensor(each) for each in request.tensors})
        return to_tensor(tensor, "action", CHUNK)

    handler = grpc.unary_unary_rpc_method_handler(answer, question.FromString, tensor.SerializeToString)
    server = grpc.server(futures.ThreadPoolExecutor(4), options=OPTIONS)
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("bench.Policy", {"Act": handler})])
    serve_grpc(server, port, ready)


def serve_grpc(server: Any, port: int, ready: Callable[[], None]) -> None:
    server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    ready()
    server.wait_for_termination()


@contextmanager
def connect_protobuf(port: int) -> Iterator[Call]:
    import grpc

    question, tensor = protobuf()
    with grpc.insecure_channel(f"127.0.0.1:{port}", options=OPTIONS) as channel:
        act = channel.unary_unary("/bench.Policy/Act", question.SerializeToString, tensor.FromString)
        yield lambda: from_tensor(act(question(tensors=[to_tensor(tensor, *each) for each in ASKED.items()])))


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
    serve_grpc(server, port, ready)


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


# -- agentlace: its own InferenceServer
def agentlace(folder: str) -> Any:
    """Its module inference, without the lines it would log of each message."""
    sys.path.insert(0, folder)
    logging.basicConfig(level=logging.WARNING)  # before it asks for DEBUG
    logging.getLogger().setLevel(logging.WARNING)
    return importlib.import_module("agentlace.inference")


def serve_agentlace(folder: str, port: int, ready: Callable[[], None]) -> None:
    server = agentlace(folder).InferenceServer(port)

    def act(arrays: dict[str, Array]) -> dict[str, Array]:
        seen(arrays)
        return {"action": CHUNK}

    server.register_interface("act", act)
    ready()
    server.start()


@contextmanager
def connect_agentlace(folder: str, port: int) -> Iterator[Call]:
    client = agentlace(folder).InferenceClient("127.0.0.1", port)
    try:
        yield lambda: client.call("act", ASKED)["action"]
    finally:
        client.client.socket.close(0)


RAW = Peer("raw TCP", serve_raw, connect_raw)


def peers(agentlace_folder: str) -> list[Peer]:
    """All of them but raw TCP; agentlace where its folder is named."""
    found = [
        Peer("pickle over ZeroMQ", serve_pickle, connect_pickle),
        Peer("websocket (openpi)", serve_websocket, connect_websocket),
        Peer("gRPC protobuf", serve_protobuf, connect_protobuf),
        Peer("lerobot, two calls", serve_lerobot, connect_lerobot),
    ]
    if agentlace_folder:
        served = partial(serve_agentlace, agentlace_folder), partial(connect_agentlace, agentlace_folder)
        found.append(Peer("agentlace", *served))
    return found
