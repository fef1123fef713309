"""Chunks relative to the present state: what openpi's DeltaActions and AbsoluteActions, written here from their
formula, make of the data and of the samples of a policy that knows nothing of them."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from serl_client import ConfigError, Feature

from serl_launcher.policies.guidance import Guidance
from serl_launcher.policies.heads.diffusion import Diffusion
from serl_launcher.policies.heads.gaussian import Gaussian
from serl_launcher.policies.relative import COLUMN, RelativeScale
from serl_launcher.types import Prefix, Window
from tests.shared.models import STATE, algorithm_of, assert_same, batch, robot, weights

from .test_flow import HORIZON, policy_of, seeds

pytestmark = pytest.mark.usefixtures("one_thread")

SPEC = replace(
    robot(cameras=()),
    observation={STATE: Feature((4,), names=("load", "elbow", "wrist", "gripper"))},
    action=Feature((3,), names=("wrist", "elbow", "gripper"), low=-50, high=50),
)
ORDER, MASK = [2, 1, 3], torch.tensor([1.0, 1.0, 0.0])  # where the action's entries are in the state; the joints
MOVES = {
    "mean": [0.1, -0.2, 0.5], "std": [0.5, 0.4, 0.3], "low": [-0.9, -0.8, 0.1], "high": [1.0, 0.9, 0.9],
    "q01": [-0.8, -0.7, 0.1], "q99": [0.9, 0.8, 0.8],
}  # fmt: skip
STATISTICS = {kind: {COLUMN: np.array(each), "action": np.array(each)} for kind, each in MOVES.items()}
HEADS = {
    "flow": {},
    "ddim": {"head": partial(Diffusion, train_steps=100, steps=5, fresh_noise=False, clip=True), "scale": "range"},
    "gaussian": {"head": partial(Gaussian, log_std_low=-5, log_std_high=2), "scale": "range"},
    "quantile": {"scale": "quantile"},
    "trained": {"max_delay": 2},
}


def pair(**options):
    """A policy of relative chunks, and the same network as a plain one, which has their statistics as the action's."""
    options = {"scale": "std", **options}
    ours, plain = policy_of(SPEC, relative=["wrist", "elbow"], **options), policy_of(SPEC, **options)
    ours.relative.scale.set_statistics(STATISTICS)
    plain.scale.set_statistics(STATISTICS)
    return ours, plain


def rows_of(policy, size=8, **columns):
    return batch(SPEC, size, window=Window(policy.offsets), **columns)


def offset(state):
    """What is subtracted of each action of a chunk: state [B, 4] -> [B, 1, A]."""
    return (state[:, ORDER] * MASK)[:, None]


def delta_actions(batch):
    return replace(batch, action=batch.action - offset(batch.observation[STATE][:, -1]))


@pytest.mark.parametrize("head", HEADS)
def test_loss_and_samples_are_those_of_openpis_transforms_around_the_same_network(head):
    ours, plain = pair(**HEADS[head])
    rows = rows_of(ours, length=torch.tensor([HORIZON, 1] * 4))
    torch.testing.assert_close(ours(rows)[0], plain(delta_actions(rows))[0])
    seen = {STATE: rows.observation[STATE][:, 0]}
    noise = torch.randn(3, 8, *ours.noise_shape)
    with torch.no_grad():
        chunk, moves = (policy.sample(seen, n=3, noise=noise) for policy in (ours, plain))
    torch.testing.assert_close(chunk, moves + offset(seen[STATE]), atol=1e-5, rtol=1e-5)
    assert (chunk - moves).abs().max() > 0.1


def test_a_gradient_and_a_density_are_those_of_the_moves():
    ours, plain = pair(noise_level=0.1)
    seen = {STATE: torch.randn(8, 4)}
    (chunk, density), (moves, known) = (policy.rsample(seen, seed=seeds(8)) for policy in (ours, plain))
    torch.testing.assert_close(chunk, moves + offset(seen[STATE]))
    assert torch.equal(density, known)
    assert chunk.requires_grad
    ours, plain = pair(**HEADS["gaussian"])
    action = torch.randn(8, HORIZON, 3)
    torch.testing.assert_close(ours.log_prob(seen, action), plain.log_prob(seen, action - offset(seen[STATE])))


