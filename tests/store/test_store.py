"""The store keeps what it acknowledged: under crashes at every write, under failing disks, and while it evicts."""

import errno
import os
import signal
import sqlite3
import time
from contextlib import closing

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from serl_client import ConfigError, Outcome, Spec
from serl_client import messages as m
from serl_client.errors import Refused

from serl_launcher.replay.buffer import ReplayBuffer
from serl_launcher.store import files, index, layout, store
from serl_launcher.store.errors import Full, Gap
from serl_launcher.store.store import Store
from serl_launcher.types import Window

STATE = "observation.state"
SAC = Window({STATE: (0,), "action": (0,), "next_observation": (1,)})


def founded(folder, spec, **capacities):
    made = Store.create(folder / "store", spec, capacities or {"online": 400})
    made.direct({"into": "online", "phase": "practise"})
    made.hello("arm", "outbox", "A", [])
    return made


def contents(folder, source="online"):
    """[(episode number, index, reward)] of all that a reader may draw, in order, each checked against its row."""
    opened = Store(folder / "store")
    layout_ = layout.Layout(opened.spec, opened.sources[source].capacity)
    tail, head = opened.sources[source].tail, opened.sources[source].head
    opened.close()
    steps, rows = layout_.steps(folder / "store" / source), layout_.observations(folder / "store" / source)[STATE]
    found = []
    for number in range(tail, head):
        record = steps[number % layout_.capacity]
        assert record["number"] == number
        seen = [record["row"], *([record["final_row"]] if record["final_row"] >= 0 else [])]
        assert record["checksum"] == layout.checksum(record, [rows[row % layout_.rows] for row in seen])
        assert rows[record["row"] % layout_.rows][1] == record["index"] == record["reward"]
        found.append((int(record["episode"]), int(record["index"]), float(rows[record["row"] % layout_.rows][0])))
    return found


def test_what_was_committed_is_there_after_reopening(tmp_path, spec, make_segment):
    made = founded(tmp_path, spec)
    made.stage("A", 0, make_segment("e0", 7, 0, 4))
    made.stage("A", 1, make_segment("e0", 7, 4, 3, ends="terminated"))
    made.stage("A", 2, Outcome("e0", True))
    made.commit()
    made.stage("A", 3, make_segment("e1", 8, 0, 4))  # never committed
    made.close()
    assert contents(tmp_path) == [(1, i, 7.0) for i in range(7)]
    opened = Store(tmp_path / "store")
    assert opened.expected("A") == 3
    episode = opened.index.episode("e0")
    assert (episode.steps, episode.success, episode.closed, episode.final) == (7, 1, 1, 1)


def test_a_repeated_record_is_ignored_and_a_gap_is_named(tmp_path, spec, make_segment):
    made = founded(tmp_path, spec)
    assert made.stage("A", 0, make_segment())
    assert not made.stage("A", 0, make_segment())
    with pytest.raises(Gap) as gap:
        made.stage("A", 2, make_segment(start=4))
    assert gap.value.expected == 1
    made.commit()
    assert len(contents(tmp_path)) == 4


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (dict(start=3), "came where the start of an episode"),
        (dict(directive=9), "collects into no source"),
        (dict(steps=300), "does not fit source"),
    ],
)
def test_a_wrong_segment_is_refused_and_nothing_of_it_is_kept(tmp_path, spec, make_segment, change, says):
    made = founded(tmp_path, spec)
    with pytest.raises(Refused, match=says):
        made.stage("A", 0, make_segment(**change))
    assert made.stage("A", 0, make_segment())
    made.commit()
    assert contents(tmp_path) == [(1, i, 0.0) for i in range(4)]


@pytest.mark.parametrize("directive", [9, 2**31, 2**40, 2**53 - 1])
def test_a_segment_that_goes_on_under_a_directive_that_nobody_gave_is_refused_and_the_others_are_kept(
    tmp_path, spec, make_segment, directive
):
    made = founded(tmp_path, spec)
    made.hello("other", "box", "B", [])
    made.stage("A", 0, make_segment("e0"))
    made.stage("B", 0, make_segment("f0", ends="terminated"))
    with pytest.raises(Refused, match=f"no directive {directive}"):
        made.stage("A", 1, make_segment("e0", start=4, directive=directive))
    made.stage("A", 1, make_segment("e0", start=4, ends="terminated"))
    made.commit()
    assert len(contents(tmp_path)) == 12


