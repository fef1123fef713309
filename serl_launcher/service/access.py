"""Decides who may connect and how much: keys, roles, rate limits, bans, and the count of all that was refused.

With a folder of keys the socket speaks CURVE: libzmq asks us about each key that knocks (ZAP, RFC 27), and hands that
key on with every message of its connection, where it is looked up again. A key that was revoked is so refused at its
next message. Without keys only loopback is served, and whoever reaches it is trusted like an operator: it is let in
without a key, but asked about all the same, so that its messages can be told from those of another connection.
"""

import hashlib
import hmac
import math
import os
import re
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq
from serl_client import clock, wire
from serl_client import messages as m
from serl_client.connection import has_come, is_local
from serl_client.console import throttled
from serl_client.errors import ConfigError, Refused
from serl_client.keys import ROLES, check_curve, read_private, write_private
from zmq.utils import z85

from serl_launcher.service.connections import CONNECTIONS, Connections
from serl_launcher.service.peers import Forbidden, KeyOwner
from serl_launcher.service.router import bound

log = throttled(__name__)

RECORDS = 5_000  # of one key (without keys: of one actor) within a second; what is more waits
SHARE_S = 1 / 3  # of the server's CPU within a second, for one key, if others have said something; what is more waits
LIMITS: dict[type, int] = {  # of one key (or connection) within a second
    m.Hello: 128, m.Command: 50, m.Status: 100, m.Drive: 200, m.DriverUpdate: 200,
}  # fmt: skip
TURN_S = 0.002  # for newcomers, before what others have said is heard
LONGEST_S = 0.02  # that this takes: if more has passed, the process was stopped, or the machine slept
BAD_MESSAGES = 16  # after these a connection is ignored
CAUSES = 5  # after bad messages of so many kinds within a minute, from one address, a key is banned
BAN_S = 600.0
HANDSHAKE_MS = 3000
TICK_NS = 50_000_000  # within it two changes of a file may have the same time
ZAP = "inproc://zeromq.zap.01"
NUMBERS = re.compile("[0-9a-f]{8,}|[0-9]+")
OPEN = KeyOwner("", "operator")
REMEDIES = {
    "revoked": "for good; ask for a new one, which tools/keys.py make on the learner gives",
    "banned": "it sent bad messages; it is let in again after 10 minutes, or by tools/keys.py unban on the learner",
    "unknown": "it is none of this learner's; tools/keys.py make on the learner gives one",
}


def check_address(address: str, keys: Path | None, option: str = "host") -> None:
    """Raise ConfigError for an address that others reach, if there are no keys. `option` is the one that chose it."""
    host = address.removeprefix("tcp://").rpartition(":")[0]
    if keys is None and not is_local(address):
        raise ConfigError(
            f"{option}={host}: without keys the learner listens on loopback only. Make a key for each robot PC with "
            "tools/keys.py make NAME --role actor, and say keys=keys here (docs/guides/security.md)"
        )


