"""The outbox: what was taken is there after a kill, and what was acknowledged is gone."""

import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest
from serl_client import Outcome, messages, wire
from serl_client import outbox as module
from serl_client.episode import LostRecord
from serl_client.errors import ConfigError
from serl_client.outbox import Outbox

MIB = 1 << 20
EPOCH = "e" * 32


def record(seq, size=100):
    return wire.encode_record(seq, {"seq": seq, "fill": "x" * size}, {})


def fill(outbox, count, *, session=EPOCH, size=100, start=0):
    for seq in range(start, start + count):
        assert outbox.append(session, seq, record(seq, size))


def content(outbox, session=EPOCH):
    """All unacknowledged seqs of a session, as a reader of slices finds them."""
    seqs, (seq, end) = [], outbox.sessions.get(session, (0, 0))
    while seq < end:
        seq, data = outbox.read(session, seq, MIB)
        seqs += [number for number, _, _ in wire.decode_records(data)]
    return seqs


@pytest.fixture
def opened(tmp_path):
    """Opens outboxes, and closes them at the end."""
    outboxes = []

    def open_outbox(folder=tmp_path / "outbox", capacity=MIB):
        outboxes.append(Outbox(folder, capacity))
        return outboxes[-1]

    yield open_outbox
    for outbox in outboxes:
        outbox.close()


def test_records_are_read_in_order_in_slices_of_whole_ones(opened, monkeypatch):
    monkeypatch.setattr(module, "SLICE_BYTES", 1000)
    outbox = opened()
    fill(outbox, 50)
    assert content(outbox) == list(range(50))
    after, data = outbox.read(EPOCH, 7, MIB)
    assert len(data) <= 1000
    assert [seq for seq, _, _ in wire.decode_records(data)] == list(range(7, after))


def test_a_slice_keeps_to_its_limit_and_one_large_record_goes_alone(opened, monkeypatch):
    monkeypatch.setattr(module, "SLICE_BYTES", 1000)
    outbox = opened()
    fill(outbox, 1, size=5000)
    fill(outbox, 3, start=1)
    assert outbox.read(EPOCH, 0, 2000) == (0, b"")
    after, data = outbox.read(EPOCH, 0, MIB)
    assert (after, len(data) > 5000) == (1, True)
    assert outbox.read(EPOCH, 1, 2 * sum(len(part) for part in record(1)))[0] == 3


def test_files_are_rotated_and_unlinked_with_their_last_acknowledged_record(opened, monkeypatch):
    monkeypatch.setattr(module, "FILE_BYTES", 1000)
    outbox = opened()
    fill(outbox, 40)
    files = sorted(outbox.folder.glob("*.records"))
    assert len(files) > 4
    second = int(files[1].stem.split("-")[2])
    outbox.acknowledge(EPOCH, second - 1)
    assert sorted(outbox.folder.glob("*.records")) == files
    outbox.acknowledge(EPOCH, second)
    assert sorted(outbox.folder.glob("*.records")) == files[1:]
    assert outbox.sessions == {EPOCH: (second, 40)}
    assert content(outbox) == list(range(second, 40))
    outbox.acknowledge(EPOCH, 40)
    assert list(outbox.folder.glob("*.records")) == []
    assert (outbox.sessions, outbox.pending) == ({}, (0, 0))
    fill(outbox, 3, start=40)
    assert content(outbox) == [40, 41, 42]


def test_a_file_that_is_written_again_holds_nothing_of_what_it_held(opened, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "FILE_BYTES", 1000)
    outbox = opened()
    for begin in range(0, 60, 20):  # records of one size: each begins where an old one began
        fill(outbox, 20, start=begin)
        outbox.acknowledge(EPOCH, begin + 19)
    fill(outbox, 1, start=60)
    spares = sorted(outbox.folder.glob("*.spare"))
    assert 0 < len(spares) <= module.SPARE_FILES
    assert content(outbox) == [59, 60]
    shutil.copytree(outbox.folder, tmp_path / "killed")
    newest = sorted(outbox.folder.glob("*.records"))[-1]
    assert newest.stat().st_size > 2 * sum(len(part) for part in record(60))
    killed = opened(tmp_path / "killed")
    assert content(killed)[-2:] == [59, 60]
    assert list(killed.folder.glob("*.spare")) == []
    fill(outbox, 20, session="f" * 32)  # no record of another session could be told from an old one
    assert list(outbox.folder.glob("*.spare")) == []


