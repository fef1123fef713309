"""An actor whose disk is full, fails or damages what it holds: nothing acknowledged is lost, and somebody is told."""

import errno
import json
import sqlite3
import subprocess
import sys
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest
from serl_client import wire

from tests.faults import played, shim
from tests.faults.shim import READ, RENAME, WRITE
from tests.shared.common import PATIENCE, until
from tests.shared.servers import ServerProcess

EIO = "Input/output error"
ACTOR = """
import json, logging, sys
from pathlib import Path
from serl_client import TrainerClient, outbox, recent
from serl_client.errors import ConfigError
from tests.faults import played
logging.basicConfig(format="%(message)s")
folder, stop, pushed, told = Path(sys.argv[1]), Path(sys.argv[3]), 0, set()
outbox.FILE_BYTES, recent.KEPT_BYTES = 4000, 0
try:
    client = TrainerClient(sys.argv[2], actor=folder.name, spec=played.SPEC, outbox=folder)
except ConfigError as error:
    sys.exit(str(error))
with client:
    while not stop.exists() or pushed % 3:
        client.wait(0.01)
        if client.has_room:
            client.push(played.record(client.session, pushed))
            pushed += 1
        if client.fault and client.fault not in told:
            told.add(client.fault)
            print("told:", client.fault, file=sys.stderr, flush=True)
    drained = client.drain(40)
    print(json.dumps([client.session, pushed, sorted(told), drained]))
"""


@dataclass
class Actor:
    """One life of an actor, in a process of its own; it pushes without end."""

    process: subprocess.Popen
    control: shim.Control
    outbox: Path
    said: Path
    stop: Path

    def says(self, text):
        until(lambda: text in self.said.read_text())

    def finish(self):
        """(session, pushed records, faults that it saw), when all is acknowledged."""
        self.stop.touch()
        session, pushed, told, drained = json.loads(self.process.communicate(timeout=PATIENCE)[0])
        assert drained
        return session, pushed, told


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return shim.build(tmp_path_factory.mktemp("shim"))


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A server with a store, whose directives and weights are those that the records of `played` name."""
    made = ServerProcess(tmp_path_factory.mktemp("learner") / "run")
    first = played.Actor(made.address, "first", "first", ())
    until(lambda: first.link.receive() is None and first.link.connected)
    first.link.close()
    for body in played.BODIES:
        made.direct(body)
    made.publish(b"weights")
    yield made
    made.close()


@pytest.fixture
def start(server, library, tmp_path):
    """start(arm) begins a life of the one actor, after `arm` was told its Control."""
    control, lives = shim.Control(tmp_path / "control"), []

    def start(arm=lambda control: None):
        said, stop = tmp_path / f"said-{len(lives)}", tmp_path / f"stop-{len(lives)}"
        arm(control)
        with said.open("w") as errors:
            process = subprocess.Popen(
                [sys.executable, "-c", ACTOR, tmp_path / tmp_path.name, server.address, stop],
                env=shim.environment(library, control), stdout=subprocess.PIPE, stderr=errors, text=True,
            )  # fmt: skip
        lives.append(process)
        return Actor(process, control, tmp_path / tmp_path.name, said, stop)

    yield start
    for process in lives:
        process.kill()
        process.communicate()


def acknowledged(server, actor):
    """How many steps of this actor's lives are stored."""
    return sum(each["steps"] for each in server.episodes().values() if each["actor"] == actor.outbox.name)


def assert_whole(server, session, pushed, damaged=()):
    with closing(sqlite3.connect(server.run_dir / "store/index.sqlite")) as index:
        lost = set(index.execute("SELECT session, seq FROM lost").fetchall())  # those of other tests, too
    assert sorted(seq for name, seq in lost if name == session) == list(damaged)
    assert played.broken(server.run_dir, played.Promises(expected={session: pushed}, damaged=lost)) == []


