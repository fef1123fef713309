"""Holds what clients said until it is handled: whose key has cost least of late comes first, and who floods is cut.

libzmq hands messages on connection by connection, so that a key with many of them, or one that asks for what is dear,
would be heard more than others. So they are taken out of the socket as they come, which is cheap, and wait here by key.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import zmq
from serl_client import clock, wire
from serl_client.connection import received

from serl_launcher.service.access import AccessControl
from serl_launcher.service.router import Router

FRAMES = 30_000  # of one key (without keys: of one connection) that wait, or came within this second: 10,000 messages
TAKEN = 256  # messages that are taken out of the socket before the next one is handled: one of each connection
TAKING_S = 0.002  # of it

Handle = Callable[[Router, zmq.Frame, Sequence[wire.Buffer]], None]


@dataclass(slots=True)
class _Line:
    """The messages of one key. came: how many frames of each connection wait, or came within this second; count: of
    all together. cut: connections whose rest is not heard."""

    waiting: deque[list[zmq.Frame]] = field(default_factory=deque)
    came: Counter[bytes] = field(default_factory=Counter)
    count: int = 0
    cut: set[bytes] = field(default_factory=set)


class FairQueue:
    """The messages that came to the public socket of `access` and are not handled yet."""

    def __init__(self, access: AccessControl) -> None:
        self._access = access
        self._lines: dict[str | bytes, _Line] = {}
        self._next = 0.0  # when the next second begins

    @property
    def waits(self) -> bool:
        """Whether there are messages that may be handled now."""
        return bool(self._ready())

    def fill(self) -> None:
        """Take what has come out of the socket, at most TAKEN messages; never waits.

        Of a key that brings more than FRAMES, a connection that brings no less than the others do is cut, and what
        waits of it is forgotten: an actor comes again, and sends what was not acknowledged. A message of too many
        frames has to be taken as a whole, for seconds if they are a million: its key is banned at once.
        """
        self._begin_second()
        begin = time.thread_time()
        end = clock.monotonic() + TAKING_S
        for _ in range(TAKEN):
            if clock.monotonic() > end or not (came := received(self._access.socket)):
                return
            who, frames, account = came[0].bytes, len(came), self._access.account(came[0])
            line = self._lines.setdefault(account, _Line())
            if who in line.cut:
                continue
            if not self._access.is_ignored(who):
                line.waiting.append(came)
            line.came[who] += frames
            line.count += frames
            is_endless = frames > wire.MAX_FRAMES + 1
            if is_endless or (line.count > FRAMES and line.came[who] * len(line.came) >= line.count):
                if is_endless:
                    self._access.expel(came[0], f"a message of more than {wire.MAX_FRAMES} frames")
                else:
                    self._access.cut(came[0], "too fast", f"more than {FRAMES} frames within a second")
                line.waiting = deque(each for each in line.waiting if each[0].bytes != who)
                line.count -= line.came.pop(who)
                line.cut.add(who)
            begin, before = time.thread_time(), begin
            self._access.spend(account, begin - before)

    def _begin_second(self) -> None:
        if (now := clock.monotonic()) < self._next:
            return
        self._next, lines = now + 1.0, self._lines
        self._lines = {key: _Line(line.waiting) for key, line in lines.items() if line.waiting}
        for line in self._lines.values():
            for came in line.waiting:
                line.came[came[0].bytes] += len(came)
            line.count = line.came.total()

    def serve(self, handle: Handle) -> bool:
        """Let `handle` have the message whose turn it is, and note what it costs. Return whether there was one."""
        if not (ready := self._ready()):
            return False
        account = min(ready, key=self._access.spent)
        identity, *frames = self._lines[account].waiting.popleft()
        if self._access.is_ignored(identity.bytes):  # it was cut since
            return True
        begin = time.thread_time()
        handle(self._access.socket, identity, [frame.buffer for frame in frames])
        self._access.spend(account, time.thread_time() - begin)
        return True

    def _ready(self) -> list[str | bytes]:
        """The accounts of which messages may be handled now."""
        return [each for each, line in self._lines.items() if line.waiting and not self._access.is_dear(each)]
