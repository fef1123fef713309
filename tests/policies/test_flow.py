"""Flow matching: its loss and its samplers are the equations of its file, and imitation uses it."""

import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from serl_client import ConfigError, Feature

from serl_launcher.algorithms.sft import SFT
from serl_launcher.config import composed
from serl_launcher.networks.chunks import MLP
from serl_launcher.networks.seeded_noise import normal, uniform
from serl_launcher.networks.vision import ObservationEncoder
from serl_launcher.optim.optimizer import Optimizer
from serl_launcher.policies.chunk import ChunkPolicy, HeadPolicy
from serl_launcher.policies.heads.flow import TIME, Flow
from serl_launcher.training.build import build
from serl_launcher.types import IdleFilter
from tests.shared.models import CONFIG, STATE, assert_same, batch, robot, weights

pytestmark = pytest.mark.usefixtures("one_thread")

HORIZON = 4
STILL = {"threshold": 0.0, "column": None, "entries": None}
BLIND = robot(cameras=())
SPEC = replace(  # two joints that are commanded to positions, and measured beside something else
    BLIND,
    observation={STATE: Feature((3,), names=("load", "elbow", "wrist"))},
    action=Feature((2,), names=("wrist", "elbow"), low=-2, high=2),
)
NOWHERE = {STATE: torch.zeros(50, 3)}


def policy_of(spec=SPEC, *, steps=10, noise_level=None, imitation_target="action", **options):
    torch.manual_seed(0)
    parts = {"network": partial(MLP, hidden=[64, 64], layer_norm=True), "head": flow_of(steps, noise_level)}
    known = {"encoder": ObservationEncoder, "horizon": HORIZON, "imitation_target": imitation_target}
    return ChunkPolicy(spec, **{**known, **parts, **options})


def flow_of(steps=10, noise_level=None, **options):
    return partial(Flow, steps=steps, noise_level=noise_level, **options)


def batch_of(action, state=None, seed=0, **options):
    """action [B, H, A]; state [B, To, 3]; `seed` tells the chance of one batch from that of another."""
    observation = {STATE: torch.zeros(len(action), 1, 3) if state is None else state}
    return batch(SPEC, len(action), HORIZON, action=action, observation=observation, seed=seed, **options)


def seeds(count, seed=0):
    return torch.arange(count) + 1_000_000 * seed


def sft(spec=SPEC, **options):
    optimizer = partial(Optimizer, learning_rate=3e-3)
    known = {"optimizer": optimizer, "ema_decay": 0.95, "idle_filter": STILL, "augment": None}
    return SFT(spec, **{**known, "policy": policy_of, **options})


@pytest.mark.parametrize(("times", "mean", "power"), [("beta", 0.6, 1.5), ("uniform", 0.5, 1.0)])
def test_times_are_drawn_as_they_are_said(monkeypatch, times, mean, power):
    """t = 0.001 + 0.999 b; with b ~ Beta(1.5, 1), mostly where the noise is, P(b < q) = q^1.5."""
    policy, seen = policy_of(head=flow_of(times=times)), []
    monkeypatch.setattr(
        ChunkPolicy, "predict", lambda _, chunk, time, *__: seen.append(time) or torch.zeros_like(chunk)
    )
    policy(batch_of(torch.zeros(20_000, HORIZON, 2)))
    assert seen[0].mean() == pytest.approx(mean, abs=0.01)
    for share in (0.1, 0.25, 0.5, 0.75, 0.9):
        assert ((seen[0] - 0.001) / 0.999 < share).float().mean() == pytest.approx(share**power, abs=0.015)
    assert 0.001 <= seen[0].min() < seen[0].max() < 1


def test_a_measured_state_is_imitated_by_the_names_of_the_action():
    """What the arm reached counts, not what was commanded: a human's motion has no command."""
    policy = policy_of(imitation_target=STATE)
    assert policy.offsets == {STATE: (0, 1, 2, 3, 4), "action": (0, 1, 2, 3)}
    state = torch.randn(7, 1 + HORIZON, 3).clamp(-2, 2)
    expected = policy_of()(batch_of(state[:, 1:, [2, 1]], state[:, :1]))[0]
    garbage = torch.full((7, HORIZON, 2), 9.0)
    torch.testing.assert_close(policy(batch_of(garbage, state))[0], expected)


def test_an_action_that_no_state_measures_cannot_be_imitated_that_way():
    unnamed = replace(SPEC, observation={STATE: Feature((3,), names=("load", "elbow", "x"))})
    with pytest.raises(ConfigError, match=r"'wrist'.*say policy.imitation_target=action"):
        policy_of(unnamed, imitation_target=STATE)
    with pytest.raises(ConfigError, match=r"imitation_target=observation.joints"):
        policy_of(imitation_target="observation.joints")


def test_rows_without_weight_are_not_imitated():
    algorithm = sft()
    before = weights(algorithm.policy)
    assert algorithm.update(batch_of(torch.ones(8, HORIZON, 2), weight=torch.zeros(8)))["gradient"] == 0
    assert_same(weights(algorithm.policy), before)


