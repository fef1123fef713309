"""Finds the images that an algorithm sees through a frozen backbone alone, so that the replay encodes each once."""

from serl_client.errors import ConfigError
from serl_client.spec import Feature, Spec

from serl_launcher.algorithms.base import Algorithm
from serl_launcher.networks.augment import Augment
from serl_launcher.networks.backbone import Backbone
from serl_launcher.networks.vision import ObservationEncoder
from serl_launcher.policies.base import Policy
from serl_launcher.replay.encoded import Encoder


def backbones(algorithm: Algorithm) -> dict[str, Backbone]:
    """Return {image: the backbone through which every network of the algorithm sees it}.

    Raises ConfigError if another network wants its pixels, and if these are augmented.
    """
    found: dict[str, Backbone] = {}
    raw: set[str] = set()
    for module in algorithm.modules():
        if isinstance(module, ObservationEncoder):
            for name in module.images:
                backbone = module.backbone
                if backbone is None or not found.setdefault(name, backbone).says_as(backbone):
                    raw.add(name)
        elif isinstance(module, Policy) and not any(isinstance(each, ObservationEncoder) for each in module.modules()):
            raw.update(module.inputs)
    if mixed := sorted(found.keys() & raw):
        raise ConfigError(
            f"a part of the networks sees {mixed[0]} through a frozen backbone, and another one otherwise: give all "
            "encoders the same backbone, or none (policy.encoder.backbone=null)"
        )
    if found and isinstance(getattr(algorithm, "augment", None), Augment):
        raise ConfigError("a frozen backbone sees each image once, so none is shifted: say algo.augment=null")
    return found


def features(algorithm: Algorithm, spec: Spec) -> dict[str, Feature]:
    """Return {image: what a batch has in its place}."""
    return {name: each.feature(spec.observation[name].shape) for name, each in backbones(algorithm).items()}


def encoders(algorithm: Algorithm, spec: Spec, device: str) -> dict[str, Encoder]:
    """Return what the replay calls for these images, on this device."""
    found = backbones(algorithm)
    return {name: Encoder(each, found[name].encoder(device)) for name, each in features(algorithm, spec).items()}
