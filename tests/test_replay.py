"""Windows never cross an episode, see every durable step, and never a row that is being overwritten."""

import dataclasses

import numpy as np
import pytest
import torch
from serl_client import ConfigError, Feature, Outcome, Spec

from serl_launcher.data import layout
from serl_launcher.data.episodes import View
from serl_launcher.data.replay import ReplayBuffer, batch_arrays
from serl_launcher.data.sources import Sources
from serl_launcher.data.store import Store
from serl_launcher.service.ledger import value_error
from serl_launcher.types import Window

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
    for epoch in "AB":
        made.hello(f"arm {epoch}", f"outbox {epoch}", epoch, [])
    yield made
    made.close()


@pytest.fixture
def push(store):
    def push(epoch, *records):
        for record in records:
            store.stage(epoch, store.expected(epoch), record)
        store.commit()

    return push


@pytest.fixture
def sources(store, spec):
    views = {"success": View(("online", "demo"), ("successful",)), "long": View(("online",), min_length=6)}
    made = Sources(store.folder, spec, {"online": 200, "demo": 200}, views, seed=0)
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
    store.close_epoch("A")
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


def test_views_hold_what_their_filter_says_and_follow_a_corrected_outcome(push, sources, make_segment):
    push("A", make_segment("win", 1, ends="terminated"), Outcome("win", True))
    push("A", make_segment("loss", 2, ends="terminated"), Outcome("loss", False))
    push("B", make_segment("shown", 3, 0, 8, ends="terminated", directive=2), Outcome("shown", True))
    found = sources()
    assert {key for key, _ in starts(found.sample(400, SAC, {"success": 1.0}))} == {1, 3}
    assert (found.size("success"), found.size("online"), found.size("long")) == ((12, 2), (8, 2), (0, 0))
    push("A", Outcome("win", False, by="operator"), Outcome("loss", True, by="operator"))
    assert {key for key, _ in starts(sources().sample(400, SAC, {"success": 1.0}))} == {2, 3}
    push("A", Outcome("loss", True, discard=True, by="operator"))
    found = sources()
    assert {key for key, _ in starts(found.sample(400, SAC, {"success": 1.0}))} == {3}
    assert {key for key, _ in starts(found.sample(400, SAC, {"online": 1.0}))} == {1}


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
    window = Window({STATE: (0,), "action": (0, 1, 2, 3)}, starts="decision")
    assert {i for _, i in starts(sources().sample(300, window, {"online": 1.0}))} == {0, 4, 8, 12}


def test_windows_start_where_the_rows_of_a_view_say_and_go_on_over_the_others(push, store, spec, make_segment):
    segment = make_segment("e0", 1, 0, 12, ends="terminated")
    segment.intervened[4:8] = True
    push("A", segment, make_segment("e1", 2, 0, 4, ends="terminated"))
    views = {"human": View(("online",), rows="intervened"), "alone": View(("online",), rows="autonomous")}
    sources = Sources(store.folder, spec, {"online": 200, "demo": 200}, views, seed=0)
    sources.update(store.index.catalog(0, 10)[1])
    human = sources.sample(300, CHUNK, {"human": 1.0})
    assert starts(human) == {(1, i) for i in range(4, 8)}
    assert human.valid.all()
    assert not human.intervened.all()
    assert starts(sources.sample(300, CHUNK, {"alone": 1.0})) == {
        *((1, i) for i in range(12) if not 4 <= i < 8), *((2, i) for i in range(4))
    }  # fmt: skip
    assert (sources.size("human"), sources.size("alone")) == ((4, 2), (12, 2))


def test_no_window_starts_where_the_robot_stays_still_and_no_row_is_lost(push, sources, make_segment):
    segment = make_segment("e0", 1, 0, 20, ends="truncated")
    segment.observation[STATE][5:15] = segment.observation[STATE][5]
    push("A", segment)
    still = Window(CHUNK.offsets, stillness=0.1)
    drawn = {int(step) % 200 for step in sources().sample(400, still, {"online": 1.0}).step_id}
    assert drawn == set(range(20)) - set(range(5, 11))
    assert {int(step) for step in sources().sample(400, CHUNK, {"online": 1.0}).step_id} == set(range(20))


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
    segment.decision[:] = np.arange(500) % 50 == 0
    own = {"weights": np.full((500, 3), 7.0, np.float32), "number": np.arange(500)}
    made.stage("A", 0, dataclasses.replace(segment, extras=own))
    made.commit()
    found = Sources(made.folder, spec, {"online": 2000}, {}, seed=0)
    found.update(made.index.catalog(0, 10)[1])
    offsets = tuple(range(50))
    window = Window({STATE: (0,), "action": offsets, "weights": offsets, "number": offsets}, starts="decision")
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
    episodes = {episode.id: episode for episode in found.episodes.values()}
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
    episodes = list(found.episodes.values())
    assert value_error(found, Expects(0.75), episodes, "cpu") == {"value_error": 0.25, "value_bias": 0.0}
    assert value_error(found, Expects(2.0), episodes, "cpu") == {"value_error": 1.25, "value_bias": 1.25}
    assert value_error(found, Expects(None), episodes, "cpu") == value_error(found, Expects(2.0), [], "cpu") == {}


def test_episodes_that_left_the_store_have_no_beginning(push, sources, make_segment):
    for i in range(30):
        push("A", make_segment(f"e{i}", i, 0, 10, ends="terminated"))
    found = sources()
    episodes = list(found.episodes.values())
    batch, returns = found.beginnings(episodes, CHUNK, 1.0)
    assert len(batch) == len(returns) < 30
    assert (returns == 45).all()
    assert starts(batch) == {(key, 0) for key in range(30 - len(batch), 30)}
    assert found.beginnings(episodes[:3], CHUNK, 1.0) is None
    assert found.beginnings([], CHUNK, 1.0) is None
