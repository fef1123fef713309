"""Who is let in, as what, for how long: real sockets and real keys, and what a status tells of those who are not."""

import shutil

import pytest
from serl_client import ConfigError, Outcome, console, reach, wire
from serl_client import messages as m
from serl_client.connection import Connection
from serl_client.errors import Disconnected, Refused, VersionMismatch
from serl_client.keys import Key, known_as

from serl_launcher.service import access as module
from serl_launcher.service import fair_queue
from serl_launcher.service.access import BAD_MESSAGES, CAUSES
from serl_launcher.service.connections import CONNECTIONS
from serl_launcher.service.updates import MISSING
from serl_launcher.store import episodes
from tests.shared.clients import RawActor, push_of
from tests.shared.common import PATIENCE, until
from tests.shared.data import make_segment
from tests.shared.keys import do


def collect(served, client, episode="e0"):
    """Deliver an episode."""
    client.push(make_segment(episode, directive=served.direct(), ends="terminated"))
    assert client.drain(PATIENCE)


def hand_in(client, record):
    """Raises what the server says of it."""
    client.push(record)
    until(client.check)


def look(served, key="eye", name=None, message=None):
    """What a viewer with this key is answered."""
    with served.link("viewer", name or key, key=key if served.keys else None) as link:
        return link.call(message or m.Status(), PATIENCE)


def verdicts(served):
    return [(row["success"], row["discard"]) for row in served.episodes().values()]


# -- addresses


def test_with_keys_every_address_is_served_and_clients_find_inference_there(keys, serve):
    served = serve(keys=keys, inference="tcp://*:7", host="0.0.0.0")
    with served.link("viewer", "eye", key="eye") as link:
        assert link.hello(PATIENCE).inference == "tcp://*:7"


# -- who is let in


def test_everybody_with_a_key_does_what_its_role_is_for(keys, serve, join):
    served = serve(keys=keys)
    collect(served, join(served, "left"))
    assert look(served).report["sources"]["online"]["head"] == 4
    assert look(served, "boss", message=m.Command("next")).value == 1
    label = join(served, "boss")
    label.push(Outcome("e0", False, judged_by="operator"))
    assert label.drain(PATIENCE)
    assert verdicts(served) == [(0, 0)]
    assert served.refusals() == {}


def test_who_only_looks_at_a_port_is_refused_nothing(keys, serve):
    served = serve(keys=keys)
    assert all(reach.look("127.0.0.1", served.port, has_key=True).ok for _ in range(8))
    look(served)  # so that the others were seen to come
    until(lambda: served.report()["connections"] == 0)
    assert served.refusals() == {}


def test_an_unknown_key_no_key_and_the_key_of_another_learner_are_kept_out_told_and_counted(
    keys, serve, join, tmp_path, caplog
):
    served, other = serve(keys=keys), tmp_path / "other"
    for name in ("left", "right"):
        do("make", other, name, "actor")
    stranger, misled = Key.read(other / "left.key"), Key.read(other / "right.key")
    known = Key.read(keys / "left.key")
    stranger = Key("left", "operator", stranger.public, stranger.secret, known.server)
    for key, error, says, counted in (
        (stranger, Refused, "does not let the key left in", "unknown key"),
        (None, Disconnected, r"no learner .* or wants a key", "no key"),
        (misled, Disconnected, "another server key than ours", "wrong server key"),
    ):
        while counted not in served.refusals():  # one without a key may have gone before its mechanism has come
            with (
                Connection(served.address, m.Hello(m.PROTOCOL, "viewer", "left"), key) as link,
                pytest.raises(error, match=says),
            ):
                link.call(m.Status(), PATIENCE)
    assert "has no key: make one with tools/keys.py" in caplog.text
    stranger.write(tmp_path / "stranger.key")
    with pytest.raises(Refused, match="does not let the key left in"):
        until(join(served, "left", told=False, key=tmp_path / "stranger.key").check)
    assert served.report()["clients"] == []
    assert "unknown key" in caplog.text
    secrets = (stranger.secret, stranger.public, known.server, misled.secret)
    assert not [text for text in secrets if text in caplog.text]


def test_a_client_with_a_key_never_speaks_in_the_clear(keys, serve):
    """Whoever answers in the learner's place, without its key, hears nothing."""
    served, key = serve(), Key.read(keys / "left.key")
    with Connection(served.address, m.Hello(m.PROTOCOL, "viewer", "left"), key) as link, pytest.raises(Disconnected):
        link.call(m.Status(), PATIENCE)
    assert served.report()["clients"] == []


