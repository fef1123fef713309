"""What an encoder says stands in a batch where its images would, is that of the same rows, and is computed once."""

import numpy as np
import pytest
import torch
from serl_client import Feature

from serl_launcher.replay.encoded import Encoder

from .made import CHUNK_SAC, SAC, SEQUENCE, STATE


class Counting:
    """An encoder of states that notes how many rows it was asked about."""

    def __init__(self):
        self.asked = 0

    def __call__(self, rows):
        self.asked += len(rows)
        return 3 * rows[:, :2] + 1


@pytest.fixture
def asked():
    return Counting()


@pytest.fixture
def both(read, asked):
    """both() -> (sources that encode the states, sources that do not), which draw the same."""
    encoders = {STATE: Encoder(Feature((2,), "float32"), asked)}
    return lambda: (read(encoders=encoders), read())


def same(encoded, plain, window, count=300):
    """Whether the next batch of both is of the same rows, the one as the encoder says them."""
    one, other = (each.sample(count, window, {"online": 1.0}) for each in (encoded, plain))
    for ours, theirs in ((one.observation, other.observation), (one.next_observation, other.next_observation)):
        if theirs is not None:
            assert ours[STATE].shape == (*theirs[STATE].shape[:-1], 2)
            assert torch.equal(ours[STATE], 3 * theirs[STATE][..., :2] + 1)
    return torch.equal(one.action, other.action)


@pytest.mark.parametrize("window", [SAC, CHUNK_SAC, SEQUENCE])
def test_a_window_holds_what_is_said_of_its_rows_and_no_row_is_asked_about_twice(both, whole, asked, window):
    whole(range(5), 9)
    encoded, plain = both()
    for _ in range(4):
        assert same(encoded, plain, window)
    assert 0 < asked.asked <= 5 * (9 + 1)
    once = asked.asked
    assert same(encoded, plain, window, 2000)
    assert asked.asked <= 5 * (9 + 1)
    assert same(encoded, plain, window, 2000)
    assert asked.asked == 5 * (9 + 1) >= once


def test_after_the_ring_has_wrapped_the_new_rows_are_asked_about(store, whole, mixture, asked):
    encoders = {STATE: Encoder(Feature((2,), "float32"), asked)}
    encoded, plain = mixture({}, encoders=encoders), mixture({})
    for first in range(0, 120, 7):  # 200 steps of each source are kept
        whole(range(first, first + 7), int(np.random.default_rng(first).integers(2, 20)))
        assert same(encoded(), plain(), SAC)
    assert plain().buffers["online"].tail > 200
    assert asked.asked > 200
