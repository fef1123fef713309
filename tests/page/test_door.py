"""Who is let in: nobody without a token, no page of another site, no other name, nothing that is too large."""

import asyncio
import http.client
import json
import re
import socket
import threading
from contextlib import ExitStack, contextmanager, suppress

import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.frames import Frame, Opcode

from serl_launcher.page import door, doorstep, stream
from tests.page.conftest import Streaming, knocking, serving, streaming
from tests.shared.common import PATIENCE, ROOT, until


def fetched(served, path, host="localhost"):
    """(status, headers, text) of one request of a browser."""
    link = http.client.HTTPConnection("127.0.0.1", served.port, timeout=PATIENCE)
    link.putrequest("GET", path, skip_host=True)
    link.putheader("Host", host if host.endswith("]") or ":" in host else f"{host}:{served.port}")
    link.endheaders()
    answer = link.getresponse()
    return answer.status, answer.headers, answer.read().decode()


def counted(served, reason):
    """How often this was refused, for this reason."""
    return served.page.door.refusals.counts.get(reason, 0)


def closed(browser):
    """Why the page ended this connection."""
    with pytest.raises(ConnectionClosed) as error:
        until(lambda: not browser.socket.recv(PATIENCE))
    told = error.value.rcvd
    return (told.code, told.reason) if told else (1006, "")


@pytest.mark.parametrize("way", [knocking, streaming])
@pytest.mark.parametrize("token", ["", "wrong", "0" * 43, "\u202e" * 43, "\ud800", "boss:", "boss:" + "0" * 64])
def test_without_a_good_token_nothing_is_told(browse, served, token, way):
    code, reason = closed(browse(token=token, way=way))
    assert code == 1008
    assert reason == (
        "this link is not good, or over: take the newest one from the learner's screen" if token.isprintable()
        else "token is a text of at most 200 characters that are shown"
    )  # fmt: skip
    assert sum(served.page.door.refusals.counts.values()) == 1


def test_a_link_of_another_run_opens_nothing(browse, served, tmp_path):
    with serving(tmp_path, "") as other:
        assert closed(browse(token=other.page.tokens.make("operator")))[0] == 1008
    assert counted(served, "token") == 1


def test_a_link_is_good_for_twelve_hours_and_an_open_page_ends_with_it(browse, served, running_clock):
    browser = browse()
    assert browser.welcome() == {"role": "operator", "run": "run"}
    token = served.page.tokens.make("viewer")
    running_clock.advance(door.LIFE_S + 1)
    assert closed(browse(token=token))[0] == 1008
    browser.socket.send(json.dumps({"id": 1, "ask": "state"}))
    assert closed(browser) == (1008, "this link is over: a new one stands on the learner's screen")


def test_a_link_stays_good_though_the_time_of_day_is_set(tmp_path, running_clock, monkeypatch):
    tokens = door.Tokens(tmp_path / "page.tokens")
    token = tokens.make("viewer")
    for step in (-7200, 24 * 3600):
        monkeypatch.setattr("serl_client.clock.time", lambda step=step: running_clock.time() + step)
        assert tokens.role(token) == "viewer"


