"""The server and its store: an actor that falls silent, a record that is wrong, a store that is made, or gone."""

import math
import os
import threading
import time

import numpy as np
import pytest
from serl_client import ConfigError
from serl_client import messages as m
from serl_client.client import TrainerClient
from serl_client.connection import Connection
from serl_client.errors import TrainerError

from serl_launcher.store import keeper, layout, updates
from serl_launcher.store.server import Server
from tests.store.test_service import episode, free_port, push_all, wait_until

COLLECT = {"phase": "practise", "mode": "collect", "into": "online"}


class Running:
    """A server in a thread of this process."""

    def __init__(self, folder, **options):
        self.address, self.local = f"tcp://127.0.0.1:{free_port()}", f"ipc://{folder}/server"
        self.server = Server(
            folder / "run", {"online": 400}, public=self.address, local=self.local, inference="", **options
        )
        self.admin = Connection(self.local, m.Hello(m.PROTOCOL, "learner", "trainer"))
        self.ended = ""
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self):
        try:
            self.server.run()
        except ConfigError as error:
            self.ended = str(error)

    def ask(self, message):
        return self.admin.call(message, 10.0)

    def direct(self):
        self.ask(m.Direct(COLLECT, None))

    def episodes(self):
        return {row[1]: dict(zip(m.EPISODE, row, strict=True)) for row in self.ask(m.Sync(0, 0)).episodes}

    def close(self):
        self.server.stop()
        self.thread.join()
        self.admin.close()
        self.server.close()


class Actor:
    """One life of an actor, on a link of its own."""

    def __init__(self, running, spec, name="arm", *, session="A", paced=False):
        self.session, self.expected, self.failed = session, 0, []
        hello = m.Hello(m.PROTOCOL, "actor", name, session, f"outbox-{name}", "", spec.to_dict(), paced=paced)
        self.link = Connection(running.address, hello)

    def push(self, seq, *records):
        data = b"".join(bytes(part) for i, record in enumerate(records) for part in m.encode_record(seq + i, record))
        self.link.send(m.Push(self.session, {"records": np.frombuffer(data, np.uint8)}))

    def hear(self):
        """What was acknowledged so far; refusals are added to `failed`."""
        while (message := self.link.receive()) is not None:
            if isinstance(message, m.Ack):
                self.expected = message.expected
            elif isinstance(message, m.Failed):
                self.failed.append(message)
        return self.expected


@pytest.fixture
def run(tmp_path):
    """run(**options) -> a server that has started."""
    started = []

    def run(**options):
        started.append(Running(tmp_path, **options))
        return started[-1]

    yield run
    for each in started:
        each.close()


@pytest.fixture
def act(spec):
    """act(running, **options) -> an actor that was welcomed, when the directive is there."""
    opened = []

    def act(running, **options):
        actor = Actor(running, spec, **options)
        opened.append(actor.link)
        actor.link.hello(10.0)
        running.direct()
        return actor

    yield act
    for link in opened:
        link.close()


@pytest.mark.parametrize(
    ("on_silence", "paced", "after"),
    [({}, True, 60.0), ({}, False, math.inf), ({"online": 5.0}, False, 5.0), ({"online": math.inf}, True, math.inf)],
)
@pytest.mark.parametrize("archived", [(), ("online",)])
def test_a_dead_actors_episode_is_truncated_after_as_much_silence_as_its_source_or_its_clock_says(
    run, act, make_segment, on_silence, paced, after, archived
):
    running = run(on_silence=on_silence, archived=archived)
    actor = act(running, paced=paced)
    actor.push(0, make_segment("e0"))
    wait_until(lambda: actor.hear() == 1)
    actor.link.send(m.Bye())
    wait_until(lambda: not [s for s in running.server.peers.values() if s.hello.role == "actor"])
    running.server.stop()
    running.thread.join()
    now = time.monotonic()
    running.server.updates.cut_silent(now)
    for silence, is_open in ((0.9, True), (1.1, math.isinf(after))):
        running.server.updates.cut_silent(now + silence * min(after, 1e6))
        assert bool(running.server.store.episodes.open) == is_open
    running.server.intake.commit()
    episode = running.server.store.index.episode("e0")
    assert (episode.closed, episode.truncated, episode.terminated, episode.final) == (not is_open, not is_open, 0, 0)


def test_an_actor_that_lives_keeps_its_episode_and_the_rest_of_a_silent_one_is_a_part(
    run, act, make_segment, monkeypatch
):
    monkeypatch.setattr(updates, "UPDATE_S", 0.05)
    running = run(on_silence={"online": 1.0})
    actor, other = act(running), act(running, name="other", session="B")
    actor.push(0, make_segment("e0"))
    other.push(0, make_segment("f0"))
    wait_until(lambda: (actor.hear(), other.hear()) == (1, 1))

    def sealed():
        other.link.send(m.Heartbeat({}))
        return running.episodes()["e0"]["closed"]

    wait_until(sealed)
    assert not running.episodes()["f0"]["closed"]
    actor.push(1, make_segment("e0", start=4, ends="terminated"))
    wait_until(lambda: actor.hear() == 2)
    found = running.episodes()
    assert {id: (e["steps"], bool(e["final"]), bool(e["terminated"])) for id, e in found.items() if id[0] == "e"} == {
        "e0": (4, False, False),
        "e0.part2": (4, True, True),
    }


