"""tools/policy.py: what it writes acts as the run's policy does, in a process that cannot import Retake."""

import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import safetensors.torch
import torch
from omegaconf import OmegaConf
from serl_client import Feature

from serl_launcher.config import composed
from serl_launcher.store import weights
from serl_launcher.store.store import Store
from serl_launcher.training.build import build
from tests.shared.common import CONFIG, STATE
from tests.shared.models import CAMERA, robot
from tests.shared.tools import called

pytestmark = pytest.mark.usefixtures("one_thread")
PLAIN = robot(states=3, shape=(32, 32, 3))
SPEC = replace(
    PLAIN, observation={**PLAIN.observation, STATE: Feature((3,), names=("load", "elbow", "wrist"))},
    action=replace(PLAIN.action, names=("wrist", "elbow")),
)  # fmt: skip
SMALL = ["policy.network.hidden=[16]", "policy.horizon=4"]
CHUNK = ["policy=chunk", "network.hidden=[16]", "policy.horizon=4"]
ALONE = """
import sys
for name in ("serl_client", "serl_launcher", "robot_infra"):
    sys.modules[name] = None
sys.path.insert(0, sys.argv[1])
import numpy as np, reader
policy = reader.Policy(sys.argv[1])
policy._random.manual_seed(3)
seen = dict(np.load(sys.argv[2]))
np.savez(sys.argv[3], explores=policy.act(seen, explore=True), evaluates=policy.act(seen))
"""


def run_of(folder, *words):
    """The folder of a run that has published its policy, and that policy."""
    config = composed(CONFIG, ["learner=true", f"run_dir={folder}", *words])
    folder.mkdir()
    OmegaConf.save(config, folder / "config.yaml")
    torch.manual_seed(0)
    algorithm = build(config, SPEC)
    store = Store.create(folder / "store", SPEC, {"demo": 100})
    published = {name: tensor.contiguous() for name, tensor in algorithm.acting.published().items()}
    store.publish_weights(*weights.write(folder / "weights", safetensors.torch.save(published)), 7)
    store.close()
    return folder, algorithm.acting.eval()


def case(*words, often=False):
    return pytest.param(words, marks=pytest.mark.slow if often else pytest.mark.nightly, id="-".join(words[:3]))


@pytest.mark.parametrize(
    "words",
    [
        case("algo=sft", "head=mip", "policy.history=2", "policy.relative=[elbow]", *CHUNK, often=True),
        case("algo=sft", "policy=pi0_tiny", often=True),
        case("algo=sft", *SMALL),
        case("algo=sft", "head=ddpm", *CHUNK),
        case("algo=sft", "head=autoregressive", *CHUNK),
        case("algo=sft", "policy.tasks=[push,pull]", *CHUNK),
        case("algo=sft", "network=chi_unet_tiny", *CHUNK[::2]),
        case("algo=rejection_pixels", "policy.encoder.channels=[8,8]", "policy.encoder.latent=8", *SMALL),
        case("algo=rlpd_frozen", "policy.encoder.backbone.features=8", "policy.hidden=[16]"),
        case("algo=sac", "policy.hidden=[16]", "critic.hidden=[16]"),
        case("algo=expo", *SMALL),
    ],
)
def test_an_exported_policy_acts_as_the_run_does_with_torch_alone(words, tmp_path):
    if "policy=pi0_tiny" in words:
        pytest.importorskip("transformers")
    run, policy = run_of(tmp_path / "run", *words)
    task = "pull" if policy.tasks else ""
    status, said = called("policy", "export", run, tmp_path / "out", "--task", task)
    assert (status, said.count("\n")) == (0, 1), said
    assert "weights 1" in said
    about = json.loads((tmp_path / "out/policy.json").read_text())
    random = np.random.default_rng(0)
    seen = {
        name: random.integers(0, 256, each["shape"]).astype(each["dtype"])
        for name, each in about["observation"].items()
    }
    assert seen.keys() <= {STATE, CAMERA}
    np.savez(tmp_path / "seen.npz", **seen)
    command = [sys.executable, "-c", ALONE, *map(str, (tmp_path / "out", tmp_path / "seen.npz", tmp_path / "did.npz"))]
    subprocess.run(command, check=True, cwd=tmp_path)
    did = np.load(tmp_path / "did.npz")
    generator = torch.Generator().manual_seed(3)
    first, second = (torch.randn(1, 1, *policy.noise_shape, generator=generator) for _ in range(2))
    noises = {"explores": first, "evaluates": torch.zeros_like(first) if policy.mode_at_zero else second}
    observation = {name: torch.from_numpy(value)[None] for name, value in seen.items()}
    for name, noise in noises.items():
        with torch.no_grad():
            expected = policy.sample(observation, task=(task,), noise=noise)[0, 0]
        np.testing.assert_allclose(did[name], expected.numpy(), atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_what_cannot_be_exported_is_refused_in_one_sentence_and_nothing_is_written(tmp_path):
    def refused(run, text, *words):
        status, said = called("policy", "export", run, tmp_path / "out", *words)
        assert (status, said.count("\n")) == (1, 1)
        assert text in said
        assert not (tmp_path / "out").exists()

    refused(tmp_path / "nowhere", "there is no run in")
    refused(run_of(tmp_path / "planner", "algo=tdmpc2_tiny")[0], "Planner plans at each step")
    run, _ = run_of(tmp_path / "tasks", "algo=sft", "policy.tasks=[push,pull]", *CHUNK)
    refused(run, "this policy knows 'push', 'pull': say --task")
    (tmp_path / "there").mkdir()
    status, said = called("policy", "export", run, tmp_path / "there", "--task", "push")
    assert (status, list((tmp_path / "there").iterdir())) == (1, [])
    assert "is there already" in said
