"""Who is let in: nobody without a token, no page of another site, no other name, nothing that is too large."""

import http.client
import json
import re

import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus

from serl_launcher.page import door
from tests.page.conftest import knocking
from tests.shared.common import PATIENCE, ROOT, until


def fetched(served, path, host="localhost"):
    """(status, headers, text) of one request of a browser."""
    link = http.client.HTTPConnection("127.0.0.1", served.port, timeout=PATIENCE)
    link.putrequest("GET", path, skip_host=True)
    link.putheader("Host", host if host.endswith("]") or ":" in host else f"{host}:{served.port}")
    link.endheaders()
    answer = link.getresponse()
    return answer.status, answer.headers, answer.read().decode()


def closed(browser):
    """Why the page ended this connection."""
    with pytest.raises(ConnectionClosed) as error:
        until(lambda: not browser.socket.recv(PATIENCE))
    return error.value.rcvd.code, error.value.rcvd.reason


@pytest.mark.parametrize("token", ["", "wrong", "0" * 43, "\u202e" * 43])
def test_without_a_good_token_nothing_is_told(browse, token):
    assert closed(browse(token=token)) == (
        1008, "this link is not good, or over: take the newest one from the learner's screen"
    )  # fmt: skip


def test_a_link_is_good_for_twelve_hours_and_an_open_page_ends_with_it(browse, served, running_clock):
    browser = browse()
    assert browser.welcome() == {"role": "operator", "run": "run"}
    token = served.page.tokens.make("viewer")
    running_clock.advance(door.LIFE_S + 1)
    assert closed(browse(token=token))[0] == 1008
    browser.socket.send(json.dumps({"id": 1, "ask": "state"}))
    assert closed(browser) == (1008, "this link is over: a new one stands on the learner's screen")


@pytest.mark.parametrize(
    ("host", "origin"),
    [("localhost", "http://evil.example"), ("localhost", None), ("localhost", "null"), ("localhost", "http://localhost"),
     ("evil.example", ""), ("localhost.evil.example", ""), ("192.168.0.7", "")],
)  # fmt: skip
def test_a_page_of_another_site_and_another_name_of_this_machine_open_no_websocket(served, host, origin):
    with pytest.raises(InvalidStatus) as error, knocking(served, host=f"{host}:{served.port}", origin=origin):
        pass
    assert error.value.response.status_code == 403


@pytest.mark.parametrize("port", ["", ":8088", ":9"])
@pytest.mark.parametrize("name", ["localhost", "127.0.0.1", "[::1]"])
def test_loopback_is_let_in_by_any_port_as_ssh_gives_one(served, browse, name, port):
    assert browse(host=name + port).welcome()["role"] == "operator"
    assert fetched(served, "/", name + (port or ":80"))[0] == 200


@pytest.mark.parametrize("host", ["evil.example", "localhost.evil.example", "10.0.0.5", "", "[", "localhost@evil"])
def test_another_name_gets_no_file(served, host):
    assert fetched(served, "/", f"{host}:80")[0] == 403


@pytest.mark.parametrize(
    "path",
    [
        "/../pyproject.toml",
        "/page.py",
        "/%2e%2e/server.py",
        "//etc/passwd",
        "/page.css/..",
        "/socket/",
        "/.",
        "/door.py",
    ],
)
def test_only_the_pages_own_files_are_served(served, path):
    status, headers, text = fetched(served, path)
    assert (status, text) == (404, "there is no such page")
    assert headers["Content-Security-Policy"] == door.POLICY


@pytest.mark.parametrize("path", door.FILES)
def test_each_file_forbids_what_it_does_not_need(served, path):
    status, headers, text = fetched(served, path)
    assert status == 200
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert "unsafe" not in headers["Content-Security-Policy"]
    assert "camera=()" in headers["Permissions-Policy"]
    assert (headers["X-Content-Type-Options"], headers["Referrer-Policy"]) == ("nosniff", "no-referrer")
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text), "it needs the network"


def test_nothing_from_outside_can_become_markup():
    for name in ("page.js", "drive.js"):
        script = (ROOT / "serl_launcher/page" / name).read_text()
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacent|document\.write|eval|Function\(|srcdoc|DOMParser", script
        )
    page = (ROOT / "serl_launcher/page/page.html").read_text()
    assert not re.search(r"\son\w+=|style=|<script(?![^>]* src=)|<style", page), "the policy would refuse it"


@pytest.mark.parametrize(
    ("message", "code"),
    [("[]", 1008), ("{", 1008), ("[" * 4000, 1008), ('{"id": "1", "ask": "state"}', 1008), ('{"id": 1}', 1008),
     ('{"id": -1, "ask": "state"}', 1008), ('{"id": 1, "ask": "__class__"}', 1008), ('{"id": 1, "ask": 7}', 1008),
     ('{"id": 1, "ask": "image", "episode": {}}', 1008), (b"\xff\xfe", 1008), ('{"id": "' + "1" * (1 << 20), 1009)],
)  # fmt: skip
def test_what_is_no_question_ends_its_connection_and_no_other(browse, message, code):
    good, bad = browse(), browse()
    assert good.welcome() == bad.welcome()
    bad.socket.send(message)
    assert closed(bad)[0] == code
    assert good.ask("state")["run"] == "run"


def test_a_token_is_never_kept_nor_shown_again_but_outlives_its_process(served, browse):
    token = served.page.tokens.make("operator")
    assert browse(token=token).welcome()
    assert token not in repr(vars(served.page.tokens))
    file = served.server.run_dir / "page.tokens"
    assert token not in file.read_text()
    assert door.Tokens(file).role(token) == "operator"
    beside = door.Tokens(file).make("viewer")  # of another process, as tools/page.py
    served.page.tokens.make("viewer")
    assert [door.Tokens(file).role(each) for each in (token, beside)] == ["operator", "viewer"]
    for damaged in ("{", "[]", '{"1": 2}', '{"1": ["operator", "x"]}'):
        file.write_text(damaged)
        assert door.Tokens(file).role(token) is None
