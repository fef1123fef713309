"""Builds Dreamer's encoder, decoder, and heads of rewards, of continuing and of actions (continuous or a choice of N).

Sources as in rssm.py. DreamerV3 sees and predicts vectors as symlog(x) = sign(x) ln(1 + |x|), and images as x / 255.
"""

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from serl_client.errors import ConfigError
from serl_client.spec import Spec
from torch import Tensor, nn

from serl_launcher.networks.critics import symlog
from serl_launcher.networks.rssm import EPSILON, UNIMIX, BlockLinear, Categorical, Layers, layers, linear
from serl_launcher.networks.vision import images_of
from serl_launcher.types import Observation

REACH = 20  # symlog of the outermost bins
HALVINGS = 4  # of an image
KERNEL = 5
DEPTHS = (2, 3, 4, 4)  # channels of each scale, times `depth`


class Inputs:
    """Which observations of a Spec are seen: its float ones, joined and sorted by name, and the images of some cameras.

    sizes: {name: numbers of it}. images: {name: [height, width, channel]}. squash: of vectors, before they are seen.
    Raises ConfigError for a camera that the Spec lacks, images whose sides are no multiples of 16, and for neither.
    """

    def __init__(self, spec: Spec, cameras: Sequence[str], squash: Callable[[Tensor], Tensor] = symlog) -> None:
        self.squash = squash
        floats = sorted(name for name, feature in spec.observation.items() if feature.dtype.startswith("float"))
        self.sizes = {name: math.prod(spec.observation[name].shape) for name in floats}
        self.images = {name: spec.observation[name].shape for name in images_of(spec, cameras)}
        if not self.sizes and not self.images:
            raise ConfigError(f"algo=dreamer sees none of {sorted(spec.observation)}: name a camera in algo.cameras")
        for name, (height, width, _) in self.images.items():
            if height % 2**HALVINGS or width % 2**HALVINGS:
                raise ConfigError(f"{name} is {height}x{width}: algo=dreamer halves images {HALVINGS} times, so give "
                                  f"it sides that are multiples of {2**HALVINGS}, such as 64")  # fmt: skip

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.sizes, *self.images)

    def vector(self, observation: Observation) -> Tensor:
        """Return the floats, squashed, [N, sum of sizes], of observations {name: [N, *shape]}."""
        return self.squash(
            torch.cat([observation[name].float().reshape(len(observation[name]), -1) for name in self.sizes], -1)
        )


