"""Chunks that continue the one under way, trained or guided: old rows stay as they are, new ones follow them."""

import math

import pytest
import torch
from serl_client import ConfigError

from serl_launcher.networks.seeded_noise import normal, uniform
from serl_launcher.policies.chunk import ChunkPolicy
from serl_launcher.policies.heads.flow import TIME
from serl_launcher.policies.prefix import GUIDANCE, Rows
from serl_launcher.types import Prefix
from tests.shared import pi0
from tests.shared.models import STATE

from .test_flow import HORIZON, NOWHERE, LinearGaussian, batch_of, policy_of, seeds, sft

pytestmark = pytest.mark.usefixtures("one_thread")

MOST = 3


def prefix_of(committed, left=None, action=None, size=2, horizon=HORIZON):
    """The prefix of len(committed) chunks of random actions in -2..2."""
    generator = torch.Generator().manual_seed(7)
    left = torch.tensor(committed if left is None else left)
    drawn = 4 * torch.rand(len(committed), horizon, size, generator=generator) - 2 if action is None else action
    there = torch.arange(horizon) < left[:, None]
    return Prefix(drawn * there.unsqueeze(-1), torch.tensor(committed), left)


def assert_continued(after, anew, prefix):
    """Without an old chunk a chunk is as ever; else its committed rows are the old ones, and the rest knows of them."""
    torch.testing.assert_close(after[0], anew[0], atol=1e-5, rtol=1e-5)
    for row, committed in ((1, 2), (2, 3)):
        assert torch.equal(after[row, :committed], prefix.action[row, :committed])
        assert not torch.allclose(after[row, committed:], anew[row, committed:])


def sampled(policy, prefix=None, rows=4, seed=0, **observed):
    observation = observed or {STATE: torch.zeros(rows, 3)}
    noise = normal(seeds(rows, seed), policy.noise_shape)[None]
    with torch.no_grad():
        return policy.sample(observation, noise=noise, prefix=prefix)[0]


# -- trained


def test_rows_of_the_old_chunk_are_clean_and_have_no_loss(monkeypatch):
    policy, seen, length = policy_of(max_delay=MOST), [], torch.tensor([4, 2, 1] * 200)
    monkeypatch.setattr(ChunkPolicy, "predict", lambda _, *asked: seen.append(asked) or torch.zeros_like(asked[0]))
    valid = torch.arange(HORIZON) < length[:, None]
    action = torch.where(valid.unsqueeze(-1), torch.rand(600, HORIZON, 2) * 4 - 2, 0.0)
    loss, _ = policy(batch_of(action, length=length))
    ((chunk, time, _, old),) = seen
    delay = old.sum(1)
    assert torch.equal(old, torch.arange(HORIZON) < delay[:, None]), "they come first"
    assert [sorted(set(delay[length == n].tolist())) for n in (4, 2, 1)] == [[0, 1, 2, 3], [0, 1], [0]]
    counts = delay[length == 4].bincount()
    assert counts.min() > 30, "each delay is drawn as often"
    b = 0.001 + 0.999 * uniform(seeds(600), (), TIME) ** (1 / 1.5)
    assert torch.equal(time[:, 0], b), "the other rows have the time that they had without a delay"
    is_old = old.unsqueeze(-1)
    noise, unit = normal(seeds(600), (HORIZON, 2)), action / 2
    torch.testing.assert_close(chunk, torch.where(is_old, unit, b[:, None, None] * (noise - unit) + unit))
    error = (noise - unit).square().mean(-1) * (valid & ~is_old[..., 0])
    torch.testing.assert_close(loss, error.sum(1) / (length - delay))


def test_the_committed_rows_come_back_bit_by_bit_and_one_batch_mixes_delays():
    for policy in (policy_of(max_delay=MOST), policy_of(max_delay=1), policy_of()):
        prefix = prefix_of([0, 1, 2, 4], [0, 3, 4, 4])
        mixed = sampled(policy, prefix)
        for row, committed in enumerate([0, 1, 2, 4]):
            assert torch.equal(mixed[row, :committed], prefix.action[row, :committed])
            assert not torch.equal(mixed[row, committed:3], prefix.action[row, committed:3]) or committed == 4
            part = Prefix(*(each[row : row + 1] for each in (prefix.action, prefix.committed, prefix.left)))
            noise = normal(seeds(4)[row : row + 1], policy.noise_shape)[None]
            alone = policy.sample({STATE: torch.zeros(1, 3)}, noise=noise, prefix=part)[0]
            torch.testing.assert_close(alone[0], mixed[row])
        torch.testing.assert_close(mixed[0], sampled(policy)[0])


def test_a_chunk_without_an_old_one_is_the_same_bit_by_bit_with_a_prefix_of_no_rows():
    policy = policy_of(max_delay=MOST)
    assert torch.equal(sampled(policy), sampled(policy, prefix_of([0] * 4)))


