"""The tiny robot and the random batches that tests of networks, policies, algorithms and ranks share."""

from dataclasses import replace
from functools import cache

import torch
from hydra import initialize_config_dir
from hydra.utils import instantiate
from serl_client import Feature, Spec

from serl_launcher.replay.columns import EPISODE
from serl_launcher.types import Batch
from tests.shared.common import CONFIG, STATE
from tests.shared.composing import GROUPS, composed_once

CAMERA = "observation.images.top"
REACH = 2.0


def robot(states=3, actions=2, reach=REACH, shape=(16, 16, 3), cameras=(CAMERA,)):
    """Return the Spec of a robot with `states` numbers, images of one `shape`, and actions within -reach..reach."""
    state = {STATE: Feature((states,))} if states else {}
    images = {name: Feature(shape, "uint8") for name in cameras}
    return Spec({**state, **images}, Feature((actions,), low=-reach, high=reach), fps=10.0)


def batch(spec, size=32, horizon=1, *, window=None, seed=0, length=None, ends="", derived=None, **columns):
    """Return random windows of `horizon` steps, or those that `window` asks for; each reward is 1.

    derived: Algorithm.derived; such columns, the Spec's extras, and those of an episode are zero: it failed, and ends
        here.
    length: how many steps are valid, one number or one per row; None: all of them.
    ends: what the last valid step is, "terminated" or "truncated"; "": neither.
    columns: fields of the Batch that are given rather than drawn.
    """
    generator = torch.Generator().manual_seed(seed)
    horizon = window.horizon if window else horizon
    offsets = window.offsets if window else dict.fromkeys((*spec.observation, "next_observation"), (0,))
    length = torch.as_tensor(horizon if length is None else length).expand(size)
    valid, last = (torch.arange(horizon) < length[:, None]), torch.arange(horizon) == length[:, None] - 1
    never = torch.zeros_like(valid)

    def observation():
        return {
            name: torch.randint(256, (size, len(offsets[name]), *feature.shape), generator=generator, dtype=torch.uint8)
            if feature.dtype == "uint8"
            else torch.randn(size, len(offsets[name]), *feature.shape, generator=generator)
            for name, feature in spec.observation.items()
            if name in offsets
        }

    known = {**spec.extras, **EPISODE, **{f"derived.{name}": feature for name, feature in (derived or {}).items()}}
    extras = {
        name: torch.zeros(size, len(offsets[name]), *feature.shape, dtype=getattr(torch, feature.dtype))
        for name, feature in known.items() if name in offsets
    }  # fmt: skip
    low, high = (torch.as_tensor(bound) for bound in (spec.action.low, spec.action.high))
    action = low + (high - low) * torch.rand(size, horizon, *spec.action.shape, generator=generator)
    drawn = Batch(
        observation(), action * valid[..., None], valid.float(), valid, last if ends == "terminated" else never,
        last if ends == "truncated" else never, never, length, torch.ones(size), torch.arange(size),
        torch.arange(size) + 1_000_000 * seed, observation() if "next_observation" in offsets else None,
        ("reach",) * size, extras,
    )  # fmt: skip
    return replace(drawn, **columns)


def now(observation):
    """Return the observation at the first time step of each window."""
    return {name: value[:, 0] for name, value in observation.items()}


def act(algorithm, observation, noise=0, explore=False):
    """Return the actions [B, H, A] of an algorithm. noise: what it is drawn from, or a seed for that."""
    rows = len(next(iter(observation.values())))
    if isinstance(noise, int):
        generator = torch.Generator().manual_seed(noise)
        noise = torch.randn(rows, *algorithm.acting.noise_shape, generator=generator)
    previous = torch.zeros(rows, 2, device=noise.device)
    task = ("reach",) * rows
    return algorithm.act(observation, previous, None, task=task, noise=noise, explore=explore)[0].action


@cache
def config_of(*words):
    """Return config/base.yaml composed with these words, such as "algo=sac", as they are."""
    words = [word.removeprefix("+") if word.partition("=")[0][1:] in GROUPS else word for word in words]
    with initialize_config_dir(str(CONFIG), version_base="1.3"):
        return composed_once("base", words)


def algorithm_of(spec, *words, seed=0):
    """Return the algorithm that these words of the command line name, with weights that `seed` names."""
    torch.manual_seed(seed)
    return instantiate(config_of(*words).algo)(spec)


def weights(module):
    """Return a copy of a module's tensors, by name."""
    return {name: value.clone() for name, value in module.state_dict().items() if isinstance(value, torch.Tensor)}


def differences(one, other):
    """Return the names of the leaves where two trees of tensors and plain data differ, bit by bit."""
    one, other = leaves(one), leaves(other)

    def same(a, b):
        return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b

    return [name for name in sorted({*one, *other}) if not same(one.get(name), other.get(name))]


def assert_same(one, other):
    """Assert that two trees of tensors and plain data are equal bit for bit."""
    assert not differences(one, other)


def leaves(tree):
    """Return {dotted name: leaf} of a tree of dicts, lists and tuples."""
    if isinstance(tree, dict):
        return {f"{key}.{name}": leaf for key, branch in tree.items() for name, leaf in leaves(branch).items()}
    if isinstance(tree, list | tuple):
        return leaves(dict(enumerate(tree)))
    return {"": tree}
