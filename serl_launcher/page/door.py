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
from websockets.asyncio.server import ServerConnection
from websockets.datastructures import Headers
from websockets.http11 import Request, Response

from serl_launcher.store.files import replaced

LIFE_S = 12 * 3600.0  # seconds that a link is good for
ROLES = ("operator", "viewer")
HOST = "127.0.0.1"  # where the page listens: nobody but this machine reaches it
LOOPBACK = ("localhost", "127.0.0.1", "::1")  # with any port, because `ssh -L` may give another one
FILES = {  # path: (file of this folder, its type); there is no other path
    "/": ("page.html", "text/html"), "/page.css": ("page.css", "text/css"), "/page.js": ("page.js", "text/javascript"),
    "/drive.js": ("drive.js", "text/javascript"),
}  # fmt: skip
SOCKET = "/socket"
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


class Tokens:
    """Holds who was given a link: only hashes, so that no comparison tells a part of a token by its time.

    file: keeps them, so that a page which is open comes back by itself after the death of this process.
    """

    def __init__(self, file: Path) -> None:
        self._file, self._known = file, _kept(file)  # {hash: (role, when it ends: seconds since 1970)}

    def make(self, role: str) -> str:
        """Return a new token of this role, good for LIFE_S. Forgets those that are over."""
        now, token = clock.time(), secrets.token_urlsafe(32)
        known = {**_kept(self._file), **self._known, _hashed(token): (role, now + LIFE_S)}
        self._known = {each: (its, end) for each, (its, end) in known.items() if end > now}
        with suppress(OSError), replaced(self._file) as aside:  # else they are good as long as this process
            aside.write_text(json.dumps(self._known))
        return token

    def role(self, token: str) -> str | None:
        """Return the role of a token; None: there is none such, or not any more."""
        role, end = self._known.get(_hashed(token), ("", 0.0))
        return role if 0 < end - clock.time() <= LIFE_S else None  # a clock that was set back lets nobody in


def _kept(file: Path) -> dict[str, tuple[str, float]]:
    try:
        return {str(each): (str(role), float(end)) for each, (role, end) in json.loads(file.read_text()).items()}
    except (OSError, ValueError, TypeError, AttributeError):  # there is none, or it is damaged: new links are printed
        return {}


def _hashed(token: str) -> str:
    return hashlib.sha256(token.encode(errors="replace")).hexdigest()


def knock(connection: ServerConnection, request: Request) -> Response | None:
    """Answer a request for a file, and refuse what comes from elsewhere; None: it may open the websocket.

    A browser names in Host what its address bar shows, and in Origin the page that asks. So a name that somebody else
    has pointed at loopback (DNS rebinding) and a page of another site are refused before they could say a token.
    """
    hosts = request.headers.get_all("Host")
    if len(hosts) != 1 or _name(hosts[0]) not in LOOPBACK:
        return answered(http.HTTPStatus.FORBIDDEN, b"this page answers to localhost alone: ssh -L brings it elsewhere")
    path = request.path.partition("?")[0]
    if path == SOCKET:
        if request.headers.get_all("Origin") == [f"http://{hosts[0]}"]:
            return None
        return answered(http.HTTPStatus.FORBIDDEN, b"a page of another site may not connect")
    if path not in FILES:
        return answered(http.HTTPStatus.NOT_FOUND, b"there is no such page")
    file, kind = FILES[path]
    return answered(http.HTTPStatus.OK, resources.files("serl_launcher.page").joinpath(file).read_bytes(), kind)


def answered(status: http.HTTPStatus, body: bytes, kind: str = "text/plain") -> Response:
    """Return a whole answer, after which the connection closes."""
    own = {"Content-Type": f"{kind}; charset=utf-8", "Content-Length": str(len(body)), "Connection": "close"}
    return Response(status, status.phrase, Headers({**HEADERS, **own}), body)


def _name(host: str) -> str:
    """Return the name in a Host header, without its port; empty for what is none."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""
