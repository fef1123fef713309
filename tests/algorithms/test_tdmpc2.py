"""TD-MPC2: its size, its search beside a known best controller, what its losses touch, and what it remembers."""

from dataclasses import replace

import pytest
import torch

from serl_launcher.policies.planner import MPPI, shifted
from tests.shared.models import CAMERA, STATE, algorithm_of, assert_same, batch, differences, robot, weights

pytestmark = pytest.mark.usefixtures("one_thread")

SPEC = robot(cameras=())
TINY = [
    "algo.model.latent=16", "algo.model.hidden=[16,16]", "algo.model.encoder_hidden=[16]", "algo.hidden=[16,16]",
    "algo.mppi.samples=24", "algo.mppi.prior_samples=4", "algo.mppi.elites=6", "algo.mppi.iterations=3",
]  # fmt: skip


def build(*words, spec=SPEC, algo="tdmpc2"):
    return algorithm_of(spec, f"algo={algo}", *TINY, *words)


def rows_of(algorithm, size=16, spec=SPEC, **columns):
    rows = batch(spec, size, window=algorithm.windows["update"], **columns)
    extras = {"behaviour_mean": rows.action / 4, "behaviour_std": torch.full_like(rows.action, 0.2)}
    return replace(rows, extras=extras if algorithm.behaviour else {})


def decide(algorithm, state, carry=None, *, explore=True, seed=3):
    shape = algorithm.acting.noise_shape
    noise = torch.stack([torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for _ in state])
    asked = {"task": ("reach",) * len(state), "noise": noise, "explore": explore}
    return algorithm.act({STATE: state}, torch.zeros(len(state), 2), carry, **asked)


def test_it_has_as_many_weights_as_the_papers():
    algorithm = algorithm_of(robot(24, 6, cameras=()), "algo=tdmpc2", "algo.model.episodic=false")
    assert sum(weight.numel() for weight in algorithm.planner.parameters()) == 4_960_618
    assert not algorithm.planner.model.critics.last.weight.any()
    assert not algorithm.planner.model.rewards[-1].weight.any()


def test_the_search_drives_a_linear_system_within_a_twentieth_of_the_best_cost():
    """Two masses of which one is pushed: x' = A x + B u, cost x'Qx + u'Ru; the best controller is Riccati's."""
    step, push = torch.tensor([[1.0, 0.1], [0.0, 1.0]]), torch.tensor([[0.005], [0.1]])
    state_cost, action_cost = torch.diag(torch.tensor([1.0, 0.1])), torch.tensor([[0.1]])
    ahead = state_cost
    for _ in range(500):
        gain = torch.linalg.solve(action_cost + push.T @ ahead @ push, push.T @ ahead @ step)
        ahead = state_cost + step.T @ ahead @ (step - push @ gain)
    mppi = MPPI(5, 256, 0, 32, 6, 20.0, 0.02, 1.0)
    state = torch.tensor([[0.3, 0.0], [-0.2, 0.1], [0.1, -0.2]])
    best = (state @ ahead * state).sum(-1)
    mean, spent, generator = torch.zeros(3, 5, 1), torch.zeros(3), torch.Generator().manual_seed(0)

    def worth(sequences):
        path, total = state.unsqueeze(1).expand(-1, sequences.shape[1], -1), 0.0
        for action in sequences.unbind(2):
            total = total - (path @ state_cost * path).sum(-1) - (action @ action_cost * action).sum(-1)
            path = path @ step.T + action @ push.T
        return total - (path @ ahead * path).sum(-1)

    for _ in range(80):
        noise = torch.randn(3, *mppi.noise_shape(1), generator=generator)
        plan = mppi.search(worth, mean, torch.zeros(3, 0, 5, 1), noise, torch.zeros(3))
        torch.testing.assert_close(plan.weights.sum(1), torch.ones(3))
        action, mean = plan.mean[:, 0], shifted(plan.mean)
        spent += (state @ state_cost * state).sum(-1) + (action @ action_cost * action).sum(-1)
        state = state @ step.T + action @ push.T
    assert (spent > 0.99 * best).all()  # nothing is below the best; the tail behind 80 steps is left out
    assert spent.sum() < 1.05 * best.sum()


def test_it_remembers_its_plan_later_by_a_step_and_alike_in_a_batch_and_alone():
    algorithm, state = build(), torch.randn(3, 3)
    _, carry = decide(algorithm, state)
    assert torch.equal(carry[:, -1], torch.zeros(3, 2))
    noise = torch.randn(algorithm.acting.noise_shape, generator=torch.Generator().manual_seed(3)).expand(3, -1)
    _, plan = algorithm.planner.search({STATE: state}, torch.zeros(3, 3, 2), noise, explore=True)
    assert torch.equal(carry[:, :-1], plan.mean[:, 1:])
    assert torch.equal(shifted(carry)[:, 0], plan.mean[:, 2])
    together, after = decide(algorithm, state, carry, seed=4)
    for row in range(3):
        alone, own = decide(algorithm, state[row : row + 1], carry[row : row + 1], seed=4)
        torch.testing.assert_close(together.action[row], alone.action[0])
        torch.testing.assert_close(after[row], own[0])
    assert not torch.equal(decide(algorithm, state, seed=4)[0].action, together.action)  # of another mean