def test_whatever_a_record_sets_off_while_it_is_looked_at_is_its_own_fault(tmp_path, spec, make_segment, monkeypatch):
    made = founded(tmp_path, spec)
    made.stage("A", 0, make_segment("e0"))

    def fail(*_):
        raise OverflowError("a number that no column holds")

    with monkeypatch.context() as patch:
        patch.setattr(store, "step_records", fail)
        with pytest.raises(Refused, match="a number that no column holds"):
            made.stage("A", 1, make_segment("e0", start=4))
    made.stage("A", 1, make_segment("e0", start=4))
    made.commit()
    assert len(contents(tmp_path)) == 8


def test_an_array_of_another_shape_is_refused_by_name(tmp_path, spec, make_segment):
    made = founded(tmp_path, spec)
    segment = make_segment()
    object.__setattr__(segment, "action", np.zeros((4, 3), np.float32))
    with pytest.raises(Refused, match=r"action should be float32 \[4, 2\], not float32 \[4, 3\]"):
        made.stage("A", 0, segment)


def test_a_segment_that_skips_steps_of_its_episode_is_refused(tmp_path, spec, make_segment):
    made = founded(tmp_path, spec)
    made.stage("A", 0, make_segment("e0", steps=4))
    with pytest.raises(Refused, match=r"e0\[5\] came where e0\[4\]"):
        made.stage("A", 1, make_segment("e0", start=5))


def test_two_actors_of_one_name_and_seq_do_not_mix(tmp_path, spec, make_segment):
    """hi-ors E1 and E2: a restarted actor begins again at 0, and two actors may count alike."""
    made = founded(tmp_path, spec)
    made.hello("arm2", "outbox2", "B", [])
    for seq in range(3):
        made.stage("A", seq, make_segment(f"a{seq}", 1, ends="terminated"))
        made.stage("B", seq, make_segment(f"b{seq}", 2, ends="terminated"))
    made.commit()
    made.hello("arm", "outbox", "A2", [])  # the first actor, started again
    made.stage("A2", 0, make_segment("c0", 3, ends="terminated"))
    made.commit()
    keys = [key for _, _, key in contents(tmp_path)]
    assert keys == [1.0] * 4 + [2.0] * 4 + [1.0] * 4 + [2.0] * 4 + [1.0] * 4 + [2.0] * 4 + [3.0] * 4


def test_an_actor_that_died_leaves_a_truncated_episode_only_when_its_next_life_has_delivered(
    tmp_path, spec, make_segment
):
    made = founded(tmp_path, spec)
    made.stage("A", 0, make_segment("e0"))
    made.commit()
    made.hello("arm", "outbox", "A2", [("A", 1)])  # record 1 of A still lies in the outbox
    assert not made.index.episode("e0").closed
    made.stage("A", 1, make_segment("e0", start=4))
    made.commit()
    made.close_session("A")
    made.commit()
    episode = made.index.episode("e0")
    assert (episode.steps, episode.truncated, episode.terminated, episode.closed, episode.final) == (8, 1, 0, 1, 0)
    with pytest.raises(Refused, match="is over"):
        made.stage("A", 2, make_segment("e0", start=8))


def rows_of(folder, source="online"):
    """{episode number: [index, ...]} of all that a reader may draw; the row of each step says its actor's own index."""
    opened = Store(folder / "store")
    layout_ = layout.Layout(opened.spec, opened.sources[source].capacity)
    steps, rows = layout_.steps(folder / "store" / source), layout_.observations(folder / "store" / source)[STATE]
    found = {}
    for number in range(opened.sources[source].tail, opened.sources[source].head):
        record = steps[number % layout_.capacity]
        said = (int(record["index"]), float(rows[record["row"] % layout_.rows][1]))
        found.setdefault(int(record["episode"]), []).append(said)
    opened.close()
    return found


