"""What Dreamer makes of a sequence: what belongs to which row, what is remembered, which losses reach which part."""

from dataclasses import replace

import pytest
import torch
from serl_client import ConfigError, Feature, Spec

from serl_launcher.algorithms.dreamer import DETER, INDEX, STOCH, rows_of
from tests.shared.models import CAMERA, STATE, algorithm_of, assert_same, batch, differences, now, robot, weights

pytestmark = pytest.mark.usefixtures("one_thread")

SPEC = robot(states=2, actions=2, cameras=())
SHORT = ("algo.length=7", "algo.imagined=3", "algo.deter=16", "algo.hidden=8", "algo.units=8")
INDICES = [4, 5, 6, 0, 0, 1, 2, 3]  # an episode that ends after step 6, its final row, and the beginning of another
FINAL = 3
CHOICES = Spec(SPEC.observation, Feature((2,), low=0, high=1, one_hot=True), fps=10.0)


@pytest.fixture
def dreamer():
    return made("dreamer")


def made(name, *words, spec=SPEC):
    """The algorithm of this yaml, small."""
    algorithm = algorithm_of(spec, f"algo={name}", *SHORT, *words)
    for head in (algorithm.reward, algorithm.value_head):  # which begin at zero
        torch.nn.init.normal_(head.layers[-1].weight)
    return algorithm


def sequences(algorithm, size=6, **columns):
    """Joined windows as INDICES says; nothing of them was seen before."""
    rows = batch(SPEC, size, window=algorithm.windows["update"], derived=algorithm.derived)
    valid = torch.arange(8).expand(size, 8) != FINAL
    index = torch.tensor(INDICES).expand(size, 8)
    columns = {"valid": valid, "terminated": torch.arange(8).expand(size, 8) == FINAL - 1, **columns}
    numbers = torch.arange(8.0).expand(size, 8)
    return replace(
        rows, reward=numbers * valid, action=rows.action * valid[..., None], extras={**rows.extras, INDEX: index},
        **columns,
    )  # fmt: skip


def test_with_each_observation_comes_what_led_to_it(dreamer):
    drawn = sequences(dreamer, 1)
    rows = rows_of(drawn, dreamer.actor.scale)
    assert rows.reward[0].tolist() == [0, 0, 1, 2, 0, 4, 5, 6]
    assert rows.first[0].nonzero().flatten().tolist() == [4]
    assert rows.terminal[0].nonzero().flatten().tolist() == [FINAL]
    assert rows.last[0].nonzero().flatten().tolist() == [FINAL]
    torch.testing.assert_close(rows.action[0, 1:], dreamer.actor.scale.to_unit(drawn.action[0, :-1]))
    whole = replace(drawn, valid=drawn.valid | True, extras={INDEX: drawn.extras[INDEX] + 1})
    assert not rows_of(whole, dreamer.actor.scale).first.any()
    open_end = torch.tensor([[4, 5, 6, 7, 0, 1, 2, 3]])  # without a final observation the next episode follows at once
    cut = rows_of(replace(whole, terminated=drawn.valid & False, extras={INDEX: open_end}), dreamer.actor.scale)
    assert cut.last[0].nonzero().flatten().tolist() == [3]
    assert not cut.terminal.any()


def acted(dreamer, seen, noise, previous=None, carry=None, *, explore=True):
    """The actions [B, A], and the carry."""
    previous = torch.zeros(len(noise), 2) if previous is None else previous
    decision, carry = dreamer.act(seen, previous, carry, task=("",) * len(noise), noise=noise, explore=explore)
    return decision.action[:, 0], carry


def states_of(algorithm, rows):
    return algorithm(rows, True, False)[2]


