"""Actor-critic through a flow: its losses are the equations of its file, and the faults known of others are not in it.

Which of Hi-ORS' faults is covered where: of its sac_pi0, all here (each test names its own). Of its buffer, in
tests/replay/test_replay.py: a chunk that runs on into the next episode (B1), pairs mixed up after a wrap (B3), the
newest step never drawn (B5); in test_mixture.py beside it: rows dropped where the robot stays still (B4). That a time
limit is no end of the value: in tests/algorithms/test_sac.py."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from hydra.utils import instantiate
from serl_client import Feature
from torch import nn

from serl_launcher.algorithms.base import value_target
from serl_launcher.networks.augment import Augment
from serl_launcher.policies.chunk import ChunkPolicy
from tests.shared.models import CAMERA, REACH, STATE, act, assert_same, batch, config_of, now, robot, weights

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.slow]  # its import alone takes seconds

SPEC = robot()
HORIZON, JUDGED, STEPS = 6, 4, 3
SMALL = (
    f"policy.horizon={HORIZON}", f"n_action_steps={JUDGED}", f"policy.head.steps={STEPS}", "policy.scale=bounds",
    "policy.network.hidden=[32,32]", "critic.hidden=[32,32]", "critic.num_critics=3", "critic.num_target_critics=3",
    "algo.optimizer.learning_rate=1e-3", "algo.critic_optimizer.learning_rate=1e-3", "algo.discount=0.5",
    "algo.tau=0.1", "algo.distill_weight=3", "algo.initial_temperature=0.2",
)  # fmt: skip
SEES, POLICY_SEES = (
    (f"{part}.encoder.cameras=[all]", f"+{part}.encoder.channels=[8]", f"+{part}.encoder.latent=6")
    for part in ("algo", "policy")
)
BLIND = ("algo.encoder=null",)
NOISY = "policy.head.noise_level=0.3"
chunks = partial(batch, SPEC, horizon=JUDGED)
longer = partial(batch, SPEC, horizon=HORIZON)


def build(*words, spec=SPEC, **options):
    """options: arguments that no word can say."""
    torch.manual_seed(0)
    return instantiate(config_of("algo=sac_pi0", *SMALL, *words).algo)(spec, **options)


# -- the critics


def test_the_target_is_that_of_the_worst_critic_where_the_chunk_ends():
    """Hi-ORS: gamma = 1 and no gamma^h, and a time limit taken for the end (what value_target is tested for)."""
    algorithm, rows = build(), chunks()
    following = now(rows.next_observation)
    with torch.no_grad():
        action, _ = algorithm.policy.rsample(following, seed=rows.seed, stream=1)
        worst = algorithm.target_critic(following, action[:, :JUDGED]).min(0).values
    torch.testing.assert_close(algorithm.target(rows), value_target(rows, worst, 0.5))


def test_the_critics_learn_the_squared_error_and_nothing_of_what_a_time_limit_cut():
    algorithm, whole, cut = build(), chunks(), chunks(length=2, ends="truncated")
    target = algorithm.target(whole)
    error = sum((q - target).square() for q in algorithm.critic(whole.observation, whole.action))
    torch.testing.assert_close(algorithm.critic_loss(whole)[0], error.mean())
    before = weights(algorithm.critic)
    assert algorithm.update_critic(cut)["critic_loss"] == 0
    assert_same(weights(algorithm.critic), before)


def test_critics_see_the_actions_that_the_policy_sees():
    """By data, once they are fitted: else the wide bounds of an arm would leave a critic nothing to tell apart."""
    algorithm = build("policy.scale=range")
    low, high = np.full(2, -0.2), np.array([0.1, 0.4])
    column = {"mean": (low + high) / 2, "std": high - low, "low": low, "high": high}
    algorithm.set_statistics({kind: {"action": value, STATE: np.ones(3)} for kind, value in column.items()})
    modules = (algorithm.policy, algorithm.reference, algorithm.critic, algorithm.target_critic)
    for scale in (module.scale for module in modules):
        torch.testing.assert_close(scale.to_unit(torch.as_tensor(high, dtype=torch.float32)), torch.ones(2))


@pytest.mark.parametrize("encoder", [SEES, BLIND])
def test_target_and_critic_that_have_met_say_the_same_of_the_same(encoder):
    """Hi-ORS: the target's BatchNorm buffers never followed, and only one of the two was in training mode."""
    algorithm = build("algo.tau=1.0", *encoder, *POLICY_SEES)
    algorithm.set_statistics({"mean": {STATE: torch.randn(3).numpy()}, "std": {STATE: torch.rand(3).numpy() + 1}})
    algorithm.update_critic(chunks())
    rows = chunks(seed=1)
    said = algorithm.critic(now(rows.observation), rows.action)
    assert torch.equal(algorithm.target_critic(now(rows.observation), rows.action), said)
    for module in (algorithm.train(), algorithm.eval()):
        assert torch.equal(module.critic(now(rows.observation), rows.action), said)
    assert not any(isinstance(module, nn.modules.batchnorm._NormBase) for module in algorithm.modules())


