"""Beyond loopback: TLS by a certificate that fits, and named keys, which end when they are revoked."""

import hashlib
import logging
import socket
import sys
from datetime import timedelta

import pytest
from serl_client.errors import ConfigError
from websockets.exceptions import InvalidStatus

from serl_launcher.page import certificate, links
from serl_launcher.page.door import _is_among
from serl_launcher.page.doorstep import Doorstep
from serl_launcher.page.server import OVER, Page
from serl_launcher.service.access import AllowList, RefusalCount
from tests.page.conftest import knocking, serving, streaming, trusting
from tests.page.test_door import closed, counted, crowd
from tests.shared.keys import do

pytest.importorskip("cryptography", reason="the extra `page` is not installed: . examples/install.sh --extra page")


@pytest.fixture
def far(served, keys):
    """A page of the same run that other machines reach, here by loopback's address; `keys` is the folder of keys."""
    with serving(served.server.run_dir, served.server.local, host="0.0.0.0", keys=keys) as made:
        made.keys, made.server = keys, served.server
        yield made


def token_of(keys, name, role):
    """A key for the page, as its tool says it."""
    return do("page", keys, name, role).split(": ")[2].split("\n")[0]


def test_others_reach_the_page_by_tls_alone_with_the_certificate_whose_fingerprint_is_said(far, browse):
    browser = browse(far, host=f"127.0.0.1:{far.port}")
    assert browser.welcome()["role"] == "operator"
    told = links.links(far.page.door, far.port)
    mine = browser.socket.socket.getpeercert(binary_form=True)
    assert hashlib.sha256(mine).hexdigest().upper() in told.replace(":", "")
    assert browser.socket.socket.version() == "TLSv1.3"
    assert (told.count("https://"), "http://" in told, "ssh" in told, "localhost" in told) == (2, False, False, False)
    for name in ("localhost", "127.0.0.1"):
        (strict := trusting(far.keys)).check_hostname = True
        strict.wrap_socket(socket.create_connection(("127.0.0.1", far.port)), server_hostname=name).close()
    with socket.create_connection(("127.0.0.1", far.port)) as plain:
        plain.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b"HTTP" not in plain.recv(4096)
    assert (far.keys / certificate.MADE).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("host", "origin", "code"),
    [("evil.example", "", 403), ("10.9.8.7", "", 403), ("localhost", "http://localhost", 403),
     (socket.gethostname(), "", 0), ("127.0.0.1", "", 0), ("localhost", "https://evil.example", 403)],
)  # fmt: skip
def test_it_answers_to_the_names_of_its_certificate_and_to_the_address_that_was_reached(far, host, origin, code):
    try:
        with knocking(far, host=host, origin=origin):
            found = 0
    except InvalidStatus as error:
        found = error.response.status_code
    assert found == code
    assert counted(far, "host") + counted(far, "origin") == bool(code)


@pytest.mark.parametrize(
    ("host", "names", "is_among"),
    [("a.lab.example", ("*.lab.example",), True), ("a.b.lab.example", ("*.lab.example",), False),
     ("lab.example", ("*.lab.example",), False), ("", ("",), False), ("*.lab.example", ("a.lab.example",), False)],
)  # fmt: skip
def test_a_pattern_of_a_certificate_stands_for_one_word(host, names, is_among):
    assert _is_among(host, names) is is_among


def test_a_certificate_is_made_once_and_anew_when_it_is_over(keys, monkeypatch):
    monkeypatch.setattr(certificate, "LIFE", timedelta(seconds=1))
    certificate._make(keys / certificate.MADE, "0.0.0.0")
    assert certificate._read(keys / certificate.MADE).is_over
    monkeypatch.undo()
    first = certificate.opened("0.0.0.0", keys, None)
    assert not first.is_over
    assert certificate.opened("10.0.0.5", keys, None).fingerprint == first.fingerprint
    assert {file.name for file in keys.iterdir() if "pem" in file.name} == {certificate.MADE}


def spoilt(file, how, monkeypatch):
    """A certificate of the user's own, and what is wrong with it."""
    if how == "over":
        monkeypatch.setattr(certificate, "LIFE", timedelta(seconds=1))
    certificate._make(file, "gpu-box.example")
    if how == "of others":
        file.chmod(0o644)
    if how == "of another key":
        certificate._make(other := file.with_name("other.pem"), "gpu-box.example")
        begin = "-----BEGIN PRIVATE KEY"
        file.write_text(file.read_text().partition(begin)[0] + begin + other.read_text().partition(begin)[2])
    if how == "without a key":
        file.write_text(file.read_text().partition("-----BEGIN PRIVATE KEY")[0])
    if how == "noise":
        file.write_bytes(b"\xff\x00" * 99)
    if how == "gone":
        file.unlink()


