"""Actor-critic through a flow: its losses are the equations of its file, and the faults known of others are not in it.

Which of Hi-ORS' faults is covered where: of its sac_pi0, all here (each test names its own). Of its buffer, in
tests/replay/test_replay.py: a chunk that runs on into the next episode (B1), pairs mixed up after a wrap (B3), rows
dropped so that next is not the next (B4), the newest step never drawn (B5). That a time limit is no end of the value:
here, and in tests/algorithms/test_algorithms.py."""

import copy
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from serl_client import ConfigError, Feature, Spec
from torch import nn

from serl_launcher.algorithms.sac_pi0 import SACPI0
from serl_launcher.networks.augment import Augment
from serl_launcher.networks.vision import ObservationEncoder
from serl_launcher.policies.flow import FlowPolicy
from serl_launcher.policies.gaussian import GaussianPolicy
from serl_launcher.types import Batch
from serl_launcher.utils.optim import Optimizer

pytestmark = pytest.mark.usefixtures("one_thread")

STATE, CAMERA = "observation.state", "observation.images.top"
HORIZON, JUDGED, STEPS, REACH = 6, 4, 3, 2.0


@pytest.fixture
def spec():
    observation = {STATE: Feature((3,)), CAMERA: Feature((16, 16, 3), "uint8")}
    return Spec(observation, Feature((2,), low=-REACH, high=REACH), fps=10.0)


SEES = partial(ObservationEncoder, cameras="all", channels=[8], latent=6)


def policy_of(spec, encoder=ObservationEncoder, noise_level=None, frozen=False, scale="bounds"):
    policy = FlowPolicy(
        spec, encoder=encoder, horizon=HORIZON, steps=STEPS, hidden=[32, 32], layer_norm=True,
        imitation_target="action",
        noise_level=noise_level, scale=scale,
    )  # fmt: skip
    if frozen:
        policy.network[0].requires_grad_(False)
    return policy


def build(spec, seed=0, policy=policy_of, learning_rate=1e-3, **options):
    torch.manual_seed(seed)
    optimizer = partial(Optimizer, learning_rate=learning_rate)
    known = {
        "critic_horizon": JUDGED, "encoder": ObservationEncoder, "optimizer": optimizer, "critic_optimizer": optimizer,
        "hidden": [32, 32], "layer_norm": True, "num_critics": 3, "discount": 0.5, "tau": 0.1, "distill_weight": 3.0,
        "initial_temperature": 0.2, "entropy_per_action": 1.0, "augment": None,
    }  # fmt: skip
    return SACPI0(spec, policy=policy, **{**known, **options})


def batch_of(spec, seed=0, size=32, horizon=JUDGED, length=None, ends=""):
    """Windows of `horizon` rows with every reward 1, of which `length` are valid; all episodes end at once, or none."""
    generator = torch.Generator().manual_seed(seed)
    length = horizon if length is None else length
    valid, last = (torch.arange(horizon) < length).expand(size, -1), torch.arange(horizon) == length - 1
    never = torch.zeros(size, horizon, dtype=torch.bool)

    def observation():
        return {
            STATE: torch.randn(size, 1, 3, generator=generator),
            CAMERA: torch.randint(256, (size, 1, 16, 16, 3), generator=generator, dtype=torch.uint8),
        }

    return Batch(
        observation(), (torch.rand(size, horizon, 2, generator=generator) * 4 - 2) * valid[..., None], valid.float(),
        valid, never | (last & (ends == "terminated")), never | (last & (ends == "truncated")), never,
        torch.full((size,), length), torch.ones(size), torch.arange(size),
        torch.randint(2**62, (size,), generator=generator), observation(), ("reach",) * size,
    )  # fmt: skip


def clone_batch(spec, seed=0):
    return batch_of(spec, seed, horizon=HORIZON)


def now(observation):
    return {name: value[:, 0] for name, value in observation.items()}


def weights(module):
    return {name: value.clone() for name, value in module.state_dict().items() if isinstance(value, torch.Tensor)}


