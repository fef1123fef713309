"""Heads of chunk policies: each loss and each sampler is the closed form of its file.

Networks are functions here, which know what is best; nothing is trained.
"""

import math
from functools import partial

import numpy as np
import pytest
import torch
from serl_client import ConfigError

from serl_launcher.networks.seeded_noise import normal, uniform
from serl_launcher.policies.heads.autoregressive import Autoregressive
from serl_launcher.policies.heads.base import Target
from serl_launcher.policies.heads.diffusion import Diffusion
from serl_launcher.policies.heads.flow import Flow
from serl_launcher.policies.heads.gaussian import Gaussian
from serl_launcher.policies.heads.mean_flow import APART, SLOWER, TIMES, MeanFlow
from serl_launcher.policies.heads.mip import MIP, TSD, CoinFlipMIP
from serl_launcher.policies.heads.regression import Regression, StraightFlow
from tests.shared.models import STATE

from .test_flow import BLIND, seeds
from .test_heads import STATES, small

pytestmark = pytest.mark.usefixtures("one_thread")

MEAN, STD, COUNT = 0.3, 0.2, 20_000


def target_of(chunk):
    """What a head should make of these chunks [B, H, D], all of whose steps count."""
    count = torch.full((len(chunk),), chunk.shape[1])
    return Target(chunk, seeds(len(chunk)), torch.zeros_like(count), count, chunk.shape[2])


def gaussians(count=COUNT, stream=9):
    """Chunks of one number each, of N(MEAN, STD^2)."""
    return MEAN + STD * normal(seeds(count), (1, 1), stream)


# -- heads of one or two passes: the optimum of a loss that is quadratic in what the network says


def optimum(head, times):
    """The a and b with which `a x + b`, of its own at each of these times, has the least loss; {time: (a, b)}."""
    target = target_of(gaussians())

    def loss(parameters):
        def predict(chunk, time):
            a, b = (torch.stack([(time == t) * each for t, each in zip(times, row, strict=True)]).sum(0)
                    for row in parameters.view(2, -1))  # fmt: skip
            return a.unsqueeze(-1) * chunk + b.unsqueeze(-1)

        return head.errors(predict, target).mean()

    zero = torch.zeros(2 * len(times))
    slope, curve = torch.func.grad(loss)(zero), torch.func.hessian(loss)(zero)
    found = -torch.linalg.pinv(curve, rtol=1e-4) @ slope
    return dict(zip(times, found.view(2, -1).T.tolist(), strict=True))


def near(*expected):
    return pytest.approx(expected, abs=0.01)


@pytest.mark.slow
def test_regression_and_straight_flow_learn_the_mean():
    for kind in (Regression, StraightFlow):
        found = optimum(head := kind(horizon=1, width=1), [1.0])
        assert found[1.0] == near(0.0, MEAN)
        a, b = found[1.0]
        sample = head.sample(lambda chunk, _, a=a, b=b: a * chunk + b, torch.randn(5, *head.noise_shape))
        assert sample.flatten().tolist() == near(*[MEAN] * 5)


@pytest.mark.parametrize("kind", [MIP, TSD, CoinFlipMIP])
@pytest.mark.parametrize("t_star", [0.9, 0.6])
def test_the_passes_of_mip_learn_the_mean_and_the_best_guess_from_a_noisy_action(kind, t_star):
    """E[a | a + s e = x] = (m s^2 + v x) / (s^2 + v), s = 1 - t*. By the coin: (x - E[a | x]) / s, x = s e + t* a."""
    s, v, head = 1 - t_star, STD**2, kind(horizon=1, width=1, t_star=t_star)
    first, second = optimum(head, [1.0, np.float32(s).item()]).values()
    if kind is CoinFlipMIP:
        slope = t_star * v / (t_star**2 * v + s**2)  # of E[a | x]
        constant = MEAN - slope * t_star * MEAN
        assert first == near(0.0, -MEAN)
        assert second == pytest.approx(((1 - slope) / s, -constant / s), abs=0.06)
        return
    assert first == near(0.0, MEAN)
    assert second == near(v / (s**2 + v), MEAN * s**2 / (s**2 + v))

    def predict(chunk, time):
        return torch.where(time.unsqueeze(-1) == 1, MEAN, (MEAN * s**2 + v * chunk) / (s**2 + v))

    assert head.sample(predict, torch.randn(1, 1, 1, 1)).item() == pytest.approx(MEAN)


