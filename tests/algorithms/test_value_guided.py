"""What chooses, climbs, leads, edits and steers the chunks of a policy does what its equations say."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from serl_launcher.algorithms.chunk_actor_critic import first_step
from serl_launcher.algorithms.guided import Led
from serl_launcher.networks.mlp import ActionScale
from serl_launcher.networks.seeded_noise import normal
from serl_launcher.policies.improved import Improved
from tests.shared.models import STATE, act, algorithm_of, assert_same, batch, differences, robot, weights

pytestmark = pytest.mark.usefixtures("one_thread")

SPEC = robot(states=2, cameras=())
SMALL = ("policy.network.hidden=[16,16]", "critic.hidden=[16,16]", "policy.horizon=4", "policy.head.steps=3")


def build(name, *words, seed=0):
    small = [word for word in SMALL if not ("policy=chunk" in words and word.startswith("policy.n"))]
    small = [word.replace("policy.head", "head") if "policy=chunk" in words else word for word in small]
    if "head=regression" in words:
        small.remove("head.steps=3")
    return algorithm_of(SPEC, f"algo={name}", *small, *words, seed=seed)


def rows(algorithm, update, **columns):
    return batch(SPEC, 8, window=algorithm.windows[update], **columns)


def observed(count=5):
    return {STATE: torch.randn(count, 2, generator=torch.Generator().manual_seed(3))}


class Bowl:
    """A critic whose value of scaled actions a is -|a - c|^2; it writes down the values that it gave."""

    def __init__(self, center, scale):
        self.center, self.scale, self.said = center, scale, []

    def mean_value(self, observation, candidates):
        value = -(self.scale.to_unit(candidates) - self.center).square().sum((-2, -1))
        self.said.append(value.detach())
        return value


def climber(center, **options):
    scale = ActionScale(SPEC.action)
    policy = SimpleNamespace(scale=scale, head=SimpleNamespace(is_deterministic=False))
    climbing = Improved.__new__(Improved)
    torch.nn.Module.__init__(climbing)
    climbing.__dict__.update(policy=policy, critic=Bowl(center, scale), **options)
    return climbing, scale


# -- PA-RL


def test_local_steps_shrink_the_distance_to_the_best_action_as_they_must_and_never_lose_value():
    center = torch.tensor([0.3, -0.4])
    climbing, scale = climber(center, steps=7, step_size=0.1)
    begun = torch.rand(4, 5, 3, 2) - 0.5
    found = scale.to_unit(climbing.ascend({}, scale.from_unit(begun)))
    torch.testing.assert_close(found - center, (1 - 2 * 0.1) ** 7 * (begun - center))
    said = torch.stack(climbing.critic.said)
    assert (said.diff(dim=0) >= 0).all()


def test_a_step_that_is_too_long_is_not_kept_and_no_step_leaves_the_bounds():
    climbing, scale = climber(torch.full((2,), 5.0), steps=3, step_size=0.2)
    found = scale.to_unit(climbing.ascend({}, torch.zeros(2, 5, 3, 2)))
    torch.testing.assert_close(found, torch.ones_like(found))  # the bound, on the way to 5
    climbing, scale = climber(torch.zeros(2), steps=3, step_size=1.4)  # each step goes too far, and further away
    begun = torch.full((2, 5, 3, 2), 0.5)
    torch.testing.assert_close(scale.to_unit(climbing.ascend({}, scale.from_unit(begun))), begun)


def test_candidates_are_kept_by_value_and_the_worst_of_them_gives_way_to_what_was_executed():
    algorithm = build("parl", "algo.samples=6", "algo.kept=3", "algo.steps=0", "algo.temperature=1.0e-4")
    drawn = rows(algorithm, "update_candidates", length=2)
    metrics, columns = algorithm.update_candidates(drawn)
    observation = {STATE: drawn.observation[STATE][:, 0]}
    noise = normal(drawn.seed, algorithm.acting.noise_shape)
    sampled = algorithm.acting.proposed(observation, drawn.task, noise)
    value = algorithm.acting.value(observation, sampled)
    top = sampled[value.argmax(0), torch.arange(8)]
    executed = torch.where(drawn.valid[..., None], drawn.action, top)  # behind the end: the best sample
    both = torch.stack([top, executed])
    best = both[algorithm.acting.value(observation, both).argmax(0), torch.arange(8)]
    assert torch.equal(columns["candidate"], best)  # so low a temperature takes the best
    assert columns["candidate_version"].tolist() == [0] * 8
    assert metrics["value_gained"] == metrics["moved"] == 0  # no step was taken


def test_the_temperature_shares_the_choice_among_candidates_by_their_values():
    algorithm = build("parl", "algo.samples=4", "algo.kept=2", "algo.steps=0", "algo.temperature=1.0e6")
    drawn = batch(SPEC, 400, window=algorithm.windows["update_candidates"])
    chosen = algorithm.update_candidates(drawn)[1]["candidate"]
    is_executed = (chosen == drawn.action).all((1, 2)).float().mean()
    assert 0.42 < is_executed < 0.58  # one of two candidates, whatever it is worth


def test_candidates_are_imitated_by_the_policys_own_loss_and_tell_their_age():
    algorithm = build("parl")
    for _ in range(3):
        algorithm.update_critic(rows(algorithm, "update_critic"))
    candidate = torch.rand(8, 1, 4, 2) - 0.5
    drawn = rows(algorithm, "update_distil")
    extras = {"derived.candidate": candidate, "derived.candidate_version": torch.ones(8, 1, dtype=torch.int64)}
    drawn, critics = replace(drawn, extras=extras), weights(algorithm.critic)
    whole = rows(algorithm, "update_clone", observation=drawn.observation, action=candidate[:, 0])
    expected = algorithm.policy(whole)[0].mean()
    metrics = algorithm.update_distil(drawn)
    torch.testing.assert_close(metrics["loss"], expected.detach())
    assert metrics["candidate_age"] == 2
    assert_same(critics, weights(algorithm.critic))


# -- what is common


def test_proposal_noise_makes_samples_of_a_deterministic_head_differ_within_the_bounds():
    algorithm = build("qc", "policy=chunk", "head=regression", "network=mlp", "algo.proposal_noise=0.3")
    acting = algorithm.acting
    found = acting.proposed(observed(), (), torch.randn(5, *acting.noise_shape))
    assert (found.std(0) > 0).all()
    assert (found.abs() <= 2).all()


def test_the_best_of_n_acts_and_backs_up():
    algorithm = build("qc", "algo.samples=6", "n_action_steps=2")
    drawn = rows(algorithm, "update_critic")
    following = {STATE: drawn.next_observation[STATE][:, 0]}
    noise = normal(drawn.seed, algorithm.acting.noise_shape, 1)
    candidates = algorithm.acting.proposed(following, drawn.task, noise)
    value = torch.stack([algorithm.critic.value(following, each[:, :2]).mean(0) for each in candidates])
    best = candidates[value.argmax(0), torch.arange(8)]
    found = algorithm.following_action(drawn, following)
    torch.testing.assert_close(found, best)
    later = algorithm.target_critic.value(following, best[:, :2]).min(0).values
    expected = drawn.reward @ torch.tensor([1, 0.97]) + 0.97**2 * later
    torch.testing.assert_close(algorithm.target(drawn), expected.detach())


@pytest.mark.parametrize("name", ["qc", "fql", "parl", "guided", "dsrl", "expo"])
def test_every_update_learns_from_what_augmentation_makes_of_its_batch(name):
    def augment(drawn):
        seen, following = drawn.observation, drawn.next_observation
        following = following and {STATE: following[STATE] - 1}
        return replace(drawn, observation={STATE: seen[STATE] + 1}, next_observation=following)

    algorithm, told = build(name), build(name)
    algorithm.augment = augment
    for update in algorithm.windows:
        drawn = rows(algorithm, update, derived=algorithm.derived)
        assert_same(getattr(algorithm, update)(drawn), getattr(told, update)(augment(drawn)))
        assert_same(dict(algorithm.named_parameters()), dict(told.named_parameters()))


# -- FQL


def test_the_one_step_policy_stays_near_the_flow_from_the_same_noise_and_climbs_the_critics():
    """(2) of qc.py and its gradient, from the definition."""
    fql = build("fql")
    drawn = rows(fql, "update_one_step")
    seen, unit = first_step(drawn.observation), fql.policy.scale.to_unit
    chunk, flow = (each.rsample(seen, seed=drawn.seed, task=drawn.task)[0] for each in (fql.one_step, fql.policy))
    value = fql.critic.value(seen, chunk).mean(0)
    apart = (unit(chunk) - unit(flow.detach())).square().mean((1, 2))
    expected = (drawn.weight * (fql.distill_weight * apart - value / value.detach().abs().mean())).mean()
    found, _ = fql.one_step_loss(drawn)
    torch.testing.assert_close(found, expected)
    moved = [weight for weight in fql.one_step.parameters() if weight.requires_grad]
    slopes = (torch.autograd.grad(loss, moved) for loss in (found, expected))
    torch.testing.assert_close(*slopes, rtol=1e-4, atol=1e-4)


def test_values_count_as_they_are_where_they_are_not_normalised():
    told, fql = build("fql"), build("fql", "algo.normalize_values=false")
    drawn = rows(fql, "update_one_step")
    (loss, metrics), (relative, _) = fql.one_step_loss(drawn), told.one_step_loss(drawn)
    value = fql.value_by_action(first_step(drawn.observation), fql.one_step_optimizer.forward(drawn))
    expected = (drawn.weight * value * (1 - 1 / value.abs().mean())).mean()
    torch.testing.assert_close(relative - loss, expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(metrics["value_of_policy"], value.mean())


def test_the_one_step_policy_acts_as_the_clone_does_before_there_are_values():
    fql = build("fql", "algo.one_step_optimizer.learning_rate=0.005")
    drawn = rows(fql, "update_clone")
    apart = [fql.update_clone(drawn)["distill"] for _ in range(150)]
    assert apart[-1] < 0.2 * apart[0]
    fql.update_critic(rows(fql, "update_critic"))
    acting = weights(fql.acting)
    fql.update_clone(drawn)
    assert_same(weights(fql.acting), acting)


# -- guidance


@pytest.mark.parametrize("words", [(), ("policy=chunk", "head=ddim"), ("policy=chunk", "head=ddpm")])
def test_guidance_of_weight_zero_is_the_policy_bit_by_bit_and_more_of_it_finds_more_value(words):
    seen, found = observed(), {}
    for weight in (0.0, 0.5):
        algorithm = build("guided", *words, f"algo.weight={weight}")
        noise = torch.randn(5, *algorithm.acting.noise_shape, generator=torch.Generator().manual_seed(2))
        found[weight] = act(algorithm, seen, noise)
        if not weight:
            alone = algorithm.policy.sample(seen, task=("reach",) * 5, noise=noise[None])[0]
            assert torch.equal(found[weight], alone)
    judged = [algorithm.critic.mean_value(seen, chunk[None]).mean() for chunk in found.values()]
    assert judged[1] > judged[0]


def test_the_slope_moves_the_guess_by_the_share_of_noise_that_is_left():
    """One step from t = 1: a flow whose velocity is v lands at x - v, and led by g at x - v + g."""
    algorithm = build("guided", "policy.head.steps=1", "algo.weight=0.25")
    seen, noise = observed(), torch.zeros(5, *algorithm.acting.noise_shape)
    plain = algorithm.policy.sample(seen, noise=noise[None])[0]
    scale = algorithm.policy.scale
    unit = scale.to_unit(plain).detach().requires_grad_()
    algorithm.critic.mean_value(seen, scale.from_unit(unit)[None]).sum().backward()
    moved = unit.detach() + 0.25 * unit.grad / (algorithm.acting.size + 1e-6)
    torch.testing.assert_close(act(algorithm, seen, noise), scale.from_unit(moved.clamp(-1, 1)))


def test_the_critic_is_asked_for_no_action_beyond_the_bounds(monkeypatch):
    algorithm, asked = build("guided"), []
    value = algorithm.critic.mean_value
    monkeypatch.setattr(
        algorithm.critic, "mean_value", lambda seen, tried: asked.append(tried.detach()) or value(seen, tried)
    )
    act(algorithm, observed(), 20 * torch.randn(5, *algorithm.acting.noise_shape))
    assert torch.stack(asked).abs().max() == 2


def test_the_size_of_values_follows_training_and_is_published():
    algorithm = build("guided")
    drawn = rows(algorithm, "update_critic")
    algorithm.update_critic(drawn)
    size = algorithm.value(drawn).abs().mean()
    torch.testing.assert_close(algorithm.acting.size, 0.1 + 0.9 * size)
    assert torch.equal(algorithm.acting.published()["size"], algorithm.acting.size)


def test_a_task_beyond_itself_leads_away_from_no_task_and_at_one_it_is_the_task():
    words = ("policy.tasks=[reach]", "algo.weight=0", "algo.task_drop=0.3")
    seen, noise = observed(), torch.zeros(5, 1, 4, 2)
    chunks = {}
    for weight in (1.0, 0.0, 2.0):
        algorithm = build("guided", *words, f"algo.task_weight={weight}", "policy.head.steps=1")
        chunks[weight] = act(algorithm, seen, noise)
    for weight, task in ((1.0, "reach"), (0.0, "")):
        alone = algorithm.policy.sample(seen, task=[task] * 5, noise=noise[None])[0]
        torch.testing.assert_close(chunks[weight], alone)
    expected = (2 * chunks[1.0] - chunks[0.0]).clamp(-2, 2)  # of one step, the answer is linear in the weight
    torch.testing.assert_close(chunks[2.0], expected)


def test_tasks_are_left_out_of_their_share_of_rows(monkeypatch):
    algorithm = build("guided", "policy.tasks=[reach]", "algo.task_drop=0.25")
    told = []
    monkeypatch.setattr(algorithm.policy, "prepared", lambda seen, task: told.extend(task) or seen)
    monkeypatch.setattr(algorithm.policy, "condition", lambda seen: torch.zeros(400, 1, 3))
    algorithm.update_clone(batch(SPEC, 400, window=algorithm.windows["update_clone"]))
    assert 0.18 < told.count("") / 400 < 0.32


# -- DSRL


def test_steering_leaves_the_cloned_flow_as_it_is_to_the_byte_and_its_noise_within_reach():
    algorithm = build("dsrl", "algo.reach=0.7")
    algorithm.update_clone(rows(algorithm, "update_clone"))
    before = {name: value.numpy().tobytes() for name, value in algorithm.policy.state_dict().items()}
    chosen = weights(algorithm.acting.noise_policy)
    for _ in range(3):
        algorithm.update_critic(rows(algorithm, "update_critic"))
        algorithm.update_noise(rows(algorithm, "update_noise"))
    assert {name: value.numpy().tobytes() for name, value in algorithm.policy.state_dict().items()} == before
    assert differences(chosen, weights(algorithm.acting.noise_policy))
    found = algorithm.acting.noise_policy.sample(observed(), noise=10 * torch.randn(1, 5, 1, 8))
    assert found.abs().max() <= 0.7


def test_more_steps_of_the_noises_critic_move_it_alone():
    algorithm = build("dsrl")
    before = {name: weights(part) for name, part in algorithm.named_children()}
    algorithm.update_noise_critic(rows(algorithm, "update_noise_critic"))
    after = {name: weights(part) for name, part in algorithm.named_children()}
    assert [name for name in before if differences(before[name], after[name])] == ["noise_critic"]


def test_one_row_of_noise_serves_all_actions_of_a_chunk_and_each_its_own_otherwise(monkeypatch):
    seen = {}
    for count in (1, 2, None):
        algorithm = build("dsrl", f"algo.noise_rows={'null' if count is None else count}")
        kept = []
        monkeypatch.setattr(
            algorithm.policy, "sample",
            lambda observation, *, task, noise, kept=kept: kept.append(noise) or noise[:, :, 0],
        )  # fmt: skip
        chosen = torch.randn(5, (count or 4) * 2)
        algorithm.acting.chunk(observed(), (), chosen)
        seen[count] = kept[0][0, :, 0], chosen
    assert torch.equal(seen[1][0], seen[1][1][:, None].expand(-1, 4, -1))
    assert torch.equal(seen[2][0], seen[2][1].view(5, 2, 2).repeat_interleave(2, 1))
    assert torch.equal(seen[None][0], seen[None][1].view(5, 4, 2))


# -- EXPO


def test_edits_stay_within_reach_and_bounds_and_change_only_what_is_judged():
    algorithm = build("expo", "n_action_steps=2", "algo.reach=0.3")
    chunks = torch.rand(3, 5, 4, 2) * 4 - 2
    edited, density = algorithm.acting.edited(observed(), chunks, 10 * torch.randn(3, 5, 2, 2))
    assert density.shape == (3, 5)
    assert torch.equal(edited[:, :, 2:], chunks[:, :, 2:])
    assert ((edited - chunks)[:, :, :2].abs() <= 0.3 * 2 + 1e-5).all()  # of a range of -2..2
    assert edited.abs().max() <= 2
    assert not torch.equal(edited[:, :, :2], chunks[:, :, :2])


def test_the_best_of_samples_and_their_edits_acts():
    algorithm = build("expo", "algo.samples=3")
    seen, acting = observed(), algorithm.acting
    noise = torch.randn(5, *acting.noise_shape)
    sampled = acting.proposed(seen, (), noise[..., : 4 * 2])
    edits, _ = acting.edited(seen, sampled, noise[..., 4 * 2 :].transpose(0, 1).unflatten(-1, (4, 2)))
    both = torch.cat([sampled, edits])
    best = both[algorithm.critic.mean_value(seen, both).argmax(0), torch.arange(5)]
    assert torch.equal(act(algorithm, seen, noise), best)


def test_an_average_of_the_base_acts_and_the_newest_backs_up(monkeypatch):
    algorithm = build("expo", "algo.ema_decay=0.5")
    average, trained = algorithm.acting.policy, algorithm.policy
    for step in range(3):
        before = weights(average)
        algorithm.update_clone(rows(algorithm, "update_clone", seed=step))
        kept = min(0.5, (1 + step) / (10 + step))
        for name, weight in average.named_parameters():
            expected = kept * before[name] + (1 - kept) * trained.get_parameter(name)
            torch.testing.assert_close(weight, expected)
    sampled = []
    for policy in (average, trained):
        sample = policy.sample
        monkeypatch.setattr(
            policy, "sample", lambda *a, of=policy, call=sample, **o: sampled.append(of) or call(*a, **o)
        )
    act(algorithm, observed(), torch.zeros(5, *algorithm.acting.noise_shape))
    algorithm.update_critic(rows(algorithm, "update_critic"))
    assert [each is trained for each in sampled] == [False, True]
    algorithm.only_acting()
    assert algorithm.policy is average


def test_an_update_of_the_edits_moves_neither_base_nor_critics():
    algorithm = build("expo")
    parts = algorithm.policy, algorithm.critic
    before, editor = [weights(part) for part in parts], weights(algorithm.acting.editor)
    algorithm.update_edit(rows(algorithm, "update_edit"))
    assert_same(before, [weights(part) for part in parts])
    assert differences(editor, weights(algorithm.acting.editor))


def test_a_wrapped_policy_alone_is_led_as_its_algorithm_leads_it():
    algorithm = build("guided", "algo.weight=0")
    led = Led(algorithm.policy, algorithm.critic, weight=0.0, task_weight=1.0)
    noise = torch.randn(2, 5, *led.noise_shape)
    assert torch.equal(led.sample(observed(), noise=noise), algorithm.policy.sample(observed(), noise=noise))