@pytest.mark.parametrize("how", ["the end of the run", "an operator", "silence"])
def test_what_comes_after_a_cut_from_elsewhere_is_a_part_of_its_own_and_nothing_is_joined_or_lost(
    tmp_path, spec, make_segment, how
):
    made = founded(tmp_path, spec)
    made.stage("A", 0, make_segment("e0"))
    if how == "an operator":
        made.hello("desk", "another outbox", "B", [])
        made.stage("B", 0, Outcome("e0", None, judged_by="operator"))
    elif how == "silence":
        made.cut("A")
    else:
        made.close_open()
    made.commit()
    before = made.index.episode("e0")
    made.stage("A", 1, make_segment("e0", start=4, ends="terminated"))
    made.commit()
    after, part = made.index.episode("e0"), made.index.episode("e0.part2")
    assert (after.steps, after.truncated, after.final, after.revision) == (4, 1, 0, before.revision)
    assert (part.part_of, part.part_start, part.steps, part.terminated, part.final) == ("e0", 4, 4, 1, 1)
    assert rows_of(tmp_path) == {1: [(i, i) for i in range(4)], 2: [(i, i + 4) for i in range(4)]}
    made.stage("A", 2, make_segment("e1"))
    made.close_open()
    made.stage("A", 3, make_segment("e2", ends="terminated"))
    with pytest.raises(Refused, match="came where the start of an episode"):
        made.stage("A", 4, make_segment("e1", start=4))  # it is not the newest any more


def test_an_outcome_of_an_episode_holds_for_all_its_parts_whenever_they_come(tmp_path, spec, make_segment):
    made = founded(tmp_path, spec)
    made.stage("A", 0, make_segment("e0"))
    made.cut("A")
    made.stage("A", 1, make_segment("e0", start=4))
    made.stage("A", 2, Outcome("e0", True))
    made.cut("A")
    made.stage("A", 3, make_segment("e0", start=8))
    made.commit()
    assert [(each.id, each.success) for each in made.index.parts("e0")] == [
        ("e0", 1), ("e0.part2", 1), ("e0.part3", 1)
    ]  # fmt: skip
    made.hello("desk", "another outbox", "B", [])
    made.stage("B", 0, Outcome("e0.part2", False, judged_by="operator"))
    made.commit()
    assert [each.success for each in made.index.parts("e0")] == [1, 0, 1]
    made.stage("B", 1, Outcome("e0", None, discard=True, judged_by="operator"))
    made.commit()
    assert [(each.discard, each.closed) for each in made.index.parts("e0")] == [(1, 1)] * 3


def test_a_part_does_not_take_the_name_of_another_episode(tmp_path, spec, make_segment):
    made = founded(tmp_path, spec)
    made.stage("A", 0, make_segment("e0.part2", ends="terminated"))
    made.stage("A", 1, make_segment("e0"))
    made.cut("A")
    made.stage("A", 2, make_segment("e0", start=4, ends="terminated"))
    made.commit()
    assert [each.id for each in made.index.parts("e0")] == ["e0", "e0.part3"]


def test_the_operator_closes_an_episode_whose_actor_is_gone(tmp_path, spec, make_segment):
    made = founded(tmp_path, spec)
    made.stage("A", 0, make_segment("e0"))
    made.stage("A", 1, Outcome("e0", True, judged_by="operator"))
    assert not made.episodes.find("e0").closed  # its own actor says so, and goes on
    made.hello("desk", "another outbox", "B", [])
    made.stage("B", 0, Outcome("e0", False, judged_by="operator"))
    made.commit()
    episode = made.index.episode("e0")
    assert (episode.closed, episode.truncated, episode.terminated, episode.success) == (1, 1, 0, 0)


def test_an_epoch_of_another_outbox_is_never_closed_by_a_hello(tmp_path, spec, make_segment):
    made = founded(tmp_path, spec)
    made.stage("A", 0, make_segment("e0"))
    made.hello("arm", "another disk", "B", [])
    made.stage("A", 1, make_segment("e0", start=4, ends="terminated"))
    made.commit()
    assert made.index.episode("e0").terminated


