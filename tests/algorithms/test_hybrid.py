"""HIL-SERL's hybrid: its target is the equation of its file, and each half learns what is its own."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from serl_client import Feature
from torch import nn

from serl_launcher.networks.mlp import ActionScale
from tests.shared.models import CAMERA, REACH, STATE, act, algorithm_of, assert_same, batch, differences, robot, weights

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL = ("policy.hidden=[32,32]", "critic.hidden=[32,32]", "algo.grasp_critic.hidden=[32,32]")
PLAIN = robot(states=2, actions=3, cameras=())
NAMED = replace(PLAIN, action=Feature((3,), names=("x", "gripper", "y"), low=[-1, 0, -4], high=[1, 2, 4]))
WIDE = 5.0  # an entry beyond its bounds


def build(*words, spec=PLAIN, seed=0):
    return algorithm_of(spec, "algo=hybrid", *SMALL, *words, seed=seed)


def rows_of(algorithm, spec=PLAIN, **options):
    """Random rows, as the updates of an algorithm get them."""
    return batch(spec, window=algorithm.windows["update"], **options)


def with_gripper(rows, values, entry=-1):
    """The rows with these numbers in the gripper's entry."""
    action = rows.action.clone()
    action[..., entry] = torch.as_tensor(values)
    return replace(rows, action=action)


class Table(nn.Module):
    """A grasp critic that gives every observation the same values."""

    def __init__(self, *values):
        super().__init__()
        self.values = torch.tensor(values)

    def forward(self, observation):
        return self.values.expand(len(observation[STATE]), -1)


# -- the grasp critic's target


def test_the_target_is_a_double_dqns_and_only_moves_pay_the_penalty():
    algorithm = build("algo.discount=0.5", "algo.grasp_penalty=0.25")
    algorithm.grasp_critic = Table(1.0, 9.0, 2.0)  # chooses the second action,
    algorithm.target_grasp_critic = Table(100.0, 8.0, 50.0)  # whose value this one says
    rows = with_gripper(rows_of(algorithm, size=5), torch.tensor([-REACH, -0.9, 0.0, 0.9, WIDE])[:, None])
    _, choice = algorithm.policy.split(rows.action)
    assert choice.tolist() == [[0], [1], [1], [1], [2]]  # the nearest of -2, 0 and 2
    following = 0.5 * 8
    assert algorithm.grasp_target(rows, choice).tolist() == [0.75 + following, *[1 + following] * 3, 0.75 + following]
    ended = {name: replace(rows, **{name: rows.valid}) for name in ("terminated", "truncated")}
    assert algorithm.grasp_target(ended["terminated"], choice).tolist() == [0.75, 1, 1, 1, 0.75]
    assert torch.equal(algorithm.grasp_target(ended["truncated"], choice), algorithm.grasp_target(rows, choice))


def test_the_loss_is_the_squared_distance_of_the_executed_actions_value():
    algorithm = build("algo.discount=0.5", "algo.grasp_penalty=0.5")
    algorithm.target_grasp_critic, algorithm.grasp_optimizer = Table(0.0, 0.0, 0.0), Table(1.0, 2.0, 4.0)
    rows = with_gripper(rows_of(algorithm, size=3, weight=torch.tensor([1.0, 1.0, 3.0])), [[-REACH], [0.0], [REACH]])
    loss, value = algorithm.grasp_loss(rows, algorithm.policy.split(rows.action)[1])
    assert loss == pytest.approx((0.5**2 + 1**2 + 3 * 3.5**2) / 3)
    assert value == pytest.approx(7 / 3)


def test_the_grasp_critics_target_follows_by_tau_and_rows_without_weight_move_nothing():
    algorithm = build("algo.tau=0.25", "algo.discount=0")
    rows, begun = rows_of(algorithm), weights(algorithm.grasp_critic)
    algorithm.update_critic(replace(rows, weight=torch.zeros(len(rows))))
    assert_same(begun, weights(algorithm.grasp_critic))
    metrics = algorithm.update_critic(rows)
    assert {"grasp_loss", "grasp_value", "grasp_gradient", "critic_loss"} <= metrics.keys()
    for name, weight in algorithm.grasp_critic.named_parameters():
        target = algorithm.target_grasp_critic.get_parameter(name)
        torch.testing.assert_close(target, 0.75 * begun[name] + 0.25 * weight)
    assert_same(begun, weights(algorithm.policy.grasp_critic))  # what acts changes with the policy,
    algorithm.update(rows)
    assert_same(weights(algorithm.grasp_critic), weights(algorithm.policy.grasp_critic))  # and is not behind it
    assert algorithm.update_critic(rows)["grasp_loss"] < metrics["grasp_loss"], "it learns the rewards"