def test_pending_counts_records_and_bytes_that_are_not_acknowledged(opened):
    outbox = opened()
    fill(outbox, 10)
    size = sum(len(part) for part in record(0))
    assert outbox.pending == (10, 10 * size)
    outbox.acknowledge(EPOCH, 4)
    assert outbox.pending == (6, 6 * size)
    outbox.acknowledge(EPOCH, 3)  # late, and out of order
    assert outbox.pending == (6, 6 * size)


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
        whole = sum(end <= length for end in ends) - 1
        again = Outbox(torn, MIB)
        assert content(again) == list(range(whole)), length
        again.close()


def episode(make_segment, name, ends="terminated"):
    """Three segments, and the outcome before the last one."""
    return [
        make_segment(name, 1, 0, 2), make_segment(name, 1, 2, 2), Outcome(name, True),
        make_segment(name, 1, 4, 2, ends=ends),
    ]  # fmt: skip


def move_to_outbox(outbox, records, start=0):
    for seq, record in enumerate(records, start):
        assert outbox.append(EPOCH, seq, messages.encode_record(seq, record))


def damage(outbox, seq, byte=-1):
    """Flip a bit of one record on the disk."""
    file = next(file for file in outbox._files if file.first <= seq < file.end)
    at = (file.size_below(seq) if byte >= 0 else file.ends[seq - file.first]) + byte
    data = bytearray(file.path.read_bytes())
    data[at] ^= 4
    file.path.write_bytes(data)


def sent(outbox, session=EPOCH):
    """{seq: record} of what is sent of a session: "lost" where a record is."""
    found, (seq, end) = {}, outbox.sessions.get(session, (0, 0))
    while seq < end:
        seq, data = outbox.read(session, seq, MIB)
        found |= {
            number: "lost" if isinstance(each, LostRecord) else each for number, each in messages.decode_records(data)
        }
    return found


def lost(outbox):
    return [seq for seq, record in sent(outbox).items() if record == "lost"]


@pytest.mark.parametrize("byte", [0, 6, 9, 17, 25, 40, -1])
def test_in_place_of_a_damaged_record_it_is_said_that_it_is_lost_and_the_rest_is_sent(
    opened, make_segment, monkeypatch, byte
):
    monkeypatch.setattr(module, "FILE_BYTES", 500)
    outbox = opened()
    move_to_outbox(outbox, [record for name in "abc" for record in episode(make_segment, name)])
    damage(outbox, 4, byte)  # the first of episode b
    outbox.close()
    files = {path.name: path.read_bytes() for path in outbox.folder.glob("*.records")}
    assert len(files) > 3
    for _ in range(2):
        again = opened()
        assert list(sent(again)) == list(range(12))
        assert lost(again) == [4, 5, 7]  # its outcome goes
        again.close()
    assert {path.name: path.read_bytes() for path in outbox.folder.glob("*.records")} == files
    again = opened()
    for seq in range(13):  # whenever it is killed: what was lost stays lost
        again.acknowledge(EPOCH, seq)
        again.close()
        again = opened()
        assert lost(again) == [seq for seq in (4, 5, 7) if seq in sent(again)]
    again.acknowledge(EPOCH, 12)
    kept = sorted(outbox.folder.glob("*.damaged"))
    assert kept
    assert all(files[f"{path.stem}.records"] == path.read_bytes() for path in kept)
    assert list(outbox.folder.glob("*.records")) == []


def test_a_record_that_is_damaged_after_it_was_written_is_found_when_the_learner_refuses_it(
    opened, make_segment, monkeypatch
):
    monkeypatch.setattr(module, "FILE_BYTES", 1000)
    outbox = opened()
    move_to_outbox(outbox, episode(make_segment, "a") + episode(make_segment, "b")[:2])
    damage(outbox, 5)
    with pytest.raises(wire.MessageError, match="damaged"):
        sent(outbox)
    outbox.recheck(EPOCH, 6)
    assert lost(outbox) == [5]
    move_to_outbox(outbox, episode(make_segment, "b")[2:] + episode(make_segment, "c"), start=6)  # b was not over
    assert lost(outbox) == [5, 7]
    outbox.acknowledge(EPOCH, 8)
    assert list(sent(outbox)) == [8, 9, 10, 11]
    outbox.acknowledge(EPOCH, 12)
    assert outbox.pending == (0, 0)
    assert list(outbox.folder.glob("*.records")) == []
    assert list(outbox.folder.glob("*.damaged"))