def test_the_passes_of_mip_weigh_as_in_its_source_and_a_coin_chooses_one():
    target, s = target_of(torch.full((1000, 1, 1), 0.5)), 0.1
    wrong = MIP(horizon=1, width=1).errors(lambda chunk, _: 0 * chunk, target)
    torch.testing.assert_close(wrong, torch.full_like(wrong, 0.25 / 0.81 + 0.25 / 0.01))
    seen = []
    head = CoinFlipMIP(horizon=1, width=1)
    errors = head.errors(lambda chunk, time: seen.append((chunk, time)) or 0 * chunk, target)
    ((chunk, time),) = seen
    is_first = time == 1
    assert is_first.float().mean().item() == pytest.approx(0.5, abs=0.05)
    assert (chunk[is_first[:, 0]] == 0).all()
    noise = normal(seeds(1000), (1, 1)) * ~is_first.unsqueeze(-1)
    torch.testing.assert_close(chunk[~is_first[:, 0]], (s * noise + 0.9 * 0.5)[~is_first[:, 0]])
    torch.testing.assert_close(errors, (noise - 0.5).square())


# -- flows and diffusion on N(MEAN, STD^2), by the network that is exact there


def exact_velocity(path):
    """E[dx/dt | x] of x = c_e e + c_a a, with the derivatives d_e and d_a of both factors by time."""

    def velocity(chunk, time):
        t = time.unsqueeze(-1)
        c_e, c_a, d_e, d_a = t, 1 - t, torch.ones_like(t), -torch.ones_like(t)
        if path == "trigonometric":
            angle = math.pi / 2 * t
            c_e, c_a, d_e, d_a = angle.sin(), angle.cos(), math.pi / 2 * angle.cos(), -math.pi / 2 * angle.sin()
        slope = (c_e * d_e + c_a * d_a * STD**2) / (c_e**2 + c_a**2 * STD**2)
        return d_a * MEAN + slope * (chunk - c_a * MEAN)

    return velocity


def moments(head, predict):
    """The exact mean and standard deviation of samples of one number, which are linear in their noise."""
    entries = math.prod(head.noise_shape)
    noise = torch.cat([torch.zeros(1, entries), torch.eye(entries)]).view(1 + entries, *head.noise_shape)
    sample = head.sample(predict, noise).flatten()
    return sample[0].item(), (sample[1:] - sample[0]).square().sum().sqrt().item()


@pytest.mark.parametrize("path", ["linear", "trigonometric"])
def test_a_flow_on_a_gaussian_has_its_moments_as_steps_grow_and_heun_sooner(path):
    error = {}
    for solver, most in (("euler", 2.4), ("heun", 6.0)):
        for steps in (20, 40):
            head = Flow(horizon=1, width=1, steps=steps, path=path, solver=solver)
            mean, std = moments(head, exact_velocity(path))
            assert mean == pytest.approx(MEAN, abs=0.1)
            error[solver, steps] = abs(std - STD)
        assert most / 1.6 < error[solver, 20] / error[solver, 40] < most, "first and second order"
        assert error[solver, 40] < 0.06
    assert error["heun", 40] < error["euler", 40] / 3


@pytest.mark.parametrize("path", ["linear", "trigonometric"])
def test_a_flow_learns_the_velocity_that_is_exact_and_from_zero_it_goes_to_the_mean(path):
    head = Flow(horizon=1, width=1, steps=1000, path=path, start="zero")
    target, best = target_of(gaussians()), exact_velocity(path)
    bend = torch.zeros(2, requires_grad=True)
    errors = head.errors(lambda chunk, time: best(chunk, time) + bend[0] + bend[1] * chunk, target)
    (slope,) = torch.autograd.grad(errors.mean(), bend)
    assert slope.tolist() == pytest.approx([0.0, 0.0], abs=0.04)
    assert moments(head, best) == (pytest.approx(MEAN, abs=1e-3), 0.0)


