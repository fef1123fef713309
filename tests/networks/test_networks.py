"""The vectorised ensemble computes what single networks would, and the Gaussian's density is the true one."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from serl_client import ConfigError, Feature, Spec
from torch import distributions, nn

from serl_launcher.networks.critics import Critic, Scalar
from serl_launcher.networks.mlp import SCALES, ActionScale, StateEncoder
from serl_launcher.networks.vision import ObservationEncoder
from serl_launcher.policies.gaussian import GaussianPolicy
from tests.shared.models import STATE, batch, robot

A, B = "observation.a", "observation.b"
LOW, HIGH = torch.tensor([-0.02, 0.0]), torch.tensor([0.02, 5.0])
SPEC = Spec(
    {A: Feature(()), B: Feature((3,)), "observation.image": Feature((4, 4, 3), "uint8")},
    Feature((2,), low=LOW.numpy(), high=HIGH.numpy()),
    fps=10.0,
)


@pytest.fixture
def policy():
    torch.manual_seed(0)
    return GaussianPolicy(
        SPEC, encoder=ObservationEncoder, hidden=[16], layer_norm=True, log_std_low=-5.0, log_std_high=2.0
    )


def observe(count):
    return {A: torch.randn(count), B: torch.randn(count, 3)}


def critic_of(**options):
    torch.manual_seed(0)
    known = {"values": Scalar, "num_target_critics": 2, "lowest": 0.0, "std_penalty": 0.0}
    return Critic(SPEC, encoder=ObservationEncoder(SPEC), **{**known, **options})


def single(critic, member):
    """Member `member` of a critic as an ordinary network."""
    layers = []
    for layer in critic.network:
        if not list(layer.parameters()):
            layers.append(layer)
            continue
        weight, bias = layer.weight[member], layer.bias[member].reshape(-1)
        weight = weight if len(bias) == 1 else weight.T  # the head's weight is a row already
        twin = nn.Linear(weight.shape[1], weight.shape[0])
        twin.load_state_dict({"weight": weight, "bias": bias})
        layers.append(twin)
    return nn.Sequential(*layers)


@pytest.mark.parametrize("layer_norm", [True, False])
def test_the_ensemble_is_a_loop_of_single_networks(layer_norm):
    critic = critic_of(horizon=4, num_critics=3, hidden=[16, 8], layer_norm=layer_norm)
    observation, action = observe(5), torch.rand(5, 4, 2)
    inputs = torch.cat([critic.encoder(observation), critic.scale.to_unit(action).flatten(1)], -1)
    prediction = critic(observation, action)
    expected = torch.stack([single(critic, member)(inputs).squeeze(-1) for member in range(3)])
    torch.testing.assert_close(prediction, expected)
    torch.testing.assert_close(critic.value(observation, action), expected)
    target = torch.randn(5)
    loss = sum((member - target) ** 2 for member in expected)
    torch.testing.assert_close(critic.loss(prediction, target), loss)
    layers = [weight for name, weight in critic.named_parameters() if name.startswith("network")]
    for gradient in torch.autograd.grad(prediction[1].sum(), layers):  # Hi-ORS: one final layer for all members
        assert gradient[1].any()
        assert not gradient[[0, 2]].any()


def test_each_member_begins_as_a_linear_layer_would():
    critic = critic_of(horizon=1, num_critics=2, hidden=[64, 64], layer_norm=False)
    for layer, inputs in zip((critic.network[0], critic.network[2], critic.network[4]), (6, 64, 64), strict=True):
        assert 0.9 * inputs**-0.5 < layer.weight.abs().max() <= inputs**-0.5
        assert not torch.equal(layer.weight[0], layer.weight[1])


def test_states_lie_side_by_side_in_the_order_of_their_names_and_a_robot_without_any_is_refused():
    encoder, observation = StateEncoder(SPEC), observe(5)
    expected = torch.cat([observation[A][:, None], observation[B]], -1)
    torch.testing.assert_close(encoder(observation), expected)
    with_time = {name: value.unsqueeze(1) for name, value in observation.items()}
    torch.testing.assert_close(encoder(with_time), expected)
    with pytest.raises(ConfigError, match="float"):
        StateEncoder(robot(states=0))


CAR = Feature((3,), low=[-1, 0, 0], high=[1, 1, 1], neutral=[0, 0.5, 0])


def test_zero_is_the_neutral_action_and_the_published_car_is_driven_by_its_authors_map():
    scale, unit = ActionScale(CAR), torch.linspace(-1, 1, 41).unsqueeze(1).expand(41, 3)
    steering, gas, brake = unit.unbind(1)
    torch.testing.assert_close(scale.from_unit(unit), torch.stack([steering, (gas + 1) / 2, brake.clamp(0, 1)], 1))
    torch.testing.assert_close(scale.from_unit(torch.zeros(3)), torch.tensor(CAR.neutral), rtol=0, atol=0)


@pytest.mark.parametrize("neutral", [[-0.5, 0.0, 0.25], [-1, 1, 0], [0, 0.5, 1], [1, 0.9, 0.1]])
def test_every_action_comes_back_from_the_scale_with_a_neutral_one(neutral):
    scale = ActionScale(replace(CAR, neutral=neutral))
    action = torch.rand(100, 3) * torch.tensor([2.0, 1, 1]) - torch.tensor([1.0, 0, 0])
    action = torch.cat([action, scale.low[None], scale.high[None], scale.center[None]])
    unit = scale.to_unit(action)
    assert (unit.abs() <= 1).all()
    torch.testing.assert_close(scale.from_unit(unit), action)
    torch.testing.assert_close(scale.executed(unit), unit)
    asked = torch.randn(100, 3) * 2
    torch.testing.assert_close(scale.executed(asked), scale.to_unit(scale.from_unit(asked)))
    outside = scale.to_unit(torch.stack([scale.low - 1, scale.high + 1]))
    assert (outside.isfinite() & (outside.abs() > 0)).all()


def test_a_neutral_action_changes_nothing_where_it_is_unsaid_or_the_data_scale():
    plain, wide = ActionScale(SPEC.action), ActionScale(replace(CAR, neutral=None), "range")
    asked = torch.randn(9, 2)
    assert plain.executed(asked) is asked
    assert "sides" not in plain.state_dict()
    assert torch.equal(ActionScale(CAR, "range").from_unit(torch.ones(3)), wide.from_unit(torch.ones(3)))
    assert not ActionScale(Feature((1,), low=-1, high=1, neutral=0.5)).from_unit(torch.zeros(1)).eq(0)


def test_the_action_scale_maps_what_the_data_hold_to_one_and_back():
    wide = Feature((3,), low=[-31.4, -1, -1], high=[31.4, 1, 1])
    column = {"mean": [0.5, 0.5, 0.2], "std": [0.25, 0.0, 0.5], "low": [0, 0.5, -4], "high": [2, 0.5, 0.6]}
    column |= {"q01": [0.1, 0.5, -0.5], "q99": [1.9, 0.5, 0.5]}
    fitted = {kind: {"action": np.array(values)} for kind, values in column.items()}
    scales = {kind: ActionScale(wide, kind) for kind in SCALES}
    before = scales["range"].to_unit(torch.ones(3))
    for scale in scales.values():
        scale.set_statistics(fitted)
    assert torch.equal(scales["bounds"].to_unit(torch.ones(3)), before)
    # the last entry's data reach beyond its bounds; the second one's never vary
    unit = scales["range"].to_unit(torch.tensor([[0.0, 0.5, -1.0], [2.0, 0.51, 0.6]]))
    torch.testing.assert_close(unit, torch.tensor([[-1.0, 0.0, -1.0], [1.0, 1.0, 1.0]]))
    unit = scales["std"].to_unit(torch.tensor([[0.5, 0.5, 0.2], [0.75, 0.51, 0.7]]))
    torch.testing.assert_close(unit, torch.tensor([[0.0, 0.0, 0.0], [1.0, 1.0, 1.0]]))
    action, low, high = (torch.tensor(each) for each in ([[0.3, 0.5, 0.9]], [0.1, 0.5, -0.5], [1.9, 0.5, 0.5]))
    openpis = (action - low) / (high - low + 1e-6) * 2 - 1  # Normalize with use_quantiles
    torch.testing.assert_close(scales["quantile"].to_unit(action)[:, ::2], openpis[:, ::2])
    for kind, scale in scales.items():
        low, high = scale.limits()
        torch.testing.assert_close(scale.from_unit(low), torch.tensor([-31.4, -1.0, -1.0]))
        torch.testing.assert_close(scale.from_unit(high), torch.tensor([31.4, 1.0, 1.0]))
        other = ActionScale(wide, kind)
        other.load_state_dict(scale.state_dict())
        assert torch.equal(other.to_unit(torch.ones(3)), scale.to_unit(torch.ones(3)))
    with pytest.raises(ConfigError, match=r"policy\.scale=log: say one of bounds, range, std, quantile"):
        ActionScale(wide, "log")


def test_the_action_scale_is_that_of_the_column_that_is_imitated():
    scale = ActionScale(Feature((2,), low=-9, high=9), "range", STATE, [2, 0])
    column = {"action": np.full(2, 7.0), STATE: np.array([1.0, 7.0, 3.0])}
    zero = {name: 0 * value for name, value in column.items()}
    scale.set_statistics({"mean": column, "std": column, "low": zero, "high": column})
    torch.testing.assert_close(scale.to_unit(torch.tensor([3.0, 1.0])), torch.ones(2))


def test_the_density_is_that_of_a_squashed_gaussian_over_scaled_actions(policy):
    observation = observe(6)
    action, log_prob = policy.rsample(observation, noise=torch.randn(6, *policy.noise_shape))
    mean, log_std = policy._gaussian(observation)
    normal = distributions.Normal(mean.double(), log_std.double().exp())
    unit = distributions.TransformedDistribution(normal, distributions.TanhTransform())
    expected = unit.log_prob(policy.scale.to_unit(action).double()).sum((-2, -1))
    torch.testing.assert_close(log_prob.double(), expected, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(policy.log_prob(observation, action).double(), expected, rtol=1e-3, atol=1e-3)
    affine = distributions.AffineTransform(policy.scale.center.double(), policy.scale.half_range.double())
    metres = distributions.TransformedDistribution(normal, [distributions.TanhTransform(), affine])
    in_metres = metres.log_prob(action.double()).sum((-2, -1))
    torch.testing.assert_close(in_metres, expected - policy.scale.half_range.double().log().sum(), rtol=1e-3, atol=1e-3)


def test_the_density_is_finite_on_and_beyond_the_bounds(policy):
    action = torch.tensor([[[-0.02, 5.0]], [[0.5, -9.0]]])
    loss, _ = policy(batch(SPEC, 2, action=action, observation=observe(2)))
    loss.sum().backward()
    assert loss.isfinite().all()
    assert all(parameter.grad.isfinite().all() for parameter in policy.parameters())


def test_samples_keep_within_the_bounds_and_follow_their_noise(policy):
    observation, noise = observe(3), 10 * torch.randn(7, 3, *policy.noise_shape)
    actions = policy.sample(observation, n=7, noise=noise)
    assert actions.shape == (7, 3, 1, 2)
    assert ((actions >= LOW - 1e-6) & (actions <= HIGH + 1e-6)).all()
    assert torch.equal(actions, policy.sample(observation, n=7, noise=noise))
    still = policy.sample(observation, noise=0 * noise[:1])[0]
    torch.testing.assert_close(still, policy.scale.from_unit(torch.tanh(policy._gaussian(observation)[0])))
    torch.testing.assert_close(policy.rsample(observation, noise=noise[0])[0], actions[0])
