"""The store keeps what it was given: actors and their lives, episodes and their parts, verdicts, and what may leave."""

import os
import signal
from dataclasses import replace

import numpy as np
import pytest
import xxhash
from serl_client import Outcome
from serl_client.episode import LostRecord
from serl_client.errors import Refused

from serl_launcher.replay.buffer import ReplayBuffer
from serl_launcher.store import episodes, files, layout, store
from serl_launcher.store.errors import Full, Gap
from serl_launcher.store.index import Index
from serl_launcher.store.schema import FORMAT, SCHEMA, EpisodeInfo
from serl_launcher.types import Window
from tests.shared.common import STATE
from tests.shared.data import BAD_NAMES, make_segment, tiny_spec

from .made import contents, fill, founded, indices

SAC = Window({STATE: (0,), "action": (0,), "next_observation": (1,)})
DESK = ("desk", "another outbox", "B", [])
LATE, NONE = np.array([[5, 0, 0, 0], [0, 1, 0, 0]], np.uint16)  # of steps 4 to 7, of which the first begins a chunk
WIDE = replace(make_segment("e1"), action=np.zeros((4, 3), np.float32))


@pytest.fixture
def made(tmp_path):
    return founded(tmp_path)


def test_the_tables_are_made_with_the_text_that_all_stores_of_this_format_hold():
    assert (FORMAT, xxhash.xxh3_64_hexdigest(SCHEMA.encode())) == (4, "49161ebc75d160e9")


def test_a_repeated_record_is_ignored_and_a_gap_is_named(tmp_path, made):
    assert made.stage("A", 0, make_segment())
    assert not made.stage("A", 0, make_segment())
    with pytest.raises(Gap) as gap:
        made.stage("A", 2, make_segment(start=4))
    assert gap.value.expected == 1
    made.commit()
    assert len(contents(tmp_path)) == 4


