"""What training will take is known before it is taken: about right, and refused where it is not there.

This file is also a program, which trains for two steps: it says what counting imported, and the bytes that they took.
"""

import json
import logging
import os
import resource
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType

import pytest
import torch
from serl_client import ConfigError, Feature
from torch._subclasses import fake_tensor

from serl_launcher.algorithms.base import Algorithm, uncounted
from serl_launcher.config import composed
from serl_launcher.optim.averaging import BUCKET
from serl_launcher.optim.distributed import World
from serl_launcher.optim.optimizer import Optimizer
from serl_launcher.replay.batches import blank
from serl_launcher.training import budget, memory
from serl_launcher.training.build import build, check_memory, untrained
from serl_launcher.training.checkpoint import Checkpoints
from serl_launcher.training.ranks import Ranks
from serl_launcher.types import Window
from tests.shared.models import CONFIG, STATE, robot

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.slow]  # whole networks are counted

GB = 1e9
WIDE = ["algo=sft", "policy=flow", "policy.network.hidden=[3000,3000]", "batch_size=2048"]
SPEC = robot(7, 7, shape=(224, 224, 3), cameras=[f"observation.images.{name}" for name in ("high", "left", "right")])
SMALL = robot(3, 3, shape=(32, 32, 3), cameras=["observation.images.high"])
ONE_ACTION, ONE_NUMBER = (robot(states, 1, cameras=()) for states in (3, 1))
NAMED = replace(
    SMALL,
    observation={STATE: Feature((3,), names=("x", "y", "z"))},
    action=replace(SMALL.action, names=("x", "y", "z")),
)
FLOW, SHALLOW = ["algo=sft", "policy=flow"], ["policy=pi0_tiny", "policy.gemma.depth=2", "policy.vision.depth=1"]
TINY = ["algo=rejection_pi0", *SHALLOW]
OPTIONS = [  # that config/policy documents
    [*FLOW, "policy.head.noise_level=0.1", "policy.network.layer_norm=false"],
    [*FLOW, "policy.imitation_target=observation.state"], ["algo=sac", "policy.layer_norm=false"],
    ["algo=sac_pi0", "policy=flow", "policy.head.noise_level=0.1"],
    ["algo=sac_pi0_pixels", "policy=flow_pixels", "policy.head.noise_level=0.1"],
    ["algo=rejection_pixels", "policy=flow_pixels", "policy.encoder.cameras=[high]"],
    ["algo=rlpd_pixels", "policy=gaussian_pixels", "batch_size=8"],
    ["algo=rlpd_frozen", "policy.encoder.backbone.stages=1", "batch_size=8"],
    [*TINY, "head.noise_level=0.1", "policy.lora=4", "policy.cameras=[high]"],
    [*TINY, "policy.checkpointing=true", "policy.precision=bfloat16", "policy.freeze=[vision,language]"],
    ["algo=sac_pi0_pixels", *SHALLOW, "head.noise_level=0.1", "head.steps=3", "batch_size=8"],
]  # fmt: skip


class Looks(torch.nn.Module):
    """Asks for the value of a tensor in one of its two updates."""

    size, derived, optimizers = 4_000_000, MappingProxyType({}), Algorithm.optimizers

    def __init__(self):
        super().__init__()
        self.network = torch.nn.Linear(4, self.size)
        self.optimizer = Optimizer(self.network, learning_rate=1e-3)
        self.windows = {"update": Window({"action": (0,)}), "update_other": Window({"action": (0,)})}

    def update(self, batch):
        loss = self.optimizer.forward(torch.ones(10, 4)).square().mean()
        if loss.item() > 0:
            self.optimizer.step(loss)

    def update_other(self, batch):
        self.optimizer.step(self.optimizer.forward(torch.ones(100, 4)).square().mean())


def need_of(words, ranks=1, stage=0):
    config = composed(CONFIG, words)
    return memory.needed(lambda: build(config, SPEC), SPEC, config.batch_size, ranks, stage)