@pytest.mark.parametrize("max_delay", [-1, HORIZON])
def test_a_delay_that_leaves_no_row_to_learn_is_refused(max_delay):
    with pytest.raises(ConfigError, match=rf"policy.max_delay={max_delay}: say 0, or fewer rows than policy.horizon=4"):
        policy_of(max_delay=max_delay)


@pytest.mark.slow
@pytest.mark.parametrize("max_delay", [MOST, 0], ids=["trained", "guided"])
def test_a_chunk_goes_the_way_that_the_old_one_went(max_delay):
    """Both ways are as likely without an old chunk: to decide anew at each border is to tremble between them."""
    algorithm = sft(policy=lambda spec: policy_of(spec, max_delay=max_delay))
    generator = torch.Generator().manual_seed(0)
    for update in range(300):
        side = torch.randint(0, 2, (128, 1, 1), generator=generator) * 2 - 1
        algorithm.update(batch_of(side.float().expand(-1, HORIZON, 2), seed=update))
    sides = torch.tensor([-1.0, 1.0]).repeat(100)
    old = sides[:, None, None].expand(-1, HORIZON, 2)
    followed = sampled(algorithm.acting, prefix_of([2] * 200, [3] * 200, old), rows=200)[:, 2:]
    assert (followed.mean((1, 2)).sign() == sides).float().mean() > 0.95
    anew = sampled(algorithm.acting, rows=200)
    assert 0.3 < (anew[:, 2:].mean((1, 2)).sign() == sides).float().mean() < 0.7
    if not max_delay:  # those that learn to continue as well are not as far yet
        left, right = ((way * anew[..., 0] > 0.5).all(1).float().mean() for way in (-1, 1))
        assert min(left, right) > 0.3
        assert left + right > 0.9, "never their mean"


# -- guided


def test_guidance_is_the_equation_of_its_file():
    """Where the velocity is linear in x, its gradient is known: a = x - t v, so da / dx = 1 - t slope."""
    policy, prefix = LinearGaussian(5), prefix_of([0, 1, 2, 3], [0, 3, 4, 3])
    noise, target = normal(seeds(4), policy.noise_shape), policy.scale.to_unit(prefix.action)
    weights = torch.zeros(4, HORIZON)
    for row, (committed, left) in enumerate(zip([0, 1, 2, 3], [0, 3, 4, 3], strict=True)):
        for i in range(left):
            c = (left - i) / (left - committed + 1)
            weights[row, i] = 1 if i < committed else c * (math.exp(c) - 1) / (math.e - 1)
    x = noise[:, 0]
    for k in range(5):
        t = 1 - k / 5
        slope = (t - (1 - t) * policy.std**2) / (t**2 + (1 - t) ** 2 * policy.std**2)
        velocity = slope * (x - (1 - t) * policy.mean) - policy.mean
        guess = x - t * velocity
        factor = GUIDANCE if k == 0 else min(GUIDANCE, (t**2 + (1 - t) ** 2) / (t * (1 - t)))
        x = x - (velocity - factor * (1 - t * slope) * weights[..., None] * (target - guess)) / 5
    expected = policy.scale.from_unit(x.clamp(-1, 1))
    for row, committed in enumerate([0, 1, 2, 3]):
        expected[row, :committed] = prefix.action[row, :committed]
    states = {STATE: NOWHERE[STATE][:4]}
    torch.testing.assert_close(policy.sample(states, noise=noise[None], prefix=prefix)[0], expected)
    torch.testing.assert_close(Rows(prefix.action, target, prefix.committed, prefix.left).weights(), weights)


# -- PI0


@pytest.mark.slow
@pytest.mark.parametrize("max_delay", [MOST, 0], ids=["trained", "guided"])
def test_pi0_continues_a_chunk(max_delay):
    policy = pi0.make(pi0.TOP, max_delay=max_delay)
    prefix = prefix_of([0, 2, 3], [0, 4, 8], horizon=policy.horizon)
    observation = pi0.observation_of(policy)
    noise = torch.randn(1, 3, *policy.noise_shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        anew, after = (
            policy.sample(observation, task=pi0.TASKS, noise=noise, prefix=each)[0] for each in (None, prefix)
        )
    assert_continued(after, anew, prefix)


def test_pi0_learns_with_a_time_for_each_row():
    """The time of all rows is that of one, if they are equal; the rows of an old chunk change what the others see."""
    policy = pi0.make(pi0.TOP, max_delay=MOST)
    condition = policy.condition(policy.prepared(pi0.observation_of(policy), pi0.TASKS))
    chunk, time = torch.randn(3, policy.horizon, policy.width), torch.rand(3, 1)
    one, each = (policy.velocity(chunk, t, condition) for t in (time, time.expand(-1, policy.horizon)))
    torch.testing.assert_close(one, each)
    begun = time * (torch.arange(policy.horizon) >= 2)
    assert not torch.allclose(policy.velocity(chunk, begun, condition)[:, 2:], one[:, 2:])
    loss, _ = policy(pi0.batch_of(policy))
    assert all(gradient.isfinite().all() for gradient in pi0.gradients(policy, loss.sum()).values())
