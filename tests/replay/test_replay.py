"""Windows never cross an episode, see every durable step, and never a row that is being overwritten."""

import dataclasses

import numpy as np
import pytest
import torch
from serl_client import ConfigError, Feature, Outcome, Spec

from serl_launcher.replay.buffer import ReplayBuffer, batch_arrays
from serl_launcher.replay.choice import Choice
from serl_launcher.replay.mixture import ReplayMixture
from serl_launcher.replay.views import EpisodeInfo, View
from serl_launcher.store import layout
from serl_launcher.store.store import Store
from serl_launcher.training.counters import value_error
from serl_launcher.types import IdleFilter, Window

STATE = "observation.state"
SAC = Window({STATE: (0,), "action": (0,), "next_observation": (1,)})
CHUNK = Window({STATE: (0,), "action": (0, 1, 2, 3, 4)})
CHUNK_SAC = Window({STATE: (0,), "action": (0, 1, 2, 3, 4), "next_observation": (5,)})
SEQUENCE = Window({STATE: (-2, -1, 0, 1, 2, 3), "action": (0, 1, 2)})


@pytest.fixture
def store(tmp_path, spec):
    made = Store.create(tmp_path / "store", spec, {"online": 200, "demo": 200})
    made.direct({"into": "online", "phase": "practise"})
    made.direct({"into": "demo", "phase": "demonstrate"})
    for session in "AB":
        made.hello(f"arm {session}", f"outbox {session}", session, [])
    yield made
    made.close()


@pytest.fixture
def push(store):
    def push(session, *records):
        for record in records:
            store.stage(session, store.expected(session), record)
        store.commit()

    return push


@pytest.fixture
def sources(store, spec):
    views = {"success": View(("online", "demo"), ("successful",)), "long": View(("online",), min_length=6)}
    made = ReplayMixture(store.folder, spec, {"online": 200, "demo": 200}, views, seed=0)
    cursor = [0]

    def refresh():
        cursor[0], rows = store.index.catalog(cursor[0], 10_000)
        made.update(rows)
        return made

    return refresh


def starts(batch):
    """{(key, index)} of the windows' first steps."""
    return {(int(key), int(i)) for key, i in batch.observation[STATE][:, 0, :2].tolist()}


def test_every_durable_step_is_drawn_and_the_terminal_one_at_once(push, sources, make_segment):
    """hi-ors B5: a buffer that never draws its newest step never sees the reward of a single success."""
    push("A", make_segment("e0", 3, 0, 4, ends="terminated"))
    batch = sources().sample(500, SAC, {"online": 1.0})
    assert starts(batch) == {(3, i) for i in range(4)}
    assert batch.reward.max() == 3.0
    assert (batch.terminated[:, 0] == (batch.reward[:, 0] == 3.0)).all()


def test_an_open_episodes_newest_step_waits_for_the_observation_after_it(push, sources, make_segment):
    push("A", make_segment("e0", 3, 0, 4))
    assert starts(sources().sample(500, SAC, {"online": 1.0})) == {(3, i) for i in range(3)}
    assert sources().sample(500, CHUNK, {"online": 1.0}) is None
    push("A", make_segment("e0", 3, 4, 2))
    assert starts(sources().sample(500, SAC, {"online": 1.0})) == {(3, i) for i in range(5)}


def test_a_chunk_stops_at_the_end_of_its_episode(push, sources, make_segment):
    """hi-ors B1: a terminal step's chunk went on into the next episode, unmasked."""
    push("A", make_segment("e0", 1, 0, 6, ends="terminated"), make_segment("e1", 2, 0, 6, ends="truncated"))
    batch = sources().sample(400, CHUNK_SAC, {"online": 1.0})
    index = batch.observation[STATE][:, 0, 1]
    assert (batch.length == (6 - index).clamp(max=5)).all()
    assert (batch.valid.sum(1) == batch.length).all()
    offsets = torch.arange(5)
    assert (batch.reward == (index[:, None] + offsets) * batch.valid).all()
    assert (batch.action[~batch.valid] == 0).all()
    following = batch.next_observation[STATE][:, 0]
    assert (following[:, 0] == batch.observation[STATE][:, 0, 0]).all()
    assert (following[:, 1] == index + batch.length).all()
    ends = batch.length < 5
    assert (batch.terminated.any(1) | batch.truncated.any(1))[ends].all()


