"""Rules that every head of config/head keeps: what counts, what noise decides, old chunks, recordings, tasks."""

from functools import partial

import numpy as np
import pytest
import torch
from hydra.utils import instantiate
from serl_client import ConfigError
from serl_client import messages as m
from serl_client.errors import MessageError
from torch._subclasses.fake_tensor import FakeTensorMode

from serl_launcher.acting.host import PolicyHost
from serl_launcher.networks.chunks import MLP
from serl_launcher.networks.seeded_noise import normal
from serl_launcher.policies.heads.flow import Flow
from tests.shared import pi0
from tests.shared.common import CONFIG
from tests.shared.models import STATE, config_of

from .test_flow import HORIZON, SPEC, batch_of, policy_of, seeds, sft
from .test_prefix import assert_continued, prefix_of

pytestmark = pytest.mark.usefixtures("one_thread")

HEADS = sorted(path.stem for path in (CONFIG / "head").glob("*.yaml"))
DETERMINISTIC = {"flow_zero", "mip", "mip_coin_flip", "regression", "straight_flow", "tsd"}
GUIDED = {"flow", "flow_zero"}
SMALL = {"ddpm": ["head.steps=5"], "autoregressive": ["head.bins=16"]}  # words that save time
STATES, LENGTH = torch.randn(3, 1, 3, generator=torch.Generator().manual_seed(1)), torch.tensor([4, 2, 3])
every_head = pytest.mark.parametrize("name", HEADS)


def head_of(name):
    return instantiate(config_of(f"+head={name}", *SMALL.get(name, [])).head)


def small(name, **options):
    """A policy with this head of config/head, and a network that answers something everywhere."""
    network = partial(MLP, hidden=[16], layer_norm=True)
    policy = policy_of(head=head_of(name), network=network, **options)
    if name == "autoregressive":  # a new network says nearly the same of all bins
        policy.network.layers[-1].weight.data.mul_(5)
    return policy


# -- the rules of every head


@every_head
def test_steps_that_do_not_count_have_no_loss_and_rows_are_alone(name, monkeypatch):
    """What lies in padded steps, what the network says of them or of the old chunk's, and other rows change nothing."""
    action = torch.rand(3, HORIZON, 2, generator=torch.Generator().manual_seed(2)) * 4 - 2
    rows, is_padded = batch_of(action, STATES, length=LENGTH), torch.arange(HORIZON) >= LENGTH[:, None]
    for policy in (small(name), small(name, max_delay=2)):
        predict, expected, learned = policy.predict, policy(rows)[0], list(policy.network.parameters())
        more, garbage = torch.linspace(1, 7, policy.head.outputs), torch.where(is_padded[..., None], 50.0, action)
        torch.testing.assert_close(policy(batch_of(garbage, STATES, length=LENGTH))[0], expected)
        gradient = torch.autograd.grad(expected[1], learned, retain_graph=True)
        weighted = torch.autograd.grad((torch.tensor([0.0, 1.0, 0.0]) * expected).sum(), learned)
        torch.testing.assert_close(weighted, gradient, rtol=0, atol=0)
        torch.testing.assert_close(policy(rows.part(1, 3))[0], expected[1:2])

        def strange(chunk, time, condition, old, predict=predict, more=more):
            ignored = is_padded if old is None else is_padded | old
            return predict(chunk, time, condition, old) + more * ignored.unsqueeze(-1)

        monkeypatch.setattr(policy, "predict", strange)
        torch.testing.assert_close(policy(rows)[0], expected)
        monkeypatch.setattr(policy, "predict", lambda *asked, predict=predict, more=more: predict(*asked) + more)
        assert (policy(rows)[0] != expected).all(), "the steps that count do"


def test_a_policy_with_history_sees_each_of_its_observations():
    """Each is encoded alone, whatever lies beside it, in a batch as in a decision."""
    policy, frames = small("regression", history=2), STATES.repeat(1, 2, 1)
    frames[:, 0] += 1
    condition = policy.condition({STATE: frames})
    encoded = [policy.encoder({STATE: frames[:, step]}) for step in range(2)]
    torch.testing.assert_close(condition, torch.stack(encoded, 1))
    assert policy.offsets[STATE] == (-1, 0)
    action = torch.zeros(3, HORIZON, 2)
    noise = torch.zeros(1, 3, *policy.noise_shape)
    turned = frames.flip(1)
    assert not torch.isclose(*(policy(batch_of(action, seen))[0] for seen in (frames, turned))).any()
    assert not torch.isclose(*(policy.sample({STATE: seen}, noise=noise) for seen in (frames, turned))).all()


@every_head
def test_equal_noise_gives_equal_chunks_in_any_batch_and_a_deterministic_head_needs_none(name):
    policy, observation = small(name), {STATE: STATES[:, 0]}
    noise, other = (normal(seeds(6, seed), policy.noise_shape).unflatten(0, (2, 3)) for seed in (0, 1))
    with torch.no_grad():
        both = policy.sample(observation, noise=noise)
        alone = policy.sample({STATE: STATES[1:2, 0]}, noise=noise[1:, 1:2])
        again = policy.sample(observation, noise=other)
    assert both.shape == (2, 3, HORIZON, 2)
    assert both.abs().max() <= 2
    torch.testing.assert_close(alone[0, 0], both[1, 1], rtol=1e-4, atol=1e-5)
    assert torch.equal(both, again) == policy.head.is_deterministic == (name in DETERMINISTIC)
    assert not torch.equal(both[0, 0], both[0, 1]), "the observation matters"


