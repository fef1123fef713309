"""A frozen backbone says what torchvision's and transformers' own classes say, and nothing of it is trained or sent."""

import subprocess
import sys
from dataclasses import replace
from functools import partial

import pytest
import safetensors.torch
import torch
from serl_client import ConfigError

from serl_launcher.networks.backbone import Backbone
from serl_launcher.networks.vision import ObservationEncoder
from serl_launcher.replay.batches import blank
from serl_launcher.training import budget
from serl_launcher.training.encoders import backbones, encoders, features
from tests.shared.models import act, algorithm_of, batch, now, robot

pytest.importorskip("torchvision")
pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.slow]
TOP, WRIST = "observation.images.top", "observation.images.wrist"
SPEC = robot(states=2, reach=1, shape=(32, 48, 3), cameras=(WRIST, TOP))
RLPD = ("algo=rlpd_frozen", "policy.encoder.backbone.stages=1", "policy.encoder.backbone.features=24")
FLOW = ("algo=rejection_frozen", "policy.encoder.backbone.stages=1", "policy.network.hidden=[16]", "head.steps=2")
anything = partial(batch, SPEC, 6)
images = torch.randint(256, (5, 32, 48, 3), generator=torch.Generator().manual_seed(3), dtype=torch.uint8)


def resnet(name="resnet18"):
    from torchvision.models import resnet

    torch.manual_seed(5)
    made = getattr(resnet, name)(weights=None).eval()
    for layer in made.modules():
        if isinstance(layer, torch.nn.BatchNorm2d):  # of a network that has seen images
            layer.running_mean.uniform_(-0.1, 0.1)
            layer.running_var.uniform_(0.5, 2)
    return made


@pytest.fixture
def weights(tmp_path):
    torch.save(resnet().state_dict(), tmp_path / "resnet18.pth")
    return tmp_path / "resnet18.pth"


def seen(algorithm, update, spec=SPEC):
    """The same rows twice: with pixels, and with what the replay would have in their place."""
    raw = batch(spec, 6, window=algorithm.windows[update], seed=2)
    own = {name: each.encode for name, each in encoders(algorithm, spec, "cpu").items()}

    def encoded(observation):
        return observation and {
            name: torch.from_numpy(own[name](value.flatten(0, 1).numpy())).unflatten(0, value.shape[:2])
            if name in own
            else value
            for name, value in observation.items()
        }

    made = replace(raw, observation=encoded(raw.observation), next_observation=encoded(raw.next_observation))
    return raw, made