def assert_same(one, other):
    assert one.keys() == other.keys()
    assert all(torch.equal(value, other[name]) for name, value in one.items())


# -- the critics


@pytest.mark.parametrize(
    ("length", "ends", "rewards", "bootstrap"),
    [
        (4, "", 1 + 0.5 + 0.25 + 0.125, 0.5**4),  # four rows on, four times discounted: not once, and not not at all
        (4, "truncated", 1 + 0.5 + 0.25 + 0.125, 0.5**4),  # a time limit ends no value
        (4, "terminated", 1 + 0.5 + 0.25 + 0.125, 0.0),
        (2, "terminated", 1 + 0.5, 0.0),
    ],
)
def test_the_target_discounts_every_row_of_a_chunk_and_ends_where_the_episode_does(
    spec, length, ends, rewards, bootstrap
):
    """Hi-ORS: gamma = 1 and no gamma^h, and a time limit taken for the end."""
    algorithm, batch = build(spec), batch_of(spec, length=length, ends=ends)
    following = now(batch.next_observation)
    with torch.no_grad():
        action, _ = algorithm.policy.rsample(following, seed=batch.seed, stream=1)
        worst = algorithm.target_critic(following, action[:, :JUDGED]).min(0).values
    torch.testing.assert_close(algorithm.target(batch), rewards + bootstrap * worst)


def test_the_critics_learn_the_squared_error_and_nothing_of_what_a_time_limit_cut(spec):
    algorithm, whole, cut = build(spec), batch_of(spec), batch_of(spec, length=2, ends="truncated")
    target = algorithm.target(whole)
    error = sum((q - target).square() for q in algorithm.critic(whole.observation, whole.action))
    torch.testing.assert_close(algorithm.critic_loss(whole)[0], error.mean())
    before = weights(algorithm.critic)
    assert algorithm.update_critic(cut)["critic_loss"] == 0
    assert_same(weights(algorithm.critic), before)


def test_critics_see_the_actions_that_the_policy_sees(spec):
    """By data, once they are fitted: else the wide bounds of an arm would leave a critic nothing to tell apart."""
    algorithm = build(spec, policy=partial(policy_of, scale="range"))
    size = spec.action.shape[0]
    low, high = np.full(size, -0.2), np.linspace(0.1, 0.4, size)
    column = {"mean": (low + high) / 2, "std": high - low, "low": low, "high": high}
    state = {"mean": np.zeros(3), "std": np.ones(3), "low": np.zeros(3), "high": np.zeros(3)}
    algorithm.set_statistics({kind: {"action": column[kind], STATE: state[kind]} for kind in column})
    modules = (algorithm.policy, algorithm.reference, algorithm.critic, algorithm.target_critic)
    for scale in (module.scale for module in modules):
        torch.testing.assert_close(scale.to_unit(torch.as_tensor(high, dtype=torch.float32)), torch.ones(size))
    resumed = build(spec, seed=1, policy=partial(policy_of, scale="range"))
    resumed.load_state_dict(copy.deepcopy(algorithm.state_dict()))
    action = torch.rand(4, JUDGED, size) - 0.5
    for one, other in zip((algorithm.critic, algorithm.policy), (resumed.critic, resumed.policy), strict=True):
        assert torch.equal(one.scale.to_unit(action), other.scale.to_unit(action))


@pytest.mark.parametrize("encoder", [SEES, None])
def test_target_and_critic_that_have_met_say_the_same_of_the_same(spec, encoder):
    """Hi-ORS: the target's BatchNorm buffers never followed, and only one of the two was in training mode."""
    algorithm = build(spec, tau=1.0, encoder=encoder, policy=partial(policy_of, encoder=SEES))
    algorithm.set_statistics({"mean": {STATE: torch.randn(3).numpy()}, "std": {STATE: torch.rand(3).numpy() + 1}})
    algorithm.update_critic(batch_of(spec))
    batch = batch_of(spec, seed=1)
    said = algorithm.critic(now(batch.observation), batch.action)
    assert torch.equal(algorithm.target_critic(now(batch.observation), batch.action), said)
    for module in (algorithm.train(), algorithm.eval()):
        assert torch.equal(module.critic(now(batch.observation), batch.action), said)
    assert not any(isinstance(module, nn.modules.batchnorm._NormBase) for module in algorithm.modules())


