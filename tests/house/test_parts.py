"""Each head, network, critic and algorithm that config/ offers goes with the others from a start to a resumed run.

They are found by glob. What is started is tiny, and it is built, counted, published and loaded as a run does it. Each
yaml of a group is tried with what base.yaml and the algorithm choose of the others.
"""

import copy
import re

import numpy as np
import pytest
import safetensors.torch
import torch
from omegaconf import DictConfig, ListConfig, OmegaConf
from serl_client import messages as m

from serl_launcher.acting.host import PolicyHost, Question
from serl_launcher.store import weights
from serl_launcher.store.extras import with_extras
from serl_launcher.training import build as training
from serl_launcher.training.plan_reader import plan_of
from serl_launcher.types import Batch
from serl_launcher.utils.checkpoint import Checkpoints
from tests.shared.models import assert_same, batch, config_of

from .test_offered import OFFERED, SEEN, needs

pytestmark = pytest.mark.usefixtures("one_thread")

WITH = {
    "head": ["algo=sft", "policy=chunk"],
    "network": ["algo=sft", "policy=chunk"],
    "critic": ["algo=rlpd"],
    "algo": [],
}
SIZES = {  # wherever an algorithm has them, of this kind
    "hidden": [16, 16], "steps": 2, "num_critics": 3, "channels": [8, 8], "encoder_hidden": [16], "latent": 16,
    "samples": 16, "prior_samples": 4, "elites": 4, "deter": 16, "units": 8, "length": 3, "imagined": 2,
    "widths": [4, 4, 4], "picture": 32, "codes": 3, "episode_steps": 3, "population": 4,
}  # fmt: skip
PI0 = ("policy=pi0_tiny", "policy.gemma.depth=1", "policy.vision.depth=1")
SIZED = {name for name in OFFERED["network"] if f"{name}_tiny" in OFFERED["network"]}  # as large as in their papers
CASES = [
    pytest.param([*words, f"{group}={name}"], id=f"{group}-{name}",
                 marks=[pytest.mark.slow] * bool(group == "algo" and re.search("pixels|pi0", name)))
    for group, words in WITH.items() for name in OFFERED[group]
    if name not in SIZED and name != "reward_classifier"  # nobody acts with it
]  # fmt: skip
IMPROVED = [  # what improves a PI0, whose features its critics see
    pytest.param([*words, *PI0, "algo.encoder=null"], id=f"pi0-{words[0]}", marks=pytest.mark.slow)
    for words in (["algo=dsrl", "algo.noise_rows=1"], ["algo=recap"], ["algo=expo"])
]  # fmt: skip


def tiny(words):
    """The config of these words with small networks; composed once, because that takes longest."""
    config = copy.deepcopy(
        config_of("ranks=1", "batch_size=8", *(PI0 if "algo=rejection_pi0" in words else ()), *words)
    )
    OmegaConf.resolve(config)
    shrink(config.algo)
    return config


def shrink(node):
    for name in node:
        if name in SIZES and isinstance(node[name], ListConfig) == isinstance(SIZES[name], list):
            node[name] = SIZES[name]
        elif isinstance(node[name], DictConfig):
            shrink(node[name])


def rows_of(spec, window, seed, derived) -> Batch:
    return batch(spec, 2, window=window, seed=seed, ends="terminated", derived=derived)


def update(algorithm, spec, seed):
    """Make each update once; return the metrics of all."""
    found = {}
    for name, window in algorithm.windows.items():
        made = getattr(algorithm, name)(rows_of(spec, window, seed, algorithm.derived))
        metrics = made[0] if isinstance(made, tuple) else made
        assert all(value.isfinite() and not value.requires_grad for value in metrics.values()), name
        found[name] = metrics
    return found


def answer(host, explores=True):
    observation = {name: np.ones(feature.shape, feature.dtype) for name, feature in SEEN.observation.items()}
    return host.answer([Question(b"arm", m.InferenceRequest(0, 7, True, explores, "", observation))])[0].arrays[
        "action"
    ]


@pytest.mark.parametrize("words", [*CASES, *IMPROVED])
def test_every_part_starts_learns_acts_with_what_it_published_and_resumes_bit_by_bit(words, tmp_path):
    needs(words)
    config = tiny(words)
    spec = with_extras(SEEN, config.extras)
    training.check_memory(config, spec, "cpu", 1)

    def built(seed):
        torch.manual_seed(seed)
        return training.build(config, spec)

    learner, resumed = built(1), built(2)
    plan_of(config, set(learner.windows))
    assert update(learner, spec, 1)
    checkpoints = Checkpoints(tmp_path / "checkpoints", spec=spec, config={})
    checkpoints.stage(1, {"algorithm": learner.state_dict()})()
    resumed.load_state_dict(checkpoints.load()["algorithm"])
    assert_same(update(learner, spec, 2), update(resumed, spec, 2))
    assert_same(learner.state_dict(), resumed.state_dict())
    sha256, _ = weights.write(tmp_path, safetensors.torch.save(learner.acting.published()))
    host, there = PolicyHost(built(3), spec, "cpu"), PolicyHost(learner, spec, "cpu")
    before = answer(host)
    host.load(1, weights.path(tmp_path, sha256))
    assert np.isfinite(answer(host, explores=False)).all()
    assert np.array_equal(answer(host), answer(there))
    assert not np.array_equal(answer(host), before)
