"""The optimiser of one process: what a step is, how the learning rate goes, and what a checkpoint of it holds."""

import copy
from dataclasses import replace
from functools import partial

import pytest
import torch
from serl_client import ConfigError
from torch import nn

from serl_launcher.optim.distributed import World
from serl_launcher.optim.optimizer import Optimizer
from serl_launcher.optim.schedule import rate
from tests.shared.models import STATE, assert_same, batch, now, robot


class Net(nn.Module):
    """Two layers, one that is never used, and one that is frozen."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(3, 8), nn.Linear(8, 1)
        self.unused, self.frozen = nn.Linear(2, 2), nn.Linear(3, 3).requires_grad_(False)

    def forward(self, rows):
        return self.last(self.first(self.frozen(rows.observation[STATE][:, 0])).tanh()).square().flatten()


def net(seed=0):
    torch.manual_seed(seed)
    return Net()


batch_of = partial(batch, robot(cameras=()), 8)


def steps(optimizer, count, seed=1):
    norms = []
    for step in range(count):
        for part in optimizer.parts(batch_of(seed=seed + step)):
            norm = optimizer.step(optimizer.forward(part).mean())
        norms.append(float(norm))
    return norms


def weights(module):
    return torch.cat([weight.detach().flatten() for weight in module.parameters()])


def test_a_step_is_adams_and_what_is_frozen_or_not_used_stays_as_it_is():
    module, twin = net(), net()
    adam = torch.optim.AdamW([p for p in twin.parameters() if p.requires_grad], lr=0.01, weight_decay=0.1)
    optimizer = Optimizer(module, learning_rate=0.01, weight_decay=0.1)
    for step in range(3):
        optimizer.step(optimizer.forward(batch_of(seed=step)).mean())
        adam.zero_grad()
        twin(batch_of(seed=step)).mean().backward()
        adam.step()
    torch.testing.assert_close(weights(module), weights(twin))
    for name in ("unused", "frozen"):
        assert torch.equal(weights(getattr(module, name)), weights(getattr(net(), name)))
    assert not torch.equal(weights(module), weights(net()))


def test_a_loss_that_passes_through_another_network_leaves_nothing_in_it():
    policy, critic = net(0), net(1)
    optimizer = Optimizer(policy, learning_rate=0.1)
    rows = batch_of()
    hidden = policy.first(now(rows.observation)[STATE])[:, None, :3]
    value = critic(replace(rows, observation={STATE: hidden}))
    optimizer.step(value.mean())
    assert all(weight.grad is None for weight in critic.parameters())
    assert not torch.equal(weights(policy), weights(net(0)))


def test_a_gradient_is_cut_to_its_largest_norm():
    """With Adam a constant factor changes nothing but the share of epsilon, so the second moment is looked at."""
    optimizers = [Optimizer(net(), learning_rate=0.01, grad_clip_norm=clip) for clip in (None, 0.01)]
    free, cut = (steps(optimizer, 1)[0] for optimizer in optimizers)
    assert free == cut > 0.01
    moments = [each.state_dict()["states"]["last.weight"]["exp_avg"] for each in optimizers]
    torch.testing.assert_close(moments[1], moments[0] * 0.01 / free)


def test_the_learning_rate_grows_then_falls_to_its_end():
    rates = [rate(step, warmup=10, decay=100, final=0.1) for step in range(120)]
    assert rates[0] == pytest.approx(1 / 11)
    assert rates[:11] == sorted(rates[:11])
    assert rates[10] == 1.0
    assert rates[55] == pytest.approx(0.55)  # half way down
    assert rates[100:] == [pytest.approx(0.1)] * 20
    assert {rate(step, warmup=0, decay=None, final=0.1) for step in (0, 5, 10**6)} == {1.0}


def test_a_step_goes_as_far_as_the_learning_rate_of_its_time():
    """Adam's first step changes each weight by the learning rate, whatever the gradient is."""
    module, before = net(), net()
    steps(Optimizer(module, learning_rate=0.1, warmup=9), 1)
    assert (weights(module.last) - weights(before.last)).abs().mean() == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize("rule", ["adamw", "laprop"])