@every_head
def test_a_sample_asks_as_often_as_its_head_says_and_never_looks_at_what_it_computes(name, monkeypatch):
    """Tensors without values stand for the recording of a CUDA graph: they have no `.item()` and fixed shapes."""
    policy, asked = small(name, max_delay=2), []
    prepared = policy.prepared({STATE: STATES[:, 0]}, [])
    prefix = {"prefix.action": torch.zeros(3, HORIZON, 2), "prefix.committed": LENGTH - 2, "prefix.left": LENGTH}
    predict = policy.predict
    monkeypatch.setattr(policy, "predict", lambda *each: asked.append(each) or predict(*each))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
        fake = {key: mode.from_tensor(value) for key, value in {**prepared, **prefix}.items()}
        chunk = policy.chunks(fake, mode.from_tensor(torch.zeros(1, 3, *policy.noise_shape)))
    assert chunk.shape == (1, 3, HORIZON, 2)
    assert len(asked) == policy.head.passes


@every_head
def test_every_head_learns_to_continue_a_chunk_and_says_whether_it_can_without(name):
    policy, prefix = small(name, max_delay=3), prefix_of([0, 2, 3], [0, 4, 4])
    noise = normal(seeds(3), policy.noise_shape)[None]
    with torch.no_grad():
        anew, after = (policy.sample({STATE: STATES[:, 0]}, noise=noise, prefix=each)[0] for each in (None, prefix))
    assert_continued(after, anew, prefix)
    assert policy.continues == "trained"
    assert small(name).continues == ("guided" if name in GUIDED else None)


@pytest.mark.slow
def test_what_a_head_cannot_do_is_said():
    observation = {STATE: STATES[:, 0]}
    with pytest.raises(ConfigError, match="only head=flow has a gradient through its sampler, not MIP"):
        small("mip").rsample(observation, seed=seeds(3))
    with pytest.raises(ConfigError, match="only head=gaussian has a density, not Flow"):
        small("flow").log_prob(observation, torch.zeros(3, HORIZON, 2))
    for name in ("gaussian", "autoregressive", "ddpm"):
        with pytest.raises(ConfigError, match=r"keeps actions within \[-1, 1\].*say policy.scale=range"):
            small(name, scale="std")
    with pytest.raises(ConfigError, match="needs the network's forward-mode derivative, which Fused does not have"):
        policy_of(head=head_of("mean_flow"), network=partial(Fused, hidden=[8], layer_norm=False))
    with pytest.raises(ConfigError, match=r"PI0 predicts velocities.*say head=flow or head=mip_coin_flip"):
        pi0.make(head=head_of("mip"))
    for words, text in (
        ({"path": "round"}, "head.path=round: say one of linear, trigonometric"),
        ({"solver": "heun", "noise_level": 0.1}, "head.noise_level goes with head.solver=euler alone, not with heun"),
        ({"steps": 0}, "head.steps=0: say 1 or more"),
        ({"times": "early"}, "head.times=early: say one of beta, uniform"),
    ):
        with pytest.raises(ConfigError, match=text):
            Flow(horizon=1, width=1, **{"steps": 1, **words})


class Fused(MLP):
    has_forward_derivative = False


@pytest.mark.slow
def test_pi0_is_a_coin_flip_mip_too():
    policy = pi0.make(pi0.TOP, head=head_of("mip_coin_flip"))
    loss, _ = policy(pi0.batch_of(policy))
    assert all(gradient.isfinite().all() for gradient in pi0.gradients(policy, loss.sum()).values())
    assert torch.equal(pi0.action_of(policy, seed=0), pi0.action_of(policy, seed=1))


# -- tasks


def test_one_policy_learns_several_tasks_and_refuses_those_it_was_not_told_of(caplog):
    algorithm = sft(policy=lambda spec: small("regression", spec=spec, tasks=["push", "pull it"]))
    words, sides = ("push", "pull it") * 16, torch.tensor([1.0, -1.0]).repeat(16)
    action = sides[:, None, None].expand(-1, HORIZON, 2)
    for update in range(60):
        algorithm.update(batch_of(action, seed=update, task=words))
    observation, none = {STATE: torch.zeros(2, 3)}, torch.zeros(2, *algorithm.acting.noise_shape)

    def act(*task):
        return algorithm.act(observation, none[:, 0, 0], None, task=task, noise=none, explore=False)[0].action

    push, pull = act("push", "pull it")
    assert push.min() > 0.5
    assert pull.max() < -0.5
    rows = batch_of(action[:2], task=("fetch", "push"))
    assert algorithm.policy(rows)[0].isfinite().all()
    algorithm.policy(rows)
    assert caplog.messages == ["rows of the task 'fetch' train without a task: policy.tasks lacks it"]
    torch.testing.assert_close(act("fetch", "push")[0], act("", "push")[0])
    host = PolicyHost(algorithm, SPEC, "cpu")
    seen = {STATE: np.zeros(3, np.float32)}
    host.check(m.InferenceRequest(0, 0, True, True, "pull it", seen))
    with pytest.raises(MessageError, match="has not learned the task 'fetch'; it knows 'push', 'pull it'"):
        host.check(m.InferenceRequest(0, 0, True, True, "fetch", seen))
    with pytest.raises(ConfigError, match="name each task once"):
        small("regression", tasks=["push", "push"])