@pytest.mark.parametrize(
    ("ema_decay", "shares"), [(0.75, [0.1, 2 / 11, 3 / 12, 4 / 13]), (0.2, [0.1, 2 / 11, 0.2, 0.2])]
)
def test_what_acts_is_the_moving_average_which_warms_up(ema_decay, shares):
    algorithm = sft(ema_decay=ema_decay)
    for share in shares:
        before = [parameter.clone() for parameter in algorithm.acting.parameters()]
        algorithm.update(batch_of(torch.ones(8, HORIZON, 2)))
        now = algorithm.acting.parameters()
        for old, averaged, new in zip(before, now, algorithm.policy.parameters(), strict=True):
            torch.testing.assert_close(averaged, share * old + (1 - share) * new)


@pytest.mark.parametrize(
    ("imitation_target", "column", "entries", "expected"),
    [
        ("action", None, None, IdleFilter(1e-3)),
        (STATE, None, None, IdleFilter(1e-3, STATE, (2, 1))),
        ("action", STATE, [1], IdleFilter(1e-3, STATE, (1,))),
        ("action", STATE, None, IdleFilter(1e-3, STATE)),
    ],
)
def test_windows_in_which_the_robot_waits_are_not_asked_for(imitation_target, column, entries, expected):
    still = {"threshold": 1e-3, "column": column, "entries": entries}
    algorithm = sft(idle_filter=still, policy=partial(policy_of, imitation_target=imitation_target))
    assert algorithm.windows["update"].idle_filter == expected
    assert sft().windows["update"].idle_filter is None


def test_rejection_sampling_drops_still_windows_and_plain_imitation_keeps_them():
    for algo, threshold in (("rejection", 1e-3), ("sft", None)):
        options = composed(CONFIG, [f"algo={algo}", "policy=flow", "algo.augment=null"])
        still = build(options, SPEC).windows["update"].idle_filter
        assert (still and still.threshold) == threshold


# -- a linear-Gaussian case, in which all of it is known


class LinearGaussian(HeadPolicy):
    """The best velocity for actions N(mean, std^2) in every entry, scaled to [-1, 1].

    With x_t = t e + (1 - t) a and V = t^2 + (1 - t)^2 std^2, what is best given x_t is
    E[e - a | x_t] = (t - (1 - t) std^2) / V (x_t - (1 - t) mean) - mean.
    """

    inputs = (STATE,)
    mean, std = 0.2, 0.15

    def __init__(self, steps, noise_level=None):
        super().__init__(SPEC, head=flow_of(steps, noise_level), horizon=HORIZON, imitation_target="action", width=2)

    def condition(self, prepared):
        return prepared[STATE]

    def repeated(self, condition, n):
        return condition.repeat(n, 1)

    def features(self, observation):
        return observation[STATE]

    def predict(self, chunk, time, condition, old):
        t, mean, variance = time[..., None], self.mean, self.std**2
        slope = (t - (1 - t) * variance) / (t**2 + (1 - t) ** 2 * variance)
        return slope * (chunk - (1 - t) * mean) - mean


def test_the_loss_asks_for_noise_minus_action_at_the_rows_own_time_and_noise():
    policy, action = LinearGaussian(3), torch.rand(6, HORIZON, 2)
    noise, b = normal(seeds(6), (HORIZON, 2)), uniform(seeds(6), (), TIME) ** (1 / 1.5)
    t, unit = (0.001 + 0.999 * b)[:, None, None], policy.scale.to_unit(action)
    guess = policy.predict(t * noise + (1 - t) * unit, t[:, 0], None, None)
    torch.testing.assert_close(policy(batch_of(action))[0], (guess - (noise - unit)).square().mean((1, 2)))


@pytest.mark.parametrize("steps", [1, 3, 1000])
def test_a_sample_takes_the_euler_steps_of_its_equation(steps):
    """Along a velocity that is linear in x, N steps are N linear maps. The flow of the best velocity keeps order."""
    policy = LinearGaussian(steps)
    noise = normal(seeds(50), policy.noise_shape)
    x = noise[:, 0].double()
    for k in range(steps):
        t = 1 - k / steps
        slope = (t - (1 - t) * policy.std**2) / (t**2 + (1 - t) ** 2 * policy.std**2)
        x = x - (slope * (x - (1 - t) * policy.mean) - policy.mean) / steps
    expected, action = policy.scale.from_unit(x.clamp(-1, 1).float()), policy.sample(NOWHERE, noise=noise[None])[0]
    torch.testing.assert_close(action, expected)
    torch.testing.assert_close(policy.rsample(NOWHERE, seed=seeds(50))[0], expected)
    with torch.no_grad():  # noise for the start alone leaves the fresh noise out
        assert torch.equal(LinearGaussian(steps, 0.5).sample(NOWHERE, noise=noise[None])[0], action)
    if steps == 1000:  # e arrives at its quantile, mean + std e
        quantile = policy.mean + policy.std * noise[:, 0]
        torch.testing.assert_close(policy.scale.to_unit(action), quantile, atol=2e-3, rtol=0)