def test_the_operator_overrules_the_judge_whenever_he_speaks(tmp_path, spec, make_segment):
    made = founded(tmp_path, spec)
    made.stage("A", 0, Outcome("e0", True))  # before its episode
    made.stage("A", 1, make_segment("e0", ends="terminated"))
    made.commit()
    assert made.index.episode("e0").success == 1
    made.stage("A", 2, Outcome("e0", False, judged_by="operator"))
    made.commit()
    made.stage("A", 3, Outcome("e0", True))
    made.stage("A", 4, Outcome("e0", False, discard=True, judged_by="operator"))
    made.commit()
    episode = made.index.episode("e0")
    assert (episode.success, episode.discard, episode.judged_by) == (0, 1, "operator")
    assert len(made.index.outcomes("e0")) == 4


def test_numbers_never_go_back(tmp_path, spec):
    made = founded(tmp_path, spec)
    first = made.publish_weights("a" * 64, 10, 5)
    assert made.direct({"into": "online", "phase": "other"}) == 2
    made.close()
    opened = Store(tmp_path / "store")
    assert opened.publish_weights("b" * 64, 10, 3) == first + 1
    assert opened.direct({"into": "online", "phase": "other"}) == 2  # unchanged: the same number
    assert opened.direct({"into": None, "phase": "third"}) == 3


def test_another_spec_or_capacity_is_refused_with_both_values(tmp_path, spec):
    founded(tmp_path, spec).close()
    other = Spec(spec.observation, spec.action, fps=30.0)
    with pytest.raises(ConfigError, match=r"fps: 10\.0, 30\.0"):
        Store.create(tmp_path / "store", other, {"online": 400})
    with pytest.raises(ConfigError, match=r"'online': 400.*'online': 500"):
        Store.create(tmp_path / "store", spec, {"online": 500})


def test_a_source_may_be_added_to_a_store(tmp_path, spec, make_segment):
    made = founded(tmp_path, spec)
    made.stage("A", 0, make_segment(ends="terminated"))
    made.commit()
    made.close()
    grown = Store.create(tmp_path / "store", spec, {"demo": 50})
    assert set(grown.sources) == {"online", "demo"}
    assert grown.sources["online"].head == 4


def test_a_store_that_does_not_fit_is_refused_before_anything_is_written(tmp_path, spec):
    with pytest.raises(ConfigError, match=r"online .*, and 67.1 MB have to stay free .* free on the disk"):
        Store.create(tmp_path / "store", spec, {"online": 10**12})
    assert not (tmp_path / "store" / "index.sqlite").exists()


@pytest.mark.parametrize("left", [("index.sqlite-wal",), ("online/rows",), ("online/steps", "online/published")])
def test_a_store_without_its_index_is_refused_and_nothing_of_it_is_overwritten(tmp_path, spec, make_segment, left):
    made = founded(tmp_path, spec)
    made.stage("A", 0, make_segment(ends="terminated"))
    made.commit()
    made.close()
    folder = tmp_path / "store"
    (folder / "index.sqlite-wal").touch()
    files_ = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    for path in files_:
        if str(path.relative_to(folder)) not in left:
            path.unlink()
    for opening in (lambda: Store(folder), lambda: Store.create(folder, spec, {"online": 400})):
        with pytest.raises(ConfigError, match=r"holds .*, but no index\.sqlite, .*Nothing was changed"):
            opening()
    assert {name: (folder / name).read_bytes() for name in left} == {name: files_[folder / name] for name in left}


@pytest.mark.parametrize("missing", ["rows", "steps", "published"])
def test_a_store_without_one_of_its_files_is_refused_in_one_sentence(tmp_path, spec, missing):
    founded(tmp_path, spec).close()
    (tmp_path / "store/online" / missing).unlink()
    for opening in (Store, lambda folder: Store.create(folder, spec, {"online": 400})):
        with pytest.raises(ConfigError, match=rf"online/{missing} should have .* bytes, not None: it was damaged"):
            opening(tmp_path / "store")
    assert not (tmp_path / "store/online" / missing).exists()


