"""Who is let in, as what, for how long: real sockets and real keys, and what a status tells of those who are not."""

import contextlib
import logging
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
import zmq
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from serl_client import ConfigError, Outcome
from serl_client import messages as m
from serl_client.client import TrainerClient
from serl_client.connection import Connection
from serl_client.errors import Disconnected, Refused, TrainerError, VersionMismatch
from serl_client.keys import Key, known_as, named

from serl_launcher.acting.server import InferenceServer, PolicyHost
from serl_launcher.store import access as module
from serl_launcher.store import weights
from serl_launcher.store.access import BAD_MESSAGES, BAN_S, CAUSES, AllowList
from serl_launcher.store.server import Server
from serl_launcher.store.store import Store
from serl_launcher.store.updates import MISSING
from tests.store.test_service import free_port
from tests.store.test_service import wait_until as until
from tools import keys as tool

PATIENCE = 15.0


@pytest.fixture
def actor(tmp_path, spec):
    """actor(served, name) -> a TrainerClient with the key of that name."""
    with contextlib.ExitStack() as stack:

        def actor(served, name, key=None, **options):
            file = key or (served.keys / f"{name}.key" if served.keys else None)
            made = TrainerClient(served.address, actor=name, spec=spec, outbox=tmp_path / f"box-{name}", key=file)
            return stack.enter_context(made)

        yield actor


def collect(served, client, make_segment, episode="e0", **options):
    until(lambda: client.check() or client.connected)
    served.direct()
    until(lambda: client.directive["number"])
    client.push(make_segment(episode, directive=client.directive["number"], **{"ends": "terminated", **options}))
    assert client.drain(PATIENCE)


# -- keys as files


# -- addresses


@pytest.mark.parametrize("host", ["0.0.0.0", "*", "10.0.0.5", "gpu-box"])
def test_another_address_than_loopback_needs_keys_of_the_server_and_of_the_inference_process(tmp_path, host):
    sentence = f"host={re.escape(host)}: without keys the learner listens on loopback only"
    with pytest.raises(ConfigError, match=sentence):
        Server(tmp_path, {"online": 10}, public=f"tcp://{host}:1", local=f"ipc://{tmp_path}/s", inference="")
    with pytest.raises(ConfigError, match=sentence):
        InferenceServer(None, tmp_path, f"tcp://{host}:1", window=0.0)


def test_with_keys_every_address_is_served_and_clients_find_inference_there(keys, tmp_path, spec, actor):
    port = free_port()
    server = Server(
        tmp_path / "run", {"online": 10}, public=f"tcp://0.0.0.0:{port}", local=f"ipc://{tmp_path}/s", keys=keys,
        inference="tcp://*:7",
    )  # fmt: skip
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        key = Key.read(keys / "eye.key")
        with Connection(f"tcp://127.0.0.1:{port}", m.Hello(m.PROTOCOL, "viewer", "eye"), key) as link:
            assert link.hello(PATIENCE).inference == "tcp://*:7"
    finally:
        server.stop()
        thread.join()
        server.close()


def test_without_keys_loopback_serves_whoever_comes_as_ever(serve, actor, make_segment):
    served = serve()
    collect(served, actor(served, "arm"), make_segment)
    with served.link("viewer", "status") as link:
        link.call(m.Command("next"), PATIENCE)
    assert served.refusals() == {}


# -- who is let in


def test_everybody_with_a_key_does_what_its_role_is_for(keys, serve, actor, make_segment):
    served = serve(keys)
    collect(served, actor(served, "left"), make_segment, episode="e0")
    with served.link("viewer", "eye", key="eye") as eye, served.link("viewer", "boss", key="boss") as boss:
        assert eye.call(m.Status(), PATIENCE).report["sources"]["online"]["head"] == 4
        assert boss.call(m.Command("next"), PATIENCE).value == 1
    label = actor(served, "boss")
    label.push(Outcome("e0", False, judged_by="operator"))
    assert label.drain(PATIENCE)
    assert [row[16] for row in served.trainer.call(m.Sync(0, 0), PATIENCE).episodes] == [0]
    assert served.refusals() == {}