@pytest.mark.parametrize("parts", [(6, 6), (2, 4, 2, 4)])
def test_a_gap_ends_windows_as_the_end_of_an_episode_does(push, sources, make_segment, parts):
    start = 0
    for count in parts:
        push("A", dataclasses.replace(part := make_segment("e0", 1, start, count), gap=part.reward == 6))
        push("B", make_segment("e1", 2, start, count))  # lies between them
        start += count
    chunks = sources().sample(400, CHUNK, {"online": 1.0})
    own = chunks.observation[STATE][:, 0, 0] == 1
    index = chunks.observation[STATE][own, 0, 1]
    assert set(index.tolist()) == {*range(8)}, "the last steps wait for those after them"
    assert (chunks.length[own] == torch.where(index < 6, (6 - index).clamp(max=5), 5)).all()
    assert starts(sources().sample(400, SAC, {"online": 1.0})) >= {(1, i) for i in (4, 6)}
    assert (1, 5) not in starts(sources().sample(400, SAC, {"online": 1.0})), "nobody saw what followed it"
    before = sources().sample(400, SEQUENCE, {"online": 1.0}).observation[STATE]
    at = before[(before[:, 2, 0] == 1) & (before[:, 2, 1] == 6)]
    assert (at[:, :2, 1] == 6).all(), "what came before the gap is no history"


def test_chunks_of_interleaved_actors_follow_their_own_episode(push, sources, make_segment):
    for start in range(0, 12, 2):
        last = start == 10
        push("A", make_segment("a", 1, start, 2, ends="terminated" if last else ""))
        push("B", make_segment("b", 2, start, 2, ends="truncated" if last else ""))
    batch = sources().sample(500, SEQUENCE, {"online": 1.0})
    states = batch.observation[STATE]  # [B, 6, 8]
    index = states[:, 2, 1]
    assert (states[:, :, 0] == states[:, :1, 0]).all()
    expected = (index[:, None] + torch.tensor([-2, -1, 0, 1, 2, 3])).clamp(0, 12)
    assert (states[:, :, 1] == expected).all()


def test_after_the_ring_has_wrapped_observation_and_action_still_belong_together(push, sources, make_segment):
    """hi-ors B3: after a wrap all samples were mismatched."""
    for i in range(60):
        segment = make_segment(f"e{i}", i, 0, 9, ends="terminated")
        segment.action[:] = (segment.reward / 10)[:, None]
        push("A", segment)
    batch = sources().sample(2000, SAC, {"online": 1.0})
    assert batch.observation[STATE][:, 0, 0].min() >= 60 - 200 // 9 - 3
    assert np.allclose(batch.action[:, 0, 0] * 10, batch.observation[STATE][:, 0, 1], atol=1e-5)
    assert (batch.next_observation[STATE][:, 0, 1] == batch.observation[STATE][:, 0, 1] + 1).all()
    assert (batch.next_observation[STATE][:, 0, 0] == batch.observation[STATE][:, 0, 0]).all()


def test_rows_that_did_not_move_are_kept_so_that_next_is_the_next_in_time(push, sources, make_segment):
    """hi-ors B4: dropped no-op rows made the next observation jump over time."""
    still = make_segment("e0", 1, 0, 8, ends="truncated")
    still.action[2:6] = 0.0
    push("A", still)
    batch = sources().sample(300, SAC, {"online": 1.0})
    assert starts(batch) == {(1, i) for i in range(8)}
    assert (batch.next_observation[STATE][:, 0, 1] == batch.observation[STATE][:, 0, 1] + 1).all()