class AllowList:
    """The folder of keys of a learner: its own pair (server.key), who is let in (allowed.json), and an empty file
    NAME.banned for each key that is refused for BAN_S, or until it is lifted. What tools/keys.py changes holds at
    once."""

    def __init__(self, folder: Path) -> None:
        """Raises ConfigError for a folder without keys, or with one that others may read."""
        self.folder, self._file = folder, folder / "allowed.json"
        try:
            pair = read_private(folder / "server.key")
            self.public, self.secret = pair["public"], pair["secret"]
            check_curve(self.public)
            check_curve(self.secret)
        except (KeyError, TypeError, ValueError):
            raise ConfigError(f"{folder / 'server.key'} is no key: take another folder, and make all anew") from None
        self._unwritten: dict[str, float] = {}  # bans that could not be written down: when they end
        self._until = math.inf  # when the next ban ends
        self._stamp: tuple[int, int] | None = None
        self.fails = False  # it cannot be read now, so nobody is let in
        self._holders = self._read()

    def find(self, public: str) -> KeyOwner:
        """Who has this key; its role is `unknown`, `revoked` or `banned` if nothing may be done with it."""
        self._refresh()
        return self._holders.get(public, KeyOwner("", "unknown"))

    def name_of(self, public: str) -> str:
        """Whose key this is, or was when that was last looked up; the key itself if that is not known."""
        owner = self._holders.get(public)
        return owner.name if owner else public

    def api_key(self, name: str, door: str = "api") -> str:
        """Return the text by which a client that speaks no CURVE shows at a door that it was given the key `name`.

        It is a MAC of that key, made with the learner's own secret: nobody else can make it, nothing is stored, it
        opens no other door, and it ends with its key. Raises ConfigError for a name without a key.
        """
        for entry in self.entries():
            if entry["name"] == name and entry["role"] in ROLES:
                return f"{name}:{self._mac(entry['public'], door)}"
        raise ConfigError(f"nobody is let in as {name}: tools/keys.py list says who is")

    def bearer(self, api_key: str, door: str = "api") -> KeyOwner:
        """Who was given this `api_key`; its role is `unknown`, `revoked` or `banned` if nothing may be done with it."""
        self._refresh()
        name, mac = api_key.partition(":")[0], api_key.partition(":")[2].encode(errors="replace")
        for public, owner in self._holders.items():
            if owner.name == name and hmac.compare_digest(self._mac(public, door).encode(), mac):
                return owner
        return KeyOwner("", "unknown")

    def _mac(self, public: str, door: str) -> str:
        return hmac.new(self.secret.encode(), f"{door} key of {public}".encode(), hashlib.sha256).hexdigest()

    def ban(self, name: str) -> None:
        """Refuse this key for BAN_S, or until it is lifted; if that cannot be written down, in this process."""
        file = self.folder / f"{name}.banned"
        try:
            file.unlink(missing_ok=True)  # an earlier ban, which is over: the folder has to change
            os.close(os.open(file, os.O_CREAT | os.O_WRONLY, 0o600))
        except OSError as error:
            log.warning("the ban of %s cannot be written down: %s", name, error.strerror)
            self._unwritten[name] = clock.time() + BAN_S
        self._stamp = None

    def entries(self) -> list[dict[str, str]]:
        """[{name, role, public}]. Raises ConfigError."""
        entries = read_private(self._file)
        try:
            for entry in entries:
                check_curve(entry["public"])
            return [{key: str(entry[key]) for key in ("name", "role", "public")} for entry in entries]
        except (KeyError, TypeError, ValueError):
            raise ConfigError(f"{self._file} is damaged: make the keys anew, in another folder") from None

    def put(self, entries: Sequence[Mapping[str, str]]) -> None:
        write_private(self._file, list(entries))

    def _read(self) -> dict[str, KeyOwner]:
        now = clock.time()
        ends = {file.stem: file.stat().st_mtime + BAN_S for file in self.folder.glob("*.banned")} | self._unwritten
        banned = {name: end for name, end in ends.items() if now < end <= now + BAN_S + 1}  # not by a clock put back
        self._until = min(banned.values(), default=math.inf)
        holders = {entry["public"]: KeyOwner(entry["name"], entry["role"]) for entry in self.entries()}
        return {
            public: KeyOwner(owner.name, "banned") if owner.name in banned and owner.role in ROLES else owner
            for public, owner in holders.items()
        }

    def _refresh(self) -> None:
        try:
            stamp = os.stat(self.folder).st_mtime_ns, os.stat(self._file).st_mtime_ns
            if stamp == self._stamp and clock.time() < self._until:
                return
            self._stamp = stamp if max(stamp) < clock.time_ns() - TICK_NS else None
            self._holders, self.fails = self._read(), False
        except (ConfigError, OSError) as error:
            if not self.fails:
                log.error("nobody is let in: %s", error)
            self._holders, self._stamp, self.fails = {}, None, True