def test_what_lies_in_another_episode_never_changes_a_posterior(dreamer):
    rows = sequences(dreamer)
    before = torch.arange(8) <= FINAL
    stirred = {STATE: torch.where(before[:, None], rows.observation[STATE] + 1, rows.observation[STATE])}
    noisy = torch.where(before[:, None], -rows.action, rows.action)
    kept = rows.extras | {STOCH: rows.extras[STOCH] + 2, DETER: rows.extras[DETER] + 1}
    other = replace(rows, observation=stirred, action=noisy, extras=kept, reward=rows.reward + before)
    for one, changed in zip(states_of(dreamer, rows), states_of(dreamer, other), strict=True):
        assert torch.equal(one[:, FINAL + 1 :], changed[:, FINAL + 1 :])
        assert (one[:, : FINAL + 1] != changed[:, : FINAL + 1]).flatten(2).any(2).float().mean() > 0.5
    later = {STATE: torch.where(before[:, None], rows.observation[STATE], -rows.observation[STATE])}
    unchanged = states_of(dreamer, replace(rows, observation=later))
    for one, changed in zip(states_of(dreamer, rows), unchanged, strict=True):
        assert torch.equal(one[:, : FINAL + 1], changed[:, : FINAL + 1])


def test_a_window_begins_with_what_was_remembered_of_its_first_row(dreamer):
    rows = sequences(dreamer)
    _, columns = dreamer.update_world_model(rows)
    assert columns["stoch"].min() >= 1
    assert columns["deter"].shape == (*rows.valid.shape, 16)
    known = torch.arange(6) < 3  # of the others nothing is
    kept = {DETER: columns["deter"][:, 2:3], STOCH: columns["stoch"][:, 2:3] * known[:, None, None]}
    shifted = replace(rows, extras=rows.extras | kept)
    (deter, stoch), fresh = dreamer.remembered(shifted), dreamer.remembered(rows)
    torch.testing.assert_close(deter[:3], columns["deter"][:3, 2].float())
    assert torch.equal(stoch[:3].argmax(-1) + 1, columns["stoch"][:3, 2].long())
    assert torch.equal(deter[3:], fresh[0][3:])
    assert torch.equal(stoch[3:], fresh[1][3:])


@pytest.mark.parametrize(
    ("name", "spec", "follows"),
    [
        ("dreamer", SPEC, ("slow_value", "low", "high", "controlled")),
        ("dreamer", CHOICES, ("slow_value", "low", "high", "controlled")),
        ("dreamer_v2", SPEC, ("slow_value", "controlled")),
        ("dreamer_v2", CHOICES, ("slow_value", "controlled")),
        ("dreamer_v1", SPEC, ()),
    ],
)
def test_each_update_moves_its_own_part(name, spec, follows):
    dreamer = made(name, "algo.slow_every=1", spec=spec)
    rows = sequences(dreamer)
    names = {  # what must have moved
        "update_world_model": ("actor.encoder", "actor.rssm", "decoder", "reward", "going_on"),
        "update_controller": ("actor.policy", "value_head", *follows),
    }
    for update, own in names.items():
        before = weights(dreamer)
        getattr(dreamer, update)(rows)
        moved = differences(before, weights(dreamer))
        assert {part for part in own if any(name.startswith(part) for name in moved)} == {*own}
        assert all(name.startswith(own) for name in moved)


@pytest.mark.parametrize(("name", "factor"), [("dreamer", 1.0), ("dreamer_v2", 0.5), ("dreamer_v1", 0.5)])
def test_older_versions_halve_the_squared_error_of_what_is_reconstructed_and_rows_have_their_weight(
    name, factor, monkeypatch
):
    dreamer = made(name)
    monkeypatch.setattr(dreamer.decoder, "forward", lambda deter, stoch, seen: 3 * torch.ones(len(deter)))
    told, _ = dreamer.update_world_model(replace(sequences(dreamer), weight=torch.full((6,), 2.0)))
    assert told["reconstruction"] == 2 * 3 * factor


@pytest.mark.parametrize(
    ("name", "factors"), [("dreamer", (1.0, 0.1)), ("dreamer_v2", (0.8, 0.2)), ("dreamer_v1", (1.0, 1.0))]
)
def test_the_models_loss_is_what_is_predicted_and_two_divergences_as_each_paper_weighs_them(name, factors):
    dreamer = made(name)
    loss, told, _ = dreamer(sequences(dreamer), True, False)
    divergences = factors[0] * told.pop("dynamics") + factors[1] * told.pop("representation")
    torch.testing.assert_close(loss, sum(told.values()) + divergences)
    assert told.keys() == {"reconstruction", "reward_loss", "continue_loss"}