def test_an_episode_that_a_crash_cut_gives_chunks_but_no_last_value_target(store, push, sources, make_segment):
    push("A", make_segment("e0", 1, 0, 6))
    store.close_session("A")
    store.commit()
    assert starts(sources().sample(400, SAC, {"online": 1.0})) == {(1, i) for i in range(5)}
    batch = sources().sample(400, CHUNK, {"online": 1.0})
    assert starts(batch) == {(1, i) for i in range(6)}
    assert (batch.length == (6 - batch.observation[STATE][:, 0, 1]).clamp(max=5)).all()


def test_what_the_writer_overwrites_while_it_is_copied_is_not_used(store, push, spec, make_segment):
    push("A", make_segment("e0", 1, 0, 50, ends="terminated"))
    reader = ReplayBuffer(store.folder / "online", layout.Layout(spec, 200))
    reader.refresh()
    drawn = reader.draw(64, SAC, np.random.default_rng(0), None)
    into = {name: np.empty(shape, dtype) for name, (shape, dtype) in batch_arrays(reader.layout, 64, SAC).items()}
    assert reader.gather(drawn, SAC, into)
    copy = reader._take

    def copy_while_the_writer_goes_round(name, rows, out):
        for i in range(8):
            push("A", make_segment(f"later{i}", 9, 0, 50, ends="terminated"))
        reader._take = copy
        copy(name, rows, out)

    reader._take = copy_while_the_writer_goes_round
    assert not reader.gather(drawn, SAC, into)
    assert (into[STATE] == 9).any(), "the test must have overwritten what was drawn"


class Overtaken:
    """The mapped steps, while the writer goes round once in the middle of a reader's copy: what the copy holds of each
    step is its old number and its new content."""

    def __init__(self, steps, goes_round):
        self.steps, self.goes_round = steps, goes_round

    def __getitem__(self, slots):
        if self.goes_round is None:
            return self.steps[slots]
        numbers = self.steps[slots]["number"]
        goes_round, self.goes_round = self.goes_round, None
        goes_round()
        torn = self.steps[slots]
        assert (torn["number"] != numbers).all(), "the test must have overwritten what is read"
        torn["number"] = numbers
        return torn


def test_steps_that_are_overwritten_while_the_reader_takes_them_in_are_not_drawn(store, push, spec, make_segment):
    def goes_round():
        for i in range(8):
            push("A", make_segment(f"later{i}", 9, 0, 50, ends="terminated"))

    push("A", make_segment("e0", 1, 0, 50, ends="terminated"))
    reader = ReplayBuffer(store.folder / "online", layout.Layout(spec, 200))
    reader._steps = Overtaken(reader._steps, goes_round)
    reader.refresh()
    assert reader.draw(64, CHUNK, np.random.default_rng(0), None) is None
    reader.refresh()
    drawn = reader.draw(64, CHUNK, np.random.default_rng(0), None)
    assert drawn.steps.min() >= reader.tail > 50


def test_an_episode_that_goes_on_after_its_beginning_was_evicted_is_joined_to_nobody_elses(
    store, push, sources, make_segment
):
    """The slot of its newest step is another episode's by then."""
    push("A", make_segment("long", 1, 0, 4))
    sources()
    for i in range(19):
        push("B", make_segment(f"b{i}", 2 + i, 0, 10, ends="terminated"))
    store.stage("B", store.expected("B"), make_segment("b19", 21, 0, 10, ends="terminated"))
    push("A", make_segment("long", 1, 4, 4, ends="terminated"))  # in one group, which evicts its beginning
    found = sources()
    buffer = found.buffers["online"]
    assert buffer.tail > 3
    assert buffer.head - 4 > 3 + 200, "step 3 is gone, and its slot in use"
    batch = found.sample(2000, SEQUENCE, {"online": 1.0})
    assert (batch.observation[STATE][..., 0] == batch.observation[STATE][:, 2:3, 0]).all()
    assert 1 not in batch.observation[STATE][..., 0]
    assert (batch.valid.sum(1) == (10 - batch.observation[STATE][:, 2, 1]).clamp(max=3)).all()


