"""Encodes images by a pretrained network that is never trained: a ResNet of torchvision, or a SigLIP tower.

What such a network says of an image never changes. So the replay computes it once per stored image
(replay/encoded.py), as HIL-SERL's frozen ResNet (Luo et al. 2024, arXiv 2410.21845) could, and an update reads that
instead of the pixels. Checkpoints and published weights hold a digest of the network in its place.
"""

import hashlib
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from serl_client.errors import ConfigError
from serl_client.spec import Array, Feature
from torch import Tensor, nn
from torch.nn import functional

from serl_launcher.networks.hollow import apart

RESNETS = ("resnet18", "resnet34", "resnet50")
MODELS = (*RESNETS, "siglip")
STAGES = 4  # of a ResNet
IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # mean and deviation of its pixels, of 1
HALF = (0.5,) * 3
SEED = 0  # of the weights that no file gives
AT_ONCE = 256  # images


class Backbone(nn.Module):
    """Encode images, uint8 [..., height, width, 3] -> features, float16 [..., F]. Features stay as they are.

    model: one of MODELS. weights: torchvision's file (.pth or .safetensors) of a ResNet; the folder of a SigLIP model
        (config.json, model.safetensors); None: a ResNet with random weights, the same in each process.
    stages: of a ResNet that are run, 1 to 4. After s stages its maps have 1 / 2^(s+1) of the image's height and width.
        SigLIP gives the numbers of its attention pooling.
    features: F, numbers that a fixed random projection keeps of the flattened maps: distances between images stay
        about as they are (Johnson and Lindenstrauss 1984). None: all numbers are features.

    Its network is no submodule: it is loaded where it is asked, and all backbones with the same words share it.
    Raises ConfigError for another model, number of stages or of features, and for a SigLIP without a folder.
    """

    def __init__(self, *, model: str, weights: str | None, stages: int, features: int | None) -> None:
        super().__init__()
        if model not in MODELS or not 1 <= stages <= STAGES or (features is not None and features < 1):
            raise ConfigError(
                f"policy.encoder.backbone: model={model}, stages={stages}, features={features}: say one of "
                f"{', '.join(MODELS)}, 1 to {STAGES} stages, and at least 1 feature, or null for all"
            )
        if model == "siglip" and weights is None:
            raise ConfigError(
                "policy.encoder.backbone.model=siglip needs a SigLIP model: say policy.encoder.backbone.weights=FOLDER"
            )
        self.words = (model, None if weights is None else str(Path(weights).expanduser()), stages)
        self.features = features

    def forward(self, images: Tensor) -> Tensor:
        if images.is_floating_point():
            return images
        lead, images, device = images.shape[:-3], images.flatten(0, -4), str(images.device)
        network = _network(*self.words, device)
        size = _size(*self.words, tuple(images.shape[1:]))
        with torch.no_grad():
            parts = [network(part) for part in images.split(AT_ONCE)]
            if self.features is not None:
                parts = [part @ _projection(size, self.features, device) for part in parts]
        return torch.cat(parts).half().unflatten(0, lead)

    def feature(self, shape: Sequence[int]) -> Feature:
        """Return what is stored of an image of this shape."""
        return Feature((self.features or _size(*self.words, tuple(shape)),), "float16")

    def encoder(self, device: str) -> Callable[[Array], Array]:
        """Return what the replay calls: images [n, height, width, 3] -> features [n, F], computed on this device."""
        return lambda images: self(torch.from_numpy(images).to(device)).cpu().numpy()

    def says_as(self, other: "Backbone") -> bool:
        """Return whether both say the same of an image."""
        return (self.words, self.features) == (other.words, other.features)

    @property
    def nbytes(self) -> int:
        """Return the bytes of the network's weights."""
        return sum(weight.nbytes for weight in _network(*self.words, "cpu").parameters())

    def get_extra_state(self) -> Tensor:
        """Return the SHA-256 of the network's weights, uint8 [32]."""
        return _digest(*self.words)

    def set_extra_state(self, state: Tensor) -> None:
        """Raise ConfigError if this is another network's digest."""
        if not torch.equal(state.cpu(), self.get_extra_state()):
            raise ConfigError(
                "what was learned stands on another frozen backbone: give policy.encoder.backbone.weights of the same "
                "file as the learner's"
            )


