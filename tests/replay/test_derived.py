"""Columns that an algorithm computes of stored steps, and updates that see each step once."""

import copy
import dataclasses
from functools import partial

import pytest
import torch
from serl_client import Feature, Outcome

from serl_launcher.replay.views import View
from serl_launcher.types import Window

from .made import STATE, starts

DERIVED = {"code": Feature((2,)), "flag": Feature((), "bool")}
PLAIN = Window({STATE: (0,), "action": (0,)})
CODES = Window({STATE: (0,), "action": (0, 1), "derived.code": (0, 1)})


@pytest.fixture
def mixture(read):
    """mixture() -> a reader that is up to date; each has its own memory."""
    return partial(read, derived=DERIVED)


def code(batch):
    """A column that tells its step: [key, index]."""
    return {"code": batch.observation[STATE][:, 0, :2].clone()}


def derive(sources, is_chosen):
    """Give the steps of `online` their column where is_chosen(key, index)."""
    batch = sources.sample(500, PLAIN, {"online": 1.0})
    among = is_chosen(*batch.observation[STATE][:, 0, :2].T)
    sources.derive(batch.step_id[among], {"code": code(batch)["code"][among]})


def all_of(sources, count, window=PLAIN, names=("online", "demo"), seen=None):
    """The batches of one pass, and what is seen then."""
    batches, seen = [], seen or {}
    while True:
        batch, seen = sources.unseen(count, window, names, seen)
        if batch is None:
            return batches, seen
        batches.append(copy.deepcopy(batch))  # the next one uses its memory


def visited(batches):
    """[(key, index)] of the rows that count."""
    rows = [(batch.observation[STATE][:, 0, :2].tolist(), batch.weight.tolist()) for batch in batches]
    return [
        tuple(map(int, row)) for states, weights in rows for row, weight in zip(states, weights, strict=True) if weight
    ]


# -- derived columns


def test_a_window_begins_only_where_its_columns_are_computed_and_has_what_was_computed(push, whole, mixture):
    whole([1, 2], 6)
    sources = mixture()
    assert sources.sample(8, CODES, {"online": 1.0}) is None
    derive(sources, lambda key, index: key == 1)
    drawn = sources.sample(300, CODES, {"online": 1.0})
    assert starts(drawn) == {(1, i) for i in range(6)}
    there = drawn.valid.unsqueeze(-1)
    following = drawn.observation[STATE][:, :1, :2] + torch.tensor([[0.0, 0.0], [0.0, 1.0]])
    torch.testing.assert_close(drawn.extras["derived.code"], following * there)


def test_a_window_may_ask_for_a_column_of_its_first_step_alone(whole, mixture):
    whole([1], 6)
    sources, window = mixture(), Window({STATE: (0,), "action": (0, 1, 2), "derived.code": (0,), "episode.index": (0,)})
    derive(sources, lambda key, index: index == 3)
    drawn = sources.sample(30, window, {"online": 1.0})
    assert starts(drawn) == {(1, 3)}
    assert drawn.action.shape[1] == 3
    torch.testing.assert_close(drawn.extras["derived.code"], drawn.observation[STATE][:, :, :2])
    assert drawn.extras["episode.index"].tolist() == [[3]] * 30


def test_a_window_over_a_step_that_is_not_computed_does_not_begin(whole, mixture):
    whole([1], 6)
    sources = mixture()
    derive(sources, lambda key, index: index != 3)
    assert starts(sources.sample(300, CODES, {"online": 1.0})) == {(1, 0), (1, 1), (1, 4), (1, 5)}


def test_columns_survive_eviction_and_a_resumed_reader_and_evicted_ones_never_come_back(whole, mixture, store):
    whole(range(15), 10)
    first = mixture()
    batches, _ = all_of(first, 16)
    for batch in batches:
        first.derive(batch.step_id, code(batch))
    kept = first.state_dict()
    stale, _ = first.unseen(4, PLAIN, ("online",), {})
    stale = stale.step_id.clone()
    whole(range(15, 30), 10)  # the ring has 200 steps: the first ten episodes and more are gone
    second = mixture()
    second.load_state_dict(kept)
    evicted = second.buffers["online"].tail
    assert evicted >= 100
    expected = {(i, k) for i in range(15) for k in range(10) if 10 * i >= evicted}
    assert expected
    second.derive(stale, {"code": torch.full((4, 2), 7.0)})  # computed while they were evicted
    drawn = second.sample(800, CODES, {"online": 1.0})
    assert starts(drawn) == expected
    torch.testing.assert_close(drawn.extras["derived.code"][:, 0], drawn.observation[STATE][:, 0, :2])


def test_a_value_that_is_not_finite_stays_unknown(whole, mixture):
    whole([1])
    sources = mixture()
    sources.derive(torch.arange(4), {"code": torch.tensor([[0.0, 1.0], [torch.nan, 0.0], [1.0, 1.0], [2.0, 3.0]])})
    batch = sources.sample(64, CODES, {"online": 1.0})
    assert set(batch.step_id.tolist()) == {2}, "the only one of which both codes are known"


