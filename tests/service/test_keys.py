"""Keys as files: who is let in, as what, and for how long; and the tool that makes, revokes and unbans them."""

import json
import os
import re

import pytest
from serl_client import ConfigError
from serl_client.client import TrainerClient
from serl_client.errors import Refused
from serl_client.identity import named
from serl_client.keys import Key

from serl_launcher.service import access as module
from serl_launcher.service.access import BAN_S, AllowList
from serl_launcher.store.store import Store
from tests.shared.keys import PEOPLE, do
from tests.shared.tools import typed


def test_a_key_file_that_others_may_read_is_refused_on_either_side(keys, spec, tmp_path):
    (keys / "left.key").chmod(0o644)
    with pytest.raises(ConfigError, match=r"left\.key has mode 0644.*chmod 600"):
        TrainerClient("tcp://127.0.0.1:1", actor="left", spec=spec, outbox=tmp_path / "box", key=keys / "left.key")
    (keys / "server.key").chmod(0o640)
    with pytest.raises(ConfigError, match=r"server\.key has mode 0640"):
        AllowList(keys)


def test_the_tool_makes_private_files_and_says_what_is_wrong(keys, tmp_path):
    assert {file.name: file.stat().st_mode & 0o777 for file in keys.iterdir()} == {
        name: 0o600 for name in ("server.key", "allowed.json", *(f"{name}.key" for name in PEOPLE))
    }
    assert keys.stat().st_mode & 0o777 == 0o700
    for arguments, sentence in {
        ("make", "left", "actor"): "there is a key left already",
        ("make", "server", "actor"): "is not server",
        ("make", "../up", "actor"): "a name has letters",
        ("revoke", "nobody"): "nobody is let in as nobody",
        ("unban", "left"): "left is not refused for bad messages",
    }.items():
        with pytest.raises(ConfigError, match=re.escape(sentence)):
            do(arguments[0], keys, *arguments[1:])
    assert do("revoke", keys, "left") == "left is refused from its next message on"
    assert "left                 revoked" in do("list", keys)
    with pytest.raises(ConfigError, match="there are no keys in"):
        do("list", tmp_path / "nowhere")


@pytest.mark.slow
def test_the_tool_as_it_is_typed(tmp_path):
    folder = "--keys", tmp_path / "made"
    assert typed("keys", "make", "left", "--role", "actor", *folder)[0] == 0
    secret = Key.read(tmp_path / "made/left.key").secret
    code, said = typed("keys", "list", *folder)
    assert secret not in repr(Key.read(tmp_path / "made/left.key"))
    assert (code, said.split()[:2], secret in said) == (0, ["left", "actor"], False)
    code, said = typed("keys", "revoke", "right", *folder)
    assert (code, said.count("\n"), said[:7]) == (1, 1, "error: ")


@pytest.mark.parametrize("text", ["~" * 40, "#" * 40, "0" * 39, "\ud800" * 40, 7])
def test_what_is_no_key_is_told_in_one_sentence(keys, text):
    for file in ("server.key", "left.key"):
        written = json.loads((keys / file).read_text())
        (keys / file).write_text(json.dumps(written | {"public": text}))
    with pytest.raises(ConfigError, match=r"server\.key is no key: take another folder"):
        AllowList(keys)
    with pytest.raises(ConfigError, match=r"left\.key is no key: make one"):
        Key.read(keys / "left.key")


def test_a_damaged_key_is_told_in_one_sentence(keys):
    for text in ("", "[]", '{"name": "left"}', (keys / "left.key").read_text().replace('"actor"', '"learner"')):
        (keys / "left.key").write_text(text)
        with pytest.raises(ConfigError, match="make"):
            Key.read(keys / "left.key")


