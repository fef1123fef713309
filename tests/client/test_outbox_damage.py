"""The outbox on a disk that damages: in place of a damaged record it is said that it is lost, and the rest is sent."""

from pathlib import Path
from random import Random

import pytest
from serl_client import Outcome, messages, wire
from serl_client import outbox as module
from serl_client.episode import LostRecord
from serl_client.send_queue import SendQueue

MIB = 1 << 20
SESSION = "e" * 32


@pytest.fixture(autouse=True)
def from_file(monkeypatch):
    """Nothing is sent from memory, so that what the disk has damaged is read."""
    monkeypatch.setattr("serl_client.recent.KEPT_BYTES", 0)


def episode(make_segment, name, ends="terminated"):
    """Three segments, and the outcome before the last one."""
    return [
        make_segment(name, 1, 0, 2), make_segment(name, 1, 2, 2), Outcome(name, True),
        make_segment(name, 1, 4, 2, ends=ends),
    ]  # fmt: skip


def move_to_outbox(outbox, records, start=0):
    for seq, record in enumerate(records, start):
        assert outbox.append(SESSION, seq, messages.encode_record(seq, record))


def damage(outbox, seq, byte=-1):
    """Flip a bit of one record on the disk."""
    file = next(file for file in outbox._files if file.first <= seq < file.end)
    at = (file.size_below(seq) if byte >= 0 else file.ends[seq - file.first]) + byte
    data = bytearray(file.path.read_bytes())
    data[at] ^= 4
    file.path.write_bytes(data)


def sent(outbox, session=SESSION):
    """{seq: record} of what is sent of a session: "lost" where a record is."""
    found, (seq, end) = {}, outbox.sessions.get(session, (0, 0))
    while seq < end:
        seq, data = outbox.read(session, seq, MIB)
        found |= {number: "lost" if isinstance(each, LostRecord) else each for number, each in messages.records(*data)}
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
        again.acknowledge(SESSION, seq)
        again.close()
        again = opened()
        assert lost(again) == [seq for seq in (4, 5, 7) if seq in sent(again)]
    again.acknowledge(SESSION, 12)
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
    outbox.recheck(SESSION, 6)
    assert lost(outbox) == [5]
    move_to_outbox(outbox, episode(make_segment, "b")[2:] + episode(make_segment, "c"), start=6)  # b was not over
    assert lost(outbox) == [5, 7]
    outbox.acknowledge(SESSION, 8)
    assert list(sent(outbox)) == [8, 9, 10, 11]
    outbox.acknowledge(SESSION, 12)
    assert outbox.pending == (0, 0)
    assert list(outbox.folder.glob("*.records")) == []
    assert list(outbox.folder.glob("*.damaged"))


def test_the_steps_of_what_is_damaged_are_counted_once_the_learner_has_heard_of_it(opened, make_segment, spec):
    queue = SendQueue(outbox := opened(), SESSION, spec)
    for record in episode(make_segment, "a"):
        queue.put(record)
    queue.move_to_outbox()
    queue.resume([[SESSION, 0]], MIB)
    assert len(list(queue.pushes())) == 1
    damage(outbox, 1)
    queue.acknowledge(messages.Ack(SESSION, 1, resend=True))
    assert (queue.lost_steps, lost(outbox)) == (0, [1, 3])
    queue.acknowledge(messages.Ack(SESSION, 4))
    assert queue.lost_steps == 4


def test_what_follows_a_lost_record_is_lost_too_though_it_is_in_memory(opened, make_segment, monkeypatch):
    monkeypatch.setattr("serl_client.recent.KEPT_BYTES", MIB)
    monkeypatch.setattr("serl_client.recent.LEAST_BYTES", 0)
    outbox = opened()
    move_to_outbox(outbox, episode(make_segment, "a")[:2])
    damage(outbox, 0)
    assert lost(outbox) == []
    outbox.recheck(SESSION, 2)
    assert lost(outbox) == [0, 1]
    outbox.acknowledge(SESSION, 2)
    move_to_outbox(outbox, episode(make_segment, "a")[2:] + episode(make_segment, "b"), start=2)
    assert lost(outbox) == [3]


def test_each_time_the_learner_refuses_what_came_it_is_looked_at_again(opened, make_segment):
    outbox = opened()
    move_to_outbox(outbox, [record for name in "abcd" for record in episode(make_segment, name)])
    damage(outbox, 5)
    outbox.recheck(SESSION, 16)
    assert lost(outbox) == [5, 7]
    damage(outbox, 12)
    outbox.recheck(SESSION, 16)
    assert lost(outbox) == [5, 7, 12, 13, 15]
    outbox.acknowledge(SESSION, 6)
    outbox.recheck(SESSION, 16)
    assert lost(outbox) == [7, 12, 13, 15]
    outbox.acknowledge(SESSION, 14)
    outbox.recheck(SESSION, 16)
    move_to_outbox(outbox, episode(make_segment, "e"), start=16)
    assert lost(outbox) == [15]