def test_only_exploration_adds_noise_to_the_elite_that_the_question_draws():
    algorithm, state = build(), torch.randn(3, 3)
    assert torch.equal(decide(algorithm, state)[0].action, decide(algorithm, state)[0].action)
    assert not torch.equal(decide(algorithm, state)[0].action, decide(algorithm, state, explore=False)[0].action)
    weights, choice = torch.tensor([[0.7, 0.2, 0.1]]), torch.tensor([-3.0, 0.0, 0.6, 1.0, 3.0])
    mppi, prior = MPPI(1, 3, 3, 3, 1, 1.0, 0.1, 1.0), torch.tensor([1.0, 2.0, 3.0]).view(1, 3, 1, 1)
    asked = (lambda _: weights.log()), torch.zeros(1, 1, 1), prior, torch.zeros(1, 1, 0, 1, 1)
    drawn = [mppi.search(*asked, each.view(1)).elite.item() for each in choice]
    assert drawn == [1, 1, 2, 2, 3]  # the normal numbers' shares are 0.001, 0.5, 0.73, 0.84 and 0.999


@pytest.mark.parametrize("count", [0, 12])
def test_the_prior_may_give_no_sequences_or_all(count):
    algorithm = build("algo.mppi.samples=12", f"algo.mppi.prior_samples={count}")
    assert decide(algorithm, torch.randn(3, 3))[0].action.isfinite().all()


def test_without_a_plan_the_prior_acts():
    algorithm, state = build("algo.plan=false"), torch.randn(3, 3)
    decision, carry = decide(algorithm, state, explore=False)
    latent = algorithm.planner.model.encode({STATE: state})
    mode = algorithm.planner.prior.gaussian(latent)[0].tanh()
    torch.testing.assert_close(decision.action[:, 0], 2 * mode.detach())  # the robot's reach is 2
    assert carry is None


def test_the_model_is_asked_about_the_actions_that_are_executed():
    spec = replace(SPEC, action=replace(SPEC.action, neutral=SPEC.action.low))
    model = build(spec=spec).planner.model
    latent, rest, below = torch.rand(3, 16), torch.zeros(3, 2), -torch.rand(3, 2)
    for asked in (model.following, model.reward, model.judge):
        assert torch.equal(asked(latent, below), asked(latent, rest))


def test_the_prior_leaves_no_gradient_in_critics_or_model():
    algorithm = build()
    algorithm.planner.model.critics.last.weight.data.normal_()  # else nothing would come back through them
    latents, begun, before = torch.rand(16, 4, 16), weights(algorithm.planner.model), weights(algorithm.planner.prior)
    loss, _ = algorithm.policy_loss(rows_of(algorithm), latents)
    algorithm.policy_optimizer.step(loss)
    assert_same(begun, weights(algorithm.planner.model))
    assert all(weight.grad is None for weight in algorithm.planner.model.parameters())
    assert differences(before, weights(algorithm.planner.prior))


def test_a_target_ends_with_its_episode_and_takes_the_lower_of_two_critics():
    algorithm = build("algo.model.num_critics=2", "algo.discount=0.5", "algo.model.bins=0")
    algorithm.target_critics.last.bias.data.copy_(torch.tensor([4.0, 2.0]).view(2, 1, 1))
    rows = rows_of(algorithm, length=torch.arange(16) % 3 + 1, ends="terminated")
    target = algorithm.target(rows, torch.rand(16, 3, 16))
    torch.testing.assert_close(target, rows.reward + 0.5 * 2.0 * ~rows.terminated)


def test_what_lies_behind_the_end_of_an_episode_teaches_nothing():
    algorithm = build("algo.model.dropout=0")
    rows = rows_of(algorithm, length=2, ends="truncated")
    changed = {STATE: rows.observation[STATE].clone()}
    changed[STATE][:, 3] += 5.0
    other = replace(rows, observation=changed, reward=rows.reward + 9.0 * ~rows.valid)
    losses = [algorithm.model_loss(each)[0] for each in (rows, other)]
    assert torch.equal(*losses)
    shorter = replace(rows, valid=rows.valid & (torch.arange(3) < 1))
    assert not torch.equal(algorithm.model_loss(shorter)[0], losses[0])


def test_the_scale_of_values_follows_their_range_and_is_at_least_one():
    algorithm = build("algo.tau=0.5")
    algorithm._rescale(torch.linspace(0, 10, 101))
    assert algorithm.value_scale == 0.5 * 1 + 0.5 * 9
    algorithm._rescale(torch.zeros(101))
    assert algorithm.value_scale == 0.5 * 5 + 0.5 * 1


def test_the_prior_stays_near_what_was_planned_once_values_differ():
    algorithm = build(algo="td_mpc_squared")
    rows, action = rows_of(algorithm), torch.zeros(16, 3, 2)
    assert algorithm.behaviour_loss(rows, action) == 0
    algorithm.value_scale.fill_(4.0)
    mean, std = rows.extras["behaviour_mean"], rows.extras["behaviour_std"]
    density = torch.distributions.Normal(mean, std).log_prob(action).sum(-1).mean(0)
    share = torch.tensor([1.0, 0.5, 0.25]) / 3
    torch.testing.assert_close(algorithm.behaviour_loss(rows, action), -2 * (share * density).sum() / 4)
    person = replace(rows, intervened=torch.ones_like(rows.valid))
    unplanned = replace(rows, extras={name: torch.zeros_like(column) for name, column in rows.extras.items()})
    assert algorithm.behaviour_loss(person, action) == algorithm.behaviour_loss(unplanned, action)
    decision, _ = decide(algorithm, torch.randn(3, 3))
    assert decision.extras["behaviour_std"].shape == (3, 2)


def test_it_sees_cameras():
    spec = robot(shape=(8, 8, 3))
    algorithm = build("algo.model.encoder.cameras=[all]", "+algo.model.encoder.channels=[8]", spec=spec)
    trunk = next(algorithm.planner.model.encoder["sensors"].trunks.parameters())
    before = trunk.detach().clone()
    for _ in range(2):  # at first nothing comes back but from the next latent
        algorithm.update(rows_of(algorithm, spec=spec))
    assert CAMERA in algorithm.windows["update"].offsets
    assert not torch.equal(before, trunk)