def test_an_unknown_key_no_key_and_the_key_of_another_learner_are_kept_out_told_and_counted(
    keys, serve, actor, tmp_path, caplog
):
    served = serve(keys)
    other = tmp_path / "other"
    for name in ("left", "right"):
        do("make", other, name, "actor")
    stranger, misled = Key.read(other / "left.key"), Key.read(other / "right.key")
    known = Key.read(keys / "left.key")
    stranger = Key("left", "operator", stranger.public, stranger.secret, known.server)
    hello = m.Hello(m.PROTOCOL, "viewer", "left")
    with (
        Connection(served.address, hello, stranger) as link,
        pytest.raises(Refused, match="does not let the key left in"),
    ):
        link.call(m.Status(), PATIENCE)
    with Connection(served.address, hello) as link, pytest.raises(Disconnected, match=r"no learner .* or wants a key"):
        link.call(m.Status(), PATIENCE)
    with (
        Connection(served.address, hello, misled) as link,
        pytest.raises(Disconnected, match="another server key than ours"),
    ):
        link.call(m.Status(), PATIENCE)
    until(lambda: served.refusals() == {"unknown key": 1, "no key": 1, "wrong server key": 1})
    stranger.write(tmp_path / "stranger.key")
    robot = actor(served, "left", tmp_path / "stranger.key")
    with pytest.raises(Refused, match="does not let the key left in"):
        until(lambda: robot.check())
    assert served.report()["clients"] == []
    logged = caplog.text
    assert "unknown key" in logged
    assert not [text for text in (stranger.secret, stranger.public, known.server, misled.secret) if text in logged]


def test_a_client_with_a_key_never_speaks_in_the_clear(keys, serve):
    """Whoever answers in the learner's place, without its key, hears nothing."""
    served = serve()
    key = Key.read(keys / "left.key")
    with Connection(served.address, m.Hello(m.PROTOCOL, "viewer", "left"), key) as link, pytest.raises(Disconnected):
        link.call(m.Status(), PATIENCE)
    assert served.report()["clients"] == []


def test_a_revoked_key_is_refused_at_its_next_message_and_at_its_next_connection(keys, serve, actor, make_segment):
    served = serve(keys)
    left, right = actor(served, "left"), actor(served, "right")
    collect(served, left, make_segment, episode="e0")
    collect(served, right, make_segment, episode="e1")
    with served.link("viewer", "left/watch", key="left") as watch, served.link("viewer", "left", key="left") as again:
        watch.call(m.Status(), PATIENCE)
        do("revoke", keys, "left")
        with pytest.raises(Refused, match="the key left is revoked: for good"):
            watch.call(m.Status(), PATIENCE)
        with pytest.raises(Refused, match="does not let the key left in"):
            again.call(m.Status(), PATIENCE)
    with pytest.raises(Refused, match="the key left is revoked"):
        until(lambda: left.check())  # its heartbeat is enough
    collect(served, right, make_segment, episode="e2")
    assert [client["actor"] for client in served.report()["clients"]] == ["right"]
    assert served.refusals() == {"revoked key": 3}
    do("make", keys, "left", "viewer")
    with served.link("viewer", "left", key="left") as link:
        link.call(m.Status(), PATIENCE)


def test_what_a_revoked_client_sends_at_once_is_not_stored(keys, serve, spec, make_segment):
    served = serve(keys)
    with served.link("actor", "left", key="left", spec=spec) as link:
        session = link.greeting.session
        link.hello(PATIENCE)
        served.direct()
        do("revoke", keys, "left")
        record = b"".join(bytes(part) for part in m.encode_record(0, make_segment("e0")))
        link.send(m.Push(session, {"records": np.frombuffer(record, np.uint8)}))
        until(lambda: served.refusals() == {"revoked key": 1})
    assert served.report()["sources"]["online"]["head"] == 0


# -- what they may say


