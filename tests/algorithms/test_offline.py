"""Implicit Q-learning and Cal-QL: what they learn of a dataset is what can be computed, and what they refuse."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from serl_launcher.algorithms import calql
from tests.shared.common import STATE
from tests.shared.models import act, algorithm_of, assert_same, batch, now, robot, weights

pytestmark = pytest.mark.usefixtures("one_thread")

KINDS = {
    "mse": (), "c51": ("critic.values.low=-1", "critic.values.high=2"), "two_hot": ("critic.values.reach=2",),
    "hl_gauss": ("critic.values.low=-1", "critic.values.high=2", "critic.values.bins=51"),
}  # fmt: skip
every_kind = pytest.mark.parametrize("kind", KINDS)


def critic(kind="mse", hidden="[64,64]"):
    """Words for critics of this kind."""
    return f"critic={kind}", f"critic.hidden={hidden}", "critic.layer_norm=false", "critic.num_critics=2", *KINDS[kind]


# -- implicit Q-learning

STATES, DISCOUNT = 5, 0.9
CHAIN = robot(states=STATES, actions=1, reach=1.0)


IQL = (
    "policy=chunk", "network=mlp", "network.hidden=[32]", "network.layer_norm=false", "policy.scale=bounds",
    "n_action_steps=1", "algo.optimizer.learning_rate=3e-3", "algo.critic_optimizer.learning_rate=3e-3",
    f"algo.discount={DISCOUNT}", "algo.tau=0.1",
)  # fmt: skip


def iql(*words, kind="mse", head="regression", horizon=2):
    return algorithm_of(CHAIN, "algo=iql", f"head={head}", *IQL, *critic(kind), f"policy.horizon={horizon}", *words)


def chain(window):
    """Every state with both actions. To the right of the last one the episode ends with the reward 1."""
    state, right = torch.arange(STATES).repeat(2), torch.arange(2).repeat_interleave(STATES).bool()
    after = (state + 2 * right - 1).clamp(0, STATES - 1)
    ends = (right & (state == STATES - 1)).unsqueeze(1).expand(-1, window.horizon)
    seen = {STATE: torch.eye(STATES)[state].unsqueeze(1)}
    following = {STATE: torch.eye(STATES)[after].unsqueeze(1)} if "next_observation" in window.offsets else None
    action = (2.0 * right - 1).view(-1, 1, 1).expand(-1, window.horizon, -1)
    return batch(
        CHAIN, 2 * STATES, window=window, observation=seen, action=action, reward=ends.float(), terminated=ends,
        next_observation=following,
    )  # fmt: skip


def behaviours_values():
    """V = R + gamma P V of a walk that goes right half of the time."""
    moves, reward = torch.zeros(STATES, STATES), torch.zeros(STATES)
    for state in range(STATES):
        moves[state, max(state - 1, 0)] += 0.5
        if state < STATES - 1:
            moves[state, state + 1] += 0.5
    reward[-1] = 0.5
    return torch.linalg.solve(torch.eye(STATES) - DISCOUNT * moves, reward)


def values_after(algorithm, updates):
    for _ in range(updates):
        algorithm.update_critic(chain(algorithm.windows["update_critic"]))
    with torch.no_grad():
        return algorithm.state_value({STATE: torch.eye(STATES).unsqueeze(1)})


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "updates"), [("mse", 250), ("hl_gauss", 400)])
def test_half_an_expectile_gives_the_behaviours_values(kind, updates):
    """C51 and TwoHot come to them too, but slowly: they begin almost sure of zero."""
    found = values_after(iql("algo.expectile=0.5", kind=kind), updates)
    assert (found - behaviours_values()).abs().max() < 0.05


@pytest.mark.slow
def test_the_upper_expectile_gives_the_best_values_and_the_policy_takes_the_better_actions():
    algorithm = iql("algo.expectile=0.99", "algo.beta=50")
    best = DISCOUNT ** torch.arange(STATES - 1.0, -1.0, -1.0)
    assert (values_after(algorithm, 400) - best).abs().max() < 0.05
    assert (best - behaviours_values()).abs().max() > 0.2, "nothing would tell the two apart"
    before = weights(algorithm.critic) | weights(algorithm.state_critic)
    for _ in range(150):
        metrics = algorithm.update_policy(chain(algorithm.windows["update_policy"]))
    assert (act(algorithm, {STATE: torch.eye(STATES)}) > 0.7).all()
    assert_same(weights(algorithm.critic) | weights(algorithm.state_critic), before)
    assert metrics.keys() == {"policy_loss", "advantage", "imitation_weight", "policy_gradient"}


@pytest.mark.parametrize("head", ["regression", "flow"])
def test_imitation_is_weighted_by_the_advantage_up_to_a_hundred_and_not_where_it_is_unknown(head, monkeypatch):
    """Of six actions two are judged: what happens behind them does not matter."""
    algorithm = iql("algo.critic_horizon=2", "algo.beta=2", head=head, horizon=6)
    rows = batch(CHAIN, 5, window=algorithm.windows["update_policy"], length=torch.tensor([6, 6, 1, 1, 3]))
    last = torch.arange(6) == rows.length[:, None] - 1
    ends = torch.tensor([[False], [False], [True], [False], [False]])
    rows = replace(rows, terminated=last & ends, truncated=last & ~ends & ~rows.valid.all(1, keepdim=True))
    advantage = torch.tensor([0.5, 9.0, -1.0, 0.5, 0.0])
    monkeypatch.setattr(algorithm, "state_value", lambda observation: torch.full((5,), 0.25))
    monkeypatch.setattr(algorithm, "target_value", lambda begin: 0.25 + advantage * (begin.action.shape[1] == 2))
    loss, metrics = algorithm.policy_loss(rows)
    factor = torch.tensor([1.0, 200.0, -2.0, 0.0, 0.0]).exp().clamp(max=100) * torch.tensor([1.0, 1, 1, 0, 1])
    torch.testing.assert_close(loss, (factor * algorithm.policy(rows)[0]).mean())
    assert metrics["advantage"] == advantage.mean()


@every_kind
def test_the_advantage_is_that_of_the_targets_lowest_critic(kind):
    algorithm = iql(kind=kind)
    rows = batch(CHAIN, window=algorithm.windows["update_critic"])
    algorithm.update_critic(rows)
    with torch.no_grad():
        lowest = algorithm.target_critic.value(now(rows.observation), rows.action).min(0).values
    torch.testing.assert_close(algorithm.target_value(rows), lowest)


def test_the_loss_of_the_state_value_is_the_equation_and_leaves_out_what_a_time_limit_cut():
    algorithm = iql("algo.expectile=0.9", "algo.critic_horizon=2")
    rows = batch(CHAIN, window=algorithm.windows["update_critic"])
    with torch.no_grad():
        lowest = algorithm.target_critic.value(now(rows.observation), rows.action).min(0).values
        far = lowest - algorithm.state_value(rows.observation)
    assert (far < 0).any()
    assert (far > 0).any()
    expected = torch.where(far < 0, 0.1, 0.9) * far.square()
    torch.testing.assert_close(algorithm.state_loss(rows)[0].detach(), expected.mean())
    before = weights(algorithm.state_critic)
    algorithm.update_critic(batch(CHAIN, window=algorithm.windows["update_critic"], length=1, ends="truncated"))
    assert_same(weights(algorithm.state_critic), before)


def test_the_target_goes_on_from_where_the_chunk_ends():
    algorithm = iql("algo.critic_horizon=2")
    rows = batch(CHAIN, window=algorithm.windows["update_critic"], ends="")
    with torch.no_grad():
        following = algorithm.state_critic(now(rows.next_observation), torch.zeros(len(rows), 0, 1))[0]
    torch.testing.assert_close(algorithm.target(rows), 1 + DISCOUNT + DISCOUNT**2 * following)


def test_what_acts_is_the_policy_and_critics_may_see_its_features():
    algorithm = iql("algo.encoder=null")
    trained = weights(algorithm.policy)
    algorithm.update_critic(chain(algorithm.windows["update_critic"]))
    assert_same(weights(algorithm.policy), trained)
    expected = act(algorithm, {STATE: torch.eye(STATES)})
    algorithm.only_acting()
    assert {name.partition(".")[0] for name in algorithm.state_dict()} <= {"policy", "_extra_state"}
    assert torch.equal(act(algorithm, {STATE: torch.eye(STATES)}), expected)


# -- Cal-QL

ARM = robot(states=1, actions=1, reach=1.0)
FAILURE = -1.0  # the return of every row


GAUSSIAN = (
    "policy.hidden=[16]", "policy.layer_norm=false", f"algo.discount={DISCOUNT}", "algo.tau=0.1",
    "algo.learning_rate=5e-3", "algo.initial_temperature=0.01", "algo.entropy_per_action=0.5",
    "algo.backup_entropy=false",
)  # fmt: skip


def cal_ql(*words, kind="mse", hidden="[16]", alpha=1.0, samples=3, calibrated=True):
    own = f"algo.cql_alpha={alpha}", f"algo.cql_samples={samples}", f"algo.calibrated={str(calibrated).lower()}"
    return algorithm_of(ARM, "algo=calql", *GAUSSIAN, *critic(kind, hidden), *own, *words)


def judged(algorithm, **columns):
    """Rows of one step that ends with the return."""
    known = {"reward": torch.full((32, 1), FAILURE), "extras": {calql.RETURN: torch.full((32, 1), FAILURE)}}
    return batch(ARM, window=algorithm.windows["update"], ends="terminated", **{**known, **columns})


@pytest.mark.slow
@pytest.mark.parametrize("calibrated", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_value_of_an_action_that_the_data_lack_sinks_to_their_return_and_no_further(calibrated, monkeypatch):
    """Data and uniform actions go right, the policy goes left. Linear critics have one number for each way."""
    algorithm = cal_ql(hidden="[]", calibrated=calibrated, alpha=5.0)
    monkeypatch.setattr(calql, "uniform", lambda seed, shape, stream: torch.ones(len(seed), *shape))
    nn.init.zeros_(algorithm.policy.network[-1].weight)
    algorithm.policy.network[-1].bias.data.copy_(torch.tensor([-9.0, -9.0]))
    still, left = torch.zeros(32, 1, 1), -torch.ones(32, 1, 1)
    rows = judged(algorithm, observation={STATE: still}, next_observation={STATE: still}, action=-left)
    assert (algorithm.critic.value({STATE: still}, left) > FAILURE).all()
    found = []
    for _ in range(2):
        for _ in range(200):
            algorithm.update_critic(rows)
        with torch.no_grad():
            found.append(algorithm.critic.value({STATE: still}, left)[:, 0])
    if calibrated:
        assert all((value - FAILURE).abs().max() < 0.05 for value in found)
    else:
        assert (found[0] < FAILURE - 0.5).all()
        assert (found[1] < found[0] - 0.5).all(), "without a bound it never ends"


@every_kind
@pytest.mark.parametrize("calibrated", [True, False])
def test_the_conservative_loss_is_the_equation_and_only_the_policys_values_are_raised(kind, calibrated):
    algorithm = cal_ql(kind=kind, calibrated=calibrated)
    returns = torch.linspace(-0.5, 0.5, 32).unsqueeze(1)
    rows = judged(algorithm, extras={calql.RETURN: returns})
    algorithm.update(judged(algorithm, seed=1))
    others = algorithm.compared(rows)
    assert others.shape == (9, 32, 1, 1)
    value = [algorithm.critic.value(rows.observation, action) for action in (rows.action, *others)]
    raised = [torch.maximum(each, returns[:, 0]) for each in value[4:]] if calibrated else value[4:]
    expected = (sum(each.exp() for each in (*value[:4], *raised)) / 10).log() - value[0]
    target = algorithm.target(rows, algorithm._noise(rows, 1)[0])
    prediction = algorithm.critic(rows.observation, rows.action)
    squared = algorithm.critic.loss(prediction, target)
    algorithm.critic.zero_grad()
    (squared + expected.sum(0)).mean().backward()
    gradient = {name: weight.grad.clone() for name, weight in algorithm.critic.named_parameters()}
    metrics = algorithm.update_critic(rows)
    torch.testing.assert_close(metrics["conservative_loss"], expected.sum(0).mean().detach())
    torch.testing.assert_close(metrics["critic_loss"], squared.mean().detach())
    for name, weight in algorithm.critic.named_parameters():
        torch.testing.assert_close(weight.grad, gradient[name], atol=1e-5, rtol=1e-4)


def test_the_compared_actions_fill_the_bounds_are_the_policys_of_both_states_and_come_from_the_rows_seeds():
    algorithm = cal_ql(samples=200)
    last = algorithm.policy.network[-1]
    last.weight.data.mul_(torch.tensor([[9.0], [0.0]]))
    last.bias.data.copy_(torch.tensor([0.0, -5.0]))  # hardly any noise, so that the state alone decides
    rows = judged(algorithm)
    anywhere, here, there = algorithm.compared(rows).split(200)
    assert (anywhere.min() < -0.99, anywhere.max() > 0.99, anywhere.mean().abs() < 0.05) == (True, True, True)
    for own, state in ((here, rows.observation), (there, rows.next_observation)):
        expected = algorithm.policy.sample(state, noise=torch.zeros(1, 32, 1, 1))
        assert (own - expected).abs().max() < 0.05
        assert expected.std() > 0.2
    torch.manual_seed(99)
    assert torch.equal(algorithm.compared(rows.part(1, 2)), algorithm.compared(rows)[:, 16:])


def test_without_the_conservative_loss_it_is_soft_actor_critic():
    ours, theirs = cal_ql(alpha=0.0), algorithm_of(ARM, "algo=sac", *GAUSSIAN, *critic(hidden="[16]"))
    for seed in range(3):
        metrics = [each.update(judged(ours, seed=seed)) for each in (ours, theirs)]
        assert metrics[0].keys() - metrics[1].keys() == {"conservative_loss"}
    for name in ("critic", "target_critic", "policy"):
        one, other = (weights(getattr(each, name)) for each in (ours, theirs))
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


def test_only_what_is_calibrated_asks_for_returns_and_with_the_algorithms_discount():
    for window in cal_ql().windows.values():
        assert (window.offsets[calql.RETURN], window.discount) == ((0,), DISCOUNT)
    assert not any(calql.RETURN in window.offsets for window in cal_ql(calibrated=False).windows.values())