def test_a_revoked_key_is_refused_at_its_next_message_and_at_its_next_connection(keys, serve, join):
    served = serve(keys=keys)
    left, right = join(served, "left"), join(served, "right")
    collect(served, left, "e0")
    collect(served, right, "e1")
    with served.link("viewer", "left/watch", key="left") as watch, served.link("viewer", "left", key="left") as again:
        watch.call(m.Status(), PATIENCE)
        do("revoke", keys, "left")
        with pytest.raises(Refused, match="the key left is revoked: for good"):
            watch.call(m.Status(), PATIENCE)
        with pytest.raises(Refused, match="does not let the key left in"):
            again.call(m.Status(), PATIENCE)
    with pytest.raises(Refused, match="the key left is revoked"):
        until(left.check)  # its heartbeat is enough
    collect(served, right, "e2")
    assert [client["actor"] for client in served.report()["clients"]] == ["right"]
    until(lambda: served.refusals() == {"revoked key": 3})
    do("make", keys, "left", "viewer")
    look(served, "left")


def test_what_a_revoked_client_sends_at_once_is_not_stored(keys, serve, spec):
    served = serve(keys=keys)
    with served.link("actor", "left", key="left", spec=spec) as link:
        link.hello(PATIENCE)
        served.direct()
        do("revoke", keys, "left")
        link.send(push_of(link.greeting.session, make_segment("e0")))
        until(lambda: served.refusals() == {"revoked key": 1})
    assert served.report()["sources"]["online"]["head"] == 0


# -- what they may say


def test_a_viewer_that_appends_is_refused_logged_and_counted(keys, serve, join, caplog):
    served = serve(keys=keys)
    with pytest.raises(Refused, match="the key eye has the role viewer, and appends nothing"):
        until(join(served, "eye", told=False).check)
    push = push_of("e" * 32, make_segment("e0"))
    with served.link("viewer", "eye", key="eye") as link:
        link.hello(PATIENCE)
        drive = m.Drive("left", "eye", 1, 0, "take over", {}, 0)
        for message in (push, m.Command("stop"), drive, m.Publish("0" * 64, 1, 1), m.WeightsRequest("0" * 64, 0)):
            link.send(message)
        until(lambda: served.refusals() == {"role": 6})
    assert "refused, role: eye:" in caplog.text
    assert served.report()["sources"] == {}


def test_an_actor_may_neither_steer_nor_label_the_episodes_of_others(keys, serve, join):
    served = serve(keys=keys)
    left, right = join(served, "left"), join(served, "right")
    collect(served, left)
    with pytest.raises(Refused, match="Command is not for"):
        look(served, "left", "left/more", m.Command("stop"))
    with pytest.raises(Refused, match="e0 is an episode of left: labelling it needs a key with the role operator"):
        hand_in(right, Outcome("e0", False, judged_by="operator"))
    left.push(Outcome("e0", True))
    assert left.drain(PATIENCE)
    assert verdicts(served) == [(1, 0)]


def test_of_an_episode_so_many_outcomes_are_kept_and_one_more_is_an_operators(keys, serve, join, monkeypatch):
    monkeypatch.setattr(episodes, "MOST_OUTCOMES", 3)
    served = serve(keys=keys)
    left, boss = join(served, "left"), join(served, "boss")
    collect(served, left)
    for success in (True, False, True):
        left.push(Outcome("e0", success))
    assert left.drain(PATIENCE)
    with pytest.raises(Refused, match="e0 has 1,000 outcomes: one more needs an operator's key"):
        hand_in(left, Outcome("e0", False))
    boss.push(Outcome("e0", False, judged_by="operator"))
    assert boss.drain(PATIENCE)
    assert verdicts(served) == [(0, 0)]


def test_an_actor_neither_labels_nor_takes_the_name_of_an_episode_that_another_will_begin(keys, serve, join):
    served = serve(keys=keys)
    right = join(served, "right")
    name = f"right-{right.session[:8]}-000000"  # as the runner names them, and everybody's status shows them
    verdict = Outcome(name, None, discard=True, judged_by="operator")
    for record, what in ((verdict, "label"), (make_segment(name), "record")):
        left = join(served, "left")
        with pytest.raises(Refused, match=f"{name} is an episode of right: {what}l?ing it needs a key"):
            hand_in(left, record)
        left.close()
        shutil.rmtree(left._outbox.folder)
    right.push(Outcome(name, True))
    collect(served, right, name)
    assert verdicts(served) == [(1, 0)]