class Channels(nn.Module):
    """RMSNorm over the channels of images [N, C, H, W], then SiLU."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(channels, EPSILON)

    def forward(self, image: Tensor) -> Tensor:
        return F.silu(self.norm(image.movedim(-3, -1)).movedim(-1, -3))


def convolution(inputs: int, outputs: int) -> nn.Conv2d:
    made = nn.Conv2d(inputs, outputs, KERNEL, padding="same")
    with torch.no_grad():
        made.weight.copy_(linear(inputs * KERNEL**2, outputs).weight.view_as(made.weight))
        made.bias.zero_()  # type: ignore[union-attr]
    return made


class Encoder(nn.Module):
    """Encode observations {name: [N, ...]} -> tokens [N, size].

    units: width of the three layers over vectors. depth: see DEPTHS; four convolutions, each halved by its maxima.
    """

    def __init__(self, inputs: Inputs, *, units: int, depth: int, make: Layers = layers) -> None:
        super().__init__()
        self.inputs, numbers = inputs, sum(inputs.sizes.values())
        self.layers = make(numbers, units, 3) if numbers else None
        self.cameras = nn.ModuleList(self._camera(shape[2], depth) for shape in inputs.images.values())
        corners = [height * width // 4**HALVINGS for height, width, _ in inputs.images.values()]
        self.size = units * bool(numbers) + sum(corners) * depth * DEPTHS[-1]

    @staticmethod
    def _camera(channels: int, depth: int) -> nn.Sequential:
        made: list[nn.Module] = []
        for width in DEPTHS:
            made += [convolution(channels, width * depth), nn.MaxPool2d(2), Channels(width * depth)]
            channels = width * depth
        return nn.Sequential(*made, nn.Flatten())

    def forward(self, observation: Observation) -> Tensor:
        tokens = [] if self.layers is None else [self.layers(self.inputs.vector(observation))]
        for name, camera in zip(self.inputs.images, self.cameras, strict=True):
            tokens.append(camera(observation[name].movedim(-1, -3).float() / 255 - 0.5))
        return torch.cat(tokens, -1)


class ImageDecoder(nn.Module):
    """Predict an image [N, H, W, channel] in (0, 1) from deter [N, D] and stoch [N, S]."""

    def __init__(
        self, shape: Sequence[int], deter: int, stoch: int, *, units: int, depth: int, blocks: int
    ) -> None:  # fmt: skip
        super().__init__()
        height, width, channels = shape
        self.blocks, self.shape = blocks, (height // 2**HALVINGS, width // 2**HALVINGS, depth * DEPTHS[-1])
        size = math.prod(self.shape)
        self.deter = BlockLinear(deter, size, blocks)
        self.stoch = nn.Sequential(layers(stoch, 2 * units, 1), linear(2 * units, size))
        self.first = Channels(depth * DEPTHS[-1])
        made, inputs = list[nn.Module](), depth * DEPTHS[-1]
        for scale in reversed(DEPTHS[:-1]):
            made += [nn.Upsample(scale_factor=2), convolution(inputs, scale * depth), Channels(scale * depth)]
            inputs = scale * depth
        self.scales = nn.Sequential(*made, nn.Upsample(scale_factor=2), convolution(inputs, channels))

    def forward(self, deter: Tensor, stoch: Tensor) -> Tensor:
        height, width, channels = self.shape
        blocks = self.deter(deter.unflatten(-1, (self.blocks, -1)))
        blocks = blocks.view(-1, self.blocks, height, width, channels // self.blocks)  # each block has own channels
        own = blocks.permute(0, 1, 4, 2, 3).flatten(1, 2)
        return (
            self.scales(self.first(own + self.stoch(stoch).view(-1, channels, height, width))).sigmoid().movedim(-3, -1)
        )


class Decoder(nn.Module):
    """The loss [N] of predicting observations from deter [N, D] and stoch [N, V, C].

    Squared errors of the squashed vectors and of images / 255, summed over all numbers.
    """

    def __init__(
        self, inputs: Inputs, deter: int, stoch: int, *, units: int, depth: int, blocks: int, make: Layers = layers
    ) -> None:  # fmt: skip
        super().__init__()
        self.inputs, numbers = inputs, sum(inputs.sizes.values())
        self.layers = nn.Sequential(make(deter + stoch, units, 3), linear(units, numbers)) if numbers else None
        self.cameras = nn.ModuleList(
            ImageDecoder(shape, deter, stoch, units=units, depth=depth, blocks=blocks)
            for shape in inputs.images.values()
        )

    def forward(self, deter: Tensor, stoch: Tensor, observation: Observation) -> Tensor:
        stoch, loss = stoch.flatten(-2), deter.new_zeros(len(deter))
        if self.layers is not None:
            error = self.layers(torch.cat([stoch, deter], -1)) - self.inputs.vector(observation)
            loss = loss + error.square().sum(-1)
        for name, camera in zip(self.inputs.images, self.cameras, strict=True):
            loss = loss + (camera(deter, stoch) - observation[name].float() / 255).square().flatten(1).sum(1)
        return loss


class Scalar(nn.Module):
    """A number [...] as logits [..., bins] over symexp(-20 .. 20), which are dense around 0; at first exactly 0.

    count, width: of the layers before, which `make` makes.
    """

    bins: Tensor

    def __init__(self, inputs: int, width: int, count: int, make: Layers = layers, bins: int = 255) -> None:
        super().__init__()
        self.layers = nn.Sequential(make(inputs, width, count), linear(width, bins, 0))
        half = torch.linspace(-REACH, 0, bins // 2 + 1, dtype=torch.float64)
        low = -(half.abs().exp() - 1)
        self.register_buffer("bins", torch.cat([low, -low[:-1].flip(0)]).float(), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(inputs)

    def mean(self, logits: Tensor) -> Tensor:
        """Return the bins' mean. Each is added to its mirror image first, so that equal ones cancel exactly."""
        parts, half = logits.softmax(-1) * self.bins, len(self.bins) // 2
        return (parts[..., :half].flip(-1) + parts[..., half + 1 :]).sum(-1) + parts[..., half]

    def loss(self, logits: Tensor, target: Tensor) -> Tensor:
        """Compute the cross entropy [...] to the two bins around each target [...], which share it by nearness."""
        below, share = self.shares(target)
        log_probs = logits.log_softmax(-1)
        low, high = (log_probs.gather(-1, index.unsqueeze(-1)).squeeze(-1) for index in (below, below + 1))
        return -((1 - share) * low + share * high)

    def shares(self, target: Tensor) -> tuple[Tensor, Tensor]:
        """Return for each target [...] the bin below it and the share of the one above, at most 1."""
        below = (torch.searchsorted(self.bins, target.contiguous(), right=True) - 1).clamp(0, len(self.bins) - 2)
        low, high = self.bins[below], self.bins[below + 1]
        return below, ((target - low) / (high - low)).clamp(0, 1)


