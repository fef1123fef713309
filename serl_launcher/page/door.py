"""Says who may look at the page, and who may give orders: tokens, Host, Origin, and the headers of each answer."""

import hashlib
import http
import json
import secrets
from contextlib import suppress
from importlib import resources
from pathlib import Path
from urllib.parse import urlsplit

from serl_client import clock
from serl_client.errors import MessageError
from websockets.asyncio.server import ServerConnection
from websockets.datastructures import Headers
from websockets.frames import CloseCode
from websockets.http11 import Request, Response

from serl_launcher.page.certificate import opened
from serl_launcher.service.access import AllowList, RefusalCount
from serl_launcher.service.peers import KeyOwner
from serl_launcher.store.files import replaced

LIFE_S = 12 * 3600.0  # seconds that a link is good for
ROLES = ("operator", "viewer")
LOOPBACK = ("localhost", "127.0.0.1", "::1")  # with any port, because `ssh -L` may give another one
FILES = {  # path: (file of this folder, its type); there is no other path
    "/": ("page.html", "text/html"), "/page.css": ("page.css", "text/css"), "/page.js": ("page.js", "text/javascript"),
    "/drive.js": ("drive.js", "text/javascript"), "/scene.js": ("scene.js", "text/javascript"),
    "/stream.js": ("stream.js", "text/javascript"),
}  # fmt: skip
SOCKET, STREAM, SAY = "/socket", "/stream", "/say"  # a websocket; what stands in for one: what is told, what is said
ICONS = ("/favicon", "/apple-touch-icon")  # what browsers ask for by themselves: there is none
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src blob:; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "Permissions-Policy": "camera=(), microphone=(), geolocation=(), usb=(), serial=(), hid=(), payment=()",
    "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer", "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin", "Cross-Origin-Opener-Policy": "same-origin",
}  # fmt: skip


class NotLetIn(MessageError):
    """A connection without a token that is good now, or without a place.

    reason: under which it is counted. code: with which it ends; a browser comes again, but after POLICY_VIOLATION.
    """

    def __init__(self, text: str, reason: str = "token", code: int = CloseCode.TRY_AGAIN_LATER) -> None:
        super().__init__(text)
        self.reason, self.code = reason, code


class Tokens:
    """Holds who was given a link: only hashes, so that no comparison tells a part of a token by its time.

    file: keeps them, so that a page which is open comes back by itself after the death of this process. It alone tells
    the time of day, which may be set meanwhile.
    """

    def __init__(self, file: Path) -> None:
        self._file, self._known = file, _kept(file)  # {hash: (role, when it ends, by clock.monotonic())}

    def make(self, role: str) -> str:
        """Return a new token of this role, good for LIFE_S. Forgets those that are over."""
        now, token = clock.monotonic(), secrets.token_urlsafe(32)
        known = {**_kept(self._file), **self._known, _hashed(token): (role, now + LIFE_S)}
        self._known = {each: (its, end) for each, (its, end) in known.items() if end > now}
        with suppress(OSError), replaced(self._file) as aside:  # else they are good as long as this process
            began = clock.time() - now
            aside.write_text(json.dumps({each: (its, began + end) for each, (its, end) in self._known.items()}))
        return token

    def role(self, token: str) -> str | None:
        """Return the role of a token; None: there is none such, or not any more."""
        role, end = self._known.get(_hashed(token), ("", 0.0))
        return role if end > clock.monotonic() else None


def _kept(file: Path) -> dict[str, tuple[str, float]]:
    now, began = clock.time(), clock.time() - clock.monotonic()
    try:
        kept = {str(each): (str(role), float(end)) for each, (role, end) in json.loads(file.read_text()).items()}
        return {
            each: (role, end - began)
            for each, (role, end) in kept.items()
            if 0 < end - now <= LIFE_S  # a clock that was set back lets nobody in
        }
    except (OSError, ValueError, TypeError, AttributeError):  # there is none, or it is damaged: new links are printed
        return {}


