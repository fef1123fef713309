"""A window may ask what is known of a step's episode, and gets what the last word has made of it."""

import dataclasses
from collections import defaultdict

import numpy as np
import pytest
from serl_client import Outcome

from serl_launcher.replay.columns import EPISODE, INDEX, REMAINING, RETURN, SUCCESS
from serl_launcher.types import Window

from .made import CHUNK_SAC, STATE, gathered, said, starts, whole_steps
from .test_verdicts import Model

DISCOUNT = 0.5
HORIZON = (0, 1, 2, 3, 4)


def window(*names, offsets=HORIZON, **more):
    return Window({STATE: (0,), "action": offsets, **dict.fromkeys(names, offsets)}, discount=DISCOUNT, **more)


ALL, TO_GO, PLACE = window(*EPISODE), window(RETURN, REMAINING), window(INDEX)


def test_each_step_has_its_episodes_return_success_index_and_what_remains(push, heard, make_segment):
    """Every reward is the index. A gap ends chunks, and not what the episode earns after it."""
    for start in (0, 3):
        part = make_segment("won", 1, start, 3, ends="terminated" if start else "")
        push("A", dataclasses.replace(part, gap=part.reward == 3))
        push("B", make_segment("open", 2, start, 3))
    push("A", Outcome("won", True))
    batch = heard().sample(300, ALL, {"online": 1.0})
    assert starts(batch) == {(1, i) for i in range(6)}
    found = {int(i): row for i, row in zip(batch.observation[STATE][:, 0, 1], range(300), strict=True)}
    columns = {name: value[found[1]].tolist() for name, value in batch.extras.items()}
    assert batch.valid[found[1]].tolist() == [True, True, False, False, False]
    assert columns == {
        RETURN: [sum(0.5**k * (t + k) for k in range(6 - t)) for t in (1, 2)] + [0.0] * 3,
        SUCCESS: [True, True, False, False, False], INDEX: [1, 2, 0, 0, 0], REMAINING: [4, 3, 0, 0, 0],
    }  # fmt: skip
    assert [str(value.dtype) for value in batch.extras.values()] == [f"torch.{f.dtype}" for f in EPISODE.values()]
    assert starts(heard().sample(300, PLACE, {"online": 1.0})) == {(1, i) for i in range(6)} | {(2, 0), (2, 1)}


def test_what_is_not_known_yet_starts_no_window_and_a_word_makes_it_known_or_takes_it_back(push, heard, make_segment):
    rewards = window(RETURN, offsets=(0,))
    labels = window(SUCCESS, offsets=(0,))
    push("A", make_segment("e1", 1, 0, 4))
    assert heard().sample(20, rewards, {"online": 1.0}) is None
    push("A", make_segment("e1", 1, 4, 2, ends="truncated"))

    def before_last():
        batch = heard().sample(60, rewards, {"online": 1.0})
        (value,) = batch.extras[RETURN][batch.observation[STATE][:, 0, 1] == 4].unique().tolist()
        return value

    assert before_last() == 4 + 0.5 * 5
    assert heard().sample(20, labels, {"online": 1.0}) is None, "nobody has judged it"
    for word, last, label in (("failure", -2.0, False), ("success", 5.0, True)):
        push("A", said("e1", word))
        assert before_last() == 4 + 0.5 * last
        assert heard().sample(20, labels, {"online": 1.0}).extras[SUCCESS].unique().tolist() == [label]
    push("A", said("e1", "nothing"))
    assert heard().sample(20, labels, {"online": 1.0}) is None
    assert before_last() == 4 + 0.5 * 5


def test_a_few_judged_steps_among_many_are_found(push, whole, heard, make_segment):
    whole(range(18))
    push("B", make_segment("rare", 99, 0, 1, ends="terminated"), Outcome("rare", False))
    batch = heard().sample(64, window(SUCCESS, offsets=(0,)), {"online": 1.0})
    assert starts(batch) == {(99, 0)}


class Gaps(Model):
    """As Model, and time passes without a step here and there."""

    def __init__(self, store, push, make_segment):
        def with_gaps(*args, **more):
            made = make_segment(*args, **more)
            return dataclasses.replace(made, gap=self.generator.random(len(made)) < 0.1)

        super().__init__(store, push, with_gaps)

    def known(self, records):
        """{number of a step: (return, success, index, remaining)} of closed episodes that are whole."""
        infos = {episode.number: episode for episode in self.store.index.latest(10_000)}
        rewards, episodes = self.expected(records), defaultdict(list)
        for record in records:
            episodes[int(record["episode"])].append(int(record["number"]))
        found = {}
        for episode, numbers in episodes.items():
            if not infos[episode].closed:
                continue
            to_go = 0.0
            for index, number in reversed(list(enumerate(numbers))):
                to_go = rewards[number][0] + DISCOUNT * to_go
                found[number] = (to_go, infos[episode].success, index, len(numbers) - 1 - index)
        return found


@pytest.mark.slow
@pytest.mark.parametrize("late", [False, True])
def test_whatever_is_said_and_evicted_every_step_has_what_the_last_word_makes_of_it(
    store, heard, push, make_segment, late
):  # fmt: skip
    """late: windows ask for the columns only after many episodes are there."""
    store.lives.hello("operator", "desk", "O", [])
    model, checked, unknown = Gaps(store, push, make_segment), 0, 0
    for turn in range(300):
        model.turn()
        sources = heard()
        if turn % 5 or (late and turn < 250):
            continue
        for each in (ALL, TO_GO):
            sources.sample(4, each, {"online": 1.0})
        buffer = sources.buffers["online"]
        numbers, records = whole_steps(buffer)
        known = model.known(records)
        ends = {n for n in numbers.tolist() if buffer._usable(np.array([n]), window())[0].size}
        assert {int(n) for n in buffer._usable(numbers, TO_GO)[0][:, 0]} == known.keys() & ends
        judged = {number for number, (_, success, _, _) in known.items() if success is not None}
        assert {int(n) for n in buffer._usable(numbers, ALL)[0][:, 0]} == judged & ends
        usable = np.array(sorted(known), np.int64)
        arrays = gathered(buffer, usable, ALL)
        rows = zip(*(arrays[name][:, 0].tolist() for name in (RETURN, SUCCESS, INDEX, REMAINING)), strict=True)
        for row, expected in zip(rows, (known[n] for n in usable.tolist()), strict=True):
            assert row == (pytest.approx(expected[0], rel=1e-5), bool(expected[1]), *expected[2:])
        checked, unknown = checked + len(usable), unknown + len(numbers) - len(usable)
    assert checked > (200 if late else 2000)
    assert unknown > 10


def test_an_own_column_of_that_name_is_not_what_a_window_gets_and_other_offsets_are_refused(sources):
    with pytest.raises(ValueError, match=r"'episode.return' has offsets \(1,\); it must use \(0,\), or the action's"):
        sources().sample(4, Window({**CHUNK_SAC.offsets, RETURN: (1,)}), {"online": 1.0})