def test_a_viewer_that_appends_is_refused_logged_and_counted(keys, serve, actor, spec, make_segment, caplog):
    served = serve(keys)
    robot = actor(served, "eye")
    with pytest.raises(Refused, match="the key eye has the role viewer, and appends nothing"):
        until(lambda: robot.check())
    record = b"".join(bytes(part) for part in m.encode_record(0, make_segment("e0")))
    push = m.Push("e" * 32, {"records": np.frombuffer(record, np.uint8)})
    with served.link("viewer", "eye", key="eye") as link:
        link.hello(PATIENCE)
        for message in (push, m.Command("stop"), m.Publish("0" * 64, 1, 1), m.WeightsRequest("0" * 64, 0, 1)):
            link.send(message)
        until(lambda: served.refusals() == {"role": 5})
    assert "role (1 times so far): eye:" in caplog.text
    assert served.report()["sources"] == {}


def test_an_actor_may_neither_steer_nor_label_the_episodes_of_others(keys, serve, actor, make_segment):
    served = serve(keys)
    left, right = actor(served, "left"), actor(served, "right")
    collect(served, left, make_segment, episode="e0")
    with served.link("viewer", "left/more", key="left") as link, pytest.raises(Refused, match="Command is not for"):
        link.call(m.Command("stop"), PATIENCE)
    until(lambda: right.connected)
    with pytest.raises(Refused, match="e0 is an episode of left: labelling it needs a key with the role operator"):
        until(lambda: right.push(Outcome("e0", False, judged_by="operator")))  # the first one, or the next call says so
    left.push(Outcome("e0", True))
    assert left.drain(PATIENCE)
    assert [row[16] for row in served.trainer.call(m.Sync(0, 0), PATIENCE).episodes] == [1]


def test_an_actor_neither_labels_nor_takes_the_name_of_an_episode_that_another_will_begin(
    keys, serve, actor, make_segment
):
    served = serve(keys)
    right = actor(served, "right")
    until(lambda: right.check() or right.connected)
    name = f"right-{right.session[:8]}-000000"  # as the runner names them, and everybody's status shows them
    for record, what in (
        (Outcome(name, None, discard=True, judged_by="operator"), "label"),
        (make_segment(name), "record"),
    ):
        left = actor(served, "left")
        until(lambda link=left: link.connected)
        with pytest.raises(Refused, match=f"{name} is an episode of right: {what}l?ing it needs a key"):
            until(lambda link=left, what=record: link.push(what))  # the first one, or the next call says so
        left.close()
        shutil.rmtree(left._outbox.folder)
    right.push(Outcome(name, True))
    collect(served, right, make_segment, episode=name)
    assert [row[16:18] for row in served.trainer.call(m.Sync(0, 0), PATIENCE).episodes] == [[1, 0]]


def test_identity_is_the_key_and_not_the_name_that_is_claimed(keys, serve, actor, spec, tmp_path, make_segment):
    served = serve(keys)
    right = actor(served, "right")
    collect(served, right, make_segment)
    for name in ("right", "leftover", "", "right/left"):
        with (
            served.link("actor", name, key="left", spec=spec) as link,
            pytest.raises(Refused, match="the key left is not that of"),
        ):
            link.hello(PATIENCE)
    for name in ("left", "left/2"):
        with served.link("actor", name, key="left", spec=spec) as link:
            link.hello(PATIENCE)
    with pytest.raises(ConfigError, match=r"left\.key is that of left, not of right"):
        actor(served, "right", keys / "left.key")
    collect(served, right, make_segment, episode="e1")
    assert known_as(Key.read(keys / "left.key"), "status") == "left/status"


KINDS = (
    m.Publish("0" * 64, 1, 1), m.Direct({}, None), m.Sync(0, 0), m.Archived([]), m.StepLimit(1, None),
)  # fmt: skip


def test_bad_messages_of_several_kinds_ban_a_key_until_it_is_lifted(keys, serve, caplog):
    served, sent = serve(keys), 0
    for kinds in (KINDS[:2], KINDS[2:CAUSES]):  # a new connection does not help
        with served.link("viewer", "eye", key="eye") as link:
            link.hello(PATIENCE)
            for message in kinds:
                link.send(message)
            sent += len(kinds)
            until(lambda sent=sent: served.refusals()["role"] == sent)
            if sent == CAUSES:
                link.send(m.Status())
                until(lambda link=link: "eye is banned: it sent bad" in getattr(link.receive(), "text", ""))
    with served.link("viewer", "eye", key="eye") as link, pytest.raises(Refused, match="does not let the key eye in"):
        link.call(m.Status(), PATIENCE)
    assert served.refusals()["banned key"] == 2
    assert "until `tools/keys.py unban eye`" in caplog.text
    assert "eye                  banned" in do("list", keys)
    assert do("unban", keys, "eye") == "eye is let in again"
    with served.link("viewer", "eye", key="eye") as link:
        link.hello(PATIENCE)
        link.send(KINDS[0])
        with pytest.raises(Refused, match="Publish is not for the role viewer"):
            link.call(m.Status(), PATIENCE)
        link.call(m.Status(), PATIENCE)
        assert served.refusals() == {"role": CAUSES + 1, "banned key": 2}