def test_the_members_of_the_ensemble_share_their_features_and_nothing_else(spec):
    """Hi-ORS: one final layer for all num_critics, so that they could hardly disagree."""
    algorithm, batch = build(spec), batch_of(spec)
    prediction = algorithm.critic(now(batch.observation), batch.action)
    layers = [weight for name, weight in algorithm.critic.named_parameters() if name.startswith("network")]
    gradients = torch.autograd.grad(prediction[1].sum(), layers)
    assert len(layers) == 6
    for gradient in gradients:
        assert gradient[1].abs().sum() > 0
        assert gradient[[0, 2]].abs().sum() == 0


def test_only_the_actions_that_are_run_are_judged(spec):
    algorithm, batch = build(spec), batch_of(spec)
    action, _ = algorithm.policy.rsample(now(batch.observation), seed=batch.seed)
    (slope,) = torch.autograd.grad(algorithm._climbed(now(batch.observation), action).sum(), action)
    assert (slope[:, :JUDGED].abs().sum(-1) > 0).all()
    assert slope[:, JUDGED:].abs().sum() == 0
    assert algorithm.windows["update"].horizon == JUDGED
    assert algorithm.windows["update_clone"].horizon == HORIZON
    assert build(spec, critic_horizon=50).critic_horizon == HORIZON


# -- the policy


def test_the_policy_loss_is_minus_the_value_plus_the_weighted_distance_once_each(spec):
    """Hi-ORS: `a = q; a += q + w * d` gave 2 q + w d, and overwrote what was logged."""
    algorithm, batch = build(spec), batch_of(spec)
    algorithm.update(batch)  # so that policy and reference differ
    observation = now(batch.observation)
    loss, metrics = algorithm.policy_loss(batch)
    with torch.no_grad():
        action, _ = algorithm.policy.rsample(observation, seed=batch.seed)
        reference, _ = algorithm.reference.rsample(observation, seed=batch.seed)
        value = algorithm.critic(observation, action[:, :JUDGED]).mean(0).mean()
        distance = ((action - reference) / REACH).square().mean()
    assert distance > 0
    torch.testing.assert_close(loss.detach(), 3 * distance - value)
    torch.testing.assert_close(metrics["policy_loss"], 3 * distance - value)
    torch.testing.assert_close(metrics["distill"], distance)
    torch.testing.assert_close(metrics["value_of_policy"], value)


def test_the_gradient_of_the_value_goes_through_every_step_of_the_sampler_and_stops_before_the_critics(spec):
    algorithm, batch = build(spec, distill_weight=0.0), batch_of(spec)
    loss, _ = algorithm.policy_loss(batch)
    loss.backward()
    assert all(weight.grad is None for weight in algorithm.critic.parameters())
    found = [weight.grad.clone() for weight in algorithm.policy.parameters()]
    algorithm.policy.zero_grad()
    action, _ = algorithm.policy.rsample(now(batch.observation), seed=batch.seed)
    (-algorithm.critic(now(batch.observation), action[:, :JUDGED]).mean()).backward()
    for gradient, weight in zip(found, algorithm.policy.parameters(), strict=True):
        assert gradient.abs().sum() > 0
        torch.testing.assert_close(gradient, weight.grad)


def test_a_heavy_distillation_keeps_the_policy_where_the_clone_was(spec):
    ends = []
    for weight in (0.0, 1000.0):
        algorithm, batch = build(spec, distill_weight=weight), batch_of(spec)
        for _ in range(30):
            metrics = algorithm.update(batch)
        ends.append(metrics["distill"].item())
    assert ends[1] < ends[0] / 20


