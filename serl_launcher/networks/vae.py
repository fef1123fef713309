"""Builds V of World Models: a variational autoencoder (VAE) of pictures.

Kingma and Welling 2014 (arXiv 1312.6114), in the layers of Ha and Schmidhuber 2018, "World Models" (arXiv 1803.10122).
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from serl_client.errors import ConfigError
from serl_client.spec import Spec
from torch import Tensor, nn

from serl_launcher.networks.vision import images_of
from serl_launcher.types import Observation

KERNELS = {64: (5, 5, 6, 6), 32: (6, 4, 6)}  # picture size: of the decoder's layers, each of stride 2 from 1 x 1 on
FREE = 0.5  # nats for each code: a smaller divergence is not pressed down further


class Pictures(nn.Module):
    """Observations {name: [B, ...]} -> [B, C, size, size] in [0, 1]: all cameras, one behind the other in C.

    cameras: as in images_of. A picture of another size is resized, each pixel from all that it covers.
    """

    def __init__(self, spec: Spec, cameras: Sequence[str], size: int) -> None:
        super().__init__()
        self.names, self.size = images_of(spec, cameras), size
        if not self.names:
            raise ConfigError("algo.cameras=[]: World Models see pictures alone; say algo.cameras=[all]")
        self.channels = sum(spec.observation[name].shape[2] for name in self.names)

    def forward(self, observation: Observation) -> Tensor:
        return torch.cat([self._picture(observation[name]) for name in self.names], 1)

    def _picture(self, image: Tensor) -> Tensor:
        picture = image.permute(0, 3, 1, 2).float() / 255
        if picture.shape[2:] == (self.size, self.size):
            return picture
        return F.interpolate(picture, (self.size, self.size), mode="bilinear", antialias=True)


class Encoder(nn.Module):
    """Pictures [B, C, size, size] -> mean and log variance of the codes, [B, codes] each."""

    def __init__(self, inputs: int, size: int, widths: Sequence[int], codes: int) -> None:
        super().__init__()
        if size not in KERNELS or len(widths) != len(KERNELS[size]):
            sizes = " or ".join(f"{each} with {len(kernels)} widths" for each, kernels in KERNELS.items())
            raise ConfigError(f"algo.picture={size}, algo.widths={list(widths)}: a picture is {sizes}")
        layers: list[nn.Module] = []
        for before, width in zip((inputs, *widths), widths, strict=False):
            layers += [nn.Conv2d(before, width, 4, stride=2), nn.ReLU()]
        self.layers = nn.Sequential(*layers, nn.Flatten())  # 2 x 2 are left
        self.mean, self.log_variance = (nn.Linear(4 * widths[-1], codes) for _ in range(2))

    def forward(self, picture: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.layers(picture)
        return self.mean(hidden), self.log_variance(hidden)


class Decoder(nn.Module):
    """Codes [B, codes] -> pictures [B, C, size, size] in (0, 1)."""

    def __init__(self, outputs: int, size: int, widths: Sequence[int], codes: int) -> None:
        super().__init__()
        self.begin = nn.Linear(codes, 4 * widths[-1])
        sizes, layers = (4 * widths[-1], *reversed(widths[:-1]), outputs), list[nn.Module]()
        for before, width, kernel in zip(sizes, sizes[1:], KERNELS[size], strict=False):
            layers += [nn.ConvTranspose2d(before, width, kernel, stride=2), nn.ReLU()]
        self.layers = nn.Sequential(*layers[:-1], nn.Sigmoid())

    def forward(self, code: Tensor) -> Tensor:
        return self.layers(self.begin(code)[..., None, None])


class VAE(nn.Module):
    """Encoder and decoder, trained together; the module gives their losses.

    inputs: channels C. size: pixels, height and width. widths: channels of the convolutions. codes: numbers of a code.
    Raises ConfigError for a size or a number of widths that KERNELS has not.
    """

    def __init__(self, inputs: int, size: int, widths: Sequence[int], codes: int) -> None:
        super().__init__()
        self.encoder, self.decoder = Encoder(inputs, size, widths, codes), Decoder(inputs, size, widths, codes)

    def forward(self, picture: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Return each picture's squared error, summed over its pixels, and its divergence in nats [B].

        noise: [B, codes], standard normal. The divergence of all codes together is FREE for each of them at least.
        """
        mean, log_variance = self.encoder(picture)
        seen = self.decoder(drawn(mean, log_variance, noise))
        divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum(1)
        return (seen - picture).square().flatten(1).sum(1), divergence.clamp(min=FREE * mean.shape[1])


def drawn(mean: Tensor, log_variance: Tensor, noise: Tensor) -> Tensor:
    """Return the codes [...] that standard normal numbers [...] choose of their distribution."""
    return mean + (0.5 * log_variance).exp() * noise
