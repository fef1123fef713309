"""What improves a policy that runs elsewhere: edits of its stored actions, values, and which of them acts."""

from dataclasses import replace

import pytest
import torch
from serl_client import ConfigError

from serl_launcher.algorithms.residual import BASE, HAS_BASE
from serl_launcher.networks.seeded_noise import normal
from serl_launcher.store.extras import with_extras
from tests.shared.models import STATE, algorithm_of, assert_same, batch, config_of, robot, weights

pytestmark = pytest.mark.usefixtures("one_thread")

SPEC = with_extras(robot(states=2, cameras=()), config_of("algo=residual").extras)
SMALL = ("critic.hidden=[32,32]", "algo.hidden=[32,32]", "critic.num_critics=2")


def build(*words, seed=0):
    return algorithm_of(SPEC, "algo=residual", *SMALL, *words, seed=seed)


def rows(algorithm, update, size=8, *, has_base=True, **columns):
    """A batch whose base actions are half of the executed ones, where it has them."""
    drawn = batch(SPEC, size, window=algorithm.windows[update], **columns)
    has = torch.as_tensor(has_base).expand(size, drawn.action.shape[1]).unsqueeze(-1)
    return replace(drawn, extras={BASE: drawn.action / 2 * has, HAS_BASE: has})


def test_a_target_adds_the_rewards_of_some_steps_and_the_value_of_the_bases_next_action():
    algorithm = build("algo.n_step=3")
    drawn = rows(algorithm, "update_critic")
    assert drawn.action.shape[1] == 4
    following = {STATE: drawn.observation[STATE][:, 1]}
    value = algorithm.target_critic.value(following, drawn.action[:, 3:] / 2).min(0).values
    expected = sum(0.97**i for i in range(3)) + 0.97**3 * value
    torch.testing.assert_close(algorithm.target(drawn), expected.detach())
    others = rows(algorithm, "update_critic", has_base=False)
    value = algorithm.target_critic.value(following, others.action[:, 3:]).min(0).values
    expected = sum(0.97**i for i in range(3)) + 0.97**3 * value  # the executed one, where the base gave none
    torch.testing.assert_close(algorithm.target(others), expected.detach())


@pytest.mark.parametrize(("length", "ends", "counts"), [
    (1, "terminated", 1), (3, "terminated", 1), (4, "terminated", 1), (3, "truncated", 0), (1, "truncated", 0),
    (4, "truncated", 1),
])  # fmt: skip
def test_an_end_before_the_next_base_action_is_the_value_or_leaves_it_unknown(length, ends, counts):
    """Of four steps, three of which are added: the fourth has the next action of the base."""
    algorithm = build("algo.n_step=3")
    drawn = rows(algorithm, "update_critic", length=length, ends=ends)
    if ends == "terminated" and length < 4:
        expected = sum(0.97**i for i in range(length))
        torch.testing.assert_close(algorithm.target(drawn), torch.full((8,), expected))
    loss = algorithm.critic_loss(drawn)[0]
    assert (loss > 0) == bool(counts)


def test_the_base_acts_alone_until_edits_are_learned_and_then_the_best_of_it_and_its_edits():
    algorithm = build("algo.samples=3")
    acts, state = algorithm.acting, {STATE: torch.randn(5, 2)}
    base, noise = torch.rand(5, 1, 2) - 0.5, torch.randn(5, *acts.noise_shape)
    assert torch.equal(acts.choose(state, base, noise), base)
    before = weights(acts.critic)
    algorithm.update_edit(rows(algorithm, "update_edit"))
    assert_same(before, weights(acts.critic))
    chosen, unit = acts.choose(state, base, noise), acts.scale.to_unit
    edited = acts.edited(state, base.expand(3, -1, -1, -1), noise.transpose(0, 1))[0]
    candidates = torch.cat([base[None], edited])
    values = acts.critic.mean_value(state, candidates)
    torch.testing.assert_close(acts.critic.mean_value(state, chosen), values.max(0).values)
    assert (unit(candidates) - unit(base)).abs().max() <= acts.editor.reach + 1e-6
    assert not torch.equal(chosen, base)
    other = build("algo.samples=3", seed=1).acting
    other.load_published(acts.published())
    assert torch.equal(other.choose(state, base, noise), chosen), "what is published tells that edits act"


