"""The outbox: what was taken is there after a kill, what was acknowledged is gone; and the queue before it."""

import itertools
import os
import resource
import shutil
import subprocess
import sys
from contextlib import contextmanager

import numpy as np
import pytest
from serl_client import messages as m
from serl_client import outbox as module
from serl_client import wire
from serl_client.episode import Outcome
from serl_client.errors import ConfigError, Refused, TrainerError
from serl_client.send_queue import SendQueue

MIB = 1 << 20
SESSION = "e" * 32


def record(seq, size=100):
    return wire.encode_record(seq, {"seq": seq, "fill": "x" * size}, {})


SIZE = sum(map(len, record(0)))


def fill(outbox, count, *, session=SESSION, size=100, start=0):
    for seq in range(start, start + count):
        assert outbox.append(session, seq, record(seq, size))


def content(outbox, session=SESSION):
    """All unacknowledged seqs of a session, as a reader of slices finds them."""
    seqs, (seq, end) = [], outbox.sessions.get(session, (0, 0))
    while seq < end:
        seq, data = outbox.read(session, seq, MIB)
        seqs += [number for number, _, _ in wire.decode_records(*data)]
    return seqs


def length(data):
    return sum(map(len, data))


@contextmanager
def limited(size):
    """No file of this process may become larger: a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_slice_of_whole_records_keeps_to_its_limit_and_one_large_record_goes_alone(opened, monkeypatch):
    monkeypatch.setattr(module, "SLICE_BYTES", 1000)
    outbox = opened()
    fill(outbox, 1, size=5000)
    fill(outbox, 3, start=1)
    assert outbox.read(SESSION, 0, 2000) == (0, [])
    after, data = outbox.read(SESSION, 0, MIB)
    assert (after, length(data) > 5000) == (1, True)
    assert outbox.read(SESSION, 1, 2 * SIZE)[0] == 3
    fill(outbox, 50, start=4)
    assert content(outbox) == list(range(54))
    after, data = outbox.read(SESSION, 7, MIB)
    assert length(data) <= 1000
    assert [seq for seq, _, _ in wire.decode_records(*data)] == list(range(7, after))


def test_files_are_rotated_and_unlinked_with_their_last_acknowledged_record(opened, monkeypatch):
    monkeypatch.setattr(module, "FILE_BYTES", 1000)
    outbox = opened()
    fill(outbox, 40)
    files = sorted(outbox.folder.glob("*.records"))
    assert len(files) > 4
    second = int(files[1].stem.split("-")[2])
    outbox.acknowledge(SESSION, second - 1)
    assert sorted(outbox.folder.glob("*.records")) == files
    outbox.acknowledge(SESSION, second)
    assert sorted(outbox.folder.glob("*.records")) == files[1:]
    assert outbox.sessions == {SESSION: (second, 40)}
    assert content(outbox) == list(range(second, 40))
    outbox.acknowledge(SESSION, 40)
    assert list(outbox.folder.glob("*.records")) == []
    assert (outbox.sessions, outbox.pending) == ({}, (0, 0))
    fill(outbox, 3, start=40)
    assert content(outbox) == [40, 41, 42]


def test_a_file_that_is_written_again_holds_nothing_of_what_it_held(opened, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "FILE_BYTES", 1000)
    outbox = opened()
    for begin in range(0, 60, 20):  # records of one size: each begins where an old one began
        fill(outbox, 20, start=begin)
        outbox.acknowledge(SESSION, begin + 19)
    fill(outbox, 1, start=60)
    spares = sorted(outbox.folder.glob("*.spare"))
    assert 0 < len(spares) <= module.SPARE_FILES
    assert content(outbox) == [59, 60]
    shutil.copytree(outbox.folder, tmp_path / "killed")
    newest = sorted(outbox.folder.glob("*.records"))[-1]
    assert newest.stat().st_size > 2 * SIZE
    killed = opened(tmp_path / "killed")
    assert content(killed)[-2:] == [59, 60]
    assert list(killed.folder.glob("*.spare")) == []
    fill(outbox, 20, session="f" * 32)  # no record of another session could be told from an old one
    assert list(outbox.folder.glob("*.spare")) == []


def test_pending_counts_records_and_bytes_that_are_not_acknowledged(opened):
    outbox = opened()
    fill(outbox, 10)
    assert outbox.pending == (10, 10 * SIZE)
    for expected in (4, 3):  # late, and out of order
        outbox.acknowledge(SESSION, expected)
        assert outbox.pending == (6, 6 * SIZE)


def test_a_write_that_was_torn_at_any_byte_is_dropped_and_nothing_else(opened, tmp_path):
    outbox = opened()
    fill(outbox, 3, size=10)
    (path,) = outbox.folder.glob("*.records")
    data = path.read_bytes()
    ends = [sum(len(part) for seq in range(n) for part in record(seq, 10)) for n in range(4)]
    assert len(data) == ends[3]
    torn = tmp_path / "torn"
    torn.mkdir()
    for length in range(len(data) + 1):
        (torn / path.name).write_bytes(data[:length])
        again = opened(torn)
        assert content(again) == list(range(sum(end <= length for end in ends) - 1)), length
        again.close()


def test_a_number_that_does_not_follow_is_no_record_of_this_session(opened):
    outbox = opened()
    fill(outbox, 2)
    (path,) = outbox.folder.glob("*.records")
    path.write_bytes(path.read_bytes() + b"".join(bytes(part) for part in record(3)))
    outbox.close()
    assert content(opened()) == [0, 1]


def test_sessions_are_found_again_in_the_order_in_which_they_were_written(opened):
    ids = set()
    for letter, count in (("f", 4), ("a", 2), ("c", 1)):
        third = opened()
        fill(third, count, session=letter * 32)
        ids.add(third.id)
        third.close() if letter != "c" else None
    assert list(third.sessions.items()) == [("f" * 32, (0, 4)), ("a" * 32, (0, 2)), ("c" * 32, (0, 1))]
    assert len(ids) == 1
    third.acknowledge("f" * 32, 4)
    assert list(third.sessions) == ["a" * 32, "c" * 32]


def test_a_full_outbox_takes_nothing_until_something_is_acknowledged(opened):
    outbox = opened(capacity=5000)
    count = next(seq for seq in itertools.count() if not outbox.append(SESSION, seq, record(seq)))
    assert 5 < count < 50
    assert "full" in outbox.fault
    assert content(outbox) == list(range(count))
    outbox.acknowledge(SESSION, count)
    fill(outbox, 1, start=count)
    assert outbox.fault == ""


def test_a_full_disk_leaves_no_torn_record_and_the_next_one_follows(opened):
    outbox = opened()
    with limited(2000):
        count = next(seq for seq in itertools.count() if not outbox.append(SESSION, seq, record(seq)))
        assert not outbox.append(SESSION, count, record(count))
    assert 0 < count < 20
    assert "cannot be written" in outbox.fault
    assert content(outbox) == list(range(count))
    fill(outbox, 3, start=count)
    outbox.close()
    assert content(opened()) == list(range(count + 3))


@pytest.mark.parametrize("written", [50, None], ids=["in part", "as a whole"])
def test_a_disk_that_cannot_even_truncate_gets_a_new_file(opened, monkeypatch, written):
    outbox = opened()
    fill(outbox, 2)

    def half_written(descriptor, parts, offset):
        os.pwrite(descriptor, b"".join(bytes(part) for part in parts)[:written], offset)
        raise OSError(5, "Input/output error")

    def fail(*_):
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as broken:
        broken.setattr(module.os, "pwritev", half_written)
        broken.setattr(module.os, "ftruncate", fail)
        assert not outbox.append(SESSION, 2, record(2))
        assert not outbox.append(SESSION, 2, record(2))
    fill(outbox, 3, start=2)
    assert content(outbox) == list(range(5))
    outbox.close()
    again = opened()
    assert content(again) == list(range(5))
    assert again.pending == (5, 5 * SIZE), "none counts twice"


def test_a_failing_read_is_an_error_and_not_the_end_of_the_process(opened, monkeypatch):
    monkeypatch.setattr("serl_client.recent.KEPT_BYTES", 0)
    outbox = opened()
    fill(outbox, 3)
    (path,) = outbox.folder.glob("*.records")
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(OSError, match="shorter"):
        outbox.read(SESSION, 0, MIB)


def test_a_large_record_is_read_from_memory_once_and_from_the_file_again(opened, monkeypatch):
    monkeypatch.setattr("serl_client.recent.LEAST_BYTES", SIZE)
    outbox = opened()
    fill(outbox, 4)
    (path,) = outbox.folder.glob("*.records")
    whole = path.read_bytes()
    path.write_bytes(b"")
    assert outbox.read(SESSION, 0, 2 * SIZE)[0] == 2
    assert outbox.read(SESSION, 2, MIB)[0] == 4
    with pytest.raises(OSError, match="shorter"):
        outbox.read(SESSION, 2, MIB)
    path.write_bytes(whole)
    assert content(outbox) == [0, 1, 2, 3]


def test_memory_holds_no_more_than_its_limit_and_the_file_has_the_rest(opened, monkeypatch):
    monkeypatch.setattr(module, "FILE_BYTES", 1)
    monkeypatch.setattr("serl_client.recent.KEPT_BYTES", 2 * SIZE)
    monkeypatch.setattr("serl_client.recent.LEAST_BYTES", SIZE)
    outbox = opened()
    fill(outbox, 3)
    fill(outbox, 1, start=3, size=5000)
    assert list(outbox._recent._records) == [0, 1]
    assert content(outbox) == [0, 1, 2, 3]
    fill(outbox, 2, start=4)
    assert list(outbox._recent._records) == [4, 5]
    outbox.acknowledge(SESSION, 5)  # the server had it before
    fill(outbox, 1, start=6)
    assert content(outbox) == [5, 6]
    fill(outbox, 2, start=7)
    assert list(outbox._recent._records) == [7, 8]
    fill(outbox, 1, start=9, size=99)
    assert list(outbox._recent._records) == [7, 8], "what is small is not worth it"
    fill(outbox, 9, session="f" * 32)
    assert list(outbox._recent._records) == [0, 1]
    assert (content(outbox), content(outbox, "f" * 32)) == ([5, 6, 7, 8, 9], list(range(9)))


def test_large_arrays_are_sent_as_they_lie_in_memory(opened):
    outbox, image = opened(), np.zeros(wire.COPY_BELOW, np.uint8)
    assert outbox.append(SESSION, 0, wire.encode_record(0, {}, {"a": image, "b": np.ones(3, np.uint8), "c": image}))
    _, data = outbox.read(SESSION, 0, MIB)
    assert [np.shares_memory(np.frombuffer(part, np.uint8), image) for part in data] == [False, True, False, True]


def test_a_second_process_is_refused_and_told_who_has_the_folder(opened):
    outbox = opened()
    code = f"from pathlib import Path; from serl_client.outbox import Outbox; Outbox(Path({str(outbox.folder)!r}), 1)"
    second = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert second.returncode == 1
    assert f"in use by process {os.getpid()}" in second.stderr
    assert ConfigError.__name__ in second.stderr
    outbox.close()
    opened().append(SESSION, 0, record(0))


def test_records_stay_bound_to_their_run_and_are_sent_on_a_full_disk_and_an_empty_outbox_is_free(opened):
    outbox = opened()
    assert outbox.run == ""
    outbox.bind("run")
    fill(outbox, 3)
    outbox.close()
    with limited(0):
        again = opened()
        assert (again.run, again.id) == ("run", outbox.id)
        assert content(again) == [0, 1, 2]
        assert not again.append("f" * 32, 0, record(0))
        again.acknowledge(SESSION, 3)
        assert list(again.folder.glob(f"*{SESSION}*")) == []
    again.close()
    assert opened().run == ""


# -- the queue before it

SESSIONS = [["before", 0], ["now", 0]]


@pytest.fixture
def queue(opened, spec):
    """Sends the session "now", and has its first three outcomes; of "before" its outbox holds five."""
    for session, count in (("before", 5), ("now", 3)):
        outbox = opened()
        made = SendQueue(outbox, session, spec)
        put(made, count)
        if session == "before":
            outbox.close()
    made.resume(SESSIONS, MIB)
    return made


def put(queue, count):
    for number in range(count):
        queue.put(Outcome(f"e{number}", True))
        queue.move_to_outbox()


def sent(queue):
    """[(session, seq), ...] of what is sent now."""
    pushes = list(queue.pushes())
    return [(push.session, seq) for push in pushes for seq, _ in m.records(*push.parts)]


def test_an_acknowledgement_that_overtakes_a_second_sending_is_taken(queue):
    assert sent(queue) == [("before", seq) for seq in range(5)]
    queue.acknowledge(m.Ack("before", 1, resend=True))
    queue.acknowledge(m.Ack("before", 2))  # to the first sending
    assert sent(queue) == [("before", seq) for seq in (2, 3, 4)]
    queue.acknowledge(m.Ack("before", 4))
    assert sent(queue) == []


def test_an_acknowledgement_of_an_earlier_session_moves_nothing_of_the_current_one(queue):
    assert len(sent(queue)) == 5
    queue.acknowledge(m.Ack("before", 5))
    assert sent(queue) == [("now", seq) for seq in range(3)]
    queue.acknowledge(m.Ack("before", 5))  # the answer to a second sending
    put(queue, 4)
    assert sent(queue) == [("now", seq) for seq in range(3, 7)]
    queue.acknowledge(m.Ack("before", 5, resend=True))
    assert sent(queue) == []


def test_no_more_than_the_window_is_on_its_way_and_a_record_larger_than_it_goes_alone(queue):
    records, size = queue.pending
    for window, now in ((1, [0]), (2.5 * size / records, [0, 1])):
        queue.resume(SESSIONS, int(window))
        assert sent(queue) == [("before", seq) for seq in now]
        assert sent(queue) == []
    queue.acknowledge(m.Ack("before", 2))
    assert sent(queue) == [("before", 2), ("before", 3)]


@pytest.mark.parametrize("left", [1, 0])
def test_a_learner_that_has_lost_what_it_acknowledged_is_not_sent_the_rest(queue, monkeypatch, left):
    monkeypatch.setattr(module, "FILE_BYTES", 1)
    put(queue, 2)
    queue.acknowledge(m.Ack("before", 5))
    queue.acknowledge(m.Ack("now", 5 - left))
    with pytest.raises(Refused, match=r"lost data\. Start it with a newer copy .*; nothing was deleted"):
        queue.resume(SESSIONS, MIB)
    assert queue.pending[0] == left


def test_a_full_queue_shows_as_no_room_and_what_ends_the_episode_is_still_taken(opened, spec, make_segment):
    """hi-ors E8: a queue of 100 lost 900 of 1000 transitions without a word."""
    queue = SendQueue(opened(capacity=1000), "now", spec)

    def put_on():
        for start in itertools.count(step=4):
            queue.put(make_segment(start=start))

    with pytest.raises(TrainerError, match=r"queue .* full: the disk is too slow"):
        put_on()
    assert not queue.has_room
    queue.put(make_segment(ends="truncated"))
    queue.put(Outcome("e0", None, discard=True))
    queue.move_to_outbox()
    with pytest.raises(TrainerError, match=r"queue .* full: the outbox"):
        put_on()
    assert queue.pending[0] > 4


@pytest.mark.parametrize("outcome", [Outcome("e0", np.True_), Outcome("e0", None, np.False_), Outcome("e0", 1)])
def test_an_outcome_of_another_kind_of_bool_is_refused_where_it_is_pushed(queue, outcome):
    with pytest.raises(TypeError, match="bool"):
        queue.put(outcome)
    assert queue.pending[0] == 8