def moments(policy, count):
    action, log_prob = policy.rsample({STATE: torch.zeros(count, 3)}, seed=seeds(count))
    return policy.scale.to_unit(action).mean().item(), policy.scale.to_unit(action).std().item(), log_prob


@pytest.mark.parametrize("noise_level", [0.2, 0.7])
@torch.no_grad()
def test_the_stochastic_sampler_has_the_marginals_of_the_flow(noise_level):
    policy = LinearGaussian(200, noise_level)
    mean, std, _ = moments(policy, 2000)
    assert mean == pytest.approx(policy.mean, abs=0.01)
    assert std == pytest.approx(policy.std, rel=0.05)
    states, noise = {STATE: torch.zeros(2000, 3)}, normal(seeds(2000), policy.noise_shape)
    fresh = noise.clone()
    fresh[:, 1:] = normal(seeds(2000), policy.noise_shape, 5)[:, 1:]
    one, other = (policy.scale.to_unit(policy.sample(states, noise=drawn[None])[0]) for drawn in (noise, fresh))
    assert (one - other).std() > 0.5 * policy.std * noise_level, "where it began must not decide where it ends"


@torch.no_grad()
def test_the_density_is_that_of_the_last_step_and_bounds_the_entropy_from_below():
    policy, count = LinearGaussian(3, 0.4), 16_000
    noise = normal(seeds(1), policy.noise_shape).repeat(count, 1, 1, 1)
    noise[:, -1] = normal(seeds(count), (HORIZON, 2), 3)  # only the last step differs
    chunk, density = policy.head.rsample(policy._predict(None), noise)
    last = torch.distributions.Normal(chunk.mean(0), chunk.std(0))
    torch.testing.assert_close(density.sum((1, 2)), last.log_prob(chunk).sum((1, 2)), atol=0.3, rtol=0)
    _, std, log_prob = moments(policy, count)
    entropy = HORIZON * 2 * 0.5 * math.log(2 * math.pi * math.e * std**2)
    assert -log_prob.mean() < entropy


def test_a_wider_deviation_is_told_as_more_entropy_and_learns_from_it():
    narrow, wide = (LinearGaussian(3, noise_level) for noise_level in (0.1, 0.4))
    densities = [moments(policy, 200)[2].mean() for policy in (narrow, wide)]
    assert (densities[0] - densities[1]).item() == pytest.approx(HORIZON * 2 * math.log(4), rel=1e-3)
    densities[0].backward()
    assert narrow.head.log_noise_level.grad.item() == pytest.approx(-HORIZON * 2, rel=1e-3)


def test_a_sample_has_a_gradient_through_every_step():
    policy, seen = policy_of(steps=3), []

    def watch(module, inputs, output):
        output.register_hook(lambda gradient: seen.append(gradient.abs().sum()))

    policy.network.register_forward_hook(watch)
    action, _ = policy.rsample({STATE: torch.randn(16, 3)}, seed=seeds(16))
    action.sum().backward()
    assert len(seen) == 3
    assert all(seen)
    assert all(parameter.grad.abs().sum() > 0 for parameter in policy.network.parameters())


# -- robots whose bounds are far wider than what they do


@pytest.mark.parametrize("scale", ["range", "std"])
def test_bounds_that_are_far_wider_than_the_data_change_neither_loss_nor_sample(scale):
    column = {"mean": np.zeros(2), "std": np.full(2, 0.58), "low": np.full(2, -1.0), "high": np.ones(2)}
    rows, found = batch_of(torch.rand(50, HORIZON, 2) * 2 - 1), []
    for bound in (1.5, 31.4):
        policy = policy_of(robot(reach=bound, cameras=()), scale=scale)
        policy.scale.set_statistics({kind: {"action": value} for kind, value in column.items()})
        sample = policy.sample(NOWHERE, noise=normal(seeds(50), policy.noise_shape)[None])
        assert sample.abs().max() > 1.4
        found.append((policy(rows)[0], sample.clamp(-1.5, 1.5)))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("scale", ["bounds", "range", "std"])
def test_samples_keep_within_the_bounds(scale, monkeypatch):
    monkeypatch.setattr(ChunkPolicy, "predict", lambda self, chunk, *_: -99 * torch.ones_like(chunk))
    policy = policy_of(scale=scale, noise_level=0.1)
    values = {"mean": np.zeros(2), "std": np.full(2, 0.1), "low": np.full(2, -0.5), "high": np.full(2, 0.5)}
    policy.scale.set_statistics({kind: {"action": value} for kind, value in values.items()})
    states = {STATE: torch.zeros(3, 3)}
    torch.testing.assert_close(policy.sample(states)[0], torch.full((3, HORIZON, 2), 2.0))
    torch.testing.assert_close(policy.rsample(states, seed=seeds(3))[0], torch.full((3, HORIZON, 2), 2.0))
