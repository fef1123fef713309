"""Windows that go on in other episodes: which entries they have, how often, and what is remembered of them."""

from collections import Counter
from functools import partial

import numpy as np
import pytest
import torch
from serl_client import Feature

from serl_launcher.replay.joined import Links, joined
from serl_launcher.replay.views import View
from serl_launcher.types import IdleFilter, Window

from .made import STATE

EVERY = tuple(range(16))
JOINED = Window({STATE: EVERY, "action": EVERY, "episode.index": EVERY, "derived.code": (0,)}, joins=True)
ALONE = {"whole": 1.0}


@pytest.fixture
def mixture(read):
    views = {"whole": View(("online", "demo"), min_length=3)}
    return partial(read, views, derived={"code": Feature((2,), "float16")})


def test_an_episode_is_followed_by_its_final_observation_and_the_beginning_of_another_of_the_view(
    push, mixture, make_segment
):
    push("A", make_segment("short", 9, 0, 2, ends="terminated"))  # not in the view
    push("A", make_segment("a", 1, 0, 3, ends="terminated"), make_segment("b", 2, 0, 7, ends="truncated"))
    push("B", make_segment("open", 3, 0, 4))
    batch, found = mixture().sample(64, JOINED, ALONE), Counter()
    keys, indices = batch.observation[STATE][..., 0].int(), batch.observation[STATE][..., 1].int()
    ends = {1: 3, 2: 7, 3: 3}  # the row that is an episode's last: a final one, but of the open episode
    assert set(keys.unique().tolist()) == {1, 2, 3}
    for row in range(64):
        for k in range(16):
            key, index = int(keys[row, k]), int(indices[row, k])
            is_step = bool(batch.valid[row, k])
            assert is_step == (key == 3 or index < ends[key])
            assert batch.extras["episode.index"][row, k] == (index if is_step else 0)
            assert (batch.step_id[row, k] >= 0) == is_step
            assert batch.terminated[row, k] == (key == 1 and index == 2)
            if not is_step:
                assert batch.action[row, k].abs().sum() == batch.reward[row, k] == 0
            if k < 15:
                after = int(keys[row, k + 1]), int(indices[row, k + 1])
                assert after[1] == 0 if index == ends[key] else after == (key, index + 1)
                found[key] += index == ends[key]
    assert len(found) == 3


def test_every_entry_of_a_window_is_uniform_over_all_rows():
    lengths = [2, 3, 7]  # rows of three episodes, the final ones among them
    first = np.cumsum([0, *lengths])[:-1]
    row = np.concatenate([np.arange(n) for n in lengths])
    steps = [np.arange(begin, begin + n - 1) for begin, n in zip(first, lengths, strict=True)]
    following, final, ends = np.full(12, -1), np.full(12, -1), np.zeros(12, bool)
    for each in steps:
        following[each[:-1]], final[each[-1]], ends[each[-1]] = each[1:], each[-1] + 1, True
    links = Links(np.arange(12), final, np.repeat(first, lengths), following, ends)
    starts = np.random.default_rng(0).choice(np.concatenate(steps), 30_000)
    drawn = joined(starts, 40, links, first, np.random.default_rng(1))
    share = np.bincount(drawn.rows[:, 25:].reshape(-1), minlength=12) / drawn.rows[:, 25:].size
    assert row.size == 12
    np.testing.assert_allclose(share, 1 / 12, atol=2e-3)


def test_what_is_derived_of_every_step_is_what_a_later_window_begins_with_and_else_zero(push, mixture, make_segment):
    push("A", make_segment("a", 1, 0, 30, ends="terminated"))
    push("B", make_segment("b", 2, 0, 30, ends="terminated"))
    sources = mixture()
    batch = sources.sample(4, JOINED, ALONE)
    assert (batch.extras["derived.code"] == 0).all()
    told = {tuple(row) for rows, valid in zip(batch.observation[STATE][..., :2], batch.valid, strict=True)
            for row in rows[valid].tolist()}  # fmt: skip
    sources.derive(batch.step_id, {"code": batch.observation[STATE][..., :2] + 1})
    resumed = mixture()
    resumed.load_state_dict(sources.state_dict())
    for each in (sources, resumed):
        batch = each.sample(64, JOINED, ALONE)
        for row, code in zip(batch.observation[STATE][:, 0, :2].tolist(), batch.extras["derived.code"], strict=True):
            assert code[0].tolist() == ([row[0] + 1, row[1] + 1] if tuple(row) in told else [0, 0])
    assert torch.equal(sources.sample(8, JOINED, ALONE).step_id, resumed.sample(8, JOINED, ALONE).step_id)


def test_what_no_joined_window_can_tell_is_refused():
    for further, options in (
        ({"next_observation": (16,)}, {}), ({"episode.return": EVERY}, {}), ({STATE: (0,)}, {}),
        ({}, {"idle_filter": IdleFilter(0.1)}),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="joins episodes"):
            Window({"action": EVERY, **further}, joins=True, **options)
