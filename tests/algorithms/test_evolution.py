"""CMA-ES beside closed forms and beside pycma: how many evaluations it takes, and what its state is."""

import warnings

import numpy as np
import pytest
import torch

from serl_launcher.algorithms.evolution import CMAES

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of its plots
    cma = pytest.importorskip("cma")

pytestmark = pytest.mark.usefixtures("one_thread")

SIZE, MOST, GOAL = 20, 30_000, 1e-6
ROTATION = torch.linalg.qr(torch.randn(SIZE, SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(3)))[0]
LENGTHS = 10 ** (6 * torch.arange(SIZE, dtype=torch.float64) / (SIZE - 1))  # squared, of the axes


def sphere(vectors):
    return vectors.square().sum(1)


def ellipsoid(vectors):
    return (vectors.square() * LENGTHS).sum(1)


def rotated(vectors):
    return ellipsoid(vectors @ ROTATION.T)


def search(seed=0, size=SIZE, **options):
    return CMAES(size, **{"population": None, "sigma": 0.5, "diagonal": False, "seed": seed, **options})


def evaluations(cost, ask, tell):
    """How many vectors are tried until one costs less than GOAL."""
    tried = 0
    while tried < MOST:
        vectors = ask()
        costs = cost(vectors)
        tried += len(costs)
        if costs.min() < GOAL:
            return tried
        tell(vectors, costs)
    raise AssertionError(f"{tried} vectors did not reach {GOAL}")


def ours(cost, **options):
    evolution = search(**options)
    evolution.mean.fill_(1)
    return evaluations(cost, evolution.ask, lambda _, costs: evolution.tell(costs))


def peers(cost):
    """The same by pycma."""
    peer = cma.CMAEvolutionStrategy([1.0] * SIZE, 0.5, {"seed": 1, "verbose": -9, "tolfun": 0, "tolx": 0})
    return evaluations(
        lambda vectors: cost(torch.tensor(np.array(vectors))), peer.ask,
        lambda vectors, costs: peer.tell(vectors, costs.tolist()),
    )  # fmt: skip


@pytest.mark.parametrize("diagonal", [False, True])
def test_a_sphere_of_20_dimensions_is_solved(diagonal):
    assert ours(sphere, diagonal=diagonal) < 3000


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_rotated_ellipsoid_takes_at_most_half_more_evaluations_than_cma():
    assert ours(rotated) <= 1.5 * peers(rotated)


def test_variances_alone_solve_an_ellipsoid_along_the_axes_in_less_than_half_of_what_the_rotated_one_takes():
    assert ours(ellipsoid, diagonal=True) < 5000


@pytest.mark.parametrize("diagonal", [False, True])
def test_candidates_are_drawn_from_its_mean_and_covariance_again_and_again_alike(diagonal):
    evolution = search(population=4000, size=3, diagonal=diagonal)
    evolution.mean.copy_(torch.tensor([1.0, -2.0, 3.0]))
    half = torch.tensor([[2.0, 0.0, 0.0], [0.5, 1.0, 0.0], [0.0, 0.3, 0.1]], dtype=torch.float64)
    covariance = half @ half.T
    evolution.covariance.copy_(covariance.diagonal() if diagonal else covariance)
    evolution.generation += 100
    evolution._decompose()
    drawn = evolution.ask()
    assert torch.equal(drawn, evolution.ask())
    torch.testing.assert_close(drawn.mean(0), evolution.mean, atol=0.1, rtol=0)
    expected = 0.25 * (torch.diag(covariance.diagonal()) if diagonal else covariance)
    torch.testing.assert_close(drawn.T.cov(), expected, atol=0.05, rtol=0.05)
    evolution.generation += 1
    assert not torch.equal(drawn, evolution.ask())
    other = search(seed=1, population=4000, size=3, diagonal=diagonal)
    assert not torch.isclose(other.ask(), search(population=4000, size=3, diagonal=diagonal).ask()).any()