@pytest.mark.parametrize(
    ("host", "origin"),
    [("localhost", "http://evil.example"), ("localhost", None), ("localhost", "null"), ("localhost", "http://localhost"),
     ("evil.example", ""), ("localhost.evil.example", ""), ("192.168.0.7", "")],
)  # fmt: skip
def test_a_page_of_another_site_and_another_name_of_this_machine_open_no_websocket(served, host, origin):
    with pytest.raises(InvalidStatus) as error, knocking(served, host=f"{host}:{served.port}", origin=origin):
        pass
    assert error.value.response.status_code == 403
    assert counted(served, "origin") + counted(served, "host") == 1


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
        "/stream.js/../door.py",
        "/..%2f..%2fpyproject.toml",
        "/page.js%00.css",
        "/page.js;/../../config.yaml",
        "\\..\\door.py",
        "http://localhost/page.js",
    ],
)
def test_only_the_files_of_the_page_are_served(served, path):
    status, headers, text = fetched(served, path)
    assert (status, text, counted(served, "path")) == (404, "there is no such page", 1)
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
    script = "".join((ROOT / f"serl_launcher/page/{name}.js").read_text() for name in ("page", "stream", "drive"))
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval|Function\(|srcdoc|DOMParser", script)
    page = (ROOT / "serl_launcher/page/page.html").read_text()
    assert not re.search(r"\son\w+=|style=|<script(?![^>]* src=)|<style", page), "the policy would refuse it"


@pytest.mark.parametrize(
    ("message", "code"),
    [("[]", 1008), ("{", 1008), ("[" * 4000, 1008), ('{"id": "1", "ask": "state"}', 1008), ('{"id": 1}', 1008),
     ('{"id": -1, "ask": "state"}', 1008), ('{"id": 1, "ask": "__class__"}', 1008), ('{"id": 1, "ask": 7}', 1008),
     ('{"id": 1, "ask": "image", "episode": {}}', 1008), (b"\xff\xfe", 1008), ('{"id": "' + "1" * (1 << 20), 1009),
     ('{"id": 1, "ask": "' + "\U0001f600" * 40 + '"}', 1008), ('{"id": 1, "ask": "image", "episode": "\\ud800"}', 1008),
     ('{"id": 1, "ask": "image", "camera": "\\u0000"}', 1008), ('{"id": 1, "ask": "' + "x" * 201 + '"}', 1008),
     ('{"id": 1e400, "ask": "state"}', 1008), ('{"id": 1, "ask": "\\u0000\\u001b[2J<script>"}', 1008)],
)  # fmt: skip
def test_what_is_no_question_ends_its_connection_and_no_other(browse, served, message, code):
    good, bad = browse(), browse()
    assert good.welcome() == bad.welcome()
    bad.socket.send(message)
    assert closed(bad)[0] == code
    assert good.ask("state")["run"] == "run"
    assert until(lambda: counted(served, "bad message")) == 1


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


# -- more than one browser wants
@contextmanager
def crowd(served):
    """More connections than there are places, which say nothing; all were accepted, and the oldest of them cut."""
    with ExitStack() as stack:
        reach = ("127.0.0.1", served.port)
        silent = [stack.enter_context(socket.create_connection(reach)) for _ in range(3 * doorstep.CONNECTIONS)]
        until(lambda: counted(served, "too many connections") == 2 * doorstep.CONNECTIONS)
        assert silent[0].recv(1) == b"", "the oldest one was cut"
        yield


def test_who_says_nothing_takes_the_place_of_nobody(served, browse):
    guest, threads = browse(), threading.active_count()
    assert guest.welcome()
    with crowd(served):
        assert browse().welcome()
        assert guest.ask("state")
        assert len(served.page._doorstep._sockets) <= 2 * doorstep.CONNECTIONS
        assert threading.active_count() <= threads + 3, "two of the page, one of the other browser"


def test_a_viewer_who_opens_many_pages_keeps_no_operator_out(served, browse, monkeypatch):
    monkeypatch.setattr(served.page._doorstep._places, "most", 3)
    viewers = [browse(role="viewer") for _ in range(3)]
    assert all(each.welcome() for each in viewers)
    assert closed(browse(role="viewer")) == (1013, "too many pages are open: close one")
    assert browse().welcome()["role"] == "operator"
    assert closed(viewers[2]) == (1006, "")
    assert counted(served, "too many connections") == 2


@pytest.mark.parametrize("opcode", [Opcode.TEXT, Opcode.PING])
def test_who_sends_ten_thousand_messages_at_once_is_cut(served, browse, opcode):
    good, bad = browse(), browse(role="viewer")
    assert good.welcome() == {**bad.welcome(), "role": "operator"}
    frames = Frame(opcode, b'{"id": 1, "ask": "state"}').serialize(mask=True) * 10_000
    with suppress(OSError):
        bad.socket.socket.sendall(frames)
    assert until(lambda: counted(served, "too fast")) == 1
    assert good.ask("state")


def unread(served, ask):
    """A client that asks this, and reads no answer."""
    link, host = socket.create_connection(("127.0.0.1", served.port)), f"localhost:{served.port}"
    key = "dGhlIHNhbXBsZSBub25jZQ=="
    link.sendall(
        f"GET /socket HTTP/1.1\r\nHost: {host}\r\nOrigin: http://{host}\r\nConnection: Upgrade\r\n"
        f"Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {key}\r\n\r\n".encode()
    )
    assert b"101 Switching" in link.recv(4096)
    for message in ({"token": served.page.tokens.make("viewer")}, {"id": 1, "ask": ask}):
        link.sendall(Frame(Opcode.TEXT, json.dumps(message).encode()).serialize(mask=True))
    return link


def test_twenty_clients_that_never_read_hold_up_nobody_and_are_cut(served, browse, monkeypatch):
    small = (socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
    monkeypatch.setattr(doorstep, "OPTIONS", [small, (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 500)])
    monkeypatch.setitem(served.page._answers, "curves", lambda _: "x" * (1 << 20))
    good = browse()
    assert good.welcome()
    links = [unread(served, "curves") for _ in range(20)]
    assert good.ask("state")
    assert until(lambda: counted(served, "does not read") == 20)
    assert until(lambda: len(served.page._guests) == 1)
    assert good.ask("state")
    for link in links:
        link.close()


def test_who_leaves_before_the_answer_keeps_a_place_until_that_is_made(served, browse, monkeypatch):
    """Else whoever asks and leaves, again and again, would fill the memory with questions."""
    go_on = threading.Event()
    monkeypatch.setitem(served.page._answers, "curves", lambda _: go_on.wait(PATIENCE))
    monkeypatch.setattr(served.page._doorstep._places, "most", 3)
    asked, read = [], served.page._read
    monkeypatch.setattr(served.page, "_read", lambda what: asked.append(what) or read(what))
    for number in range(3):
        link = unread(served, "curves")
        assert until(lambda: len(asked) > number)  # noqa: B023
        link.close()
    assert until(lambda: len(served.page._guests) == 3)
    assert closed(browse(role="viewer")) == (1013, "too many pages are open: close one")
    go_on.set()
    assert until(lambda: not served.page._guests)
    assert browse(role="viewer").welcome()


def test_however_many_look_the_server_is_asked_as_if_one_did(clock, served, browse, monkeypatch):
    """It answers 100 such questions a second, and then none of an operator's either."""
    folder, asked = served.page._folder, []
    ask = folder._ask
    monkeypatch.setattr(folder, "_ask", lambda: asked.append(clock.monotonic()) or ask())
    for _ in range(3):
        browser = browse(role="viewer")
        assert browser.welcome()
        assert browser.ask("state")["alive"]
    assert len(asked) == 1


# -- in place of a websocket
def test_a_stream_tells_what_a_websocket_tells(served, browse, monkeypatch):
    monkeypatch.setitem(served.page._answers, "image", lambda _: b"\xff\xd8")
    browser = browse(way=streaming)
    assert browser.welcome() == {"role": "operator", "run": "run"}
    assert browser.ask("state")["run"] == "run"
    assert browser.ask("image") == b"\xff\xd8"
    assert "there is no order" in browser.ask("order", order="<b>", about="")
    browser.socket.send("[]")
    assert closed(browser) == (1008, "a message is a JSON object")


@pytest.mark.parametrize(
    "headers",
    [{"Sec-Fetch-Site": "cross-site"}, {"Sec-Fetch-Site": "none"}, {"Accept": "text/event-stream"},
     {"Sec-Fetch-Site": "same-origin", "Origin": "http://evil.example"}, {"Origin": "null"}],
)  # fmt: skip
def test_a_page_of_another_site_opens_no_stream(served, headers):
    with pytest.raises(AssertionError, match="another site may not connect"):
        Streaming(served, **headers)
    assert counted(served, "origin") == 1


def test_nobody_speaks_on_a_stream_but_its_page_and_not_without_end(served, browse, monkeypatch):
    browser, go_on = browse(way=streaming), threading.Event()
    assert browser.welcome()
    said, reply = json.dumps({"id": 1, "ask": "preview"}), served.page._reply
    assert browser.socket.send(said, **{"X-Stream": "0" * 43}) == 404
    assert browser.socket.send(said, Origin="http://evil.example") == 403
    assert browser.socket.send("x" * 4097) == 413

    async def held(*asked):
        """As to a browser that reads nothing."""
        await asyncio.to_thread(go_on.wait, PATIENCE)
        await reply(*asked)

    monkeypatch.setattr(served.page, "_reply", held)
    answers = [browser.socket.send(said) for _ in range(stream.WAITING + 2)]
    assert (set(answers[:-1]), answers[-1]) == ({200}, 429)
    go_on.set()
    assert json.loads(browser.socket.recv())["id"] == 1


def test_the_page_ends_though_its_browsers_stay(served):
    with serving(served.server.run_dir, "") as page:
        left = Streaming(page)
        assert left.send(json.dumps({"token": page.page.tokens.make("viewer")})) == 200
        assert "viewer" in left.recv()
        others = [unread(page, "state"), socket.create_connection(("127.0.0.1", page.port))]
    assert left.events.readline() == b""
    for each in (left.events, *others):
        each.close()