@pytest.mark.parametrize(
    ("how", "says"),
    [("over", "page_certificate=.*: its time is over, or has not begun: renew it"),
     ("of others", "own.pem has mode 0644, so others may use the key: say chmod 600"),
     ("of another key", r"own.pem is no certificate with its private key, or .*MISMATCH.*cat fullchain.pem"),
     ("without a key", r"own.pem is no certificate with its private key.*cat fullchain.pem"),
     ("noise", r"own.pem is no certificate with its private key.*cat fullchain.pem"),
     ("gone", r"cannot read .*own.pem \(No such file or directory\): Make one PEM file of both")],
)  # fmt: skip
def test_a_certificate_that_is_not_good_is_refused_with_what_to_do(keys, tmp_path, monkeypatch, how, says):
    spoilt(file := tmp_path / "own.pem", how, monkeypatch)
    with pytest.raises(ConfigError, match=says):
        Page(tmp_path, "", host="0.0.0.0", keys=keys, certificate=file)


def test_what_the_page_cannot_do_is_refused_with_what_to_do(keys, tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"page_host=0.0.0.0: without keys .*tools/keys.py page NAME --role operator"):
        Page(tmp_path, "", host="0.0.0.0")
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigError, match="choose another page="):
        Doorstep("127.0.0.1", taken.getsockname()[1], RefusalCount())
    with pytest.raises(ConfigError, match="page=10080: browsers open nothing on this port"):
        Doorstep("127.0.0.1", 10080, RefusalCount())
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(
        ConfigError, match=r"TLS of the page needs cryptography: run `. examples/install.sh --extra page"
    ):
        Page(tmp_path, "", host="0.0.0.0", keys=keys)
    assert Page(tmp_path, "", keys=keys).door.certificate is None, "loopback needs no TLS"


def test_a_phone_reads_the_link_from_the_terminal_where_there_is_one(far, monkeypatch):
    pytest.importorskip("segno")
    assert "█" not in links.links(far.page.door, far.port)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert "█" in links.links(far.page.door, far.port)
    monkeypatch.setitem(sys.modules, "segno", None)
    assert "https://" in links.links(far.page.door, far.port)


def test_who_begins_no_tls_takes_the_place_of_nobody(far, browse):
    with crowd(far):
        assert browse(far).welcome()


# -- named keys
def test_orders_are_logged_with_the_name_of_the_key_and_never_with_the_key(far, browse, join, caplog):
    caplog.set_level(logging.INFO)
    join(far.server)
    alice, eve = (token_of(far.keys, name, role) for name, role in (("alice", "operator"), ("eve", "viewer")))
    for token, role in ((alice, "operator"), (eve, "viewer")):
        browser = browse(far, token=token)
        assert browser.welcome()["role"] == role
        phase = browser.ask("state")["phase"]
        told = browser.ask("order", order="pause", about=phase)
        assert told.startswith("pause: the learner has" if role == "operator" else "error: this link is to look only")
    assert "alice: pause: the learner has taken it" in caplog.text
    assert counted(far, "role") == 1
    assert alice.partition(":")[2] not in caplog.text


@pytest.mark.parametrize("way", [knocking, streaming])
def test_a_revoked_key_ends_its_open_pages_also_where_they_ask_nothing_and_opens_no_other(served, keys, browse, way):
    token = token_of(keys, "alice", "operator")
    with serving(served.server.run_dir, served.server.local, keys=keys) as page:
        browser = browse(page, token=token, way=way)
        assert browser.welcome()["role"] == "operator"
        do("revoke", keys, "alice")
        assert closed(browser) == (1008, OVER)
        assert closed(browse(page, token=token, way=way))[0] == 1008


def test_while_keys_cannot_be_read_a_page_ends_in_such_a_way_that_it_comes_again(served, keys, browse):
    token, file = token_of(keys, "alice", "operator"), keys / "allowed.json"
    with serving(served.server.run_dir, served.server.local, keys=keys) as page:
        browser = browse(page, token=token)
        browser.welcome()
        file.rename(keys / "aside")
        assert closed(browser) == (1013, "the keys cannot be read now: the learner's log says why")
        (keys / "aside").rename(file)
        assert browse(page, token=token).welcome()["role"] == "operator"


def test_a_key_for_the_page_opens_the_page_alone_and_no_other_key_does(keys, tmp_path):
    token, allowed = token_of(keys, "alice", "viewer"), AllowList(keys)
    owner = Page(tmp_path, "", keys=keys).door.owner
    assert owner(token).role == "viewer"
    assert allowed.bearer(token).role == "unknown"
    assert not (keys / "alice.key").exists()
    for name in ("boss", "left", "alice"):
        assert owner(allowed.api_key(name)) is None
    assert owner(allowed.api_key("left", "page")) is None, "an actor's key, even so"
    for role, says in (("actor", "has --role operator"), ("viewer", "there is a key alice already: revoke it first")):
        with pytest.raises(ConfigError, match=says):
            do("page", keys, "alice", role)
    assert "alice                viewer" in do("list", keys)