def test_identity_is_the_key_and_not_the_name_that_is_claimed(keys, serve, join, spec):
    served = serve(keys=keys)
    right = join(served, "right")
    collect(served, right)
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
        join(served, "right", key=keys / "left.key")
    collect(served, right, "e1")
    assert known_as(Key.read(keys / "left.key"), "status") == "left/status"


KINDS = (
    m.Publish("0" * 64, 1, 1), m.Direct({}, None), m.Sync(0, 0), m.Archived([]), m.StepLimit(1, None),
)  # fmt: skip


def test_bad_messages_of_several_kinds_ban_a_key_until_it_is_lifted(keys, serve, caplog):
    served, sent = serve(keys=keys), 0
    for kinds in (KINDS[:2], KINDS[2:CAUSES]):  # a new connection does not help
        with served.link("viewer", "eye", key="eye") as link:
            link.hello(PATIENCE)
            for message in kinds:
                link.send(message)
            sent += len(kinds)
            until(lambda sent=sent: served.refusals().get("role") == sent)
            if sent == CAUSES:
                link.send(m.Status())
                until(lambda link=link: "eye is banned: it sent bad" in getattr(link.receive(), "text", ""))
    with pytest.raises(Refused, match="does not let the key eye in"):
        look(served)
    until(lambda: served.refusals()["banned key"] == 2)
    assert "until `tools/keys.py unban eye`" in caplog.text
    assert "eye                  banned" in do("list", keys)
    assert do("unban", keys, "eye") == "eye is let in again"
    with served.link("viewer", "eye", key="eye") as link:
        link.hello(PATIENCE)
        link.send(KINDS[CAUSES - 1])  # with the kinds of before it would be banned again
        with pytest.raises(Refused, match="StepLimit is not for the role viewer"):
            link.call(m.Status(), PATIENCE)
        link.call(m.Status(), PATIENCE)
        until(lambda: served.refusals() == {"role": CAUSES + 1, "banned key": 2})


def test_a_message_of_more_frames_than_any_has_bans_its_key_at_once_and_ends_all_its_connections(keys, serve):
    served = serve(keys=keys)
    with served.link("viewer", "eye/1", key="eye") as link, served.link("viewer", "eye/2", key="eye") as other:
        for each in (link, other):
            each.call(m.Status(), PATIENCE)
        link._socket.send_multipart([b""] * wire.MAX_FRAMES)
        until(lambda: served.refusals() == {"bad message": 1})
        assert other.call(m.Status(), PATIENCE)
        link._socket.send_multipart([b""] * (wire.MAX_FRAMES + 1))
        for each in (link, other):
            with pytest.raises(Refused, match="does not let the key eye in"):
                until(lambda each=each: each.receive() and None)
    assert look(served, "left")


def test_mistakes_of_one_kind_and_old_versions_ban_no_key(keys, serve):
    """The connection on which a mistake is made again and again is silenced."""
    served = serve(keys=keys)
    for connection in range(3):
        with served.link("viewer", "eye", key="eye") as link:
            link.hello(PATIENCE)
            for _ in range(BAD_MESSAGES):
                link.send(m.Publish("0" * 64, 1, 1))
            until(lambda done=connection: served.refusals().get("role") == BAD_MESSAGES * (done + 1))
    for version in range(20):
        hello = m.Hello((m.PROTOCOL[1] + 1 + version,) * 2, "viewer", "eye")
        with Connection(served.address, hello, Key.read(keys / "eye.key")) as link, pytest.raises(VersionMismatch):
            link.hello(PATIENCE)
    with served.link("viewer", "left/console", key="left") as link:
        for _ in range(2 * BAD_MESSAGES):
            with pytest.raises(Refused, match="Command is not for the key left"):
                link.call(m.Command("next"), PATIENCE)
        link.call(m.Status(), PATIENCE)  # a person at the keyboard of an actor
    look(served)
    until(lambda: served.refusals() == {"role": 5 * BAD_MESSAGES, "other version": 20})


def test_nobody_writes_in_the_name_of_another_though_he_knows_its_numbers(keys, serve, act, spec):
    """The numbers lie in the files of the other's outbox."""
    served, mine, his = serve(keys=keys), "a" * 32, "b" * 32
    left = act(served, "left", session=mine, key=keys / "left.key")
    left.push(0, make_segment("e0"))
    left.told(1)
    for session, earlier in ((his, [[mine, 5]]), (mine, [])):
        right = RawActor(served.address, spec, "right", session=session, earlier=earlier, key=keys / "right.key")
        with right, pytest.raises(Refused, match="or to another key"):
            right.welcome()
    left.push(1, make_segment("e0", start=4, ends="terminated"))
    left.told(2)
    (row,) = served.episodes().values()
    assert (row["id"], row["actor"], row["steps"]) == ("e0", "left", 8)