def test_a_chunk_beyond_the_bounds_finds_its_way_back(spec):
    """Where the cut to the bounds has no gradient, what was once outside would stay there."""
    policy = policy_of(spec)
    nn.init.zeros_(policy.network[-1].weight)
    nn.init.constant_(policy.network[-1].bias, -9.0)  # every chunk ends far above the bound
    for sign, passes in ((1, True), (-1, False)):
        policy.zero_grad()
        action, _ = policy.rsample({STATE: torch.zeros(8, 3)}, seed=torch.arange(8))
        assert (action == REACH).all()
        (sign * action.sum()).backward()
        assert (policy.network[-1].bias.grad.abs() > 0).all() == passes


def test_a_clone_that_climbs_finds_the_better_of_what_it_was_shown(spec):
    """Actions are rewarded by where they go: to the right is better than what the clone does, which is anything."""
    algorithm, generator = build(spec, learning_rate=3e-3, distill_weight=0.1), torch.Generator().manual_seed(0)

    def experience(horizon):
        batch = batch_of(spec, int(torch.randint(2**30, (), generator=generator)), 64, horizon, ends="terminated")
        return replace(batch, reward=batch.action[..., 0] / REACH)

    def mean_action():
        noise = torch.randn(1, 256, *algorithm.policy.noise_shape, generator=torch.Generator().manual_seed(1))
        return algorithm.policy.sample({STATE: torch.zeros(256, 3)}, noise=noise)[0, :, :JUDGED].mean((0, 1)) / REACH

    for _ in range(100):
        algorithm.update_clone(experience(HORIZON))
    before = mean_action()
    assert before.abs().max() < 0.2
    for _ in range(50):
        algorithm.update_critic(experience(JUDGED))
    assert torch.equal(mean_action(), before)
    for _ in range(150):
        algorithm.update(experience(JUDGED))
    after = mean_action()
    assert after[0] > 0.8
    assert after[1].abs() < 0.3, "nothing rewards the other direction"


# -- the reference


def test_the_reference_is_what_was_cloned_and_stays_it(spec):
    algorithm = build(spec)
    for seed in range(3):
        algorithm.update_clone(clone_batch(spec, seed))
    assert_same(weights(algorithm.reference), weights(algorithm.policy))
    kept = weights(algorithm.reference)
    for seed in range(3):
        algorithm.update_critic(batch_of(spec, seed))
        algorithm.update(batch_of(spec, seed))
    assert_same(weights(algorithm.reference), kept)
    assert not torch.equal(*(policy.network[0].weight for policy in (algorithm.reference, algorithm.policy)))


def test_a_resumed_run_has_the_same_reference_and_goes_on_bit_by_bit(spec):
    straight = build(spec, policy=partial(policy_of, noise_level=0.3))
    straight.update_clone(clone_batch(spec))
    straight.update(batch_of(spec))
    resumed = build(spec, seed=1, policy=partial(policy_of, noise_level=0.3))
    resumed.load_state_dict(copy.deepcopy(straight.state_dict()))
    assert_same(weights(resumed.reference), weights(straight.reference))
    for algorithm in (straight, resumed):
        for seed in (5, 6):
            algorithm.update(batch_of(spec, seed))
    assert_same(weights(straight), weights(resumed))


def test_neither_reference_nor_critics_are_published(spec):
    """Hi-ORS: the reference, a second policy of three billion weights, was sent to every actor."""
    algorithm = build(spec)
    assert algorithm.acting.published().keys() == policy_of(spec).state_dict().keys()
    algorithm.only_acting()
    assert {name.partition(".")[0] for name in algorithm.state_dict()} <= {"policy", "_extra_state"}


def test_what_is_frozen_exists_once_and_the_rest_of_the_reference_once_more(spec):
    algorithm = build(spec, policy=partial(policy_of, frozen=True))
    shared = {id(weight) for weight in algorithm.policy.parameters()} & {
        id(weight) for weight in algorithm.reference.parameters()
    }
    assert shared == {id(weight) for weight in algorithm.policy.network[0].parameters()}
    algorithm.update_clone(clone_batch(spec))
    assert_same(weights(algorithm.reference), weights(algorithm.policy))
    policies = [module for module in algorithm.modules() if isinstance(module, FlowPolicy)]
    assert len(policies) == 2