def _hashed(token: str) -> str:
    return hashlib.sha256(token.encode(errors="replace")).hexdigest()


class Door:
    """Lets in, or refuses and counts. host, keys, certificate: as certificate.opened takes them, and raises.

    The folder of keys is that of tools/keys.py: its keys for the page are good until they are revoked.
    """

    def __init__(self, tokens: Tokens, host: str, keys: Path | None, certificate: Path | None) -> None:
        self.host, self.tokens, self.refusals = host, tokens, RefusalCount()
        self._named = AllowList(keys) if keys else None
        self.certificate = opened(host, keys, certificate)
        self.scheme = "https" if self.certificate else "http"

    def owner(self, token: str) -> KeyOwner | None:
        """Return whose token or key this is, with a role of ROLES; None: it is not good, or not any more."""
        if role := self.tokens.role(token):
            return KeyOwner(f"the {role}'s link", role)  # no name of a key holds a space
        owner = self._named.bearer(token, "page") if self._named else None
        return owner if owner and owner.role in ROLES else None

    def refusal(self, text: str) -> NotLetIn:
        """Return why a token that has no owner is not let in: this text, or that the keys cannot be read now."""
        if self._named and self._named.fails:
            return NotLetIn("the keys cannot be read now: the learner's log says why")
        return NotLetIn(text, code=CloseCode.POLICY_VIOLATION)

    def knock(self, connection: ServerConnection, request: Request) -> Response | None:
        """Answer a request for a file, and refuse what comes from elsewhere; None: it may talk.

        A browser names in Host what its address bar shows, and in Origin the page that asks. So a name that somebody
        else has pointed at this machine (DNS rebinding) and a page of another site are refused before they could say
        a token.
        """
        hosts, path = request.headers.get_all("Host"), request.path.partition("?")[0]
        names = (*LOOPBACK, *(self.certificate.names if self.certificate else ()))
        if len(hosts) != 1 or not _is_among(_name(hosts[0]), (*names, str(connection.local_address[0]))):
            text = f"this page answers to {', '.join(names)}: open one of them, or use ssh -L (docs/guides/page.md)"
            return self._refuse("host", text)
        if path in (SOCKET, STREAM, SAY):
            return None if self._is_own(request, hosts[0]) else self._refuse("origin", "another site may not connect")
        if path not in FILES:
            no_page = answered(http.HTTPStatus.NOT_FOUND, b"there is no such page")
            return no_page if path.startswith(ICONS) else self._refuse("path", "there is no such page", no_page)
        file, kind = FILES[path]
        return answered(http.HTTPStatus.OK, resources.files("serl_launcher.page").joinpath(file).read_bytes(), kind)

    def _is_own(self, request: Request, host: str) -> bool:
        """Return whether it is this page that asks. Of an EventSource a browser names no Origin, but says the same."""
        if request.path == STREAM and not request.headers.get_all("Origin"):
            return request.headers.get_all("Sec-Fetch-Site") == ["same-origin"]
        return request.headers.get_all("Origin") == [f"{self.scheme}://{host}"]

    def _refuse(self, reason: str, text: str, answer: Response | None = None) -> Response:
        self.refusals.add(reason, f"a browser: {text}")
        return answer or answered(http.HTTPStatus.FORBIDDEN, text.encode())


def answered(status: http.HTTPStatus, body: bytes, kind: str = "text/plain") -> Response:
    """Return a whole answer, after which the connection closes."""
    own = {"Content-Type": f"{kind}; charset=utf-8", "Content-Length": str(len(body)), "Connection": "close"}
    return Response(status, status.phrase, Headers({**HEADERS, **own}), body)


def _is_among(name: str, names: tuple[str, ...]) -> bool:
    """Return whether a name is one of these, of which `*.lab.example` stands for a.lab.example alone."""
    return bool(name) and (name in names or "*." + name.partition(".")[2] in names)


def _name(host: str) -> str:
    """Return the name in a Host header, without its port; empty for what is none."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""
