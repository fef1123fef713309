"""The optimiser of one process: what a step is, how the learning rate goes, and what a checkpoint of it holds."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from serl_launcher.types import Batch
from serl_launcher.utils.optim import Optimizer
from serl_launcher.utils.schedule import rate


class Net(nn.Module):
    """Two layers, one that is never used, and one that is frozen."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(3, 8), nn.Linear(8, 1)
        self.unused, self.frozen = nn.Linear(2, 2), nn.Linear(3, 3).requires_grad_(False)

    def forward(self, batch):
        return self.last(self.first(self.frozen(batch.observation["x"])).tanh()).square().flatten()


def net(seed=0):
    torch.manual_seed(seed)
    return Net()


def batch_of(size=8, seed=1):
    generator, ones = torch.Generator().manual_seed(seed), torch.ones(size)
    flags = torch.ones(size, 1, dtype=torch.bool)
    return Batch(
        observation={"x": torch.randn(size, 3, generator=generator)}, action=torch.zeros(size, 1, 1),
        reward=torch.zeros(size, 1), valid=flags, terminated=flags, truncated=flags, intervened=flags,
        length=torch.ones(size), weight=ones, step_id=torch.arange(size), seed=torch.arange(size),
    )  # fmt: skip


def steps(optimizer, count, seed=1):
    norms = []
    for step in range(count):
        for part in optimizer.parts(batch_of(seed=seed + step)):
            norm = optimizer.step(optimizer(part).mean())
        norms.append(float(norm))
    return norms


def weights(module):
    return torch.cat([weight.detach().flatten() for weight in module.parameters()])


def test_a_step_is_adams():
    module, twin = net(), net()
    adam = torch.optim.AdamW([p for p in twin.parameters() if p.requires_grad], lr=0.01, weight_decay=0.1)
    optimizer = Optimizer(module, learning_rate=0.01, weight_decay=0.1)
    for step in range(3):
        optimizer.step(optimizer(batch_of(seed=step)).mean())
        adam.zero_grad()
        twin(batch_of(seed=step)).mean().backward()
        adam.step()
    torch.testing.assert_close(weights(module), weights(twin))
    assert not torch.equal(weights(module), weights(net()))


def test_what_is_frozen_and_what_is_not_used_stays_as_it_is():
    module, before = net(), net()
    steps(Optimizer(module, learning_rate=0.1, weight_decay=0.1), 2)
    for name in ("unused", "frozen"):
        assert torch.equal(weights(getattr(module, name)), weights(getattr(before, name)))


def test_a_loss_that_passes_through_another_network_leaves_nothing_in_it():
    policy, critic = net(0), net(1)
    optimizer = Optimizer(policy, learning_rate=0.1)
    value = critic(replace(batch_of(), observation={"x": policy.first(batch_of().observation["x"])[:, :3]}))
    optimizer.step(value.mean())
    assert all(weight.grad is None for weight in critic.parameters())
    assert not torch.equal(weights(policy), weights(net(0)))


@pytest.mark.parametrize("accumulation", [2, 4])
def test_parts_of_a_batch_make_the_step_of_the_whole(accumulation):
    whole, parts = net(), net()
    norms = steps(Optimizer(whole, learning_rate=0.01, grad_clip_norm=0.5), 3)
    assert steps(
        Optimizer(parts, learning_rate=0.01, grad_clip_norm=0.5, accumulation=accumulation), 3
    ) == pytest.approx(norms)
    torch.testing.assert_close(weights(parts), weights(whole))


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


def test_it_goes_on_bit_for_bit_from_its_state():
    options = {"learning_rate": 0.01, "warmup": 2, "decay": 6, "grad_clip_norm": 1.0, "accumulation": 2}
    module = net()
    optimizer = Optimizer(module, **options)
    steps(optimizer, 3)
    resumed, state = copy.deepcopy(module), copy.deepcopy(optimizer.state_dict())
    again = Optimizer(resumed, **options)
    again.load_state_dict(state)
    assert again.state_dict()["steps"] == 3
    assert steps(optimizer, 3, seed=9) == steps(again, 3, seed=9)
    assert torch.equal(weights(module), weights(resumed))


def test_its_state_has_the_names_of_the_weights():
    optimizer = Optimizer(net(), learning_rate=0.01)
    steps(optimizer, 1)
    states = {name: state for name, state in optimizer.state_dict()["states"].items() if state}
    assert set(states) == {"first.weight", "first.bias", "last.weight", "last.bias"}
    assert states["first.weight"]["exp_avg"].shape == (8, 3)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_gradient_that_is_not_finite_changes_nothing_and_is_counted(value, accumulation):
    module, twin = net(), net()
    optimizer, straight = (Optimizer(each, learning_rate=0.1, accumulation=accumulation) for each in (module, twin))
    bad = batch_of(seed=7)
    bad.observation["x"][3, 1] = value
    assert optimizer.refused == 0
    for seed in (0, None, None, 1):
        for part in optimizer.parts(bad if seed is None else batch_of(seed=seed)):
            optimizer.step(optimizer(part).mean())
    steps(straight, 2, seed=0)
    assert torch.equal(weights(module), weights(twin))
    assert (optimizer.steps, optimizer.refused) == (4, 2)
    mine, other = (each.state_dict()["states"] for each in (optimizer, straight))
    for name in mine:
        assert all(torch.equal(mine[name][key], other[name][key]) for key in mine[name])
