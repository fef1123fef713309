"""The closed forms of DreamerV3's networks: its states, what it predicts, and how large it is."""

import math

import pytest
import torch
from serl_client import ConfigError, Feature, Spec

from serl_launcher.algorithms.dreamer_rules import RULES
from serl_launcher.networks.rssm import RSSM, BlockLinear, Categorical, Gaussian, one_hot
from serl_launcher.networks.world_heads import Choice, Decoder, Encoder, Inputs, Mean, Normal, Scalar

pytestmark = pytest.mark.usefixtures("one_thread")

SIZES = {"deter": 16, "hidden": 8, "variables": 5, "classes": 4, "blocks": 8}


@pytest.fixture
def rssm():
    torch.manual_seed(0)
    return RSSM(6, 2, **SIZES)


@pytest.fixture
def scalar():
    return Scalar(3, 8, 1)


def state(rssm, rows=3):
    return torch.randn(rows, 16), one_hot(torch.randint(4, (rows, 5)), 4)


def test_a_first_observation_makes_a_state_that_knows_of_nothing_before_it(rssm):
    tokens, chance, first = torch.randn(3, 6), torch.rand(3, 5), torch.tensor([True, True, False])
    found = [rssm.observe(state(rssm), torch.randn(3, 2), first, tokens, chance) for _ in range(2)]
    for one, other in zip((*found[0][0], found[0][1]), (*found[1][0], found[1][1]), strict=True):
        assert torch.equal(one[:2], other[:2])
    assert not torch.equal(found[0][1][2], found[1][1][2])
    begun = rssm.observe(rssm.begin(3), torch.zeros(3, 2), ~first, tokens, chance)[1]
    assert torch.equal(begun[:2], found[0][1][:2])


def test_an_action_beyond_one_counts_as_one(rssm):
    before = state(rssm, 1)
    assert torch.equal(rssm.step(before, torch.tensor([[5.0, 0.5]])), rssm.step(before, torch.tensor([[1.0, 0.5]])))


def test_no_class_is_less_likely_than_unimix_says(rssm):
    with torch.no_grad():
        rssm.prior_layers[-1].bias[0] += 1000
    probs = rssm.prior(torch.zeros(1, 16)).exp()
    torch.testing.assert_close(probs.sum(-1), torch.ones(1, 5))
    torch.testing.assert_close(probs[0, 0], torch.tensor([0.99 + 0.01 / 4, *[0.01 / 4] * 3]))


def test_variables_are_drawn_as_often_as_they_are_likely_and_have_the_gradient_of_that():
    log_probs = torch.tensor([0.5, 0.3, 0.2]).log().expand(1, 3).requires_grad_()
    uniform = (torch.arange(1000) + 0.5)[:, None] / 1000
    found = Categorical(0.0).drawn(log_probs.expand(1000, 1, 3), uniform)
    assert set(found.detach().unique().tolist()) == {0.0, 1.0}
    torch.testing.assert_close(found.detach().mean((0, 1)), torch.tensor([0.5, 0.3, 0.2]), atol=2e-3, rtol=0)
    (gradient,) = torch.autograd.grad(found[..., 0].mean(), log_probs)
    torch.testing.assert_close(gradient, torch.tensor([[0.5, 0.0, 0.0]]))
    assert Categorical(0.0).likeliest(log_probs)[0].tolist() == [1, 0, 0]
    assert torch.equal(Categorical(0.0).restored(Categorical(0.0).kept(found), 3), found.detach())
    assert one_hot(torch.tensor([-1]), 3).tolist() == [[0, 0, 0]]


def test_free_nats_count_for_each_row_after_the_sum_over_its_variables():
    far, near, even = torch.tensor([[0.97, 0.03], [0.6, 0.4], [0.5, 0.5]]).log()
    posterior = torch.stack([far.expand(4, 2), near.expand(4, 2)]).requires_grad_()
    prior = even.expand(2, 4, 2).clone().requires_grad_()
    exact = 0.97 * math.log(0.97 / 0.5) + 0.03 * math.log(0.03 / 0.5)
    assert exact < 1 < 4 * exact  # one variable alone would be free
    torch.testing.assert_close(Categorical(0.0).kl(posterior, prior)[0].item(), 4 * exact, rtol=1e-5, atol=0)
    dynamics, representation = RULES["v3"].divergence(posterior, prior)
    torch.testing.assert_close(dynamics, torch.tensor([4 * exact, 1.0]))
    assert torch.equal(dynamics, representation)
    for loss, moves, stays in ((dynamics, prior, posterior), (representation, posterior, prior)):
        gradient, none = torch.autograd.grad(loss.sum(), [moves, stays], allow_unused=True)
        assert none is None
        assert gradient[0].abs().min() > 0 == gradient[1].abs().max()


