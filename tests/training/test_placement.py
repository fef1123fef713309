"""Every algorithm trains and acts with all its tensors on one device: on `meta`, which refuses others as a GPU does.

Not looked at: numbers, and the types that autocast chooses, because `meta` has no autocast.
"""

from contextlib import nullcontext
from importlib.util import find_spec

import pytest
import torch

from serl_launcher.config import composed
from serl_launcher.replay.batches import blank
from serl_launcher.training.build import untrained
from serl_launcher.training.memory import hollow
from tests.shared.models import CONFIG

from .test_memory import NAMED, OPTIONS, SMALL, TINY

DEFAULT = [["algo=sac"], ["algo=rlpd"], ["algo=sft"], ["algo=rejection"], TINY]


@pytest.fixture(autouse=True)
def _no_autocast(monkeypatch):
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())


def made(words):
    """(the algorithm, the Spec) of these words, on `meta`."""
    if any("pi0_tiny" in word for word in words) and find_spec("transformers") is None:
        pytest.skip("needs the extra `vla`")
    spec = NAMED if "imitation_target" in words[-1] else SMALL
    return hollow(untrained(composed(CONFIG, words), spec)), spec


@pytest.mark.slow
@pytest.mark.parametrize("words", [*DEFAULT, *OPTIONS], ids=" ".join)
def test_every_algorithm_and_option_trains_and_acts_on_one_device(words):
    algorithm, spec = made(words)
    for name, window in algorithm.windows.items():
        metrics = getattr(algorithm, name)(blank(spec, window, 4).to("meta"))
        assert {value.device.type for value in metrics.values()} == {"meta"}, name
    seen = blank(spec, window, 3).to("meta").observation
    noise = torch.zeros(3, *algorithm.acting.noise_shape, device="meta")
    now = {name: column[:, 0] for name, column in seen.items()}
    previous = torch.zeros(3, *spec.action.shape, device="meta")
    decision, _ = algorithm.act(now, previous, None, task=("reach",) * 3, noise=noise, explore=True)
    assert decision.action.device.type == "meta"