class Mean(nn.Module):
    """A number [...] as the mean [..., 1] of a normal with variance 1; at first 0. See Scalar, whose methods it has."""

    def __init__(self, inputs: int, width: int, count: int, make: Layers = layers) -> None:
        super().__init__()
        self.layers = nn.Sequential(make(inputs, width, count), linear(width, 1, 0))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(inputs)

    def mean(self, mean: Tensor) -> Tensor:
        return mean.squeeze(-1)

    def loss(self, mean: Tensor, target: Tensor) -> Tensor:
        """Compute half of the squared error [...]."""
        return 0.5 * (mean.squeeze(-1) - target).square()


class Normal(nn.Module):
    """A normal of actions [..., A]: the mean is a tanh, the standard deviation between 0.1 and 1.

    Its description is both, [..., 2, A]. `chances`: standard normal numbers of one draw.
    """

    def __init__(self, inputs: int, width: int, count: int, actions: int, make: Layers = layers) -> None:
        super().__init__()
        self.chances = actions
        self.layers = make(inputs, width, count)
        self.mean, self.std = linear(width, actions, 0.01), linear(width, actions, 0.01)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.layers(inputs)
        return torch.stack([self.mean(hidden).tanh(), 0.1 + 0.9 * (self.std(hidden) + 2).sigmoid()], -2)

    def drawn(self, described: Tensor, noise: Tensor) -> Tensor:
        """Draw actions [..., A], differentiably, by standard normal numbers [..., chances]."""
        mean, std = described.unbind(-2)
        return mean + std * noise

    def likeliest(self, described: Tensor) -> Tensor:
        return described[..., 0, :]

    def widened(self, described: Tensor, noise: float) -> Tensor:
        """Return what normal noise of this standard deviation makes of it."""
        mean, std = described.unbind(-2)
        return torch.stack([mean, (std.square() + noise**2).sqrt()], -2)

    def log_density(self, described: Tensor, action: Tensor) -> Tensor:
        """Return log p(action), summed over the dimensions -> [...]."""
        mean, std = described.unbind(-2)
        return (-0.5 * ((action - mean) / std).square() - std.log() - 0.5 * math.log(2 * math.pi)).sum(-1)

    def entropy(self, described: Tensor) -> Tensor:
        """Return the entropy in nats, summed over the dimensions -> [...]."""
        return (described[..., 1, :].log() + 0.5 * math.log(2 * math.pi * math.e)).sum(-1)


class Choice(nn.Module):
    """A choice among A actions, one-hot [..., A], each with a probability of at least 0.01 / A. See Normal.

    Its description is the log probabilities [..., A].
    """

    chances = 1

    def __init__(self, inputs: int, width: int, count: int, actions: int, make: Layers = layers) -> None:
        super().__init__()
        self.layers = nn.Sequential(make(inputs, width, count), linear(width, actions, 0.01))
        self._latent = Categorical(UNIMIX)

    def forward(self, inputs: Tensor) -> Tensor:
        return self._latent.described(self.layers(inputs))

    def drawn(self, described: Tensor, noise: Tensor) -> Tensor:
        return self._latent.drawn(described, torch.special.ndtr(noise.squeeze(-1)))

    def likeliest(self, described: Tensor) -> Tensor:
        return self._latent.likeliest(described)

    def log_density(self, described: Tensor, action: Tensor) -> Tensor:
        return (described * action).sum(-1)

    def entropy(self, described: Tensor) -> Tensor:
        return -(described.exp() * described).sum(-1)