def test_the_slow_value_begins_as_the_value_and_follows_by_its_share():
    dreamer = algorithm_of(SPEC, "algo=dreamer", *SHORT, "algo.slow_share=0.25")
    begun = weights(dreamer.value_head)
    assert_same(begun, weights(dreamer.slow_value))
    dreamer.update(sequences(dreamer))
    for name, value in weights(dreamer.value_head).items():
        torch.testing.assert_close(dreamer.slow_value.state_dict()[name], 0.75 * begun[name] + 0.25 * value)


def test_the_slow_value_follows_after_so_many_updates_of_the_controller_whatever_else_is_updated():
    dreamer, followed = made("dreamer_v2", "algo.slow_every=2"), []
    for _ in range(4):
        dreamer.update_controller(sequences(dreamer))
        dreamer.update_world_model(sequences(dreamer))
        slow, value = weights(dreamer.slow_value), weights(dreamer.value_head)
        followed.append(all(torch.equal(slow[name], value[name]) for name in value))
    assert followed == [False, True, False, True]


def test_a_range_of_returns_below_one_scales_nothing_and_it_moves_slowly(dreamer):
    assert dreamer.range_of(torch.linspace(0, 50, 101)) == 1  # 0.01 of 45
    torch.testing.assert_close(torch.stack([dreamer.low, dreamer.high]), torch.tensor([0.025, 0.475]))
    for _ in range(1000):
        scale = dreamer.range_of(torch.linspace(0, 50, 101))
    torch.testing.assert_close(scale, torch.tensor(45.0), atol=0.01, rtol=0)


def test_the_replayed_value_reaches_the_model_and_an_episodes_last_row_has_no_loss(dreamer):
    rows = sequences(dreamer)
    deter, stoch = (each[:, 1:].requires_grad_() for each in states_of(dreamer, rows))
    imagined = torch.randn(6, 7)
    losses = dreamer.replay_losses(rows_of(rows, dreamer.actor.scale), (deter, stoch), imagined)
    assert losses.shape == (6, 6)
    assert (losses[:, FINAL - 1] == 0).all()
    gradient = torch.autograd.grad(losses.sum(), deter)[0].abs().sum((0, 2))
    assert (gradient > 0).tolist() == [True, True, False, True, True, True, False]
    changed = imagined.clone()
    changed[:, :FINAL] += 5  # before the end; R of row 2 is the terminal reward alone
    other = dreamer.replay_losses(rows_of(rows, dreamer.actor.scale), (deter, stoch), changed)
    assert torch.equal(losses[:, 1:], other[:, 1:])
    assert not torch.equal(losses[:, 0], other[:, 0])


def test_the_model_imagines_the_actions_that_are_executed(monkeypatch):
    spec = replace(SPEC, action=replace(SPEC.action, neutral=SPEC.action.low))
    dreamer = made("dreamer", spec=spec)
    rssm, followed = dreamer.actor.rssm, []
    step = rssm.step
    monkeypatch.setattr(rssm, "step", lambda state, action: followed.append(action) or step(state, action))
    rows = sequences(dreamer)
    states = states_of(dreamer, rows)
    followed.clear()
    _, asked = dreamer.imagine(tuple(each[:, 1:].flatten(0, 1) for each in states), rows.seed)
    assert (asked < 0).any()
    torch.testing.assert_close(torch.stack(followed, 1), asked.clamp(0, 1))