def test_what_a_client_reports_and_is_called_changes_neither_who_it_is_nor_the_log(serve, caplog, monkeypatch):
    monkeypatch.setattr(console, "QUIET_S", 10.0)
    served = serve()
    with served.link("viewer", "eve") as link:
        link.hello(PATIENCE)
        link.send(m.Heartbeat({"role": "learner", "actor": "trainer", "seen_s": "now", "rate": 1}))
        until(lambda: any("rate" in client for client in served.report()["clients"]))
        (client,) = served.report()["clients"]
    assert (client["role"], client["actor"], type(client["seen_s"])) == ("viewer", "eve", float)
    with served.link("viewer", "eve\nthe learner: all is well") as link, pytest.raises(Refused, match="printable"):
        link.hello(PATIENCE)
    for index in range(50):
        served.server.access.refuse("refused", f"session {index}\nrefused: nothing")
    lines = [console.CleanFormatter().format(record) for record in caplog.records if record.name == module.__name__]
    assert len(lines) == 1 + console.LINES
    assert not any("\n" in line for line in lines)


@pytest.mark.slow
def test_while_the_allow_list_cannot_be_read_all_wait_and_afterwards_go_on(keys, serve, join):
    served = serve(keys=keys)
    left = join(served, "left")
    collect(served, left)
    (keys / "allowed.json").chmod(0o644)
    (keys / "allowed.json").touch()
    left.push(make_segment("e1", directive=left.state.directive["number"], ends="terminated"))
    right = join(served, "right", told=False)
    until(lambda: served.refusals().get("unknown key", 0) >= 3)
    assert (left.pending[0], right.connected) == (1, False)
    (keys / "allowed.json").chmod(0o600)
    (keys / "allowed.json").touch()
    collect(served, left, "e2")
    collect(served, right, "e3")


# -- limits


@pytest.mark.parametrize("has_keys", [False, True])
def test_of_a_key_that_sends_more_than_it_may_within_a_second_who_sends_most_is_cut_and_comes_again(
    keys, serve, monkeypatch, clock, has_keys
):
    monkeypatch.setattr(fair_queue, "FRAMES", 200)
    served, key = serve(keys=keys if has_keys else None), "eye" if has_keys else None
    with served.link("viewer", "eye/1", key=key) as fast, served.link("viewer", "eye/2", key=key) as slow:
        fast.hello(PATIENCE)
        slow.hello(PATIENCE)
        for number in range(200):
            fast.send(m.Heartbeat({"number": number}))
        until(lambda: (fast.receive(), not fast.connected)[1])
        assert slow.call(m.Status(), PATIENCE).report["refusals"] == {"too fast": 1}
        told = until(lambda: (clock.advance(0.6), fast.receive() and fast.welcome)[1])
        assert "more than 200 frames" in told.state["degraded"]
        fast.call(m.Status(), PATIENCE)
        assert slow.connected


def test_a_learner_that_was_stopped_while_it_let_somebody_in_lets_the_next_one_in_at_once(serve, clock, monkeypatch):
    """Or that slept with its machine: what newcomers cost is not what passed meanwhile."""
    served = serve()
    with served.link("viewer", "eye/1") as first:
        first.hello(PATIENCE)
        doors = served.server.access.connections
        turn, asked = doors.turn, []

        def stopped(*end):
            asked or clock.advance(3600.0)
            asked.append(turn(*end))

        monkeypatch.setattr(doors, "turn", stopped)
        until(lambda: asked)
        with served.link("viewer", "eye/2") as second:
            until(lambda: (clock.advance(0.1), second.receive() and second.welcome)[1], 20)


def test_clients_that_come_and_go_leave_nothing_that_grows(serve, spec):
    """Actors that vanish are named as missing, but not for ever all of them."""
    server = (served := serve()).server
    for number in range(4):
        served.link("actor", f"arm{number}", spec=spec).close()
    server.updates.missing.update({f"gone{number}": 0.0 for number in range(10 * MISSING)})
    until(lambda: len(server.updates.missing) <= MISSING)
    limit = 4 * CONNECTIONS
    for number in range(2 * limit):
        server.access._peer(b"%d" % number)
    assert len(server.access._peers) == limit