def test_only_the_actions_that_are_run_are_judged():
    algorithm, rows = build(), chunks()
    action, _ = algorithm.policy.rsample(now(rows.observation), seed=rows.seed)
    (slope,) = torch.autograd.grad(algorithm.value_by_action(now(rows.observation), action).sum(), action)
    assert (slope[:, :JUDGED].abs().sum(-1) > 0).all()
    assert slope[:, JUDGED:].abs().sum() == 0
    assert algorithm.windows["update"].horizon == JUDGED
    assert algorithm.windows["update_clone"].horizon == HORIZON
    assert build("algo.critic_horizon=50").critic.horizon == HORIZON


# -- the policy


@pytest.mark.parametrize("words", [(), (NOISY,)], ids=["plain", "noisy"])
def test_the_policy_loss_and_its_gradient_are_those_of_the_equation_and_stop_before_the_critics(words):
    """Hi-ORS: `a = q; a += q + w * d` gave 2 q + w d, and overwrote what was logged."""
    algorithm, rows, is_noisy = build(*words), chunks(), bool(words)
    price = algorithm.update(rows).get("temperature", 0.0)  # so that policy and reference differ
    algorithm.zero_grad()
    observation, policy = now(rows.observation), algorithm.policy
    loss, metrics = algorithm.policy_loss(rows)
    loss.backward()
    assert all(weight.grad is None for weight in algorithm.critic.parameters())
    found = [weight.grad.clone() for weight in policy.parameters()]
    algorithm.zero_grad()
    action, log_prob = policy.rsample(observation, seed=rows.seed)
    reference = algorithm.reference.rsample(observation, seed=rows.seed)[0].detach()
    value = algorithm.critic(observation, action[:, :JUDGED]).mean()
    distance = ((action - reference) / REACH).square().mean()
    entropy = -log_prob.mean() if is_noisy else torch.zeros(())
    expected = 3 * distance - value - price * entropy
    expected.backward()
    for gradient, weight in zip(found, policy.parameters(), strict=True):
        assert gradient.abs().sum() > 0
        torch.testing.assert_close(gradient, weight.grad)
    assert distance > 0
    told = {"policy_loss": expected, "distill": distance, "value_of_policy": value, "entropy": entropy}
    torch.testing.assert_close(loss, expected)
    for name, metric in metrics.items():
        torch.testing.assert_close(metric, told[name].detach())
    assert bool(price) == ("entropy" in metrics) == is_noisy == bool(entropy.abs() > 1)
    assert any("temperature" in name for name in algorithm.state_dict()) == is_noisy, "nothing to tune"


@pytest.mark.parametrize(("target", "dearer"), [(99.0, True), (-99.0, False)])
def test_entropy_below_its_target_becomes_dear_and_rises_and_above_it_costs_nothing(target, dearer):
    words = f"algo.entropy_per_action={-target}", "algo.distill_weight=0", "algo.initial_temperature=50"
    algorithm = build(NOISY, *words)
    before = algorithm.policy.head.log_noise_level.item()
    assert (algorithm.update(chunks())["temperature"] > 50) == dearer
    assert algorithm.policy.head.log_noise_level > before, "at this price there is nothing better than noise"


def test_a_chunk_beyond_the_bounds_finds_its_way_back():
    """Where the cut to the bounds has no gradient, what was once outside would stay there."""
    policy = build().policy
    nn.init.zeros_(policy.network.layers[-1].weight)
    nn.init.constant_(policy.network.layers[-1].bias, -9.0)  # every chunk ends far above the bound
    for sign, passes in ((1, True), (-1, False)):
        policy.zero_grad()
        action, _ = policy.rsample({STATE: torch.zeros(8, 3)}, seed=torch.arange(8))
        assert (action == REACH).all()
        (sign * action.sum()).backward()
        assert (policy.network.layers[-1].bias.grad.abs() > 0).all() == passes


# -- the reference


def test_the_reference_is_what_was_cloned_and_stays_it():
    algorithm = build()
    for seed in range(3):
        algorithm.update_clone(longer(seed=seed))
    assert_same(weights(algorithm.reference), weights(algorithm.policy))
    kept = weights(algorithm.reference)
    for seed in range(3):
        algorithm.update_critic(chunks(seed=seed))
        algorithm.update(chunks(seed=seed))
    assert_same(weights(algorithm.reference), kept)
    assert not torch.equal(*(policy.network.layers[0].weight for policy in (algorithm.reference, algorithm.policy)))