# -- what the critics look at


def test_the_critics_train_an_encoder_of_their_own(spec):
    algorithm = build(spec, encoder=SEES, policy=partial(policy_of, encoder=SEES), augment=partial(Augment, 1, 0.1, 0))
    mine, theirs = weights(algorithm.policy.encoder), weights(algorithm.critic.encoder)
    algorithm.update_critic(batch_of(spec))
    assert_same(weights(algorithm.policy.encoder), mine)
    changed = {
        name for name, value in weights(algorithm.critic.encoder).items() if not torch.equal(value, theirs[name])
    }
    assert any(name.startswith("trunks") for name in changed)


def test_frozen_features_are_the_references_and_exist_once(spec):
    algorithm = build(spec, encoder=None, policy=partial(policy_of, encoder=SEES))
    algorithm.update_clone(clone_batch(spec))
    batch = batch_of(spec)
    expected = algorithm.reference.encoder(now(batch.observation))
    algorithm.update(batch)
    for critic in (algorithm.critic, algorithm.target_critic):
        assert torch.equal(critic.encoder(now(batch.observation)), expected)
        assert not list(critic.encoder.parameters())
    assert not torch.equal(algorithm.policy.encoder(now(batch.observation)), expected)


def test_augmentation_is_refused_where_nobody_sees(spec):
    with pytest.raises(ConfigError, match="sees none"):
        build(spec, augment=partial(Augment, 1, 0.0, 0.0))
    build(spec, encoder=SEES, augment=partial(Augment, 1, 0.0, 0.0))


# -- entropy


def test_what_the_end_of_an_episode_cut_off_lies_within_the_bounds_of_actions(spec):
    """The batch has zeros there, which an action of absolute positions may never be."""
    far = Spec(spec.observation, Feature((2,), low=10, high=12), fps=10.0)
    algorithm, batch = build(far), batch_of(far, length=2, ends="terminated")
    centred = batch.action.clone()
    centred[:, 2:] = 11.0
    loss, _ = algorithm.critic_loss(batch)
    filled = replace(batch, action=centred, valid=torch.ones_like(batch.valid))
    assert loss == algorithm.critic_loss(filled)[0]
    assert torch.equal(algorithm.value(batch), algorithm.value(filled))


def test_without_a_deviation_there_is_no_temperature(spec):
    """Hi-ORS: log-probabilities of zeros, and a temperature that was tuned to them."""
    algorithm = build(spec)
    metrics = algorithm.update(batch_of(spec))
    assert not {"entropy", "temperature"} & metrics.keys()
    assert not any("temperature" in name for name in algorithm.state_dict())


def test_with_a_deviation_its_density_is_in_the_loss_and_the_temperature_is_its_price(spec):
    algorithm, batch = build(spec, policy=partial(policy_of, noise_level=0.3)), batch_of(spec)
    plain = build(spec, policy=partial(policy_of, noise_level=0.3), initial_temperature=1e-9)
    loss, metrics = algorithm.policy_loss(batch)
    _, log_prob = algorithm.policy.rsample(now(batch.observation), seed=batch.seed)
    torch.testing.assert_close(loss - plain.policy_loss(batch)[0], 0.2 * log_prob.mean())
    assert metrics["entropy"] == -log_prob.mean()
    assert abs(metrics["entropy"]) > 1


def test_entropy_below_its_target_becomes_dear_and_rises_and_above_it_costs_nothing(spec):
    """Actions near zero are rewarded: values ask for no spread at all."""
    target = -1.5 * HORIZON * 2
    for noise_level, updates in ((0.05, 100), (0.8, 200)):
        algorithm = build(
            spec, policy=partial(policy_of, noise_level=noise_level), learning_rate=0.01, distill_weight=0.0,
            entropy_per_action=1.5, initial_temperature=0.05, critic_optimizer=partial(Optimizer, learning_rate=0.03),
        )  # fmt: skip
        found = []
        for seed in range(updates):
            batch = batch_of(spec, seed, 64, ends="terminated")
            metrics = algorithm.update(replace(batch, reward=-batch.action.square().sum(-1)))
            found.append((metrics["entropy"].item(), metrics["temperature"].item()))
        if noise_level == 0.05:
            assert found[0][0] < target - 8
            assert found[20][1] > 1.5 * found[0][1]
            assert max(entropy for entropy, _ in found) > target - 1
        else:
            assert found[0][0] > target + 15
            assert found[-1][1] < found[0][1] / 50
            assert found[-1][0] < found[0][0] - 5