def test_blocks_do_not_see_each_other():
    layer, seen = BlockLinear(8, 4, 2), torch.randn(1, 2, 4)
    changed = seen.clone()
    changed[:, 1] += 1
    same = (layer(seen) == layer(changed))[0].tolist()
    assert same == [True, True, False, False]


@pytest.mark.parametrize("value", [0.0, 0.3, -0.3, 17.0, -17.0, 4e8, -4e8])
def test_a_number_is_what_its_two_bins_say(scalar, value):
    below, share = scalar.shares(torch.tensor(value))
    logits = torch.full((255,), -1e9)
    logits[below], logits[below + 1] = (1 - share).log().clamp(min=-1e9), share.log().clamp(min=-1e9)
    torch.testing.assert_close(scalar.mean(logits).item(), value, rtol=1e-5, atol=1e-6)
    entropy = -((1 - share).xlogy(1 - share) + share.xlogy(share))
    torch.testing.assert_close(scalar.loss(logits, torch.tensor(value)), entropy)


def test_bins_share_a_number_by_nearness_and_the_outermost_keep_what_is_beyond(scalar):
    bins = scalar.bins
    assert torch.equal(bins, -bins.flip(0))
    torch.testing.assert_close(bins[[0, 127, 254]].tolist(), [-math.expm1(20), 0.0, math.expm1(20)])
    middle = (3 * bins[200] + bins[201]) / 4
    below, share = scalar.shares(torch.stack([bins[7], middle, bins[254], bins[254] * 2, bins[0] * 2]))
    torch.testing.assert_close(below + share, torch.tensor([7.0, 200.25, 254.0, 254.0, 0.0]))


def test_a_new_head_says_exactly_zero(scalar):
    assert scalar.mean(scalar(torch.randn(100, 3) * 10)).tolist() == [0.0] * 100
    assert scalar.mean(torch.full((255,), 3.7)) == 0


def test_actions_are_of_a_bounded_normal():
    policy = Normal(3, 8, 3, 2)
    described = policy(torch.randn(50, 3) * 100)
    mean, std = described.unbind(-2)
    torch.testing.assert_close(std, torch.full_like(std, 0.1 + 0.9 / (1 + math.exp(-2))), atol=0.05, rtol=0)
    reference = torch.distributions.Normal(mean, std)
    action = torch.randn(50, 2)
    torch.testing.assert_close(policy.log_density(described, action), reference.log_prob(action).sum(-1))
    torch.testing.assert_close(policy.entropy(described), reference.entropy().sum(-1))
    wider = torch.distributions.Normal(mean, (std**2 + 0.09).sqrt())
    found = policy.log_density(policy.widened(described, 0.3), action)
    torch.testing.assert_close(found, wider.log_prob(action).sum(-1))


def test_a_choice_is_drawn_as_often_as_it_is_likely_and_none_is_impossible():
    policy = Choice(3, 8, 1, 4)
    with torch.no_grad():
        policy.layers[-1].weight.zero_()
        policy.layers[-1].bias.copy_(torch.tensor([0.0, math.log(2), -1000, 0.0]))
    described = policy(torch.randn(1, 3))
    expected = 0.99 * torch.tensor([0.25, 0.5, 0.0, 0.25]) + 0.01 / 4
    torch.testing.assert_close(described.exp()[0], expected)
    quantiles = torch.special.ndtri((torch.arange(4000) + 0.5) / 4000).float()[:, None]
    action = policy.drawn(described.expand(4000, 4), quantiles).detach()
    assert (action.sum(-1) == 1).all()
    torch.testing.assert_close(action.mean(0), expected, atol=1e-3, rtol=0)
    reference = torch.distributions.OneHotCategorical(expected)
    torch.testing.assert_close(policy.log_density(described, action), reference.log_prob(action))
    torch.testing.assert_close(policy.entropy(described), reference.entropy().expand(1))
    assert policy.likeliest(described).tolist() == [[0, 1, 0, 0]]