def test_neither_reference_nor_critics_are_published_and_what_is_frozen_exists_once():
    """Hi-ORS: the reference, a second policy of three billion weights, was sent to every actor."""
    policy = build().policy
    policy.network.layers[0].requires_grad_(False)
    algorithm = build(policy=lambda spec: policy)
    assert shared(algorithm) == {id(weight) for weight in algorithm.policy.network.layers[0].parameters()}
    algorithm.update_clone(longer())
    assert_same(weights(algorithm.reference), weights(algorithm.policy))
    assert sum(isinstance(module, ChunkPolicy) for module in algorithm.modules()) == 2
    algorithm = build()
    assert algorithm.acting.published().keys() == build().policy.state_dict().keys()
    algorithm.only_acting()
    assert {name.partition(".")[0] for name in algorithm.state_dict()} <= {"policy", "_extra_state"}


def shared(algorithm):
    """The weights that policy and reference share."""
    policy, reference = (map(id, part.parameters()) for part in (algorithm.policy, algorithm.reference))
    return {*policy} & {*reference}


# -- what the critics look at


def test_the_critics_train_an_encoder_of_their_own():
    algorithm = build(*SEES, *POLICY_SEES, augment=partial(Augment, 1, 0.1, 0))
    mine, theirs = weights(algorithm.policy.encoder), weights(algorithm.critic.encoder)
    algorithm.update_critic(chunks())
    assert_same(weights(algorithm.policy.encoder), mine)
    changed = weights(algorithm.critic.encoder)
    assert any(name.startswith("trunks") and not torch.equal(changed[name], theirs[name]) for name in changed)


def test_frozen_features_are_the_references_and_exist_once():
    algorithm = build(*BLIND, *POLICY_SEES)
    algorithm.update_clone(longer())
    rows = chunks()
    expected = algorithm.reference.encoder(now(rows.observation))
    algorithm.update(rows)
    for critic in (algorithm.critic, algorithm.target_critic):
        assert torch.equal(critic.encoder(now(rows.observation)), expected)
        assert not list(critic.encoder.parameters())
    assert not torch.equal(algorithm.policy.encoder(now(rows.observation)), expected)


def test_what_the_end_of_an_episode_cut_off_lies_within_the_bounds_of_actions():
    """The batch has zeros there, which an action of absolute positions may never be."""
    far = replace(SPEC, action=Feature((2,), low=10, high=12))
    algorithm, rows = build(spec=far), batch(far, horizon=JUDGED, length=2, ends="terminated")
    centred = rows.action.clone()
    centred[:, 2:] = 11.0
    loss, _ = algorithm.critic_loss(rows)
    filled = replace(rows, action=centred, valid=torch.ones_like(rows.valid))
    assert loss == algorithm.critic_loss(filled)[0]
    assert torch.equal(algorithm.value(rows), algorithm.value(filled))


def test_who_explores_takes_all_of_the_noise_and_who_is_evaluated_only_where_it_begins():
    algorithm, observation = build(NOISY), {STATE: torch.randn(5, 3)}
    noise = torch.randn(5, *algorithm.acting.noise_shape)
    other = torch.cat([noise[:, :1], torch.randn(5, STEPS, HORIZON, 2)], 1)
    calm, explored = act(algorithm, observation, noise), act(algorithm, observation, noise, explore=True)
    assert torch.equal(calm, act(algorithm, observation, other))
    assert not torch.allclose(explored, act(algorithm, observation, other, explore=True))
    assert not torch.allclose(explored, calm)


# -- with PI0


@pytest.mark.parametrize("noise_level", ["null", 0.3])
def test_pi0_is_cloned_judged_by_what_its_frozen_tower_sees_and_climbs(noise_level):
    words = ["+policy=pi0_tiny", "head.steps=3", "policy.freeze=[vision,language]", "policy.gemma.depth=2"]
    policy = instantiate(config_of(*words, f"head.noise_level={noise_level}").policy)
    algorithm = build(*BLIND, policy=policy)
    for seed in range(2):
        algorithm.update_clone(chunks(4, seed=seed, horizon=algorithm.policy.horizon))
    assert_same(weights(algorithm.reference), weights(algorithm.policy))
    metrics = algorithm.update(chunks(4, seed=3)) | algorithm.update(chunks(4, seed=4))
    assert all(value.isfinite() for value in metrics.values())
    assert ("entropy" in metrics) == (noise_level != "null")
    assert metrics["distill"] > 0
    frozen = {id(weight) for weight in algorithm.policy.parameters() if not weight.requires_grad}
    assert frozen
    assert frozen == shared(algorithm)
    observation = now(chunks(4, seed=5).observation)
    features = algorithm.critic.encoder(observation)
    assert features.shape == (4, algorithm.critic.encoder.size)
    dark = {**observation, CAMERA: torch.zeros(4, 16, 16, 3, dtype=torch.uint8)}
    assert not torch.allclose(algorithm.critic.encoder(dark), features)
    assert not any("reference" in name or "critic" in name for name in algorithm.acting.published())
