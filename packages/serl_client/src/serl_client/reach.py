"""Finds out why a learner does not answer (address, firewall, key, another version), and says what to do."""

import logging
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import serl_client.clock as clock
from serl_client.errors import Disconnected, Timeout, TrainerError

log = logging.getLogger(__name__)

PATIENCE = 3.0  # seconds for one look at the address
SILENCE = 5.0  # seconds without a learner until an actor says why
WATCH = 1.0  # seconds between two checks whether the learner is there
AGAIN = 10.0  # seconds between two looks, because the learner counts each as a broken handshake
# The greeting of every ZeroMQ peer (ZMTP 3.0): this signature and version, the security mechanism, whether the peer is
# the server, and zeros; GREETING bytes in all.
OPENING = b"\xff" + bytes(7) + b"\x01\x7f" + b"\x03\x00"
GREETING = 64


@dataclass(frozen=True, slots=True)
class Look:
    """Holds what a look at an address found: whether a learner seems to be there, one sentence, and what to do."""

    ok: bool
    text: str
    advice: str = ""


def look(host: str, port: int, *, has_key: bool) -> Look:
    """Look whether a learner listens there, and whether it asks for keys.

    Takes PATIENCE at most, or longer if the lookup of the host's name fails slowly.
    """
    try:
        greeting, seconds = greeted(host, port)
    except socket.gaierror as error:
        return Look(False, f"{host} is no known name: {error.strerror}", "say the learner's address, ip=10.0.0.5")
    except ConnectionRefusedError:
        advice = (
            "start the learner; if it runs, compare port= there, and its host=: on 127.0.0.1 only its own machine "
            f"reaches it, so use a tunnel (ssh -L {port}:localhost:{port} GPU_BOX) or keys (docs/security.md)"
        )
        return Look(False, f"nobody listens at {host}:{port}", advice)
    except (OSError, UnicodeError, OverflowError) as error:
        advice = "look at the cable, the address (ping) and the firewall of the learner's machine for this port"
        return Look(False, f"{host}:{port} cannot be reached: {getattr(error, 'strerror', None) or error}", advice)
    return judged(f"{host}:{port}", greeting, seconds, has_key)


def greeted(host: str, port: int) -> tuple[bytes, float]:
    """Return a listener's greeting (GREETING bytes, or less), and the seconds that connecting took."""
    begin = clock.monotonic()
    with socket.create_connection((host, port), PATIENCE) as peer:
        seconds = clock.monotonic() - begin
        peer.sendall(OPENING)
        said = b""
        try:
            while len(said) < GREETING and (part := peer.recv(GREETING - len(said))):
                said += part
        except (TimeoutError, ConnectionResetError):
            pass
    return said, seconds


def judged(address: str, greeting: bytes, seconds: float, has_key: bool) -> Look:
    """Return what a greeting tells about the program at `address`."""
    if not greeting:
        advice = "is the learner stopped (Ctrl-Z)? Behind a tunnel: does the learner run at its other end?"
        return Look(False, f"{address} takes connections and says nothing", advice)
    if greeting[:1] + greeting[9:10] != b"\xff\x7f" or len(greeting) < GREETING:
        advice = f"another program has that port: compare port= of the learner with {address.rpartition(':')[2]}"
        return Look(False, f"{address} is no learner, it says {greeting[:24]!r}", advice)
    mechanism = greeting[12:32].rstrip(b"\0").decode("ascii", "replace")
    if mechanism == "CURVE" and not has_key:
        advice = "have a key made there (`tools/keys.py make`), bring the file here (mode 0600) and say key=FILE"
        return Look(False, f"{address} lets in only who has a key", advice)
    if mechanism == "NULL" and has_key:
        return Look(False, f"{address} has no keys, and key= is given", "leave key= out, or start it with keys=")
    return Look(True, f"{address} answers after {seconds * 1e3:.1f} ms, security {mechanism}")


def unwelcome(address: str) -> Look:
    """Return the Look for an address that speaks ZeroMQ and does not answer our Hello."""
    advice = "a learner that is starting, or stopped (see its screen), or another program: compare port="
    return Look(False, f"{address} does not answer to Hello", advice)


def explained(error: TrainerError, host: str, port: int, *, has_key: bool) -> str:
    """Return why a call got no answer: what a look at the address finds, or else the error's text."""
    if not isinstance(error, Disconnected | Timeout):
        return str(error)
    found = look(host, port, has_key=has_key)
    return str(error) if found.ok else f"{found.text}: {found.advice}"


class Lookout:
    """Logs why the learner has been away for SILENCE, and logs when it is back; a context manager.

    is_connected: returns whether the learner is there. A thread of its own looks, because a look may take seconds.
    refusal: returns why a learner that is there refuses this client, which the client has told already.
    """

    def __init__(
        self, is_connected: Callable[[], bool], host: str, port: int, *, has_key: bool,
        refusal: Callable[[], str] = lambda: "",
    ) -> None:  # fmt: skip
        self._refusal = refusal
        self._is_connected, self._host, self._port, self._has_key = is_connected, host, port, has_key
        self._left = clock.monotonic()  # when the learner was last there, or when this object was made
        self._was_there = False
        self._told, self._looked = "", 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lookout", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()  # the thread is a daemon: a look under way is not waited for

    def __str__(self) -> str:
        """Return for the console: connected, or since when not, and why."""
        if self._is_connected():
            return "connected"
        heard = f"last heard {clock.monotonic() - self._left:.0f} s ago" if self._was_there else "never heard"
        return f"AWAY, {heard}" + f": {self._told}" * bool(self._told)

    def _run(self) -> None:
        while not self._ended.wait(WATCH):
            self.watch()

    def watch(self) -> None:
        """Look once if the learner has been away for long enough, and log what is new."""
        if self._is_connected():
            if self._told:
                log.info("the learner is there%s", " again" * self._was_there)
            self._left, self._was_there, self._told, self._looked = clock.monotonic(), True, "", 0.0
            return
        if refusal := self._refusal():
            self._told = refusal
            return
        now = clock.monotonic()
        if now - self._left < SILENCE or now - self._looked < AGAIN:
            return
        self._looked = now
        found = look(self._host, self._port, has_key=self._has_key)
        found = unwelcome(f"{self._host}:{self._port}") if found.ok else found
        if found.text == self._told or self._is_connected() or self._ended.is_set():
            return
        self._told = found.text
        log.warning(
            "%s: %s (%s). This actor waits, keeps what it has, and goes on by itself; Ctrl-C ends it",
            "the learner has left" if self._was_there else "nothing is heard of the learner", found.text, found.advice,
        )  # fmt: skip