def take():
    def peak():  # of this program alone: what getrusage says begins at its parent's
        status = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
        return int(status["VmHWM"].split()[0]) * 1024

    torch.set_num_threads(1)
    sys.modules.pop("torch._dynamo", None)
    config = composed(CONFIG, ["algo=rlpd", "ranks=1"])
    check_memory(config, SPEC, "cpu", 1)
    learned = build(config, SPEC)
    learned.update(blank(SPEC, learned.windows["update"], 8))
    imported = {"torch._dynamo", "sympy"} & set(sys.modules)
    config = composed(CONFIG, WIDE)
    small = build(composed(CONFIG, [*WIDE, "policy.network.hidden=[8]"]), SPEC)
    small.update(blank(SPEC, small.windows["update"], 8))  # what is loaded once does not count
    before, algorithm = peak(), build(config, SPEC)
    for _ in range(2):
        algorithm.update(blank(SPEC, algorithm.windows["update"], config.batch_size))
    sys.stdout.write(json.dumps([sorted(imported), peak() - before]))


def test_what_is_predicted_is_what_training_takes_and_a_small_policy_is_counted_without_a_compiler():
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 17)}  # what is freed goes back at once: a peak is exact
    done = subprocess.run([sys.executable, "-m", __name__], capture_output=True, text=True, cwd=CONFIG.parent, env=env)
    assert done.returncode == 0, done.stderr
    imported, taken = json.loads(done.stdout)
    assert not imported
    assert need_of(WIDE).total == pytest.approx(taken, rel=0.15)


@pytest.mark.parametrize("words", [["policy.freeze=[vision,language]"], ["policy.lora=4"]], ids=["expert", "lora"])
def test_what_is_frozen_is_there_once_and_has_no_gradient(words):
    tiny = ["algo=sft", "policy=pi0_tiny", "batch_size=4"]
    whole, part = need_of(tiny), need_of([*tiny, *words])
    assert 0 < part.gradients == part.weights == part.optimizer / 2 < whole.weights
    assert part.copies + part.weights < whole.copies + whole.weights


def test_what_is_spread_is_divided_by_the_ranks():
    alone, states, gradients, all_of_it = (need_of(FLOW, 4, stage) for stage in range(4))
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


def test_the_largest_batch_that_the_plan_names_is_what_has_to_fit():
    def need(option, batch_size):
        words = ["plan=sft", *FLOW, f"plan.phases.clone.updates=[{{update: {option}}}]", f"batch_size={batch_size}"]
        return check_memory(composed(CONFIG, [*words, "ranks=1"]), SPEC, "cpu", 1)

    assert need("{batch: 64}", 16) == need("{every: 1}", 64) != need("{every: 1}", 16)


KINDS = (
    ["algo=sac"],
    FLOW,
    ["algo=rejection", "policy=gaussian"],
    ["algo=sac_pi0", "policy=flow", "policy.head.steps=3"],
)
WAYS = {"small": memory.SMALL, "large": 0}
COUNTED = [  # words, robots, way
    *(pytest.param(words, [NAMED if "imitation_target" in words[-1] else SMALL], way, id=f"{way} {' '.join(words)}")
      for words in OPTIONS for way in WAYS),
    *(pytest.param(words, [ONE_ACTION, ONE_NUMBER], way, id=f"{way} one action {' '.join(words)}")
      for words in KINDS for way in WAYS),
]  # fmt: skip


@pytest.mark.parametrize(("words", "specs", "way"), COUNTED)
def test_every_documented_option_and_a_robot_with_one_action_are_counted(words, specs, way, monkeypatch, caplog):
    monkeypatch.setattr(memory, "SMALL", WAYS[way])
    config = composed(CONFIG, [*words, "ranks=1"])
    for spec in specs:
        need = check_memory(config, spec, "cpu", 1)
        assert min(need.weights, need.copies, need.gradients, need.optimizer, need.activations) > 0
    assert not caplog.records


@pytest.mark.parametrize(
    "words",
    [["algo=rlpd"], ["algo=rejection_pixels", "policy=flow_pixels"], TINY],
    ids=" ".join,
)
def test_both_ways_to_count_agree(words, monkeypatch):
    config = composed(CONFIG, words)
    small = memory.needed(lambda: build(config, SMALL), SMALL, 32, 1, 0)
    monkeypatch.setattr(memory, "SMALL", 0)
    large = memory.needed(lambda: build(config, SMALL), SMALL, 32, 1, 0)
    assert small.activations == pytest.approx(large.activations, rel=0.15)
    assert replace(small, activations=0) == replace(large, activations=0)


