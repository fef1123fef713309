"""Says the links to the page, with new tokens, on the learner's screen, where a phone can read one from."""

import io
import sys
from contextlib import suppress

from serl_client.connection import is_local, tcp

from serl_launcher.page.certificate import reached_at
from serl_launcher.page.door import LIFE_S, Door


def links(door: Door, port: int) -> str:
    """Return new links: whoever has one gives orders, or looks, for LIFE_S. Nothing else may show them."""
    is_here, hours, tls = is_local(tcp(door.host, port)), round(LIFE_S / 3600), door.certificate
    host = "localhost" if is_here else (tls and tls.name) or reached_at(door.host)
    place = tcp(host, port).removeprefix("tcp:")
    operator, viewer = (f"{door.scheme}:{place}/#{door.tokens.make(role)}" for role in ("operator", "viewer"))
    lines = [
        f"the page of this run, for an operator, for {hours} h: {operator}",
        f"to look only, for {hours} h: {viewer}",
    ]
    if is_here:
        lines += [f"from another machine: ssh -L {port}:localhost:{port} HOST there, then the same link"]
    if tls:
        lines += [f"the browser has to show this SHA-256 of the certificate: {tls.fingerprint}"]
    if not is_here and sys.stdout.isatty():
        lines += [_code(operator)]
    return "\n".join([*lines, ""])


def _code(link: str) -> str:
    """Return a link as a QR code for a terminal; empty where segno is not installed."""
    with suppress(ModuleNotFoundError):
        import segno

        segno.make(link, micro=False).terminal(drawn := io.StringIO(), compact=True)
        return drawn.getvalue()
    return ""