def test_a_critic_that_leads_sees_the_robots_units():
    ours, plain = pair()
    state = torch.randn(8, 4)

    def value(chunk):
        return -(chunk - 1).square().sum((1, 2))

    def moved(moves):
        return value(moves + offset(state))

    noise = torch.randn(8, *ours.noise_shape)
    chunk, moves = (
        policy.led({STATE: state}, noise, Guidance(asked, torch.ones(()), 3.0), task=(), without=())
        for policy, asked in ((ours, value), (plain, moved))
    )
    torch.testing.assert_close(chunk, moves + offset(state), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("max_delay", [2, 0], ids=["trained", "guided"])
def test_a_chunk_under_way_is_continued_from_where_the_robot_is_now(max_delay):
    ours, plain = pair(max_delay=max_delay)
    state, old = torch.randn(4, 4), torch.randn(4, HORIZON, 3)
    there = {"committed": torch.tensor([0, 1, 2, 2]), "left": torch.tensor([0, 2, 3, 4])}
    noise = torch.randn(1, 4, *ours.noise_shape)
    with torch.no_grad():
        chunk = ours.sample({STATE: state}, noise=noise, prefix=Prefix(old, **there))[0]
        moves = plain.sample({STATE: state}, noise=noise, prefix=Prefix(old - offset(state), **there))[0]
    torch.testing.assert_close(chunk, moves + offset(state), atol=1e-5, rtol=1e-5)
    for row, committed in enumerate(there["committed"]):
        assert torch.equal(chunk[row, :committed], old[row, :committed])


def test_data_of_a_robot_that_stands_elsewhere_have_the_same_loss_and_its_chunks_are_moved_with_it():
    policy, far = policy_of(SPEC, relative=["all"], scale="std"), torch.tensor([0.0, -5.0, 3.0, 2.0])
    policy.relative.scale.set_statistics(STATISTICS)
    rows, noise = rows_of(policy), torch.randn(1, 8, *policy.noise_shape)
    loss, chunk = policy(rows)[0], policy.sample({STATE: rows.observation[STATE][:, 0]}, noise=noise)
    policy.encoder.state.mean += far
    state = rows.observation[STATE] + far
    moved = replace(rows, action=rows.action + far[ORDER], observation={STATE: state})
    torch.testing.assert_close(policy(moved)[0], loss, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(policy.sample({STATE: state[:, 0]}, noise=noise), chunk + far[ORDER])


def test_the_newest_observation_is_the_present_one_and_positions_are_relative_as_well():
    policy = policy_of(SPEC, relative=["wrist"], scale="std", history=2, imitation_target=STATE)
    rows = rows_of(policy, length=torch.tensor([HORIZON, 2] * 4))
    (window, moves), states = policy.measured[COLUMN], rows.observation[STATE]
    assert window.offsets == policy.offsets
    assert states.shape[1] == 2 + HORIZON
    reached = states[:, 2:, ORDER] - torch.tensor([1.0, 0, 0]) * states[:, 1:2, ORDER]
    assert torch.equal(moves(rows), reached[rows.valid])
    spoiled = states.clone()
    spoiled[0, 2, 2] = 1e6  # what the first step of the first row has reached
    assert torch.equal(moves(replace(rows, observation={STATE: spoiled})), reached[rows.valid][1:])
    policy.relative.scale.set_statistics(STATISTICS)
    there = policy.sample({STATE: states[:, :2]}, noise=(noise := torch.randn(1, 8, *policy.noise_shape)))
    plain = policy_of(SPEC, scale="std", history=2)
    plain.scale.set_statistics(STATISTICS)
    expected = plain.sample({STATE: states[:, :2]}, noise=noise) + states[:, 1:2, ORDER] * torch.tensor([1.0, 0, 0])
    torch.testing.assert_close(there, expected)


def test_samples_keep_within_the_robots_bounds_wherever_it_stands():
    narrow = replace(SPEC, action=replace(SPEC.action, low=np.array([-1, -1, 0]), high=np.array([1, 0.5, 1])))
    policy = policy_of(narrow, relative=["all"], scale="std")
    chunk = policy.sample({STATE: 3 * torch.randn(64, 4)})[0]
    low, high = torch.as_tensor(narrow.action.low), torch.as_tensor(narrow.action.high)
    assert ((low - 1e-5 <= chunk) & (chunk <= high + 1e-5)).all()
    assert (chunk > 0.4).any()


@pytest.mark.slow
@pytest.mark.parametrize(
    "algo", ["sft", "sac_pi0", "qc", "fql", "parl", "expo", "dsrl", "guided", "recap"]
)  # fmt: skip
def test_every_algorithm_over_chunks_takes_it_and_what_it_has_learned_comes_back_whole(algo):
    words = (f"algo={algo}", "policy=flow", "policy.relative=[wrist,elbow]", "policy.network.hidden=[16]")
    algorithm, other = (algorithm_of(SPEC, *words, seed=seed) for seed in (0, 1))
    algorithm.set_statistics(
        {kind: {**each, STATE: np.full(4, float(kind == "std"))} for kind, each in STATISTICS.items()}
    )
    for name, window in algorithm.windows.items():
        rows = batch(SPEC, 8, window=window, derived=algorithm.derived)
        told = getattr(algorithm, name)(rows)
        assert all(each.isfinite().all() for each in (told[0] if isinstance(told, tuple) else told).values()), name
    assert isinstance(algorithm.policy.relative, RelativeScale)
    assert algorithm.policy.relative.scale.center.tolist() == pytest.approx([0.05, 0.05, 0.5])
    other.load_state_dict(algorithm.state_dict())
    assert_same(weights(other), weights(algorithm))
    acting = algorithm_of(SPEC, *words, seed=2).acting
    acting.load_published(algorithm.acting.published())
    seen, noise = {STATE: torch.randn(5, 4)}, torch.randn(1, 5, *acting.noise_shape)
    with torch.no_grad():
        assert torch.equal(*(each.sample(seen, task=("",) * 5, noise=noise) for each in (acting, algorithm.acting)))


DEGREES = replace(SPEC, action=replace(SPEC.action, units="deg"))
SPEEDS = {name: SPEC.observation[STATE] for name in ("observation.speed", "observation.force")}


@pytest.mark.parametrize(
    ("spec", "options", "said"),
    [
        (SPEC, {"relative": ["wirst"]}, r"no entry of the action is called 'wirst'; did you mean 'wrist'"),
        (SPEC, {"scale": "bounds"}, r"policy\.scale=bounds is of the robot's limits, .*: say policy\.scale=range"),
        (robot(cameras=()), {}, r"this robot's action has no names, .*: say policy\.relative=\[\]"),
        (DEGREES, {}, r"'wrist' is in no unit in observation\.state, and in deg in the action, .*: leave it out of"),
        (
            replace(SPEC, observation=SPEEDS), {},
            r"the action's 'wrist' is in observation\.speed and observation\.force, and should be in one",
        ),
        (
            replace(SPEC, observation={STATE: Feature((2,), names=("elbow", "gripper"))}), {},
            r"the action's 'wrist' is in no observation, and should be in one: leave it out of policy\.relative",
        ),
        (SPEC, {**HEADS["gaussian"], "scale": "quantile"}, r"scale=quantile goes beyond: say policy\.scale=range"),
    ],
)  # fmt: skip
def test_what_cannot_be_relative_is_refused(spec, options, said):
    with pytest.raises(ConfigError, match=said):
        policy_of(spec, **{"relative": ["all"], "scale": "std", **options})


def test_of_several_observations_with_the_actions_names_the_state_counts():
    spec = replace(SPEC, observation={**SPEEDS, **SPEC.observation})
    assert {*policy_of(spec, relative=["all"], scale="std").relative.places} == {(STATE, 1), (STATE, 2), (STATE, 3)}