def test_each_time_the_learner_refuses_what_came_it_is_looked_at_again(opened, make_segment):
    outbox = opened()
    move_to_outbox(outbox, [record for name in "abcd" for record in episode(make_segment, name)])
    damage(outbox, 5)
    outbox.recheck(EPOCH, 16)
    assert lost(outbox) == [5, 7]
    damage(outbox, 12)
    outbox.recheck(EPOCH, 16)
    assert lost(outbox) == [5, 7, 12, 13, 15]
    outbox.acknowledge(EPOCH, 6)
    outbox.recheck(EPOCH, 16)
    assert lost(outbox) == [7, 12, 13, 15]
    outbox.acknowledge(EPOCH, 14)
    outbox.recheck(EPOCH, 16)
    move_to_outbox(outbox, episode(make_segment, "e"), start=16)
    assert lost(outbox) == [15]


def test_a_file_that_holds_a_lost_record_stays_until_its_episode_is_over(opened, make_segment, monkeypatch):
    monkeypatch.setattr(module, "FILE_BYTES", 1)
    outbox = opened()
    move_to_outbox(outbox, episode(make_segment, "a")[:2])
    damage(outbox, 0)
    outbox.recheck(EPOCH, 2)
    assert lost(outbox) == [0, 1]
    outbox.acknowledge(EPOCH, 2)
    assert outbox.sessions == {EPOCH: (2, 2)}
    move_to_outbox(outbox, episode(make_segment, "a")[2:], start=2)
    outbox.close()
    again = opened()  # it was killed: only the file on the disk tells that the rest of the episode has no beginning
    assert lost(again) == [0, 1, 3]
    again.acknowledge(EPOCH, 2)
    assert {seq: record == "lost" for seq, record in sent(again).items()} == {2: False, 3: True}
    again.acknowledge(EPOCH, 4)
    assert (again.sessions, len(list(outbox.folder.glob("*.damaged")))) == ({}, 3)


def test_a_file_that_is_missing_is_lost_and_the_rest_is_sent(opened, make_segment, monkeypatch):
    monkeypatch.setattr(module, "FILE_BYTES", 1)
    outbox = opened()
    move_to_outbox(outbox, episode(make_segment, "a") + episode(make_segment, "b"))
    outbox.close()
    sorted(outbox.folder.glob("*.records"))[1].unlink()
    assert lost(opened()) == [1, 3]


@pytest.mark.parametrize("stays", ["rename", "unlink"])
def test_a_file_that_cannot_be_removed_keeps_those_after_it_so_that_no_hole_is_taken_for_a_loss(
    opened, make_segment, monkeypatch, stays
):
    monkeypatch.setattr(module, "FILE_BYTES", 1)
    outbox = opened()
    move_to_outbox(outbox, episode(make_segment, "a"))
    first, *_ = files = sorted(outbox.folder.glob("*.records"))

    def fails(change):
        def changed(path, *arguments):
            if path == first and (stays == "unlink" or change is Path.rename):
                raise OSError(28, "No space left on device")
            return change(path, *arguments)

        return changed

    with monkeypatch.context() as full:
        for change in (Path.rename, Path.unlink):
            full.setattr(Path, change.__name__, fails(change))
        outbox.acknowledge(EPOCH, 1)
        outbox.acknowledge(EPOCH, 2)
    left = files if stays == "unlink" else files[2:]
    assert sorted(outbox.folder.glob("*.records")) == left
    assert outbox.pending[0] == 2
    outbox.close()
    again = opened()
    again.acknowledge(EPOCH, 2)
    assert (lost(again), sorted(outbox.folder.glob("*.records"))) == ([], files[2:])