@lru_cache(maxsize=4)
@apart
def _network(model: str, weights: str | None, stages: int, device: str) -> nn.Module:
    made = _siglip(weights) if model == "siglip" and weights else _resnet(model, weights, stages)
    return made.eval().requires_grad_(False).to(device)


@lru_cache(maxsize=16)
@apart
def _size(model: str, weights: str | None, stages: int, shape: tuple[int, ...]) -> int:
    """Return F for images of this shape."""
    with torch.no_grad():
        image = torch.zeros(1, *shape, dtype=torch.uint8)
        return _network(model, weights, stages, "cpu")(image).shape[1]


@lru_cache(maxsize=4)
@apart
def _projection(size: int, features: int, device: str) -> Tensor:
    """Return the random projection [size, features], the same in each process."""
    drawn = torch.randn(size, features, generator=torch.Generator().manual_seed(SEED))
    return drawn.div_(features**0.5).to(device)


@lru_cache(maxsize=4)
@apart
def _digest(model: str, weights: str | None, stages: int) -> Tensor:
    digest = hashlib.sha256()
    for name, tensor in sorted(_network(model, weights, stages, "cpu").state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.contiguous().numpy().data)
    return torch.tensor([*digest.digest()], dtype=torch.uint8)


def _resnet(model: str, weights: str | None, stages: int) -> nn.Module:
    try:
        from torchvision.models import resnet
    except ImportError:
        raise ConfigError("a frozen backbone needs the extra `vla`: . examples/install.sh --extra vla") from None
    with torch.random.fork_rng([]):
        torch.manual_seed(SEED)
        made: Any = getattr(resnet, model)(weights=None)
    if weights is not None:
        _load(made, Path(weights))
    layers = [made.conv1, made.bn1, made.relu, made.maxpool, *[getattr(made, f"layer{n + 1}") for n in range(stages)]]
    return nn.Sequential(Pixels(*IMAGENET), *layers, nn.Flatten())


def _load(network: nn.Module, file: Path) -> None:
    wants = (
        f"policy.encoder.backbone.weights={file}: give torchvision's file of this model, such as resnet18-f37072fd.pth"
    )
    if not file.is_file():
        raise ConfigError(f"{wants}; there is no such file")
    try:
        read = safetensors.torch.load_file if file.suffix == ".safetensors" else _unpickled
        network.load_state_dict(read(file))
    except Exception as error:  # unpickling raises what it likes
        raise ConfigError(f"{wants} ({str(error).splitlines()[0]})") from None


def _unpickled(file: Path) -> dict[str, Tensor]:
    return torch.load(file, "cpu", weights_only=True)


def _siglip(weights: str) -> nn.Module:
    try:
        from transformers import SiglipVisionModel
    except ImportError:
        raise ConfigError("a frozen backbone needs the extra `vla`: . examples/install.sh --extra vla") from None
    folder = Path(weights)
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"policy.encoder.backbone.weights={weights}: there is no config.json; give the folder of a SigLIP model"
        )
    tower: Any = SiglipVisionModel.from_pretrained(folder, local_files_only=True)
    return nn.Sequential(Pixels(HALF, HALF, tower.config.image_size), Pooled(tower))


class Pixels(nn.Module):
    """Normalise images, uint8 [B, H, W, 3] -> [B, 3, H, W], or [B, 3, side, side]."""

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Sequence[float], std: Sequence[float], side: int | None = None) -> None:
        super().__init__()
        self.register_buffer("mean", 255 * torch.tensor(mean).view(3, 1, 1))
        self.register_buffer("std", 255 * torch.tensor(std).view(3, 1, 1))
        self.side = side

    def forward(self, images: Tensor) -> Tensor:
        values = images.permute(0, 3, 1, 2).float()
        if self.side is not None and values.shape[-2:] != (self.side, self.side):
            values = functional.interpolate(values, (self.side, self.side), mode="bilinear", antialias=True)
        return (values - self.mean) / self.std


class Pooled(nn.Module):
    """A SigLIP tower's attention pooling: [B, 3, side, side] -> [B, width]."""

    def __init__(self, tower: nn.Module) -> None:
        super().__init__()
        self.tower = tower

    def forward(self, values: Tensor) -> Tensor:
        return self.tower(values).pooler_output