class RefusalCount:
    """Counts what was refused, by reason."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def add(self, reason: str, text: str, times: int = 1) -> None:
        """Count a refusal, and log it. reason: one of a few, because each is a kind of its own for the log."""
        self.counts[reason] = self.counts.get(reason, 0) + times
        log.warning(f"refused, {reason}: %s", text[:500])

    @property
    def report(self) -> dict[str, Any]:
        """For status."""
        counts = dict(self.counts)
        return {"refused": sum(counts.values()), "refusals": counts}


@dataclass(slots=True)
class _Peer:
    """One connection: how many bad messages it sent, and whether it is heard no more."""

    bad: int = 0
    ignored: bool = False


class AccessControl:
    """Guards one public socket, and is polled by the loop that owns it: `turn` whenever one of `polled` is ready. The
    `context` is the one to be destroyed in the end."""

    def __init__(self, address: str, keys: Path | None, *, option: str = "port") -> None:
        """Raises ConfigError when nothing may listen on `address`, or cannot; `option` is what would change it."""
        check_address(address, keys)
        self.keys = AllowList(keys) if keys else None
        self.refusals = RefusalCount()
        self.refuse = self.refusals.add
        self._peers: dict[bytes, _Peer] = {}
        self._causes: dict[tuple[str, str], dict[str, float]] = {}  # of each key and address: when a kind was seen
        self._second, self._counts = 0.0, dict[tuple[Any, Any], int]()  # what each did since then
        self._spending, self._spent = 0.0, dict[str | bytes, float]()  # seconds of CPU that each has cost since then
        self.context = zmq.Context()
        self._due = 0.0  # when it is time for newcomers again
        self._zap = self.context.socket(zmq.REP)
        self._zap.bind(ZAP)
        self.socket = bound(self.context, address, prepare=self._prepare, option=option)
        self.socket.connections = self.connections

    def _prepare(self, socket: zmq.Socket) -> None:
        socket.set(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        socket.zap_domain = b"retake"
        socket.set(zmq.ZAP_ENFORCE_DOMAIN, 1)  # nobody is let in if nobody can be asked
        if self.keys is not None:
            socket.curve_server = True
            socket.curve_secretkey = self.keys.secret.encode()
        self.connections = Connections(socket, self.refuse, has_keys=self.keys is not None)

    @property
    def polled(self) -> tuple[zmq.Socket, ...]:
        return self.socket, self._zap, self.connections.monitor

    @property
    def report(self) -> dict[str, Any]:
        """For status: how many are connected, and what was refused, by reason."""
        return {"connections": len(self.connections.places), **self.refusals.report}

    def turn(self) -> None:
        """Let in and keep out who has knocked, a quarter of the time at most; never waits."""
        if (begin := clock.monotonic()) < self._due:
            return
        self.connections.turn(begin + TURN_S)
        while has_come(self._zap) and clock.monotonic() <= begin + TURN_S:
            self._zap.send_multipart(self._asked(*self._zap.recv_multipart()))
        end = clock.monotonic()
        self._due = end + 3 * min(end - begin, LONGEST_S)

    def admit(self, identity: zmq.Frame, frames: Sequence[wire.Buffer]) -> KeyOwner | None:
        """Whose message it is that began with the frame `identity`; None: it is not looked at.

        Raises Refused, once for each connection, when its key is not allowed any more.
        """
        self.connections.heard(identity, frames)
        peer = self._peer(identity.bytes)
        if peer.ignored:
            return None
        if self.keys is None:
            return OPEN
        owner = self.keys.find(_property(identity, "User-Id"))
        if owner.role in ROLES:
            return owner
        self.refuse(f"{owner.role} key", owner.name)
        if self.keys.fails:
            return None  # it is not told so, as its key may be good: it tries again
        peer.ignored = True
        raise Refused(f"the key {owner.name} is {owner.role}: {REMEDIES[owner.role]}")

    def account(self, identity: zmq.Frame) -> str | bytes:
        """Whose message it is, cheaply: what its client shares with all others of its key; without keys, with none."""
        return self.keys.name_of(_property(identity, "User-Id")) if self.keys is not None else identity.bytes

    def is_ignored(self, identity: bytes) -> bool:
        """Whether nothing more of this connection is looked at."""
        is_known = (peer := self._peers.get(identity)) is not None and peer.ignored
        return is_known or self.connections.is_dropped(identity)

    def cut(self, identity: zmq.Frame, reason: str, text: str) -> None:
        """End the connection on which a message came, and look at nothing more of it."""
        self._peer(identity.bytes).ignored = True
        self.connections.cut(identity, reason, text)

    def expel(self, identity: zmq.Frame, text: str) -> None:
        """End the connection on which a message came that nobody sends by mistake, ban its key, and end all of it."""
        self.cut(identity, "bad message", text)
        if self.keys is not None and (name := self.keys.find(_property(identity, "User-Id")).name):
            self._ban(name)
            self.connections.cut_all(name, "bad message", text)

    def allows(self, identity: zmq.Frame, owner: KeyOwner, message: m.Message) -> bool:
        """Count a message whose answer is dear; False when there were too many of its kind within this second."""
        most = LIMITS.get(type(message))
        if most is None:
            return True
        price = 1 + len(message.earlier) if isinstance(message, m.Hello) else 1
        if self._count((type(message), owner.name or identity.bytes), price) <= most:
            return True
        self.refuse("too fast", f"more than {most} {type(message).__name__}s within a second")
        return False

    def charge(self, account: str) -> bool:
        """Count one record; True when it was the last one that this account may bring within this second."""
        return self._count((None, account), 1) >= RECORDS

    def brought(self, account: str) -> int:
        """How many records this account has brought within this second."""
        return self._count((None, account), 0)

    def is_exhausted(self, account: str) -> bool:
        """Whether no more records of this account are staged within this second."""
        return self.brought(account) >= RECORDS or self.is_dear(account)

    def spend(self, account: str | bytes, seconds: float) -> None:
        """Count the CPU that an account has cost."""
        self._spent[account] = self.spent(account) + seconds

    def spent(self, account: str | bytes) -> float:
        """Seconds of CPU that this account has cost within this second."""
        if (now := time.monotonic()) > self._spending + 1.0:  # as CPU is counted: not by a clock that a test advances
            self._spending, self._spent = now, {}
        return self._spent.get(account, 0.0)

    def is_dear(self, account: str | bytes) -> bool:
        """Whether this account has had its share of this second, in which others have said something, too."""
        return self.spent(account) >= SHARE_S and len(self._spent) > 1

    def _count(self, what: tuple[Any, Any], price: int) -> int:
        now = clock.monotonic()
        if now > self._second + 1.0:
            self._second, self._counts = now, {}
        total = self._counts.get(what, 0) + price
        if price:
            self._counts[what] = total
        return total

    def blame(self, identity: zmq.Frame, owner: KeyOwner | None, error: Exception) -> None:
        """Count a bad message. After BAD_MESSAGES its connection is ignored; after CAUSES kinds of them within a
        minute, from one address, its key is banned. One mistake, made again and again, bans nobody, and nor does what
        the learner's own processes send, which nobody `admit`s."""
        whose = owner.name if owner and owner.name else "a client"
        self.refuse("role" if isinstance(error, Forbidden) else "bad message", f"{whose}: {error}")
        if owner is None:
            return
        peer = self._peer(identity.bytes)
        peer.bad += 1
        peer.ignored = peer.bad >= BAD_MESSAGES
        if self.keys is None:
            return
        whence, now = (owner.name, _property(identity, "Peer-Address")), clock.monotonic()
        causes = {cause: seen for cause, seen in self._causes.pop(whence, {}).items() if seen > now - 60.0}
        causes[NUMBERS.sub("#", str(error))[:100]] = now
        if len(causes) >= CAUSES:
            self._ban(owner.name)
            return
        while len(self._causes) >= 4 * CONNECTIONS:
            del self._causes[next(iter(self._causes))]
        self._causes[whence] = causes

    def _ban(self, name: str) -> None:
        assert self.keys is not None
        self.keys.ban(name)
        log.warning("the key %s is refused for 10 minutes, or until `tools/keys.py unban %s`", name, name)

    def _peer(self, identity: bytes) -> _Peer:
        if (peer := self._peers.get(identity)) is None:
            while len(self._peers) >= 4 * CONNECTIONS:
                del self._peers[next(iter(self._peers))]
            peer = self._peers[identity] = _Peer()
        return peer

    def _asked(self, *frames: bytes) -> list[bytes]:
        """The answer to libzmq: may this key come in?"""
        version, request, _, address, _, _, *credentials = frames
        public = z85.encode(credentials[0]).decode() if credentials else ""
        owner = self.keys.find(public) if self.keys else OPEN
        if owner.role in ROLES:
            return [version, request, b"200", b"", public.encode(), _packed(self.connections.admitted())]
        self.refuse(f"{owner.role} key", f"{owner.name or 'a client'} at {address.decode(errors='replace')}")
        is_certain = self.keys is None or not self.keys.fails
        return [version, request, b"400" if is_certain else b"300", b"", b"", b""]  # 300: not now


def _packed(properties: Mapping[str, bytes]) -> bytes:
    """Return properties of a connection as ZAP wants them."""
    pairs = ((name.encode(), value) for name, value in properties.items())
    return b"".join(struct.pack(f">B{len(name)}sI", len(name), name, len(value)) + value for name, value in pairs)


def _property(identity: zmq.Frame, name: str) -> str:
    """What libzmq knows of the connection that a message came from: User-Id is its key."""
    try:
        return str(identity.get(name))
    except zmq.ZMQError:
        return ""
