"""Spoiled bytes and a hostile peer: what is refused is counted, nothing of it is written, and the server goes on."""

import json
import sqlite3
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serl_client import Outcome, Spec, messages, wire
from serl_client.errors import ConfigError, MessageError

from serl_launcher.acting.host import PolicyHost
from serl_launcher.datasets import reader
from serl_launcher.service.access import BAD_MESSAGES
from serl_launcher.store import store
from serl_launcher.store.index import Index
from serl_launcher.store.store import Store
from tests.faults.fuzzing import campaign, damage, files, hostile, live, mutations
from tests.faults.fuzzing.targets import TARGETS, Target
from tests.shared.clients import push_episodes
from tests.shared.common import PATIENCE, free_port, until


# -- all that comes from outside
@pytest.mark.slow
@pytest.mark.parametrize("count", [20, pytest.param(500, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("kind", sorted(campaign.KINDS))
def test_a_spoiled_case_of_any_kind_is_taken_or_refused_as_declared(tmp_path, kind, count):
    target = campaign.KINDS[kind]

    @settings(max_examples=count)
    @given(st.randoms(use_true_random=False))
    def tried(chance):
        with suppress(*target.declared):
            target.run(target.make(chance, chance.getrandbits(32)), tmp_path)

    tried()


@pytest.mark.parametrize(
    ("path", "said"),
    [("../{chunk_index}.parquet", "not in its folder"), ("/etc/passwd", "not in its folder"),
     ("{chunk_index:0999999999d}", "names no file"), ("{chunk_index.real}", "names no file")],
)  # fmt: skip
def test_a_dataset_reads_no_file_outside_its_folder(tmp_path, path, said):
    files.write_lerobot(tmp_path)
    info = json.loads((tmp_path / "meta/info.json").read_text())
    (tmp_path / "meta/info.json").write_text(json.dumps({**info, "data_path": path}))
    with pytest.raises(ConfigError, match=said):
        reader.Dataset(tmp_path).episode(0)


# -- the wire and the messages
@pytest.mark.parametrize("bomb", mutations.BOMBS, ids=lambda bomb: f"{bomb[:6].hex()}-{len(bomb)}")
def test_a_header_that_unpacks_large_is_refused_before_it_has(bomb):
    def refused(frames, scratch):
        with pytest.raises(MessageError):
            messages.decode(frames)
        return "refused"

    target = Target(1.0, TARGETS["bombs"].make, refused)
    assert campaign._once(target, [bomb], Path(), is_watched=True) == "refused"


def test_a_header_has_at_most_so_many_lists_and_mappings():
    count = wire.MAX_PARTS - 5  # the message, its fields, the report, its rows, no arrays
    frames = messages.encode(messages.Status({"rows": [[1]] * count}))
    assert len(messages.decode(frames).report["rows"]) == count
    with pytest.raises(MessageError, match="lists and mappings"):
        messages.decode(messages.encode(messages.Status({"rows": [[1]] * (count + 1)})))


def test_a_report_that_the_server_would_keep_is_short():
    heartbeat = messages.Heartbeat({"text": "x" * messages.MAX_REPORT})
    with pytest.raises(MessageError, match="at most 8192 bytes"):
        messages.encode(heartbeat)
    with pytest.raises(MessageError, match="at most 8192 bytes"):
        messages.decode(wire.pack({"type": "Heartbeat", "report": heartbeat.report}, {}))


def test_an_observation_brings_nothing_that_would_only_be_kept(spec):
    host = PolicyHost.__new__(PolicyHost)
    host.acting, host.spec = SimpleNamespace(tasks=(), history=1), spec
    seen = dict.fromkeys(("observation.state", "observation.else"), np.zeros(8, np.float32))
    with pytest.raises(MessageError, match="which is not in the Spec"):
        host.check(messages.InferenceRequest(0, 1, True, True, "", seen))


@pytest.mark.parametrize("dtype", [">f4", "complex64", "U3", "M8[s]", object])
def test_an_array_of_a_dtype_that_would_arrive_as_another_is_not_sent(dtype):
    with pytest.raises(MessageError, match="array 'a' has the dtype"):
        wire.pack({}, {"a": np.zeros(3, dtype)})


def test_a_record_whose_action_has_no_dimension_is_refused_as_one():
    columns = {name: np.zeros((), dtype) for name, dtype in [("action", "float32"), *messages.COLUMNS.items()]}
    header = {"episode": "e", "start": 0, "task": "", "stamp": [1, "p", 1], "extras": []}
    with pytest.raises(MessageError, match=r"\[T, ...\]"):
        list(messages.records(b"".join(bytes(part) for part in wire.encode_record(0, header, columns))))


def test_one_run_of_bytes_has_at_most_so_many_records(monkeypatch):
    monkeypatch.setattr(wire, "MAX_RECORDS", 3)
    record = mutations.RECORDS[2]
    assert len(list(messages.records(record * 3))) == 3
    with pytest.raises(MessageError, match="at most 3 records"):
        list(messages.records(record * 4))


# -- a Spec
@pytest.mark.parametrize(
    ("change", "text"),
    [({"action": {"shape": [2**31], "low": -1, "high": 1}}, "cannot be stored"),
     ({"action": {"shape": [-2], "low": -1, "high": 1}}, "shape"),
     ({"action": {"shape": [0], "low": -1, "high": 1}}, "shape"),
     ({"action": {"shape": [5000], "low": -1, "high": 1}}, "has no bounds"),
     ({"action": {"shape": [float("inf")]}}, "no Spec"),
     ({"action": {"shape": [2], "low": -1, "high": 1, "names": [b"x", 3]}}, "names"),
     ({"action": {"shape": [2], "low": -1, "high": 1e308}}, "finite"), ({"fps": float("inf")}, "fps"),
     ({"fps": float("nan")}, "fps"), ({"extras": {b"x": {"shape": [1]}}}, "names of features"),
     ({"extras": {"x" * 201: {"shape": [1]}}}, "names of features")],
)  # fmt: skip
def test_a_spec_that_could_not_be_stored_is_refused_before_it_is_built(change, text):
    with pytest.raises(ConfigError, match=text):
        Spec.from_dict({**mutations.SPEC.to_dict(), **change})


# -- the store's files
@pytest.fixture
def stored(tmp_path):
    damage.write(tmp_path / "store")
    return tmp_path / "store"


@pytest.mark.parametrize(
    "sql",
    ["UPDATE sources SET head = 'many'", "UPDATE sources SET head = tail - 1", "UPDATE sources SET capacity = NULL",
     "UPDATE sources SET tail = -5", "UPDATE episodes SET steps = x'00ff'", "UPDATE sessions SET actor = x'07'",
     "UPDATE directives SET body = '[1]'", "UPDATE directives SET body = '{'", "DROP TABLE sessions",
     "ALTER TABLE episodes RENAME COLUMN steps TO step", "UPDATE meta SET value = '{' WHERE key = 'format'",
     "UPDATE meta SET value = '{' WHERE key = 'spec'",
     "UPDATE outcomes SET episode = NULL", "UPDATE sources SET head = head + 100000",
     "UPDATE sources SET tail = tail + 1", "UPDATE sessions SET expected = expected + 1",
     "DROP INDEX episodes_by_first"],
)  # fmt: skip
def test_an_index_that_we_cannot_have_written_is_refused_with_its_name(stored, sql):
    database = sqlite3.connect(stored / "index.sqlite")
    tables = database.execute("SELECT sql, name FROM sqlite_master WHERE sql LIKE '% STRICT'").fetchall()
    database.execute("PRAGMA writable_schema = ON")
    database.execute("UPDATE sqlite_master SET sql = replace(replace(sql, ' NOT NULL', ''), ' STRICT', '')")
    database.execute("PRAGMA writable_schema = RESET")  # SQLite itself writes no such thing, a disk does
    with database:
        database.execute(sql)
    if sql.startswith("UPDATE"):
        database.execute("PRAGMA writable_schema = ON")
        database.executemany("UPDATE sqlite_master SET sql = ? WHERE name = ?", tables)
        database.commit()
    database.close()
    with pytest.raises(ConfigError, match=r"index\.sqlite is damaged"):
        Store(stored)


def test_an_empty_index_is_refused_and_stays_empty(tmp_path):
    (tmp_path / "index.sqlite").touch()
    with pytest.raises(ConfigError, match="is empty"):
        Index(tmp_path / "index.sqlite")
    assert (tmp_path / "index.sqlite").stat().st_size == 0


def test_a_flood_of_outcomes_is_committed_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "GROUP_OUTCOMES", 10)
    made = Store.create(tmp_path / "store", mutations.SPEC, {"online": 100})
    made.lives.hello("arm", "o", "e", [])
    for seq in range(35):
        made.stage("e", seq, Outcome(f"e{seq}", True))
        assert len(made.episodes.said) <= 10
    made.commit()
    assert made.expected("e") == 35
    assert sum(len(made.index.outcomes(f"e{seq}")) for seq in range(35)) == 35
    made.close()


def test_an_index_that_lost_what_was_published_is_refused(stored):
    (stored / "index.sqlite-wal").unlink()  # of the last commits
    (stored / "index.sqlite-shm").unlink(missing_ok=True)
    with pytest.raises(ConfigError, match="were published"):
        Store(stored)


# -- a hostile peer
@pytest.mark.slow
def test_the_server_outlives_every_attack_and_spoiled_messages_after_a_good_hello(tmp_path):
    result = live.attack(240, 7, tmp_path / "live")
    assert (result["failures"], result["files"], result["threads_lost"]) == ([], [], 0)
    assert result["growth"] < live.HELD
    assert result["outcomes"]["refused"] > 100


def test_a_connection_that_goes_on_to_say_what_is_no_message_is_ignored(serve):
    server = serve()
    with hostile.Peer(server.port) as peer:
        peer.send(hostile.message(b"no header") * 200)
        until(lambda: server.refusals() == {"bad message": BAD_MESSAGES})


@pytest.mark.slow
def test_an_actor_whose_report_is_too_long_lives_without_one(serve, join):
    def report():
        return next(client for client in server.report()["clients"] if client["actor"] == "arm")

    client = join(server := serve())
    client.report({"late": 3})
    until(lambda: report().get("late") == 3)
    client.report({"late": 4, "warning": "x" * 100_000})
    until(lambda: "late" not in report())
    push_episodes(client, [0])
    assert client.drain(PATIENCE)


# -- the tool


@pytest.mark.slow
def test_a_case_that_crashes_or_writes_is_found_and_kept(tmp_path, monkeypatch):
    def run(case, scratch):
        if case == 5:
            raise RuntimeError("planted")
        if case == 7:
            (tmp_path / "elsewhere").touch()
        return "taken"

    monkeypatch.setitem(campaign.KINDS, "planted", Target(1.0, lambda chance, number: number, run))
    result = campaign.apart("planted", 10, 0, 1, tmp_path / "scratch")
    _, *_ = campaign.keep(tmp_path / "kept", "planted", 1, result["failures"])
    kept = json.loads((tmp_path / "kept" / "planted-1-5.json").read_text())
    assert (result["crashes"], kept["number"], "planted" in kept["why"]) == (1, 5, True)
    assert result["files"] == [str(tmp_path / "elsewhere")]
    assert result["outcomes"] == {"taken": 9, "FAILED": 1}


BUSY = """
import sys, zmq
from serl_launcher.service.router import bound
socket = bound(zmq.Context(), sys.argv[1])
print("bound", flush=True)
sys.stdin.readline()
count = 0
while socket.poll(200):
    socket.recv_multipart()
    count += 1
print(count, flush=True)
"""


PING = hostile.frame(b"\x04PING\x00\x1e", hostile.COMMAND)


@pytest.mark.parametrize("ping", [PING, pytest.param(b"", marks=pytest.mark.slow)], ids=["pings", "plain"])
def test_a_client_that_floods_a_busy_server_and_is_cut_off_does_not_end_it(ping):
    port = free_port()
    words = [sys.executable, "-c", BUSY, f"tcp://127.0.0.1:{port}"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout.readline() == "bound\n"
        peer = hostile.Peer(port)
        peer.socket.sendall((hostile.message(b"x" * 50) + ping) * 4000)
        time.sleep(0.2)
        peer.reset()
        print(file=server.stdin, flush=True)
        assert int(server.stdout.readline()) > 0
    assert server.returncode == 0