@pytest.mark.parametrize("fresh_noise", [True, False], ids=["ddpm", "ddim"])
def test_diffusion_on_a_gaussian_has_its_moments_as_steps_grow(fresh_noise):
    error = []
    for count in (50, 400):
        head = Diffusion(horizon=1, width=1, train_steps=count, steps=count, fresh_noise=fresh_noise, clip=False)

        def predict(chunk, time, head=head, count=count):
            share = head.signal[(time * count).round().long() - 1].unsqueeze(-1)
            return (1 - share).sqrt() / (share * STD**2 + 1 - share) * (chunk - share.sqrt() * MEAN)

        mean, std = moments(head, predict)
        error.append(max(abs(mean - MEAN), abs(std - STD)))
        bend = torch.zeros(2, requires_grad=True)
        bent = head.errors(lambda x, t, best=predict: best(x, t) + bend[0] + bend[1] * x, target_of(gaussians()))  # noqa: B023
        assert torch.autograd.grad(bent.mean(), bend)[0].tolist() == pytest.approx([0.0, 0.0], abs=0.02)
    assert error[1] < error[0] / 4
    assert error[1] < 5e-3


@pytest.mark.parametrize("steps", [100, 1000])
@pytest.mark.parametrize("fresh_noise", [True, False], ids=["ddpm", "ddim"])
def test_a_small_error_of_the_network_stays_small_where_guesses_are_not_clipped(fresh_noise, steps):
    head = Diffusion(horizon=1, width=1, train_steps=steps, steps=10, fresh_noise=fresh_noise, clip=False)

    def predict(chunk, time, error):
        share = head.signal[(time * steps).round().long() - 1].unsqueeze(-1)
        return (1 - share).sqrt() / (share * STD**2 + 1 - share) * (chunk - share.sqrt() * MEAN) + error

    exact, wrong = (moments(head, partial(predict, error=error))[0] for error in (0.0, 0.01))
    assert abs(wrong - exact) < 0.05


def test_the_schedule_of_diffusion_is_that_of_its_paper_and_fewer_steps_end_at_the_action():
    head = Diffusion(horizon=1, width=1, train_steps=100, steps=10, fresh_noise=False, clip=True)
    expected = [math.cos((k / 100 + 0.008) / 1.008 * math.pi / 2) ** 2 for k in range(101)]
    torch.testing.assert_close(head.signal[:98], torch.tensor(expected[1:99]) / expected[0])
    seen = []
    far = head.sample(lambda x, t: seen.append(t[0, 0].item()) or -9 * torch.ones_like(x), torch.zeros(1, 1, 1, 1))
    assert seen == pytest.approx([1 - i / 10 for i in range(10)])
    assert far.item() == pytest.approx(1.0), "the last guess, clipped"