def test_who_explores_takes_all_of_the_noise_and_who_is_evaluated_only_where_it_begins(spec):
    algorithm = build(spec, policy=partial(policy_of, noise_level=0.3))
    observation, nothing = {STATE: torch.randn(5, 3)}, torch.zeros(5, 2)
    noise = torch.randn(5, *algorithm.acting.noise_shape)
    other = noise.clone()
    other[:, 1:] = torch.randn(5, STEPS, HORIZON, 2)

    def act(noise, explore):
        return algorithm.act(observation, nothing, None, task=[""] * 5, noise=noise, explore=explore)[0].action

    assert torch.equal(act(noise, False), act(other, False))
    assert not torch.allclose(act(noise, True), act(other, True))
    assert not torch.allclose(act(noise, True), act(noise, False))


def test_a_policy_without_a_sampler_to_go_through_is_refused(spec):
    gaussian = partial(
        GaussianPolicy, encoder=ObservationEncoder, hidden=[8], layer_norm=False, log_std_low=-5.0, log_std_high=2.0
    )
    with pytest.raises(ConfigError, match="policy=flow or policy=pi0, not GaussianPolicy"):
        build(spec, policy=gaussian)


def test_parts_of_a_batch_make_the_step_of_the_whole(spec):
    whole, parts = (
        build(spec, optimizer=partial(Optimizer, learning_rate=1e-3, accumulation=count)) for count in (1, 4)
    )
    for algorithm in (whole, parts):
        algorithm.update_clone(clone_batch(spec))
        algorithm.update(batch_of(spec))
    for one, other in zip(whole.policy.parameters(), parts.policy.parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-3)


# -- with PI0


@pytest.mark.parametrize("noise_level", ["null", 0.3])
def test_pi0_is_cloned_judged_by_what_its_frozen_tower_sees_and_climbs(spec, noise_level):
    words = [
        "+policy=pi0_tiny",
        "policy.steps=3",
        "policy.freeze=[vision,language]",
        f"policy.noise_level={noise_level}",
    ]
    with initialize_config_dir(str(Path(__file__).parents[2] / "config"), version_base="1.3"):
        policy = instantiate(compose(overrides=words).policy)
    algorithm = build(spec, policy=policy, encoder=None)
    horizon = algorithm.policy.horizon
    for seed in range(2):
        algorithm.update_clone(batch_of(spec, seed, 4, horizon))
    assert_same(weights(algorithm.reference), weights(algorithm.policy))
    metrics = algorithm.update(batch_of(spec, 3, 4)) | algorithm.update(batch_of(spec, 4, 4))
    assert all(value.isfinite() for value in metrics.values())
    assert ("entropy" in metrics) == (noise_level != "null")
    assert metrics["distill"] > 0
    frozen = {id(weight) for weight in algorithm.policy.parameters() if not weight.requires_grad}
    assert frozen
    assert frozen == {id(weight) for weight in algorithm.policy.parameters()} & {
        id(weight) for weight in algorithm.reference.parameters()
    }
    batch = batch_of(spec, 5, 4)
    features = algorithm.critic.encoder(now(batch.observation))
    assert features.shape == (4, algorithm.critic.encoder.size)
    dark = {**now(batch.observation), CAMERA: torch.zeros(4, 16, 16, 3, dtype=torch.uint8)}
    assert not torch.allclose(algorithm.critic.encoder(dark), features)
    assert not any("reference" in name or "critic" in name for name in algorithm.acting.published())
