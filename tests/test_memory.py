"""What training will take is known before it is taken: about right, and refused where it is not there.

This file is also a program: test_memory.py WORD ... trains for two steps, and prints the bytes that this took.
"""

import resource
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from serl_client import ConfigError, Feature, Spec

from serl_launcher.data.sources import blank
from serl_launcher.service import memory
from serl_launcher.service.config import composed
from serl_launcher.service.training import build

CONFIG = Path(__file__).resolve().parents[1] / "config"
GB = 1e9
WIDE = ["algo=sft", "policy=flow", "policy.hidden=[3000,3000]", "batch_size=8192"]
FULL = ["algo=sft", "policy=pi0", "batch_size=8"]
IMAGES = {f"observation.images.{name}": Feature((224, 224, 3), "uint8") for name in ("high", "left", "right")}
SPEC = Spec(
    {**IMAGES, "observation.state": Feature((7,))}, Feature((7,), low=-np.ones(7), high=np.ones(7)), fps=30.0
)  # fmt: skip


def need_of(words, ranks=1, stage=0):
    config = composed(CONFIG, words)
    return memory.needed(lambda: build(config, SPEC), SPEC, config.batch_size, ranks, stage)


def take(*words):
    def peak():  # of this program alone: what getrusage says begins at its parent's
        status = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
        return int(status["VmHWM"].split()[0]) * 1024

    torch.set_num_threads(1)
    config = composed(CONFIG, words)
    small = build(composed(CONFIG, [*words, "policy.hidden=[8]"]), SPEC)
    small.update(blank(SPEC, small.windows["update"], 8))  # what is loaded once does not count
    before, algorithm = peak(), build(config, SPEC)
    for _ in range(2):
        algorithm.update(blank(SPEC, algorithm.windows["update"], config.batch_size))
    sys.stdout.write(str(peak() - before))


def test_what_is_predicted_is_what_training_takes():
    done = subprocess.run([sys.executable, __file__, *WIDE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert need_of(WIDE).total == pytest.approx(int(done.stdout), rel=0.15)


@pytest.mark.parametrize("words", [["policy.freeze=[vision,language]"], ["policy.lora=4"]], ids=["expert", "lora"])
def test_what_is_frozen_is_there_once_and_has_no_gradient(words):
    tiny = ["algo=sft", "policy=pi0_tiny", "batch_size=4"]
    whole, part = need_of(tiny), need_of([*tiny, *words])
    assert 0 < part.gradients == part.weights == part.optimizer / 2 < whole.weights
    assert part.copies + part.weights < whole.copies + whole.weights


def test_what_is_spread_is_divided_by_the_ranks():
    alone, states, gradients, all_of_it = (need_of(WIDE, 4, stage) for stage in range(4))
    weights = alone.weights
    assert alone.optimizer == 2 * weights
    assert states.optimizer == pytest.approx(weights * 3 / 4, rel=1e-6)  # two moments, and DeepSpeed's own weights
    assert states.gradients == weights
    assert gradients.gradients == all_of_it.gradients == pytest.approx(weights / 4, rel=1e-6)
    assert all_of_it.weights == pytest.approx(weights / 4, rel=1e-6)
    assert {need.copies for need in (alone, states, gradients, all_of_it)} == {alone.copies}


def test_parts_of_a_batch_take_the_memory_of_one():
    whole, parts = need_of(WIDE), need_of([*WIDE, "algo.optimizer.accumulation=8"])
    assert parts.activations < whole.activations / 3
    assert parts.weights == whole.weights


@pytest.mark.slow
@pytest.mark.skipif(find_spec("transformers") is None, reason="needs the extra `vla`")
def test_a_full_size_pi0_is_refused_with_what_to_change_before_it_is_built():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    need = need_of(FULL)
    assert 3.0 * 4 * GB < need.weights < 3.4 * 4 * GB
    with pytest.raises(ConfigError, match=r"GB are free on cpu. What helps: .*policy=pi0_expert.*sharding=zero3"):
        memory.check(need, int(24 * GB), "cpu")
    memory.check(need, int(2 * need.total), "cpu")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1e6  # kilobytes


if __name__ == "__main__":
    take(*sys.argv[1:])