def test_mean_flow_is_its_identity_where_the_slope_is_known():
    """For u = (x - a) / t + b s + c x, s = t - r, the row's own velocity is (x - a) / t and du/dt = b + c v."""
    a, b, c = 0.4, 0.7, -0.3
    drawn = (normal(seeds(500), (2,), TIMES) - 0.4).sigmoid()
    t, r = drawn.amax(1), drawn.amin(1)
    s = torch.where(uniform(seeds(500), (), APART) < 0.25, t - r, 0.0)
    assert (s > 0).float().mean().item() == pytest.approx(0.25, abs=0.06)
    noise = normal(seeds(500), (1, 1)).flatten()
    x, v = t * noise + (1 - t) * a, noise - a

    def predict(chunk, times):
        t, s = (times / SLOWER).unbind(1)
        return (chunk - a) / t[:, None, None] + b * s[:, None, None] + c * chunk

    errors = MeanFlow(horizon=1, width=1, steps=1, apart=0.25).errors(predict, target_of(torch.full((500, 1, 1), a)))
    torch.testing.assert_close(errors.flatten(), (b * s + c * x + s * (b + c * v)).square(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("steps", [1, 3])
def test_the_mean_velocity_of_a_gaussian_takes_noise_to_actions_in_any_number_of_steps(steps):
    def spread(t):
        return (t**2 + (1 - t) ** 2 * STD**2).sqrt()

    def predict(chunk, times):
        t, s = (times / SLOWER).view(-1, 2, 1, 1).unbind(1)
        r = t - s
        return (chunk - (1 - r) * MEAN - spread(r) / spread(t) * (chunk - (1 - t) * MEAN)) / s

    head = MeanFlow(horizon=1, width=1, steps=steps, apart=0.25)
    assert moments(head, predict) == (pytest.approx(MEAN, abs=1e-4), pytest.approx(STD, abs=1e-4))


# -- heads with a density


def test_the_density_of_the_gaussian_head_integrates_to_one_and_its_mode_is_the_mean():
    policy = small("gaussian", spec=BLIND, horizon=1)
    grid = torch.linspace(-12, 12, 301)
    plane = torch.stack(torch.meshgrid(grid, grid, indexing="ij"), -1).view(-1, 1, 2)
    seen = {STATE: STATES[:1, 0]}
    with torch.no_grad():
        density = policy.log_prob({STATE: seen[STATE].expand(len(plane), -1)}, plane).exp()
        mode = policy.sample(seen, noise=torch.zeros(1, 1, *policy.noise_shape))[0]
        assert policy.log_prob(seen, mode) >= policy.log_prob(seen, plane[density.argmax()][None]) - 1e-4
    area = (24 / 300 / 2) ** 2  # of actions scaled to [-1, 1], where the robot's are within -2 and 2
    assert density.sum().item() * area == pytest.approx(1.0, abs=1e-3)
    assert policy.mode_at_zero


def test_the_gaussian_head_learns_mean_and_deviation():
    head, target = Gaussian(horizon=1, width=1, log_std_low=-5.0, log_std_high=0.0), target_of(gaussians())
    raw = [math.atanh(MEAN), math.log((share := (math.log(STD) + 5) / 5) / (1 - share))]
    best = torch.tensor(raw, requires_grad=True)
    errors = head.errors(lambda chunk, _: best.expand(len(chunk), 1, 2), target)
    assert torch.autograd.grad(errors.mean(), best)[0].tolist() == pytest.approx([0.0, 0.0], abs=0.15)
    noise = normal(seeds(COUNT), head.noise_shape)
    sample = head.sample(lambda chunk, _: best.detach().expand(len(chunk), 1, 2), noise)
    torch.testing.assert_close(sample, MEAN + STD * noise[:, 0])


def test_an_autoregressive_head_tells_a_joint_from_the_product_of_its_marginals():
    """Two numbers, one of which is a half and the other minus a half; each of them is either by itself."""
    head, one = Autoregressive(horizon=2, width=1, bins=4), torch.tensor([0.5, -0.5]).repeat(1000)
    target = target_of(torch.stack([one, -one], 1).unsqueeze(-1))
    level = torch.tensor([-9.0, 0.0, -9.0, 0.0]).log_softmax(0)  # bins of a half and of minus a half: 3 and 1

    def marginals(chunk, place):
        return level.expand(len(chunk), 2, 4)

    def joint(chunk, place):
        first = chunk[:, 0]  # 0 where it is not known; the centres are -0.25 and 0.75
        known = torch.tensor([-9.0, 9.0, -9.0, -9.0]), torch.tensor([-9.0, -9.0, -9.0, 9.0])
        second = torch.where(first > 0.5, known[0], known[1]).log_softmax(-1)
        second = torch.where(place > 0, second, level)
        return torch.stack([level.expand(len(chunk), 4), second], 1)

    def copies(chunk, place):
        """Says of each number what it is given of it; all bins are alike where that is nothing."""
        return 9 * (chunk - torch.tensor([-0.75, -0.25, 0.25, 0.75])).abs().neg() * (chunk != 0)

    half = math.log(2)
    assert head.errors(copies, target).mean().item() == pytest.approx(2 * math.log(4)), "none before it is drawn"
    assert head.errors(marginals, target).mean().item() == pytest.approx(2 * half, abs=1e-3)
    assert head.errors(joint, target).mean().item() == pytest.approx(half, abs=0.03)  # 2 log 2 and 0, by chance
    sample = head.sample(joint, normal(seeds(1000), head.noise_shape)).squeeze(-1)
    assert {tuple(row) for row in sample.tolist()} == {(-0.25, 0.75), (0.75, -0.25)}
    assert (sample[:, 0] > 0).float().mean().item() == pytest.approx(0.5, abs=0.05)


def test_diffusion_takes_one_step_to_all_that_it_was_trained_with():
    made = partial(Diffusion, horizon=1, width=1, train_steps=100, fresh_noise=False, clip=True)
    assert [made(steps=steps).passes for steps in (1, 100)] == [1, 100]
    for steps in (0, 101):
        with pytest.raises(ConfigError, match="say 1 to head"):
            made(steps=steps)
