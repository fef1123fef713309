"""Encodes observations: states, and camera images by small convolutions (CNN) per camera, or a frozen backbone."""

from collections.abc import Sequence

import torch
from serl_client.errors import ConfigError
from serl_client.spec import IMAGES, Spec
from torch import Tensor, nn

from serl_launcher.networks.backbone import Backbone
from serl_launcher.networks.mlp import StateEncoder
from serl_launcher.types import Observation

ALL = "all"
GROUP = 8  # channels per group of GroupNorm; BatchNorm would make a row's result depend on the rest of the batch


class ImageTrunk(nn.Module):
    """Encode images by convolutions of stride 2, each with GroupNorm and ReLU: uint8 [B, *shape] -> [B, size].

    shape: [height, width, channel] of the images. channels: output channels of each layer, multiples of 8.

    The last maps are flattened, because they change much more from image to image than the mean positions of a spatial
    softmax. On the arm, whose state alone nearly explains a demonstration, cloning used the images within a few hundred
    updates with flattened maps, and hardly at all with a spatial softmax.
    Raises ConfigError for channels that are no multiple of 8.
    """

    def __init__(self, shape: Sequence[int], channels: Sequence[int]) -> None:
        if not channels or any(width % GROUP or width <= 0 for width in channels):
            raise ConfigError(f"channels={list(channels)}: give one multiple of {GROUP} per layer, as in [16, 32, 64]")
        height, width, inputs = shape
        layers: list[nn.Module] = []
        for outputs in channels:
            layers += [nn.Conv2d(inputs, outputs, 3, stride=2, padding=1)]
            layers += [nn.GroupNorm(outputs // GROUP, outputs), nn.ReLU()]
            height, width, inputs = (height + 1) // 2, (width + 1) // 2, outputs
        super().__init__()
        self.layers = nn.Sequential(*layers)
        self.size = height * width * inputs

    def forward(self, image: Tensor) -> Tensor:
        values = image.permute(0, 3, 1, 2).float() / 127.5 - 1  # [B, C, H, W], channels last in memory
        return self.layers(values).flatten(1)


class ObservationEncoder(nn.Module):
    """Concatenate the normalised states of a Spec and `latent` features of each camera.

    Each camera has its own convolutions and a projection to `latent` numbers in (-1, 1) (Yarats et al. 2021, arXiv
    2107.09645). With a backbone there is one such projection, of what that says of all cameras.
    cameras: names, as in `observation.images.<name>`; `all`: every camera of the Spec; empty: states alone.
    channels: as in ImageTrunk. latent: features per camera.
    backbone: a frozen network in the place of the convolutions; None: there is none.
    Raises ConfigError for a camera that the Spec lacks.
    """

    def __init__(
        self, spec: Spec, *, cameras: str | Sequence[str] = (), channels: Sequence[int] = (16, 32, 64, 64),
        latent: int = 50, backbone: Backbone | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        images = images_of(spec, [cameras] if isinstance(cameras, str) else cameras)
        has_state = any(feature.dtype.startswith("float") for feature in spec.observation.values())
        self.state = StateEncoder(spec) if has_state or not images else None
        states = self.state.sizes if self.state is not None else {}
        self.inputs = (*states, *images)
        self.images, self.backbone = images, backbone
        shapes = [spec.observation[name].shape for name in images]
        trunks = [] if backbone else [ImageTrunk(shape, channels) for shape in shapes]
        sizes = [each.size for each in trunks]
        if backbone and images:
            sizes = [sum(backbone.feature(shape).shape[0] for shape in shapes)]
        self.trunks = nn.ModuleList(trunks)
        self.projections = nn.ModuleList(
            nn.Sequential(nn.Linear(size, latent), nn.LayerNorm(latent), nn.Tanh()) for size in sizes
        )
        self.size = sum(states.values()) + latent * len(sizes)

    def forward(self, observation: Observation) -> Tensor:
        """Encode {name: [B, ...]}, with or without a time axis of one step -> [B, size].

        With a backbone an image may also be what that says of it, as in a batch: float16 [B, F].
        """
        features = [] if self.state is None else [self.state(observation)]
        images = [observation[name] for name in self.images]
        if self.backbone and images:
            seen = torch.cat([self.backbone(image) for image in images], -1)
            features.append(self.projections[0](seen.flatten(0, -2).float()))
        else:
            for image, trunk, project in zip(images, self.trunks, self.projections, strict=True):
                features.append(project(trunk(image.flatten(0, -4))))
        return features[0] if len(features) == 1 else torch.cat(features, -1)


def images_of(spec: Spec, cameras: Sequence[str]) -> tuple[str, ...]:
    """Return the names of these cameras' images in a Spec; `all`: of every camera. Raises as ObservationEncoder."""
    there = spec.images
    if ALL in cameras:
        if not there:
            raise ConfigError(
                "the policy needs cameras, and this robot has none: say task.cameras=true if the task offers it, "
                "or name no camera (policy.encoder.cameras=[]), to see states alone. A run that began without them "
                "stores none: say another run_dir=..."
            )
        return there
    names = [IMAGES + camera for camera in cameras]
    if unknown := [camera for camera, name in zip(cameras, names, strict=True) if name not in there]:
        has = ", ".join(name.removeprefix(IMAGES) for name in there)
        cure = f"name some of {has}" if has else "it has none: say task.cameras=true"
        raise ConfigError(f"this robot has no camera {', '.join(unknown)}; {cure}")
    return tuple(sorted(set(names)))
