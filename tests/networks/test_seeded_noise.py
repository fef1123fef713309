"""Chance that belongs to a row: its numbers have the right distribution, and nobody else's company changes them."""

import math
from dataclasses import fields, replace
from statistics import NormalDist

import pytest
import torch

from serl_launcher.networks.seeded_noise import normal, uniform
from serl_launcher.types import Batch
from tests.shared.models import batch, robot

ROWS, PLACES = 20_000, 8
SEED = torch.randint(2**62, (ROWS,), generator=torch.Generator().manual_seed(0))  # as ReplayMixture draws them
NEARBY = torch.arange(ROWS)  # and the worst that could come: one bit or two apart
either = pytest.mark.parametrize("seed", [SEED, NEARBY], ids=["drawn", "counted"])


def correlation(one, other):
    """Of two columns of numbers, with the standard error of 1 / sqrt(n) where there is none."""
    return torch.corrcoef(torch.stack([one.flatten().double(), other.flatten().double()]))[0, 1].item()


@either
def test_normal_numbers_have_the_moments_and_the_tails_of_a_normal_distribution(seed):
    drawn = normal(seed, (PLACES,)).double()
    for power, moment in ((1, 0), (2, 1), (3, 0), (4, 3)):
        spread = math.sqrt({1: 1, 2: 2, 3: 15, 4: 96}[power] / drawn.numel())  # of the mean of z^power
        assert (drawn**power).mean().item() == pytest.approx(moment, abs=5 * spread)
    for bound in (-2.0, -0.5, 0.0, 1.0, 3.0):
        share = (1 + math.erf(bound / math.sqrt(2))) / 2
        assert (drawn < bound).double().mean().item() == pytest.approx(share, abs=0.006)


@either
def test_uniform_numbers_fill_their_interval_evenly_and_never_reach_its_ends(seed):
    drawn = uniform(seed, (PLACES,), 0)
    counts = torch.histc(drawn, bins=16, min=0, max=1)
    expected = drawn.numel() / 16
    assert (counts - expected).square().sum() / expected < 45  # chi squared of 15: 1e-4
    assert 0 < drawn.min() < 1e-4
    assert 1 - 1e-4 < drawn.max() < 1


@either
def test_rows_places_and_streams_know_nothing_of_each_other(seed):
    drawn, other = normal(seed, (PLACES,)), normal(seed, (PLACES,), 1)
    limit = 5 / math.sqrt(ROWS)
    assert abs(correlation(drawn[:-1], drawn[1:])) < limit
    for place in range(1, PLACES):
        assert abs(correlation(drawn[:, 0], drawn[:, place])) < limit
        assert abs(correlation(drawn[:, 0].abs(), drawn[:, place].abs())) < limit
    assert abs(correlation(drawn, other)) < limit
    assert abs(correlation(drawn.abs(), other.abs())) < limit
    assert abs(correlation(drawn, uniform(seed, (PLACES,), 0))) < limit


def test_a_row_has_the_same_numbers_in_any_batch_and_in_any_part_of_it():
    whole, times = normal(SEED[:64], (4, 3)), uniform(SEED[:64], (), 1)
    assert whole.shape == (64, 4, 3)
    assert times.shape == (64,)
    assert whole.dtype == times.dtype == torch.float32
    order = torch.randperm(64, generator=torch.Generator().manual_seed(1))
    assert torch.equal(normal(SEED[:64][order], (4, 3)), whole[order])
    for i in (0, 17, 63):
        assert torch.equal(normal(SEED[i : i + 1], (4, 3))[0], whole[i])
        assert torch.equal(uniform(SEED[i : i + 1], (), 1)[0], times[i])
    parts = [normal(part, (4, 3)) for part in SEED[:64].split(16)]
    assert torch.equal(torch.cat(parts), whole)
    longer = normal(SEED[:64], (9, 3))[:, :4]
    assert torch.equal(longer, whole), "the sampler that stops early starts from the same noise"


def test_the_numbers_are_the_same_for_ever():
    """A run that was begun before an upgrade goes on with the same noise: SplitMix64, computed without wrapping, and
    normal numbers as quantiles."""

    def mixed(bits):
        bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        bits = (bits ^ bits >> 27) * 0x94D049BB133111EB % 2**64
        return bits ^ bits >> 31

    def number(stream, place):
        bits = mixed((int(SEED[0]) + 0x632BE59BD9B4E019 * stream + 0x1E3779B97F4A7C15 * place) % 2**64)
        return ((bits >> 40) + 0.5) / 2**24

    expected = [(number(3 + 2**32, place) + 0.5) % 1 for place in (1, 2, 3)]
    torch.testing.assert_close(uniform(SEED[:1], (3,), 3)[0], torch.tensor(expected))
    expected = [NormalDist().inv_cdf((number(0, place) + 0.5) % 1) for place in (1, 2, 3)]
    torch.testing.assert_close(normal(SEED[:1], (3,))[0], torch.tensor(expected), rtol=0, atol=1e-5)


def test_the_parts_of_a_batch_are_its_rows_in_order_with_all_their_columns():
    """Micro-batches and ranks: a row keeps its seed, and so its noise, wherever it lands."""
    rows = batch(robot(), 8, 2, length=torch.arange(8) % 2 + 1, seed=3, task=tuple("abcdefgh"))
    rows = replace(rows, weight=torch.randn(8), extras={"mean": torch.randn(8, 2)})
    parts = [rows.part(i, 4) for i in range(4)]
    for column in fields(Batch):
        value, pieces = getattr(rows, column.name), [getattr(part, column.name) for part in parts]
        if isinstance(value, torch.Tensor):
            assert torch.equal(torch.cat(pieces), value), column.name
        elif isinstance(value, dict):
            assert all(torch.equal(torch.cat([piece[name] for piece in pieces]), value[name]) for name in value)
        else:
            assert sum(pieces, ()) == value
    assert torch.equal(torch.cat([normal(part.seed, (4,)) for part in parts]), normal(rows.seed, (4,)))


@pytest.mark.gpu
def test_a_gpu_draws_the_same_numbers():
    torch.testing.assert_close(normal(SEED.cuda(), (PLACES,)).cpu(), normal(SEED, (PLACES,)), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(uniform(SEED.cuda(), (), 1).cpu(), uniform(SEED, (), 1))