def test_a_file_that_holds_a_lost_record_stays_until_its_episode_is_over(opened, make_segment, monkeypatch):
    monkeypatch.setattr(module, "FILE_BYTES", 1)
    outbox = opened()
    move_to_outbox(outbox, episode(make_segment, "a")[:2])
    damage(outbox, 0)
    outbox.recheck(SESSION, 2)
    assert lost(outbox) == [0, 1]
    outbox.acknowledge(SESSION, 2)
    assert outbox.sessions == {SESSION: (2, 2)}
    move_to_outbox(outbox, episode(make_segment, "a")[2:], start=2)
    outbox.close()
    again = opened()  # it was killed: only the file on the disk tells that the rest of the episode has no beginning
    assert lost(again) == [0, 1, 3]
    again.acknowledge(SESSION, 2)
    assert {seq: record == "lost" for seq, record in sent(again).items()} == {2: False, 3: True}
    again.acknowledge(SESSION, 4)
    assert (again.sessions, len(list(outbox.folder.glob("*.damaged")))) == ({}, 3)


@pytest.mark.parametrize(
    ("number", "change", "left"),
    [(1, Path.unlink, [1, 3]), (0, lambda path: path.write_bytes(b""), [0, 1, 3])],
    ids=["missing", "an empty file in place of one that cannot be read"],
)
def test_a_file_that_is_not_there_is_lost_and_the_rest_is_sent(opened, make_segment, monkeypatch, number, change, left):
    monkeypatch.setattr(module, "FILE_BYTES", 1)
    outbox = opened()
    move_to_outbox(outbox, episode(make_segment, "a") + episode(make_segment, "b"))
    outbox.close()
    change(sorted(outbox.folder.glob("*.records"))[number])
    assert lost(opened()) == left


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
        outbox.acknowledge(SESSION, 1)
        outbox.acknowledge(SESSION, 2)
    left = files if stays == "unlink" else files[2:]
    assert sorted(outbox.folder.glob("*.records")) == left
    assert outbox.pending[0] == 2
    outbox.close()
    again = opened()
    again.acknowledge(SESSION, 2)
    assert (lost(again), sorted(outbox.folder.glob("*.records"))) == ([], files[2:])


class Learner:
    """Takes records as a store does: in order, each once, and a segment only where it continues what is there."""

    def __init__(self):
        self.expected, self.open, self.lost, self.whole = 0, None, set(), []

    def take(self, data):
        """False: something came damaged, and nothing of it was taken."""
        try:
            records = list(messages.records(*data))
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
    opened, make_segment, monkeypatch, seed
):
    monkeypatch.setattr(module, "FILE_BYTES", 700)
    monkeypatch.setattr(module, "SLICE_BYTES", 900)
    chance, learner, written, broken, read = Random(seed), Learner(), 0, set(), 0
    names = [f"e{number}" for number in range(12)]
    records = [record for name in names for record in episode(make_segment, name)]
    outbox = opened()
    while learner.expected < len(records):
        deed = chance.choice(("write", "send", "send", "acknowledge", "damage", "restart"))
        first, end = outbox.sessions.get(SESSION, (0, 0))
        if deed == "write" and written < len(records):
            count = chance.randint(1, 5)
            move_to_outbox(outbox, records[written : written + count], start=written)
            written += len(records[written : written + count])
        elif deed == "send" and max(read, learner.expected, first) < end:
            read, data = outbox.read(SESSION, max(read, learner.expected, first), MIB)
            if not learner.take(data):
                outbox.recheck(SESSION, read)
                read = learner.expected
        elif deed == "acknowledge":
            outbox.acknowledge(SESSION, learner.expected)
        elif deed == "damage" and chance.random() < 0.15 and first < end:
            broken.add(seq := chance.randrange(first, end))
            damage(outbox, seq, chance.choice((0, 9, 17, 40, -1)))
        elif deed == "restart" and chance.random() < 0.2 and (written == 0 or chance.random() < 0.5):
            outbox.close()
            outbox, read = opened(), 0
            outbox._writing = SESSION  # this test goes on with the same session
            written = max(outbox.sessions.get(SESSION, (0, 0))[1], learner.expected)
    hit = {seq // 4 for seq in learner.lost}
    assert learner.whole == [name for number, name in enumerate(names) if number not in hit]
    assert hit <= {seq // 4 for seq in broken}