def test_the_losses_of_what_is_imagined_are_the_papers(dreamer):
    rows = replace(sequences(dreamer), weight=torch.tensor([1.0, 2.0, 0.0, 1.0, 0.5, 3.0]))
    states = tuple(each[:, 1:] for each in states_of(dreamer, rows))
    torch.nn.init.normal_(dreamer.slow_value.layers[-1].weight)
    loss, told = dreamer.controller_losses(rows, rows_of(rows, dreamer.actor.scale), states)
    replayed = dreamer.replay_value_scale * told["replay_value"]
    torch.testing.assert_close(loss.detach(), told["policy_loss"] + told["value_loss"] + replayed)
    scale = dreamer.high - dreamer.low  # which the returns have moved by now
    assert scale > 1
    with torch.no_grad():
        imagined, action = dreamer.imagine(tuple(each.flatten(0, 1) for each in states), rows.seed)
        reward, goes_on = dreamer.reward.mean(dreamer.reward(imagined)), dreamer.going_on(imagined)[..., 0].sigmoid()
        logits, (mean, std) = dreamer.value_head(imagined), dreamer.actor.policy(imagined).unbind(-2)
        value, slow = dreamer.value_head.mean(logits), dreamer.slow_value.mean(dreamer.slow_value(imagined))
        policies, values = [], []
        for n in range(6 * 7):
            result, share = value[n, 3], rows.weight[n // 7]
            returns = [result := reward[n, t] + goes_on[n, t] * (0.05 * value[n, t] + 0.95 * result) for t in (3, 2, 1)]
            for t, found in enumerate(reversed(returns)):
                share = share * goes_on[n, t]
                chosen = torch.distributions.Normal(mean[n, t], std[n, t])
                gain = chosen.log_prob(action[n, t]).sum() * (found - value[n, t]) / scale
                policies.append(-share * (gain + 3e-4 * chosen.entropy().sum()))
                both = [dreamer.value_head.loss(logits[n, t], target) for target in (found, slow[n, t])]
                values.append(share * sum(both))
    torch.testing.assert_close(told["policy_loss"], torch.stack(policies).mean())
    torch.testing.assert_close(told["value_loss"], torch.stack(values).mean())


@pytest.mark.parametrize(("name", "noise"), [("dreamer_v2", 1e-4), ("dreamer_v1", 0.0)])
def test_older_policies_climb_the_returns_through_the_model(name, noise):
    dreamer = made(name)
    rows = sequences(dreamer)
    states = tuple(each[:, 1:] for each in states_of(dreamer, rows))
    assert dreamer.entropy_scale == noise
    dreamer.slow_value.load_state_dict(dreamer.value_head.state_dict())
    _, told = dreamer.controller_losses(rows, rows_of(rows, dreamer.actor.scale), states)
    policy, weight = dreamer.actor.policy, next(dreamer.actor.policy.mean.parameters())
    start = tuple(each.flatten(0, 1) for each in states)
    for each in (dreamer.actor.rssm, dreamer.reward, dreamer.going_on, dreamer.value_head):
        each.requires_grad_(False)

    def loss():
        """The policy's loss from its definition, on the same draws."""
        imagined, _ = dreamer.imagine(start, rows.seed)
        reward, goes_on = dreamer.reward.mean(dreamer.reward(imagined)), dreamer.going_on(imagined)[..., 0].sigmoid()
        value = dreamer.value_head.mean(dreamer.value_head(imagined))  # as the slow one says
        result, total = value[:, 3], 0.0
        for t in (2, 1, 0):
            result = reward[:, t + 1] + goes_on[:, t + 1] * (0.05 * value[:, t + 1] + 0.95 * result)
            spread = policy.entropy(policy(imagined[:, t].detach()))
            total = total - goes_on[:, : t + 1].detach().prod(1) * (result + dreamer.entropy_scale * spread)
        return total.mean() / 3

    torch.testing.assert_close(told["policy_loss"], loss().detach())
    expected = torch.autograd.grad(loss(), weight)[0]
    assert expected.abs().max() > 0
    found, _ = dreamer.controller_losses(rows, rows_of(rows, dreamer.actor.scale), states)
    torch.testing.assert_close(torch.autograd.grad(found, weight)[0], expected)


def test_the_second_versions_returns_are_made_of_a_slow_value():
    dreamer = made("dreamer_v2")
    with torch.no_grad():
        for weight in (*dreamer.slow_value.parameters(), *dreamer.reward.layers[-1].parameters()):
            weight.zero_()
    assert dreamer.update_controller(sequences(dreamer))["imagined_return"] == 0, "no rewards, and no slow value"


def test_a_choice_is_one_of_its_actions_and_the_likeliest_where_nothing_is_explored():
    dreamer = made("dreamer", spec=CHOICES)
    assert dreamer.acting.noise_shape == (33,)
    seen, noise = {STATE: torch.randn(40, 2)}, torch.randn(40, 33)
    action, _ = acted(dreamer, seen, noise)
    assert action.sum(1).tolist() == [1.0] * 40
    assert set(action.unique().tolist()) == {0.0, 1.0}
    assert 5 < action[:, 0].sum() < 35, "a new policy prefers nothing"
    with torch.no_grad():
        dreamer.actor.policy.layers[-1].bias[1] += 3
    calm, _ = acted(dreamer, seen, noise, explore=False)
    assert calm[:, 1].tolist() == [1.0] * 40
    with pytest.raises(ConfigError, match=r"algo\.variant=v1 adds noise .* takes one of 2: say algo\.variant=v2 or v3"):
        made("dreamer_v1", spec=CHOICES)
    with pytest.raises(ConfigError, match=r"algo\.variant=v4: say one of v3, v2, v1"):
        made("dreamer", "algo.variant=v4")


def test_without_memory_each_action_sees_its_own_observation_alone():
    dreamer = made("dreamer", "algo.remembers=false")
    seen, noise = {STATE: torch.randn(3, 2)}, torch.randn(3, *dreamer.acting.noise_shape)
    first, carry = acted(dreamer, seen, noise, torch.randn(3, 2))
    assert carry is None
    assert torch.equal(first, acted(dreamer, seen, noise, first)[0])


def test_the_first_versions_actions_are_noisier_in_practice():
    dreamer = made("dreamer_v1")
    seen, noise = {STATE: torch.zeros(4000, 2)}, torch.randn(4000, *dreamer.acting.noise_shape) * 0.3
    noise[:, :30] = -9.0  # the latent variables are all alike, and finite
    with torch.no_grad():
        dreamer.actor.policy.std.bias.fill_(-100.0)  # 0.1 alone
    unit = dreamer.actor.scale.to_unit(acted(dreamer, seen, noise)[0])
    torch.testing.assert_close(unit.std(0), torch.full((2,), 0.3 * (0.1**2 + 0.3**2) ** 0.5), rtol=0.1, atol=0)


def test_acting_remembers_and_sees_what_the_robot_really_did(dreamer):
    seen, noise = {STATE: torch.randn(3, 2)}, torch.randn(3, *dreamer.acting.noise_shape)
    first, carry = acted(dreamer, seen, noise, torch.randn(3, 2))
    assert torch.equal(first, acted(dreamer, seen, noise)[0]), "nothing was done before an episode"
    later, carry = acted(dreamer, seen, noise, first, carry)
    assert not torch.equal(first, later)
    assert not torch.equal(later, acted(dreamer, seen, noise, -first, carry)[0])
    bounds = dreamer.actor.scale
    assert ((later >= bounds.low) & (later <= bounds.high)).all()


def test_it_sees_cameras_if_they_are_named():
    spec = robot(states=2, actions=2, shape=(16, 16, 3))
    camera = "algo.cameras=[all]"
    dreamer = made("dreamer", camera, "algo.depth=2", spec=spec)
    rows = batch(spec, 2, window=dreamer.windows["update"], derived=dreamer.derived)
    assert dreamer.update(rows)[0]["reconstruction"].isfinite()
    seen, noise = now(rows.observation), torch.zeros(2, 34)
    other = seen | {CAMERA: 255 - seen[CAMERA]}
    one, changed = (acted(dreamer, each, noise)[1][1] for each in (seen, other))
    assert not torch.equal(one, changed)
    for words, named in (
        (["algo.deter=20"], "deter=20"), (["algo.variant=v2", camera, "algo.deter=20"], "deter=20"),
        ([camera, "algo.depth=3"], "depth=3"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=f"{named}.* multiples of blocks=8"):
            made("dreamer", *words, spec=spec)


def test_it_sees_a_number_that_is_no_vector():
    spec = Spec({STATE: Feature((2,)), "observation.force": Feature(())}, SPEC.action, fps=10.0)
    dreamer = made("dreamer", spec=spec)
    seen = {STATE: torch.randn(3, 2), "observation.force": torch.randn(3)}
    assert dreamer.actor.encoder.inputs.vector(seen).shape == (3, 3)


def test_the_model_for_walker_walk_is_as_large_as_the_reference():
    algorithm = algorithm_of(robot(states=24, actions=6, cameras=()), "algo=dreamer")
    assert sum(weight.numel() for weight in algorithm.parameters() if weight.requires_grad) == 640_867
