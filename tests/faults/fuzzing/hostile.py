"""A peer that speaks ZMTP 3 by hand over a plain TCP socket, so that it can speak it wrongly; its attacks on a server,
and how a server process looks from outside (memory, threads, files).

ZMTP: https://rfc.zeromq.org/spec/23. A greeting is 64 bytes, a frame is flags, length, body.
"""

import hashlib
import os
import random
import socket
import struct
import time
from contextlib import suppress
from pathlib import Path

import msgpack
from serl_client.messages import PROTOCOL

MORE, LONG, COMMAND = 1, 2, 4
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + b"\0" + bytes(31)
READY = b"\x05READY" + b"\x0bSocket-Type\x00\x00\x00\x06DEALER" + b"\x08Identity\x00\x00\x00\x00"


def frame(body: bytes, flags: int = 0, length: int | None = None) -> bytes:
    """One frame on the wire; `length`: what it says its length is."""
    size = len(body) if length is None else length
    if size > 255 or flags & LONG:
        return struct.pack(">BQ", flags | LONG, size & (1 << 64) - 1) + body
    return struct.pack(">BB", flags, size) + body


def message(*parts: bytes) -> bytes:
    """The frames of one message on the wire; a ROUTER takes the first one as it is."""
    return b"".join(frame(part, MORE if i < len(parts) - 1 else 0) for i, part in enumerate(parts))


class Peer:
    """A TCP connection to `port`; what the other side closed raises nothing, and is seen by `is_open`."""

    def __init__(self, port: int, *, greeted: bool = True) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=5)
        self.socket.settimeout(2)
        if greeted:
            self.send(GREETING + frame(READY, COMMAND))
            self.read(64 + 2 + len(READY) - 10)

    def __enter__(self) -> "Peer":
        return self

    def __exit__(self, *exception: object) -> None:
        self.socket.close()

    def send(self, data: bytes) -> bool:
        """False when the other side has closed, or takes nothing for two seconds."""
        try:
            self.socket.sendall(data)
        except OSError:
            return False
        return True

    def read(self, least: int = 1) -> bytes:
        """What comes, until there are `least` bytes, the end, or two seconds without any."""
        data = b""
        with suppress(OSError):
            while len(data) < least and (part := self.socket.recv(1 << 16)):
                data += part
        return data

    def is_open(self, seconds: float = 0.3) -> bool:
        """Whether the other side keeps this connection for so long."""
        self.socket.settimeout(seconds)
        try:
            while self.socket.recv(1 << 16):
                pass
        except TimeoutError:
            return True
        except OSError:
            return False
        finally:
            self.socket.settimeout(2)
        return False

    def reset(self) -> None:
        """End the connection with a RST."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()


HELLO = {
    "type": "Hello", "protocol": list(PROTOCOL), "role": "viewer", "actor": "hostile", "session": "", "outbox": "",
    "run": "", "spec": None, "earlier": [], "paced": False, "has_operator": False,
}  # fmt: skip


def header(layout: list[object] | None = None, **fields: object) -> bytes:
    """The first frame of a message."""
    return msgpack.packb([fields, layout or []]) or b""


VALID = message(header(None, **HELLO)) + message(header(None, type="Heartbeat", report={"a": 1}))


# -- attacks
def attack(port: int, amount: int) -> int:
    """All of them, with so many tiny frames where there are many; how many there were."""
    said = _said(amount)
    for greeted, data in said:
        with Peer(port, greeted=greeted) as peer:
            peer.send(data)
            peer.is_open(0.1 if greeted else 0.0)
    for strike in (_a_name_that_is_taken, _slowly, _gone_in_every_phase):
        strike(port)
    return len(said) + 3


def _said(amount: int) -> list[tuple[bool, bytes]]:
    """(whether a good handshake comes first, what is said) of the connections of those who speak wrongly."""
    many, chance = max(1, amount // 1000), random.Random(amount)
    curve, old = GREETING.replace(b"NULL".ljust(20, b"\0"), b"CURVE".ljust(20, b"\0")), b"\x01\x00"
    web, bad = b"GET / HTTP/1.1\r\n\r\n" + bytes(64), READY[:-9] + b"\xff\xff\xff\xff\xff"
    handshakes = (  # out of order
        VALID, frame(b"\x05READY", COMMAND), frame(READY), frame(bad, COMMAND), frame(b"\x05ERROR\xffx", COMMAND),
        frame(READY, COMMAND) * 2, frame(b"\xc8nothing", COMMAND), frame(b"", COMMAND), frame(READY, COMMAND | 0xF8),
        frame(READY.replace(b"DEALER", b"SUBSCR"), COMMAND), frame(b"\x09SUBSCRIBEx", COMMAND),
    )  # fmt: skip
    commands = (b"\x04PING\x00\x0ax", b"\x04PONG", b"\x04PING" + bytes(200), b"\x06CANCELx", b"\x03FOO")
    row = b"\xdd" + struct.pack(">I", 99_999)
    return [
        *((False, GREETING[:length]) for length in (0, 1, 10, 11, 12, 32, 63)),
        *((False, wrong + frame(READY, COMMAND)) for wrong in (web, bytes(64), b"\xff" * 200, curve, old)),
        (False, GREETING[:10] + b"\x7f" + frame(READY, COMMAND)),
        *((False, GREETING + data + VALID) for data in handshakes),
        (True, message(header(None, **HELLO)) + b"".join(frame(command, COMMAND) for command in commands)
         + frame(b"\x04PING\x00\x0a", COMMAND | MORE) + frame(b"x", 0xF0)),
        *((True, frame(b"x" * 10, LONG, length)) for length in (1 << 63, (1 << 64) - 1, 1 << 40, (64 << 20) + 1)),
        (True, frame(b"", LONG, 64 << 20) + bytes(1000) * many),  # one that never ends
        (True, frame(b"x", MORE) * 1000 * many), (True, frame(b"x", MORE) * 1000 * many + frame(b"x")),
        (True, frame(b"x") * 1000 * many),
        # 1 MiB of empty mappings: 72 MiB, if somebody made them
        (True, message(b"\xdd\0\0\0\x0a" + (row + b"\x80" * 99_999) * 10) * 3),
        *((number % 2 == 0, chance.randbytes(4000)) for number in range(20)),
    ]  # fmt: skip


def _a_name_that_is_taken(port: int) -> None:
    """Several connections that all say they are the same one, with a name like those that libzmq gives."""
    for name in (b"twin", b"\0\0\0\0\1", b"x" * 255, b"x" * 300):
        ready = frame(READY[:-4] + struct.pack(">I", len(name)) + name, COMMAND)
        peers = [Peer(port, greeted=False) for _ in range(3)]
        for peer in peers:
            peer.send(GREETING + ready + VALID)
        for peer in peers:
            peer.socket.close()


def _slowly(port: int) -> None:
    with Peer(port, greeted=False) as peer:
        for byte in (GREETING + frame(READY, COMMAND) + VALID)[:200]:
            peer.send(bytes([byte]))
            time.sleep(0.002)


def _gone_in_every_phase(port: int) -> None:
    """Hang up, by turns with and without a reset, after every few bytes of a good beginning."""
    data = GREETING + frame(READY, COMMAND) + VALID
    for i, length in enumerate(range(0, len(data), 7)):
        peer = Peer(port, greeted=False)
        peer.send(data[:length])
        (peer.reset if i % 2 else peer.socket.close)()


# -- what a process looks like from outside
def memory(pid: int) -> int:
    """Resident bytes."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def threads(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/task"))


def contents(folder: Path) -> dict[str, str]:
    """{path: hash of the content} of every file below a folder."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