def test_a_record_with_a_hostile_number_is_its_senders_fault_and_holds_up_nobody(run, act, make_segment, monkeypatch):
    running = run()
    hostile, honest = act(running), act(running, name="honest", session="B")
    degraded = []
    monkeypatch.setattr(running.server.intake, "degrade", degraded.append)
    hostile.push(0, make_segment("e0"))
    wait_until(lambda: hostile.hear() == 1)
    for number in range(20):
        hostile.push(1, make_segment("e0", start=4, directive=2**40))
        honest.push(number, make_segment(f"f{number}", ends="terminated"))
    wait_until(lambda: honest.hear() == 20)
    wait_until(lambda: hostile.hear() == 1 and hostile.failed)
    assert hostile.failed[0].final
    assert "no directive 1099511627776" in hostile.failed[0].text
    assert running.ask(m.Status()).report["refusals"] == {"bad message": 16}, "then its connection is ignored"
    assert not degraded


def test_a_record_that_sets_off_a_bug_when_its_group_is_written_costs_the_others_one_group(
    run, act, make_segment, monkeypatch
):
    checksums = layout.checksums

    def buggy(records, columns):
        if (records["reward"] == 7).any():
            raise OverflowError("a bug")
        return checksums(records, columns)

    monkeypatch.setattr(layout, "checksums", buggy)
    running = run()
    hostile, honest = act(running), act(running, name="honest", session="B")
    honest.push(0, make_segment("f0", ends="terminated"))
    wait_until(lambda: honest.hear() == 1)
    hostile.push(0, make_segment("e0", steps=8))
    wait_until(lambda: running.server.keeper.is_suspicious)
    pushed = 1
    while not hostile.failed:
        hostile.push(0, make_segment("e0", steps=8))
        honest.push(honest.hear(), make_segment(f"f{honest.expected}", ends="terminated"))
        pushed += 1
        hostile.hear()
        time.sleep(0.05)
        assert pushed < 400
    assert "record 0 cannot be written: a group could not be written: OverflowError('a bug')" in hostile.failed[0].text
    wait_until(lambda: not running.server.degraded)
    before = honest.hear()
    honest.push(before, make_segment(f"f{before}", ends="terminated"))
    wait_until(lambda: honest.hear() > before)
    assert sorted(running.episodes()) == sorted(f"f{i}" for i in range(before + 1))


def test_a_server_does_not_start_where_the_index_of_its_store_is_missing(run, act, make_segment, tmp_path):
    running = run()
    actor = act(running)
    actor.push(0, make_segment("e0", ends="terminated"))
    wait_until(lambda: actor.hear() == 1)
    running.server.stop()
    running.thread.join()
    steps = (tmp_path / "run/store/online/steps").read_bytes()
    (tmp_path / "run/store/index.sqlite").rename(tmp_path / "index.sqlite")
    with pytest.raises(ConfigError, match=r"but no index\.sqlite, without which nobody can read it"):
        run()
    assert (tmp_path / "run/store/online/steps").read_bytes() == steps
    (tmp_path / "index.sqlite").rename(tmp_path / "run/store/index.sqlite")


@pytest.mark.parametrize("ends_by", ["being made", "a full disk"])
def test_while_large_files_are_made_others_are_answered_and_the_actor_waits(
    run, spec, make_segment, tmp_path, monkeypatch, ends_by
):
    begun, go_on, allocate = threading.Event(), threading.Event(), os.posix_fallocate

    def slow(*arguments):
        begun.set()
        assert go_on.wait(30)
        if ends_by == "a full disk":
            raise OSError(28, "No space left on device")
        allocate(*arguments)

    monkeypatch.setattr(os, "posix_fallocate", slow)
    monkeypatch.setattr(keeper, "MAKE_S", 0.01)
    running = run()
    with TrainerClient(running.address, actor="arm", spec=spec, outbox=tmp_path / "outbox") as client:
        assert begun.wait(10)
        for _ in range(3):
            assert running.ask(m.Status()).report["run"] == ""
        assert not client.connected
        go_on.set()
        if ends_by == "a full disk":
            with pytest.raises(TrainerError, match="No space left on device"):
                wait_until(lambda: client.check())
            wait_until(lambda: running.ended)
            assert "No space left on device" in running.ended
            return
        wait_until(lambda: client.connected)
        running.direct()
        push_all(client, episode(make_segment, 0, client=client))
        assert client.drain(10)
    (found,) = running.episodes().values()
    assert (found["steps"], bool(found["terminated"])) == (8, True)
