"""What turns a robot's states and camera images into features: a small convolutional network per camera."""

from collections.abc import Sequence

import torch
from serl_client.errors import ConfigError
from serl_client.spec import Spec
from torch import Tensor, nn

from serl_launcher.networks.mlp import StateEncoder
from serl_launcher.types import Observation

IMAGES = "observation.images."
ALL = "all"
GROUP = 8  # channels that GroupNorm normalises together; BatchNorm would make an update depend on who is in the batch


class ImageTrunk(nn.Module):
    """Convolutions of stride 2, each followed by GroupNorm and ReLU; what they leave is flattened.

    uint8 [B, *shape] -> [B, size], for images of one `shape`, [height, width, channel]. `channels` has one entry per
    layer and says how many channels it puts out, a multiple of 8. Flattened maps move far more from one image to the
    next than the mean places of a spatial softmax do: on the arm, whose state alone nearly explains a demonstration,
    cloning looked at the images within a few hundred updates with these, and hardly at all with those.
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
    """The states of a Spec, normalised, beside `latent` features of each of its cameras.

    `cameras` names them as in `observation.images.<name>`; `all` are all that the Spec has, and none leaves the states.
    Each camera has a trunk of convolutions and a projection of what it sees to `latent` numbers within (-1, 1)
    (Yarats et al. 2021, arXiv 2107.09645). Raises ConfigError for a camera that the Spec lacks.
    """

    def __init__(
        self, spec: Spec, *, cameras: str | Sequence[str] = (), channels: Sequence[int] = (16, 32, 64, 64),
        latent: int = 50,
    ) -> None:  # fmt: skip
        super().__init__()
        images = _images(spec, [cameras] if isinstance(cameras, str) else cameras)
        has_state = any(feature.dtype.startswith("float") for feature in spec.observation.values())
        self.state = StateEncoder(spec) if has_state or not images else None
        states = self.state.sizes if self.state is not None else {}
        self.inputs = (*states, *images)
        self.size = sum(states.values()) + latent * len(images)
        self._images = images
        trunks = [ImageTrunk(spec.observation[name].shape, channels) for name in images]
        self.trunks = nn.ModuleList(trunks)
        self.projections = nn.ModuleList(
            nn.Sequential(nn.Linear(trunk.size, latent), nn.LayerNorm(latent), nn.Tanh()) for trunk in trunks
        )

    def forward(self, observation: Observation) -> Tensor:
        """{name: [B, ...]}, with or without a time axis of one step -> [B, size]."""
        features = [] if self.state is None else [self.state(observation)]
        for name, trunk, project in zip(self._images, self.trunks, self.projections, strict=True):
            image = observation[name]
            features.append(project(trunk(image.flatten(0, image.ndim - 4))))
        return torch.cat(features, -1)


def _images(spec: Spec, cameras: Sequence[str]) -> tuple[str, ...]:
    """The observations' names of these cameras, in the Spec's order of names."""
    there = sorted(name for name in spec.observation if name.startswith(IMAGES))
    if ALL in cameras:
        if not there:
            raise ConfigError(
                "the policy wants cameras and this robot has none: say task.cameras=true where the task offers it, "
                "or policy.encoder.cameras=[] for a policy over states alone"
            )
        return tuple(there)
    names = [IMAGES + camera for camera in cameras]
    if unknown := [camera for camera, name in zip(cameras, names, strict=True) if name not in there]:
        has = ", ".join(name.removeprefix(IMAGES) for name in there) or "none: say task.cameras=true"
        raise ConfigError(f"this robot has no camera {', '.join(unknown)}; it has {has}")
    return tuple(sorted(set(names)))