@pytest.mark.parametrize(
    ("segment", "says"),
    [
        (make_segment("e1", start=3), "came where the start of an episode"),
        (make_segment("e1", directive=9), "no directive 9"),
        (make_segment("e1", steps=300), "does not fit source"),
        (WIDE, r"action should be float32 \[4, 2\], not float32 \[4, 3\]"),
        (make_segment("e0", start=5), r"e0\[5\] came where e0\[4\]"),
        *((make_segment("e0", start=4, directive=d), f"no directive {d}") for d in (9, 2**31, 2**40, 2**53 - 1)),
        (replace(make_segment("e1"), task="odd"), "a number that no column holds"),
        (replace(make_segment("e0", start=4), task="other"), r"e0\[4\] names the task 'other', and its episode '"),
        (replace(make_segment("e1"), gap=np.full(4, 255, np.uint8).view(bool)), "gap should hold flags"),
        *((replace(make_segment("e0", start=4), chunk_delay=late), "chunk_delay is at most") for late in (LATE, NONE)),
        *(
            (replace(make_segment("e1"), **{where: bad}), "printable")
            for where in ("episode", "task")
            for bad in BAD_NAMES
        ),
        *((make_segment("e1", phase=bad), "printable") for bad in BAD_NAMES),
    ],
)
def test_a_wrong_segment_is_its_senders_fault_nothing_of_it_is_kept_and_the_others_are(
    tmp_path, made, monkeypatch, segment, says
):
    """Also one that sets off an error of ours while it is looked at."""
    records = store.step_records

    def fail(*arguments):
        if any(getattr(argument, "task", None) == "odd" for argument in arguments):
            raise OverflowError("a number that no column holds")
        return records(*arguments)

    monkeypatch.setattr(store, "step_records", fail)
    for session in "BC":
        made.lives.hello(f"arm{session}", f"outbox{session}", session, [])
    made.stage("A", 0, make_segment("e0"))
    made.stage("B", 0, make_segment("f0", ends="terminated"))
    with pytest.raises(Refused, match=says):
        made.stage(*(("A", 1) if segment.episode == "e0" else ("C", 0)), segment)
    made.stage("A", 1, replace(make_segment("e0", start=4, ends="terminated"), chunk_delay=LATE - LATE // 5))
    made.commit()
    assert len(contents(tmp_path)) == 12


# -- actors and their lives


def test_an_actor_that_died_leaves_a_truncated_episode_only_when_its_next_life_has_delivered(made):
    made.stage("A", 0, make_segment("e0"))
    made.commit()
    made.lives.hello("arm", "outbox", "A2", ["A"])  # record 1 of A still lies in the outbox
    assert not made.index.episode("e0").closed
    made.stage("A", 1, make_segment("e0", start=4))
    made.commit()
    made.close_session("A")
    made.commit()
    episode = made.index.episode("e0")
    assert (episode.steps, episode.truncated, episode.terminated, episode.closed, episode.final) == (8, 1, 0, 1, 0)
    with pytest.raises(Refused, match="is over"):
        made.stage("A", 2, make_segment("e0", start=8))


def test_the_name_of_an_actor_is_in_memory_once_however_many_lives_it_has(made):
    for session in "BC":
        made.lives.hello("".join(["long ", "name"]), "".join(["long ", "box"]), session, [])
    one, other = made.sessions["B"], made.sessions["C"]
    assert one.actor is other.actor
    assert one.outbox is other.outbox


@pytest.mark.parametrize(("actor", "outbox"), [("arm", "another disk"), ("leg", "outbox")])
def test_a_session_of_another_outbox_or_actor_is_never_closed(made, actor, outbox):
    made.stage("A", 0, make_segment("e0"))
    made.lives.hello(actor, outbox, "B", [])
    made.commit()
    made.close_before("B", ())
    made.stage("A", 1, make_segment("e0", start=4, ends="terminated"))
    made.commit()
    assert made.index.episode("e0").terminated


def test_an_episode_counts_by_the_oldest_weights_that_acted_in_it(made):
    for version in "abcde":
        made.publish_weights(version * 64, 1, 0)
    for seq, weights in enumerate((3, 2, 5)):
        made.stage("A", seq, make_segment("e0", start=4 * seq, weights=weights))
    made.commit()
    assert made.index.episode("e0").weights == 2


# -- parts of an episode


def test_a_name_of_an_outcome_is_refused_and_the_reason_of_a_loss_is_cleaned_so_that_nothing_else_is_lost(made):
    for bad in BAD_NAMES:
        for outcome in (Outcome(bad, True), Outcome("e0", True, judged_by=bad)):
            with pytest.raises(Refused, match="printable"):
                made.stage("A", 0, outcome)
    made.stage("A", 0, LostRecord("its disk\x1b[2J\n" + "x" * 300))
    made.commit()
    ((reason,),) = made.index._db.execute("SELECT reason FROM lost").fetchall()
    assert reason == f"its disk?[2J {'x' * 300}"[:200]


def test_no_verdict_is_about_the_last_step_before_what_was_lost(made):
    lost = LostRecord("its disk")
    records = make_segment("e0"), lost, make_segment("e1", ends="terminated"), lost, make_segment("e2")
    for seq, record in enumerate(records):
        made.stage("A", seq, record)
    made.close_open()  # from elsewhere, before the loss is known
    made.stage("A", 5, lost)
    made.commit()
    assert [made.index.episode(name).continued for name in ("e0", "e1", "e2")] == [1, 0, 1]


@pytest.mark.parametrize("how", ["the end of the run", "an operator", "silence"])
def test_what_comes_after_a_cut_from_elsewhere_is_a_part_of_its_own_and_nothing_is_joined_or_lost(tmp_path, made, how):
    made.stage("A", 0, make_segment("e0"))
    if how == "an operator":
        made.lives.hello(*DESK)
        made.stage("B", 0, Outcome("e0", None, judged_by="operator"))
    elif how == "silence":
        made.episodes.cut("A")
    else:
        made.close_open()
    made.commit()
    before = made.index.episode("e0")
    made.stage("A", 1, make_segment("e0", start=4, ends="terminated"))
    made.commit()
    after, part = made.index.episode("e0"), made.index.episode("e0.part2")
    assert (after.steps, after.truncated, after.final) == (before.steps, before.truncated, before.final) == (4, 1, 0)
    assert (after.continued, part.continued, before.continued) == (1, 0, 0), "readers hear which part is the last one"
    assert part.revision != after.revision > before.revision
    assert (part.part_of, part.part_start, part.steps, part.terminated, part.final) == ("e0", 4, 4, 1, 1)
    assert indices(tmp_path) == {1: [(i, i) for i in range(4)], 2: [(i, i + 4) for i in range(4)]}
    made.stage("A", 2, make_segment("e1"))
    made.close_open()
    made.stage("A", 3, make_segment("e2", ends="terminated"))
    with pytest.raises(Refused, match="came where the start of an episode"):
        made.stage("A", 4, make_segment("e1", start=4))  # it is not the newest any more


def test_an_outcome_of_an_episode_holds_for_all_its_parts_whenever_they_come(made):
    made.stage("A", 0, make_segment("e0"))
    made.episodes.cut("A")
    made.stage("A", 1, make_segment("e0", start=4))
    made.stage("A", 2, Outcome("e0", True))
    made.episodes.cut("A")
    made.stage("A", 3, make_segment("e0", start=8))
    made.commit()
    parts = [(each.id, each.success) for each in made.index.parts("e0")]
    assert parts == [("e0", 1), ("e0.part2", 1), ("e0.part3", 1)]
    made.lives.hello(*DESK)
    made.stage("B", 0, Outcome("e0.part2", False, judged_by="operator"))
    made.commit()
    assert [each.success for each in made.index.parts("e0")] == [1, 0, 1]
    made.stage("B", 1, Outcome("e0", None, discard=True, judged_by="operator"))
    made.commit()
    assert [(each.discard, each.closed) for each in made.index.parts("e0")] == [(1, 1)] * 3


def test_the_hundredth_part_of_an_episode_reads_no_more_than_the_second_and_their_number_ends(made, monkeypatch):
    read, get = [], Index._get
    monkeypatch.setattr(Index, "_get", lambda *words: read.extend(found := get(*words)) or found)

    def stage(part: int) -> int:
        made.stage("A", 2 * part, make_segment("e0", start=4 * part))
        made.stage("A", 2 * part + 1, LostRecord("its file is damaged"))
        made.commit()
        read_before, read[:] = len(read), []
        return read_before

    reads = [stage(part) for part in range(100)]
    assert reads[1] == reads[99] > 0
    monkeypatch.setattr(episodes, "MOST_PARTS", 100)
    with pytest.raises(Refused, match="closed from elsewhere 100 times: begin another episode"):
        stage(100)
    made.stage("A", 200, make_segment("e1"))
    made.stage("A", 201, Outcome("e0", True))
    made.commit()
    assert [each.success for each in made.index.parts("e0")] == [1] * 100


def test_a_part_does_not_take_the_name_of_another_episode(made):
    made.stage("A", 0, make_segment("e0.part2", ends="terminated"))
    made.stage("A", 1, make_segment("e0"))
    made.episodes.cut("A")
    made.stage("A", 2, make_segment("e0", start=4, ends="terminated"))
    made.commit()
    assert [each.id for each in made.index.parts("e0")] == ["e0", "e0.part3"]


# -- verdicts


def test_the_operator_closes_an_episode_whose_actor_is_gone(made):
    made.stage("A", 0, make_segment("e0"))
    made.stage("A", 1, Outcome("e0", True, judged_by="operator"))
    assert not made.episodes.find("e0").closed  # its own actor says so, and goes on
    made.lives.hello(*DESK)
    made.stage("B", 0, Outcome("e0", False, judged_by="operator"))
    made.commit()
    episode = made.index.episode("e0")
    assert (episode.closed, episode.truncated, episode.terminated, episode.success) == (1, 1, 0, 0)


def test_the_operator_overrules_the_judge_whenever_he_speaks(made):
    made.stage("A", 0, Outcome("e0", True))  # before its episode
    made.stage("A", 1, make_segment("e0", ends="terminated"))
    made.commit()
    assert made.index.episode("e0").success == 1
    made.stage("A", 2, Outcome("e0", False, judged_by="operator"))
    made.commit()
    made.stage("A", 3, Outcome("e0", True))
    made.commit()
    assert made.index.episode("e0").success == 0
    made.stage("A", 4, Outcome("e0", False, discard=True, judged_by="operator"))
    made.commit()
    episode = made.index.episode("e0")
    assert (episode.success, episode.discard, episode.judged_by) == (0, 1, "operator")
    assert len(made.index.outcomes("e0")) == 4


# -- eviction


def test_eviction_takes_whole_episodes_the_oldest_first(tmp_path):
    made = founded(tmp_path, online=100)
    fill(made, 30)
    found = contents(tmp_path)
    assert 50 <= len(found) <= 100
    oldest = found[0][0]
    assert found == [(episode, i, 2.0 * (episode - 1)) for episode in range(oldest, 31) for i in range(10)]


def test_what_is_not_archived_stays_however_much_room_an_eviction_would_make(tmp_path):
    """29 archived episodes may go, 35 must stay, and three open ones fill the rest: the tail stops between them."""
    made = founded(tmp_path, ["online"], online=1280)
    for session in "BC":
        made.lives.hello(f"arm{session}", f"outbox{session}", session, [])
    fill(made, 29)
    made.add_archived(range(1, 30))
    fill(made, 35, seq=58)
    for start in range(0, 310, 10):
        for session in "ABC":
            made.stage(session, made.expected(session), make_segment(f"open{session}", start=start, steps=10))
        made.commit()
    assert (made.sources["online"].tail, made.sources["online"].head) == (290, 1570)
    with pytest.raises(Full, match="waits for its export"):
        made.stage("A", made.expected("A"), make_segment("openA", start=310))


def test_a_final_observation_needs_a_place_that_no_kept_episode_has(tmp_path):
    """Short episodes fill the ring of rows first: 87 of one step leave two of its 176 free."""
    made = founded(tmp_path, ["online"], online=100)
    for seq in range(87):
        made.stage("A", seq, make_segment(f"e{seq}", steps=1, ends="terminated"))
    with pytest.raises(Full, match="its episode e0 waits for its export"):
        made.stage("A", 87, make_segment("last", steps=2, ends="terminated"))
    made.stage("A", 87, make_segment("last", steps=2))
    made.commit()
    assert len(contents(tmp_path)) == 89


def test_readers_know_the_new_tail_before_anything_is_overwritten(tmp_path, monkeypatch):
    made = founded(tmp_path, online=100)
    write, overwritten = files.SourceFiles.write, []

    def watched(self, name, offset, slots, start, arrays):
        gone = start + sum(map(len, arrays)) - slots  # of an episode, 10 steps and 11 rows
        overwritten.append(gone if name == "steps" else -(-gone // 11) * 10)
        assert int(layout.published(tmp_path / "store/online")[0]) >= overwritten[-1]
        write(self, name, offset, slots, start, arrays)

    monkeypatch.setattr(files.SourceFiles, "write", watched)
    fill(made, 30)
    assert max(overwritten) == 200


@pytest.mark.slow
@pytest.mark.parametrize("draws", [100_000, pytest.param(1_000_000, marks=pytest.mark.nightly)])
def test_no_row_is_torn_however_many_are_drawn_while_old_episodes_are_evicted(tmp_path, draws):
    made = founded(tmp_path, online=300)
    child = os.fork()
    if child == 0:  # the writer: goes round the ring again and again
        seq = 0
        while True:
            seq = fill(made, 1, seq=seq)
    try:
        reader = ReplayBuffer(tmp_path / "store" / "online", layout.Layout(tiny_spec(), 300))
        generator, drawn = np.random.default_rng(0), 0
        into = {
            STATE: np.empty((512, 1, 8), np.float32), f"next.{STATE}": np.empty((512, 1, 8), np.float32),
            "action": np.empty((512, 1, 2), np.float32), "reward": np.empty((512, 1), np.float32),
            "length": np.empty(512, np.int64), "step_id": np.empty(512, np.int64),
            **{name: np.empty((512, 1), bool) for name in ("terminated", "truncated", "intervened", "valid")},
        }  # fmt: skip
        while drawn < draws or reader.head < 5000:  # the writer must have gone round many times
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


def test_an_episode_that_nobody_ends_is_cut_and_pushes_out_no_more_than_its_own_steps(tmp_path, made, caplog):
    made.lives.hello("other", "box", "B", [])
    fill(made, 30, session="B")
    for seq in range(20):
        made.stage("A", seq, make_segment("long", 0, 10 * seq, 10))
        made.commit()
    assert "long goes on as another episode from step 100 on: one takes at most 100 steps" in caplog.text
    held = indices(tmp_path)
    parts = made.index.parts("long")
    assert [(each.id, each.part_start, each.steps) for each in parts] == [("long", 0, 100), ("long.part2", 100, 100)]
    assert [held[each.number] for each in parts] == [[(i, k + i) for i in range(100)] for k in (0, 100)]
    assert sum(map(len, held.values())) >= 390
    assert len(held) >= 20, "18 episodes of another actor stay beside it"


def test_an_open_episode_that_is_archived_later_is_cut_rather_than_waited_for_or_lost(tmp_path):
    made, waited = founded(tmp_path, ["online"]), 0
    made.lives.hello("alive", "box", "B", [])
    made.stage("A", 0, make_segment("open"))
    segments = [
        make_segment(f"b{number}", number, half, 5, ends=ends)
        for number in range(100) for half, ends in ((0, ""), (5, "terminated"))
    ]  # fmt: skip
    while (seq := made.expected("B")) < len(segments):
        try:
            made.stage("B", seq, segments[seq])
        except Full:
            made.commit()
            waited += 1
            rows = made.index.catalog(0, 1000)[1]
            made.add_archived(row[0] for row in rows if EpisodeInfo(*row).closed)
    assert waited > 1
    made.stage("A", 1, make_segment("open", start=4, ends="terminated"))
    made.commit()
    parts = [(each.id, each.steps, each.closed) for each in made.index.parts("open")]
    assert parts == [("open", 4, 1), ("open.part2", 4, 1)]
    assert made.sources["online"].tail > 4