def test_an_empty_file_in_place_of_one_that_cannot_be_read_is_lost_and_the_rest_is_sent(
    opened, make_segment, monkeypatch
):
    monkeypatch.setattr(module, "FILE_BYTES", 1)
    outbox = opened()
    move_to_outbox(outbox, episode(make_segment, "a") + episode(make_segment, "b"))
    outbox.close()
    first = sorted(outbox.folder.glob("*.records"))[0]
    first.write_bytes(b"")
    assert lost(opened()) == [0, 1, 3]


def test_a_number_that_does_not_follow_is_no_record_of_this_epoch(opened):
    outbox = opened()
    fill(outbox, 2)
    (path,) = outbox.folder.glob("*.records")
    path.write_bytes(path.read_bytes() + b"".join(bytes(part) for part in record(3)))
    outbox.close()
    assert content(opened()) == [0, 1]


def test_epochs_are_found_again_in_the_order_in_which_they_were_written(opened):
    first = opened()
    fill(first, 4, session="f" * 32)
    first.close()
    second = opened()
    fill(second, 2, session="a" * 32)
    second.close()
    third = opened()
    fill(third, 1, session="c" * 32)
    assert list(third.sessions.items()) == [("f" * 32, (0, 4)), ("a" * 32, (0, 2)), ("c" * 32, (0, 1))]
    assert third.id == first.id
    third.acknowledge("f" * 32, 4)
    assert list(third.sessions) == ["a" * 32, "c" * 32]


def test_a_full_outbox_takes_nothing_until_something_is_acknowledged(opened):
    outbox = opened(capacity=5000)
    count = 0
    while outbox.append(EPOCH, count, record(count)):
        count += 1
    assert 5 < count < 50
    assert "full" in outbox.fault
    assert content(outbox) == list(range(count))
    outbox.acknowledge(EPOCH, count)
    fill(outbox, 1, start=count)
    assert outbox.fault == ""


def test_a_full_disk_leaves_no_torn_record_and_the_next_one_follows(opened):
    outbox = opened()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
    try:
        count = 0
        while outbox.append(EPOCH, count, record(count)):
            count += 1
        assert not outbox.append(EPOCH, count, record(count))
        assert 0 < count < 20
        assert "cannot be written" in outbox.fault
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert content(outbox) == list(range(count))
    fill(outbox, 3, start=count)
    outbox.close()
    assert content(opened()) == list(range(count + 3))


def test_a_disk_that_cannot_even_truncate_gets_a_new_file(opened, monkeypatch):
    outbox = opened()
    fill(outbox, 2)

    def half_written(descriptor, parts, offset):
        os.pwrite(descriptor, b"".join(bytes(part) for part in parts)[:50], offset)
        raise OSError(5, "Input/output error")

    def fail(*_):
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as broken:
        broken.setattr(module.os, "pwritev", half_written)
        broken.setattr(module.os, "ftruncate", fail)
        assert not outbox.append(EPOCH, 2, record(2))
        assert not outbox.append(EPOCH, 2, record(2))
    fill(outbox, 3, start=2)
    assert content(outbox) == list(range(5))
    outbox.close()
    assert content(opened()) == list(range(5))


def test_a_failing_read_is_an_error_and_not_the_end_of_the_process(opened):
    outbox = opened()
    fill(outbox, 3)
    (path,) = outbox.folder.glob("*.records")
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(OSError, match="shorter"):
        outbox.read(EPOCH, 0, MIB)


def test_a_second_process_is_refused_and_told_who_has_the_folder(opened):
    outbox = opened()
    code = f"from pathlib import Path; from serl_client.outbox import Outbox; Outbox(Path({str(outbox.folder)!r}), 1)"
    second = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert second.returncode == 1
    assert f"in use by process {os.getpid()}" in second.stderr
    assert ConfigError.__name__ in second.stderr
    outbox.close()
    opened().append(EPOCH, 0, record(0))


def test_records_stay_bound_to_their_run_and_an_empty_outbox_is_free(opened):
    outbox = opened()
    assert outbox.run == ""
    outbox.bind("run-a")
    fill(outbox, 2)
    outbox.close()
    again = opened()
    assert again.run == "run-a"
    again.acknowledge(EPOCH, 2)
    again.close()
    assert opened().run == ""


