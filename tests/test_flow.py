"""Flow matching: its loss and its sampler are the equations of its file, and imitation uses it."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from serl_client import ConfigError, Feature, Spec

from serl_launcher.algorithms.sft import SFT
from serl_launcher.networks.vision import ObservationEncoder
from serl_launcher.policies.flow import FlowPolicy
from serl_launcher.types import Batch

STATE = "observation.state"
HORIZON = 4


@pytest.fixture
def spec():
    """Two joints that are commanded to positions, and measured beside something else."""
    state = Feature((3,), names=("load", "elbow", "wrist"))
    return Spec({STATE: state}, Feature((2,), names=("wrist", "elbow"), low=-2, high=2), fps=10.0)


def policy_of(spec, **options):
    torch.manual_seed(0)
    known = {"horizon": HORIZON, "steps": 10, "hidden": [64, 64], "layer_norm": True, "imitates": "action"}
    return FlowPolicy(spec, encoder=ObservationEncoder, **{**known, **options})


def batch_of(action, state=None, valid=None):
    """action [B, H, A]; state [B, To, 3]."""
    count = len(action)
    flags = torch.ones(action.shape[:2], dtype=torch.bool)
    valid = flags if valid is None else valid
    return Batch(
        {STATE: torch.zeros(count, 1, 3) if state is None else state}, action, torch.zeros(action.shape[:2]), valid,
        ~flags, ~flags, ~flags, valid.sum(1), torch.ones(count), torch.arange(count),
    )  # fmt: skip


def sft(spec, **options):
    known = {"learning_rate": 3e-3, "average": 0.95, "stillness": 0.0, "augment": None}
    return SFT(spec, policy=partial(policy_of), **{**known, **options})


def test_the_loss_is_the_squared_error_of_the_velocity_over_valid_steps(spec):
    policy = policy_of(spec)
    for parameter in policy.network.parameters():
        torch.nn.init.zeros_(parameter)  # v = 0 everywhere
    action = torch.rand(3, HORIZON, 2) * 4 - 2
    valid = torch.arange(HORIZON) < torch.tensor([[4], [2], [1]])
    loss, _ = policy(batch_of(action * valid[..., None], valid=valid), torch.Generator().manual_seed(1))
    noise = torch.randn(3, HORIZON, 2, generator=torch.Generator().manual_seed(1))
    error = (noise - action / 2).square().mean(-1)
    torch.testing.assert_close(loss, torch.stack([error[i, :n].mean() for i, n in enumerate((4, 2, 1))]))


def test_what_lies_past_the_end_of_an_episode_changes_nothing(spec):
    policy = policy_of(spec)
    action, valid = torch.rand(2, HORIZON, 2), torch.arange(HORIZON) < torch.tensor([[3], [HORIZON]])
    losses = [
        policy(batch_of(torch.where(valid[..., None], action, past), valid=valid), torch.Generator().manual_seed(1))[0]
        for past in (0.0, 50.0)
    ]
    assert torch.equal(*losses)


def test_the_sampler_follows_the_velocity_from_noise_to_the_action(spec, monkeypatch):
    """Towards one chunk a the velocity is (x_t - a) / t, along which Euler steps of any size are exact."""
    target = torch.rand(5, HORIZON, 2) * 2 - 1
    monkeypatch.setattr(FlowPolicy, "_velocity", lambda self, chunk, time, _: (chunk - target) / time[:, None])
    for steps in (1, 3, 10):
        action = policy_of(spec, steps=steps).sample({STATE: torch.zeros(5, 3)})
        torch.testing.assert_close(action[0], 2 * target, atol=1e-5, rtol=0)


def test_times_dwell_where_the_noise_is(spec, monkeypatch):
    """t = 0.001 + 0.999 b with b ~ Beta(1.5, 1), whose mean is 0.6 and whose median 0.63."""
    seen = []
    policy = policy_of(spec)
    monkeypatch.setattr(
        FlowPolicy, "_velocity", lambda self, chunk, time, _: seen.append(time) or torch.zeros_like(chunk)
    )
    policy(batch_of(torch.zeros(20_000, HORIZON, 2)), torch.Generator().manual_seed(0))
    assert seen[0].mean() == pytest.approx(0.6, abs=0.01)
    assert seen[0].median() == pytest.approx(0.5 ** (1 / 1.5), abs=0.01)
    assert seen[0].min() >= 0.001


def test_the_same_noise_gives_the_same_chunk_in_any_company(spec):
    policy = policy_of(spec)
    observation, noise = {STATE: torch.randn(6, 3)}, torch.randn(2, 6, HORIZON, 2)
    both = policy.sample(observation, noise=noise)
    assert both.shape == (2, 6, HORIZON, 2)
    for i in range(6):
        alone = policy.sample({STATE: observation[STATE][i : i + 1]}, noise=noise[1:, i : i + 1])
        torch.testing.assert_close(alone[0, 0], both[1, i])


def test_two_ways_to_do_it_are_both_learned_and_never_their_mean(spec):
    algorithm = sft(spec)
    generator = torch.Generator().manual_seed(0)
    for _ in range(400):
        side = torch.randint(0, 2, (128, 1, 1), generator=generator) * 2 - 1
        algorithm.update(batch_of(side.float().expand(-1, HORIZON, 2)))
    sampled = algorithm.acting.sample({STATE: torch.zeros(1, 3)}, n=400, generator=generator)[:, 0, :, 0]  # [400, H]
    left, right = (sampled < -0.5).all(1).float().mean(), (sampled > 0.5).all(1).float().mean()
    assert left + right > 0.9
    assert min(left, right) > 0.3


def test_a_measured_state_is_imitated_by_the_names_of_the_action(spec):
    """What the arm reached counts, not what was commanded: a human's motion has no command."""
    policy = policy_of(spec, imitates=STATE)
    assert policy.offsets == {STATE: (0, 1, 2, 3, 4), "action": (0, 1, 2, 3)}
    state = torch.randn(7, 1 + HORIZON, 3).clamp(-2, 2)
    expected = policy_of(spec)(batch_of(state[:, 1:, [2, 1]], state[:, :1]), torch.Generator().manual_seed(3))[0]
    garbage = torch.full((7, HORIZON, 2), 9.0)
    torch.testing.assert_close(policy(batch_of(garbage, state), torch.Generator().manual_seed(3))[0], expected)


def test_an_action_that_no_state_measures_cannot_be_imitated_that_way(spec):
    with pytest.raises(ConfigError, match=r"'wrist'.*say imitates=action"):
        policy_of(replace(spec, observation={STATE: Feature((3,), names=("load", "elbow", "x"))}), imitates=STATE)
    with pytest.raises(ConfigError, match=r"imitates=observation.joints"):
        policy_of(spec, imitates="observation.joints")


def test_rows_without_weight_are_not_imitated(spec):
    algorithm = sft(spec)
    before = [parameter.clone() for parameter in algorithm.policy.parameters()]
    batch = batch_of(torch.ones(8, HORIZON, 2))
    assert algorithm.update(replace(batch, weight=torch.zeros(8)))["gradient"] == 0
    assert all(torch.equal(old, new) for old, new in zip(before, algorithm.policy.parameters(), strict=True))


def test_what_acts_is_the_moving_average(spec):
    algorithm = sft(spec, average=0.75)
    before = [parameter.clone() for parameter in algorithm.acting.parameters()]
    algorithm.update(batch_of(torch.ones(8, HORIZON, 2)))
    for old, averaged, new in zip(before, algorithm.acting.parameters(), algorithm.policy.parameters(), strict=True):
        torch.testing.assert_close(averaged, 0.75 * old + 0.25 * new)