# -- two halves


def test_the_arm_does_not_see_the_gripper():
    one, other = build(), build()
    rows = rows_of(one)
    turned = with_gripper(rows, -rows.action[..., -1])
    assert torch.equal(one.value(rows), one.value(turned))
    for _ in range(2):
        one.update(rows)
        other.update(turned)
    for half in ("critic", "target_critic", "log_temperature"):
        assert_same(weights(getattr(one, half)), weights(getattr(other, half)))
    assert_same(weights(one.policy.arm), weights(other.policy.arm))
    assert differences(weights(one.grasp_critic), weights(other.grasp_critic))
    assert one.target_entropy == -0.5 * 2  # of the arm's two entries


@pytest.mark.parametrize(("gripper", "entry"), [("null", 2), (1, 1), (0, 0), ("gripper", 1)])
def test_the_gripper_is_put_back_in_its_place_in_the_robots_units(gripper, entry):
    algorithm = build(f"algo.gripper={gripper}", spec=NAMED)
    state, noise = {STATE: torch.randn(20, 2)}, torch.randn(20, 1, 3)
    action = act(algorithm, state, noise, explore=True)
    values = algorithm.policy.grasp_critic(state)
    low, high = (np.asarray(bound)[entry] for bound in (NAMED.action.low, NAMED.action.high))
    steps = torch.tensor([low, (low + high) / 2, high])
    assert torch.equal(action[:, 0, entry], steps[values.argmax(-1)])
    arm = algorithm.policy.arm.sample(state, noise=noise[None, ..., :-1])[0]
    others = [i for i in range(3) if i != entry]
    assert torch.equal(action[..., others], arm)
    back, choice = algorithm.policy.split(action)
    assert torch.equal(back, arm)
    assert torch.equal(choice[:, 0], values.argmax(-1))
    scale = ActionScale(NAMED.action)
    assert torch.equal(algorithm.policy.arm.scale.half_range, scale.half_range[others])


def test_a_share_epsilon_of_the_gripper_actions_is_drawn_from_the_noise_alone():
    algorithm, rows = build("algo.epsilon=0.3"), 30_000
    algorithm.policy.grasp_critic = Table(0.0, 0.0, 1.0)
    state = {STATE: torch.zeros(rows, 2)}
    noise = torch.randn(rows, 1, 3, generator=torch.Generator().manual_seed(0))
    found = act(algorithm, state, noise, explore=True)[:, 0, -1]
    shares = torch.stack([(found == step * REACH).float().mean() for step in (-1, 0, 1)])
    torch.testing.assert_close(shares, torch.tensor([0.1, 0.1, 0.8]), atol=0.01, rtol=0)
    assert torch.equal(found, act(algorithm, state, noise, explore=True)[:, 0, -1])
    arms = noise.clone()
    arms[..., :-1] = 0
    assert torch.equal(found, act(algorithm, state, arms, explore=True)[:, 0, -1])
    assert (act(algorithm, state, noise)[:, 0, -1] == REACH).all()  # an evaluation takes the best
    algorithm.policy.epsilon = 1.0
    assert (act(algorithm, state, noise)[:, 0, -1] == REACH).all()
    assert (act(algorithm, state, noise, explore=True)[:, 0, -1] == REACH).float().mean() < 0.4


# -- images


def test_the_grasp_critic_sees_augmented_images_and_trains_convolutions_of_its_own():
    spec = robot(states=2, actions=3, shape=(8, 8, 3))
    augment = "_target_:serl_launcher.networks.augment.Augment,_partial_:true,shift:4,brightness:0.0,contrast:0.0"
    words = ("policy=gaussian_pixels", "policy.encoder.channels=[8]", "policy.encoder.latent=4")
    algorithm = build(*words, f"algo.augment={{{augment}}}", spec=spec)
    rows, seen = rows_of(algorithm, spec), []
    algorithm.grasp_critic.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0][CAMERA]))
    before = weights(algorithm.grasp_critic.encoder.trunks)
    metrics = algorithm.update(rows)
    assert all(value.isfinite() for value in metrics.values())
    for found, images in zip(seen, (rows.observation[CAMERA], rows.next_observation[CAMERA]), strict=True):
        assert found.shape == images.shape
        assert not torch.equal(found, images)
    assert differences(before, weights(algorithm.grasp_critic.encoder.trunks))
    assert_same(weights(algorithm.grasp_critic), weights(algorithm.policy.grasp_critic))