@pytest.mark.parametrize("columns", [{"other": torch.zeros(3, 2)}, {"code": torch.zeros(3, 4)}])
def test_a_column_that_the_algorithm_does_not_have_is_refused(whole, mixture, columns):
    whole([1])
    sources = mixture()
    with pytest.raises(ValueError, match=r"an update gave derived\.\w+ \[3"):
        sources.derive(torch.arange(3), columns)
    assert sources.sample(8, CODES, {"online": 1.0}) is None


# -- order: once


@pytest.mark.parametrize("count", [1, 7, 16, 64])
def test_each_step_comes_once_in_the_order_of_the_episodes(push, whole, mixture, make_segment, count):
    for start in (0, 3):  # the steps of two episodes lie between each other
        for session, key in (("A", 1), ("B", 2)):
            push(session, make_segment(f"e{key}", key, start, 3, ends="terminated" if start else ""))
    whole([3, 4], 5)
    push("A", make_segment("demo", 9, 0, 4, ends="truncated", directive=2, phase="demonstrate"))
    batches, seen = all_of(mixture(), count)
    expected = [(key, i) for key, length in ((1, 6), (2, 6), (3, 5), (4, 5), (9, 4)) for i in range(length)]
    assert visited(batches) == expected
    assert all(len(batch) == count for batch in batches)
    assert all_of(mixture(), count, seen=seen)[0] == [], "a resumed reader has seen them, too"
    whole([5], 2)
    assert visited(all_of(mixture(), count, seen=seen)[0]) == [(5, 0), (5, 1)]


def test_what_repeats_a_row_at_the_end_has_no_weight(whole, mixture):
    whole([1], 5)
    batch, _ = mixture().unseen(8, PLAIN, ("online",), {})
    assert batch.weight.tolist() == [1] * 5 + [0] * 3
    assert batch.step_id.tolist() == [0, 1, 2, 3, 4, 4, 4, 4]
    assert mixture().sample(8, PLAIN, {"online": 1.0}).weight.tolist() == [1] * 8


def test_an_open_episode_and_all_after_it_wait_until_it_is_closed(push, whole, mixture, make_segment):
    whole([1], 3)
    push("B", make_segment("open", 2, 0, 4))
    whole([3], 3)
    batches, seen = all_of(mixture(), 8)
    assert visited(batches) == [(1, i) for i in range(3)]
    push("B", make_segment("open", 2, 4, 1, ends="terminated"))
    assert visited(all_of(mixture(), 8, seen=seen)[0]) == [(2, i) for i in range(5)] + [(3, i) for i in range(3)]


def test_a_view_and_a_window_say_which_steps_count(push, whole, mixture, make_segment):
    """Windows of `chunk_start` begin at each fourth step; discarded and failed episodes are not in the view."""
    for key, word in ((1, Outcome("e1", True)), (2, Outcome("e2", False)), (3, Outcome("e3", True, True))):
        push("A", make_segment(f"e{key}", key, 0, 6, ends="terminated"), word)
    sources = mixture({"good": View(("online",), ("successful",))})
    window = dataclasses.replace(PLAIN, starts="chunk_start")
    assert visited(all_of(sources, 4, window, ("good",))[0]) == [(1, 0), (1, 4)]


def test_a_window_may_begin_with_its_episode_alone(push, whole, mixture, make_segment):
    """Also where the steps of two episodes lie between each other; an open one gives none that needs its return."""
    for start in (0, 3):
        for session, key in (("A", 1), ("B", 2)):
            push(session, make_segment(f"e{key}", key, start, 3, ends="terminated" if start else ""))
    whole([3, 4], 5)
    push("B", make_segment("open", 5, 0, 4))
    first = dataclasses.replace(PLAIN, starts="episode_start")
    assert visited(all_of(mixture(), 3, first, ("online",))[0]) == [(key, 0) for key in (1, 2, 3, 4)]
    assert starts(mixture().sample(100, first, {"online": 1.0})) == {(key, 0) for key in range(1, 6)}
    told = dataclasses.replace(first, offsets={**PLAIN.offsets, "episode.return": (0,)})
    assert starts(mixture().sample(100, told, {"online": 1.0})) == {(key, 0) for key in range(1, 5)}


def test_a_pass_over_more_than_the_ring_holds_sees_what_is_left(whole, mixture, store):
    whole(range(15), 10)
    sources = mixture()
    _, seen = sources.unseen(10, PLAIN, ("online",), {})
    whole(range(15, 30), 10)
    newer = mixture()
    tail = newer.buffers["online"].tail
    assert tail > 0
    keys = sorted({key for key, _ in visited(all_of(newer, 16, seen=seen)[0])})
    assert keys == list(range(tail // 10 + bool(tail % 10), 30))
