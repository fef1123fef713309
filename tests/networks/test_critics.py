"""How critics represent values: encodings and targets against closed forms, and what an ensemble takes."""

import math
from functools import partial

import pytest
import torch
from serl_client import ConfigError
from torch import distributions

from serl_launcher.networks.critics import C51, Critic, HLGauss, Scalar, Spread, TwoHot, symlog
from serl_launcher.networks.vision import ObservationEncoder
from tests.shared.models import STATE, robot

SPEC = robot(states=3, cameras=())
ATOMS = partial(C51, atoms=51, low=-10.0, high=10.0)
TWO_HOT = partial(TwoHot, bins=101, reach=10.0)
GAUSS = partial(HLGauss, bins=101, low=-10.0, high=10.0, sigma=0.75)
BINNED = {"c51": ATOMS, "two_hot": TWO_HOT, "hl_gauss": GAUSS}
binned = pytest.mark.parametrize("make", BINNED.values(), ids=BINNED)


def critic_of(values=Scalar, **options):
    torch.manual_seed(0)
    known = {"num_critics": 5, "num_target_critics": 5, "lowest": 0.0, "std_penalty": 0.0}
    critic = Critic(
        SPEC, encoder=ObservationEncoder(SPEC), horizon=1, values=values, hidden=[8], layer_norm=False,
        **{**known, **options},
    )  # fmt: skip
    for weight in critic.parameters():
        torch.nn.init.normal_(weight)
    return critic


def certain(probabilities):
    """The logits [1, B, K] of a critic that has learned these probabilities [B, K]."""
    return probabilities.log().unsqueeze(0)


def inputs(rows=6):
    return {STATE: torch.randn(rows, 3)}, torch.rand(rows, 1, 2)


# -- encodings


@binned
def test_a_target_within_the_range_is_what_a_critic_says_that_has_learned_it(make):
    values = make()
    margin = 4 * values.width if make is GAUSS else 0.0
    target = torch.linspace(-10 + margin, 10 - margin, 4001, dtype=torch.float64).float()
    said = values.mean(certain(values.encode(target)))[0]
    torch.testing.assert_close(said, target, atol=1e-3 * values.width, rtol=0)
    assert values.outside(target) == 0


def test_two_hot_comes_back_within_a_thousandth_of_a_bin_also_for_large_returns():
    values, far = TWO_HOT(), math.expm1(10)
    size = torch.logspace(-6, math.log10(far), 500).clamp(max=far)
    target = torch.cat([-size, torch.zeros(1), size])
    probabilities = values.encode(target)
    assert ((probabilities > 0).sum(-1) <= 2).all()
    torch.testing.assert_close(probabilities.sum(-1), torch.ones(len(target)))
    error = symlog(values.mean(certain(probabilities))[0]) - symlog(target)
    assert error.abs().max() < 1e-3 * values.width


def test_an_atom_that_is_hit_exactly_has_all_of_the_mass_and_the_mass_is_always_one():
    values = ATOMS()
    torch.testing.assert_close(values.encode(values.centers), torch.eye(51), atol=1e-5, rtol=0)
    anywhere = torch.cat([torch.empty(1000).uniform_(-15, 15), torch.tensor([-math.inf, math.inf])])
    mass = values.encode(anywhere)
    torch.testing.assert_close(mass.sum(-1), torch.ones(len(anywhere)), atol=1e-6, rtol=0)
    torch.testing.assert_close(mass @ values.centers, anywhere.clamp(-10, 10), atol=1e-5, rtol=0)
    assert (mass >= 0).all()


