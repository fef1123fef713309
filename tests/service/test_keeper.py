"""The server and its store: an actor that falls silent, a record that is wrong, a store that is made, or gone."""

import dataclasses
import math
import os
import sqlite3
import threading
import time

import pytest
from serl_client import messages as m
from serl_client.errors import TrainerError

from serl_launcher.service import keeper
from serl_launcher.store import layout
from serl_launcher.store.index import Index
from serl_launcher.store.store import Store
from tests.shared.clients import push_episodes
from tests.shared.common import PATIENCE, until
from tests.shared.data import make_segment

SECOND = "b" * 32


@pytest.mark.parametrize(
    ("on_silence", "paced", "after"),
    [({}, True, 60.0), ({}, False, math.inf), ({"online": 5.0}, False, 5.0), ({"online": math.inf}, True, math.inf)],
)
@pytest.mark.parametrize("archived", [(), ("online",)])
def test_a_dead_actors_episode_is_truncated_after_as_much_silence_as_its_source_or_its_clock_says(
    serve, act, on_silence, paced, after, archived
):
    running = serve(on_silence=on_silence, archived=archived)
    actor = act(running, paced=paced)
    actor.push(0, make_segment("e0"))
    actor.told(1)
    actor.link.send(m.Bye())
    until(lambda: not [peer for peer in running.server.peers.values() if peer.hello.role == "actor"])
    running.stop()
    now = time.monotonic()
    running.server.updates.cut_silent(now)
    for silence, is_open in ((0.9, True), (1.1, math.isinf(after))):
        running.server.updates.cut_silent(now + silence * min(after, 1e6))
        assert bool(running.server.store.episodes.open) == is_open
    running.server.intake.commit()
    episode = running.server.store.index.episode("e0")
    assert (episode.closed, episode.truncated, episode.terminated, episode.final) == (not is_open, not is_open, 0, 0)


def test_an_actor_that_lives_keeps_its_episode_and_the_rest_of_a_silent_one_is_a_part(serve, act, clock):
    running = serve(on_silence={"online": 5.0})
    actor, other = act(running), act(running, "other", session=SECOND, outbox="box of other")
    actor.push(0, make_segment("e0"))
    other.push(0, make_segment("f0"))
    actor.told(1)
    other.told(1)

    for _ in range(5):
        assert not running.episodes()["e0"]["closed"]
        clock.advance(1.0)
        other.link.send(m.Heartbeat({}))
        until(lambda: any(peer.seen == clock.now for peer in running.server.peers.values()))
    until(lambda: running.episodes()["e0"]["closed"])
    assert not running.episodes()["f0"]["closed"]
    actor.push(1, make_segment("e0", start=4, ends="terminated"))
    actor.told(2)
    found = {id: e for id, e in running.episodes().items() if id[0] == "e"}
    assert {id: (e["steps"], e["final"], e["terminated"]) for id, e in found.items()} == {
        "e0": (4, 0, 0),
        "e0.part2": (4, 1, 1),
    }


def test_a_record_with_a_hostile_number_is_its_senders_fault_and_holds_up_nobody(serve, act, monkeypatch):
    running, degraded = serve(), []
    hostile, honest = act(running), act(running, "honest", session=SECOND, outbox="box of honest")
    monkeypatch.setattr(running.server.keeper, "degrade", degraded.append)
    hostile.push(0, make_segment("e0"))
    hostile.told(1)
    for number in range(20):
        hostile.push(1, make_segment("e0", start=4, directive=2**40))
        honest.push(number, make_segment(f"f{number}", ends="terminated"))
    until(lambda: honest.hear() == 20)
    assert "no directive 1099511627776" in hostile.refused()
    assert hostile.failed[0].final
    until(lambda: running.refusals() == {"bad message": 16})  # then its connection is ignored
    assert not degraded


