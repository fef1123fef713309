"""Finds out why a learner does not answer (address, port, key, another program), and says what to do."""

import logging
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self
from urllib.parse import urlsplit

import serl_client.clock as clock
from serl_client.connection import tcp
from serl_client.errors import Disconnected, RetakeError, Timeout

log = logging.getLogger(__name__)

PATIENCE = 3.0  # seconds for one look at the address
SILENCE = 5.0  # seconds without an answer until an actor says why
WATCH = 1.0  # seconds between two checks whether there is silence
UNASKED = 3.0  # seconds without a question until nobody waits for an answer any more: each is repeated before
AGAIN = 10.0  # seconds between two looks
# The greeting of every ZeroMQ peer (ZMTP 3.0): this signature and version, the security mechanism, whether the peer is
# the server, and zeros; GREETING bytes in all.
OPENING = b"\xff" + bytes(7) + b"\x01\x7f" + b"\x03\x00"
GREETING = 64
PLACES = "on 127.0.0.1 only its own machine reaches it, so use a tunnel (ssh -L {0}:localhost:{0} GPU_BOX) or keys"
REFUSED = {  # {option of a port: what to do where nobody listens}
    "port": "start the learner; if it runs, compare port= there and host=: " + PLACES + " (docs/guides/security.md)",
    "inference_port": (
        "the learner opens it when it knows the robot and has loaded torch, some seconds after the first actor came. "
        "If it stays closed, see the learner's screen, and compare inference_port= there and here; a tunnel takes this "
        "port, too (ssh -L {0}:localhost:{0} GPU_BOX)"
    ),
}


@dataclass(frozen=True, slots=True)
class Look:
    """Holds what a look at an address found: whether a learner seems to be there, one sentence, and what to do.

    is_refused: its machine answers, and nobody listens there.
    """

    ok: bool
    text: str
    advice: str = ""
    is_refused: bool = False


def look(host: str, port: int, *, has_key: bool, option: str = "port") -> Look:
    """Look whether a learner listens there, and whether it asks for keys.

    option: the setting that chose the port. Takes PATIENCE at most, or longer if the lookup of the host's name fails
    slowly.
    """
    place = tcp(host, port).removeprefix("tcp://")
    try:
        greeting, seconds = greeted(host, port)
    except socket.gaierror as error:
        return Look(False, f"{host} is no known name: {error.strerror}", "say the learner's address, ip=10.0.0.5")
    except ConnectionRefusedError:
        return Look(False, f"nobody listens at {place}", REFUSED[option].format(port), is_refused=True)
    except (OSError, UnicodeError, OverflowError) as error:
        advice = (
            "look at the cable, the address (ping) and the firewall of the learner's machine for this port, "
            f"which {option}= chooses"
        )
        return Look(False, f"{place} cannot be reached: {getattr(error, 'strerror', None) or error}", advice)
    return judged(place, greeting, seconds, has_key)


def look_at(address: str, *, has_key: bool, option: str = "port") -> Look:
    """Look at an address, tcp://host:port, as `look`."""
    place = urlsplit(address)
    return look(place.hostname or "", place.port or 0, has_key=has_key, option=option)


def why_silent(address: str, *, has_key: bool, option: str = "port") -> Look:
    """Look why an address does not answer us."""
    found = look_at(address, has_key=has_key, option=option)
    return unwelcome(address.removeprefix("tcp://")) if found.ok else found


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
        advice = "look whether the learner is stopped (Ctrl-Z), and behind a tunnel, whether it runs at the other end"
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
    """Return the Look for an address that speaks ZeroMQ and does not answer us."""
    advice = (
        "a learner that is starting, busy or stopped (see its screen), one of which key= is not (copy it again), or "
        "another program: compare its port"
    )
    return Look(False, f"{address} takes connections and does not answer", advice)


def explained(error: RetakeError, address: str, *, has_key: bool, option: str = "port") -> str:
    """Return why a call got no answer: what a look at the address finds, or else the error's text."""
    if not isinstance(error, Disconnected | Timeout) or address.startswith("ipc://"):
        return str(error)
    found = look_at(address, has_key=has_key, option=option)
    return str(error) if found.ok else f"{found.text}: {found.advice}"


class Unanswered:
    """Tells for how long questions have had no answer. One thread asks; others may read."""

    def __init__(self) -> None:
        self._since = self._latest = 0.0

    def ask(self) -> None:
        """Note that an answer is waited for now."""
        now = clock.monotonic()
        if not self._since or now > self._latest + UNASKED:
            self._since = now
        self._latest = now

    def end(self) -> None:
        """Note that an answer has come."""
        self._since = 0.0

    @property
    def seconds(self) -> float | None:
        """Return since when, in seconds; 0.0: there was an answer. None: none is waited for any more."""
        now = clock.monotonic()
        if self._since and now > self._latest + UNASKED:
            return None
        return now - self._since if self._since else 0.0


class Lookout:
    """Logs why what should answer has been silent for SILENCE, and logs when it answers; a context manager.

    what: should answer, such as `the learner`. silence: returns for how many seconds it does not; 0.0 while it does;
        None while nobody asks.
    find: looks for the reason; ok where it is one that passes by itself, so that nobody is warned. A thread of its own
        calls it, because a look may take seconds.
    refusal: returns why it refuses this client, which the client has told already.
    """

    def __init__(
        self, what: str, silence: Callable[[], float | None], find: Callable[[], Look], *,
        refusal: Callable[[], str] = lambda: "",
    ) -> None:  # fmt: skip
        self._what, self._silence, self._find, self._refusal = what, silence, find, refusal
        self._was_there = self._is_coming = False
        self.told, self._looked = "", 0.0  # told: the reason; empty while there is none
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lookout", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()  # the thread is a daemon: a look under way is not waited for

    def __str__(self) -> str:
        """Return for the console: connected, or since when not, and why."""
        if not (silence := self._silence()):
            return "connected"
        if self._is_coming or (silence < SILENCE and not (self._was_there or self.told)):
            return self.told or "connecting"
        heard = f"last heard {silence:.0f} s ago" if self._was_there else "never heard"
        return f"AWAY, {heard}" + f": {self.told}" * bool(self.told)

    def _run(self) -> None:
        while not self._ended.wait(WATCH):
            self.watch()

    def watch(self) -> None:
        """Look once if there was silence for long enough, and log what is new."""
        if (silence := self._silence()) is None:
            self.told, self._looked = "", 0.0
            return
        if not silence:
            if self.told:
                log.info("%s answers%s", self._what, " again" * self._was_there)
            self._was_there, self._is_coming, self.told, self._looked = True, False, "", 0.0
            return
        if refusal := self._refusal():
            self.told = refusal
            return
        now = clock.monotonic()
        if silence < SILENCE or now - self._looked < AGAIN:
            return
        self._looked = now
        found = self._find()
        if found.text == self.told or not self._silence() or self._ended.is_set():
            return
        self.told, self._is_coming = found.text, found.ok
        if found.ok:
            log.info("%s: %s", self._what, found.text)
            return
        log.warning(
            "%s: %s (%s). This actor waits, keeps what it has, and goes on by itself; Ctrl-C ends it",
            f"{self._what} answers no more" if self._was_there else f"nothing is heard of {self._what}",
            found.text, found.advice, extra={"is_shown": True},
        )  # fmt: skip