def test_a_gaussian_target_is_the_normal_distribution_of_three_quarters_of_a_bin_and_sums_to_one_at_both_ends():
    values = GAUSS()
    target = torch.tensor([-10.0, -9.99, 0.0, 0.123, 9.9, 10.0, -50.0, 50.0])
    edges = torch.linspace(-10, 10, 102)
    below = distributions.Normal(target.clamp(-10, 10)[:, None], 0.75 * 20 / 101).cdf(edges)
    expected = below.diff() / (below[:, -1:] - below[:, :1])
    torch.testing.assert_close(values.encode(target), expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(values.encode(target).sum(-1), torch.ones(8))


@binned
def test_the_loss_is_the_cross_entropy_and_is_least_for_the_targets_own_distribution(make):
    values, target, prediction = make(), torch.tensor([-3.0, 0.0, 2.5]), torch.randn(4, 3, make().bins)
    expected = torch.nn.functional.cross_entropy(
        prediction.flatten(0, 1), values.encode(target).repeat(4, 1), reduction="none"
    )
    torch.testing.assert_close(values.loss(prediction, target).flatten(), expected)
    learned = certain(values.encode(target) + 1e-12).requires_grad_()
    (gradient,) = torch.autograd.grad(values.loss(learned, target).sum(), learned)
    assert gradient.abs().max() < 1e-5


@binned
def test_an_untrained_critic_says_about_nothing_as_one_of_squared_errors_does(make):
    """In the middle of the range from 0 to 1 it would promise a success that was never seen."""
    unit = {"low": 0.0, "high": 1.0} if make is not TWO_HOT else {}
    values = make(**unit)
    said = values.mean(values.layer(3, 8)(torch.randn(3, 5, 8)))
    assert said.shape == (3, 5)
    assert said.abs().max() < 0.02


def test_targets_beyond_the_range_are_told():
    target = torch.tensor([0.0, 10.1, 11.0, -12.0])
    assert ATOMS().outside(target) == GAUSS().outside(target) == 0.5, "less than a bin beyond is none"
    assert TWO_HOT().outside(torch.tensor([0.0, 20_000.0, 50_000.0, -1.0])) == 0.25
    assert Scalar().outside(target) is None
    spread = Spread(torch.tensor([[0.0, 20.0], [30.0, 0.0]]), torch.tensor([[0.9, 0.5], [0.1, 0.5]]))
    torch.testing.assert_close(ATOMS().outside(spread), torch.tensor(0.3))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: ATOMS(atoms=1), "1 bins"), (lambda: GAUSS(low=1.0, high=1.0), "from 1.0 to 1.0"),
        (lambda: critic_of(lowest=1.5), "lowest=1.5"),
        (lambda: critic_of(num_target_critics=0), "num_target_critics=0"),
    ],
)  # fmt: skip
def test_what_makes_no_critic_is_refused(make, said):
    with pytest.raises(ConfigError, match=f"critic.*{said}"):
        make()


# -- targets of an ensemble


@pytest.mark.parametrize("make", [Scalar, *BINNED.values()], ids=["mse", *BINNED])
def test_a_target_takes_the_minimum_the_mean_the_lowest_share_or_less_than_the_mean(make):
    observation, action = inputs()

    def taken(**options):
        critic = critic_of(make, **options)
        target = critic.target(observation, action, lambda value: 2 * value, torch.Generator().manual_seed(3))
        target = (target.values * target.shares).sum(0) if isinstance(target, Spread) else target
        return critic.value(observation, action).detach(), target / 2

    check = partial(torch.testing.assert_close, atol=2e-4, rtol=2e-4)
    values, least = taken()
    check(least, values.amin(0))
    if make is Scalar:
        assert torch.equal(least, values.amin(0)), "published runs stay as they are"
    values, low = taken(lowest=0.4)
    check(low, values.sort(0).values[:2].mean(0))
    values, mean = taken(lowest=1.0)
    check(mean, values.mean(0))
    _, pessimist = taken(lowest=1.0, std_penalty=0.5)
    check(pessimist, values.mean(0) - 0.5 * values.std(0, correction=0))
    drawn = torch.randperm(5, generator=torch.Generator().manual_seed(3))[:2]
    values, least = taken(num_target_critics=2)
    check(least, values[drawn].amin(0))


def test_the_target_of_c51_is_the_projection_of_bellemare():
    """Algorithm 1 of the paper, atom by atom, of the critic whose mean is the lowest."""
    critic, (observation, action) = critic_of(ATOMS), inputs()
    reward, discount = torch.randn(6), torch.tensor([0.9, 0.9, 0.0, 0.9, 0.0, 0.9])  # 0: terminated
    target = critic.target(observation, action, lambda value: reward + discount * value, torch.Generator())
    assert isinstance(target, Spread)
    logits = critic(observation, action).detach()
    atoms, width = torch.linspace(-10, 10, 51).tolist(), 20 / 50
    expected = torch.zeros(6, 51)
    for row in range(6):
        worst = critic.values.mean(logits)[:, row].argmin()
        for atom, mass in zip(atoms, logits[worst, row].softmax(0).tolist(), strict=True):
            moved = min(10.0, max(-10.0, float(reward[row]) + float(discount[row]) * atom))
            place = (moved + 10) / width
            low, high = math.floor(place), math.ceil(place)
            expected[row, low] += mass * (high - place if high > low else 1.0)
            expected[row, high] += mass * (place - low)
    prediction = torch.randn(5, 6, 51)
    cross = -(expected * prediction.log_softmax(-1)).sum(-1)
    torch.testing.assert_close(critic.loss(prediction, target), cross.sum(0), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(expected.sum(-1), torch.ones(6))