def test_no_window_starts_in_an_episode_whose_beginning_was_evicted(push, sources, make_segment):
    push("A", make_segment("long", 1, 0, 4))
    for i in range(5):
        push("B", make_segment(f"b{i}", 2 + i, 0, 10, ends="terminated"))
    push("A", make_segment("long", 1, 4, 46, ends="terminated"))
    for i in range(5, 17):
        push("B", make_segment(f"b{i}", 2 + i, 0, 10, ends="terminated"))
    found = sources()
    buffer = found.buffers["online"]
    assert 4 <= buffer.tail < 54, "its beginning is gone, and most of it is there"
    assert {key for key, _ in starts(found.sample(1000, SEQUENCE, {"online": 1.0}))} == {
        *range(2 + (buffer.tail - 4) // 10, 19),
    }  # fmt: skip


def test_the_size_of_a_source_is_what_it_holds_and_not_what_left_it(push, sources, make_segment):
    for i in range(30):
        push("A", make_segment(f"e{i}", i, 0, 10, ends="terminated"), Outcome(f"e{i}", True))
        found = sources()
        held = found.buffers["online"].head - found.buffers["online"].tail
        assert found.size("online") == found.size("success") == found.size("long") == (held, held // 10)
    assert held < 300


def test_a_step_has_one_id_in_every_batch_and_no_other_step_has_it(push, sources, make_segment):
    push("A", make_segment("won", 1, ends="terminated"), Outcome("won", True))
    push("B", make_segment("shown", 2, ends="terminated", directive=2), Outcome("shown", True))
    ids = {}
    for shares in ({"success": 1.0}, {"online": 0.5, "demo": 0.5}):
        batch = sources().sample(400, SAC, shares)
        for start, step in zip(batch.observation[STATE][:, 0, :2].tolist(), batch.step_id.tolist(), strict=True):
            assert ids.setdefault(step, start) == start
    assert len(ids) == 8


def test_views_hold_what_their_filter_says_and_follow_a_corrected_outcome(push, sources, make_segment):
    push("A", make_segment("win", 1, ends="terminated"), Outcome("win", True))
    push("A", make_segment("loss", 2, ends="terminated"), Outcome("loss", False))
    push("B", make_segment("shown", 3, 0, 8, ends="terminated", directive=2), Outcome("shown", True))
    found = sources()
    assert {key for key, _ in starts(found.sample(400, SAC, {"success": 1.0}))} == {1, 3}
    assert (found.size("success"), found.size("online"), found.size("long")) == ((12, 2), (8, 2), (0, 0))
    push("A", Outcome("win", False, judged_by="operator"), Outcome("loss", True, judged_by="operator"))
    assert {key for key, _ in starts(sources().sample(400, SAC, {"success": 1.0}))} == {2, 3}
    push("A", Outcome("loss", True, discard=True, judged_by="operator"))
    found = sources()
    assert {key for key, _ in starts(found.sample(400, SAC, {"success": 1.0}))} == {3}
    assert {key for key, _ in starts(found.sample(400, SAC, {"online": 1.0}))} == {1}


def test_a_choice_of_steps_is_the_set_that_was_put_in_and_every_one_of_them_is_found():
    generator, choice, expected, capacity = np.random.default_rng(0), Choice(1000), {}, 1000
    for _ in range(200):
        new = np.arange(choice.head, choice.head + generator.integers(200))
        choice.evict(max(choice.tail, new[-1] + 1 - capacity + generator.integers(20)) if len(new) else choice.tail)
        choice.put(new, generator.random(len(new)) < 0.3)
        choice.head += len(new)
        some = np.arange(choice.tail, choice.head)[generator.random(choice.head - choice.tail) < 0.1]
        which = generator.random(len(some)) < 0.5
        choice.put(some, which)
        flat = choice._chosen.reshape(-1)
        expected = {number for number in range(choice.tail, choice.head) if flat[number % capacity]}
        assert set(some[which].tolist()) <= expected
        assert not set(some[~which].tolist()) & expected
        assert len(choice) == len(expected)
        assert set(choice.nth(np.arange(len(choice))).tolist()) == expected


def test_views_follow_every_change_of_interleaved_episodes_as_a_look_at_all_of_them_would(
    push, store, spec, make_segment
):
    """Random actors, verdicts and discards, and a ring that is overwritten many times."""
    views = {
        "won": View(("online",), ("successful",)), "long": View(("online",), min_length=12),
        "human": View(("online",), rows="intervened"),
    }  # fmt: skip
    sources, cursor, at = (
        ReplayMixture(store.folder, spec, {"online": 200, "demo": 200}, views, seed=0),
        0,
        {"A": 0, "B": 0},
    )
    generator, ids, started = np.random.default_rng(1), [], 0
    for turn in range(150):
        session = "AB"[generator.integers(2)]
        started += at[session] == 0
        ids += [f"{session}{started}"] * (at[session] == 0)
        name = next(id for id in reversed(ids) if id[0] == session)
        ends = "terminated" if at[session] > 5 and generator.random() < 0.5 else ""
        segment = make_segment(name, 1, at[session], 4, ends=ends)
        segment.intervened[:] = generator.random(4) < 0.5
        push(session, segment)
        at[session] = 0 if ends else at[session] + 4
        if generator.random() < 0.5:
            word = Outcome(ids[generator.integers(max(0, len(ids) - 9), len(ids))], bool(generator.integers(2)),
                           discard=bool(generator.random() < 0.2), judged_by="operator")  # fmt: skip
            push(session, word)
        if turn % 3 == 0:
            cursor, rows = store.index.catalog(cursor, 10_000)
            sources.update(rows)
            _same_as_a_look_at_all(store, sources, views | {"online": View(("online",))})


def _same_as_a_look_at_all(store, sources, views):
    buffer = sources.buffers["online"]
    infos = {info.number: info for info in (EpisodeInfo(*row) for row in store.index.catalog(0, 10_000)[1])}
    numbers = np.arange(buffer.tail, buffer.head)
    records = buffer._steps[numbers % 200]
    whole = [r for r in records if infos[int(r["episode"])].first >= buffer.tail]
    for name, view in views.items():
        for starts in ("any", "chunk_start"):
            expected = {
                int(r["number"]) for r in whole
                if view.holds(infos[int(r["episode"])])
                and (view.rows == "all" or r["flags"] & layout.INTERVENED)
                and (starts == "any" or r["flags"] & layout.CHUNK_START)
            }  # fmt: skip
            choice = sources._choice(name, "online", starts)
            chosen = numbers if choice is None else choice.nth(np.arange(len(choice)))
            usable = {int(n) for n in chosen if buffer._first[n % 200] >= buffer.tail}
            assert usable == expected
        alive = [info for info in infos.values() if info.first >= buffer.tail and view.holds(info)]
        assert sources.size(name) == (sum(map(view.count, alive)), sum(bool(info.closed) for info in alive))


def test_a_discard_and_a_verdict_look_at_no_steps_but_their_episodes_and_the_new_ones(tmp_path, spec, make_segment):
    made = Store.create(tmp_path / "store", spec, {"online": 6000})
    made.direct({"into": "online", "phase": "practise"})
    made.hello("arm", "outbox", "A", [])
    views = {"won": View(("online",), ("successful",))}
    found, cursor, looked = ReplayMixture(made.folder, spec, {"online": 6000}, views, seed=0), 0, []
    buffer = found.buffers["online"]
    episodes = buffer.episodes
    buffer.episodes = lambda numbers: looked.append(len(numbers)) or episodes(numbers)
    decisions = Window(CHUNK.offsets, starts="chunk_start")
    for i in range(500):
        made.stage("A", made.expected("A"), make_segment(f"e{i}", 1, 0, 10, ends="terminated"))
        if i >= 450:
            made.stage(
                "A", made.expected("A"), Outcome(f"e{i - 300}", bool(i % 2), discard=i % 3 == 0, judged_by="operator")
            )
        made.commit()
        if i >= 449:
            looked.clear()
            cursor, rows = made.index.catalog(cursor, 10_000)
            found.update(rows)
            for shares in ({"online": 1.0}, {"won": 1.0}):
                for window in (CHUNK, decisions):
                    found.sample(64, window, shares)
            assert i < 452 or sum(looked) <= 4 * (10 + 1024), "each of four choices looks at what is new or changed"
    made.close()


def test_what_is_overwritten_while_observations_and_returns_are_read_is_left_out(store, push, spec, make_segment):
    push("A", make_segment("e0", 1, 0, 50, ends="terminated"), make_segment("e1", 2, 0, 50, ends="terminated"))
    reader = ReplayBuffer(store.folder / "online", layout.Layout(spec, 200))
    reader.refresh()
    assert reader.returns(np.array([0, 50]), 1.0).tolist() == [1225.0, 1225.0]
    assert reader.observed(STATE, None).shape == (100, 8)
    push(
        "A", *(make_segment(f"later{i}", 9, 0, n, ends="terminated") for i, n in enumerate((50, 50, 25)))
    )  # over all of e0
    assert reader.observed(STATE, None)[:, 0].tolist() == [2.0] * 50
    assert reader.observed(STATE, np.array([0, 50]))[:, 0].tolist() == [2.0]
    assert reader.returns(np.array([0, 50]), 1.0) is None
    assert reader.returns(np.array([50]), 1.0).tolist() == [1225.0]


def test_beginnings_that_are_overwritten_while_they_are_read_are_left_out(push, sources, make_segment):
    push("A", make_segment("e0", 1, 0, 50, ends="terminated"), make_segment("e1", 2, 0, 50, ends="terminated"))
    found = sources()
    episodes = list(found.held["online"].values())
    push("A", *(make_segment(f"later{i}", 9, 0, n, ends="terminated") for i, n in enumerate((50, 50, 25))))
    batch, returns = found.beginnings(episodes, CHUNK, 1.0)
    assert (starts(batch), returns.tolist()) == ({(2, 0)}, [1225.0])


def test_a_batch_is_shared_out_exactly_and_an_empty_source_gives_none(push, sources, make_segment):
    push("A", make_segment("e0", 1, 0, 20, ends="terminated"))
    assert sources().sample(64, SAC, {"online": 0.5, "demo": 0.5}) is None
    push("B", make_segment("d0", 2, 0, 10, ends="terminated", directive=2))
    batch = sources().sample(65, SAC, {"online": 0.5, "demo": 0.5})
    keys = batch.observation[STATE][:, 0, 0]
    assert sorted([(keys == 1).sum().item(), (keys == 2).sum().item()]) == [32, 33]
    assert batch.task == ("reach",) * 65


def test_the_same_generator_draws_the_same_batch_again(push, sources, make_segment):
    push("A", make_segment("e0", 1, 0, 40, ends="terminated"))
    found = sources()
    state = found.state_dict()
    first = found.sample(32, SAC, {"online": 1.0}).step_id.clone()
    assert not (found.sample(32, SAC, {"online": 1.0}).step_id == first).all()
    found.load_state_dict(state)
    assert (found.sample(32, SAC, {"online": 1.0}).step_id == first).all()


def test_only_steps_where_a_chunk_began_are_drawn_when_the_window_says_so(push, sources, make_segment):
    push("A", make_segment("e0", 1, 0, 16, ends="terminated"))
    window = Window({STATE: (0,), "action": (0, 1, 2, 3)}, starts="chunk_start")
    assert {i for _, i in starts(sources().sample(300, window, {"online": 1.0}))} == {0, 4, 8, 12}


def test_windows_start_where_the_rows_of_a_view_say_and_go_on_over_the_others(push, store, spec, make_segment):
    segment = make_segment("e0", 1, 0, 12, ends="terminated")
    segment.intervened[4:8] = True
    push("A", segment, make_segment("e1", 2, 0, 4, ends="terminated"))
    views = {"human": View(("online",), rows="intervened"), "alone": View(("online",), rows="autonomous")}
    sources = ReplayMixture(store.folder, spec, {"online": 200, "demo": 200}, views, seed=0)
    sources.update(store.index.catalog(0, 10)[1])
    human = sources.sample(300, CHUNK, {"human": 1.0})
    assert starts(human) == {(1, i) for i in range(4, 8)}
    assert human.valid.all()
    assert not human.intervened.all()
    assert starts(sources.sample(300, CHUNK, {"alone": 1.0})) == {
        *((1, i) for i in range(12) if not 4 <= i < 8), *((2, i) for i in range(4))
    }  # fmt: skip
    assert (sources.size("human"), sources.size("alone")) == ((4, 2), (12, 2))


@pytest.mark.parametrize(
    "idle_filter",
    [
        IdleFilter(0.1, STATE, entries=(1, 3)),  # the other entries are a sensor's noise
        IdleFilter(0.1, "action"),
    ],
)
def test_no_window_starts_where_the_robot_stays_still_and_no_row_is_lost(push, sources, make_segment, idle_filter):
    segment = make_segment("e0", 1, 0, 20, ends="truncated")
    segment.observation[STATE][5:15] = segment.observation[STATE][5]
    segment.observation[STATE][:, [0, 2, 4, 5, 6, 7]] += np.random.default_rng(0).normal(size=(21, 6))
    segment.action[:, 1] = segment.observation[STATE][:20, 1]
    push("A", segment)
    drawn = {
        int(s) for s in sources().sample(400, Window(CHUNK.offsets, idle_filter=idle_filter), {"online": 1.0}).step_id
    }
    assert drawn == set(range(20)) - set(range(5, 11))
    noisy = Window(CHUNK.offsets, idle_filter=IdleFilter(0.1, STATE))
    for every in (noisy, CHUNK):
        assert {int(step) for step in sources().sample(400, every, {"online": 1.0}).step_id} == set(range(20))


@pytest.mark.parametrize(
    ("idle_filter", "named"),
    [
        (
            IdleFilter(0.1, "observation.joints"),
            r"idle_filter.column='observation.joints': .*'action', 'observation.state'",
        ),
        (IdleFilter(0.1, STATE, (0, 8)), r"idle_filter.entries=\[0, 8\]: observation.state has the entries 0 to 7"),
        (IdleFilter(0.1, "action", ()), r"idle_filter.entries=\[\]: action has the entries 0 to 1"),
    ],
)
def test_stillness_of_what_no_row_has_is_refused_with_what_there_is(push, sources, make_segment, idle_filter, named):
    push("A", make_segment("e0", ends="terminated"))
    with pytest.raises(ConfigError, match=named):
        sources().sample(4, Window(CHUNK.offsets, idle_filter=idle_filter), {"online": 1.0})


def test_a_column_that_no_row_has_is_named(push, sources, make_segment):
    push("A", make_segment("e0", ends="terminated"))
    window = Window({"observation.images.cam_high": (0,), "action": (0,)})
    with pytest.raises(ValueError, match=r"cam_high.*there are \['observation.state'\]"):
        sources().sample(4, window, {"online": 1.0})


def test_a_reader_that_comes_late_or_falls_behind_sees_what_is_left(store, push, spec, make_segment):
    reader = ReplayBuffer(store.folder / "online", layout.Layout(spec, 200))
    for i in range(40):
        push("A", make_segment(f"e{i}", i, 0, 10, ends="terminated"))
    late = ReplayBuffer(store.folder / "online", layout.Layout(spec, 200))
    for each in (reader, late):
        each.refresh()
        drawn = each.draw(300, SAC, np.random.default_rng(0), None)
        assert set(each.episode_of(drawn)) == set(range(reader.tail // 10 + 1, 41))


def test_rare_decisions_are_found_and_extras_keep_their_own_names(tmp_path, spec, make_segment):
    """A column of Spec.extras may be called like a field of the step record."""
    extras = {"weights": Feature((3,)), "number": Feature((), "int64")}
    spec = Spec(spec.observation, spec.action, 10.0, extras)
    made = Store.create(tmp_path / "store", spec, {"online": 2000})
    made.direct({"into": "online", "phase": "practise"})
    made.hello("arm", "outbox", "A", [])
    segment = make_segment("e0", 1, 0, 500, ends="terminated")
    segment.chunk_start[:] = np.arange(500) % 50 == 0
    own = {"weights": np.full((500, 3), 7.0, np.float32), "number": np.arange(500)}
    made.stage("A", 0, dataclasses.replace(segment, extras=own))
    made.commit()
    found = ReplayMixture(made.folder, spec, {"online": 2000}, {}, seed=0)
    found.update(made.index.catalog(0, 10)[1])
    offsets = tuple(range(50))
    window = Window({STATE: (0,), "action": offsets, "weights": offsets, "number": offsets}, starts="chunk_start")
    for _ in range(20):
        batch = found.sample(64, window, {"online": 1.0})
        assert {i % 50 for _, i in starts(batch)} == {0}
        assert (batch.extras["weights"] == 7).all()
        assert (batch.extras["number"] == batch.observation[STATE][:, :1, 1] + torch.arange(50)).all()
    made.close()


@pytest.mark.parametrize("name", ["reward", "action", STATE])
def test_extras_that_every_row_has_already_are_refused(spec, name):
    with pytest.raises(ConfigError):
        Spec(spec.observation, spec.action, 10.0, {name: Feature((2,))})


def test_the_first_windows_of_episodes_come_with_the_discounted_returns_that_followed(push, sources, make_segment):
    push("A", make_segment("won", 1, 0, 3))
    push("B", make_segment("lost", 2, 0, 7, ends="truncated"))  # lies between
    push("A", make_segment("won", 1, 3, 3, ends="terminated"))
    push("B", make_segment("shown", 3, 0, 4, ends="terminated", directive=2))
    found = sources()
    episodes = {e.id: e for held in found.held.values() for e in held.values()}
    batch, returns = found.beginnings([episodes["won"], episodes["lost"]], CHUNK_SAC, 0.5)
    assert starts(batch) == {(1, 0), (2, 0)}
    expected = [sum(0.5**i * i for i in range(steps)) for steps in (6, 7)]  # every reward is its index
    torch.testing.assert_close(returns, torch.tensor(expected))
    assert batch.reward.tolist() == [[0, 1, 2, 3, 4]] * 2
    short, returns = found.beginnings([episodes["shown"]], CHUNK_SAC, 1.0)
    assert (short.length.tolist(), returns.tolist(), short.task) == ([4], [6.0], ("reach",))


class Expects:
    """An algorithm that expects the same everywhere, or nothing at all."""

    windows, discount = {"update": CHUNK_SAC}, 0.5

    def __init__(self, value):
        self._value = value

    def value(self, batch):
        return None if self._value is None else torch.full((len(batch),), self._value)


def test_the_error_of_a_value_is_how_far_it_is_from_the_returns_in_the_mean(push, sources, make_segment):
    push("A", make_segment("short", 1, 0, 2, ends="terminated"), make_segment("long", 2, 0, 3, ends="truncated"))
    found = sources()  # their returns are 0.5 and 1
    episodes = list(found.held["online"].values())
    assert value_error(found, Expects(0.75), episodes, "cpu") == {"value_error": 0.25, "value_bias": 0.0}
    assert value_error(found, Expects(2.0), episodes, "cpu") == {"value_error": 1.25, "value_bias": 1.25}
    assert value_error(found, Expects(None), episodes, "cpu") == value_error(found, Expects(2.0), [], "cpu") == {}


def test_episodes_that_left_the_store_have_no_beginning(store, push, sources, make_segment):
    for i in range(30):
        push("A", make_segment(f"e{i}", i, 0, 10, ends="terminated"))
    episodes = [EpisodeInfo(*row) for row in store.index.catalog(0, 100)[1]]
    found = sources()
    batch, returns = found.beginnings(episodes, CHUNK, 1.0)
    assert len(batch) == len(returns) < 30
    assert (returns == 45).all()
    assert starts(batch) == {(key, 0) for key in range(30 - len(batch), 30)}
    assert found.beginnings(episodes[:3], CHUNK, 1.0) is None
    assert found.beginnings([], CHUNK, 1.0) is None