def test_weights_whose_name_begins_so_have_a_factor_of_the_rate_and_keep_it_when_resumed(rule):
    module, before = net(), net()
    options = {"learning_rate": 0.1, "rates": {"first": 0.3, "first.bias": 0.0}, "rule": rule}
    optimizer = Optimizer(module, **options)
    steps(optimizer, 1)
    for name, moved in {"first.weight": 0.03, "first.bias": 0.0, "last.weight": 0.1}.items():
        change = (module.get_parameter(name) - before.get_parameter(name)).abs()
        assert float(change.detach().mean()) == pytest.approx(moved, rel=1e-3)
    before.load_state_dict(module.state_dict())
    resumed = Optimizer(before, **options)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert steps(optimizer, 2, seed=5) == steps(resumed, 2, seed=5)
    assert torch.equal(weights(module), weights(before))
    with pytest.raises(ConfigError, match=r"rates.encoder: no .* name begins so; use the beginnings of first.weight"):
        Optimizer(module, learning_rate=0.1, rates={"encoder": 0.3})


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize(("accumulation", "rule"), [(1, "adamw"), (2, "adamw"), (1, "laprop")])
def test_a_gradient_that_is_not_finite_changes_nothing_and_is_counted(value, accumulation, rule):
    module, twin = net(), net()
    options = {"learning_rate": 0.1, "accumulation": accumulation, "rule": rule}
    optimizer, straight = (Optimizer(each, **options) for each in (module, twin))
    bad = batch_of(seed=7)
    bad.observation[STATE][3, 0, 1] = value
    assert optimizer.refused == 0
    for seed in (0, None, None, 1):
        for part in optimizer.parts(bad if seed is None else batch_of(seed=seed)):
            optimizer.step(optimizer.forward(part).mean())
    steps(straight, 2, seed=0)
    assert torch.equal(weights(module), weights(twin))
    assert (optimizer.steps, optimizer.refused) == (4, 2)
    assert_same(*(each.state_dict()["states"] for each in (optimizer, straight)))


# -- LaProp


def laprop(**options):
    module = nn.Linear(3, 2, bias=False)
    with torch.no_grad():
        module.weight.copy_(torch.tensor([[1.0, -2.0, 3.0], [0.5, 0.0, -1.0]]))
    return module.weight, Optimizer(module, rule="laprop", learning_rate=0.01, epsilon=1e-20, **options)


def test_the_first_step_of_laprop_is_the_learning_rate_and_the_sign_however_large_the_gradient():
    for scale in (1e-3, 1e9):
        weight, optimizer = laprop()
        before, direction = weight.detach().clone(), torch.tensor([[1.0, -1.0, 0.0], [2.0, -3.0, 1e-3]])
        optimizer.step((weight * direction * scale).sum())
        torch.testing.assert_close(before - weight, 0.01 * direction.sign())


def test_laprop_normalises_before_it_averages_and_cuts_a_gradient_to_a_share_of_its_weight():
    weight, optimizer = laprop(betas=(0.8, 0.9), weight_decay=0.5)
    expected, first, second = weight.detach().clone(), torch.zeros(2, 3), torch.zeros(2, 3)
    for step, scale in enumerate((0.01, 100.0, 0.01), 1):
        gradient = scale * torch.tensor([[1.0, -1.0, 2.0], [2.0, -3.0, 0.5]])
        gradient /= max(1.0, float(gradient.norm() / (0.3 * expected.norm())))
        second = 0.9 * second + 0.1 * gradient**2
        first = 0.8 * first + 0.2 * gradient / (second / (1 - 0.9**step)).sqrt()
        expected -= 0.01 * (0.5 * expected + first / (1 - 0.8**step))
        optimizer.step((weight * scale * torch.tensor([[1.0, -1.0, 2.0], [2.0, -3.0, 0.5]])).sum())
    torch.testing.assert_close(weight.detach(), expected)


def test_a_weight_of_zero_is_cut_as_one_of_a_thousandth():
    weight, optimizer = laprop(betas=(0.0, 0.0))
    with torch.no_grad():
        weight.zero_()
    optimizer.step((weight * torch.full((2, 3), 1.0)).sum())
    moments = optimizer.state_dict()["states"]["weight"]["exp_avg_sq"]
    torch.testing.assert_close(moments.sum().sqrt(), torch.tensor(0.3e-3))


def test_an_unknown_rule_and_shards_of_laprop_are_refused():
    with pytest.raises(ConfigError, match=r"rule=adam: say one of adamw, laprop"):
        Optimizer(nn.Linear(1, 1), learning_rate=1.0, rule="adam")
    with pytest.raises(ConfigError, match=r"rule=laprop has no shards: say sharding=replicas"):
        laprop()[1].spread(World(size=2), {"zero_optimization": {"stage": 1}})
