"""pi0_tiny with random weights, and what it is asked: for the tests of the model and of its checkpoints."""

from functools import partial

import torch
from hydra.utils import instantiate
from torch import nn

from serl_launcher.policies.heads.flow import Flow
from tests.shared.models import batch, config_of, now, robot

LEFT, TOP = "observation.images.left", "observation.images.top"
TASKS = ("push the cube", "go", "")
ROWS, WIDTH, DEPTH, HEADS, HEAD_DIM = 3, 96, 3, 4, 24  # of pi0_tiny, but for the rows
TEXT = {
    "hidden_size": WIDTH, "intermediate_size": 192, "num_hidden_layers": DEPTH, "num_attention_heads": HEADS,
    "num_key_value_heads": 1, "head_dim": HEAD_DIM, "vocab_size": 258,
}  # fmt: skip
VISION = {
    "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 64,
    "patch_size": 8, "vision_use_head": False,
}  # fmt: skip


def spec_of(*cameras, states=5, actions=2):
    return robot(states, actions, shape=(48, 64, 3), cameras=cameras)


def policy_config(name):
    """Return config/policy/<name>.yaml."""
    return config_of(f"+policy={name}").policy


def make(*cameras, spec=None, seed=0, noise_level=None, steps=10, **options):
    """Return pi0_tiny with random weights, norms and biases among them, or those of a checkpoint (`weights`)."""
    config = policy_config("pi0_tiny")
    options = {"head": partial(Flow, steps=steps, noise_level=noise_level), **options}
    pinned = {"gemma": {}, "vision": {"image": VISION["image_size"], "patch": VISION["patch_size"]}}
    sizes = {name: {**config[name], **pinned[name], **options.pop(name, {})} for name in pinned}
    torch.manual_seed(seed)
    policy = instantiate(config)(spec or spec_of(*cameras), **sizes, **options)
    if "weights" not in options:
        randomise(policy)
    return policy


def randomise(module):
    """Give weights the order of one over the root of their inputs; norms and biases, too, say something."""
    for weight in module.parameters():
        scale = 0.3 if weight.ndim < 2 else weight[0].numel() ** -0.5
        nn.init.normal_(weight, std=scale)


def batch_of(policy, seed=0):
    """Return ROWS windows of what the policy sees."""
    return batch(spec_of(*policy.inputs[1:]), ROWS, policy.horizon, task=TASKS, seed=seed)


def observation_of(policy, seed=0):
    return now(batch_of(policy, seed).observation)


def gradients(policy, loss):
    weights = {name: weight for name, weight in policy.named_parameters() if weight.requires_grad}
    return dict(zip(weights, torch.autograd.grad(loss, weights.values()), strict=True))


@torch.no_grad()
def action_of(policy, observation=None, task=TASKS, seed=0):
    """Return actions [1, B, H, A] from the noise of `seed`."""
    observation = observation_of(policy) if observation is None else observation
    noise = torch.randn(1, ROWS, *policy.noise_shape, generator=torch.Generator().manual_seed(seed))
    return policy.sample(observation, task=task, noise=noise)
