"""A TCP proxy with faults, to stand between an actor and its learner: cut, half open, one way, slow, reset."""

import select
import socket
import struct
import threading
import time
from collections import Counter, deque
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

MODES: dict[str, tuple[str, ...]] = {  # and their options
    "pass": (), "cut": (), "half_open": (), "one_way": ("direction",), "delay": ("seconds",), "trickle": ("rate",),
    "reset": (),
}  # fmt: skip
BUFFER = 4 << 20  # bytes that one direction of a connection holds here
CHUNK = 256 << 10
TICK = 0.01  # seconds between two drops of a trickle
ABORT = struct.pack("ii", 1, 0)  # for SO_LINGER: closing sends RST and not FIN


class Proxy:
    """Forwards connections to `port` on loopback to (`target_host`, `target_port`); a context manager with a thread.

    `set` says what becomes of living and new connections, in both directions: `pass`; `cut` (closed); `reset` (RST);
    `half_open` (accepted, nothing forwarded, nothing closed); `one_way` (`direction` "up" from the client, or "down":
    the other one stands still); `delay` (each byte comes `seconds` later); `trickle` (`rate` bytes/s in each
    direction). What stood still goes on at the next `pass`, as it does when a cable is plugged in again. `moved` counts
    the bytes of each direction.
    """

    def __init__(self, target_host: str, target_port: int) -> None:
        self.moved = Counter[str]()
        self._target = (target_host, target_port)
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._pairs: list[_Pair] = []
        self._mode, self._options = "pass", {}
        self._wake, self._waker = socket.socketpair()
        self._changed, self._ended = threading.Event(), False
        self._thread = threading.Thread(target=self._run, name=f"proxy {self.port}", daemon=True)

    def __enter__(self) -> "Proxy":
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended = True
        self._waker.send(b"!")
        self._thread.join()
        for pair in self._pairs:
            pair.close()
        for opened in (self._listener, self._wake, self._waker):
            opened.close()

    def set(self, mode: str, **options: Any) -> None:
        """Returns when it holds. Raises ValueError for a mode or an option that there is not."""
        if mode not in MODES or tuple(options) != MODES[mode]:
            raise ValueError(f"the modes and their options are {MODES}, not {mode} {options}")
        if mode == "one_way" and options["direction"] not in ("up", "down"):
            raise ValueError(f"the direction is up or down, not {options['direction']}")
        self._changed.clear()
        self._mode, self._options = mode, options
        self._waker.send(b"!")
        self._changed.wait()

    def _run(self) -> None:
        mode, options = self._mode, self._options
        while not self._ended:
            for pair in self._pairs:
                pair.step(mode, options)
            self._pairs = [pair for pair in self._pairs if pair.is_open]
            self._wait(mode)
            if mode is not self._mode or options is not self._options:
                mode, options = self._mode, self._options
            if mode in ("cut", "reset"):
                for pair in self._pairs:
                    pair.close(abort=mode == "reset")
            self._changed.set()

    def _wait(self, mode: str) -> None:
        """Until something can move; connections that came meanwhile are accepted."""
        watched = {self._listener.fileno(): select.POLLIN, self._wake.fileno(): select.POLLIN}
        due = [pair.watch(watched) for pair in self._pairs] if mode not in ("half_open", "cut", "reset") else []
        poll = select.poll()
        for descriptor, events in watched.items():
            poll.register(descriptor, events)
        later = min((time for time in due if time is not None), default=None)
        poll.poll(None if later is None else max(0.0, later - time.monotonic()) * 1000 + 1)
        with suppress(BlockingIOError):
            self._wake.recv(4096, socket.MSG_DONTWAIT)
        with suppress(OSError):
            while True:
                self._pairs.append(_Pair(self._listener.accept()[0], self._target, self.moved))


class _Pair:
    """One connection: the client's socket, and ours to the target as soon as something may be forwarded."""

    def __init__(self, client: socket.socket, target: tuple[str, int], moved: Counter[str]) -> None:
        self._client, self._address, self._flows, self._moved = client, target, [], moved
        client.setblocking(False)
        self._target: socket.socket | None = None
        self.is_open = True

    def step(self, mode: str, options: Mapping[str, Any]) -> None:
        if mode in ("half_open", "cut", "reset") or not self.is_open:
            return
        try:
            if self._target is None:
                self._target = socket.create_connection(self._address, timeout=2.0)
                for end in (self._client, self._target):
                    end.setblocking(False)
                    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                ends = ("up", self._client, self._target), ("down", self._target, self._client)
                self._flows = [_Flow(*each, self._moved) for each in ends]
            for flow in self._flows:
                flow.stands = mode == "one_way" and options["direction"] != flow.direction
                if not flow.stands:
                    flow.step(options.get("seconds", 0.0), options.get("rate"))
        except OSError:  # one side is gone, and the other learns it
            self.close()

    def watch(self, watched: dict[int, int]) -> float | None:
        """Add what to poll for; when to come back without it (time.monotonic())."""
        due = [flow.watch(watched) for flow in self._flows if not flow.stands]
        return min((time for time in due if time is not None), default=None)

    def close(self, abort: bool = False) -> None:
        for end in (self._client, self._target):
            if end is not None:
                with suppress(OSError):
                    if abort:
                        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, ABORT)
                end.close()
        self.is_open = False


class _Flow:
    """One direction of a connection."""

    def __init__(self, direction: str, source: socket.socket, target: socket.socket, moved: Counter[str]) -> None:
        self.direction, self.stands, self._moved = direction, False, moved
        self._source, self._target = source, target
        self._waiting: deque[tuple[float, memoryview]] = deque()  # (when it may go on, bytes)
        self._size, self._ended, self._full = 0, False, False
        self._free = 0.0  # when a trickle may send again

    def step(self, delay: float, rate: float | None) -> None:
        """Raises OSError when the connection is over."""
        now = time.monotonic()
        with suppress(BlockingIOError):
            while self._size < BUFFER and not self._ended:
                data = self._source.recv(CHUNK)
                self._ended = not data
                self._size += len(data)
                self._waiting.append((now + delay, memoryview(data)))
        self._full = False
        try:
            while self._waiting and max(self._waiting[0][0], self._free if rate else 0.0) <= now:
                due, data = self._waiting.popleft()
                part = data[: max(1, int(rate * TICK))] if rate else data
                sent = 0
                try:
                    sent = self._target.send(part) if part else 0
                finally:
                    self._size -= sent
                    self._moved[self.direction] += sent
                    if sent < len(data):
                        self._waiting.appendleft((due, data[sent:]))
                if rate:
                    self._free = now + sent / rate
        except BlockingIOError:
            self._full = True
        if self._ended and not self._waiting:
            raise ConnectionResetError

    def watch(self, watched: dict[int, int]) -> float | None:
        if self._size < BUFFER and not self._ended:
            watched[self._source.fileno()] = watched.get(self._source.fileno(), 0) | select.POLLIN
        if self._full:
            watched[self._target.fileno()] = watched.get(self._target.fileno(), 0) | select.POLLOUT
        return max(self._waiting[0][0], self._free) if self._waiting and not self._full else None