def test_one_mistake_made_again_and_again_silences_the_connection_and_bans_no_key(keys, serve):
    served = serve(keys)
    for connection in range(3):
        with served.link("viewer", "eye", key="eye") as link:
            link.hello(PATIENCE)
            for _ in range(BAD_MESSAGES):
                link.send(m.Publish("0" * 64, 1, 1))
            until(lambda done=connection: served.refusals()["role"] == BAD_MESSAGES * (done + 1))
    with served.link("viewer", "eye", key="eye") as link:
        link.call(m.Status(), PATIENCE)
    assert served.refusals() == {"role": 3 * BAD_MESSAGES}


def test_another_version_is_told_so_for_ever_and_bans_no_key(keys, serve):
    served = serve(keys)
    for version in range(20):
        hello = m.Hello((version + 10, version + 10), "viewer", "eye")
        with Connection(served.address, hello, Key.read(keys / "eye.key")) as link, pytest.raises(VersionMismatch):
            link.hello(PATIENCE)
    with served.link("viewer", "eye", key="eye") as link:
        link.call(m.Status(), PATIENCE)
    assert served.refusals() == {"other version": 20}


def test_nobody_writes_in_the_name_of_another_though_he_knows_its_numbers(keys, serve, spec, make_segment):
    """The numbers lie in the files of the other's outbox."""
    served = serve(keys)

    def link(name, session, earlier=()):
        hello = m.Hello(m.PROTOCOL, "actor", name, session, "box of left", "", spec.to_dict(), earlier)
        return Connection(served.address, hello, Key.read(keys / f"{name}.key"))

    def push(opened, session, seq, record):
        data = b"".join(bytes(part) for part in m.encode_record(seq, record))
        opened.send(m.Push(session, {"records": np.frombuffer(data, np.uint8)}))

    mine, his = "a" * 32, "b" * 32
    with link("left", mine) as left:
        left.hello(PATIENCE)
        served.direct()
        push(left, mine, 0, make_segment("e0"))
        until(lambda: isinstance(left.receive(), m.Ack))
        for session, earlier in ((his, [[mine, 5]]), (mine, [])):
            with link("right", session, earlier) as right, pytest.raises(Refused, match="or to another key"):
                right.hello(PATIENCE)
        push(left, mine, 1, make_segment("e0", start=4, ends="terminated"))
        assert until(lambda: (got := left.receive()) and isinstance(got, m.Ack) and got).expected == 2
    (row,) = served.trainer.call(m.Sync(0, 0), PATIENCE).episodes
    assert (row[1], row[3], row[8]) == ("e0", "left", 8)


def test_a_person_at_the_keyboard_of_an_actor_is_refused_to_steer_and_gets_no_key_banned(keys, serve):
    served = serve(keys)
    with served.link("viewer", "left/console", key="left") as link:
        for _ in range(2 * BAD_MESSAGES):
            with pytest.raises(Refused, match="Command is not for the key left"):
                link.call(m.Command("next"), PATIENCE)
        link.call(m.Status(), PATIENCE)
    assert served.refusals() == {"role": 2 * BAD_MESSAGES}


def test_what_a_client_reports_does_not_change_who_it_is(serve):
    served = serve()
    with served.link("viewer", "eve") as link:
        link.hello(PATIENCE)
        link.send(m.Heartbeat({"role": "learner", "actor": "trainer", "seen_s": "now", "rate": 1}))
        until(lambda: any("rate" in client for client in served.report()["clients"]))
        (client,) = served.report()["clients"]
    assert (client["role"], client["actor"], type(client["seen_s"])) == ("viewer", "eve", float)