def test_an_edit_of_a_person_s_row_begins_at_what_the_person_did():
    algorithm = build()
    drawn = rows(algorithm, "update_edit", has_base=False)
    fresh = normal(drawn.seed, (1, 2), 8).unsqueeze(0)
    unit = algorithm.acting.scale.to_unit(drawn.action)
    edited, density = algorithm.acting.editor({STATE: drawn.observation[STATE][:, 0]}, unit.unsqueeze(0), fresh)
    metrics = algorithm.edit_loss(drawn)[1]
    torch.testing.assert_close(metrics["edit"], (edited[0] - unit).abs().mean().detach())
    torch.testing.assert_close(metrics["entropy"], -density.mean().detach())


def test_edits_mend_a_base_that_is_wrong_by_a_little():
    """One-step episodes: the best action is minus the state, and the base is wrong by 0.4 of the robot's 2."""
    rates = [f"algo.{name}_optimizer.learning_rate=3e-3" for name in ("critic", "edit")]
    algorithm, generator = build("algo.reach=0.3", *rates), torch.Generator().manual_seed(1)

    def base_for(state):
        return (-state + 0.4).clamp(-2, 2)

    def drawn(update):
        window = algorithm.windows[update]
        steps = window.horizon
        state = torch.rand(64, 1, 2, generator=generator) * 2 - 1
        base = base_for(state)
        action = (base + 0.6 * (torch.rand(64, 1, 2, generator=generator) * 2 - 1)).clamp(-2, 2)
        made = batch(
            SPEC, 64, window=window, length=1, ends="terminated", action=action.repeat(1, steps, 1),
            seed=int(torch.randint(2**20, (), generator=generator)),
            observation={STATE: state.repeat(1, len(window.offsets[STATE]), 1)},
            reward=-(state + action).square().sum(-1) * torch.eye(steps)[0],
        )  # fmt: skip
        has = torch.ones(64, steps, 1, dtype=torch.bool)
        return replace(made, extras={BASE: base.repeat(1, steps, 1), HAS_BASE: has})

    for _ in range(150):
        for update in ("update_critic", "update_edit"):
            metrics = getattr(algorithm, update)(drawn(update))
            assert all(value.isfinite() for value in metrics.values())
    state = torch.rand(256, 2, generator=generator) * 2 - 1
    noise = torch.randn(256, *algorithm.acting.noise_shape, generator=generator)
    found = algorithm.acting.choose({STATE: state}, base_for(state).unsqueeze(1), noise)[:, 0]
    before, after = ((each + state).norm(dim=-1).mean() for each in (base_for(state), found))
    assert after < before / 2


def test_what_cannot_be_is_refused():
    for words, sentence in (
        (["policy=gaussian"], "algo=residual improves a policy that runs elsewhere: say policy=server, not Gaussian"),
        (["algo.n_step=0"], r"algo\.n_step=0: say a whole number from 1 on"),
        (["algo.reach=0"], r"algo\.reach=0, algo\.samples=4: say a reach of more than 0"),
        (["algo.samples=0"], "at least 1 sample"),
        (["policy.scale=wide"], r"policy\.scale=wide: say one of bounds"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            build(*words)


@pytest.mark.parametrize("algo", ["sft", "sac", "expo", "iql", "recap", "sac_pi0"])
def test_another_algorithm_does_not_take_a_policy_server(algo):
    with pytest.raises(ConfigError, match=r"say (policy=|algo=)"):
        algorithm_of(SPEC, f"algo={algo}", "policy=server")