def test_an_update_that_looks_at_values_is_left_out_and_named(caplog):
    caplog.set_level(logging.WARNING)
    need = memory.needed(Looks, ONE_ACTION, 32, 1, 0)
    assert need.activations >= 100 * 4_000_000 * 4  # of the other update
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("the memory that update takes is not counted")


class Evolves(Looks):
    """Has one update that cannot be run on rows that hold nothing."""

    size = 1000

    @uncounted
    def update(self, batch):
        raise ValueError("nobody survives")


@pytest.mark.parametrize("small", WAYS.values(), ids=WAYS)
def test_an_update_that_is_marked_is_not_run(small, monkeypatch, caplog):
    monkeypatch.setattr(memory, "SMALL", small)
    caplog.set_level(logging.INFO)
    need = memory.needed(Evolves, ONE_ACTION, 32, 1, 0)
    assert need.activations >= 100 * Evolves.size * 4  # of the other update
    assert {(record.levelname, record.getMessage()) for record in caplog.records} == {
        ("INFO", "the memory that update takes is not counted")
    }


def test_nothing_stays_changed_after_counting(monkeypatch):
    monkeypatch.setattr(memory, "SMALL", 0)
    to, limit = torch.nn.Module.to, fake_tensor.CONSTANT_NUMEL_LIMIT
    need_of([*TINY, "policy.precision=bfloat16"])
    assert (torch.nn.Module.to, fake_tensor.CONSTANT_NUMEL_LIMIT) == (to, limit)


# -- trainer and inference on one GPU


@pytest.fixture
def on_gpu(monkeypatch):
    """on_gpu(words, free, total, size=1) -> what check_memory says of the second GPU, with so many GB there."""

    def check(words, free, total, size=1):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (int(free * GB), int(total * GB)))
        return check_memory(composed(CONFIG, [*words, "ranks=1"]), SPEC, "cuda:1", size)

    return check


def test_what_inference_takes_of_a_gpu_is_its_weights_those_it_swaps_in_its_graphs_and_cuda():
    def of(*words):
        return budget.of_acting(lambda: build(composed(CONFIG, ["algo=sft", *words]), SPEC))

    whole, half = of("policy=pi0_tiny"), of("policy=pi0_tiny", "policy.precision=bfloat16")
    expert, gaussian = of("policy=pi0_tiny", "policy.freeze=[vision,language]"), of("policy=gaussian")
    assert half.weights == pytest.approx(whole.weights / 2, rel=0.01)
    assert (whole.swapped, expert.weights) == (whole.weights, whole.weights)
    assert 0 < expert.swapped < 0.6 * whole.swapped, "what is frozen is never swapped"
    assert whole.graphs == pytest.approx(budget.GRAPHS * whole.weights, rel=0.01)
    assert gaussian.graphs == 0
    assert whole.total == whole.weights + whole.swapped + whole.graphs + budget.CONTEXT
    assert budget.of_acting(untrained(composed(CONFIG, ["algo=tdmpc2_tiny"]), SPEC)).swapped > 0, "a planner, too"


def test_a_rank_on_a_gpu_takes_what_cuda_takes_and_what_it_publishes_and_nccl_where_there_are_several(on_gpu):
    alone, two = on_gpu(FLOW, 30, 30), on_gpu(FLOW, 30, 30, size=2)
    assert alone.context == budget.CONTEXT
    assert two.context == budget.CONTEXT + budget.NCCL
    assert alone.published == budget.of_acting(lambda: build(composed(CONFIG, FLOW), SPEC)).swapped
    assert "published" not in str(need_of(FLOW)), "on a CPU there is no such copy"