def test_while_the_allow_list_cannot_be_read_all_wait_and_afterwards_go_on(keys, serve, actor, make_segment):
    served = serve(keys)
    left = actor(served, "left")
    collect(served, left, make_segment)
    (keys / "allowed.json").chmod(0o644)
    (keys / "allowed.json").touch()
    left.push(make_segment("e1", directive=left.directive["number"], ends="terminated"))
    right = actor(served, "right")
    until(lambda: served.refusals().get("unknown key", 0) >= 3)
    assert (left.pending[0], right.connected) == (1, False)
    (keys / "allowed.json").chmod(0o600)
    (keys / "allowed.json").touch()
    collect(served, left, make_segment, episode="e2")
    collect(served, right, make_segment, episode="e3")


# -- limits


def test_a_connection_that_sends_junk_is_ignored_and_others_are_served(serve):
    served = serve()
    context = zmq.Context.instance()
    with served.link("viewer", "status") as link, context.socket(zmq.DEALER) as junk:
        junk.linger = 0
        junk.connect(served.address)
        for _ in range(BAD_MESSAGES * 3):
            junk.send(b"junk")
        until(lambda: served.refusals().get("bad message", 0) >= BAD_MESSAGES)
        junk.send_multipart(m.encode(m.Hello(m.PROTOCOL, "viewer", "junk")))
        time.sleep(0.2)
        assert link.call(m.Status(), PATIENCE).report["refusals"] == {"bad message": BAD_MESSAGES}
        assert [client["actor"] for client in served.report()["clients"]] == ["status"]


def test_more_messages_within_a_second_than_allowed_are_dropped_and_counted(serve, monkeypatch):
    monkeypatch.setattr(module, "MESSAGES", 100)
    served = serve()
    with served.link("viewer", "fast") as fast, served.link("viewer", "slow") as slow:
        fast.hello(PATIENCE)
        for number in range(200):
            fast.send(m.Heartbeat({"number": number}))
        until(lambda: served.refusals().get("too fast", 0) >= 99)
        assert slow.call(m.Status(), PATIENCE).report["refusals"].keys() == {"too fast"}
        time.sleep(1.1)
        fast.call(m.Status(), PATIENCE)


@pytest.mark.parametrize("has_keys", [False, True])
def test_more_connections_than_allowed_are_cut_and_the_first_ones_stay(keys, serve, monkeypatch, has_keys):
    monkeypatch.setattr(module, "CONNECTIONS", 3)
    served = serve(keys if has_keys else None)
    port = int(served.address.rpartition(":")[2])
    with served.link("viewer", "eye", key="eye" if has_keys else None) as link, contextlib.ExitStack() as stack:
        link.call(m.Status(), PATIENCE)
        for _ in range(20):  # they say nothing, like a scan of ports
            stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        until(lambda: served.refusals().get("too many connections", 0) == 18)
        report = link.call(m.Status(), PATIENCE).report
        assert report["connections"] <= 3
    until(lambda: served.report()["connections"] == 0)
    with served.link("viewer", "eye", key="eye" if has_keys else None) as link:
        link.call(m.Status(), PATIENCE)


def test_clients_that_come_and_go_leave_nothing_that_grows(serve, spec):
    """Actors that vanish are named as missing, but not for ever all of them."""
    served = serve()
    server = served.server
    for number in range(4):
        served.link("actor", f"arm{number}", spec=spec).close()
    server.updates.missing.update({f"gone{number}": 0.0 for number in range(10 * MISSING)})
    until(lambda: len(server.updates.missing) <= MISSING)
    limit = 4 * module.CONNECTIONS
    for number in range(2 * limit):
        server.access._peer(b"%d" % number)
    assert len(server.access._peers) == limit


def test_what_a_peer_says_cannot_write_lines_of_the_log(serve, caplog):
    served = serve()
    with served.link("viewer", "eve\nthe learner: all is well") as link, pytest.raises(Refused, match="is printable"):
        link.hello(PATIENCE)
    for index in range(5):
        served.server.access.refuse("refused", f"session {index}\nrefused: nothing")
    lines = [record for record in caplog.records if record.name == module.__name__ and "(1 times" in record.message]
    assert [line.levelno for line in lines] == [logging.WARNING] * 2
    assert not any("\n" in line.message for line in lines)