def test_normal_variables_diverge_and_are_drawn_as_normals_do():
    latent, numbers = Gaussian(), torch.randn(2, 7, 5, 2)
    one, other = (latent.described(each) for each in numbers)
    first, second = (torch.distributions.Normal(*each.unbind(-1)) for each in (one, other))
    assert (first.stddev > 0.1).all()
    torch.testing.assert_close(latent.kl(one, other), torch.distributions.kl_divergence(first, second).sum(-1))
    chance = torch.rand(7, 5) * 0.98 + 0.01
    found = latent.drawn(one, chance)
    torch.testing.assert_close(found.squeeze(-1), first.icdf(chance))
    torch.testing.assert_close(latent.restored(latent.kept(found), 1), found, atol=4e-3, rtol=1e-3)
    assert torch.equal(latent.likeliest(one).squeeze(-1), first.mean)


@pytest.mark.parametrize(("variant", "free", "shares"), [("v2", 1.0, (0.8, 0.2)), ("v1", 3.0, (1.0, 1.0))])
def test_in_older_versions_the_mean_divergence_is_free_and_not_each_rows(variant, free, shares):
    rules, far, near = RULES[variant], torch.full((1, 2, 3, 2), 2.0), torch.zeros(1, 2, 3, 2)
    far[..., 0] = 9.0
    near[:, 1] = far[:, 1]  # only the first row diverges
    posterior, prior = rules.latent.described(far), rules.latent.described(near)
    mean = rules.latent.kl(posterior, prior)[0, 0] / 2
    assert mean > free
    for found in rules.divergence(posterior, prior):
        torch.testing.assert_close(found, mean)
    assert [float(found) for found in rules.divergence(posterior, posterior)] == [free, free]
    assert (rules.dynamics, rules.representation) == shares


def test_the_older_versions_numbers_are_means_of_normals():
    head = Mean(3, 8, 1)
    told = head(torch.randn(4, 3))
    assert head.mean(told).tolist() == [0.0] * 4
    torch.testing.assert_close(head.loss(told, torch.tensor([0.0, 1.0, -2.0, 3.0])), torch.tensor([0, 0.5, 2, 4.5]))


def seen(shape, **more):
    return Spec({"observation.images.top": Feature(shape, "uint8"), **more}, Feature((2,), low=-1, high=1), fps=10.0)


def test_images_and_vectors_are_encoded_and_predicted():
    torch.manual_seed(0)
    spec = seen((16, 32, 3), **{"observation.state": Feature((3,))})
    inputs = Inputs(spec, ["top"])
    encoder = Encoder(inputs, units=8, depth=4)
    decoder = Decoder(inputs, 16, 20, units=8, depth=4, blocks=8)
    image = (torch.arange(32) * 8).to(torch.uint8)[:, None].expand(5, 16, 32, 3)  # brighter to the right
    observation = {"observation.images.top": image, "observation.state": torch.randn(5, 3) * 1000}
    assert encoder(observation).shape == (5, encoder.size) == (5, 8 + 2 * 16)
    deter, stoch = torch.randn(5, 16), torch.randn(5, 5, 4)
    rate = torch.optim.Adam(decoder.parameters(), 3e-2)
    losses = [decoder(deter, stoch, observation)]
    for _ in range(10):
        rate.zero_grad()
        losses[-1].sum().backward()
        rate.step()
        losses.append(decoder(deter, stoch, observation))
    assert (losses[-1] < 0.5 * losses[0]).all()
    plain = (decoder.cameras[0](deter, stoch.flatten(1)) - image / 255).square().sum((1, 2, 3))
    vector = decoder.layers(torch.cat([stoch.flatten(1), deter], 1)) - inputs.vector(observation)
    torch.testing.assert_close(losses[-1], plain + vector.square().sum(1))
    raw = observation["observation.state"]
    torch.testing.assert_close(inputs.vector(observation), raw.sign() * raw.abs().log1p())


def test_an_image_that_cannot_be_halved_four_times_is_refused_and_so_is_nothing():
    with pytest.raises(ConfigError, match=r"40x64: .* multiples of 16"):
        Inputs(seen((40, 64, 3)), ["all"])
    with pytest.raises(ConfigError, match=r"name a camera in algo\.cameras"):
        Inputs(seen((64, 64, 3)), [])