@pytest.mark.skipif(find_spec("transformers") is None, reason="needs the extra `vla`")
def test_layer_norms_are_given_float32_so_that_autocast_on_a_gpu_keeps_what_was_counted():
    """CUDA's autocast computes them in float32, a CPU's in the type that they get."""
    algorithm = build(composed(CONFIG, [*TINY, "policy.precision=bfloat16"]), SMALL)
    types = []
    for module in algorithm.modules():
        if isinstance(module, torch.nn.LayerNorm):
            module.register_forward_hook(lambda _, inputs, made: types.extend([inputs[0].dtype, made.dtype]))
    algorithm.update(blank(SMALL, algorithm.windows["update"], 2))
    assert set(types) == {torch.float32}


def test_what_ranks_send_each_other_is_counted_and_one_large_weight_too():
    def of(way, *words):
        config = composed(CONFIG, [*FLOW, *words, f"sharding={way}", "ranks=1"])
        return check_memory(config, SPEC, "cpu", 2).exchanged

    assert of("replicas") == BUCKET
    assert of("zero2", "sharding.zero_optimization.reduce_bucket_size=1e6") == 2 * 1_000_000 * 4
    large = of("zero3", "policy.network.hidden=[1000,1000]")
    assert large == (50_000_000 + 50_000_000 + 100_000_000) * 4 + 2 * 1000 * 1000 * 4
    assert need_of(FLOW).exchanged == 0


def test_trainer_and_inference_are_refused_together_where_each_alone_would_fit(on_gpu):
    need = on_gpu(FLOW, 30, 30)
    acting = budget.of_acting(lambda: build(composed(CONFIG, FLOW), SPEC))
    room = 1.02 * max(need.total, acting.total) / memory.SHARE / GB
    said = r"trainer and inference share cuda:1, which has .*: training takes .*context.*inference .*swapped.*smaller"
    with pytest.raises(ConfigError, match=said):
        on_gpu(FLOW, room, room)
    with pytest.raises(ConfigError, match=r"training takes .* are free on cuda:1"):
        on_gpu(FLOW, 0.5 * need.total / GB, 30)
    on_gpu(FLOW, room, 2 * room)  # inference has taken its part already


def test_inference_is_refused_where_not_even_one_answer_has_room():
    acting = budget.Acting(weights=6_000_000_000, swapped=6_000_000_000, graphs=3_000_000_000)
    budget.check_acting(acting, int(14 * GB), "cuda:0")
    said = r"inference takes 15.7 GB \(weights 6.0 GB, .*, and 12.0 GB are free on cuda:0"
    with pytest.raises(ConfigError, match=said):
        budget.check_acting(acting, int(12 * GB), "cuda:0")


def test_what_is_staged_is_as_large_as_what_is_written(tmp_path):
    config = composed(CONFIG, ["algo=sft", "policy=flow", "policy.network.hidden=[64,64]", "ranks=1"])
    make = untrained(config, SPEC)
    algorithm = make()
    batch = blank(SPEC, algorithm.windows["update"], 4)
    batch.action.uniform_(-1, 1)
    algorithm.update(batch)
    published = Ranks(algorithm, World(), {}).published().size
    checkpoints = Checkpoints(tmp_path, spec=SPEC, config={})
    checkpoints.stage(1, {"algorithm": algorithm.state_dict()})
    assert budget.of_staging(make) == pytest.approx(published + checkpoints.staging.size, rel=0.1)
    assert check_memory(config, SPEC, "cpu", 1).staged == budget.of_staging(make)
    with pytest.raises(ConfigError, match=r"before they are written: 2.0 GB, of which 2.0 GB are free. What helps"):
        budget.check_staging(2_000_000_000, 2_000_000_000)


@pytest.mark.skipif(find_spec("transformers") is None, reason="needs the extra `vla`")
def test_a_full_size_pi0_is_refused_with_what_to_change_before_it_is_built():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    need = need_of(["algo=sft", "policy=pi0", "batch_size=8"])
    assert 3.0 * 4 * GB < need.weights < 3.4 * 4 * GB
    with pytest.raises(ConfigError, match=r"GB are free on cpu. What helps: .*policy=pi0_expert.*sharding=zero3"):
        memory.check(need, int(24 * GB), "cpu")
    memory.check(need, int(2 * need.total), "cpu")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1e6  # kilobytes


if __name__ == "__main__":
    take()
