"""A policy server that is not ours: openpi's protocol, from its facts, with websockets and msgpack alone."""

import threading
from contextlib import contextmanager
from functools import cache

import msgpack
import numpy as np
from websockets.exceptions import ConnectionClosed
from websockets.sync.server import serve


def packed(array):
    return {b"__ndarray__": True, b"data": array.tobytes(), b"dtype": array.dtype.str, b"shape": array.shape}


def unpacked(found):
    return np.ndarray(found[b"shape"], found[b"dtype"], found[b"data"]) if b"__ndarray__" in found else found


def answer(**fields):
    """The bytes of an answer, or of a server's metadata."""
    return msgpack.packb(fields, default=packed)


class Policy:
    """A server on loopback. `act(request)` returns the chunk, or a function of the connection that is rude.

    requests: all that came. opened: connections so far.
    """

    def __init__(self, act, port=0):
        self.act, self.requests, self.opened = act, [], 0
        self._server = serve(self._converse, "127.0.0.1", port, compression=None, max_size=None)
        self.port = self._server.socket.getsockname()[1]
        self.url = f"ws://127.0.0.1:{self.port}"
        self._open = []
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def _converse(self, connection):
        self.opened += 1
        self._open.append(connection)
        connection.send(answer(reset_pose=[0.0, 0.5]))
        try:
            for data in connection:
                self.requests.append(msgpack.unpackb(data, object_hook=unpacked))
                found = self.act(self.requests[-1])
                if callable(found):
                    found(connection)
                else:
                    connection.send(answer(actions=found, policy_timing={"infer_ms": 1.5}))
        except ConnectionClosed:
            pass

    def close(self):
        """End it and its connections; may be called twice."""
        self._server.shutdown()
        for connection in self._open:
            connection.close_socket()
        self._thread.join()


@cache
def still(size):
    """The address of a server that always answers `size` zeros for each action."""
    return Policy(lambda _: np.zeros((64, size))).url


@contextmanager
def policy(act, port=0):
    """A Policy, as long as this lasts."""
    made = Policy(act, port)
    try:
        yield made
    finally:
        made.close()
