"""Chunks relative to the present state: openpi's delta actions, written here from their formula."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from serl_client import ConfigError, Feature

from serl_launcher.policies.heads.autoregressive import Autoregressive
from serl_launcher.policies.relative import COLUMN
from serl_launcher.types import Prefix, Window
from tests.shared.models import STATE, algorithm_of, assert_same, batch, robot, weights

from .test_flow import HORIZON, policy_of, seeds
from .test_prefix import prefix_of

pytestmark = pytest.mark.usefixtures("one_thread")

NAMES = ("wrist", "elbow", "gripper")
SPEC = replace(
    robot(cameras=()),
    observation={STATE: Feature((4,), names=("load", "elbow", "wrist", "gripper"))},
    action=Feature((3,), names=NAMES, low=[-2, -3, 0], high=[2, 3, 1]),
)
JOINTS = ("wrist", "elbow")
MASK, PLACES = torch.tensor([1.0, 1.0, 0.0]), [2, 1, 3]
FITTED = {
    "mean": [0.1, -0.2, 0.5], "std": [0.5, 0.4, 0.3], "low": [-0.9, -0.8, 0.1], "high": [1.0, 0.9, 0.9],
    "q01": [-0.8, -0.7, 0.1], "q99": [0.9, 0.8, 0.8],
}  # fmt: skip
"""Statistics of what openpi's DeltaActions gives."""


def fitted(relative=JOINTS, **options):
    policy = policy_of(SPEC, relative=relative, **{"scale": "std", **options})
    own = {kind: {COLUMN: np.array(values), "action": np.zeros(3)} for kind, values in FITTED.items()}
    for scale in (policy.scale, policy.relative.scale):
        scale.set_statistics(own)
    return policy


def delta(action, state):
    """openpi's DeltaActions of chunks [B, H, A], by state [B, A] in the action's order."""
    return action - (state * MASK)[:, None]


def absolute(moves, state):
    return moves + (state * MASK)[:, None]


def normalised(moves, scale):
    """openpi's Normalize by z-score, or by quantiles."""
    found = {kind: torch.tensor(values) for kind, values in FITTED.items()}
    if scale == "std":
        return (moves - found["mean"]) / found["std"]
    low, high = {"quantile": ("q01", "q99"), "range": ("low", "high")}[scale]
    return (moves - found[low]) / (found[high] - found[low]) * 2 - 1


def rows_of(policy, size=8, seed=0, **columns):
    return batch(SPEC, size, window=Window(policy.offsets), seed=seed, **columns)


@pytest.mark.parametrize("scale", ["std", "range", "quantile"])
def test_the_network_sees_openpis_delta_actions_and_its_samples_come_back_as_their_absolute_ones(scale, monkeypatch):
    policy = fitted(scale=scale, history=2)
    rows, seen = rows_of(policy), []
    state = rows.observation[STATE][:, -1][:, PLACES]
    errors = type(policy.head).errors
    monkeypatch.setattr(
        type(policy.head), "errors", lambda self, ask, target: seen.append(target) or errors(self, ask, target)
    )
    policy(rows)
    torch.testing.assert_close(seen[0].chunk, normalised(delta(rows.action, state), scale))

    unit = torch.rand(8, HORIZON, 3) - 0.5
    monkeypatch.setattr(type(policy.head), "sample", lambda self, ask, noise: unit)
    moves = unit * torch.ones(3)
    whole = normalised(torch.zeros(3), scale), normalised(torch.ones(3), scale)
    moves = (moves - whole[0]) / (whole[1] - whole[0])
    expected = absolute(moves, state).clamp(torch.tensor(SPEC.action.low), torch.tensor(SPEC.action.high))
    torch.testing.assert_close(policy.sample(rows.observation)[0], expected)


def test_a_robot_that_stands_elsewhere_has_the_same_loss_and_its_chunks_are_moved_with_it():
    policy = fitted()
    wide = replace(SPEC, action=replace(SPEC.action, low=np.full(3, -50.0), high=np.full(3, 50.0)))
    policy = policy_of(wide, relative=["all"], scale="std")
    policy.encoder.state.std[:] = 1e9  # the network does not see where the arm stands
    rows, far = rows_of(policy), torch.tensor([3.0, -5.0, 2.0])
    moved = replace(
        rows, action=rows.action + far,
        observation={STATE: rows.observation[STATE] + torch.tensor([0.0, -5.0, 3.0, 2.0])},
    )  # fmt: skip
    torch.testing.assert_close(policy(moved)[0], policy(rows)[0])
    noise = torch.randn(2, 8, *policy.noise_shape)
    here, there = (policy.sample({STATE: each.observation[STATE][:, 0]}, noise=noise) for each in (rows, moved))
    torch.testing.assert_close(there, here + far, atol=1e-5, rtol=1e-5)
