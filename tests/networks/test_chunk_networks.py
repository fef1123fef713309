"""What every network of config/network promises a head, whichever it is. They are found by glob."""

import pytest
import torch
from hydra.utils import instantiate
from serl_client import ConfigError
from torch import nn

from serl_launcher.networks.chunks import ChunkSizes
from tests.shared.models import CONFIG, config_of

NAMES = sorted(path.stem for path in (CONFIG / "network").glob("*.yaml"))
SMALL = [name for name in NAMES if f"{name}_tiny" not in NAMES]
WEIGHTS = {  # millions at a horizon of 16, an action of 7 numbers and two observations of 19
    "residual_mlp": 17.1, "chi_unet": 19.5, "janner_unet": 2.6, "chi_transformer": 20.3, "dit": 9.8, "lstm": 16.2,
}  # fmt: skip
CAUSAL = ("chi_transformer_tiny", "lstm_tiny")  # no step of a chunk depends on a later one
each = pytest.mark.parametrize("name", SMALL)

pytestmark = pytest.mark.usefixtures("one_thread")


def made(name, *words, horizon=8, times=1, history=2, device=None):
    """A network whose last layers are not zero, as they are after some updates."""
    torch.manual_seed(0)
    sizes = ChunkSizes(horizon=horizon, inputs=4, outputs=6, times=times, condition=5, history=history)
    with torch.device(device or "cpu"):
        network = instantiate(config_of(f"+network={name}", *words).network)(sizes)
    for weight in network.parameters():
        if device is None and not weight.any():
            nn.init.normal_(weight, std=0.1)
    return network


def inputs(network, count=3):
    torch.manual_seed(1)
    has = network.sizes
    sizes = (has.horizon, has.inputs), (has.times,), (has.history, has.condition)
    return [torch.randn(count, *sizes[0]), torch.rand(count, *sizes[1]), torch.randn(count, *sizes[2])]


@each
@pytest.mark.parametrize(("horizon", "times", "history"), [(1, 1, 1), (5, 2, 3), (16, 1, 2)])
def test_any_horizon_times_and_observations_fit_and_every_weight_learns(name, horizon, times, history):
    network = made(name, horizon=horizon, times=times, history=history)
    found = network(*inputs(network))
    assert found.shape == (3, horizon, 6)
    found.square().sum().backward()
    still = [key for key, weight in network.named_parameters() if weight.grad is None or not weight.grad.any()]
    lone = (".asks.", "weight_hh") if horizon == 1 else ()  # a lone step asks nobody else, and remembers nothing
    assert not [key for key in still if not any(part in key for part in lone)]


@each
def test_a_row_is_the_same_in_any_batch_and_all_that_it_is_given_matters(name):
    network = made(name)
    chunk, time, condition = inputs(network)
    whole = network(chunk, time, condition)
    for row in range(3):
        torch.testing.assert_close(network(*(part[row : row + 1] for part in (chunk, time, condition)))[0], whole[row])
    assert (network(chunk, time + 0.1, condition) != whole).all()
    for frame in range(2):
        changed = condition.clone()
        changed[:, frame] += 1
        assert (network(chunk, time, changed) != whole).all()
    for step in range(8):
        changed = chunk.clone()
        changed[:, step] += 1
        moved = (network(changed, time, condition) != whole).any(-1).all(0)
        assert moved[step:].any()
        assert moved[step]
        assert not moved[:step].any() if name in CAUSAL else moved[max(0, step - 2) : step + 3].all()


@each
@pytest.mark.slow
def test_derivatives_forward_are_those_that_the_network_says_it_has(name):
    network = made(name, times=2).double()
    chunk, time, condition = (part.double() for part in inputs(network))
    tangents = torch.randn_like(chunk), torch.randn_like(time)
    if not network.has_forward_derivative:
        return
    value, along = torch.func.jvp(lambda x, t: network(x, t, condition), (chunk, time), tangents)
    step = 1e-6
    ahead, behind = (network(chunk + s * tangents[0], time + s * tangents[1], condition) for s in (step, -step))
    torch.testing.assert_close(value, network(chunk, time, condition))
    torch.testing.assert_close(along, (ahead - behind) / (2 * step), atol=1e-4, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(NAMES) - set(SMALL)))
def test_full_sizes_are_those_of_the_papers(name):
    network = instantiate(config_of(f"+network={name}").network)
    with torch.device("meta"):
        made = network(ChunkSizes(horizon=16, inputs=7, outputs=7, times=1, condition=19, history=2))
        assert made(*(torch.empty(2, *shape) for shape in ((16, 7), (1,), (2, 19)))).shape == (2, 16, 7)
    assert sum(weight.numel() for weight in made.parameters()) / 1e6 == pytest.approx(WEIGHTS[name], abs=0.15)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["chi_unet_tiny", "network.kernel=4"], "an odd kernel"),
        (["chi_unet_tiny", "network.widths=[10]"], "multiples of 4"),
        (["dit_tiny", "network.heads=5"], "network.heads=5 does not divide network.width=64"),
    ],
)
def test_sizes_that_cannot_be_are_refused(words, told):
    with pytest.raises(ConfigError, match=told):
        made(*words)