def test_an_outbox_that_was_killed_in_mid_write_is_opened_again(tmp_path):
    folder = tmp_path / "outbox"
    code = f"""
from pathlib import Path
from serl_client import wire
from serl_client.outbox import Outbox
outbox = Outbox(Path({str(folder)!r}), 1 << 30)
seq = 0
while True:
    assert outbox.append("e" * 32, seq, wire.encode_record(seq, {{"fill": "x" * 20000}}, {{}}))
    seq += 1
    if seq == 200:
        print("ready", flush=True)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        process.kill()
    again = Outbox(folder, 1 << 30)
    seqs = content(again)
    assert seqs == list(range(len(seqs)))
    assert len(seqs) >= 200
    again.close()
    shutil.rmtree(folder)


def test_an_outbox_with_records_is_opened_and_sent_on_a_full_disk(opened):
    outbox = opened()
    outbox.bind("run")
    fill(outbox, 3)
    outbox.close()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        again = opened()
        assert (again.run, again.id) == ("run", outbox.id)
        assert content(again) == [0, 1, 2]
        assert not again.append("f" * 32, 0, record(0))
        again.acknowledge(EPOCH, 3)
        assert list(again.folder.glob(f"*{EPOCH}*")) == []
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


class Learner:
    """Takes records as a store does: in order, each once, and a segment only where it continues what is there."""

    def __init__(self):
        self.expected, self.open, self.lost, self.whole = 0, None, set(), []

    def take(self, data):
        """False: something came damaged, and nothing of it was taken."""
        try:
            records = messages.decode_records(data)
        except wire.MessageError:
            return False
        for seq, record in records:
            if seq < self.expected:
                continue
            assert seq == self.expected
            self.expected += 1
            if isinstance(record, LostRecord):
                self.lost.add(seq)
                self.open = None
            elif not isinstance(record, Outcome):
                if record.start:
                    assert self.open == (record.episode, record.start), "a store would refuse it for good"
                self.open = (record.episode, record.start + len(record))
                if record.ends:
                    self.whole.append(record.episode)
        return True


@pytest.mark.parametrize("seed", range(12))
def test_whatever_is_damaged_when_ever_each_episode_arrives_whole_or_is_said_to_be_lost(
    tmp_path, make_segment, monkeypatch, seed
):
    monkeypatch.setattr(module, "FILE_BYTES", 700)
    monkeypatch.setattr(module, "SLICE_BYTES", 900)
    chance, learner, written, broken, read = Random(seed), Learner(), 0, set(), 0
    names = [f"e{number}" for number in range(12)]
    records = [record for name in names for record in episode(make_segment, name)]
    outbox = Outbox(tmp_path / "outbox", MIB)
    while learner.expected < len(records):
        deed = chance.choice(("write", "send", "send", "acknowledge", "damage", "restart"))
        first, end = outbox.sessions.get(EPOCH, (0, 0))
        if deed == "write" and written < len(records):
            count = chance.randint(1, 5)
            move_to_outbox(outbox, records[written : written + count], start=written)
            written += len(records[written : written + count])
        elif deed == "send" and max(read, learner.expected, first) < end:
            read, data = outbox.read(EPOCH, max(read, learner.expected, first), MIB)
            if not learner.take(data):
                outbox.recheck(EPOCH, read)
                read = learner.expected
        elif deed == "acknowledge":
            outbox.acknowledge(EPOCH, learner.expected)
        elif deed == "damage" and chance.random() < 0.15 and first < end:
            broken.add(seq := chance.randrange(first, end))
            damage(outbox, seq, chance.choice((0, 9, 17, 40, -1)))
        elif deed == "restart" and chance.random() < 0.2 and (written == 0 or chance.random() < 0.5):
            outbox.close()
            outbox, read = Outbox(tmp_path / "outbox", MIB), 0
            outbox._writing = EPOCH  # this test goes on with the same session
            written = max(outbox.sessions.get(EPOCH, (0, 0))[1], learner.expected)
    outbox.close()
    hit = {seq // 4 for seq in learner.lost}
    assert learner.whole == [name for number, name in enumerate(names) if number not in hit]
    assert hit <= {seq // 4 for seq in broken}
