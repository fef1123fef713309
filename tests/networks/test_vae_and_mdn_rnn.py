"""V and M of World Models beside closed forms, and as large as the published ones."""

import pytest
import torch
from serl_client.errors import ConfigError

from serl_launcher.networks.mdn_rnn import MDNRNN, unlikeliness
from serl_launcher.networks.vae import VAE, Pictures, drawn
from tests.shared.models import CAMERA, robot

pytestmark = pytest.mark.usefixtures("one_thread")


def size(module):
    return sum(weight.numel() for weight in module.parameters())


def test_they_have_as_many_weights_as_the_published_ones():
    assert size(VAE(3, 64, (32, 64, 128, 256), 32)) == 4_348_547
    assert size(MDNRNN(32, 3, 256, 5)) == 422_368


def test_a_picture_is_from_0_to_1():
    pictures = Pictures(robot(cameras=(CAMERA,)), ("all",), 16)
    image = torch.full((2, 16, 16, 3), 255, dtype=torch.uint8)
    image[1] = 0
    assert [each.unique().tolist() for each in pictures({CAMERA: image})] == [[1.0], [0.0]]


@pytest.mark.parametrize(("pixels", "widths"), [(64, (4, 4, 8, 8)), (32, (4, 4, 8))])
def test_the_losses_are_the_pictures_squared_error_and_the_divergence_of_at_least_half_a_nat_for_each_number(
    pixels, widths
):
    torch.manual_seed(0)
    vae, picture, noise = VAE(6, pixels, widths, 4), torch.rand(3, 6, pixels, pixels), torch.randn(3, 4)
    with torch.no_grad():
        vae.encoder.mean.bias.copy_(torch.tensor([3.0, -1.0, 0.5, 2.0]))
        vae.encoder.log_variance.bias.copy_(torch.tensor([0.0, -1.0, 0.3, 0.1]))
        mean, log_variance = vae.encoder(picture)
        error, divergence = vae(picture, noise)
        distribution = torch.distributions.Normal(mean, (0.5 * log_variance).exp())
        prior = torch.distributions.Normal(torch.zeros(4), torch.ones(4))
        expected = torch.distributions.kl_divergence(distribution, prior).sum(1)
        assert (expected > 2).all()
        torch.testing.assert_close(divergence, expected)
        seen = vae.decoder(mean + distribution.scale * noise)
        assert seen.shape == picture.shape
        torch.testing.assert_close(error, (seen - picture).square().sum((1, 2, 3)))
        for layer in (vae.encoder.mean, vae.encoder.log_variance):
            layer.weight.zero_()
            layer.bias.zero_()
        assert vae(picture, noise)[1].tolist() == [2.0] * 3


@pytest.mark.parametrize(("pixels", "widths"), [(48, (4, 4, 4)), (64, (4, 4, 4))])
def test_other_pictures_are_refused_with_the_sizes_that_there_are(pixels, widths):
    with pytest.raises(ConfigError, match="a picture is 64 with 4 widths or 32 with 3 widths"):
        VAE(3, pixels, widths, 4)


def test_cameras_of_any_size_become_one_picture_and_none_are_refused():
    other = "observation.images.wrist"
    spec = robot(cameras=(CAMERA, other), shape=(48, 96, 3))
    pictures = Pictures(spec, ["all"], 32)
    image = torch.zeros(2, 48, 96, 3, dtype=torch.uint8)
    image[:, :, 48:, 1] = 255
    seen = pictures({CAMERA: image, other: image * 0})
    assert seen.shape == (2, 6, 32, 32)
    assert seen[:, 1, :, 18:].min() > 0.99
    assert seen[:, 1, :, :14].max() < 0.01
    assert not seen[:, [0, 2, 3, 4, 5]].any()
    with pytest.raises(ConfigError, match="see pictures alone"):
        Pictures(spec, [], 32)


def test_the_likelihood_is_that_of_a_mixture_for_each_number_written_out():
    generator = torch.Generator().manual_seed(0)
    mixture, value = torch.randn(4, 7, 5, 3, generator=generator), torch.randn(4, 7, generator=generator)
    found = unlikeliness(mixture, value)
    for row in range(4):
        for number in range(7):
            logit, mean, log_std = mixture[row, number].double().unbind(-1)
            share, std = logit.exp() / logit.exp().sum(), log_std.exp()
            distance = (value[row, number] - mean) / std
            density = (share * (-distance.square() / 2).exp() / (std * (2 * torch.pi) ** 0.5)).sum()
            torch.testing.assert_close(found[row, number].double(), -density.log(), atol=1e-5, rtol=1e-5)
    assert unlikeliness(torch.tensor([[0.0, 0.0, -50.0]]), torch.tensor(1.0)).isinf()


def test_the_loss_is_of_the_next_code_given_all_before_it():
    torch.manual_seed(0)
    rnn, code, action = MDNRNN(3, 2, 8, 5), torch.randn(2, 6, 3), torch.rand(2, 5, 2)
    whole = rnn(code, action)
    assert whole.shape == (2, 5)
    memory, losses = None, []
    for step in range(5):
        hidden, memory = rnn.lstm(code[:, step : step + 1], action[:, step : step + 1], memory)
        losses.append(unlikeliness(rnn.mixture(hidden[:, 0]), code[:, step + 1]).mean(-1))
    torch.testing.assert_close(whole, torch.stack(losses, 1))
    later = code.clone()
    later[:, 4] += 1
    changed = rnn(later, action)
    assert torch.equal(changed[:, :3], whole[:, :3])
    assert (changed[:, 3:] != whole[:, 3:]).all()


def test_a_step_of_the_memory_is_that_of_an_lstm_whose_forget_gates_begin_open_by_one():
    torch.manual_seed(0)
    lstm = MDNRNN(3, 2, 4, 2).lstm
    code, action, hidden, cell = torch.randn(5, 3), torch.rand(5, 2), torch.randn(5, 4), torch.randn(5, 4)
    weights = torch.cat([lstm.cell.weight_ih_l0[:, :-1], lstm.cell.weight_hh_l0], 1)
    gates = (torch.cat([code, action, hidden], 1) @ weights.T).chunk(4, 1)
    kept = (gates[1] + 1).sigmoid() * cell + gates[0].sigmoid() * gates[2].tanh()
    found, memory = lstm(code[:, None], action[:, None], (hidden, cell))
    torch.testing.assert_close(memory, (gates[3].sigmoid() * kept.tanh(), kept))
    torch.testing.assert_close(found[:, 0], memory[0])


def test_a_code_is_drawn_by_its_mean_and_log_variance():
    noise = torch.tensor([1.0, -2.0])
    found = drawn(torch.tensor([1.0, 1.0]), torch.tensor([0.0, 2.0]).log() * 2, noise)
    torch.testing.assert_close(found, torch.tensor([1.0, 1.0 - 4.0]))