@pytest.mark.slow
@pytest.mark.parametrize(("call", "error"), [(WRITE, errno.ENOSPC), (READ, errno.EIO)], ids=["full", "read"])
def test_a_disk_that_is_full_in_the_middle_of_a_record_or_cannot_be_read_is_told_and_nothing_is_lost(
    server, start, call, error
):
    actor = start()
    until(lambda: acknowledged(server, actor))
    actor.control.fail(call, error, sticky=True, path=".records", short=call == WRITE)
    actor.says("told:" if call == WRITE else EIO)
    before = acknowledged(server, actor)
    actor.control.clear()
    until(lambda: acknowledged(server, actor) > before)
    session, pushed, told = actor.finish()
    assert ["cannot be written" in fault for fault in told] == [True] * (call == WRITE)
    assert_whole(server, session, pushed)


@pytest.mark.slow
def test_no_record_is_sent_before_it_is_written_down_whose_run_it_belongs_to(server, start):
    actor = start(lambda control: control.fail(RENAME, errno.EIO, sticky=True, path="/run.new"))
    actor.says(EIO)
    assert acknowledged(server, actor) == 0
    actor.control.clear()
    session, pushed, _ = actor.finish()
    assert pushed
    assert_whole(server, session, pushed)


@pytest.mark.slow
def test_an_outbox_that_cannot_get_its_name_or_be_read_says_so_in_one_sentence(server, start):
    unnamed = start(lambda control: control.fail(RENAME, errno.ENOSPC, sticky=True, path="/id.new"))
    assert unnamed.process.wait(PATIENCE) == 1
    assert unnamed.said.read_text().startswith("the outbox ")
    assert "No space left" in unnamed.said.read_text()
    server.kill()
    actor = start(lambda control: control.clear())
    until(lambda: len(list(actor.outbox.glob("*.records"))) > 2)
    actor.process.kill()
    files = {path: path.read_bytes() for path in actor.outbox.glob("*.records")}
    unread = start(lambda control: control.fail(READ, errno.EIO, sticky=True, path=".records"))
    assert unread.process.wait(PATIENCE) == 1
    assert "cannot be read" in unread.said.read_text()
    assert {path: path.read_bytes() for path in actor.outbox.glob("*.records")} == files
    server.start()
    start(lambda control: control.clear()).finish()
    assert acknowledged(server, actor)
    assert not [path for path in files if path.exists()]


def damaged(outbox):
    """(session, seq) of the first of an episode that ends later: a bit of it is flipped on the disk."""
    path = sorted(outbox.glob("*.records"))[1]
    data = bytearray(path.read_bytes())
    session, begin = path.stem.split("-")[1], 0
    while (seq := next(wire.decode_records(data[begin : begin + wire.record_length(data[begin:])]))[0]) % 3:
        begin += wire.record_length(data[begin:])
    with path.open("r+b") as file:
        file.seek(begin + 200)
        byte = file.read(1)[0]
        file.seek(begin + 200)
        file.write(bytes([byte ^ 1]))
    return session, seq


@pytest.mark.slow
@pytest.mark.parametrize("found", ["at the start", "when it is sent"])
def test_a_damaged_record_costs_its_episode_and_no_other_and_both_sides_say_so(server, start, found):
    server.kill()
    actor = start()
    until(lambda: len(list(actor.outbox.glob("*.records"))) > 3)
    if found == "at the start":
        actor.process.kill()
        actor.process.wait()
    session, seq = damaged(actor.outbox)
    server.start()
    if found == "at the start":
        actor = start()
        actor.finish()
        pushed = 0
    else:
        _, pushed, _ = actor.finish()
    assert f"record {seq} is damaged" in actor.said.read_text()
    assert_whole(server, session, max(pushed, seq + 3), damaged=[seq, seq + 2])  # the outcome between them is there
    assert played.record(session, seq).episode not in server.episodes()
    assert len(list(actor.outbox.glob("*.damaged"))) in (1, 2)
    assert list(actor.outbox.glob("*.records")) == []