# -- what it says
@pytest.mark.parametrize("stages", [1, 3, 4])
@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_a_resnet_says_what_torchvisions_own_says_of_the_images_as_torchvision_normalises_them(
    weights, tmp_path, stages, suffix
):
    from torchvision.models.feature_extraction import create_feature_extractor
    from torchvision.transforms.functional import normalize

    if suffix == ".safetensors":
        weights = tmp_path / "resnet18.safetensors"
        safetensors.torch.save_file(resnet().state_dict(), weights)
    pixels = normalize(images.permute(0, 3, 1, 2) / 255, [0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
    extractor = create_feature_extractor(resnet(), [f"layer{stages}"])
    expected = extractor(pixels)[f"layer{stages}"].flatten(1).detach()
    found = Backbone(model="resnet18", weights=str(weights), stages=stages, features=None)(images)
    assert found.dtype == torch.float16
    assert (found.shape[1],) == Backbone(model="resnet18", weights=str(weights), stages=stages, features=None).feature(
        (32, 48, 3)
    ).shape
    torch.testing.assert_close(found.float(), expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))


def test_a_siglip_says_what_transformers_own_class_and_processor_say(tmp_path):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    config = transformers.SiglipVisionConfig(image_size=32, patch_size=8, **sizes)
    tower = transformers.SiglipVisionModel(config).eval()
    tower.save_pretrained(tmp_path)
    square = images[:, :, :32]
    processor = transformers.SiglipImageProcessor(size={"height": 32, "width": 32})
    pixels = processor(list(square.numpy()), return_tensors="pt")["pixel_values"]
    expected = tower(pixels).pooler_output.detach()
    made = Backbone(model="siglip", weights=str(tmp_path), stages=4, features=None)
    torch.testing.assert_close(made(square).float(), expected, rtol=2e-3, atol=2e-3)
    assert made(images).shape == (5, 16) == (5, *made.feature((32, 48, 3)).shape)


def test_the_projection_keeps_how_far_images_are_apart():
    whole, kept = (Backbone(model="resnet18", weights=None, stages=2, features=n) for n in (None, 1024))
    apart, there = (torch.cdist(each(images).float(), each(images).float()) for each in (whole, kept))
    ratio = (there / apart)[~torch.eye(5, dtype=torch.bool)]
    assert 0.8 < ratio.min() < ratio.max() < 1.25


def test_an_image_means_the_same_alone_in_a_batch_and_in_another_process():
    made = Backbone(model="resnet18", weights=None, stages=3, features=16)
    together = made(images)
    torch.testing.assert_close(together[2:3], made(images[2:3]), rtol=2e-3, atol=2e-3)
    again = (
        "import torch; torch.manual_seed(9); from serl_launcher.networks.backbone import Backbone\n"
        "made = Backbone(model='resnet18', weights=None, stages=3, features=16)\n"
        "print(bytes(made.get_extra_state().tolist()).hex())"
    )
    said = subprocess.run([sys.executable, "-c", again], check=True, capture_output=True, text=True).stdout
    assert said.strip() == bytes(made.get_extra_state().tolist()).hex()


# -- in an algorithm
@pytest.mark.parametrize("words", [RLPD, FLOW], ids=["rlpd", "hi-ors"])
def test_updates_from_features_are_those_from_pixels_and_the_backbone_is_not_trained_kept_or_sent(words):
    ours, theirs = algorithm_of(SPEC, *words, seed=0), algorithm_of(SPEC, *words, seed=0)
    for name in ours.windows:
        raw, encoded = seen(ours, name)
        for column in encoded.observation:
            assert encoded.observation[column].dtype in (torch.float16, torch.float32)
        left, right = getattr(ours, name)(encoded), getattr(theirs, name)(raw)
        left, right = (each[0] if isinstance(each, tuple) else each for each in (left, right))
        for metric in left:
            torch.testing.assert_close(left[metric], right[metric], rtol=1e-3, atol=1e-4)
    first = now(anything().observation)
    torch.testing.assert_close(act(ours, first), act(theirs, first), rtol=1e-3, atol=1e-4)
    sizes = [tensor.numel() for tensor in ours.acting.published().values()]
    assert sum(sizes) < 60_000 < sum(weight.numel() for weight in resnet().parameters())
    assert any(name.endswith("backbone._extra_state") for name in ours.acting.published())


def test_what_was_learned_on_another_backbone_is_refused_by_name(weights):
    there = algorithm_of(SPEC, *RLPD, f"policy.encoder.backbone.weights={weights}", seed=0)
    here = algorithm_of(SPEC, *RLPD, seed=0)
    with pytest.raises(ConfigError, match=r"another frozen backbone: give policy\.encoder\.backbone\.weights"):
        here.acting.load_published(there.acting.published())
    here.acting.load_published(algorithm_of(SPEC, *RLPD, seed=1).acting.published())


def test_all_cameras_of_all_networks_are_found_and_a_batch_of_zeros_has_their_shape():
    algorithm = algorithm_of(SPEC, *RLPD, seed=0)
    assert backbones(algorithm).keys() == {TOP, WRIST}
    assert {name: each.shape for name, each in features(algorithm, SPEC).items()} == {TOP: (24,), WRIST: (24,)}
    zeros = blank(SPEC, algorithm.windows["update"], 3, features(algorithm, SPEC))
    assert zeros.observation[TOP].shape == zeros.next_observation[WRIST].shape == (3, 1, 24)
    assert backbones(algorithm_of(SPEC, "algo=rlpd_pixels", seed=0)) == {}


# -- what is refused
def test_shifts_of_images_that_are_seen_once_are_refused():
    shift = "{_target_: serl_launcher.networks.augment.Augment, _partial_: true, shift: 2, brightness: 0, contrast: 0}"
    algorithm = algorithm_of(SPEC, *RLPD, f"algo.augment={shift}", seed=0)
    with pytest.raises(ConfigError, match=r"algo\.augment=null"):
        backbones(algorithm)


def test_networks_that_see_a_camera_in_two_ways_are_refused():
    algorithm = algorithm_of(SPEC, *FLOW, seed=0)
    algorithm.other = ObservationEncoder(SPEC, cameras=["top"])
    with pytest.raises(ConfigError, match=r"observation.images.top.*policy.encoder.backbone=null"):
        backbones(algorithm)


@pytest.mark.parametrize(
    ("options", "cure"),
    [
        ({"model": "resnet19"}, "say one of resnet18"),
        ({"stages": 5}, "1 to 4 stages"),
        ({"features": 0}, "at least 1 feature, or null"),
        ({"model": "siglip"}, r"say policy\.encoder\.backbone\.weights=FOLDER"),
        ({"model": "siglip", "weights": "/nowhere"}, "give the folder of a SigLIP model"),
        ({"weights": "/nowhere.pth"}, r"give torchvision's file.*there is no such file"),
    ],
)
def test_what_is_no_backbone_is_refused(options, cure):
    with pytest.raises(ConfigError, match=cure):
        Backbone(**{"model": "resnet18", "weights": None, "stages": 4, "features": None, **options})(images)


@pytest.mark.parametrize("content", ["resnet34", b"no weights", {"model": 1}])
def test_a_file_of_something_else_is_refused(tmp_path, content):
    file = tmp_path / "other.pth"
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        torch.save(resnet(content).state_dict() if isinstance(content, str) else content, file)
    with pytest.raises(ConfigError, match="give torchvision's file of this model"):
        Backbone(model="resnet18", weights=str(file), stages=4, features=None)(images)


def test_features_that_have_no_room_in_memory_are_refused():
    found = encoders(algorithm_of(SPEC, *RLPD, seed=0), SPEC, "cpu")
    budget.check_encoded(found, SPEC, {"online": 1000}, 10_000_000)
    with pytest.raises(ConfigError, match=r"plan\.sources\.online\.capacity=20000"):
        budget.check_encoded(found, SPEC, {"online": 1_000_000}, 10_000_000)
