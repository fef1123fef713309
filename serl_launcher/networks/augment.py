"""Augments the images of a batch: random shifts (DrQ), brightness and contrast.

Kostrikov et al. 2020, "Image Augmentation Is All You Need" (arXiv 2004.13649): without random shifts of a few pixels, a
critic of images overfits.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

import torch
from serl_client.errors import ConfigError
from serl_client.spec import IMAGES
from torch import Tensor

from serl_launcher.networks.seeded_noise import uniform
from serl_launcher.types import Batch

GREY = 127.5  # value that a change of contrast leaves as it is
STREAM = 1000  # of a row's random numbers; losses use streams below


@dataclass(frozen=True, slots=True)
class Augment:
    """Shift images at random, and change their brightness and contrast.

    shift: pixels, at most, up or down and left or right; the border is repeated. 0: no shift.
    brightness, contrast: 0 to 1; a value x draws a factor between 1 - x and 1 + x. 0: no change.

    Each row and camera has its own random numbers, and `next_observation` draws anew. The time steps of one window
    share them. Raises ConfigError for a shift below 0, and for a brightness or contrast outside 0 to 1.
    """

    shift: int
    brightness: float
    contrast: float

    def __post_init__(self) -> None:
        if self.shift < 0 or not (0 <= self.brightness <= 1 and 0 <= self.contrast <= 1):
            raise ConfigError(
                "augment: shift is a number of pixels, at least 0; brightness and contrast lie between 0 (unchanged) "
                f"and 1, not shift={self.shift}, brightness={self.brightness}, contrast={self.contrast}"
            )

    def __call__(self, batch: Batch) -> Batch:
        """Return the batch with changed images, uint8 [B, To, H, W, C]. Random numbers come from the rows' seeds."""
        following = batch.next_observation
        return replace(
            batch,
            observation=self._observation(batch.observation, batch.seed, STREAM),
            next_observation=None if following is None else self._observation(following, batch.seed, 2 * STREAM),
        )

    def _observation(self, observation: Mapping[str, Tensor], seed: Tensor, stream: int) -> dict[str, Tensor]:
        return {
            name: self._images(value, uniform(seed, (4,), stream + place)) if name.startswith(IMAGES) else value
            for place, (name, value) in enumerate(observation.items())
        }

    def _images(self, images: Tensor, drawn: Tensor) -> Tensor:
        """Change images [B, To, H, W, C] by `drawn` [B, 4] in (0, 1): down, right, brightness, contrast."""
        if self.shift:
            moved = (drawn[:, :2] * (2 * self.shift + 1)).floor().long() - self.shift
            images = shifted(images, *moved.T)
        if self.brightness or self.contrast:
            change = 2 * drawn[:, 2:] - 1
            images = coloured(images, 1 + self.brightness * change[:, 0], 1 + self.contrast * change[:, 1])
        return images


def augmentation(made: Callable[[], Augment] | None, inputs: Collection[str]) -> Callable[[Batch], Batch]:
    """Make the augmentation of a policy that reads the observations `inputs`; None: batches stay as they are. Raises
    ConfigError if `inputs` has no images."""
    if made is None:
        return lambda batch: batch
    if not any(name.startswith(IMAGES) for name in inputs):
        raise ConfigError(
            "augment changes images, and this policy sees none: say algo.augment=null, or a policy that sees "
            "(flow_pixels, gaussian_pixels, pi0) and a task with cameras"
        )
    return made()


def shifted(images: Tensor, down: Tensor, right: Tensor) -> Tensor:
    """Move images [B, T, H, W, C] by down [B] and right [B] pixels; repeat the border."""
    count, time, height, width, channels = images.shape
    rows = _positions(height, down.repeat_interleave(time))  # [B T, H]
    columns = _positions(width, right.repeat_interleave(time))  # [B T, W]
    image = torch.arange(count * time, device=images.device)[:, None, None]
    pixels = (image * height + rows[:, :, None]) * width + columns[:, None, :]  # [B T, H, W]
    return images.reshape(-1, channels).index_select(0, pixels.flatten()).view(images.shape)


def _positions(size: int, offset: Tensor) -> Tensor:
    """Return the source pixels of a line of `size` pixels that moves by offset [B] -> [B, size]."""
    return (torch.arange(size, device=offset.device) - offset[:, None]).clamp(0, size - 1)


def coloured(images: Tensor, brightness: Tensor, contrast: Tensor) -> Tensor:
    """Multiply images [B, ...] by brightness [B], then scale them about grey by contrast [B]; round, clip to 0..255."""
    scale, offset = (factor.view(-1, *[1] * (images.ndim - 1)) for factor in (brightness * contrast, 1 - contrast))
    return (images * scale).add_(GREY * offset + 0.5).clamp_(0, 255).to(torch.uint8)