# -- the whole


def rlpd(spec):
    torch.manual_seed(0)
    with initialize_config_dir(str(ROOT / "config"), version_base="1.3"):
        return instantiate(compose(overrides=["+algo=rlpd", "+policy=gaussian"]).algo)(spec)


@pytest.fixture
def answering(tmp_path, spec):
    """answering(keys) -> an InferenceServer in a thread, with weights."""
    with contextlib.ExitStack() as stack:

        def answering(keys=None):
            algorithm = rlpd(spec)
            digest, _ = weights.write(tmp_path / "weights", safetensors.torch.save(algorithm.acting.published()))
            address = f"tcp://127.0.0.1:{free_port()}"
            server = InferenceServer(
                PolicyHost(algorithm, spec, "cpu"), tmp_path / "weights", address, window=0, keys=keys
            )
            ended, notice = threading.Event(), {"version": 1, "sha256": digest}
            thread = threading.Thread(target=server.run, args=(lambda: notice, ended.is_set))
            thread.start()
            stack.callback(server.close)
            stack.callback(thread.join)
            stack.callback(ended.set)
            return server, address

        yield answering


QUESTION = dict(step=0, seed=1, previous_action=None, reset=True, explore=False, task="")


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("has_keys", [False, True])
def test_an_actor_pushes_and_asks(keys, serve, actor, answering, make_segment, has_keys):
    keys = keys if has_keys else None
    inference, address = answering(keys)
    served = serve(keys, inference=address)
    left = actor(served, "left")
    collect(served, left, make_segment)
    left.ask({STATE: np.zeros(8, np.float32)}, **QUESTION)
    assert left.wait_answer(0, PATIENCE).action.shape[1] == 2
    assert "refused" not in inference.report()
    assert served.refusals() == {}


@pytest.mark.usefixtures("one_thread")
def test_the_inference_process_lets_in_and_refuses_as_the_server_does(keys, answering, spec):
    inference, address = answering(keys)
    ask = m.InferenceRequest(0, 1, True, False, "", {STATE: np.zeros(8, np.float32)})

    def link(role, name, key, **record):
        return Connection(
            address, m.Hello(m.PROTOCOL, role, name, **record), Key.read(keys / f"{key}.key") if key else None
        )

    def answer(asked):
        def first():
            message = asked.receive()
            return message if isinstance(message, m.InferenceResponse | m.Failed) else None

        asked.hello(PATIENCE)
        asked.send(ask)
        return until(first)

    with link("viewer", "eye", "eye") as eye:
        assert "InferenceRequest is not for the key eye" in answer(eye).text
    with link("actor", "right", "left") as claimed, pytest.raises(Refused, match="is not that of 'right'"):
        claimed.hello(PATIENCE)
    with link("actor", "left", None) as plain, pytest.raises(Disconnected):
        plain.hello(PATIENCE)
    with link("actor", "left", "left") as left:
        assert isinstance(answer(left), m.InferenceResponse)
        do("revoke", keys, "left")
        left.send(ask)
        assert "the key left is revoked" in until(lambda: left.receive()).text
        left.close()
        with pytest.raises(Refused, match="does not let the key left in"):
            left.hello(PATIENCE)
    assert inference.report()["refusals"] == {"role": 2, "no key": 1, "revoked key": 2}


@pytest.mark.usefixtures("one_thread")
def test_the_inference_process_answers_a_hello_so_that_nobody_takes_it_for_mute(answering, spec):
    _, address = answering()
    with Connection(address, m.Hello(m.PROTOCOL, "actor", "arm", spec=spec.to_dict())) as link:
        welcome = link.hello(PATIENCE)
        assert (welcome.spec, welcome.inference, link.heard > 0) == (spec.to_dict(), "", True)
    with (
        Connection(address, m.Hello((1, 1), "actor", "arm")) as link,
        pytest.raises(TrainerError, match="this client 1-1"),
    ):
        link.hello(PATIENCE)
