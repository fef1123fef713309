"""Our PI0 as a policy of lerobot 0.6, beside lerobot's own class on the same weights and inputs."""

import json
from dataclasses import replace

import pytest
import torch
from hydra.utils import instantiate
from serl_client import ConfigError, Feature

from serl_launcher.networks.mlp import Normaliser
from serl_launcher.policies import pi0_lerobot
from serl_launcher.types import Window
from tests.shared import lerobot_policies as small
from tests.shared.common import STATE
from tests.shared.lerobot_policies import FITTED, SIDE, SPEC, TOP, change
from tests.shared.models import batch, config_of
from tests.shared.pi0 import randomise

pytest.importorskip("lerobot", reason="the extra `data` is not installed: . examples/install.sh --extra data")
pytestmark = [
    pytest.mark.slow, pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(not small.HAS_PI, reason="lerobot 0.6 on Python 3.12"),
]  # fmt: skip
NAMES = ("pan", "lift", "flex", "gripper", "load")
NAMED = replace(
    SPEC, observation={**SPEC.observation, STATE: Feature((5,), names=NAMES)},
    action=replace(SPEC.action, names=NAMES[:4]),
)  # fmt: skip


@pytest.fixture
def our_pi0(words, monkeypatch):
    """Makes a small PI0 of ours with random weights and the tokenizer of lerobot's small ones."""
    sizes = {"width": 32, "mlp": 64, "expert_width": 32, "expert_mlp": 64, "depth": 2, "heads": 8, "head_dim": 8}
    known = {"gemma": {**sizes, "kv_heads": 1, "vocabulary": 300}, "horizon": 6, "width": 32, "resize": "plain"}
    monkeypatch.setattr(pi0_lerobot, "VARIANTS", {(32, 64): "gemma_2b"})

    def made(spec=SPEC, image=28, **options):
        vision = {"width": 16, "depth": 1, "heads": 2, "mlp": 32, "patch": 14, "image": image}
        make, own = instantiate(config_of("+policy=pi0_tiny", "head.steps=3").policy), {"vision": vision, **options}
        policy = make(spec, tokenizer=str(words), prompt_tokens=48, **known, **own)
        if "weights" not in options:
            randomise(policy)
            for module in (module for module in policy.modules() if isinstance(module, Normaliser)):
                module.set_statistics(FITTED)
        return policy

    return made


def chunks(policy, spec, saved):
    """The chunk of our PI0, and that of lerobot's class of the folder `saved`, for the same images, state and noise."""
    given = batch(spec, 3, window=Window(policy.offsets), task=small.TASKS)
    seen = {name: value[:, 0] for name, value in given.observation.items()}
    noise = torch.randn(1, 3, 6, 32, generator=torch.Generator().manual_seed(5))
    chunk = policy.sample(seen, task=small.TASKS, noise=noise.unsqueeze(2))[0]
    assert chunk.std(0).max() > 0.01
    return chunk, small.Theirs(saved).chunk(given.observation, small.TASKS, noise[0]).clamp(-3, 3)


@pytest.mark.parametrize("scale", ["std", "range", "quantile"])
def test_our_pi0_gives_the_same_chunk_in_lerobot(scale, folder, our_pi0, tmp_path, monkeypatch):
    policy = our_pi0(scale=scale)
    pi0_lerobot.save(policy, SPEC, tmp_path)
    torch.testing.assert_close(*chunks(policy, SPEC, tmp_path), atol=1e-4, rtol=1e-4)
    monkeypatch.setattr(pi0_lerobot, "VARIANTS", {})
    with pytest.raises(ConfigError, match="has the sizes of policy=pi0 alone"):
        pi0_lerobot.save(policy, SPEC, tmp_path)


def test_relative_chunks_are_those_of_lerobots_steps_there_and_back(folder, our_pi0, tmp_path):
    arm = list(NAMES[:3])
    policy = our_pi0(NAMED, scale="std", relative=arm)
    pi0_lerobot.save(policy, NAMED, tmp_path)
    ours, theirs = chunks(policy, NAMED, tmp_path)
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    with pytest.raises(ConfigError, match=r"Say policy\.relative=\[pan,lift,flex\]"):
        our_pi0(NAMED, scale="std", weights=str(tmp_path))
    begun = our_pi0(NAMED, scale="std", weights=str(tmp_path), relative=arm)
    torch.testing.assert_close(chunks(begun, NAMED, tmp_path)[0], theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("lacks", [False, True], ids=["all cameras", "one absent"])
@pytest.mark.parametrize("shape", [(56, 56, 3), (224, 224, 3), (480, 640, 3)], ids=str)
def test_images_of_every_size_and_absent_cameras_are_seen_as_in_lerobot(shape, lacks, folder, our_pi0, tmp_path):
    spec = replace(SPEC, observation={**SPEC.observation, **dict.fromkeys((SIDE, TOP), Feature(shape, "uint8"))})
    policy = our_pi0(spec, image=224, scale="std")
    pi0_lerobot.save(policy, spec, tmp_path)
    if lacks:
        features = json.loads((tmp_path / "config.json").read_text())["input_features"]
        change(tmp_path, input_features={"observation.images.absent": features[TOP], **features})
    torch.testing.assert_close(*chunks(policy, spec, tmp_path), atol=1e-4, rtol=1e-4)