@pytest.mark.slow
def test_a_record_that_sets_off_a_bug_when_its_group_is_written_costs_the_others_one_group(serve, act, monkeypatch):
    checksums = layout.checksums

    def buggy(records, columns):
        if (records["reward"] == 7).any():
            raise OverflowError("a bug")
        return checksums(records, columns)

    monkeypatch.setattr(layout, "checksums", buggy)
    running = serve()
    hostile, honest = act(running), act(running, "honest", session=SECOND, outbox="box of honest")
    honest.push(0, make_segment("f0", ends="terminated"))
    honest.told(1)
    hostile.push(0, make_segment("e0", steps=8))
    until(lambda: running.server.keeper.is_suspicious)

    def blamed():
        hostile.push(0, make_segment("e0", steps=8))
        honest.push(honest.hear(), make_segment(f"f{honest.expected}", ends="terminated"))
        hostile.hear()
        return hostile.failed

    until(blamed, every=0.05)
    assert "record 0 cannot be written: a group could not be written: OverflowError('a bug')" in hostile.failed[0].text
    until(lambda: not running.server.keeper.degraded)
    before = honest.hear()
    honest.push(before, make_segment(f"f{before}", ends="terminated"))
    until(lambda: honest.hear() > before)
    assert sorted(running.episodes()) == sorted(f"f{i}" for i in range(before + 1))


@pytest.mark.parametrize("ends_by", ["being made", "a full disk"])
def test_while_large_files_are_made_others_are_answered_and_the_actor_waits(serve, join, monkeypatch, caplog, ends_by):
    begun, go_on, allocate = threading.Event(), threading.Event(), os.posix_fallocate

    def slow(*arguments):
        begun.set()
        assert go_on.wait(PATIENCE)
        if ends_by == "a full disk":
            raise OSError(28, "No space left on device")
        allocate(*arguments)

    monkeypatch.setattr(os, "posix_fallocate", slow)
    monkeypatch.setattr(keeper, "MAKE_S", 0.01)
    running = serve()
    client = join(running, told=False)
    assert begun.wait(PATIENCE)
    for _ in range(3):
        assert running.report()["run"] == ""
    until(lambda: "the learner is making the files" in caplog.text)
    assert (client.connected, running.refusals()) == (False, {})
    go_on.set()
    if ends_by == "a full disk":
        with pytest.raises(TrainerError, match="No space left on device"):
            until(client.check)
        until(lambda: "No space left on device" in running.ended)
        return
    until(lambda: client.connected)
    running.direct()
    push_episodes(client, [0])
    assert client.drain(PATIENCE)
    (found,) = running.episodes().values()
    assert (found["steps"], found["terminated"]) == (8, 1)


@pytest.mark.parametrize("error", [OSError("is being read"), sqlite3.OperationalError("database is locked")])
def test_a_start_waits_for_an_index_that_is_busy_for_a_moment(tmp_path, spec, monkeypatch, caplog, error):
    Store.create(tmp_path / "store", spec, {"online": 50}).close()
    probe, tries = Index.probe, [error, None]

    def busy(index):
        if fails := tries.pop(0):
            raise fails
        probe(index)

    monkeypatch.setattr(keeper, "REOPEN_S", 0.0)
    monkeypatch.setattr(Index, "probe", busy)
    opened = keeper.StoreKeeper(tmp_path, {"online": 50}, ())
    assert opened.ready.sources["online"].capacity == 50
    opened.close()
    assert f"is tried again: {error}" in caplog.text


def test_a_clock_that_is_an_hour_off_changes_nothing(server, join):
    early, late = join(server, "early"), join(server, "late")
    number = early.state.directive["number"]
    for i in range(3):
        for client, hours in ((early, -1 + 2 * (i % 2)), (late, 1)):  # one clock jumps, the other is ahead
            segment = make_segment(client.actor, start=4 * i, ends="terminated" * (i == 2), directive=number)
            client.push(dataclasses.replace(segment, time=segment.time + 3600.0 * hours))
    assert early.drain(PATIENCE)
    assert late.drain(PATIENCE)
    assert all(episode["terminated"] for episode in server.episodes().values())
    assert server.stored() == {name: list(range(12)) for name in server.episodes()}
    assert set(server.stored()) == {"early", "late"}