def test_actors_of_several_machines_and_jobs_have_names_of_their_own_without_being_told(keys, monkeypatch, tmp_path):
    for name in ("SLURM_ARRAY_TASK_ID", "SLURM_PROCID", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("socket.gethostname", lambda: "robot-7.lab.example")
    key = Key.read(keys / "left.key")
    assert [named(*words, tmp_path) for words in (("auto", None), ("auto", key), ("arm", key), ("arm", None))] == [
        "robot-7", "left", "arm", "arm"
    ]  # fmt: skip
    assert named("auto", None, tmp_path) == named("auto", None, tmp_path), "a restart finds its outbox"
    monkeypatch.setenv("SLURM_PROCID", "0")
    assert named("auto", None, tmp_path) == "robot-7", "one process a machine"
    names = set()
    for task, process in (("1", "0"), ("1", "1"), ("2", "0")):
        for variable, value in zip(("ARRAY_TASK_ID", "PROCID", "NTASKS"), (task, process, "2"), strict=True):
            monkeypatch.setenv(f"SLURM_{variable}", value)
        names.add(named("auto", None, tmp_path))
    assert names == {"robot-7-1-0", "robot-7-1-1", "robot-7-2-0"}
    monkeypatch.setattr("socket.gethostname", lambda: "a/b c")
    assert "/" not in named("auto", None, tmp_path)


def test_a_ban_ends_after_ten_minutes_and_a_clock_that_was_put_back_ends_it_too(keys, clock):
    allowed, public = AllowList(keys), Key.read(keys / "left.key").public
    for later in (BAN_S + 2, -3600.0):
        allowed.ban("left")
        assert allowed.find(public).role == "banned"
        clock.advance(later)
        if later < 0:
            allowed._stamp = None  # it looks again when a ban ends, and when a file changed
        assert allowed.find(public).role == "actor"
        assert AllowList(keys).find(public).role == "actor"
        clock.advance(-later)


def test_a_ban_that_cannot_be_written_down_holds_in_this_process(keys, monkeypatch, clock):
    allowed, public = AllowList(keys), Key.read(keys / "left.key").public

    def full(*_):
        raise OSError(28, "No space left on device")

    for path in (keys / "allowed.json", keys):
        os.utime(path, (1, 1))  # the folder is as it was for long
    assert allowed.find(public).role == "actor"
    monkeypatch.setattr(module.os, "open", full)
    allowed.ban("left")
    assert allowed.find(public).role == "banned"
    assert not list(keys.glob("*.banned"))
    clock.advance(BAN_S + 2)
    assert allowed.find(public).role == "actor"


def test_two_changes_within_one_tick_of_the_clock_are_both_seen(keys, clock):
    allowed, public = AllowList(keys), Key.read(keys / "left.key").public
    tick = clock.time_ns()

    def changed(role):
        for path in (keys / "allowed.json", keys):
            os.utime(path, ns=(tick, tick))
        return allowed.find(public).role == role

    allowed.ban("left")
    assert changed("banned")
    (keys / "left.banned").unlink()
    assert changed("actor")


def test_a_ban_outlives_the_server_and_an_allow_list_that_is_gone_lets_nobody_in(keys):
    allowed = AllowList(keys)
    public = Key.read(keys / "left.key").public
    allowed.ban("left")
    assert AllowList(keys).find(public).role == "banned"
    do("unban", keys, "left")
    assert allowed.find(public).role == "actor"
    for mode, role in ((0o666, "unknown"), (0o600, "actor")):
        (keys / "allowed.json").chmod(mode)
        (keys / "allowed.json").touch()
        assert allowed.find(public).role == role
    (keys / "allowed.json").unlink()
    assert allowed.find(public).role == "unknown"


def test_the_owner_of_a_life_outlives_the_server(keys, tmp_path, spec):
    store = Store.create(tmp_path / "store", spec, {"online": 100})
    store.lives.hello("left", "box", "a" * 32, [], owner="left")
    store.commit()
    store.close()
    store = Store(tmp_path / "store")
    for owner in ("right", "lef"):
        with pytest.raises(Refused, match="or to another key"):
            store.lives.hello("left", "box", "b" * 32, ["a" * 32], owner=owner)
    for owner in ("left", ""):  # "": a learner without keys trusts whoever is there
        store.lives.hello("left", "box", "b" * 32, ["a" * 32], owner=owner)
    store.close()