def test_a_store_whose_making_was_interrupted_is_made_anew(tmp_path, spec, monkeypatch):
    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", fail)
        with pytest.raises(OSError, match="No space"):
            Store.create(tmp_path / "store", spec, {"online": 400})
    assert (tmp_path / "store/online/rows").exists()
    founded(tmp_path, spec).close()
    assert Store(tmp_path / "store").sources["online"].capacity == 400


# -- eviction


def fill(made, make_segment, episodes, session="A", seq=0, length=10):
    for _ in range(episodes):
        made.stage(session, seq, make_segment(f"{session}{seq}", seq, 0, length // 2))
        made.stage(session, seq + 1, make_segment(f"{session}{seq}", seq, length // 2, length // 2, ends="terminated"))
        seq += 2
        made.commit()
    return seq


def test_eviction_takes_whole_episodes_the_oldest_first(tmp_path, spec, make_segment):
    made = founded(tmp_path, spec, online=100)
    fill(made, make_segment, 30)
    found = contents(tmp_path)
    episodes = [episode for episode, _, _ in found]
    assert 50 <= len(found) <= 100
    assert found == [(episode, i, 2.0 * (episode - 1)) for episode in range(min(episodes), 31) for i in range(10)]


def test_what_is_not_archived_stays_however_much_room_an_eviction_would_make(tmp_path, spec, make_segment):
    """29 archived episodes may go, 35 must stay, and three open ones fill the rest: the tail stops between them."""
    made = Store.create(tmp_path / "store", spec, {"online": 1280}, ["online"])
    made.direct({"into": "online", "phase": "practise"})
    sessions = "ABC"
    for session in sessions:
        made.hello(f"arm{session}", f"outbox{session}", session, [])
    fill(made, make_segment, 29)
    made.archive(range(1, 30))
    fill(made, make_segment, 35, seq=58)
    for start in range(0, 310, 10):
        for session in sessions:
            seq = made.expected(session)
            made.stage(session, seq, make_segment(f"open{session}", start=start, steps=10))
        made.commit()
    assert (made.sources["online"].tail, made.sources["online"].head) == (290, 1570)
    with pytest.raises(Full, match="waits for its export"):
        made.stage("A", made.expected("A"), make_segment("openA", start=310))


def test_readers_know_the_new_tail_before_anything_is_overwritten(tmp_path, spec, make_segment, monkeypatch):
    made = founded(tmp_path, spec, online=100)
    write, overwritten = files.SourceFiles.write, []

    def watched(self, name, offset, slots, start, arrays):
        gone = start + sum(map(len, arrays)) - slots  # of an episode, 10 steps and 11 rows
        overwritten.append(gone if name == "steps" else -(-gone // 11) * 10)
        assert int(layout.published(tmp_path / "store/online")[0]) >= overwritten[-1]
        write(self, name, offset, slots, start, arrays)

    monkeypatch.setattr(files.SourceFiles, "write", watched)
    fill(made, make_segment, 30)
    assert max(overwritten) == 200


def test_no_row_is_torn_in_a_million_draws_while_old_episodes_are_evicted(tmp_path, spec, make_segment):
    made = founded(tmp_path, spec, online=300)
    child = os.fork()
    if child == 0:  # the writer: goes round the ring again and again
        seq = 0
        while True:
            seq = fill(made, make_segment, 1, seq=seq)
    try:
        reader = ReplayBuffer(tmp_path / "store" / "online", layout.Layout(spec, 300))
        generator, drawn = np.random.default_rng(0), 0
        into = {
            STATE: np.empty((512, 1, 8), np.float32), f"next.{STATE}": np.empty((512, 1, 8), np.float32),
            "action": np.empty((512, 1, 2), np.float32), "reward": np.empty((512, 1), np.float32),
            "length": np.empty(512, np.int64), "step_id": np.empty(512, np.int64),
            **{name: np.empty((512, 1), bool) for name in ("terminated", "truncated", "intervened", "valid")},
        }  # fmt: skip
        deadline = time.monotonic() + 120
        while (drawn < 1_000_000 or reader.head < 5000) and time.monotonic() < deadline:
            reader.refresh()
            found = reader.draw(512, SAC, generator, None)
            if found is None or not reader.gather(found, SAC, into):
                continue
            now, then, index = into[STATE][:, 0], into[f"next.{STATE}"][:, 0], into["reward"][:, 0]
            assert (now[:, ::2] == now[:, :1]).all()
            assert (now[:, 1::2] == index[:, None]).all()
            assert (then[:, ::2] == now[:, :1]).all()
            assert (then[:, 1::2] == index[:, None] + 1).all()
            assert (into["terminated"][:, 0] == (index == 9)).all()
            drawn += 512
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert drawn >= 1_000_000
    assert reader.head >= 5000, "the writer must have gone round many times"


def test_nothing_that_a_start_or_a_record_asks_of_the_index_reads_all_past_episodes(
    tmp_path, spec, make_segment, monkeypatch
):
    asked, connect = set(), sqlite3.connect

    def traced(*arguments, **options):
        database = connect(*arguments, **options)
        database.set_trace_callback(asked.add)
        return database

    founded(tmp_path, spec, online=100).close()
    monkeypatch.setattr(sqlite3, "connect", traced)
    made = Store.resume(tmp_path / "store", {"online": 100}, ["online"])
    made.hello("arm", "outbox", "A", [])
    fill(made, make_segment, 5)
    made.stage("A", 10, make_segment("open"))
    made.cut("A")
    made.stage("A", 11, make_segment("open", start=4, ends="terminated"))
    made.stage("A", 12, Outcome("open", True))
    made.archive([1, 2, 3, 4, 5])
    fill(made, make_segment, 4, seq=13)
    made.index.catalog(0, 10)
    made.close()
    questions = [sql for sql in asked if sql.startswith("SELECT") and "FROM episodes" in sql]
    assert len(questions) > 10
    with closing(connect(tmp_path / "store/index.sqlite")) as database:
        for sql in questions:
            for *_, step in database.execute(f"EXPLAIN QUERY PLAN {sql}"):
                assert not step.startswith("SCAN episodes") or "episodes_open" in step, (sql, step)


# -- crashes


def records(make_segment, episodes):
    made = []
    for i in range(episodes):
        made.append(make_segment(f"e{i}", i, 0, 6))
        made.append(make_segment(f"e{i}", i, 6, 6, ends="terminated"))
        made.append(Outcome(f"e{i}", i % 2 == 0))
    return made


def run_and_die(folder, produced, killer, pipe):
    """The server's part in a child: goes on from the watermark, acknowledges through the pipe, dies by the killer."""
    for name in ("pwritev", "fdatasync"):
        setattr(os, name, killer.wrap(getattr(os, name)))
    index.Index.commit = killer.wrap(index.Index.commit)
    index.Index.put_episodes = killer.wrap(index.Index.put_episodes)
    files.SourceFiles.publish = killer.wrap(files.SourceFiles.publish)
    made = Store(folder / "store")
    begin = made.expected("A")
    for seq in range(begin, len(produced)):
        made.stage("A", seq, produced[seq])
        if seq % 2:
            made.commit()
            os.write(pipe, f"{made.expected('A')}\n".encode())
    made.commit()
    os.write(pipe, f"{made.expected('A')}\n".encode())


def test_kill_at_every_write_sync_commit_and_publish_loses_and_doubles_nothing(tmp_path, spec, make_segment, killer_at):
    """Each child dies one call later than the one before, some while old episodes are evicted."""
    founded(tmp_path, spec, online=60).close()
    produced, at, lives, acknowledged = records(make_segment, 14), 1, 0, 0
    while acknowledged < len(produced):
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            run_and_die(tmp_path, produced, killer_at(at), writing)
            os._exit(0)
        os.close(writing)
        _, status = os.waitpid(child, 0)
        with os.fdopen(reading) as told_by_child:
            told = [int(line) for line in told_by_child.read().split()]
        acknowledged = max([acknowledged, *told])
        check_prefix(tmp_path, acknowledged, produced)
        lives, at = lives + 1, at % 24 + 1
    assert lives > 20
    assert os.waitstatus_to_exitcode(status) in (0, -signal.SIGKILL)


def check_prefix(folder, acknowledged, produced):
    """The store holds a prefix of what was produced, not less than what was acknowledged, minus what was evicted."""
    opened = Store(folder / "store")
    durable = opened.expected("A")
    assert durable >= acknowledged
    steps = [(seq // 3, i) for seq in range(durable) if seq % 3 < 2 for i in range(6 * (seq % 3), 6 * (seq % 3) + 6)]
    outcomes = sum(seq % 3 == 2 for seq in range(durable))
    assert sum(len(opened.index.outcomes(f"e{i}")) for i in range(len(produced))) == outcomes
    tail = opened.sources["online"].tail
    assert opened.sources["online"].head == len(steps)
    opened.close()
    assert [(int(key), i) for _, i, key in contents(folder)] == steps[tail:]


def test_whatever_ends_a_commit_counts_as_a_failure_of_the_disk(tmp_path, spec, make_segment, monkeypatch):
    """A caller that went on would write what was staged a second time."""
    made = founded(tmp_path, spec)
    made.stage("A", 0, make_segment("e0"))

    def fail(*_):
        raise MemoryError

    monkeypatch.setattr(os, "fdatasync", fail)
    with pytest.raises(OSError, match="could not be written: MemoryError"):
        made.hello("arm", "box", "C", [])
    made.close()


@pytest.mark.parametrize("call", ["pwritev", "fdatasync"])
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
def test_after_a_failed_write_or_sync_nothing_unacknowledged_is_there(
    tmp_path, spec, make_segment, monkeypatch, call, error
):
    made = founded(tmp_path, spec)
    made.stage("A", 0, make_segment("e0"))
    made.commit()
    made.stage("A", 1, make_segment("e0", start=4))

    def fail(*_):
        raise OSError(error, os.strerror(error))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(OSError, match=os.strerror(error)):
            made.commit()
    made.close()
    opened = Store(tmp_path / "store")
    assert opened.expected("A") == 1
    assert opened.stage("A", 1, make_segment("e0", start=4, ends="terminated"))
    opened.commit()
    assert [i for _, i, _ in contents(tmp_path)] == list(range(8))


def test_probing_writes_the_log_into_the_database_anew(tmp_path, spec, make_segment):
    """A commit whose sync failed may be found again in the log: before it counts, it is written and synced again."""
    made = founded(tmp_path, spec)
    made.stage("A", 0, make_segment("e0", ends="terminated"))
    made.commit()
    log = tmp_path / "store" / "index.sqlite-wal"
    assert log.stat().st_size > 0
    made.probe()
    assert log.stat().st_size == 0
    made.close()
    assert len(contents(tmp_path)) == 4


def test_a_page_of_the_index_that_is_damaged_is_found_before_anything_relies_on_it(tmp_path, spec, make_segment):
    made = founded(tmp_path, spec)
    fill(made, make_segment, 3)
    made.close()
    path = tmp_path / "store/index.sqlite"
    with closing(sqlite3.connect(path)) as database:
        (page,) = database.execute("SELECT rootpage FROM sqlite_master WHERE name = 'episodes_by_first'").fetchone()
        (size,) = database.execute("PRAGMA page_size").fetchone()
    with path.open("r+b") as file:
        file.seek((page - 1) * size + 8)  # where its cells are said to begin
        file.write(b"\xff" * 8)
    with pytest.raises(ConfigError, match=r"index\.sqlite is damaged"):
        Store(tmp_path / "store")


def test_an_episode_that_nobody_ends_is_cut_and_pushes_out_no_more_than_its_own_steps(
    tmp_path, spec, make_segment, caplog
):
    made = founded(tmp_path, spec, online=400)
    made.hello("other", "box", "B", [])
    fill(made, make_segment, 30, session="B")
    for seq in range(20):
        made.stage("A", seq, make_segment("long", 0, 10 * seq, 10))
        made.commit()
    assert "long goes on as another episode from step 100 on: one takes at most 100 steps" in caplog.text
    held = rows_of(tmp_path)
    parts = made.index.parts("long")
    assert [(each.id, each.part_start, each.steps) for each in parts] == [("long", 0, 100), ("long.part2", 100, 100)]
    assert [held[each.number] for each in parts] == [[(i, k + i) for i in range(100)] for k in (0, 100)]
    assert sum(map(len, held.values())) >= 390
    assert len(held) >= 20, "18 episodes of another actor stay beside it"


def test_an_open_episode_that_is_archived_later_is_cut_rather_than_waited_for_or_lost(tmp_path, spec, make_segment):
    made = Store.create(tmp_path / "store", spec, {"online": 400}, ["online"])
    made.direct({"into": "online", "phase": "practise"})
    made.hello("dead", "outbox", "A", [])
    made.hello("alive", "box", "B", [])
    made.stage("A", 0, make_segment("open"))
    seq, waited = 0, 0
    for number in range(100):
        for half, ends in ((0, ""), (5, "terminated")):
            segment = make_segment(f"b{number}", number, half, 5, ends=ends)
            while True:
                try:
                    made.stage("B", seq, segment)
                    break
                except Full:
                    made.commit()
                    waited += 1
                    rows = made.index.catalog(0, 1000)[1]
                    made.archive(row[0] for row in rows if row[m.EPISODE.index("closed")])
            seq += 1
    assert waited > 1
    made.stage("A", 1, make_segment("open", start=4, ends="terminated"))
    made.commit()
    assert [(each.id, each.steps, each.closed) for each in made.index.parts("open")] == [
        ("open", 4, 1), ("open.part2", 4, 1)
    ]  # fmt: skip
    assert made.sources["online"].tail > 4


def test_a_commit_of_the_index_that_fails_undoes_the_whole_group(tmp_path, spec, make_segment, monkeypatch):
    made = founded(tmp_path, spec)
    made.stage("A", 0, make_segment("e0", ends="terminated"))
    made.stage("A", 1, Outcome("e0", True))

    def fail(*_):
        raise sqlite3.OperationalError("database or disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(made.index, "commit", fail)
        with pytest.raises(sqlite3.OperationalError):
            made.commit()
    made.close()
    opened = Store(tmp_path / "store")
    assert (opened.expected("A"), opened.index.outcomes("e0"), contents(tmp_path)) == (0, [], [])


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.sampled_from(["A", "B", "commit", "reopen", "repeat"]), min_size=5, max_size=60))
def test_any_interleaving_of_actors_groups_repeats_and_restarts_keeps_each_actors_order(
    tmp_path_factory, spec, make_segment, operations
):
    folder = tmp_path_factory.mktemp("any")
    made = founded(folder, spec)
    made.hello("arm2", "outbox2", "B", [])
    made.commit()
    produced = {name: records(make_segment, 25) for name in "AB"}
    for name in "AB":  # ids and keys of their own
        produced[name] = [record_of(name, record) for record in produced[name]]
    for operation in [*operations, "commit"]:
        if operation in produced:
            seq = made.expected(operation)
            made.stage(operation, seq, produced[operation][seq])
        elif operation == "commit":
            made.commit()
        elif operation == "reopen":
            made.close()
            made = Store(folder / "store")
        elif made.expected("A"):
            assert not made.stage("A", made.expected("A") - 1, produced["A"][0])
    durable = {name: made.expected(name) for name in "AB"}
    made.close()
    found = contents(folder)
    for name in "AB":
        steps = [
            (record.observation[STATE][0, 0], i)
            for record in produced[name][: durable[name]] if not isinstance(record, Outcome)
            for i in range(record.start, record.start + len(record))
        ]  # fmt: skip
        assert [(key, i) for _, i, key in found if (key >= 100) == (name == "B")] == steps


def record_of(name, record):
    if isinstance(record, Outcome):
        return Outcome(name + record.episode, record.success)
    record.observation[STATE][:, ::2] += 100 * (name == "B")
    object.__setattr__(record, "episode", name + record.episode)
    return record
