"""Values of a step, and soft actor-critic beside its paper."""

from dataclasses import replace

import pytest
import torch

from serl_launcher.algorithms.base import critic_weight, value_target
from tests.algorithms.test_algorithms import SPEC, build, toy_batch
from tests.shared.models import STATE, assert_same, batch, weights

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    ("length", "ends", "target", "weight"),
    [
        (3, "", 1 + 0.5 * 2 + 0.25 * 4 + 0.125 * 8, 0.5),
        (3, "truncated", 1 + 0.5 * 2 + 0.25 * 4 + 0.125 * 8, 0.5),  # a time limit ends no value
        (3, "terminated", 1 + 0.5 * 2 + 0.25 * 4, 0.5),
        (2, "terminated", 1 + 0.5 * 2, 0.5),  # the actions after success do not matter
        (2, "truncated", 1 + 0.5 * 2 + 0.25 * 8, 0.0),  # what the actions after the cut would have done is unknown
    ],
)
def test_targets_keep_termination_and_truncation_apart(length, ends, target, weight):
    row = batch(SPEC, 1, 3, length=length, ends=ends, weight=torch.tensor([0.5]))
    row = replace(row, reward=torch.tensor([[1.0, 2.0, 4.0]]) * row.valid)
    assert value_target(row, torch.tensor([8.0]), discount=0.5).tolist() == [target]
    assert critic_weight(row).tolist() == [weight]
    moved = row.to("meta")
    assert moved.action.device.type == moved.observation[STATE].device.type == "meta"


def test_the_target_of_soft_actor_critic_is_the_papers():
    algorithm, _ = build("sac", "algo.discount=0.5", "algo.initial_temperature=0.3")
    rows = batch(SPEC, window=algorithm.windows["update"])
    generator = torch.Generator().set_state(algorithm.generator.get_state())
    noise = torch.randn(len(rows), *algorithm.policy.noise_shape)
    target = algorithm.target(rows, noise)
    with torch.no_grad():
        action, log_prob = algorithm.policy.rsample(rows.next_observation, noise=noise)
        pair = torch.randperm(3, generator=generator)[:2]
        value = algorithm.target_critic(rows.next_observation, action)[pair].min(0).values - 0.3 * log_prob
    torch.testing.assert_close(target, rows.reward[:, 0] + 0.5 * value)


def test_the_noise_of_an_update_is_that_of_its_rows_and_the_target_has_another_than_the_loss(monkeypatch):
    algorithm, _ = build("sac")
    rows, seen = batch(SPEC, window=algorithm.windows["update"]), []
    for name in ("target", "policy_loss"):
        method = getattr(algorithm, name)
        monkeypatch.setattr(
            algorithm, name, lambda rows, noise, method=method: (seen.append(noise), method(rows, noise))[1]
        )
    algorithm.update(rows)
    algorithm.update(rows)
    assert torch.equal(seen[0], seen[2])
    assert torch.equal(seen[1], seen[3])
    assert (seen[0] != seen[1]).all()


def test_target_networks_follow_by_tau_alone_and_rows_without_weight_move_no_critic():
    algorithm, _ = build("sac", "algo.tau=0.25")
    rows, begun = toy_batch(algorithm.windows["update"]), weights(algorithm.critic)
    assert algorithm.update_critic(replace(rows, weight=torch.zeros(64)))["critic_gradient"] == 0
    assert_same(begun, weights(algorithm.critic))
    before = [parameter.clone() for parameter in algorithm.target_critic.parameters()]
    algorithm.update_critic(rows)
    found = zip(before, algorithm.target_critic.parameters(), algorithm.critic.parameters(), strict=True)
    for old, new, critic in found:
        torch.testing.assert_close(new, 0.75 * old + 0.25 * critic)


@pytest.mark.parametrize(("target", "dearer"), [(9.0, True), (-9.0, False)])
def test_entropy_below_its_target_becomes_dear_and_above_it_cheap(target, dearer):
    algorithm, _ = build("sac", f"algo.entropy_per_action={-target}")
    algorithm.update(toy_batch(algorithm.windows["update"]))
    assert (algorithm.log_temperature.log_alpha > 0) == dearer  # it began at 0
